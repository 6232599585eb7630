"""What a number may be, and how it may vary: the nodes that every other part of an experiment is made of.

Pure data, like all of the tree. `None` means "no limit" or "not given", never a number with a second meaning.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=80)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node of the experiment tree; unknown keys are refused."""


class Fixed(Spec, frozen=True, kw_only=True, tag_field="kind", tag="fixed"):
    """Always `value`."""

    value: NonNegative


class Uniform(Spec, frozen=True, kw_only=True, tag_field="kind", tag="uniform"):
    """Evenly between `low` and `high`."""

    low: NonNegative
    high: NonNegative


class Lognormal(Spec, frozen=True, kw_only=True, tag_field="kind", tag="lognormal"):
    """`median · exp(sigma · N(0, 1))`, cut at `cap`."""

    median: Positive
    sigma: NonNegative
    cap: Positive | None = None


class Gamma(Spec, frozen=True, kw_only=True, tag_field="kind", tag="gamma"):
    """Gamma with this mean and shape; shape 1 is exponential."""

    mean: Positive
    shape: Positive = 1.0


class Empirical(Spec, frozen=True, kw_only=True, tag_field="kind", tag="empirical"):
    """One of `values`, each equally likely; sorted ascending when fitted from a trace."""

    values: Annotated[tuple[NonNegative, ...], msgspec.Meta(min_length=1)]


class Mixture(Spec, frozen=True, kw_only=True, tag_field="kind", tag="mixture"):
    """`parts[i]` with probability proportional to `weights[i]`; a heavy tail is one of the parts."""

    weights: tuple[Positive, ...]
    parts: tuple[Distribution, ...]


Distribution = Fixed | Uniform | Lognormal | Gamma | Empirical | Mixture
