"""A replica's continuous batching in closed form."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from marlaas.errors import InputError
from sim.batch import Batch
from sim.costs import IterationCosts, iterations_until, run_fs
from sim.engine import Chore, Engine
from sim.rules import EngineRules
from sim.sequences import Sequence
from sim.stepwise import StepwiseEngine

US = 10**9  # one microsecond in femtoseconds
PLAIN = IterationCosts(iteration_fs=100 * US)

AnyEngine = Engine | StepwiseEngine
Order = tuple[int, Callable[[AnyEngine, int], None]]
Ended = list[tuple[int, str]]


def sequences(
    command: int, lengths: list[tuple[int, int]], adapter: str = "a", first: int = 0
) -> list[Sequence]:
    """Sequences of one command from (prompt, output) lengths.

    Even contexts are shared whole by those of equal length, odd ones to a quarter by those of like length.
    """
    shared = [(p, p) if p % 2 == 0 else (-p // 4, p // 4) for p, _ in lengths]
    return [
        Sequence(command, first + i, (adapter, 0), p, o, o, *shared[i]) for i, (p, o) in enumerate(lengths)
    ]


def rules(max_num_seqs: int, kv_tokens: int) -> EngineRules:
    """Rules with preemption, unbounded prefills and nothing shared."""
    return EngineRules(max_num_seqs=max_num_seqs, kv_tokens=kv_tokens)


def drive(engine: AnyEngine, orders: list[Order]) -> Ended:
    """Give the orders at their times, run until idle; returns what ended, as (ns, `command.trajectory`)."""
    ended: Ended = []

    def advance(now_ns: int) -> None:
        for item in engine.advance(now_ns):
            name = "chore" if isinstance(item, Chore) else f"{item.command}.{item.trajectory}"
            ended.append((now_ns, name))

    for at_ns, order in sorted(orders, key=lambda pair: pair[0]):
        while (wake_ns := engine.wake_ns) is not None and wake_ns <= at_ns:
            advance(wake_ns)
        advance(at_ns)
        order(engine, at_ns)
    while (wake_ns := engine.wake_ns) is not None:
        advance(wake_ns)
    return ended


def quiet(duration_ns: int) -> Chore:
    """A chore that tells nobody."""
    return Chore(duration_ns, lambda: None)


def submit(*batch: Sequence) -> Callable[[AnyEngine, int], None]:
    """An order that submits these."""
    return lambda engine, at_ns: engine.submit(at_ns, batch)


def test_one_sequence_costs_a_prefill_and_an_iteration_per_further_token() -> None:
    """Alone: prefill p0 + p·P gives the first token; token k+1 costs a + b + c·(P + k) + d0 + d1."""
    costs = IterationCosts(
        iteration_fs=100 * US,
        per_sequence_fs=10 * US,
        per_kv_token_fs=1 * US,
        adapters_fs=5 * US,
        per_adapter_fs=2 * US,
        prefill_fs=50 * US,
        per_prefill_token_fs=3 * US,
    )
    ended = drive(Engine(costs, rules(8, 1000)), [(7, submit(*sequences(1, [(20, 4)])))])
    prefill_us = 50 + 3 * 20 + 7
    decode_us = 3 * (100 + 10 + 7) + 21 + 22 + 23
    assert ended == [(7 + (prefill_us + decode_us) * 1000, "1.0")]


def test_the_knee_and_each_distinct_adapter_are_paid_for() -> None:
    """Three sequences of two adapters over a knee of two: a + 3b + e + d0 + 2·d1 an iteration."""
    costs = IterationCosts(
        iteration_fs=100 * US,
        per_sequence_fs=10 * US,
        per_sequence_beyond_knee_fs=7 * US,
        knee_sequences=2,
        adapters_fs=4 * US,
        per_adapter_fs=3 * US,
    )
    batch = sequences(1, [(5, 3), (5, 3)], "a") + sequences(2, [(5, 3)], "b")
    ended = drive(Engine(costs, rules(8, 1000)), [(0, submit(*batch))])
    assert {at for at, _ in ended} == {(4 + 6 + 2 * (100 + 30 + 7 + 4 + 6)) * 1000}


def test_no_more_than_max_num_seqs_run_and_the_rest_come_in_order() -> None:
    """Five equal sequences through two seats take three rounds, first come first served."""
    ended = drive(Engine(PLAIN, rules(2, 1000)), [(0, submit(*sequences(1, [(1, 2)] * 5)))])
    assert [name for _, name in ended] == ["1.0", "1.1", "1.2", "1.3", "1.4"]
    assert [at for at, _ in ended] == [100_000, 100_000, 200_000, 200_000, 300_000]


def test_an_arrival_joins_at_the_end_of_the_iteration_it_lands_in() -> None:
    """A running sequence is delayed by the newcomer's prefill only from that boundary on."""
    costs = IterationCosts(iteration_fs=100 * US, prefill_fs=30 * US)
    orders = [(0, submit(*sequences(1, [(1, 5)]))), (180_000, submit(*sequences(2, [(1, 2)])))]
    # 30 prefill; iterations end at 130, 230 | prefill to 260 | 360 (both sample), 460.
    assert drive(Engine(costs, rules(8, 1000)), orders) == [(360_000, "2.0"), (460_000, "1.0")]


def test_a_chore_stops_the_batch_at_the_next_boundary_for_its_time() -> None:
    """An adapter load of 45 µs asked for in an iteration delays everyone by 45 µs."""
    orders: list[Order] = [
        (0, submit(*sequences(1, [(1, 4)]))),
        (150_000, lambda engine, at_ns: engine.run_chore(at_ns, quiet(45_000))),
    ]
    assert drive(Engine(PLAIN, rules(8, 1000)), orders) == [(245_000, "chore"), (345_000, "1.0")]


def test_a_slower_pace_holds_from_the_next_boundary_on() -> None:
    """Told in the second of four iterations to take 160 %: the last two do."""
    orders: list[Order] = [
        (0, submit(*sequences(1, [(1, 5)]))),
        (150_000, lambda engine, at_ns: engine.set_costs(at_ns, PLAIN.scaled(160))),
    ]
    assert drive(Engine(PLAIN, rules(8, 1000)), orders) == [(520_000, "1.0")]


def test_an_abort_frees_the_seat_at_the_next_boundary() -> None:
    """The aborted never end, waiting or decoding; who waited behind them gets the seat."""
    orders: list[Order] = [
        (0, submit(*sequences(1, [(1, 50), (1, 50)]))),
        (0, submit(*sequences(2, [(1, 3)]))),
        (250_000, lambda engine, at_ns: engine.abort(at_ns, 1, frozenset({0, 1}), quiet(0))),
    ]
    assert drive(Engine(PLAIN, rules(1, 1000)), orders) == [(300_000, "chore"), (500_000, "2.0")]


def test_under_kv_pressure_the_youngest_is_preempted_and_the_oldest_never() -> None:
    """Two sequences that fit only one at full length: the older ends as if alone, both end complete."""
    engine = Engine(PLAIN, rules(8, 24))
    ended = drive(engine, [(0, submit(*sequences(1, [(8, 15), (8, 15)])))])
    assert ended == [(1_400_000, "1.0"), (2_300_000, "1.1")]
    assert engine.num_preemptions == 1
    # Of the younger's 15 tokens 5 were sampled before its preemption and 1 by the second prefill.
    assert engine.counters.sequences_sum == 14 + 4 + 9


def test_a_pool_that_reserves_lets_in_fewer_and_preempts_none() -> None:
    """The same two sequences, one after the other: at most one could grow to its limit."""
    engine = Engine(PLAIN, EngineRules(max_num_seqs=8, kv_tokens=24, kv_rule="reserve"))
    ended = drive(engine, [(0, submit(*sequences(1, [(8, 15), (8, 15)])))])
    assert ended == [(1_400_000, "1.0"), (2_800_000, "1.1")]
    assert engine.num_preemptions == 0


def test_a_bounded_prefill_lets_the_running_ones_decode_in_between() -> None:
    """Three prompts of 10 through passes of 20 tokens: two passes with one iteration between them."""
    costs = IterationCosts(iteration_fs=100 * US, per_prefill_token_fs=US)
    engine = Engine(costs, EngineRules(max_num_seqs=8, kv_tokens=99, max_prefill_tokens=20))
    ended = drive(engine, [(0, submit(*sequences(1, [(10, 3)] * 3)))])
    # 20 prefill | 120 iteration | 130 prefill | 230 the first two end | 330
    assert ended == [(230_000, "1.0"), (230_000, "1.1"), (330_000, "1.2")]


def test_a_prompt_that_several_share_fills_a_pass_once() -> None:
    """Four samples of one prompt and one other in passes of 22 tokens: one pass if shared, else three."""
    costs = IterationCosts(iteration_fs=100 * US, prefill_fs=7 * US, per_prefill_token_fs=US)
    for shares_prompts, num_passes in ((False, 3), (True, 1)):
        rules = EngineRules(
            max_num_seqs=8, kv_tokens=99, max_prefill_tokens=22, shares_prompts=shares_prompts
        )
        engine = Engine(costs, rules)
        ended = drive(engine, [(0, submit(*sequences(1, [(10, 1)] * 4 + [(12, 1)])))])
        assert engine.counters.num_prefills == num_passes
        assert ended[-1] == ((7 * num_passes + 4 * 10 + 12) * 1000, "1.4")


def test_a_sequence_that_can_never_fit_is_refused() -> None:
    """Nothing waits for ever: the message names the key to raise."""
    with pytest.raises(InputError, match="kv_tokens"):
        Engine(PLAIN, rules(8, 24)).submit(0, sequences(1, [(20, 5)]))


def test_costs_that_would_stop_the_clock_are_refused() -> None:
    """A free iteration could loop for ever."""
    with pytest.raises(ValueError, match="at least 1 fs"):
        IterationCosts(iteration_fs=0)


# --- properties ------------------------------------------------------------------------------------

femtoseconds = st.integers(0, 10**9)
costs_strategy = st.builds(
    IterationCosts,
    iteration_fs=st.integers(10**6, 10**9),
    per_sequence_fs=femtoseconds,
    per_sequence_beyond_knee_fs=femtoseconds,
    knee_sequences=st.integers(0, 6),
    per_kv_token_fs=st.integers(0, 10**8),
    adapters_fs=femtoseconds,
    per_adapter_fs=femtoseconds,
    prefill_fs=femtoseconds,
    per_prefill_token_fs=st.integers(0, 10**8),
    half_per_attended_token_fs=st.integers(0, 10**7),
)
rules_strategy = st.builds(
    EngineRules,
    max_num_seqs=st.integers(1, 8),
    kv_tokens=st.integers(50, 200),
    kv_rule=st.sampled_from(["reserve", "preempt"]),
    max_prefill_tokens=st.none() | st.integers(1, 60),
    shares_prompts=st.booleans(),
    prefill=st.sampled_from(["own-pass", "mixed"]),
    prefix_cache=st.sampled_from(["none", "prompts", "turns"]),
    block_tokens=st.integers(1, 4),
)
length = st.tuples(st.integers(1, 20), st.integers(1, 30))
submission = st.tuples(st.just("submit"), st.lists(length, min_size=1, max_size=6), st.sampled_from("abc"))
abortion = st.tuples(st.just("abort"), st.integers(0, 7), st.frozensets(st.integers(0, 5), min_size=1))
chore_ns = st.integers(0, 3_000)
pace = st.tuples(st.just("pace"), st.sampled_from([100, 160, 220]))
script_strategy = st.lists(
    st.tuples(st.integers(0, 20_000), st.one_of(submission, submission, abortion, chore_ns, pace)), max_size=8
)


def order_of(command: int, what: object, costs: IterationCosts) -> Callable[[AnyEngine, int], None]:
    """A fresh order, with sequences of its own, from plain values of the script."""
    match what:
        case ("pace", int(percent)):
            return lambda engine, at_ns: engine.set_costs(at_ns, costs.scaled(percent))
        case ("submit", list(lengths), str(adapter)):
            return submit(*sequences(command, lengths, adapter))
        case ("abort", int(whose), frozenset(trajectories)):
            return lambda engine, at_ns: engine.abort(at_ns, whose, trajectories, quiet(0))
        case int(duration_ns):
            return lambda engine, at_ns: engine.run_chore(at_ns, quiet(duration_ns))
    raise AssertionError(what)


def orders_of(script: list[tuple[int, object]], costs: IterationCosts) -> list[Order]:
    """The script as orders in time; a submission's command is its place in it."""
    in_time = sorted(script, key=lambda entry: entry[0])
    return [(at_ns, order_of(number, what, costs)) for number, (at_ns, what) in enumerate(in_time)]


@settings(max_examples=100, deadline=None)
@given(costs_strategy, rules_strategy, script_strategy)
def test_the_closed_form_equals_stepping_token_by_token(
    costs: IterationCosts, rules: EngineRules, script: list[tuple[int, object]]
) -> None:
    """Same ends at the same nanosecond in the same order, preemptions, aborts, chores, paces included."""
    engine = Engine(costs, rules)
    stepwise = StepwiseEngine(costs, rules)
    assert drive(engine, orders_of(script, costs)) == drive(stepwise, orders_of(script, costs))
    assert engine.num_preemptions == stepwise.num_preemptions


@example(
    IterationCosts(iteration_fs=1_000_000),
    EngineRules(max_num_seqs=2, kv_tokens=50, prefill="mixed", max_prefill_tokens=9),
    [(8, 20), (13, 15)],
)
@settings(max_examples=50, deadline=None)
@given(costs_strategy, rules_strategy, st.lists(length, min_size=1, max_size=20))
def test_every_sequence_ends_once_and_every_token_is_sampled_once(
    costs: IterationCosts, rules: EngineRules, lengths: list[tuple[int, int]]
) -> None:
    """Work is conserved: one end each, and a token per whole prefill or iteration that a sequence was in."""
    engine = Engine(costs, rules)
    num_unread = 0  # preempted before their context was read to its end, so without a token for it
    preempt = Batch._preempt_youngest

    def counted(batch: Batch) -> None:
        nonlocal num_unread
        num_unread += batch._partial is not None
        preempt(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "_preempt_youngest", counted)
        ended = drive(engine, [(0, submit(*sequences(1, lengths)))])
    assert sorted(name for _, name in ended) == sorted(f"1.{i}" for i in range(len(lengths)))
    num_joins = len(lengths) + engine.num_preemptions - num_unread
    assert sum(output for _, output in lengths) == engine.counters.sequences_sum + num_joins


def scaled(costs: IterationCosts, factor: int) -> IterationCosts:
    """Every cost times `factor`; the knee is a count and stays."""
    values = msgspec.structs.asdict(costs)
    return IterationCosts(**{k: v if k == "knee_sequences" else v * factor for k, v in values.items()})


@settings(max_examples=50, deadline=None)
@given(costs_strategy, st.lists(length, min_size=1, max_size=20))
def test_doubling_every_cost_doubles_the_makespan(
    costs: IterationCosts, lengths: list[tuple[int, int]]
) -> None:
    """Exactly: time is counted in whole femtoseconds (here made whole nanoseconds)."""
    in_ns = scaled(costs, 10**6)
    doubled = scaled(in_ns, 2)
    once = drive(Engine(in_ns, rules(4, 60)), [(0, submit(*sequences(1, lengths)))])
    twice = drive(Engine(doubled, rules(4, 60)), [(0, submit(*sequences(1, lengths)))])
    assert twice == [(2 * at, name) for at, name in once]


@given(st.integers(1, 10**13), st.integers(0, 10**10), st.integers(1, 10**18))
def test_the_landing_iteration_is_the_first_that_lasts_long_enough(
    first: int, growth: int, elapsed: int
) -> None:
    """The solved quadratic brackets the arrival: j iterations reach it and j − 1 do not."""
    j = iterations_until(first, growth, elapsed)
    assert run_fs(first, growth, j) >= elapsed
    assert j == 1 or run_fs(first, growth, j - 1) < elapsed


@pytest.mark.parametrize("name", PLAIN.__struct_fields__)
def test_each_cost_moves_some_end_alike_in_both_engines(name: str) -> None:
    """The comparison with the naive twin would notice a wrong term: no cost is without effect."""
    base = replace(PLAIN, per_sequence_beyond_knee_fs=US)
    changed = replace(base, **{name: 2 if name == "knee_sequences" else 3 * US + 7})

    def ends(kind: type[Engine] | type[StepwiseEngine], costs: IterationCosts) -> Ended:
        return drive(kind(costs, rules(8, 99)), [(0, submit(*sequences(1, [(4, 6), (4, 3), (2, 9)])))])

    assert ends(Engine, changed) == ends(StepwiseEngine, changed) != ends(Engine, base)
