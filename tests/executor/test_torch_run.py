"""A whole run with the embedded engines on the shipped base: rollouts, training and examination, all real."""

import json
from pathlib import Path

import pytest
from scripted_runs import assert_replays

from executor.driver import execute
from executor.evaluate import evaluate, published_versions
from marlaas.commands import LoadAdapter
from marlaas.events import AdapterLoaded, EnvironmentStepped, TrainingFinished
from marlaas.spec import (
    EvaluationSpec,
    Experiment,
    LookupEnvironment,
    ModelSpec,
    SumsEnvironment,
    TaskSpec,
)
from traces.reader import read
from traces.schema import make_header
from traces.writer import TraceWriter

BASE = Path(__file__).parents[2] / "executor" / "models" / "tiny-base"
EXPERIMENT = Experiment(
    name="tiny",
    model=ModelSpec(path=str(BASE)),
    environments={"adding": SumsEnvironment(), "library": LookupEnvironment()},
    tasks=(
        TaskSpec(name="add", environment="adding", steps=2, max_new_tokens=8),
        TaskSpec(name="find", environment="library", steps=2, max_new_tokens=10, max_turns=2),
    ),
    evaluation=EvaluationSpec(prompts=32),
)


@pytest.mark.slow
def test_two_tasks_are_trained_on_one_base(tmp_path: Path) -> None:
    """Sampler and trainer agree, replicas hold what was published, and the trace replays."""
    with TraceWriter(tmp_path / "trace.jsonl", make_header(EXPERIMENT, world="executor")) as recorder:
        outcomes = execute(EXPERIMENT, tmp_path, recorder)
    assert outcomes == {"add": "done", "find": "done"}
    records = read(tmp_path).records
    assert_replays(EXPERIMENT, records)
    trained = [event.stats for event, _ in records if isinstance(event, TrainingFinished)]
    assert len(trained) == 4
    assert all(stats.logprob_gap is not None and stats.logprob_gap < 1e-4 for stats in trained)
    assert any(stats.updated for stats in trained)
    rewards = {event.reward for event, _ in records if isinstance(event, EnvironmentStepped) and event.done}
    assert rewards == {0.0, 1.0}
    loads = {c.id: (c.task, c.version) for _, cs in records for c in cs if isinstance(c, LoadAdapter)}
    loaded = {(*loads[e.command], e.fingerprint) for e, _ in records if isinstance(e, AdapterLoaded)}
    assert loaded
    assert loaded <= {
        (*version, fingerprint) for version, fingerprint in published_versions(tmp_path).items()
    }

    scores = evaluate(EXPERIMENT, tmp_path)
    assert json.loads((tmp_path / "evaluation.json").read_text()) == scores
    assert all(0.0 < scores[task]["before"] < 1.0 for task in outcomes)
