"""The simulated world: commands in, events out, on SimPy's clock in whole nanoseconds.

    start(command) ──► replica: engine in closed form ──► one wake-up per change of its batch
                   ──► lane: one job after another     ──► one timeout per job
                   ──► environment, timer, operation   ──► one timeout each

Owns what is in flight and what dies with a worker; how long anything takes comes from the profile, what
trajectories do from the plans. Decides nothing. Callbacks on bare timeouts, no processes: a process would
cost several times as much per event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

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
    CancelRequested,
    EnvironmentStepped,
    Event,
    PauseRequested,
    ResumeRequested,
    TaskSubmitted,
    TimerFired,
    TrainingFinished,
    TrainingStats,
    WorkerLost,
    WorkerUp,
)
from marlaas.runtime import Emit
from marlaas.spec import Cancel, Experiment, Kill, Operation, Pause, Resume
from sim.host import Host
from sim.lane import Lane
from sim.profile import (
    Profile,
    Quantity,
    ReplicaProfile,
    engine_rules,
    iteration_costs,
    training_seconds,
)
from sim.replica import Replica, ReplicaTimes, fingerprint
from sim.timeline import Timeline, to_ns
from sim.workload import Plans


class SimBackend:
    """A `Backend` in simulated time, which is over when the last task is closed.

    With `measure_every_s` replicas report their counters, as real ones do, after so much busy time.
    """

    def __init__(
        self,
        experiment: Experiment,
        profile: Profile,
        timeline: Timeline,
        *,
        measure_every_s: float | None = None,
    ) -> None:
        self._num_open_tasks = len(experiment.tasks)
        self._experiment = experiment
        self._lane_names = frozenset(experiment.lane_names)
        self._profile = profile
        self._timeline = timeline
        self._plans = Plans(experiment, profile)
        self._replicas: dict[str, Replica] = {}
        self._lanes: dict[str, Lane] = {}
        self._host = Host(profile.slowdown_per_busy_worker.value)
        self._costs = iteration_costs(profile.replica)
        self._rules = engine_rules(profile.engine, experiment)
        self._replica_times = _replica_times(profile.replica, measure_every_s)
        self._emit: Emit = _nobody
        self._starts: dict[type[Command], Callable[[Any], None]] = {
            StartWorker: self._start_worker,
            OpenService: self._open_service,
            CreateAdapter: self._create_adapter,
            LoadAdapter: lambda command: self._replicas[command.replica].load(command),
            UnloadAdapter: lambda command: self._replicas[command.replica].unload(command),
            Generate: self._generate,
            AbortTurns: lambda command: self._replicas[command.replica].abort(command),
            StepEnvironment: self._step_environment,
            Train: self._train,
            Publish: self._publish,
            SetTimer: self._set_timer,
            CloseTask: self._close_task,
            DropTrajectories: _nothing,  # what they would still do is answered and ignored
            Alarm: _nothing,
        }

    def start(self, command: Command, emit: Emit) -> None:
        """Begin the work of a command; its answer is emitted when simulated time has come to it."""
        self._emit = emit
        self._starts[type(command)](command)

    # --- workers -----------------------------------------------------------------------------------

    def _start_worker(self, command: StartWorker) -> None:
        name = command.worker
        self._stop(name)
        worker: Replica | Lane
        if name in self._lane_names:
            worker = self._lanes[name] = Lane(name, self._timeline, self._host)
        else:
            worker = self._replicas[name] = self._new_replica(name)

        def come_up() -> None:
            if worker.is_alive:
                self._emit(WorkerUp(at=self._timeline.now_ns, command=command.id, worker=name))

        is_lane = isinstance(worker, Lane)
        start_s = self._profile.lane.start_s if is_lane else self._profile.replica.start_s
        self._timeline.after(_ns(start_s), come_up)

    def _new_replica(self, name: str) -> Replica:
        return Replica(
            name,
            self._costs,
            self._rules,
            self._replica_times,
            self._experiment.cluster.replicas.slots,
            self._plans,
            self._timeline,
            self._host,
            self._emit,
        )

    def _stop(self, name: str) -> bool:
        """End a worker, if it lives; nothing it was doing will be answered."""
        worker = self._replicas.pop(name, None) or self._lanes.pop(name, None)
        if worker is None:
            return False
        worker.stop()
        return True

    def _generate(self, command: Generate) -> None:
        self._replicas[command.replica].generate(command)

    # --- lanes -------------------------------------------------------------------------------------

    def _run_job(self, lane_name: str, duration_ns: int, answer: Callable[..., Event]) -> None:
        """Queue a job on a lane; its answer, given its time, is emitted at its end."""
        self._lanes[lane_name].run(duration_ns, lambda: self._emit(answer(at=self._timeline.now_ns)))

    def _create_adapter(self, command: CreateAdapter) -> None:
        answer = partial(AdapterCreated, command=command.id, fingerprint=fingerprint((command.task, 0)))
        self._run_job(command.lane, _ns(self._profile.lane.create_adapter_s), answer)

    def _train(self, command: Train) -> None:
        lengths = self._plans.of(command.task, command.step).lengths
        trained = [lengths[i] for i in command.trajectories]
        stats = TrainingStats(num_tokens=sum(trained))
        micro_batch_tokens = self._plans.tasks[command.task].training.micro_batch_tokens
        seconds = training_seconds(self._profile.lane, trained, micro_batch_tokens)
        duration_ns = to_ns(seconds * self._plans.factor("training", command.task, command.step))
        self._run_job(command.lane, duration_ns, partial(TrainingFinished, command=command.id, stats=stats))

    def _publish(self, command: Publish) -> None:
        self._plans.forget(command.task, command.version - 1)
        factor = self._plans.factor("publish", command.task, command.version - 1)
        version = (command.task, command.version)
        answer = partial(AdapterPublished, command=command.id, fingerprint=fingerprint(version))
        self._run_job(command.lane, to_ns(self._profile.lane.publish_s.value * factor), answer)

    # --- environments, timers, tasks ----------------------------------------------------------------

    def _step_environment(self, command: StepEnvironment) -> None:
        plan = self._plans.of(command.task, command.step)
        turn, i = command.turn, command.trajectory
        is_done = turn + 1 >= plan.turns[i]
        after_ns = plan.environment_ns[turn][i]
        event = EnvironmentStepped(
            at=self._timeline.now_ns + after_ns,
            command=command.id,
            done=is_done,
            observation_tokens=0 if is_done else plan.observations[turn][i],
        )
        self._timeline.put(after_ns, self._emit, event)

    def _set_timer(self, command: SetTimer) -> None:
        self._tell_at(TimerFired(at=max(command.at, self._timeline.now_ns), command=command.id))

    def _tell_at(self, event: Event) -> None:
        """Emit what is certain to happen when its time has come."""
        self._timeline.put(event.at - self._timeline.now_ns, self._emit, event)

    def _close_task(self, command: CloseTask) -> None:
        self._num_open_tasks -= 1
        self._timeline.is_over = not self._num_open_tasks
        self._plans.forget(command.task)

    # --- what happens to the run ----------------------------------------------------------------------

    def _open_service(self, _: OpenService) -> None:
        """Submit every task and carry out every operation, counted from now."""
        for task in self._experiment.tasks:
            self._happen(task.submit_at_s, partial(TaskSubmitted, task=task.name))
        for operation in self._experiment.operations:
            if isinstance(operation, Kill):
                self._timeline.after(to_ns(operation.at_s), partial(self._kill, operation.worker))
            else:
                self._happen(operation.at_s, partial(_REQUESTS[type(operation)], task=operation.task))

    def _happen(self, after_s: float, event: Callable[..., Event]) -> None:
        self._tell_at(event(at=self._timeline.now_ns + to_ns(after_s)))

    def _kill(self, name: str) -> None:
        if self._stop(name):
            self._emit(WorkerLost(at=self._timeline.now_ns, worker=name, reason="killed"))


_REQUESTS: Mapping[type[Operation], type[PauseRequested | ResumeRequested | CancelRequested]] = {
    Pause: PauseRequested,
    Resume: ResumeRequested,
    Cancel: CancelRequested,
}


def _nobody(event: Event) -> None:
    raise AssertionError(f"{event} before any command")


def _nothing(_: Command) -> None:
    """Begin nothing: the command has no answer."""


def _ns(quantity: Quantity) -> int:
    return to_ns(quantity.value)


def _replica_times(costs: ReplicaProfile, measure_every_s: float | None) -> ReplicaTimes:
    return ReplicaTimes(
        load_ns=to_ns(costs.load_s.value + costs.load_per_byte_s.value * costs.adapter_bytes.value),
        unload_ns=_ns(costs.unload_s),
        overhead_ns=_ns(costs.turn_overhead_s),
        measure_every_ns=None if measure_every_s is None else to_ns(measure_every_s),
    )
