"""A profile fitted from the traces of real runs, and a report of how well it fits.

    traces ──► observations ──► replica: decode and prefill costs from engine windows
                            ──► lane: training affine in tokens, publish, create
                            ──► workloads: empirical lengths and latencies per task

What a trace cannot show (the cost of a further adapter when only one was ever active) is taken from a prior
and marked as assumed. Owns the choice of models; the numerics are `fitting`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from marlaas.cluster_spec import VLLM_BLOCK_TOKENS
from marlaas.errors import InputError
from marlaas.events import EngineMeasured
from marlaas.spec import Distribution, Empirical, Fixed, Workload
from sim.fitting import Fit, fit
from sim.observations import NS, Chores, Observations, TaskLengths, observe
from sim.profile import FREE, EngineProfile, LaneProfile, Profile, ProfiledWorkload, Quantity, ReplicaProfile
from sim.profile_files import dump_profile

# One further adapter costs the embedded engine next to nothing: all of them go through one product.
PRIOR_PER_ADAPTER_S = Quantity(
    value=1e-4,
    source="assumed",
    interval=(0.0, 4e-4),
    note="only one adapter was ever active; a benchmark of the embedded engine on one CPU core saw at most"
    " 0.4 ms per further adapter at 64 to 256 sequences",
)
# Two cores of a rented machine are often two threads of one core.
PRIOR_SLOWDOWN = Quantity(
    value=0.5,
    source="assumed",
    interval=(0.0, 1.0),
    note="no rollout ran beside a training step; on two shared cores a compute-bound process was seen to take"
    " 60 % longer beside another, on cores of their own it would be next to nothing",
)
OVERLAP_SEEN = 0.05
MAX_EMPIRICAL = 1000


class FittedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the report: what was fitted, in words, and the fit."""

    name: str
    fit: Fit


class FitReport(msgspec.Struct, frozen=True, kw_only=True):
    """How well a profile fits the runs it was made from, and what it had to assume."""

    sources: tuple[str, ...]
    models: tuple[FittedModel, ...]
    assumptions: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"fitted from {', '.join(self.sources)}"]
        for model in self.models:
            lines.append(
                f"  {model.name}: {model.fit.num_points} points, mean error {model.fit.error:.1%},"
                f" held out {model.fit.held_out_error:.1%}"
            )
            for name, value in model.fit.values.items():
                low, high = model.fit.intervals[name]
                lines.append(f"    {name} {value:.3g} ({low:.3g} to {high:.3g})")
        lines += [f"  assumed {assumption}" for assumption in self.assumptions]
        return "\n".join(lines)


def calibrate(paths: Sequence[Path]) -> tuple[Profile, FitReport]:
    """Fit a profile from run folders or traces; raises `InputError` when they show too little."""
    seen = observe(paths)
    where = ", ".join(str(path) for path in paths)
    if not seen.trainings or not any(window.num_iterations for window in seen.windows):
        wanted = "calibrate from an executed run that trained"
        raise InputError(where, "no training step or no measured engine window", wanted)
    replica, models = _fit_replica(seen)
    lane, training = _fit_lane(seen)
    profile = Profile(
        name="-".join(path.name.partition(".")[0] for path in paths)[:80],
        description=f"calibrated from {where}",
        engine=_engine(seen, where),
        replica=replica,
        lane=lane,
        slowdown_per_busy_worker=_slowdown(seen),
        workloads={task: _workload(lengths) for task, lengths in seen.tasks.items() if lengths.turns},
    )
    quantities = {
        "per_adapter_s": replica.per_adapter_s,
        "slowdown_per_busy_worker": profile.slowdown_per_busy_worker,
    }
    assumed = tuple(
        f"{n} {q.value:g}: {q.note}" for n, q in quantities.items() if q.source == "assumed" and q.note
    )
    report = FitReport(sources=tuple(map(str, paths)), models=(*models, training), assumptions=assumed)
    return profile, report


def report(fitted: tuple[Profile, FitReport], out: Path) -> str:
    """Write the profile to `out` and say how well it fits."""
    profile, fit_report = fitted
    out.write_text(dump_profile(profile), encoding="utf-8")
    return f"{fit_report}\nwrote {out}"


def _engine(seen: Observations, where: str) -> EngineProfile:
    """The rules of the engine that ran; vLLM's are those that `executor` starts it with."""
    kinds = {(pool.engine, pool.device, pool.block_tokens) for pool in seen.pools}
    if len(kinds) > 1:
        named = ", ".join(sorted(f"{engine} on {device}" for engine, device, _ in kinds))
        raise InputError(where, f"the runs had different engines: {named}", "calibrate from runs of one")
    ((engine, device, block_tokens),) = kinds
    if engine == "torch":
        return EngineProfile()
    on_cpu = device == "cpu"  # where vLLM reads prompts whole
    return EngineProfile(
        name="vllm",
        kv_rule="preempt",
        prefill="own-pass" if on_cpu else "mixed",
        shares_prompts=False,
        prefix_cache="turns",
        block_tokens=block_tokens or VLLM_BLOCK_TOKENS.get(device, VLLM_BLOCK_TOKENS["cuda"]),
    )


def _slowdown(seen: Observations) -> Quantity:
    """What workers of one machine cost each other; costs of runs in which they met contain it already."""
    if not seen.is_one_machine or seen.overlap_seconds > OVERLAP_SEEN * seen.rollout_seconds:
        return FREE
    if not seen.slowdowns:
        return PRIOR_SLOWDOWN
    return Quantity(
        value=sum(seen.slowdowns) / len(seen.slowdowns),
        source="calibrated",
        interval=(min(seen.slowdowns), max(seen.slowdowns)),
        note="two probes pinned like a replica and a lane, alone and together, before the run",
    )


# --- replicas --------------------------------------------------------------------------------------


def _fit_replica(seen: Observations) -> tuple[ReplicaProfile, list[FittedModel]]:
    adapter, decode = _fit_decode(seen.windows)
    overhead = _mean(seen.overheads)
    load, unload = _fit_chores(seen.chores)
    models = [FittedModel(name="decode iterations, s", fit=decode)]
    costs = {
        "iteration_s": _less(_quantity(decode, "iteration_s"), adapter),
        "per_sequence_s": _quantity(decode, "per_sequence_s"),
        "per_kv_token_s": _quantity(decode, "per_kv_token_s"),
    }
    prefill = _fit_prefill(seen.windows)
    if prefill is not None:
        models.append(FittedModel(name="prefill passes, s", fit=prefill))
        costs["prefill_s"] = _less(_quantity(prefill, "prefill_s"), adapter)
        costs["per_prefill_token_s"] = _quantity(prefill, "per_prefill_token_s")
    replica = ReplicaProfile(
        **costs,
        per_adapter_s=adapter,
        turn_overhead_s=overhead,
        start_s=_mean(seen.replica_starts),
        load_s=load,
        unload_s=unload,
    )
    return replica, models


def _fit_decode(windows: Sequence[EngineMeasured]) -> tuple[Quantity, Fit]:
    """The cost of one adapter, and a fit of all else whose `iteration_s` contains one adapter's."""
    used = [w for w in windows if w.num_iterations and w.busy_ns > w.prefill_ns]
    columns = {
        "iteration_s": [w.num_iterations for w in used],
        "per_sequence_s": [w.sequences_sum for w in used],
        "per_kv_token_s": [w.kv_tokens_sum for w in used],
    }
    further = [w.adapters_sum - w.num_iterations for w in used]
    is_seen = any(n >= w.num_iterations for n, w in zip(further, used, strict=True))
    if is_seen:
        columns["per_adapter_s"] = further
    seconds = [(w.busy_ns - w.prefill_ns) * NS for w in used]
    fitted = fit(columns, seconds, {"per_adapter_s": PRIOR_PER_ADAPTER_S.value})
    return _quantity(fitted, "per_adapter_s") if is_seen else PRIOR_PER_ADAPTER_S, fitted


def _fit_prefill(windows: Sequence[EngineMeasured]) -> Fit | None:
    used = [w for w in windows if w.num_prefills and w.prefill_ns]
    if not used:
        return None
    columns = {
        "prefill_s": [w.num_prefills for w in used],
        "per_prefill_token_s": [w.prefill_tokens for w in used],
    }
    return fit(columns, [w.prefill_ns * NS for w in used], {})


def _fit_chores(chores: Sequence[Chores]) -> tuple[Quantity, Quantity]:
    """Seconds to load and to unload an adapter, the way there and back included."""
    if not chores:
        return FREE, FREE
    columns = {"load_s": [c.num_loads for c in chores], "unload_s": [c.num_unloads for c in chores]}
    fitted = fit(columns, [c.seconds for c in chores], {})
    return _quantity(fitted, "load_s"), _quantity(fitted, "unload_s")


def _less(constant: Quantity, one_adapter: Quantity) -> Quantity:
    """A constant that was measured with one adapter, without that adapter's cost."""
    value = _rounded(max(constant.value - one_adapter.value, 1e-9))
    return msgspec.structs.replace(constant, value=value, note=f"{constant.note}, less one adapter")


# --- lanes and workloads ---------------------------------------------------------------------------


def _fit_lane(seen: Observations) -> tuple[LaneProfile, FittedModel]:
    steps = seen.trainings
    columns: dict[str, Sequence[float]] = {
        "step_s": [1.0] * len(steps),
        "per_token_s": [step.num_tokens for step in steps],
        "per_squared_token_s": [step.squares for step in steps],
    }
    fitted = fit(columns, [step.seconds for step in steps], {})
    lane = LaneProfile(
        step_s=_quantity(fitted, "step_s"),
        per_token_s=_quantity(fitted, "per_token_s"),
        per_squared_token_s=_quantity(fitted, "per_squared_token_s"),
        publish_s=_mean(seen.publishes),
        create_adapter_s=_mean(seen.creations),
        start_s=_mean(seen.lane_starts),
    )
    return lane, FittedModel(name="training steps, s", fit=fitted)


def _workload(lengths: TaskLengths) -> ProfiledWorkload:
    workload = Workload(
        prompt_tokens=_empirical(lengths.prompt_tokens),
        output_tokens=_empirical(lengths.output_tokens),
        turns=_empirical(lengths.turns),
        observation_tokens=_empirical(lengths.observation_tokens or [0.0]),
        environment_s=_empirical(lengths.environment_s),
    )
    note = f"{len(lengths.turns)} trajectories, {len(lengths.output_tokens)} turns"
    return ProfiledWorkload(workload=workload, source="calibrated", note=note)


def _empirical(values: Sequence[float]) -> Distribution:
    """The values themselves, sorted; of very many, so many evenly spaced quantiles."""
    ordered = sorted(round(float(value), 6) for value in values)
    if len(ordered) > MAX_EMPIRICAL:
        step = len(ordered) / MAX_EMPIRICAL
        ordered = [ordered[int((i + 0.5) * step)] for i in range(MAX_EMPIRICAL)]
    return Fixed(value=ordered[0]) if ordered[0] == ordered[-1] else Empirical(values=tuple(ordered))


# --- quantities ------------------------------------------------------------------------------------


def _quantity(fitted: Fit, name: str) -> Quantity:
    low, high = fitted.intervals[name]
    return Quantity(
        value=_rounded(fitted.values[name]),
        source="calibrated",
        interval=(_rounded(low), _rounded(high)),
        note=f"{fitted.num_points} points, held-out error {fitted.held_out_error:.1%}",
    )


def _mean(values: Sequence[float]) -> Quantity:
    """The mean, so that totals are kept, with the smallest and largest as interval."""
    if not values:
        return FREE
    interval = (_rounded(min(values)), _rounded(max(values)))
    note = f"mean of {len(values)}"
    return Quantity(value=_rounded(fmean(values)), source="calibrated", interval=interval, note=note)


def _rounded(value: float) -> float:
    """Six significant digits: more would be noise to a reader."""
    return float(f"{value:.6g}")
