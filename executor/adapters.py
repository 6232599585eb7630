"""The store of adapters: ordinary PEFT folders, written atomically, each with a fingerprint of its weights.

    adapters/<task>/v<k>/    adapter_config.json, adapter_model.safetensors, README.md
    optimizer/<task>/v<k>/   optimizer.safetensors (AdamW moments), state.json (version, seed, cursor, ...)

Owns names and files; what "committed" means on disk is `commits.py`'s. Knows neither rollout nor training.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from executor.commits import commit_folder, sweep_optimizers
from marlaas.spec import LoraSpec

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
MOMENTS, STATE = "optimizer.safetensors", "state.json"


class AdapterProblem(Exception):
    """An adapter folder is not what was ordered; the message says how. Becomes a `CommandFailed`."""


class TrainingState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What resuming a task needs besides tensors.

    `seed` is that of the last update: randomness is counter-based, every update brings its own seed, so no
    generator state can be lost. `fingerprint` ties the optimizer folder to its adapter folder.
    """

    version: int
    num_updates: int
    seed: int
    fingerprint: str
    cursor: dict[str, int]


class _Config(msgspec.Struct, frozen=True):
    """What is read of PEFT's adapter_config.json."""

    r: int
    lora_alpha: int
    target_modules: str | list[str]


def lora_modules(model: Any, targets: str | tuple[str, ...]) -> dict[str, nn.Linear]:
    """The linear modules an adapter adapts, by name, in model order; PEFT's rules.

    `all-linear` is every linear module but the output head; another string is a regular expression for the
    whole name; a tuple holds names or last parts of names.
    """
    head = model.get_output_embeddings()
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    if targets == "all-linear":
        return linear
    if isinstance(targets, str):
        return {n: m for n, m in linear.items() if re.fullmatch(targets, n)}
    return {n: m for n, m in linear.items() if any(n == t or n.endswith("." + t) for t in targets)}


def tensor_name(module: str, part: str) -> str:
    """The name PEFT's files give to matrix `part` ("A" or "B") of a module."""
    return f"base_model.model.{module}.lora_{part}.weight"


def adapter_shapes(modules: Mapping[str, nn.Linear], rank: int) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of an adapter of these modules."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in modules.items():
        shapes[tensor_name(name, "A")] = (rank, module.in_features)
        shapes[tensor_name(name, "B")] = (module.out_features, rank)
    return shapes


def pristine(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Version 0: A as PEFT draws it (Kaiming uniform, a = √5), B zero; a function of its arguments alone."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.zeros(shapes[name]) for name in sorted(shapes)}
    for name, tensor in tensors.items():
        if name.endswith(".lora_A.weight"):
            nn.init.kaiming_uniform_(tensor, a=5**0.5, generator=generator)
    return tensors


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A digest of weights: SHA-256 over names, types, shapes and bytes in order of name, 32 hex digits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], lora: LoraSpec, base: str) -> None:
    """Commit an adapter: `folder` appears whole or not at all; a leftover under that name is replaced."""
    from peft import LoraConfig

    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config: Any = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    # PEFT keeps sets; sorted, the file is the same in every process.
    text = json.dumps(config.to_dict(), default=sorted, indent=2, sort_keys=True)
    commit_folder(
        folder,
        {CONFIG: text.encode(), WEIGHTS: save(dict(tensors)), "README.md": _card(folder, base).encode()},
    )


def read_shape(folder: Path) -> LoraSpec:
    """The shape an adapter folder says it has."""
    try:
        config = msgspec.json.decode(_read(folder / CONFIG), type=_Config)
    except msgspec.DecodeError as error:
        raise AdapterProblem(f"{folder / CONFIG}: {error}") from error
    targets = config.target_modules
    return LoraSpec(
        rank=config.r,
        alpha=config.lora_alpha,
        targets=targets if isinstance(targets, str) else tuple(sorted(targets)),
    )


def read_adapter(folder: Path, lora: LoraSpec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """An adapter's tensors; refused unless they are exactly those of `shapes` (name to shape) and finite."""
    tensors, shape = _tensors(folder / WEIGHTS), read_shape(folder)
    if (shape.rank, shape.alpha) != (lora.rank, lora.alpha):
        raise AdapterProblem(f"{folder}: shape is {shape}, wanted {lora}")
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != dict(shapes):  # such an adapter would load and change nothing, or not all it should
        odd = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
        raise AdapterProblem(
            f"{folder}: {len(shapes) - len(odd)} of {len(shapes)} tensors match the base model's modules;"
            f" first difference: {odd[0]}"
        )
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise AdapterProblem(f"{folder}: {name} holds NaN or infinite weights")
    return tensors


def write_optimizer(folder: Path, tensors: Mapping[str, Tensor], state: TrainingState) -> None:
    """Commit what resuming needs beside the adapter; of the task's optimizer folders keep the last two."""
    text = msgspec.json.format(msgspec.json.encode(state))
    commit_folder(folder, {MOMENTS: save(dict(tensors)), STATE: text})
    sweep_optimizers(folder)


def read_optimizer(folder: Path) -> tuple[dict[str, Tensor], TrainingState]:
    """AdamW's moments and the state of a committed version."""
    try:
        state = msgspec.json.decode(_read(folder / STATE), type=TrainingState)
    except msgspec.ValidationError as error:
        raise AdapterProblem(f"{folder / STATE}: {error}") from error
    return _tensors(folder / MOMENTS), state


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AdapterProblem(f"{path}: cannot be read ({error.strerror})") from error


def _tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load(_read(path))
    except SafetensorError as error:
        raise AdapterProblem(f"{path}: damaged ({error})") from error


def _card(folder: Path, base: str) -> str:
    task, version = folder.parent.name, folder.name
    return (
        f"---\nlibrary_name: peft\nbase_model: {base}\ntags: [lora]\n---\n\n# {task} {version}\n\n"
        f"LoRA adapter of task `{task}`, version `{version}`, trained with GRPO by MARLaaS.\n"
        "Load it with `PeftModel.from_pretrained(base_model, this_folder)`.\n"
    )
