"""`verifiers`: an environment of the library, defined here as a package of its own would define it."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from executor.environments import Environment, Observation, build, close_all, held_out_seed, problem_seed
from marlaas.errors import InputError
from marlaas.spec import VerifiersEnvironment

pytest.importorskip("verifiers", reason="verifiers is not installed: pip install 'marlaas[verifiers]'")
pytest.importorskip("verifiers.clients", reason="this version of verifiers has not the classic interface")
pytestmark = [
    pytest.mark.slow,  # importing the library takes seconds
    pytest.mark.filterwarnings("ignore"),  # of the library and of what it imports
]


def spec_of(kind: str, **args: Any) -> VerifiersEnvironment:
    """The environment in `vf_guess.py`, which is found as an installed package is."""
    return VerifiersEnvironment(environment="vf-guess", args={"kind": kind, **args})


async def episode(environment: Environment, seed: int, turns: Sequence[str]) -> list[Observation]:
    """What is seen after each turn of an episode."""
    problem = environment.problem(seed)
    return [await environment.step(problem, turns[: n + 1]) for n in range(len(turns))]


def play(kind: str, *turns: str, seed: int = 2) -> list[Observation]:
    """What is seen after each turn."""

    async def main() -> list[Observation]:
        environment = build(spec_of(kind))
        try:
            return await episode(environment, seed, turns)
        finally:
            await close_all([environment])

    return asyncio.run(main())


def answer_of(kind: str, seed: int = 2) -> str:
    """The right answer of a problem."""
    return str(int(build(spec_of(kind)).problem(seed).prompt.split()[1].removesuffix("?")) % 10)


def test_problems_come_from_the_dataset_with_its_system_prompt() -> None:
    """Held-out ones from its evaluation dataset where it has one, else one row in eight."""
    game, tool = build(spec_of("game")), build(spec_of("tool"))
    assert game.problem(2).system == "Guess."
    assert game.problem(held_out_seed(0, "t", 0)).prompt == "Held out?"
    rows = [
        {environment.problem(problem_seed(0, "t", 0, i)).prompt for i in range(400)}
        for environment in (game, tool)
    ]
    assert len(rows[0]) == 24
    assert len(rows[1]) == 21
    assert [t.name for t in tool.problem(2).tools] == ["tell"]
    assert game.problem(2).tools == ()


def test_the_environment_answers_and_its_rubric_rewards() -> None:
    """State lasts from turn to turn; the reward is the rubric's own."""
    right = answer_of("game")
    wrong = "10"
    first, second, end = play("game", wrong, wrong, right)
    assert [first.text, second.text] == ["1: lower", "2: lower"]
    assert (first.role, first.done, second.done, end.done) == ("user", False, False, True)
    assert end.reward == pytest.approx(0.8)
    assert play("game", *[wrong] * 5)[-1] == Observation(done=True, reward=0.0)


def test_tools_are_called_by_whatever_call_the_model_writes() -> None:
    """Results and the tool's errors come back; a call that cannot be read is told so; an answer ends it."""
    number = int(build(spec_of("tool")).problem(2).prompt.split()[1].removesuffix("?"))
    good = f"<tool_call>{json.dumps({'name': 'tell', 'arguments': {'number': number}})}</tool_call>"
    bad = f"<tool_call>{json.dumps({'name': 'tell', 'arguments': {'number': -1}})}</tool_call>"
    unread, told, error, end = play("tool", "<tool_call>{oops</tool_call>", good, bad, str(number % 10))
    assert unread.text.startswith("error: the call is not JSON")
    assert (told.text, told.role) == (f"It is {number % 10}.", "tool")
    assert "no such number" in error.text
    assert end.reward == pytest.approx(0.8)


def test_asking_again_gives_the_same_answer() -> None:
    """After a retry, and in an environment that never saw the earlier turns."""
    right, turns = answer_of("game"), ["10", "10"]

    async def main() -> None:
        first, second = build(spec_of("game")), build(spec_of("game"))
        problem = first.problem(2)
        seen = [await first.step(problem, turns) for _ in range(3)]
        assert {each.text for each in seen} == {"2: lower"}
        assert await second.step(problem, [*turns, right]) == await first.step(problem, [*turns, right])
        await close_all([first, second])

    asyncio.run(main())


def test_samples_of_a_group_do_not_share_their_state() -> None:
    """Equal turns of one problem, all at once."""

    async def main() -> list[list[Observation]]:
        environment = build(spec_of("game"))
        episodes = await asyncio.gather(*(episode(environment, 2, ["10"] * 4) for _ in range(16)))
        await close_all([environment])
        return episodes

    for seen in asyncio.run(main()):
        assert [each.text for each in seen] == ["1: lower", "2: lower", "3: lower", "4: lower"]


def test_what_breaks_in_the_environment_is_raised() -> None:
    """It is an event like any other failure, not a reward of nothing."""
    with pytest.raises(RuntimeError, match="the game is broken"):
        play("game", "10", "crash")


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (VerifiersEnvironment(environment="no-such-thing"), r"env: 'no-such-thing' cannot be loaded"),
        (spec_of("game", colour="red"), r"env: 'vf-guess' cannot be loaded .*colour"),
        (spec_of("group"), r"env: 'vf-guess' rewards samples by comparing them"),
    ],
)
def test_what_cannot_be_run_is_refused(spec: VerifiersEnvironment, complaint: str) -> None:
    """Before a run, with its place."""
    with pytest.raises(InputError, match=complaint):
        build(spec, "env")
