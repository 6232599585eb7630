"""Runs the whole study: every sweep into its own folder, then claims and report from what is there.

    experiments/paper/<study>.yaml ──sweep──► <out>/<study>/ ──► <out>/claims.json, <out>/report/

Owns the order and the miniature. Sweeps keep finished cells, so a run that was interrupted goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from experiments.paper.claims import write_claims
from experiments.paper.page import write_page
from experiments.paper.results import read_results
from experiments.sweep.axes import NUM_TASKS, Axis, Setting
from experiments.sweep.run import sweep
from experiments.sweep.study import Study, load_study

FOLDER = Path(__file__).parent
SCALING = "scaling"
STUDIES = (SCALING, "sustained", "ratio", "sensitivity", "split", "loads", "memory")
CLAIMS, REPORT = "claims.json", "report"


def run_paper(out: Path, console: Console, jobs: int | None = None, *, quick: bool = False) -> int:
    """Simulate and report into `out`; the number of cells that failed. Raises `InputError`."""
    num_failed = 0
    for name in STUDIES:
        study = load_study(FOLDER / f"{name}.yaml")
        study = miniature(study) if quick else study
        if name == SCALING:  # the cells of the headline first, with their traces
            sweep(headline(study), out / name, console, jobs)
        num_failed += sweep(study, out / name, console, jobs).num_failed
    results = read_results(out)
    claims = write_claims(results, out / CLAIMS)
    write_page(results, claims, out / REPORT)
    return num_failed


def headline(study: Study) -> Study:
    """The cells with the most tasks and the first seed, to be kept as run folders."""
    tasks = study.axis(NUM_TASKS)
    axes = tuple(_only(axis, axis.labels[-1:]) if axis is tasks else axis for axis in study.axes)
    return msgspec.structs.replace(study, axes=axes, replications=1, keep_traces=True, plot=None)


def miniature(study: Study) -> Study:
    """The first and last point of every axis but the systems', two tasks, one step, few trajectories."""
    axes = tuple(axis if axis.name == "system" else _ends(axis) for axis in study.axes)
    small: dict[str, Any] = {"tasks.*.steps": 1, "tasks.*.prompts": 2}
    if study.name == "sustained":
        small = {"tasks.*.prompts": 2, "operations.*.at_s": 600}
        axes = tuple(_without(axis, "operations.*.at_s") for axis in axes)
    fixed = {one.key: one for one in study.fixed}
    fixed |= {key: Setting(key, value, "--quick") for key, value in small.items()}
    if not any(axis.name == NUM_TASKS for axis in axes):
        fixed[NUM_TASKS] = Setting(NUM_TASKS, 2, "--quick")
    return msgspec.structs.replace(study, axes=axes, fixed=tuple(fixed.values()), replications=1, plot=None)


def _ends(axis: Axis) -> Axis:
    """The first point of the models, the first two numbers of tasks, both ends of the rest."""
    if axis.name == "model":
        return _only(axis, axis.labels[:1])
    if axis.name == NUM_TASKS:
        small = tuple(
            msgspec.structs.replace(point, label=num, settings=(Setting(NUM_TASKS, num, "--quick"),))
            for num, point in zip((1, 2), axis.points, strict=False)
        )
        return msgspec.structs.replace(axis, points=small)
    if axis.name == "assumption":
        return _only(axis, axis.labels[:3])
    return _only(axis, [axis.labels[0], axis.labels[-1]])


def _only(axis: Axis, labels: list[Any]) -> Axis:
    return msgspec.structs.replace(
        axis, points=tuple(point for point in axis.points if point.label in labels)
    )


def _without(axis: Axis, key: str) -> Axis:
    points = tuple(
        msgspec.structs.replace(point, settings=tuple(one for one in point.settings if one.key != key))
        for point in axis.points
    )
    return msgspec.structs.replace(axis, points=points)
