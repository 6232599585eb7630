"""Rollouts: from the start of a batch to its last trajectory. Adapters in slots, turns, environment steps.

Every turn is checked against the ledger: the adapter that made it must be the batch's (task, version).
Knows nothing of lanes, nor of why a batch may start.
"""

from __future__ import annotations

from collections.abc import Iterable

from marlaas.commands import (
    AbortTurns,
    DropTrajectories,
    Generate,
    LoadAdapter,
    StepEnvironment,
    UnloadAdapter,
)
from marlaas.core import Core
from marlaas.events import AdapterLoaded, AdapterUnloaded, EnvironmentStepped, TurnGenerated, TurnsAborted
from marlaas.state import Batch, Flight, Replica, Slot, Step, Surroundings, Task, Trajectory

# --- the batch -------------------------------------------------------------------------------------


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
        _settle(core, replica, task, 1)
        replica.waiting.setdefault(task.name, []).append(trajectory)
        core.replicas_due[replica.name] = None


def drop(core: Core, task: Task, batch: Batch, trajectories: Iterable[Trajectory], reason: str) -> None:
    """Give up trajectories that no replica or environment is to answer for any more."""
    indices = []
    for trajectory in trajectories:
        if trajectory.state != "finished":
            batch.num_live -= 1
            _settle(core, core.state.replicas[trajectory.replica], task, -1)
        trajectory.move("dropped")
        indices.append(trajectory.index)
    if not indices:
        return
    task.dropped[reason] = task.dropped.get(reason, 0) + len(indices)
    core.issue(DropTrajectories, task=task.name, step=batch.step, trajectories=tuple(indices), reason=reason)


def abandon(core: Core, task: Task, reason: str) -> None:
    """Drop the present batch of a task that ends; turns in flight keep their pins until aborted."""
    batch = task.batch
    if batch is None:
        return
    for number, flight in core.state.flights.items():
        if flight.batch is batch and flight.pending:
            _abort(core, number, flight, sorted(flight.pending))
    for replica in core.state.replicas.values():
        replica.waiting.pop(task.name, None)
    for number in [n for n, step in core.state.steps.items() if step.batch is batch]:
        _leave_environment(core, number)
    drop(core, task, batch, [t for t in batch.trajectories if t.state != "dropped"], reason)
    task.batch = None


def _finish_if_complete(core: Core, task: Task, batch: Batch) -> None:
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


def _settle(core: Core, replica: Replica, task: Task, change: int) -> None:
    replica.load += change
    live = replica.live.get(task.name, 0) + change
    if live:
        replica.live[task.name] = live
        return
    del replica.live[task.name]
    if replica.waiting:  # a task that has left the replica may leave its slot to another
        core.replicas_due[replica.name] = None


# --- turns -----------------------------------------------------------------------------------------


def _queue_turn(core: Core, task: Task, trajectory: Trajectory) -> None:
    """Let a trajectory wait for its next turn on its replica, or on another where its own is not up."""
    replica = core.state.replicas[trajectory.replica]
    if replica.state != "up":
        placed = core.system.place(core.state, 1, 1)
        if placed and placed[0] != replica.name:
            _settle(core, replica, task, -1)
            replica = core.state.replicas[placed[0]]
            trajectory.replica = replica.name
            _settle(core, replica, task, 1)
    replica.waiting.setdefault(task.name, []).append(trajectory)
    core.replicas_due[replica.name] = None


def serve(core: Core, replica: Replica) -> None:
    """Start every waiting turn whose adapter is resident; find slots for the other tasks, oldest first."""
    if replica.state != "up":
        return
    tasks = core.state.tasks
    lacking = []
    for name in list(replica.waiting):
        slot = replica.slots.get((name, tasks[name].version))
        if slot is None:
            lacking.append(tasks[name])
        elif slot.state == "resident":
            _generate(core, replica, tasks[name], slot, replica.waiting.pop(name))
    if lacking:
        _find_slots(core, replica, lacking)


def _generate(core: Core, replica: Replica, task: Task, slot: Slot, waiting: list[Trajectory]) -> None:
    batch = task.batch
    assert batch is not None
    slot.used = core.tick()
    by_turn: dict[int, list[Trajectory]] = {}
    for trajectory in waiting:
        by_turn.setdefault(trajectory.turn, []).append(trajectory)
    for turn, trajectories in by_turn.items():
        indices = tuple(t.index for t in trajectories)
        number = core.issue(
            Generate,
            replica=replica.name,
            task=task.name,
            version=slot.version,
            step=batch.step,
            turn=turn,
            trajectories=indices,
        )
        flight = Flight(replica=replica.name, task=task.name, batch=batch, slot=slot, pending=set(indices))
        core.state.flights[number] = flight
        slot.pins += len(indices)
        for trajectory in trajectories:
            trajectory.move("generating")
            trajectory.command = number
        core.set_deadline(task.turn_ns, "turn", number)
        _start_clocks(core, task, batch, trajectories)


def _start_clocks(core: Core, task: Task, batch: Batch, trajectories: list[Trajectory]) -> None:
    fresh = [t for t in trajectories if not t.is_started]
    for trajectory in fresh:
        trajectory.is_started = True
    if fresh:
        core.set_deadline(task.trajectory_ns, "trajectory", (task.name, batch, fresh))


def turn_generated(core: Core, event: TurnGenerated) -> None:
    """A turn arrived: check who made it, then let it wait for its environment."""
    flight = core.state.flights.get(event.command)
    if flight is None or event.trajectory not in flight.pending:
        return
    _unpin(core, event.command, flight, event.trajectory)
    task = core.state.tasks[flight.task]
    trajectory = flight.batch.trajectories[event.trajectory]
    if trajectory.command != event.command:
        return
    if trajectory.state == "aborting":  # the turn came before its abort: the replica has let go of it
        _retry_turn(core, task, flight.batch, trajectory, "turn_deadline")
        return
    if trajectory.state != "generating":
        return
    if event.version != flight.batch.version or event.task != flight.task:
        made = f"{event.task}-v{event.version}"
        wanted = f"{task.name}-v{flight.batch.version}"
        core.alarm(f"{flight.replica} made a turn of {wanted} with {made}; refused", task.name)
        _retry_turn(core, task, flight.batch, trajectory, "wrong_adapter")
        return
    trajectory.move("acting")
    _queue_step(core, task, flight.batch, trajectory)


def _unpin(core: Core, number: int, flight: Flight, index: int) -> None:
    flight.pending.discard(index)
    slot = flight.slot
    slot.pins -= 1
    if not flight.pending:
        del core.state.flights[number]
    if not slot.pins:
        replica = core.state.replicas[flight.replica]
        if slot.is_retired:
            _unload(core, replica, slot)
        elif replica.waiting:
            core.replicas_due[replica.name] = None


def _retry_turn(core: Core, task: Task, batch: Batch, trajectory: Trajectory, reason: str) -> None:
    """Another try for a turn that came to nothing, or the end of the trajectory when it has had its tries."""
    if trajectory.doom is not None or not trajectory.retries_left:
        drop(core, task, batch, [trajectory], trajectory.doom or reason)
        _finish_if_complete(core, task, batch)
        return
    trajectory.retries_left -= 1
    trajectory.move("waiting")
    _queue_turn(core, task, trajectory)


def generate_failed(core: Core, number: int, index: int | None, reason: str) -> None:
    """A replica could not make one turn of a Generate, or (index None) any of those left."""
    flight = core.state.flights.get(number)
    if flight is None or (index is not None and index not in flight.pending):
        return
    for i in sorted(flight.pending) if index is None else [index]:
        _unpin(core, number, flight, i)
        trajectory = flight.batch.trajectories[i]
        if trajectory.command == number and trajectory.state in ("generating", "aborting"):
            _retry_turn(core, core.state.tasks[flight.task], flight.batch, trajectory, "generate_failed")
    core.alarm(f"{flight.replica} failed a turn of {flight.task}: {reason}", flight.task)


def _abort(core: Core, number: int, flight: Flight, indices: list[int]) -> None:
    core.order(
        AbortTurns,
        within_s=core.experiment.limits.order_s,
        replica=flight.replica,
        generate=number,
        trajectories=tuple(indices),
    )


def turns_aborted(core: Core, event: TurnsAborted) -> None:
    """A replica let go of turns: unpin them and try again those that still matter."""
    order = core.answered(event.command, AbortTurns)
    if order is None:
        return
    flight = core.state.flights.get(order.generate)
    for index in order.trajectories:
        if flight is not None and index in flight.pending:
            _unpin(core, order.generate, flight, index)
            trajectory = flight.batch.trajectories[index]
            if trajectory.state == "aborting" and trajectory.command == order.generate:
                _retry_turn(core, core.state.tasks[flight.task], flight.batch, trajectory, "turn_deadline")


def turn_is_late(core: Core, number: int) -> None:
    """The deadline of a Generate passed: abort what has not answered."""
    flight = core.state.flights.get(number)
    if flight is None:
        return
    late = [flight.batch.trajectories[i] for i in sorted(flight.pending)]
    late = [t for t in late if t.state == "generating" and t.command == number]
    for trajectory in late:
        trajectory.move("aborting")
    if late:
        _abort(core, number, flight, [t.index for t in late])


def trajectories_are_late(core: Core, name: str, batch: Batch, trajectories: list[Trajectory]) -> None:
    """The deadline of whole trajectories passed: drop them as soon as their replica lets go."""
    task = core.state.tasks[name]
    if task.batch is not batch:
        return
    late = [t for t in trajectories if t.state not in ("finished", "dropped")]
    aborting: dict[int, list[int]] = {}
    for trajectory in late:
        trajectory.doom = "trajectory_deadline"
        if trajectory.state == "generating":
            trajectory.move("aborting")
            aborting.setdefault(trajectory.command, []).append(trajectory.index)
        elif trajectory.state == "stepping":
            _leave_environment(core, trajectory.command)
        elif trajectory.state == "waiting":
            waiting = core.state.replicas[trajectory.replica].waiting
            waiting[name] = [t for t in waiting[name] if t is not trajectory]
            if not waiting[name]:
                del waiting[name]
    for number, indices in aborting.items():
        _abort(core, number, core.state.flights[number], indices)
    drop(core, task, batch, [t for t in late if t.state != "aborting"], "trajectory_deadline")
    _finish_if_complete(core, task, batch)


# --- adapters in slots -----------------------------------------------------------------------------


def _find_slots(core: Core, replica: Replica, lacking: list[Task]) -> None:
    """Load adapters into free slots, oldest waiter first; evict for those that find none.

    A waiter's wait is bounded: the task whose adapter it needs to go finishes its batch, and no task
    that came later is served from an empty slot before it.
    """
    free = replica.capacity - len(replica.slots)
    leaving = sum(1 for slot in replica.slots.values() if slot.state == "unloading")
    for task in lacking:
        if free > 0:
            _load(core, replica, task)
            free -= 1
        elif leaving > 0:
            leaving -= 1
        else:
            victim = core.system.evict(core.state, replica)
            if victim is None:
                return
            _unload(core, replica, victim)


def _load(core: Core, replica: Replica, task: Task) -> None:
    slot = Slot(task=task.name, version=task.version, used=core.tick())
    replica.slots[task.name, task.version] = slot
    core.order(
        LoadAdapter,
        within_s=core.experiment.limits.order_s,
        replica=replica.name,
        task=task.name,
        version=task.version,
    )


def _unload(core: Core, replica: Replica, slot: Slot) -> None:
    slot.move("unloading")
    core.order(
        UnloadAdapter,
        within_s=core.experiment.limits.order_s,
        replica=replica.name,
        task=slot.task,
        version=slot.version,
    )


def adapter_loaded(core: Core, event: AdapterLoaded) -> None:
    """An adapter is resident; it must be the very weights that were published."""
    order = core.answered(event.command, LoadAdapter)
    if order is None:
        return
    replica = core.state.replicas[order.replica]
    slot = replica.slots[order.task, order.version]
    task = core.state.tasks[order.task]
    slot.move("resident")
    core.replicas_due[replica.name] = None
    is_right = event.fingerprint == task.fingerprint
    if slot.is_retired or not is_right:
        _unload(core, replica, slot)
    if not (slot.is_retired or is_right):
        core.alarm(f"{replica.name} loaded other weights than {task.name}-v{order.version}", task.name)
        _count_load_failure(core, task, "loaded weights differ from the published ones")


def adapter_unloaded(core: Core, event: AdapterUnloaded) -> None:
    """A slot is free."""
    order = core.answered(event.command, UnloadAdapter)
    if order is not None:
        del core.state.replicas[order.replica].slots[order.task, order.version]
        core.replicas_due[order.replica] = None


def load_failed(core: Core, order: LoadAdapter, reason: str) -> None:
    """An adapter could not be loaded: the slot is free again and the task tries a bounded number of times."""
    replica = core.state.replicas[order.replica]
    slot = replica.slots.pop((order.task, order.version))
    core.replicas_due[replica.name] = None
    core.alarm(f"{replica.name} could not load {order.task}-v{order.version}: {reason}", order.task)
    if not slot.is_retired:
        _count_load_failure(core, core.state.tasks[order.task], reason)


def _count_load_failure(core: Core, task: Task, reason: str) -> None:
    batch = task.batch
    if batch is None:
        return
    batch.load_failures += 1
    if batch.load_failures > task.limits.trajectory_retries:
        core.failing.append((task.name, f"version {task.version} cannot be loaded: {reason}"))


def retire(core: Core, name: str) -> None:
    """No further turn needs any resident adapter of this task: free each slot as soon as it is unpinned."""
    for replica in core.state.replicas.values():
        for slot in [s for s in replica.slots.values() if s.task == name and not s.is_retired]:
            slot.is_retired = True
            if slot.state == "resident" and not slot.pins:
                _unload(core, replica, slot)


def replica_lost(core: Core, replica: Replica) -> None:
    """Everything on a replica is gone: its turns are tried again elsewhere, or there once it is back."""
    flights = {n: f for n, f in core.state.flights.items() if f.replica == replica.name}
    waiting, replica.waiting = replica.waiting, {}
    replica.slots.clear()
    for number in flights:
        del core.state.flights[number]
    for number, flight in flights.items():
        task = core.state.tasks[flight.task]
        for index in sorted(flight.pending):
            trajectory = flight.batch.trajectories[index]
            if trajectory.command == number and trajectory.state in ("generating", "aborting"):
                _retry_turn(core, task, flight.batch, trajectory, "replica_lost")
    for name, trajectories in waiting.items():
        for trajectory in trajectories:
            _queue_turn(core, core.state.tasks[name], trajectory)


# --- environment steps -----------------------------------------------------------------------------


def _queue_step(core: Core, task: Task, batch: Batch, trajectory: Trajectory) -> None:
    environment = core.state.environments[task.spec.environment]
    environment.queue.append(Step(task=task.name, batch=batch, trajectory=trajectory))
    core.environments_due[environment.name] = None


def step_environment(core: Core, environment: Surroundings) -> None:
    """Start waiting steps, first come first served, up to the environment's concurrency."""
    while environment.queue and environment.num_stepping < environment.concurrency:
        step = environment.queue.popleft()
        trajectory = step.trajectory
        if trajectory.state != "acting":
            continue
        number = core.issue(
            StepEnvironment,
            environment=environment.name,
            task=step.task,
            step=step.batch.step,
            turn=trajectory.turn,
            trajectory=trajectory.index,
        )
        core.state.steps[number] = step
        environment.num_stepping += 1
        trajectory.move("stepping")
        trajectory.command = number
        core.set_deadline(environment.timeout_ns, "environment", number)


def _leave_environment(core: Core, number: int) -> Step | None:
    step = core.state.steps.pop(number, None)
    if step is not None:
        environment = core.state.environments[core.state.tasks[step.task].spec.environment]
        environment.num_stepping -= 1
        if environment.queue:
            core.environments_due[environment.name] = None
    return step


def environment_stepped(core: Core, event: EnvironmentStepped) -> None:
    """The environment answered: the trajectory is finished, or wants its next turn."""
    step = _leave_environment(core, event.command)
    if step is None:
        return
    task, trajectory = core.state.tasks[step.task], step.trajectory
    if event.done or trajectory.turn + 1 >= task.spec.max_turns:
        trajectory.move("finished")
        step.batch.num_live -= 1
        _settle(core, core.state.replicas[trajectory.replica], task, -1)
        _finish_if_complete(core, task, step.batch)
    else:
        trajectory.turn += 1
        trajectory.move("waiting")
        _queue_turn(core, task, trajectory)


def step_failed(core: Core, number: int, reason: str) -> None:
    """An environment step failed or took too long: try it again, within the trajectory's tries."""
    step = _leave_environment(core, number)
    if step is None:
        return
    task, trajectory = core.state.tasks[step.task], step.trajectory
    if trajectory.retries_left:
        trajectory.retries_left -= 1
        trajectory.move("acting")
        _queue_step(core, task, step.batch, trajectory)
    else:
        drop(core, task, step.batch, [trajectory], reason)
        _finish_if_complete(core, task, step.batch)
