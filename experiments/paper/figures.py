"""The figures of the study: tables in, matplotlib figures out, each answering one question.

Systems keep one colour and one order everywhere, and what arithmetic allows is drawn black and dashed. Knows
no file and judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator, ScalarFormatter

from experiments.paper.bounds import equal_gain_bound
from experiments.paper.claim import MODEST, THROUGHPUT, mixed_bound
from experiments.paper.results import (
    ASYNC_SINGLE_LORA,
    MARLAAS,
    SINGLE,
    SYNC,
    SYNC_SINGLE_LORA,
    SYSTEMS,
    Results,
)
from experiments.report import style
from experiments.sweep.axes import NUM_TASKS
from experiments.words import figure as figure_of

COLOURS = {
    SINGLE: style.GREY,
    SYNC_SINGLE_LORA: style.PINK,
    ASYNC_SINGLE_LORA: style.SKY,
    SYNC: style.ORANGE,
    MARLAAS: style.BLUE,
}
MARKS = {SINGLE: "s", SYNC_SINGLE_LORA: "v", ASYNC_SINGLE_LORA: "^", SYNC: "D", MARLAAS: "o"}
BOUND: dict[str, Any] = {"color": style.BLACK, "linestyle": "--", "linewidth": 1.2}
CLAIMED: dict[str, Any] = {"color": style.RED, "linestyle": ":", "linewidth": 1.4}


def scaling(results: Results) -> Figure:
    """What do 1 to 32 tasks get? Aggregate, normalised, makespan and gain, side by side for every model."""
    figure, grid = _grid(results, 4, 2.35)
    for column, model in enumerate(results.models):
        _curves(results, grid[0][column], model, "steps_per_hour", log=True)
        _curves(results, grid[1][column], model, "steps_per_hour_normalised", log=True)
        _curves(results, grid[2][column], model, "makespan_s", log=True, scale=1 / 3600)
        _gains(results, grid[3][column], model)
        grid[0][column].set_title(model)
    words = ("steps per hour", "rate / rate alone\n(mean over tasks)", "makespan (h)", "gain over single")
    for row, word in zip(grid, words, strict=True):
        row[0].set_ylabel(word)
    _finish(results, figure, grid, {"bound": BOUND, f"{THROUGHPUT}× claimed": CLAIMED})
    return figure


def _gains(results: Results, axis: Axes, model: str) -> None:
    for system in SYSTEMS[1:]:
        values = [results.gain(model, num, system, SINGLE) for num in results.num_tasks]
        _line(axis, results.num_tasks, values, system)
    limits_of = [mixed_bound(results, model, num).value for num in results.num_tasks]
    axis.plot(results.num_tasks, limits_of, **BOUND)
    axis.axhline(THROUGHPUT, **CLAIMED)
    axis.set_ylim(bottom=0)


def utilisation(results: Results) -> Figure:
    """How much of the devices is used: time with work in flight, and what could be done in it?"""
    figure, grid = _grid(results, 2, 2.5)
    for column, model in enumerate(results.models):
        for row, metric in enumerate(("busy", "effective")):
            _curves(results, grid[row][column], model, metric, scale=100)
            grid[row][column].set_ylim(bottom=0)
        grid[0][column].set_title(model)
    grid[0][0].set_ylabel("busy (% of device time)")
    grid[1][0].set_ylabel("effective (% of what\ndevices could do)")
    _finish(results, figure, grid, {})
    return figure


def reached(results: Results) -> Figure:
    """Where is a gain reached? Every cell of the main grid."""
    figure = Figure(figsize=(style.WIDTH_IN, 1.0 + 0.5 * len(results.models)), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, baseline in zip(axes, (SINGLE, SYNC), strict=True):
        gains = np.array(
            [
                [results.gain(model, num, MARLAAS, baseline) for num in results.num_tasks]
                for model in results.models
            ]
        )
        axis.imshow(np.log(gains), cmap="Blues", vmin=0, vmax=np.log(12), aspect="auto")
        for (row, column), gain in np.ndenumerate(gains):
            dark = gain > 5
            axis.text(
                column,
                row,
                f"{gain:.2f}" + ("  ✓" if gain >= THROUGHPUT else ""),
                ha="center",
                va="center",
                color="white" if dark else style.BLACK,
            )
        axis.set_xticks(range(len(results.num_tasks)), [str(num) for num in results.num_tasks])
        axis.set_yticks(range(len(results.models)), results.models)
        axis.grid(visible=False)
        axis.set_xlabel("tasks")
        axis.set_title(f"Gain of marlaas over {baseline} in steps per hour")
    return figure


def ablation(results: Results) -> Figure:
    """What does each part contribute? Four systems without one part or two, counted in three ways."""
    figure = Figure(figsize=(style.WIDTH_IN, 3.6), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    order = (MARLAAS, SYNC, ASYNC_SINGLE_LORA, SYNC_SINGLE_LORA)
    counted: dict[str, Callable[[str, str], float]] = {
        "aggregate steps/hour, under way": lambda m, s: _share(results, m, s, "aggregate"),
        "normalised, under way": lambda m, s: _share(results, m, s, "normalised"),
        "1 / makespan, equal steps": lambda m, s: results.gain(m, results.largest, s, MARLAAS),
    }
    for axis, (title, value) in zip(axes, counted.items(), strict=True):
        for place, system in enumerate(order):
            at = np.arange(len(results.models)) + (place - 1.5) * 0.2
            heights = [100 * value(model, system) for model in results.models]
            bars = axis.bar(at, heights, 0.18, color=COLOURS[system])
            axis.bar_label(bars, [f"{height:.0f}" for height in heights], padding=2, fontsize=8)
        axis.axhline(34, **CLAIMED)
        axis.set_xticks(range(len(results.models)), results.models)
        axis.grid(axis="x", visible=False)
        axis.set_title(title)
    axes[0].set_ylabel("percent of marlaas")
    handles: list[Any] = [Patch(color=COLOURS[system], label=system) for system in order]
    handles.append(Line2D([], [], label="−66 % claimed without asynchrony", **CLAIMED))
    figure.legend(handles=handles, loc="outside upper center", ncols=5)
    return figure


def _share(results: Results, model: str, system: str, column: str) -> float:
    return results.service[model, system][column] / results.service[model, MARLAAS][column]


def waiting(results: Results) -> Figure:
    """What does a tenant wait for: the first step, and each step?"""
    figure, grid = _grid(results, 2, 2.6)
    for column, model in enumerate(results.models):
        _curves(results, grid[0][column], model, "ttfs_s.mean", log=True, systems=(SINGLE, SYNC, MARLAAS))
        latency = [results.latency_ratio(model, num) for num in results.num_tasks]
        _line(grid[1][column], results.num_tasks, latency, MARLAAS)
        grid[1][column].axhline(MODEST, **BOUND)
        grid[1][column].axhline(1, color=style.GREY, linewidth=1)
        grid[1][column].set_ylim(bottom=0)
        grid[0][column].set_title(model)
    grid[0][0].set_ylabel("mean time to\nfirst step (s)")
    grid[1][0].set_ylabel("step latency of marlaas\n/ that alone")
    _finish(results, figure, grid, {"2×: taken for modest": BOUND}, (SINGLE, SYNC, MARLAAS))
    return figure


def causes(results: Results) -> Figure:
    """Where does a step's time go as tasks are added?"""
    figure, grid = _grid(results, 1, 3.3)
    names = [name for name in style.CAUSES if f"step_latency_s.{name}" in results.by_cell.columns]
    for column, model in enumerate(results.models):
        axis = grid[0][column]
        bottom = np.zeros(len(results.num_tasks))
        for name in names:
            heights = np.array(
                [
                    float(results.at(model, num, MARLAAS)[f"step_latency_s.{name}"])
                    for num in results.num_tasks
                ]
            )
            axis.bar(range(len(bottom)), heights, 0.75, bottom=bottom, color=style.CAUSES[name])
            bottom += heights
        axis.set_xticks(range(len(bottom)), [str(num) for num in results.num_tasks])
        axis.set_xlabel("tasks")
        axis.grid(axis="x", visible=False)
        axis.set_title(model)
    grid[0][0].set_ylabel("mean step latency of marlaas (s)")
    handles = [Patch(color=style.CAUSES[name], label=name.replace("_", " ")) for name in names]
    figure.legend(handles=handles, loc="outside upper center", ncols=8)
    return figure


def tornado(results: Results) -> Figure:
    """Which assumption moves the headline? One bar per assumption, from its low to its high end."""
    rows = tornado_rows(results)
    documented, ends = rows["gain"].iloc[0], rows.iloc[1:]
    names = list(dict.fromkeys(ends["assumption"]))
    spans = {name: ends[ends["assumption"] == name]["gain"] for name in names}
    names.sort(key=lambda name: float(np.ptp([*spans[name], documented])))
    figure = Figure(figsize=(style.WIDTH_IN, 1.2 + 0.34 * len(names)), layout="constrained")
    axis = figure.subplots()
    for place, name in enumerate(names):
        bars = list(zip(ends[ends["assumption"] == name]["gain"], (style.SKY, style.BLUE), strict=False))
        for gain, colour in sorted(bars, key=lambda bar: -abs(bar[0] - documented)):  # the shorter one on top
            axis.barh(place, gain - documented, left=documented, height=0.66, color=colour)
    low, high = float(rows["gain"].min()), float(rows["gain"].max())
    room = 0.16 * max(high - low, 0.1)
    for place, name in enumerate(names):
        _write_ends(axis, place, documented, ends[ends["assumption"] == name])
    axis.set_xlim(low - room, high + room)
    axis.axvline(documented, color=style.BLACK, linewidth=1)
    axis.axvline(THROUGHPUT, **CLAIMED)
    axis.set_yticks(range(len(names)), names)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("gain of marlaas over single in steps per hour, 32 tasks, Qwen3-14B")
    handles: list[Any] = [
        Patch(color=style.SKY, label="low end"),
        Patch(color=style.BLUE, label="high end"),
        Line2D([], [], color=style.BLACK, label=f"documented, {documented:.2f}×"),
        Line2D([], [], label=f"{THROUGHPUT}× claimed", **CLAIMED),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=4)
    return figure


def _write_ends(axis: Axes, place: int, documented: float, ends: pd.DataFrame) -> None:
    """The value of each end beside its bar; two on the same side share a place, the nearer one first."""
    for side, sign in (("left", -1), ("right", 1)):
        on_side = ends[(ends["gain"] - documented) * sign >= 0 if sign > 0 else ends["gain"] < documented]
        if on_side.empty:
            continue
        ordered = on_side.sort_values("gain", ascending=True)
        text = " · ".join(ordered["end"])
        outer = float(ordered["gain"].iloc[0 if sign < 0 else -1])
        axis.annotate(
            text,
            (outer, place),
            xytext=(4 * sign, 0),
            textcoords="offset points",
            ha="right" if side == "left" else "left",
            va="center",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )


def tornado_rows(results: Results) -> pd.DataFrame:
    """The documented set and every end: gain, effective ratio, fall of time to first step, R/T."""
    table = results.sensitivity.set_index(["assumption", "system"])
    rows = []
    for label in dict.fromkeys(results.sensitivity["assumption"]):
        ours, alone = table.loc[(label, MARLAAS)], table.loc[(label, SINGLE)]
        name, _, end = str(label).partition(" | ")
        rows.append(
            {
                "assumption": name,
                "end": end,
                "gain": float(ours["steps_per_hour"] / alone["steps_per_hour"]),
                "normalised": float(ours["steps_per_hour_normalised"] / alone["steps_per_hour_normalised"]),
                "makespan": float(ours["makespan_s"] / alone["makespan_s"]),
                "effective": float(ours["effective"] / alone["effective"]),
                "ttfs": 1 - float(ours["ttfs_s.mean"] / alone["ttfs_s.mean"]),
                "ratio": float(alone["rollout_to_training_ratio"]),
            }
        )
    return pd.DataFrame(rows)


def ratio(results: Results) -> Figure:
    """How does the gain depend on R/T, and how near does it come to its bound?"""
    numbers = sorted(int(num) for num in results.ratio[NUM_TASKS].unique())
    figure = Figure(figsize=(style.WIDTH_IN, 3.8), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(numbers), sharey=False))
    for axis, num in zip(axes, numbers, strict=True):
        table = ratio_rows(results, num)
        for system in (SYNC, MARLAAS):
            _line(axis, list(table["ratio"]), list(table[system]), system)
        smooth = np.geomspace(min(1, table["ratio"].min()), max(100, table["ratio"].max()), 200)
        axis.plot(smooth, [equal_gain_bound(num, value) for value in smooth], **BOUND)
        axis.axhline(THROUGHPUT, **CLAIMED)
        axis.set_xscale("log")
        _plain(axis, [1, 2, 5, 10, 20, 50, 100])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("R/T alone")
        axis.set_title(f"{num} equal tasks")
    axes[0].set_ylabel("gain over single")
    _legend(figure, (SYNC, MARLAAS), {"min(N, 1 + R/T)": BOUND, f"{THROUGHPUT}× claimed": CLAIMED})
    return figure


def ratio_rows(results: Results, num_tasks: int) -> pd.DataFrame:
    """Measured R/T alone, and the gains of sync and marlaas over single there."""
    table = results.ratio[results.ratio[NUM_TASKS] == num_tasks]
    pace = table.pivot_table(index="ratio", columns="system", values="steps_per_hour")
    measured = table[table["system"] == SINGLE].set_index("ratio")["rollout_to_training_ratio"]
    found = pd.DataFrame(
        {"ratio": measured, SYNC: pace[SYNC] / pace[SINGLE], MARLAAS: pace[MARLAAS] / pace[SINGLE]}
    )
    found["bound"] = [equal_gain_bound(num_tasks, value) for value in measured]
    return found.reset_index(drop=True).sort_values("ratio")


def split(results: Results) -> Figure:
    """How should 64 NPUs be split?"""
    figure, grid = _grid(results, 1, 3.0)
    labels = list(dict.fromkeys(results.split["split"]))
    for column, model in enumerate(results.models):
        axis = grid[0][column]
        table = results.split[results.split["model"] == model]
        pace = table.pivot_table(index="split", columns="system", values="steps_per_hour").reindex(labels)
        for system in (SINGLE, MARLAAS):
            _line(axis, range(len(labels)), list(pace[system]), system)
        axis.set_xticks(range(len(labels)), labels)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("rollout : training NPUs")
        axis.set_title(model)
    grid[0][0].set_ylabel("steps per hour")
    _legend(figure, (SINGLE, MARLAAS), {})
    return figure


def limits(results: Results) -> Figure:
    """What do slow adapter loads, few slots and little KV cost?"""
    figure = Figure(figsize=(style.WIDTH_IN, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    slots = "cluster.replicas.slots"
    table = results.loads.pivot_table(index="load_s", columns=slots, values="steps_per_hour")
    wheel = (style.PINK, style.GREEN, style.BLUE)
    for num, colour in zip(table.columns, wheel, strict=False):
        left.plot(table.index, table[num], color=colour, marker="o", label=f"{num} slots")
    left.set_xscale("log")
    _plain(left, list(table.index))
    left.set_ylim(bottom=0)
    left.set(
        xlabel="time to load an adapter (s)", ylabel="steps per hour", title="Adapters, marlaas, Qwen3-14B"
    )
    left.legend()
    kv = "cluster.replicas.kv_tokens"
    pace = results.memory.pivot_table(index=kv, columns="system", values="steps_per_hour")
    for system in (SINGLE, MARLAAS):
        _line(right, [tokens / 1000 for tokens in pace.index], list(pace[system]), system)
    right.set_ylim(bottom=0)
    right.set(xlabel="KV of a replica (thousand tokens)", ylabel="steps per hour", title="KV, Qwen3-14B")
    right.legend(handles=_handles((SINGLE, MARLAAS)))
    return figure


# --- pieces ----------------------------------------------------------------------------------------


def _grid(results: Results, num_rows: int, height_in: float) -> tuple[Figure, list[list[Axes]]]:
    num = len(results.models)
    figure = Figure(figsize=(style.WIDTH_IN, 0.6 + height_in * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, num, squeeze=False, sharey="row" if num_rows > 99 else False)
    return figure, [list(row) for row in axes]


def _curves(
    results: Results,
    axis: Axes,
    model: str,
    metric: str,
    *,
    log: bool = False,
    scale: float = 1.0,
    systems: Sequence[str] = SYSTEMS,
) -> None:
    for system in systems:
        values = [scale * float(results.at(model, num, system)[metric]) for num in results.num_tasks]
        _line(axis, results.num_tasks, values, system)
    if log:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: figure_of(float(value))))
        axis.yaxis.set_minor_locator(NullLocator())


def _line(axis: Axes, x: Sequence[Any] | range, y: Sequence[float], system: str) -> None:
    is_ours = system == MARLAAS
    axis.plot(
        list(x),
        list(y),
        color=COLOURS[system],
        marker=MARKS[system],
        markersize=5 if is_ours else 4,
        linewidth=2.2 if is_ours else 1.4,
        zorder=3 if is_ours else 2,
    )


def _finish(
    results: Results,
    figure: Figure,
    grid: list[list[Axes]],
    further: Mapping[str, dict[str, Any]],
    systems: Sequence[str] = SYSTEMS,
) -> None:
    for row in grid:
        for axis in row:
            axis.set_xscale("log", base=2)
            _plain(axis, results.num_tasks)
    for axis in grid[-1]:
        axis.set_xlabel("tasks")
    _legend(figure, systems, further)


def _plain(axis: Axes, ticks: Sequence[float]) -> None:
    """Ticks at these numbers, spelt out."""
    axis.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(ScalarFormatter())
    axis.set_xticklabels([figure_of(float(tick)) for tick in ticks])


def _handles(systems: Sequence[str]) -> list[Any]:
    return [
        Line2D([], [], color=COLOURS[system], marker=MARKS[system], markersize=5, label=system)
        for system in systems
    ]


def _legend(figure: Figure, systems: Sequence[str], further: Mapping[str, dict[str, Any]]) -> None:
    handles = _handles(systems) + [Line2D([], [], label=name, **look) for name, look in further.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
