"""All cells of a study: those not finished yet simulated in processes that stay warm, then the tables.

    study ──► cells ──► finished before? ──► worker processes ──► one file a cell ──► tables, figures

Owns the processes and what happens when one dies or the user has had enough. Rows are put in the cells'
order and hold nothing of how they were made, so the tables do not depend on the number of processes.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from experiments.sweep.cells import Base, expand
from experiments.sweep.folder import CellRecord, Folder, code_fingerprint
from experiments.sweep.study import Study, require_metrics
from experiments.sweep.tables import write_tables
from experiments.sweep.work import Job, work
from marlaas.spec import Experiment
from traces.metrics import compute
from traces.reader import Trace
from traces.schema import make_header

Done = Callable[[CellRecord], None]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """How a sweep went: rows of the results, different questions among them, and how those were answered."""

    num_rows: int
    num_reused: int
    num_simulated: int
    num_failed: int
    files: tuple[Path, ...]


def sweep(study: Study, out: Path, console: Console, num_processes: int | None = None) -> Summary:
    """Run a study into the folder `out`, reusing what is finished there; raises `InputError`.

    Everything is checked before anything is written. An interrupt leaves the finished cells.
    """
    base = Base(study)
    require_metrics(study, known_metrics(base.experiment))
    cells = expand(study, base, code_fingerprint())
    folder = Folder(out)
    with folder.owned(study.name, study.text, base.experiment):
        jobs = {
            cell.key: Job(cell.key, cell.question, out, study.keep_traces) for cell in cells if cell.question
        }
        records = {
            key: record
            for key in jobs
            if (record := folder.finished(key, with_trace=study.keep_traces)) is not None
        }
        pending = [job for key, job in jobs.items() if key not in records]
        num_reused = len(records)
        with _watched(study.name, num_reused, len(jobs), console) as note:

            def done(record: CellRecord) -> None:
                records[record.key] = record
                note(record)

            simulate_all(pending, num_processes or num_cores(), done)
        files = write_tables(study, cells, records, out)
    failed = [cell for cell in cells if cell.error or records[cell.key].error]
    return Summary(
        num_rows=len(cells),
        num_reused=num_reused,
        num_simulated=len(pending),
        num_failed=len(failed),
        files=tuple(files),
    )


def known_metrics(experiment: Experiment) -> list[str]:
    """The names of all metrics of a whole run, as a run in which nothing happened has them."""
    nothing = Trace(header=make_header(experiment, world="sim"), records=[])
    return [name for name in compute(nothing) if not name.startswith("tasks.")]


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def simulate_all(jobs: Iterable[Job], num_processes: int, done: Done) -> None:
    """Simulate jobs in so many processes, in this one if it is to be one; `done` is told each result.

    A job whose process dies under it, twice and the second time alone, has that as its result.
    """
    pending = deque(jobs)
    num = min(num_processes, len(pending))
    if num <= 1:
        for job in pending:
            done(work(job))
        return
    while pending:
        in_flight: dict[Future[CellRecord], Job] = {}
        try:
            with _pool(num) as pool:
                _drain(pool, pending, in_flight, 2 * num, done)
        except BrokenProcessPool:
            for job in in_flight.values():
                done(_alone(job))


def _drain(
    pool: ProcessPoolExecutor,
    pending: deque[Job],
    in_flight: dict[Future[CellRecord], Job],
    window: int,
    done: Done,
) -> None:
    """Keep `window` jobs in flight until all are done; what a broken pool leaves stays in `in_flight`."""
    while pending or in_flight:
        while pending and len(in_flight) < window:
            future = pool.submit(work, pending[0])
            in_flight[future] = pending.popleft()
        for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
            record = future.result()
            del in_flight[future]
            done(record)


def _alone(job: Job) -> CellRecord:
    """A job that was in flight when a process died, in a process of its own."""
    try:
        with _pool(1) as pool:
            return pool.submit(work, job).result()
    except BrokenProcessPool:
        return CellRecord(key=job.key, error="the process died; it may have run out of memory")


@contextmanager
def _pool(num: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes that start afresh, so that no thread or lock of this process is copied into them.

    Leaving by an error, an interrupt above all, ends them at once in the middle of their cells.
    """
    others = set(mp.active_children())
    pool = ProcessPoolExecutor(num, mp.get_context("spawn"), initializer=_begin_work)
    try:
        yield pool
    except BaseException:
        for process in set(mp.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_work() -> None:
    """Set up a worker process: an interrupt is the parent's business, and so is the parent's end ours."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Without this a worker would wait for ever for a parent that was killed."""
    parent = mp.parent_process()
    assert parent is not None
    wait_for([parent.sentinel])
    os._exit(1)


@contextmanager
def _watched(name: str, num_reused: int, num_all: int, console: Console) -> Iterator[Done]:
    """A bar with the time that is left, where the console is a terminal; nothing otherwise."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(name, total=num_all, completed=num_reused, note="")
        num_failed = 0

        def note(record: CellRecord) -> None:
            nonlocal num_failed
            num_failed += record.error is not None
            progress.update(bar, advance=1, note=f"{num_failed} failed" if num_failed else "")

        yield note
