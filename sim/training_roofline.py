"""A lane's costs from what is known of its devices and model, before anything was measured.

    T = switch + t0 + Σ_micro-batch (τ0 + τ1·tokens + τ2·Σ length²) + optimizer, then publish

τ1 = (4N + 6n + 2N each for checkpointing, old log-probabilities and a reference) / (devices·MFU·F): the
frozen base passes gradients on but has none itself, so it costs 4N and not 6N; n are the adapter's
parameters. τ0 is what a micro-batch takes however small: together they are an MFU that falls with the
micro-batch, `mfu_at`. Devices share a step's trajectories, each taking its own micro-batches; a base that is
sharded is gathered for every pass over it.

Owns these formulas; a replica's are `roofline`'s.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from marlaas.errors import InputError
from marlaas.spec import Count, Spec
from sim.derived import derived, guessed, published
from sim.hardware import Device, Model
from sim.profile import LaneProfile, Quantity

STEP_S = published(0.5, 0.2, 1.0, "what steps took beside forward and backward passes on H200: 0.2 to 1.0 s")
SWITCH_S = guessed(0.05, 0.01, 0.5, "another adapter's turn, beside the bytes of its state")
CREATE_S = guessed(0.5, 0.1, 3.0, "drawing an adapter's first weights and saving them")
START_S = guessed(30.0, 10.0, 120.0, "a trainer's start beside the reading of weights")
SAVE_S = published(
    1.1, 0.1, 8.4, "gather and save; then up to 7 s until a network file system shows the files"
)
SEND_S = published(0.3, 0.05, 1.4, "the pause of engines while weights are sent")
EXPOSED_SHARE = guessed(0.5, 0.0, 1.0, "of the gathering of a sharded base, not hidden behind products")
OPTIMIZER_BYTES_PER_PARAMETER = 20


class Training(Spec, frozen=True, kw_only=True):
    """What a profile says of its training engines.

    Without `devices`, the experiment says how many a lane has. `sharded`: the devices of a node hold parts
    of the base and gather them for every pass; `replicated`: each holds all of it. `old_logprobs`: another
    forward pass before the update; `reference`: one more of the bare base. `publish` is by files or by
    sending weights to the replicas.
    """

    devices: Count | None = None
    sharding: Literal["replicated", "sharded"] = "sharded"
    checkpointing: bool = True
    old_logprobs: bool = True
    reference: bool = False
    publish: Literal["disk", "network"] = "disk"


class LaneSetup(msgspec.Struct, frozen=True, kw_only=True):
    """One lane: a model's training on so many devices."""

    device: Device
    model: Model
    num_devices: int = 1
    training: Training = Training()
    rank: int = 16
    targets: str | tuple[str, ...] = "all-linear"

    @property
    def num_lora_parameters(self) -> int:
        """Parameters that are trained."""
        return self.model.num_lora_parameters(self.rank, self.targets)

    @property
    def shard_devices(self) -> int:
        """Devices that hold the base together."""
        is_sharded = self.training.sharding == "sharded"
        return min(self.num_devices, self.device.devices_per_node) if is_sharded else 1

    def check(self) -> None:
        """Raise `InputError` when the base does not fit the devices' memory."""
        share = self.model.weight_bytes / self.shard_devices
        if share > 0.9 * self.device.memory_bytes.value:
            problem = (
                f"{share / 1e9:.0f} GB of {self.model.name} a device do not fit"
                f" {self.device.memory_bytes.value / 1e9:.0f} GB of {self.device.name}"
            )
            raise InputError(
                "hardware.training", problem, "wanted sharding: sharded over more devices of a node"
            )


def lane_costs(setup: LaneSetup) -> LaneProfile:
    """The costs of a lane; raises `InputError` when the base does not fit its devices."""
    setup.check()
    return LaneProfile(
        switch_s=_switch_s(setup),
        step_s=STEP_S,
        per_micro_batch_s=_per_micro_batch_s(setup),
        per_token_s=_per_token_s(setup),
        per_squared_token_s=_per_squared_token_s(setup),
        optimizer_s=_optimizer_s(setup),
        publish_s=_publish_s(setup),
        create_adapter_s=CREATE_S,
        start_s=_start_s(setup),
        num_parallel_micro_batches=setup.num_devices,
    )


def flops_per_token(setup: LaneSetup) -> int:
    """Operations per trained token, attention apart."""
    base = 2 * (setup.model.num_layer_parameters + setup.model.num_embedding_parameters)
    return base * (2 + _further_passes(setup.training)) + 6 * setup.num_lora_parameters


def mfu_at(setup: LaneSetup, micro_batch_tokens: int) -> float:
    """The share of its peak that a device reaches in full micro-batches of so many tokens."""
    costs = lane_costs(setup)
    tokens = micro_batch_tokens * setup.num_devices
    seconds = costs.per_micro_batch_s.value + costs.per_token_s.value * tokens
    done = flops_per_token(setup) * tokens
    return done / (seconds * setup.num_devices * setup.device.flops_per_s.value)


def _further_passes(training: Training) -> int:
    """Forward passes beside the one that has a backward pass."""
    return training.checkpointing + training.old_logprobs + training.reference


def _per_token_s(setup: LaneSetup) -> Quantity:
    operations = flops_per_token(setup)
    return derived(
        lambda flops, mfu: operations / (setup.num_devices * mfu * flops),
        setup.device.flops_per_s,
        setup.device.mfu,
        note=f"(4N + 6n + {_further_passes(setup.training)}·2N)/(devices·MFU·F)",
    )


def _per_squared_token_s(setup: LaneSetup) -> Quantity:
    passes = 3 + _further_passes(setup.training)
    operations = passes * setup.model.attention_flops_per_squared_token
    return derived(
        lambda flops, mfu: operations / (setup.num_devices * mfu * flops),
        setup.device.flops_per_s,
        setup.device.mfu,
        note=f"{passes} passes of causal attention: 2·layers·heads·head_dim each/(devices·MFU·F)",
    )


def _per_micro_batch_s(setup: LaneSetup) -> Quantity:
    """Launching a micro-batch's layers, and what shows of gathering a sharded base."""
    model, devices = setup.model, setup.shard_devices
    further = setup.training.old_logprobs + setup.training.reference
    launches = model.layers * (1 + further / 3)  # a forward pass is a third of forward and back
    gathered = (2 + further) * model.weight_bytes * (devices - 1) / devices
    return derived(
        lambda layer, link, exposed: launches * layer + exposed * gathered / link,
        setup.device.train_layer_s,
        setup.device.link_bytes_per_s,
        EXPOSED_SHARE,
        note="layers · launches + exposed share · gathered weights / link",
    )


def _optimizer_s(setup: LaneSetup) -> Quantity:
    """Adam over the adapter, and the all-reduce of its gradients between the devices."""
    parameters, devices = setup.num_lora_parameters, setup.num_devices
    device = setup.device
    network = device.link_bytes_per_s if devices <= device.devices_per_node else device.network_bytes_per_s
    reduced = 2 * (devices - 1) / devices * 4 * parameters
    return derived(
        lambda bandwidth, link: OPTIMIZER_BYTES_PER_PARAMETER * parameters / bandwidth + reduced / link,
        device.bandwidth_bytes_per_s,
        network,
        note="20 B·n / bandwidth + gradients all-reduced in float32",
    )


def _switch_s(setup: LaneSetup) -> Quantity:
    state = 2 * setup.model.lora_training_bytes(setup.rank, setup.targets)
    return derived(
        lambda switch, host: switch + state / host,
        SWITCH_S,
        setup.device.host_bytes_per_s,
        note="one adapter's state out, another's in: 12 B·n each / host bandwidth",
    )


def _publish_s(setup: LaneSetup) -> Quantity:
    size = setup.model.lora_bytes(setup.rank, setup.targets)
    by_disk = setup.training.publish == "disk"
    fixed = SAVE_S if by_disk else SEND_S
    path = setup.device.disk_bytes_per_s if by_disk else setup.device.network_bytes_per_s
    note = f"by {setup.training.publish}: fixed + adapter bytes / bandwidth"
    return derived(lambda seconds, bandwidth: seconds + size / bandwidth, fixed, path, note=note)


def _start_s(setup: LaneSetup) -> Quantity:
    size = setup.model.weight_bytes / setup.shard_devices
    return derived(
        lambda start, disk: start + size / disk,
        START_S,
        setup.device.disk_bytes_per_s,
        note="start + weights per device / disk bandwidth",
    )
