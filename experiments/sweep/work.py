"""One cell, simulated: an experiment and a profile in, its metrics out and kept in a file.

This is what worker processes import and run. The trace is written to the folder's `partial/` and read again
for the metrics; then it is deleted or, with `keep_traces`, moved to `runs/` with all that a run folder holds.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from experiments.load import dump_experiment
from experiments.run import RESOLVED, TRACE, write_metrics
from experiments.sweep.cells import Question
from experiments.sweep.folder import CellRecord, Folder
from marlaas.spec import Experiment
from sim.profile import Profile
from sim.profile_files import dump_profile
from sim.run import simulate
from traces.metrics import compute
from traces.schema import make_header
from traces.writer import TraceWriter

PROFILE = "profile.yaml"


class Job(msgspec.Struct, frozen=True):
    """A cell to simulate: its key, its question, the sweep's folder, and whether to keep its run folder."""

    key: str
    question: Question
    out: Path
    keep_trace: bool


def work(job: Job) -> CellRecord:
    """Simulate a cell and keep its result; a cell that fails is a record with an error, which is not kept."""
    folder = Folder(job.out)
    began = time.perf_counter()
    try:
        values = _kept_run(job, folder) if job.keep_trace else _fleeting_run(job, folder)
    except Exception as error:  # noqa: BLE001 - whatever breaks one cell must not stop the others
        return CellRecord(key=job.key, error=f"{type(error).__name__}: {error}")
    record = CellRecord(
        key=job.key,
        metrics={name: value for name, value in values.items() if not name.startswith("tasks.")},
        rates={task.name: _rates(values, task.name) for task in job.question.experiment.tasks},
        wall_s=time.perf_counter() - began,
    )
    folder.keep(record)
    return record


def _fleeting_run(job: Job, folder: Folder) -> dict[str, Any]:
    """The metrics of a run of which nothing else stays: a file, as folders are slow to make."""
    trace = folder.partial(job.key).with_suffix(".jsonl")
    trace.unlink(missing_ok=True)
    try:
        _simulate(job.question.experiment, job.question.profile, trace)
        return compute(trace)
    finally:
        trace.unlink(missing_ok=True)


def _kept_run(job: Job, folder: Folder) -> dict[str, Any]:
    """The metrics of a run whose folder is kept, complete and on its own: its profile lies in it."""
    partial = folder.partial(job.key)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        profile = job.question.profile
        experiment = msgspec.structs.replace(job.question.experiment, profile=PROFILE)
        (partial / RESOLVED).write_text(dump_experiment(experiment), encoding="utf-8")
        (partial / PROFILE).write_text(dump_profile(profile), encoding="utf-8")
        _simulate(experiment, profile, partial / TRACE)
        values = write_metrics(partial)
        partial.rename(folder.emptied_run(job.key))
        return values
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _simulate(experiment: Experiment, profile: Profile, trace: Path) -> None:
    header = make_header(experiment, world="sim", profile=msgspec.to_builtins(profile))
    with TraceWriter(trace, header) as recorder:
        simulate(experiment, profile, recorder)


def _rates(values: dict[str, float | None], task: str) -> tuple[float | None, float | None]:
    """A task's steps per hour from its submission on, and while it was served."""
    own, active = (values.get(f"tasks.{task}.steps_per_hour{suffix}") for suffix in ("", "_active"))
    return own, active
