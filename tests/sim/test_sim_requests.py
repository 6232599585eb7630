"""Requests served an iteration at a time: the engine's own ends, and what else a server would log."""

from __future__ import annotations

import random

import msgspec
import pytest

from sim.costs import FS_PER_NS, IterationCosts, to_fs
from sim.engine import Engine
from sim.requests import BASE, Request, serve
from sim.rules import EngineRules
from sim.sequences import Sequence

COSTS = IterationCosts(
    iteration_fs=to_fs(10e-3),
    per_sequence_fs=to_fs(30e-6),
    per_kv_token_fs=to_fs(80e-9),
    per_prefill_token_fs=to_fs(45e-6),
    half_per_attended_token_fs=to_fs(0.8e-9),
)
RULES = EngineRules(max_num_seqs=8, kv_tokens=100_000, prefill="mixed", max_prefill_tokens=256)
MS = 1_000_000


def made_up(seed: int, number: int = 60, rate_per_s: float = 20.0, longest: int = 150) -> list[Request]:
    """Poisson arrivals of short and long prompts and answers."""
    rng = random.Random(seed)
    now_s, requests = 0.0, []
    for _ in range(number):
        now_s += rng.expovariate(rate_per_s)
        requests.append(
            Request(
                arrival_ns=round(now_s * 1e9),
                prompt_tokens=rng.randint(1, 600),
                output_tokens=rng.choice([1, 2, rng.randint(3, longest)]),
            )
        )
    return requests


def ends_in_engine(requests: list[Request], rules: EngineRules) -> list[int]:
    """When the simulator's engine ends each, in whole nanoseconds rounded up."""
    engine, ends = Engine(COSTS, rules), [0] * len(requests)

    def carry_on(until_ns: int | None) -> None:
        while engine.wake_ns is not None and (until_ns is None or engine.wake_ns <= until_ns):
            wake_ns = engine.wake_ns
            for ended in engine.advance(wake_ns):
                assert isinstance(ended, Sequence)
                ends[ended.trajectory] = wake_ns
        if until_ns is not None:
            assert not engine.advance(until_ns)

    for number, request in enumerate(requests):
        carry_on(request.arrival_ns)
        sequence = Sequence(
            command=0,
            trajectory=number,
            adapter=BASE,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            limit_tokens=request.output_tokens,
        )
        engine.submit(request.arrival_ns, [sequence])
    carry_on(None)
    return ends


@pytest.mark.parametrize("kv_tokens", [100_000, 1_200])
@pytest.mark.parametrize("seed", range(4))
def test_requests_end_when_the_engine_ends_them(seed: int, kv_tokens: int) -> None:
    """To the nanosecond, with seats and KV short and sequences preempted too."""
    requests = made_up(seed)
    rules = msgspec.structs.replace(RULES, kv_tokens=kv_tokens)
    served = serve(requests, COSTS, rules)
    assert [round(last * 1e9) for last in served.last_s] == pytest.approx(
        ends_in_engine(requests, rules), abs=2
    )


def test_what_is_logged_adds_up() -> None:
    """Every token of prompts and answers is counted once, and the last iteration leaves nobody."""
    requests = made_up(5)
    served = serve(requests, COSTS, RULES)
    iterations = served.iterations
    assert sum(one.prompt_tokens for one in iterations) == sum(r.prompt_tokens for r in requests)
    assert sum(one.prefill_tokens for one in iterations) == sum(r.prompt_tokens for r in requests)
    assert sum(one.generated_tokens for one in iterations) == sum(r.output_tokens for r in requests)
    assert max(one.running for one in iterations) == RULES.max_num_seqs
    assert max(one.waiting for one in iterations) > 0
    assert (iterations[-1].running, iterations[-1].waiting) == (0, 0)
    pairs = sum(r.prompt_tokens**2 / 2 for r in requests)
    assert sum(one.prefill_pairs for one in iterations) == pytest.approx(pairs)


def test_first_tokens_by_hand() -> None:
    """A prompt of two chunks has its first token with the second; one that came meanwhile follows."""
    requests = [
        Request(arrival_ns=0, prompt_tokens=400, output_tokens=3),
        Request(arrival_ns=MS, prompt_tokens=10, output_tokens=1),
    ]
    costs = IterationCosts(iteration_fs=10 * MS * FS_PER_NS)
    served = serve(requests, costs, RULES)
    assert served.first_s == pytest.approx([0.020, 0.020])
    assert served.last_s == pytest.approx([0.040, 0.020])
    assert served.ttft_s() == pytest.approx([0.020, 0.019])
    assert served.tpot_s() == pytest.approx([0.010])
    assert served.latency_s() == pytest.approx([0.040, 0.019])


def test_an_engine_that_plans_ahead_lets_newcomers_wait_for_one_more_iteration() -> None:
    """The next iteration was decided on when this one began; an idle engine begins at once."""
    requests = [
        Request(arrival_ns=0, prompt_tokens=10, output_tokens=5),
        Request(arrival_ns=MS, prompt_tokens=10, output_tokens=1),
        Request(arrival_ns=500 * MS, prompt_tokens=10, output_tokens=1),
    ]
    costs = IterationCosts(iteration_fs=10 * MS * FS_PER_NS)
    assert serve(requests, costs, RULES).first_s == pytest.approx([0.010, 0.020, 0.510])
    ahead = serve(requests, costs, RULES, plans_ahead=True)
    assert ahead.first_s == pytest.approx([0.010, 0.030, 0.510])
