"""What the scheduler orders, event by event, in runs without faults."""

from __future__ import annotations

import pytest
from worlds import World, experiment

from marlaas.commands import (
    CloseTask,
    CreateAdapter,
    Generate,
    LoadAdapter,
    OpenService,
    Publish,
    SetTimer,
    StartWorker,
    StepEnvironment,
    Train,
    UnloadAdapter,
)
from marlaas.errors import IllegalEvent
from marlaas.events import RunStarted, TaskSubmitted, TurnGenerated, WorkerUp


def test_one_step_of_one_task_from_start_to_close() -> None:
    """One task, one step, two single-turn trajectories: every order in its place."""
    world = World(experiment(tasks=1, steps=1))
    assert world.start() == (
        StartWorker(id=1, worker="replica-0"),
        StartWorker(id=2, worker="lane-0"),
        SetTimer(id=3, at=120_000_000_000),
    )
    assert world.answer(StartWorker(id=1, worker="replica-0")) == ()
    assert world.answer(StartWorker(id=2, worker="lane-0")) == (OpenService(id=4),)
    assert world.answer(OpenService(id=4)) == (CreateAdapter(id=5, lane="lane-0", task="t0"),)
    load = LoadAdapter(id=6, replica="replica-0", task="t0", version=0)
    assert world.answer(CreateAdapter(id=5, lane="lane-0", task="t0")) == (load,)
    generate = Generate(id=7, replica="replica-0", task="t0", version=0, step=0, turn=0, trajectories=(0, 1))
    assert world.answer(load) == (generate,)
    steps = [
        StepEnvironment(id=number, environment="env", task="t0", step=0, turn=0, trajectory=i)
        for i, number in enumerate((8, 10))
    ]
    assert world.answer(generate, 0) == (steps[0], SetTimer(id=9, at=60_000_000_000))
    assert world.answer(generate, 1) == (steps[1],)
    assert world.answer(steps[1]) == ()
    train = Train(id=11, lane="lane-0", task="t0", step=0, version=0, trajectories=(0, 1))
    assert world.answer(steps[0]) == (train,)
    publish = Publish(id=12, lane="lane-0", task="t0", version=1)
    assert world.answer(train) == (publish,)
    assert world.answer(publish) == (
        UnloadAdapter(id=13, replica="replica-0", task="t0", version=0),
        CloseTask(id=14, task="t0", outcome="done"),
    )
    assert world.scheduler.finished
    assert world.scheduler.outcomes == {"t0": "done"}


def test_a_second_turn_goes_to_the_replica_that_made_the_first() -> None:
    """An episode that goes on is generated again where it began."""
    world = World(experiment(tasks=1, turns=2, replicas=2, prompts=2))
    world.open_service()
    world.answer_all(CreateAdapter)
    world.answer_all(LoadAdapter)
    first = [c for c, _ in world.find(Generate) if isinstance(c, Generate)]
    world.answer_all(Generate)
    world.answer_all(StepEnvironment)
    second = [c for c, _ in world.find(Generate) if isinstance(c, Generate)]
    homes = {i: c.replica for c in first for i in c.trajectories}
    assert {c.turn for c in second} == {1}
    assert all(homes[i] == c.replica for c in second for i in c.trajectories)


def test_groups_are_spread_over_replicas_and_stay_together() -> None:
    """Prompt groups go to the least loaded replica, all samples of a group to the same one."""
    world = World(experiment(tasks=1, prompts=4, samples=2, replicas=2))
    world.open_service()
    world.answer_all(CreateAdapter)
    world.answer_all(LoadAdapter)
    placed = {c.replica: c.trajectories for c, _ in world.find(Generate) if isinstance(c, Generate)}
    assert placed == {"replica-0": (0, 1, 4, 5), "replica-1": (2, 3, 6, 7)}


def test_the_environment_takes_no_more_steps_at_once_than_its_concurrency() -> None:
    """The third of three turns waits for a place in an environment with two."""
    world = World(experiment(tasks=1, samples=3, concurrency=2))
    world.open_service()
    world.answer_all(CreateAdapter)
    world.answer_all(LoadAdapter)
    world.answer_all(Generate)
    assert len(world.find(StepEnvironment)) == 2
    world.answer(*world.find(StepEnvironment)[0])
    assert len(world.find(StepEnvironment)) == 2


def test_other_tasks_go_on_while_one_trains() -> None:
    """Under `marlaas` a task's turns are made while another task is on the lane."""
    world = World(experiment(tasks=2))
    world.open_service()
    world.answer_all(CreateAdapter)
    world.answer_all(CreateAdapter)
    world.answer_all(LoadAdapter)
    for command, index in [o for o in world.find(Generate) if o[0].task == "t0"]:
        world.answer(command, index)
    world.answer_all(StepEnvironment)
    assert [c.task for c, _ in world.find(Train)] == ["t0"]
    assert {c.task for c, _ in world.find(Generate)} == {"t1"}


def test_batches_train_in_the_order_in_which_they_were_complete() -> None:
    """The buffer is first in, first out, whatever the order of registration."""
    world = World(experiment(tasks=3))
    world.open_service()
    for _ in range(3):
        world.answer_all(CreateAdapter)
    for _ in range(3):
        world.answer_all(LoadAdapter)
    for name in ("t2", "t0", "t1"):
        for command, index in [o for o in world.find(Generate) if o[0].task == name]:
            world.answer(command, index)
        world.answer_all(StepEnvironment)
    trained = []
    for _ in range(3):
        trained += [c.task for c, _ in world.find(Train)]
        world.answer_all(Train)
        world.answer_all(Publish)
    assert trained == ["t2", "t0", "t1"]


@pytest.mark.parametrize("system", ["single", "sync", "sync-single-lora", "async-single-lora", "marlaas"])
def test_every_step_of_every_task_is_trained_once_on_its_own_version(system: str) -> None:
    """Each task trains versions 0, 1, 2 in turn, each on all trajectories of that version's batch."""
    for seed in range(5):
        world = World(experiment(tasks=3, steps=3, prompts=2, samples=3, turns=2, replicas=2, system=system))
        world.start()
        world.run_randomly(seed)
        for name in ("t0", "t1", "t2"):
            trains = [c for c in world.log if isinstance(c, Train) and c.task == name]
            assert [(c.step, c.version) for c in trains] == [(0, 0), (1, 1), (2, 2)]
            assert all(c.trajectories == tuple(range(6)) for c in trains)


def test_equal_events_give_equal_commands() -> None:
    """A second scheduler told the same events orders the same."""
    world = World(experiment(tasks=3, steps=2, turns=2, replicas=2))
    world.start()
    world.run_randomly(3)
    again = World(world.experiment).scheduler
    assert [c for e in world.events for c in again.handle(e)] == world.log


def test_an_event_that_cannot_have_happened_changes_nothing() -> None:
    """Time running backwards, an answer to no command, an unknown name: refused, and the run goes on."""
    world = World(experiment(tasks=1))
    world.now = 5
    world.tell(RunStarted(at=5))
    turn = TurnGenerated(
        at=6, command=99, trajectory=0, task="t0", version=0, prompt_tokens=1, output_tokens=1
    )
    wrong = [
        WorkerUp(at=4, command=1, worker="replica-0"),
        turn,
        TaskSubmitted(at=6, task="nobody"),
        WorkerUp(at=6, command=1, worker="nobody"),
        RunStarted(at=6),
    ]
    for event in wrong:
        with pytest.raises(IllegalEvent):
            world.scheduler.handle(event)
    world.run()
    assert world.scheduler.outcomes == {"t0": "done"}
