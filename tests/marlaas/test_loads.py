"""Choosing the least loaded without looking at everybody."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from marlaas.loads import Loads

NAMES = ("a", "b", "c", "d")
change = st.tuples(st.sampled_from(NAMES), st.integers(-3, 5))
question = st.tuples(st.integers(0, 6), st.integers(1, 4), st.frozensets(st.sampled_from(NAMES)))


def slow_place(loads: dict[str, int], num_groups: int, size: int, eligible: frozenset[str]) -> list[str]:
    """Look at everybody for every group."""
    loads, placed = dict(loads), []
    for _ in range(num_groups if eligible else 0):
        name = min((n for n in NAMES if n in eligible), key=lambda n: (loads[n], NAMES.index(n)))
        loads[name] += size
        placed.append(name)
    return placed


@given(st.lists(st.one_of(change, question), max_size=150))
def test_it_chooses_as_if_it_had_looked_at_everybody(script: list[tuple[object, ...]]) -> None:
    """Whatever was counted and asked before; asking counts nothing."""
    loads, expected = Loads(NAMES), dict.fromkeys(NAMES, 0)
    for entry in script:
        match entry:
            case (str(name), int(more)):
                loads.change(name, more)
                expected[name] += more
            case (int(num_groups), int(size), frozenset(eligible)):
                wanted = slow_place(expected, num_groups, size, eligible)
                assert loads.place_among(eligible, num_groups, size) == wanted
                assert loads.place(num_groups, size, eligible.__contains__) == wanted
    assert {name: loads.of(name) for name in NAMES} == expected
