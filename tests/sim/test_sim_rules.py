"""What an engine's rules change: prefills mixed into iterations, contexts read once and found again."""

from __future__ import annotations

from typing import Any

import pytest
import small_runs
from msgspec.structs import replace
from small_runs import PROFILE, Record

from marlaas.events import EngineMeasured, TurnGenerated
from marlaas.spec import ClusterSpec, Fixed, LookupEnvironment, ReplicasSpec, TaskSpec, Workload
from sim import simulate
from sim.costs import IterationCosts
from sim.engine import Chore, Engine
from sim.profile import EngineProfile
from sim.rules import EngineRules
from sim.sequences import Sequence

US = 10**9  # one microsecond in femtoseconds
COSTS = IterationCosts(iteration_fs=100 * US, per_prefill_token_fs=US, prefill_fs=999 * US)


def sequence(name: int, prompt: int, output: int, shared: tuple[Any, int] = (None, 0)) -> Sequence:
    """A sequence of adapter `a` in command `name`, of which (key, tokens) of the context are shared."""
    return Sequence(name, name, ("a", 0), prompt, output, output, *shared)


def mixed(budget: int, **changes: Any) -> EngineRules:
    """Rules with a token budget per iteration."""
    given: dict[str, Any] = {"max_num_seqs": 8, "kv_tokens": 1000, "max_prefill_tokens": budget}
    return EngineRules(prefill="mixed", **(given | changes))


def run(engine: Engine) -> list[tuple[int, int]]:
    """Let it work to its end: (µs, command) of each sequence, as they end."""
    ended = []
    while (wake_ns := engine.wake_ns) is not None:
        for item in engine.advance(wake_ns):
            assert not isinstance(item, Chore)
            ended.append((wake_ns // 1000, item.command))
    return ended


def test_a_context_is_read_in_chunks_of_what_the_budget_leaves() -> None:
    """One decodes and takes a token of each 11: the other's 25 are read 10, 10 and 5 at a time."""
    engine = Engine(COSTS, mixed(11))
    engine.submit(0, [sequence(1, 11, 6)])
    engine.submit(1, [sequence(2, 25, 2)])
    # 111 (11 read, 1st token) | 110 | 110 | 105, and the other's 1st token | 100, the other ends | 100
    assert run(engine) == [(111 + 110 + 110 + 105 + 100, 2), (111 + 110 + 110 + 105 + 100 + 100, 1)]
    assert engine.counters.prefill_tokens == 36
    assert engine.counters.num_iterations == 6


def test_several_contexts_share_an_iteration_and_its_fixed_cost() -> None:
    """Three contexts of 10 in one iteration of 30 read tokens: nobody pays for a pass of its own."""
    engine = Engine(COSTS, mixed(64))
    engine.submit(0, [sequence(i, 10, 1) for i in range(3)])
    assert run(engine) == [(130, 0), (130, 1), (130, 2)]


def test_attention_within_a_context_costs_by_pairs_however_it_is_cut() -> None:
    """Σ c·(k + c/2) over the chunks of a context is half its length squared."""
    costs = IterationCosts(iteration_fs=100 * US, half_per_attended_token_fs=US)
    for budget in (7, 10, 20):
        engine = Engine(costs, mixed(budget))
        engine.submit(0, [sequence(1, 20, 1)])
        num_iterations = -(-20 // budget)
        assert run(engine) == [(100 * num_iterations + 20 * 20, 1)]


def test_a_context_that_finds_no_room_for_its_next_chunk_gives_way() -> None:
    """The youngest is the one being read; it starts again when the older one is done, and all is sampled."""
    engine = Engine(COSTS, mixed(10, kv_tokens=30))
    engine.submit(0, [sequence(1, 10, 16)])
    engine.submit(1, [sequence(2, 20, 2)])
    assert [name for _, name in run(engine)] == [1, 2]
    assert engine.num_preemptions >= 1


def test_samples_of_one_prompt_read_it_once() -> None:
    """Four samples of a prompt of 33: all but its last token, which each must read, is read once."""
    group = [sequence(i, 33, 1, ("p", 33)) for i in range(4)]
    engine = Engine(COSTS, mixed(1000, prefix_cache="prompts"))
    engine.submit(0, group)
    run(engine)
    assert engine.counters.prefill_tokens == 33 + 3

    in_blocks = Engine(COSTS, mixed(1000, prefix_cache="prompts", block_tokens=16))
    in_blocks.submit(0, [sequence(i, 33, 1, ("p", 33)) for i in range(4)])
    run(in_blocks)
    assert in_blocks.counters.prefill_tokens == 33 + 3


def test_a_prompt_in_use_by_several_fills_the_pool_once() -> None:
    """A pool of 60 holds three samples of a prompt of 40 at once if they share it, else one after another."""

    def times(**changes: Any) -> list[int]:
        engine = Engine(COSTS, EngineRules(max_num_seqs=8, kv_tokens=60, **changes))
        engine.submit(0, [sequence(i, 40, 5, ("p", 40)) for i in range(3)])
        return [at for at, _ in run(engine)]

    assert len(set(times(prefix_cache="prompts"))) == 1
    assert len(set(times())) == 3


def test_another_adapters_prompt_is_another_prompt() -> None:
    """Nothing read by one version is found by the next."""
    engine = Engine(COSTS, mixed(1000, prefix_cache="turns"))
    for version in (0, 1):
        engine.submit(version, [Sequence(version, 0, ("a", version), 33, 1, 1, "p", 33)])
    run(engine)
    assert engine.counters.prefill_tokens == 66


@pytest.mark.parametrize(("cache", "num_read"), [("none", 30 + 50), ("prompts", 30 + 21), ("turns", 30 + 11)])
def test_the_next_turn_reads_what_the_policy_did_not_keep(cache: str, num_read: int) -> None:
    """Turn 0: a prompt of 30, 10 sampled. Turn 1: a context of 50, the first 39 of it known."""
    engine = Engine(COSTS, replace(mixed(1000), prefix_cache=cache))
    engine.submit(0, [Sequence(1, 7, ("a", 0), 30, 10, 10, "p", 30)])
    run(engine)
    engine.submit(10**7, [Sequence(2, 7, ("a", 0), 50, 1, 1, "p", 30)])
    run(engine)
    assert engine.counters.prefill_tokens == num_read


def test_what_was_freed_is_overwritten_from_the_oldest_on() -> None:
    """A pool of 100: two turns leave 39 tokens each; a third of 60 leaves 1 of the first, all of one."""
    engine = Engine(COSTS, mixed(1000, kv_tokens=100, prefix_cache="turns"))
    for name, prompt in ((1, 30), (2, 30), (3, 51)):
        engine.submit(name * 10**7, [sequence(name, prompt, 10)])
        run(engine)
    before = engine.counters.prefill_tokens
    engine.submit(5 * 10**7, [sequence(2, 50, 1)])
    run(engine)
    assert engine.counters.prefill_tokens - before == 50 - 39
    before = engine.counters.prefill_tokens
    engine.submit(6 * 10**7, [sequence(1, 50, 1)])
    run(engine)
    assert engine.counters.prefill_tokens - before == 50


def test_a_preempted_sequence_finds_what_nobody_overwrote() -> None:
    """Resuming reads less than its context, and never less than one token."""
    engines = [Engine(COSTS, mixed(100, kv_tokens=60, prefix_cache=cache)) for cache in ("none", "prompts")]
    for engine in engines:
        engine.submit(0, [sequence(1, 20, 30), sequence(2, 20, 30)])
        run(engine)
        assert engine.num_preemptions == 1
    recomputed, resumed = (engine.counters.prefill_tokens for engine in engines)
    assert 40 < resumed < recomputed


def test_keeping_kv_between_turns_shows_in_a_whole_run() -> None:
    """Three turns of a group of four: the prompt is read once, then what is new; it takes less."""
    workload = Workload(
        prompt_tokens=Fixed(value=30.0),
        output_tokens=Fixed(value=10.0),
        turns=Fixed(value=3.0),
        observation_tokens=Fixed(value=5.0),
        environment_s=Fixed(value=0.3),
    )
    task = TaskSpec(
        name="find", environment="library", steps=1, prompts=1, samples=4, max_turns=3, workload=workload
    )
    of = small_runs.experiment(
        tasks=(task,),
        environments={"library": LookupEnvironment()},
        cluster=ClusterSpec(replicas=ReplicasSpec(kv_tokens=2048)),
    )

    def measured(**changes: Any) -> tuple[int, float]:
        engine = EngineProfile(kv_rule="preempt", shares_prompts=False, **changes)
        record = Record()
        simulate(of, replace(PROFILE, engine=engine), record, measure_every_s=0.01)
        assert len(record.events(TurnGenerated)) == 12
        return sum(e.prefill_tokens for e in record.events(EngineMeasured)), record.end_s

    (lost, lost_s), (kept, kept_s) = measured(), measured(prefix_cache="turns")
    assert lost == 4 * (30 + 45 + 60)
    # The last token sampled in a turn was never read, so the next turn reads it with what is new.
    assert kept == 30 + 3 * 1 + 4 * 2 * (5 + 1)
    assert kept_s < lost_s
