"""An environment of the library verifiers, as a package would have it: guess, or ask a tool."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def load_environment(num_rows: int = 24, kind: str = "game") -> Any:
    """`game` answers guesses with higher or lower, `tool` has a tool that tells, `group` compares samples."""
    rows = [{"question": f"Number {i}?", "answer": str(i % 10)} for i in range(num_rows)]
    dataset = Dataset.from_list(rows)
    rubric = vf.Rubric(funcs=[compared] if kind == "group" else [right], weights=[1.0])
    if kind == "tool":
        return vf.ToolEnv(dataset=dataset, rubric=rubric, tools=[tell], max_turns=5)
    held_out = Dataset.from_list([{"question": "Held out?", "answer": "7"}])
    return Game(dataset=dataset, eval_dataset=held_out, rubric=rubric, system_prompt="Guess.", max_turns=5)


def right(completion: Any, answer: str) -> float:
    """1 for the number in the last turn, less a tenth for each turn before."""
    turns = [message for message in completion if message.role == "assistant"]
    return float(str(turns[-1].content).strip() == answer) * (1.1 - len(turns) / 10)


def compared(completions: list[Any], answers: list[str]) -> list[float]:
    """A reward that needs all samples of a group."""
    return [0.0] * len(completions)


async def tell(number: int) -> str:
    """Tell the answer of a question.

    Args:
        number: the number in the question
    """
    if number < 0:
        raise ValueError("no such number")
    return f"It is {number % 10}."


class Game(vf.MultiTurnEnv):  # type: ignore[misc]
    """Higher or lower, until the guess is right; keeps count in its state."""

    async def setup_state(self, state: Any) -> Any:
        state["guesses"] = 0
        return state

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        state["guesses"] += 1
        said = str(messages[-1].content).strip()
        if said == "crash":
            raise RuntimeError("the game is broken")
        if said == state["answer"]:
            state["final_env_response"] = [vf.UserMessage(content="right")]
            return state["final_env_response"]
        hint = "higher" if said.isdigit() and int(said) < int(state["answer"]) else "lower"
        return [vf.UserMessage(content=f"{state['guesses']}: {hint}")]
