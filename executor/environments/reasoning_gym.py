"""`reasoning_gym`: problems of the library of that name, any dataset, graded by the dataset's own scorer.

A dataset makes each of its problems from an index, drawn from the problem's seed. Some go through sets on the
way and make another problem in a process with other hashes, so what is graded is the problem that was posed,
not one made again from its index. Scorers read what a model wrote, so they run in a `Judges` process.
"""

from __future__ import annotations

import base64
import difflib
import json
import pickle
from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import Any

from executor.environments import answers
from executor.environments.judge import Grade, Judges
from executor.environments.packages import require
from executor.environments.problems import Observation, Problem, draw_apart
from marlaas.errors import InputError
from marlaas.spec import ReasoningGymEnvironment

KEPT_PROBLEMS = 512


class ReasoningGym:
    """A dataset of reasoning-gym; the answer of a turn earns what the dataset's scorer gives, 0 to 1."""

    def __init__(self, spec: ReasoningGymEnvironment, where: str) -> None:
        self._spec = spec
        self._dataset = _dataset(spec.dataset, spec.config, spec.size, where)
        self._entry = lru_cache(KEPT_PROBLEMS)(self._draw)  # every sample of a group asks for it
        self._judges = Judges(
            "executor.environments.reasoning_gym:grader",
            {"dataset": spec.dataset, "config": spec.config, "size": spec.size},
            count=spec.graders,
            seconds=spec.grading_s,
        )

    def problem(self, seed: int) -> Problem:
        """The index is drawn evenly; problems of held-out seeds never occur for others."""
        entry = self._entry(seed)
        answer, instruction = entry.get("answer"), self._spec.instruction
        return Problem(
            prompt=_prompt(entry),
            solution=(answers.wrap(str(answer), self._spec.answer),) if answer is not None else (),
            seed=seed,
            system=answers.request(self._spec.answer) if instruction is None else instruction,
        )

    async def step(self, problem: Problem, turns: Sequence[str]) -> Observation:
        """Every turn is an answer."""
        answer = answers.extract(turns[-1], self._spec.answer)
        if answer is None:
            return Observation(done=True, reward=0.0)
        posed = base64.b64encode(pickle.dumps(self._entry(problem.seed))).decode("ascii")
        return Observation(done=True, reward=await self._judges.grade({"posed": posed, "answer": answer}))

    async def close(self) -> None:
        """End the processes that grade."""
        await self._judges.close()

    def _draw(self, seed: int) -> dict[str, Any]:
        def pose(random: Random) -> dict[str, Any]:
            entry: dict[str, Any] = self._dataset[random.randrange(self._spec.size)]
            return entry

        return draw_apart(seed, pose, _prompt)


def _prompt(entry: dict[str, Any]) -> str:
    return str(entry["question"]).strip()


def grader(setting: dict[str, Any]) -> Grade:
    """The scorer of a dataset, for a process of its own: a request is a pickled problem and an answer."""
    dataset = _dataset(**setting, where="dataset")

    def grade(request: dict[str, Any]) -> float:
        entry = pickle.loads(base64.b64decode(request["posed"]))  # the driver's own
        return float(dataset.score_answer(answer=request["answer"], entry=entry))

    return grade


def _dataset(dataset: str, config: dict[str, Any], size: int, where: str) -> Any:
    """A dataset of the library; raises `InputError` for a name or a configuration that it refuses."""
    library = require("reasoning_gym", where, "reasoning_gym")
    known = require("reasoning_gym.factory", where, "reasoning_gym").DATASETS
    if dataset not in known:
        close = difflib.get_close_matches(dataset, known, n=3, cutoff=0.4)
        wanted = f"did you mean {' or '.join(close)}?" if close else "see reasoning_gym.factory.DATASETS"
        raise InputError(f"{where}.dataset", f"reasoning-gym has no dataset {dataset!r}", wanted)
    for key, mending in (
        ("seed", "leave it out: seeds come from the run's"),
        ("size", "write size beside config"),
    ):
        if key in config:
            raise InputError(f"{where}.config.{key}", f"{key} is no key of config", mending)
    try:
        return library.create_dataset(dataset, seed=0, size=size, **config)
    except (AssertionError, TypeError, ValueError) as error:
        problem = f"{dataset} does not take {json.dumps(config)} ({error})"
        raise InputError(f"{where}.config", problem, f"wanted {_keys(known[dataset][1])}") from None


def _keys(config: Any) -> str:
    """The keys of a dataset's configuration with their defaults."""
    fields = config.__dataclass_fields__.values()
    own = [field for field in fields if field.name not in ("seed", "size")]
    return "a mapping of " + ", ".join(f"{field.name} ({field.default!r})" for field in own)
