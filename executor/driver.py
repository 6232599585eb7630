"""Runs an experiment in the real world, from the start of its workers to the end of its last task.

    execute ──► asyncio loop ──► Runtime: record event, handle, record commands, start them
                    ▲                                        │
                    └────────── events ◄── ExecutorBackend ◄─┘

Owns the loop and the way out of it: whatever ends a run, no worker outlives it. Loads no torch; that is
the workers' business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from executor.backend import ExecutorBackend, Plugins
from executor.clock import Clock
from marlaas.commands import Command
from marlaas.events import Event, RunStarted, StopRequested
from marlaas.runtime import Emit, Observed, Observer, Recorder, Runtime
from marlaas.scheduler import Scheduler
from marlaas.spec import Experiment

__all__ = ["Observer", "Plugins", "execute"]

_log = logging.getLogger("marlaas")

EMBEDDED = Plugins()


def execute(
    experiment: Experiment,
    out: Path,
    recorder: Recorder,
    observer: Observer | None = None,
    *,
    plugins: Plugins = EMBEDDED,
) -> dict[str, str]:
    """Run an experiment to its end; returns each task's outcome: `done`, `failed`, `cancelled` or `stopped`.

    On SIGTERM the lanes commit what they are at, then the run ends, and tasks that had not are `stopped`.

    What the run makes goes under `out`, which must exist; the trace goes to `recorder`, and to
    `observer` after that. `experiment.model.path` must lead to the model folder from here. Raises what
    the scheduler, the recorder or the observer raise; `KeyboardInterrupt` on interrupt and `SystemExit` on
    a second SIGTERM.
    """
    if observer is not None:
        recorder = Observed(recorder, observer)
    return asyncio.run(_execute(experiment, out, recorder, plugins))


async def _execute(experiment: Experiment, out: Path, recorder: Recorder, plugins: Plugins) -> dict[str, str]:
    run = _Run(experiment, out, recorder, plugins)
    with _termination_stops(run.stop) as is_cancelled:
        try:
            ended = await run.to_its_end()
        except asyncio.CancelledError:
            if is_cancelled():
                raise SystemExit(128 + signal.SIGTERM) from None
            raise
    return {task.name: ended.get(task.name, "stopped") for task in experiment.tasks}


class _Run:
    """One run: itself the `Backend` that its runtime sees, so that every event passes through `post`."""

    def __init__(self, experiment: Experiment, out: Path, recorder: Recorder, plugins: Plugins) -> None:
        self._clock = Clock()
        self._scheduler = Scheduler(experiment)
        self._runtime = Runtime(self._scheduler, self, recorder)
        self._backend = ExecutorBackend(experiment, out, self._clock, self.fail, plugins)
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def to_its_end(self) -> dict[str, str]:
        """Run until every task has ended; leaves no worker and no asyncio task behind, however it ends."""
        try:
            self.post(RunStarted(at=self._clock.now()))
            await self._ended
        finally:
            await self._backend.close()
        return dict(self._scheduler.outcomes)

    def start(self, command: Command, emit: Emit) -> None:
        """Begin a command; its events come back through `post`."""
        self._backend.start(command, self.post)

    def post(self, event: Event) -> None:
        """Hand an event to the runtime, unless the run has ended; what goes wrong there ends the run."""
        if self._ended.done():
            return
        try:
            self._runtime.post(event)
        except Exception as error:  # noqa: BLE001 - it ends the run, whoever raised it
            self.fail(error)
        else:
            if self._scheduler.finished and not self._ended.done():
                self._ended.set_result(None)

    def stop(self) -> None:
        """End the run as soon as the lanes have committed what they are at."""
        _log.warning("asked to stop: committing what is being trained; ask again to stop at once")
        self.post(StopRequested(at=self._clock.now()))

    def fail(self, error: BaseException) -> None:
        """End the run with an error."""
        if not self._ended.done():
            self._ended.set_exception(error)


@contextlib.contextmanager
def _termination_stops(stop: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """While inside, a first SIGTERM calls `stop`, a second cancels the current task.

    Yields a function that tells whether the second has come.
    """
    num_signals = 0
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()

    def terminate() -> None:
        nonlocal num_signals
        num_signals += 1
        if num_signals == 1:
            stop()
        else:
            task.cancel()

    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        with contextlib.suppress(NotImplementedError):  # no such handlers on this platform
            loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        yield lambda: num_signals > 1
    finally:
        if is_main:
            loop.remove_signal_handler(signal.SIGTERM)
