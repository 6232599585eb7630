"""What the outside world does to a run, and when: tasks handed in, operations, faults injected.

Times count from the opening of the service. Knows the experiment, not what its events lead to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from executor.clock import Clock
from marlaas.events import CancelRequested, Event, PauseRequested, ResumeRequested, TaskSubmitted
from marlaas.spec import Cancel, Experiment, Kill, Operation, Pause, Resume, TaskSpec


async def keep_timetable(
    experiment: Experiment, clock: Clock, emit: Callable[[Event], None], kill: Callable[[str], None]
) -> None:
    """Submit each task and carry out each operation at its time; `kill` ends a worker's process."""
    opened_ns = clock.now()
    submissions = [(task.submit_at_s, task) for task in experiment.tasks]
    operations = [(operation.at_s, operation) for operation in experiment.operations]
    for at_s, entry in sorted([*submissions, *operations], key=lambda moment: moment[0]):
        at_ns = opened_ns + round(at_s * 1e9)
        await asyncio.sleep(max(0.0, (at_ns - clock.now()) / 1e9))
        if isinstance(entry, Kill):
            kill(entry.worker)
        else:
            emit(_event(entry, clock.now(at_ns)))


def _event(entry: TaskSpec | Operation, at_ns: int) -> Event:
    match entry:
        case TaskSpec(name=name):
            return TaskSubmitted(at=at_ns, task=name)
        case Pause(task=name):
            return PauseRequested(at=at_ns, task=name)
        case Resume(task=name):
            return ResumeRequested(at=at_ns, task=name)
        case Cancel(task=name):
            return CancelRequested(at=at_ns, task=name)
    raise NotImplementedError(f"no event for {type(entry).__name__}")
