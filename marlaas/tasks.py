"""Tasks from submission to their end: admission, starts, pause, resume, cancel, failure.

Composes `rollout` and `training`; one task's end touches no other task.
"""

from __future__ import annotations

from marlaas import batches, rollout, slots, training
from marlaas.commands import CloseTask, Outcome
from marlaas.core import Core
from marlaas.events import AdapterPublished, CancelRequested, PauseRequested, ResumeRequested, TaskSubmitted
from marlaas.state import Task

Request = TaskSubmitted | PauseRequested | ResumeRequested | CancelRequested


def submitted(core: Core, event: TaskSubmitted) -> None:
    """A task waits for admission."""
    task = core.state.tasks[event.task]
    if task.state == "expected":
        core.state.move_task(task, "queued")
        task.training_retries_left = task.limits.training_retries
        core.are_tasks_due = True


def pause_requested(core: Core, event: PauseRequested) -> None:
    """Pause now at a step boundary, else at the next one."""
    task = core.state.tasks[event.task]
    if task.state in ("queued", "ready"):
        core.state.move_task(task, "paused")
        core.are_tasks_due = core.are_lanes_due = True
    elif task.state not in ("expected", "paused") and not task.is_closed:
        task.is_pause_requested = True


def resume_requested(core: Core, event: ResumeRequested) -> None:
    """Queue a paused task for admission again; forget a pause that has not come into force."""
    task = core.state.tasks[event.task]
    task.is_pause_requested = False
    if task.state == "paused":
        core.state.move_task(task, "queued")
        core.are_tasks_due = True


def cancel_requested(core: Core, event: CancelRequested) -> None:
    """End a task now."""
    close(core, core.state.tasks[event.task], "cancelled", "cancelled by its tenant")


def published(core: Core, event: AdapterPublished) -> None:
    """Commit a version, retire the one before it, and end the task after its last step."""
    task = training.adapter_published(core, event)
    if task is not None:
        slots.retire(core, task.name)
        if task.version == task.spec.steps:
            close(core, task, "done", "")


def close(core: Core, task: Task, outcome: Outcome, reason: str) -> None:
    """End a task with everything it has in flight."""
    if task.is_closed:
        return
    rollout.abandon(core, task, outcome)
    training.forget(core, task)
    core.state.move_task(task, outcome)
    task.reason = reason
    slots.retire(core, task.name)
    core.issue(CloseTask, task=task.name, outcome=outcome, reason=reason)
    core.are_tasks_due = core.are_lanes_due = True


def admit(core: Core) -> None:
    """Make active the queued tasks that the system lets in."""
    for name in core.system.admit(core.state):
        task = core.state.tasks[name]
        if task.version < 0:
            core.state.move_task(task, "creating")
            core.state.creations.append(name)
            core.are_lanes_due = True
        else:
            core.state.move_task(task, "ready")


def start(core: Core) -> None:
    """Start the rollout batches that the system lets begin."""
    for name in core.system.start(core.state):
        batches.start_batch(core, core.state.tasks[name])
