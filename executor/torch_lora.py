"""Applies many LoRA adapters at once to a frozen base model, one adapter per token.

All slots' matrices of a module lie side by side, so a batch of any mix of adapters costs two matrix products
per module: every token is projected by every active adapter, what is not its own is masked out, the rest is
projected back. With small ranks this beats one pair of products per adapter, and the more so the more
adapters there are. Adapter matrices are float32 whatever the base, as PEFT holds them.

The products are taken in pieces of at most `_PIECE` ranks: longer sums would be cut by matrix products at
places that depend on which adapters are active, and a token's result with them.

Owns the slots' weights; knows no tasks or versions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from executor.adapters import adapter_shapes, lora_modules, tensor_name
from marlaas.spec import LoraSpec

_PIECE = 256


class LoraSlots:
    """The weights of `num_slots` adapters of one shape, put on a model's linear modules by forward hooks."""

    def __init__(self, model: Any, lora: LoraSpec, num_slots: int) -> None:
        self._rank, self.num_slots = lora.rank, num_slots
        # One per piece; None where all tokens are of the one adapter in use.
        self._masks: list[Tensor | None] = []
        self._active = (0, 0)
        self._block: int | None = None
        self._modules = {
            name: _Stack(module, lora, num_slots)
            for name, module in lora_modules(model, lora.targets).items()
        }
        for stack in self._modules.values():
            stack.module.register_forward_hook(self._hook(stack))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of the tensors an adapter must have, no more and no fewer."""
        modules = {name: stack.module for name, stack in self._modules.items()}
        return adapter_shapes(modules, self._rank)

    def load(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy an adapter's tensors, named as `shapes()` says, into a slot."""
        for name, stack in self._modules.items():
            stack.a[self._columns(slot)] = tensors[tensor_name(name, "A")]
            stack.b[self._columns(slot)] = tensors[tensor_name(name, "B")].T

    def held(self, slot: int) -> dict[str, Tensor]:
        """The tensors a slot holds now, on the CPU."""
        held = {}
        for name, stack in self._modules.items():
            held[tensor_name(name, "A")] = stack.a[self._columns(slot)].cpu()
            held[tensor_name(name, "B")] = stack.b[self._columns(slot)].T.contiguous().cpu()
        return held

    def clear(self, slot: int) -> None:
        """Forget a slot's weights."""
        for stack in self._modules.values():
            stack.a[self._columns(slot)] = 0
            stack.b[self._columns(slot)] = 0

    def use_blocks(self, num_rows: int) -> None:
        """Take products of so many rows at a time, with all slots, active or not; rows come in blocks."""
        self._block = num_rows

    def fill_randomly(self) -> None:
        """Give every slot weights that matter to what the model says."""
        generator = torch.Generator().manual_seed(0)
        for stack in self._modules.values():
            for matrix in (stack.a, stack.b):
                matrix.copy_(0.1 * torch.randn(matrix.shape, generator=generator))

    def clear_all(self) -> None:
        """Forget every slot's weights."""
        for slot in range(self.num_slots):
            self.clear(slot)

    def use(self, slots: Tensor, active: Collection[int]) -> None:
        """Say which slot each token of the coming passes uses ([tokens]); `active` are the distinct ones."""
        low, high = (min(active), max(active) + 1) if self._block is None else (0, self.num_slots)
        if (low, high) != self._active:
            self._active = (low, high)
            ranks = range(low * self._rank, high * self._rank)
            step = max(1, _PIECE // self._rank) * self._rank
            pieces = [slice(begin, min(begin + step, ranks.stop)) for begin in ranks[::step]]
            for stack in self._modules.values():
                stack.show(pieces)
        self._masks = [None]
        if high - low > 1:
            owner = torch.arange(low, high, device=slots.device).repeat_interleave(self._rank)
            mask = slots.unsqueeze(1) != owner
            self._masks = list(torch.split(mask, max(1, _PIECE // self._rank) * self._rank, dim=1))

    def _columns(self, slot: int) -> slice:
        assert 0 <= slot < self.num_slots
        return slice(slot * self._rank, (slot + 1) * self._rank)

    def _product(self, rows: Tensor, matrix: Tensor) -> Tensor:
        if self._block is None:
            return rows @ matrix
        return torch.cat([block @ matrix for block in torch.split(rows, self._block)])

    def _hook(self, stack: _Stack) -> Any:
        def add_adapters(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            rows, flat = inputs[0].flatten(0, -2).to(torch.float32), output.flatten(0, -2)
            for (down, up), mask in zip(stack.pieces, self._masks, strict=True):
                low = self._product(rows, down).mul_(stack.scaling)
                if mask is not None:
                    low.masked_fill_(mask, 0.0)  # not a product: another tenant's inf times 0 would be NaN
                if flat.dtype == torch.float32 and self._block is None:
                    flat = flat.addmm_(low, up)
                else:
                    flat = (flat + self._product(low, up)).to(flat.dtype)
            return flat.view_as(output)

        return add_adapters


class _Stack:
    """One module's matrices of all slots: `a` [slots × rank, in], `b` [slots × rank, out].

    `pieces` are views of the slots in use: `down` [in, ranks] and `up` [ranks, out].
    """

    def __init__(self, module: nn.Linear, lora: LoraSpec, num_slots: int) -> None:
        device, rows = module.weight.device, num_slots * lora.rank
        self.module = module
        self.scaling = lora.alpha / lora.rank
        self.a = torch.zeros(rows, module.in_features, device=device)
        self.b = torch.zeros(rows, module.out_features, device=device)
        self.pieces: list[tuple[Tensor, Tensor]] = []

    def show(self, pieces: Sequence[slice]) -> None:
        """Let `pieces` be these rows."""
        self.pieces = [(self.a[rows].T, self.b[rows]) for rows in pieces]
