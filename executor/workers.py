"""Worker processes as the driver sees them: started, spoken to, killed, and seen to end.

Owns the process and the driver's ends of its two pipes. Knows no scheduler; why a worker ended is told as
text, to whoever awaits `run`.

Workers are plain child processes (`python -m executor.worker`) rather than `multiprocessing` ones: those
import the parent's main module again, here a whole command line, and cannot be given their thread
limits before the interpreter starts.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

from executor.folders import RunFolder
from executor.protocols import Order, Report
from executor.wire import HEAD, Crashed, Hello, WorkerSpec, pack, unpack

Receive = Callable[[Hello | list[Report]], None]

_EXIT_GRACE_S = 5.0
_POLL_S = 0.01


class Worker(Protocol):
    """One incarnation of a worker, wherever it runs; what it says goes to whoever made it."""

    async def run(self) -> str:
        """Start it and hear it to its end; returns why it ended. Cancelling kills it."""

    def send(self, order: Order) -> None:
        """Queue an order; never blocks, and says nothing when the worker is gone: `run` does that."""

    def kill(self) -> None:
        """End it at once, whatever it is doing; `run` then tells so. It may be dead already."""

    async def gone(self) -> None:
        """Wait until the killed worker has left its memory and its devices."""


class Place(Protocol):
    """Where the workers of a run are."""

    def worker(self, spec: WorkerSpec, receive: Receive) -> Worker:
        """A worker to be; `receive` will be called with each `Hello` and each list of reports."""

    def leave(self) -> None:
        """Let go of the place, when every worker is gone."""


class ThisMachine:
    """The `Place` of worker processes; what they print goes to a log each in the run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def worker(self, spec: WorkerSpec, receive: Receive) -> WorkerProcess:
        """A worker process to be."""
        return WorkerProcess(spec, self._folder.log(spec.name), receive)

    def leave(self) -> None:
        """Nothing to let go of."""


class WorkerProcess:
    """A `Worker` that is a process of this machine; `receive` is told each `Hello` and list of reports.

    Orders and reports have a pipe each: were they to share a socket, an order that meets a dead worker would
    tear down with it what the worker said last.
    """

    def __init__(self, spec: WorkerSpec, log: Path, receive: Receive) -> None:
        self.spec = spec
        self._log = log
        self._receive = receive
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: asyncio.WriteTransport | None = None
        self._reports: asyncio.ReadTransport | None = None

    async def run(self) -> str:
        """Start the process and hear it to its end; returns why it ended. Cancelling kills it."""
        try:
            # In this thread: the kernel ties the child's life to the thread that starts it.
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                self._process = spawn(self.spec, log)
        except OSError as error:
            return f"could not be started: {error}"
        try:
            reports = await self._connect(self._process)
            return await self._hear(reports) or await self._exit_reason()
        finally:
            self.kill()
            if self._reports is not None:
                self._reports.close()
            if self._orders is not None and not self._orders.is_closing():
                self._orders.abort()
            await self.gone()

    async def _connect(self, process: subprocess.Popen[bytes]) -> asyncio.StreamReader:
        loop = asyncio.get_running_loop()
        reports = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reports)
        self._reports, _ = await loop.connect_read_pipe(lambda: protocol, process.stdout)
        self._orders, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        self._orders.write(pack(self.spec))
        return reports

    def send(self, order: Order) -> None:
        """Queue an order; never blocks, and says nothing when the process is gone: `run` does that."""
        if self._orders is not None and not self._orders.is_closing():
            self._orders.write(pack(order))

    def kill(self) -> None:
        """End the process at once, whatever it is doing; `run` then tells so. It may be dead already."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    @property
    def is_alive(self) -> bool:
        """Whether the process has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    async def gone(self) -> None:
        """Wait until the killed process has left its memory and its cores."""
        while self.is_alive:  # noqa: ASYNC110 - a child process has no asyncio event
            await asyncio.sleep(_POLL_S)

    async def _hear(self, reports: asyncio.StreamReader) -> str | None:
        """Pass messages on until the worker says why it ends, or (None) the pipe does."""
        while True:
            try:
                (length,) = HEAD.unpack(await reports.readexactly(HEAD.size))
                message = unpack(await reports.readexactly(length))
            except (asyncio.IncompleteReadError, OSError):
                return None
            if isinstance(message, Crashed):
                return message.reason
            assert isinstance(message, Hello | list)
            self._receive(message)

    async def _exit_reason(self) -> str:
        """The pipe closed without a word: the exit status is all there is to tell."""
        assert self._process is not None
        try:
            await asyncio.wait_for(self.gone(), _EXIT_GRACE_S)
        except TimeoutError:
            return "closed its pipe without exiting"
        return f"{ending(self._process.returncode)}; see {self._log.name}"


def spawn(spec: WorkerSpec, stderr: IO[bytes] | None, **more: str) -> subprocess.Popen[bytes]:
    """Start the process of a worker, with `more` in its environment; its spec is to be sent first."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "executor.worker", spec.name, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**_surroundings(spec), **more},
    )


def settings(spec: WorkerSpec) -> dict[str, str]:
    """What must be in a worker's environment before torch is imported."""
    threads = str(len(spec.cores))
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}


def defaults() -> dict[str, str]:
    """What is in a worker's environment unless the user's says otherwise."""
    return {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


def _surroundings(spec: WorkerSpec) -> dict[str, str]:
    """The child's environment: our own with our import path."""
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**defaults(), **os.environ, "PYTHONPATH": path, **settings(spec)}


def ending(status: int) -> str:
    """How a process ended, by its return code."""
    if status >= 0:
        return f"exited with status {status}"
    is_named = -status in {number.value for number in signal.Signals}
    return f"killed by {signal.Signals(-status).name if is_named else f'signal {-status}'}"
