"""One cell, simulated: an experiment and a profile in, its metrics out and kept in a file.

This is what worker processes import and run. The trace is written to the folder's `partial/` and read
again for the metrics; then the run folder is moved to `runs/` or deleted.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import msgspec

from experiments.load import dump_experiment
from experiments.run import RESOLVED, TRACE, write_metrics
from experiments.sweep.cells import Question
from experiments.sweep.folder import CellRecord, Folder
from sim.profile import dump_profile
from sim.run import simulate
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
    partial = folder.partial(job.key)
    try:
        record = _measured(job, partial)
    except Exception as error:  # noqa: BLE001 - whatever breaks one cell must not stop the others
        return CellRecord(key=job.key, error=f"{type(error).__name__}: {error}")
    else:
        if job.keep_trace:
            partial.rename(folder.emptied_run(job.key))
        folder.keep(record)
        return record
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _measured(job: Job, partial: Path) -> CellRecord:
    """Run the cell in the folder `partial`; what came out."""
    began = time.perf_counter()
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    profile = job.question.profile
    experiment = msgspec.structs.replace(job.question.experiment, profile=PROFILE)
    if job.keep_trace:
        (partial / RESOLVED).write_text(dump_experiment(experiment), encoding="utf-8")
        (partial / PROFILE).write_text(dump_profile(profile), encoding="utf-8")
    header = make_header(experiment, world="sim", profile=msgspec.to_builtins(profile))
    with TraceWriter(partial / TRACE, header) as recorder:
        simulate(experiment, profile, recorder)
    values = write_metrics(partial)
    names = [task.name for task in experiment.tasks]
    return CellRecord(
        key=job.key,
        metrics={name: value for name, value in values.items() if not name.startswith("tasks.")},
        rates={name: _rates(values, name) for name in names},
        wall_s=time.perf_counter() - began,
    )


def _rates(values: dict[str, float | None], task: str) -> tuple[float | None, float | None]:
    """A task's steps per hour from its submission on, and while it was served."""
    own, active = (values.get(f"tasks.{task}.steps_per_hour{suffix}") for suffix in ("", "_active"))
    return own, active
