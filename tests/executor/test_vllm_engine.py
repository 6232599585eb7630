"""vLLM in a worker: how it ends, what it is started with, and a whole experiment through the command line."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from rollout_workers import ANSWER_S, experiment, served_base, started
from tiny_base import LORA, turn

from executor.base_facts import read_facts
from executor.vllm_counters import IterationCounters
from executor.vllm_settings import cores_by_stage, engine_arguments, num_blocks, rank_limit, set_surroundings
from marlaas.errors import InputError
from marlaas.spec import ModelSpec, ReplicasSpec

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: make test-vllm"
)
ROOT = Path(__file__).parents[2]


def assert_all_gone(processes: list[psutil.Process], within_s: float = 5.0) -> None:
    """Every process ends in time; a zombie nobody of ours can reap counts as ended."""
    deadline = time.monotonic() + within_s
    left = processes
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert left == []


@pytest.mark.slow
@needs_vllm
def test_however_vllm_or_its_worker_ends_nothing_is_left_and_the_reason_is_told(tmp_path: Path) -> None:
    """SIGKILL of the worker in the middle of turns; SIGKILL of vLLM's engine while it has nothing to do."""
    spec = experiment(ReplicasSpec(engine="vllm", slots=2, kv_tokens=4096))
    with started(tmp_path / "a", spec) as first, started(tmp_path / "b", spec) as second:
        first.load("t", 0, 1)
        first.until(1)
        first.generate("t", 0, [turn(i, [1, 2], 200) for i in range(64)])
        time.sleep(0.2)
        family = psutil.Process(first.process.pid).children(recursive=True)
        assert any("EngineCore" in process.name() for process in family)
        first.process.kill()
        assert_all_gone(family)

        family = psutil.Process(second.process.pid).children(recursive=True)
        next(process for process in family if "EngineCore" in process.name()).kill()
        second.hear(ANSWER_S)
        assert second.crashed is not None
        assert "vLLM's engine" in second.crashed
        assert_all_gone([psutil.Process(second.process.pid), *family])


@pytest.mark.slow
@needs_vllm
@pytest.mark.filterwarnings("ignore")
def test_vllm_finds_kv_again_by_adapter_as_well_as_by_tokens() -> None:
    """The key of a cached block holds the name and the folder of the adapter, and of none for the base."""
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
    from vllm.v1.request import Request

    def key(adapter: LoRARequest | None) -> object:
        request = Request("one", [1] * 64, SamplingParams(), None, lora_request=adapter)
        return generate_block_hash_extra_keys(request, 0, 32, 0)[0]

    adapters = [LoRARequest(name, i + 1, f"/run/{name}") for i, name in enumerate(("t-v0", "t-v1", "u-v0"))]
    keys = [key(None), *(key(adapter) for adapter in adapters)]
    assert len(set(keys)) == 4
    assert all(adapter.lora_name in str(each) for adapter, each in zip(adapters, keys[1:], strict=True))


STARTER = """
import subprocess, sys, time
sys.path.insert(0, {root!r})
from executor.reaper import contain
contain()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_contained_process_started_does_not_outlive_it(number: signal.Signals) -> None:
    """Its child and the watcher itself are gone soon after it; whoever started it is not in their group."""
    command = [sys.executable, "-c", STARTER.format(root=str(ROOT))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2
        assert os.getpgid(process.pid) == process.pid
        process.send_signal(number)
        process.wait(5)
        assert_all_gone(family)


def test_the_experiments_words_become_vllms_arguments() -> None:
    """Slots, KV pool, lengths and parallelism are as declared on every kind of device."""
    base = read_facts(served_base(), LORA)
    replicas = ReplicasSpec(
        engine="vllm", slots=3, kv_tokens=1000, devices=8, pipeline_parallel=2, eager=False
    )
    model = ModelSpec(path=served_base(), lora=LORA)
    arguments = {
        kind: engine_arguments(model, replicas, base, kind, "bfloat16") for kind in ("cpu", "cuda", "npu")
    }
    for each in arguments.values():
        assert (each["max_loras"], each["max_cpu_loras"], each["max_lora_rank"]) == (3, 3, 8)
        assert each["max_model_len"] == 256
        assert each["enforce_eager"] is False
        assert each["enable_prefix_caching"]
        assert each["logprobs_mode"] == "raw_logprobs"
    shards = {kind: (e["tensor_parallel_size"], e["pipeline_parallel_size"]) for kind, e in arguments.items()}
    assert shards == {"cpu": (1, 2), "cuda": (4, 2), "npu": (4, 2)}
    blocks = {kind: (e["block_size"], e["num_gpu_blocks_override"]) for kind, e in arguments.items()}
    assert blocks == {"cpu": (32, 32), "cuda": (16, 63), "npu": (128, 8)}
    assert "enable_chunked_prefill" not in arguments["cuda"]


def test_kv_blocks_hold_what_is_declared_and_ranks_are_rounded_up() -> None:
    """One block more than the tokens need, for vLLM keeps one; ranks beyond vLLM's are refused."""
    assert num_blocks(64, 32) == 3
    assert [rank_limit(rank) for rank in (1, 8, 9, 64)] == [8, 8, 16, 64]
    with pytest.raises(InputError, match=r"model\.lora\.rank.*at most 512"):
        rank_limit(513)


def test_vllms_processes_compute_on_the_workers_cores() -> None:
    """On a CPU its threads are bound to them, the pool fits, and what the user has set stays."""
    base = read_facts(served_base(), LORA)
    replicas = ReplicasSpec(engine="vllm", kv_tokens=4_000_000)
    environ = {"VLLM_LOGGING_LEVEL": "DEBUG"}
    set_surroundings(replicas, base, "cpu", "float32", (2, 3), environ)
    assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert int(environ["VLLM_CPU_KVCACHE_SPACE"]) * 2**30 > 4_000_000 * 2 * 2 * 32 * 4
    assert environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert cores_by_stage((0, 1, 2), 2) == "0,2|1"
    assert cores_by_stage((5,), 2) == "5|5"


class Stats:
    """What vLLM says of an iteration."""

    def __init__(self, tokens: int, first: int, prompt: int, kv: float, adapters: int) -> None:
        self.num_generation_tokens, self.num_prompt_tokens = tokens, prompt
        self.time_to_first_tokens_iter = [0.0] * first
        self.kv_cache_usage, self.running_lora_adapters = kv, dict.fromkeys(range(adapters), 1)


def test_iterations_are_counted_as_calibration_reads_them() -> None:
    """Decoding turns, KV and adapters of each iteration; prefills apart, and their time beyond decoding's."""
    counters = IterationCounters("replica-0", kv_tokens=1000)
    counters.begin()
    for stats in (
        Stats(3, 3, 30, 0.1, 2),  # three prefills
        Stats(3, 0, 0, 0.1, 2),
        Stats(4, 1, 7, 0.2, 3),  # one more among three that decode
        Stats(4, 0, 0, 0.0, 0),  # all end: what is left holds nothing, but while it ran there were three
    ):
        counters.record(stats, stats)
        assert counters.window(is_idle=False) is None
    measured = counters.window(is_idle=True)
    assert measured is not None
    assert (measured.num_iterations, measured.sequences_sum, measured.adapters_sum) == (3, 10, 8)
    assert measured.kv_tokens_sum == 100 + 200 + 200
    assert (measured.num_prefills, measured.prefill_tokens) == (2, 37)
    assert 0 < measured.prefill_ns < measured.busy_ns
    assert counters.window(is_idle=True) is None


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("system", ["marlaas", "sync", "single"])
def test_eight_tasks_over_four_slots_run_through_the_command_line(tmp_path: Path, system: str) -> None:
    """Every task is done after its three steps, and the trace replays."""
    marlaas = [sys.executable, "-m", "experiments"]
    out = str(tmp_path / system)
    run = [*marlaas, "execute", "experiments/vllm.yaml", "--out", out, "--system", system]
    subprocess.run(run, cwd=ROOT, check=True, timeout=900)
    replay = subprocess.run(
        [*marlaas, "replay", out], cwd=ROOT, check=True, timeout=60, capture_output=True, text=True
    )
    assert "384 issued = 384 trained" in replay.stdout
