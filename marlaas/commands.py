"""Orders, imperative: everything the scheduler can ask of a world.

A world begins the work and later emits the event that ends it, named in each docstring; any command
of a worker or environment may instead be answered by `CommandFailed`. Trajectories are numbered
within their rollout batch: prompt index × samples per prompt + sample index.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Outcome = Literal["done", "failed", "cancelled"]


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False):
    """Something a world must do; `id` is unique in the run and rises by one."""

    id: int


class StartWorker(Command, frozen=True, kw_only=True):
    """Start a replica or lane afresh, killing what is left of it first.

    Ends in `WorkerUp` or `WorkerLost`.
    """

    worker: str


class OpenService(Command, frozen=True, kw_only=True):
    """Every worker has answered its first start; submissions and operations begin to count from now.

    The world submits each task `submit_at_s` after this and begins the experiment's operations.
    Ends in `TaskSubmitted` for each task.
    """


class CreateAdapter(Command, frozen=True, kw_only=True):
    """Make version 0 of a task's adapter, pristine, on a lane. Ends in `AdapterCreated`."""

    lane: str
    task: str


class LoadAdapter(Command, frozen=True, kw_only=True):
    """Bring an adapter version into a slot of a replica. Ends in `AdapterLoaded`."""

    replica: str
    task: str
    version: int


class UnloadAdapter(Command, frozen=True, kw_only=True):
    """Free the slot of an adapter version on a replica. Ends in `AdapterUnloaded`."""

    replica: str
    task: str
    version: int


class Generate(Command, frozen=True, kw_only=True):
    """Sample one turn of each named trajectory. Ends in one `TurnGenerated` per trajectory."""

    replica: str
    task: str
    version: int
    step: int
    turn: int
    trajectories: tuple[int, ...]


class AbortTurns(Command, frozen=True, kw_only=True):
    """Stop these trajectories of an earlier `Generate`. Ends in `TurnsAborted`."""

    replica: str
    generate: int
    trajectories: tuple[int, ...]


class StepEnvironment(Command, frozen=True, kw_only=True):
    """Hand one turn to the environment. Ends in `EnvironmentStepped`."""

    environment: str
    task: str
    step: int
    turn: int
    trajectory: int


class Train(Command, frozen=True, kw_only=True):
    """Update a task from `version` on exactly these trajectories. Ends in `TrainingFinished`."""

    lane: str
    task: str
    step: int
    version: int
    trajectories: tuple[int, ...]


class Publish(Command, frozen=True, kw_only=True):
    """Make the version just trained on this lane durable and loadable. Ends in `AdapterPublished`."""

    lane: str
    task: str
    version: int


class DropTrajectories(Command, frozen=True, kw_only=True):
    """Give up these trajectories and release what the world holds for them. Has no answer."""

    task: str
    step: int
    trajectories: tuple[int, ...]
    reason: str


class SetTimer(Command, frozen=True, kw_only=True):
    """Report when the run's clock reads `at` nanoseconds. Ends in `TimerFired`."""

    at: int


class CloseTask(Command, frozen=True, kw_only=True):
    """A task has ended; release all that is held for it, keep its committed versions. Has no answer."""

    task: str
    outcome: Outcome
    reason: str = ""


class Alarm(Command, frozen=True, kw_only=True):
    """Tell the operator. Has no answer."""

    message: str
    task: str | None = None


AnyCommand = (
    StartWorker
    | OpenService
    | CreateAdapter
    | LoadAdapter
    | UnloadAdapter
    | Generate
    | AbortTurns
    | StepEnvironment
    | Train
    | Publish
    | DropTrajectories
    | SetTimer
    | CloseTask
    | Alarm
)
