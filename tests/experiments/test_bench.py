"""The serving workload and the benchmarks measure what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.bench import core, growth, serving
from marlaas.commands import Generate
from marlaas.errors import InputError
from marlaas.events import TurnGenerated
from marlaas.spec import Fixed
from sim.serving import arrival_times_ns
from traces.metrics import compute
from traces.reader import read

FOLDER = Path(serving.__file__).parent


@pytest.fixture(scope="module")
def load() -> serving.Load:
    """The shipped workload."""
    return serving.load_serving(serving.SERVING)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_yaml_of_the_benchmarks_loads(path: Path) -> None:
    """They are serving workloads; the shipped one is that which others are timed on."""
    requests = serving.load_serving(path).requests
    assert (requests.count, requests.per_s) == (1000, 4)
    assert (requests.prompt_tokens, requests.output_tokens) == (Fixed(value=512), Fixed(value=128))


def test_a_mistake_in_a_serving_workload_is_named(tmp_path: Path) -> None:
    """With its path and the nearest key."""
    path = tmp_path / "mine.yaml"
    path.write_text(serving.SERVING.read_text().replace("per_s:", "per_sec:"))
    with pytest.raises(InputError, match=r"requests\.per_sec.*per_s"):
        serving.load_serving(path)


def test_every_request_is_ordered_when_it_arrives_and_answered_once(
    load: serving.Load, tmp_path: Path
) -> None:
    """One turn each, in order of arrival; none sooner than its tokens take alone, each in the latencies."""
    metrics = serving.serve_into(load, tmp_path / "trace.jsonl")
    records = read(tmp_path / "trace.jsonl").records
    orders = [(event.at, c) for event, commands in records for c in commands if isinstance(c, Generate)]
    answers = [event for event, _ in records if isinstance(event, TurnGenerated)]
    assert [c.trajectories for _, c in orders] == [(i,) for i in range(1000)]
    assert sorted(event.trajectory for event in answers) == list(range(1000))
    assert {(event.prompt_tokens, event.output_tokens) for event in answers} == {(512, 128)}
    times = arrival_times_ns("poisson", 4, 1000, load.experiment.seed)
    assert [at - orders[0][0] for at, _ in orders] == [at - times[0] for at in times]
    assert metrics["requests"] == 1000
    alone_s = 128 * load.profile.replica.iteration_s.value
    assert alone_s < metrics["request_latency_s.p50"] <= metrics["request_latency_s.p99"]
    assert metrics["in_flight.max"] > 1
    mean_from_littles_law = metrics["in_flight.mean"] * metrics["makespan_s"] / 1000
    assert metrics["request_latency_s.mean"] == pytest.approx(mean_from_littles_law, rel=1e-9)
    assert compute(tmp_path / "trace.jsonl")["makespan_s"] == metrics["makespan_s"]


def test_a_serving_run_is_the_same_every_time(load: serving.Load, tmp_path: Path) -> None:
    """To the byte."""
    for name in ("a", "b"):
        serving.serve_into(load, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_arrivals_come_at_the_rate_asked_for() -> None:
    """Evenly, or at random with exponential gaps of that mean."""
    assert arrival_times_ns("fixed", 4, 4, 0) == [250_000_000 * (i + 1) for i in range(4)]
    times = arrival_times_ns("poisson", 4, 10_000, 0)
    assert times == sorted(times)
    assert times[-1] / 1e9 / 10_000 == pytest.approx(0.25, rel=0.05)


def test_growth_counts_what_it_simulates() -> None:
    """The trajectories of every task, and some time."""
    found = list(growth.growth((2, 3)))
    assert [(g.num_tasks, g.num_trajectories) for g in found] == [(2, 64), (3, 96)]
    assert all(g.us_per_trajectory > 0 for g in found)


def test_rates_are_measured_over_the_same_events(tmp_path: Path) -> None:
    """Every figure is there and positive, and the trace that was timed is whole."""
    experiment = core.cluster(2, prompts=2)
    run = core.record(experiment)
    assert run.num_trajectories == 32
    found = core.rates(experiment, run, tmp_path)
    assert found.keys() >= {core.BARE, core.TRAJECTORIES, "core events", "simulated events"}
    assert min(found.values()) > 0
    assert [event for event, _ in read(tmp_path / "trace.jsonl").records] == run.events


@pytest.mark.slow
def test_serving_is_as_fast_as_promised(load: serving.Load, tmp_path: Path) -> None:
    """20,000 requests per CPU-second with the trace off, 5,000 with trace and all metrics: best of 15."""
    without = min(core.cpu_s(lambda: serving.simulate_requests(load, core.Blank())) for _ in range(15))
    whole = []
    for i in range(15):
        path = tmp_path / f"{i}.jsonl"
        whole.append(core.cpu_s(lambda to=path: serving.serve_into(load, to)))  # type: ignore[misc]
    assert load.requests.count / without >= 20_000
    assert load.requests.count / min(whole) >= 5_000
