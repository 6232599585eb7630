"""What may follow what: one literal table per entity, and the one function that moves along it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from marlaas.errors import IllegalTransition

TaskState = Literal[
    "expected",  # named in the experiment, not handed in yet
    "queued",  # handed in, waiting for admission
    "creating",  # version 0 is being made
    "ready",  # its next rollout batch may start when the system says so
    "rolling",  # a rollout batch is in flight
    "buffered",  # the batch is complete and waits for a lane
    "training",
    "publishing",
    "paused",
    "done",
    "failed",
    "cancelled",
]
TrajectoryState = Literal[
    "waiting",  # needs a turn; waits for its replica or adapter
    "generating",
    "aborting",  # the replica was told to stop its turn
    "acting",  # its turn is made; waits for a place in the environment
    "stepping",  # the environment works on it
    "finished",
    "dropped",
]
WorkerState = Literal["down", "starting", "up", "dead"]
SlotState = Literal["loading", "resident", "unloading"]
LaneState = Literal["idle", "creating", "training", "publishing"]

_ENDS = ("failed", "cancelled")

TASK: Mapping[str, tuple[str, ...]] = {
    "expected": ("queued", *_ENDS),
    "queued": ("creating", "ready", "paused", *_ENDS),
    "creating": ("ready", "paused", *_ENDS),
    "ready": ("rolling", "paused", *_ENDS),
    "rolling": ("buffered", *_ENDS),
    "buffered": ("training", *_ENDS),
    "training": ("publishing", "buffered", *_ENDS),
    "publishing": ("ready", "paused", "buffered", "done", *_ENDS),
    "paused": ("queued", *_ENDS),
    "done": (),
    "failed": (),
    "cancelled": (),
}
TRAJECTORY: Mapping[str, tuple[str, ...]] = {
    "waiting": ("generating", "dropped"),
    "generating": ("acting", "aborting", "waiting", "dropped"),
    "aborting": ("waiting", "dropped"),
    "acting": ("stepping", "dropped"),
    "stepping": ("waiting", "acting", "finished", "dropped"),
    "finished": ("dropped",),  # its group turned out too small to train on
    "dropped": (),
}
WORKER: Mapping[str, tuple[str, ...]] = {
    "down": ("starting",),
    "starting": ("up", "starting", "dead"),
    "up": ("starting", "dead"),
    "dead": (),
}
SLOT: Mapping[str, tuple[str, ...]] = {
    "loading": ("resident",),
    "resident": ("unloading",),
    "unloading": (),
}
LANE: Mapping[str, tuple[str, ...]] = {
    "idle": ("creating", "training"),
    "creating": ("idle",),
    "training": ("publishing", "idle"),
    "publishing": ("idle",),
}

TERMINAL: tuple[TaskState, ...] = ("done", "failed", "cancelled")
IN_FLIGHT: tuple[TaskState, ...] = ("creating", "ready", "rolling", "buffered", "training", "publishing")


def check_move(table: Mapping[str, tuple[str, ...]], who: str, start: str, finish: str) -> None:
    """Raise `IllegalTransition` unless the table has this pair."""
    if finish not in table[start]:
        allowed = ", ".join(table[start]) or "nothing: it has ended"
        raise IllegalTransition(f"{who} cannot go from {start} to {finish}; it may go to {allowed}")
