"""Non-negative linear models of durations, and how far to trust them.

    seconds ≈ Σ value_j · column_j,  value_j ≥ 0

Fitted by least squares on the relative error with a pull of each value toward its prior, then scaled so
that predicted and measured totals agree: what matters later is how long whole runs take. The pull is weak, or
as strong as is right where it is known how far off points and priors may be. Owns the numerics; knows no
trace and no meaning of a column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

RIDGE = 1e-4
MAX_FOLDS = 100
NUM_RESAMPLES = 100


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted values with 90 % intervals from resampling, and mean absolute relative errors.

    `held_out_error` is of points that the fit was not shown: each alone, or in up to 100 folds.
    """

    values: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    num_points: int
    error: float
    held_out_error: float


class Trust(msgspec.Struct, frozen=True, kw_only=True):
    """How far off points and priors may be, as standard deviations.

    `noise` of a point relative to it; `spreads` of the values named, in their own units.
    """

    noise: float
    spreads: Mapping[str, float]


def fit(
    columns: Mapping[str, Sequence[float]],
    seconds: Sequence[float],
    prior: Mapping[str, float],
    trust: Trust | None = None,
) -> Fit:
    """Fit the model; a column without a prior is pulled toward 0. Needs at least one point.

    With `trust`, which must name every column, points and priors count by how far off each may be; without,
    all priors are pulled to alike and weakly.
    """
    names = list(columns)
    x = np.column_stack([np.asarray(columns[name], dtype=np.float64) for name in names])
    y = np.asarray(seconds, dtype=np.float64)
    start = np.array([prior.get(name, 0.0) for name in names])
    pull = None if trust is None else np.array([trust.noise / trust.spreads[name] for name in names])
    values = _solve(x, y, start, pull)
    low, high = _intervals(x, y, start, pull)
    return Fit(
        values=dict(zip(names, values.tolist(), strict=True)),
        intervals={name: (float(low[i]), float(high[i])) for i, name in enumerate(names)},
        num_points=len(y),
        error=_error(x @ values, y),
        held_out_error=_held_out_error(x, y, start, pull),
    )


def _solve(x: Floats, y: Floats, prior: Floats, pull: Floats | None) -> Floats:
    from scipy.optimize import nnls

    relative = x / y[:, None]
    if pull is None:
        # In units of the share of time that a column explains, so that no unit matters.
        pull = np.sqrt(RIDGE * len(y)) * relative.mean(axis=0)
    target = np.concatenate([np.ones(len(y)), pull * prior])
    values: Floats
    values, _ = nnls(np.vstack([relative, np.diag(pull)]), target)
    predicted = float((x @ values).sum())
    return values * (float(y.sum()) / predicted) if predicted > 0 else values


def _error(predicted: Floats, y: Floats) -> float:
    return float(np.abs(predicted / y - 1).mean())


def _held_out_error(x: Floats, y: Floats, prior: Floats, pull: Floats | None) -> float:
    if len(y) < 2:
        return float("nan")
    fold = np.arange(len(y)) % min(len(y), MAX_FOLDS)
    predicted = np.empty_like(y)
    for k in range(int(fold.max()) + 1):
        held_out = fold == k
        predicted[held_out] = x[held_out] @ _solve(x[~held_out], y[~held_out], prior, pull)
    return _error(predicted, y)


def _intervals(x: Floats, y: Floats, prior: Floats, pull: Floats | None) -> tuple[Floats, Floats]:
    random = np.random.Generator(np.random.Philox(key=len(y)))
    samples = []
    for _ in range(NUM_RESAMPLES):
        rows = random.integers(len(y), size=len(y))
        samples.append(_solve(x[rows], y[rows], prior, pull))
    low, high = np.quantile(np.array(samples), [0.05, 0.95], axis=0)
    return low, high
