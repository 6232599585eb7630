"""What vLLM says of its iterations, summed window by window into `EngineMeasured`.

vLLM mixes prefills with decoding in one iteration and times neither: what an iteration takes beyond the last
that only decoded counts as prefill. KV is what the blocks in use can hold. Owns the sums; decides nothing.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from executor.engine_window import Window
from marlaas.events import EngineMeasured


class _Load(NamedTuple):
    """What the engine holds between two iterations."""

    kv_share: float = 0.0
    num_adapters: int = 0

    @classmethod
    def of(cls, scheduler_stats: Any) -> _Load:
        return cls(scheduler_stats.kv_cache_usage, len(scheduler_stats.running_lora_adapters))


class IterationCounters:
    """A logger of vLLM's statistics, as its `StatLoggerBase` asks for, that keeps what the trace wants."""

    def __init__(self, worker: str, kv_tokens: int) -> None:
        self._worker, self._kv_tokens = worker, kv_tokens
        self._last_ns: int | None = None
        self._decode_ns = 0
        self._left = _Load()
        self._window = Window()

    def begin(self) -> None:
        """Turns are at the engine; the first iteration after it was idle begins now."""
        if self._last_ns is None:
            self._last_ns = time.perf_counter_ns()

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """vLLM's account of one iteration."""
        if scheduler_stats is None or iteration_stats is None:
            return
        now = time.perf_counter_ns()
        elapsed_ns = now - (self._last_ns or now)
        self._last_ns = now
        window = self._window
        window.busy_ns += elapsed_ns
        num_prefills = len(iteration_stats.time_to_first_tokens_iter)
        num_decodes = iteration_stats.num_generation_tokens - num_prefills
        before, self._left = self._left, _Load.of(scheduler_stats)
        if num_decodes:
            window.num_iterations += 1
            window.sequences_sum += num_decodes
            # What is left after an iteration lacks the turns that it ended.
            window.kv_tokens_sum += max(before.kv_share, self._left.kv_share) * self._kv_tokens
            window.adapters_sum += max(before.num_adapters, self._left.num_adapters)
        if num_prefills:
            window.num_prefills += 1
            window.prefill_tokens += iteration_stats.num_prompt_tokens
            window.prefill_ns += max(0, elapsed_ns - (self._decode_ns if num_decodes else 0))
        else:
            self._decode_ns = elapsed_ns

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def log(self) -> None:
        """Nothing to say."""

    def record_sleep_state(self, *args: Any, **kwargs: Any) -> None:
        """It never sleeps."""

    def window(self, is_idle: bool) -> EngineMeasured | None:
        """The counters as an event when a window is full or the engine is idle; they start again at zero."""
        if is_idle:
            self._last_ns = None
        if not self._window.busy_ns or not (is_idle or self._window.is_full):
            return None
        measured = self._window.measured(self._worker)
        self._window = Window()
        return measured
