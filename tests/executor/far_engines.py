"""Scripted engines of workers that must not see the run folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

from scripted_engines import WatermarkLane, WatermarkReplica

from executor.engines import replica
from executor.protocols import (
    AdapterFolder,
    NewAdapter,
    NextVersion,
    Order,
    Report,
    RolloutEngine,
    TrainingBatch,
)
from executor.wire import WorkerSpec


def _leave_pid(spec: WorkerSpec) -> None:
    (Path(spec.experiment.model.path) / f"{spec.name}.pid").write_text(str(os.getpid()))


def _require_copy(spec: WorkerSpec, folder: str) -> None:
    run = Path(spec.experiment.model.path).parent
    assert not Path(folder).is_relative_to(run), f"{folder} is in the run folder"


class FarReplica(WatermarkReplica):
    """Reads copies of adapters, never the run folder's; takes its time for a turn."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        _leave_pid(spec)

    def start(self, order: Order) -> None:
        if isinstance(order.payload, AdapterFolder):
            _require_copy(self.spec, order.payload.folder)
        super().start(order)

    def step(self) -> list[Report]:
        time.sleep(0.05)
        return super().step()


class FarLane(WatermarkLane):
    """Writes adapters and optimizers out of the driver's sight, and trains from copies of them alone."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        _leave_pid(spec)

    def run(self, order: Order) -> Report:
        if isinstance(order.payload, TrainingBatch):
            for folder in (order.payload.adapter_folder, order.payload.optimizer_folder):
                _require_copy(self.spec, folder)
                assert list(Path(folder).iterdir())
        return super().run(order)

    def _write(self, place: NewAdapter | NextVersion, task: str, version: int) -> str:
        _require_copy(self.spec, place.adapter_folder)
        optimizer = Path(place.optimizer_folder)
        optimizer.mkdir(parents=True)
        (optimizer / "state.json").write_text(str(version))
        return super()._write(place, task, version)


def embedded_replica(spec: WorkerSpec) -> RolloutEngine:
    """The real thing, which a test may look for."""
    _leave_pid(spec)
    return replica(spec)
