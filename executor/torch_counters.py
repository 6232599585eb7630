"""Counts what a replica's iterations do, window by window, for `EngineMeasured`.

Owns what is counted when; decides nothing.
"""

from __future__ import annotations

from executor.engine_window import Window
from executor.torch_batch import Batch
from marlaas.events import EngineMeasured


class Counters:
    """What `EngineMeasured` reports, since the last report."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._window = Window()

    def iteration(self, batch: Batch) -> None:
        """One decode iteration of a batch is about to run."""
        window = self._window
        window.num_iterations += 1
        window.sequences_sum += len(batch.turns)
        window.kv_tokens_sum += batch.num_kv_tokens
        window.adapters_sum += batch.num_adapters

    def prefilled(self, num_tokens: int, elapsed_ns: int) -> None:
        """One prefill pass over contexts of so many tokens was run."""
        self._window.num_prefills += 1
        self._window.prefill_tokens += num_tokens
        self._window.prefill_ns += elapsed_ns

    def busy(self, elapsed_ns: int) -> None:
        """Time was spent inside iterations, prefill included."""
        self._window.busy_ns += elapsed_ns

    def is_due(self, idle: bool) -> bool:
        """Whether to report: the batch has run empty, or a window is full."""
        return idle or self._window.is_full

    def take(self) -> EngineMeasured:
        """The counters as an event; they start again from zero."""
        measured = self._window.measured(self._worker)
        self._window = Window()
        return measured
