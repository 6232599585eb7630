"""Steps as they are committed: what a watcher of a run tells of each, from the records alone.

Follows events and commands as they are recorded, live or read back from a trace; keeps only what is in
flight. Knows neither terminals nor files.
"""

from __future__ import annotations

import msgspec

from marlaas.commands import Command, Publish, StepEnvironment, Train
from marlaas.events import (
    AdapterPublished,
    CommandFailed,
    EnvironmentStepped,
    Event,
    TrainingFinished,
    TrainingStats,
    TurnGenerated,
)


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A committed step of a task: it made `version`.

    `reward` and `output_tokens` are means over the trajectories trained on, no reward is known in simulation;
    `seconds` is the time since the task's last commit or its first turn.
    """

    task: str
    version: int
    at: int
    seconds: float
    num_trajectories: int
    output_tokens: float
    reward: float | None
    stats: TrainingStats


class _Batch(msgspec.Struct):
    """What is known of a task's step in flight, by trajectory."""

    since: int | None = None
    rewards: dict[int, float | None] = {}
    output_tokens: dict[int, int] = {}
    trained: tuple[int, ...] = ()
    stats: TrainingStats | None = None


class Commits:
    """Call it with each record of a run, in order; it returns the step that the record committed, if any."""

    def __init__(self) -> None:
        self._batches: dict[str, _Batch] = {}
        self._orders: dict[int, Train | Publish | StepEnvironment] = {}

    def __call__(self, event: Event, commands: tuple[Command, ...]) -> Step | None:
        """Take one record."""
        step = None
        match event:
            case TurnGenerated():
                self._generated(event)
            case EnvironmentStepped() | TrainingFinished() | AdapterPublished():
                step = self._answered(event)
            case CommandFailed():
                self._orders.pop(event.command, None)
        for command in commands:
            if isinstance(command, Train | Publish | StepEnvironment):
                self._orders[command.id] = command
        return step

    def _generated(self, event: TurnGenerated) -> None:
        batch = self._batches.setdefault(event.task, _Batch())
        batch.output_tokens[event.trajectory] = (
            batch.output_tokens.get(event.trajectory, 0) + event.output_tokens
        )
        if batch.since is None:
            batch.since = event.at

    def _answered(self, event: EnvironmentStepped | TrainingFinished | AdapterPublished) -> Step | None:
        order = self._orders.pop(event.command, None)
        if order is None:
            return None
        batch = self._batches.setdefault(order.task, _Batch())
        match event, order:
            case EnvironmentStepped(done=True), StepEnvironment():
                batch.rewards[order.trajectory] = event.reward
            case TrainingFinished(), Train():
                batch.trained, batch.stats = order.trajectories, event.stats
            case AdapterPublished(), Publish():
                self._batches[order.task] = _Batch(since=event.at)
                return _step(order, event.at, batch)
        return None


def _step(order: Publish, at: int, batch: _Batch) -> Step:
    rewards = [batch.rewards.get(trajectory) for trajectory in batch.trained]
    assert batch.stats is not None, "a version is published after its training"
    known = [reward for reward in rewards if reward is not None]
    return Step(
        task=order.task,
        version=order.version,
        at=at,
        seconds=(at - (at if batch.since is None else batch.since)) / 1e9,
        num_trajectories=len(batch.trained),
        output_tokens=sum(batch.output_tokens[t] for t in batch.trained) / len(batch.trained),
        reward=sum(known) / len(known) if known else None,
        stats=batch.stats,
    )
