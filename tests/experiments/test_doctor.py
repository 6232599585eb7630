import pytest
from rich.console import Console

from experiments import doctor
from experiments.answers import print_diagnosis


def test_missing_packages_are_findings_not_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch the simulator still runs, and the executor's need is named."""
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    found = doctor.diagnose()
    can = {ability.what: ability.can for ability in found.abilities}
    assert can["simulate, calibrate, compare, replay, report"]
    assert not can["execute with the embedded engine on CPU"]
    assert "missing: torch" in next(ability.why for ability in found.abilities if not ability.can)


def test_a_broken_torch_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that cannot be imported is said to be so."""
    monkeypatch.setattr(doctor, "_PROBE", "raise OSError('libcann.so is missing')")
    found = doctor.diagnose()
    assert "libcann.so is missing" in found.machine["accelerator"]
    assert not any(ability.can for ability in found.abilities if ability.what.startswith("execute"))


def test_an_accelerator_is_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two NPUs seen by torch make the Ascend line a yes."""
    monkeypatch.setattr(doctor, "_PROBE", "print('npu', 2)")
    found = doctor.diagnose()
    assert found.machine["accelerator"] == "2 × npu"
    assert found.abilities[3].can == all(found.packages[name] for name in ("torch", "transformers", "peft"))


def test_what_mends_a_lack_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """An extra's name in brackets is not taken for a style."""
    lack = doctor.Ability("roll out with vLLM", False, "pip install 'marlaas[vllm]'")
    print_diagnosis(doctor.Diagnosis({}, {}, (lack,)), Console(width=120))
    assert "pip install 'marlaas[vllm]'" in capsys.readouterr().out
