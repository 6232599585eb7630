"""Profiles as YAML files: costs spelt out, or hardware named to compute them from."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sim.hardware_profile import HardwareProfile, resolve
from sim.profile import Profile
from sim.strict_yaml import converted, read_file


def load_profile(path: str | Path) -> Profile:
    """Read a profile from YAML; unknown, duplicate, missing and mistyped keys are an `InputError`.

    Costs are spelt out, or `hardware` names a device and a model to compute them from.
    """
    data = read_file(path, "a profile YAML")
    if isinstance(data, dict) and "hardware" in data:
        return resolve(converted(data, HardwareProfile, str(path)), beside=Path(path).parent)
    return converted(data, Profile, str(path))


def dump_profile(profile: Profile | HardwareProfile) -> str:
    """The profile as YAML that `load_profile` reads back to the same."""
    import yaml

    data = msgspec.to_builtins(profile)
    text: str = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
    return text
