"""`marlaas demo`: execute an experiment under two systems, predict one of them from the other, compare.

The profile is fitted from the `single` run alone, in which no two tasks ever meet; that the simulator then
foretells what all tasks do to one another is the point. Owns the order of things and the table at the end.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from experiments import run
from experiments.load import load_experiment
from experiments.preflight import require_executable
from experiments.words import figure, percent
from marlaas.errors import InputError
from traces.metrics import alone_rates, compute

QUICKSTART = Path(__file__).parent / "quickstart.yaml"
MARK = "demo.json"
"""What a folder holds that a demo made: the only kind that a demo replaces."""

ROWS = (
    "steps_per_hour",
    "steps_per_hour_normalised",
    "makespan_s",
    "ttfs_s.mean",
    "ttfs_s.max",
    "step_latency_s.mean",
    "step_latency_s.p95",
    "step_latency_s.generate",
    "step_latency_s.environment",
    "step_latency_s.buffer_wait",
    "step_latency_s.train",
    "rollout_busy",
    "train_busy",
    "busy",
    "tokens_per_s",
    "fairness_jain",
)

Values = dict[str, Any]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The gain in steps per hour of `marlaas` over `single`, measured and predicted, and R/T alone.

    `bound` is min(N, 1 + R/T): what N equal tasks can gain at most, and unequal ones on average.
    """

    measured_gain: float
    predicted_gain: float
    bound: float
    rollout_to_training_ratio: float
    rollout_to_training_ratio_by_task: dict[str, float]
    rows: dict[str, tuple[float | None, float | None, float | None]]


def run_demo(path: Path, settings: Sequence[str], out: Path, console: Console) -> bool:
    """Make the demo of an experiment file in `out`, replacing an older one; whether every task was done.

    Raises `InputError`.
    """
    single, marlaas = (load_experiment(path, settings, name) for name in ("single", "marlaas"))
    require_executable(marlaas)
    make_room(out)
    outcomes: list[str] = []
    for number, experiment in enumerate((single, marlaas), start=1):
        name = str(experiment.system)
        console.print(f"[{number}/4] executing {experiment.name} under {name}", markup=False)
        outcomes += run.execute(experiment, out / name, console).values()
    if set(outcomes) != {"done"}:
        console.print(f"not every task was done: nothing to compare; the traces are in {out}", markup=False)
        return False
    console.print("[3/4] fitting costs from the single run, predicting both systems from them", markup=False)
    profile = _fit(out / "single", out / "profile.yaml")
    for experiment, folder in ((single, "predicted-single"), (marlaas, "predicted")):
        quiet = Console(stderr=True, quiet=True)
        run.simulate(msgspec.structs.replace(experiment, profile=str(profile)), out / folder, quiet)
    result = _compare(out)
    (out / MARK).write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2))
    console.print("[4/4] drawing the report", markup=False)
    page = _report(out, f"MARLaaS: {marlaas.name}, measured and predicted")
    _print(result, page, Console(width=None if console.is_terminal else 120))
    return True


def make_room(out: Path) -> None:
    """Make `out` an empty folder with the mark of a demo; raises `InputError` if it holds anything else."""
    if out.is_dir() and any(out.iterdir()):
        if not (out / MARK).is_file():
            wanted = "name a folder that does not exist yet; only an older demo is replaced"
            raise InputError("--out", f"{out} is not empty", wanted)
        shutil.rmtree(out)
    run.require_fresh(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / MARK).write_text("{}\n", encoding="utf-8")


def _fit(measured: Path, profile: Path) -> Path:
    from sim.calibrate import calibrate
    from sim.profile_files import dump_profile

    fitted, _ = calibrate([measured])
    profile.write_text(dump_profile(fitted), encoding="utf-8")
    return profile.resolve()


def _compare(out: Path) -> Result:
    """Read every number from the traces of the four runs."""
    rates = {"measured": alone_rates(out / "single"), "predicted": alone_rates(out / "predicted-single")}
    single = compute(out / "single", rates["measured"])
    marlaas = compute(out / "marlaas", rates["measured"])
    predicted = compute(out / "predicted", rates["predicted"])
    predicted_single = compute(out / "predicted-single")
    ratio = single["rollout_to_training_ratio"]
    return Result(
        bound=min(len(rates["measured"]), 1 + ratio),
        measured_gain=marlaas["steps_per_hour"] / single["steps_per_hour"],
        predicted_gain=predicted["steps_per_hour"] / predicted_single["steps_per_hour"],
        rollout_to_training_ratio=ratio,
        rollout_to_training_ratio_by_task={
            task: single[f"tasks.{task}.rollout_to_training_ratio"] for task in rates["measured"]
        },
        rows={name: (single[name], marlaas[name], predicted[name]) for name in ROWS},
    )


def _report(out: Path, title: str) -> Path:
    from experiments.report.write import write_report

    folders = [out / name for name in ("single", "marlaas", "predicted")]
    return write_report(folders, out / "report", title)


def _print(result: Result, page: Path, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("metric")
    for name in ("measured single", "measured marlaas", "predicted marlaas", "error"):
        table.add_column(name, justify="right")
    for name, (single, marlaas, predicted) in result.rows.items():
        table.add_row(name, figure(single), figure(marlaas), figure(predicted), _error(marlaas, predicted))
    gains = (f"× {result.measured_gain:.2f}", f"× {result.predicted_gain:.2f}")
    table.add_section()
    table.add_row(
        "gain in steps per hour", "× 1", *gains, _error(result.measured_gain, result.predicted_gain)
    )
    by_task = ", ".join(
        f"{name} {ratio:.1f}" for name, ratio in result.rollout_to_training_ratio_by_task.items()
    )
    console.print(
        f"R/T, rollout and environment over training, measured alone:"
        f" {result.rollout_to_training_ratio:.1f} ({by_task})\n",
        highlight=False,
    )
    console.print(table)
    reached = percent(result.measured_gain / result.bound)
    console.print(f"\nbound of the gain, min(N, 1 + R/T): {result.bound:.2f}; measured: {reached} of it")
    console.print(f"\nreport: {page}", highlight=False, soft_wrap=True)


def _error(measured: float | None, predicted: float | None) -> str:
    """How far the prediction is from the measurement, relative to it."""
    return "–" if not measured or predicted is None else percent(predicted / measured - 1, "+")
