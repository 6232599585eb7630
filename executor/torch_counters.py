"""Counts what a replica's iterations do, window by window, for `EngineMeasured`.

Owns the sums; decides nothing.
"""

from __future__ import annotations

from executor.torch_batch import Batch
from marlaas.events import EngineMeasured

_WINDOW_NS = 250_000_000


class Counters:
    """What `EngineMeasured` reports, since the last report."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._reset()

    def _reset(self) -> None:
        self._iterations = self._busy_ns = self._sequences = self._kv_tokens = self._adapters = 0
        self._prefills = self._prefill_tokens = self._prefill_ns = 0

    def iteration(self, batch: Batch) -> None:
        """One decode iteration of a batch is about to run."""
        self._iterations += 1
        self._sequences += len(batch.turns)
        self._kv_tokens += batch.num_kv_tokens
        self._adapters += batch.num_adapters

    def prefilled(self, num_tokens: int, elapsed_ns: int) -> None:
        """One prefill pass over contexts of so many tokens was run."""
        self._prefills += 1
        self._prefill_tokens += num_tokens
        self._prefill_ns += elapsed_ns

    def busy(self, elapsed_ns: int) -> None:
        """Time was spent inside iterations, prefill included."""
        self._busy_ns += elapsed_ns

    def is_due(self, idle: bool) -> bool:
        """Whether to report: the batch has run empty, or a window is full."""
        return idle or self._busy_ns >= _WINDOW_NS

    def take(self) -> EngineMeasured:
        """The counters as an event; they start again from zero."""
        measured = EngineMeasured(
            at=0,
            worker=self._worker,
            num_iterations=self._iterations,
            busy_ns=self._busy_ns,
            sequences_sum=self._sequences,
            kv_tokens_sum=self._kv_tokens,
            adapters_sum=self._adapters,
            num_prefills=self._prefills,
            prefill_tokens=self._prefill_tokens,
            prefill_ns=self._prefill_ns,
        )
        self._reset()
        return measured
