"""The command line as a user meets it: exit codes, one message, nothing written."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import cli
from experiments.load import load_experiment

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(small: Path, profile: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with small.yaml and profile.yaml, made the current one."""
    (small.parent / "profile.yaml").write_text(profile)
    small.write_text(small.read_text() + "profile: profile.yaml\n")
    monkeypatch.chdir(small.parent)
    return small.parent


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run the command line in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["marlaas", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    assert code is None or isinstance(code, int)
    return code or 0


def everything(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, with what is in it."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


BAD = {
    "unknown key": (
        ["simulate", "small.yaml", "--out", "r", "--set", "tasks.0.stpes=3"],
        "did you mean steps?",
    ),
    "wrong type": (["simulate", "small.yaml", "--out", "r", "--set", "tasks.0.steps=x"], "a whole number"),
    "duplicate key": (["simulate", "twice.yaml", "--out", "r"], "name: duplicate key, first given on line 1"),
    "unknown system": (["simulate", "small.yaml", "--out", "r", "--system", "snyc"], "did you mean sync?"),
    "never fits": (
        ["simulate", "small.yaml", "--out", "r", "--set", "cluster.replicas.kv_tokens=9"],
        "never fits",
    ),
    "no slots": (
        ["simulate", "small.yaml", "--out", "r", "--set", "cluster.replicas.slots=0"],
        "slots: got 0",
    ),
    "missing experiment": (["simulate", "smal.yaml", "--out", "r"], "did you mean small.yaml?"),
    "missing profile": (["simulate", "small.yaml", "--out", "r", "--set", "profile=p.yaml"], "no such file"),
    "no profile": (["simulate", "small.yaml", "--out", "r", "--set", "profile=null"], "needs a profile"),
    "bad profile": (
        ["simulate", "small.yaml", "--out", "r", "--set", "profile=bad.yaml"],
        "workloads.calc.workload.output_tokens.knd: unknown key",
    ),
    "no workload": (
        ["simulate", "small.yaml", "--out", "r", "--set", "profile=poor.yaml"],
        "says what its trajectories are like",
    ),
    "missing model": (["execute", "small.yaml", "--out", "r", "--set", "model.path=tiny"], "model.path"),
    "context beyond the model": (
        ["execute", "small.yaml", "--out", "r", "--set", "tasks.0.max_new_tokens=60000"],
        "the model reads at most",
    ),
    "prompt would be cut": (
        ["execute", "small.yaml", "--out", "r", "--set", "tasks.0.max_prompt_tokens=2"],
        "would be cut to 2",
    ),
    "answer too long": (
        ["execute", "small.yaml", "--out", "r", "--set", "tasks.1.max_new_tokens=4"],
        "tasks (finder).max_new_tokens: an answer needs 6 tokens",
    ),
    "no such device": (
        ["execute", "small.yaml", "--out", "r", "--set", "cluster.lanes.device=npu"],
        "npu needs CANN",
    ),
    "out not empty": (["simulate", "small.yaml", "--out", "full"], "full is not empty"),
    "out is a file": (["execute", "small.yaml", "--out", "small.yaml"], "small.yaml is a file"),
    "no trace": (["replay", "full"], "no trace here"),
    "no trace to report": (["report", "full", "--out", "r"], "no trace here"),
    "no trace to compare": (["compare", "full", "nowhere"], "no trace here"),
    "no trace to fit": (["calibrate", "full", "--out", "r"], "no trace here"),
    "no trace to evaluate": (["evaluate", "full"], "no trace here"),
    "nothing to export": (["export", "full"], "--perfetto FILE, --parquet FOLDER"),
    "profile exists": (["calibrate", "full", "--out", "profile.yaml"], "exists already"),
    "demo over other files": (["demo", "--out", "full"], "only an older demo is replaced"),
    "unknown command": (["simulte"], "simulate"),
    "unknown option": (["simulate", "small.yaml", "--out", "r", "--sytem", "x"], "--system"),
    "no out": (["simulate", "small.yaml"], "--out"),
}


@pytest.mark.parametrize(("words", "said"), BAD.values(), ids=BAD.keys())
def test_bad_input_exits_2_with_one_message_and_writes_nothing(
    here: Path,
    profile: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    """Whatever is wrong with the input, nothing is touched and stderr says what to mend."""
    (here / "full").mkdir()
    (here / "full" / "file").write_text("precious")
    (here / "twice.yaml").write_text("name: a\nname: b\n")
    (here / "bad.yaml").write_text(profile.replace("kind: uniform", "kind: uniform, knd: 1"))
    (here / "poor.yaml").write_text(profile.replace("  corpus:", "  other:"))
    before = everything(here)
    assert run(monkeypatch, *words) == cli.INPUT
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""
    assert "Traceback" not in shown.err
    if not shown.err.startswith("Usage"):
        assert shown.err.startswith("marlaas: ")
        assert shown.err.count("\n") == 1
    assert everything(here) == before
    assert not (here / "r").exists()


def test_simulate_writes_a_run_folder_that_replays_compares_reports_and_exports(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole path of a planner: two systems, a comparison, a replay, exports."""
    for system in ("single", "marlaas"):
        assert run(monkeypatch, "simulate", "small.yaml", "--out", system, "--system", system) == cli.OK
    assert "6 steps in" in capsys.readouterr().out
    assert load_experiment(here / "marlaas" / "experiment.yaml") == load_experiment(here / "small.yaml")
    metrics = json.loads((here / "marlaas" / "metrics.json").read_text())
    assert metrics["steps"] == 6

    assert run(monkeypatch, "compare", "single", "marlaas", "--json") == cli.OK
    rows = {row["metric"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["makespan_s"]["b"] == pytest.approx(metrics["makespan_s"])
    assert run(monkeypatch, "compare", "single", "marlaas") == cli.OK
    shown = capsys.readouterr().out
    assert "steps_per_hour" in shown
    assert "tasks.finder" not in shown
    assert run(monkeypatch, "compare", "single", "marlaas", "--tasks") == cli.OK
    assert "tasks.finder.ttfs_s" in capsys.readouterr().out

    assert run(monkeypatch, "replay", "marlaas") == cli.OK
    assert run(monkeypatch, "export", "marlaas", "--perfetto", "t.json", "--parquet", "tables") == cli.OK
    assert json.loads((here / "t.json").read_text())["traceEvents"]
    assert (here / "tables" / "steps.parquet").exists()


def test_replay_exits_1_and_names_the_first_difference(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One altered field of one line is found."""
    assert run(monkeypatch, "simulate", "small.yaml", "--out", "r") == cli.OK
    trace = here / "r" / "trace.jsonl"
    lines = trace.read_text().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if '"type":"Train"' in line)
    lines[number] = lines[number].replace('"step":0', '"step":1')
    trace.write_text("".join(lines))
    capsys.readouterr()
    assert run(monkeypatch, "replay", "r") == cli.INTERNAL
    assert f"line {number + 1}: Train.step" in capsys.readouterr().out


def test_a_failed_task_exits_3(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends well, one tenant does not: scripts can tell."""
    late = (
        "environments.corpus={kind: lookup, timeout_s: 0.1, latency_s: {kind: uniform, low: 0.0, high: 9.0}}"
    )
    words = ["simulate", "small.yaml", "--out", "r", "--set", late]
    words += ["--set", "limits.trajectory_retries=0"]
    assert run(monkeypatch, *words) == cli.TASK_FAILED
    assert json.loads((here / "r" / "metrics.json").read_text())["tasks.finder.outcome"] == "failed"


def test_check_prints_what_it_resolved(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output of `check` is an experiment that loads to the same."""
    assert run(monkeypatch, "check", "small.yaml", "--set", "seed=3") == cli.OK
    shown = capsys.readouterr()
    (here / "copy.yaml").write_text(shown.out)
    assert load_experiment(here / "copy.yaml") == load_experiment(here / "small.yaml", ["seed=3"])


def test_check_says_when_the_model_is_missing(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A planner's model need not be here to be simulated."""
    assert run(monkeypatch, "check", "small.yaml", "--set", "model.path=Qwen/Qwen3-32B") == cli.OK
    assert "can be simulated but not executed here" in capsys.readouterr().err


def test_an_internal_error_exits_1_with_a_short_message(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A traceback only for those who ask for it."""

    def explode(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("experiments.run.simulate", explode)
    assert run(monkeypatch, "simulate", "small.yaml", "--out", "r") == cli.INTERNAL
    shown = capsys.readouterr().err
    assert shown == "marlaas: RuntimeError: boom (marlaas --debug ... shows where)\n"
    assert run(monkeypatch, "--debug", "simulate", "small.yaml", "--out", "r") == cli.INTERNAL
    assert "Traceback" in capsys.readouterr().err


def test_a_small_simulation_takes_a_moment_from_the_shell(here: Path) -> None:
    """Process start to finish in seconds at most, quiet on a pipe; the CPU time is bounded, not the wait."""
    begin = os.times()
    started = time.monotonic()
    words = [
        sys.executable,
        "-m",
        "experiments",
        "simulate",
        str(here / "small.yaml"),
        "--out",
        str(here / "r"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
    end = os.times()
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    cpu_s = end.children_user + end.children_system - begin.children_user - begin.children_system
    assert cpu_s < 2.5, f"{cpu_s} s of CPU in {time.monotonic() - started} s"
