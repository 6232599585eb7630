"""Profiles fitted from traces give back what made the traces."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from small_runs import ONE_TURN, PROFILE, SEVERAL, Record, experiment

from marlaas.errors import InputError
from marlaas.spec import ClusterSpec, Experiment, Kill, LanesSpec, ReplicasSpec
from sim import load_profile, simulate
from sim.calibrate import calibrate, report
from sim.fitting import fit
from sim.profile import EngineProfile, Profile, assumed
from sim.streams import sample, stream
from traces.schema import SLOWDOWN, Scalar, make_header
from traces.writer import TraceWriter

KNOWN = replace(PROFILE, replica=replace(PROFILE.replica, turn_overhead_s=assumed(0.004)))


def trace(
    folder: Path, of: Experiment, profile: Profile = KNOWN, host: dict[str, Scalar] | None = None
) -> Path:
    """The trace of a simulation that reports engine counters, as an executor would."""
    path = folder / f"{of.name}.jsonl"
    with TraceWriter(path, make_header(of, world="executor" if host else "sim", host=host)) as recorder:
        simulate(of, profile, recorder, measure_every_s=0.05)
    return path


def bigger(system: str) -> Experiment:
    """Enough trajectories for a good fit, everything resident at once."""
    tasks = tuple(replace(task, prompts=8, samples=4, steps=4) for task in experiment().tasks)
    cluster = ClusterSpec(replicas=ReplicasSpec(slots=4, max_num_seqs=128, kv_tokens=16_384))
    return experiment(system, tasks=tasks, cluster=cluster, name=system)


def test_known_costs_are_recovered_from_a_trace_of_many_adapters(tmp_path: Path) -> None:
    """Every cost that the trace shows comes back within 3 %, the adapters' among them."""
    profile, fit_report = calibrate([trace(tmp_path, bigger("marlaas"))])
    found, true = profile.replica, KNOWN.replica
    assert found.per_adapter_s.source == "calibrated"
    assert not fit_report.assumptions
    # The constant per active adapter set cannot be told from the constant per iteration.
    assert found.iteration_s.value == pytest.approx(true.iteration_s.value + true.adapters_s.value, rel=0.03)
    for name in ("per_sequence_s", "per_adapter_s", "per_kv_token_s"):
        assert getattr(found, name).value == pytest.approx(getattr(true, name).value, rel=0.03), name
    for name in ("step_s", "per_token_s", "publish_s", "create_adapter_s", "start_s"):
        assert getattr(profile.lane, name).value == pytest.approx(getattr(KNOWN.lane, name).value, rel=0.03)


def test_one_adapter_at_a_time_leaves_the_cost_of_further_ones_assumed(tmp_path: Path) -> None:
    """A `single` run recovers the rest; the report says what was not seen."""
    profile, fit_report = calibrate([trace(tmp_path, bigger("single"))])
    found, true = profile.replica, KNOWN.replica
    one_adapter_s = true.adapters_s.value + true.per_adapter_s.value
    assert found.iteration_s.value + found.per_adapter_s.value == pytest.approx(
        true.iteration_s.value + one_adapter_s, rel=0.02
    )
    assert found.prefill_s.value + found.per_adapter_s.value == pytest.approx(
        true.prefill_s.value + one_adapter_s, rel=0.02
    )
    assert found.per_prefill_token_s.value == pytest.approx(true.per_prefill_token_s.value, rel=0.02)
    assert found.turn_overhead_s.value == pytest.approx(true.turn_overhead_s.value, rel=0.02)
    assert found.load_s.value == pytest.approx(true.load_s.value, rel=0.1)
    assert found.per_adapter_s.source == "assumed"
    assert "per_adapter_s" in str(fit_report)


def test_a_profile_from_one_system_predicts_another(tmp_path: Path) -> None:
    """Fitted from `single` alone, the makespan of `marlaas` on its own devices is predicted within 3 %."""
    profile, _ = calibrate([trace(tmp_path, bigger("single"))])
    profile = replace(profile, slowdown_per_busy_worker=assumed(0.0))

    def makespan_s(of: Profile) -> float:
        record = Record()
        bare = bigger("marlaas")
        simulate(replace(bare, tasks=tuple(replace(t, workload=None) for t in bare.tasks)), of, record)
        return record.end_s

    truth = Record()
    simulate(bigger("marlaas"), KNOWN, truth)
    assert makespan_s(profile) == pytest.approx(truth.end_s, rel=0.03)


def test_workers_of_one_machine_are_taken_to_slow_each_other_where_they_were_never_seen_to(
    tmp_path: Path,
) -> None:
    """Assumed after `single` on CPUs unless probed; in the costs already after `marlaas`; none on NPUs."""
    from_single, said = calibrate([trace(tmp_path, bigger("single"))])
    assert from_single.slowdown_per_busy_worker.source == "assumed"
    assert from_single.slowdown_per_busy_worker.value > 0
    assert "slowdown_per_busy_worker" in str(said)
    beside = trace(tmp_path, replace(bigger("single"), name="probed"), host={SLOWDOWN: 0.25})
    probed = calibrate([beside])[0].slowdown_per_busy_worker
    assert (probed.value, probed.source) == (0.25, "calibrated")
    from_marlaas, _ = calibrate([trace(tmp_path, bigger("marlaas"))])
    assert from_marlaas.slowdown_per_busy_worker.value == 0
    devices = replace(bigger("single").cluster, lanes=LanesSpec(device="npu"))
    from_npu, _ = calibrate([trace(tmp_path, replace(bigger("single"), name="npu", cluster=devices))])
    assert from_npu.slowdown_per_busy_worker.value == 0


def test_work_lost_with_a_worker_does_not_count(tmp_path: Path) -> None:
    """A replica killed in mid-rollout and a lane in mid-training leave every duration as it was."""
    kills = (Kill(at_s=0.25, worker="replica-0"), Kill(at_s=4.0, worker="lane-0"))
    profile, _ = calibrate([trace(tmp_path, replace(bigger("marlaas"), operations=kills))])
    assert profile.replica.start_s.value == pytest.approx(2.0)
    assert profile.replica.start_s.note == "mean of 2"
    assert profile.lane.start_s.note == "mean of 2"
    for name in ("step_s", "per_token_s", "publish_s"):
        assert getattr(profile.lane, name).value == pytest.approx(getattr(KNOWN.lane, name).value, rel=0.03)


def test_workloads_are_what_was_seen(tmp_path: Path) -> None:
    """Means of prompts, answers, turns and latencies agree with the distributions they were drawn from."""
    profile, _ = calibrate([trace(tmp_path, bigger("single"))])
    for name, true in (("add", ONE_TURN), ("find", SEVERAL)):
        found = profile.workloads[name].workload
        for field in ("prompt_tokens", "output_tokens", "turns", "observation_tokens"):
            if name == "add" and field == "observation_tokens":
                continue  # a single turn is followed by no observation that anybody would see
            mean, expected = (
                float(sample(getattr(of, field), stream(1), (4000,)).mean()) for of in (found, true)
            )
            assert mean == pytest.approx(expected, rel=0.12), (name, field)
    assert profile.workloads["add"].workload.environment_s is not None


def test_a_report_names_its_points_and_held_out_errors_and_the_profile_reads_back(tmp_path: Path) -> None:
    """What the command line prints, and the file it writes."""
    fitted = calibrate([trace(tmp_path, bigger("single"))])
    text = report(fitted, tmp_path / "p.yaml")
    assert load_profile(tmp_path / "p.yaml") == fitted[0]
    for word in ("decode iterations", "prefill passes", "training steps", "held out", "p.yaml"):
        assert word in text


def test_the_engine_that_ran_is_the_engine_that_is_modelled(tmp_path: Path) -> None:
    """vLLM on a CPU reads prompts in passes of their own, elsewhere in chunks; two engines do not mix."""
    paths = {}
    for name, changes in {
        "torch": {},
        "cpu": {"engine": "vllm"},
        "gpu": {"engine": "vllm", "device": "cuda"},
    }.items():
        of = bigger("single")
        replicas = replace(of.cluster.replicas, **changes)
        of = replace(of, name=name, cluster=replace(of.cluster, replicas=replicas))
        paths[name] = trace(tmp_path, of)
    found = {name: calibrate([path])[0].engine for name, path in paths.items()}
    assert found["torch"] == EngineProfile()
    assert [found[name].prefill for name in ("cpu", "gpu")] == ["own-pass", "mixed"]
    assert [found[name].block_tokens for name in ("cpu", "gpu")] == [32, 16]
    with pytest.raises(InputError, match="torch on cpu, vllm on cpu"):
        calibrate([paths["torch"], paths["cpu"]])


def test_a_trace_without_measurements_is_refused(tmp_path: Path) -> None:
    """A plain simulation has no engine windows to fit."""
    with TraceWriter(tmp_path / "t.jsonl", make_header(experiment(), world="sim")) as recorder:
        simulate(experiment(), PROFILE, recorder)
    with pytest.raises(InputError, match="no measured engine window"):
        calibrate([tmp_path / "t.jsonl"])


# --- the numerics ------------------------------------------------------------------------------------------


def test_noise_shows_in_the_held_out_error_and_intervals_hold_the_truth() -> None:
    """10 % noise gives an error near 8 % (the mean of |N(0, 0.1)|); most 90 % intervals hold the truth."""
    num_held = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        num = random.integers(1, 100, 100).astype(float)
        noisy = (5 + 0.3 * num) * (1 + 0.1 * random.standard_normal(100))
        found = fit({"fixed": [1.0] * 100, "each": num.tolist()}, noisy.tolist(), {})
        low, high = found.intervals["each"]
        num_held += low <= 0.3 <= high
        assert 0.05 < found.error < found.held_out_error < 0.11
    assert num_held >= 14


def test_totals_are_kept_under_one_sided_noise() -> None:
    """Stalls that triple one point in ten still count: predicted and measured sums agree."""
    seconds = [3.0 if i % 10 == 0 else 1.0 for i in range(100)]
    found = fit({"fixed": [1.0] * 100}, seconds, {})
    assert found.values["fixed"] == pytest.approx(1.2)


def test_what_the_data_cannot_tell_stays_at_its_prior() -> None:
    """Two equal columns: the one with a prior keeps it, the other explains the rest."""
    column = [float(i) for i in range(1, 30)]
    found = fit({"free": column, "known": column}, [3.0 * i for i in column], {"known": 2.0, "free": 1.0})
    assert found.values == pytest.approx({"free": 1.0, "known": 2.0}, rel=1e-3)


def test_one_point_has_no_held_out_error() -> None:
    """Said as not-a-number, not as zero."""
    assert math.isnan(fit({"fixed": [1.0]}, [2.0], {}).held_out_error)
