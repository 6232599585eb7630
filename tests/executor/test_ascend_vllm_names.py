"""Everything our code asks of vLLM is there in the version that vllm-ascend is released for."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from pinned_wheels import pinned_version
from vllm_names import NAMES
from vllm_usage import missing, uses

from executor.base_facts import BaseFacts
from executor.vllm_counters import IterationCounters
from executor.vllm_settings import engine_arguments, rank_limit
from marlaas.cluster_spec import VLLM_BLOCK_TOKENS
from marlaas.spec import LoraSpec, ModelSpec, ReplicasSpec

ROOT = Path(__file__).parents[2]
HAVE: dict[str, Any] = json.loads(NAMES.read_text())
SOURCES = [
    # All but the benchmark, which compares with vLLM's offline class on CPUs.
    *sorted(file for file in (ROOT / "executor").glob("*vllm*.py") if not file.stem.endswith("_bench")),
    *sorted((ROOT / "executor").glob("openai*.py")),
    ROOT / "experiments" / "preflight.py",
]


def arguments(device: str, **replicas: Any) -> dict[str, Any]:
    """What one of our replicas passes to vLLM's engine."""
    base = BaseFacts(100, 2048, (2,), LoraSpec(), {}, 64)
    spec = ReplicasSpec(engine="vllm", **replicas)
    return engine_arguments(ModelSpec(path="base"), spec, base, device, "bfloat16")


def test_the_list_is_of_the_pinned_version() -> None:
    """After a change of the pin the list must be made anew: python tests/executor/vllm_names.py."""
    assert HAVE["vllm"] == pinned_version("vllm")


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_what_our_sources_ask_for_is_there(source: Path) -> None:
    """Imports, arguments, methods, attributes, environment variables and routes."""
    asked = list(uses(ast.parse(source.read_text(encoding="utf-8"))))
    lacking = [f"{source.name}:{use.line}: {lack}" for use in asked if (lack := missing(use, HAVE))]
    assert lacking == []


def test_the_reading_finds_what_is_known_to_be_asked() -> None:
    """Or names in our sources have changed and the reading sees nothing of them any more."""
    trees = [ast.parse(source.read_text(encoding="utf-8")) for source in SOURCES]
    asked = {(use.kind, use.owner, use.name) for tree in trees for use in uses(tree)}
    assert {
        ("import", "vllm.v1.engine.async_llm", "AsyncLLM"),
        ("argument", "AsyncLLM.generate()", "lora_request"),
        ("argument", "AsyncLLM.from_engine_args()", "stat_loggers"),
        ("argument", "AsyncLLM.add_lora()", "#0"),
        ("argument", "LoRARequest()", "#2"),
        ("argument", "SamplingParams()", "output_kind"),
        ("attribute", "AsyncLLM", "pin_lora"),
        ("attribute", "AsyncLLM", "remove_lora"),
        ("attribute", "LoRARequest", "lora_int_id"),
        ("attribute", "RequestOutput", "outputs"),
        ("attribute", "CompletionOutput", "token_ids"),
        ("attribute", "Logprob", "logprob"),
        ("attribute", "IterationStats", "num_generation_tokens"),
        ("attribute", "Platform", "device_type"),
        ("variable", "", "VLLM_CPU_KVCACHE_SPACE"),
        ("variable", "", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ("route", "", "/v1/unload_lora_adapter"),
        ("argument", "CompletionRequest()", "return_token_ids"),
        ("argument", "LoadLoRAAdapterRequest()", "lora_path"),
        ("attribute", "CompletionResponseChoice", "token_ids"),
        ("attribute", "ModelCard", "id"),
    } <= asked


@pytest.mark.parametrize(
    ("line", "lack"),
    [
        ("from vllm import no_such", "vllm has no no_such"),
        ("import vllm.nowhere", "vllm.nowhere is not in the list"),
        ("SamplingParams(max_token=3)", "SamplingParams() takes no max_token"),
        ("llm.generate(prompt, sampling, '1', adapter)", "AsyncLLM.generate() takes 3 by place"),
        ("self._llm.load_lora(adapter)", "AsyncLLM has no load_lora"),
        ("output.outputs[0].token_idz", "CompletionOutput has no token_idz"),
        ("environ['VLLM_CPU_KV_SPACE'] = '1'", "vLLM reads no VLLM_CPU_KV_SPACE"),
        ("ask('/v1/completions', max_new_tokens=3)", "CompletionRequest() takes no max_new_tokens"),
        ("choice['tokens']", "CompletionResponseChoice has no tokens"),
        ("post('/v1/load_adapter')", "vLLM serves no /v1/load_adapter"),
    ],
)
def test_what_is_not_there_is_found(line: str, lack: str) -> None:
    """The check bites."""
    found = [missing(use, HAVE) for use in uses(ast.parse(line))]
    assert any(told is not None and told.startswith(lack) for told in found)


@pytest.mark.parametrize("device", list(VLLM_BLOCK_TOKENS))
def test_every_argument_of_the_engine_is_one(device: str) -> None:
    """`AsyncEngineArgs` has a field for each, and the value where vLLM allows only some."""
    passed = arguments(device, devices=4, pipeline_parallel=2)
    assert set(passed) <= set(HAVE["classes"]["AsyncEngineArgs"]["fields"])
    assert passed["logprobs_mode"] in HAVE["literals"]["LogprobsMode"]
    assert passed["max_lora_rank"] in HAVE["literals"]["MaxLoRARanks"]


def test_every_rank_gets_a_limit_that_vllm_allows() -> None:
    """An adapter's room is the next rank that vLLM makes kernels for."""
    allowed = set(HAVE["literals"]["MaxLoRARanks"])
    assert {rank_limit(rank) for rank in range(1, 513)} <= allowed


def test_an_npu_replica_is_asked_for_what_vllm_ascend_takes() -> None:
    """Blocks of 128 tokens, bf16, layers shared by the devices of a stage, as many adapters on the host."""
    passed = arguments("npu", devices=8, pipeline_parallel=2, slots=32)
    assert passed["block_size"] == 128
    assert passed["dtype"] == "bfloat16"
    assert (passed["tensor_parallel_size"], passed["pipeline_parallel_size"]) == (4, 2)
    assert passed["max_loras"] == passed["max_cpu_loras"] == 32


def test_our_logger_of_statistics_is_one_of_vllms() -> None:
    """It has every method that vLLM calls, and `record` takes what is passed."""
    for method, parameters in HAVE["classes"]["StatLoggerBase"]["methods"].items():
        if method != "__init__":
            code = getattr(IterationCounters, method).__code__
            takes_any = bool(code.co_flags & 0x0C)
            assert takes_any or set(parameters) <= set(code.co_varnames), method


def test_a_prompt_of_token_ids_is_what_vllm_calls_one() -> None:
    """The keys of the dictionary that stands for a prompt."""
    tree = ast.parse((ROOT / "executor" / "vllm_server.py").read_text())
    prompts = [
        {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "prompt"
        and isinstance(node.value, ast.Dict)
    ]
    assert prompts
    assert all(keys <= set(HAVE["classes"]["TokensInput"]["attributes"]) for keys in prompts)
