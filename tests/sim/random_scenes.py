"""Random experiments, small and strange, in which every duration is a whole number of milliseconds."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import msgspec
from hypothesis import strategies as st
from msgspec.structs import replace
from small_runs import Record

from marlaas.spec import (
    Cancel,
    ClusterSpec,
    Distribution,
    Empirical,
    Experiment,
    Fixed,
    Kill,
    LanesSpec,
    Limits,
    Mixture,
    Operation,
    Pause,
    ReplicasSpec,
    Resume,
    SumsEnvironment,
    TaskSpec,
    Workload,
)
from marlaas.systems import SYSTEMS
from sim import simulate
from sim.profile import EngineProfile, LaneProfile, Profile, Quantity, ReplicaProfile, Variation, assumed

S = TypeVar("S", bound=msgspec.Struct)

MS = 0.001
ENDLESS = Limits(min_group=1, turn_s=1e6, trajectory_s=1e6, training_s=1e6, order_s=1e6)


class Scene(NamedTuple):
    """An experiment and what things cost in it."""

    experiment: Experiment
    profile: Profile

    def run(self, system: str | None = None) -> Record:
        """Simulate it, under its own system or another."""
        of = self.experiment if system is None else replace(self.experiment, system=system)
        record = Record()
        simulate(of, self.profile, record)
        return record


def ms(low: int, high: int) -> st.SearchStrategy[float]:
    """Whole milliseconds, in seconds."""
    return st.integers(low, high).map(lambda number: number * MS)


def costs(low: int, high: int) -> st.SearchStrategy[Quantity]:
    """A cost in whole milliseconds."""
    return ms(low, high).map(assumed)


def times(low: int, high: int) -> st.SearchStrategy[Distribution]:
    """Times of whole milliseconds: fixed, of several values, and with a rare long one."""
    fixed = st.builds(lambda value: Fixed(value=value), ms(low, high))
    several = st.lists(ms(low, high), min_size=2, max_size=5).map(
        lambda v: Empirical(values=tuple(sorted(v)))
    )
    tail = st.builds(
        lambda usual, rare: Mixture(weights=(9.0, 1.0), parts=(usual, rare)),
        fixed,
        ms(high, 9 * high).map(_fixed),
    )
    return st.one_of(fixed, several, tail)


def _fixed(value: float) -> Fixed:
    return Fixed(value=value)


def counts(low: int, high: int) -> st.SearchStrategy[Distribution]:
    """Whole numbers of something."""
    values = st.lists(st.integers(low, high).map(float), min_size=1, max_size=4)
    return values.map(lambda v: Empirical(values=tuple(sorted(v))))


factors = st.sampled_from([Fixed(value=1.0), Empirical(values=(0.5, 1.0, 1.0, 4.0))])

workloads = st.builds(
    Workload,
    prompt_tokens=counts(1, 12),
    output_tokens=counts(1, 12),
    turns=counts(1, 3),
    observation_tokens=counts(0, 6),
    environment_s=times(0, 300),
)

engines = st.builds(
    EngineProfile,
    kv_rule=st.sampled_from(["reserve", "preempt"]),
    prefill=st.sampled_from(["own-pass", "mixed"]),
    max_prefill_tokens=st.none() | st.integers(4, 40),
    prefix_cache=st.sampled_from(["none", "prompts", "turns"]),
    block_tokens=st.integers(1, 4),
)

replica_costs = st.builds(
    ReplicaProfile,
    iteration_s=costs(1, 20),
    per_sequence_s=costs(0, 3),
    per_kv_token_s=costs(0, 1),
    adapters_s=costs(0, 2),
    per_adapter_s=costs(0, 3),
    prefill_s=costs(0, 10),
    per_prefill_token_s=costs(0, 2),
    turn_overhead_s=costs(0, 2),
    load_s=costs(0, 50),
    unload_s=costs(0, 5),
    start_s=costs(0, 500),
)

lane_costs = st.builds(
    LaneProfile,
    step_s=costs(1, 400),
    per_token_s=costs(0, 2),
    publish_s=costs(0, 60),
    create_adapter_s=costs(0, 60),
    start_s=costs(0, 500),
)


@st.composite
def tasks(draw: st.DrawFn, most: int = 4) -> tuple[TaskSpec, ...]:
    """Some tasks, each of few trajectories."""
    return tuple(
        TaskSpec(
            name=f"t{i}",
            environment=draw(st.sampled_from(["a", "b"])),
            steps=draw(st.integers(1, 3)),
            prompts=draw(st.integers(1, 3)),
            samples=draw(st.integers(1, 3)),
            max_prompt_tokens=12,
            max_new_tokens=12,
            max_turns=draw(st.integers(1, 3)),
            max_observation_tokens=6,
            submit_at_s=draw(st.sampled_from([0.0, 0.0, 0.7])),
            workload=draw(workloads),
        )
        for i in range(draw(st.integers(1, most)))
    )


@st.composite
def scenes(draw: st.DrawFn, *, systems: tuple[str, ...] = tuple(SYSTEMS), has_faults: bool = False) -> Scene:
    """Any experiment; with faults also losses, cancellations, pauses and deadlines too short to keep."""
    specs = draw(tasks())
    num_replicas, num_lanes = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    faults: dict[str, Any] = {"limits": ENDLESS}
    timeouts = st.just(1e6)
    if has_faults:
        faults = {
            "limits": draw(_limits()),
            "operations": draw(_operations(len(specs), num_replicas, num_lanes)),
        }
        timeouts = st.just(1e6) | ms(100, 900)
    of = Experiment(
        name="scene",
        tasks=specs,
        seed=draw(st.integers(0, 99)),
        system=draw(st.sampled_from(systems)),
        environments={
            name: SumsEnvironment(concurrency=draw(st.integers(1, 6)), timeout_s=draw(timeouts))
            for name in "ab"
        },
        cluster=ClusterSpec(
            replicas=ReplicasSpec(
                count=num_replicas,
                slots=draw(st.integers(1, 4)),
                max_num_seqs=draw(st.integers(1, 9)),
                kv_tokens=draw(st.integers(60, 200)),
            ),
            lanes=LanesSpec(count=num_lanes),
        ),
        **faults,
    )
    # With one replica and one lane a busy worker's pace is 100 or 200 %, and nothing need be rounded.
    slowdown = draw(st.sampled_from([0.0, 1.0])) if num_replicas == num_lanes == 1 else 0.0
    profile = Profile(
        name="scene",
        engine=draw(engines),
        replica=draw(replica_costs),
        lane=draw(lane_costs),
        variation=Variation(training=draw(factors), publish=draw(factors)),
        slowdown_per_busy_worker=assumed(slowdown),
    )
    return Scene(of, profile)


@st.composite
def _limits(draw: st.DrawFn) -> Limits:
    return Limits(
        turn_s=draw(st.just(1e6) | ms(50, 2000)),
        trajectory_s=draw(st.just(1e6) | ms(200, 5000)),
        training_s=draw(st.just(1e6) | ms(200, 5000)),
        order_s=draw(st.just(1e6) | ms(600, 5000)),
        trajectory_retries=draw(st.integers(0, 2)),
        training_retries=draw(st.integers(0, 1)),
        worker_restarts=draw(st.integers(0, 3)),
        min_group=draw(st.integers(1, 2)),
    )


@st.composite
def _operations(draw: st.DrawFn, num_tasks: int, num_replicas: int, num_lanes: int) -> tuple[Operation, ...]:
    workers = [f"replica-{i}" for i in range(num_replicas)] + [f"lane-{i}" for i in range(num_lanes)]
    found: list[Operation] = []
    for _ in range(draw(st.integers(0, 4))):
        at_s, task = draw(ms(0, 5000)), f"t{draw(st.integers(0, num_tasks - 1))}"
        kind = draw(st.sampled_from(["kill", "cancel", "pause"]))
        if kind == "kill":
            found.append(Kill(at_s=at_s, worker=draw(st.sampled_from(workers))))
        elif kind == "cancel":
            found.append(Cancel(at_s=at_s, task=task))
        else:
            found += [Pause(at_s=at_s, task=task), Resume(at_s=at_s + draw(ms(0, 3000)), task=task)]
    return tuple(found)


# --- the same, twice as slow ------------------------------------------------------------------------------


def doubled(scene: Scene) -> Scene:
    """The scene with every duration, and every instant given from outside, twice as long."""
    return Scene(_doubled(scene.experiment), _doubled(scene.profile))


def _doubled(node: S) -> S:
    changes: dict[str, Any] = {}
    for name in node.__struct_fields__:
        value = getattr(node, name)
        is_duration = name.endswith("_s")
        if isinstance(value, Distribution | Quantity):
            changes[name] = _stretched(value) if is_duration else value
        elif isinstance(value, float) and is_duration:
            changes[name] = 2 * value
        elif isinstance(value, msgspec.Struct):
            changes[name] = _doubled(value)
        elif isinstance(value, tuple):
            changes[name] = tuple(_doubled(v) if isinstance(v, msgspec.Struct) else v for v in value)
        elif isinstance(value, dict):
            changes[name] = {k: _doubled(v) for k, v in value.items()}
    return replace(node, **changes)


def _stretched(value: Distribution | Quantity) -> Distribution | Quantity:
    if isinstance(value, Fixed | Quantity):
        return replace(value, value=2 * value.value)
    if isinstance(value, Empirical):
        return replace(value, values=tuple(2 * v for v in value.values))
    assert isinstance(value, Mixture), "the scenes have no other"
    return replace(value, parts=tuple(_stretched(part) for part in value.parts))
