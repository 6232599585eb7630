"""The trajectories that need a turn on a replica, by task, and the tasks for which something has changed.

A replica may keep thousands of tasks waiting for a slot, and whoever looks must not look at all: `due`
are those with new trajectories or whose slot has changed, `lacking` those found to have no slot. Owns that
order; decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import ItemsView
from typing import Generic, TypeVar

T = TypeVar("T")


class Waiting(Generic[T]):
    """Trajectories by task, the task that has waited longest first."""

    __slots__ = ("_by_task", "_due", "_lacking", "_num_tasks", "_ranks")

    def __init__(self) -> None:
        self._by_task: dict[str, list[T]] = {}
        self._ranks: dict[str, int] = {}
        self._num_tasks = 0
        self._due: dict[str, None] = {}
        self._lacking: list[tuple[int, str]] = []

    def __bool__(self) -> bool:
        return bool(self._by_task)

    def items(self) -> ItemsView[str, list[T]]:
        """Task names and what waits for them, oldest task first."""
        return self._by_task.items()

    def get(self, task: str) -> list[T]:
        """What waits for a task."""
        return self._by_task.get(task, [])

    def add(self, task: str, trajectory: T) -> None:
        """Let a trajectory wait."""
        waiting = self._by_task.get(task)
        if waiting is None:
            waiting = self._by_task[task] = []
            self._num_tasks += 1
            self._ranks[task] = self._num_tasks
        waiting.append(trajectory)
        self._due[task] = None

    def take(self, task: str) -> list[T]:
        """Remove all that waits for a task."""
        taken = self._by_task.pop(task, [])
        if taken:
            self.note_slot(task, has_slot=True)
            del self._ranks[task]
            self._due.pop(task, None)
        return taken

    def remove(self, task: str, trajectory: T) -> None:
        """Remove one trajectory."""
        left = [t for t in self._by_task[task] if t is not trajectory]
        if left:
            self._by_task[task] = left
        else:
            self.take(task)

    # --- whom to look at ---

    def mark(self, task: str) -> None:
        """Something about a task's slot has changed."""
        if task in self._by_task:
            self._due[task] = None

    def mark_all(self) -> None:
        """Nothing is as it was: the replica has come up."""
        self._lacking.clear()
        self._due = dict.fromkeys(self._by_task)

    def take_due(self) -> list[str]:
        """The tasks to look at, oldest first; they are not due any more."""
        due = list(self._due) if len(self._due) < 2 else sorted(self._due, key=self._ranks.__getitem__)
        self._due.clear()
        return due

    @property
    def num_lacking(self) -> int:
        """How many tasks have no slot."""
        return len(self._lacking)

    def oldest_lacking(self) -> str:
        """Of the tasks without a slot the one that has waited longest; there must be one."""
        return self._lacking[0][1]

    def note_slot(self, task: str, *, has_slot: bool) -> None:
        """Note whether a task that waits has a slot."""
        entry = (self._ranks[task], task)
        position = bisect_left(self._lacking, entry)
        is_noted = position < len(self._lacking) and self._lacking[position] == entry
        if is_noted and has_slot:
            del self._lacking[position]
        elif not (is_noted or has_slot):
            insort(self._lacking, entry)
