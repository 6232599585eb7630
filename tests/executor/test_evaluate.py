"""The examination of a finished run, with scripted engines."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from scripted_engines import FIRST_MARK, mark
from scripted_runs import GOOD, scripted, small

from executor.driver import execute
from executor.environments import Observation, Problem, is_held_out
from executor.evaluate import evaluate
from marlaas.errors import MarlaasError
from marlaas.spec import EvaluationSpec, Experiment, Fixed
from traces.schema import make_header
from traces.writer import TraceWriter


def run(tmp_path: Path) -> Experiment:
    """A finished run of two tasks × two steps, with its trace."""
    experiment = replace(small(tmp_path, max_turns=2), evaluation=EvaluationSpec(prompts=5))
    with TraceWriter(tmp_path / "trace.jsonl", make_header(experiment, world="executor")) as recorder:
        execute(experiment, tmp_path, recorder, plugins=scripted())
    slow = replace(experiment.environments["env"], latency_s=Fixed(value=9))
    return replace(experiment, environments={"env": slow})


def knows(problem: Problem, turns: Sequence[str]) -> Observation:
    """Rewards the second turn of version 2 of task-0 alone; every problem must be held out."""
    assert is_held_out(problem.seed)
    if len(turns) == 1:
        return Observation(done=False, text="and?")
    said = f"<mark-{mark('task-0', 2) - FIRST_MARK}>"
    return GOOD if turns == [said, said] else Observation(done=True, reward=0.0)


def test_first_and_last_versions_solve_the_same_held_out_problems(tmp_path: Path) -> None:
    """Each score comes from its own version's turns; latency is left out; the file says what was returned."""
    scores = evaluate(run(tmp_path), tmp_path, plugins=scripted(knows))
    assert scores == {
        "task-0": {"before": 0.0, "after": 1.0, "prompts": 5},
        "task-1": {"before": 0.0, "after": 0.0, "prompts": 5},
    }
    assert json.loads((tmp_path / "evaluation.json").read_text()) == scores


def test_weights_that_are_not_the_published_ones_are_refused(tmp_path: Path) -> None:
    """The trace says which fingerprint a version has."""
    experiment = run(tmp_path)
    altered = tmp_path / "adapters" / "task-1" / "v2" / "adapter.json"
    altered.write_text(json.dumps({"mark": FIRST_MARK}))
    with pytest.raises(MarlaasError, match="LoadAdapter failed: AssertionError"):
        evaluate(experiment, tmp_path, plugins=scripted(knows))


def test_a_lost_worker_ends_the_examination(tmp_path: Path) -> None:
    """With the reason, instead of waiting for ever."""
    experiment = run(tmp_path)
    with pytest.raises(MarlaasError, match="worker was lost: RuntimeError: out of memory"):
        evaluate(experiment, tmp_path, plugins=scripted(knows, replica="DyingReplica"))
