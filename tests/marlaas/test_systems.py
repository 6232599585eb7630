"""What tells the systems apart."""

from __future__ import annotations

import itertools
from collections import Counter

from worlds import World, experiment

from marlaas.commands import CreateAdapter, Generate, LoadAdapter, Train, UnloadAdapter
from marlaas.events import AdapterPublished, TurnGenerated
from marlaas.spec import SystemSpec
from marlaas.systems import SYSTEMS, compose


def _run(system: str | SystemSpec, seed: int = 1, **sizes: int) -> World:
    spec = experiment(tasks=3, steps=2, samples=2, system=system, **sizes)
    world = World(spec)
    world.start()
    world.run_randomly(seed)
    return world


def test_single_takes_one_task_after_another() -> None:
    """No turn of a task is ordered before the last step of the task before it."""
    order = [c.task for c in _run("single").log if isinstance(c, Generate)]
    assert [name for name, _ in itertools.groupby(order)] == ["t0", "t1", "t2"]


def test_sync_trains_in_registration_order_after_everybody_has_rolled_out() -> None:
    """Each round: all batches first, then one update each, in the order of the experiment."""
    for seed in range(10):
        log = [c for c in _run("sync", seed).log if isinstance(c, Generate | Train)]
        phases = [(kind, list(group)) for kind, group in itertools.groupby(log, key=type)]
        assert [kind for kind, _ in phases] == [Generate, Train, Generate, Train]
        for kind, group in phases:
            names = [c.task for c in group]
            assert names == ["t0", "t1", "t2"] if kind is Train else sorted(names) == ["t0", "t1", "t2"]


def test_single_lora_serves_one_adapter_at_a_time_per_replica() -> None:
    """Between two tasks' turns on a replica lies the end of the first one's batch there."""
    for system in ("sync-single-lora", "async-single-lora"):
        world = _run(system, slots=8)
        resident: set[str] = set()
        for command in world.log:
            if isinstance(command, LoadAdapter):
                assert not resident
                resident.add(command.task)
            elif isinstance(command, UnloadAdapter):
                resident.discard(command.task)


def test_marlaas_mixes_adapters_on_a_replica() -> None:
    """Turns of several tasks are in flight on one replica at once."""
    world = World(experiment(tasks=3))
    world.open_service()
    for _ in range(3):
        world.answer_all(CreateAdapter)
    for _ in range(3):
        world.answer_all(LoadAdapter)
    assert {c.task for c, _ in world.find(Generate)} == {"t0", "t1", "t2"}


def test_dealt_batches_have_whole_replicas_to_themselves() -> None:
    """Each of three tasks gets two of six replicas; a lone task gets them all."""
    for tasks, share in ((3, 2), (1, 6)):
        world = World(experiment(tasks=tasks, prompts=6, replicas=6, system=SystemSpec(placement="deal")))
        world.open_service()
        for _ in range(tasks):
            world.answer_all(CreateAdapter)
        homes = [(c.replica, c.task) for c, _ in world.find(LoadAdapter) if isinstance(c, LoadAdapter)]
        assert len({replica for replica, _ in homes}) == len(homes) == 6
        assert all(len([t for _, t in homes if t == f"t{i}"]) == share for i in range(tasks))


def test_packed_batches_share_few_replicas() -> None:
    """Each of four tasks is on four of eight replicas, each of which serves two; a lone task is on all."""
    for tasks, share, overlap in ((4, 4, 2), (2, 8, 2), (1, 8, 1)):
        world = World(experiment(tasks=tasks, prompts=8, replicas=8))
        world.open_service()
        for _ in range(tasks):
            world.answer_all(CreateAdapter)
        homes = [(c.replica, c.task) for c, _ in world.find(LoadAdapter) if isinstance(c, LoadAdapter)]
        assert Counter(task for _, task in homes) == {f"t{i}": share for i in range(tasks)}
        assert Counter(replica for replica, _ in homes) == {f"replica-{i}": overlap for i in range(8)}


def test_rounds_are_spread_over_all_replicas() -> None:
    """A round waits for its slowest replica, so each serves every task."""
    world = World(experiment(tasks=4, prompts=8, replicas=8, system="sync"))
    world.open_service()
    for _ in range(4):
        world.answer_all(CreateAdapter)
    homes = [(c.replica, c.task) for c, _ in world.find(LoadAdapter) if isinstance(c, LoadAdapter)]
    assert Counter(replica for replica, _ in homes) == {f"replica-{i}": 4 for i in range(8)}


def test_more_dealt_tasks_than_replicas_take_the_least_loaded_one_each() -> None:
    """Five tasks over two replicas: one replica each, never more than one task apart."""
    spec = experiment(tasks=5, prompts=4, replicas=2, system="sync-single-lora")
    world = World(spec)
    world.start()
    world.run_randomly(3)
    first = [c for c in world.log if isinstance(c, Generate) and c.step == 0]
    homes = {task: {c.replica for c in first if c.task == task} for task in (f"t{i}" for i in range(5))}
    assert all(len(replicas) == 1 for replicas in homes.values())
    counts = [sum(replicas == {name} for replicas in homes.values()) for name in ("replica-0", "replica-1")]
    assert sorted(counts) == [2, 3]


def test_a_system_spelt_out_behaves_like_its_name() -> None:
    """The composition in YAML and the named system give the same orders."""
    assert _run(SystemSpec(barrier="round", training_order="registration")).log == _run("sync").log


def test_names_are_compositions_that_differ() -> None:
    """Five named systems, five different compositions."""
    assert len(set(SYSTEMS.values())) == 5
    single = compose(experiment(system="async-single-lora", slots=8))
    assert single.capacity == 1


def test_more_tasks_than_slots_all_finish_and_every_turn_is_by_the_right_adapter() -> None:
    """Five tasks over two slots: every turn is made by its task's last committed version."""
    for seed in range(10):
        world = World(experiment(tasks=5, steps=3, turns=2, slots=2, concurrency=2))
        world.start()
        world.run_randomly(seed)
        version = dict.fromkeys((f"t{i}" for i in range(5)), 0)
        orders = {c.id: c for c in world.log}
        for event in world.events:
            if isinstance(event, TurnGenerated):
                assert event.version == version[event.task]
            elif isinstance(event, AdapterPublished):
                version[orders[event.command].task] += 1
        assert set(version.values()) == {3}
