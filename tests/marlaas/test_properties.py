"""Random sequences of answers, faults, requests and passing time: the books balance after every event."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import World, experiment

from marlaas.commands import OpenService, SetTimer, Train
from marlaas.events import CancelRequested, CommandFailed, PauseRequested, ResumeRequested, TurnGenerated
from marlaas.spec import Limits

_SYSTEMS = ["single", "sync", "sync-single-lora", "async-single-lora", "marlaas"]
_MOVES = st.lists(st.tuples(st.sampled_from("aaaaaaaaaafwltprcw"), st.integers(0, 999)), max_size=120)


def _ready(world: World) -> list:  # type: ignore[type-arg]
    return [o for o in world.open if not isinstance(o[0], SetTimer)]


def _move(world: World, move: str, number: int) -> None:
    """Do one thing to the world: answer, fail, mislabel, lose, let time pass, pause, resume or cancel."""
    ready, tasks = _ready(world), [t.name for t in world.experiment.tasks]
    name = tasks[number % len(tasks)]
    if move == "a" and ready:
        world.answer(*ready[number % len(ready)])
    elif move == "f" and ready:
        command, index = ready[number % len(ready)]
        if isinstance(command, OpenService):  # nothing in it can fail
            return
        world.open.remove((command, index))
        world.tell(CommandFailed(at=world.now, command=command.id, reason="broken", trajectory=index))
    elif move == "w" and (turns := [o for o in ready if o[1] is not None]):
        command, index = turns[number % len(turns)]
        world.open.remove((command, index))
        made = world.turn(command, index)
        wrong = TurnGenerated(
            at=made.at,
            command=made.command,
            trajectory=made.trajectory,
            task=name,
            version=made.version + number % 2,
            prompt_tokens=1,
            output_tokens=1,
        )
        world.tell(wrong)
    elif move == "l":
        workers = [*world.experiment.replica_names, *world.experiment.lane_names]
        world.lose(workers[number % len(workers)])
    elif move == "t" and (timers := world.find(SetTimer)):
        world.answer(*min(timers, key=lambda o: o[0].at))
    elif move == "p":
        world.tell(PauseRequested(at=world.now, task=name))
    elif move == "r":
        world.tell(ResumeRequested(at=world.now, task=name))
    elif move == "c" and number % 5 == 0:
        world.tell(CancelRequested(at=world.now, task=name))


def _finish(world: World) -> None:
    """Resume everything and answer faultlessly until all tasks have ended."""
    for _ in range(5000):
        if world.scheduler.finished:
            return
        paused = world.scheduler.state.in_state("paused")
        for name in paused:
            world.tell(ResumeRequested(at=world.now, task=name))
        if ready := _ready(world) or world.open:
            world.answer(*ready[0])
    raise AssertionError("tasks did not end")


@settings(max_examples=120, deadline=None)
@given(
    system=st.sampled_from(_SYSTEMS),
    sizes=st.fixed_dictionaries(
        {
            "tasks": st.integers(1, 3),
            "steps": st.integers(1, 2),
            "prompts": st.integers(1, 2),
            "samples": st.integers(2, 3),
            "turns": st.integers(1, 2),
            "slots": st.integers(1, 2),
            "replicas": st.integers(1, 2),
            "lanes": st.integers(1, 2),
            "concurrency": st.integers(1, 4),
        }
    ),
    moves=_MOVES,
)
def test_any_sequence_of_events_keeps_the_invariants_and_every_task_ends(
    system: str, sizes: dict[str, int], moves: list[tuple[str, int]]
) -> None:
    """Whatever happens, issued = trained + dropped + live, pins hold, and no task is left behind."""
    limits = Limits(turn_s=10, trajectory_s=30, training_s=20, order_s=20, worker_restarts=2)
    world = World(experiment(system=system, limits=limits, **sizes))
    world.start()
    for move, number in moves:
        _move(world, move, number)
    _finish(world)
    for task in world.scheduler.state.tasks.values():
        assert task.num_issued == task.num_trained + sum(task.dropped.values())
        versions = [c.version for c in world.log if isinstance(c, Train) and c.task == task.name]
        assert versions == sorted(versions)
        assert task.state != "done" or set(versions) == set(range(task.spec.steps))
