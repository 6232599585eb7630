"""Tables of a sweep, made anew from its cells: a row per cell, a summary per configuration, a comparison.

    results.csv, .parquet  axis columns, seed, metrics, cell, error          one row per cell
    summary.csv            axis columns, metric, num_seeds, mean, sd, ci95_low, ci95_high
    comparison.csv         other axes, the compared axis, baseline, metric, num_seeds,
                           difference, difference_low, difference_high, ratio, ratio_low, ratio_high

Rows stand in the cells' order and numbers are written so that they read back exactly: equal results are
equal bytes. Formulas are in `statistics`.
"""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.sweep.axes import Scalar
from experiments.sweep.cells import Cell
from experiments.sweep.folder import (
    COMPARISON,
    FIGURES,
    KEY_LENGTH,
    PARQUET,
    RESULTS,
    SUMMARY,
    CellRecord,
    Number,
    replace_file,
)
from experiments.sweep.statistics import Estimate, estimate, paired_difference, paired_ratio
from experiments.sweep.study import SYSTEM, Study

ALONE = "single"
"""The system under which a task has the cluster to itself."""
NORMALISED = "steps_per_hour_normalised"

Row = dict[str, Any]
Records = Mapping[str, CellRecord]


def write_tables(study: Study, cells: Sequence[Cell], records: Records, out: Path) -> list[Path]:
    """Write every table, and the figures that the study asks for, into `out`; their paths."""
    rows = result_rows(study, cells, records)
    summary = summary_rows(study, rows)
    columns = [axis.name for axis in study.axes]
    kinds = column_kinds(study, rows)
    _write_csv(out / RESULTS, list(kinds), rows)
    _write_parquet(out / PARQUET, kinds, rows)
    _write_csv(
        out / SUMMARY, [*columns, "metric", "num_seeds", "mean", "sd", "ci95_low", "ci95_high"], summary
    )
    files = [out / RESULTS, out / PARQUET, out / SUMMARY]
    (out / COMPARISON).unlink(missing_ok=True)
    if study.comparison is not None:
        compared = comparison_rows(study, rows)
        _write_csv(out / COMPARISON, _comparison_columns(study), compared)
        files.append(out / COMPARISON)
    shutil.rmtree(out / FIGURES, ignore_errors=True)
    if study.plot is not None:
        from experiments.sweep.figures import write_figures  # matplotlib, for those who plot

        files += write_figures(study, study.plot, summary, out / FIGURES)
    return files


def result_rows(study: Study, cells: Sequence[Cell], records: Records) -> list[Row]:
    """One row per cell; what is not known is None."""
    normalised = _normalised(study, cells, records)
    rows = []
    for cell, of_alone in zip(cells, normalised, strict=True):
        record = records.get(cell.key)
        error = cell.error or (record.error if record else None)
        metrics = {} if record is None or error else {**record.metrics, NORMALISED: of_alone}
        kept = {name: metrics.get(name, _absent(name, metrics)) for name in study.metrics}
        name = cell.key[:KEY_LENGTH] or None
        rows.append({**cell.columns, "seed": cell.seed, **kept, "cell": name, "error": error})
    return rows


def summary_rows(study: Study, rows: Sequence[Row]) -> list[Row]:
    """The estimate of every metric for every configuration, over its seeds that have a value."""
    summary = []
    for columns, group in _grouped(rows, [axis.name for axis in study.axes]):
        for metric in study.metrics:
            values = [row[metric] for row in group if row[metric] is not None]
            num, *found = estimate(values) if values else (0, None, None, None, None)
            named = dict(zip(("mean", "sd", "ci95_low", "ci95_high"), found, strict=True))
            summary.append({**columns, "metric": metric, "num_seeds": num, **named})
    return summary


def comparison_rows(study: Study, rows: Sequence[Row]) -> list[Row]:
    """Every point of the compared axis against the baseline, metric by metric, over the seeds of both."""
    assert study.comparison is not None
    axis, baseline = study.comparison.axis, study.comparison.baseline
    others = [one.name for one in study.axes if one.name != axis]
    compared = []
    for columns, group in _grouped(rows, others):
        for label in study.axis(axis).labels:
            if label != baseline:
                head = {**columns, axis: label, "baseline": baseline}
                compared += [{**head, **row} for row in _compared(study, group, axis, baseline, label)]
    return compared


def column_kinds(study: Study, rows: Sequence[Row]) -> dict[str, type]:
    """The columns of the results in order, each with the one type that all its values have."""
    kinds: dict[str, type] = {axis.name: _kind(axis.labels) for axis in study.axes}
    metrics = {name: _kind([row[name] for row in rows if row[name] is not None]) for name in study.metrics}
    return {**kinds, "seed": int, **metrics, "cell": str, "error": str}


def _compared(
    study: Study, group: Sequence[Row], axis: str, baseline: Scalar, label: Scalar
) -> Iterator[Row]:
    ours = {row["seed"]: row for row in group if row[axis] == label}
    theirs = {row["seed"]: row for row in group if row[axis] == baseline}
    for metric in study.metrics:
        both = [(theirs[seed][metric], ours[seed][metric]) for seed in ours if seed in theirs]
        pairs = [(a, b) for a, b in both if a is not None and b is not None]
        difference = paired_difference(pairs) if pairs else None
        ratio = paired_ratio(pairs) if pairs else None
        yield {
            "metric": metric,
            "num_seeds": len(pairs),
            **_interval("difference", difference),
            **_interval("ratio", ratio),
        }


def _comparison_columns(study: Study) -> list[str]:
    assert study.comparison is not None
    others = [axis.name for axis in study.axes if axis.name != study.comparison.axis]
    numbers = [f"{name}{end}" for name in ("difference", "ratio") for end in ("", "_low", "_high")]
    return [*others, study.comparison.axis, "baseline", "metric", "num_seeds", *numbers]


def _interval(name: str, found: Estimate | None) -> dict[str, float | None]:
    mean, low, high = (None, None, None) if found is None else (found.mean, found.low, found.high)
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def _absent(name: str, metrics: Mapping[str, Number]) -> Number:
    """A reason for which nothing was dropped has no metric of its own."""
    return 0 if metrics and name.startswith("dropped.") else None


def _normalised(study: Study, cells: Sequence[Cell], records: Records) -> list[Number]:
    """`steps_per_hour_normalised` of each cell, from the one that differs only in its system, `single`.

    Mean over tasks of own rate / own rate alone, as `traces.metrics` defines it.
    """
    others = [axis.name for axis in study.axes if axis.name != SYSTEM]

    def place(cell: Cell) -> tuple[Any, ...]:
        return (*(cell.columns[name] for name in others), cell.seed)

    found = [(cell, records.get(cell.key)) for cell in cells]
    alone = {
        place(cell): record.rates
        for cell, record in found
        if record is not None and cell.columns.get(SYSTEM) == ALONE
    }
    return [
        None if record is None else _mean_share(record.rates, alone.get(place(cell), {}))
        for cell, record in found
    ]


def _mean_share(
    rates: Mapping[str, tuple[Number, Number]], alone: Mapping[str, tuple[Number, Number]]
) -> Number:
    shares = []
    for task, (own, _) in rates.items():
        active = alone.get(task, (None, None))[1]
        if own is None or not active:
            return None
        shares.append(own / active)
    return sum(shares) / len(shares) if shares else None


def _grouped(rows: Sequence[Row], names: Sequence[str]) -> list[tuple[Row, list[Row]]]:
    """Rows with equal values of these columns, in the order in which the values first appear."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return [(dict(zip(names, values, strict=True)), group) for values, group in groups.items()]


def _kind(values: Sequence[Any]) -> type:
    kinds = {type(value) for value in values}
    if len(kinds) == 1:
        return kinds.pop()
    return float if kinds <= {int, float} else str


def _write_csv(path: Path, columns: Sequence[str], rows: Sequence[Row]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_spell(row[name]) for name in columns] for row in rows)
    replace_file(path, text.getvalue().encode())


def _spell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case float():
            return repr(value)
        case _:
            return str(value)


def _write_parquet(path: Path, kinds: Mapping[str, type], rows: Sequence[Row]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    names = {bool: "bool", int: "int64", float: "float64", str: "string"}
    arrays = {
        name: pa.array([_cast(row[name], kind) for row in rows], type=pa.type_for_alias(names[kind]))
        for name, kind in kinds.items()
    }
    sink = io.BytesIO()
    parquet.write_table(pa.table(arrays), sink, compression="zstd")
    replace_file(path, sink.getvalue())


def _cast(value: Any, kind: type) -> Any:
    if value is None:
        return None
    return _spell(value) if kind is str else kind(value)
