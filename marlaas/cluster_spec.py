"""The part of an experiment that says what there is to run on: base model, replicas, lanes, placement."""

from __future__ import annotations

from typing import Literal

import msgspec

from marlaas.distributions import Count, Positive, Share, Spec


class LoraSpec(Spec, frozen=True, kw_only=True):
    """Shape of every task's adapter."""

    rank: Count = 8
    alpha: Count = 16
    targets: str | tuple[str, ...] = "all-linear"


class ChatSpec(Spec, frozen=True, kw_only=True):
    """How conversations are written: `auto` uses the model's own chat template where its folder has one.

    `variables` are given to the template, for example `enable_thinking: false`.
    """

    template: Literal["auto", "none"] = "auto"
    variables: dict[str, bool | str] = msgspec.field(default_factory=dict)


class ModelSpec(Spec, frozen=True, kw_only=True):
    """The frozen base model: a Hugging Face folder, relative to the YAML file or absolute.

    `dtype: auto` is bfloat16 on an accelerator and float32 on the CPU.
    """

    path: str = "tiny-base"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    lora: LoraSpec = LoraSpec()
    chat: ChatSpec = ChatSpec()


VLLM_BLOCK_TOKENS = {"cpu": 32, "cuda": 16, "npu": 128}
"""The KV block that suits vLLM on a kind of device."""


class ReplicasSpec(Spec, frozen=True, kw_only=True):
    """Rollout engines: `count` replicas of `devices` devices each.

    `torch` is the embedded engine, `vllm` runs vLLM in the worker, `openai` speaks to vLLM servers that are
    up elsewhere, replica i to `urls[i]`. The last four keys are for `vllm`: the pipeline's stages share
    `devices` evenly, each stage's part being tensor-parallel; `eager` runs without compiling or capturing
    graphs; `memory_utilization` is the share of a device's memory that may be taken; `block_tokens` is the
    KV block, None being what suits the device. A KV pool holds `kv_tokens` whatever memory there is.

    `batch_invariant` is for `torch`: a turn's tokens and log-probabilities are the same to the bit
    whatever runs beside it. None is that on a CPU where it can be had; true refuses to start where it
    cannot.
    """

    count: Count = 1
    devices: Count = 1
    engine: Literal["torch", "vllm", "openai"] = "torch"
    device: Literal["cpu", "cuda", "npu", "auto"] = "cpu"
    slots: Count = 8
    max_num_seqs: Count = 256
    kv_tokens: Count = 65_536
    peak_tokens_per_s: Positive | None = None
    batch_invariant: bool | None = None
    urls: tuple[str, ...] = ()
    pipeline_parallel: Count = 1
    eager: bool = True
    memory_utilization: Share = 0.9
    block_tokens: Count | None = None


class LanesSpec(Spec, frozen=True, kw_only=True):
    """Training engines: `count` lanes of `devices` devices each, all of one machine.

    A lane of several devices is as many processes (ranks) over one base model, sharded among them; on the CPU
    a device is such a process with its share of the lane's cores.
    """

    count: Count = 1
    devices: Count = 1
    engine: Literal["torch"] = "torch"
    device: Literal["cpu", "cuda", "npu", "auto"] = "cpu"
    peak_tokens_per_s: Positive | None = None


class ClusterSpec(Spec, frozen=True, kw_only=True):
    """What there is to run on, and who starts workers there.

    `placement: local` starts processes of this machine; `ray` starts actors on the nodes of the Ray
    cluster at `ray_address`: `HOST:PORT`, `auto` for the cluster this machine belongs to, None for one of
    this machine alone, made for the run. With `shared_folder` every node sees the run folder under the
    same path; without it adapters travel through Ray's object store.
    """

    replicas: ReplicasSpec = ReplicasSpec()
    lanes: LanesSpec = LanesSpec()
    placement: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    shared_folder: bool = False
