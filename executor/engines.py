"""Factories that a worker process calls to become a replica or a lane, named by `Plugins`.

Owns the choice of device and threads for one worker. Imports torch only when called, in the worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from executor import devices
from executor.wire import WorkerSpec

if TYPE_CHECKING:
    from executor.protocols import RolloutEngine, TrainingEngine


def replica(spec: WorkerSpec) -> RolloutEngine:
    """The rollout engine that the experiment asks for."""
    return _REPLICAS[spec.experiment.cluster.replicas.engine](spec)


def torch_replica(spec: WorkerSpec) -> RolloutEngine:
    """The embedded rollout engine."""
    experiment = spec.experiment
    replicas, model = experiment.cluster.replicas, experiment.model
    devices.claim(replicas.device, spec.index * replicas.devices, replicas.devices)
    from executor.torch_engine import TorchRolloutEngine

    _set_up_torch(spec, replicas.device, first_device=spec.index * replicas.devices)
    dtype = devices.precision(model.dtype, replicas.device)
    return TorchRolloutEngine(spec.name, model.path, replicas, model.lora, dtype=dtype)


def vllm_replica(spec: WorkerSpec) -> RolloutEngine:
    """vLLM within the worker."""
    replicas = spec.experiment.cluster.replicas
    kind = devices.kind_of(replicas.device)
    devices.claim(kind, spec.index * replicas.devices, replicas.devices)
    from executor.vllm_engine import start_vllm

    return start_vllm(spec)


def openai_replica(spec: WorkerSpec) -> RolloutEngine:
    """A vLLM server that runs elsewhere."""
    from executor.openai_engine import reach_server

    return reach_server(spec)


def torch_lane(spec: WorkerSpec) -> TrainingEngine:
    """The embedded training engine."""
    cluster, model = spec.experiment.cluster, spec.experiment.model
    lanes, before = cluster.lanes, cluster.replicas.count * cluster.replicas.devices
    if lanes.devices > 1:
        from executor.fsdp_lane import sharded_lane

        return sharded_lane(spec)
    first_device = before + spec.index * lanes.devices
    devices.claim(lanes.device, first_device, lanes.devices)
    from executor.trainer import PeftTrainingEngine

    _set_up_torch(spec, lanes.device, first_device)
    dtype = devices.precision(model.dtype, lanes.device)
    return PeftTrainingEngine(spec.name, model.path, lanes, dtype=dtype)


def _set_up_torch(spec: WorkerSpec, device: str, first_device: int) -> None:
    """Compute with the worker's own cores; on an accelerator, with its own device as far as they go round."""
    import torch

    torch.set_num_threads(len(spec.cores))
    if device != "cpu" and torch.accelerator.is_available():
        # Where the worker was shown only its own devices these are few, and its first is number 0.
        torch.accelerator.set_device_index(first_device % torch.accelerator.device_count())


_REPLICAS: dict[str, Callable[[WorkerSpec], RolloutEngine]] = {
    "torch": torch_replica,
    "vllm": vllm_replica,
    "openai": openai_replica,
}
