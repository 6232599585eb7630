"""The serving workload: how many requests per CPU-second one simulated replica answers.

A request is one turn of one trajectory, ordered when it arrives: two events and two orders of the runtime's
loop, the clock, and the simulated replica with all that its engine models (admission, prefill, KV pool). No
scheduler decides and no lane trains, since those whose figures stand beside these simulate an engine alone; a
task for every request would mostly time the training of 1,000 adapters. See `sim.serving`.

What is timed, in CPU-seconds of this process, imports and reading the YAML left out: with the trace off
the simulation, lengths and arrivals drawn included; with the trace on also encoding, sealing and writing it,
reading it back with every check, all the metrics of a run and the latency of every request.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from experiments import costs
from experiments.load import load_profile, read_text
from experiments.schema import Misfit, convert
from experiments.yaml_strict import parse, render
from marlaas.errors import InputError
from marlaas.runtime import Recorder
from marlaas.spec import (
    ClusterSpec,
    Count,
    Distribution,
    Experiment,
    Fixed,
    Name,
    Positive,
    ReplicasSpec,
    ReverseEnvironment,
    Spec,
    TaskSpec,
    Workload,
)
from sim.profile import Profile
from sim.serving import Arrivals, arrival_times_ns, serve
from traces.metrics import compute, quantile
from traces.metrics.spans import Span
from traces.schema import make_header
from traces.writer import TraceWriter

SERVING = Path(__file__).with_name("serving.yaml")


class Requests(Spec, frozen=True, kw_only=True):
    """`count` requests, `per_s` a second on average, of so many tokens in and out."""

    count: Count = 1000
    per_s: Positive = 4.0
    arrivals: Arrivals = "poisson"
    prompt_tokens: Distribution = Fixed(value=512)
    output_tokens: Distribution = Fixed(value=128)
    max_prompt_tokens: Count = 1024
    max_new_tokens: Count = 1024


class Serving(Spec, frozen=True, kw_only=True):
    """One replica and what is asked of it; its KV pool is what the profile says fits."""

    name: Name
    profile: str
    seed: int = 0
    max_num_seqs: Count = 256
    requests: Requests = Requests()


class Load(msgspec.Struct, frozen=True):
    """A serving workload made ready: the experiment that stands in its trace, its costs, its requests."""

    experiment: Experiment
    profile: Profile
    requests: Requests


def load_serving(path: Path) -> Load:
    """Read and check a serving YAML; raises `InputError`."""
    document = parse(read_text(path, "a serving workload"), str(path))
    try:
        serving = convert(document.data, Serving)
    except Misfit as misfit:
        raise InputError(f"{path}: {render(misfit.path)}", misfit.problem, misfit.wanted) from None
    experiment = _experiment(serving)
    profile = load_profile(experiment, check=False)
    return Load(costs.with_kv_pool(experiment, profile), profile, serving.requests)


def _experiment(serving: Serving) -> Experiment:
    requests = serving.requests
    task = TaskSpec(
        name="requests",
        environment="none",
        steps=1,
        prompts=requests.count,
        samples=1,
        max_prompt_tokens=requests.max_prompt_tokens,
        max_new_tokens=requests.max_new_tokens,
        workload=Workload(prompt_tokens=requests.prompt_tokens, output_tokens=requests.output_tokens),
    )
    return Experiment(
        name=serving.name,
        seed=serving.seed,
        profile=serving.profile,
        tasks=(task,),
        environments={"none": ReverseEnvironment()},
        cluster=ClusterSpec(replicas=ReplicasSpec(max_num_seqs=serving.max_num_seqs)),
    )


def simulate_requests(load: Load, recorder: Recorder) -> None:
    """Serve every request once."""
    requests = load.requests
    times = arrival_times_ns(requests.arrivals, requests.per_s, requests.count, load.experiment.seed)
    serve(load.experiment, load.profile, times, recorder)


def serve_into(load: Load, trace: Path) -> dict[str, Any]:
    """Serve into a trace; its metrics and, in seconds, `request_latency_s.*` from arrival to last token."""
    profile = msgspec.to_builtins(load.profile)
    with TraceWriter(trace, make_header(load.experiment, world="sim", profile=profile)) as recorder:
        simulate_requests(load, recorder)
    latencies_s: list[float] = []

    def note(span: Span) -> None:
        if span.trajectory >= 0:
            latencies_s.append((span.end - span.start) / 1e9)

    metrics = compute(trace, also=note)
    latencies_s.sort()
    return metrics | {
        "requests": len(latencies_s),
        "request_latency_s.mean": sum(latencies_s) / len(latencies_s),
        **{f"request_latency_s.p{p}": quantile(latencies_s, p / 100) for p in (50, 95, 99)},
    }
