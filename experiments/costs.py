"""A profile for an experiment: its costs computed where it names hardware, and the KV pool that then fits.

Owns what a profile and an experiment have to say to each other; knows no file but those that a profile names.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from experiments.schema import Misfit, convert
from marlaas.errors import InputError
from marlaas.spec import Experiment

if TYPE_CHECKING:
    from sim.profile import Profile

HARDWARE = "hardware"
KV_TOKENS = ("cluster", "replicas", "kv_tokens")


def read_profile(data: Any, experiment: Experiment, folder: Path) -> Profile:
    """A profile from plain data; files it names are looked for in `folder`. Raises `Misfit`."""
    from sim.hardware_profile import HardwareProfile, resolve, site_of  # numpy, for those who simulate
    from sim.profile import Profile

    if not isinstance(data, dict) or HARDWARE not in data:
        return convert(data, Profile)
    form = convert(data, HardwareProfile)
    try:
        return resolve(form, site_of(experiment), folder)
    except InputError as error:
        raise Misfit(tuple(error.where.split(".")), error.problem, error.wanted) from None


def says_kv_tokens(data: Any) -> bool:
    """Whether an experiment, as plain data, says how large a replica's KV pool is."""
    for key in KV_TOKENS:
        if not isinstance(data, dict) or key not in data:
            return False
        data = data[key]
    return True


def with_kv_pool(experiment: Experiment, profile: Profile) -> Experiment:
    """The experiment with the KV pool that fits its replicas, where the profile knows it."""
    if profile.replica.kv_tokens is None:
        return experiment
    replace, cluster = msgspec.structs.replace, experiment.cluster
    replicas = replace(cluster.replicas, kv_tokens=round(profile.replica.kv_tokens.value))
    return replace(experiment, cluster=replace(cluster, replicas=replicas))


def check_kv_pool(experiment: Experiment, profile: Profile) -> None:
    """Raise `Misfit` when an experiment asks for more KV than can possibly fit its replicas."""
    pool, asked = profile.replica.kv_tokens, experiment.cluster.replicas.kv_tokens
    if pool is None:
        return
    most = round(pool.interval[1] if pool.interval else pool.value)
    if asked > most:
        problem = f"{asked:,} tokens never fit a replica of {profile.name}, {most:,} at the most"
        raise Misfit(
            KV_TOKENS, problem, f"wanted about {round(pool.value):,}; left out, that is what it gets"
        )
