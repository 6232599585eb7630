"""Factories that a worker process calls to become a replica or a lane, named by `Plugins`.

Owns the choice of device and threads for one worker. Imports torch only when called, in the worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor.wire import WorkerSpec

if TYPE_CHECKING:
    from executor.protocols import RolloutEngine, TrainingEngine


def torch_replica(spec: WorkerSpec) -> RolloutEngine:
    """The embedded rollout engine."""
    from executor.torch_engine import TorchRolloutEngine

    experiment = spec.experiment
    replicas, model = experiment.cluster.replicas, experiment.model
    _set_up_torch(spec, replicas.device, first_device=spec.index * replicas.devices)
    return TorchRolloutEngine(spec.name, model.path, replicas, model.lora, dtype=model.dtype)


def torch_lane(spec: WorkerSpec) -> TrainingEngine:
    """The embedded training engine."""
    from executor.trainer import PeftTrainingEngine

    cluster, model = spec.experiment.cluster, spec.experiment.model
    before = cluster.replicas.count * cluster.replicas.devices
    _set_up_torch(spec, cluster.lanes.device, first_device=before + spec.index * cluster.lanes.devices)
    return PeftTrainingEngine(spec.name, model.path, cluster.lanes, dtype=model.dtype)


def _set_up_torch(spec: WorkerSpec, device: str, first_device: int) -> None:
    """Compute with the worker's own cores; on an accelerator, with its own device as far as they go round."""
    import torch

    torch.set_num_threads(len(spec.cores))
    if device != "cpu" and torch.accelerator.is_available():
        torch.accelerator.set_device_index(first_device % torch.accelerator.device_count())
