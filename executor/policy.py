"""The trainable policy: PEFT's adapter modules laid once into a frozen base model, weights copied in and out.

Owns the modules and the forward pass; knows no tasks, versions or losses.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from executor.adapters import adapter_shapes, lora_modules
from executor.base_model import BaseModel
from executor.grpo import MicroBatch
from marlaas.spec import LoraSpec


class LoraPolicy:
    """One adapter's modules on a base model; `parameters` are named as in PEFT's files."""

    def __init__(self, base: BaseModel, lora: LoraSpec) -> None:
        from peft import LoraConfig, LoraModel

        targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
        self.lora, self.device = lora, base.device
        self.shapes = adapter_shapes(lora_modules(base.model, lora.targets), lora.rank)
        config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
        self._base = base.model
        self._model = LoraModel(base.model, config, "default")
        self._model.eval()
        self.parameters: dict[str, torch.nn.Parameter] = {
            "base_model." + name.replace(".default.", "."): parameter
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }
        for parameter in self.parameters.values():
            parameter.data = (
                parameter.data.float()
            )  # whatever the base, as PeftModel does: small steps must count
        found = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        assert found == self.shapes, "PEFT adapts other modules than the rollout engine would"

    def remove(self) -> None:
        """Take the modules out again; the base model is as it was."""
        self._model.unload()

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy an adapter's weights in."""
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])
            parameter.grad = None

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights as they are, on the CPU."""
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in self.parameters.items()}

    def logits(self, batch: MicroBatch) -> Tensor:
        """Logits that predict each sampled token of a micro-batch: [sampled tokens, vocabulary]."""
        # Padding is to the right and attention causal: no mask needed. A token is predicted one earlier.
        keep = torch.arange(batch.first - 1, batch.tokens.shape[1] - 1, device=self.device)
        # Through the base model, which holds the adapter's modules: calling it is what sharding hooks into.
        output = self._base(input_ids=batch.tokens, use_cache=False, logits_to_keep=keep)
        logits: Tensor = output.logits[batch.sampled]
        return logits
