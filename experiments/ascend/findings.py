"""Judges a machine and an experiment by the tables of `capabilities`, and says how to mend what does not fit.

Owns the wording. Every finding names the step that mends it; a run is refused for the first one,
`marlaas doctor` prints them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from experiments.ascend.capabilities import (
    GATED_LINEAR_ATTENTION,
    MAX_RANK,
    MAX_SLOTS,
    PINNED,
    VLLM_RANKS,
    Release,
    cann_for,
    release_of,
)
from experiments.ascend.machine import Machine
from marlaas.errors import InputError
from marlaas.spec import Experiment

GUIDE = "docs/ascend.md"
DRIVER = "driver and devices"
_INSTALL = "pip install 'marlaas[ascend]'"
_VLLM_EMPTY = f"VLLM_TARGET_DEVICE=empty pip install --no-binary vllm vllm=={PINNED.vllm}"
_VLLM_ASCEND = (
    "apt-get install -y gcc g++ cmake libnuma-dev && "
    f"pip install --no-build-isolation vllm-ascend=={PINNED.vllm_ascend}"
)


class Finding(NamedTuple):
    """One thing that is asked of an Ascend machine, whether it holds, what was found, and how to mend it."""

    what: str
    holds: bool
    found: str
    mend: str


def findings(machine: Machine, *, vllm: bool) -> Iterator[Finding]:
    """What a worker on an NPU needs, the driver first; with `vllm` also what that rollout engine needs."""
    yield _devices(machine)
    row = release_of(machine.packages["vllm_ascend"] or "") or PINNED
    yield from _cann(machine, row.cann if vllm else cann_for(machine.packages["torch_npu"] or ""))
    yield _torch_npu(machine, row if vllm else None)
    if vllm:
        yield _package(machine, "vllm", row.vllm, _VLLM_EMPTY)
        yield _vllm_ascend(machine)
        yield _package(
            machine, "transformers", row.transformers, f"pip install transformers=={row.transformers}"
        )
        triton = f"pip install triton-ascend=={row.triton_ascend}, from Ascend's own index ({GUIDE})"
        yield _package(machine, "triton_ascend", row.triton_ascend, triton)
        yield _python(machine, row)


def _devices(machine: Machine) -> Finding:
    found = f"{machine.num_devices} device files, npu-smi {'found' if machine.npu_smi else 'not found'}"
    mend = "install the Ascend driver and firmware, or pass --device /dev/davinciN to the container"
    return Finding(DRIVER, machine.num_devices > 0, found, mend)


def _cann(machine: Machine, known: str | None) -> Iterator[Finding]:
    """CANN of the version that is known to go with the packages, or any where the tables do not say."""
    wanted = known or PINNED.cann
    install = f"sh Ascend-cann-toolkit_{wanted}_linux-$(uname -m).run --full, then ops and nnal ({GUIDE})"
    if machine.cann_folder is None:
        yield Finding(f"CANN {wanted}", False, "no toolkit", install)
        return
    holds = machine.cann is not None and (known is None or machine.cann == known)
    found = f"{machine.cann or 'of unknown version'} in {machine.cann_folder}"
    yield Finding(f"CANN {wanted}", holds, found, install)
    step = f"source {machine.cann_folder}/set_env.sh"
    yield Finding("CANN in the environment", machine.cann_is_set_up, "ASCEND_HOME_PATH", step)


def _torch_npu(machine: Machine, row: Release | None) -> Finding:
    """torch_npu of the very release of torch, and of the row where vLLM comes with it."""
    torch, torch_npu = machine.packages["torch"], machine.packages["torch_npu"]
    wanted = PINNED if row is None else row
    mend = f"pip install torch=={wanted.torch} torch-npu=={wanted.torch_npu}"
    what = f"torch {wanted.torch} with torch_npu {wanted.torch_npu}"
    if torch is None or torch_npu is None:
        return Finding(what, False, f"torch {torch}, torch_npu {torch_npu}", mend)
    goes = torch_npu.partition(".post")[0] == torch
    if row is not None:
        goes = (torch, torch_npu) == (row.torch, row.torch_npu)
    return Finding(what, goes, f"torch {torch}, torch_npu {torch_npu}", mend)


def _package(machine: Machine, name: str, wanted: str, mend: str) -> Finding:
    found = machine.packages[name]
    return Finding(f"{name} {wanted}", found == wanted, found or "not installed", mend)


def _vllm_ascend(machine: Machine) -> Finding:
    """Any version will do that the table knows; the others it checks are then that row's."""
    found = machine.packages["vllm_ascend"]
    holds = found is not None and release_of(found) is not None
    return Finding(f"vllm_ascend {PINNED.vllm_ascend}", holds, found or "not installed", _VLLM_ASCEND)


def _python(machine: Machine, row: Release) -> Finding:
    low, below = row.python
    spelt = f"Python {low[0]}.{low[1]} up to, without, {below[0]}.{below[1]}"
    found = ".".join(map(str, machine.python))
    return Finding(spelt, low <= machine.python < below, found, f"python3.11 -m venv .venv, then {_INSTALL}")


# --- before a run ----------------------------------------------------------------------------------------


def require_machine(experiment: Experiment, machine: Machine) -> None:
    """Refuse, for the first thing that does not hold, what workers on NPUs need."""
    pools = experiment.cluster.replicas, experiment.cluster.lanes
    if all(pool.device != "npu" for pool in pools):
        return
    replicas = experiment.cluster.replicas
    vllm = replicas.device == "npu" and replicas.engine == "vllm"
    place = "cluster.replicas.device" if replicas.device == "npu" else "cluster.lanes.device"
    for finding in findings(machine, vllm=vllm):
        # Containers often have neither device files nor npu-smi: torch will say whether there is a device.
        if not finding.holds and finding.what != DRIVER:
            raise InputError(place, f"npu needs {finding.what}, found {finding.found}", finding.mend)


def require_capable(experiment: Experiment, model: dict[str, Any]) -> None:
    """Refuse what vllm-ascend cannot do with adapters; `model` is the base model's config.json."""
    replicas, rank = experiment.cluster.replicas, experiment.model.lora.rank
    if replicas.device != "npu" or replicas.engine != "vllm":
        return
    tensor_parallel = replicas.devices // replicas.pipeline_parallel
    if replicas.slots > MAX_SLOTS:
        problem = f"{replicas.slots} adapter slots, documented on Ascend are {MAX_SLOTS}"
        raise InputError(
            "cluster.replicas.slots", problem, f"use {MAX_SLOTS}; more tasks than slots are served"
        )
    widest = min(MAX_RANK, _narrowest_slice(model, tensor_parallel))
    if _room(rank) > widest:
        problem = f"rank {rank} takes room for {_room(rank)}, Ascend's kernels take {widest} here"
        raise InputError("model.lora.rank", problem, "use a smaller rank or fewer devices per replica")
    if tensor_parallel > 1:
        _require_parallel(str(model.get("model_type", "")), tensor_parallel, eager=replicas.eager)


def _require_parallel(model_type: str, tensor_parallel: int, *, eager: bool) -> None:
    where, parallel = "cluster.replicas.devices", f"{tensor_parallel} devices share a layer"
    if model_type.startswith(GATED_LINEAR_ATTENTION):
        problem = f"{parallel}, which hangs with adapters on a {model_type}"
        raise InputError(where, problem, "use 1 device, or one per stage: pipeline_parallel = devices")
    if not eager:
        problem = f"{parallel}, which does not work with adapters and graphs together"
        raise InputError("cluster.replicas.eager", problem, "use eager: true, or one device per replica")


def _room(rank: int) -> int:
    """The rank that vLLM makes room for: the next of those it allows."""
    return next((room for room in VLLM_RANKS if room >= rank), rank)


def _narrowest_slice(model: dict[str, Any], tensor_parallel: int) -> int:
    """Width of the smallest part of an adapted layer on one device: keys or values, at least one head."""
    heads = int(model.get("num_attention_heads", 1))
    kv_heads = int(model.get("num_key_value_heads") or heads)
    width = int(model.get("head_dim") or int(model.get("hidden_size", MAX_RANK)) // heads)
    return max(1, kv_heads // tensor_parallel) * width
