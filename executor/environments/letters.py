"""`sort` and `reverse`: put letters in order, `sort dbca:` answered by `abcd`, or backwards."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from string import ascii_lowercase

from executor.environments.problems import Observation, Problem, draw, grade
from marlaas.spec import ReverseEnvironment, SortEnvironment


def _letters(random: Random, spec: SortEnvironment | ReverseEnvironment) -> str:
    return "".join(random.choices(ascii_lowercase, k=random.randint(spec.min_letters, spec.max_letters)))


class Sort:
    """Letters, repetitions allowed, to be written in alphabetical order."""

    def __init__(self, spec: SortEnvironment) -> None:
        self._spec = spec

    def problem(self, seed: int) -> Problem:
        """The number of letters and each letter are drawn evenly."""
        return draw(seed, self._pose)

    def _pose(self, random: Random) -> tuple[str, tuple[str, ...]]:
        letters = _letters(random, self._spec)
        return f"sort {letters}:", ("".join(sorted(letters)),)

    async def step(self, problem: Problem, turns: Sequence[str]) -> Observation:
        """Every turn is an answer."""
        return grade(problem, turns[-1])


class Reverse:
    """Letters, repetitions allowed, to be written backwards."""

    def __init__(self, spec: ReverseEnvironment) -> None:
        self._spec = spec

    def problem(self, seed: int) -> Problem:
        """The number of letters and each letter are drawn evenly."""
        return draw(seed, self._pose)

    def _pose(self, random: Random) -> tuple[str, tuple[str, ...]]:
        letters = _letters(random, self._spec)
        return f"reverse {letters}:", (letters[::-1],)

    async def step(self, problem: Problem, turns: Sequence[str]) -> Observation:
        """Every turn is an answer."""
        return grade(problem, turns[-1])
