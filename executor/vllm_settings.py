"""What an experiment's words mean to vLLM: the arguments of its engine and the environment of its processes.

Owns the translation alone, the same for CPU, CUDA and Ascend; starts nothing and imports no vLLM.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from typing import Any

from executor.base_facts import BaseFacts
from marlaas.cluster_spec import VLLM_BLOCK_TOKENS
from marlaas.errors import InputError
from marlaas.spec import ModelSpec, ReplicasSpec

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_BATCHED_TOKENS = 2048
_NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def engine_arguments(
    model: ModelSpec, replicas: ReplicasSpec, base: BaseFacts, device: str, dtype: str
) -> dict[str, Any]:
    """Arguments of vLLM's `AsyncEngineArgs` for one replica on a kind of device (not `auto`)."""
    block_tokens = replicas.block_tokens or VLLM_BLOCK_TOKENS.get(device, VLLM_BLOCK_TOKENS["cuda"])
    stages, longest = replicas.pipeline_parallel, base.longest(replicas.kv_tokens)
    arguments = {
        "model": model.path,
        "skip_tokenizer_init": True,  # token ids in, token ids out: no text is ever tokenised twice
        "generation_config": "vllm",  # no sampling habits of the model folder
        "dtype": dtype,
        "seed": 0,
        "enforce_eager": replicas.eager,
        # A CPU replica's devices are cores, which one process uses together.
        "tensor_parallel_size": 1 if device == "cpu" else replicas.devices // stages,
        "pipeline_parallel_size": stages,
        "max_model_len": longest,
        "max_num_seqs": replicas.max_num_seqs,
        "block_size": block_tokens,
        "num_gpu_blocks_override": num_blocks(replicas.kv_tokens, block_tokens),
        "gpu_memory_utilization": replicas.memory_utilization,
        "enable_prefix_caching": True,
        "logprobs_mode": "raw_logprobs",  # at temperature 1, over the whole vocabulary
        "enable_lora": True,
        # As many on the host as on the device: vLLM then has nothing to swap by itself.
        "max_loras": replicas.slots,
        "max_cpu_loras": replicas.slots,
        "max_lora_rank": rank_limit(model.lora.rank),
        "disable_log_stats": True,
    }
    return arguments | (_for_cpu(replicas, longest) if device == "cpu" else {})


def _for_cpu(replicas: ReplicasSpec, longest: int) -> dict[str, Any]:
    """What is different on a CPU."""
    return {
        # A seeded request whose prompt is read in parts ends vLLM's engine there: it rewinds a kind of random
        # generator that CPUs lack ("CPU Generator does not use offset"). So no prompt is read in parts.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(_BATCHED_TOKENS, longest, replicas.max_num_seqs),
        "worker_extension_cls": "executor.vllm_extension.CleanBlocks",
        # vLLM's engine process can compute by itself: the worker has set its cores and threads.
        **({"distributed_executor_backend": "uni"} if replicas.pipeline_parallel == 1 else {}),
    }


def num_blocks(kv_tokens: int, block_tokens: int) -> int:
    """KV blocks that hold so many tokens: vLLM keeps one block for itself."""
    return kv_tokens // block_tokens + 1


def rank_limit(rank: int) -> int:
    """The smallest limit on adapter ranks that vLLM can be given and that this rank keeps."""
    fitting = [limit for limit in _RANKS if limit >= rank]
    if not fitting:
        raise InputError("model.lora.rank", f"vLLM serves no rank of {rank}", f"wanted at most {_RANKS[-1]}")
    return fitting[0]


def set_surroundings(
    replicas: ReplicasSpec,
    base: BaseFacts,
    device: str,
    dtype: str,
    cores: Sequence[int],
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """Set what vLLM's own processes read from the environment; must run before vLLM is imported."""
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if device == "cpu":
        pool_bytes = replicas.kv_tokens * base.kv_numbers_per_token * _NUMBER_BYTES[dtype]
        environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(pool_bytes // 2**30 + 1))
        environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores_by_stage(cores, replicas.pipeline_parallel))
        if replicas.pipeline_parallel == 1:
            environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # else "uni" is overruled on a CPU


def cores_by_stage(cores: Sequence[int], num_stages: int) -> str:
    """Core numbers as vLLM's CPU backend reads them: one list per process, shared where they are too few."""
    shares = [cores[i::num_stages] or [cores[i % len(cores)]] for i in range(num_stages)]
    return "|".join(",".join(str(core) for core in share) for share in shares)
