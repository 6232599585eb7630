"""Processes that grade answers, so that none can hang, crash or fool the run: models are not trusted.

    environment ──JSON line──► python -m executor.environments.judge ──JSON line──► reward

Graders of libraries parse, simplify and even evaluate what they are given. Each answer gets so much CPU
time, of which the kernel keeps count: a process beyond it dies of its own alarm, in the middle of a
computation if need be, and also when the driver is gone; the load of the machine makes no difference. Owns
the processes; knows no environment: a grader is `package.module:function`, a function of a setting that
returns a function of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import resource
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from typing import Any

from marlaas.errors import MarlaasError

Grade = Callable[[Any], float]
MEMORY_BYTES = 4 << 30
START_S = 60.0
LINE_BYTES = 1 << 20


class Judges:
    """At most `count` processes of one grader, started when they are needed."""

    def __init__(self, function: str, setting: Any, *, count: int, seconds: float) -> None:
        self._setup = {"function": function, "setting": setting, "seconds": seconds}
        self._count = count
        self._loop: asyncio.AbstractEventLoop | None = None
        self._free: asyncio.Queue[Process | None] = asyncio.Queue()
        self._started: set[Process] = set()

    async def grade(self, request: Any) -> float:
        """The grader's answer, 0 for a request it cannot finish in time or fails at.

        Raises `MarlaasError` if the grader cannot be made or its process ends for another reason.
        """
        self._join_loop()
        process = await self._free.get()
        try:
            if process is None or process.returncode is not None:
                process = await self._start()
            reward = await self._ask(process, request)
        except BaseException:
            self._end(process)  # an answer that nobody waited for must not be taken for the next one's
            self._free.put_nowait(None)
            raise
        self._free.put_nowait(process)
        return reward

    async def close(self) -> None:
        """End all processes; grading again starts new ones."""
        for process in self._started:
            self._end(process)
        for process in self._started:
            await process.wait()
        self._started.clear()
        self._loop = None

    def _join_loop(self) -> None:
        """Processes belong to the event loop that started them."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        for process in self._started:
            self._end(process)
        self._started.clear()
        self._loop, self._free = loop, asyncio.Queue()
        for _ in range(self._count):
            self._free.put_nowait(None)

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "executor.environments.judge"),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            limit=LINE_BYTES,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
        )
        self._started = {each for each in self._started if each.returncode is None} | {process}
        ready = await asyncio.wait_for(_exchange(process, self._setup), START_S)
        if ready is None:
            raise MarlaasError(f"the grader {self._setup['function']} ended while it was made")
        if "error" in ready:
            raise MarlaasError(f"the grader {self._setup['function']} cannot be made: {ready['error']}")
        return process

    async def _ask(self, process: Process, request: Any) -> float:
        answer = await _exchange(process, request)
        if answer is not None:
            return float(answer["reward"])
        if await process.wait() == -signal.SIGPROF:
            return 0.0
        raise MarlaasError(f"a process grading answers ended with status {process.returncode}")

    def _end(self, process: Process | None) -> None:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


async def _exchange(process: Process, message: Any) -> dict[str, Any] | None:
    """Send a line, wait for one; None when the process is gone."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(message).encode() + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
    except ConnectionError:
        return None
    answer: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    return answer


# --- the process -----------------------------------------------------------------------------------


def serve() -> None:
    """Make the grader that the first line names, then grade a line each until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # interrupts of the terminal are the driver's to handle
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print is not an answer

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    setup = json.loads(sys.stdin.readline())
    try:
        module, _, name = setup["function"].partition(":")
        grade: Grade = getattr(importlib.import_module(module), name)(setup["setting"])
    except Exception as error:  # noqa: BLE001 - the driver says it
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, setup["seconds"])
        try:
            reward = float(grade(json.loads(line)))
        except Exception:  # noqa: BLE001 - an answer that makes a grader stumble is a wrong answer
            reward = 0.0
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        say({"reward": reward})


if __name__ == "__main__":
    serve()
