"""`sums`: addition and subtraction of whole numbers, `47+85=` answered by `132`."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from executor.environments.problems import Observation, Problem, draw, grade
from marlaas.spec import SumsEnvironment


class Sums:
    """Sums and differences of numbers of up to `digits` digits; a difference may be negative."""

    def __init__(self, spec: SumsEnvironment) -> None:
        self._spec = spec

    def problem(self, seed: int) -> Problem:
        """Both numbers are drawn evenly from 0 to 10^digits - 1."""
        return draw(seed, self._pose)

    def _pose(self, random: Random) -> tuple[str, tuple[str, ...]]:
        left, right = (random.randrange(10**self._spec.digits) for _ in range(2))
        operation = random.choice(self._spec.operations)
        result = left + right if operation == "+" else left - right
        return f"{left}{operation}{right}=", (str(result),)

    async def step(self, problem: Problem, turns: Sequence[str]) -> Observation:
        """Every turn is an answer."""
        return grade(problem, turns[-1])
