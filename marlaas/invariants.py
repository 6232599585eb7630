"""What must be true after every event, checked from scratch: the books balance or `InvariantViolation`."""

from __future__ import annotations

from collections import Counter

from marlaas.errors import InvariantViolation
from marlaas.lifecycle import TERMINAL
from marlaas.scheduler import Scheduler
from marlaas.state import Replica, State, Task

_JOB_OF_STATE = {"creating": "creating", "training": "training", "publishing": "publishing"}


def check(scheduler: Scheduler) -> None:
    """Raise `InvariantViolation` naming the first thing that does not hold."""
    state = scheduler.state
    for task in state.tasks.values():
        _check_ledger(task)
        _check_place(state, task)
    for replica in state.replicas.values():
        _check_slots(state, replica)
        _check_load(state, replica)
    _check_flights(state)
    _check_environments(state)
    _check_lanes(state)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantViolation(message)


def _check_ledger(task: Task) -> None:
    batch = task.batch
    kept = sum(1 for t in batch.trajectories if t.state != "dropped") if batch else 0
    dropped = sum(task.dropped.values())
    _require(
        task.num_issued == task.num_trained + dropped + kept,
        f"{task.name}: {task.num_issued} issued != {task.num_trained} trained + {dropped} + {kept}",
    )
    if batch is not None:
        _require(batch.version == task.version, f"{task.name}: its batch is of another version than its own")
        live = sum(1 for t in batch.trajectories if t.state not in ("finished", "dropped"))
        _require(live == batch.num_live, f"{task.name}: {live} trajectories live, {batch.num_live} counted")
    _require(task.version <= task.spec.steps, f"{task.name}: more versions than steps")


def _check_place(state: State, task: Task) -> None:
    _require(task.name in state.by_state[task.state], f"{task.name} is not filed under {task.state}")
    has_batch = task.state in ("rolling", "buffered", "training", "publishing")
    _require(has_batch == (task.batch is not None), f"{task.name} is {task.state}: batch kept or missing")
    buffered = task.state == "buffered"
    _require(buffered == (state.buffer.count(task.name) == 1), f"{task.name}: buffer and state differ")
    _require(task.state != "done" or task.version == task.spec.steps, f"{task.name} is done too early")


def _check_slots(state: State, replica: Replica) -> None:
    _require(len(replica.slots) <= replica.capacity, f"{replica.name}: more adapters than slots")
    pins: Counter[tuple[str, int]] = Counter()
    for flight in state.flights.values():
        if flight.replica == replica.name:
            pins[flight.slot.task, flight.slot.version] += len(flight.pending)
    for key, slot in replica.slots.items():
        _require(slot.pins == pins.pop(key, 0), f"{replica.name}: pins of {key} are not its turns in flight")
        _require(slot.pins == 0 or slot.state == "resident", f"{replica.name}: {key} is pinned, not resident")
    _require(not pins, f"{replica.name}: turns in flight on adapters without a slot: {sorted(pins)}")
    held = Counter(slot.task for slot in replica.slots.values())
    noted = {t.name: t.holders[replica.name] for t in state.tasks.values() if replica.name in t.holders}
    _require(held == noted, f"{replica.name}: slots are held by {dict(held)}, not by {noted}")


def _check_load(state: State, replica: Replica) -> None:
    live = {
        task.name: count
        for task in state.tasks.values()
        if task.batch
        and (
            count := sum(
                1
                for t in task.batch.trajectories
                if t.replica == replica.name and t.state not in ("finished", "dropped")
            )
        )
    }
    _require(replica.live == live, f"{replica.name}: live is {replica.live}, not {live}")
    is_counted = state.loads.of(replica.name) == sum(live.values())
    _require(is_counted, f"{replica.name}: load is not the sum of live")
    for name, waiting in replica.waiting.items():
        _require(bool(waiting), f"{replica.name}: an empty queue is kept for {name}")
        for trajectory in waiting:
            fits = trajectory.state == "waiting" and trajectory.replica == replica.name
            _require(fits, f"{replica.name}: trajectory {trajectory.index} of {name} does not wait here")
    if replica.state == "up":
        tasks = state.tasks
        lacking = [n for n, _ in replica.waiting.items() if (n, tasks[n].version) not in replica.slots]
        is_known = replica.waiting.num_lacking == len(lacking)
        is_known = is_known and (not lacking or replica.waiting.oldest_lacking() == lacking[0])
        _require(is_known, f"{replica.name}: not exactly {lacking} are known to lack a slot")


def _check_flights(state: State) -> None:
    for number, flight in state.flights.items():
        _require(bool(flight.pending), f"generate {number} is kept with nothing pending")
    for task in state.tasks.values():
        for trajectory in task.batch.trajectories if task.batch else ():
            if trajectory.state in ("generating", "aborting"):
                found = state.flights.get(trajectory.command)
                is_pending = found is not None and trajectory.index in found.pending
                _require(is_pending, f"{task.name}: trajectory {trajectory.index} generates on no flight")
            elif trajectory.state == "stepping":
                _require(trajectory.command in state.steps, f"{task.name}: a step in flight is not counted")
            elif trajectory.state == "waiting":
                queue = state.replicas[trajectory.replica].waiting.get(task.name)
                is_queued = sum(1 for t in queue if t is trajectory) == 1
                _require(is_queued, f"{task.name}: trajectory {trajectory.index} waits in no queue")


def _check_environments(state: State) -> None:
    stepping: Counter[str] = Counter()
    for step in state.steps.values():
        _require(step.trajectory.state == "stepping", "a step in flight belongs to no stepping trajectory")
        stepping[state.tasks[step.task].spec.environment] += 1
    for environment in state.environments.values():
        count = stepping[environment.name]
        _require(count == environment.num_stepping, f"{environment.name}: {count} steps are miscounted")
        _require(count <= environment.concurrency, f"{environment.name}: more steps than places")


def _check_lanes(state: State) -> None:
    busy: Counter[str] = Counter()
    for lane in state.lanes.values():
        if lane.job != "idle":
            busy[lane.task] += 1
            at_work = state.tasks[lane.task].state
            is_right = at_work in TERMINAL or _JOB_OF_STATE.get(at_work) == lane.job
            _require(is_right, f"{lane.name} is {lane.job} {lane.task}, which is {at_work}")
    for task in state.tasks.values():
        _require(busy[task.name] <= 1, f"{task.name} is on {busy[task.name]} lanes")
        if task.state in ("training", "publishing"):
            _require(busy[task.name] == 1, f"{task.name} is {task.state} on no lane")
