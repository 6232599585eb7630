"""What fits into a replica's memory: adapter slots, and the KV pool in what is left.

    blocks = ⌊(memory · utilisation − weights − activations − other − slots) / block bytes⌋

Per device of a replica; vLLM sizes its pool so, once, when it starts. Owns the arithmetic of bytes; how long
anything takes is `roofline`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from marlaas.errors import InputError
from sim.derived import derived, guessed
from sim.profile import Quantity
from sim.replica_setup import ReplicaSetup

BLOCK_TOKENS = 16
MIB = 2**20
# Of PyTorch's caching allocator: large buffers are rounded up to this, smaller ones share a segment.
GRANULE_BYTES = 2 * MIB
LARGE_BYTES = 10 * MIB
SEGMENT_BYTES = 20 * MIB

# Logits in the model's type and in float32, and the indices of their sorting: vLLM 0.9 was seen to take 14.3.
SAMPLER_BYTES_PER_LOGIT = 14
ACTIVATIONS_FACTOR = guessed(
    1.0, 0.5, 2.0, "of a gated MLP's inputs and one hidden state per token of the largest prefill"
)
OTHER_BYTES = guessed(
    1.5e9, 0.3e9, 5.0e9, "runtime, communication buffers, fragments; up to 5 GB in another simulator's fit"
)


def kv_pool(setup: ReplicaSetup) -> Quantity:
    """Tokens of KV that fit a replica; raises `InputError` when not even one block does.

    A measured number of blocks takes the place of the arithmetic.
    """
    if setup.rollout.kv_blocks is not None:
        tokens = setup.rollout.kv_blocks * BLOCK_TOKENS
        return Quantity(value=tokens, source="calibrated", note="measured blocks of 16 tokens")
    held = setup.model.weight_bytes / setup.num_devices + slot_bytes(setup)
    block_bytes = kv_bytes_per_device(setup) * BLOCK_TOKENS

    def tokens_in(memory: float, factor: float, other: float) -> float:
        free = memory * setup.rollout.memory_utilisation - held - factor * activation_bytes(setup) - other
        return max(0.0, BLOCK_TOKENS * (free // block_bytes))

    other = setup.rollout.other_bytes or OTHER_BYTES
    pool = derived(
        tokens_in,
        setup.device.memory_bytes,
        ACTIVATIONS_FACTOR,
        other,
        note="blocks of 16 tokens in memory · utilisation − weights − activations − other − slots",
    )
    if pool.value < BLOCK_TOKENS:
        raise InputError(
            "hardware.rollout", _why_nothing_fits(setup), "use more devices, fewer slots or a smaller rank"
        )
    return pool


def _why_nothing_fits(setup: ReplicaSetup) -> str:
    weights = setup.model.weight_bytes / setup.num_devices
    return (
        f"no KV fits: of {setup.device.memory_bytes.value / 1e9:.0f} GB a device {weights / 1e9:.1f} GB hold"
        f" {setup.model.name} over {setup.num_devices} devices and {slot_bytes(setup) / 1e9:.1f} GB"
        f" {setup.slots} adapter slots of rank {setup.rank}"
    )


def kv_bytes_per_device(setup: ReplicaSetup) -> float:
    """Bytes of KV per token on one device; devices beyond the number of KV heads hold copies."""
    shares = min(setup.tensor_parallel, setup.model.kv_heads) * setup.rollout.pipeline_parallel
    return setup.model.kv_bytes_per_token / shares


def activation_bytes(setup: ReplicaSetup) -> float:
    """Bytes that one device needs at the most for the largest prefill, or for sampling for all seats."""
    model, rollout = setup.model, setup.rollout
    width = 2 * model.intermediate / setup.tensor_parallel + model.hidden
    forward = rollout.max_batched_tokens * width * model.dtype_bytes
    return max(forward, setup.max_num_seqs * model.vocabulary * SAMPLER_BYTES_PER_LOGIT)


def slot_bytes(setup: ReplicaSetup) -> int:
    """Bytes that the slots take on one device, as the allocator reserves them."""
    return reserved_bytes(slot_buffers(setup))


def slot_buffers(setup: ReplicaSetup) -> Counter[int]:
    """The sizes in bytes of the buffers of the slots on one device, and how many there are of each.

    A slot is a row of stacked A and B matrices for every adapted module. With tensor parallelism the
    dimension that is split in the module is split in the adapter; the other is held whole.
    `adapts_embeddings` adds the embedding and the LM head, and an engine that lets adapters add tokens
    adds three tables of them. Without slots there are none.
    """
    model, per_row = setup.model, 2 * setup.slots * setup.rank
    buffers: Counter[int] = Counter()
    if not setup.slots:
        return buffers
    for name, (inputs, outputs) in model.adapted_shapes(setup.targets).items():
        splits_inputs = name in ("o_proj", "down_proj")
        a = inputs // setup.tensor_parallel if splits_inputs else inputs
        b = outputs if splits_inputs else outputs // setup.tensor_parallel
        num_layers = -(-model.layers // setup.rollout.pipeline_parallel)
        buffers[per_row * a] += num_layers
        buffers[per_row * b] += num_layers
    if model.adapts_embeddings:
        added = setup.rollout.added_tokens
        buffers[per_row * (model.vocabulary + added)] += 2
        buffers[per_row * model.hidden] += 2
        if added:
            buffers[2 * setup.slots * added * model.hidden] += 3
    return buffers


def reserved_bytes(buffers: Mapping[int, int]) -> int:
    """Bytes that a caching allocator takes for buffers of these sizes, given how many there are of each."""
    total = 0
    for size, number in buffers.items():
        if size >= LARGE_BYTES:
            total += number * -(-size // GRANULE_BYTES) * GRANULE_BYTES
        else:
            segment = SEGMENT_BYTES if size > MIB else GRANULE_BYTES
            total += -(-number // (segment // size)) * segment
    return total
