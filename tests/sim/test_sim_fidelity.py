"""Real vLLM runs against the simulator, fitted from one-second counters of their first half only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from public_runs import vllm_runs

from marlaas.errors import InputError
from sim.counters import fit_counters
from sim.fidelity import (
    ERROR_BOUND,
    calibrated_profile,
    fit_first_half,
    main,
    means,
    measured_run,
    predicted_run,
)
from sim.hardware_profile import HardwareProfile, Site, resolve
from sim.profile import Quantity, ReplicaProfile
from sim.profile_files import dump_profile
from sim.roofline import replica_costs
from sim.server_logs import ServerLog, log_names, read_log
from sim.strict_yaml import converted, parse

LLAMA, QWEN = "RTXPRO6000_Llama-3.1-8B", "RTXPRO6000_Qwen3-32B"
both_runs = pytest.mark.parametrize("name", [LLAMA, QWEN])


def errors(log: ServerLog, costs: ReplicaProfile, *, since_queued: bool = False) -> dict[str, float]:
    """Of the three means, at these costs."""
    return means(predicted_run(log, costs)).errors(means(measured_run(log, since_queued=since_queued)))


def worst(of: dict[str, float]) -> float:
    """The largest of them, either way."""
    return max(map(abs, of.values()))


def changed(costs: ReplicaProfile, **factors: float) -> ReplicaProfile:
    """Costs times factors."""
    scaled = {
        name: Quantity(value=factor * getattr(costs, name).value, source="assumed")
        for name, factor in factors.items()
    }
    return msgspec.structs.replace(costs, **scaled)


@both_runs
def test_the_first_half_of_the_counters_predicts_a_real_run(name: str) -> None:
    """Mean TTFT, TPOT and latency within 3 %, since arrival and since the engine queued each request."""
    log = read_log(vllm_runs(), name)
    assert len(log.requests) == 300
    half = fit_first_half(log)
    assert worst(errors(log, half.replica)) <= ERROR_BOUND
    assert worst(errors(log, half.replica, since_queued=True)) <= ERROR_BOUND
    assert half.fit.held_out_error < 0.06


@both_runs
def test_so_it_does_with_the_event_simulation_s_own_engine(name: str) -> None:
    """Within 3 % also without planning ahead, which the engine of whole experiments leaves out."""
    log = msgspec.structs.replace(read_log(vllm_runs(), name), plans_ahead=False)
    assert worst(errors(log, fit_first_half(log).replica)) <= ERROR_BOUND


@both_runs
def test_so_does_the_second_half(name: str) -> None:
    """The fit does not hang on the seconds that it was shown."""
    log = read_log(vllm_runs(), name)
    prior, half = replica_costs(log.setup), len(log.seconds) // 2
    fitted = fit_counters(
        log.requests,
        log.seconds,
        log.rules,
        prior,
        lambda begin, end: begin >= half,
        plans_ahead=log.plans_ahead,
    )
    assert worst(errors(log, fitted.replica)) <= ERROR_BOUND


@both_runs
@pytest.mark.parametrize(
    "plant",
    [
        lambda costs: changed(costs, iteration_s=1.1),
        lambda costs: changed(costs, per_kv_token_s=0.0),
        lambda costs: changed(costs, per_prefill_token_s=1.1),
    ],
    ids=["longer iterations", "no KV term", "slower prefill"],
)
def test_a_wrong_parameter_is_found_out(name: str, plant: Callable[[ReplicaProfile], ReplicaProfile]) -> None:
    """With one cost a tenth off, or left out, some mean is more than 3 % off."""
    log = read_log(vllm_runs(), name)
    assert worst(errors(log, plant(fit_first_half(log).replica))) > ERROR_BOUND


@both_runs
def test_the_roofline_alone_is_further_off(name: str) -> None:
    """Without the counters the bound is missed: the fit is what meets it."""
    log = read_log(vllm_runs(), name)
    assert worst(errors(log, replica_costs(log.setup))) > 2 * ERROR_BOUND


def test_a_wrong_rule_is_found_out() -> None:
    """With a seat in sixteen too few, the fitted costs miss."""
    log = read_log(vllm_runs(), QWEN)
    fewer = msgspec.structs.replace(log, rules=msgspec.structs.replace(log.rules, max_num_seqs=120))
    assert worst(errors(fewer, fit_first_half(fewer).replica)) > ERROR_BOUND


def copied(folder: Path, change: Callable[[dict[str, object]], None] | None = None) -> Path:
    """One run's files in a folder of one's own, each request changed."""
    source = vllm_runs()
    for path in source.glob(f"{LLAMA}.*"):
        shutil.copyfile(path, folder / path.name)
    path = folder / f"{LLAMA}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if change is not None:
            change(line)
    path.write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_no_latency_is_used_in_the_fit(tmp_path: Path) -> None:
    """With every token time of the log made up, the same costs come out."""

    def forge(line: dict[str, object]) -> None:
        line.update(first_token_ts=line["queued_ts"], last_token_ts=line["queued_ts"])

    forged, true = read_log(copied(tmp_path, forge), LLAMA), read_log(vllm_runs(), LLAMA)
    assert forged.measured != true.measured
    assert fit_first_half(forged) == fit_first_half(true)


def test_the_later_half_of_the_counters_is_not_used(tmp_path: Path) -> None:
    """With it made up, the same costs come out."""
    log = read_log(vllm_runs(), LLAMA)
    half = len(log.seconds) // 2
    forged = [*log.seconds[:half], *log.seconds[: len(log.seconds) - half]]
    assert fit_first_half(msgspec.structs.replace(log, seconds=forged)) == fit_first_half(log)


def test_a_calibrated_profile_reads_back_and_resolves_to_the_fitted_costs() -> None:
    """What the counters show replaces what the hardware says; all else is computed as ever."""
    log = read_log(vllm_runs(), QWEN)
    half = fit_first_half(log)
    form = calibrated_profile(log, half)
    assert converted(parse(dump_profile(form), "dumped"), HardwareProfile, "dumped") == form
    site = Site(replica_devices=2, lane_devices=2, slots=4, max_num_seqs=128, rank=8, targets="all-linear")
    resolved = resolve(form, site).replica
    assert resolved.per_kv_token_s == half.replica.per_kv_token_s
    assert resolved.per_kv_token_s.source == "calibrated"
    assert resolved.per_adapter_s.source != "calibrated"


@pytest.mark.slow
def test_the_command_prints_both_runs_and_writes_profiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table has every mean, and a profile is written per run."""
    data = vllm_runs()
    assert main(["--data", str(data), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.count("latency, ms") == 2
    assert "second half" in printed
    written = [path.read_text() for path in tmp_path.glob("*.yaml")]
    assert ["source: calibrated" in text for text in written] == [True, True]


def test_what_is_wrong_with_a_log_is_said_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing files, rows that are none and hardware unknown to the library are the user's to mend."""
    assert main(["--data", str(tmp_path)]) == 2
    assert "meta.json" in capsys.readouterr().err
    folder = copied(tmp_path)
    assert log_names(folder) == [LLAMA]
    counters = folder / f"{LLAMA}.ts.csv"
    good = counters.read_text()
    for bad, place in (
        (good.replace("13.0,697.0", "13.0,many"), ":14"),
        (good.replace("13.0,697.0", "11.0,697.0"), ":14"),
    ):
        counters.write_text(bad)
        with pytest.raises(InputError, match=place):
            read_log(folder, LLAMA)
    counters.write_text(good)
    (folder / f"{LLAMA}.cfg.json").write_text('{"nodes": [{"instances": [{"hardware": "RTXPRO7000"}]}]}')
    with pytest.raises(InputError, match="did you mean rtxpro6000"):
        read_log(folder, LLAMA)


def test_a_second_without_a_row_counted_nothing(tmp_path: Path) -> None:
    """Loggers leave out seconds in which no iteration ended."""
    folder = copied(tmp_path)
    counters = folder / f"{LLAMA}.ts.csv"
    lines = counters.read_text().splitlines()
    del lines[60]
    counters.write_text("\n".join(lines))
    seconds = read_log(folder, LLAMA).seconds
    assert len(seconds) == 67
    assert (seconds[59].prompt_tokens, seconds[59].generated_tokens) == (0, 0)
    assert seconds[59].running == seconds[58].running
