"""What things cost: a strict tree of quantities, each with its source and, where known, an interval.

A profile describes machines, engines and workloads; the experiment says what is run on them. Owns the
schema, reading and writing it, and where a task's workload comes from; draws nothing and times nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from marlaas.errors import InputError
from marlaas.spec import Count, Distribution, Experiment, Fixed, Name, NonNegative, Spec, TaskSpec, Workload
from sim.costs import IterationCosts, to_fs
from sim.distribution_checks import require_sound
from sim.rules import CacheRule, EngineRules, KvRule, PrefillRule

Source = Literal["datasheet", "published", "calibrated", "assumed"]


class Quantity(Spec, frozen=True, kw_only=True):
    """A number and where it comes from; the interval is of what is thought possible, or is not known."""

    value: NonNegative
    source: Source
    interval: tuple[NonNegative, NonNegative] | None = None
    note: str = ""


def assumed(value: float, note: str = "") -> Quantity:
    """A quantity nobody measured."""
    return Quantity(value=value, source="assumed", note=note)


FREE = assumed(0.0)


class EngineProfile(Spec, frozen=True, kw_only=True):
    """How the modelled engine admits sequences; see `rules.EngineRules`. `name` says which engine it is."""

    name: str = "torch"
    kv_rule: KvRule = "reserve"
    prefill: PrefillRule = "own-pass"
    max_prefill_tokens: Count | None = 2048
    shares_prompts: bool = True
    prefix_cache: CacheRule = "none"
    block_tokens: Count = 1


class ReplicaProfile(Spec, frozen=True, kw_only=True):
    """Costs of a replica, in seconds per unit named; see `costs.IterationCosts` for the formula.

    `turn_overhead_s` passes between the end of a turn in the engine and the scheduler's knowing it. An
    adapter is loaded in `load_s + load_per_byte_s · adapter_bytes`, and the batch stands still meanwhile.
    `kv_tokens` is the KV pool that fits, where that is known; the experiment says what is used.
    """

    iteration_s: Quantity
    per_sequence_s: Quantity = FREE
    per_sequence_beyond_knee_s: Quantity = FREE
    knee_sequences: Quantity = FREE
    per_kv_token_s: Quantity = FREE
    adapters_s: Quantity = FREE
    per_adapter_s: Quantity = FREE
    prefill_s: Quantity = FREE
    per_prefill_token_s: Quantity = FREE
    per_attended_token_s: Quantity = FREE
    turn_overhead_s: Quantity = FREE
    start_s: Quantity = FREE
    load_s: Quantity = FREE
    load_per_byte_s: Quantity = FREE
    unload_s: Quantity = FREE
    adapter_bytes: Quantity = FREE
    kv_tokens: Quantity | None = None


class LaneProfile(Spec, frozen=True, kw_only=True):
    """Costs of a lane, in seconds per unit named.

    A training step takes `switch_s + step_s + per_micro_batch_s·rounds + per_token_s·tokens
    + per_squared_token_s·Σ length² + optimizer_s`, over the trained trajectories' whole lengths; a round
    works on `num_parallel_micro_batches` micro-batches of the task's `micro_batch_tokens` each.
    """

    switch_s: Quantity = FREE
    step_s: Quantity
    per_micro_batch_s: Quantity = FREE
    num_parallel_micro_batches: Count = 1
    per_token_s: Quantity = FREE
    per_squared_token_s: Quantity = FREE
    optimizer_s: Quantity = FREE
    publish_s: Quantity = FREE
    create_adapter_s: Quantity = FREE
    start_s: Quantity = FREE


class Variation(Spec, frozen=True, kw_only=True):
    """Factors by which a lane's durations differ from what they cost, such as a rare slow file system.

    Each is drawn once per step of a task, so every system and every retry meets the same. A mean of 1 keeps
    the costs as they are on average.
    """

    training: Distribution = Fixed(value=1.0)
    publish: Distribution = Fixed(value=1.0)

    def __post_init__(self) -> None:
        require_sound(self)


class ProfiledWorkload(Spec, frozen=True, kw_only=True):
    """A workload and where it comes from."""

    workload: Workload
    source: Source
    note: str = ""

    def __post_init__(self) -> None:
        require_sound(self)


class Profile(Spec, frozen=True, kw_only=True):
    """All that a simulation needs beside the experiment.

    `workloads` are named after a task or an environment. `environment_overhead_s` is added to an
    environment's own latency; a workload's `environment_s` was measured whole and contains it. A busy worker
    takes `slowdown_per_busy_worker` of its time longer for each other busy one: 0 for devices of their own,
    more where workers share the cores of one machine. `variation` makes training and publishing irregular.
    """

    name: Name
    description: str = ""
    engine: EngineProfile = EngineProfile()
    replica: ReplicaProfile
    lane: LaneProfile
    variation: Variation = Variation()
    environment_overhead_s: Quantity = FREE
    slowdown_per_busy_worker: Quantity = FREE
    workloads: dict[str, ProfiledWorkload] = msgspec.field(default_factory=dict)


# --- what the simulation asks ------------------------------------------------------------------------


def iteration_costs(replica: ReplicaProfile) -> IterationCosts:
    """The engine's costs in femtoseconds."""
    return IterationCosts(
        iteration_fs=to_fs(replica.iteration_s.value),
        per_sequence_fs=to_fs(replica.per_sequence_s.value),
        per_sequence_beyond_knee_fs=to_fs(replica.per_sequence_beyond_knee_s.value),
        knee_sequences=round(replica.knee_sequences.value),
        per_kv_token_fs=to_fs(replica.per_kv_token_s.value),
        adapters_fs=to_fs(replica.adapters_s.value),
        per_adapter_fs=to_fs(replica.per_adapter_s.value),
        prefill_fs=to_fs(replica.prefill_s.value),
        per_prefill_token_fs=to_fs(replica.per_prefill_token_s.value),
        half_per_attended_token_fs=to_fs(replica.per_attended_token_s.value / 2),
    )


def engine_rules(engine: EngineProfile, experiment: Experiment) -> EngineRules:
    """How a replica of this experiment admits."""
    replicas = experiment.cluster.replicas
    return EngineRules(
        max_num_seqs=replicas.max_num_seqs,
        kv_tokens=replicas.kv_tokens,
        kv_rule=engine.kv_rule,
        prefill=engine.prefill,
        max_prefill_tokens=engine.max_prefill_tokens,
        shares_prompts=engine.shares_prompts,
        prefix_cache=engine.prefix_cache,
        block_tokens=engine.block_tokens,
    )


def training_seconds(lane: LaneProfile, lengths: Sequence[int], micro_batch_tokens: int) -> float:
    """How long a training step over trajectories of these lengths, in tokens, takes."""
    fixed = lane.switch_s.value + lane.step_s.value + lane.optimizer_s.value
    num_tokens, squares = sum(lengths), sum(length * length for length in lengths)
    rounds = -(-num_tokens // (micro_batch_tokens * lane.num_parallel_micro_batches))
    varying = lane.per_token_s.value * num_tokens + lane.per_squared_token_s.value * squares
    return fixed + lane.per_micro_batch_s.value * rounds + varying


def workload_of(task: TaskSpec, profile: Profile) -> Workload:
    """A task's own workload, else the profile's for its name, else the profile's for its environment."""
    if task.workload is not None:
        return task.workload
    for name in (task.name, task.environment):
        if name in profile.workloads:
            return profile.workloads[name].workload
    known = ", ".join(profile.workloads) or "none"
    raise InputError(
        f"tasks ({task.name}).workload",
        f"neither the task nor the profile {profile.name} says what its trajectories are like",
        f"give it a workload, or the profile one named {task.name} or {task.environment} (known: {known})",
    )


def environment_latency(
    task: TaskSpec, profile: Profile, experiment: Experiment
) -> tuple[Distribution, float]:
    """The latency of a task's environment and what is added to each draw, both in seconds."""
    measured = workload_of(task, profile).environment_s
    if measured is not None:
        return measured, 0.0
    return experiment.environments[task.environment].latency_s, profile.environment_overhead_s.value
