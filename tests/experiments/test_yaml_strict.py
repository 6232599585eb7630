from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.yaml_strict import dump, parse, render
from marlaas.errors import InputError

SCALARS = {
    "1e-5": 1e-5,
    "1.5": 1.5,
    ".5": 0.5,
    "65_536": 65536,
    "010": 10,
    "0x1F": 31,
    "0o17": 15,
    "-3": -3,
    "no": "no",
    "on": "on",
    "true": True,
    "2026-01-01": "2026-01-01",
    "1:30": "1:30",
    "+": "+",
    "=": "=",
    "~": None,
    "''": "",
}

BAD = {
    "duplicate key": ("a:\n  b: 1\n  b: 2\n", "f.yaml:3: a.b: duplicate key, first given on line 2"),
    "duplicate in a list": ("t:\n  - {s: 1, s: 2}", "f.yaml:2: t[0].s: duplicate key"),
    "loop": ("a: &x [*x]", "f.yaml:1: a[0]: an alias stands inside"),
    "object tag": ("a: !!python/object:os.system {}", "unknown tag"),
    "set": ("a: !!set {x}", "unknown tag"),
    "wrong tag": ("a: !!int x", "a tag does not fit"),
    "open bracket": ("a: [1, 2", "f.yaml:1:9: not YAML"),
    "tab": ("a:\n\tb: 1", "f.yaml:2:1: not YAML"),
    "two documents": ("a: 1\n---\nb: 2", "not YAML"),
    "number as key": ("1: 2", "the key is not a string"),
    "list as key": ("? [1, 2]\n: 3", "the key is not a string"),
    "nothing": ("# only a comment", "the file is empty"),
    "control character": ("a: \x00", "not text"),
}


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_scalars_mean_what_they_look_like(text: str, value: Any) -> None:
    """YAML 1.1's surprises are gone: no octal, no dates, no yes/no, and 1e-5 is a number."""
    got = parse(f"a: {text}", "f.yaml").data["a"]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_not_plain_yaml_is_refused_with_its_place(text: str, message: str) -> None:
    """Each problem names the file, the line and, where there is one, the path."""
    with pytest.raises(InputError) as caught:
        parse(text, "f.yaml")
    assert str(caught.value).startswith("f.yaml")
    assert message in str(caught.value)


def test_a_merge_may_be_overridden() -> None:
    """`<<` brings defaults; naming a key again beside it is no duplicate."""
    assert parse("a: &d {x: 1}\nb: {<<: *d, x: 2, y: 3}", "f").data["b"] == {"x": 2, "y": 3}


def test_lines_are_those_of_keys_and_items() -> None:
    """The line of each key is kept for later complaints."""
    lines = parse("a: 1\nb:\n  - x: 1\n  - x: 2\n", "f").lines
    assert lines[("b",)] == 2
    assert lines[("b", 1, "x")] == 4


def test_render_spells_paths_as_users_do() -> None:
    """Indexes in brackets, names with dots."""
    assert render(("tasks", 2, "training", "lr")) == "tasks[2].training.lr"


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20)
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(min_size=1), trees, max_size=3))
def test_what_is_dumped_parses_to_the_same(tree: dict[str, Any]) -> None:
    """Text that looks like a number stays text, a number stays a number."""
    assert parse(dump(tree), "f").data == tree
