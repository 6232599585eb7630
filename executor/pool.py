"""The run's workers by name: one incarnation of each at a time, seen from start to end.

Owns which incarnation is the present one, so that nothing an earlier one said or suffered is taken for
it. What the messages mean is not its business, and where the workers are is `Place`'s.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from executor.affinity import CorePlan, split_cores, usable_cores
from executor.background import Background
from executor.folders import RunFolder
from executor.protocols import Order, Report
from executor.wire import Hello, WorkerSpec
from executor.workers import Place, ThisMachine, Worker
from marlaas.spec import Experiment


def worker_specs(experiment: Experiment, replica_engine: str, lane_engine: str) -> dict[str, WorkerSpec]:
    """What each worker of an experiment is started with."""
    cores = _cores(experiment)

    def spec(kind: Literal["replica", "lane"], index: int, name: str, engine: str) -> WorkerSpec:
        return WorkerSpec(
            name=name,
            kind=kind,
            index=index,
            engine=engine,
            experiment=experiment,
            cores=cores[name],
            is_pinned=experiment.cluster.placement == "local",
        )

    specs = [spec("replica", i, name, replica_engine) for i, name in enumerate(experiment.replica_names)]
    specs += [spec("lane", i, name, lane_engine) for i, name in enumerate(experiment.lane_names)]
    return {each.name: each for each in specs}


def _cores(experiment: Experiment) -> CorePlan:
    """This machine's cores, split; of a cluster's nodes only how many are reserved is known."""
    replicas, lanes, cluster = experiment.replica_names, experiment.lane_names, experiment.cluster
    if cluster.placement == "local":
        return split_cores(replicas, lanes, usable_cores())
    from executor.ray_workers import num_threads

    counts = dict.fromkeys(replicas, num_threads(cluster.replicas))
    counts |= dict.fromkeys(lanes, num_threads(cluster.lanes))
    return {name: tuple(range(count)) for name, count in counts.items()}


def place_of(experiment: Experiment, folder: RunFolder) -> Place:
    """Where the experiment's workers are to be; raises `InputError` for a cluster that cannot be joined."""
    if experiment.cluster.placement == "local":
        return ThisMachine(folder)
    from executor.ray_workers import RayPlace

    return RayPlace(experiment.cluster)


class WorkerPool:
    """Starts, feeds and ends workers; their tasks belong to `background`."""

    def __init__(self, specs: Mapping[str, WorkerSpec], place: Place, background: Background) -> None:
        self._specs = specs
        self._place = place
        self._background = background
        self._present: dict[str, tuple[Worker, asyncio.Task[None]]] = {}
        # All that were ever started: their number is bounded by the budget of restarts.
        self._all: defaultdict[str, list[Worker]] = defaultdict(list)

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
        worker = self._place.worker(self._specs[name], receive)
        task = self._background.spawn(self._supervise(worker, tuple(self._all[name]), is_lost))
        self._all[name].append(worker)
        self._present[name] = worker, task

    def give(self, name: str, order: Order) -> None:
        """Hand an order to a worker; one that is lost has said or will say so, and the order goes with it."""
        if name in self._present:
            self._present[name][0].send(order)

    def kill(self, name: str) -> None:
        """End a worker as a crash would; it will be reported lost."""
        if name in self._present:
            self._present[name][0].kill()

    async def close(self) -> None:
        """Kill every worker and wait until it is gone; to be called when `background` is closed."""
        workers = [worker for incarnations in self._all.values() for worker in incarnations]
        for worker in workers:
            worker.kill()
        for worker in workers:
            await worker.gone()
        self._place.leave()

    async def _supervise(
        self, worker: Worker, earlier: Sequence[Worker], is_lost: Callable[[str], None]
    ) -> None:
        for other in earlier:
            await other.gone()  # cancelled, so killed; its cores and its memory are wanted
        is_lost(await worker.run())
