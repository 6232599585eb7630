"""The base model and random adapters that the benchmarks of the engines share. Knows no engine."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from executor.adapters import adapter_shapes, fingerprint, lora_modules, pristine, write_adapter
from executor.base_model import load_base
from executor.protocols import AdapterFolder
from marlaas.spec import LoraSpec

TINY_BASE = Path(__file__).parents[1] / "models" / "tiny-base"
LORA = LoraSpec(rank=8, alpha=16)


def write_random_adapters(folder: Path, num: int, base: Path = TINY_BASE) -> list[AdapterFolder]:
    """Write `num` adapters that change what the base says; adapter i lies in `folder/i`."""
    model = load_base(str(base), "float32", torch.device("cpu")).model
    shapes = adapter_shapes(lora_modules(model, LORA.targets), LORA.rank)
    return [_write(folder / str(i), shapes, i, base) for i in range(num)]


def read_adapters(folder: Path, num: int) -> list[AdapterFolder]:
    """What `write_random_adapters` wrote there."""
    folders = [folder / str(i) for i in range(num)]
    return [
        AdapterFolder(folder=str(one), fingerprint=fingerprint(load_file(one / "adapter_model.safetensors")))
        for one in folders
    ]


def _write(folder: Path, shapes: dict[str, tuple[int, ...]], seed: int, base: Path) -> AdapterFolder:
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: tensor if tensor.any() else 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in pristine(shapes, seed).items()
    }
    write_adapter(folder, weights, LORA, str(base))
    return AdapterFolder(folder=str(folder), fingerprint=fingerprint(weights))


def load_peft(adapters: list[AdapterFolder], base: Path = TINY_BASE) -> Any:
    """PEFT's own model over the same base with these adapters, named `0`, `1`, ..."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():
        # PEFT asks for a property that newer transformers have renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        model = PeftModel.from_pretrained(model, adapters[0].folder, adapter_name="0")
    for i, adapter in enumerate(adapters[1:], start=1):
        model.load_adapter(adapter.folder, adapter_name=str(i))
    return model.eval()
