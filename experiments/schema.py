"""Plain data in, typed specs out; what does not fit is named by its path, with what was wanted.

Owns the wording of every complaint about a value. Knows no YAML and no experiment: it walks any tree of
msgspec structs. msgspec would refuse the same values, but its paths leave out dictionary keys and it
offers no nearest name.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
import msgspec.inspect as mi

from experiments.yaml_strict import Path

T = TypeVar("T")
Number = mi.IntType | mi.FloatType


class Misfit(Exception):
    """A value does not fit at `path`; whoever knows the file turns this into an `InputError`."""

    def __init__(self, path: Path, problem: str, wanted: str) -> None:
        super().__init__(path, problem, wanted)
        self.path, self.problem, self.wanted = path, problem, wanted


def convert(data: Any, kind: type[T]) -> T:
    """Turn plain data into `kind`, a msgspec struct; raises `Misfit` for the first thing wrong."""
    _check(data, mi.type_info(kind), ())
    return msgspec.convert(data, kind)


def one_of(word: str, valid: Iterable[str], what: str = "names") -> str:
    """Say what was wanted when `word` is not in `valid`, nearest name first."""
    options = list(valid)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    listed = f"valid {what}: {', '.join(options) or 'none'}"
    return f"did you mean {close[0]}? ({listed})" if close else f"wanted one of the {listed}"


def _check(value: Any, kind: mi.Type, path: Path) -> None:
    match kind:
        case mi.UnionType():
            _check_union(value, kind, path)
        case mi.StructType():
            _check_struct(value, kind, path)
        case mi.VarTupleType():
            _check_list(value, kind, path)
        case mi.TupleType():
            if not isinstance(value, list | tuple) or len(value) != len(kind.item_types):
                raise _unwanted(value, kind, path)
            for index, (item, item_type) in enumerate(zip(value, kind.item_types, strict=True)):
                _check(item, item_type, (*path, index))
        case mi.DictType():
            if not isinstance(value, dict):
                raise _unwanted(value, kind, path)
            for key, inner in value.items():
                _check_text(key, kind.key_type, (*path, key), "the name")
                _check(inner, kind.value_type, (*path, key))
        case mi.IntType() | mi.FloatType():
            _check_number(value, kind, path)
        case mi.LiteralType():
            if value not in kind.values or isinstance(value, bool):
                options = [str(option) for option in kind.values]
                raise Misfit(path, f"unknown value {value!r}", one_of(str(value), options, "values"))
        case mi.StrType():
            _check_text(value, kind, path, "the text")
        case mi.BoolType() if isinstance(value, bool):
            pass
        case mi.NoneType() if value is None:
            pass
        case mi.AnyType():  # for the library that the value is handed to
            pass
        case _:
            raise _unwanted(value, kind, path)


def _check_union(value: Any, kind: mi.UnionType, path: Path) -> None:
    """Choose the member by the value's own shape, and tagged structs by their tag."""
    tagged = [member for member in kind.types if isinstance(member, mi.StructType) and member.tag_field]
    if isinstance(value, dict) and tagged:
        tag_field = str(tagged[0].tag_field)
        by_tag = {str(member.tag): member for member in tagged}
        if tag_field not in value:
            options = ", ".join(by_tag)
            raise Misfit((*path, tag_field), "the key is missing", f"wanted {tag_field}: one of {options}")
        tag = value[tag_field]
        if not isinstance(tag, str) or tag not in by_tag:
            wanted = one_of(str(tag), by_tag, f"values of {tag_field}")
            raise Misfit((*path, tag_field), f"unknown value {tag!r}", wanted)
        _check_struct(value, by_tag[tag], path)
        return
    for member in kind.types:
        if isinstance(value, _python_types(member)):
            _check(value, member, path)
            return
    raise _unwanted(value, kind, path)


def _check_struct(value: Any, kind: mi.StructType, path: Path) -> None:
    if not isinstance(value, dict):
        raise _unwanted(value, kind, path)
    fields = {field.encode_name: field for field in kind.fields}
    for key in value:
        if key not in fields and key != kind.tag_field:
            raise Misfit((*path, key), "unknown key", _wanted_key(key, fields))
    for name, field in fields.items():
        if field.required and name not in value:
            raise Misfit((*path, name), "the key is missing", f"wanted {_describe(field.type)}")
        if name in value:
            _check(value[name], field.type, (*path, name))


def _wanted_key(key: str, fields: dict[str, mi.Field]) -> str:
    """The nearest key, which may stand one level further down."""
    for name, field in fields.items():
        inner = [kind for kind in _members(field.type) if isinstance(kind, mi.StructType)]
        if any(key == below.encode_name for kind in inner for below in kind.fields):
            return f"did you mean {name}.{key}?"
    return one_of(key, fields, "keys")


def _check_list(value: Any, kind: mi.VarTupleType, path: Path) -> None:
    if not isinstance(value, list | tuple) or len(value) < (kind.min_length or 0):
        raise _unwanted(value, kind, path)
    for index, item in enumerate(value):
        _check(item, kind.item_type, (*path, index))


def _check_number(value: Any, kind: Number, path: Path) -> None:
    right_type = isinstance(value, int if isinstance(kind, mi.IntType) else int | float)
    if not right_type or isinstance(value, bool) or not math.isfinite(value) or not _in_bounds(value, kind):
        raise _unwanted(value, kind, path)


def _in_bounds(value: float, kind: Number) -> bool:
    return (
        (kind.ge is None or value >= kind.ge)
        and (kind.gt is None or value > kind.gt)
        and (kind.le is None or value <= kind.le)
        and (kind.lt is None or value < kind.lt)
    )


def _check_text(value: Any, kind: mi.Type, path: Path, what: str) -> None:
    if not isinstance(kind, mi.StrType) or not isinstance(value, str):
        raise _unwanted(value, kind, path)
    if kind.max_length is not None and len(value) > kind.max_length:
        raise Misfit(path, f"{what} has {len(value)} characters", f"wanted at most {kind.max_length}")
    if kind.pattern is not None and not re.search(kind.pattern, value):
        wanted = "letters, digits, '_', '-' and '.', beginning with a letter or digit"
        raise Misfit(path, f"{what} {value!r} cannot be a name", f"wanted {wanted}")


def _unwanted(value: Any, kind: mi.Type, path: Path) -> Misfit:
    return Misfit(path, f"got {_spell(value)}", f"wanted {_describe(kind)}")


def _spell(value: Any) -> str:
    """Show a value as the user wrote it, with its type where that is the surprise."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case dict():
            return f"a mapping of {len(value)} keys"
        case list() | tuple():
            return f"a list of {len(value)} items"
        case str():
            return f"the text {value!r}"
        case _:
            return f"{value}"


def _describe(kind: mi.Type) -> str:
    match kind:
        case mi.IntType() | mi.FloatType():
            noun = "a whole number" if isinstance(kind, mi.IntType) else "a number"
            bounds = {"at least": kind.ge, "above": kind.gt, "at most": kind.le, "below": kind.lt}
            said = [f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None]
            return " ".join([noun, *said])
        case mi.LiteralType():
            return "one of " + ", ".join(str(option) for option in kind.values)
        case mi.StructType():
            if kind.tag_field:
                return f"a mapping with {kind.tag_field}: {kind.tag}"
            return f"a mapping with the keys {', '.join(field.encode_name for field in kind.fields)}"
        case mi.UnionType():
            tags = [
                str(member.tag) for member in kind.types if isinstance(member, mi.StructType) and member.tag
            ]
            if tags:
                return f"a mapping with kind: one of {', '.join(tags)}"
            return " or ".join(_describe(member) for member in kind.types)
        case mi.VarTupleType():
            least = f" at least {kind.min_length}" if kind.min_length else ""
            return f"a list of{least} items, each {_describe(kind.item_type)}"
        case mi.TupleType():
            return f"a list of {len(kind.item_types)} items"
        case mi.DictType():
            return "a mapping of names to values"
        case mi.StrType():
            return "a text"
        case mi.BoolType():
            return "true or false"
        case _:
            return "nothing (null)"


def _members(kind: mi.Type) -> tuple[mi.Type, ...]:
    return tuple(kind.types) if isinstance(kind, mi.UnionType) else (kind,)


def _python_types(kind: mi.Type) -> tuple[type, ...]:
    match kind:
        case mi.StructType() | mi.DictType():
            return (dict,)
        case mi.VarTupleType() | mi.TupleType():
            return (list, tuple)
        case mi.IntType() | mi.FloatType():
            return (int, float)
        case mi.BoolType():
            return (bool,)
        case mi.NoneType():
            return (type(None),)
        case _:
            return (str,)
