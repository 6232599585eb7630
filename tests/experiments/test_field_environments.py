"""Environments of the field in a YAML: strict keys, files beside it, and what is refused before a run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from experiments.load import MODELS, dump_experiment, load_experiment
from experiments.preflight import require_executable
from marlaas.errors import InputError
from marlaas.spec import Experiment, LocalCorpus, MathEnvironment, SearchEnvironment

PLAIN = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TASK = {"name": "t", "environment": "env", "steps": 1, "prompts": 2, "samples": 2, "max_turns": 2}


def write(folder: Path, environment: dict[str, Any], **more: Any) -> Path:
    """An experiment of one task; JSON is YAML."""
    path = folder / "field.yaml"
    task = {**TASK, **more.pop("task", {})}
    path.write_text(json.dumps({"name": "x", "environments": {"env": environment}, "tasks": [task], **more}))
    return path


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"kind": "reasoning_gym"}, r"env\.dataset: the key is missing"),
        (
            {"kind": "reasoning_gym", "dataset": "x", "conf": {}},
            r"env\.conf: unknown key; did you mean config",
        ),
        ({"kind": "reasoning_gym", "dataset": "x", "config": 3}, r"env\.config: got 3; wanted a mapping"),
        (
            {"kind": "reasoning_gym", "dataset": "x", "answer": {"tag": "a b"}},
            r"env\.answer\.tag: .*cannot be",
        ),
        ({"kind": "math", "graders": 0}, r"env\.graders: got 0; wanted a whole number at least 1"),
        ({"kind": "math", "grading_s": 0}, r"env\.grading_s: got 0"),
        ({"kind": "search", "style": "long"}, r"env\.style: unknown value 'long'"),
        ({"kind": "search", "source": {"kind": "wiki"}}, r"env\.source\.kind: .*did you mean mediawiki"),
        ({"kind": "search", "source": {"kind": "mediawiki"}}, r"env\.source\.url: the key is missing"),
        (
            {"kind": "search", "source": {"kind": "mediawiki", "url": "u", "retries": -1}},
            r"env\.source\.retries: got -1; wanted a whole number at least 0",
        ),
        ({"kind": "verifiers", "environment": 3}, r"env\.environment: got 3; wanted a text"),
        ({"kind": "maths"}, r"env\.kind: .*did you mean math"),
    ],
)
def test_keys_are_strict(tmp_path: Path, environment: dict[str, Any], complaint: str) -> None:
    """Each mistake is named by its path, with what was wanted."""
    with pytest.raises(InputError, match=complaint):
        load_experiment(write(tmp_path, environment))


def test_searching_and_answering_need_a_turn_each(tmp_path: Path) -> None:
    """As for `lookup`."""
    with pytest.raises(
        InputError, match=r"tasks\[0\]\.max_turns: asking and answering need a turn each, got 1"
    ):
        load_experiment(write(tmp_path, {"kind": "search"}, task={"max_turns": 1}))


def test_files_are_found_beside_the_yaml_and_samples_by_name(tmp_path: Path) -> None:
    """Resolved, dumped and loaded again it is the same experiment."""
    for name in ("q.jsonl", "p.jsonl"):
        (tmp_path / name).write_text("{}")
    source = {"kind": "local", "pages": "p.jsonl"}
    path = write(tmp_path, {"kind": "search", "questions": "q.jsonl", "source": source})
    experiment = load_experiment(path)
    environment = experiment.environments["env"]
    assert isinstance(environment, SearchEnvironment)
    assert environment.questions == str(tmp_path / "q.jsonl")
    assert environment.source == LocalCorpus(pages=str(tmp_path / "p.jsonl"))
    (tmp_path / "again.yaml").write_text(dump_experiment(experiment))
    assert load_experiment(tmp_path / "again.yaml") == experiment
    path = write(tmp_path, {"kind": "math", "problems": "gsm8k-sample", "held_out": "q.jsonl"})
    environment = load_experiment(path).environments["env"]
    assert environment == MathEnvironment(problems="gsm8k-sample", held_out=str(tmp_path / "q.jsonl"))


def chatting(tmp_path: Path, environment: dict[str, Any], **task: Any) -> Experiment:
    """The tiny base with a chat template, which needs more room than its words."""
    model = tmp_path / "model"
    if not model.is_dir():
        shutil.copytree(MODELS / "tiny-base", model)
        (model / "chat_template.jinja").write_text(PLAIN)
    return load_experiment(write(tmp_path, environment, task=task, model={"path": "model"}))


def test_room_is_counted_with_the_chat_template(tmp_path: Path) -> None:
    """Prompts and observations with what the template puts around them."""
    pytest.importorskip("bm25s", reason="bm25s is not installed")
    names = {"kind": "lookup"}
    with pytest.raises(InputError, match=r"max_prompt_tokens: a prompt has 3\d tokens"):
        require_executable(chatting(tmp_path, names, max_prompt_tokens=20))
    with pytest.raises(InputError, match=r"max_observation_tokens: the chat template alone adds 2\d tokens"):
        require_executable(chatting(tmp_path, names, max_observation_tokens=20))
    require_executable(chatting(tmp_path, names, max_observation_tokens=48))


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        ({"kind": "reasoning_gym", "dataset": "chain_sums"}, r"environments\.env\.dataset: .*chain_sum"),
        ({"kind": "math", "problems": "none.jsonl"}, r"environments\.env\.problems: no such file"),
        ({"kind": "search", "source": {"kind": "mediawiki", "url": "x"}}, r"environments\.env\.source\.url"),
        (
            {"kind": "verifiers", "environment": "nothing-like-it"},
            r"environments\.env: .*(pip install|loaded)",
        ),
    ],
)
def test_what_only_the_environment_can_know_is_refused_before_a_run(
    tmp_path: Path, environment: dict[str, Any], complaint: str
) -> None:
    """With the path of the key in the YAML."""
    for package in ("reasoning_gym", "math_verify", "bm25s", "httpx"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    with pytest.raises(InputError, match=complaint):
        require_executable(load_experiment(write(tmp_path, environment)))
