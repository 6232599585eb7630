"""Which replicas have the fewest unfinished trajectories, without looking at all of them each time.

A heap of loads, in which what has become untrue lies until it comes up. Owns that order; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace


class Loads:
    """The loads of workers by name; ties go to the one named first."""

    __slots__ = ("_changed", "_heap", "_index", "_loads", "_names")

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        self._index = {name: i for i, name in enumerate(self._names)}
        self._loads = [0] * len(self._names)
        self._heap: list[tuple[int, int]] = []
        self._changed = dict.fromkeys(range(len(self._names)))  # whose load may not be in the heap

    def of(self, name: str) -> int:
        """The load of a worker."""
        return self._loads[self._index[name]]

    def change(self, name: str, change: int) -> None:
        """Count so many more or, negative, less."""
        i = self._index[name]
        self._loads[i] += change
        self._changed[i] = None

    def place(self, num_groups: int, size: int, is_eligible: Callable[[str], bool]) -> list[str]:
        """A worker for each group of this size: the least loaded, counting the groups before it.

        Nothing where nobody is eligible. No load is changed by asking.
        """
        self._refresh()
        heap, loads = self._heap, self._loads
        placed: list[int] = []
        added: dict[int, int] = {}
        passed_over: list[tuple[int, int]] = []
        while heap and len(placed) < num_groups:
            load, i = heap[0]
            if load != loads[i] + added.get(i, 0):
                heappop(heap)
            elif not is_eligible(self._names[i]):
                passed_over.append(heappop(heap))
            else:
                heapreplace(heap, (load + size, i))
                added[i] = added.get(i, 0) + size
                placed.append(i)
        for entry in passed_over:
            heappush(heap, entry)
        self._changed |= dict.fromkeys(added)
        return [self._names[i] for i in placed]

    def place_among(self, names: Iterable[str], num_groups: int, size: int) -> list[str]:
        """The same among these workers alone, without a look at any other."""
        heap = [(self._loads[i], i) for i in {self._index[name] for name in names}]
        heapify(heap)
        placed: list[str] = []
        while heap and len(placed) < num_groups:
            load, i = heap[0]
            heapreplace(heap, (load + size, i))
            placed.append(self._names[i])
        return placed

    def _refresh(self) -> None:
        if len(self._heap) + len(self._changed) > 4 * len(self._loads) + 64:
            self._heap = [(load, i) for i, load in enumerate(self._loads)]
            heapify(self._heap)
        else:
            for i in self._changed:
                heappush(self._heap, (self._loads[i], i))
        self._changed.clear()
