"""What environments share: the Protocol, problems, tools, observations, exact grading. Knows no task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from executor.environments.streams import is_held_out, seed_of

T = TypeVar("T")
HELD_OUT_SHARE = 8
MAX_DRAWS = 1_000


Role = Literal["user", "tool"]


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """Something the model may call; `parameters` is a JSON schema of an object."""

    name: str
    description: str
    parameters: dict[str, Any]


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One problem and what grading it needs.

    `solution` holds the turns of a perfect player, as far as they are known; its last one is the answer.
    `seed` made the problem and makes whatever else of its world an environment may need. `system` says what
    is wanted; it and `tools` are shown as the model's chat template has it, else before the prompt.
    """

    prompt: str
    solution: tuple[str, ...]
    seed: int
    system: str = ""
    tools: tuple[Tool, ...] = ()


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a turn: the episode is over with a reward, or goes on after `text`, said in a `role`."""

    done: bool
    reward: float | None = None
    text: str = ""
    role: Role = "user"


class Environment(Protocol):
    """Sets problems and answers turns; keeps no state between calls but what it could make again."""

    def problem(self, seed: int) -> Problem:
        """The problem of this seed, always the same one."""

    async def step(self, problem: Problem, turns: Sequence[str]) -> Observation:
        """Answer the last of `turns`, all the model's turns so far, at least one.

        A turn is the decoded text without the end token that closed it. Any text is legal, none raises.
        """


@runtime_checkable
class Closing(Protocol):
    """An environment that holds processes or connections."""

    async def close(self) -> None:
        """Let go of them; a later call may open them again."""


async def close_all(environments: Iterable[Environment]) -> None:
    """Close those environments that have something to close."""
    for environment in environments:
        if isinstance(environment, Closing):
            await environment.close()


def draw(seed: int, pose: Callable[[Random], tuple[str, tuple[str, ...]]]) -> Problem:
    """The problem of (prompt, solution), drawn so that evaluation problems never occur in training."""
    prompt, solution = draw_apart(seed, pose, lambda posed: posed[0])
    return Problem(prompt=prompt, solution=solution, seed=seed)


def draw_apart(seed: int, pose: Callable[[Random], T], prompt_of: Callable[[T], str]) -> T:
    """Draw something with a prompt until that lies in the seed's part of the problem space.

    One prompt in `HELD_OUT_SHARE` is held out: only held-out seeds pose it, so evaluation problems never
    occur in training however small the space. A space with no prompt in the wanted part
    (a handful of prompts in all) yields its last draw after `MAX_DRAWS`.
    """
    random = Random(seed)
    for _ in range(MAX_DRAWS):
        posed = pose(random)
        if is_held_out_prompt(prompt_of(posed)) == is_held_out(seed):
            break
    return posed


def is_held_out_prompt(prompt: str) -> bool:
    """Whether a prompt belongs to evaluation: one in `HELD_OUT_SHARE`, the same ones in every run."""
    return seed_of("held-out", prompt) % HELD_OUT_SHARE == 0


def grade(problem: Problem, answer: str) -> Observation:
    """End the episode: 1 for exactly the solution, surrounding blanks aside, else 0."""
    return Observation(done=True, reward=float(answer.strip() == problem.solution[-1]))


def out_of_turns(observation: Observation) -> Observation:
    """What an observation becomes on the last turn a task allows: an episode without an answer earns 0."""
    return observation if observation.done else Observation(done=True, reward=0.0)
