"""Every state of a task, a trajectory and a worker against every event: where it goes, or that it stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from worlds import World, experiment

from marlaas.commands import (
    AbortTurns,
    CloseTask,
    Command,
    CreateAdapter,
    Generate,
    LoadAdapter,
    OpenService,
    Publish,
    SetTimer,
    StartWorker,
    StepEnvironment,
    Train,
)
from marlaas.events import (
    AdapterCreated,
    AdapterLoaded,
    AdapterPublished,
    AdapterUnloaded,
    CancelRequested,
    CommandFailed,
    EngineMeasured,
    EnvironmentStepped,
    Event,
    PauseRequested,
    ResumeRequested,
    TaskSubmitted,
    TimerFired,
    TrainingFinished,
    TrainingStats,
    TurnGenerated,
    TurnsAborted,
    WorkerLost,
    WorkerUp,
)
from marlaas.lifecycle import TASK, TERMINAL
from marlaas.spec import Limits

TASK_STATES = tuple(TASK)


def _world(system: str = "marlaas", lanes: int = 1) -> World:
    limits = Limits(trajectory_retries=1)
    return World(experiment(tasks=2, steps=2, system=system, lanes=lanes, limits=limits))


def _advance(world: World, *kinds: type[Command], task: str = "t1") -> None:
    """Answer, until none is open, orders of these kinds that are `task`'s or nobody's."""
    while found := [o for o in world.open if type(o[0]) in kinds and getattr(o[0], "task", task) == task]:
        world.answer(*found[0])


def _opened(world: World) -> World:
    world.start()
    _advance(world, StartWorker, OpenService)
    return world


def _roll_out_both(world: World) -> None:
    for task in ("t0", "t1"):
        _advance(world, CreateAdapter, task=task)
    for task in ("t0", "t1"):
        _advance(world, LoadAdapter, Generate, StepEnvironment, task=task)


_PATHS: dict[str, tuple[type[Command], ...]] = {
    "creating": (),
    "rolling": (CreateAdapter,),
    "training": (CreateAdapter, LoadAdapter, Generate, StepEnvironment),
    "publishing": (CreateAdapter, LoadAdapter, Generate, StepEnvironment, Train),
}


def _task_in(state: str) -> World:
    """A world in which t1 is in `state`."""
    if state == "queued":
        return _opened(_world("single"))
    if state == "ready":  # t1 is trained before t0 and waits for the round to end
        world = _opened(_world("sync", lanes=2))
        _roll_out_both(world)
        _advance(world, Train, Publish)
        return world
    world = _world()
    if state == "expected":
        world.start()
        return world
    _opened(world)
    if state in _PATHS:
        _advance(world, CreateAdapter, task="t0")
        _advance(world, *_PATHS[state])
    elif state == "buffered":
        _roll_out_both(world)
    elif state == "cancelled":
        world.tell(CancelRequested(at=0, task="t1"))
    elif state == "done":
        world.run()
    elif state == "paused":
        world.tell(PauseRequested(at=0, task="t1"))
        for task in ("t0", "t1"):
            _advance(world, CreateAdapter, task=task)
    else:
        _advance(world, CreateAdapter, task="t0")
        while found := world.find(CreateAdapter):
            world.open.remove(found[0])
            world.tell(CommandFailed(at=0, command=found[0][0].id, reason="broken"))
    return world


def _newest(world: World, *kinds: type[Command]) -> int:
    """The id of t1's newest order of these kinds, open or long answered; 0 when there was none."""
    return max((c.id for c in world.log if type(c) in kinds and c.task == "t1"), default=0)


_REQUESTS: dict[str, Callable[[World], Event]] = {
    "submitted": lambda w: TaskSubmitted(at=w.now, task="t1"),
    "pause": lambda w: PauseRequested(at=w.now, task="t1"),
    "resume": lambda w: ResumeRequested(at=w.now, task="t1"),
    "cancel": lambda w: CancelRequested(at=w.now, task="t1"),
    "created": lambda w: AdapterCreated(at=w.now, command=_newest(w, CreateAdapter), fingerprint="t1-v0"),
    "trained": lambda w: TrainingFinished(
        at=w.now, command=_newest(w, Train), stats=TrainingStats(num_tokens=1)
    ),
    "published": lambda w: AdapterPublished(at=w.now, command=_newest(w, Publish), fingerprint="x"),
    "failed": lambda w: CommandFailed(
        at=w.now, command=_newest(w, CreateAdapter, Train, Publish), reason="broken"
    ),
    "lane lost": lambda w: WorkerLost(at=w.now, worker="lane-0", reason="gone"),
    "replica lost": lambda w: WorkerLost(at=w.now, worker="replica-0", reason="gone"),
    "timer": lambda w: TimerFired(at=w.now, command=3),
    "measured": lambda w: EngineMeasured(
        at=w.now,
        worker="replica-0",
        num_iterations=1,
        busy_ns=1,
        sequences_sum=1,
        kv_tokens_sum=1,
        adapters_sum=1,
    ),
}

# Where t1 goes. Whatever is not listed stays where it is.
_GOES: dict[tuple[str, str], str] = {
    ("expected", "submitted"): "creating",
    ("queued", "pause"): "paused",
    ("ready", "pause"): "paused",
    ("paused", "resume"): "rolling",
    ("creating", "created"): "rolling",
    ("training", "trained"): "publishing",
    ("training", "lane lost"): "buffered",
    ("training", "failed"): "training",  # at once on the lane again
    ("publishing", "published"): "rolling",
    ("publishing", "failed"): "training",
    ("publishing", "lane lost"): "buffered",
} | {(s, "cancel"): "cancelled" for s in TASK_STATES if s not in TERMINAL}


@pytest.mark.parametrize("event", _REQUESTS)
@pytest.mark.parametrize("state", TASK_STATES)
def test_a_task_in_every_state_meets_every_event(state: str, event: str) -> None:
    """The task moves as the table says or stays; the invariants hold; its neighbour still ends."""
    world = _task_in(state)
    task = world.scheduler.state.tasks["t1"]
    assert task.state == state
    if event == "submitted" and state == "expected":
        _advance(world, StartWorker)
    if event in ("lane lost", "replica lost"):
        world.lose("lane-0" if event == "lane lost" else "replica-0")
    else:
        answered = _REQUESTS[event](world)
        number = getattr(answered, "command", 0)
        world.open = [(c, i) for c, i in world.open if c.id != number]
        world.tell(answered)
    assert task.state == _GOES.get((state, event), state)
    for name in ("t0", "t1"):
        if world.scheduler.state.tasks[name].state == "expected" and not world.find(OpenService):
            world.tell(TaskSubmitted(at=world.now, task=name))
        if world.scheduler.state.tasks[name].state == "paused":
            world.tell(ResumeRequested(at=world.now, task=name))
    for _ in range(500):
        if world.scheduler.finished:
            break
        ready = [o for o in world.open if not isinstance(o[0], SetTimer)]
        if not ready:
            for name in ("t0", "t1"):
                world.tell(ResumeRequested(at=world.now, task=name))
            continue
        world.answer(*ready[0])
    assert world.scheduler.outcomes["t0"] == "done"
    assert sum(isinstance(c, CloseTask) and c.task == "t1" for c in world.log) == 1


# --- trajectories ----------------------------------------------------------------------------------

TRAJECTORY_STATES = ("waiting", "generating", "aborting", "acting", "stepping", "finished")


def _trajectory_in(state: str) -> World:
    """A world of one task in which trajectory 0 is in `state` and trajectory 1 generates or is waiting."""
    limits = Limits(trajectory_retries=1, turn_s=10, trajectory_s=50, min_group=1)
    world = World(experiment(tasks=1, turns=2, samples=2, concurrency=1, limits=limits))
    world.open_service()
    world.answer_all(CreateAdapter)
    if state == "waiting":
        return world
    world.answer_all(LoadAdapter)
    turns = world.find(Generate)
    if state == "aborting":
        _fire(world, 10)
    elif state == "acting":
        world.answer(*turns[1])
        world.answer(*turns[0])
    elif state in ("stepping", "finished"):
        world.answer(*turns[0])
        if state == "finished":
            world.answer(*world.find(StepEnvironment)[0])
            world.answer(*next(o for o in world.find(Generate) if o[1] == 0))
            world.answer(*world.find(StepEnvironment)[0])
    return world


def _fire(world: World, after_s: float) -> None:
    world.now += round(after_s * 1e9)
    timer, index = min(world.find(SetTimer), key=lambda o: o[0].at)
    world.open.remove((timer, index))
    world.tell(TimerFired(at=world.now, command=timer.id))


def _command(world: World, kind: type[Command]) -> int:
    """The newest order of this kind that covers trajectory 0."""
    found = (c for c in world.log if type(c) is kind)
    covering = (
        c for c in found if getattr(c, "trajectory", 0) == 0 and 0 in getattr(c, "trajectories", (0,))
    )
    return max((c.id for c in covering), default=0)


def _turn(world: World) -> Event:
    return TurnGenerated(
        at=world.now,
        command=_command(world, Generate),
        trajectory=0,
        task="t0",
        version=0,
        prompt_tokens=1,
        output_tokens=1,
    )


_TURN_EVENTS: dict[str, Callable[[World], Event]] = {
    "turn": _turn,
    "turn failed": lambda w: CommandFailed(at=w.now, command=_command(w, Generate), reason="x", trajectory=0),
    "aborted": lambda w: TurnsAborted(at=w.now, command=_command(w, AbortTurns)),
    "stepped": lambda w: EnvironmentStepped(
        at=w.now, command=_command(w, StepEnvironment), done=True, reward=0.0
    ),
    "step failed": lambda w: CommandFailed(at=w.now, command=_command(w, StepEnvironment), reason="x"),
    "loaded": lambda w: AdapterLoaded(at=w.now, command=_command(w, LoadAdapter), fingerprint="t0-v0"),
    "unloaded": lambda w: AdapterUnloaded(at=w.now, command=_command(w, LoadAdapter)),
    "up": lambda w: WorkerUp(at=w.now, command=1, worker="replica-0"),
    "replica lost": lambda w: WorkerLost(at=w.now, worker="replica-0", reason="gone"),
}

_TURN_GOES: dict[tuple[str, str], str] = {
    ("waiting", "loaded"): "generating",
    ("generating", "turn"): "stepping",  # the environment has a place for it
    ("aborting", "turn"): "generating",  # too late to count, but the replica is done with it
    ("generating", "turn failed"): "generating",  # tried again at once
    ("generating", "replica lost"): "waiting",
    ("aborting", "aborted"): "generating",
    ("aborting", "turn failed"): "generating",
    ("aborting", "replica lost"): "waiting",
    ("stepping", "stepped"): "finished",
    ("stepping", "step failed"): "stepping",
}


@pytest.mark.parametrize("event", _TURN_EVENTS)
@pytest.mark.parametrize("state", TRAJECTORY_STATES)
def test_a_trajectory_in_every_state_meets_every_event(state: str, event: str) -> None:
    """The trajectory moves as the table says or stays, the invariants hold, and its task ends."""
    world = _trajectory_in(state)
    batch = world.scheduler.state.tasks["t0"].batch
    assert batch is not None
    trajectory = batch.trajectories[0]
    assert trajectory.state == state
    if event == "replica lost":
        world.lose("replica-0")
    else:
        told = _TURN_EVENTS[event](world)
        number = getattr(told, "command", 0)
        index = getattr(told, "trajectory", None)
        matters = (state, event) in _TURN_GOES
        covered = [c for c, _ in world.open if isinstance(c, AbortTurns) and c.id == number]
        world.tell(told)
        if matters:
            gone = {(a.generate, i) for a in covered for i in a.trajectories}
            world.open = [(c, i) for c, i in world.open if (c.id, i) not in ({(number, index)} | gone)]
    assert trajectory.state == _TURN_GOES.get((state, event), state)
    world.run()
    assert world.scheduler.outcomes == {"t0": "done"}


# --- workers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", ["replica-0", "lane-0"])
@pytest.mark.parametrize(
    ("state", "event", "goes"),
    [
        ("down", "lost", "down"),
        ("starting", "up", "up"),
        ("starting", "late up", "starting"),
        ("starting", "lost", "starting"),
        ("up", "up", "up"),
        ("up", "lost", "starting"),
        ("dead", "up", "dead"),
        ("dead", "lost", "dead"),
    ],
)
def test_a_worker_in_every_state_meets_every_event(worker: str, state: str, event: str, goes: str) -> None:
    """A loss starts it afresh while it has restarts left; late news of an earlier life is ignored."""
    world = _world()
    state_of = world.scheduler.state.replicas if worker == "replica-0" else world.scheduler.state.lanes
    if state != "down":
        world.start()
    first = 1 if worker == "replica-0" else 2
    if state == "up":
        world.answer(StartWorker(id=first, worker=worker))
    for _ in range({"dead": 4}.get(state, 0) or (event == "late up")):
        world.lose(worker)
    assert state_of[worker].state == state
    starts = [c.id for c in world.log if isinstance(c, StartWorker) and c.worker == worker]
    if event == "lost":
        world.tell(WorkerLost(at=0, worker=worker, reason="gone"))
    else:
        number = starts[0] if event == "late up" else starts[-1]
        world.tell(WorkerUp(at=0, command=number, worker=worker))
    assert state_of[worker].state == goes
