"""Applies many LoRA adapters at once to a frozen base model, one adapter per token.

All slots' matrices of a module lie side by side, so a batch of any mix of adapters costs two matrix products
per module: every token is projected by every active adapter, what is not its own is masked out, the rest is
projected back. With small ranks this beats one pair of products per adapter, and the more so the more
adapters there are. Adapter matrices are float32 whatever the base, as PEFT holds them.

Owns the slots' weights; knows no tasks or versions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from executor.adapters import adapter_shapes, lora_modules, tensor_name
from marlaas.spec import LoraSpec


class LoraSlots:
    """The weights of `num_slots` adapters of one shape, put on a model's linear modules by forward hooks."""

    def __init__(self, model: Any, lora: LoraSpec, num_slots: int) -> None:
        self._rank, self._num_slots = lora.rank, num_slots
        self._mask: Tensor | None = None
        self._active = (0, 0)
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

    def use(self, slots: Tensor, active: Collection[int]) -> None:
        """Say which slot each token of the coming passes uses ([tokens]); `active` are the distinct ones."""
        low, high = min(active), max(active) + 1
        if (low, high) != self._active:
            self._active = (low, high)
            for stack in self._modules.values():
                stack.show(slice(low * self._rank, high * self._rank))
        self._mask = None
        if high - low > 1:
            owner = torch.arange(low, high, device=slots.device).repeat_interleave(self._rank)
            self._mask = slots.unsqueeze(1) != owner

    def _columns(self, slot: int) -> slice:
        assert 0 <= slot < self._num_slots
        return slice(slot * self._rank, (slot + 1) * self._rank)

    def _hook(self, stack: _Stack) -> Any:
        def add_adapters(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            low = inputs[0].flatten(0, -2).to(torch.float32) @ stack.down
            if self._mask is not None:
                low.masked_fill_(self._mask, 0.0)  # not a product: another tenant's inf times 0 would be NaN
            flat = output.flatten(0, -2)
            if flat.dtype == torch.float32:
                return flat.addmm_(low, stack.up, alpha=stack.scaling).view_as(output)
            return (flat + (low @ stack.up) * stack.scaling).to(output.dtype).view_as(output)

        return add_adapters


class _Stack:
    """One module's matrices of all slots: `a` [slots × rank, in], `b` [slots × rank, out].

    `down` [in, ranks shown] and `up` [ranks shown, out] are views of the slots in use.
    """

    def __init__(self, module: nn.Linear, lora: LoraSpec, num_slots: int) -> None:
        device, rows = module.weight.device, num_slots * lora.rank
        self.module = module
        self.scaling = lora.alpha / lora.rank
        self.a = torch.zeros(rows, module.in_features, device=device)
        self.b = torch.zeros(rows, module.out_features, device=device)
        self.show(slice(0, 0))

    def show(self, rows: slice) -> None:
        """Let `down` and `up` be these rows."""
        self.down, self.up = self.a[rows].T, self.b[rows]
