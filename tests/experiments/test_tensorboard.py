"""TensorBoard event files say what the metrics say, whether written live or from the trace."""

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from experiments.tensorboard import board, export_tensorboard
from marlaas.commands import Command, Publish, StepEnvironment, Train
from marlaas.events import (
    AdapterPublished,
    CommandFailed,
    EnvironmentStepped,
    Event,
    RunStarted,
    TrainingFinished,
    TrainingStats,
    TurnGenerated,
)
from traces.metrics import Run

STATS = TrainingStats(num_tokens=40, loss=0.5, grad_norm=2.0)


def _turn(at: int, trajectory: int, output_tokens: int) -> TurnGenerated:
    return TurnGenerated(
        at=at,
        command=1,
        trajectory=trajectory,
        task="add",
        version=0,
        prompt_tokens=5,
        output_tokens=output_tokens,
    )


def _step(number: int, trajectory: int) -> StepEnvironment:
    return StepEnvironment(id=number, environment="calc", task="add", step=0, turn=0, trajectory=trajectory)


RECORDS: list[tuple[Event, tuple[Command, ...]]] = [
    (RunStarted(at=0), ()),
    (_turn(1_000_000_000, 0, 4), (_step(2, 0),)),
    (_turn(1_000_000_000, 1, 8), (_step(3, 1),)),
    (_turn(1_000_000_000, 2, 6), (_step(4, 2),)),
    (EnvironmentStepped(at=1_500_000_000, command=2, done=True, reward=1.0), ()),
    (EnvironmentStepped(at=1_500_000_000, command=3, done=True, reward=0.5), ()),
    (CommandFailed(at=1_600_000_000, command=4, reason="timeout"), ()),
    (
        EnvironmentStepped(at=1_700_000_000, command=4, done=True, reward=1.0),  # too late: not counted
        (Train(id=5, lane="lane-0", task="add", step=0, version=0, trajectories=(0, 1)),),
    ),
    (
        TrainingFinished(at=2_000_000_000, command=5, stats=STATS),
        (Publish(id=6, lane="lane-0", task="add", version=1),),
    ),
    (AdapterPublished(at=4_000_000_000, command=6, fingerprint=""), ()),
]


def _scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Tag to (step, wall time, value) of every point in a folder of event files."""
    events: Any = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: [(p.step, p.wall_time, float(make_ndarray(p.tensor_proto))) for p in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }


def test_a_committed_step_is_one_point_of_every_known_scalar(tmp_path: Path) -> None:
    """Rewards of the trained trajectories alone, time since the first turn, nothing for what is not known."""
    with board(tmp_path, began_s=100.0) as scalars:
        for event, commands in RECORDS:
            scalars(event, commands)
    found = _scalars(tmp_path / "add")
    assert {tag: points[0][2] for tag, points in found.items()} == {
        "reward": 0.75,
        "rollout/output_tokens": 6.0,
        "rollout/trajectories": 2.0,
        "train/loss": 0.5,
        "train/grad_norm": 2.0,
        "train/tokens": 40.0,
        "time/step_s": 3.0,
    }
    assert all(points[0][:2] == (1, 104.0) for points in found.values())


def test_a_trace_exports_one_folder_per_task_with_every_step(two_runs: list[Path], tmp_path: Path) -> None:
    """Steps 1, 2, ... of each task; tokens per trajectory as the metrics have them."""
    export_tensorboard(two_runs[1], tmp_path / "board")
    tasks = Run(two_runs[1]).tasks
    folders = sorted((tmp_path / "board").iterdir())
    assert [folder.name for folder in folders] == ["adder-0", "adder-1", "finder"]
    for folder in folders:
        found = _scalars(folder)
        assert [step for step, _, _ in found["train/tokens"]] == [1, 2]
        assert "reward" not in found  # a simulation knows none
        sampled = [value * 4 for _, _, value in found["rollout/output_tokens"]]
        assert sampled == [row.tokens for row in tasks[folder.name].rows]
