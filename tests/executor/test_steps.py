"""Environment steps one by one: which answer counts."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from scripted_engines import END, FIRST_MARK
from scripted_runs import GOOD, ScriptedEnvironment, small

from executor.background import Background
from executor.clock import Clock
from executor.environments import Observation, Problem
from executor.protocols import TurnResult
from executor.steps import EnvironmentSteps
from executor.transcripts import Codec, Transcripts
from marlaas.commands import Generate, StepEnvironment
from marlaas.events import EnvironmentStepped, Event


def test_an_answer_that_comes_after_its_step_was_tried_again_is_neither_kept_nor_told(tmp_path: Path) -> None:
    """Not even when the environment swallows its cancellation."""
    answers = iter([Observation(done=True, reward=-1.0), GOOD])

    async def stubborn(problem: Problem, turns: Sequence[str]) -> Observation:
        answer = next(answers)
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            await asyncio.sleep(0.1)
        return answer

    async def main() -> tuple[list[Event], list[float]]:
        experiment = small(tmp_path)
        codec = Codec(Path(experiment.model.path))
        environments = {"env": ScriptedEnvironment(stubborn)}
        transcripts = Transcripts(0, experiment.tasks, environments, codec)
        failures: list[BaseException] = []
        background = Background(failures.append)
        steps = EnvironmentSteps(experiment, transcripts, Clock(), background)
        events: list[Event] = []
        generate = Generate(id=1, replica="r", task="task-0", version=0, step=0, turn=0, trajectories=(0,))
        transcripts.begin_turn(generate, 0)
        transcripts.record_turn(generate, 0, TurnResult(tokens=[FIRST_MARK, END], logprobs=[-1.0, -1.0]))
        for number in (2, 3):
            steps.start(step(number), events.append)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert len(background) == 0
        assert failures == []
        return events, transcripts.rewards("task-0", 0, [0])

    (event,), rewards = asyncio.run(main())
    assert isinstance(event, EnvironmentStepped)
    assert (event.command, event.reward) == (3, 1.0)
    assert rewards == [1.0]


def step(number: int) -> StepEnvironment:
    """A try of the first turn of trajectory 0."""
    return StepEnvironment(id=number, environment="env", task="task-0", step=0, turn=0, trajectory=0)
