"""The closed form equals stepping token by token under pressure, for every rule of the engine.

Beside the property in `test_sim_engine.py`: here every workload is made to be short of KV, and it is counted
that preemption, shared prompts, kept turns and chunks all do happen.
"""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import pytest
from test_sim_engine import drive, order_of

from sim.costs import IterationCosts
from sim.engine import Engine
from sim.rules import CacheRule, EngineRules, PrefillRule
from sim.sequences import Sequence
from sim.stepwise import StepwiseEngine

NUM_WORKLOADS = 25


def costs_of(random: Random) -> IterationCosts:
    """Any costs; nothing is free, so that nothing goes unnoticed."""
    cheap = {name: random.randint(1, 10**8) for name in IterationCosts.__struct_fields__[1:]}
    return IterationCosts(iteration_fs=random.randint(10**6, 10**9), **cheap | {"knee_sequences": 3})


def script_of(random: Random) -> list[tuple[int, object]]:
    """Submissions of which a few fill the pool, now and then an abort, a load or another pace."""
    script: list[tuple[int, object]] = []
    for _ in range(random.randint(2, 6)):
        lengths = [(random.randint(1, 18), random.randint(1, 30)) for _ in range(random.randint(2, 6))]
        script.append((random.randint(0, 9000), ("submit", lengths, random.choice("ab"))))
    if random.random() < 0.3:
        whose = random.randint(0, len(script) - 1)
        script.append((random.randint(0, 12_000), ("abort", whose, frozenset({0, 2}))))
    if random.random() < 0.3:
        script.append((random.randint(0, 9000), random.randint(0, 3000)))
    if random.random() < 0.3:
        script.append((random.randint(0, 9000), ("pace", 160)))
    return sorted(script, key=lambda entry: entry[0])


def orders_of(script: list[tuple[int, object]], costs: IterationCosts) -> list[Any]:
    """Fresh orders; a submission's command is its place among them."""
    return [(at_ns, order_of(number, what, costs)) for number, (at_ns, what) in enumerate(script)]


@pytest.mark.parametrize(
    ("prefill", "cache"), list(product(("own-pass", "mixed"), ("none", "prompts", "turns")))
)
def test_under_pressure_both_engines_agree_to_the_nanosecond(prefill: PrefillRule, cache: CacheRule) -> None:
    """Same ends in the same order and the same number of preemptions, over many workloads."""
    random = Random(f"{prefill} {cache}")
    num_preempted = num_read = num_to_read = num_chunks = 0
    for _ in range(NUM_WORKLOADS):
        costs, script = costs_of(random), script_of(random)
        rules = EngineRules(
            max_num_seqs=random.randint(3, 8),
            kv_tokens=random.randint(50, 75),
            kv_rule="preempt",
            prefill=prefill,
            max_prefill_tokens=random.choice([None, 6, 15]),
            shares_prompts=random.random() < 0.5,
            prefix_cache=cache,
            block_tokens=random.randint(1, 3),
        )
        engine, stepwise = Engine(costs, rules), StepwiseEngine(costs, rules)
        ended = drive(engine, orders_of(script, costs))
        assert ended == drive(stepwise, orders_of(script, costs))
        assert engine.num_preemptions == stepwise.num_preemptions
        num_preempted += engine.num_preemptions
        num_read += engine.counters.prefill_tokens
        num_chunks += engine.counters.num_prefills
        num_to_read += sum(p for _, what in script for p, _ in _lengths(what))
    assert num_preempted > 2 * NUM_WORKLOADS
    assert num_chunks > 4 * NUM_WORKLOADS
    if cache == "none":
        assert num_read > num_to_read, "what was preempted is read again"


def _lengths(what: object) -> list[tuple[int, int]]:
    return what[1] if isinstance(what, tuple) and what[0] == "submit" else []


@pytest.mark.parametrize("prefill", ["own-pass", "mixed"])
def test_what_is_kept_need_not_be_read(prefill: PrefillRule) -> None:
    """Samples of one prompt read it once, and a preempted turn finds again what was not overwritten."""
    read: dict[CacheRule, int] = {}
    costs = IterationCosts(iteration_fs=10**9, per_prefill_token_fs=10**6)
    for cache in ("none", "prompts", "turns"):
        rules = EngineRules(
            max_num_seqs=8, kv_tokens=80, kv_rule="preempt", prefill=prefill, prefix_cache=cache
        )
        batch = [Sequence(1, i, ("a", 0), 16, 20 + i, 30, "same prompt", 16) for i in range(4)]
        engine = Engine(costs, rules)
        drive(engine, [(0, lambda e, at_ns, batch=batch: e.submit(at_ns, batch))])  # type: ignore[misc]
        read[cache] = engine.counters.prefill_tokens
    assert read["none"] > 4 * 16
    assert read["prompts"] < read["none"] / 2
