"""Systems: named compositions of policies. An ablation is a one-word edit.

A system may also be written out in YAML as a mapping with the fields of `SystemSpec`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from marlaas import policies
from marlaas.spec import Experiment, Placement, SystemSpec

SYSTEMS: Mapping[str, SystemSpec] = {
    "single": SystemSpec(tasks_in_flight="one"),
    "sync": SystemSpec(barrier="round", training_order="registration"),
    "sync-single-lora": SystemSpec(barrier="round", training_order="registration", batching="single-lora"),
    "async-single-lora": SystemSpec(batching="single-lora"),
    "marlaas": SystemSpec(),
}


_PLACE: Mapping[Placement, policies.Place] = {
    "spread": policies.spread,
    "pack": policies.pack,
    "deal": policies.deal,
}


class System(msgspec.Struct, frozen=True, kw_only=True):
    """The policies that decide; `capacity` is the adapters a replica may hold at once."""

    admit: policies.Admit
    start: policies.StartBatches
    train: policies.TrainNext
    place: policies.Place
    evict: policies.Evict
    capacity: int


def compose(experiment: Experiment) -> System:
    """The system an experiment names or spells out."""
    named = experiment.system
    spec = SYSTEMS[named] if isinstance(named, str) else named
    in_rounds = spec.barrier == "round"
    is_multi = spec.batching == "multi-lora"
    train = policies.train_oldest if spec.training_order == "fifo" else policies.train_registered
    return System(
        admit=policies.admit_one if spec.tasks_in_flight == "one" else policies.admit_all,
        start=policies.start_together if in_rounds else policies.start_at_once,
        train=policies.train_after_round(train) if in_rounds else train,
        place=_PLACE[spec.placement or _usual_placement(spec)],
        evict=policies.evict_idle if is_multi else policies.evict_finished,
        capacity=experiment.cluster.replicas.slots if is_multi else 1,
    )


def _usual_placement(spec: SystemSpec) -> Placement:
    """A round waits for its slowest replica, so there all should have the same mix of work."""
    if spec.batching == "single-lora":
        return "deal"
    return "spread" if spec.barrier == "round" else "pack"
