"""Rates of the core and the simulator beside bare SimPy, all measured in the same run.

Machines differ and are shared, so what counts are the ratios. Every figure is the best of several rounds
taken in turn, which a busy neighbour disturbs least. Owns the clusters that are simulated for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import simpy

from marlaas.commands import Command
from marlaas.events import Event
from marlaas.scheduler import Scheduler
from marlaas.spec import (
    ClusterSpec,
    Experiment,
    Fixed,
    LanesSpec,
    Limits,
    Lognormal,
    LookupEnvironment,
    ReplicasSpec,
    ReverseEnvironment,
    TaskSpec,
    Uniform,
    Workload,
)
from sim.profile import LaneProfile, Profile, ReplicaProfile, assumed
from sim.run import simulate
from traces.schema import make_header
from traces.writer import TraceWriter


class Tape:
    """A recorder that keeps the events of a run in memory."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event, commands: tuple[Command, ...]) -> None:
        """Keep the event."""
        self.events.append(event)


class Blank:
    """A recorder that keeps nothing."""

    def write(self, event: Event, commands: tuple[Command, ...]) -> None:
        """Forget both."""


def cluster(num_tasks: int, *, prompts: int = 64, num_lanes: int = 1) -> Experiment:
    """So many tasks of two steps of `prompts` × 4 samples, a third of them agentic, on as many replicas."""
    maths = Workload(
        prompt_tokens=Fixed(value=105),
        output_tokens=Lognormal(median=250, sigma=0.6, cap=2048),
        environment_s=Fixed(value=0.01),
    )
    search = Workload(
        prompt_tokens=Fixed(value=200),
        output_tokens=Lognormal(median=200, sigma=0.4, cap=400),
        turns=Uniform(low=3, high=5),
        observation_tokens=Uniform(low=200, high=800),
        environment_s=Lognormal(median=0.1, sigma=1.0),
    )
    tasks = tuple(
        TaskSpec(
            name=f"task-{i}",
            environment="web" if i % 3 == 2 else "maths",
            steps=2,
            prompts=prompts,
            samples=4,
            max_prompt_tokens=1024,
            max_new_tokens=2048,
            max_turns=5 if i % 3 == 2 else 1,
            max_observation_tokens=800,
            workload=search if i % 3 == 2 else maths,
        )
        for i in range(num_tasks)
    )
    return Experiment(
        name="bench",
        tasks=tasks,
        limits=Limits(turn_s=36_000, trajectory_s=72_000, training_s=36_000),
        environments={
            "maths": ReverseEnvironment(concurrency=100_000),
            "web": LookupEnvironment(concurrency=100_000),
        },
        cluster=ClusterSpec(
            replicas=ReplicasSpec(count=num_tasks, slots=32, kv_tokens=400_000),
            lanes=LanesSpec(count=num_lanes),
        ),
    )


PROFILE = Profile(
    name="bench",
    description="Round numbers: only the speed of the simulation is measured here.",
    replica=ReplicaProfile(
        iteration_s=assumed(0.02),
        per_sequence_s=assumed(2e-5),
        per_kv_token_s=assumed(3e-8),
        per_prefill_token_s=assumed(1e-5),
        per_adapter_s=assumed(1e-4),
        load_s=assumed(0.2),
    ),
    lane=LaneProfile(step_s=assumed(1.0), per_token_s=assumed(2e-5), publish_s=assumed(0.3)),
)


BARE, TRAJECTORIES = "bare SimPy timeouts", "simulated trajectories, of several turns"


class Recorded(msgspec.Struct, frozen=True):
    """The events of a simulated run, and how many trajectories it had."""

    events: list[Event]
    num_trajectories: int


def record(experiment: Experiment) -> Recorded:
    """Simulate an experiment once and keep its events."""
    tape = Tape()
    simulate(experiment, PROFILE, tape)
    return Recorded(tape.events, num_trajectories(experiment))


def num_trajectories(experiment: Experiment) -> int:
    """How many trajectories its tasks want."""
    return sum(task.steps * task.num_trajectories for task in experiment.tasks)


def rates(experiment: Experiment, run: Recorded, folder: Path) -> dict[str, float]:
    """Everything measured once, per CPU-second."""
    num = len(run.events)
    simulated_s = cpu_s(lambda: simulate(experiment, PROFILE, Blank()))
    return {
        BARE: _bare_simpy(),
        "core events": num / cpu_s(_core(experiment, run.events)),
        "core events, trace written": num / cpu_s(_core_with_trace(experiment, run.events, folder)),
        "simulated events": num / simulated_s,
        TRAJECTORIES: run.num_trajectories / simulated_s,
    }


def cpu_s(work: Callable[[], object]) -> float:
    """CPU-seconds of this process that some work takes."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _bare_simpy(num: int = 200_000) -> float:
    """Timeouts per CPU-second that SimPy alone gets through, 100 processes at a time."""
    env = simpy.Environment()

    def process() -> simpy.events.ProcessGenerator:
        for _ in range(num // 100):
            yield env.timeout(1)

    for _ in range(100):
        env.process(process())
    return num / cpu_s(env.run)


def _core(experiment: Experiment, events: list[Event]) -> Callable[[], None]:
    """The scheduler alone, ready to take the events in."""
    scheduler = Scheduler(experiment)

    def work() -> None:
        for event in events:
            scheduler.handle(event)

    return work


def _core_with_trace(experiment: Experiment, events: list[Event], folder: Path) -> Callable[[], None]:
    """The same with every event and command written to a trace."""
    scheduler = Scheduler(experiment)
    path = folder / "trace.jsonl"
    path.unlink(missing_ok=True)
    header = make_header(experiment, world="sim", profile=msgspec.to_builtins(PROFILE))

    def work() -> None:
        with TraceWriter(path, header) as writer:
            for event in events:
                writer.write(event, scheduler.handle(event))

    return work
