import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from experiments import demo
from experiments.load import load_experiment
from marlaas.errors import InputError
from sim.profile_files import load_profile
from traces.replay import replay

ROOT = Path(__file__).parents[2]

TINY = """\
name: tiny
seed: 5
cluster: {replicas: {slots: 2, kv_tokens: 8192}}
environments:
  calc: {kind: sums, latency_s: {kind: uniform, low: 0.3, high: 0.5}}
  corpus: {kind: lookup, latency_s: {kind: uniform, low: 0.3, high: 0.5}}
tasks:
  - {name: add, environment: calc, steps: 4, prompts: 2, samples: 4, max_new_tokens: 6}
  - {name: find, environment: corpus, steps: 4, prompts: 2, samples: 4, max_turns: 2, max_new_tokens: 8}
"""


def test_only_an_older_demo_is_replaced(tmp_path: Path) -> None:
    """A folder of the user's own is never touched."""
    (tmp_path / "notes.txt").write_text("precious")
    with pytest.raises(InputError, match="only an older demo is replaced"):
        demo.run_demo(demo.QUICKSTART, [], tmp_path, Console(quiet=True))
    assert (tmp_path / "notes.txt").read_text() == "precious"


def test_an_older_demo_makes_room(tmp_path: Path) -> None:
    """The mark that a demo leaves lets the next one begin afresh."""
    out = tmp_path / "demo"
    for _ in range(2):
        demo.make_room(out)
        (out / "old").mkdir()
    demo.make_room(out)
    assert [path.name for path in out.iterdir()] == [demo.MARK]


@pytest.mark.slow
def test_the_demo_measures_predicts_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two real runs, a profile from the single one alone, two predictions, one table, one page."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    out = tmp_path / "demo"
    assert demo.run_demo(tmp_path / "tiny.yaml", ["seed=6"], out, Console(quiet=True))
    result = json.loads((out / demo.MARK).read_text())
    assert result["measured_gain"] > 1
    assert result["predicted_gain"] > 1
    assert result["rows"]["steps_per_hour"][1] > result["rows"]["steps_per_hour"][0]
    assert result["bound"] == min(2, 1 + result["rollout_to_training_ratio"])
    table = capsys.readouterr().out
    assert "gain in steps per hour" in table
    assert f"× {result['measured_gain']:.2f}" in table
    for name in ("single", "marlaas", "predicted", "predicted-single"):
        assert replay(out / name).ok
        assert json.loads((out / name / "metrics.json").read_text())["steps"] == 8
    assert load_profile(out / "profile.yaml").description == f"calibrated from {out / 'single'}"
    assert (out / "report" / "index.html").exists()


@pytest.mark.slow
def test_execute_then_evaluate_from_the_shell(tmp_path: Path) -> None:
    """One task for one step: exit code 0, a run folder, held-out rewards."""
    (tmp_path / "tiny.yaml").write_text(TINY + "evaluation: {prompts: 4}\n")
    words = ["execute", "tiny.yaml", "--out", "r", "--set", "tasks.0.steps=1", "--set", "tasks.1.steps=1"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "held-out problems" in done.stdout
    assert "2 steps in" in done.stdout
    scores = json.loads((tmp_path / "r" / "evaluation.json").read_text())
    assert scores["add"]["prompts"] == 4
    assert load_experiment(tmp_path / "r" / "experiment.yaml").tasks[0].steps == 1
