"""A world with a clock and fixed durations, enough to record real runs of the scheduler in milliseconds.

Faults by name: `kill` maps a worker to the time (s) at which it dies once; `hang` holds the (task, step,
trajectory) whose first environment step never answers; `stick` those whose first turn never ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from pathlib import Path

from marlaas import commands as c
from marlaas import events as e
from marlaas.runtime import Emit, Recorder, Runtime
from marlaas.scheduler import Scheduler
from marlaas.spec import (
    ClusterSpec,
    Experiment,
    LanesSpec,
    Limits,
    ReplicasSpec,
    ReverseEnvironment,
    TaskSpec,
)
from traces.schema import World, make_header
from traces.writer import TraceWriter

NS = 1_000_000_000
SECONDS = {
    c.StartWorker: 0.5,
    c.CreateAdapter: 0.1,
    c.LoadAdapter: 0.2,
    c.UnloadAdapter: 0.05,
    c.AbortTurns: 0.01,
    c.Train: 1.5,
    c.Publish: 0.3,
}
Who = tuple[str, int, int]


def small_experiment(
    system: str = "marlaas",
    *,
    tasks: int = 2,
    steps: int = 2,
    samples: int = 2,
    turns: int = 2,
    **cluster: int,
) -> Experiment:
    """Equal tasks `t0`, `t1`, ... with short deadlines."""
    return Experiment(
        name="small",
        system=system,
        seed=7,
        limits=Limits(turn_s=6.0, trajectory_s=60.0, order_s=10.0, training_s=20.0, min_group=1),
        environments={
            "tool": ReverseEnvironment(concurrency=cluster.get("concurrency", 3), timeout_s=4.0),
            "idle": ReverseEnvironment(),
        },
        cluster=ClusterSpec(
            replicas=ReplicasSpec(count=cluster.get("replicas", 1), slots=cluster.get("slots", 4)),
            lanes=LanesSpec(count=cluster.get("lanes", 1)),
        ),
        tasks=tuple(
            TaskSpec(name=f"t{i}", environment="tool", steps=steps, prompts=1, samples=2, max_turns=turns)
            for i in range(tasks)
        ),
    )


class TimedWorld:
    """Runs an experiment against a recorder, on its own clock."""

    def __init__(
        self,
        experiment: Experiment,
        recorder: Recorder,
        *,
        kill: Mapping[str, float] | None = None,
        hang: Collection[Who] = (),
        stick: Collection[Who] = (),
    ) -> None:
        self._experiment = experiment
        self._runtime = Runtime(Scheduler(experiment), self, recorder)
        self._queue: list[tuple[int, int, e.Event]] = []
        self._num_queued = 0
        self._now = 0
        self._gone: set[int] = set()  # commands that are not answered any more
        self._in_flight: dict[int, str] = {}
        self._hang, self._stick = set(hang), set(stick)
        self._lengths: dict[Who, int] = {}
        for worker, at_s in (kill or {}).items():
            self._later(e.WorkerLost(at=round(at_s * NS), worker=worker, reason="killed"))

    def run(self) -> dict[str, str]:
        """Run to the end; each task's outcome."""
        self._runtime.post(e.RunStarted(at=0))
        while self._queue and not self._runtime.scheduler.finished:
            at, _, event = heapq.heappop(self._queue)
            if getattr(event, "command", None) in self._gone:
                continue
            self._now = at
            if isinstance(event, e.WorkerLost):
                self._forget(event.worker)
            self._runtime.post(event)
        return self._runtime.scheduler.outcomes

    def start(self, command: c.Command, emit: Emit) -> None:
        """Queue what ends a command."""
        worker = getattr(command, "replica", None) or getattr(command, "lane", None)
        if worker is not None:
            self._in_flight[command.id] = worker
        after = self._now + round(SECONDS.get(type(command), 0.0) * NS)
        match command:
            case c.StartWorker():
                self._forget(command.worker)
                self._later(e.WorkerUp(at=after, command=command.id, worker=command.worker))
            case c.OpenService():
                for task in self._experiment.tasks:
                    self._later(e.TaskSubmitted(at=after, task=task.name))
            case c.CreateAdapter():
                self._later(e.AdapterCreated(at=after, command=command.id, fingerprint=f"{command.task}-0"))
            case c.LoadAdapter():
                made = f"{command.task}-{command.version}"
                self._later(e.AdapterLoaded(at=after, command=command.id, fingerprint=made))
            case c.UnloadAdapter():
                self._later(e.AdapterUnloaded(at=after, command=command.id))
            case c.AbortTurns():
                self._gone.add(command.generate)
                self._later(e.TurnsAborted(at=after, command=command.id))
            case c.Generate():
                self._generate(command)
            case c.StepEnvironment():
                self._step(command)
            case c.Train():
                lengths = [self._lengths[command.task, command.step, i] for i in command.trajectories]
                stats = e.TrainingStats(num_tokens=sum(lengths), loss=0.25, grad_norm=1.5)
                self._later(e.TrainingFinished(at=after, command=command.id, stats=stats))
            case c.Publish():
                made = f"{command.task}-{command.version}"
                self._later(e.AdapterPublished(at=after, command=command.id, fingerprint=made))
            case c.SetTimer():
                self._later(e.TimerFired(at=command.at, command=command.id))

    def _generate(self, command: c.Generate) -> None:
        for i in command.trajectories:
            who = command.task, command.step, i
            if who in self._stick:
                self._stick.remove(who)
                continue
            event = e.TurnGenerated(
                at=self._now + round((1 + 0.7 * i + 0.1 * command.turn) * NS),
                command=command.id,
                trajectory=i,
                task=command.task,
                version=command.version,
                prompt_tokens=10 + (20 + i) * command.turn,  # with the answer of before and 8 of observation
                output_tokens=12 + i,
            )
            self._lengths[who] = event.prompt_tokens + event.output_tokens
            self._later(event)

    def _step(self, command: c.StepEnvironment) -> None:
        who = command.task, command.step, command.trajectory
        if who in self._hang:
            self._hang.remove(who)
            return
        task = next(task for task in self._experiment.tasks if task.name == command.task)
        done = command.turn + 1 == task.max_turns
        event = e.EnvironmentStepped(
            at=self._now + round((0.4 + 0.3 * command.trajectory) * NS),
            command=command.id,
            done=done,
            reward=0.5 * command.trajectory if done else None,
            observation_tokens=0 if done else 8,
        )
        self._later(event)

    def _later(self, event: e.Event) -> None:
        self._num_queued += 1
        heapq.heappush(self._queue, (event.at, self._num_queued, event))

    def _forget(self, worker: str) -> None:
        self._gone |= {number for number, other in self._in_flight.items() if other == worker}


FAULTS = {
    "kill": {"replica-0": 3.0, "lane-0": 8.0},
    "hang": [("t0", 0, 1)],
    "stick": [("t1", 0, 1)],
}


def record(
    path: Path, experiment: Experiment, *, world: World = "sim", faults: bool = False
) -> dict[str, str]:
    """Run an experiment into a trace; each task's outcome."""
    of_run = {"host": {"machine": "test"}, "created_at": "2026-01-01T00:00:00"} if world == "executor" else {}
    with TraceWriter(path, make_header(experiment, world=world, **of_run)) as writer:
        return TimedWorld(experiment, writer, **(FAULTS if faults else {})).run()
