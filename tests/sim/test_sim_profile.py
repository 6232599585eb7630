"""Profiles: what things cost and where a task's workload comes from."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from marlaas.errors import InputError
from marlaas.spec import Empirical, Experiment, Fixed, SumsEnvironment, TaskSpec, Uniform, Workload
from sim.profile import (
    LaneProfile,
    Profile,
    ProfiledWorkload,
    Quantity,
    ReplicaProfile,
    assumed,
    environment_latency,
    iteration_costs,
    workload_of,
)
from sim.profile_files import dump_profile, load_profile

TASK = TaskSpec(name="add", environment="sums", steps=1)
EXPERIMENT = Experiment(
    name="x", tasks=(TASK,), environments={"sums": SumsEnvironment(latency_s=Fixed(value=2.0))}
)


def workload(prompt_tokens: float, environment: float | None = None) -> Workload:
    """A workload told apart by its prompts."""
    return Workload(
        prompt_tokens=Fixed(value=prompt_tokens),
        output_tokens=Fixed(value=5),
        environment_s=None if environment is None else Fixed(value=environment),
    )


PROFILE = Profile(
    name="tiny",
    replica=ReplicaProfile(
        iteration_s=Quantity(value=0.012, source="calibrated", interval=(0.011, 0.013)),
        per_kv_token_s=assumed(1e-7, "a guess"),
        knee_sequences=assumed(150),
    ),
    lane=LaneProfile(step_s=assumed(0.2)),
    environment_overhead_s=assumed(0.001),
    workloads={"add": ProfiledWorkload(workload=workload(10), source="assumed")},
)


def test_a_profile_survives_its_yaml(tmp_path: Path) -> None:
    """What is dumped reads back equal, small numbers and lists of values included."""
    measured = Workload(prompt_tokens=Empirical(values=(1.0, 2.5)), output_tokens=Fixed(value=3))
    profile = replace(PROFILE, workloads={"a": ProfiledWorkload(workload=measured, source="calibrated")})
    (tmp_path / "p.yaml").write_text(dump_profile(profile))
    assert load_profile(tmp_path / "p.yaml") == profile


def test_a_number_in_bare_exponent_form_is_a_number(tmp_path: Path) -> None:
    """YAML 1.1 would read 1e-7 as text."""
    (tmp_path / "p.yaml").write_text(dump_profile(PROFILE).replace("1.0e-07", "1e-7"))
    assert load_profile(tmp_path / "p.yaml") == PROFILE


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("per_kv_token_s", "per_kv_tokens_s", "did you mean per_kv_token_s"),
        ("  switch_s", "  switch_s: {value: 1, source: assumed}\n  switch_s", "'switch_s' is given twice"),
        (
            "source: calibrated",
            "source: hearsay",
            r"replica.iteration_s.source: Invalid enum value 'hearsay'",
        ),
        ("value: 0.012", "value: -1", r"replica.iteration_s.value: Expected `float` >= 0"),
        ("replica:", "replicas:", "did you mean replica"),
        ("name: tiny", "name: [", "not YAML"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    """Unknown, duplicate and mistyped keys are refused, never ignored."""
    assert old in dump_profile(PROFILE)
    (tmp_path / "p.yaml").write_text(dump_profile(PROFILE).replace(old, new, 1))
    with pytest.raises(InputError, match=message):
        load_profile(tmp_path / "p.yaml")


def test_a_missing_file_is_an_input_error(tmp_path: Path) -> None:
    """Not a traceback."""
    with pytest.raises(InputError, match=r"none\.yaml: cannot be read"):
        load_profile(tmp_path / "none.yaml")


def test_a_workload_is_the_tasks_own_then_by_task_then_by_environment() -> None:
    """The nearest description wins, and none at all is an error that says how to mend it."""
    by_both = replace(
        PROFILE,
        workloads=PROFILE.workloads | {"sums": ProfiledWorkload(workload=workload(20), source="assumed")},
    )
    own = replace(TASK, workload=workload(30))
    other = replace(TASK, name="more")
    assert workload_of(own, by_both) == workload(30)
    assert workload_of(TASK, by_both) == workload(10)
    assert workload_of(other, by_both) == workload(20)
    with pytest.raises(InputError, match="named more or sums"):
        workload_of(other, PROFILE)


def test_a_measured_latency_contains_the_overhead() -> None:
    """Only an environment's nominal latency gets it added."""
    assert environment_latency(TASK, PROFILE, EXPERIMENT) == (Fixed(value=2.0), 0.001)
    measured = replace(TASK, workload=workload(10, environment=2.5))
    assert environment_latency(measured, PROFILE, EXPERIMENT) == (Fixed(value=2.5), 0.0)


def test_costs_are_whole_femtoseconds() -> None:
    """12 ms is 12e12 fs."""
    costs = iteration_costs(PROFILE.replica)
    assert (costs.iteration_fs, costs.per_kv_token_fs, costs.knee_sequences) == (12 * 10**12, 10**8, 150)


@pytest.mark.parametrize(
    ("distribution", "message"),
    [
        (
            "{kind: uniform, low: 2, high: 1}",
            r"p\.yaml: variation: training\.low: 2 is above high; wanted at most 1",
        ),
        (
            "{kind: mixture, weights: [1, 2], parts: [{kind: fixed, value: 1}]}",
            r"variation: training\.weights: 2 weights for 1 parts",
        ),
        ("{kind: mixture, weights: [], parts: []}", r"training\.parts: a mixture of nothing"),
        (
            "{kind: mixture, weights: [1], parts: [{kind: uniform, low: 2, high: 1}]}",
            r"training\.parts\[0\]\.low: 2 is above high",
        ),
        ("{kind: lognormal, median: 1}", r"variation\.training: Object missing required field `sigma`"),
        ("{kind: fixed, value: -1}", r"variation\.training\.value: Expected `float` >= 0"),
        ("3", r"variation\.training: Expected `object`, got `int`"),
    ],
)
def test_a_variation_that_cannot_be_drawn_is_refused_by_its_place(
    tmp_path: Path, distribution: str, message: str
) -> None:
    """In a profile that spells its costs out and in one that names hardware alike."""
    text = f"variation: {{training: {distribution}}}\n"
    for profile in (
        "replica: {iteration_s: {value: 1, source: assumed}}\nlane: {step_s: {value: 1, source: assumed}}\n",
        "hardware: {device: h100, model: qwen3-4b}\n",
    ):
        (tmp_path / "p.yaml").write_text(f"name: p\n{profile}{text}")
        with pytest.raises(InputError, match=message):
            load_profile(tmp_path / "p.yaml")


def test_a_workload_that_cannot_be_drawn_is_refused_too() -> None:
    """A profile's workloads are checked as an experiment's are."""
    with pytest.raises(ValueError, match=r"workload\.turns\.low: 3 is above high"):
        ProfiledWorkload(workload=replace(workload(10), turns=Uniform(low=3.0, high=1.0)), source="assumed")
