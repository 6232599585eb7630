"""What a person watching a run sees: a bar per task on a terminal, one line per ended task otherwise.

Watches events and commands as they are recorded; changes nothing and keeps only what is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from experiments.committed import Commits
from marlaas.commands import CloseTask, Command, DropTrajectories, Publish
from marlaas.events import AdapterPublished, Event, WorkerLost
from marlaas.spec import Experiment


class _Task(msgspec.Struct):
    """What is known of a task so far."""

    bar: TaskID
    steps: int = 0
    reward: float | None = None


class Watcher:
    """An observer of a run; call it with each event and the commands that followed.

    In a simulation there is no reward to follow, and a million records a minute to look at.
    """

    def __init__(
        self, experiment: Experiment, console: Console, progress: Progress, *, is_simulated: bool = False
    ) -> None:
        self._console = console
        self._progress = progress
        self._tasks = {
            task.name: _Task(progress.add_task(task.name, total=task.steps, note="waiting"))
            for task in experiment.tasks
        }
        self._commits = None if is_simulated else Commits()
        self._publishing: dict[int, str] = {}
        self._takes: Mapping[type[Command], Callable[[int, Any], None]] = {
            CloseTask: self._closed,
            DropTrajectories: self._dropped,
            Publish: self._publishes,
        }

    def __call__(self, event: Event, commands: tuple[Command, ...]) -> None:
        """Take one record of the trace."""
        kind = event.__class__
        if self._commits is not None:
            step = self._commits(event, commands)
            if step is not None:
                self._committed(step.task, step.reward)
        elif kind is AdapterPublished:
            task = self._publishing.pop(event.command, None)  # type: ignore[attr-defined]  # of this kind
            if task is not None:
                self._committed(task, None)
        if kind is WorkerLost:
            self._lost(event)  # type: ignore[arg-type]  # of this kind
        for command in commands:
            take = self._takes.get(command.__class__)
            if take is not None:
                take(event.at, command)

    def _lost(self, event: WorkerLost) -> None:
        self._console.print(f"{event.at / 1e9:8.1f} s  {event.worker} lost: {event.reason}", markup=False)

    def _dropped(self, at: int, command: DropTrajectories) -> None:
        self._say(at, command.task, f"{len(command.trajectories)} trajectories dropped: {command.reason}")

    def _publishes(self, _: int, command: Publish) -> None:
        if self._commits is None:
            self._publishing[command.id] = command.task

    def _committed(self, name: str, reward: float | None) -> None:
        task = self._tasks[name]
        task.steps += 1
        task.reward = reward
        self._progress.update(task.bar, completed=task.steps, note=self._note(task))

    def _closed(self, at: int, command: CloseTask) -> None:
        task = self._tasks[command.task]
        self._progress.update(task.bar, note=f"{command.outcome} {self._note(task)}")
        self._progress.stop_task(task.bar)
        because = f" ({command.reason})" if command.reason else ""
        self._say(at, command.task, f"{command.outcome} after {task.steps} steps{because} {self._note(task)}")

    def _note(self, task: _Task) -> str:
        return "" if task.reward is None else f"reward {task.reward:.2f}"

    def _say(self, at: int, task: str, text: str) -> None:
        """A line above the bars; on a terminal too, so that nothing said is lost."""
        self._console.print(f"{at / 1e9:8.1f} s  {task}: {text.strip()}", markup=False, highlight=False)


@contextmanager
def watch(experiment: Experiment, console: Console, *, is_simulated: bool = False) -> Iterator[Watcher]:
    """Show progress while inside; the bars only where `console` is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    with progress:
        yield Watcher(experiment, console, progress, is_simulated=is_simulated)
