"""What one pass of a replica's engine costs, in whole femtoseconds.

Integers make the closed form, token-by-token stepping and any order of summation agree to the last bit,
and doubling every cost doubles every duration exactly. Owns the formulas; knows no queue and no clock.
"""

from __future__ import annotations

from math import isqrt

import msgspec

FS_PER_NS = 1_000_000
FS_PER_S = 10**15


def to_fs(seconds: float) -> int:
    """Seconds as the nearest whole number of femtoseconds."""
    return round(seconds * FS_PER_S)


class IterationCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of one engine iteration, in femtoseconds per unit named.

    A decode iteration of B sequences with A distinct adapters that attends to KV tokens in all takes
    `iteration + per_sequence·B + per_sequence_beyond_knee·max(0, B − knee) + per_kv_token·KV
    + [A > 0]·(adapters + per_adapter·A)`. Reading P tokens of contexts, of which each attends to those before
    it, takes `per_prefill_token·P + half_per_attended_token·(twice such pairs)`: in an iteration beside its
    own terms, in a pass of its own beside `prefill` and the adapter terms.
    """

    iteration_fs: int
    per_sequence_fs: int = 0
    per_sequence_beyond_knee_fs: int = 0
    knee_sequences: int = 0
    per_kv_token_fs: int = 0
    adapters_fs: int = 0
    per_adapter_fs: int = 0
    prefill_fs: int = 0
    per_prefill_token_fs: int = 0
    half_per_attended_token_fs: int = 0

    def __post_init__(self) -> None:
        if self.iteration_fs < 1 or min(msgspec.structs.astuple(self)) < 0:
            raise ValueError("an iteration takes at least 1 fs and no cost is negative")

    def scaled(self, percent: int) -> IterationCosts:
        """The same costs at another pace: every duration in percent of what it was, the knee unchanged."""
        if percent == 100:
            return self
        costs = msgspec.structs.asdict(self)
        scaled = {
            name: cost if name == "knee_sequences" else cost * percent // 100 for name, cost in costs.items()
        }
        return IterationCosts(**scaled)

    def decode_fs(self, num_sequences: int, kv_tokens: int, num_adapters: int) -> int:
        """Duration of one decode iteration."""
        total = self.iteration_fs + self.per_sequence_fs * num_sequences + self.per_kv_token_fs * kv_tokens
        if num_sequences > self.knee_sequences:
            total += self.per_sequence_beyond_knee_fs * (num_sequences - self.knee_sequences)
        if num_adapters:
            total += self.adapters_fs + self.per_adapter_fs * num_adapters
        return total

    def reading_fs(self, num_tokens: int, num_pairs: int) -> int:
        """What reading contexts adds: so many tokens, and twice so many pairs as those they attend to."""
        return self.per_prefill_token_fs * num_tokens + self.half_per_attended_token_fs * num_pairs

    def prefill_pass_fs(self, num_tokens: int, num_pairs: int, num_adapters: int) -> int:
        """Duration of a pass that only reads contexts."""
        total = self.prefill_fs + self.reading_fs(num_tokens, num_pairs)
        if num_adapters:
            total += self.adapters_fs + self.per_adapter_fs * num_adapters
        return total


def run_fs(first_fs: int, growth_fs: int, num_iterations: int) -> int:
    """Duration of a run of iterations of which the first takes `first_fs` and each next `growth_fs` more."""
    return num_iterations * first_fs + growth_fs * (num_iterations * (num_iterations - 1) // 2)


def iterations_until(first_fs: int, growth_fs: int, elapsed_fs: int) -> int:
    """The fewest whole iterations, at least one, whose run lasts `elapsed_fs` or longer."""
    if elapsed_fs <= first_fs:
        return 1
    if not growth_fs:
        return -(-elapsed_fs // first_fs)
    # growth/2·j² + (first − growth/2)·j ≥ elapsed; the root, then mended for the rounding of isqrt.
    linear = 2 * first_fs - growth_fs
    root = (isqrt(linear * linear + 8 * growth_fs * elapsed_fs) - linear) // (2 * growth_fs)
    while run_fs(first_fs, growth_fs, root) < elapsed_fs:
        root += 1
    return root
