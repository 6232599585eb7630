"""Makes what a turn computes the same to the bit whatever turns run beside it, and tests that it is so here.

Float sums depend on their order, and libraries choose it by the size of the batch. Three places matter:

    matrix products   MKL keeps one order for any number of rows in its strict mode, which Intel's AVX2 and
                      AVX-512 have; elsewhere each product is taken of a block of as many rows, at a price
    attention         `torch_cache` pads and splits by a sequence's own length
    activations       vectors end in a scalar tail of other rounding, at each thread's last elements

Knows no tasks. Nothing is assumed of a machine: the model itself is run, turns alone and turns together.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from executor.base_model import BaseModel
from executor.protocols import TurnRequest, TurnResult
from executor.torch_batch import Batch, Turn
from executor.torch_lora import LoraSlots

_BLOCK = 16
# Elements that torch's vectorized loops take at a time, with AVX-512, and at most on one thread.
_VECTOR, _ONE_THREAD = 32, 32_768
_NUM_TURNS, _NUM_TOKENS = 37, 3


def ask_for_strict_products() -> None:
    """Ask MKL for one order of summation; it listens only before this process's first matrix product."""
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")


def make_independent(base: BaseModel, slots: LoraSlots, *, at_any_price: bool) -> int | None:
    """Make turns independent of one another; the multiple to pad rows to, or None if it cannot be had here.

    Where products must be taken in blocks it is had only `at_any_price`. The slots must be free.
    """
    _steady_activations(base.model)
    slots.fill_randomly()
    try:
        if _is_independent(base, slots, 1):
            return 1
        if at_any_price:
            slots.use_blocks(_BLOCK)
            _use_blocks(base.model)
            if _is_independent(base, slots, _BLOCK):
                return _BLOCK
        return None
    finally:
        slots.clear_all()


def _use_blocks(model: Any) -> None:
    """Let linear modules read a block of rows at a time."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            vars(module)["forward"] = _in_blocks(module.forward)


def _in_blocks(linear: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(inputs: Tensor) -> Tensor:
        out = torch.cat([linear(rows) for rows in torch.split(inputs.flatten(0, -2), _BLOCK)])
        return out.view(*inputs.shape[:-1], -1)

    return forward


def _steady_activations(model: Any) -> None:
    """Let a model's activation functions see whole vectors, on one thread at a time."""
    from transformers.activations import ACT2CLS

    kinds: Any = tuple({entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()})
    for module in model.modules():
        if isinstance(module, kinds):
            vars(module)["forward"] = _steady(module.forward)


def _steady(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def act(inputs: Tensor) -> Tensor:
        width = inputs.shape[-1]
        if short := -width % _VECTOR:
            return act(torch.nn.functional.pad(inputs, (0, short)))[..., :width]
        if inputs.numel() < _ONE_THREAD or torch.get_num_threads() == 1:
            return activation(inputs)
        # A part's last vector is whole, and so are all others, for parts are whole rows.
        rows = inputs.flatten(0, -2)
        parts = torch.split(rows, max(1, (_ONE_THREAD - 1) // width))
        return torch.cat([activation(part) for part in parts]).view_as(inputs)

    return act


def _is_independent(base: BaseModel, slots: LoraSlots, multiple: int) -> bool:
    """Whether some turns, each alone and then among all, come out the same to the bit."""
    longest = min(48, (base.max_positions or 48) - _NUM_TOKENS)
    turns = [_turn(i, slots.num_slots, base.vocab_size, 1 + (7 * i) % longest) for i in range(_NUM_TURNS)]
    crowded = _sampled(Batch(base, slots, _NUM_TURNS, multiple), turns)
    for some in (slice(0, 1), slice(1, 3), slice(5, 14)):
        if _sampled(Batch(base, slots, _NUM_TURNS, multiple), turns[some]) != crowded[some]:
            return False
    return True


def _turn(i: int, num_slots: int, vocab_size: int, length: int) -> Turn:
    context = [(31 * i + 17 * j) % vocab_size for j in range(length)]
    request = TurnRequest(trajectory=i, context=context, max_new_tokens=99, temperature=1.0, seed=i)
    return Turn(0, i % num_slots, request)


def _sampled(batch: Batch, turns: list[Turn]) -> list[TurnResult]:
    batch.join(turns)
    for _ in range(_NUM_TOKENS - 1):
        batch.decode()
    # Contexts that are equal are read together, so rows stand by groups, not as the turns were given.
    rows = {turn.request.trajectory: row for row, turn in enumerate(batch.turns)}
    return batch.results([rows[turn.request.trajectory] for turn in turns])
