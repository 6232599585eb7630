"""The simulator, with its real scheduler, against queueing theory.

Seeds are fixed, intervals are of 99 % and must be narrow enough to fail; the slow tests narrow them further.
"""

from __future__ import annotations

from math import factorial

import numpy as np
import pytest
from msgspec.structs import replace
from queueing_runs import (
    Floats,
    Interval,
    Visits,
    at_environment,
    at_lanes,
    batch_means,
    closed,
    closed_record,
    controlled,
    exponential,
    interval,
)
from small_runs import PROFILE, Record, experiment

from marlaas.commands import Publish, Train
from marlaas.events import AdapterPublished, TrainingFinished, TurnGenerated
from marlaas.spec import (
    Distribution,
    Fixed,
    Gamma,
    Kill,
    Mixture,
    SumsEnvironment,
    TaskSpec,
    Uniform,
    Workload,
)
from sim import simulate
from sim.profile import Variation

# name, distribution, first and second moment
SERVICES: dict[str, tuple[Distribution, float, float]] = {
    "exponential": (exponential(1.0), 1.0, 2.0),
    "fixed": (Fixed(value=1.0), 1.0, 1.0),
    "gamma of shape 4": (Gamma(mean=1.0, shape=4.0), 1.0, 1.25),
    "a tail of one in ten": (
        Mixture(weights=(9.0, 1.0), parts=(exponential(0.5), exponential(5.5))),
        1.0,
        2 * (0.9 * 0.5**2 + 0.1 * 5.5**2),
    ),
}


def pollaczek_khinchine(rate: float, mean: float, square: float) -> float:
    """Mean wait in an M/G/1 queue, in seconds."""
    return rate * square / (2 * (1 - rate * mean))


def erlang_wait(rate: float, mean: float, servers: int) -> float:
    """Mean wait in an M/M/c queue, in seconds."""
    load = rate * mean
    tail = load**servers / factorial(servers) / (1 - load / servers)
    busy = tail / (sum(load**k / factorial(k) for k in range(servers)) + tail)
    return busy * mean / (servers - load)


def repair(tasks: int, think_s: float, service_s: float) -> float:
    """Steps per second of N tasks that think and are served by one lane, both exponential."""
    terms = [factorial(tasks) / factorial(tasks - k) * (service_s / think_s) ** k for k in range(tasks + 1)]
    return (1 - 1 / sum(terms)) / service_s


def cyclic(tasks: int, first_s: float, second_s: float) -> float:
    """Steps per second of N tasks that go round two exponential single servers."""
    ratio = second_s / first_s
    none_at_second = 1 / sum(ratio**k for k in range(tasks + 1))
    return (1 - none_at_second) / second_s


def test_the_formulas_give_the_known_values() -> None:
    """Machine repair with Z = 10 s and S = 1 s, and the cases that formulas share."""
    assert [round(repair(n, 10.0, 1.0), 4) for n in (4, 8, 16)] == [0.3533, 0.6617, 0.9777]
    assert erlang_wait(0.4, 1.0, 1) == pytest.approx(pollaczek_khinchine(0.4, 1.0, 2.0))
    assert cyclic(1, 2.0, 1.0) == pytest.approx(1 / 3)
    assert cyclic(200, 2.0, 1.0) == pytest.approx(1 / 2)


# --- open queues -----------------------------------------------------------------------------------------


def stay_of(visits: Visits, rate: float, mean: float, square: float) -> Interval:
    """The interval of the mean stay, controlled by arrivals and services, whose moments are known."""
    gaps = np.diff(visits.arrived, prepend=0.0)
    services = visits.services
    return controlled(visits.stays, [(gaps, 1 / rate), (services, mean), (services**2, square)])


def followed(visits: Visits, servers: int) -> Floats:
    """When each begins by Kiefer and Wolfowitz: first come, first served by whoever is free first."""
    free = np.zeros(servers)
    began = np.zeros(len(visits.arrived))
    for i, (arrived, service) in enumerate(zip(visits.arrived, visits.services, strict=True)):
        first = int(free.argmin())
        began[i] = max(arrived, free[first])
        free[first] = began[i] + service
    return began


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("station", [at_environment, at_lanes])
def test_every_single_wait_is_that_of_first_come_first_served(station, servers: int) -> None:  # type: ignore[no-untyped-def]
    """Lindley's recursion, with c servers that of Kiefer and Wolfowitz, to a few nanoseconds."""
    visits = station(exponential(1.0), rate=0.8 * servers, servers=servers, num=600, seed=3)
    assert (visits.waits > 0.1).mean() > 0.2
    assert np.abs(followed(visits, servers) - visits.began).max() < 1e-5


def require_pollaczek_khinchine(name: str, *, num: int, seed: int, within: float) -> None:
    """M/G/1 at an environment, load 0.4: the mean stay is the formula's, arrivals and services as given."""
    distribution, mean, square = SERVICES[name]
    visits = at_environment(distribution, rate=0.4, servers=1, num=num, seed=seed)
    stay = stay_of(visits, 0.4, mean, square)
    assert stay.holds(mean + pollaczek_khinchine(0.4, mean, square)), stay
    assert stay.relative < within
    assert batch_means(np.diff(visits.arrived)).holds(1 / 0.4)
    services = batch_means(visits.services)
    assert abs(services.mean - mean) <= max(services.half_width, 1e-6)


def test_the_mean_stay_at_an_environment_is_pollaczek_and_khinchines() -> None:
    """Service of shape 4: mean plus rate × second moment / 2 (1 − load)."""
    require_pollaczek_khinchine("gamma of shape 4", num=25_000, seed=1, within=0.02)


def test_tasks_and_a_lane_are_machines_and_their_repair() -> None:
    """Rollout and environment take 10 s, an update 1 s: the rate and the response N/X − Z."""
    found = closed(tasks=8, steps=400, rollout=exponential(10.0), training=exponential(1.0), seed=2)
    assert found.rate.holds(0.6617), found
    assert found.rate.relative < 0.04
    assert found.response_s.holds(8 / 0.6617 - 10.0), found


@pytest.mark.parametrize(("tasks", "rollout_s"), [(3, 10.0), (11, 10.0), (20, 10.0), (5, 0.5)])
def test_without_chance_n_tasks_reach_the_bound_exactly(tasks: int, rollout_s: float) -> None:
    """Fixed times: min(1/T, N/(R + T)), up to filling and emptying, to the nanosecond."""
    steps, train_s = 12, 1.0
    record = closed_record(
        tasks=tasks, steps=steps, rollout=Fixed(value=rollout_s), training=Fixed(value=train_s), seed=0
    )
    rollout_ns = round(rollout_s * 1e9)
    cycle_ns = rollout_ns + 10**9
    crowded = rollout_ns + tasks * steps * 10**9
    expected = crowded if tasks * 10**9 >= cycle_ns else steps * cycle_ns + (tasks - 1) * 10**9
    assert record.events(AdapterPublished)[-1].at == expected


def test_tasks_go_round_two_servers_as_in_a_closed_cyclic_queue() -> None:
    """Three tasks, one environment place of 1.5 s and one lane of 1 s, both exponential."""
    found = closed(tasks=3, steps=800, rollout=exponential(1.5), training=exponential(1.0), seed=4, places=1)
    assert found.rate.holds(cyclic(3, 1.5, 1.0)), found
    assert found.rate.relative < 0.06


# --- the end of a batch ----------------------------------------------------------------------------------


def batch_of(workload: Workload, *, size: int, steps: int) -> Record:
    """One task alone: `steps` batches of `size` trajectories."""
    task = TaskSpec(
        name="t",
        environment="e",
        steps=steps,
        prompts=size,
        samples=1,
        max_new_tokens=40,
        workload=workload,
        limits=replace(experiment().limits, min_group=1, trajectory_s=1e6, turn_s=1e6),
    )
    environments = {"e": SumsEnvironment(concurrency=size, timeout_s=1e6)}
    record = Record()
    simulate(experiment(tasks=(task,), environments=environments, seed=6), PROFILE, record)
    return record


def rollouts_s(record: Record) -> Floats:
    """From the first end of a turn in each batch to its update's begin, in seconds."""
    first: dict[int, int] = {}
    orders: dict[int, int] = {}
    spans: list[float] = []
    step = 0
    for event, commands in record.records:
        if isinstance(event, TurnGenerated):
            first.setdefault(event.version, event.at)
        for command in commands:
            if isinstance(command, Train):
                orders[command.step] = event.at
                spans.append((event.at - first[command.step]) / 1e9)
                step += 1
    return np.asarray(spans)


def test_a_batch_ends_with_its_slowest_of_n() -> None:
    """Equal turns, exponential verdicts: the mean of the maximum is the mean times 1 + 1/2 + ... + 1/n."""
    workload = Workload(
        prompt_tokens=Fixed(value=5.0), output_tokens=Fixed(value=5.0), environment_s=exponential(2.0)
    )
    found = interval(rollouts_s(batch_of(workload, size=8, steps=700)))
    assert found.holds(2.0 * sum(1 / k for k in range(1, 9))), found
    assert found.relative < 0.05


def test_a_batch_of_answers_ends_with_the_longest() -> None:
    """Lengths even on 1 ... 40: P(max ≤ k) = (k/40)^n; an iteration a token."""
    size, most = 6, 40
    workload = Workload(
        prompt_tokens=Fixed(value=5.0),
        output_tokens=Uniform(low=0.5, high=most + 0.5),
        environment_s=Fixed(value=0.0),
    )
    record = batch_of(workload, size=size, steps=400)
    longest: dict[int, int] = {}
    for event in record.events(TurnGenerated):
        longest[event.version] = max(longest.get(event.version, 0), event.output_tokens)
    found = interval([float(n) for n in longest.values()])
    assert found.holds(sum(1 - ((k - 1) / most) ** size for k in range(1, most + 1))), found
    assert found.relative < 0.02
    ends = {event.version: event.at for event in record.events(TurnGenerated)}
    begins = {c.step: e.at for e, cs in record.records for c in cs if isinstance(c, Train)}
    assert begins == ends, "a batch is complete with its longest answer"


# --- irregular training ----------------------------------------------------------------------------------


def lane_times(system: str, **changes: object) -> dict[tuple[str, str, int], float]:
    """Seconds of every update and publish that ended, by (kind, task, step)."""
    irregular = replace(
        PROFILE,
        variation=Variation(
            training=exponential(1.0),
            publish=Mixture(weights=(9.0, 1.0), parts=(Fixed(value=1.0), exponential(9.0))),
        ),
    )
    record = Record()
    assert set(simulate(experiment(system, **changes), irregular, record).values()) == {"done"}
    begun: dict[int, tuple[int, tuple[str, str, int]]] = {}
    found: dict[tuple[str, str, int], float] = {}
    for event, commands in record.records:
        if isinstance(event, TrainingFinished | AdapterPublished):
            at, key = begun[event.command]
            found[key] = (event.at - at) / 1e9
        for command in commands:
            if isinstance(command, Train):
                begun[command.id] = event.at, ("train", command.task, command.step)
            elif isinstance(command, Publish):
                begun[command.id] = event.at, ("publish", command.task, command.version)
    return found


def test_irregular_training_is_the_same_for_every_system_and_every_retry() -> None:
    """Factors are drawn by (task, step): two systems, and a lane that dies, meet the same times."""
    alone, together = lane_times("single"), lane_times("marlaas")
    assert alone == together
    assert len(set(together.values())) > 7, "they differ from step to step"
    assert lane_times("marlaas", operations=(Kill(at_s=1.0, worker="lane-0"),)) == together


# --- the same, narrower ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVICES)
def test_pollaczek_khinchine_to_a_few_percent(name: str) -> None:
    """M/G/1 at an environment, load 0.4: exponential (so M/M/1), fixed, regular and heavy-tailed service."""
    require_pollaczek_khinchine(name, num=100_000, seed=7, within=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("servers", [2, 5])
def test_erlangs_formula_at_an_environment(servers: int) -> None:
    """M/M/c at a load of 0.6 per server."""
    rate = 0.6 * servers
    visits = at_environment(exponential(1.0), rate=rate, servers=servers, num=100_000, seed=8)
    stay = stay_of(visits, rate, 1.0, 2.0)
    assert stay.holds(1.0 + erlang_wait(rate, 1.0, servers)), stay
    assert stay.relative < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 3])
def test_erlangs_formula_at_lanes(servers: int) -> None:
    """M/M/1 and M/M/3 whose servers are lanes and whose customers are tasks."""
    rate = 0.5 * servers
    visits = at_lanes(exponential(1.0), rate=rate, servers=servers, num=20_000, seed=9)
    stay = stay_of(visits, rate, 1.0, 2.0)
    assert stay.holds(1.0 + erlang_wait(rate, 1.0, servers)), stay
    assert stay.relative < 0.035


@pytest.mark.slow
@pytest.mark.parametrize(("tasks", "rate"), [(4, 0.3533), (8, 0.6617), (16, 0.9777)])
def test_machine_repair_within_two_percent(tasks: int, rate: float) -> None:
    """The rate and the response of the closed form, eight times as long."""
    found = closed(
        tasks=tasks, steps=24_000 // tasks, rollout=exponential(10.0), training=exponential(1.0), seed=10
    )
    assert found.rate.holds(rate), found
    assert found.rate.relative < 0.02
    assert found.response_s.holds(tasks / repair(tasks, 10.0, 1.0) - 10.0), found
