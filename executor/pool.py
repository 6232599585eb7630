"""The run's worker processes by name: one incarnation of each at a time, seen from start to end.

Owns which incarnation is the present one, so that nothing an earlier one said or suffered is taken for
it. What the messages mean is not its business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Literal

from executor.affinity import split_cores, usable_cores
from executor.background import Background
from executor.folders import RunFolder
from executor.protocols import Order, Report
from executor.wire import Hello, WorkerSpec
from executor.workers import WorkerProcess
from marlaas.spec import Experiment


def worker_specs(experiment: Experiment, replica_engine: str, lane_engine: str) -> dict[str, WorkerSpec]:
    """What each worker of an experiment is started with."""
    replicas, lanes = experiment.replica_names, experiment.lane_names
    cores = split_cores(replicas, lanes, usable_cores())

    def spec(kind: Literal["replica", "lane"], index: int, name: str, engine: str) -> WorkerSpec:
        return WorkerSpec(
            name=name, kind=kind, index=index, engine=engine, experiment=experiment, cores=cores[name]
        )

    specs = [spec("replica", i, name, replica_engine) for i, name in enumerate(replicas)]
    specs += [spec("lane", i, name, lane_engine) for i, name in enumerate(lanes)]
    return {each.name: each for each in specs}


class WorkerPool:
    """Starts, feeds and ends workers; their tasks belong to `background`."""

    def __init__(self, specs: Mapping[str, WorkerSpec], folder: RunFolder, background: Background) -> None:
        self._specs = specs
        self._folder = folder
        self._background = background
        self._present: dict[str, tuple[WorkerProcess, asyncio.Task[None]]] = {}
        self._processes: list[WorkerProcess] = []

    def start(
        self,
        name: str,
        *,
        is_up: Callable[[], None],
        has_reports: Callable[[list[Report]], None],
        is_lost: Callable[[str], None],
    ) -> None:
        """Start a worker afresh, killing what is left of it; `is_lost` is told why it ended, when it does."""

        def receive(message: Hello | list[Report]) -> None:
            if isinstance(message, Hello):
                is_up()
            else:
                has_reports(message)

        if name in self._present:
            self._present[name][1].cancel()
        process = WorkerProcess(self._specs[name], self._folder.log(name), receive)
        self._processes = [p for p in self._processes if not p.has_ended] + [process]
        task = self._background.spawn(self._supervise(process, self._processes[:-1], is_lost))
        self._present[name] = process, task

    def give(self, name: str, order: Order) -> None:
        """Hand an order to a worker; one that is lost has said or will say so, and the order goes with it."""
        if name in self._present:
            self._present[name][0].send(order)

    def kill(self, name: str) -> None:
        """End a worker's process as a crash would; it will be reported lost."""
        if name in self._present:
            self._present[name][0].kill()

    async def close(self) -> None:
        """Kill every process and wait until it is gone; to be called when `background` is closed."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            await process.gone()

    async def _supervise(
        self, process: WorkerProcess, earlier: list[WorkerProcess], is_lost: Callable[[str], None]
    ) -> None:
        for other in earlier:
            if other.spec.name == process.spec.name:
                await other.gone()  # cancelled, so killed; its cores and its memory are wanted
        is_lost(await process.run())
