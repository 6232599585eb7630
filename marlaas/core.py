"""What every part of the scheduler works with: the state, the orders being written, and the deadlines.

Decides nothing. A handler marks what it made possible (`is_..._due`, `replicas_due`, ...) and the
scheduler lets each part look once, in a fixed order, after the event has been taken in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from marlaas.commands import Alarm, Command, SetTimer
from marlaas.spec import Experiment
from marlaas.state import NS, State, initial_state
from marlaas.systems import compose

C = TypeVar("C", bound=Command)


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
        self.is_service_due = False
        self.are_tasks_due = False
        self.are_lanes_due = False
        self.is_timer_due = False
        self._deadlines: dict[int, deque[tuple[int, str, Any]]] = {}
        self._timer_at: int | None = None
        self._timer = 0

    # --- orders ---

    def next_id(self) -> int:
        """The id of the next order, for those who write it into the outbox themselves: the frequent ones."""
        self.last_id += 1
        return self.last_id

    def issue(self, kind: type[C], **fields: Any) -> int:
        """Write an order of this kind and return its id."""
        number = self.next_id()
        self.outbox.append(kind(id=number, **fields))
        return number

    def order(self, kind: type[C], *, within_s: float, **fields: Any) -> int:
        """Write an order that a worker must answer `within_s`, or be taken for lost."""
        number = self.issue(kind, **fields)
        self.orders[number] = self.outbox[-1]
        self.set_deadline(round(within_s * NS), "order", number)
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
    #
    # Deadlines of one length come due in the order in which they were set, so a queue per length is
    # sorted by itself and nothing is searched when one is set.

    def set_deadline(self, after_ns: int, kind: str, what: Any) -> None:
        """Remember to look at `what` when `after_ns` nanoseconds have passed."""
        at = self.now + after_ns
        queue = self._deadlines.get(after_ns)
        if queue is None:
            queue = self._deadlines[after_ns] = deque()
        queue.append((at, kind, what))
        if self._timer_at is None or at < self._timer_at:
            self.is_timer_due = True

    def due(self, timer: int) -> list[tuple[str, Any]]:
        """What the timer that fired was set for; empty when it is not the one being waited for."""
        if timer != self._timer:
            return []
        self._timer_at = None
        self.is_timer_due = True
        found = []
        for queue in self._deadlines.values():
            while queue and queue[0][0] <= self.now:
                found.append(queue.popleft())
        found.sort(key=lambda entry: entry[0])
        return [(kind, what) for _, kind, what in found]

    def set_timer(self, is_moot: Callable[[str, Any], bool]) -> None:
        """Forget leading deadlines that are moot, then ask for one timer at the earliest that is left."""
        self.is_timer_due = False
        for queue in self._deadlines.values():
            while queue and is_moot(queue[0][1], queue[0][2]):
                queue.popleft()
        at = min((queue[0][0] for queue in self._deadlines.values() if queue), default=None)
        if at is not None and (self._timer_at is None or at < self._timer_at):
            self._timer_at = at
            self._timer = self.issue(SetTimer, at=at)
