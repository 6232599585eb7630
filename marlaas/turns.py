"""Turns on replicas: started when their adapter is resident, checked against the ledger, tried again.

Every turn must have been made by the very (task, version) that its batch belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable

from marlaas import batches, slots
from marlaas.commands import AbortTurns, Generate
from marlaas.core import Core
from marlaas.events import TurnGenerated, TurnsAborted
from marlaas.state import Batch, Flight, Replica, Slot, Task, Trajectory
from marlaas.waiting import Waiting


def serve(core: Core, replica: Replica) -> None:
    """Start every waiting turn whose adapter is resident; find slots for the other tasks, oldest first."""
    if replica.state != "up":
        return
    tasks, waiting = core.state.tasks, replica.waiting
    for name in waiting.take_due():
        slot = replica.slots.get((name, tasks[name].version))
        if slot is None:
            waiting.note_slot(name, has_slot=False)
        elif slot.state == "resident":
            _generate(core, replica, tasks[name], slot, waiting.take(name))
    if waiting.num_lacking:
        slots.find_slots(core, replica)


def _generate(core: Core, replica: Replica, task: Task, slot: Slot, waiting: list[Trajectory]) -> None:
    batch = task.batch
    assert batch is not None
    slot.used = core.tick()
    for turn, trajectories in _by_turn(waiting):
        number = core.next_id()
        indices = tuple([t.index for t in trajectories])
        core.outbox.append(
            Generate(
                id=number,
                replica=replica.name,
                task=task.name,
                version=slot.version,
                step=batch.step,
                turn=turn,
                trajectories=indices,
            )
        )
        core.state.flights[number] = Flight(
            replica=replica.name, task=task.name, batch=batch, slot=slot, pending=set(indices)
        )
        slot.pins += len(indices)
        for trajectory in trajectories:
            trajectory.move("generating")
            trajectory.command = number
        core.set_deadline(task.turn_ns, "turn", number)
        _start_clocks(core, task, batch, trajectories)


def _by_turn(waiting: list[Trajectory]) -> Iterable[tuple[int, list[Trajectory]]]:
    if len(waiting) == 1:
        return [(waiting[0].turn, waiting)]
    by_turn: dict[int, list[Trajectory]] = {}
    for trajectory in waiting:
        by_turn.setdefault(trajectory.turn, []).append(trajectory)
    return by_turn.items()


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
    batches.queue_step(core, task, flight.batch, trajectory)


def _unpin(core: Core, number: int, flight: Flight, index: int) -> None:
    flight.pending.discard(index)
    slot = flight.slot
    slot.pins -= 1
    if not flight.pending:
        del core.state.flights[number]
    if not slot.pins:
        replica = core.state.replicas[flight.replica]
        if slot.is_retired:
            slots.unload(core, replica, slot)
        elif replica.waiting:
            core.replicas_due[replica.name] = None


def _retry_turn(core: Core, task: Task, batch: Batch, trajectory: Trajectory, reason: str) -> None:
    """Another try for a turn that came to nothing, or the end of the trajectory when it has had its tries."""
    if trajectory.doom is not None or not trajectory.retries_left:
        batches.drop(core, task, batch, [trajectory], trajectory.doom or reason)
        batches.finish_if_complete(core, task, batch)
        return
    trajectory.retries_left -= 1
    trajectory.move("waiting")
    batches.queue_turn(core, task, trajectory)


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


def abort(core: Core, number: int, flight: Flight, indices: list[int]) -> None:
    """Order a replica to stop these turns of a Generate."""
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
        abort(core, number, flight, [t.index for t in late])


def replica_lost(core: Core, replica: Replica) -> None:
    """Everything on a replica is gone: its turns are tried again elsewhere, or there once it is back."""
    flights = {n: f for n, f in core.state.flights.items() if f.replica == replica.name}
    waiting, replica.waiting = replica.waiting, Waiting()
    slots.lose(core, replica)
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
            batches.queue_turn(core, core.state.tasks[name], trajectory)
