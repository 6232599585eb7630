"""SimPy as the rest of the simulation sees it: the time, and calls put off until later.

Time is a whole number of nanoseconds. Calls due at one instant are made in the order they were asked for.
A call is a bare SimPy event: a process or a closure for each would cost several times as much. What is done a
million times, to put an event on SimPy's heap and to take it off, is written out here, as SimPy does it.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import simpy
from simpy.events import NORMAL

NS_PER_S = 1_000_000_000


def to_ns(seconds: float) -> int:
    """Seconds as the nearest whole number of nanoseconds."""
    return round(seconds * NS_PER_S)


class Due(simpy.Event):
    """An instant at which `call` is to be made with `what`. Like SimPy's `Timeout`, it cannot fail."""

    __slots__ = ("call", "what")

    _ok = True

    def __init__(self, call: Callable[[Any], None], what: Any) -> None:
        self.call = call
        self.what = what

    callbacks = [lambda due: due.call(due.what)]  # noqa: RUF012 - as SimPy has it


class Timeline(simpy.Environment):
    """The clock of one simulated run; nothing but `Due`s are on it. Time stops once `is_over`."""

    def __init__(self) -> None:
        super().__init__(initial_time=0)
        self.is_over = False

    @property
    def now_ns(self) -> int:
        """Nanoseconds since the run began."""
        return self._now  # type: ignore[return-value]  # whole, as all delays are

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Make a call when so much time has passed."""
        self.put(delay_ns, _make, call)

    def put(self, delay_ns: int, call: Callable[[Any], None], what: Any) -> None:
        """Make a call with `what` when so much time has passed; for what happens often."""
        heappush(self._queue, (self._now + delay_ns, NORMAL, next(self._eid), Due(call, what)))

    def run_until_over(self) -> bool:
        """Let time pass until somebody says that it is over; False where nothing more can happen before."""
        queue = self._queue
        while not self.is_over:
            if not queue:
                return False
            self._now, _, _, due = heappop(queue)
            due.call(due.what)  # type: ignore[attr-defined]  # a `Due`
        return True


def _make(call: Callable[[], None]) -> None:
    call()
