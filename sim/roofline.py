"""A replica's costs from what is known of its device and model, before anything was measured.

    T = a + b·B + e·max(0, B − B0) + c·KV + p·P + [A > 0]·(d0 + d1·A)

a: weights are read once, kernels leave gaps, the host takes its time; b and e: products for each sequence,
of which a part is hidden behind the reading of weights up to B0; c: KV is read; p: products for each token
of prefills; d0 and d1: launching the adapters' small products. With tensor parallelism two all-reduces a
layer are added; a pipeline of s stages works on s parts of the batch in turn, so each stage reads its weights
s times. In eager mode launching may take longer than the work of an empty batch; what the batch adds is then
charged in full though launching would hide some of it.

Every term is a `Quantity` with its formula and an interval from those of its inputs. Such costs are 5 to 45 %
off where they can be checked (`published`): calibrate where there is something to calibrate from.
"""

from __future__ import annotations

from sim.derived import derived, guessed, published
from sim.memory import SAMPLER_BYTES_PER_LOGIT, kv_bytes_per_device
from sim.profile import Quantity, ReplicaProfile
from sim.replica_setup import ReplicaSetup

# Where public fits put the knee of a batch, and how much of a sequence's products they show below it.
KNEE_SEQUENCES = published(175, 150, 200, "public fits put it at 150 to 200")
SHARE_BELOW_KNEE = guessed(0.5, 0.25, 0.75, "an H200 and an H100 fit show 0.58 and 0.51")
GRAPH_ADAPTERS_SHARE = published(
    0.1,
    0.014,
    0.2,
    "of an iteration, with graphs captured per number of adapters; 1.4 % where none is active",
)
HOST_TO_DEVICE_S = published(6e-3, 3e-3, 9e-3, "hardly depends on the rank, 8 to 32")
READ_S = guessed(20e-3, 5e-3, 200e-3, "opening an adapter's files")
TURN_OVERHEAD_S = guessed(5e-3, 1e-3, 20e-3, "from the engine to the scheduler and back")
START_S = guessed(30.0, 10.0, 120.0, "an engine's start beside the reading of weights")
UNLOAD_S = guessed(1e-3, 0.0, 10e-3, "forgetting an adapter")


def replica_costs(setup: ReplicaSetup) -> ReplicaProfile:
    """The costs of a replica; raises `InputError` when the model cannot be split as asked."""
    setup.check()
    iteration = iteration_s(setup)
    load_s, load_per_byte_s = _loading(setup)
    return ReplicaProfile(
        iteration_s=iteration,
        per_sequence_s=_per_sequence_s(setup),
        per_sequence_beyond_knee_s=_per_sequence_beyond_knee_s(setup),
        knee_sequences=KNEE_SEQUENCES,
        per_kv_token_s=_per_kv_token_s(setup),
        adapters_s=_adapters_s(setup, iteration),
        per_adapter_s=_per_adapter_s(setup),
        prefill_s=iteration,
        per_prefill_token_s=_per_prefill_token_s(setup),
        per_attended_token_s=per_attended_token_s(setup),
        turn_overhead_s=TURN_OVERHEAD_S,
        start_s=_start_s(setup),
        load_s=load_s,
        load_per_byte_s=load_per_byte_s,
        unload_s=UNLOAD_S,
        adapter_bytes=adapter_bytes(setup),
    )


def iteration_s(setup: ReplicaSetup) -> Quantity:
    """An iteration beside what grows with its batch, in seconds."""
    device, model, stages = setup.device, setup.model, setup.rollout.pipeline_parallel
    is_eager = setup.rollout.mode == "eager"
    reduces = 2 * model.layers if setup.tensor_parallel > 1 else 0
    hops = stages if stages > 1 else 0

    def seconds(
        host: float, bandwidth: float, efficiency: float, gap: float, launch: float, latency: float
    ) -> float:
        weights = model.weight_bytes / (setup.tensor_parallel * efficiency * bandwidth)
        working = weights + gap * model.layers + latency * (reduces + hops)
        launching = launch * model.layers if is_eager else 0.0
        return stages * host + max(working, launching)

    return derived(
        seconds,
        device.iteration_s,
        device.bandwidth_bytes_per_s,
        device.weights_efficiency,
        device.layer_s,
        device.eager_layer_s,
        device.all_reduce_s,
        note=f"{setup.rollout.mode}: host + max(weights/(TP·η·bandwidth) + gaps + all-reduces, launches)",
    )


def _product_s(setup: ReplicaSetup, flops: float, efficiency: float) -> float:
    """The layers' products for one token, in seconds."""
    return 2 * setup.model.num_layer_parameters / (setup.num_devices * efficiency * flops)


def _reduce_s(setup: ReplicaSetup, link: float) -> float:
    """What one token adds to the all-reduces of a pass, in seconds: two a layer, as a ring."""
    tensor = setup.tensor_parallel
    bytes_per_token = setup.model.hidden * setup.model.dtype_bytes
    return 2 * setup.model.layers * 2 * (tensor - 1) / tensor * bytes_per_token / link


def _link(setup: ReplicaSetup) -> Quantity:
    """The bandwidth between a replica's devices."""
    within = setup.tensor_parallel <= setup.device.devices_per_node
    return setup.device.link_bytes_per_s if within else setup.device.network_bytes_per_s


def _per_sequence_s(setup: ReplicaSetup) -> Quantity:
    device = setup.device
    sampler_bytes = setup.model.vocabulary * SAMPLER_BYTES_PER_LOGIT

    def seconds(flops: float, efficiency: float, share: float, bandwidth: float, link: float) -> float:
        products = share * _product_s(setup, flops, efficiency)
        return products + sampler_bytes / bandwidth + _reduce_s(setup, link)

    return derived(
        seconds,
        device.flops_per_s,
        device.flops_efficiency,
        SHARE_BELOW_KNEE,
        device.bandwidth_bytes_per_s,
        _link(setup),
        note="share below the knee · 2N′/(devices·η·F) + sampling + all-reduced bytes",
    )


def _per_sequence_beyond_knee_s(setup: ReplicaSetup) -> Quantity:
    device = setup.device
    return derived(
        lambda flops, efficiency, share: (1 - share) * _product_s(setup, flops, efficiency),
        device.flops_per_s,
        device.flops_efficiency,
        SHARE_BELOW_KNEE,
        note="(1 − share below the knee) · 2N′/(devices·η·F)",
    )


def _per_kv_token_s(setup: ReplicaSetup) -> Quantity:
    device = setup.device
    return derived(
        lambda bandwidth, efficiency: kv_bytes_per_device(setup) / (efficiency * bandwidth),
        device.bandwidth_bytes_per_s,
        device.kv_efficiency,
        note="KV bytes per token / (devices·η·bandwidth)",
    )


def _per_prefill_token_s(setup: ReplicaSetup) -> Quantity:
    device = setup.device
    return derived(
        lambda flops, efficiency, link: _product_s(setup, flops, efficiency) + _reduce_s(setup, link),
        device.flops_per_s,
        device.flops_efficiency,
        _link(setup),
        note="2N′/(devices·η·F) + all-reduced bytes",
    )


def per_attended_token_s(setup: ReplicaSetup) -> Quantity:
    """What a prefilled token takes per token of context that it attends to, in seconds."""
    model, device = setup.model, setup.device
    operations = 4 * model.layers * model.heads * model.head_dim
    return derived(
        lambda flops, efficiency: operations / (setup.num_devices * efficiency * flops),
        device.flops_per_s,
        device.flops_efficiency,
        note="4·layers·heads·head_dim/(devices·η·F)",
    )


# --- adapters --------------------------------------------------------------------------------------


def _adapters_s(setup: ReplicaSetup, iteration: Quantity) -> Quantity:
    if setup.rollout.mode == "graph":
        note = "a share of an iteration: graphs are captured per number of adapters"
        return derived(lambda share, seconds: share * seconds, GRAPH_ADAPTERS_SHARE, iteration, note=note)
    layers = setup.model.layers
    return derived(lambda layer: layers * layer, setup.device.adapters_layer_s, note="layers · launches")


def _per_adapter_s(setup: ReplicaSetup) -> Quantity:
    model, device = setup.model, setup.device
    size = model.lora_bytes(setup.rank, setup.targets) / setup.num_devices
    return derived(
        lambda layer, bandwidth, eta: model.layers * layer + size / (eta * bandwidth),
        device.adapter_layer_s,
        device.bandwidth_bytes_per_s,
        device.weights_efficiency,
        note="layers · small products + adapter bytes / (devices·η·bandwidth)",
    )


def adapter_bytes(setup: ReplicaSetup) -> Quantity:
    """Bytes of one adapter, as it is published and loaded."""
    return Quantity(
        value=setup.model.lora_bytes(setup.rank, setup.targets),
        source=setup.model.source,
        note=f"2·layers·Σ(in + out)·rank at rank {setup.rank}",
    )


def _loading(setup: ReplicaSetup) -> tuple[Quantity, Quantity]:
    """Seconds to load an adapter, fixed and per byte."""
    device = setup.device
    if setup.rollout.adapters_from == "host":
        note = "1 / host bandwidth"
        return HOST_TO_DEVICE_S, derived(lambda host: 1 / host, device.host_bytes_per_s, note=note)
    return (
        derived(lambda copy, read: copy + read, HOST_TO_DEVICE_S, READ_S, note="read a file, copy to device"),
        derived(
            lambda disk, host: 1 / disk + 1 / host,
            device.disk_bytes_per_s,
            device.host_bytes_per_s,
            note="1 / disk + 1 / host bandwidth",
        ),
    )


def _start_s(setup: ReplicaSetup) -> Quantity:
    size = setup.model.weight_bytes / setup.num_devices
    return derived(
        lambda start, disk: start + size / disk,
        START_S,
        setup.device.disk_bytes_per_s,
        note="start + weights per device / disk bandwidth",
    )
