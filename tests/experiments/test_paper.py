"""The original's claims: the study's YAMLs, its arithmetic, and a miniature of the whole run."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from experiments.load import load_experiment, load_profile
from experiments.paper import bounds
from experiments.paper.bounds import Alone
from experiments.paper.claim import Cell, best, smallest_reaching
from experiments.paper.claims import CLAIMS
from experiments.paper.peaks import peaks
from experiments.paper.run import FOLDER, STUDIES, headline, miniature, run_paper
from experiments.sweep.cells import Base, configurations, expand
from experiments.sweep.cells import Cell as SweepCell
from experiments.sweep.study import load_study
from sim.profile import Quantity

FILES = sorted(FOLDER.glob("*.yaml"))
WORKLOADS = ("gsm8k", "amc12", "search")


@cache
def cells_of(name: str) -> list[SweepCell]:
    """Every cell of a study, none of them simulated."""
    study = load_study(FOLDER / f"{name}.yaml")
    return expand(study, Base(study), "code")


# --- the YAMLs -------------------------------------------------------------------------------------


def test_every_yaml_of_the_study_is_run_by_it_or_a_workload() -> None:
    """No file is left over, and none is missing."""
    assert {path.stem for path in FILES} == {*STUDIES, *WORKLOADS, "mixed32"}


@pytest.mark.parametrize("name", STUDIES)
def test_every_combination_of_a_study_can_be_simulated(name: str) -> None:
    """No axis asks for what the base or the profile refuses."""
    assert [cell.error for cell in cells_of(name) if cell.error] == []


def test_the_largest_workload_is_what_the_original_reports() -> None:
    """32 tasks in turn, 20 steps of 64 prompts x 4 samples, rank 16, 64 NPUs."""
    experiment = load_experiment(FOLDER / "mixed32.yaml")
    cluster = experiment.cluster
    assert [task.name.split("-")[0] for task in experiment.tasks] == [WORKLOADS[i % 3] for i in range(32)]
    assert {(task.steps, task.prompts, task.samples) for task in experiment.tasks} == {(20, 64, 4)}
    assert experiment.model.lora.rank == 16
    assert cluster.replicas.count * cluster.replicas.devices + cluster.lanes.devices == 64


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_workload_alone_is_that_of_the_mix(workload: str) -> None:
    """The files of single workloads and the mix state the same numbers."""
    mixed, alone = (load_experiment(FOLDER / f"{name}.yaml") for name in ("mixed32", workload))
    ours = next(task for task in mixed.tasks if task.name.startswith(workload))
    assert msgspec.structs.replace(alone.tasks[0], name=ours.name) == ours
    assert alone.environments[workload] == mixed.environments[workload]
    assert (alone.cluster, alone.limits, alone.profile) == (mixed.cluster, mixed.limits, mixed.profile)


def test_every_model_has_one_parameter_set_in_all_studies() -> None:
    """A claim cannot have parameters of its own: a model's are the same wherever it is simulated."""
    found: dict[str, set[str]] = {}
    for name in ("scaling", "sustained"):
        for cell in cells_of(name):
            assert cell.question is not None
            experiment, profile = cell.question.experiment, cell.question.profile
            parts = [experiment.cluster, experiment.environments, profile]
            digest = msgspec.json.encode(parts).decode()
            found.setdefault(str(cell.columns["model"]), set()).add(digest)
    assert {model: len(digests) for model, digests in found.items()} == {
        "Qwen3-0.6B": 1,
        "Qwen3-14B": 1,
        "Qwen3-32B": 1,
    }


def test_sensitivity_and_ratio_vary_the_set_of_the_main_grid() -> None:
    """What is called documented there is the parameter set of Qwen3-14B here."""
    of_grid = next(
        cell.question
        for cell in cells_of("scaling")
        if cell.columns == {"model": "Qwen3-14B", "num_tasks": 32, "system": "marlaas"}
    )
    documented = next(
        cell.question
        for cell in cells_of("sensitivity")
        if cell.columns == {"assumption": "documented", "system": "marlaas"}
    )
    assert of_grid is not None
    assert documented is not None
    assert documented.profile == of_grid.profile
    assert documented.experiment.cluster == of_grid.experiment.cluster


def test_peaks_in_the_yaml_are_those_of_the_profiles() -> None:
    """`effective` is relative to what a profile allows; a changed profile must change the peaks too."""
    for cell in cells_of("scaling"):
        if cell.columns["num_tasks"] == 32 and cell.columns["system"] == "marlaas":
            assert cell.question is not None
            cluster = cell.question.experiment.cluster
            stated = (cluster.replicas.peak_tokens_per_s, cluster.lanes.peak_tokens_per_s)
            assert stated == pytest.approx(
                peaks(cell.question.experiment, cell.question.profile, 32 * 256), rel=0.02
            )


def test_ends_of_computed_costs_are_the_intervals_of_the_profile() -> None:
    """Sensitivity asks about the intervals that the profile states, not about convenient ones."""
    study = load_study(FOLDER / "sensitivity.yaml")
    model = load_study(FOLDER / "scaling.yaml").axis("model").points[1]
    settings = [f"{one.key}={one.value}" for one in model.settings]
    profile = load_profile(load_experiment(FOLDER / "mixed32.yaml", settings))
    num_checked = 0
    for point in study.axis("assumption").points:
        for setting in point.settings:
            part, _, name = setting.key.removeprefix("profile.hardware.overrides.").partition(".")
            if not setting.key.startswith("profile.") or name == "load_s":
                continue  # loads are not published, and swept from 0.05 to 2 s
            quantity = getattr(getattr(profile, part), name)
            assert isinstance(quantity, Quantity)
            assert quantity.interval is not None
            nearest = min(abs(setting.value["value"] / end - 1) for end in quantity.interval)
            assert nearest < 0.02, setting.key
            num_checked += 1
    assert num_checked >= 20


# --- arithmetic ------------------------------------------------------------------------------------


def test_bounds_on_hand_made_numbers() -> None:
    """min(N, 1 + R/T) for equal tasks; the lane or the slowest task for unequal ones."""
    assert bounds.equal_gain_bound(8, 4.0) == 5.0
    assert bounds.equal_gain_bound(3, 4.0) == 3.0
    equal = [Alone(40.0, 10.0)] * 8
    assert bounds.mixed_gain_bound(equal) == 5.0
    assert bounds.mixed_gain_limit(equal) == "lane"
    unequal = [Alone(8.0, 2.0), Alone(95.0, 5.0)]
    assert bounds.mixed_gain_bound(unequal) == pytest.approx(1.1)
    assert bounds.mixed_gain_limit(unequal) == "slowest task"
    assert bounds.lane_pace(equal) == 360.0
    assert bounds.effective_gain_bound(0.2) == 5.0


def test_a_gain_and_the_time_that_it_saves() -> None:
    """5.7 times the pace is not 85 % less time; 6.7 times is."""
    assert bounds.saving(5.7) == pytest.approx(0.825, abs=1e-3)
    assert bounds.gain_of_saving(0.85) == pytest.approx(6.67, abs=1e-2)
    assert bounds.gain_of_saving(bounds.saving(3.0)) == pytest.approx(3.0)


def test_where_a_gain_is_first_reached() -> None:
    """The fewest tasks by model; a model that never reaches it is not named."""
    cells = [Cell("a", 8, 6.0), Cell("a", 4, 5.8), Cell("a", 2, 2.0), Cell("b", 8, 3.0)]
    assert best(cells) == Cell("a", 8, 6.0)
    assert smallest_reaching(cells, 5.7) == {"a": 4}


# --- the run ---------------------------------------------------------------------------------------


def test_the_headline_is_the_grids_last_number_of_tasks() -> None:
    """Its cells are kept with their traces and found again by the grid."""
    study = load_study(FOLDER / "scaling.yaml")
    assert {one.columns["num_tasks"] for one in configurations(headline(study))} == {32}
    assert headline(study).keep_traces
    assert {one.columns["num_tasks"] for one in configurations(miniature(study))} == {1, 2}


@pytest.mark.slow
def test_a_miniature_of_the_study_from_yaml_to_page(tmp_path: Path) -> None:
    """Two tasks, one model: every claim is judged, every figure drawn, every number has a run folder."""
    out = tmp_path / "paper"
    assert run_paper(out, Console(quiet=True), jobs=1, quick=True) == 0
    claims = json.loads((out / "claims.json").read_text(encoding="utf-8"))
    assert len(claims) == len(CLAIMS)
    for claim in claims:
        assert claim["verdict"] in ("reached", "not reached")
        assert claim["why"]
        assert claim["conditions"]
        for folder in claim["run_folders"]:
            assert (out / folder / "trace.jsonl").is_file()
            assert (out / folder / "metrics.json").is_file()
    gain = next(claim for claim in claims if claim["name"] == "throughput")
    assert gain["simulated"] <= gain["bound"]["value"] * 1.02
    page = (out / "report" / "index.html").read_text(encoding="utf-8")
    assert all(claim["name"] in page for claim in claims)
    pictures = {path.name for path in (out / "report").glob("*.png")}
    assert len(pictures) == 10
    before = {path: path.stat().st_mtime_ns for path in (out / "scaling" / "cells").iterdir()}
    assert run_paper(out, Console(quiet=True), jobs=1, quick=True) == 0
    assert {path: path.stat().st_mtime_ns for path in (out / "scaling" / "cells").iterdir()} == before
