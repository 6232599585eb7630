"""What the figures draw, read once from a run's trace: who used what when, what it earned.

Derives nothing that `traces` defines; it only picks and arranges. Times are seconds since the first task
was submitted, so that the start-up of real workers does not push two runs apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from traces.metrics import CAUSES, Interval, Run, compute, intervals

NS = 1e9


class Span(msgspec.Struct, frozen=True):
    """A task was at work at a place: `phase` is one of the kinds of `traces.metrics.KINDS`."""

    task: str
    phase: str
    place: str
    start_s: float
    end_s: float


class RunView(msgspec.Struct, frozen=True, kw_only=True):
    """One run as the report sees it.

    `spans` are by place; `commits` are (seconds, task) in order; `rewards` and `causes` (mean seconds per
    step) are per task and empty where the trace knows none.
    """

    label: str
    folder: Path
    name: str
    description: str
    system: str
    world: str
    tasks: tuple[str, ...]
    spans: tuple[Span, ...]
    commits: tuple[tuple[float, str], ...]
    rewards: dict[str, list[float]]
    causes: dict[str, dict[str, float]]
    metrics: dict[str, Any]
    end_s: float


def view(folder: Path, label: str) -> RunView:
    """Read a run folder's trace; raises `InputError` or `TraceError`."""
    run = Run(folder)
    experiment = run.experiment
    rows = [row for task in run.tasks.values() for row in task.rows]
    commits = sorted(((row.end_ns - run.begin) / NS, row.task) for row in rows)
    return RunView(
        label=label,
        folder=folder,
        name=experiment.name,
        description=experiment.description,
        system=experiment.system if isinstance(experiment.system, str) else "custom",
        world="simulated" if run.header.world == "sim" else "executed",
        tasks=tuple(task.name for task in experiment.tasks),
        spans=tuple(_spans(intervals(folder), run.begin)),
        commits=tuple(commits),
        rewards={
            name: [row.reward for row in task.rows if row.reward is not None]
            for name, task in run.tasks.items()
        },
        causes={name: _causes(name, run) for name, task in run.tasks.items() if task.rows},
        metrics=compute(folder),
        end_s=run.length_ns / NS,
    )


def _spans(found: list[Interval], begin_ns: int) -> list[Span]:
    """Intervals by device and environment, from the first submission on."""
    return [
        Span(one.task, one.kind, one.track.partition(":")[2], (one.start_ns - begin_ns) / NS, end_s)
        for one in found
        if not one.track.startswith("task:") and (end_s := (one.end_ns - begin_ns) / NS) > 0
    ]


def _causes(name: str, run: Run) -> dict[str, float]:
    rows = run.tasks[name].rows
    sums = [sum(row.causes_ns[i] for row in rows) for i in range(len(CAUSES))]
    return {cause: total / len(rows) / NS for cause, total in zip(CAUSES, sums, strict=True)}
