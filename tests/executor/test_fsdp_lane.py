"""A lane of two ranks, real processes: the same adapters as one device makes, no hanging when a rank dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from test_trainer import Lane, samples
from tiny_base import LORA, shapes, tiny_base

from executor.adapters import read_adapter, read_optimizer
from executor.affinity import usable_cores
from executor.fsdp_ranks import JoinedRanks
from executor.grpo import MicroBatch
from executor.protocols import NewAdapter, NextVersion, Order, Report, Sample, TrainingBatch
from executor.wire import Hello, WorkerSpec
from executor.workers import WorkerProcess
from marlaas.commands import CreateAdapter, Publish, Train
from marlaas.events import AdapterPublished, CommandFailed, TrainingFinished
from marlaas.spec import (
    ClusterSpec,
    Experiment,
    LanesSpec,
    ModelSpec,
    SumsEnvironment,
    TaskSpec,
    TrainingSpec,
)

TRAINING = TrainingSpec(lr=1e-2, weight_decay=0.1, max_grad_norm=0.05, micro_batch_tokens=60)
EXPERIMENT = Experiment(
    name="one",
    tasks=(TaskSpec(name="t", environment="sums", steps=1),),
    environments={"sums": SumsEnvironment()},
)


class FarLane:
    """A lane worker driven by hand over its pipes."""

    def __init__(self, run: Path, worker: WorkerProcess, said: asyncio.Queue[Any]) -> None:
        self.worker, self._said = worker, said
        self._plans = Lane.folders.__get__(self)
        self.run = run
        self._next_id = 0

    def folders(self, version: int) -> dict[str, str]:
        """Where a version lives."""
        found: dict[str, str] = self._plans("t", version)
        return found

    async def do(self, kind: Any, payload: Any, **fields: Any) -> Any:
        """Give an order and wait for its event."""
        self.give(kind, payload, **fields)
        (report,) = await self._said.get()
        assert isinstance(report, Report)
        return report.event

    def give(self, kind: Any, payload: Any, **fields: Any) -> None:
        """Give an order."""
        self._next_id += 1
        self.worker.send(
            Order(command=kind(id=self._next_id, lane="lane-0", task="t", **fields), payload=payload)
        )

    async def create(self) -> Any:
        """Make version 0."""
        return await self.do(
            CreateAdapter, NewAdapter(**self.folders(0), lora=LORA, training=TRAINING, seed=7)
        )

    def batch(self, version: int, batch: list[Sample]) -> tuple[Any, Any, dict[str, Any]]:
        """A Train order."""
        fixed: dict[str, Any] = {"training": TRAINING, "temperature": 1.0, "seed": 5}
        payload = TrainingBatch(samples=batch, **self.folders(version), **fixed)
        trajectories = tuple(sample.trajectory for sample in batch)
        return Train, payload, {"step": version, "version": version, "trajectories": trajectories}

    async def train(self, version: int, batch: list[Sample]) -> Any:
        """Train from a version."""
        kind, payload, fields = self.batch(version, batch)
        return await self.do(kind, payload, **fields)

    async def publish(self, version: int) -> Any:
        """Publish a version."""
        payload = NextVersion(**self.folders(version), cursor={"step": version})
        return await self.do(Publish, payload, version=version)


Script = Callable[[FarLane], Coroutine[Any, Any, Any]]


def with_lane(run: Path, num_ranks: int, script: Script) -> tuple[Any, str]:
    """Run `script` beside a lane, then wait for the lane's end if it is ending, or kill it."""
    cluster = ClusterSpec(lanes=LanesSpec(devices=num_ranks))
    experiment = Experiment(
        name="one",
        tasks=EXPERIMENT.tasks,
        environments=EXPERIMENT.environments,
        model=ModelSpec(path=tiny_base()),
        cluster=cluster,
    )
    spec = WorkerSpec(
        name="lane-0",
        kind="lane",
        index=0,
        engine="executor.engines:torch_lane",
        experiment=experiment,
        cores=usable_cores()[:2],
    )

    async def main() -> tuple[Any, str]:
        said: asyncio.Queue[Any] = asyncio.Queue()
        worker = WorkerProcess(spec, run / "logs" / "lane-0.log", said.put_nowait)
        running = asyncio.create_task(worker.run())
        hello = asyncio.create_task(said.get())
        await asyncio.wait({running, hello}, return_when=asyncio.FIRST_COMPLETED, timeout=120)
        assert isinstance(hello.result(), Hello)
        result = await asyncio.wait_for(script(FarLane(run, worker, said)), 120)
        if result is not ENDING:
            worker.kill()
        return result, await asyncio.wait_for(running, 60)

    return asyncio.run(main())


ENDING = object()


def rank_1() -> psutil.Process:
    """The process of the other rank."""
    children = psutil.Process().children(recursive=True)
    (found,) = [child for child in children if "lane-0-rank-1" in child.cmdline()]
    return found


async def two_steps(lane: FarLane) -> list[Any]:
    """Two versions, of 16 samples and of an odd number of them."""
    await lane.create()
    events = [await lane.train(0, samples(1)), await lane.publish(1)]
    return [*events, await lane.train(1, samples(2, num=13)), await lane.publish(2)]


def test_samples_are_dealt_once_and_every_rank_has_as_many_forwards() -> None:
    """Forwards are collectives: a rank with fewer micro-batches repeats a sample that weighs nothing."""
    fillers = 0
    for num in (1, 7, 13, 40):
        batch = samples(num, num=num)
        advantage = {sample.trajectory: float(sample.trajectory) for sample in batch}
        device = torch.device("cpu")
        dealt = [list(JoinedRanks(rank, 3).share(batch, advantage, 60, device)) for rank in range(3)]
        assert len({len(own) for own in dealt}) == 1
        found = [pair for own in dealt for m, weight in own if weight for pair in _targets(m)]
        tokens = [zip(s.tokens, s.sampled, strict=True) for s in batch]
        wanted = [(float(i), token) for i, row in enumerate(tokens) for token, own in row if own]
        assert sorted(found) == sorted(wanted)
        fillers += sum(not weight for own in dealt for _, weight in own)
    assert fillers


def _targets(batch: MicroBatch) -> list[tuple[float, int]]:
    """Each sampled token of a micro-batch after its trajectory's advantage."""
    return list(zip(batch.advantages.tolist(), batch.targets.tolist(), strict=True))


@pytest.mark.slow
def test_two_ranks_train_what_one_device_trains(tmp_path: Path) -> None:
    """Weights, moments and statistics agree but for the order of float sums; files are alike."""
    told = [with_lane(tmp_path / str(num), num, two_steps)[0] for num in (1, 2)]
    for alone, together in zip(*told, strict=True):
        assert isinstance(alone, TrainingFinished | AdapterPublished), alone
        if isinstance(alone, TrainingFinished):
            assert alone.stats.num_tokens == together.stats.num_tokens
            for name in ("loss", "grad_norm", "kl", "logprob_gap", "clip_fraction"):
                one, other = getattr(alone.stats, name), getattr(together.stats, name)
                assert other == pytest.approx(one, rel=1e-5, abs=1e-7), name
    adapters = [tmp_path / str(num) / "adapter" / "t" / "v2" for num in (1, 2)]
    weights = [read_adapter(folder, LORA, shapes()) for folder in adapters]
    moments = [read_optimizer(tmp_path / str(num) / "optimizer" / "t" / "v2")[0] for num in (1, 2)]
    for name, weight in weights[0].items():
        # Adam divides tiny gradients by their own size, so the last bits of a gradient show.
        torch.testing.assert_close(weights[1][name], weight, atol=1e-4, rtol=0)
    for name, moment in moments[0].items():
        torch.testing.assert_close(moments[1][name], moment, atol=1e-6, rtol=1e-3)
    names = [sorted(file.name for file in folder.iterdir()) for folder in adapters]
    assert names[0] == names[1]
    configs = [(folder / "adapter_config.json").read_text() for folder in adapters]
    assert configs[0] == configs[1]


@pytest.mark.slow
def test_an_order_that_fails_on_both_ranks_fails_alone(tmp_path: Path) -> None:
    """Poison, a version that is not there and too few samples for two ranks; the lane then goes on."""

    async def script(lane: FarLane) -> list[Any]:
        await lane.create()
        poison = samples(1)
        poison[0] = Sample(**{**_fields(poison[0]), "reward": float("nan")})
        events = [await lane.train(0, poison), await lane.train(3, samples(1)), await lane.publish(7)]
        return [*events, await lane.train(0, samples(1, num=1)), await lane.publish(1)]

    events, _ = with_lane(tmp_path, 2, script)
    assert [type(event) for event in events] == [
        CommandFailed,
        CommandFailed,
        CommandFailed,
        TrainingFinished,
        AdapterPublished,
    ]


def _fields(sample: Sample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in Sample.__struct_fields__}


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["between orders", "in mid-update"])
def test_a_dead_rank_ends_its_lane_with_the_reason(tmp_path: Path, moment: str) -> None:
    """At once or at the next order, never by a wait for a deadline; no process is left."""
    left: list[psutil.Process] = []

    async def script(lane: FarLane) -> Any:
        await lane.create()
        other = rank_1()
        left.append(other)
        if moment == "in mid-update":
            other.suspend()  # so that rank 0 is waiting for it when it dies
        else:
            other.kill()
        kind, payload, fields = lane.batch(0, samples(1))
        lane.give(kind, payload, **fields)
        await asyncio.sleep(0.5)
        if moment == "in mid-update":
            other.kill()
        return ENDING

    _, reason = with_lane(tmp_path, 2, script)
    assert reason == "rank 1 killed by SIGKILL"
    assert not left[0].is_running() or left[0].status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_the_other_ranks_die_with_the_lane(tmp_path: Path) -> None:
    """Killed in the middle of anything, a lane leaves nobody behind."""
    left: list[psutil.Process] = []

    async def script(lane: FarLane) -> None:
        await lane.create()
        left.append(rank_1())

    with_lane(tmp_path, 2, script)
    psutil.wait_procs(left, timeout=5)
    assert not left[0].is_running() or left[0].status() == psutil.STATUS_ZOMBIE
