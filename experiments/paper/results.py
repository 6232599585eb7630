"""What the sweeps of the study left, as pandas tables and, for the headline, as run folders.

Owns reading and joining; decides nothing. Columns are those of the sweeps' results: axis names, `seed`,
metrics, `cell`, `error`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.paper.bounds import Alone
from experiments.run import METRICS
from experiments.sweep.axes import NUM_TASKS
from experiments.sweep.folder import RESULTS, Folder

SINGLE, SYNC, MARLAAS = "single", "sync", "marlaas"
SYNC_SINGLE_LORA, ASYNC_SINGLE_LORA = "sync-single-lora", "async-single-lora"
SYSTEMS = (SINGLE, SYNC_SINGLE_LORA, ASYNC_SINGLE_LORA, SYNC, MARLAAS)

Rates = Mapping[str, tuple[float | None, float | None]]


@dataclass(frozen=True)
class Results:
    """The tables of every study under `out`."""

    out: Path
    scaling: pd.DataFrame
    sustained: pd.DataFrame
    ratio: pd.DataFrame
    sensitivity: pd.DataFrame
    split: pd.DataFrame
    loads: pd.DataFrame
    memory: pd.DataFrame

    @cached_property
    def models(self) -> list[str]:
        """The models, smallest first, as written."""
        return list(dict.fromkeys(self.scaling["model"]))

    @cached_property
    def num_tasks(self) -> list[int]:
        """The numbers of tasks, ascending."""
        return sorted(int(num) for num in self.scaling[NUM_TASKS].unique())

    @cached_property
    def largest(self) -> int:
        """The number of tasks of the headline."""
        return self.num_tasks[-1]

    @cached_property
    def by_cell(self) -> pd.DataFrame:
        """The scaling study's metrics, mean over seeds, by (model, num_tasks, system)."""
        numbers = self.scaling.select_dtypes("number").columns.difference(["seed", NUM_TASKS])
        return self.scaling.groupby(["model", NUM_TASKS, "system"])[list(numbers)].mean()

    @cached_property
    def _cells(self) -> dict[tuple[str, int, str], dict[str, float]]:
        table = self.by_cell.reset_index()
        rows: list[dict[Any, Any]] = table.to_dict("records")
        keys = ("model", NUM_TASKS, "system")
        return {
            (str(row["model"]), int(row[NUM_TASKS]), str(row["system"])): {
                name: float(value) for name, value in row.items() if name not in keys
            }
            for row in rows
        }

    def at(self, model: str, num_tasks: int, system: str) -> dict[str, float]:
        """The metrics of one configuration of the scaling study, mean over seeds."""
        return self._cells[model, num_tasks, system]

    def gain(self, model: str, num_tasks: int, system: str, baseline: str) -> float:
        """How many times the steps per hour of another system; the inverse ratio of makespans."""
        ours, theirs = (self.at(model, num_tasks, name) for name in (system, baseline))
        return ours["steps_per_hour"] / theirs["steps_per_hour"]

    def gain_range(self, model: str, num_tasks: int, system: str, baseline: str) -> tuple[float, float]:
        """The lowest and the highest gain over the seeds, each paired with itself."""
        rows = self.scaling[(self.scaling["model"] == model) & (self.scaling[NUM_TASKS] == num_tasks)]
        table = rows.pivot(index="seed", columns="system", values="steps_per_hour")
        ratios = table[system] / table[baseline]
        return float(ratios.min()), float(ratios.max())

    def run_folder(self, study: str, **where: Any) -> Path:
        """The run folder of a cell's first seed, relative to `out`; there where traces are kept."""
        table: pd.DataFrame = getattr(self, study)
        for column, value in where.items():
            table = table[table[column] == value]
        cell = str(table.sort_values("seed").iloc[0]["cell"])
        return Folder(Path(study)).run(cell)

    def metrics(self, folder: Path) -> dict[str, Any]:
        """The metrics of a kept run, those of tasks included."""
        loaded: dict[str, Any] = json.loads((self.out / folder / METRICS).read_text(encoding="utf-8"))
        return loaded

    def headline_folder(self, model: str, system: str) -> Path:
        """The run folder of a system with the most tasks."""
        return self.run_folder("scaling", model=model, num_tasks=self.largest, system=system)

    def alone(self, model: str) -> dict[str, Alone]:
        """Every task of the headline alone: from the run of `single`, where tasks follow one another."""
        values = self.metrics(self.headline_folder(model, SINGLE))
        return {name: _alone(values, name) for name in task_names(values)}

    def rates(self, study: str, cell: str) -> Rates:
        """Each task's steps per hour in a cell: from its submission on, and while it was served."""
        record = Folder(self.out / study).finished(*self._key(study, cell), with_trace=False)
        assert record is not None, "a row with metrics has its cell"
        return record.rates

    def _key(self, study: str, cell: str) -> tuple[str]:
        path = self.out / study / "cells" / f"{cell}.json"
        return (str(json.loads(path.read_text(encoding="utf-8"))["key"]),)

    def cell_rates(self, model: str, num_tasks: int, system: str) -> list[Rates]:
        """The tasks' rates in a configuration of the scaling study, seed by seed."""
        table = self.scaling
        wanted = (table["model"] == model) & (table[NUM_TASKS] == num_tasks) & (table["system"] == system)
        return [self.rates("scaling", str(cell)) for cell in table[wanted].sort_values("seed")["cell"]]

    def latency_ratio(self, model: str, num_tasks: int) -> float:
        """Step latency under `marlaas` over that alone: the mean over tasks and seeds of the ratio."""
        ratios = []
        pairs = zip(
            self.cell_rates(model, num_tasks, MARLAAS), self.cell_rates(model, num_tasks, SINGLE), strict=True
        )
        for ours, alone in pairs:
            for name, (_, rate) in ours.items():
                rate_alone = alone[name][1]
                if rate and rate_alone:
                    ratios.append(rate_alone / rate)
        return sum(ratios) / len(ratios)

    @cached_property
    def service(self) -> dict[tuple[str, str], dict[str, float]]:
        """The sustained study by (model, system): what a service under way commits.

        A task's rate is the inverse of its mean step latency from its submission on, 0 without a commit.
        `aggregate` is the sum of the rates in steps per hour, `normalised` the mean of rate over rate alone.
        """
        found = {}
        rows: list[dict[Any, Any]] = self.sustained.to_dict("records")
        for row in rows:
            model, system = str(row["model"]), str(row["system"])
            values = self.metrics(self.run_folder("sustained", model=model, system=system))
            alone = self.alone(model)
            rates = {name: _service_rate(values, name) for name in task_names(values)}
            shares = [rate * alone[name].step_s / 3600 for name, rate in rates.items() if name in alone]
            kept = {
                name: float(row[name])
                for name in ("effective", "busy", "rollout_busy", "train_busy", "steps")
            }
            totals = {"aggregate": sum(rates.values()), "normalised": sum(shares) / len(shares)}
            found[model, system] = {**totals, **kept, **_by_workload(rates)}
        return found


def read_results(out: Path) -> Results:
    """Read the finished sweeps under `out`."""

    def table(study: str) -> pd.DataFrame:
        frame = pd.read_csv(out / study / RESULTS, dtype={"cell": str})
        return frame[frame["error"].isna()].reset_index(drop=True)

    names = ("scaling", "sustained", "ratio", "sensitivity", "split", "loads", "memory")
    return Results(out, *(table(name) for name in names))


def task_names(values: Mapping[str, Any]) -> list[str]:
    """The tasks that a run's metrics tell of."""
    return [key.split(".")[1] for key in values if key.startswith("tasks.") and key.endswith(".outcome")]


def workload_of(task: str) -> str:
    """The workload of a task, which is the first part of its name: gsm8k, amc12 or search."""
    return task.partition("-")[0]


def _service_rate(values: Mapping[str, Any], name: str) -> float:
    latency_s = values[f"tasks.{name}.step_latency_s.mean"]
    return 3600 / latency_s if latency_s else 0.0


def _by_workload(rates: Mapping[str, float]) -> dict[str, float]:
    """The mean rate of the tasks of each workload."""
    groups: dict[str, list[float]] = {}
    for name, rate in rates.items():
        groups.setdefault(workload_of(name), []).append(rate)
    return {workload: sum(group) / len(group) for workload, group in groups.items()}


def _alone(values: Mapping[str, Any], name: str) -> Alone:
    """R + T is the inverse of the rate while served; T is what the step spent in training and publishing."""
    step_s = 3600 / values[f"tasks.{name}.steps_per_hour_active"]
    causes = (values[f"tasks.{name}.step_latency_s.{cause}"] for cause in ("train", "publish"))
    training_s = sum(causes)
    return Alone(step_s - training_s, training_s)
