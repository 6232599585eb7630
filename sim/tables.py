"""Engine costs fitted from a table of iterations: sequences, KV tokens, adapters, and the time they took.

    seconds ≈ a + b·B + e·max(0, B − knee) + c·KV + [A > 0]·(d0 + d1·A)

For tables that engines, benchmarks or others' measurements provide; traces are `calibrate`'s. Owns the
columns of that model and the search for the knee; the numerics are `fitting`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from sim.fitting import Fit, fit
from sim.profile import Quantity, ReplicaProfile

KNEES = (0, 100, 150, 200, 250, 300)
HAS_NO_KNEE = 0


class Iteration(msgspec.Struct, frozen=True, kw_only=True):
    """A row: means over iterations that were much alike, and the seconds that one took."""

    num_sequences: float
    kv_tokens: float
    num_adapters: float = 0.0
    seconds: float


class TableFit(msgspec.Struct, frozen=True, kw_only=True):
    """A fit and the knee it was made with; `HAS_NO_KNEE` means that all of a batch costs the same."""

    fit: Fit
    knee_sequences: int

    def seconds(self, row: Iteration) -> float:
        """What the model says of a row."""
        columns = _columns([row], self.knee_sequences)
        return sum(self.fit.values[name] * columns[name][0] for name in self.fit.values)

    def costs(self) -> dict[str, Quantity]:
        """The fitted fields of a `ReplicaProfile`."""
        note = f"{self.fit.num_points} rows, held-out error {self.fit.held_out_error:.1%}"
        fitted = {
            name: Quantity(value=value, source="calibrated", interval=self.fit.intervals[name], note=note)
            for name, value in self.fit.values.items()
        }
        knee = Quantity(value=self.knee_sequences, source="calibrated", note="best held-out error")
        return fitted | {"knee_sequences": knee}


def fit_table(
    rows: Sequence[Iteration], prior: ReplicaProfile | None = None, knees: Sequence[int] = KNEES
) -> TableFit:
    """Fit the costs of iterations; what the rows leave open stays near the prior.

    Every knee is tried and the one with the least held-out error, to a tenth of a percent, kept: of equals
    the first, which is none. Columns that are 0 in every row are left out of the fit. Raises `ValueError`
    without rows.
    """
    if not rows:
        raise ValueError("a fit needs at least one row")
    fits = [TableFit(fit=_fit(rows, prior, knee), knee_sequences=knee) for knee in knees]
    return fits[0] if len(rows) == 1 else min(fits, key=lambda one: round(one.fit.held_out_error, 3))


def mean_error(table_fit: TableFit, rows: Sequence[Iteration]) -> float:
    """The mean absolute relative error of the model over rows."""
    return sum(abs(table_fit.seconds(row) / row.seconds - 1) for row in rows) / len(rows)


def _fit(rows: Sequence[Iteration], prior: ReplicaProfile | None, knee: int) -> Fit:
    columns = {name: column for name, column in _columns(rows, knee).items() if any(column)}
    start = {} if prior is None else {name: getattr(prior, name).value for name in columns}
    return fit(columns, [row.seconds for row in rows], start)


def _columns(rows: Sequence[Iteration], knee: int) -> Mapping[str, Sequence[float]]:
    beyond = [max(0.0, row.num_sequences - knee) if knee else 0.0 for row in rows]
    return {
        "iteration_s": [1.0] * len(rows),
        "per_sequence_s": [row.num_sequences for row in rows],
        "per_sequence_beyond_knee_s": beyond,
        "per_kv_token_s": [row.kv_tokens for row in rows],
        "adapters_s": [float(row.num_adapters > 0) for row in rows],
        "per_adapter_s": [row.num_adapters for row in rows],
    }
