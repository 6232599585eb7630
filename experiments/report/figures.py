"""The figures of a report: runs in, matplotlib figures out, each answering one question.

Every figure puts the runs under or beside one another on shared axes, so that a difference is seen and not
computed. Knows only `RunView`s: no trace, no file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from experiments.report import style
from experiments.report.views import RunView, Span
from experiments.words import figure as figure_of

Runs = Sequence[RunView]


def tasks_gantt(runs: Runs) -> Figure:
    """When did each task generate, act and train? One row per task, runs on one time axis."""
    figure, axes = _stack(runs, [len(run.tasks) for run in runs])
    for axis, run in zip(axes, runs, strict=True):
        rows = {task: row for row, task in enumerate(run.tasks)}
        for lane, phases in enumerate((("load", "rollout"), ("environment",), ("training", "publish"))):
            for phase in phases:
                spans = [span for span in run.spans if span.phase == phase]
                _bars(
                    axis, spans, [rows[span.task] - 0.4 + lane * 0.27 for span in spans], style.PHASES[phase]
                )
        for at_s, task in run.commits:
            axis.plot(at_s, rows[task] + 0.44, marker="^", markersize=3.5, color=style.BLACK, clip_on=False)
        _rows(axis, list(run.tasks), run)
    _legend(figure, style.PHASES, "▲ a step is committed")
    return figure


def devices_gantt(runs: Runs) -> Figure:
    """Who used which device when? Each place's block holds one line per task that was there."""
    blocks = [_blocks(run) for run in runs]
    figure, axes = _stack(runs, [0.6 * sum(map(len, block.values())) for block in blocks])
    wheel = style.colours(_all_tasks(runs))
    for axis, run, block in zip(axes, runs, blocks, strict=True):
        top, middles = 0, []
        for place, tasks in block.items():
            for line, task in enumerate(tasks):
                spans = [
                    s for s in run.spans if s.place == place and s.task == task and s.phase in _DEVICE_PHASES
                ]
                _bars(axis, spans, [top + line + 0.1] * len(spans), wheel[task], 0.8)
            middles.append(top + len(tasks) / 2)
            top += len(tasks)
            axis.axhline(top, color=style.GREY, linewidth=0.6)
        axis.set_yticks(middles, list(block))
        axis.set_ylim(top, 0)
        _finish_row(axis, run)
    _legend(figure, wheel, "")
    return figure


def throughput(runs: Runs) -> Figure:
    """How fast do steps get committed? Steps over time, and steps per hour."""
    figure = Figure(figsize=(style.WIDTH_IN, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1.3))
    wheel = style.colours([run.label for run in runs])
    for run in runs:
        times = [0.0, *(at_s for at_s, _ in run.commits)]
        left.step(
            times, range(len(times)), where="post", color=wheel[run.label], label=run.label, linewidth=2
        )
    left.set(title="Committed steps, all tasks", xlabel="time since the first submission (s)", ylabel="steps")
    left.set_xlim(left=0)
    left.set_ylim(bottom=0)
    bars = right.bar(
        range(len(runs)), [run.metrics["steps_per_hour"] for run in runs], 0.65, color=wheel.values()
    )
    right.bar_label(bars, [figure_of(run.metrics["steps_per_hour"]) for run in runs], padding=2)
    right.set_xticks([])
    right.grid(axis="x", visible=False)
    right.margins(y=0.12)
    right.set(title="Throughput", ylabel="steps per hour")
    _legend(figure, wheel, "")
    return figure


def utilisation(runs: Runs) -> Figure:
    """How much of the device time was in use, and how much of it well used?"""
    figure = Figure(figsize=(style.WIDTH_IN, 3.4), layout="constrained")
    axis = figure.subplots()
    shares = {
        "rollout\nbusy": [_number(run, "rollout_busy") for run in runs],
        "train\nbusy": [_number(run, "train_busy") for run in runs],
        "busy": [_number(run, "busy") for run in runs],
        "rollout\neffective": _against_best(runs, "rollout"),
        "train\neffective": _against_best(runs, "train"),
    }
    _grouped(axis, runs, shares)
    axis.set(title="Share of device time", ylabel="percent of device time")
    axis.set_ylim(0, 105)
    _legend(figure, style.colours([run.label for run in runs]), "")
    return figure


def rewards(runs: Runs) -> Figure:
    """Does every task learn? Mean reward of each step, thin, and smoothed, thick."""
    learned = [run for run in runs if any(run.rewards.values())]
    tasks = [task for task in _all_tasks(learned) if any(run.rewards.get(task) for run in learned)]
    columns = min(len(tasks), 4) or 1
    num_rows = -(-len(tasks) // columns) or 1
    figure = Figure(figsize=(style.WIDTH_IN, 0.6 + 2.4 * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, columns, sharex=True, sharey=True, squeeze=False)
    wheel = style.colours([run.label for run in runs])
    for axis, task in zip(grid.flat, tasks, strict=False):
        for number, run in enumerate(learned):
            values, colour = run.rewards.get(task, []), wheel[run.label]
            steps = np.arange(1, len(values) + 1)
            dashes = ("-", "--", ":", "-.")[number % 4]  # equal curves lie on one another and stay visible
            axis.plot(steps, values, color=colour, linewidth=0.8, alpha=0.5, linestyle=dashes)
            axis.plot(steps, smooth(values), color=colour, linewidth=max(1.5, 3.5 - number), linestyle=dashes)
        axis.set(title=task)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    grid[0, 0].set_ylim(bottom=min(0.0, grid[0, 0].get_ylim()[0]))
    for axis in grid.flat[len(tasks) :]:
        axis.set_visible(False)
    for axis in grid[-1]:
        axis.set_xlabel("step")
    for axis in grid[:, 0]:
        axis.set_ylabel("mean reward")
    _legend(figure, {run.label: wheel[run.label] for run in learned}, "")
    return figure


def latency(runs: Runs) -> Figure:
    """Where does a step's time go? Mean seconds per step by cause, per task."""
    labels = [(run, task) for run in runs for task in run.tasks if task in run.causes]
    figure = Figure(figsize=(style.WIDTH_IN, 1.2 + 0.32 * len(labels)), layout="constrained")
    axis = figure.subplots()
    for row, (run, task) in enumerate(labels):
        left = 0.0
        for cause, seconds in run.causes[task].items():
            axis.barh(row, seconds, left=left, height=0.74, color=style.CAUSES[cause])
            left += seconds
    axis.set_yticks(range(len(labels)), [f"{run.label}  {task}" for run, task in labels])
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set(title="Mean step latency by cause", xlabel="seconds per step")
    _legend(figure, {cause.replace("_", " "): colour for cause, colour in style.CAUSES.items()}, "")
    return figure


def smooth(values: Sequence[float], window: int = 5) -> list[float]:
    """The mean of each value and up to `window - 1` before it."""
    return [float(np.mean(values[max(0, i + 1 - window) : i + 1])) for i in range(len(values))]


# --- pieces ----------------------------------------------------------------------------------------


def _stack(runs: Runs, num_rows: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """One axes per run under one another, as high as its rows, on one time axis."""
    row_in = float(np.clip(9.0 / max(sum(num_rows), 1), 0.14, 0.5))
    height = 0.9 + sum(0.55 + rows * row_in for rows in num_rows)
    figure = Figure(figsize=(style.WIDTH_IN, height), layout="constrained")
    grid = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=list(num_rows))
    axes = list(grid[:, 0])
    axes[0].set_xlim(0, max(run.end_s for run in runs))
    axes[-1].set_xlabel("time since the first submission (s)")
    return figure, axes


def _rows(axis: Axes, names: list[str], run: RunView) -> None:
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.45, -0.55)
    _finish_row(axis, run)


def _finish_row(axis: Axes, run: RunView) -> None:
    axis.grid(axis="y", visible=False)
    axis.set_title(run.label)
    axis.axvline(run.end_s, color=style.GREY, linewidth=1, linestyle=":")


def _bars(
    axis: Axes, spans: Sequence[Span], tops: Sequence[float], colour: str, height: float = 0.25
) -> None:
    for top in sorted(set(tops)):
        ranges = [(s.start_s, s.end_s - s.start_s) for s, at in zip(spans, tops, strict=True) if at == top]
        axis.broken_barh(ranges, (top, height), facecolor=colour, linewidth=0)


_DEVICE_PHASES = {"rollout": 0, "environment": 1, "training": 2, "publish": 2}


def _blocks(run: RunView) -> dict[str, list[str]]:
    """The places of the device figure, replicas before environments before lanes, and who was at each."""
    seen = {(_DEVICE_PHASES[s.phase], s.place, s.task) for s in run.spans if s.phase in _DEVICE_PHASES}
    order = {task: i for i, task in enumerate(run.tasks)}
    blocks: dict[str, list[str]] = {}
    for _, place, task in sorted(seen, key=lambda found: (found[0], found[1], order[found[2]])):
        blocks.setdefault(place, []).append(task)
    return blocks


def _legend(figure: Figure, entries: dict[str, str], note: str) -> None:
    """Colour patches outside the axes, where they cover no data."""
    handles = [Patch(color=colour, label=label) for label, colour in entries.items()]
    if note:
        handles.append(Patch(color="none", label=note))
    figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 8))


def _grouped(axis: Axes, runs: Runs, shares: dict[str, list[float | None]]) -> None:
    """Percent bars, one group per name, one bar per run; unknown values leave a gap."""
    wheel = style.colours([run.label for run in runs])
    width = 0.8 / len(runs)
    for place, run in enumerate(runs):
        at = np.arange(len(shares)) + (place - (len(runs) - 1) / 2) * width
        values = [of_runs[place] for of_runs in shares.values()]
        heights = [100 * (value or 0.0) for value in values]
        texts = ["" if value is None else f"{100 * value:.0f}" for value in values]
        axis.bar_label(axis.bar(at, heights, width * 0.92, color=wheel[run.label]), texts, padding=2)
    axis.set_xticks(range(len(shares)), list(shares))
    axis.grid(axis="x", visible=False)


def _against_best(runs: Runs, pool: str) -> list[float | None]:
    """The effective share of a pool, relative to the best rate seen in any of the runs."""
    peaks = [_number(run, f"{pool}_peak_tokens_per_s") or 0.0 for run in runs]
    own = [_number(run, f"{pool}_effective") for run in runs]
    best = max(peaks) or 1.0
    return [None if value is None else value * peak / best for value, peak in zip(own, peaks, strict=True)]


def _number(run: RunView, name: str) -> float | None:
    value = run.metrics.get(name)
    return float(value) if isinstance(value, int | float) else None


def _all_tasks(runs: Runs) -> list[str]:
    return list(dict.fromkeys(task for run in runs for task in run.tasks))
