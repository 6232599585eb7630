"""What commands print: tables on the standard output, JSON where it is asked for.

Owns wording and layout; every number comes from a trace through `traces`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.doctor import Diagnosis
from experiments.words import figure, percent
from traces.compare import Row


def print_outcome(out: Path, outcomes: dict[str, str], metrics: dict[str, Any], console: Console) -> None:
    """How a run ended: its tasks, its pace, where it lies."""
    table = Table(box=None, pad_edge=False)
    table.add_column("task")
    table.add_column("outcome")
    for name in ("steps", "steps/hour", "R/T", "reward, first 5", "last 5"):
        table.add_column(name, justify="right")
    columns = ("steps", "steps_per_hour", "rollout_to_training_ratio", "reward_first5", "reward_last5")
    for task, outcome in outcomes.items():
        table.add_row(task, outcome, *(figure(metrics.get(f"tasks.{task}.{column}")) for column in columns))
    console.print(table)
    console.print(
        f"{figure(metrics['steps'])} steps in {figure(metrics['makespan_s'])} s,"
        f" {figure(metrics['steps_per_hour'])} steps per hour,"
        f" devices busy {percent(metrics['busy'])}: {out}",
        highlight=False,
        soft_wrap=True,
    )


def print_comparison(labels: Sequence[str], rows: Sequence[Row], console: Console) -> None:
    """Two runs metric by metric, with the second's difference from the first."""
    table = Table(box=None, pad_edge=False)
    table.add_column("metric")
    for label in labels:
        table.add_column(label, justify="right")
    table.add_column("difference", justify="right")
    for row in rows:
        table.add_row(row.metric, figure(row.a), figure(row.b), percent(row.relative_error, "+"))
    console.print(table)


def print_json(value: Any) -> None:
    """Plain JSON, readable by people and programs."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_evaluation(scores: dict[str, dict[str, float | int]], console: Console) -> None:
    """Held-out reward of each task before and after training."""
    table = Table(box=None, pad_edge=False)
    table.add_column("task")
    for name in ("held-out problems", "reward before", "after", "gain"):
        table.add_column(name, justify="right")
    for task, score in scores.items():
        before, after = float(score["before"]), float(score["after"])
        table.add_row(
            task, figure(score["prompts"]), f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"
        )
    console.print(table)


def print_diagnosis(found: Diagnosis, console: Console) -> None:
    """The machine, the packages, and what can run."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in found.machine.items():
        table.add_row(name, value)
    for package, version in found.packages.items():
        table.add_row(package, version or "not installed")
    console.print(table)
    console.print()
    table = Table(box=None, pad_edge=False)
    table.add_column("what")
    table.add_column("here")
    table.add_column("why")
    for ability in found.abilities:
        # An extra is written in brackets, which would be taken for a style.
        table.add_row(ability.what, "yes" if ability.can else "no", escape(ability.why))
    console.print(table)
