"""What this machine has, and so what can run on it: facts gathered once, printed by `marlaas doctor`.

Reads versions from package metadata and imports only torch, in a child process, so that a broken
installation is a finding and not a crash. Where there is anything of Ascend, what NPUs need is listed too.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata

import msgspec

from experiments.ascend.capabilities import LIMITS
from experiments.ascend.findings import GUIDE, findings
from experiments.ascend.machine import Machine, look
from experiments.compiled import is_preferred

# What more can be done with which packages, and how to have them.
EXTRAS = (
    ("roll out with vLLM", ("vllm",), "make install-vllm (CPU) or pip install 'marlaas[vllm]' (CUDA)"),
    ("roll out with vLLM servers elsewhere", ("aiohttp",), "pip install 'marlaas[openai]'"),
    ("place workers on a Ray cluster", ("ray",), "pip install 'marlaas[cluster]'"),
    (
        "environments reasoning_gym, math, search",
        ("reasoning_gym", "math_verify", "bm25s", "httpx"),
        "pip install 'marlaas[environments]'",
    ),
    ("environment verifiers", ("verifiers",), "pip install 'marlaas[verifiers]'"),
    ("watch runs in TensorBoard", ("tensorboard",), "pip install 'marlaas[executor]'"),
)
PACKAGES = (
    *("torch", "transformers", "peft", "torch_npu", "vllm_ascend"),
    *(name for _, names, _ in EXTRAS for name in names),
)
_PROBE = (
    "import torch\n"
    "ok = torch.accelerator.is_available()\n"
    "print(torch.accelerator.current_accelerator().type if ok else '',"
    " torch.accelerator.device_count() if ok else 0)\n"
)


class Ability(msgspec.Struct, frozen=True):
    """Something the project can do, whether it can be done here, and why or what is missing."""

    what: str
    can: bool
    why: str


class Diagnosis(msgspec.Struct, frozen=True):
    """Facts of the machine, versions of packages (None where absent), and what follows."""

    machine: dict[str, str]
    packages: dict[str, str | None]
    abilities: tuple[Ability, ...]


def diagnose() -> Diagnosis:
    """Look at the machine; takes as long as importing torch."""
    packages = {name: _version(name) for name in PACKAGES}
    accelerator = _accelerator() if packages["torch"] else "none: torch is not installed"
    abilities = (*_abilities(packages, accelerator), *_ascend(look()))
    return Diagnosis(_machine(accelerator), packages, abilities)


def _ascend(machine: Machine) -> tuple[Ability, ...]:
    """What vLLM on NPUs needs, each with the step that mends it; then what is known of adapters there."""
    if not machine.is_ascend:
        return (
            Ability("execute with vLLM on Ascend", False, f"no driver, CANN or torch_npu here; see {GUIDE}"),
        )
    needs = [
        Ability(
            f"Ascend: {need.what}", need.holds, need.found if need.holds else f"{need.found}: {need.mend}"
        )
        for need in findings(machine, vllm=True)
    ]
    whole = all(need.can for need in needs)
    why = "all of the following hold" if whole else f"the following must hold; {GUIDE}"
    known = (Ability(f"Ascend: {limit.what}", limit.works, limit.state) for limit in LIMITS)
    return (Ability("execute with vLLM on Ascend", whole, why), *needs, *known)


def _version(package: str) -> str | None:
    """The installed version; a distribution spells its name with dashes, sometimes with a suffix."""
    for name in (package, f"{package}-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _machine(accelerator: str) -> dict[str, str]:
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "accelerator": accelerator,
    }


def _accelerator() -> str:
    probe = [sys.executable, "-c", _PROBE]
    run = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=120)
    if run.returncode != 0:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        return f"none: torch cannot be imported ({last})"
    kind, count = run.stdout.split() if len(run.stdout.split()) == 2 else ("", "0")
    return f"{count} × {kind}" if kind else "none: torch sees only the CPU"


def _abilities(packages: dict[str, str | None], accelerator: str) -> tuple[Ability, ...]:
    cores = len(os.sched_getaffinity(0))
    missing = [name for name in ("torch", "transformers", "peft") if packages[name] is None]
    broken = "cannot be imported" in accelerator
    embedded = not missing and not broken
    why = f"missing: {', '.join(missing)}; pip install 'marlaas[executor]'" if missing else accelerator
    disjoint = (
        "rollout and training each get a core" if cores > 1 else "one core: they share it, timings mislead"
    )
    speed = "as machine code" if is_preferred() else "plain Python; `marlaas compile` makes it twice as fast"
    found_npu, found_cuda = "npu" in accelerator, "cuda" in accelerator
    return (
        Ability("simulate, calibrate, compare, replay, report", True, "needs no torch"),
        Ability("execute with the embedded engine on CPU", embedded, disjoint if embedded else why),
        Ability("execute with the embedded engine on CUDA", embedded and found_cuda, accelerator),
        Ability("execute with the embedded engine on Ascend", embedded and found_npu, accelerator),
        Ability("simulate at full speed", is_preferred(), speed),
        *(_extra(what, names, packages, mending) for what, names, mending in EXTRAS),
    )


def _extra(what: str, names: tuple[str, ...], packages: dict[str, str | None], mending: str) -> Ability:
    missing = [name for name in names if packages[name] is None]
    return Ability(what, not missing, f"missing: {', '.join(missing)}; {mending}" if missing else "installed")
