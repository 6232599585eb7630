"""Run folders: an experiment in, a folder with `experiment.yaml`, `trace.jsonl` and `metrics.json` out.

Owns the order that keeps mistakes harmless: everything the user typed is checked before anything is written.
Numbers come from the trace alone, after the run.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from experiments.compiled import is_preferred
from experiments.load import dump_experiment, load_profile, model_folder
from experiments.meanwhile import metrics_meanwhile, rare_collections
from experiments.preflight import require_executable
from experiments.progress import watch
from experiments.tensorboard import board
from marlaas.commands import Command
from marlaas.errors import InputError
from marlaas.events import Event
from marlaas.runtime import Observed, Observer, Recorder
from marlaas.spec import Experiment
from traces.metrics import compute
from traces.reader import TraceReader
from traces.schema import SLOWDOWN, Header, Scalar, make_header
from traces.writer import TraceWriter

TRACE, RESOLVED, METRICS, BOARD = "trace.jsonl", "experiment.yaml", "metrics.json", "tensorboard"
Outcomes = dict[str, str]


def simulate(experiment: Experiment, out: Path, console: Console) -> Outcomes:
    """Run in the simulated world into the fresh folder `out`; each task's outcome. Raises `InputError`."""
    from sim.profile import workload_of
    from sim.run import simulate as simulate_experiment

    require_fresh(out)
    profile = load_profile(experiment)
    for task in experiment.tasks:
        workload_of(task, profile)
    header = make_header(experiment, world="sim", profile=msgspec.to_builtins(profile))

    def work(recorder: Recorder, observer: Observer) -> Outcomes:
        return simulate_experiment(experiment, profile, Observed(recorder, observer))

    if _is_long(experiment) and not is_preferred():
        console.print("in plain Python; `marlaas compile` makes this nearly twice as fast", style="dim")
    with rare_collections():
        return _run(experiment, out, header, work, console)


def execute(experiment: Experiment, out: Path, console: Console) -> Outcomes:
    """Run in the real world into the fresh folder `out`; each task's outcome. Raises `InputError`."""
    require_fresh(out)
    require_executable(experiment)

    from executor.driver import execute as execute_experiment

    host: dict[str, Scalar] = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    slowdown = _probe_slowdown(experiment)
    if slowdown is not None:
        host[SLOWDOWN] = round(slowdown, 3)
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    header = make_header(experiment, world="executor", host=host, created_at=now)
    located = with_model_folder(experiment)

    def work(recorder: Recorder, observer: Observer) -> Outcomes:
        with board(out / BOARD) as scalars:

            def observe(event: Event, commands: tuple[Command, ...]) -> None:
                observer(event, commands)
                scalars(event, commands)

            return execute_experiment(located, out, recorder, observe)

    return _run(experiment, out, header, work, console)


def _probe_slowdown(experiment: Experiment) -> float | None:
    """What a busy replica and a busy lane will cost each other here; None where they share no machine."""
    from executor.affinity import split_cores, usable_cores
    from executor.contention import slowdown_per_busy_worker

    cluster, replicas, lanes = experiment.cluster, experiment.replica_names, experiment.lane_names
    if cluster.placement != "local":
        return None
    plan = split_cores(replicas, lanes, usable_cores())
    ours, theirs = plan[replicas[0]], plan[lanes[0]]
    if {cluster.replicas.device, cluster.lanes.device} != {"cpu"} or set(ours) & set(theirs):
        return None
    return slowdown_per_busy_worker(ours, theirs)


def evaluate(experiment: Experiment, out: Path) -> dict[str, Any]:
    """Solve held-out problems with the first and last version of each task; writes `evaluation.json`."""
    require_executable(experiment)

    from executor.evaluate import evaluate as evaluate_run

    return dict(evaluate_run(with_model_folder(experiment), out))


def with_model_folder(experiment: Experiment) -> Experiment:
    """The experiment with a model path that leads to the folder from anywhere."""
    model = msgspec.structs.replace(experiment.model, path=str(model_folder(experiment)))
    return msgspec.structs.replace(experiment, model=model)


def require_fresh(out: Path, option: str = "--out") -> None:
    """Refuse a folder that holds something already, or a path that cannot become a folder."""
    if out.is_dir() and any(out.iterdir()):
        raise InputError(option, f"{out} is not empty", "name a folder that does not exist yet, or empty it")
    if out.exists() and not out.is_dir():
        raise InputError(option, f"{out} is a file", "name a folder that does not exist yet")
    above = next(parent for parent in [out.absolute(), *out.absolute().parents] if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise InputError(option, f"{out} cannot be made in {above}", "name a folder that can be written to")


def _run(
    experiment: Experiment,
    out: Path,
    header: Header,
    work: Callable[[Recorder, Observer], Outcomes],
    console: Console,
) -> Outcomes:
    out.mkdir(parents=True, exist_ok=True)
    (out / RESOLVED).write_text(dump_experiment(experiment), encoding="utf-8")
    recorder = TraceWriter(out / TRACE, header)
    is_simulated = header.world == "sim"
    if is_simulated and _is_long(experiment):
        with metrics_meanwhile(out), recorder, watch(experiment, console, is_simulated=True) as watcher:
            return work(recorder, watcher)
    with recorder, watch(experiment, console, is_simulated=is_simulated) as watcher:
        outcomes = work(recorder, watcher)
    write_metrics(out)
    return outcomes


def _is_long(experiment: Experiment) -> bool:
    """Whether a second process for the metrics will save more than its own start costs."""
    num_turns = sum(task.steps * task.num_trajectories * task.max_turns for task in experiment.tasks)
    return num_turns > 50_000 and (os.cpu_count() or 1) > 1


def write_metrics(out: Path, trace: TraceReader | None = None) -> dict[str, Any]:
    """Compute a run's metrics from its trace, write them beside it and return them."""
    metrics = compute(trace or out)
    text = msgspec.json.format(msgspec.json.encode(metrics), indent=2)
    (out / METRICS).write_bytes(text + b"\n")
    return metrics
