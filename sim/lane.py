"""A lane in simulated time: one job after another, in the order given, at a pace that may change.

Owns when a job ends; knows no commands and no costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sim.host import Host, Percent
from sim.timeline import Timeline


class Lane:
    """One incarnation of a lane; a restart makes a new one, and nothing of this one is answered any more."""

    def __init__(self, name: str, timeline: Timeline, host: Host) -> None:
        self.name = name
        self.is_alive = True
        self._timeline = timeline
        self._host = host
        self._jobs: deque[tuple[int, Callable[[], None]]] = deque()
        self._pace: Percent = 100
        # Of the first job: work left at `since`, in hundredths of the nanoseconds that it takes alone.
        self._left = 0
        self._since_ns = 0
        self._num_plans = 0
        host.join(name, self._set_pace)

    def stop(self) -> None:
        """Die silently."""
        self.is_alive = False
        self._host.leave(self.name)

    def run(self, duration_ns: int, finish: Callable[[], None]) -> None:
        """Queue a job that takes so long alone, and call `finish` at its end."""
        self._jobs.append((duration_ns, finish))
        if len(self._jobs) == 1:
            self._begin()

    def _begin(self) -> None:
        self._left = 100 * self._jobs[0][0]
        self._since_ns = self._timeline.now_ns
        self._host.note(self.name, True)
        self._plan()

    def _plan(self) -> None:
        self._num_plans += 1
        number = self._num_plans

        def end() -> None:
            if self.is_alive and number == self._num_plans:
                self._end()

        self._timeline.after(-(-self._left * self._pace // 10_000), end)

    def _end(self) -> None:
        _, finish = self._jobs.popleft()
        if self._jobs:
            self._begin()
        else:
            self._host.note(self.name, False)
        finish()

    def _set_pace(self, pace: Percent) -> None:
        if self._jobs:
            now_ns = self._timeline.now_ns
            self._left = max(0, self._left - (now_ns - self._since_ns) * 10_000 // self._pace)
            self._since_ns = now_ns
            self._pace = pace
            self._plan()
        self._pace = pace
