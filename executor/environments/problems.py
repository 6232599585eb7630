"""What every environment shares: the Protocol, problems, observations and exact grading. Knows no task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

import msgspec

from executor.environments.streams import is_held_out, seed_of

HELD_OUT_SHARE = 8
MAX_DRAWS = 1_000


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One problem and what grading it needs.

    `solution` holds the turns of a perfect player; its last one is the answer. `seed` made the problem
    and makes whatever else of its world an environment may need.
    """

    prompt: str
    solution: tuple[str, ...]
    seed: int


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a turn: the episode is over with a reward of 0 or 1, or goes on after `text`."""

    done: bool
    reward: float | None = None
    text: str = ""


class Environment(Protocol):
    """Sets problems and answers turns; keeps no state between calls."""

    def problem(self, seed: int) -> Problem:
        """The problem of this seed, always the same one."""

    async def step(self, problem: Problem, turns: Sequence[str]) -> Observation:
        """Answer the last of `turns`, all the model's turns so far, at least one.

        A turn is the decoded text without the end token that closed it. Any text is legal, none raises.
        """


def draw(seed: int, pose: Callable[[Random], tuple[str, tuple[str, ...]]]) -> Problem:
    """Draw (prompt, solution) until the prompt lies in the seed's part of the problem space.

    One prompt in `HELD_OUT_SHARE` is held out: only held-out seeds pose it, so evaluation problems never
    occur in training however small the space. A space with no prompt in the wanted part
    (a handful of prompts in all) yields its last draw after `MAX_DRAWS`.
    """
    random = Random(seed)
    for _ in range(MAX_DRAWS):
        prompt, solution = pose(random)
        if (seed_of("held-out", prompt) % HELD_OUT_SHARE == 0) == is_held_out(seed):
            break
    return Problem(prompt=prompt, solution=solution, seed=seed)


def grade(problem: Problem, answer: str) -> Observation:
    """End the episode: 1 for exactly the solution, surrounding blanks aside, else 0."""
    return Observation(done=True, reward=float(answer.strip() == problem.solution[-1]))


def out_of_turns(observation: Observation) -> Observation:
    """What an observation becomes on the last turn a task allows: an episode without an answer earns 0."""
    return observation if observation.done else Observation(done=True, reward=0.0)
