"""What has been asked for and not been answered, and until when it must be; timers.

Whatever is begun ends once: an answer that finds nothing open is late or a duplicate and says nothing. In a
simulation no answer is taken after its deadline, and a timer fires to the nanosecond. Owns deadlines; knows
nothing of what is ordered.
"""

from __future__ import annotations

from typing import Any

from marlaas.commands import CreateAdapter, Publish, SetTimer, Train
from marlaas.errors import LawBroken
from marlaas.spec import Experiment

NS = 1_000_000_000


class OpenOrders:
    """The orders of workers that are open, each with its deadline, and the timers that are set."""

    def __init__(self, experiment: Experiment, *, is_simulated: bool) -> None:
        self._order_ns = round(experiment.limits.order_s * NS)
        self._training_ns = {t.name: round(experiment.limits_of(t).training_s * NS) for t in experiment.tasks}
        self._is_simulated = is_simulated
        self._open: dict[int, tuple[Any, int]] = {}
        self._timers: dict[int, int] = {}
        self._last_timer = 0

    def begin(self, order: Any, now: int) -> None:
        """A worker is asked for something."""
        within = self._order_ns
        if isinstance(order, CreateAdapter | Train | Publish):
            within = self._training_ns[order.task]
        self._open[order.id] = order, now + within

    def answered(self, number: int, now: int) -> Any:
        """The open order that an event answers; None when late or a duplicate."""
        order, deadline = self._open.pop(number, (None, 0))
        if order is not None:
            self.require_in_time(order, deadline, now)
        return order

    def lose(self, worker: str) -> None:
        """A worker is taken for lost: nothing it was asked for is open any more."""
        for number in [n for n, (order, _) in self._open.items() if _worker_of(order) == worker]:
            del self._open[number]

    def require_in_time(self, order: Any, deadline: int, now: int) -> None:
        """Raise `LawBroken` where something is answered, or still open, after its deadline."""
        if self._is_simulated and now > deadline:
            raise LawBroken(f"open {now - deadline} ns past its deadline: {order}")

    def set_timer(self, timer: SetTimer, now: int) -> None:
        """An instant is asked for."""
        self._timers[timer.id] = max(timer.at, now)
        self._last_timer = timer.id

    def fire(self, number: int, now: int) -> bool:
        """A timer fires; returns whether it is the one that is waited for."""
        asked = self._timers.pop(number, None)
        if asked is not None and (now < asked or (self._is_simulated and now > asked)):
            raise LawBroken(f"timer {number} fires at {now} ns, was set for {asked}")
        return number == self._last_timer

    def close(self, now: int) -> None:
        """The end: what is open is not past its deadline."""
        for order, deadline in self._open.values():
            self.require_in_time(order, deadline, now)


def _worker_of(order: Any) -> str:
    for field in ("worker", "replica", "lane"):
        name = getattr(order, field, None)
        if name is not None:
            return str(name)
    raise AssertionError(f"{order} is no worker's")
