"""TensorBoard event files of a run, one folder per task: reward, loss and pace of every committed step.

An observer of records like the progress bars, live or from a trace; computes nothing of its own. Needs the
`tensorboard` package, not torch; an executed run without it goes on without event files.
"""

from __future__ import annotations

import datetime as dt
import importlib.util
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.committed import Commits, Step
from marlaas.commands import Command
from marlaas.errors import InputError
from marlaas.events import Event
from traces.reader import iter_records, read_header

SCALARS: Mapping[str, str] = {
    "reward": "mean over the trajectories trained on",
    "rollout/output_tokens": "sampled tokens per trajectory, mean",
    "rollout/trajectories": "trajectories trained on",
    "train/loss": "of the update",
    "train/grad_norm": "before clipping",
    "train/kl": "of the updated policy from the sampler",
    "train/logprob_gap": "mean absolute difference of token log-probabilities, sampler and trainer",
    "train/clip_fraction": "share of tokens whose probability ratio was clipped",
    "train/tokens": "tokens trained on",
    "time/step_s": "since the commit before",
}


def is_available() -> bool:
    """Whether event files can be written here."""
    return importlib.util.find_spec("tensorboard") is not None


class Board:
    """An observer that writes the scalars of each committed step, where `tensorboard` is installed.

    `began_s` is the run's start, Unix time.
    """

    def __init__(self, folder: Path, began_s: float) -> None:
        self._folder = folder
        self._began_s = began_s
        self._commits = Commits()
        self._writers: dict[str, Any] = {}
        self._is_available = is_available()

    def __call__(self, event: Event, commands: tuple[Command, ...]) -> None:
        """Take one record of the trace."""
        step = self._commits(event, commands)
        if step is not None and self._is_available:
            self._write(step)

    def close(self) -> None:
        """Flush and close every file."""
        for writer in self._writers.values():
            writer.close()

    def _write(self, step: Step) -> None:
        writer = self._writers.get(step.task)
        if writer is None:
            from tensorboard.summary import Writer

            writer = self._writers[step.task] = Writer(str(self._folder / step.task))
        for tag, value in _values(step).items():
            if value is not None:
                wall_s = self._began_s + step.at / 1e9
                writer.add_scalar(tag, value, step.version, wall_time=wall_s, description=SCALARS[tag])
        writer.flush()  # a step takes seconds at least, and whoever watches wants to see it


def _values(step: Step) -> dict[str, float | None]:
    stats = step.stats
    return {
        "reward": step.reward,
        "rollout/output_tokens": step.output_tokens,
        "rollout/trajectories": step.num_trajectories,
        "train/loss": stats.loss,
        "train/grad_norm": stats.grad_norm,
        "train/kl": stats.kl,
        "train/logprob_gap": stats.logprob_gap,
        "train/clip_fraction": stats.clip_fraction,
        "train/tokens": stats.num_tokens,
        "time/step_s": step.seconds,
    }


@contextmanager
def board(folder: Path, began_s: float | None = None) -> Iterator[Board]:
    """A board while inside; without `began_s` the run begins now."""
    made = Board(folder, time.time() if began_s is None else began_s)
    try:
        yield made
    finally:
        made.close()


def export_tensorboard(run: Path, folder: Path) -> None:
    """Write the event files of a finished run into `folder`; a simulated one is dated from the epoch on."""
    if not is_available():
        raise InputError("--tensorboard", "tensorboard is not installed", "pip install tensorboard")
    created_at = read_header(run).created_at
    began_s = 0.0 if created_at is None else dt.datetime.fromisoformat(created_at).timestamp()
    with board(folder, began_s) as scalars:
        for event, commands in iter_records(run):
            scalars(event, commands)
