"""Writes a report: run folders in, a folder with `index.html` and PNGs out.

Owns the order of the page and the words under each picture. The page needs no other file: pictures are
embedded, and lie beside it for use elsewhere.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib.style as mpl_style
import msgspec
from matplotlib.figure import Figure

from experiments.report import figures, style
from experiments.report.views import RunView, view
from experiments.words import figure, labels, meaning, percent
from marlaas import __version__
from marlaas.errors import InputError

PAGE = "index.html"
TASK_COLUMNS = (
    "outcome",
    "steps",
    "steps_per_hour",
    "ttfs_s",
    "step_latency_s.mean",
    "rollout_to_training_ratio",
    "tokens",
    "dropped",
    "reward_first5",
    "reward_last5",
)


class _Picture(msgspec.Struct, frozen=True):
    """One figure of the page, where it goes and what it says."""

    file: str
    title: str
    caption: str
    draw: Callable[[Sequence[RunView]], Figure]


PICTURES = (
    _Picture(
        "gantt-tasks.png",
        "Who did what when",
        "Each task's row holds three lines: sampling (with adapter loads), the environment, and training with"
        " publishing. Gaps are waiting. The dotted line is the end of the run.",
        figures.tasks_gantt,
    ),
    _Picture(
        "gantt-devices.png",
        "Who used which device when",
        "One block per replica, environment and lane, one line per task that was there. White is idle.",
        figures.devices_gantt,
    ),
    _Picture(
        "throughput.png",
        "Throughput",
        "Policy updates committed by all tasks together. The steeper the line, the more a cluster gets done.",
        figures.throughput,
    ),
    _Picture(
        "utilisation.png",
        "Utilisation",
        "Busy: work was in flight. Effective: tokens per second over the best rate that any of these runs"
        " reached; the table below has each run's own.",
        figures.utilisation,
    ),
    _Picture(
        "latency.png",
        "Where a step's time goes",
        "Mean seconds from one commit of a task to its next, split by what its trajectories were doing; the"
        " parts sum to the whole.",
        figures.latency,
    ),
    _Picture(
        "rewards.png",
        "Reward per step",
        "Mean verified reward of the trajectories of each step (thin) and of five steps together (thick).",
        figures.rewards,
    ),
)


def write_report(folders: Sequence[Path], out: Path, title: str | None = None) -> Path:
    """Write the report of these run folders into `out`; the page. Raises `InputError` or `TraceError`."""
    runs = [view(folder, label) for folder, label in zip(folders, labels(folders), strict=True)]
    for run in runs:
        if not run.commits:
            raise InputError(str(run.folder), "no step was committed in this run", "wanted a run with steps")
    out.mkdir(parents=True, exist_ok=True)
    pictures = [_write_picture(picture, runs, out) for picture in PICTURES if _is_known(picture, runs)]
    page = _template().render(
        title=title or f"MARLaaS: {' and '.join(dict.fromkeys(run.name for run in runs))}",
        description=runs[0].description,
        headlines=headlines(runs),
        runs=runs,
        pictures=pictures,
        rows=[row for name in _names(runs) if (row := _row(name, runs))],
        task_columns=TASK_COLUMNS,
        task_rows=[_task_row(task, run) for task in _tasks(runs) for run in runs if task in run.tasks],
        version=__version__,
    )
    (out / PAGE).write_text(page, encoding="utf-8")
    return out / PAGE


def headlines(runs: Sequence[RunView]) -> list[str]:
    """What the pictures show, in a sentence per run after the first."""
    first, *others = runs
    pace = first.metrics["steps_per_hour"]
    return [
        f"{run.label} commits {figure(run.metrics['steps_per_hour'])} steps per hour,"
        f" {run.metrics['steps_per_hour'] / pace:.2f} times the {figure(pace)} of {first.label};"
        f" its devices are busy {percent(run.metrics['busy'])} of the time, against"
        f" {percent(first.metrics['busy'])}."
        for run in others
    ]


def _write_picture(picture: _Picture, runs: Sequence[RunView], out: Path) -> dict[str, str]:
    buffer = io.BytesIO()
    with mpl_style.context(style.RC):
        picture.draw(runs).savefig(buffer, format="png", dpi=style.DPI)
    (out / picture.file).write_bytes(buffer.getvalue())
    encoded = base64.b64encode(buffer.getvalue()).decode("ascii")
    return {"file": picture.file, "title": picture.title, "caption": picture.caption, "base64": encoded}


def _is_known(picture: _Picture, runs: Sequence[RunView]) -> bool:
    """Simulated runs know no rewards; an empty picture says nothing."""
    return picture.draw is not figures.rewards or any(any(run.rewards.values()) for run in runs)


def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["figure"] = figure
    return environment.get_template("page.html.j2")


def _names(runs: Sequence[RunView]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.metrics if not name.startswith("tasks.")))


def _row(name: str, runs: Sequence[RunView]) -> dict[str, Any] | None:
    values = [run.metrics.get(name) for run in runs]
    if all(value is None for value in values):
        return None
    return {"name": name, "cells": values, "meaning": meaning(name)}


def _tasks(runs: Sequence[RunView]) -> list[str]:
    return list(dict.fromkeys(task for run in runs for task in run.tasks))


def _task_row(task: str, run: RunView) -> dict[str, Any]:
    values = [run.metrics.get(f"tasks.{task}.{column}") for column in TASK_COLUMNS]
    return {"task": task, "run": run.label, "cells": values}
