"""A real worker process around a scripted engine: what goes in, what comes out, how it ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
import pytest

from executor.affinity import usable_cores
from executor.protocols import Order, Report, TurnRequest, TurnRequests
from executor.wire import Hello, WorkerSpec, pack, read
from executor.workers import WorkerProcess
from marlaas.commands import Generate, UnloadAdapter
from marlaas.events import CommandFailed
from marlaas.spec import Experiment, SumsEnvironment, TaskSpec

EXPERIMENT = Experiment(
    name="one",
    tasks=(TaskSpec(name="a", environment="sums", steps=1),),
    environments={"sums": SumsEnvironment()},
)
GENERATE = Order(
    command=Generate(id=7, replica="replica-0", task="a", version=0, step=0, turn=0, trajectories=(0, 2)),
    payload=TurnRequests(
        requests=[
            TurnRequest(trajectory=t, context=[1], max_new_tokens=4, temperature=1.0, seed=t) for t in (0, 2)
        ]
    ),
)
UNLOAD = Order(command=UnloadAdapter(id=8, replica="replica-0", task="a", version=0))

Said = asyncio.Queue[Hello | list[Report]]
Script = Callable[[WorkerProcess, Said], Coroutine[Any, Any, Any]]


def spec(engine: str) -> WorkerSpec:
    """What a replica with one core and this engine is started with."""
    return WorkerSpec(
        name="replica-0",
        kind="replica",
        index=0,
        engine=f"scripted_engines:{engine}",
        experiment=EXPERIMENT,
        cores=usable_cores()[:1],
    )


def with_worker(tmp_path: Path, engine: str, script: Script, *, kill: bool = True) -> tuple[Any, str]:
    """Run `script` beside a worker, then kill the worker or wait for its end; the result and why it ended."""

    async def main() -> tuple[Any, str]:
        said: Said = asyncio.Queue()
        worker = WorkerProcess(spec(engine), tmp_path / "logs" / "replica-0.log", said.put_nowait)
        running = asyncio.create_task(worker.run())
        result = await asyncio.wait_for(script(worker, said), 30)
        if kill:
            worker.kill()
        return result, await asyncio.wait_for(running, 10)

    return asyncio.run(main())


async def hello(said: Said) -> int:
    """Wait for the worker to be up; its process id."""
    first = await said.get()
    assert isinstance(first, Hello)
    return first.pid


async def reports(said: Said, number: int) -> list[Report]:
    """The next `number` reports."""
    found: list[Report] = []
    while len(found) < number:
        more = await said.get()
        assert isinstance(more, list)
        found += more
    return found


def test_a_worker_runs_on_its_cores_with_as_many_threads(tmp_path: Path) -> None:
    """Pinned and limited before the engine is built, and free of torch unless the engine wants it."""

    async def ask(worker: WorkerProcess, said: Said) -> Any:
        await hello(said)
        worker.send(UNLOAD)
        (report,) = await reports(said, 1)
        assert isinstance(report.event, CommandFailed)
        return json.loads(report.event.reason)

    told, _ = with_worker(tmp_path, "TellingReplica", ask)
    assert told["threads"] == "1"
    assert not told["has_torch"]
    if hasattr(os, "sched_getaffinity"):
        assert tuple(told["cores"]) == usable_cores()[:1]


def test_an_order_that_raises_fails_alone_once_per_trajectory(tmp_path: Path) -> None:
    """The text travels on one line, and the worker takes further orders."""

    async def ask(worker: WorkerProcess, said: Said) -> list[Report]:
        await hello(said)
        worker.send(GENERATE)
        failed = await reports(said, 2)
        worker.send(GENERATE)
        return failed + await reports(said, 2)

    told, _ = with_worker(tmp_path, "RefusingReplica", ask)
    reason = "ValueError: no such adapter"
    expected = [CommandFailed(at=0, command=7, reason=reason, trajectory=t) for t in (0, 2, 0, 2)]
    assert [report.event for report in told] == expected


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ("DyingReplica", "RuntimeError: out of memory"),
        ("unbuildable", "FileNotFoundError: no weights for replica-0"),
        ("nowhere", "AttributeError: module 'scripted_engines' has no attribute 'nowhere'"),
        ("exiting", "exited with status 3; see replica-0.log"),
    ],
)
def test_a_worker_that_cannot_go_on_says_why(tmp_path: Path, engine: str, reason: str) -> None:
    """An exception's text travels; a silent death is told by its status; the traceback is in the log."""

    async def provoke(worker: WorkerProcess, said: Said) -> None:
        if engine == "DyingReplica":
            await hello(said)
            worker.send(GENERATE)

    _, told = with_worker(tmp_path, engine, provoke, kill=False)
    assert told == reason
    if engine != "exiting":
        assert "Traceback" in (tmp_path / "logs" / "replica-0.log").read_text()


def test_a_worker_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    """Here the place of its log is taken by a file."""
    (tmp_path / "logs").write_text("")

    async def wait(worker: WorkerProcess, said: Said) -> None:
        assert not worker.is_alive

    _, told = with_worker(tmp_path, "WatermarkReplica", wait, kill=False)
    assert told.startswith("could not be started: ")


def test_a_killed_worker_is_told_by_its_signal(tmp_path: Path) -> None:
    """As an out-of-memory killer would do it."""

    async def kill(worker: WorkerProcess, said: Said) -> None:
        os.kill(await hello(said), signal.SIGKILL)

    _, told = with_worker(tmp_path, "WatermarkReplica", kill, kill=False)
    assert told == "killed by SIGKILL; see replica-0.log"


def test_a_stopped_worker_does_not_block_its_driver_and_can_be_killed(tmp_path: Path) -> None:
    """Orders for a worker that does not read are kept, far beyond what a socket holds."""

    async def flood(worker: WorkerProcess, said: Said) -> None:
        psutil.Process(await hello(said)).suspend()
        turn = TurnRequest(trajectory=0, context=[5] * 200_000, max_new_tokens=1, temperature=1.0, seed=1)
        for _ in range(20):
            worker.send(Order(command=GENERATE.command, payload=TurnRequests(requests=[turn])))

    _, told = with_worker(tmp_path, "WatermarkReplica", flood)
    assert told == "killed by SIGKILL; see replica-0.log"


def test_large_orders_arrive_whole(tmp_path: Path) -> None:
    """Frames are longer than any buffer on their way."""

    async def ask(worker: WorkerProcess, said: Said) -> list[Report]:
        await hello(said)
        text = "x" * 3_000_000
        worker.send(Order(command=UnloadAdapter(id=9, replica="replica-0", task=text, version=0)))
        return await reports(said, 1)

    (report,), _ = with_worker(tmp_path, "WatermarkReplica", ask)
    assert isinstance(report.event, CommandFailed)
    assert report.event.reason.startswith("KeyError: ('xxx")


def test_a_worker_ends_when_its_driver_lets_go_of_it(tmp_path: Path) -> None:
    """The end of its orders is enough, also where the kernel does not tie a child to its parent."""
    command = [sys.executable, "-m", "executor.worker", "replica-0", str(os.getpid())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(pack(spec("SpinningReplica")) + pack(GENERATE))
        process.stdin.flush()
        try:
            assert isinstance(read(process.stdout), Hello)
            process.stdin.close()
            assert process.wait(5) == 0
        finally:
            process.kill()


def test_last_words_are_heard_though_orders_meet_a_dead_worker(tmp_path: Path) -> None:
    """Orders go on arriving while the worker dies of the first."""

    async def flood(worker: WorkerProcess, said: Said) -> None:
        await hello(said)
        for _ in range(200):
            worker.send(GENERATE)
            await asyncio.sleep(0.001)

    for _ in range(3):
        _, told = with_worker(tmp_path, "DyingReplica", flood, kill=False)
        assert told == "RuntimeError: out of memory"


def test_what_an_engine_prints_does_not_reach_the_driver(tmp_path: Path) -> None:
    """Libraries print; their words go to the log."""

    async def ask(worker: WorkerProcess, said: Said) -> None:
        await hello(said)

    with_worker(tmp_path, "talkative", ask)
    assert "hello from the library" in (tmp_path / "logs" / "replica-0.log").read_text()
