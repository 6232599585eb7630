"""The short form of a profile: a device and a model by name, from which all costs follow.

    hardware: {device: ascend-910c-die, model: qwen3-14b}     a profile whose costs are computed

What the experiment already says, such as the devices of a replica, need not be repeated here; where it is,
the two must agree. `overrides` replace single costs, for instance by measured ones. Owns this form and how it
is resolved; the formulas are `roofline`'s, `training_roofline`'s and `memory`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from marlaas.errors import InputError
from marlaas.spec import Count, Experiment, Name, Spec
from sim.hardware import Device, Model, load_device, load_model
from sim.memory import kv_pool
from sim.profile import (
    FREE,
    EngineProfile,
    LaneProfile,
    Profile,
    ProfiledWorkload,
    Quantity,
    ReplicaProfile,
    Variation,
)
from sim.replica_setup import ReplicaSetup, Rollout
from sim.roofline import replica_costs
from sim.strict_yaml import nearest
from sim.training_roofline import LaneSetup, Training, lane_costs

T = TypeVar("T")
Costs = TypeVar("Costs", ReplicaProfile, LaneProfile)


class Adapters(Spec, frozen=True, kw_only=True):
    """The adapters' rank and the slots of a replica; without them, what the experiment says."""

    rank: Count | None = None
    slots: Count | None = None


class Overrides(Spec, frozen=True, kw_only=True):
    """Costs that replace computed ones, by their names in a profile."""

    replica: dict[str, Quantity] = msgspec.field(default_factory=dict)
    lane: dict[str, Quantity] = msgspec.field(default_factory=dict)


class Hardware(Spec, frozen=True, kw_only=True):
    """What runs on what: library names, or paths of files relative to the profile."""

    device: str
    model: str
    adapters: Adapters = Adapters()
    rollout: Rollout = Rollout()
    training: Training = Training()
    overrides: Overrides = Overrides()


class HardwareProfile(Spec, frozen=True, kw_only=True):
    """A profile in its short form; the other keys are those of `Profile`. Without `engine`, vLLM's."""

    name: Name
    description: str = ""
    engine: EngineProfile | None = None
    hardware: Hardware
    variation: Variation = Variation()
    environment_overhead_s: Quantity = FREE
    workloads: dict[str, ProfiledWorkload] = msgspec.field(default_factory=dict)


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What an experiment says of the machines it runs on."""

    replica_devices: int
    lane_devices: int
    slots: int
    max_num_seqs: int
    rank: int
    targets: str | tuple[str, ...]


def site_of(experiment: Experiment) -> Site:
    """What this experiment says of its machines."""
    replicas, lora = experiment.cluster.replicas, experiment.model.lora
    return Site(
        replica_devices=replicas.devices,
        lane_devices=experiment.cluster.lanes.devices,
        slots=replicas.slots,
        max_num_seqs=replicas.max_num_seqs,
        rank=lora.rank,
        targets=lora.targets,
    )


def resolve(form: HardwareProfile, site: Site | None = None, beside: Path | None = None) -> Profile:
    """The profile with all costs computed; `beside` is the folder that paths start from.

    Raises `InputError`, at a path inside the profile, for what is unknown, contradicts the experiment, is
    neither here nor there, or does not fit the devices' memory.
    """
    hardware = form.hardware
    device = _named("device", lambda: load_device(hardware.device, beside))
    model = _named("model", lambda: load_model(hardware.model, beside))
    replica_setup = _replica_setup(hardware, device, model, site)
    lane_setup = _lane_setup(hardware, device, model, site)
    replica = msgspec.structs.replace(replica_costs(replica_setup), kv_tokens=kv_pool(replica_setup))
    return Profile(
        name=form.name,
        description=_description(form.description, replica_setup, lane_setup),
        engine=form.engine or _vllm(hardware.rollout),
        replica=_overridden(replica, hardware.overrides.replica, "replica"),
        lane=_overridden(lane_costs(lane_setup), hardware.overrides.lane, "lane"),
        variation=form.variation,
        environment_overhead_s=form.environment_overhead_s,
        workloads=form.workloads,
    )


def _replica_setup(hardware: Hardware, device: Device, model: Model, site: Site | None) -> ReplicaSetup:
    rollout, own = hardware.rollout, hardware.adapters
    slots = site.slots if site else None
    return ReplicaSetup(
        device=device,
        model=model,
        tensor_parallel=_tensor_parallel(rollout, site),
        rollout=rollout,
        rank=_rank(hardware, site),
        slots=_agreed("adapters.slots", own.slots, "cluster.replicas.slots", slots),
        targets=site.targets if site else "all-linear",
        max_num_seqs=site.max_num_seqs if site else 256,
    )


def _lane_setup(hardware: Hardware, device: Device, model: Model, site: Site | None) -> LaneSetup:
    own, lane_devices = hardware.training, site.lane_devices if site else None
    return LaneSetup(
        device=device,
        model=model,
        num_devices=_agreed("training.devices", own.devices, "cluster.lanes.devices", lane_devices),
        training=own,
        rank=_rank(hardware, site),
        targets=site.targets if site else "all-linear",
    )


def _vllm(rollout: Rollout) -> EngineProfile:
    """How vLLM admits."""
    return EngineProfile(name="vllm", kv_rule="preempt", max_prefill_tokens=rollout.max_batched_tokens)


def _rank(hardware: Hardware, site: Site | None) -> int:
    return _agreed("adapters.rank", hardware.adapters.rank, "model.lora.rank", site.rank if site else None)


def _tensor_parallel(rollout: Rollout, site: Site | None) -> int:
    stages, own = rollout.pipeline_parallel, rollout.tensor_parallel
    if site is None:
        return _agreed("rollout.tensor_parallel", own, "cluster.replicas.devices", None)
    devices = site.replica_devices
    if devices % stages:
        problem = f"{stages} stages do not share the {devices} devices of cluster.replicas evenly"
        raise InputError("hardware.rollout.pipeline_parallel", problem, "wanted a divisor of the devices")
    if own is not None and own * stages != devices:
        problem = f"{own} × {stages} stages, but cluster.replicas.devices is {devices}"
        raise InputError(
            "hardware.rollout.tensor_parallel", problem, "make them agree, or leave this one out"
        )
    return devices // stages


def _agreed(key: str, own: int | None, experiment_key: str, theirs: int | None) -> int:
    """What the profile or the experiment says; both must agree and one must speak."""
    if own is None and theirs is None:
        wanted = f"give it, or read the profile for an experiment, which says {experiment_key}"
        raise InputError(f"hardware.{key}", "the key is missing", wanted)
    if own is not None and theirs is not None and own != theirs:
        problem = f"{own}, but {experiment_key} is {theirs}"
        raise InputError(f"hardware.{key}", problem, "make them agree, or leave this one out")
    agreed = own if own is not None else theirs
    assert agreed is not None, "one of them speaks"
    return agreed


def _named(key: str, load: Callable[[], T]) -> T:
    try:
        return load()
    except InputError as error:
        raise InputError(f"hardware.{key}", f"{error.where}: {error.problem}", error.wanted) from None


def _overridden(costs: Costs, overrides: Mapping[str, Quantity], where: str) -> Costs:
    """The costs with some replaced; raises `InputError` for one that there is not."""
    names = [name for name, value in msgspec.structs.asdict(costs).items() if isinstance(value, Quantity)]
    for name in overrides:
        if name not in names:
            raise InputError(f"hardware.overrides.{where}.{name}", "unknown key", nearest(name, names))
    return msgspec.structs.replace(costs, **overrides)


def _description(own: str, replica: ReplicaSetup, lane: LaneSetup) -> str:
    """The profile's own words, and what was computed from what."""
    stages = replica.rollout.pipeline_parallel
    pipeline = f" × pipeline {stages}" if stages > 1 else ""
    said = (
        f"computed by roofline, nothing measured: {replica.model.name} on {replica.device.name}; replicas"
        f" tensor {replica.tensor_parallel}{pipeline}, {replica.rollout.mode}, {replica.slots} slots of rank"
        f" {replica.rank}; lanes of {lane.num_devices}, {lane.training.sharding}"
    )
    return f"{own.rstrip('. ')}; {said}" if own else said
