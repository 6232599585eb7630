"""`math`: mathematical problems of a JSONL file, graded by math-verify.

Reads the public forms of GSM8K (`question`, and an `answer` that ends in `#### 42`) and of AMC12
(`problem` and `answer`, a number or the letter of a choice, or a `solution` that ends in `\\boxed{42}`).
Any equal expression is right: `1/2`, `0.5` and `\\frac{2}{4}`. The library keeps its time by signals,
which only a main thread can have, so it runs in a `Judges` process that keeps time for it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from executor.environments.jsonl import find, read_objects, text_of
from executor.environments.judge import Grade, Judges
from executor.environments.packages import require
from executor.environments.problems import Observation, Problem
from executor.environments.split import given_split, split
from marlaas.errors import InputError
from marlaas.spec import MathEnvironment

INSTRUCTION = "Solve the problem. Reason step by step and write the final answer within \\boxed{}."
MARK = "####"
READ_CHARS = 4_000
CHOICES = frozenset("ABCDE")
_LETTER = re.compile(r"[\s$({]*(?:\\text(?:bf)?\{)?[\s(]*([A-E])[\s).}$]*")
_ANSWER = re.compile(r"answer(?: is|:)?[\s*$({]*(?:\\text(?:bf)?\{)?\(?([A-E])\b", re.IGNORECASE)


class Entry(NamedTuple):
    """A problem's text and its right answer."""

    text: str
    answer: str


class Mathematics:
    """Problems of a file; a turn earns 1 if the answer that math-verify finds in it equals the right one."""

    def __init__(self, spec: MathEnvironment, where: str) -> None:
        require("math_verify", where, "math")
        if "{problem}" not in spec.prompt:
            raise InputError(f"{where}.prompt", f"{spec.prompt!r} leaves the problem out", "wanted {problem}")
        self._spec = spec
        entries = read(find(spec.problems, f"{where}.problems"))
        if spec.held_out is None:
            self._split = split(entries, lambda entry: entry.text, f"{where}.problems")
        else:
            held_out = read(find(spec.held_out, f"{where}.held_out"))
            self._split = given_split(entries, held_out, lambda entry: entry.text, f"{where}.held_out")
        grader = "executor.environments.mathematics:grader"
        self._judges = Judges(grader, None, count=spec.graders, seconds=spec.grading_s)

    def problem(self, seed: int) -> Problem:
        """Each problem of the seed's part of the file is equally likely."""
        entry = self._split.draw(seed)
        return Problem(
            prompt=self._spec.prompt.replace("{problem}", entry.text),
            solution=(f"\\boxed{{{entry.answer}}}",),
            seed=seed,
            system=INSTRUCTION if self._spec.instruction is None else self._spec.instruction,
        )

    async def step(self, problem: Problem, turns: Sequence[str]) -> Observation:
        """Every turn is an answer; of a long one the end is read."""
        right = self._split.draw(problem.seed).answer
        turn = turns[-1].strip()[-READ_CHARS:]
        reward = await self._judges.grade({"right": right, "turn": turn}) if turn else 0.0
        return Observation(done=True, reward=reward)

    async def close(self) -> None:
        """End the processes that grade."""
        await self._judges.close()


def read(file: Path) -> list[Entry]:
    """The problems of a JSONL file; raises `InputError` with file and line for one that is none."""
    return [_entry(place, line) for place, line in read_objects(file)]


def _entry(place: str, line: dict[str, Any]) -> Entry:
    text = text_of(place, line, "question", "problem")
    if line.get("answer") is not None:
        answer = text_of(place, line, "answer")
        if MARK in answer:
            answer = answer.rpartition(MARK)[2].replace(",", "").strip()
        elif "question" in line and "\n" in answer:
            raise InputError(place, "the worked answer has no final one", f"wanted a last line `{MARK} 42`")
    else:
        answer = boxed(text_of(place, line, "solution"))
    if not answer:
        wanted = f"wanted an answer, `{MARK} 42` at its end, or a solution with \\boxed{{42}}"
        raise InputError(place, "no final answer", wanted)
    return Entry(text, answer)


def boxed(solution: str) -> str:
    """What stands in the last `\\boxed{...}`, braces within it included, or nothing."""
    _, found, rest = solution.rpartition("\\boxed{")
    depth = 1
    for place, character in enumerate(rest if found else ""):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[:place].strip()
    return ""


def grader(_: None) -> Grade:
    """Compares the answer in a turn with the right one, for a process of its own."""
    from math_verify import parse, verify

    def grade(request: dict[str, Any]) -> float:
        right, turn = request["right"], request["turn"]
        if right in CHOICES:
            return float(choice(turn) == right)
        gold, said = parse(f"${right}$", parsing_timeout=None), parse(turn, parsing_timeout=None)
        return float(bool(gold) and verify(gold, said, timeout_seconds=None))

    return grade


def choice(turn: str) -> str:
    """The letter that a turn chooses: in its box, after its last "answer", or alone on its last line."""
    said = _LETTER.fullmatch(boxed(turn)) or _LETTER.fullmatch(turn.strip().rpartition("\n")[2])
    after_answer = _ANSWER.findall(turn)
    return said[1] if said else after_answer[-1] if after_answer else ""
