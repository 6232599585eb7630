"""What the scheduler remembers. Plain data: no decisions here; only the scheduler writes to it.

Policies are given the `State` to read. What is made for every turn is written out as a plain class: compiled
code makes those several times as fast as dataclasses.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from marlaas.lifecycle import (
    IN_FLIGHT,
    LANE,
    SLOT,
    TASK,
    TERMINAL,
    TRAJECTORY,
    WORKER,
    LaneState,
    SlotState,
    TaskState,
    TrajectoryState,
    WorkerState,
    check_move,
)
from marlaas.loads import Loads
from marlaas.spec import Experiment, Limits, TaskSpec
from marlaas.waiting import Waiting

Adapter = tuple[str, int]

NS = 1_000_000_000
_MOVES = {state: frozenset(after) for state, after in TRAJECTORY.items()}  # asked four times a turn


class Trajectory:
    """One sampled episode. `command` is the Generate or StepEnvironment it waits for.

    `doom` is set when it must be dropped, with that reason, as soon as its replica lets go of it.
    """

    __slots__ = ("command", "doom", "index", "is_started", "replica", "retries_left", "state", "turn")

    def __init__(
        self, *, index: int, retries_left: int, replica: str, state: TrajectoryState = "waiting"
    ) -> None:
        self.index = index
        self.retries_left = retries_left
        self.replica = replica
        self.state: TrajectoryState = state
        self.turn = 0
        self.command = 0
        self.is_started = False
        self.doom: str | None = None

    def move(self, state: TrajectoryState) -> None:
        """Go to `state` if the table allows it."""
        if state not in _MOVES[self.state]:
            check_move(TRAJECTORY, f"trajectory {self.index}", self.state, state)
        self.state = state


@dataclass(kw_only=True, eq=False)
class Batch:
    """All trajectories of one step of one task, every one made by `version`."""

    step: int
    version: int
    trajectories: list[Trajectory]
    num_live: int
    load_failures: int = 0


@dataclass(kw_only=True, eq=False)
class Task:
    """One fine-tuning job. `version` is the last committed one, -1 before version 0 exists.

    `holders` counts its slots by replica. The ledger: `num_issued` = `num_trained` + sum of `dropped` +
    trajectories of the present batch that are not dropped.
    """

    name: str
    spec: TaskSpec
    limits: Limits
    index: int
    turn_ns: int
    trajectory_ns: int
    state: TaskState = "expected"
    version: int = -1
    fingerprint: str = ""
    batch: Batch | None = None
    is_pause_requested: bool = False
    training_retries_left: int = 0
    num_issued: int = 0
    num_trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    holders: dict[str, int] = field(default_factory=dict)
    reason: str = ""

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""
        return self.state in TERMINAL


@dataclass(kw_only=True, eq=False)
class Slot:
    """Room on a replica held by one adapter version; never freed while `pins` turns run on it.

    `used` orders slots by last use; `is_retired` says that no further turn will need it.
    """

    task: str
    version: int
    state: SlotState = "loading"
    pins: int = 0
    used: int = 0
    is_retired: bool = False

    def move(self, state: SlotState) -> None:
        """Go to `state` if the table allows it."""
        check_move(SLOT, f"slot of {self.task}-v{self.version}", self.state, state)
        self.state = state


class Flight:
    """A Generate under way: the trajectories that have not answered yet each pin its slot once."""

    __slots__ = ("batch", "pending", "replica", "slot", "task")

    def __init__(self, *, replica: str, task: str, batch: Batch, slot: Slot, pending: set[int]) -> None:
        self.replica = replica
        self.task = task
        self.batch = batch
        self.slot = slot
        self.pending = pending


@dataclass(kw_only=True, eq=False)
class Replica:
    """A rollout engine. `waiting` holds trajectories that need a turn.

    `live` counts unfinished trajectories placed here, by task.
    """

    name: str
    index: int
    capacity: int
    restarts_left: int
    state: WorkerState = "down"
    slots: dict[Adapter, Slot] = field(default_factory=dict)
    waiting: Waiting[Trajectory] = field(default_factory=Waiting)
    live: dict[str, int] = field(default_factory=dict)

    def move(self, state: WorkerState) -> None:
        """Go to `state` if the table allows it."""
        check_move(WORKER, self.name, self.state, state)
        self.state = state


@dataclass(kw_only=True, eq=False)
class Lane:
    """A training engine: does one job of one task at a time; `command` is the order it works on."""

    name: str
    restarts_left: int
    state: WorkerState = "down"
    job: LaneState = "idle"
    task: str = ""
    command: int = 0

    def move(self, state: WorkerState) -> None:
        """Go to `state` if the table allows it."""
        check_move(WORKER, self.name, self.state, state)
        self.state = state

    def turn_to(self, job: LaneState, task: str = "", command: int = 0) -> None:
        """Take up `job` for a task if the table allows it."""
        check_move(LANE, self.name, self.job, job)
        self.job, self.task, self.command = job, task, command


class Step:
    """A StepEnvironment under way."""

    __slots__ = ("batch", "task", "trajectory")

    def __init__(self, *, task: str, batch: Batch, trajectory: Trajectory) -> None:
        self.task = task
        self.batch = batch
        self.trajectory = trajectory


@dataclass(kw_only=True, eq=False)
class Surroundings:
    """One environment: at most `concurrency` steps at once, the others wait in `queue`."""

    name: str
    concurrency: int
    timeout_ns: int
    queue: deque[Step]
    num_stepping: int = 0


@dataclass(kw_only=True, eq=False)
class State:
    """The whole memory of a run.

    `buffer` is the FIFO of tasks whose batch is complete; `unsettled` are workers whose first start has
    neither succeeded nor failed for good; `loads` counts the unfinished trajectories of replicas; after
    `is_stopping` nothing begins.
    """

    tasks: dict[str, Task]
    replicas: dict[str, Replica]
    lanes: dict[str, Lane]
    environments: dict[str, Surroundings]
    by_state: dict[TaskState, dict[str, None]]
    unsettled: set[str]
    loads: Loads
    buffer: list[str] = field(default_factory=list)
    creations: list[str] = field(default_factory=list)
    flights: dict[int, Flight] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)
    is_open: bool = False
    is_stopping: bool = False

    def in_state(self, *states: TaskState) -> list[str]:
        """Names of the tasks in any of these states, in the order in which they came to be there."""
        return [name for state in states for name in self.by_state[state]]

    def num_in_flight(self) -> int:
        """How many tasks have been admitted and are neither paused nor ended."""
        return sum(len(self.by_state[state]) for state in IN_FLIGHT)

    def move_task(self, task: Task, state: TaskState) -> None:
        """Take a task to `state` if the table allows it."""
        check_move(TASK, f"task {task.name}", task.state, state)
        del self.by_state[task.state][task.name]
        self.by_state[state][task.name] = None
        task.state = state


def _expected(spec: TaskSpec, limits: Limits, index: int) -> Task:
    turn_ns, trajectory_ns = round(limits.turn_s * NS), round(limits.trajectory_s * NS)
    return Task(
        name=spec.name,
        spec=spec,
        limits=limits,
        index=index,
        turn_ns=turn_ns,
        trajectory_ns=trajectory_ns,
    )


def initial_state(experiment: Experiment, capacity: int) -> State:
    """The state before the run: every task expected, every worker down; `capacity` slots per replica."""
    limits = experiment.limits
    tasks = {
        spec.name: _expected(spec, experiment.limits_of(spec), index)
        for index, spec in enumerate(experiment.tasks)
    }
    by_state: dict[TaskState, dict[str, None]] = {state: {} for state in TASK}  # type: ignore[misc]
    by_state["expected"] = dict.fromkeys(tasks)
    return State(
        tasks=tasks,
        replicas={
            name: Replica(name=name, index=i, capacity=capacity, restarts_left=limits.worker_restarts)
            for i, name in enumerate(experiment.replica_names)
        },
        lanes={name: Lane(name=name, restarts_left=limits.worker_restarts) for name in experiment.lane_names},
        environments={
            name: Surroundings(
                name=name,
                concurrency=environment.concurrency,
                timeout_ns=round(environment.timeout_s * NS),
                queue=deque(),
            )
            for name, environment in experiment.environments.items()
        },
        by_state=by_state,
        unsettled={*experiment.replica_names, *experiment.lane_names},
        loads=Loads(experiment.replica_names),
    )
