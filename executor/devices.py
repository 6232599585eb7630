"""What follows from a kind of device: a literal table, and the choices that are made by it.

Owns the names that differ between CPU, CUDA and Ascend: the collective backend, the precision when none is
asked for, the vLLM platform, the variable that shows a process its devices. Everything else goes through
`torch.accelerator`. Knows no engine, and imports no torch: devices are claimed before torch looks for any.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from pathlib import Path
from typing import NamedTuple

AUTO = "auto"


class DeviceKind(NamedTuple):
    """What goes with one kind of device."""

    collectives: str
    """Backend of `torch.distributed`."""
    dtype: str
    """Precision of the base model unless the experiment names one."""
    vllm_platform: str
    """vLLM's platform plugin that serves it; vLLM finds it by itself, or is told by `VLLM_PLUGINS`."""
    visible: str | None
    """Environment variable that lists the devices a process may see."""
    node: str | None
    """Pattern of the device files, one a device."""


DEVICES = {
    "cpu": DeviceKind("gloo", "float32", "cpu", None, None),
    "cuda": DeviceKind("nccl", "bfloat16", "cuda", "CUDA_VISIBLE_DEVICES", r"nvidia\d+"),
    "npu": DeviceKind("hccl", "bfloat16", "ascend", "ASCEND_RT_VISIBLE_DEVICES", r"davinci\d+"),
}


def kind_of(device: str) -> str:
    """The kind behind `auto`, by asking torch; any other word is its own answer."""
    if device != AUTO:
        return device
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None else found.type


def precision(wanted: str, device: str) -> str:
    """The base model's dtype by name: what the experiment asks for, or for `auto` what suits the device."""
    if wanted != AUTO:
        return wanted
    kind = DEVICES.get(kind_of(device))
    return "bfloat16" if kind is None else kind.dtype


def claim(
    device: str,
    first: int,
    num_devices: int,
    environ: MutableMapping[str, str] = os.environ,
    nodes: Path = Path("/dev"),
) -> None:
    """Show this process only its own devices: `num_devices` from the `first` on, as far as they go round.

    Counts within the devices that the process may see already, so that a scheduler's choice (Slurm, Ray, a
    container) is respected. Must run before torch is imported. Does nothing for the CPU, for `auto`, and
    where neither the variable nor device files tell how many devices there are: torch has to choose then.
    """
    kind = DEVICES.get(device)
    if kind is None or kind.visible is None or kind.node is None:
        return
    listed = [entry.strip() for entry in environ.get(kind.visible, "").split(",") if entry.strip()]
    seen = listed or _device_numbers(nodes, kind.node)
    if seen:
        num_shown = min(num_devices, len(seen))
        environ[kind.visible] = ",".join(seen[(first + i) % len(seen)] for i in range(num_shown))


def _device_numbers(nodes: Path, pattern: str) -> list[str]:
    names = [node.name for node in nodes.iterdir()] if nodes.is_dir() else []
    numbers = [int(re.sub(r"\D", "", name)) for name in names if re.fullmatch(pattern, name)]
    return [str(number) for number in sorted(numbers)]
