"""Figures of a sweep: one per metric, means over the seeds with their 95 % intervals as bars.

Owns what goes across, what is told apart by colour, and the words on the axes; numbers come from the summary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.style as mpl_style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.report import style
from experiments.sweep.axes import Axis, Scalar
from experiments.sweep.study import Plot, Study
from experiments.words import meaning

DASHES = ("-", "--", ":", "-.")
MAX_TICKS = 10

Row = dict[str, Any]


def write_figures(study: Study, plot: Plot, summary: Sequence[Row], folder: Path) -> list[Path]:
    """Draw every metric of the plot into `folder`; the files."""
    folder.mkdir(parents=True)
    files = []
    for metric in plot.metrics:
        path = folder / f"{metric}.png"
        rows = [row for row in summary if row["metric"] == metric and row["mean"] is not None]
        with mpl_style.context(style.RC):
            draw(study, plot, metric, rows).savefig(path, format="png", dpi=style.DPI)
        files.append(path)
    return files


def draw(study: Study, plot: Plot, metric: str, rows: Sequence[Row]) -> Figure:
    """One metric across `plot.x`: a line per combination of the other axes, its colour that of `plot.by`."""
    figure = Figure(figsize=(0.75 * style.WIDTH_IN, 4.5), layout="constrained")
    panel = figure.subplots()
    places = _scale(panel, study.axis(plot.x))
    others = [one.name for one in study.axes if one.name not in (plot.x, plot.by) and len(one.points) > 1]
    lines = _lines(plot, rows, others)
    wheel = style.colours(list(dict.fromkeys(colour for colour, _ in lines)))
    dashes = dict(zip(dict.fromkeys(rest for _, rest in lines), itertools.cycle(DASHES), strict=False))
    for (colour, rest), of_line in lines.items():
        at = [places[row[plot.x]] for row in of_line]
        name = ", ".join(part for part in (colour, rest) if part)
        panel.plot(
            at, [row["mean"] for row in of_line], color=wheel[colour], linestyle=dashes[rest], label=name
        )
        _draw_intervals(panel, of_line, at, wheel[colour])
    panel.set_xlabel(plot.x)
    panel.set_ylabel(metric)
    panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))
    panel.set_title(meaning(metric) or metric)
    if len(lines) > 1:
        figure.legend(loc="outside right upper")
    return figure


def _scale(panel: Axes, x: Axis) -> dict[Scalar, float]:
    """Set up the axis across; where each of its points goes: numbers at their value, words in order."""
    is_number = all(isinstance(label, int | float) and not isinstance(label, bool) for label in x.labels)
    places = {label: float(label) if is_number else index for index, label in enumerate(x.labels)}
    if x.scale == "log":
        panel.set_xscale("log")
    if not is_number or len(x.labels) <= MAX_TICKS:
        panel.set_xticks(list(places.values()), [str(label) for label in x.labels])
        panel.minorticks_off()
    return places


def _lines(plot: Plot, rows: Sequence[Row], others: Sequence[str]) -> dict[tuple[str, str], list[Row]]:
    """The rows of each line, by what its colour and what its dashes stand for."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        rest = ", ".join(_named(name, row[name]) for name in others)
        lines.setdefault((str(row[plot.by]) if plot.by else "", rest), []).append(row)
    return lines


def _named(axis: str, label: Scalar) -> str:
    """A label as it is, where it is a word that explains itself."""
    return label if isinstance(label, str) else f"{axis} {label}"


def _draw_intervals(panel: Axes, rows: Sequence[Row], places: Sequence[float], colour: str) -> None:
    means = [row["mean"] for row in rows]
    halves = [0.0 if row["ci95_high"] is None else row["ci95_high"] - row["mean"] for row in rows]
    panel.errorbar(places, means, yerr=halves, color=colour, fmt="o", markersize=4, capsize=3)
