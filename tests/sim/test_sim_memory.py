"""The KV pool beside weights and adapter slots: bytes by hand, and pools that vLLM measured."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace
from public_runs import multi_lora_runs

from marlaas.errors import InputError
from sim.hardware import load_device, load_model
from sim.memory import (
    BLOCK_TOKENS,
    MIB,
    OTHER_BYTES,
    activation_bytes,
    kv_bytes_per_device,
    kv_pool,
    reserved_bytes,
    slot_buffers,
    slot_bytes,
)
from sim.profile import Quantity
from sim.replica_setup import ReplicaSetup, Rollout

DIE_14B = ReplicaSetup(device=load_device("ascend-910c-die"), model=load_model("qwen3-14b"), slots=32)
# vLLM of May 2025 on an H100 of 64 GiB: adapters may add 256 tokens to the vocabulary.
H100_64 = replace(load_device("h100"), memory_bytes=Quantity(value=64 * 2.0**30, source="datasheet"))
LLAMA = ReplicaSetup(device=H100_64, model=load_model("llama-3.1-8b"), rollout=Rollout(added_tokens=256))


def buffer_bytes(setup: ReplicaSetup) -> int:
    """Bytes of all slot buffers, without what an allocator adds."""
    return sum(size * number for size, number in slot_buffers(setup).items())


def test_the_pool_is_the_formula_by_hand() -> None:
    """Whole blocks of what is left of 90 % of the memory."""
    other = Quantity(value=1e9, source="assumed")
    setup = replace(DIE_14B, rollout=Rollout(other_bytes=other))
    left = 64e9 * 0.9 - setup.model.weight_bytes - activation_bytes(setup) - 1e9 - slot_bytes(setup)
    blocks = left // (16 * 160 * 1024)
    assert kv_pool(setup).value == pytest.approx(blocks * BLOCK_TOKENS, abs=1)
    assert activation_bytes(setup) == 8192 * (2 * 17408 + 5120) * 2


def test_more_slots_more_rank_or_fewer_devices_leave_less() -> None:
    """What a planner varies moves the pool in the direction it should, and its interval with it."""
    pools = [
        kv_pool(one)
        for one in (
            replace(DIE_14B, slots=100),
            replace(DIE_14B, rank=32),
            DIE_14B,
            replace(DIE_14B, slots=8),
            replace(DIE_14B, tensor_parallel=2),
        )
    ]
    assert pools[0].value < pools[2].value
    assert [pool.value for pool in pools[1:]] == sorted(pool.value for pool in pools[1:])
    for pool in pools:
        assert pool.interval is not None
        assert pool.interval[0] < pool.value < pool.interval[1]


def test_a_measured_number_of_blocks_takes_the_place_of_the_arithmetic() -> None:
    """It is exact and says so."""
    measured = kv_pool(replace(DIE_14B, rollout=Rollout(kv_blocks=1000)))
    assert (measured.value, measured.interval, measured.source) == (16_000, None, "calibrated")


def test_a_model_that_does_not_fit_is_refused_with_its_sizes() -> None:
    """32B holds 66 GB; a die has 64."""
    with pytest.raises(InputError, match=r"of 64 GB a device 65.5 GB hold qwen3-32b over 1 devices"):
        kv_pool(replace(DIE_14B, model=load_model("qwen3-32b")))


def test_devices_beyond_the_kv_heads_hold_copies() -> None:
    """Eight KV heads are split eight ways and no further."""
    shares = [kv_bytes_per_device(replace(DIE_14B, tensor_parallel=n)) for n in (1, 4, 8, 20)]
    assert [shares[0] / one for one in shares] == [1, 4, 8, 8]


def test_a_rank_of_a_slot_costs_40_kv_tokens_of_llama_and_4_more_for_embedding_and_head() -> None:
    """The factor 1.10 that was measured for Llama is these two; Qwen has neither, and 1.00 was measured."""
    per_token = LLAMA.model.kv_bytes_per_token
    plain = replace(LLAMA, rollout=Rollout(), slots=1)
    of_rank = buffer_bytes(replace(plain, rank=17)) - buffer_bytes(replace(plain, rank=16))
    assert of_rank / per_token == pytest.approx(44.0, rel=0.002)
    assert of_rank / LLAMA.model.lora_bytes(1) == pytest.approx(1.10, abs=0.003)
    qwen = replace(DIE_14B, slots=1)
    assert buffer_bytes(replace(qwen, rank=16)) == qwen.model.lora_bytes(16)


@pytest.mark.parametrize("rank", [8, 16, 32])
@pytest.mark.parametrize("slots", [8, 96, 384])
def test_slots_cost_what_28_public_runs_were_fitted_to_cost(slots: int, rank: int) -> None:
    """48.6 KV tokens a slot and 43.98 a slot and rank, over slots 8 to 384 and ranks 8 to 32."""
    fitted = 48.6 * slots + 43.98 * slots * rank
    tokens = buffer_bytes(replace(LLAMA, slots=slots, rank=rank)) / LLAMA.model.kv_bytes_per_token
    assert tokens == pytest.approx(fitted, rel=0.002)


def test_with_tensor_parallelism_half_of_an_adapter_is_held_by_every_device() -> None:
    """The dimension that the module does not split is not split in the adapter either."""
    one, four = (buffer_bytes(replace(DIE_14B, tensor_parallel=n)) for n in (1, 4))
    assert one / 4 < four < one
    split = 32 * 16 * 2 * 40
    queries, keys, hidden, wide = 5120, 1024, 5120, 17408
    columns = 5 * hidden + (queries + 2 * keys + 2 * wide) / 4
    rows = (queries + wide) / 4 + 2 * hidden
    assert four == split * (columns + rows)


def test_an_allocator_rounds_large_buffers_up_and_packs_small_ones() -> None:
    """18.75 MiB take 20; six of 3 MiB share a segment of 20 MiB, a seventh opens another."""
    assert reserved_bytes(Counter({int(18.75 * MIB): 2})) == 40 * MIB
    assert reserved_bytes(Counter({3 * MIB: 6})) == 20 * MIB
    assert reserved_bytes(Counter({3 * MIB: 7})) == 40 * MIB
    assert reserved_bytes(Counter({1000: 3})) == 2 * MIB


def setup_of(run: str) -> ReplicaSetup:
    """The replica of a public run, from its name."""
    kind, numbers = run.split("|")[1], run.split("|")[2].split("__")[0].strip("_").split("_")
    slots, rank = (int(numbers[1]), int(numbers[2])) if kind == "lora" else (0, 8)
    return replace(LLAMA, slots=slots, rank=rank, max_num_seqs=int(numbers[0]))


def test_the_pools_of_public_runs_are_predicted_from_one_of_them() -> None:
    """With one constant, what vLLM holds besides, from one base run: all others to 1 %.

    Those with adapters have 300 slots of rank 8, which take more than a third of the pool.
    """
    runs = {name: run["kvtok"] for name, run in multi_lora_runs().items() if run["kvtok"] is not None}
    first = next(name for name in runs if "|base|_100__" in name)

    def predicted(name: str, other: float) -> float:
        rollout = Rollout(added_tokens=256, other_bytes=Quantity(value=other, source="calibrated"))
        return kv_pool(replace(setup_of(name), rollout=rollout)).value

    surplus = predicted(first, 0.0) - runs[first]
    other = surplus * LLAMA.model.kv_bytes_per_token
    errors = {name: predicted(name, other) / measured - 1 for name, measured in runs.items() if name != first}
    assert sum("|lora|" in name for name in errors) == 10
    assert len(errors) > 25
    assert max(map(abs, errors.values())) < 0.01, errors
    assert other == pytest.approx(OTHER_BYTES.value, rel=0.2), "the default is of the right size"


def test_without_the_tables_of_added_tokens_the_pool_would_be_missed() -> None:
    """The comparison with public runs can tell: 48 KV tokens a slot are 7 % of that pool."""
    setup = replace(LLAMA, slots=300, rank=8)
    plain = slot_bytes(replace(setup, rollout=Rollout()))
    assert (slot_bytes(setup) - plain) / LLAMA.model.kv_bytes_per_token > 0.05 * 209_664
