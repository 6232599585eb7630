"""Whole runs in real processes: scripted engines, the real scheduler, and what goes wrong."""

import asyncio
import gc
import json
import math
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from scripted_engines import mark
from scripted_runs import GOOD, Answer, Memory, assert_replays, scripted, small

from executor.driver import execute
from executor.environments import Observation, Problem
from executor.transcripts import Episode
from marlaas.commands import Command, DropTrajectories, Generate, OpenService, StepEnvironment
from marlaas.events import (
    AdapterPublished,
    CommandFailed,
    EnvironmentStepped,
    Event,
    RunStarted,
    TurnsAborted,
    WorkerLost,
    WorkerUp,
)
from marlaas.spec import Cancel, Fixed, Kill, Limits, Pause, Resume

ROOT = Path(__file__).parents[2]


def talk_first(problem: Problem, turns: Sequence[str]) -> Observation:
    """Goes on after the first turn, then rewards."""
    return GOOD if len(turns) > 1 else Observation(done=False, text="go on")


def of_kind(memory: Memory, *kinds: type) -> list[Any]:
    """The recorded events of these kinds."""
    return [event for event in memory.events if isinstance(event, kinds)]


def test_two_tasks_run_to_their_end_and_the_record_replays(tmp_path: Path) -> None:
    """Every step of every task is generated, answered, trained and published by its own version, in order."""
    experiment = small(tmp_path, max_turns=2)
    memory, seen = Memory(), list[Event]()
    outcomes = execute(
        experiment, tmp_path, memory, lambda event, commands: seen.append(event), plugins=scripted(talk_first)
    )
    assert outcomes == {"task-0": "done", "task-1": "done"}
    assert isinstance(memory.events[0], RunStarted)
    assert seen == memory.events
    times = [event.at for event in memory.events]
    assert times == sorted(times)
    assert len(of_kind(memory, AdapterPublished)) == 4
    assert len(of_kind(memory, EnvironmentStepped)) == 2 * 2 * 4 * 2
    for task in outcomes:
        for version in (0, 1, 2):
            written = json.loads((tmp_path / "adapters" / task / f"v{version}" / "adapter.json").read_text())
            assert written == {"mark": mark(task, version)}
    assert_replays(experiment, memory.entries)


def _episodes() -> list[Episode]:
    return [thing for thing in gc.get_objects() if isinstance(thing, Episode)]


def test_a_committed_step_is_forgotten(tmp_path: Path) -> None:
    """The driver holds the trajectories of live batches and no others, however long the run."""
    held: list[int] = []
    others = _episodes()  # of runs that other tests made and something still holds; kept alive meanwhile

    def count(event: Event, commands: tuple[Command, ...]) -> None:
        if isinstance(event, AdapterPublished):
            held.append(len(_episodes()) - len(others))

    execute(small(tmp_path, steps=4, environments=("env",)), tmp_path, Memory(), count, plugins=scripted())
    assert held == [0, 0, 0, 0]


def test_committed_steps_leave_readable_samples(tmp_path: Path) -> None:
    """Prompt, turns, observations and reward of a step's trajectories, as JSON lines."""
    execute(small(tmp_path, max_turns=2, steps=1), tmp_path, Memory(), plugins=scripted(talk_first))
    lines = (tmp_path / "samples" / "task-1" / "step-0.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    said = f"<mark-{mark('task-1', 0) - 200}>"
    assert len(lines) == 4
    assert first["prompt"].startswith("p")
    assert first["turns"] == [{"model": said, "environment": "go on"}, {"model": said, "environment": ""}]
    assert first["reward"] == 1.0


def test_the_last_turn_ends_the_episode_whatever_the_environment_says(tmp_path: Path) -> None:
    """Out of turns without an answer earns nothing."""
    memory = Memory()
    plugins = scripted(lambda problem, turns: Observation(done=False, text="more"))
    execute(small(tmp_path, max_turns=2, steps=1), tmp_path, memory, plugins=plugins)
    answers = of_kind(memory, EnvironmentStepped)
    assert Counter((a.done, a.reward, a.observation_tokens) for a in answers) == {
        (False, None, 4): 8,
        (True, 0.0, 0): 8,
    }


def raises(problem: Problem, turns: Sequence[str]) -> Observation:
    """A crash."""
    raise RuntimeError("sandbox is gone")


def is_garbage(problem: Problem, turns: Sequence[str]) -> Any:
    """Not an observation."""
    return {"reward": 1}


def rewards_nan(problem: Problem, turns: Sequence[str]) -> Observation:
    """Not a number."""
    return Observation(done=True, reward=math.nan)


def rewards_nothing(problem: Problem, turns: Sequence[str]) -> Observation:
    """An end without a reward."""
    return Observation(done=True)


async def hangs(problem: Problem, turns: Sequence[str]) -> Observation:
    """Never answers."""
    await asyncio.sleep(1e6)
    return GOOD


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (raises, "RuntimeError: sandbox is gone"),
        (is_garbage, "the environment answered with a dict, not an Observation"),
        (rewards_nan, "the environment ended the episode with the reward nan"),
        (rewards_nothing, "the environment ended the episode with the reward None"),
        (hangs, None),
    ],
)
def test_a_bad_environment_fails_its_task_alone(tmp_path: Path, answer: Answer, reason: str | None) -> None:
    """Its trajectories are dropped after their tries; the neighbour's run is untouched."""
    experiment = small(
        tmp_path, environments=("bad", "good"), limits=Limits(trajectory_retries=1), timeout_s=0.2
    )
    memory = Memory()
    outcomes = execute(experiment, tmp_path, memory, plugins=scripted(answer))
    assert outcomes == {"task-0": "failed", "task-1": "done"}
    assert {failure.reason for failure in of_kind(memory, CommandFailed)} == ({reason} if reason else set())
    dropped = [c for c in memory.commands if isinstance(c, DropTrajectories)]
    assert {command.task for command in dropped} == {"task-0"}
    assert_replays(experiment, memory.entries)


@pytest.mark.parametrize("worker", ["replica-0", "lane-0"])
def test_a_killed_worker_comes_back_and_the_run_finishes(tmp_path: Path, worker: str) -> None:
    """A crash of a process in the middle costs time, not the run."""
    experiment = small(
        tmp_path, steps=3, operations=(Kill(at_s=0.25, worker=worker),), latency_s=Fixed(value=0.15)
    )
    memory = Memory()
    assert set(execute(experiment, tmp_path, memory, plugins=scripted()).values()) == {"done"}
    (lost,) = of_kind(memory, WorkerLost)
    assert (lost.worker, lost.reason) == (worker, f"killed by SIGKILL; see {worker}.log")
    assert Counter(up.worker for up in of_kind(memory, WorkerUp))[worker] == 2
    assert_replays(experiment, memory.entries)


def _workers() -> list[psutil.Process]:
    """Worker processes that this one has; it may have other children of its own."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "executor.worker" in child.cmdline()]


@pytest.mark.slow
def test_a_frozen_worker_is_replaced_and_the_run_finishes(tmp_path: Path) -> None:
    """Neither turns nor the order to abort them are answered: the process is killed and replaced."""
    limits = Limits(turn_s=0.1, order_s=5.0)
    experiment = small(tmp_path, steps=1, limits=limits)
    memory = Memory()
    outcomes = execute(experiment, tmp_path, memory, plugins=scripted(replica="StoppedOnceReplica"))
    assert set(outcomes.values()) == {"done"}
    assert of_kind(memory, WorkerLost) == []  # the scheduler gave it up; the world had no word from it
    assert Counter(up.worker for up in of_kind(memory, WorkerUp))["replica-0"] == 2
    assert _workers() == []
    assert_replays(experiment, memory.entries)


def test_turns_that_never_come_are_aborted_and_dropped(tmp_path: Path) -> None:
    """Deadlines and tries are the scheduler's; the replica lets go and the run ends by itself."""
    experiment = small(tmp_path, steps=1, limits=Limits(turn_s=0.1, trajectory_retries=1))
    memory = Memory()
    outcomes = execute(experiment, tmp_path, memory, plugins=scripted(replica="StallingReplica"))
    assert set(outcomes.values()) == {"failed"}
    dropped = [c for c in memory.commands if isinstance(c, DropTrajectories)]
    assert sum(len(command.trajectories) for command in dropped) == 8
    assert len(of_kind(memory, TurnsAborted)) == 4
    assert_replays(experiment, memory.entries)


def test_a_worker_that_cannot_be_built_is_given_up_and_says_why(tmp_path: Path) -> None:
    """The run ends by itself when no replica is left."""
    experiment = small(tmp_path, limits=Limits(worker_restarts=1))
    memory = Memory()
    outcomes = execute(experiment, tmp_path, memory, plugins=scripted(replica="unbuildable"))
    assert set(outcomes.values()) == {"failed"}
    reasons = {lost.reason for lost in of_kind(memory, WorkerLost)}
    assert reasons == {"FileNotFoundError: no weights for replica-0"}
    assert len(of_kind(memory, WorkerLost)) == 2


def test_a_turn_with_a_log_probability_that_is_no_number_is_made_again(tmp_path: Path) -> None:
    """It is refused with its reason and never reaches the trainer."""
    experiment = small(tmp_path, steps=1)
    memory = Memory()
    outcomes = execute(experiment, tmp_path, memory, plugins=scripted(replica="NanReplica"))
    assert set(outcomes.values()) == {"done"}
    failures = of_kind(memory, CommandFailed)
    assert len(failures) == 8
    assert all("finite" in failure.reason and failure.trajectory is not None for failure in failures)


def test_operations_and_submissions_come_at_their_times(tmp_path: Path) -> None:
    """Times count from the opening of the service; a paused task waits, a cancelled one ends."""
    operations = (
        Cancel(at_s=0.3, task="task-1"),
        Pause(at_s=0.0, task="task-0"),
        Resume(at_s=0.6, task="task-0"),
    )
    experiment = small(tmp_path, operations=operations, latency_s=Fixed(value=0.2))
    memory = Memory()
    outcomes = execute(experiment, tmp_path, memory, plugins=scripted())
    assert outcomes == {"task-0": "done", "task-1": "cancelled"}
    opened = next(e.at for e, cs in memory.entries if any(isinstance(c, OpenService) for c in cs))
    moments = {type(e).__name__: (e.at - opened) / 1e9 for e in memory.events if hasattr(e, "task")}
    assert 0.0 <= moments["PauseRequested"] < 0.3 <= moments["CancelRequested"]
    assert moments["ResumeRequested"] >= 0.6
    assert_replays(experiment, memory.entries)


def test_latency_is_waited_before_an_answer(tmp_path: Path) -> None:
    """It stands for the tool's own time."""
    experiment = small(tmp_path, steps=1, latency_s=Fixed(value=0.2))
    memory = Memory()
    execute(experiment, tmp_path, memory, plugins=scripted())
    asked = {c.id: e.at for e, cs in memory.entries for c in cs if isinstance(c, StepEnvironment)}
    waits = [(e.at - asked[e.command]) / 1e9 for e in of_kind(memory, EnvironmentStepped)]
    assert waits
    assert min(waits) >= 0.2


def test_the_same_experiment_makes_the_same_samples(tmp_path: Path) -> None:
    """Problems and seeds depend on names and numbers alone."""
    for run in ("one", "two"):
        (tmp_path / run).mkdir()
        execute(small(tmp_path, steps=1), tmp_path / run, Memory(), plugins=scripted())
    for task in ("task-0", "task-1"):
        files = [tmp_path / run / "samples" / task / "step-0.jsonl" for run in ("one", "two")]
        assert files[0].read_text() == files[1].read_text()
    assert (tmp_path / "one/samples/task-0/step-0.jsonl").read_text() != (
        tmp_path / "one/samples/task-1/step-0.jsonl"
    ).read_text()


def test_an_error_of_the_recorder_ends_the_run_and_its_workers(tmp_path: Path) -> None:
    """A full disk is not for the run to survive; nobody is left behind."""

    class Full(Memory):
        def write(self, event: Event, commands: tuple[Command, ...]) -> None:
            super().write(event, commands)
            if any(isinstance(command, Generate) for command in commands):
                raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        execute(small(tmp_path), tmp_path, Full(), plugins=scripted())
    assert _workers() == []


def test_a_run_may_live_in_any_thread(tmp_path: Path) -> None:
    """A notebook or a service need not give up its main thread."""
    outcomes: dict[str, str] = {}
    experiment = small(tmp_path, steps=1)
    thread = threading.Thread(
        target=lambda: outcomes.update(execute(experiment, tmp_path, Memory(), plugins=scripted()))
    )
    thread.start()
    thread.join(20)
    assert outcomes == {"task-0": "done", "task-1": "done"}


def test_the_driver_loads_no_torch() -> None:
    """It starts at once and leaves the memory to the workers."""
    modules = "executor.driver, executor.evaluate, executor.engines"
    program = f"import sys, {modules}; print({{'torch', 'transformers'}} & set(sys.modules))"
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT)
    assert run.stdout.strip() == "set()"
