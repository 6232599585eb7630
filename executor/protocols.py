"""What crosses the pipe between the driver and its workers, and the engines behind them.

Everything here is picklable data. A worker is given `Order`s and answers with `Report`s; the driver
stamps each report's event with the run's clock. Knows no torch.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from marlaas.commands import Command
from marlaas.errors import MarlaasError
from marlaas.events import Event
from marlaas.spec import LoraSpec, TrainingSpec


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A scheduler command with the data a worker needs to carry it out."""

    command: Command
    payload: Payload | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """An event from a worker (its `at` is set by the driver) with the data that must not enter the trace."""

    event: Event
    payload: TurnResult | None = None


class AdapterFolder(msgspec.Struct, frozen=True, kw_only=True):
    """For `LoadAdapter`: the PEFT folder to load and the fingerprint it was published with."""

    folder: str
    fingerprint: str


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory's next turn: the whole context as token ids, and how to sample.

    `seed` is fixed by (run seed, task, step, prompt, sample, turn), so samples do not depend on neighbours.
    """

    trajectory: int
    context: list[int]
    max_new_tokens: int
    temperature: float
    seed: int


class TurnRequests(msgspec.Struct, frozen=True, kw_only=True):
    """For `Generate`: one request per trajectory of the command, in its order."""

    requests: list[TurnRequest]


class TurnResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a turn sampled: token ids (with the end token when it was sampled) and their log-probabilities.

    `logprobs` are of the sampling distribution at temperature 1 over the full vocabulary, natural log.
    """

    tokens: list[int]
    logprobs: list[float]


class NewAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """For `CreateAdapter`: where version 0 goes, its shape, and the seed of its initial weights."""

    adapter_folder: str
    optimizer_folder: str
    lora: LoraSpec
    training: TrainingSpec
    seed: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One finished trajectory as the trainer needs it.

    `sampled[i]` says that `tokens[i]` was sampled by the policy (and is trained on); `logprobs[i]` is the
    sampler's log-probability there and 0 elsewhere. `group` is the prompt index. Equal lengths.
    """

    trajectory: int
    group: int
    tokens: list[int]
    sampled: list[bool]
    logprobs: list[float]
    reward: float


class TrainingBatch(msgspec.Struct, frozen=True, kw_only=True):
    """For `Train`: the samples, the committed version to start from, and how to update it."""

    samples: list[Sample]
    adapter_folder: str
    optimizer_folder: str
    training: TrainingSpec
    temperature: float
    seed: int


class NextVersion(msgspec.Struct, frozen=True, kw_only=True):
    """For `Publish`: where the trained version goes. `cursor` is what resuming needs to find its data."""

    adapter_folder: str
    optimizer_folder: str
    cursor: dict[str, int]


Payload = AdapterFolder | TurnRequests | NewAdapter | TrainingBatch | NextVersion


class EngineLost(MarlaasError):
    """An engine cannot go on, whatever it is ordered: raised by a lane's `run`, it ends the worker."""


class RolloutEngine(Protocol):
    """Serves many adapters over one frozen base; driven by one worker loop, never blocks for long."""

    def start(self, order: Order) -> None:
        """Take a LoadAdapter, UnloadAdapter, Generate or AbortTurns order."""

    def step(self) -> list[Report]:
        """Run one iteration of the batch, if any; return what ended, answers to orders included."""

    def is_busy(self) -> bool:
        """Whether `step` has something to do."""


class TrainingEngine(Protocol):
    """Trains one adapter at a time."""

    def run(self, order: Order) -> Report:
        """Carry out a CreateAdapter, Train or Publish order to its end; failures are `CommandFailed`."""
