"""A lane of several devices: the worker is rank 0, the others are worker processes that it starts and feeds.

    driver ──order──► rank 0 ──order──► rank 1, 2, ...      (pipes)
                         └── collectives ──┘                (torch.distributed)

Every rank runs the same engine on every order; only rank 0 writes files and is heard. A rank that dies, or
fails without the others, takes the lane down: the worker ends with the reason, to be started afresh. Owns the
processes and what follows from their end; the arithmetic is `fsdp_ranks.py`'s.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from msgspec.structs import replace

from executor import devices
from executor.affinity import pin
from executor.protocols import EngineLost, Order, Report, TrainingEngine
from executor.wire import Crashed, Hello, WorkerSpec, pack, read
from executor.worker import one_line
from executor.workers import ending, spawn

_RANK, _PORT = "MARLAAS_LANE_RANK", "MARLAAS_LANE_PORT"
# A peer's death breaks a gloo collective at once; others may wait for ever, and are not waited for.
_GRACE_S = 10.0
_LAST_WORDS_S = 5.0


class RankEngine:
    """One rank's `TrainingEngine`. Joins the others on its first order, which reaches all of them."""

    def __init__(self, spec: WorkerSpec, rank: int, port: int) -> None:
        lanes = spec.experiment.cluster.lanes
        devices.claim(lanes.device, _first_device(spec) + rank, 1)
        import torch

        from executor.base_model import choose_device, load_base

        torch.set_num_threads(len(spec.cores))
        self._spec, self._rank, self._port = spec, rank, port
        self._device = choose_device(lanes.device)
        dtype = devices.precision(spec.experiment.model.dtype, lanes.device)
        self._base = load_base(spec.experiment.model.path, dtype, torch.device("cpu"))
        self._engine: TrainingEngine | None = None

    def run(self, order: Order) -> Report:
        """Carry out an order in step with the other ranks; raises `EngineLost` when out of step."""
        try:
            if self._engine is None:
                self._engine = self._joined()
            return self._engine.run(order)
        except Exception as error:
            raise EngineLost(f"rank {self._rank}: {one_line(error)}") from error

    def _joined(self) -> TrainingEngine:
        from executor.fsdp_ranks import JoinedRanks, join, shard
        from executor.trainer import PeftTrainingEngine

        experiment = self._spec.experiment
        lanes = experiment.cluster.lanes
        join(self._rank, lanes.devices, self._port, self._device, experiment.limits.training_s)
        base = shard(self._base, self._device)
        ranks = JoinedRanks(self._rank, lanes.devices)
        return PeftTrainingEngine(self._spec.name, experiment.model.path, lanes, base=base, ranks=ranks)


class Follower:
    """Another rank's process, as rank 0 sees it."""

    def __init__(self, spec: WorkerSpec, rank: int, port: int) -> None:
        self.rank = rank
        self._process = spawn(spec, None, **{_RANK: str(rank), _PORT: str(port)})
        self._is_ready = threading.Event()
        self.end = threading.Event()
        self.reason = ""
        self.send(spec)
        threading.Thread(target=self._hear, daemon=True).start()

    def send(self, message: Any) -> None:
        """Hand on an order; one that is gone says so by `end`."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(pack(message))
            self._process.stdin.flush()

    def wait_until_ready(self) -> None:
        """Wait until its base model is loaded; raises `EngineLost` when that fails."""
        self._is_ready.wait()
        if self.end.is_set():
            raise EngineLost(f"rank {self.rank} {self.reason}")

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def _hear(self) -> None:
        """Its reports are rank 0's own; what counts is when and how they cease."""
        assert self._process.stdout is not None
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = read(self._process.stdout)
                if isinstance(message, Hello):
                    self._is_ready.set()
                elif isinstance(message, Crashed):
                    self.reason = f"ended: {message.reason}"
        status = _status(self._process)
        self.reason = self.reason or ending(status)
        self.end.set()
        self._is_ready.set()


class ShardedLane:
    """The `TrainingEngine` of rank 0: orders go to every rank, and all of them must come back."""

    def __init__(self, engine: TrainingEngine, followers: list[Follower]) -> None:
        self._engine, self._followers = engine, followers
        self._is_running = False
        for follower in followers:
            threading.Thread(target=self._watch, args=(follower,), daemon=True).start()

    def run(self, order: Order) -> Report:
        """Carry out an order on every rank; raises `EngineLost` with the reason of the rank to blame."""
        for follower in self._followers:
            follower.send(order)
        self._is_running = True
        try:
            return self._engine.run(order)
        except EngineLost as error:
            raise EngineLost(self._lost_rank() or str(error)) from error
        finally:
            self._is_running = False

    def _lost_rank(self) -> str | None:
        """The other rank that is to blame, if there is one."""
        deadline = time.monotonic() + _LAST_WORDS_S
        for follower in self._followers:
            if follower.end.wait(max(0.0, deadline - time.monotonic())):
                return f"rank {follower.rank} {follower.reason}"
        return None

    def _watch(self, follower: Follower) -> None:
        """End the worker if rank 0 goes on waiting for a rank that is no more."""
        follower.end.wait()
        time.sleep(_GRACE_S)
        if self._is_running:
            print(f"rank {follower.rank} {follower.reason}", file=sys.stderr, flush=True)
            os._exit(1)


def sharded_lane(spec: WorkerSpec) -> ShardedLane:
    """Become rank 0 of a lane of several devices and start the other ranks, which die with this process."""
    num_ranks, port = spec.experiment.cluster.lanes.devices, _free_port()
    followers = [Follower(_follower_spec(spec, rank, num_ranks), rank, port) for rank in range(1, num_ranks)]
    cores = _share(spec.cores, 0, num_ranks)
    if spec.is_pinned:
        pin(cores)
    try:
        engine = RankEngine(replace(spec, cores=cores), 0, port)
        for follower in followers:
            follower.wait_until_ready()
    except BaseException:
        for follower in followers:
            follower.kill()
        raise
    return ShardedLane(engine, followers)


def follower(spec: WorkerSpec) -> RankEngine:
    """Become another rank, in a process that rank 0 has started."""
    return RankEngine(spec, int(os.environ[_RANK]), int(os.environ[_PORT]))


def _follower_spec(spec: WorkerSpec, rank: int, num_ranks: int) -> WorkerSpec:
    cores = _share(spec.cores, rank, num_ranks)
    return replace(spec, name=f"{spec.name}-rank-{rank}", engine=f"{__name__}:follower", cores=cores)


def _share(cores: tuple[int, ...], rank: int, num_ranks: int) -> tuple[int, ...]:
    """A rank's cores of its lane's: its own, or one in turn where there are fewer than ranks."""
    return cores[rank::num_ranks] or (cores[rank % len(cores)],)


def _first_device(spec: WorkerSpec) -> int:
    replicas, lanes = spec.experiment.cluster.replicas, spec.experiment.cluster.lanes
    return replicas.count * replicas.devices + spec.index * lanes.devices


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _status(process: subprocess.Popen[bytes]) -> int:
    """How a process that has closed its pipe ended; one that only closed it is killed."""
    try:
        return process.wait(_LAST_WORDS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
