"""Which versions go together on Ascend and what they can do with adapters: literal tables with sources.

Pure data. Nothing here was measured by this project: every row says where it is written.
"""

from __future__ import annotations

from typing import NamedTuple

_SDIST = "vllm-ascend 0.23.0.post1, source distribution"
_MATRIX = f"{_SDIST}: docs/source/community/versioning_policy.md, release compatibility matrix"
_ISSUES = "github.com/vllm-project/vllm-ascend/issues"
_PULLS = "github.com/vllm-project/vllm-ascend/pull"


class Release(NamedTuple):
    """Versions that were released to be used together."""

    vllm_ascend: str
    vllm: str
    cann: str
    torch: str
    torch_npu: str
    triton_ascend: str
    transformers: str
    python: tuple[tuple[int, int], tuple[int, int]]
    """From, and up to but without."""
    source: str


# The release that `marlaas[ascend]` pins comes first.
RELEASES = (
    Release(
        vllm_ascend="0.23.0.post1",
        vllm="0.23.0",
        cann="9.1.0",
        torch="2.10.0",
        torch_npu="2.10.0.post4",
        triton_ascend="3.2.2",
        transformers="5.5.4",
        python=((3, 10), (3, 13)),
        source=f"{_MATRIX}; its Requires-Dist",
    ),
    Release(
        vllm_ascend="0.23.0",
        vllm="0.23.0",
        cann="9.1.0",
        torch="2.10.0",
        torch_npu="2.10.0.post4",
        triton_ascend="3.2.2",
        transformers="5.5.4",
        python=((3, 10), (3, 13)),
        source=_MATRIX,
    ),
)
PINNED = RELEASES[0]


class Limit(NamedTuple):
    """Something an adapter-serving replica can do on Ascend, how far, and where that is written."""

    what: str
    works: bool
    state: str
    source: str


# vLLM accepts more ranks; above 64 vllm-ascend falls back from its kernels to plain torch at 128, and the
# service whose documentation lists ranks lists these.
MAX_RANK = 64
MAX_SLOTS = 32
# vLLM's allowed values of max_lora_rank: an adapter's room is rounded up to one of them.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

LIMITS = (
    Limit(
        "adapter slots",
        True,
        f"at most {MAX_SLOTS} a replica are documented, with as many in host memory; a public training system"
        " of the original's authors sets 100",
        "support.huaweicloud.com/bestpractice-modelarts/modelarts_llm_infer_5901029.html (--max-loras)",
    ),
    Limit(
        "adapter rank",
        True,
        f"up to {MAX_RANK} with Ascend's own kernels, plain torch from 128 on; the rank must not exceed the"
        " width of any output slice of a device (key and value heads over the tensor-parallel size)",
        f"{_SDIST}: vllm_ascend/lora/punica_npu.py, csrc/torch_binding.cpp (sgmv_expand); github.com/"
        "verl-project/verl/pull/7921",
    ),
    Limit(
        "graph mode with LoRA",
        True,
        "ACL graphs work with adapters on one device; in the second model runner a base and an adapter"
        " request of one size could hang each other's replay, so that `eager: true` is the safe start",
        f"{_SDIST}: docs/source/user_guide/feature_guide/lora.md; {_PULLS}/14225",
    ),
    Limit(
        "tensor parallel with LoRA",
        True,
        "tested there with 2 devices and Llama-3.2, A whole or sharded; models with gated linear attention"
        " (Qwen3.5, Qwen3-Next) abort at 4 devices or hang. vLLM 0.23 gathers the low-rank products of all"
        " devices even where A is whole, which fully_sharded_loras makes consistent",
        f"{_SDIST}: tests/e2e/pull_request/two_card/lora; {_ISSUES}/16586 (0.23.0, open), {_ISSUES}/6143 with"
        " pull/6650; vLLM 0.23.0: vllm/lora/layers/column_parallel_linear.py (_mcp_apply)",
    ),
    Limit(
        "tensor parallel with LoRA in graph mode",
        False,
        "reported not to work together; tested there with piecewise graphs only, which are not the default",
        f"{_ISSUES}/10897; {_SDIST}: tests/e2e/pull_request/two_card/lora/test_llama32_lora_tp2.py",
    ),
    Limit(
        "MoE with LoRA",
        True,
        "works, but not with expert parallelism and not on quantised weights",
        f"{_SDIST}: docs/source/user_guide/feature_guide/lora.md",
    ),
    Limit(
        "prefix cache and log-probabilities",
        True,
        "functional",
        f"{_SDIST}: docs/source/user_guide/support_matrix/supported_features.md",
    ),
)

# Architectures whose linear attention breaks tensor parallelism with adapters (see LIMITS).
GATED_LINEAR_ATTENTION = ("qwen3_5", "qwen3_next")


def release_of(vllm_ascend: str) -> Release | None:
    """The row of a version of vllm-ascend, or None where the table does not know it."""
    return next((row for row in RELEASES if row.vllm_ascend == vllm_ascend), None)


def cann_for(torch_npu: str) -> str | None:
    """The CANN version that goes with a version of torch_npu, or None where the table does not say."""
    return next((row.cann for row in RELEASES if row.torch_npu == torch_npu), None)
