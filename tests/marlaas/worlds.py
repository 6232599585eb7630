"""A scripted world for tests of the core: it keeps every order given and answers when told to."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

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
    AdapterLoaded,
    AdapterPublished,
    AdapterUnloaded,
    EnvironmentStepped,
    Event,
    RunStarted,
    TaskSubmitted,
    TimerFired,
    TrainingFinished,
    TrainingStats,
    TurnGenerated,
    TurnsAborted,
    WorkerLost,
    WorkerUp,
)
from marlaas.invariants import check
from marlaas.scheduler import Scheduler
from marlaas.spec import (
    ClusterSpec,
    Experiment,
    LanesSpec,
    Limits,
    ReplicasSpec,
    ReverseEnvironment,
    SystemSpec,
    TaskSpec,
)

Answer = Callable[["World", Command], Iterable[Event]]


def experiment(
    *,
    tasks: int = 2,
    steps: int = 2,
    prompts: int = 1,
    samples: int = 2,
    turns: int = 1,
    slots: int = 4,
    replicas: int = 1,
    lanes: int = 1,
    concurrency: int = 64,
    system: str | SystemSpec = "marlaas",
    limits: Limits | None = None,
) -> Experiment:
    """A small experiment of equal tasks `t0`, `t1`, ... that all use the environment `env`."""
    return Experiment(
        name="small",
        system=system,
        limits=limits or Limits(),
        environments={"env": ReverseEnvironment(concurrency=concurrency)},
        cluster=ClusterSpec(replicas=ReplicasSpec(count=replicas, slots=slots), lanes=LanesSpec(count=lanes)),
        tasks=tuple(
            TaskSpec(
                name=f"t{i}",
                environment="env",
                steps=steps,
                prompts=prompts,
                samples=samples,
                max_turns=turns,
            )
            for i in range(tasks)
        ),
    )


class World:
    """Feeds a scheduler and keeps the orders that are still unanswered, checking every invariant."""

    def __init__(self, spec: Experiment) -> None:
        self.experiment = spec
        self.scheduler = Scheduler(spec)
        self.now = 0
        self.open: list[tuple[Command, int | None]] = []
        self.log: list[Command] = []
        self.events: list[Event] = []

    def tell(self, event: Event) -> tuple[Command, ...]:
        """Hand one event to the scheduler and file the orders that come back."""
        self.events.append(event)
        commands = self.scheduler.handle(event)
        check(self.scheduler)
        for command in commands:
            self._file(command)
        return commands

    def _file(self, command: Command) -> None:
        self.log.append(command)
        if isinstance(command, Generate):
            self.open += [(command, index) for index in command.trajectories]
        elif not isinstance(command, DropTrajectories | CloseTask | Alarm):
            self.open.append((command, None))

    def start(self) -> tuple[Command, ...]:
        """Begin the run."""
        return self.tell(RunStarted(at=0))

    def answers(self, command: Command, index: int | None) -> list[Event]:
        """The events with which a faultless world ends an order."""
        at = self.now
        match command:
            case StartWorker():
                return [WorkerUp(at=at, command=command.id, worker=command.worker)]
            case OpenService():
                return [TaskSubmitted(at=at, task=task.name) for task in self.experiment.tasks]
            case CreateAdapter():
                return [AdapterCreated(at=at, command=command.id, fingerprint=f"{command.task}-v0")]
            case LoadAdapter():
                made = f"{command.task}-v{command.version}"
                return [AdapterLoaded(at=at, command=command.id, fingerprint=made)]
            case UnloadAdapter():
                return [AdapterUnloaded(at=at, command=command.id)]
            case Generate():
                assert index is not None
                return [self.turn(command, index)]
            case AbortTurns():
                self.open = [
                    (c, i)
                    for c, i in self.open
                    if not (c.id == command.generate and i in command.trajectories)
                ]
                return [TurnsAborted(at=at, command=command.id)]
            case StepEnvironment():
                return [self.answer_of_environment(command)]
            case Train():
                return [TrainingFinished(at=at, command=command.id, stats=TrainingStats(num_tokens=1))]
            case Publish():
                made = f"{command.task}-v{command.version}"
                return [AdapterPublished(at=at, command=command.id, fingerprint=made)]
            case SetTimer():
                self.now = max(self.now, command.at)
                return [TimerFired(at=self.now, command=command.id)]
        raise AssertionError(command)

    def turn(self, command: Generate, index: int) -> TurnGenerated:
        """The turn of one trajectory of a Generate, made by the right adapter."""
        return TurnGenerated(
            at=self.now,
            command=command.id,
            trajectory=index,
            task=command.task,
            version=command.version,
            prompt_tokens=1,
            output_tokens=1,
        )

    def answer_of_environment(self, command: StepEnvironment) -> EnvironmentStepped:
        """Go on until the task's last turn."""
        task = next(t for t in self.experiment.tasks if t.name == command.task)
        return EnvironmentStepped(
            at=self.now, command=command.id, done=command.turn + 1 == task.max_turns, reward=1.0
        )

    def answer(self, command: Command, index: int | None = None) -> tuple[Command, ...]:
        """End one open order faultlessly; returns every order that followed."""
        self.open.remove((command, index))
        found: tuple[Command, ...] = ()
        for event in self.answers(command, index):
            found += self.tell(event)
        return found

    def find(self, kind: type[Command]) -> list[tuple[Command, int | None]]:
        """The open orders of one kind."""
        return [(command, index) for command, index in self.open if type(command) is kind]

    def answer_all(self, *kinds: type[Command]) -> None:
        """End every open order of these kinds that is open now, oldest first."""
        for command, index in [o for kind in kinds for o in self.find(kind)]:
            self.answer(command, index)

    def lose(self, worker: str) -> tuple[Command, ...]:
        """Let a worker die with everything in flight on it."""
        self.open = [(c, i) for c, i in self.open if _worker_of(c) != worker]
        return self.tell(WorkerLost(at=self.now, worker=worker, reason="killed"))

    def run(self, choose: Callable[[int], int] = lambda n: 0, *, most: int = 100_000) -> None:
        """Answer orders until every task has ended; timers fire only when nothing else is open."""
        for _ in range(most):
            if self.scheduler.finished:
                return
            ready = [o for o in self.open if not isinstance(o[0], SetTimer)] or self.open
            assert ready, "nothing is in flight, yet tasks have not ended"
            self.answer(*ready[choose(len(ready))])
        raise AssertionError(f"not finished after {most} answers")

    def run_randomly(self, seed: int) -> None:
        """Answer orders in a random order until every task has ended."""
        self.run(random.Random(seed).randrange)

    def open_service(self) -> None:
        """Bring every worker up and submit every task."""
        self.start()
        self.answer_all(StartWorker)
        self.answer_all(OpenService)


def _worker_of(command: Command) -> str | None:
    if isinstance(command, StartWorker):
        return command.worker
    return getattr(command, "replica", None) or getattr(command, "lane", None)
