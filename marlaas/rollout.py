"""What ends trajectories from outside, whatever they are doing: their task's end, their own deadline."""

from __future__ import annotations

from marlaas import batches, episodes, turns
from marlaas.core import Core
from marlaas.state import Batch, Task, Trajectory


def abandon(core: Core, task: Task, reason: str) -> None:
    """Drop the present batch of a task that ends; turns in flight keep their pins until aborted."""
    batch = task.batch
    if batch is None:
        return
    for number, flight in core.state.flights.items():
        if flight.batch is batch and flight.pending:
            turns.abort(core, number, flight, sorted(flight.pending))
    for replica in core.state.replicas.values():
        replica.waiting.take(task.name)
    for number in [n for n, step in core.state.steps.items() if step.batch is batch]:
        episodes.leave(core, number)
    batches.drop(core, task, batch, [t for t in batch.trajectories if t.state != "dropped"], reason)
    task.batch = None


def trajectories_are_late(core: Core, name: str, batch: Batch, trajectories: list[Trajectory]) -> None:
    """The deadline of whole trajectories passed: drop them as soon as their replica lets go."""
    task = core.state.tasks[name]
    if task.batch is not batch:
        return
    late = [t for t in trajectories if t.state not in ("finished", "dropped")]
    if not late:  # the batch may be complete already, and be trained at this very moment
        return
    aborting: dict[int, list[int]] = {}
    for trajectory in late:
        trajectory.doom = "trajectory_deadline"
        if trajectory.state == "generating":
            trajectory.move("aborting")
            aborting.setdefault(trajectory.command, []).append(trajectory.index)
        elif trajectory.state == "stepping":
            episodes.leave(core, trajectory.command)
        elif trajectory.state == "waiting":
            core.state.replicas[trajectory.replica].waiting.remove(name, trajectory)
    for number, indices in aborting.items():
        turns.abort(core, number, core.state.flights[number], indices)
    batches.drop(core, task, batch, [t for t in late if t.state != "aborting"], "trajectory_deadline")
    batches.finish_if_complete(core, task, batch)
