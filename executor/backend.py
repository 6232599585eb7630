"""The real world as a backend: every command goes to a worker process, an environment or the loop's clock.

    StartWorker ───────────────► a new process          LoadAdapter, Generate, ... ──► its replica
    StepEnvironment ──► an asyncio task                 CreateAdapter, Train, ... ───► its lane
    SetTimer, OpenService ──► the loop's clock          DropTrajectories, CloseTask ─► forget

Owns what is under way and takes reports in: turns go to the transcripts, fingerprints to the payloads,
events with the run's time to the scheduler. Decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace

from executor import environments as embedded
from executor.background import Background
from executor.clock import Clock
from executor.environments import Environment
from executor.folders import RunFolder
from executor.payloads import Payloads
from executor.pool import WorkerPool, place_of, worker_specs
from executor.protocols import Report
from executor.steps import EnvironmentSteps
from executor.timetable import keep_timetable
from executor.transcripts import Codec, Transcripts, Unusable
from marlaas.commands import (
    AbortTurns,
    Alarm,
    CloseTask,
    Command,
    CreateAdapter,
    DropTrajectories,
    Generate,
    LoadAdapter,
    OpenService,
    Publish,
    SetTimer,
    StartWorker,
    StepEnvironment,
    Train,
    UnloadAdapter,
)
from marlaas.events import (
    AdapterCreated,
    AdapterPublished,
    CommandFailed,
    Event,
    TimerFired,
    TurnGenerated,
    WorkerLost,
    WorkerUp,
)
from marlaas.runtime import Emit
from marlaas.spec import EnvironmentSpec, Experiment

_log = logging.getLogger("marlaas")

SHOWN_TRAJECTORIES = 8


class Plugins(msgspec.Struct, frozen=True, kw_only=True):
    """What stands behind workers and environments.

    Engines are named `package.module:function`, called with a `WorkerSpec` inside the worker.
    """

    replica: str = "executor.engines:replica"
    lane: str = "executor.engines:torch_lane"
    environment: Callable[[EnvironmentSpec], Environment] = embedded.build


class ExecutorBackend:
    """A `Backend` on the running asyncio loop; `fail` is told of exceptions nobody else would see."""

    def __init__(
        self,
        experiment: Experiment,
        out: Path,
        clock: Clock,
        fail: Callable[[BaseException], None],
        plugins: Plugins,
    ) -> None:
        self._experiment = experiment
        self._clock = clock
        self._folder = RunFolder(out)
        self._background = Background(fail)
        environments = {name: plugins.environment(spec) for name, spec in experiment.environments.items()}
        self._environments = environments.values()
        codec = Codec(Path(experiment.model.path), experiment.model.chat)
        self._transcripts = Transcripts(experiment.seed, experiment.tasks, environments, codec)
        self._payloads = Payloads(experiment, self._folder, self._transcripts)
        self._steps = EnvironmentSteps(experiment, self._transcripts, clock, self._background)
        specs = worker_specs(experiment, plugins.replica, plugins.lane)
        place = place_of(experiment, self._folder)
        self._workers = WorkerPool(specs, place, self._background)
        self._generates: dict[int, Generate] = {}
        self._versions: dict[int, tuple[str, int]] = {}
        self._trained: dict[str, Train] = {}

    # --- commands ---

    def start(self, command: Command, emit: Emit) -> None:
        """Begin the work of a command; never blocks."""
        match command:
            case StartWorker():
                self._start_worker(command, emit)
            case LoadAdapter() | UnloadAdapter() | AbortTurns():
                self._give(command.replica, command, emit)
            case Generate():
                self._generates[command.id] = command
                self._give(command.replica, command, emit)
            case CreateAdapter():
                self._versions[command.id] = command.task, 0
                self._give(command.lane, command, emit)
            case Train():
                self._trained[command.task] = command
                self._give(command.lane, command, emit)
            case Publish():
                self._versions[command.id] = command.task, command.version
                self._give(command.lane, command, emit)
            case StepEnvironment():
                self._steps.start(command, emit)
            case SetTimer():
                self._set_timer(command, emit)
            case OpenService():
                kill = self._workers.kill
                self._background.spawn(keep_timetable(self._experiment, self._clock, emit, kill))
            case DropTrajectories(task=task, step=step, trajectories=trajectories):
                self._steps.cancel((task, step, trajectory) for trajectory in trajectories)
                self._transcripts.release(task, step, trajectories)
            case CloseTask(task=task):
                self._steps.cancel_task(task)
                self._forget(task)
            case Alarm(message=message):
                _log.warning(message)
            case _:
                raise NotImplementedError(f"the executor knows no {type(command).__name__}")

    async def close(self) -> None:
        """Kill every worker, cancel everything under way, and wait until both are gone."""
        await self._background.close()
        await embedded.close_all(self._environments)
        await self._workers.close()

    def _start_worker(self, command: StartWorker, emit: Emit) -> None:
        name = command.worker
        self._workers.start(
            name,
            is_up=lambda: emit(WorkerUp(at=self._clock.now(), command=command.id, worker=name)),
            has_reports=lambda reports: self._take(reports, emit),
            is_lost=lambda reason: emit(WorkerLost(at=self._clock.now(), worker=name, reason=reason)),
        )

    def _give(self, worker: str, command: Command, emit: Emit) -> None:
        try:
            order = self._payloads.order(command)
        except Unusable as error:
            emit(CommandFailed(at=self._clock.now(), command=command.id, reason=str(error)))
        else:
            self._workers.give(worker, order)

    def _set_timer(self, command: SetTimer, emit: Emit) -> None:
        def ring() -> None:
            emit(TimerFired(at=self._clock.now(command.at), command=command.id))

        asyncio.get_running_loop().call_at(self._clock.monotonic_s(command.at), ring)

    # --- reports ---

    def _take(self, reports: list[Report], emit: Emit) -> None:
        for report in reports:
            event = replace(report.event, at=self._clock.now())
            if isinstance(event, TurnGenerated):
                event = self._keep_turn(event, report)
            elif isinstance(event, AdapterCreated | AdapterPublished):
                self._keep_version(event)
            emit(event)

    def _keep_turn(self, event: TurnGenerated, report: Report) -> Event:
        command = self._generates.get(event.command)
        if command is None:  # its step is committed or its task has ended
            return event
        assert report.payload is not None, "a replica reported a turn without its tokens"
        try:
            self._transcripts.record_turn(command, event.trajectory, report.payload)
        except Unusable as error:
            return CommandFailed(
                at=event.at, command=event.command, reason=str(error), trajectory=event.trajectory
            )
        return event

    def _keep_version(self, event: AdapterCreated | AdapterPublished) -> None:
        task, version = self._versions.pop(event.command)
        self._payloads.published(task, version, event.fingerprint)
        if isinstance(event, AdapterPublished):
            trained = self._trained[task]
            with contextlib.suppress(OSError, Unusable):  # for people to read; no run fails for its sake
                self._show(trained)
            self._forget(task, trained.step)

    def _show(self, trained: Train) -> None:
        shown = trained.trajectories[:SHOWN_TRAJECTORIES]
        text = self._transcripts.describe(trained.task, trained.step, shown)
        file = self._folder.samples(trained.task, trained.step)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def _forget(self, task: str, up_to_step: int | None = None) -> None:
        """Let go of a task's trajectories: all of them, or those of steps up to and including one."""
        self._transcripts.release_task(task, up_to_step)
        for number, generate in list(self._generates.items()):
            if generate.task == task and (up_to_step is None or generate.step <= up_to_step):
                del self._generates[number]
