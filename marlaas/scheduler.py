"""The scheduler: facts in, orders out.

`Scheduler.handle` is the only mutator. It takes an event in (the table below says who does), lets each
part look once at what the event made possible, and returns the orders that follow, in a fixed order:
same events in, same commands out. Time is `event.at`; waiting is a `SetTimer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from marlaas import episodes, rollout, slots, tasks, training, turns, workers
from marlaas.commands import Command, CreateAdapter, LoadAdapter, Publish, Train
from marlaas.core import Core
from marlaas.errors import IllegalEvent
from marlaas.events import (
    AdapterCreated,
    AdapterLoaded,
    AdapterPublished,
    AdapterUnloaded,
    CancelRequested,
    CommandFailed,
    EngineMeasured,
    EnvironmentStepped,
    Event,
    PauseRequested,
    ResumeRequested,
    RunStarted,
    StopRequested,
    TaskSubmitted,
    TimerFired,
    TrainingFinished,
    TurnGenerated,
    TurnsAborted,
    WorkerLost,
    WorkerUp,
)
from marlaas.lifecycle import TERMINAL
from marlaas.spec import Experiment
from marlaas.state import State


def _run_started(core: Core, event: RunStarted) -> None:
    workers.start_all(core)


def _command_failed(core: Core, event: CommandFailed) -> None:
    order = core.orders.get(event.command)
    if order is None:
        turns.generate_failed(core, event.command, event.trajectory, event.reason)
        episodes.step_failed(core, event.command, "environment_failed")
    elif isinstance(order, LoadAdapter):
        del core.orders[event.command]
        slots.load_failed(core, order, event.reason)
    elif isinstance(order, CreateAdapter | Train | Publish):
        del core.orders[event.command]
        training.job_failed(core, order, event.reason)
    else:  # a worker that cannot start, unload or abort is of no use as it is
        workers.lose(core, workers.worker_of(core, order), event.reason)


def _timer_fired(core: Core, event: TimerFired) -> None:
    for kind, what in core.due(event.command):
        if kind == "order":
            workers.order_is_late(core, what)
        elif kind == "turn":
            turns.turn_is_late(core, what)
        elif kind == "environment":
            episodes.step_failed(core, what, "environment_timeout")
        else:
            rollout.trajectories_are_late(core, *what)


def _stop_requested(core: Core, event: StopRequested) -> None:
    core.state.is_stopping = True


def _ignored(core: Core, event: EngineMeasured) -> None:
    """A measurement is for readers of the trace."""


_HANDLERS: Mapping[type[Event], Callable[[Core, Any], None]] = {
    RunStarted: _run_started,
    TaskSubmitted: tasks.submitted,
    PauseRequested: tasks.pause_requested,
    ResumeRequested: tasks.resume_requested,
    CancelRequested: tasks.cancel_requested,
    StopRequested: _stop_requested,
    WorkerUp: workers.up,
    WorkerLost: workers.lost,
    AdapterCreated: training.adapter_created,
    AdapterLoaded: slots.adapter_loaded,
    AdapterUnloaded: slots.adapter_unloaded,
    TurnGenerated: turns.turn_generated,
    EnvironmentStepped: episodes.environment_stepped,
    TurnsAborted: turns.turns_aborted,
    TrainingFinished: training.training_finished,
    AdapterPublished: tasks.published,
    CommandFailed: _command_failed,
    TimerFired: _timer_fired,
    EngineMeasured: _ignored,
}


# Checked for the names they carry; kept apart because the other kinds are the hot ones.
_NAMING = frozenset(
    (RunStarted, WorkerUp, WorkerLost, TaskSubmitted, PauseRequested, ResumeRequested, CancelRequested)
)


class Scheduler:
    """One run of one experiment."""

    def __init__(self, experiment: Experiment) -> None:
        self._core = Core(experiment)

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Take in one fact and return the orders that follow from it.

        Raises `IllegalEvent`, changing nothing, for a fact that cannot have happened: time running
        backwards, an answer to a command never given, a name the experiment has not.
        """
        core, kind = self._core, type(event)
        if event.at < core.now:
            raise IllegalEvent(f"{event} is earlier than the event before it, at {core.now}")
        if getattr(event, "command", 0) > core.last_id:
            raise IllegalEvent(f"{event} answers a command that was never given; the last is {core.last_id}")
        if kind in _NAMING:
            self._refuse_unknown_names(event)
        core.now = event.at
        _HANDLERS[kind](core, event)
        self._follow_up()
        commands = tuple(core.outbox)
        core.outbox.clear()
        return commands

    def _refuse_unknown_names(self, event: Event) -> None:
        core = self._core
        if isinstance(event, RunStarted):
            if core.last_id:
                raise IllegalEvent("the run has begun already")
        elif isinstance(event, WorkerUp | WorkerLost):
            if not workers.exists(core, event.worker):
                raise IllegalEvent(f"{event} names a worker that the experiment has not")
        elif isinstance(event, tasks.Request) and event.task not in core.state.tasks:
            raise IllegalEvent(f"{event} names a task that the experiment has not")

    def _follow_up(self) -> None:
        core = self._core
        while core.failing:
            name, reason = core.failing.pop(0)
            tasks.close(core, core.state.tasks[name], "failed", reason)
        if not core.state.is_stopping:
            self._give_work()
        if core.is_timer_due:
            core.set_timer(self._is_moot)

    def _give_work(self) -> None:
        core = self._core
        if core.is_service_due:
            core.is_service_due = False
            workers.open_service(core)
        if core.are_tasks_due:
            core.are_tasks_due = False
            tasks.admit(core)
            tasks.start(core)
        while core.replicas_due:
            turns.serve(core, core.state.replicas[core.replicas_due.popitem()[0]])
        while core.environments_due:
            episodes.step_environment(core, core.state.environments[core.environments_due.popitem()[0]])
        if core.are_lanes_due:
            core.are_lanes_due = False
            for lane in core.state.lanes.values():
                training.give_work(core, lane)

    def _is_moot(self, kind: str, what: Any) -> bool:
        state = self._core.state
        if kind == "order":
            return what not in self._core.orders
        if kind == "turn":
            return what not in state.flights
        if kind == "environment":
            return what not in state.steps
        name, batch, _ = what
        return state.tasks[name].batch is not batch

    @property
    def state(self) -> State:
        """The state, to be read only."""
        return self._core.state

    @property
    def finished(self) -> bool:
        """Whether every task of the experiment has ended or, once asked to stop, every lane is idle."""
        state = self._core.state
        if state.is_stopping and all(lane.job == "idle" for lane in state.lanes.values()):
            return True
        ended = sum(len(state.by_state[end]) for end in TERMINAL)
        return ended == len(state.tasks)

    @property
    def outcomes(self) -> dict[str, str]:
        """Task name → `done`, `failed` or `cancelled`, for the tasks that have ended."""
        return {name: task.state for name, task in self._core.state.tasks.items() if task.is_closed}
