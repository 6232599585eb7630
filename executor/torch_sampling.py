"""Draws the next token of every row from its own random stream.

Owns the stream: one uniform number per (seed, index), whatever else is in the batch. Knows no model.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Odd 64-bit constants as signed integers: the increment and the two multipliers of splitmix64
# (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
_STEP, _MIX_1, _MIX_2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def uniform(seeds: Tensor, indices: Tensor) -> Tensor:
    """The `indices`-th number of each seed's stream, in [0, 1), float32; a pure function of the pair."""
    # The seed is mixed first, so that streams of neighbouring seeds are not shifts of one another.
    bits = _mix(_mix(seeds) + (indices + 1) * _STEP)
    return ((bits >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def sample(logits: Tensor, temperatures: Tensor, seeds: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row by inverse CDF at the row's temperature (0 = the likeliest), and its log-probability.

    `logits` is [rows, vocabulary], the rest [rows]. The log-probability is at temperature 1, full vocabulary.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    scaled = logprobs / temperatures.clamp_min(1e-6).unsqueeze(1)
    mass = torch.softmax(scaled, dim=-1).cumsum(dim=-1)
    target = uniform(seeds, indices).unsqueeze(1) * mass[:, -1:]
    drawn = torch.searchsorted(mass, target, right=True).squeeze(1)
    # Rounding may put the target at the very end; rows of NaN land there too: their log-probability tells.
    drawn = drawn.clamp_max(logits.shape[-1] - 1)
    tokens = torch.where(temperatures > 0, drawn, logprobs.argmax(dim=-1))
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * _MIX_1
    bits = (bits ^ _shift(bits, 27)) * _MIX_2
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, places: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)
