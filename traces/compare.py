"""Two runs of the same experiment, metric by metric.

Knows which runs may be compared; the numbers come from `metrics`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from marlaas.errors import InputError
from traces.metrics import compute
from traces.reader import read_header
from traces.schema import question_hash


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of runs `a` and `b`; `relative_error` is (b - a) / |a|, None where that says nothing."""

    metric: str
    a: float | None
    b: float | None
    relative_error: float | None


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Row]:
    """Every metric that is a number in either run, in the order of `a`, then what only `b` has."""
    names = [*a, *(name for name in b if name not in a)]
    rows = [_row(name, _number(a.get(name)), _number(b.get(name))) for name in names]
    return [row for row in rows if row.a is not None or row.b is not None]


def compare_runs(a: str | Path, b: str | Path) -> list[Row]:
    """Compare two traces or run folders; `InputError` unless they are runs of the same experiment."""
    check_same_experiment(a, b)
    return compare(compute(a), compute(b))


def check_same_experiment(a: str | Path, b: str | Path) -> None:
    """Raise `InputError` unless two runs asked the same: equal but for the system and the cost profile."""
    one, other = (read_header(path).experiment for path in (a, b))
    if question_hash(one) == question_hash(other):
        return
    differing = [
        name
        for name in one.__struct_fields__
        if name not in ("system", "profile") and getattr(one, name) != getattr(other, name)
    ]
    raise InputError(
        f"{a}, {b}",
        f"not runs of the same experiment: {', '.join(differing)} differ",
        "compare runs that differ in their system, world or profile alone",
    )


def _row(name: str, a: float | None, b: float | None) -> Row:
    error = None if a is None or b is None or not a else (b - a) / abs(a)
    return Row(metric=name, a=a, b=b, relative_error=error)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
