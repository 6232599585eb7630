"""Metrics computed by a second process while the run writes its trace are those computed after it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from experiments import run
from experiments.load import load_experiment
from experiments.meanwhile import metrics_meanwhile
from traces.metrics import compute

ROOT = Path(__file__).parents[2]


def test_metrics_of_a_followed_run_are_those_of_its_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run taken for a long one has the same metrics.json as if it had been read afterwards."""
    monkeypatch.setattr(run, "_is_long", lambda experiment: True)
    experiment = load_experiment(ROOT / "experiments" / "quickstart.yaml")
    run.simulate(experiment, tmp_path / "run", Console(quiet=True))
    found = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert found == json.loads(msgspec.json.encode(compute(tmp_path / "run")))
    assert found["tasks_done"] == len(experiment.tasks)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a run that has ended."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    run.simulate(load_experiment(ROOT / "experiments" / "quickstart.yaml"), folder, Console(quiet=True))
    return folder / "trace.jsonl"


@pytest.fixture
def begun(trace: Path, tmp_path: Path) -> Path:
    """A run folder with its trace; whoever follows it cannot know that the run has ended."""
    shutil.copy(trace, tmp_path)
    return tmp_path


def test_a_run_that_fails_has_no_metrics(begun: Path) -> None:
    """What went wrong passes through, and the process that read is gone."""
    with pytest.raises(KeyboardInterrupt), metrics_meanwhile(begun):
        raise KeyboardInterrupt
    assert not (begun / "metrics.json").exists()


def test_a_run_that_dies_has_no_metrics(begun: Path) -> None:
    """The pipe closes without a word: the reader ends too and writes nothing."""
    reader = [sys.executable, "-m", "experiments.meanwhile", str(begun)]
    ended = subprocess.run(reader, input=b"", cwd=ROOT, timeout=60, check=False)
    assert ended.returncode == 1
    assert not (begun / "metrics.json").exists()


def test_a_trace_that_cannot_be_read_fails_the_run(begun: Path) -> None:
    """A damaged trace leaves no metrics in silence."""
    trace = begun / "trace.jsonl"
    trace.write_bytes(trace.read_bytes().replace(b'"RunStarted"', b'"RunStopped"'))
    with pytest.raises(RuntimeError, match="metrics"), metrics_meanwhile(begun):
        pass
