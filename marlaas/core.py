"""What every part of the scheduler works with: the state, the orders being written, and the deadlines.

Decides nothing. A handler marks what it made possible (`is_..._due`, `replicas_due`, ...) and the
scheduler lets each part look once, in a fixed order, after the event has been taken in.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, TypeVar

from marlaas.commands import Alarm, Command, SetTimer
from marlaas.spec import Experiment
from marlaas.state import State, initial_state
from marlaas.systems import compose

C = TypeVar("C", bound=Command)

NS = 1_000_000_000


class Core:
    """State, outbox, deadlines and marks of one run."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.system = compose(experiment)
        self.state: State = initial_state(experiment, self.system.capacity)
        self.now = 0
        self.last_id = 0
        self.clock = 0
        self.outbox: list[Command] = []
        self.orders: dict[int, Command] = {}
        self.failing: list[tuple[str, str]] = []
        self.replicas_due: dict[str, None] = {}
        self.environments_due: dict[str, None] = {}
        self.are_tasks_due = False
        self.are_lanes_due = False
        self._deadlines: list[tuple[int, int, str, Any]] = []
        self._num_deadlines = 0
        self._timer_at: int | None = None
        self._timer = 0

    # --- orders ---

    def issue(self, kind: type[C], **fields: Any) -> int:
        """Write an order of this kind and return its id."""
        self.last_id += 1
        self.outbox.append(kind(id=self.last_id, **fields))
        return self.last_id

    def order(self, kind: type[C], *, within_s: float, **fields: Any) -> int:
        """Write an order that a worker must answer `within_s`, or be taken for lost."""
        number = self.issue(kind, **fields)
        self.orders[number] = self.outbox[-1]
        self.set_deadline(within_s, "order", number)
        return number

    def answered(self, number: int, kind: type[C]) -> C | None:
        """The open order of this kind that an event answers; None when late or a duplicate."""
        order = self.orders.get(number)
        if type(order) is not kind:
            return None
        del self.orders[number]
        return order

    def alarm(self, message: str, task: str | None = None) -> None:
        """Tell the operator."""
        self.issue(Alarm, message=message, task=task)

    def tick(self) -> int:
        """A counter that orders uses of slots."""
        self.clock += 1
        return self.clock

    # --- deadlines ---

    def set_deadline(self, after_s: float, kind: str, what: Any) -> None:
        """Remember to look at `what` when `after_s` seconds have passed."""
        self._num_deadlines += 1
        at = self.now + round(after_s * NS)
        heapq.heappush(self._deadlines, (at, self._num_deadlines, kind, what))

    def due(self, timer: int) -> list[tuple[str, Any]]:
        """What the timer that fired was set for; empty when it is not the one being waited for."""
        if timer != self._timer:
            return []
        self._timer_at = None
        found = []
        while self._deadlines and self._deadlines[0][0] <= self.now:
            _, _, kind, what = heapq.heappop(self._deadlines)
            found.append((kind, what))
        return found

    def needs_timer(self) -> bool:
        """Whether the earliest deadline has no timer at or before it."""
        return bool(self._deadlines) and (self._timer_at is None or self._deadlines[0][0] < self._timer_at)

    def set_timer(self, is_moot: Callable[[str, Any], bool]) -> None:
        """Forget leading deadlines that are moot, then ask for one timer at the earliest that is left."""
        while self._deadlines and is_moot(self._deadlines[0][2], self._deadlines[0][3]):
            heapq.heappop(self._deadlines)
        if self.needs_timer():
            self._timer_at = self._deadlines[0][0]
            self._timer = self.issue(SetTimer, at=self._timer_at)
