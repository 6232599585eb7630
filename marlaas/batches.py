"""A task's rollout batch: from its start to the moment when no trajectory is left to wait for.

Owns the count of live trajectories, where they are placed and the queues they wait in; knows neither how a
turn is made nor how an environment answers.
"""

from __future__ import annotations

from collections.abc import Iterable

from marlaas.commands import DropTrajectories
from marlaas.core import Core
from marlaas.state import Batch, Replica, Step, Task, Trajectory


def start_batch(core: Core, task: Task) -> None:
    """Issue the task's next rollout batch: place its groups and queue every trajectory for its first turn."""
    spec = task.spec
    placed = core.system.place(core.state, spec.prompts, spec.samples)
    trajectories = [
        Trajectory(index=i, retries_left=task.limits.trajectory_retries, replica=placed[i // spec.samples])
        for i in range(spec.num_trajectories)
    ]
    task.batch = Batch(
        step=task.version, version=task.version, trajectories=trajectories, num_live=len(trajectories)
    )
    task.num_issued += len(trajectories)
    core.state.move_task(task, "rolling")
    for trajectory in trajectories:
        replica = core.state.replicas[trajectory.replica]
        settle(core, replica, task, 1)
        replica.waiting.add(task.name, trajectory)
        core.replicas_due[replica.name] = None


def drop(core: Core, task: Task, batch: Batch, trajectories: Iterable[Trajectory], reason: str) -> None:
    """Give up trajectories that no replica or environment is to answer for any more."""
    indices = []
    for trajectory in trajectories:
        if trajectory.state != "finished":
            batch.num_live -= 1
            settle(core, core.state.replicas[trajectory.replica], task, -1)
        trajectory.move("dropped")
        indices.append(trajectory.index)
    if not indices:
        return
    task.dropped[reason] = task.dropped.get(reason, 0) + len(indices)
    core.issue(DropTrajectories, task=task.name, step=batch.step, trajectories=tuple(indices), reason=reason)


def finish_if_complete(core: Core, task: Task, batch: Batch) -> None:
    """Buffer a batch that has nothing live left, without the groups that became too small to train on."""
    if batch.num_live or task.batch is not batch:
        return
    samples = task.spec.samples
    groups = [batch.trajectories[i : i + samples] for i in range(0, len(batch.trajectories), samples)]
    kept = [[t for t in group if t.state == "finished"] for group in groups]
    small = [t for group in kept if len(group) < task.limits.min_group for t in group]
    drop(core, task, batch, small, "small_group")
    if any(t.state == "finished" for t in batch.trajectories):
        core.state.move_task(task, "buffered")
        core.state.buffer.append(task.name)
        core.are_lanes_due = core.are_tasks_due = True
    else:
        wanted = task.limits.min_group
        core.failing.append((task.name, f"step {batch.step}: no prompt group kept {wanted} trajectories"))


def settle(core: Core, replica: Replica, task: Task, change: int) -> None:
    """Count a trajectory of the task as live on the replica (1) or no longer (-1)."""
    core.state.loads.change(replica.name, change)
    live = replica.live.get(task.name, 0) + change
    if live:
        replica.live[task.name] = live
        return
    del replica.live[task.name]
    if replica.waiting:  # a task that has left the replica may leave its slot to another
        core.replicas_due[replica.name] = None


def queue_turn(core: Core, task: Task, trajectory: Trajectory) -> None:
    """Let a trajectory wait for its next turn on its replica, or on another where its own is not up."""
    replica = core.state.replicas[trajectory.replica]
    if replica.state != "up":
        placed = core.system.place(core.state, 1, 1)
        if placed and placed[0] != replica.name:
            settle(core, replica, task, -1)
            replica = core.state.replicas[placed[0]]
            trajectory.replica = replica.name
            settle(core, replica, task, 1)
    replica.waiting.add(task.name, trajectory)
    core.replicas_due[replica.name] = None


def queue_step(core: Core, task: Task, batch: Batch, trajectory: Trajectory) -> None:
    """Let a trajectory wait for a place in its environment."""
    environment = core.state.environments[task.spec.environment]
    environment.queue.append(Step(task=task.name, batch=batch, trajectory=trajectory))
    core.environments_due[environment.name] = None
