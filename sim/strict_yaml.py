"""Files of numbers, read strictly: what is unknown, given twice, missing or mistyped is refused by its place.

Owns how the simulator reads YAML into its specs, and the words of refusal. Experiments are read elsewhere.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import msgspec.inspect as mi

from marlaas.errors import InputError

T = TypeVar("T")


def read_file(path: str | Path, what: str) -> Any:
    """The plain data of a YAML file; raises `InputError`, which asks for `what` where there is no file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InputError(str(path), f"cannot be read ({problem})", f"name {what}") from None
    return parse(text, str(path))


def converted(data: Any, kind: type[T], where: str) -> T:
    """Plain data as `kind`, a spec; raises `InputError` with the path inside and the nearest key."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        inside = f"{where}: {place.strip('.`') or 'the whole'}"
        raise InputError(inside, problem, _suggestion(problem, kind)) from None


def nearest(word: str, valid: list[str]) -> str:
    """What to say when `word` is not one of `valid`."""
    near = difflib.get_close_matches(word, valid, n=1, cutoff=0.5)
    listed = f"valid: {', '.join(valid) or 'none'}"
    return f"did you mean {near[0]}? ({listed})" if near else f"wanted one of the {listed}"


def parse(text: str, where: str) -> Any:
    """The plain data of a YAML text; raises `InputError` for a key given twice and for what is not YAML."""
    import yaml

    class StrictLoader(yaml.SafeLoader):
        """Refuses a key given twice, of which YAML would keep the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
            mapping = super().construct_mapping(node, deep=deep)
            if len(mapping) < len(node.value):
                keys = [key.value for key, _ in node.value]
                twice = next(key for key in keys if keys.count(key) > 1)
                place = f"{where}: line {node.start_mark.line + 1}"
                raise InputError(place, f"key {twice!r} is given twice", "keep one of them")
            return mapping

    # YAML 1.1 reads 1e-5 as text for want of a dot.
    number = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$")
    StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    try:
        return yaml.load(text, StrictLoader)
    except yaml.YAMLError as error:
        raise InputError(where, f"not YAML: {error}", "mend the file") from None


def _suggestion(problem: str, kind: type[Any]) -> str:
    """The nearest key to the one a complaint is about."""
    found = re.search(r"unknown field `(.*)`", problem)
    near = difflib.get_close_matches(found[1], sorted(_keys(kind)), n=1) if found else []
    return f"did you mean {near[0]}?" if near else "mend it; the shipped files show every key"


def _keys(kind: type[Any]) -> frozenset[str]:
    """The keys of a spec and of all specs within it."""
    keys: set[str] = set()
    seen: set[int] = set()

    def visit(node: Any) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, mi.StructType):
            keys.update(field.encode_name for field in node.fields)
            inner: list[Any] = [field.type for field in node.fields]
        elif isinstance(node, mi.UnionType):
            inner = list(node.types)
        elif isinstance(node, mi.DictType):
            inner = [node.value_type]
        else:
            inner = [getattr(node, "item_type", None)]
        for one in inner:
            visit(one)

    visit(mi.type_info(kind))
    return frozenset(keys)
