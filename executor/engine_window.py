"""Sums over a window of an engine's iterations, and the event that reports them; every engine counts here.

Owns when a window is full; knows no engine.
"""

from __future__ import annotations

import msgspec

from marlaas.events import EngineMeasured

FULL_NS = 250_000_000


class Window(msgspec.Struct, kw_only=True):
    """What `EngineMeasured` reports, by the same names, since the last report."""

    num_iterations: int = 0
    busy_ns: int = 0
    sequences_sum: int = 0
    kv_tokens_sum: float = 0
    adapters_sum: int = 0
    num_prefills: int = 0
    prefill_tokens: int = 0
    prefill_ns: int = 0

    @property
    def is_full(self) -> bool:
        """Whether it is time to report."""
        return self.busy_ns >= FULL_NS

    def measured(self, worker: str) -> EngineMeasured:
        """The sums as a worker's event, of no time yet."""
        sums = msgspec.structs.asdict(self)
        return EngineMeasured(at=0, worker=worker, **sums | {"kv_tokens_sum": round(self.kv_tokens_sum)})
