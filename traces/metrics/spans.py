"""Joins commands with the events that ended them: the spans of work that everything else is computed from.

    record ──► Joiner ──► on_span(span)            when a piece of work has ended, in that order
                      └─► on_mark(at, fact)        for the few facts and orders that are no work

Work ends with its answer, with the loss or restart of its worker, with the next try of the same trajectory,
or with the run. A turn is a span of its own; a late or duplicate answer ends nothing. Computes no number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from marlaas.commands import (
    AbortTurns,
    CloseTask,
    Command,
    CreateAdapter,
    DropTrajectories,
    Generate,
    LoadAdapter,
    Publish,
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
    CommandFailed,
    EnvironmentStepped,
    Event,
    TaskSubmitted,
    TrainingFinished,
    TurnGenerated,
    TurnsAborted,
    WorkerLost,
    WorkerUp,
)
from traces.schema import Record

Ending = Literal["ok", "failed", "aborted", "lost", "retried", "dropped", "open"]
Mark = TaskSubmitted | WorkerLost | DropTrajectories | CloseTask


class Span:
    """A piece of work from `start` to `end` (ns): `command` asked for it and `answer` ended it, if one did.

    `trajectory` is set for turns and environment steps, -1 otherwise. `ending` says how it ended; `retried`
    means that the scheduler tried again without waiting for an answer, `open` that the trace ends first.
    """

    __slots__ = ("answer", "command", "end", "ending", "start", "trajectory")

    def __init__(
        self, command: Any, trajectory: int, start: int, end: int, ending: Ending, answer: Any
    ) -> None:
        self.command = command
        self.trajectory = trajectory
        self.start = start
        self.end = end
        self.ending: Ending = ending
        self.answer = answer


class _Flight:
    """A Generate with turns that have not ended."""

    __slots__ = ("command", "open", "start")

    def __init__(self, command: Generate, start: int) -> None:
        self.command = command
        self.start = start
        self.open = set(command.trajectories)


class Joiner:
    """Turns records into spans and marks."""

    def __init__(self, on_span: Callable[[Span], None], on_mark: Callable[[int, Mark], None]) -> None:
        self._on_span = on_span
        self._on_mark = on_mark
        self._now = 0
        self._open: dict[int, tuple[Command, int]] = {}
        self._flights: dict[int, _Flight] = {}
        self._latest: dict[str, dict[int, int]] = {}
        self._take: dict[type, Callable[[Any], None]] = {
            **dict.fromkeys(_ANSWERS, self._answered),
            **dict.fromkeys((CreateAdapter, LoadAdapter, UnloadAdapter, Train, Publish), self._begun),
            **dict.fromkeys((TaskSubmitted, CloseTask), self._marked),
            TurnGenerated: self._turn_generated,
            TurnsAborted: self._turns_aborted,
            CommandFailed: self._failed,
            WorkerLost: self._worker_lost,
            StartWorker: self._worker_started,
            Generate: self._generate,
            AbortTurns: self._begun,
            StepEnvironment: self._step_environment,
            DropTrajectories: self._dropped,
        }

    def feed(self, records: Iterable[Record]) -> int:
        """Take in a whole run, whose last time is returned; work still open is ended there as `open`."""
        find = self._take.get
        for event, commands in records:
            self._now = event.at
            take = find(event.__class__)
            if take is not None:
                take(event)
            for command in commands:
                take = find(command.__class__)
                if take is not None:
                    take(command)
        self._end_all(lambda command: True, "open")
        return self._now

    # --- beginnings ---

    def _begun(self, command: Command) -> None:
        self._open[command.id] = command, self._now

    def _generate(self, command: Generate) -> None:
        latest = self._latest.setdefault(command.task, {})
        for trajectory in command.trajectories:
            before = latest.get(trajectory)
            latest[trajectory] = command.id
            if before in self._flights:
                self._end_turn(before, trajectory, "retried", None)
        self._flights[command.id] = _Flight(command, self._now)

    def _step_environment(self, command: StepEnvironment) -> None:
        latest = self._latest.setdefault(command.task, {})
        self._end_one(latest.get(command.trajectory), "retried", None)
        latest[command.trajectory] = command.id
        self._open[command.id] = command, self._now

    # --- endings ---

    def _answered(self, event: Any) -> None:
        self._end_one(event.command, "ok", event)

    def _turn_generated(self, event: TurnGenerated) -> None:
        flight = self._flights.get(event.command)
        if flight is not None and event.trajectory in flight.open:
            self._end_flight(flight, event.trajectory, "ok", event)

    def _turns_aborted(self, event: TurnsAborted) -> None:
        abort, _ = self._open.pop(event.command, (None, 0))
        if isinstance(abort, AbortTurns):
            for trajectory in abort.trajectories:
                self._end_turn(abort.generate, trajectory, "aborted", event)

    def _failed(self, event: CommandFailed) -> None:
        flight = self._flights.get(event.command)
        if flight is None:
            self._end_one(event.command, "failed", event)
        elif event.trajectory is None:
            self._end_turns(event.command, "failed", event)
        else:
            self._end_turn(event.command, event.trajectory, "failed", event)

    def _worker_lost(self, event: WorkerLost) -> None:
        self._end_all(lambda command: _worker_of(command) == event.worker, "lost")
        self._on_mark(self._now, event)

    def _worker_started(self, command: StartWorker) -> None:
        self._end_all(lambda other: _worker_of(other) == command.worker, "lost")
        self._begun(command)

    def _dropped(self, command: DropTrajectories) -> None:
        latest = self._latest.get(command.task, {})
        for trajectory in command.trajectories:
            self._end_one(latest.get(trajectory), "dropped", None)
        self._on_mark(self._now, command)

    def _marked(self, fact: Mark) -> None:
        self._on_mark(self._now, fact)

    def _end_one(self, number: int | None, ending: Ending, answer: Event | None) -> None:
        begun = self._open.pop(number, None)  # type: ignore[arg-type]  # None is never a key
        if begun is not None:
            command, start = begun
            trajectory = command.trajectory if isinstance(command, StepEnvironment) else -1
            self._on_span(Span(command, trajectory, start, self._now, ending, answer))

    def _end_turn(self, number: int | None, trajectory: int, ending: Ending, answer: Event | None) -> None:
        flight = self._flights.get(number)  # type: ignore[arg-type]  # None is never a key
        if flight is not None and trajectory in flight.open:
            self._end_flight(flight, trajectory, ending, answer)

    def _end_flight(self, flight: _Flight, trajectory: int, ending: Ending, answer: Event | None) -> None:
        flight.open.remove(trajectory)
        if not flight.open:
            del self._flights[flight.command.id]
        self._on_span(Span(flight.command, trajectory, flight.start, self._now, ending, answer))

    def _end_turns(self, number: int, ending: Ending, answer: Event | None) -> None:
        for trajectory in sorted(self._flights[number].open):
            self._end_turn(number, trajectory, ending, answer)

    def _end_all(self, is_meant: Callable[[Command], bool], ending: Ending) -> None:
        for number in [n for n, flight in self._flights.items() if is_meant(flight.command)]:
            self._end_turns(number, ending, None)
        for number in [n for n, (command, _) in self._open.items() if is_meant(command)]:
            self._end_one(number, ending, None)


_ANSWERS = (
    AdapterCreated,
    AdapterLoaded,
    AdapterUnloaded,
    AdapterPublished,
    EnvironmentStepped,
    TrainingFinished,
    WorkerUp,
)


def _worker_of(command: Command) -> str | None:
    if isinstance(command, StartWorker):
        return command.worker
    if isinstance(command, CreateAdapter | Train | Publish):
        return command.lane
    if isinstance(command, StepEnvironment):
        return None
    return command.replica  # type: ignore[attr-defined, no-any-return]  # the other orders are a replica's
