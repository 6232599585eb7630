"""What tells systems apart, read off a trace: one task at a time, rounds, and whose batch is trained next.

    a round     everybody's batches begin ──► all are complete ──► all are trained ──► the next

Owns the order of steps between tasks; knows no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from marlaas.commands import Train
from marlaas.errors import LawBroken
from marlaas.spec import Experiment
from marlaas.systems import SYSTEMS
from traces.laws.paths import TaskPaths


class SystemOrder:
    """Whether a run keeps the order that its system promises."""

    def __init__(self, experiment: Experiment, tasks: Mapping[str, TaskPaths]) -> None:
        named = experiment.system
        self._spec = SYSTEMS[named] if isinstance(named, str) else named
        self._tasks = tasks
        self._index = {name: i for i, name in enumerate(tasks)}
        self._is_training = False  # the round's batches have begun to be trained
        self.has_retried = False  # a batch that a lane could not train goes before the others

    def _others(self, name: str) -> list[TaskPaths]:
        return [task for other, task in self._tasks.items() if other != name and task.paths]

    def batch_begins(self, name: str) -> None:
        """The first turns of a batch are ordered."""
        if self._spec.tasks_in_flight == "one" and self._others(name):
            raise LawBroken(f"task {name} begins a batch beside {self._others(name)[0].spec.name}'s")
        if self._spec.barrier == "round" and self._is_training and self._others(name):
            raise LawBroken(f"task {name} begins a batch before the round of the others is trained")
        self._is_training = False

    def train(self, command: Train, buffered: Iterable[str]) -> None:
        """A batch goes to a lane; `buffered` are the complete ones, the oldest first."""
        self._is_training = True
        if self._spec.barrier == "round":
            rolling = [task.spec.name for task in self._tasks.values() if task.is_rolling]
            if rolling:
                raise LawBroken(f"{command.task} is trained while {rolling[0]} of its round is rolling")
        waiting = list(buffered)
        if self._spec.training_order == "registration":
            waiting.sort(key=self._index.__getitem__)
        if not self.has_retried and waiting and command.task != waiting[0]:
            raise LawBroken(f"{command.task} is trained before {waiting[0]}, whose turn it is")
