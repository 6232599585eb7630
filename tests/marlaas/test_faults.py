"""What goes wrong stays with its task, is tried again within a budget, and is said aloud."""

from __future__ import annotations

import pytest
from worlds import World, experiment

from marlaas.commands import (
    AbortTurns,
    Alarm,
    CloseTask,
    Command,
    CreateAdapter,
    DropTrajectories,
    Generate,
    LoadAdapter,
    Publish,
    SetTimer,
    StartWorker,
    StepEnvironment,
    Train,
    UnloadAdapter,
)
from marlaas.events import (
    AdapterLoaded,
    CancelRequested,
    CommandFailed,
    EnvironmentStepped,
    PauseRequested,
    ResumeRequested,
    StopRequested,
    TimerFired,
    TurnGenerated,
    WorkerLost,
)
from marlaas.spec import Limits


def _rolling(**sizes: int) -> World:
    """A world of one task whose turns are in flight."""
    world = World(experiment(**({"tasks": 1} | sizes)))
    world.open_service()
    while world.find(CreateAdapter):
        world.answer_all(CreateAdapter)
    world.answer_all(LoadAdapter)
    return world


def _fail(world: World, command: Command, index: int | None = None) -> tuple[Command, ...]:
    world.open.remove((command, index))
    return world.tell(CommandFailed(at=world.now, command=command.id, reason="broken", trajectory=index))


def _fire(world: World, after_s: float) -> tuple[Command, ...]:
    """Let time pass, firing the latest timer set by then."""
    world.now += round(after_s * 1e9)
    timer, index = world.find(SetTimer)[-1]
    assert isinstance(timer, SetTimer)
    assert timer.at <= world.now
    world.open.remove((timer, index))
    return world.tell(TimerFired(at=world.now, command=timer.id))


def _kinds(commands: tuple[Command, ...]) -> list[type[Command]]:
    return [type(command) for command in commands]


# --- the ledger ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task", "version"), [("t0", 1), ("t1", 0)])
def test_a_turn_made_by_another_adapter_is_refused_loudly_and_made_again(task: str, version: int) -> None:
    """A turn of another version or another task never reaches the environment."""
    world = _rolling(tasks=2)
    generate, index = world.find(Generate)[0]
    world.open.remove((generate, index))
    wrong = TurnGenerated(
        at=0, command=generate.id, trajectory=0, task=task, version=version, prompt_tokens=1, output_tokens=1
    )
    commands = world.tell(wrong)
    assert _kinds(commands) == [Alarm, Generate]
    assert commands[1].trajectories == (0,)


def test_other_weights_than_those_published_are_refused() -> None:
    """A load that proves different weights is unloaded, said aloud and tried again, then fails its task."""
    world = World(experiment(tasks=1))
    world.open_service()
    world.answer_all(CreateAdapter)
    for _ in range(3):
        load, _ = world.find(LoadAdapter)[0]
        world.open.remove((load, None))
        commands = world.tell(AdapterLoaded(at=0, command=load.id, fingerprint="other"))
        assert _kinds(commands)[:2] == [UnloadAdapter, Alarm]
        world.answer_all(UnloadAdapter)
    assert world.scheduler.outcomes == {"t0": "failed"}
    assert not world.find(Generate)


# --- late and duplicate answers --------------------------------------------------------------------


def test_an_answer_given_twice_is_ignored() -> None:
    """Every event of a run told a second time changes nothing and orders nothing."""
    world = World(experiment(tasks=2, turns=2))
    world.start()
    for _ in range(10_000):
        ready = [o for o in world.open if not isinstance(o[0], SetTimer)]
        if not ready:
            break
        before = len(world.events)
        world.answer(*ready[0])
        for event in world.events[before:]:
            assert world.scheduler.handle(event) == ()
    assert set(world.scheduler.outcomes.values()) == {"done"}


def test_a_turn_that_comes_after_its_deadline_is_not_counted_twice() -> None:
    """The late copy of an aborted and repeated turn is ignored."""
    world = _rolling()
    late = [o for o in world.open if isinstance(o[0], Generate)]
    aborts = _fire(world, 120)
    assert _kinds(aborts)[0] is AbortTurns
    world.open = [o for o in world.open if o not in late]
    world.answer(aborts[0])
    assert world.tell(world.turn(*late[0])) == ()
    world.run()
    assert world.scheduler.outcomes == {"t0": "done"}


# --- deadlines and budgets -------------------------------------------------------------------------


def test_a_late_turn_is_aborted_tried_again_and_at_last_dropped() -> None:
    """Two further tries by default; then both trajectories are dropped and the task fails alone."""
    world = _rolling()
    for _ in range(2):
        abort = _fire(world, 120)[0]
        assert isinstance(abort, AbortTurns)
        assert world.answer(abort)[0] == world.find(Generate)[0][0]
    abort = _fire(world, 120)[0]
    commands = world.answer(abort)
    dropped = [c for c in commands if isinstance(c, DropTrajectories)]
    assert [(c.trajectories, c.reason) for c in dropped] == [((0,), "turn_deadline"), ((1,), "turn_deadline")]
    assert world.scheduler.outcomes == {"t0": "failed"}


def test_a_replica_that_does_not_answer_an_abort_is_started_afresh() -> None:
    """No order is waited for past its deadline."""
    world = _rolling()
    _fire(world, 120)
    commands = _fire(world, 120)
    assert StartWorker in _kinds(commands)
    world.open = [o for o in world.open if not isinstance(o[0], Generate | AbortTurns)]
    world.run()
    assert world.scheduler.outcomes == {"t0": "done"}


def test_a_trajectory_that_takes_too_long_is_dropped_whatever_it_is_doing() -> None:
    """One trajectory generates, one steps, one is finished when the trajectories' deadline comes."""
    limits = Limits(trajectory_s=50, turn_s=100, min_group=1)
    world = World(experiment(tasks=1, samples=3, limits=limits))
    world.open_service()
    world.answer_all(CreateAdapter)
    world.answer_all(LoadAdapter)
    for command, index in world.find(Generate)[:2]:
        world.answer(command, index)
    world.answer(*world.find(StepEnvironment)[0])
    commands = _fire(world, 50)
    assert _kinds(commands)[:2] == [AbortTurns, DropTrajectories]
    assert commands[1].trajectories == (1,)
    commands = world.answer(commands[0])
    assert _kinds(commands)[:2] == [DropTrajectories, Train]
    assert commands[0].trajectories == (2,)
    assert commands[1].trajectories == (0,)


def test_a_failed_environment_step_is_tried_again_then_dropped() -> None:
    """The trajectory's tries are shared by its turns and steps; its group is then too small."""
    world = _rolling()
    world.answer_all(Generate)
    step, _ = world.find(StepEnvironment)[0]
    for _ in range(2):
        (step,) = (c for c in _fail(world, step) if isinstance(c, StepEnvironment))
    commands = _fail(world, step)
    assert [c.reason for c in commands if isinstance(c, DropTrajectories)] == ["environment_failed"]
    commands = world.answer(*world.find(StepEnvironment)[0])
    assert [c.reason for c in commands if isinstance(c, DropTrajectories)] == ["small_group"]
    assert world.scheduler.outcomes == {"t0": "failed"}


def test_an_environment_that_hangs_gives_its_place_to_the_next() -> None:
    """A step past its time-out frees the environment's place and is tried again."""
    world = _rolling(concurrency=1)
    world.answer_all(Generate)
    hung, _ = world.find(StepEnvironment)[0]
    commands = _fire(world, 60)
    nxt = next(c for c in commands if isinstance(c, StepEnvironment))
    assert nxt.trajectory == 1
    assert world.tell(EnvironmentStepped(at=world.now, command=hung.id, done=True)) == ()


def test_groups_that_stay_large_enough_are_trained_without_the_dropped() -> None:
    """The batch trains on exactly the trajectories that finished in groups of at least `min_group`."""
    world = _rolling(prompts=2, samples=3)
    for index in (0, 3, 4):
        while found := [command for command, i in world.find(Generate) if i == index]:
            _fail(world, found[0], index)
    world.answer_all(Generate)
    world.answer_all(StepEnvironment)
    trains = [c for c, _ in world.find(Train)]
    assert [c.trajectories for c in trains] == [(1, 2)]
    assert world.scheduler.state.tasks["t0"].dropped == {"generate_failed": 3, "small_group": 1}


# --- lanes -----------------------------------------------------------------------------------------


def _at_training(**sizes: int) -> World:
    world = _rolling(**sizes)
    world.answer_all(Generate)
    world.answer_all(StepEnvironment)
    return world


@pytest.mark.parametrize("kind", [Train, Publish])
def test_a_failed_update_is_tried_again_from_the_committed_version(kind: type[Command]) -> None:
    """One further try by default, from the same version and trajectories; the step is trained once."""
    world = _at_training()
    if kind is Publish:
        world.answer_all(Train)
    commands = _fail(world, world.find(kind)[0][0])
    assert _kinds(commands) == [Alarm, Train]
    world.run()
    assert world.scheduler.outcomes == {"t0": "done"}
    assert world.scheduler.state.tasks["t0"].num_trained == 4


def test_a_task_whose_updates_fail_stops_alone() -> None:
    """After its tries the task fails with the reason; the other task ends as if it were alone."""
    world = _at_training(tasks=2)
    for _ in range(2):
        train = next(c for c, _ in world.find(Train) if c.task == "t0")
        commands = _fail(world, train)
    (closed,) = (c for c in commands if isinstance(c, CloseTask))
    assert (closed.task, closed.outcome, closed.reason) == ("t0", "failed", "training: broken")
    world.run()
    assert world.scheduler.outcomes == {"t0": "failed", "t1": "done"}


def test_a_lost_lane_repeats_its_job_when_it_is_back() -> None:
    """The batch goes to the head of the buffer and is trained once."""
    world = _at_training()
    commands = world.lose("lane-0")
    assert StartWorker in _kinds(commands)
    world.run()
    assert world.scheduler.outcomes == {"t0": "done"}
    assert world.scheduler.state.tasks["t0"].num_trained == 4


# --- workers ---------------------------------------------------------------------------------------


def test_turns_of_a_lost_replica_go_to_another() -> None:
    """What was in flight on it is generated by the replica that is left, with the same version."""
    world = _rolling(prompts=2, replicas=2)
    commands = world.lose("replica-0")
    world.answer_all(LoadAdapter)
    moved = [c for c, _ in world.find(Generate)]
    assert {c.replica for c in moved} == {"replica-1"}
    assert _kinds(commands)[:2] == [Alarm, StartWorker]
    world.run()
    assert world.scheduler.outcomes == {"t0": "done"}


def test_a_worker_is_given_up_after_its_restarts_and_tasks_fail_when_none_is_left() -> None:
    """Three restarts by default; then every task fails, naming what is missing."""
    world = _rolling(tasks=2)
    for _ in range(4):
        commands = world.tell(WorkerLost(at=0, worker="lane-0", reason="gone"))
        world.open = [o for o in world.open if not isinstance(o[0], StartWorker)]
    closed = {c.task: c.reason for c in commands if isinstance(c, CloseTask)}
    assert closed == {"t0": "no lane is left", "t1": "no lane is left"}
    assert world.scheduler.finished


# --- tenants' requests -----------------------------------------------------------------------------


def test_pause_takes_effect_at_the_step_boundary_and_resume_goes_on_from_there() -> None:
    """The step under way is committed; nothing starts while paused; the version goes on rising by one."""
    world = _rolling()
    world.tell(PauseRequested(at=0, task="t0"))
    while ready := [o for o in world.open if not isinstance(o[0], SetTimer)]:
        world.answer(*ready[0])
    task = world.scheduler.state.tasks["t0"]
    assert (task.state, task.version) == ("paused", 1)
    world.tell(ResumeRequested(at=0, task="t0"))
    world.run()
    assert world.scheduler.outcomes == {"t0": "done"}
    assert [c.version for c in world.log if isinstance(c, Train)] == [0, 1]


def test_a_paused_task_lets_the_next_in_under_single() -> None:
    """The task in flight pauses; the queued one is admitted; the first waits for its turn again."""
    world = World(experiment(tasks=2, system="single"))
    world.open_service()
    world.tell(PauseRequested(at=0, task="t0"))
    while ready := [o for o in world.open if not isinstance(o[0], SetTimer)]:
        world.answer(*ready[0])
    assert world.scheduler.outcomes == {"t1": "done"}
    world.tell(ResumeRequested(at=0, task="t0"))
    world.run()
    assert world.scheduler.outcomes == {"t0": "done", "t1": "done"}


@pytest.mark.parametrize("num_answers", range(0, 60, 3))
def test_a_cancelled_task_leaves_nothing_behind(num_answers: int) -> None:
    """Cancelled at any moment: its neighbour ends, its trajectories are accounted for, its slots freed."""
    world = World(experiment(tasks=2, turns=2, slots=1))
    world.start()
    for _ in range(num_answers):
        ready = [o for o in world.open if not isinstance(o[0], SetTimer)]
        if ready:
            world.answer(*ready[len(ready) // 2])
    world.tell(CancelRequested(at=0, task="t0"))
    while ready := [o for o in world.open if not isinstance(o[0], SetTimer)]:
        world.answer(*ready[0])
    assert world.scheduler.outcomes["t1"] == "done"
    task = world.scheduler.state.tasks["t0"]
    assert task.num_issued == task.num_trained + sum(task.dropped.values())
    assert not world.scheduler.state.replicas["replica-0"].slots


@pytest.mark.parametrize("num_answers", range(0, 60, 2))
def test_a_run_asked_to_stop_commits_what_is_on_a_lane_and_begins_nothing(num_answers: int) -> None:
    """Stopped at any moment: it ends when its lane is idle, and an update under way has become a version."""
    world = World(experiment(tasks=3, turns=2, slots=2))
    world.start()
    for _ in range(num_answers):
        ready = [o for o in world.open if not isinstance(o[0], SetTimer)]
        world.answer(*ready[len(ready) // 2])
    num_orders, on_lane = len(world.log), [c.task for c, _ in world.find(Train) + world.find(Publish)]
    versions = {name: task.version for name, task in world.scheduler.state.tasks.items()}
    world.tell(StopRequested(at=world.now))
    while not world.scheduler.finished:
        world.answer(*next(o for o in world.open if not isinstance(o[0], SetTimer)))
    begun = (StartWorker, CreateAdapter, LoadAdapter, Generate, StepEnvironment, Train)
    assert not [c for c in world.log[num_orders:] if isinstance(c, begun)]
    gained = {name: task.version - versions[name] for name, task in world.scheduler.state.tasks.items()}
    assert {name for name, change in gained.items() if change and versions[name] >= 0} == set(on_lane)
