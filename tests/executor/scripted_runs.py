"""Small real runs with scripted engines and environments, for tests of the driver."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import scripted_engines
from msgspec.structs import replace

from executor.backend import Plugins
from executor.environments import Observation, Problem
from marlaas.commands import Command
from marlaas.events import Event
from marlaas.invariants import check
from marlaas.scheduler import Scheduler
from marlaas.spec import (
    EnvironmentSpec,
    Experiment,
    Limits,
    ModelSpec,
    Operation,
    SumsEnvironment,
    TaskSpec,
)

Answer = Callable[[Problem, Sequence[str]], Any]

LIMITS = Limits()
GOOD = Observation(done=True, reward=1.0)


class ScriptedEnvironment:
    """Answers with `answer`, which may return an observation, anything else, or a coroutine of either."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def problem(self, seed: int) -> Problem:
        return Problem(prompt=f"p{seed % 100}=", solution=("x",), seed=seed)

    async def step(self, problem: Problem, turns: Sequence[str]) -> Observation:
        answer = self._answer(problem, turns)
        observation: Observation = await answer if asyncio.iscoroutine(answer) else answer
        return observation


class Memory:
    """A recorder that keeps everything."""

    def __init__(self) -> None:
        self.entries: list[tuple[Event, tuple[Command, ...]]] = []

    def write(self, event: Event, commands: tuple[Command, ...]) -> None:
        self.entries.append((event, commands))

    @property
    def events(self) -> list[Event]:
        return [event for event, _ in self.entries]

    @property
    def commands(self) -> list[Command]:
        return [command for _, commands in self.entries for command in commands]


def small(
    tmp_path: Path,
    *,
    environments: Sequence[str] = ("env", "env"),
    steps: int = 2,
    max_turns: int = 1,
    operations: tuple[Operation, ...] = (),
    limits: Limits = LIMITS,
    **environment: Any,
) -> Experiment:
    """Tasks `task-0`, `task-1`, ...: one per entry of `environments`, 2 prompts × 2 samples per step."""
    shape = TaskSpec(name="shape", environment="env", steps=steps, prompts=2, samples=2, max_turns=max_turns)
    return Experiment(
        name="small",
        tasks=tuple(
            replace(shape, name=f"task-{i}", environment=name) for i, name in enumerate(environments)
        ),
        environments={name: SumsEnvironment(**environment) for name in dict.fromkeys(environments)},
        model=ModelSpec(path=scripted_engines.write_model_folder(tmp_path / "model")),
        limits=limits,
        operations=operations,
    )


def scripted(*answers: Answer, replica: str = "WatermarkReplica", lane: str = "WatermarkLane") -> Plugins:
    """Scripted engines; the environments of an experiment answer with `answers` in turn, or well."""
    left = list(answers)

    def environment(spec: EnvironmentSpec) -> ScriptedEnvironment:
        return ScriptedEnvironment(left.pop(0) if left else lambda problem, turns: GOOD)

    return Plugins(
        replica=f"scripted_engines:{replica}", lane=f"scripted_engines:{lane}", environment=environment
    )


def assert_replays(experiment: Experiment, records: Iterable[tuple[Event, tuple[Command, ...]]]) -> None:
    """A fresh scheduler gives the recorded commands for the recorded events; its books always balance."""
    scheduler = Scheduler(experiment)
    for event, commands in records:
        assert scheduler.handle(event) == commands
        check(scheduler)
