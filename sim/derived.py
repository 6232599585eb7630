"""Quantities computed from quantities: the value, what is thought possible of it, and where it comes from.

Intervals are carried along to first order: each input is moved to its two ends while the others stay, and the
changes are added in quadrature, as of independent inputs. Owns that rule; knows no formula.
"""

from __future__ import annotations

from collections.abc import Callable
from math import hypot

from sim.profile import Quantity, Source

FROM_WEAKEST: tuple[Source, ...] = ("assumed", "published", "datasheet", "calibrated")


def derived(formula: Callable[..., float], *inputs: Quantity, note: str) -> Quantity:
    """`formula` of the inputs' values, with an interval where an input has one.

    The source is the weakest of the inputs'; `note` says the formula in words or symbols.
    """
    values = [one.value for one in inputs]
    value = formula(*values)
    below, above = 0.0, 0.0
    for i, one in enumerate(inputs):
        if one.interval is not None:
            ends = [formula(*values[:i], end, *values[i + 1 :]) - value for end in one.interval]
            below, above = hypot(below, min(*ends, 0.0)), hypot(above, max(*ends, 0.0))
    has_interval = any(one.interval is not None for one in inputs)
    return Quantity(
        value=_rounded(value),
        source=weakest(*inputs),
        interval=(_rounded(max(0.0, value - below)), _rounded(value + above)) if has_interval else None,
        note=note,
    )


def weakest(*inputs: Quantity) -> Source:
    """The source that deserves the least trust among the inputs'."""
    return min((one.source for one in inputs), key=FROM_WEAKEST.index)


def published(value: float, low: float, high: float, note: str) -> Quantity:
    """A quantity that others measured and wrote down, and the range of what they wrote."""
    return Quantity(value=value, source="published", interval=(low, high), note=note)


def guessed(value: float, low: float, high: float, note: str) -> Quantity:
    """A quantity nobody measured, and the range in which it is sought."""
    return Quantity(value=value, source="assumed", interval=(low, high), note=note)


def _rounded(value: float) -> float:
    """Six significant digits: more would be noise to a reader."""
    return float(f"{value:.6g}")
