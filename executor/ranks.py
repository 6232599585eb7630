"""The processes that compute one update together, as the trainer sees them; here for a trainer on its own.

Owns the seam between the update's arithmetic and its distribution. `fsdp_ranks.py` has the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch

from executor.adapters import AdapterProblem
from executor.grpo import MicroBatch, Sums, micro_batches
from executor.policy import LoraPolicy
from executor.protocols import Sample

T = TypeVar("T")


class Ranks(Protocol):
    """What a trainer must do with its peers, all of which are given the same orders.

    `is_first` says who writes files; `order_failures` are the exceptions of which only the order fails.
    """

    is_first: bool
    order_failures: tuple[type[Exception], ...]

    def share(
        self, samples: Sequence[Sample], advantage: dict[int, float], budget_tokens: int, device: torch.device
    ) -> Iterator[tuple[MicroBatch, float]]:
        """This rank's micro-batches, as many on every rank, each with its weight: 0 for one that fills up."""

    def total(self, policy: LoraPolicy, sums: Sums, has_gradients: bool) -> Sums:
        """Add up gradients, in place and to the same bits on every rank, and sums."""

    def agreed(self, work: Callable[[], T]) -> T:
        """Do work that may fail on one rank; raises `AdapterProblem` on all if it does."""


class Alone:
    """A trainer without peers."""

    is_first = True
    order_failures: tuple[type[Exception], ...] = (AdapterProblem, OSError, torch.OutOfMemoryError)

    def share(
        self, samples: Sequence[Sample], advantage: dict[int, float], budget_tokens: int, device: torch.device
    ) -> Iterator[tuple[MicroBatch, float]]:
        """All of them."""
        return ((batch, 1.0) for batch in micro_batches(samples, advantage, budget_tokens, device))

    def total(self, policy: LoraPolicy, sums: Sums, has_gradients: bool) -> Sums:
        """What there is."""
        return sums

    def agreed(self, work: Callable[[], T]) -> T:
        """Do the work."""
        return work()
