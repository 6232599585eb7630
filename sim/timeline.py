"""SimPy as the rest of the simulation sees it: the time, and calls put off until later.

Time is a whole number of nanoseconds. Calls due at one instant are made in the order they were asked for.
A call is a bare SimPy event: a process or a closure for each would cost several times as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simpy
from simpy.events import NORMAL

NS_PER_S = 1_000_000_000

Callbacks = list[Callable[[Any], None]]


def to_ns(seconds: float) -> int:
    """Seconds as the nearest whole number of nanoseconds."""
    return round(seconds * NS_PER_S)


class Due(simpy.Event):
    """An instant at which something is to be done with `what`. Like SimPy's `Timeout`, it cannot fail."""

    __slots__ = ("what",)

    _ok = True

    def __init__(self, callbacks: Callbacks, what: Any) -> None:
        self.callbacks = callbacks
        self.what = what


class Timeline(simpy.Environment):
    """The clock of one simulated run."""

    def __init__(self) -> None:
        super().__init__(initial_time=0)
        self._make_call: Callbacks = [_make_call]

    @property
    def now_ns(self) -> int:
        """Nanoseconds since the run began."""
        return self._now  # type: ignore[return-value]  # whole, as all delays are

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Make a call when so much time has passed."""
        self.schedule(Due(self._make_call, call), NORMAL, delay_ns)

    def put(self, delay_ns: int, callbacks: Callbacks, what: Any = None) -> None:
        """Hand a `Due` with `what` to these callbacks when so much time has passed.

        For what happens often: whoever asks makes the list of callbacks once and keeps it.
        """
        self.schedule(Due(callbacks, what), NORMAL, delay_ns)


def _make_call(due: Due) -> None:
    due.what()
