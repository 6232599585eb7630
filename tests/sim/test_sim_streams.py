"""Random streams and the workload drawn from them."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from marlaas.spec import (
    Distribution,
    Empirical,
    Fixed,
    Gamma,
    Lognormal,
    Mixture,
    TaskSpec,
    Uniform,
    Workload,
)
from sim.streams import Streams, sample, stream
from sim.workload import BatchPlan

TASK = TaskSpec(
    name="find",
    environment="library",
    steps=3,
    prompts=4,
    samples=3,
    max_turns=3,
    max_prompt_tokens=50,
    max_new_tokens=30,
    max_observation_tokens=9,
)
WORKLOAD = Workload(
    prompt_tokens=Uniform(low=5, high=60),
    output_tokens=Lognormal(median=12, sigma=1.5),
    turns=Empirical(values=(1, 2, 3, 7)),
    observation_tokens=Gamma(mean=6),
)


def plan(task: TaskSpec = TASK, step: int = 1, seed: int = 5, workload: Workload = WORKLOAD) -> BatchPlan:
    """A plan with exponential latencies."""
    return BatchPlan(Streams(seed), task, step, workload, Gamma(mean=0.5))


def as_lists(of: BatchPlan) -> list[object]:
    """Everything in a plan."""
    return [getattr(of, name) for name in BatchPlan.__slots__]


@pytest.mark.parametrize(
    ("distribution", "mean", "deviation"),
    [
        (Fixed(value=3.0), 3.0, 0.0),
        (Uniform(low=1.0, high=5.0), 3.0, 4 / math.sqrt(12)),
        (Lognormal(median=2.0, sigma=0.5), 2.0 * math.exp(0.125), 1.2),
        (Gamma(mean=4.0, shape=4.0), 4.0, 2.0),
        (Empirical(values=(1.0, 2.0, 6.0)), 3.0, math.sqrt(14 / 3)),
        (Mixture(weights=(3, 1), parts=(Fixed(value=1), Uniform(low=8, high=10))), 3.0, 3.5),
    ],
)
def test_every_distribution_has_the_mean_it_promises(
    distribution: Distribution, mean: float, deviation: float
) -> None:
    """The mean of 20,000 draws lies within five standard errors."""
    drawn = sample(distribution, stream(1, "check"), (20_000,))
    assert abs(drawn.mean() - mean) <= 5 * deviation / math.sqrt(20_000)


def test_a_lognormal_is_cut_at_its_cap() -> None:
    """No draw exceeds the cap."""
    drawn = sample(Lognormal(median=2.0, sigma=2.0, cap=5.0), stream(1), (1000,))
    assert drawn.max() == 5.0


def test_streams_of_a_seed_are_the_same_however_they_are_made() -> None:
    """One after another from one generator, whatever was left of the one before, or each from its own."""
    streams = Streams(7)
    for names in (("a", 1), ("b", 2), ("a", 1)):
        shared, own = streams.of(*names), stream(7, *names)
        assert (
            shared.integers(9, size=3, dtype=np.uint32).tolist()
            == own.integers(9, size=3, dtype=np.uint32).tolist()
        )
        assert shared.random(5).tolist() == own.random(5).tolist()


def test_a_plan_depends_on_its_names_and_numbers_alone() -> None:
    """The same again whatever was drawn before; another seed, task or step gives another."""
    first = as_lists(plan())
    plan(step=2)
    assert as_lists(plan()) == first
    renamed = TaskSpec(**{name: getattr(TASK, name) for name in TASK.__struct_fields__} | {"name": "other"})
    for other in (plan(step=2), plan(seed=6), plan(renamed)):
        assert as_lists(other) != first


def test_one_purpose_does_not_disturb_another() -> None:
    """Other latencies leave the lengths as they were, and more turns leave the first ones."""
    longer = TaskSpec(**{name: getattr(TASK, name) for name in TASK.__struct_fields__} | {"max_turns": 5})
    assert BatchPlan(Streams(5), TASK, 1, WORKLOAD, Fixed(value=1)).outputs == plan().outputs
    assert plan(longer).outputs[:3] == plan().outputs
    assert plan(longer).environment_ns[:3] == plan().environment_ns


def test_lengths_are_whole_tokens_within_the_tasks_limits() -> None:
    """At least one token where there must be one, at most what the task allows."""
    one = plan()
    assert {type(tokens) for row in one.outputs for tokens in row} == {int}
    assert min(map(min, one.outputs)) >= 1
    assert max(map(max, one.outputs)) == 30
    assert max(one.contexts[0]) <= 50
    assert 0 <= min(map(min, one.observations)) <= max(map(max, one.observations)) <= 9
    assert set(one.turns) <= {1, 2, 3}


def test_contexts_add_up_turn_by_turn() -> None:
    """Next context = context + output + observation; the length ends with the last turn's output."""
    one = plan()
    for i in range(TASK.num_trajectories):
        for turn in range(2):
            grown = one.contexts[turn][i] + one.outputs[turn][i] + one.observations[turn][i]
            assert one.contexts[turn + 1][i] == grown
        last = one.turns[i] - 1
        assert one.lengths[i] == one.contexts[last][i] + one.outputs[last][i]


def test_samples_of_a_prompt_share_its_length() -> None:
    """Trajectories are numbered prompt × samples + sample."""
    first = np.reshape(plan().contexts[0], (TASK.prompts, TASK.samples))
    assert (first == first[:, :1]).all()
    assert len(set(first[:, 0].tolist())) > 1


def test_a_measured_overhead_is_added_to_every_latency() -> None:
    """A tenth of a second more each, to the nanosecond."""
    with_overhead = BatchPlan(Streams(5), TASK, 1, WORKLOAD, Gamma(mean=0.5), 0.1)
    assert np.allclose(
        np.array(with_overhead.environment_ns) - np.array(plan().environment_ns), 10**8, rtol=0, atol=1
    )


def test_a_workload_with_its_defaults_is_written_as_it_will_be_read() -> None:
    """A default of 1 in a field of fractions would be read back as 1.0, and a trace's header refused."""
    as_written = msgspec.json.encode(Workload(prompt_tokens=Fixed(value=5.0), output_tokens=Fixed(value=6.0)))
    assert msgspec.json.encode(msgspec.json.decode(as_written, type=Workload)) == as_written
