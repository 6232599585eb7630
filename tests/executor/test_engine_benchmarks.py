"""The benchmarks of the engines measure what they say: the same work on both sides."""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_base import LORA  # noqa: F401 - one thread, as everywhere in these tests

from executor.bench import trl_step
from executor.bench.adapters import TINY_BASE, load_peft, read_adapters, write_random_adapters
from executor.bench.clock import WorkClock
from executor.bench.rollout import OurEngine, PeftGenerate, equal_requests, spread_requests
from executor.bench.training import OurTrainer, PlainLoop, batch, num_tokens
from executor.protocols import AdapterFolder


def test_both_sides_serve_every_request_of_the_same_list(tmp_path: Path) -> None:
    """Requests that are there and requests to come, with fewer rows than requests."""
    adapters = write_random_adapters(tmp_path, 2)
    assert read_adapters(tmp_path, 2) == adapters
    requests = [
        r._replace(num_tokens=min(r.num_tokens, 6)) for r in spread_requests(6, 2, requests_per_s=5.0)
    ]
    assert len({r.num_tokens for r in requests} | {len(r.context) for r in requests}) > 3
    assert requests[-1].arrives_s > 0.3
    span = requests[-1].arrives_s
    total = sum(r.num_tokens for r in requests)
    for side in (OurEngine(adapters, 3), PeftGenerate(load_peft(adapters), 3)):
        assert 0 < side.tokens_per_s(requests) < total / span, "no request is done before it arrives"
        assert side.tokens_per_s(equal_requests(4, 2, 5, 3)) > 0


def test_the_clock_counts_work_and_skips_waiting() -> None:
    """Moments to come are jumped to, moments past stay past."""
    clock = WorkClock()
    clock.skip_to(100.0)
    assert 100.0 <= clock.now() < 101.0
    clock.skip_to(50.0)
    assert clock.now() < 101.0


def test_the_plain_loop_makes_the_same_update_as_the_training_engine(tmp_path: Path) -> None:
    """From the same adapter and batch, whatever its micro-batches, the weights after are equal."""
    samples = batch(16)
    assert num_tokens(samples) > sum(sum(sample.sampled) for sample in samples) > 0
    ours = OurTrainer(tmp_path, samples)
    start = AdapterFolder(folder=str(tmp_path / "adapter" / "v0"), fingerprint="")
    assert ours.update_s() > 0
    expected = load_file(tmp_path / "adapter" / "v1" / "adapter_model.safetensors")
    before = load_file(tmp_path / "adapter" / "v0" / "adapter_model.safetensors")
    assert any(not torch.equal(tensor, before[name]) for name, tensor in expected.items())
    model = load_peft([start])
    assert PlainLoop(model, samples, 4).update_s() > 0
    found = {
        name.replace(".0.weight", ".weight"): p for name, p in model.named_parameters() if "lora_" in name
    }
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        torch.testing.assert_close(parameter.detach(), expected[name], atol=2e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is a yardstick: .[bench]")
@pytest.mark.filterwarnings("ignore")
def test_trl_takes_the_batch_that_is_given(tmp_path: Path) -> None:
    """Its own trainer makes the updates; nothing is generated."""
    assert TINY_BASE.is_dir()
    seconds = trl_step.update_s(batch(16), tmp_path, num_updates=2, samples_at_a_time=8)
    assert len(seconds) == 2
    assert min(seconds) > 0
