"""Workers that share a machine, and how much the busy ones slow each other.

On devices of their own workers do not notice each other. On the cores of one machine they may: two cores can
be the two threads of one, and all share caches and memory. Owns who is busy; knows no time.
"""

from __future__ import annotations

from collections.abc import Callable

Percent = int


class Host:
    """Every busy worker takes `slowdown` of its time longer for each other busy one; 0 means own devices."""

    def __init__(self, slowdown: float) -> None:
        self._percent_each = round(100 * slowdown)
        self._busy: set[str] = set()
        self._workers: dict[str, Callable[[Percent], None]] = {}

    def join(self, name: str, set_pace: Callable[[Percent], None]) -> None:
        """Take part; `set_pace` is told how long work takes from now on, in percent of its time alone."""
        if self._percent_each:
            self._workers[name] = set_pace
            set_pace(self._pace(name))

    def leave(self, name: str) -> None:
        """Take part no more, and be busy no more."""
        self.note(name, False)
        self._workers.pop(name, None)

    def note(self, name: str, is_busy: bool) -> None:
        """Hear that a worker has begun or ceased to work; the others' pace changes."""
        if is_busy == (name in self._busy) or not self._percent_each:
            return
        (self._busy.add if is_busy else self._busy.discard)(name)
        for other, set_pace in self._workers.items():
            if other != name:
                set_pace(self._pace(other))

    def _pace(self, name: str) -> Percent:
        return 100 + self._percent_each * len(self._busy - {name})
