"""Tests of the tests: for every proof that the simulator is right, faults that it must notice.

A fault is a small change of the real code, made for one test. Each row of `PLANTED` names it, the proof that
catches it, and a word of what that proof then says; on the real code every proof passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace
from queueing_runs import at_environment, closed, closed_record, exponential
from random_scenes import ENDLESS, Scene, doubled
from small_runs import ONE_TURN, PROFILE, Record, experiment
from test_sim_bounds import Alike, rate_bounds, span_ns
from test_sim_engine import drive, sequences, submit
from test_sim_queueing import (
    batch_of,
    cyclic,
    followed,
    interval,
    lane_times,
    repair,
    require_pollaczek_khinchine,
    rollouts_s,
)

import marlaas.core
import marlaas.scheduler
import sim.engine
import sim.workload
from marlaas import batches, episodes, policies, training
from marlaas.commands import Command, SetTimer, StepEnvironment, Train
from marlaas.core import Core
from marlaas.errors import MarlaasError
from marlaas.events import (
    AdapterPublished,
    TimerFired,
)
from marlaas.spec import (
    ClusterSpec,
    Fixed,
    ReplicasSpec,
    SumsEnvironment,
    TaskSpec,
    Workload,
)
from sim import simulate
from sim.backend import SimBackend
from sim.batch import Batch
from sim.costs import IterationCosts
from sim.engine import Engine
from sim.lane import Lane
from sim.prefix_cache import PrefixCache
from sim.profile import Profile, assumed
from sim.rules import EngineRules
from sim.sequences import DecodingSet
from sim.stepwise import StepwiseEngine
from sim.streams import Streams
from sim.workload import BatchPlan
from traces.laws import check
from traces.reader import Trace
from traces.schema import make_header

Patch = pytest.MonkeyPatch
US = 10**9  # femtoseconds

# --- the proofs, each on one run that shows it --------------------------------------------------------------


def small(system: str = "marlaas", profile: Profile = PROFILE, **changes: Any) -> Record:
    """The small experiment; the laws are asked after each event (`tests/conftest.py`) and of the whole."""
    record, of = Record(), experiment(system, **changes)
    simulate(of, profile, record)
    check(Trace(header=make_header(of, world="sim"), records=record.records))
    return record


def laws() -> None:
    """Conservation, tokens, slots, lanes, places, Little's law; at ease and with a crowded lane."""
    small()
    crowded = replace(PROFILE, lane=replace(PROFILE.lane, step_s=assumed(2.0)))
    small(profile=crowded)


def laws_of_rounds() -> None:
    """The same under rounds."""
    small("sync")


def laws_of_one_task_at_a_time() -> None:
    """The same with one task in flight."""
    small("single")


def laws_of_deadlines() -> None:
    """The same where verdicts take longer than their time-out."""
    environments = {
        "sums": SumsEnvironment(latency_s=exponential(0.2), concurrency=8, timeout_s=0.3),
        "library": SumsEnvironment(),
    }
    small(environments=environments)


def laws_of_the_kv_pool() -> None:
    """The same where answers of one length want more KV than there is."""
    workload = Workload(prompt_tokens=Fixed(value=10.0), output_tokens=Fixed(value=20.0))
    task = TaskSpec(name="t", environment="sums", steps=1, prompts=8, samples=2, workload=workload)
    small(tasks=(task,), cluster=ClusterSpec(replicas=ReplicasSpec(kv_tokens=200)))


def stepwise() -> None:
    """The closed form equals token-by-token stepping, under pressure, with every rule of admission."""
    costs = IterationCosts(
        iteration_fs=100 * US,
        per_sequence_fs=7 * US,
        per_kv_token_fs=US,
        adapters_fs=2 * US,
        per_adapter_fs=3 * US,
        prefill_fs=5 * US,
        per_prefill_token_fs=2 * US,
        half_per_attended_token_fs=US,
    )
    lengths = [[(12, 9), (12, 14), (7, 5)], [(12, 11), (8, 3), (8, 8)], [(5, 20), (9, 6)]]
    num_preempted = 0
    for kv_rule, prefill, cache in itertools.product(
        ("reserve", "preempt"), ("own-pass", "mixed"), ("none", "prompts", "turns")
    ):
        rules = EngineRules(
            max_num_seqs=5,
            kv_tokens=60,
            kv_rule=kv_rule,  # type: ignore[arg-type]
            prefill=prefill,  # type: ignore[arg-type]
            max_prefill_tokens=14,
            prefix_cache=cache,  # type: ignore[arg-type]
            block_tokens=2,
        )

        def orders() -> list[Any]:
            return [
                (at_ns, submit(*sequences(number, own, "ab"[number % 2])))
                for number, (at_ns, own) in enumerate(zip((0, 150_000, 700_000), lengths, strict=True))
            ]

        engine, naive = Engine(costs, rules), StepwiseEngine(costs, rules)
        assert drive(engine, orders()) == drive(naive, orders())
        assert engine.num_preemptions == naive.num_preemptions
        num_preempted += naive.num_preemptions
    assert num_preempted >= 3


def first_come_first_served() -> None:
    """Every wait is that of Kiefer and Wolfowitz."""
    visits = at_environment(exponential(1.0), rate=1.6, servers=2, num=300, seed=3)
    assert np.abs(followed(visits, 2) - visits.began).max() < 1e-5


def pollaczek() -> None:
    """The mean stay at an environment."""
    require_pollaczek_khinchine("gamma of shape 4", num=5000, seed=1, within=0.05)


def machine_repair() -> None:
    """The rate of tasks that think and one lane."""
    found = closed(tasks=16, steps=70, rollout=exponential(10.0), training=exponential(1.0), seed=2)
    assert found.rate.holds(repair(16, 10.0, 1.0))


def cyclic_queue() -> None:
    """The rate of tasks that go round two servers."""
    found = closed(tasks=3, steps=300, rollout=exponential(1.5), training=exponential(1.0), seed=4, places=1)
    assert found.rate.holds(cyclic(3, 1.5, 1.0))


def fixed_cycle() -> None:
    """Without chance: K·(R + T) + (N − 1)·T to the nanosecond."""
    record = closed_record(tasks=3, steps=5, rollout=Fixed(value=10.0), training=Fixed(value=1.0), seed=0)
    assert record.events(AdapterPublished)[-1].at == 57 * 10**9


def slowest_of_n() -> None:
    """The mean of the maximum of n exponential verdicts."""
    workload = Workload(
        prompt_tokens=Fixed(value=5.0), output_tokens=Fixed(value=5.0), environment_s=exponential(2.0)
    )
    found = interval(rollouts_s(batch_of(workload, size=8, steps=200)))
    assert found.holds(2.0 * sum(1 / k for k in range(1, 9)))


def same_draws() -> None:
    """Two systems meet the same times of training."""
    assert lane_times("single") == lane_times("marlaas")


def determinism() -> None:
    """The same experiment twice gives the same record."""
    assert small().records == small().records


def doubling() -> None:
    """Twice the durations, twice every instant."""
    tasks = tuple(
        replace(task, workload=replace(ONE_TURN, environment_s=Fixed(value=0.25)))
        for task in experiment().tasks
    )
    scene = Scene(experiment(tasks=tasks), PROFILE)
    once, twice = scene.run().records, doubled(scene).run().records
    assert [2 * event.at for event, _ in once] == [event.at for event, _ in twice]


def alike(rollout_s: float, train_s: float) -> Alike:
    """Four tasks of three steps without chance, which contend for nothing but the lane."""
    profile = replace(
        PROFILE,
        replica=replace(PROFILE.replica, load_s=assumed(0.0), unload_s=assumed(0.0), prefill_s=assumed(0.0)),
        lane=replace(PROFILE.lane, step_s=assumed(train_s), per_token_s=assumed(0.0)),
    )
    task = TaskSpec(
        name="t",
        environment="sums",
        steps=3,
        prompts=2,
        samples=1,
        workload=Workload(
            prompt_tokens=Fixed(value=5.0),
            output_tokens=Fixed(value=3.0),
            environment_s=Fixed(value=rollout_s),
        ),
    )
    of = experiment(
        tasks=tuple(replace(task, name=f"t{i}") for i in range(4)),
        limits=ENDLESS,
        environments={"sums": SumsEnvironment(timeout_s=1e6)},
        cluster=ClusterSpec(replicas=ReplicasSpec(slots=4)),
    )
    return Alike(Scene(of, profile), 4, 3)


def bound_by_lanes() -> None:
    """No more steps than lanes can train."""
    scene = alike(0.5, 2.0).scene
    assert 12 / span_ns(scene.run()) <= rate_bounds(scene)[0]


def bound_by_cycles() -> None:
    """No more steps than the tasks' cycles allow."""
    scene = alike(20.0, 0.1).scene
    assert 12 / span_ns(scene.run()) <= rate_bounds(scene)[1]


def gain_over_single() -> None:
    """At most N, and one task at a time takes as long as each alone."""
    of = alike(5.0, 0.5)
    assert span_ns(of.scene.run("single")) == of.num_tasks * span_ns(of.alone().run("marlaas"))
    assert of.gain("single") <= of.num_tasks


def gain_over_rounds() -> None:
    """Less than two where nothing is contended."""
    assert alike(4.0, 1.0).gain("sync") < 2


PROOFS: tuple[Callable[[], None], ...] = (
    laws,
    laws_of_rounds,
    laws_of_one_task_at_a_time,
    laws_of_deadlines,
    laws_of_the_kv_pool,
    stepwise,
    first_come_first_served,
    pollaczek,
    machine_repair,
    cyclic_queue,
    fixed_cycle,
    slowest_of_n,
    same_draws,
    determinism,
    doubling,
    bound_by_lanes,
    bound_by_cycles,
    gain_over_single,
    gain_over_rounds,
)

# --- the faults ---------------------------------------------------------------------------------------------


def wrapped(patch: Patch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Let `around(real, *args)` stand for a function or method."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: around(real, *args, **kwargs))


def a_dropped_trajectory(patch: Patch) -> None:
    """The last finished trajectory is left out of training."""

    def around(real: Any, core: Core, kind: type[Command], **fields: Any) -> int:
        if kind is Train:
            fields["trajectories"] = fields["trajectories"][:-1]
        return int(real(core, kind, **fields))

    wrapped(patch, Core, "order", around)


def a_trajectory_that_is_forgotten(patch: Patch) -> None:
    """A batch is taken for complete when one trajectory is still out."""

    def around(real: Any, core: Core, task: Any, batch: Any) -> None:
        if batch.num_live == 1 and len(batch.trajectories) > 1 and task.state == "rolling":
            batch.num_live = 0
        real(core, task, batch)

    wrapped(patch, batches, "finish_if_complete", around)


def a_token_that_is_lost(patch: Patch) -> None:
    """Later turns begin a token behind where the observation ended."""

    def around(real: Any, plan: BatchPlan, *args: Any) -> None:
        real(plan, *args)
        plan.contexts[1:] = [[tokens - 1 for tokens in row] for row in plan.contexts[1:]]

    wrapped(patch, BatchPlan, "__init__", around)


def a_lane_that_serves_two(patch: Patch) -> None:
    """The scheduler gives a busy lane work."""

    def around(real: Any, core: Core, lane: Any) -> None:
        kept = lane.job, lane.task, lane.command
        if lane.job == "training" and core.state.buffer:
            lane.job = "idle"
        real(core, lane)
        if lane.job == "idle":
            lane.job, lane.task, lane.command = kept

    wrapped(patch, training, "give_work", around)


def one_slot_too_many(patch: Patch) -> None:
    """The scheduler thinks replicas larger than they are."""
    wrapped(
        patch,
        marlaas.core,
        "compose",
        lambda real, experiment: (
            (system := real(experiment))
            and type(system)(**{n: getattr(system, n) for n in system.__struct_fields__} | {"capacity": 3})
        ),
    )


def an_eviction_under_turns(patch: Patch) -> None:
    """An adapter in use is evicted for another."""

    def evict(state: Any, replica: Any) -> Any:
        return min(
            (s for s in replica.slots.values() if s.state == "resident"), key=lambda s: s.used, default=None
        )

    def around(real: Any, experiment: Any) -> Any:
        system = real(experiment)
        fields = {n: getattr(system, n) for n in system.__struct_fields__}
        return type(system)(**fields | {"evict": evict})

    wrapped(patch, marlaas.core, "compose", around)


def a_late_event_counted_twice(patch: Patch) -> None:
    """A duplicate answer of an environment frees a place again."""

    def doubled_answer(real: Any, backend: SimBackend, command: StepEnvironment) -> None:
        real(backend, command)
        real(backend, command)

    def around(real: Any, core: Core, number: int) -> Any:
        step = real(core, number)
        if step is None:
            for environment in core.state.environments.values():
                environment.num_stepping -= environment.num_stepping > 0
        return step

    wrapped(patch, SimBackend, "_step_environment", doubled_answer)
    patch.setattr(episodes, "leave", partial(around, episodes.leave))


def a_place_never_given_back(patch: Patch) -> None:
    """The first trajectory to leave an environment is counted as there for ever."""

    def around(real: Any, core: Core, number: int) -> Any:
        step = real(core, number)
        if step is not None and (step.task, step.batch.step, step.trajectory.index) == ("add", 0, 0):
            core.state.environments["sums"].num_stepping += 1
        return step

    wrapped(patch, episodes, "leave", around)


def a_place_too_many(patch: Patch) -> None:
    """An environment steps one more than it may."""

    def around(real: Any, core: Core, environment: Any) -> None:
        environment.concurrency += 1
        real(core, environment)
        environment.concurrency -= 1

    wrapped(patch, episodes, "step_environment", around)


def a_timer_that_fires_early(patch: Patch) -> None:
    """By a microsecond."""

    def early(backend: SimBackend, command: SetTimer) -> None:
        backend._tell_at(TimerFired(at=max(command.at - 1000, backend._timeline.now_ns), command=command.id))

    patch.setattr(SimBackend, "_set_timer", early)


def timers_that_are_lost(patch: Patch) -> None:
    """Nobody is told that a time-out has passed."""
    patch.setattr(SimBackend, "_set_timer", lambda backend, command: None)


def a_barrier_that_leaks(patch: Patch) -> None:
    """In rounds a task starts as soon as it is ready."""
    patch.setattr(policies, "start_together", policies.start_at_once)


def a_round_trained_too_early(patch: Patch) -> None:
    """In rounds batches are trained before all are complete."""
    patch.setattr(policies, "train_after_round", lambda choose: choose)


def the_newest_batch_first(patch: Patch) -> None:
    """The batch completed last is trained first."""
    patch.setattr(policies, "train_oldest", lambda state: state.buffer[-1] if state.buffer else None)


def two_tasks_at_a_time(patch: Patch) -> None:
    """`single` admits everyone."""
    patch.setattr(policies, "admit_one", policies.admit_all)


def a_pool_without_a_bound(patch: Patch) -> None:
    """The engine never finds its KV pool full."""
    patch.setattr(
        sim.backend,
        "engine_rules",
        lambda engine, of: EngineRules(max_num_seqs=64, kv_tokens=10**6, kv_rule="reserve"),
    )


def kv_freed_twice(patch: Patch) -> None:
    """A sequence that ends gives back its KV a second time."""

    def around(real: Any, decoding: DecodingSet, sequence: Any) -> None:
        before = decoding.kv_tokens
        real(decoding, sequence)
        freed = before - decoding.kv_tokens
        decoding.kv_tokens = max(0, decoding.kv_tokens - freed)

    wrapped(patch, DecodingSet, "leave", around)


def a_decode_iteration_skipped(patch: Patch) -> None:
    """A run of iterations takes one iteration less."""
    wrapped(
        patch,
        sim.engine,
        "run_fs",
        lambda real, first, growth, num: real(first, growth, num - 1 if num > 2 else num),
    )


def the_oldest_preempted(patch: Patch) -> None:
    """Under KV pressure whoever came first gives way."""
    patch.setattr(DecodingSet, "youngest", lambda decoding: decoding.members()[0])


def a_prompt_never_given_back(patch: Patch) -> None:
    """What samples share of a prompt counts as saved for ever."""

    def around(real: Any, cache: PrefixCache, *args: Any, **kwargs: Any) -> None:
        saved = cache.saved
        real(cache, *args, **kwargs)
        cache.saved = max(saved, cache.saved)

    wrapped(patch, PrefixCache, "leave", around)


def a_chunk_read_twice(patch: Patch) -> None:
    """Contexts cost twice their reading."""

    def around(real: Any, batch: Batch, *args: Any) -> None:
        real(batch, *args)
        batch.prefill_tokens += args[2]

    wrapped(patch, Batch, "_note_read", around)


def last_come_first_served(patch: Patch) -> None:
    """An environment takes the newest of its queue."""

    def around(real: Any, core: Core, environment: Any) -> None:
        environment.queue.reverse()
        real(core, environment)
        environment.queue.reverse()

    wrapped(patch, episodes, "step_environment", around)


def slow_verdicts(patch: Patch) -> None:
    """Environments take 6 % longer than they are said to."""

    def around(real: Any, backend: SimBackend, command: StepEnvironment) -> None:
        plan = backend._plans.of(command.task, command.step)
        times, i = plan.environment_ns[command.turn], command.trajectory
        kept, times[i] = times[i], round(1.06 * times[i])
        real(backend, command)
        times[i] = kept

    wrapped(patch, SimBackend, "_step_environment", around)


def quick_verdicts(patch: Patch) -> None:
    """Environments answer after half their time."""

    def around(real: Any, backend: SimBackend, command: StepEnvironment) -> None:
        plan = backend._plans.of(command.task, command.step)
        times, i = plan.environment_ns[command.turn], command.trajectory
        kept, times[i] = times[i], times[i] // 2
        real(backend, command)
        times[i] = kept

    wrapped(patch, SimBackend, "_step_environment", around)


def a_quick_lane(patch: Patch) -> None:
    """Lanes take 15 % less than their costs."""
    wrapped(
        patch,
        Lane,
        "run",
        lambda real, lane, duration_ns, finish: real(lane, duration_ns * 85 // 100, finish),
    )


def a_slow_lane(patch: Patch) -> None:
    """Lanes take 15 % more than their costs."""
    wrapped(
        patch,
        Lane,
        "run",
        lambda real, lane, duration_ns, finish: real(lane, duration_ns * 115 // 100, finish),
    )


def one_verdict_for_all(patch: Patch) -> None:
    """The trajectories of a batch draw one latency between them."""

    def around(real: Any, distribution: Any, random: Any, shape: tuple[int, ...]) -> Any:
        return np.broadcast_to(real(distribution, random, (*shape[:-1], 1)), shape)

    wrapped(patch, sim.workload, "sample", around)


def draws_that_remember(patch: Patch) -> None:
    """What is drawn depends on how often was drawn before."""
    counter = itertools.count()
    wrapped(patch, Streams, "of", lambda real, streams, *names: real(streams, *names, next(counter)))


def a_hidden_millisecond(patch: Patch) -> None:
    """Every job of a lane takes a millisecond that no cost names."""
    wrapped(
        patch,
        Lane,
        "run",
        lambda real, lane, duration_ns, finish: real(lane, duration_ns + 1_000_000, finish),
    )


def rounds_of_one(patch: Patch) -> None:
    """Under rounds only one task rolls out at a time."""
    wrapped(patch, policies, "start_together", lambda real, state: real(state)[:1])


def single_in_no_hurry(patch: Patch) -> None:
    """With one task at a time every job of a lane takes twice as long as with several."""

    def around(real: Any, backend: SimBackend, lane: str, duration_ns: int, answer: Any) -> None:
        is_single = backend._experiment.system == "single"
        real(backend, lane, (1 + is_single) * duration_ns, answer)

    wrapped(patch, SimBackend, "_run_job", around)


class Planted(NamedTuple):
    """A fault, the proof that must notice it, and a word of what it then says ("" for a bare assertion)."""

    fault: Callable[[Patch], None]
    proof: Callable[[], None]
    says: str = ""


PLANTED = (
    Planted(a_dropped_trajectory, laws, "trained on .*, not on"),
    Planted(a_trajectory_that_is_forgotten, laws, "trained with 1 trajectories unfinished"),
    Planted(a_token_that_is_lost, laws, "goes on from"),
    Planted(a_lane_that_serves_two, laws, "begins while .* is under way"),
    Planted(one_slot_too_many, laws, "3 adapters in 2 slots"),
    Planted(an_eviction_under_turns, laws, "is unloaded under"),
    Planted(a_late_event_counted_twice, laws, "steps in .* places|Little's law"),
    Planted(a_place_never_given_back, laws, "Little's law"),
    Planted(a_place_too_many, laws, "9 steps in 8 places"),
    Planted(the_newest_batch_first, laws, "whose turn it is"),
    Planted(a_timer_that_fires_early, laws_of_deadlines, "timer .* fires at"),
    Planted(timers_that_are_lost, laws_of_deadlines, "past its deadline"),
    Planted(a_barrier_that_leaks, laws_of_rounds, "before the round of the others is trained|of its round"),
    Planted(a_round_trained_too_early, laws_of_rounds, "of its round is rolling"),
    Planted(two_tasks_at_a_time, laws_of_one_task_at_a_time, "begins a batch beside"),
    Planted(a_pool_without_a_bound, laws_of_the_kv_pool, "tokens held at once of 200"),
    Planted(kv_freed_twice, stepwise),
    Planted(a_decode_iteration_skipped, stepwise),
    Planted(the_oldest_preempted, stepwise),
    Planted(a_prompt_never_given_back, stepwise),
    Planted(a_chunk_read_twice, stepwise),
    Planted(last_come_first_served, first_come_first_served),
    Planted(slow_verdicts, pollaczek),
    Planted(a_slow_lane, machine_repair),
    Planted(quick_verdicts, cyclic_queue),
    Planted(a_hidden_millisecond, fixed_cycle),
    Planted(one_verdict_for_all, slowest_of_n),
    Planted(draws_that_remember, same_draws),
    Planted(draws_that_remember, determinism),
    Planted(a_hidden_millisecond, doubling),
    Planted(a_quick_lane, bound_by_lanes),
    Planted(quick_verdicts, bound_by_cycles),
    Planted(single_in_no_hurry, gain_over_single),
    Planted(rounds_of_one, gain_over_rounds),
)


@pytest.fixture
def fault_free(lawful_runs: list[object]) -> Iterator[None]:
    """What a fault has left unlawful is no failure of the test that planted it."""
    yield
    lawful_runs.clear()


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: f"{p.fault.__name__}-{p.proof.__name__}")
def test_a_planted_fault_is_noticed(planted: Planted, monkeypatch: Patch, fault_free: None) -> None:
    """The proof that passes on the real code fails with the fault."""
    planted.fault(monkeypatch)
    with pytest.raises((AssertionError, MarlaasError), match=planted.says or None):
        planted.proof()


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: proof.__name__)
def test_every_proof_passes_on_the_real_code_and_is_planted_against(proof: Callable[[], None]) -> None:
    """No proof is there that no fault tests."""
    proof()
    assert any(planted.proof is proof for planted in PLANTED)
