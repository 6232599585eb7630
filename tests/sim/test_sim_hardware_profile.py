"""Profiles in short form: resolved in full, in agreement with the experiment, refused by their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from marlaas.errors import InputError
from marlaas.spec import (
    ClusterSpec,
    Experiment,
    LanesSpec,
    LoraSpec,
    ModelSpec,
    ReplicasSpec,
    SumsEnvironment,
)
from marlaas.spec import TaskSpec as Task
from sim.hardware import LIBRARY, library_names
from sim.hardware_profile import HardwareProfile, Site, resolve, site_of
from sim.profile import Profile, Quantity
from sim.profile_files import dump_profile, load_profile
from sim.strict_yaml import converted, read_file

SITE = Site(replica_devices=4, lane_devices=16, slots=32, max_num_seqs=256, rank=16, targets="all-linear")
SHORT = """\
name: mine
hardware:
  device: ascend-910c-die
  model: qwen3-32b
  adapters: {rank: 16, slots: 32}
  rollout: {tensor_parallel: 4, mode: eager}
  training: {devices: 16}
"""


def load(tmp_path: Path, text: str) -> Profile:
    """A profile from text."""
    (tmp_path / "p.yaml").write_text(text)
    return load_profile(tmp_path / "p.yaml")


def read(text: str) -> HardwareProfile:
    """A short form from text."""
    data: Any = yaml.safe_load(text)
    return converted(data, HardwareProfile, "p.yaml")


@pytest.mark.parametrize("name", library_names("profiles"))
def test_every_shipped_profile_resolves_to_costs_with_sources(name: str) -> None:
    """All costs are computed, the pool is known, and the words say that nothing was measured."""
    form = converted(read_file(LIBRARY / "profiles" / f"{name}.yaml", ""), HardwareProfile, name)
    profile = resolve(form, SITE)
    assert profile.name == form.name == name
    assert "nothing measured" in profile.description
    assert profile.engine.name == "vllm"
    assert profile.replica.iteration_s.value > 0
    assert profile.lane.num_parallel_micro_batches == 16
    assert profile.replica.kv_tokens is not None
    assert profile.replica.kv_tokens.value > 10_000


def test_the_long_form_of_a_short_one_is_read_back_the_same(tmp_path: Path) -> None:
    """What is recorded with a run spells every number out."""
    profile = load(tmp_path, SHORT)
    (tmp_path / "long.yaml").write_text(dump_profile(profile))
    assert load_profile(tmp_path / "long.yaml") == profile


def test_the_experiment_says_what_the_profile_leaves_out() -> None:
    """A planner varies devices, slots and rank in one place."""
    experiment = Experiment(
        name="x",
        tasks=(Task(name="t", environment="e", steps=1),),
        environments={"e": SumsEnvironment()},
        model=ModelSpec(lora=LoraSpec(rank=16)),
        cluster=ClusterSpec(replicas=ReplicasSpec(devices=4, slots=32), lanes=LanesSpec(devices=16)),
    )
    form = read("{name: mine, hardware: {device: ascend-910c-die, model: qwen3-32b, rollout: {mode: eager}}}")
    assert resolve(form, site_of(experiment)) == resolve(read(SHORT), SITE)
    fewer = resolve(form, site_of(experiment)).replica
    assert fewer == resolve(read(SHORT)).replica


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "device: ascend-910c-die",
            "device: ascend-910c-dye",
            r"hardware.device: .*did you mean ascend-910c-die",
        ),
        ("model: qwen3-32b", "model: qwen3-33b", r"hardware.model: .*no such model.*did you mean qwen3-32b"),
        ("mode: eager", "mood: eager", r"hardware.rollout: .*unknown field `mood`; did you mean mode"),
        ("mode: eager", "mode: eagre", r"hardware.rollout.mode: Invalid enum value 'eagre'"),
        ("tensor_parallel: 4, ", "", "hardware.rollout.tensor_parallel: the key is missing"),
        ("{rank: 16, slots: 32}", "{rank: 16}", "hardware.adapters.slots: the key is missing"),
        ("tensor_parallel: 4", "tensor_parallel: 1", "hardware.rollout: no KV fits"),
        ("{devices: 16}", "{devices: 1}", "hardware.training: 66 GB of qwen3-32b a device do not fit"),
        (
            "  training",
            "  overrides: {replica: {laod_s: {value: 1, source: assumed}}}\n  training",
            "hardware.overrides.replica.laod_s: unknown key; did you mean load_s",
        ),
        ("name: mine", "name: mine\nreplica: {}", "unknown field `replica`"),
    ],
)
def test_mistakes_are_refused_by_their_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    """With the path inside the YAML and, where there is one, the nearest name."""
    assert old in SHORT
    with pytest.raises(InputError, match=message):
        load(tmp_path, SHORT.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tensor_parallel: 4", "tensor_parallel: 8", "8 × 1 stages, but cluster.replicas.devices is 4"),
        ("tensor_parallel: 4", "pipeline_parallel: 3", "3 stages do not share the 4 devices"),
        ("devices: 16", "devices: 8", "hardware.training.devices: 8, but cluster.lanes.devices is 16"),
        ("slots: 32", "slots: 8", "hardware.adapters.slots: 8, but cluster.replicas.slots is 32"),
        ("rank: 16", "rank: 8", "hardware.adapters.rank: 8, but model.lora.rank is 16"),
    ],
)
def test_a_profile_that_contradicts_the_experiment_is_refused(old: str, new: str, message: str) -> None:
    """Both are named, so that either can be mended."""
    with pytest.raises(InputError, match=message):
        resolve(read(SHORT.replace(old, new)), SITE)


def test_overrides_replace_single_costs(tmp_path: Path) -> None:
    """A measured number takes the place of a computed one and keeps its source."""
    measured = "{value: 0.5, source: calibrated}"
    text = SHORT + f"  overrides: {{replica: {{load_s: {measured}}}, lane: {{publish_s: {measured}}}}}\n"
    profile, plain = load(tmp_path, text), load(tmp_path, SHORT)
    expected = Quantity(value=0.5, source="calibrated")
    assert (profile.replica.load_s, profile.lane.publish_s) == (expected, expected)
    assert profile.replica.iteration_s == plain.replica.iteration_s


def test_files_are_looked_for_beside_the_profile(tmp_path: Path) -> None:
    """A custom device or model is a path relative to the YAML that names it."""
    for kind, name in (("devices", "h100"), ("models", "qwen3-8b")):
        text = (LIBRARY / kind / f"{name}.yaml").read_text()
        (tmp_path / f"{name}-of-mine.yaml").write_text(text)
    text = SHORT.replace("ascend-910c-die", "h100-of-mine.yaml").replace("qwen3-32b", "qwen3-8b-of-mine.yaml")
    assert "qwen3-8b on h100" in load(tmp_path, text).description


def test_the_engine_takes_the_rollouts_budget(tmp_path: Path) -> None:
    """Unless the profile describes another engine."""
    text = SHORT.replace("mode: eager", "mode: eager, max_batched_tokens: 4096")
    assert load(tmp_path, text).engine.max_prefill_tokens == 4096
    other = text + "engine: {name: other, kv_rule: reserve}\n"
    assert load(tmp_path, other).engine.name == "other"
