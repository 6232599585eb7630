"""Experiments on profiles that name hardware: places in errors, the KV pool that fits, sweeps over slots."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.load import dump_experiment, load_experiment, load_profile
from experiments.sweep.cells import Base, expand
from experiments.sweep.study import load_study
from marlaas.errors import InputError

PROFILE = """\
name: mine
hardware:
  device: h200
  model: llama-3.1-8b
  training: {sharding: replicated}
"""


@pytest.fixture
def on_hardware(small: Path, profile: str) -> Path:
    """The small experiment, with its profile beside it and no KV pool of its own."""
    workloads = profile[profile.index("workloads:") :]
    (small.parent / "mine.yaml").write_text(PROFILE + workloads)
    text = small.read_text()
    assert "kv_tokens" not in text
    return small


def kv_tokens(path: Path, *settings: str) -> int:
    """The KV pool of the experiment's replicas under these settings."""
    return load_experiment(path, ["profile=mine.yaml", *settings]).cluster.replicas.kv_tokens


def test_an_experiment_that_does_not_say_its_pool_gets_what_fits(on_hardware: Path) -> None:
    """Slots and rank are paid for in KV tokens; a stated pool stays."""
    few, many = (kv_tokens(on_hardware, f"cluster.replicas.slots={n}") for n in (8, 128))
    high = kv_tokens(on_hardware, "cluster.replicas.slots=128", "model.lora.rank=32")
    assert few > many > high > 100_000
    assert kv_tokens(on_hardware, "cluster.replicas.kv_tokens=5000") == 5000


def test_what_fits_is_written_out_in_the_resolved_experiment(on_hardware: Path) -> None:
    """So it reads back the same, and a run's folder says what was simulated."""
    resolved = load_experiment(on_hardware, ["profile=mine.yaml"])
    again = on_hardware.parent / "again.yaml"
    again.write_text(dump_experiment(resolved))
    assert load_experiment(again) == resolved
    profile = load_profile(resolved)
    assert profile.replica.kv_tokens is not None
    assert resolved.cluster.replicas.kv_tokens == profile.replica.kv_tokens.value


def test_a_pool_that_cannot_be_is_refused(on_hardware: Path) -> None:
    """More KV than the device has memory; the answer says how much fits."""
    experiment = load_experiment(on_hardware, ["profile=mine.yaml", "cluster.replicas.kv_tokens=2000000"])
    with pytest.raises(
        InputError, match=r"cluster.replicas.kv_tokens: 2,000,000 tokens never fit .* about 8"
    ):
        load_profile(experiment)


def test_a_trajectory_that_does_not_fit_the_computed_pool_is_refused(on_hardware: Path) -> None:
    """As with a stated pool."""
    tight = PROFILE + "  rollout: {kv_blocks: 2}\n"
    (on_hardware.parent / "mine.yaml").write_text(tight)
    with pytest.raises(InputError, match=r"a trajectory can reach 96 tokens and never fits .*kv_tokens, 32"):
        load_experiment(on_hardware, ["profile=mine.yaml"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("device: h200", "device: h20", r"mine\.yaml:3: hardware\.device: .*did you mean h200"),
        ("  device", "  devcie", r"mine\.yaml:3: hardware\.devcie: unknown key; did you mean device"),
        ("replicated}", "replicate}", r"mine\.yaml:5: hardware\.training\.sharding: unknown value"),
        ("replicated}", "replicated, devices: 8}", r"mine\.yaml:5: hardware\.training\.devices: 8, but"),
    ],
)
def test_mistakes_are_refused_with_file_and_line(on_hardware: Path, old: str, new: str, message: str) -> None:
    """Also those that only show when the costs are computed."""
    (on_hardware.parent / "mine.yaml").write_text(PROFILE.replace(old, new, 1))
    with pytest.raises(InputError, match=message):
        load_profile(load_experiment(on_hardware, ["profile=mine.yaml"]))


def test_a_sweep_over_slots_and_hardware_computes_each_cells_costs(on_hardware: Path) -> None:
    """Slots change the pool, devices the costs; a split that cannot be is a cell with an error."""
    study = on_hardware.parent / "study.yaml"
    study.write_text(
        "name: split\nbase: small.yaml\nset: {profile: mine.yaml}\nreplications: 1\naxes:\n"
        "  cluster.replicas.slots: [8, 64]\n"
        "  cluster.replicas.devices: [1, 2, 3]\n"
        "  profile.hardware.rollout.pipeline_parallel: [1, 3]\n"
    )
    loaded = load_study(study)
    cells = expand(loaded, Base(loaded), "code")
    assert len(cells) == 12
    errors = [str(cell.error) for cell in cells if cell.question is None]
    assert sum("not split evenly by 3" in error for error in errors) == 2
    assert sum("3 stages do not share the" in error for error in errors) == 4
    good = {tuple(cell.columns.values())[:3]: cell.question for cell in cells if cell.question is not None}
    assert len(good) == 6
    pools = {key: question.experiment.cluster.replicas.kv_tokens for key, question in good.items()}
    assert pools[8, 1, 1] > pools[64, 1, 1]
    assert pools[8, 2, 1] > 2 * pools[8, 1, 1]
    per_kv_s = {key: question.profile.replica.per_kv_token_s.value for key, question in good.items()}
    assert per_kv_s[8, 3, 3] == pytest.approx(per_kv_s[8, 1, 1] / 3, rel=1e-4)
    assert per_kv_s[8, 2, 1] == pytest.approx(per_kv_s[8, 1, 1] / 2, rel=1e-4)
