"""Lanes: making version 0, training one finished batch at a time, publishing and committing.

A task trains only on trajectories of its last committed version. Knows nothing of slots or turns.
"""

from __future__ import annotations

from marlaas.commands import Command, CreateAdapter, Publish, Train
from marlaas.core import Core
from marlaas.errors import InvariantViolation
from marlaas.events import AdapterCreated, AdapterPublished, TrainingFinished
from marlaas.state import Lane, Task


def give_work(core: Core, lane: Lane) -> None:
    """Give an idle lane its next job: a new task's version 0 first (it is short), else a finished batch."""
    if lane.state != "up" or lane.job != "idle":
        return
    if core.state.creations:
        task = core.state.tasks[core.state.creations.pop(0)]
        number = core.order(CreateAdapter, within_s=task.limits.training_s, lane=lane.name, task=task.name)
        lane.turn_to("creating", task.name, number)
        return
    name = core.system.train(core.state)
    if name is not None:
        _train(core, lane, core.state.tasks[name])


def _train(core: Core, lane: Lane, task: Task) -> None:
    batch = task.batch
    if batch is None or batch.version != task.version:
        raise InvariantViolation(f"task {task.name} would train on a batch that its version did not make")
    core.state.buffer.remove(task.name)
    core.state.move_task(task, "training")
    number = core.order(
        Train,
        within_s=task.limits.training_s,
        lane=lane.name,
        task=task.name,
        step=batch.step,
        version=batch.version,
        trajectories=tuple(t.index for t in batch.trajectories if t.state == "finished"),
    )
    lane.turn_to("training", task.name, number)


def _free(core: Core, lane: Lane) -> None:
    lane.turn_to("idle")
    core.are_lanes_due = core.are_tasks_due = True


def adapter_created(core: Core, event: AdapterCreated) -> None:
    """Version 0 exists: the task may begin."""
    order = core.answered(event.command, CreateAdapter)
    if order is None:
        return
    _free(core, core.state.lanes[order.lane])
    task = core.state.tasks[order.task]
    if not task.is_closed:
        task.version, task.fingerprint = 0, event.fingerprint
        _settle_down(core, task)


def training_finished(core: Core, event: TrainingFinished) -> None:
    """The next version is computed: publish it on the same lane."""
    order = core.answered(event.command, Train)
    if order is None:
        return
    lane, task = core.state.lanes[order.lane], core.state.tasks[order.task]
    if task.is_closed:
        _free(core, lane)
        return
    core.state.move_task(task, "publishing")
    number = core.order(
        Publish,
        within_s=task.limits.training_s,
        lane=lane.name,
        task=task.name,
        version=order.version + 1,
    )
    lane.turn_to("publishing", task.name, number)


def adapter_published(core: Core, event: AdapterPublished) -> Task | None:
    """The next version is durable: commit it. Returns the task whose version rose."""
    order = core.answered(event.command, Publish)
    if order is None:
        return None
    _free(core, core.state.lanes[order.lane])
    task = core.state.tasks[order.task]
    if task.is_closed:
        return None
    assert task.batch is not None
    task.num_trained += sum(1 for t in task.batch.trajectories if t.state == "finished")
    task.batch = None
    task.version, task.fingerprint = order.version, event.fingerprint
    if task.version < task.spec.steps:
        _settle_down(core, task)
    return task


def _settle_down(core: Core, task: Task) -> None:
    """At a step boundary: ready for the next batch, or paused when that was asked for."""
    core.state.move_task(task, "paused" if task.is_pause_requested else "ready")
    task.is_pause_requested = False
    task.training_retries_left = task.limits.training_retries
    core.are_tasks_due = True


def job_failed(core: Core, order: Command, reason: str) -> None:
    """A lane could not do a job: the task tries again, within its budget, or fails alone."""
    assert isinstance(order, CreateAdapter | Train | Publish)
    lane = core.state.lanes[order.lane]
    _free(core, lane)
    _job_came_to_nothing(core, core.state.tasks[order.task], reason)


def _job_came_to_nothing(core: Core, task: Task, reason: str) -> None:
    if task.is_closed:
        return
    core.alarm(f"{task.state} of {task.name} came to nothing: {reason}", task.name)
    if not task.training_retries_left:
        core.failing.append((task.name, f"{task.state}: {reason}"))
        return
    task.training_retries_left -= 1
    if task.state == "creating":
        core.state.creations.insert(0, task.name)
    else:
        core.state.move_task(task, "buffered")
        core.state.buffer.insert(0, task.name)
    core.are_lanes_due = True


def lane_lost(core: Core, lane: Lane, reason: str) -> None:
    """A lane is gone: its job starts again from the last committed version, on any lane."""
    if lane.job != "idle":
        task = core.state.tasks[lane.task]
        lane.turn_to("idle")
        _job_came_to_nothing(core, task, reason)


def forget(core: Core, task: Task) -> None:
    """Take a task that ends out of the queues; a job under way is finished and its result ignored."""
    if task.state == "buffered":
        core.state.buffer.remove(task.name)
    elif task.state == "creating" and task.name in core.state.creations:
        core.state.creations.remove(task.name)
