"""YAML that cannot be misread: text in, plain Python data and the line of every key out.

Owns the syntax: the scalars of YAML 1.2's core schema (`1e-5` is a float, `no` is a string, a date is a
string), no duplicate keys, no loops. Knows nothing of what the data means. Errors are `InputError`s that
name file, line and column.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import msgspec
import yaml

from marlaas.errors import InputError

Path = tuple[str | int, ...]
"""Where a value stands in a document: ("tasks", 2, "steps")."""

_INT = re.compile(r"^[-+]?(?:[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^[-+]?(?:(?:[0-9][0-9_]*)?\.[0-9]+|[0-9][0-9_]*\.?)(?:[eE][-+]?[0-9]+)?$"
    r"|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
)
_SCALARS = [
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789.")),
    ("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"]),
]


class Document(msgspec.Struct, frozen=True):
    """A parsed file: its data, and the line (from 1) on which each key or item stands."""

    data: Any
    lines: dict[Path, int]


def parse(text: str, name: str) -> Document:
    """Parse one YAML document; `name` is the file's name for messages. Raises `InputError`."""
    lines: dict[Path, int] = {}
    try:
        loader = _StrictLoader(text)
        node = loader.get_single_node()
        if node is None:
            raise InputError(name, "the file is empty", "wanted a mapping of keys to values")
        _survey(node, name, (), lines, frozenset())
        return Document(loader.construct_document(node), lines)
    except yaml.MarkedYAMLError as error:
        raise _input_error(error, name) from None
    except yaml.reader.ReaderError as error:
        raise InputError(name, f"not text ({error.reason})", "wanted YAML in UTF-8") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(name, f"a tag does not fit its value ({error})", "remove the tag") from None


def parse_value(text: str) -> Any:
    """Read one value as YAML would read it behind a key; raises `InputError`."""
    return parse(text, "value").data if text.strip() else text


def dump(data: Any) -> str:
    """Write plain data so that `parse` reads exactly the same back."""
    return yaml.dump(data, Dumper=_StrictDumper, sort_keys=False, allow_unicode=True, width=100)


def render(path: Path) -> str:
    """Spell a path as users write it: `tasks[2].training.lr`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "the document"


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader with the core schema's scalars and no tags but the plain ones."""

    # PyYAML's own names; both are filled below.
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - an instance variable to the type checker
    yaml_constructors: ClassVar[dict[Any, Any]] = {}

    def int_(self, node: yaml.ScalarNode) -> int:
        """Read an integer; a leading zero does not make it octal."""
        text = str(self.construct_scalar(node)).replace("_", "").lower()
        base = 8 if "0o" in text else 16 if "0x" in text else 10
        return int(text, base)

    def str_(self, node: yaml.ScalarNode) -> str:
        """Read a string."""
        return str(self.construct_scalar(node))

    def unknown(self, node: yaml.Node) -> Any:
        """Refuse a tag such as `!!python/object`."""
        raise yaml.constructor.ConstructorError(None, None, f"unknown tag {node.tag!r}", node.start_mark)


class _StrictDumper(yaml.SafeDumper):
    """SafeDumper that also quotes what only the strict loader would take for a number."""

    def ignore_aliases(self, data: Any) -> bool:
        """Never write anchors: a resolved file is for reading."""
        return True

    def text(self, value: str) -> yaml.Node:
        """Quote what would be folded away: PyYAML takes these characters for line breaks."""
        style = '"' if any(mark in value for mark in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)


for _tag, _pattern, _first in _SCALARS:
    _StrictLoader.add_implicit_resolver(_tag, _pattern, _first)
    _StrictDumper.add_implicit_resolver(_tag, _pattern, _first)
for _kind in ("null", "bool", "float", "map", "seq"):
    _tag = f"tag:yaml.org,2002:{_kind}"
    _StrictLoader.add_constructor(_tag, yaml.SafeLoader.yaml_constructors[_tag])
_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.int_)
_StrictLoader.add_constructor("tag:yaml.org,2002:str", _StrictLoader.str_)
_StrictLoader.add_constructor(None, _StrictLoader.unknown)
_StrictDumper.add_representer(str, _StrictDumper.text)


def _input_error(error: yaml.MarkedYAMLError, name: str) -> InputError:
    mark = error.problem_mark or error.context_mark
    where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
    said = " ".join(part for part in (error.context, error.problem) if part)
    return InputError(where, f"not YAML: {said}", "check quotes, brackets and indentation")


def _survey(node: yaml.Node, name: str, path: Path, lines: dict[Path, int], above: frozenset[int]) -> None:
    """Note the line of every key and item; refuse duplicate keys, keys that are not strings, and loops."""
    if id(node) in above:
        raise InputError(_at(name, node, path), "an alias stands inside what it names", "remove the loop")
    above |= {id(node)}
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[*path, index] = item.start_mark.line + 1
            _survey(item, name, (*path, index), lines, above)
    elif isinstance(node, yaml.MappingNode):
        own: dict[str, int] = {}
        for key, value in node.value:
            inner = (*path, str(key.value))
            if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
                raise InputError(_at(name, key, inner), "the key is not a string", "quote it")
            if key.value in own:
                problem = f"duplicate key, first given on line {own[key.value]}"
                raise InputError(_at(name, key, inner), problem, "keep one of the two")
            own[key.value] = lines[inner] = key.start_mark.line + 1
            _survey(value, name, inner, lines, above)


def _at(name: str, node: yaml.Node, path: Path) -> str:
    return f"{name}:{node.start_mark.line + 1}: {render(path)}"
