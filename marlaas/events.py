"""Facts, past tense: everything the scheduler can be told. `at` is nanoseconds since the run began.

An event that answers a command carries its id as `command`. A late or duplicate answer is legal.
Names ending in `_tokens` and `_ns` are counts of tokens and nanoseconds.
"""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False):
    """Something that happened in a world."""

    at: int


class RunStarted(Event, frozen=True, kw_only=True):
    """The run began; always the first event."""


class TaskSubmitted(Event, frozen=True, kw_only=True):
    """A tenant handed in a task of the experiment."""

    task: str


class PauseRequested(Event, frozen=True, kw_only=True):
    """A tenant asked to pause; the task stops at its next step boundary and keeps its state."""

    task: str


class ResumeRequested(Event, frozen=True, kw_only=True):
    """A tenant asked a paused task to go on."""

    task: str


class CancelRequested(Event, frozen=True, kw_only=True):
    """A tenant asked to end a task now; committed versions stay."""

    task: str


class StopRequested(Event, frozen=True, kw_only=True):
    """The operator asked the run to end soon: lanes commit what they are at, nothing new begins."""


class WorkerUp(Event, frozen=True, kw_only=True):
    """A replica or lane is ready and empty: no adapter resident, nothing in flight."""

    command: int
    worker: str


class WorkerLost(Event, frozen=True, kw_only=True):
    """A replica or lane is gone with everything in flight on it."""

    worker: str
    reason: str


class AdapterCreated(Event, frozen=True, kw_only=True):
    """Version 0 of a task's adapter exists and is durable."""

    command: int
    fingerprint: str


class AdapterLoaded(Event, frozen=True, kw_only=True):
    """A replica holds an adapter version in a slot; `fingerprint` is of the weights it holds."""

    command: int
    fingerprint: str


class AdapterUnloaded(Event, frozen=True, kw_only=True):
    """A replica no longer holds an adapter version; its slot is free."""

    command: int


class TurnGenerated(Event, frozen=True, kw_only=True):
    """One trajectory's turn was sampled; `task` and `version` name the adapter that really made it.

    `prompt_tokens` is the context the turn began with, `output_tokens` what was sampled.
    """

    command: int
    trajectory: int
    task: str
    version: int
    prompt_tokens: int
    output_tokens: int


class EnvironmentStepped(Event, frozen=True, kw_only=True):
    """The environment answered a turn: the episode is over with a reward, or goes on.

    `reward` is None where a world does not know it (simulation); `observation_tokens` are appended
    to the context of the next turn.
    """

    command: int
    done: bool
    reward: float | None = None
    observation_tokens: int = 0


class TurnsAborted(Event, frozen=True, kw_only=True):
    """A replica has stopped the turns it was told to abort; their KV is free."""

    command: int


class TrainingStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """What the trainer saw in one update; None where a world does not know it.

    `logprob_gap` is the mean absolute difference between the sampler's and the trainer's token
    log-probabilities; `updated` is False for a committed no-op (all advantages zero).
    """

    num_tokens: int
    updated: bool = True
    loss: float | None = None
    grad_norm: float | None = None
    kl: float | None = None
    logprob_gap: float | None = None
    clip_fraction: float | None = None


class TrainingFinished(Event, frozen=True, kw_only=True):
    """A lane computed the next version of a task; it is not durable yet."""

    command: int
    stats: TrainingStats


class AdapterPublished(Event, frozen=True, kw_only=True):
    """The next version is durable and loadable by replicas."""

    command: int
    fingerprint: str


class CommandFailed(Event, frozen=True, kw_only=True):
    """A command could not be carried out; for `Generate`, `trajectory` names the one that failed."""

    command: int
    reason: str
    trajectory: int | None = None


class TimerFired(Event, frozen=True, kw_only=True):
    """The instant asked for by a `SetTimer` has come."""

    command: int


class EngineMeasured(Event, frozen=True, kw_only=True):
    """A replica's counters since its last report. The scheduler ignores them; calibration reads them.

    Sums run over the iterations of the window: decoding sequences, their resident KV tokens, and
    distinct adapters. `busy_ns` is time inside iterations, prefill included; `prefill_ns` is the part
    spent in `num_prefills` prefill passes over `prefill_tokens` tokens.
    """

    worker: str
    num_iterations: int
    busy_ns: int
    sequences_sum: int
    kv_tokens_sum: int
    adapters_sum: int
    num_prefills: int = 0
    prefill_tokens: int = 0
    prefill_ns: int = 0


AnyEvent = (
    RunStarted
    | TaskSubmitted
    | PauseRequested
    | ResumeRequested
    | CancelRequested
    | StopRequested
    | WorkerUp
    | WorkerLost
    | AdapterCreated
    | AdapterLoaded
    | AdapterUnloaded
    | TurnGenerated
    | EnvironmentStepped
    | TurnsAborted
    | TrainingFinished
    | AdapterPublished
    | CommandFailed
    | TimerFired
    | EngineMeasured
)
