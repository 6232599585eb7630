"""Loads the frozen base model of a worker onto its device.

Owns the choice of device and precision and what a model folder says about itself. Knows no adapters,
no tasks and no engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from marlaas.errors import InputError


class BaseModel(NamedTuple):
    """A frozen causal language model on its device, with the tokens that end a turn."""

    model: Any
    device: torch.device
    eos_token_ids: tuple[int, ...]

    @property
    def vocab_size(self) -> int:
        """Number of token ids the model can read."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model was made for, or None if it does not say."""
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return None if limit is None else int(limit)


def choose_device(wanted: str, num_devices: int = 1) -> torch.device:
    """The torch device for `cpu`, `cuda`, `npu` or `auto` (the accelerator if there is one, else the CPU).

    On the CPU `num_devices` counts cores and needs nothing here; these engines use one accelerator at most.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if wanted == "cpu" or (wanted == "auto" and found is None):
        return torch.device("cpu")
    if found is None or wanted not in ("auto", found.type):
        raise InputError("cluster.*.device", f"no {wanted} device here", f"use {found or 'cpu'} or auto")
    if num_devices > 1:
        raise InputError("cluster.*.devices", f"{num_devices} accelerators for one torch engine", "use 1")
    return found


def load_base(folder: str, dtype: str, device: torch.device, attention: str = "sdpa") -> BaseModel:
    """Read a Hugging Face causal LM folder, never a hub; `attention` names an attention implementation."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if not (Path(folder) / "config.json").is_file():
        raise InputError("model.path", f"no model at {folder}", "a Hugging Face folder with config.json")
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation=attention, local_files_only=True
    )
    model.eval().requires_grad_(False).to(device)
    return BaseModel(model, device, _eos_token_ids(model))


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    for config in (model.generation_config, model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (int(ids),)
    return ()
