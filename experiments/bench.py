"""Speed of the core and the simulator beside bare SimPy, measured in one run: `make bench`.

Machines differ and are shared, so what counts are the ratios. Every figure is the best of several rounds
taken in turn, which a busy neighbour disturbs least.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import simpy
from rich.console import Console
from rich.table import Table

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

ROUNDS = 5


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


def cluster(num_tasks: int, *, steps: int = 2) -> Experiment:
    """`num_tasks` tasks of 64 prompts × 4 samples, a third of them agentic, on as many replicas."""
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
            steps=steps,
            prompts=64,
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
            replicas=ReplicasSpec(count=num_tasks, slots=32, kv_tokens=400_000), lanes=LanesSpec()
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


def _bare_simpy(num: int = 200_000) -> float:
    """Timeouts per CPU-second that SimPy alone gets through, 100 processes at a time."""
    env = simpy.Environment()

    def process() -> simpy.events.ProcessGenerator:
        for _ in range(num // 100):
            yield env.timeout(1)

    for _ in range(100):
        env.process(process())
    return num / _cpu_s(env.run)


def _cpu_s(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _core(experiment: Experiment, events: list[Event]) -> float:
    """Events per CPU-second that the scheduler alone gets through."""
    scheduler = Scheduler(experiment)

    def work() -> None:
        for event in events:
            scheduler.handle(event)

    return len(events) / _cpu_s(work)


def _core_with_trace(experiment: Experiment, events: list[Event], folder: Path) -> float:
    """The same with every event and command written to a trace."""
    scheduler = Scheduler(experiment)
    path = folder / "trace.jsonl"
    path.unlink(missing_ok=True)

    def work() -> None:
        with TraceWriter(
            path, make_header(experiment, world="sim", profile=msgspec.to_builtins(PROFILE))
        ) as writer:
            for event in events:
                writer.write(event, scheduler.handle(event))

    return len(events) / _cpu_s(work)


def _simulation(experiment: Experiment, num_events: int) -> float:
    """Events per CPU-second of a whole simulation without a trace."""
    return num_events / _cpu_s(lambda: simulate(experiment, PROFILE, Blank()))


def main() -> None:
    """Measure in turn, several rounds, and print the best of each with its ratio to bare SimPy."""
    experiment = cluster(8)
    tape = Tape()
    simulate(experiment, PROFILE, tape)
    best = {"bare SimPy timeouts": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(ROUNDS):
            found = {
                "bare SimPy timeouts": _bare_simpy(),
                "core events": _core(experiment, tape.events),
                "core events, trace written": _core_with_trace(experiment, tape.events, Path(folder)),
                "simulated events": _simulation(experiment, len(tape.events)),
            }
            best = {name: max(rate, best.get(name, 0.0)) for name, rate in found.items()}
    table = Table(title=f"{len(tape.events)} events of a simulated cluster, best of {ROUNDS} rounds")
    for column in ("what", "per CPU-second", "ratio to bare SimPy"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for name, rate in best.items():
        table.add_row(name, f"{rate:,.0f}", f"{rate / best['bare SimPy timeouts']:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
