"""Sweeps: axes spread out, mistakes refused, cells kept, tables right, whatever the number of processes."""

import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments import cli
from experiments.load import load_experiment
from experiments.run import simulate
from experiments.sweep import run as sweep_run
from experiments.sweep import work as sweep_work
from experiments.sweep.axes import Axis, read_axis
from experiments.sweep.cells import Base, Cell, expand
from experiments.sweep.folder import Folder
from experiments.sweep.statistics import estimate, paired_difference, paired_ratio
from experiments.sweep.study import load_study
from marlaas.errors import InputError, InvariantViolation
from traces.metrics import alone_rates, compute
from traces.replay import replay

ROOT = Path(__file__).parents[2]
STUDIES = sorted((ROOT / "experiments" / "studies").glob("*.yaml"))
QUIET = Console(quiet=True)

STUDY = """\
name: little
base: small.yaml
set: {profile: profile.yaml}
axes:
  cluster.replicas.slots: [1, 2]
systems: [single, marlaas]
replications: 3
"""

CONTRADICTING = STUDY.replace("replications: 3", "replications: 1").replace(
    "  cluster.replicas.slots: [1, 2]",
    "  cluster.replicas.kv_tokens: [200, 999]\n  tasks.0.max_new_tokens: [9, 150]",
)

Rows = list[dict[str, str]]


@pytest.fixture
def study(small: Path, profile: str) -> Path:
    """A study of the small experiment: 2 slots × 2 systems × 3 seeds."""
    (small.parent / "profile.yaml").write_text(profile)
    path = small.parent / "study.yaml"
    path.write_text(STUDY)
    return path


def cells_of(path: Path) -> list[Cell]:
    """The cells of a study, nothing simulated."""
    study = load_study(path)
    return expand(study, Base(study), "code")


def sweep(path: Path, out: str = "out", num_processes: int = 1) -> sweep_run.Summary:
    """Run a study into a folder beside it."""
    return sweep_run.sweep(load_study(path), path.parent / out, QUIET, num_processes)


def table(path: Path) -> Rows:
    """A CSV file's rows."""
    with open(path) as file:
        return list(csv.DictReader(file))


def tables(folder: Path) -> dict[str, bytes]:
    """Every table of a sweep."""
    names = ("results.csv", "results.parquet", "summary.csv", "comparison.csv")
    return {name: (folder / name).read_bytes() for name in names}


# --- axes --------------------------------------------------------------------------------------------


def axis(raw: Any) -> Axis:
    """An axis from plain data."""
    return read_axis("tasks.0.steps", raw, ("axes", "tasks.0.steps"), str)


@pytest.mark.parametrize(
    ("raw", "labels"),
    [
        ([3, 1, 2], [3, 1, 2]),
        (["a", True, 0.5], ["a", True, 0.5]),
        ([{"kind": "fixed", "value": 1}, None], ['{"kind":"fixed","value":1}', "null"]),
        ({"from": 1, "to": 10, "step": 3}, [1, 4, 7, 10]),
        ({"from": 1, "to": 9, "step": 3}, [1, 4, 7]),
        ({"from": 0.1, "to": 0.5, "step": 0.1}, [0.1, 0.2, 0.3, 0.4, 0.5]),
        ({"from": 0.0, "to": 1.0, "num": 5}, [0.0, 0.25, 0.5, 0.75, 1.0]),
        ({"from": 1, "to": 64, "num": 7, "scale": "log"}, [1, 2, 4, 8, 16, 32, 64]),
        ({"from": 1, "to": 4, "num": 7, "scale": "log"}, [1, 2, 3, 4]),
        ({"from": 0.01, "to": 1.0, "num": 3, "scale": "log"}, [0.01, 0.1, 1.0]),
    ],
)
def test_lists_and_ranges_become_values(raw: Any, labels: list[Any]) -> None:
    """Ends are included, whole ends give whole numbers once each, the noise of floating point is gone."""
    found = axis(raw)
    assert found.labels == labels
    assert [type(label) for label in found.labels] == [type(label) for label in labels]


def test_cells_are_every_combination_and_seed(study: Path) -> None:
    """Axes in the order written, systems after them, seeds fastest; the seeds are those of every other."""
    cells = cells_of(study)
    assert [(*cell.columns.values(), cell.seed) for cell in cells] == [
        (slots, system, seed) for slots in (1, 2) for system in ("single", "marlaas") for seed in (0, 1, 2)
    ]
    for cell in cells:
        assert cell.question is not None
        experiment = cell.question.experiment
        assert experiment.cluster.replicas.slots == cell.columns["cluster.replicas.slots"]
        assert (experiment.system, experiment.seed) == (cell.columns["system"], cell.seed)
    assert len({cell.key for cell in cells}) == len(cells)


def test_a_star_sets_a_key_of_every_item(study: Path) -> None:
    """Every task and every environment, also through several levels; a later setting wins over an earlier."""
    study.write_text(
        "name: stars\nbase: small.yaml\n"
        "set: {profile: profile.yaml, tasks.*.steps: 5, 'tasks[1].steps': 6, environments.*.concurrency: 7}\n"
        "axes: {tasks.*.training.lr: [0.5]}\n"
    )
    (cell,) = cells_of(study)
    assert cell.question is not None
    experiment = cell.question.experiment
    assert [task.steps for task in experiment.tasks] == [5, 5, 6]
    assert {task.training.lr for task in experiment.tasks} == {0.5}
    assert {one.concurrency for one in experiment.environments.values()} == {7}


def test_num_tasks_keeps_the_first_of_the_counted_tasks(study: Path) -> None:
    """`count: 2` is two tasks; what was to be done to a task that is left out is left out too."""
    operations = "[{do: pause, at_s: 1, task: finder}, {do: kill, at_s: 1, worker: lane-0}]"
    study.write_text(
        f"name: fewer\nbase: small.yaml\nset: {{profile: profile.yaml, operations: {operations}}}\n"
        "axes: {num_tasks: {from: 1, to: 3, step: 1}}\n"
    )
    found = [cell.question.experiment for cell in cells_of(study) if cell.question]
    names = ["adder-0", "adder-1", "finder"]
    assert [[task.name for task in one.tasks] for one in found] == [names[:1], names[:2], names]
    assert [len(one.operations) for one in found] == [1, 1, 2]


def test_a_named_axis_sets_keys_together_and_a_profile_can_be_varied(study: Path) -> None:
    """A point has a label and sets keys of the experiment and, behind `profile.`, of its profile."""
    study.write_text(
        "name: points\nbase: small.yaml\nset: {profile: profile.yaml}\naxes:\n  load:\n"
        "    - {label: light, set: {num_tasks: 1, profile.lane.step_s.value: 0.1, system: sync}}\n"
        "    - {label: heavy, set: {tasks.*.steps: 4, system.batching: single-lora}}\n"
    )
    light, heavy = cells_of(study)
    assert (light.columns, heavy.columns) == ({"load": "light"}, {"load": "heavy"})
    assert light.question is not None
    assert heavy.question is not None
    assert len(light.question.experiment.tasks) == 1
    assert light.question.experiment.system == "sync"
    assert heavy.question.experiment.system.batching == "single-lora"  # type: ignore[union-attr]
    assert [task.steps for task in heavy.question.experiment.tasks] == [4, 4, 4]
    costs = [one.question.profile.lane.step_s.value for one in (light, heavy) if one.question]
    assert costs == [0.1, 0.2]


@pytest.mark.parametrize("path", STUDIES, ids=[path.stem for path in STUDIES])
def test_every_study_of_the_repository_expands_and_simulates(path: Path, tmp_path: Path) -> None:
    """No shipped study is broken: every cell asks something, and the first finds an answer."""
    cells = cells_of(path)
    assert all(cell.error is None for cell in cells)
    first = cells[0]
    assert first.question is not None
    (tmp_path / "partial").mkdir()
    (tmp_path / "cells").mkdir()
    assert sweep_work.work(sweep_work.Job(first.key, first.question, tmp_path, False)).error is None


# --- mistakes ----------------------------------------------------------------------------------------

BAD = {
    "unknown key path": (
        "[1, 2]",
        "[1, 2]\n  tasks.0.stpes: [3]",
        ["axes.tasks.0.stpes", "did you mean ste"],
    ),
    "bad value": (
        "[1, 2]",
        "[1, 0]",
        ["study.yaml:5: axes.cluster.replicas.slots[1]", "got 0; wanted a whol"],
    ),
    "empty axis": ("[1, 2]", "[]", ["axes.cluster.replicas.slots: an empty axis", "at least one value"]),
    "no axis": ("[1, 2]", "3", ["axes.cluster.replicas.slots: got 3", "wanted a list"]),
    "given twice": ("[1, 2]", "[1, 2, 1]", ["slots[2]: 1 is given twice"]),
    "no end": ("[1, 2]", "{from: 1, num: 3}", ["slots.to: the key is missing"]),
    "no number": ("[1, 2]", "{from: 1, to: 3}", ["neither step nor num"]),
    "downwards": ("[1, 2]", "{from: 3, to: 1, step: 1}", ["slots.to: 1 is not above from"]),
    "log from 0": ("[1, 2]", "{from: 0, to: 3, num: 3, scale: log}", ["slots.from: got 0 on a log scale"]),
    "range key": ("[1, 2]", "{form: 1, to: 3, num: 3}", ["slots.form: unknown key", "did you mean from"]),
    "point key": ("[1, 2]", "[{lable: a, set: {seed: 3}}]", ["slots[0].lable: unknown key", "label"]),
    "point of nothing": ("[1, 2]", "[{label: a, set: {}}]", ["slots[0].set: got {}"]),
    "seeds on an axis": ("axes:", "axes:\n  seed: [1, 2]", ["axes.seed[0]: seeds are not", "replications"]),
    "star of nothing": ("axes:", "axes:\n  limits.*.x: [1]", ["limits.*.x matches nothing"]),
    "unknown system": ("marlaas]", "marlas]", ["study.yaml:6: systems[1]: unknown system", "marlaas?"]),
    "systems twice": ("axes:", "axes:\n  system: [sync]", ["systems are given twice"]),
    "too many tasks": ("axes:", "axes:\n  num_tasks: [3, 4]", ["num_tasks[1]: got 4", "from 1 to 3"]),
    "taken name": ("axes:", "axes:\n  metric: [1]", ["an axis cannot be named 'metric'"]),
    "unknown study key": ("axes:", "axs:", ["study.yaml:4: axs: unknown key", "did you mean axes?"]),
    "unknown metric": (
        "axes:",
        "metrics: [busi]\naxes:",
        ["metrics[0]: unknown metric", "did you mean busy?"],
    ),
    "a task's metric": ("axes:", "metrics: [tasks.a.steps]\naxes:", ["is of one task", "keep_traces"]),
    "baseline not on axis": (
        "axes:",
        "baseline: sync\naxes:",
        ["'sync' is not on the axis system", "single"],
    ),
    "compare no axis": ("axes:", "compare: slots\naxes:", ["no axis 'slots'", "cluster.replicas.slots"]),
    "plot no axis": (
        "axes:",
        "plot: {x: sytem}\naxes:",
        ["plot.x: there is no axis", "did you mean system?"],
    ),
    "plot no metric": (
        "axes:",
        "plot: {x: system, metrics: [kv]}\naxes:",
        ["plot.metrics[0]: 'kv' is not kep"],
    ),
    "no base": ("small.yaml", "smal.yaml", ["smal.yaml: no such file", "did you mean small.yaml?"]),
    "fixed key": ("set: {", "set: {seeed: 3, ", ["study.yaml:3: set.seeed: seeed: unknown key", "seed?"]),
    "profile key": (
        "set: {",
        "set: {profile.lan.x: 3, ",
        ["study.yaml:3: set.profile.lan.x: lan: unknown key", "lane"],
    ),
    "key on the way": (
        "set: {",
        "set: {tasks.0.trainig.lr: 3, ",
        ["yaml:3: set.tasks.0.trainig.lr: tasks[0].t"],
    ),
    "no profile": ("profile: profile.yaml", "profile: null", ["needs a profile of costs"]),
    "two profiles": ("axes:", "profile: {name: x}\naxes:", ["profile: a profile is written out here and"]),
    "own profile": (
        "set: {profile: profile.yaml}",
        "profile: {name: x}",
        ["study.yaml:3: profile.replica: the"],
    ),
    "never fits": ("slots: [1, 2]", "kv_tokens: [9, 99999]", ["tasks[0]", "never fits a replica"]),
}


@pytest.mark.parametrize(("old", "new", "parts"), BAD.values(), ids=BAD.keys())
def test_a_mistake_in_a_study_is_one_message_and_nothing_is_written(
    study: Path, old: str, new: str, parts: list[str]
) -> None:
    """The message names the place in the study, what was wanted and the nearest name."""
    assert old in STUDY
    study.write_text(STUDY.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        sweep(study)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert "\n" not in message
    assert not (study.parent / "out").exists()


def test_a_combination_that_contradicts_itself_is_a_row_with_its_error(study: Path) -> None:
    """Each value is accepted by some combination, so the user made no mistake: the others go on."""
    study.write_text(CONTRADICTING)
    done = sweep(study)
    assert (done.num_rows, done.num_failed) == (8, 2)
    errors = [row for row in table(study.parent / "out" / "results.csv") if row["error"]]
    assert {(row["cluster.replicas.kv_tokens"], row["tasks.0.max_new_tokens"]) for row in errors} == {
        ("200", "150")
    }
    assert all("never fits a replica" in row["error"] and row["makespan_s"] == "" for row in errors)


# --- results -----------------------------------------------------------------------------------------


def test_the_results_do_not_depend_on_the_number_of_processes(study: Path) -> None:
    """One process or two: the same bytes in every table, and what is in them is what simulate says."""
    one, two = sweep(study, "one", 1), sweep(study, "two", 2)
    assert (one.num_simulated, one.num_failed) == (two.num_simulated, two.num_failed) == (12, 0)
    assert tables(study.parent / "one") == tables(study.parent / "two")
    assert list((study.parent / "one" / "partial").glob("*")) == []

    row = table(study.parent / "one" / "results.csv")[4]
    settings = ["profile=profile.yaml", "cluster.replicas.slots=1", "seed=1"]
    experiment = load_experiment(study.parent / "small.yaml", settings, "marlaas")
    simulate(experiment, study.parent / "alone", QUIET)
    metrics = json.loads((study.parent / "alone" / "metrics.json").read_text())
    assert (row["cluster.replicas.slots"], row["system"], row["seed"]) == ("1", "marlaas", "1")
    for name in ("makespan_s", "steps", "busy", "ttfs_s.mean", "kv_peak"):
        assert float(row[name]) == metrics[name]


def test_csv_and_parquet_hold_the_same_with_types(study: Path) -> None:
    """Numbers are numbers of one kind per column, words are words, what is not known is null."""
    from pyarrow import parquet

    study.write_text(STUDY.replace("axes:", "metrics: [steps, makespan_s, preemptions, dropped.x]\naxes:"))
    sweep(study)
    found = parquet.read_table(study.parent / "out" / "results.parquet")
    kinds = {field.name: str(field.type) for field in found.schema}
    assert kinds == {
        "cluster.replicas.slots": "int64",
        "system": "string",
        "seed": "int64",
        "steps": "int64",
        "makespan_s": "double",
        "preemptions": "double",
        "dropped.x": "int64",
        "cell": "string",
        "error": "string",
    }
    for row, text in zip(found.to_pylist(), table(study.parent / "out" / "results.csv"), strict=True):
        assert float(text["makespan_s"]) == row["makespan_s"]
        assert (text["preemptions"], row["preemptions"]) == ("", None)
        assert row["dropped.x"] == 0


def test_normalised_pace_is_taken_from_the_single_run_of_the_same_seed(study: Path) -> None:
    """The same number as the metrics give when they are told each task's rate alone."""
    study.write_text(STUDY.replace("replications: 3", "replications: 1\nkeep_traces: true"))
    sweep(study)
    single, marlaas = table(study.parent / "out" / "results.csv")[:2]
    alone = alone_rates(study.parent / "out" / "runs" / single["cell"])
    values = compute(study.parent / "out" / "runs" / marlaas["cell"], alone)
    assert float(marlaas["steps_per_hour_normalised"]) == values["steps_per_hour_normalised"]


def test_kept_traces_are_run_folders_on_their_own(study: Path) -> None:
    """They replay, and their experiment simulates again to the same metrics; a cell without is run again."""
    sweep(study)
    assert not (study.parent / "out" / "runs").exists()
    study.write_text(STUDY + "keep_traces: true\n")
    assert sweep(study).num_reused == 0
    assert sweep(study).num_reused == 12
    run = study.parent / "out" / "runs" / table(study.parent / "out" / "results.csv")[-1]["cell"]
    assert replay(run).ok
    simulate(load_experiment(run / "experiment.yaml"), study.parent / "again", QUIET)
    assert (study.parent / "again" / "metrics.json").read_bytes() == (run / "metrics.json").read_bytes()


def test_a_figure_is_drawn_for_each_metric_of_the_plot(study: Path) -> None:
    """A line across an axis, one colour by another; a plot that is gone takes its figures along."""
    plot = "plot: {x: cluster.replicas.slots, by: system, metrics: [steps_per_hour, busy]}\n"
    study.write_text(STUDY + plot)
    sweep(study)
    figures = study.parent / "out" / "figures"
    assert {path.name for path in figures.iterdir()} == {"steps_per_hour.png", "busy.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures.iterdir())
    study.write_text(STUDY)
    sweep(study)
    assert not figures.exists()


# --- statistics --------------------------------------------------------------------------------------


def test_intervals_are_students() -> None:
    """Worked by hand: sd = sqrt(5/3), t(3) = 3.18245, half-width = 3.18245 * 1.29099 / 2 = 2.05426."""
    found = estimate([1.0, 2.0, 3.0, 4.0])
    assert (found.num, found.mean) == (4, 2.5)
    assert found.sd == pytest.approx(math.sqrt(5 / 3))
    assert found.low == pytest.approx(2.5 - 2.05426, abs=1e-5)
    assert found.high == pytest.approx(2.5 + 2.05426, abs=1e-5)


def test_one_value_has_no_interval() -> None:
    """A mean of one says nothing of its error."""
    assert estimate([3.0]) == (1, 3.0, None, None, None)
    assert paired_ratio([(2.0, 3.0)]) == pytest.approx((1, 1.5, None, None, None))


def test_paired_differences_and_ratios() -> None:
    """Worked by hand: differences 2, 3, 1 with t(2) = 4.30265; ratios 2 and 8 with t(1) = 12.7062."""
    difference = paired_difference([(10, 12), (20, 23), (30, 31)])
    assert difference.mean == 2
    assert difference.high == pytest.approx(2 + 4.30265 / math.sqrt(3), abs=1e-5)
    ratio = paired_ratio([(1, 2), (2, 16)])
    assert ratio is not None
    assert ratio.mean == pytest.approx(4)
    half_width = 12.7062 * (math.log(4) / math.sqrt(2)) / math.sqrt(2)
    assert ratio.low == pytest.approx(4 * math.exp(-half_width), rel=1e-4)
    assert ratio.high == pytest.approx(4 * math.exp(half_width), rel=1e-4)
    assert paired_ratio([(0, 1), (1, 2)]) is None


def test_common_random_numbers_make_the_interval_of_a_difference_narrow(study: Path) -> None:
    """Both systems sample the same tokens under a seed, so pairs say more than two means do."""
    workload = "profile.workloads.*.workload.output_tokens: {kind: lognormal, median: 12, sigma: 0.8}"
    study.write_text(
        f"name: pairs\nbase: small.yaml\nset: {{profile: profile.yaml, {workload}}}\n"
        "systems: [sync, marlaas]\nreplications: 12\n"
    )
    sweep(study)
    out = study.parent / "out"
    rows = table(out / "results.csv")
    tokens: dict[str, set[float]] = {}
    for row in rows:
        num = float(row["tokens_per_s"]) * float(row["makespan_s"])
        tokens.setdefault(row["seed"], set()).add(round(num, 6))
    assert all(len(of_seed) == 1 for of_seed in tokens.values())
    assert len(set.union(*tokens.values())) > 1

    means = [row for row in table(out / "summary.csv") if row["metric"] == "makespan_s"]
    halves = [float(row["ci95_high"]) - float(row["mean"]) for row in means]
    (paired,) = [row for row in table(out / "comparison.csv") if row["metric"] == "makespan_s"]
    half = float(paired["difference_high"]) - float(paired["difference"])
    assert 0 < half < 0.8 * math.hypot(*halves)
    assert (paired["system"], paired["baseline"], paired["num_seeds"]) == ("marlaas", "sync", "12")
    assert float(paired["difference"]) == pytest.approx(float(means[1]["mean"]) - float(means[0]["mean"]))


def test_any_axis_can_be_compared(study: Path) -> None:
    """Points of an axis of numbers against one of them, for every system."""
    study.write_text(STUDY + "compare: cluster.replicas.slots\nbaseline: 2\n")
    sweep(study)
    rows = [r for r in table(study.parent / "out" / "comparison.csv") if r["metric"] == "adapter_loads"]
    heads = [(row["system"], row["cluster.replicas.slots"], row["baseline"]) for row in rows]
    assert heads == [("single", "1", "2"), ("marlaas", "1", "2")]


# --- what is kept ------------------------------------------------------------------------------------


def test_a_study_extended_reuses_what_is_there(study: Path) -> None:
    """More values and more seeds under the same name: only what is new is simulated."""
    sweep(study)
    study.write_text(STUDY.replace("[1, 2]", "[2, 4]").replace("replications: 3", "replications: 4"))
    done = sweep(study)
    assert (done.num_rows, done.num_reused, done.num_simulated) == (16, 6, 10)
    sweep(study, "afresh")
    assert tables(study.parent / "out") == tables(study.parent / "afresh")


@pytest.mark.parametrize("change", ["profile", "code", "cut"])
def test_a_cell_is_reused_only_where_it_answers_the_same_question(
    study: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Other costs under the same name, other code, or a file cut short: the cell is simulated again."""
    sweep(study)
    num_reused = 0
    if change == "profile":
        path = study.parent / "profile.yaml"
        path.write_text(path.read_text().replace("value: 0.2", "value: 0.3"))
    elif change == "code":
        monkeypatch.setattr(sweep_run, "code_fingerprint", lambda: "another")
    else:
        path = next((study.parent / "out" / "cells").iterdir())
        path.write_bytes(path.read_bytes()[:40])
        num_reused = 11
    assert sweep(study).num_reused == num_reused


def test_a_profile_lies_anywhere(study: Path) -> None:
    """Where the files are is no part of the question."""
    sweep(study)
    (study.parent / "profile.yaml").rename(study.parent / "costs.yaml")
    study.write_text(STUDY.replace("profile.yaml", "costs.yaml"))
    assert sweep(study).num_reused == 12


def test_a_folder_of_something_else_is_refused(study: Path) -> None:
    """A folder is a study's by its name; any other with something in it is left as it is."""
    (study.parent / "full").mkdir()
    (study.parent / "full" / "file").write_text("precious")
    with pytest.raises(InputError, match="full is not empty"):
        sweep(study, "full")
    assert [path.name for path in (study.parent / "full").iterdir()] == ["file"]
    sweep(study)
    before = tables(study.parent / "out")
    study.write_text(STUDY.replace("name: little", "name: other"))
    with pytest.raises(InputError, match=r"holds the study 'little', not 'other'; name another folder"):
        sweep(study)
    assert tables(study.parent / "out") == before


def test_two_sweeps_do_not_share_a_folder_at_once(study: Path) -> None:
    """The second is refused while the first is at work."""
    loaded = load_study(study)
    folder = Folder(study.parent / "out")
    experiment = Base(loaded).experiment
    with folder.owned("little", loaded.text, experiment), pytest.raises(InputError, match="at work"):
        sweep(study)
    assert sweep(study).num_simulated == 12


def test_a_cell_that_fails_is_a_row_and_is_tried_again(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others go on; a later sweep simulates the failed one again."""
    real = sweep_work.simulate

    def stalling(experiment: Any, *rest: Any) -> Any:
        if experiment.seed == 1 and experiment.system == "single":
            raise InvariantViolation("stalled")
        return real(experiment, *rest)

    monkeypatch.setattr(sweep_work, "simulate", stalling)
    done = sweep(study)
    assert (done.num_simulated, done.num_failed) == (12, 2)
    rows = table(study.parent / "out" / "results.csv")
    failed = [row for row in rows if row["error"]]
    assert {(row["system"], row["seed"], row["error"]) for row in failed} == {
        ("single", "1", "InvariantViolation: stalled")
    }
    assert all(row["makespan_s"] for row in rows if not row["error"])
    steps = [row for row in table(study.parent / "out" / "summary.csv") if row["metric"] == "steps"]
    assert [row["num_seeds"] for row in steps] == ["2", "3", "2", "3"]
    monkeypatch.undo()
    done = sweep(study)
    assert (done.num_simulated, done.num_reused, done.num_failed) == (2, 10, 0)


# --- the command -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (STUDY, 0, "12 cells: 12 simulated, 0 kept from before, 0 failed\nout/results.csv\n"),
        (CONTRADICTING, 3, "8 cells: 6 simulated, 0 kept from before, 2 failed"),
        (STUDY.replace("[1, 2]", "[]"), 2, "an empty axis"),
    ],
)
def test_the_command_says_how_it_went(
    study: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    code: int,
    said: str,
) -> None:
    """0 done, 2 a mistake in the study, 3 finished but some cell failed; quiet where there is no terminal."""
    study.write_text(text)
    monkeypatch.chdir(study.parent)
    monkeypatch.setattr(sys, "argv", ["marlaas", "sweep", "study.yaml", "--out", "out", "--jobs", "1"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    shown = capsys.readouterr()
    assert said in (shown.err if code == 2 else shown.out)
    assert code == 2 or shown.err == ""


def test_a_terminal_sees_a_bar_with_the_cells_done(study: Path) -> None:
    """The study's name, cells done of all, reused ones among them, and the time that is left."""
    sweep(study)
    study.write_text(STUDY.replace("replications: 3", "replications: 4"))
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    sweep_run.sweep(load_study(study), study.parent / "out", terminal, 1)
    assert isinstance(terminal.file, io.StringIO)
    shown = terminal.file.getvalue()
    assert "little" in shown
    assert "16/16" in shown
    assert "0:00:00" in shown


# --- ends that nobody planned ------------------------------------------------------------------------

LONG = """\
name: long
base: small.yaml
set: {profile: profile.yaml, tasks.*.steps: 6}
axes: {cluster.replicas.slots: [1, 2, 4]}
systems: [single, marlaas]
replications: 40
metrics: [makespan_s, busy]
"""

PROGRAM = """\
import sys
from pathlib import Path
from rich.console import Console
from experiments.sweep.run import sweep
from experiments.sweep.study import load_study
if __name__ == "__main__":
    sweep(load_study(Path(sys.argv[1])), Path(sys.argv[2]), Console(stderr=True), 2)
"""


def start(study: Path, out: Path) -> subprocess.Popen[str]:
    """A sweep in two worker processes, in a process of its own, once it has finished some cells."""
    program = study.parent / "program.py"
    program.write_text(PROGRAM)
    words = [sys.executable, str(program), str(study), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, text=True, stderr=subprocess.PIPE, env=environment)
    wait_until(lambda: num_cells(out) >= 5 or process.poll() is not None)
    assert process.poll() is None, "the sweep ended before it could be stopped"
    return process


def num_cells(out: Path) -> int:
    """How many cells are finished."""
    return len(list((out / "cells").glob("[0-9a-f]*.json")))


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    """Whether a process is there and not a mere entry."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for something to come true."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_sweep_that_was_stopped_goes_on_where_it_was(study: Path, how: signal.Signals) -> None:
    """Killed or interrupted, its processes end at once, and the next sweep reuses every finished cell."""
    study.write_text(LONG)
    out = study.parent / "out"
    process = start(study, out)
    workers = children(process.pid)
    assert len(workers) >= 2
    process.send_signal(how)
    process.communicate(timeout=30)
    wait_until(lambda: not any(map(is_running, workers)))
    num_finished = num_cells(out)
    assert 5 <= num_finished < 240
    assert not (out / "results.csv").exists()

    few = LONG.replace("replications: 40", "replications: 1")
    study.write_text(few)
    done = sweep(study)
    assert done.num_reused >= 1
    assert done.num_reused + done.num_simulated == 6
    sweep(study, "afresh")
    assert tables(out) == tables(study.parent / "afresh")


class Deadly(type(Path())):  # type: ignore[misc]
    """A path that ends the process that receives it."""

    def __reduce__(self) -> Any:
        return os._exit, (9,)


@pytest.mark.slow
def test_a_process_that_dies_takes_only_its_own_cell_along(study: Path) -> None:
    """The cells beside it are simulated again, alone, and those after it go on."""
    jobs = [
        sweep_work.Job(cell.key, cell.question, study.parent, False)
        for cell in cells_of(study)
        if cell.question
    ]
    (study.parent / "partial").mkdir()
    (study.parent / "cells").mkdir()
    jobs[1] = sweep_work.Job(jobs[1].key, jobs[1].question, Deadly(study.parent), False)
    found: dict[str, str | None] = {}
    sweep_run.simulate_all(jobs, 2, lambda record: found.update({record.key: record.error}))
    assert {key for key, error in found.items() if error} == {jobs[1].key}
    assert "the process died" in str(found[jobs[1].key])
    assert len(found) == len(jobs)
