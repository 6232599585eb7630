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


class StartWorker(Command):
    """Start a replica or lane afresh, killing what is left of it first. Ends in `WorkerUp` or `WorkerLost`."""

    worker: str


class CreateAdapter(Command):
    """Make version 0 of a task's adapter, pristine, on a lane. Ends in `AdapterCreated`."""

    lane: str
    task: str


class LoadAdapter(Command):
    """Bring an adapter version into a slot of a replica. Ends in `AdapterLoaded`."""

    replica: str
    task: str
    version: int


class UnloadAdapter(Command):
    """Free the slot of an adapter version on a replica. Ends in `AdapterUnloaded`."""

    replica: str
    task: str
    version: int


class Generate(Command):
    """Sample one turn of each named trajectory. Ends in one `TurnGenerated` per trajectory."""

    replica: str
    task: str
    version: int
    step: int
    turn: int
    trajectories: tuple[int, ...]


class AbortTurns(Command):
    """Stop these trajectories of an earlier `Generate`. Ends in `TurnsAborted`."""

    replica: str
    generate: int
    trajectories: tuple[int, ...]


class StepEnvironment(Command):
    """Hand one turn to the environment. Ends in `EnvironmentStepped`."""

    environment: str
    task: str
    step: int
    turn: int
    trajectory: int


class Train(Command):
    """Update a task from `version` on exactly these trajectories. Ends in `TrainingFinished`."""

    lane: str
    task: str
    step: int
    version: int
    trajectories: tuple[int, ...]


class Publish(Command):
    """Make the version just trained on this lane durable and loadable. Ends in `AdapterPublished`."""

    lane: str
    task: str
    version: int


class DropTrajectories(Command):
    """Give up these trajectories and release what the world holds for them. Has no answer."""

    task: str
    step: int
    trajectories: tuple[int, ...]
    reason: str


class SetTimer(Command):
    """Report when the run's clock reads `at` nanoseconds. Ends in `TimerFired`."""

    at: int


class CloseTask(Command):
    """A task has ended; release all that is held for it, keep its committed versions. Has no answer."""

    task: str
    outcome: Outcome
    reason: str = ""


class Alarm(Command):
    """Tell the operator. Has no answer."""

    message: str
    task: str | None = None


AnyCommand = (
    StartWorker
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
