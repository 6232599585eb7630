"""Workers as Ray actors on the nodes of a cluster, as the driver sees them: the same four verbs as a process.

Owns the connection to Ray, what a worker reserves, and the words for its end: an actor that dies and a node
that is lost are the same loss. Imports Ray only when a run asks for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import re
import socket
from collections import Counter
from typing import Any

from executor.protocols import Order
from executor.ray_actor import WorkerActor
from executor.ray_courier import Delivery, Stock, commit
from executor.wire import Crashed, WorkerSpec
from executor.worker import one_line
from executor.workers import Receive, Worker, defaults, settings
from marlaas.errors import InputError
from marlaas.spec import ClusterSpec, LanesSpec, ReplicasSpec

_REACH_S = 5.0
_FATE_WITHIN_S = 30.0  # Ray takes about ten seconds to be sure that a node is dead
_ASK_AGAIN_S = 0.1
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # a run phones nobody
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's own default to come; without it every import warns
}


class RayPlace:
    """Where workers are when `placement` is `ray`; connects, and raises `InputError` if it cannot."""

    def __init__(self, cluster: ClusterSpec) -> None:
        import ray

        connect(cluster)
        self._cluster = cluster
        self._stock: Stock[Any] = Stock(ray.put)
        self._actor_class = _actor_class()

    def worker(self, spec: WorkerSpec, receive: Receive) -> Worker:
        """A worker to be; it says hello from whichever node has room for it, spread over the nodes."""
        pool = self._cluster.replicas if spec.kind == "replica" else self._cluster.lanes
        options = {
            **reservation(pool),
            "scheduling_strategy": "SPREAD",
            "runtime_env": {"env_vars": {**defaults(), **settings(spec)}},
        }
        actor_class = self._actor_class.options(**options)
        return RayWorker(spec, actor_class, self._cluster.shared_folder, self._stock, receive)

    def leave(self) -> None:
        """Let go of the cluster; one that was started for the run ends."""
        import ray

        ray.shutdown()


class RayWorker:
    """A `Worker` that is an actor of `actor_class`."""

    def __init__(
        self, spec: WorkerSpec, actor_class: Any, is_shared: bool, stock: Stock[Any], receive: Receive
    ) -> None:
        self._spec, self._actor_class, self._is_shared = spec, actor_class, is_shared
        self._stock, self._receive = stock, receive
        self._actor: Any = None

    async def run(self) -> str:
        """Start the actor and hear it to its end; returns why it ended. Cancelling kills it."""
        from ray.exceptions import ActorUnavailableError, RayError

        is_cut_off = False
        try:
            self._actor = self._actor_class.remote(self._spec, self._is_shared)
            self._actor.work.remote()
            return await self._hear()
        except ActorUnavailableError:
            is_cut_off = True
            return "its node is out of reach"
        except RayError as error:
            return _reason(error)
        finally:
            if not is_cut_off:
                self.kill()

    async def _hear(self) -> str:
        while True:
            for said in await self._actor.hear.remote():
                if isinstance(said, Crashed):
                    return said.reason
                if isinstance(said, Delivery):
                    self._receive(await self._committed(said))
                else:
                    self._receive(said)

    async def _committed(self, delivery: Delivery) -> Any:
        if not delivery.parcels:
            return delivery.reports
        reports = await asyncio.to_thread(commit, delivery)
        for parcel in delivery.parcels:
            self._stock.renew(parcel.folder)
        return reports

    def send(self, order: Order) -> None:
        """Queue an order with what it needs to read; says nothing when the actor is gone: `run` does that."""
        if self._actor is not None:
            refs = [] if self._is_shared else self._stock.refs(order)
            self._actor.tell.remote(order, *refs)

    def kill(self) -> None:
        """End the actor at once, whatever it is doing; it may be dead already."""
        import ray

        if self._actor is not None:
            ray.kill(self._actor)

    async def gone(self) -> None:
        """Wait until the cluster knows what became of an actor out of reach, if it does soon; then end it.

        Killed before that it would be counted dead alone, and its successor be sent to the same dead node.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._fate(), _FATE_WITHIN_S)
        self.kill()

    async def _fate(self) -> None:
        from ray.exceptions import ActorUnavailableError, RayError

        while self._actor is not None:
            try:
                await self._actor.is_here.remote()
            except ActorUnavailableError:
                await asyncio.sleep(_ASK_AGAIN_S)
            except RayError:
                return
            else:
                return


def reservation(pool: ReplicasSpec | LanesSpec) -> dict[str, Any]:
    """What a worker of a pool reserves, as options of a Ray actor."""
    if pool.engine == "openai":  # its devices are another server's
        return {"num_cpus": 1}
    match pool.device:
        case "cuda":
            return {"num_cpus": 1, "num_gpus": pool.devices}
        case "npu":
            return {"num_cpus": 1, "resources": {"NPU": pool.devices}}
    return {"num_cpus": pool.devices}


def num_threads(pool: ReplicasSpec | LanesSpec) -> int:
    """As many threads as processors are reserved: Ray gives no processors of one's own."""
    return int(reservation(pool)["num_cpus"])


def connect(cluster: ClusterSpec) -> None:
    """Join the cluster at `ray_address`, or start one; does nothing if that was done. Raises `InputError`."""
    if importlib.util.find_spec("ray") is None:
        raise InputError("cluster.placement", "ray is not installed here", "pip install 'marlaas[cluster]'")
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    if not ray.is_initialized():
        _join(cluster)
    have: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    for resource, amount in wanted(cluster).items():
        if amount > have.get(resource, 0):
            problem = (
                f"the workers reserve {amount} {resource}, the Ray cluster has {have.get(resource, 0):g}"
            )
            raise InputError("cluster", problem, "fewer or smaller replicas and lanes, or more nodes")


def _join(cluster: ClusterSpec) -> None:
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    address = cluster.ray_address
    if address is None:
        num_cpus = max(os.cpu_count() or 1, wanted(cluster)["CPU"])
        ray.init(address="local", include_dashboard=False, num_cpus=num_cpus, **quiet)
        return
    mending = "wanted HOST:PORT of `ray start --head`, or auto, from a node of that cluster"
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), _REACH_S).close()
        ray.init(address=address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
        problem = f"no Ray cluster answers at {address} ({one_line(error)})"
        raise InputError("cluster.ray_address", problem, mending) from None


def wanted(cluster: ClusterSpec) -> Counter[str]:
    """What all workers together reserve, by Ray's names for resources."""
    total: Counter[str] = Counter()
    for pool in (cluster.replicas, cluster.lanes):
        options = reservation(pool)
        each = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
        total.update({name: amount * pool.count for name, amount in each.items() if amount})
    return total


def _actor_class() -> Any:
    ray: Any = importlib.import_module("ray")  # its types know neither groups nor classes made here
    groups = {"tell": "orders", "is_here": "orders", "hear": "reports"}
    methods = {
        name: ray.method(concurrency_group=group)(getattr(WorkerActor, name))
        for name, group in groups.items()
    }
    grouped = type("WorkerActor", (WorkerActor,), methods)
    return ray.remote(concurrency_groups=dict.fromkeys(groups.values(), 1))(grouped)


def _reason(error: BaseException) -> str:
    """What is worth telling of Ray's many lines."""
    text = " ".join(str(error).split())
    found = re.search(r"The actor (?:is dead|died) because (.*?)(?: Some common causes| NOTE:|$)", text)
    return found.group(1)[:500] if found else one_line(error)
