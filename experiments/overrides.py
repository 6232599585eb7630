"""`--set tasks.0.steps=3`: change one key of a YAML document before it is read as an experiment.

Knows how paths are written on a command line; whether the key exists is for the schema to say.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from experiments.yaml_strict import Path, parse_value, render
from marlaas.errors import InputError
from marlaas.systems import SYSTEMS


class Override(msgspec.Struct, frozen=True):
    """One change: the words the user typed, the path it goes to, and the value."""

    typed: str
    path: Path
    value: Any


def read_overrides(settings: Iterable[str], system: str | None, data: Any) -> list[Override]:
    """Read `KEY.PATH=VALUE` settings, and `--system` as the first of them; apply them to `data` in place.

    So `--system sync --set system.batching=single-lora` is an ablation of `sync`. Raises `InputError` for a
    setting that is not of this form or leads nowhere, and for two systems.
    """
    typed = [(f"--set {setting}", *_split(setting)) for setting in settings]
    if system is not None:
        if any(keys == ["system"] for _, keys, _ in typed):
            raise InputError(f"--system {system}", "--set names a system too", "leave one of them out")
        typed.insert(0, (f"--system {system}", ["system"], system))
    return [Override(words, _assign(data, keys, value, words), value) for words, keys, value in typed]


def _split(setting: str) -> tuple[list[str], Any]:
    key, equals, value = setting.partition("=")
    parts = re.sub(r"\[(\d+)\]", r".\1", key).strip().split(".")
    if not equals or not all(parts):
        raise InputError(f"--set {setting}", "not a setting", "wanted KEY.PATH=VALUE, as in tasks.0.steps=3")
    try:
        return parts, parse_value(value)
    except InputError as error:
        raise InputError(f"--set {setting}", error.problem, "quote the value as YAML wants it") from None


def _assign(data: Any, keys: list[str], value: Any, words: str) -> Path:
    """Put `value` where `keys` lead, making mappings on the way; return the path."""
    here: Any = data
    path: Path = ()
    while True:
        part, keys = _next_part(here, keys, path, words)
        path = (*path, part)
        if not keys:
            here[part] = value
            return path
        inner = here.get(part) if isinstance(here, dict) else here[part]
        if path == ("system",) and isinstance(inner, str) and inner in SYSTEMS:
            inner = msgspec.to_builtins(SYSTEMS[inner])
        here[part] = inner = {} if inner is None else inner
        here = inner


def _next_part(here: Any, keys: list[str], path: Path, words: str) -> tuple[str | int, list[str]]:
    """The next step from `here`, and the keys left; a name may itself contain dots."""
    if isinstance(here, list):
        if not keys[0].isdigit() or int(keys[0]) >= len(here):
            wanted = f"wanted an index from 0 to {len(here) - 1}" if here else "the list is empty"
            raise InputError(words, f"{render(path)} has no item {keys[0]!r}", wanted)
        return int(keys[0]), keys[1:]
    if not isinstance(here, dict):
        raise InputError(words, f"{render(path)} has no keys: it is {here!r}", "set it as a whole instead")
    for length in range(len(keys), 0, -1):
        joined = ".".join(keys[:length])
        if joined in here:
            return joined, keys[length:]
    return keys[0], keys[1:]
