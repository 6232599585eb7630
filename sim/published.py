"""Published measurements beside what the roofline says of them: `python -m sim.published`.

A figure is an input where a device's YAML took a number from it, else a check. What a source does not state,
such as contexts, is assumed and said so. Owns the figures and their conditions; the formulas are `roofline`'s
and `training_roofline`'s.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sim.hardware import Mode, load_device, load_model
from sim.profile import ReplicaProfile
from sim.replica_setup import ReplicaSetup, Rollout
from sim.roofline import replica_costs
from sim.training_roofline import LaneSetup, Training, lane_costs

Use = Literal["check", "input", "other"]
# How far off a check may be: what predictions from datasheets were seen to be, and more for training, where
# the sources do not state the micro-batch on which the rate depends most.
ERROR_BOUND = 0.45
TRAINING_ERROR_BOUND = 0.6
H200_TABLE = "H200, Llama-3.1-8B, kernel tables of vLLM 0.24"
H100_RUNS = "64 GB H100 class, Llama-3.1-8B, vLLM of May 2025"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One published number and its prediction, both in `unit`.

    `use`: a check; an input, from which a device's figures were taken; or other, where engine or model are
    not those that the profile describes. A check may be off by `bound`.
    """

    where: str
    what: str
    unit: str
    published: float
    predicted: float
    use: Use = "check"
    bound: float = ERROR_BOUND

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.published - 1


def decode_s(costs: ReplicaProfile, num_sequences: int, context_tokens: int, num_adapters: int = 0) -> float:
    """One decode iteration of sequences with contexts of one length, in seconds."""
    beyond = max(0.0, num_sequences - costs.knee_sequences.value)
    total = (
        costs.iteration_s.value
        + costs.per_sequence_s.value * num_sequences
        + costs.per_sequence_beyond_knee_s.value * beyond
        + costs.per_kv_token_s.value * num_sequences * context_tokens
    )
    if num_adapters:
        total += costs.adapters_s.value + costs.per_adapter_s.value * num_adapters
    return total


def figures() -> list[Figure]:
    """All published figures."""
    return [*_h200(), *_h100(), *_ascend(), *_old_adapters(), *_training()]


def table(rows: list[Figure]) -> str:
    """The figures as text, one a line."""
    lines = [f"{'use':6}{'published':>11}{'predicted':>11}{'error':>8}  what"]
    lines += [
        f"{row.use:6}{row.published:11.5g}{row.predicted:11.5g}{row.error:+8.0%}"
        f"  {row.what}, {row.unit}; {row.where}"
        for row in rows
    ]
    return "\n".join(lines)


def _costs(
    device: str, model: str, tensor: int = 1, mode: Mode = "graph", rank: int = 16, weight_bytes: int = 2
) -> ReplicaProfile:
    shape = msgspec.structs.replace(load_model(model), dtype_bytes=weight_bytes)
    setup = ReplicaSetup(
        device=load_device(device), model=shape, tensor_parallel=tensor, rollout=Rollout(mode=mode), rank=rank
    )
    return replica_costs(setup)


def _h200() -> list[Figure]:
    costs = _costs("h200", "llama-3.1-8b")

    def fitted_ms(num: int, context: int) -> float:
        return 4.95 + 0.0105 * num + 2.93e-5 * num * context + 0.0076 * max(0, num - 160)

    terms = [
        ("an iteration", "ms", 4.95, 1e3 * costs.iteration_s.value),
        ("each sequence", "µs", 10.5, 1e6 * costs.per_sequence_s.value),
        ("each sequence beyond the knee", "µs more", 7.6, 1e6 * costs.per_sequence_beyond_knee_s.value),
        ("each KV token", "ns", 29.3, 1e9 * costs.per_kv_token_s.value),
        ("each prefill token", "µs", 16.34, 1e6 * costs.per_prefill_token_s.value),
    ]
    whole = [
        (f"{n} × {k} tokens decoding", "ms", fitted_ms(n, k), 1e3 * decode_s(costs, n, k))
        for n, k in ((1, 256), (64, 1024), (256, 512), (512, 2048))
    ]
    return [
        Figure(where=H200_TABLE, what=what, unit=unit, published=published, predicted=predicted)
        for what, unit, published, predicted in terms + whole
    ]


def _h100() -> list[Figure]:
    costs = _costs("h100", "llama-3.1-8b", rank=8)

    def fitted_ms(num: int, context: int) -> float:
        return 12.47 + 0.0191 * num + 5.16e-5 * num * context + 0.0186 * max(0, num - 150)

    whole = [
        Figure(
            where=H100_RUNS,
            what=f"{n} × {k} tokens decoding",
            unit="ms",
            published=fitted_ms(n, k),
            predicted=1e3 * decode_s(costs, n, k),
        )
        for n, k in ((50, 100), (200, 200), (800, 200))
    ]
    further = Figure(
        where=H100_RUNS,
        what="each adapter of rank 8",
        unit="ms",
        published=0.325,
        predicted=1e3 * costs.per_adapter_s.value,
        use="input",
    )
    return [*whole, further]


def _ascend() -> list[Figure]:
    """Of vllm-ascend in bfloat16 unless said otherwise; contexts are not published."""
    small, large = _costs("ascend-910c-die", "qwen3-4b", 4), _costs("ascend-910c-die", "qwen3-32b", 4)
    one = _costs("ascend-910c-die", "qwen3-8b")
    int8 = _costs("ascend-910c-die", "qwen3-32b", 4, weight_bytes=1)
    where = "Ascend, vllm-ascend; contexts of 500 tokens assumed"
    return [
        Figure(
            where=where,
            what="Qwen3-4B on 4 NPUs, one stream, a token",
            unit="ms",
            published=20.0,
            predicted=1e3 * decode_s(small, 1, 500),
            use="input",
        ),
        Figure(
            where=where,
            what="Qwen3-32B on 4 NPUs, one stream, a token",
            unit="ms",
            published=38.0,
            predicted=1e3 * decode_s(large, 1, 500),
            use="input",
        ),
        Figure(
            where=where,
            what="Qwen3-8B on one NPU, 10 streams, a token",
            unit="ms",
            published=25.9,
            predicted=1e3 * decode_s(one, 10, 500),
        ),
        Figure(
            where=where,
            what="Qwen3-8B on one NPU, 40 streams",
            unit="tokens/s",
            published=1514.0,
            predicted=40 / decode_s(one, 40, 500),
        ),
        Figure(
            where="A3, vllm-ascend, weights as one byte each; contexts of 2,000 tokens assumed",
            what="Qwen3-32B W8A8 on 4 NPUs, 76 streams",
            unit="tokens/s",
            published=1288.0,
            predicted=76 / decode_s(int8, 76, 2000),
            use="other",
        ),
    ]


def _old_adapters() -> list[Figure]:
    """An old multi-adapter path, about 31 + 3.1·B ms; its model is not stated."""
    costs = _costs("ascend-910c-die", "qwen3-8b", mode="eager")
    return [
        Figure(
            where="A3, old path, model not stated, taken as 8B in eager mode",
            what=f"{n} streams, an adapter each",
            unit="ms",
            published=1e3 * n / rate,
            predicted=1e3 * decode_s(costs, n, 500, n),
            use="other",
        )
        for n, rate in ((1, 29.3), (4, 82.0), (8, 134.0), (16, 199.0))
    ]


def _training() -> list[Figure]:
    """LoRA fine-tuning; what is recomputed is inferred from the stated MFU, micro-batches are assumed."""
    alone = Training(sharding="replicated", checkpointing=False, old_logprobs=False)
    several = Training(sharding="replicated", checkpointing=True, old_logprobs=True)
    cases = [
        ("Qwen3-0.6B on one H100", "h100", "qwen3-0.6b", 1, alone, 1024, 13_300.0),
        ("Qwen3-4B on one H100", "h100", "qwen3-4b", 1, alone, 1024, 6_200.0),
        ("Qwen3-4B on 8 H200", "h200", "qwen3-4b", 8, several, 8192, 52_400.0),
    ]
    return [
        Figure(
            where=f"LoRA training; micro-batches of {micro:,} tokens assumed",
            what=what,
            unit="tokens/s",
            published=rate,
            predicted=_tokens_per_s(device, model, devices, training, micro),
            use="input" if devices == 8 else "check",
            bound=TRAINING_ERROR_BOUND,
        )
        for what, device, model, devices, training, micro, rate in cases
    ]


def _tokens_per_s(
    device: str, model: str, devices: int, training: Training, micro_batch_tokens: int
) -> float:
    """Tokens per second in full micro-batches, steps' fixed parts left out."""
    setup = LaneSetup(
        device=load_device(device), model=load_model(model), num_devices=devices, training=training
    )
    costs, tokens = lane_costs(setup), micro_batch_tokens * devices
    return tokens / (costs.per_micro_batch_s.value + costs.per_token_s.value * tokens)


if __name__ == "__main__":
    print(table(figures()))
