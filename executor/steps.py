"""Environment steps under way: one asyncio task each, waiting out its latency and asking the environment.

Owns which step of a trajectory is the present one. How many may run at once and how long one may take
is the scheduler's to say; a step that is superseded, dropped or closed is cancelled here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from executor.background import Background
from executor.clock import Clock
from executor.environments import Observation, latency_s
from executor.transcripts import Key, Transcripts
from executor.worker import one_line
from marlaas.commands import StepEnvironment
from marlaas.events import CommandFailed, EnvironmentStepped, Event
from marlaas.spec import Experiment


class EnvironmentSteps:
    """All environment steps of a run."""

    def __init__(
        self, experiment: Experiment, transcripts: Transcripts, clock: Clock, background: Background
    ) -> None:
        self._experiment = experiment
        self._transcripts = transcripts
        self._clock = clock
        self._background = background
        self._present: dict[Key, asyncio.Task[None]] = {}

    def start(self, command: StepEnvironment, emit: Callable[[Event], None]) -> None:
        """Begin a step, cancelling an earlier try of the same trajectory."""
        key = (command.task, command.step, command.trajectory)
        self.cancel([key])
        self._present[key] = self._background.spawn(self._step(command, key, emit))

    def cancel(self, keys: Iterable[Key]) -> None:
        """Give up the steps of these trajectories, where there are any."""
        for key in keys:
            if (task := self._present.pop(key, None)) is not None:
                task.cancel()

    def cancel_task(self, name: str) -> None:
        """Give up every step of a task."""
        self.cancel([key for key in self._present if key[0] == name])

    async def _step(self, command: StepEnvironment, key: Key, emit: Callable[[Event], None]) -> None:
        answer: Observation | Exception
        try:
            answer = await self._answer(command, key)
        except Exception as error:  # noqa: BLE001 - whatever an environment does is data
            answer = error
        if self._present.get(key) is not asyncio.current_task():
            return  # an environment may swallow its cancellation; its answer is not wanted any more
        del self._present[key]
        if isinstance(answer, Exception):
            emit(CommandFailed(at=self._clock.now(), command=command.id, reason=one_line(answer)))
            return
        num_tokens = self._transcripts.record_answer(key, command.turn, answer)
        emit(
            EnvironmentStepped(
                at=self._clock.now(),
                command=command.id,
                done=answer.done,
                reward=answer.reward,
                observation_tokens=num_tokens,
            )
        )

    async def _answer(self, command: StepEnvironment, key: Key) -> Observation:
        latency = self._experiment.environments[command.environment].latency_s
        seconds = latency_s(latency, self._experiment.seed, *key, command.turn)
        if seconds > 0:
            await asyncio.sleep(seconds)
        return await self._transcripts.ask(key, command.turn)
