"""What the simulator says of real servers' runs beside what they did: `python -m sim.fidelity --data DIR`.

    counters of the first half ──► fitted costs ──► all requests served ──► means beside the measured ones

No time of a request's token is used but to compare. Means are over requests: TTFT is from arrival to the
first token, TPOT from the first to the last over the tokens after the first, latency from arrival to the
last. How much the errors depend on the seconds that were fitted is printed too. Owns the comparison; the fit
is `counters`'.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

import msgspec

from marlaas.errors import InputError
from sim.counters import CounterFit, base_costs, fit_counters
from sim.hardware_profile import Hardware, HardwareProfile, Overrides
from sim.profile import EngineProfile, ReplicaProfile
from sim.profile_files import dump_profile
from sim.requests import Served, serve
from sim.roofline import replica_costs
from sim.server_logs import ServerLog, log_names, read_log

# How far off a mean may be.
ERROR_BOUND = 0.03
NUM_RANDOM_HALVES = 5
PERCENTS = (10, 50, 90, 99)


class Means(msgspec.Struct, frozen=True, kw_only=True):
    """Means over requests, in seconds."""

    ttft_s: float
    tpot_s: float
    latency_s: float

    def errors(self, measured: Means) -> dict[str, float]:
        """How far off these are, relative to what was measured."""
        names = ("ttft_s", "tpot_s", "latency_s")
        return {name: getattr(self, name) / getattr(measured, name) - 1 for name in names}


def means(served: Served) -> Means:
    """The means of a run."""
    return Means(
        ttft_s=fmean(served.ttft_s()), tpot_s=fmean(served.tpot_s()), latency_s=fmean(served.latency_s())
    )


def measured_run(log: ServerLog, *, since_queued: bool = False) -> Served:
    """What was measured, as a run; since arrival, or since the engine took each request into its queue."""
    arrivals = [request.arrival_ns * 1e-9 for request in log.requests]
    return Served(
        arrival_s=[one.queued_s for one in log.measured] if since_queued else arrivals,
        first_s=[one.first_s for one in log.measured],
        last_s=[one.last_s for one in log.measured],
        output_tokens=[request.output_tokens for request in log.requests],
        iterations=[],
    )


def fit_first_half(log: ServerLog) -> CounterFit:
    """Costs from the first half of the counted seconds, and the roofline where those are silent."""
    seconds, prior = log.seconds[: len(log.seconds) // 2], replica_costs(log.setup)
    return fit_counters(log.requests, seconds, log.rules, prior, plans_ahead=log.plans_ahead)


def predicted_run(log: ServerLog, costs: ReplicaProfile) -> Served:
    """All requests of a log, served at these costs."""
    return serve(log.requests, base_costs(costs), log.rules, plans_ahead=log.plans_ahead)


def calibrated_profile(log: ServerLog, fitted: CounterFit) -> HardwareProfile:
    """A profile of this server: the fitted costs, and what its hardware says of all others."""
    setup = log.setup
    engine = EngineProfile(
        name="vllm", prefill="mixed", max_prefill_tokens=log.rules.max_prefill_tokens, shares_prompts=False
    )
    costs = {name: getattr(fitted.replica, name) for name in fitted.fit.values}
    return HardwareProfile(
        name=f"{setup.device.name}-{setup.model.name}",
        description=f"calibrated from the one-second counters of {log.name}",
        engine=engine,
        hardware=Hardware(
            device=setup.device.name,
            model=setup.model.name,
            rollout=msgspec.structs.replace(setup.rollout, tensor_parallel=setup.tensor_parallel),
            overrides=Overrides(replica=costs),
        ),
    )


def variants(log: ServerLog) -> Iterator[tuple[str, Served]]:
    """Runs at costs fitted from other seconds and from none, and of an engine that does not plan ahead."""
    prior, half = replica_costs(log.setup), len(log.seconds) // 2

    def run(is_shown: Callable[[int, int], bool]) -> Served:
        seconds, ahead = log.seconds, log.plans_ahead
        fitted = fit_counters(log.requests, seconds, log.rules, prior, is_shown, plans_ahead=ahead)
        return predicted_run(log, fitted.replica)

    yield "second half", run(lambda begin, end: begin >= half)
    yield "all", run(lambda begin, end: True)
    for seed in range(NUM_RANDOM_HALVES):
        yield f"random half {seed + 1}", run(_coin(seed))
    yield "none: roofline", predicted_run(log, prior)
    if log.plans_ahead:
        plain = msgspec.structs.replace(log, plans_ahead=False)
        yield "first half, simple", predicted_run(plain, fit_first_half(plain).replica)


def _coin(seed: int) -> Callable[[int, int], bool]:
    """Shows every stretch or not, at even chances."""
    return lambda begin, end: random.Random(f"{seed}/{begin}").random() < 0.5


def table(log: ServerLog) -> str:
    """A log's means, measured and predicted, the fitted costs, and how the errors change with the seconds."""
    half = fit_first_half(log)
    measured, predicted = means(measured_run(log)), means(predicted_run(log, half.replica))
    errors = predicted.errors(measured)
    lines = [
        f"{log.name}: {len(log.requests)} requests, {len(log.seconds)} counted seconds",
        f"  {'mean':12}{'measured':>12}{'predicted':>12}{'error':>9}",
    ]
    for name, error in errors.items():
        lines.append(
            f"  {name.removesuffix('_s') + ', ms':12}{1e3 * getattr(measured, name):12.1f}"
            f"{1e3 * getattr(predicted, name):12.1f}{error:+9.2%}"
        )
    lines += _quantile_lines(measured_run(log), predicted_run(log, half.replica))
    return "\n".join([*lines, *_fit_lines(half), *_variant_lines(log, errors, measured)])


def _quantile_lines(measured: Served, predicted: Served) -> list[str]:
    """Errors of quantiles, to show that means are not right by chance."""
    lines = [f"  {'errors of':12}" + "".join(f"{f'p{percent}':>9}" for percent in PERCENTS)]
    for name in ("ttft_s", "tpot_s", "latency_s"):
        ours, theirs = (sorted(getattr(run, name)()) for run in (predicted, measured))
        errors = [ours[len(ours) * p // 100] / theirs[len(theirs) * p // 100] - 1 for p in PERCENTS]
        lines.append(f"  {name.removesuffix('_s'):12}" + "".join(f"{error:+9.2%}" for error in errors))
    return lines


def _fit_lines(half: CounterFit) -> list[str]:
    fit = half.fit
    said = f"{fit.num_points} rows, mean error {fit.error:.1%}, held out {fit.held_out_error:.1%}"
    lines = [f"  fitted from the first half: {said}"]
    for name, value in half.fit.values.items():
        low, high = half.fit.intervals[name]
        lines.append(f"    {name:22}{value:10.3g} ({low:.3g} to {high:.3g})")
    return lines


def _variant_lines(log: ServerLog, errors: dict[str, float], measured: Means) -> list[str]:
    rows = [("first half", errors)]
    rows += [(label, means(run).errors(measured)) for label, run in variants(log)]
    lines = [f"  {'seconds fitted':18}{'TTFT':>9}{'TPOT':>9}{'latency':>9}"]
    lines += [f"  {label:18}" + "".join(f"{error:+9.2%}" for error in row.values()) for label, row in rows]
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Print the tables of a folder's logs; 0 when every mean of each is within the bound, else 3."""
    parser = argparse.ArgumentParser(prog="python -m sim.fidelity", description="predict real servers' runs")
    parser.add_argument("--data", type=Path, required=True, help="folder of servers' logs")
    parser.add_argument("--out", type=Path, help="folder to write the calibrated profiles to")
    options = parser.parse_args(arguments)
    try:
        logs = [read_log(options.data, name) for name in log_names(options.data)]
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n\n".join(table(log) for log in logs))
    if options.out is not None:
        _write_profiles(logs, options.out)
    return 0 if all(_is_close(log) for log in logs) else 3


def _write_profiles(logs: list[ServerLog], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for log in logs:
        path = out / f"{log.setup.device.name}-{log.setup.model.name}.yaml"
        path.write_text(dump_profile(calibrated_profile(log, fit_first_half(log))), encoding="utf-8")
        print(f"wrote {path}")


def _is_close(log: ServerLog) -> bool:
    predicted = means(predicted_run(log, fit_first_half(log).replica))
    return all(abs(error) <= ERROR_BOUND for error in predicted.errors(means(measured_run(log))).values())


if __name__ == "__main__":
    sys.exit(main())
