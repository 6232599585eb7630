"""Runs of the real simulator that are queues of the textbooks, and intervals for what they show.

open queue at an environment   arrivals: turns of one batch of uniform lengths, a Poisson number of them
                               servers: the environment's concurrency; service: its latency
open queue at lanes            arrivals: tasks of one step, submitted at Poisson times; service: training
closed queue                   N tasks of many steps over an environment and a lane
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student
from small_runs import Record

from marlaas.commands import StepEnvironment, Train
from marlaas.events import EnvironmentStepped, TrainingFinished, TurnGenerated
from marlaas.spec import (
    ClusterSpec,
    Distribution,
    Experiment,
    Fixed,
    Gamma,
    LanesSpec,
    Limits,
    ReplicasSpec,
    SumsEnvironment,
    TaskSpec,
    Uniform,
    Workload,
)
from sim import simulate
from sim.profile import LaneProfile, Profile, ReplicaProfile, Variation, assumed

Floats = npt.NDArray[np.float64]
LEVEL = 0.99
PATIENT = Limits(min_group=1, turn_s=1e8, trajectory_s=1e8, training_s=1e8, order_s=1e8)
ONE = Fixed(value=1.0)
MS = 0.001


class Visits(NamedTuple):
    """Who came when, was served when and left when, in seconds, in the order of arrival."""

    arrived: Floats
    began: Floats
    ended: Floats

    @property
    def waits(self) -> Floats:
        """Time in the queue."""
        return self.began - self.arrived

    @property
    def stays(self) -> Floats:
        """Time from arrival to departure."""
        return self.ended - self.arrived

    @property
    def services(self) -> Floats:
        """Time in service."""
        return self.ended - self.began


class Interval(NamedTuple):
    """A mean and the half-width of its confidence interval at `LEVEL`."""

    mean: float
    half_width: float

    def holds(self, theory: float) -> bool:
        """Whether the theory lies in the interval."""
        return abs(self.mean - theory) <= self.half_width

    @property
    def relative(self) -> float:
        """The half-width in parts of the mean."""
        return self.half_width / self.mean


def interval(batches: Sequence[float] | Floats) -> Interval:
    """Student's interval for the mean of independent values: batch means or replications."""
    values = np.asarray(batches, dtype=np.float64)
    quantile = student.ppf((1 + LEVEL) / 2, len(values) - 1)
    return Interval(float(values.mean()), float(quantile * values.std(ddof=1) / np.sqrt(len(values))))


def batch_means(values: Floats, num_batches: int = 20, warm_up: float = 0.05) -> Interval:
    """The interval for the mean of a stationary sequence, its beginning left out."""
    kept = values[int(len(values) * warm_up) :]
    return interval([part.mean() for part in np.array_split(kept, num_batches)])


def controlled(values: Floats, controls: Sequence[tuple[Floats, float]], num_batches: int = 50) -> Interval:
    """The interval for a mean, narrowed by what is known: controls of the same visits and their true means.

    Batch means are regressed on the batch means of the controls less their truth; the intercept is the mean.
    """
    edges = np.linspace(0.05 * len(values), len(values), num_batches + 1).astype(int)

    def means(of: Floats) -> Floats:
        return np.array([of[a:b].mean() for a, b in itertools.pairwise(edges)])

    varying = [(of, truth) for of, truth in controls if np.ptp(of) > 1e-6]
    design = np.column_stack([np.ones(num_batches), *(means(of) - truth for of, truth in varying)])
    target = means(values)
    found = np.linalg.lstsq(design, target, rcond=None)[0]
    freedom = num_batches - design.shape[1]
    variance = float(((target - design @ found) ** 2).sum()) / freedom
    error = np.sqrt(variance * np.linalg.inv(design.T @ design)[0, 0])
    return Interval(float(found[0]), float(student.ppf((1 + LEVEL) / 2, freedom) * error))


def exponential(mean: float) -> Gamma:
    """An exponential time."""
    return Gamma(mean=mean)


def _experiment(tasks: tuple[TaskSpec, ...], *, seed: int, concurrency: int, lanes: int = 1) -> Experiment:
    most = sum(task.num_trajectories for task in tasks)
    return Experiment(
        name="queue",
        tasks=tasks,
        seed=seed,
        limits=PATIENT,
        environments={"e": SumsEnvironment(concurrency=concurrency, timeout_s=1e8)},
        cluster=ClusterSpec(
            replicas=ReplicasSpec(slots=len(tasks), max_num_seqs=most, kv_tokens=10**11 * most),
            lanes=LanesSpec(count=lanes),
        ),
    )


def _profile(iteration_s: float, training: Distribution) -> Profile:
    return Profile(
        name="queue",
        replica=ReplicaProfile(iteration_s=assumed(iteration_s)),
        lane=LaneProfile(step_s=assumed(1.0)),
        variation=Variation(training=training),
    )


def _run(of: Experiment, profile: Profile) -> Record:
    record = Record()
    assert set(simulate(of, profile, record).values()) == {"done"}
    return record


# --- open queues ----------------------------------------------------------------------------------------


def at_environment(service: Distribution, *, rate: float, servers: int, num: int, seed: int) -> Visits:
    """An M/G/c queue at an environment, about `num` arrivals at `rate` per second.

    Given how many come, Poisson arrivals are independent and uniform: so are the ends of turns whose lengths
    are, up to the grid of one iteration, a millisecond.
    """
    length_s = num / rate
    num_came = int(np.random.default_rng(seed).poisson(num))
    task = TaskSpec(
        name="t",
        environment="e",
        steps=1,
        prompts=num_came,
        samples=1,
        max_new_tokens=10**10,
        workload=Workload(
            prompt_tokens=ONE, output_tokens=Uniform(low=1.0, high=length_s / MS), environment_s=service
        ),
    )
    record = _run(_experiment((task,), seed=seed, concurrency=servers), _profile(MS, ONE))
    arrived, began, ended = np.zeros(num_came), np.zeros(num_came), np.zeros(num_came)
    who: dict[int, int] = {}
    for event, commands in record.records:
        if isinstance(event, TurnGenerated):
            arrived[event.trajectory] = event.at / 1e9
        elif isinstance(event, EnvironmentStepped):
            ended[who[event.command]] = event.at / 1e9
        for command in commands:
            if isinstance(command, StepEnvironment):
                who[command.id] = command.trajectory
                began[command.trajectory] = event.at / 1e9
    order = np.argsort(arrived, kind="stable")
    return Visits(arrived[order], began[order], ended[order])


def at_lanes(service: Distribution, *, rate: float, servers: int, num: int, seed: int) -> Visits:
    """An M/G/c queue at lanes: `num` tasks of one step and one trajectory whose rollout takes a nanosecond.

    Submissions count as arrivals: a task's adapter is created, in no time, when a lane is free, and only the
    order of the queue depends on that.
    """
    at_s = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, num))
    tasks = tuple(
        TaskSpec(
            name=f"t{i}",
            environment="e",
            steps=1,
            prompts=1,
            samples=1,
            submit_at_s=float(at_s[i]),
            workload=Workload(prompt_tokens=ONE, output_tokens=ONE),
        )
        for i in range(num)
    )
    of = _experiment(tasks, seed=seed, concurrency=num, lanes=servers)
    record = _run(of, _profile(1e-9, service))
    began, ended = np.zeros(num), np.zeros(num)
    who: dict[int, int] = {}
    for event, commands in record.records:
        if isinstance(event, TrainingFinished):
            ended[who[event.command]] = event.at / 1e9
        for command in commands:
            if isinstance(command, Train):
                who[command.id] = int(command.task[1:])
                began[who[command.id]] = event.at / 1e9
    return Visits(at_s, began, ended)


# --- closed queues ---------------------------------------------------------------------------------------


class Closed(NamedTuple):
    """A closed queue when steady: steps per second, and seconds from a batch's end to its update's."""

    rate: Interval
    response_s: Interval


def closed(
    *,
    tasks: int,
    steps: int,
    rollout: Distribution,
    training: Distribution,
    seed: int,
    places: int | None = None,
) -> Closed:
    """N tasks of one trajectory a step that go round between an environment (`places`) and one lane."""
    record = closed_record(
        tasks=tasks, steps=steps, rollout=rollout, training=training, seed=seed, places=places
    )
    complete: dict[str, float] = {}
    tasks_of: dict[int, str] = {}
    ends: list[tuple[float, float]] = []
    last_of: dict[str, float] = {}
    for event, commands in record.records:
        if isinstance(event, EnvironmentStepped):
            complete[tasks_of[event.command]] = event.at / 1e9
        elif isinstance(event, TrainingFinished):
            name = tasks_of[event.command]
            ends.append((event.at / 1e9, event.at / 1e9 - complete[name]))
            last_of[name] = event.at / 1e9
        for command in commands:
            if isinstance(command, StepEnvironment | Train):
                tasks_of[command.id] = command.task
    until = min(last_of.values())  # from then on fewer than N go round
    at, response = np.array([pair for pair in ends if pair[0] <= until]).T
    edges = np.linspace(0.05 * until, until, 21)
    counts, _ = np.histogram(at, edges)
    return Closed(interval(counts / np.diff(edges)), batch_means(response))


def closed_record(
    *,
    tasks: int,
    steps: int,
    rollout: Distribution,
    training: Distribution,
    seed: int,
    places: int | None = None,
) -> Record:
    """The record of such a run."""
    specs = tuple(
        TaskSpec(
            name=f"t{i}",
            environment="e",
            steps=steps,
            prompts=1,
            samples=1,
            workload=Workload(prompt_tokens=ONE, output_tokens=ONE, environment_s=rollout),
        )
        for i in range(tasks)
    )
    of = _experiment(specs, seed=seed, concurrency=places or tasks)
    return _run(of, _profile(1e-9, training))
