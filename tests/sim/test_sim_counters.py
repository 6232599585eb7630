"""Costs fitted from an engine's one-second counters: those of a made-up run come back from them alone."""

from __future__ import annotations

from statistics import fmean

import msgspec
import pytest
from test_sim_requests import made_up

from sim.costs import FS_PER_S
from sim.counters import COLUMNS, CounterClock, CounterFit, Second, base_costs, fit_counters
from sim.fitting import Trust, fit
from sim.profile import Quantity, ReplicaProfile
from sim.requests import Served, serve
from sim.rules import EngineRules

RULES = EngineRules(max_num_seqs=48, kv_tokens=200_000, prefill="mixed", max_prefill_tokens=512)
REQUESTS = made_up(3, number=900, rate_per_s=40.0, longest=300)
TRUE = {
    "iteration_s": 12e-3,
    "per_sequence_s": 0.15e-3,
    "per_kv_token_s": 0.8e-6,
    "per_prefill_token_s": 60e-6,
    "per_attended_token_s": 4e-9,
}


def profile(**factors: float) -> ReplicaProfile:
    """The true costs times factors, with an interval of a half to twice of that."""
    values = {name: value * factors.get(name, 1.0) for name, value in TRUE.items()}
    costs = {
        name: Quantity(value=value, source="assumed", interval=(value / 2, 2 * value))
        for name, value in values.items()
    }
    return ReplicaProfile(**costs)


def counted(served: Served) -> list[Second]:
    """What a logger would have counted each second."""
    seconds = []
    for end_s in range(1, served.iterations[-1].end_fs // FS_PER_S + 2):
        within = [one for one in served.iterations if end_s - 1 <= one.end_fs / FS_PER_S < end_s]
        seconds.append(
            Second(
                prompt_tokens=sum(one.prompt_tokens for one in within),
                generated_tokens=sum(one.generated_tokens for one in within),
                running=within[-1].running if within else 0,
                waiting=within[-1].waiting if within else 0,
            )
        )
    return seconds


def fitted_from(prior: ReplicaProfile, share: float = 0.5) -> tuple[Served, CounterFit]:
    """The made-up run and a fit of the first seconds of it."""
    run = serve(REQUESTS, base_costs(profile()), RULES)
    seconds = counted(run)
    return run, fit_counters(REQUESTS, seconds[: round(share * len(seconds))], RULES, prior)


def test_half_of_the_counters_of_a_made_up_run_predict_the_whole() -> None:
    """From a prior that is 40 % off either way, means come within 2 %; what is fitted says so."""
    prior = profile(iteration_s=1.4, per_kv_token_s=0.6, per_prefill_token_s=1.4)
    run, half = fitted_from(prior)
    predicted = serve(REQUESTS, base_costs(half.replica), RULES)
    unfitted = serve(REQUESTS, base_costs(prior), RULES)
    assert abs(fmean(unfitted.latency_s()) / fmean(run.latency_s()) - 1) > 0.05
    for ours, theirs in (
        (predicted.ttft_s(), run.ttft_s()),
        (predicted.tpot_s(), run.tpot_s()),
        (predicted.latency_s(), run.latency_s()),
    ):
        assert fmean(ours) == pytest.approx(fmean(theirs), rel=0.02)
    assert half.fit.held_out_error < 0.05
    assert {getattr(half.replica, name).source for name in COLUMNS} == {"calibrated"}
    assert "rows of counted seconds, held-out error" in half.replica.iteration_s.note


def test_retracing_with_the_true_costs_finds_every_iteration() -> None:
    """Where counters and costs agree, the clock of the counters changes nothing."""
    run = serve(REQUESTS, base_costs(profile()), RULES)
    totals = [0]
    for second in counted(run):
        totals.append(totals[-1] + second.prompt_tokens + second.generated_tokens)
    retraced = serve(REQUESTS, base_costs(profile()), RULES, CounterClock(totals[1:]))
    assert retraced.iterations == run.iterations


def test_costs_that_the_counters_contradict_are_held_to_their_clock() -> None:
    """At twice the costs, retraced iterations still end in the seconds that counted them."""
    run = serve(REQUESTS, base_costs(profile()), RULES)
    totals, total = [], 0
    for second in counted(run):
        total += second.prompt_tokens + second.generated_tokens
        totals.append(total)
    slow = profile(**dict.fromkeys(TRUE, 2.0))
    retraced = serve(REQUESTS, base_costs(slow), RULES, CounterClock(totals))
    assert fmean(retraced.last_s) == pytest.approx(fmean(run.last_s), rel=0.03)
    assert fmean(serve(REQUESTS, base_costs(slow), RULES).last_s) > 1.5 * fmean(run.last_s)


def test_too_few_seconds_are_refused() -> None:
    """A fit needs a row."""
    with pytest.raises(ValueError, match="30 iterations"):
        fit_counters(REQUESTS, [], RULES, profile())


def test_priors_count_by_how_far_off_they_may_be() -> None:
    """Of two columns that points cannot tell apart, the one that is less sure gives way."""
    columns = {"sure": [1.0, 1.0, 1.0], "unsure": [2.0, 2.0, 2.0]}
    trust = Trust(noise=0.01, spreads={"sure": 0.01, "unsure": 1.0})
    values = fit(columns, [5.0, 5.0, 5.0], {"sure": 1.0, "unsure": 1.0}, trust).values
    assert values["sure"] == pytest.approx(1.0, rel=0.01)
    assert values["unsure"] == pytest.approx(2.0, rel=0.01)


def test_only_the_base_model_is_served() -> None:
    """A prior's cost of adapters is kept, and not charged where there are none."""
    prior = msgspec.structs.replace(profile(), adapters_s=Quantity(value=5e-3, source="assumed"))
    _, half = fitted_from(prior)
    assert half.replica.adapters_s == prior.adapters_s
    assert base_costs(half.replica).adapters_fs == 0
