"""The books that the laws are read from: one pass over a run, every record by its kind.

    record ──► open turns, steps and orders ──► paths of trajectories, slots and lanes, stations

A late or duplicate answer finds nothing open and changes nothing. Owns what is open and until when; the laws
themselves are those of `paths`, `workers`, `systems`, `orders` and `stations`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from marlaas import commands as c
from marlaas import events as e
from marlaas.errors import LawBroken
from marlaas.spec import Experiment
from marlaas.state import State
from marlaas.systems import compose
from traces.laws.orders import NS, OpenOrders
from traces.laws.paths import TaskPaths
from traces.laws.stations import Little, Station, jobs_on, queued_for, steps_in, turns_on
from traces.laws.systems import SystemOrder
from traces.laws.workers import LaneHold, ReplicaHold


class _Flight(msgspec.Struct):
    """A Generate with turns that have not ended."""

    command: c.Generate
    deadline: int
    open: set[int]
    aborting: set[int]


class Books:
    """Everything that is under way in a run, and where."""

    def __init__(self, experiment: Experiment, *, is_simulated: bool) -> None:
        self.now = 0
        self.tasks = {t.name: TaskPaths(t, is_simulated=is_simulated) for t in experiment.tasks}
        self._order_of_tasks = SystemOrder(experiment, self.tasks)
        self._experiment = experiment
        self._limits = {t.name: experiment.limits_of(t) for t in experiment.tasks}
        replicas, num_slots = experiment.cluster.replicas, compose(experiment).capacity
        self._replicas = {
            name: ReplicaHold(name, num_slots, replicas.kv_tokens) for name in experiment.replica_names
        }
        self._lanes = {name: LaneHold(name) for name in experiment.lane_names}
        self._flights: dict[int, _Flight] = {}
        self._steps: dict[int, tuple[c.StepEnvironment, int]] = {}  # each with its deadline
        self._step_deadlines: dict[str, deque[tuple[int, int]]] = {
            n: deque() for n in experiment.environments
        }
        self._orders = OpenOrders(experiment, is_simulated=is_simulated)
        self._buffer = Station("buffer", lambda state: len(state.buffer))
        self._at: dict[str, Station] = {
            **{name: Station(name, turns_on(name)) for name in self._replicas},
            **{name: Station(name, jobs_on(name)) for name in self._lanes},
            **{name: Station(f"environment {name}", steps_in(name)) for name in experiment.environments},
        }
        self._queues = {
            name: Station(f"queue of environment {name}", queued_for(name))
            for name in experiment.environments
        }
        self._touched: dict[Station, None] = {}
        self._tasks_touched: dict[str, None] = {}

    def table(self) -> Mapping[type, Callable[[Any], None]]:
        """Who takes which kind of event or command; the others say nothing to the laws."""
        return {
            e.TurnGenerated: self._turn_generated,
            e.TurnsAborted: self._turns_aborted,
            e.EnvironmentStepped: self._environment_stepped,
            e.CommandFailed: self._failed,
            e.TimerFired: self._timer_fired,
            e.WorkerUp: self._order_answered,
            e.AdapterLoaded: self._adapter_loaded,
            e.AdapterUnloaded: self._adapter_unloaded,
            e.AdapterCreated: self._job_done,
            e.TrainingFinished: self._job_done,
            e.AdapterPublished: self._job_done,
            c.StartWorker: self._order,
            c.Generate: self._generate,
            c.AbortTurns: self._abort,
            c.StepEnvironment: self._step,
            c.DropTrajectories: self._drop,
            c.LoadAdapter: self._load,
            c.UnloadAdapter: self._unload,
            c.CreateAdapter: self._job,
            c.Train: self._job,
            c.Publish: self._job,
            c.SetTimer: self._timer_set,
            c.CloseTask: self._close_task,
            c.Alarm: self._alarm,
        }

    # --- stays ---

    def _enter(self, station: Station, who: object) -> None:
        station.enter(who, self.now)
        self._touched[station] = None

    def _leave(self, station: Station, who: object) -> None:
        station.leave(who, self.now)
        self._touched[station] = None

    def settle(self, state: State) -> None:
        """The record is over: what is complete now is in the buffer; read the scheduler's counts."""
        buffer = self._buffer
        for name in self._tasks_touched:
            is_buffered = self.tasks[name].is_buffered
            if is_buffered != (name in buffer):
                (self._enter if is_buffered else self._leave)(buffer, name)
        self._tasks_touched.clear()
        for station in self._touched:
            station.sample(self.now, state)
        self._touched.clear()

    # --- turns ---

    def _generate(self, command: c.Generate) -> None:
        task, station = self.tasks[command.task], self._at[command.replica]
        if not task.paths:
            self._order_of_tasks.batch_begins(command.task)
        task.generate(command)
        self._replicas[command.replica].generate(command)
        deadline = self.now + round(self._limits[command.task].turn_s * NS)
        self._flights[command.id] = _Flight(command, deadline, set(command.trajectories), set())
        for i in command.trajectories:
            self._enter(station, (command.id, i))

    def _end_turn(self, flight: _Flight, i: int, answer: e.TurnGenerated | None) -> None:
        command = flight.command
        flight.open.remove(i)
        if not flight.open:
            del self._flights[command.id]
        self._leave(self._at[command.replica], (command.id, i))
        self._replicas[command.replica].turn_ended(command)
        task = self.tasks[command.task]
        path = task.path(command, i)
        was_in_turn = path is not None and path.where == "turn" and path.number == command.id
        task.turn_ended(command, i, None if i in flight.aborting else answer)
        if path is not None and was_in_turn and path.where == "acting":
            self._replicas[command.replica].held_at_once(self.now, command, path, i // task.spec.samples)
            self._enter(self._queues[task.spec.environment], (command.task, command.step, i))

    def _turn_generated(self, event: e.TurnGenerated) -> None:
        flight = self._flights.get(event.command)
        if flight is not None and event.trajectory in flight.open:
            if event.trajectory not in flight.aborting:
                self._orders.require_in_time(flight.command, flight.deadline, self.now)
            self._end_turn(flight, event.trajectory, event)

    def _abort(self, command: c.AbortTurns) -> None:
        self._order(command)
        flight = self._flights.get(command.generate)
        if flight is None or not flight.open.issuperset(command.trajectories):
            raise LawBroken(f"command {command.id} aborts turns that are not under way")
        flight.aborting.update(command.trajectories)

    def _turns_aborted(self, event: e.TurnsAborted) -> None:
        abort = self._answered(event.command)
        flight = None if abort is None else self._flights.get(abort.generate)
        if flight is not None:
            for i in abort.trajectories:
                if i in flight.open:
                    self._end_turn(flight, i, None)

    # --- environments ---

    def _step(self, command: c.StepEnvironment) -> None:
        task, name = self.tasks[command.task], command.environment
        task.step_environment(command)
        environment, station = self._experiment.environments[name], self._at[name]
        self._leave(self._queues[name], (command.task, command.step, command.trajectory))
        self._enter(station, command.id)
        if len(station) > environment.concurrency:
            raise LawBroken(f"environment {name}: {len(station)} steps in {environment.concurrency} places")
        deadline = self.now + round(environment.timeout_s * NS)
        self._steps[command.id] = command, deadline
        deadlines = self._step_deadlines[name]
        while deadlines and deadlines[0][1] not in self._steps:
            deadlines.popleft()
        deadlines.append((deadline, command.id))

    def _end_step(self, number: int, answer: e.EnvironmentStepped | None) -> None:
        command, deadline = self._steps.pop(number, (None, 0))
        if command is None:
            return
        if answer is not None:
            self._orders.require_in_time(command, deadline, self.now)
        self._leave(self._at[command.environment], number)
        task = self.tasks[command.task]
        task.step_ended(command, answer)
        self._tasks_touched[command.task] = None
        path = task.path(command, command.trajectory)
        if path is not None and path.where == "acting":
            who = command.task, command.step, command.trajectory
            self._enter(self._queues[command.environment], who)

    def _environment_stepped(self, event: e.EnvironmentStepped) -> None:
        self._end_step(event.command, event)

    def _drop(self, command: c.DropTrajectories) -> None:
        task = self.tasks[command.task]
        self._tasks_touched[command.task] = None
        for i, before in zip(command.trajectories, task.drop(command), strict=True):
            if before.where == "stepping":
                self._end_step(before.number, None)
            elif before.where == "acting":
                queue = self._queues[task.spec.environment]
                self._leave(queue, (command.task, command.step, i))
                queue.is_comparable = False  # the scheduler strikes it off when its turn comes

    # --- lanes ---

    def _job(self, command: c.CreateAdapter | c.Train | c.Publish) -> None:
        task = self.tasks[command.task]
        self._order(command)
        self._lanes[command.lane].begin(command)
        self._enter(self._at[command.lane], command.id)
        self._tasks_touched[command.task] = None
        if isinstance(command, c.Train):
            if task.is_buffered and command.task not in self._buffer:
                self._enter(self._buffer, command.task)  # complete with this very record
            self._order_of_tasks.train(command, map(str, self._buffer))
            if command.task in self._buffer:
                self._leave(self._buffer, command.task)
            task.train(command)
        elif isinstance(command, c.Publish):
            task.law(task.computed_on == command.lane, f"{command.lane} publishes what it did not compute")

    def _end_job(self, lane: str) -> Any:
        job = self._lanes[lane].end()
        if job is not None:
            self._leave(self._at[lane], job.id)
            self._tasks_touched[job.task] = None
        return job

    def _job_done(self, event: e.AdapterCreated | e.TrainingFinished | e.AdapterPublished) -> None:
        order = self._answered(event.command)
        if order is None:
            return
        job = self._end_job(order.lane)
        task = self.tasks[job.task]
        if task.is_closed:
            return
        if isinstance(event, e.TrainingFinished):
            task.trained(job, event.stats, job.lane)
        else:
            task.commit(job.version if isinstance(job, c.Publish) else 0)

    # --- slots ---

    def _load(self, command: c.LoadAdapter) -> None:
        self._order(command)
        self._replicas[command.replica].load((command.task, command.version))

    def _unload(self, command: c.UnloadAdapter) -> None:
        self._order(command)
        self._replicas[command.replica].unload((command.task, command.version))

    def _adapter_loaded(self, event: e.AdapterLoaded) -> None:
        order = self._answered(event.command)
        if order is not None:
            self._replicas[order.replica].loaded((order.task, order.version))

    def _adapter_unloaded(self, event: e.AdapterUnloaded) -> None:
        order = self._answered(event.command)
        if order is not None:
            self._replicas[order.replica].free((order.task, order.version))

    # --- failures and losses ---

    def _failed(self, event: e.CommandFailed) -> None:
        flight = self._flights.get(event.command)
        if flight is not None:
            failed = sorted(flight.open) if event.trajectory is None else [event.trajectory]
            for i in failed:
                if i in flight.open:
                    self._end_turn(flight, i, None)
            return
        self._end_step(event.command, None)
        order = self._answered(event.command)
        if isinstance(order, c.LoadAdapter):
            self._replicas[order.replica].free((order.task, order.version))
        elif isinstance(order, c.CreateAdapter | c.Train | c.Publish):
            self._job_lost(self._end_job(order.lane))

    def _alarm(self, command: c.Alarm) -> None:
        """The scheduler says in so many words when it takes a worker for lost."""
        name, is_loss, _ = command.message.partition(" is lost: ")
        if is_loss and name in self._replicas:
            self._lose_replica(name)
        elif is_loss and name in self._lanes:
            self._job_lost(self._end_job(name))
        if is_loss:
            self._orders.lose(name)

    def _job_lost(self, job: Any) -> None:
        if job is not None:
            self.tasks[job.task].job_lost()
            self._order_of_tasks.has_retried = True

    def _lose_replica(self, name: str) -> None:
        for flight in [f for f in self._flights.values() if f.command.replica == name]:
            for i in sorted(flight.open):
                self._end_turn(flight, i, None)
        self._replicas[name].lose()

    # --- orders, timers, ends ---

    def _order(self, command: Any) -> None:
        self._orders.begin(command, self.now)

    def _order_answered(self, event: e.WorkerUp) -> None:
        self._answered(event.command)

    def _answered(self, number: int) -> Any:
        return self._orders.answered(number, self.now)

    def _timer_set(self, command: c.SetTimer) -> None:
        self._orders.set_timer(command, self.now)

    def _timer_fired(self, event: e.TimerFired) -> None:
        if self._orders.fire(event.command, self.now):
            for deadlines in self._step_deadlines.values():
                while deadlines and deadlines[0][0] <= self.now:
                    self._end_step(deadlines.popleft()[1], None)

    def _close_task(self, command: c.CloseTask) -> None:
        self.tasks[command.task].close(command)
        self._tasks_touched[command.task] = None

    def close(self, state: State) -> dict[str, Little]:
        """The end of the trace: what is open is live and not late; the books balance at every place."""
        for task in self.tasks.values():
            task.balance()
        self._require_nothing_is_late()
        stations = [*self._at.values(), *self._queues.values(), self._buffer]
        return {station.name: station.close(self.now, state) for station in stations}

    def _require_nothing_is_late(self) -> None:
        require, now = self._orders.require_in_time, self.now
        self._orders.close(now)
        for flight in self._flights.values():
            if flight.open - flight.aborting:
                require(flight.command, flight.deadline, now)
        for command, deadline in self._steps.values():
            require(command, deadline, now)
