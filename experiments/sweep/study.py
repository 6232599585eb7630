"""A study: one base experiment, the axes along which it varies, and what is asked of the results.

Owns the YAML of a study and what must hold between its keys. Knows no cell: whether the base takes an axis's
values is found when they are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from experiments.load import read_text
from experiments.schema import Misfit, convert, one_of
from experiments.sweep.axes import Axis, Point, Scalar, Setting, read_axis, read_settings
from experiments.yaml_strict import Path as Place
from experiments.yaml_strict import parse, render
from marlaas.errors import InputError
from marlaas.spec import Count, Name, Spec

SYSTEM = "system"
DEFAULT_METRICS = (
    "makespan_s",
    "steps",
    "steps_per_hour",
    "steps_per_hour_normalised",
    "tokens_per_s",
    "tasks_done",
    "tasks_failed",
    "ttfs_s.mean",
    "ttfs_s.p95",
    "ttfs_s.max",
    "step_latency_s.mean",
    "step_latency_s.p50",
    "step_latency_s.p95",
    "step_latency_s.queue",
    "step_latency_s.adapter_load",
    "step_latency_s.generate",
    "step_latency_s.environment",
    "step_latency_s.straggler_wait",
    "step_latency_s.buffer_wait",
    "step_latency_s.train",
    "step_latency_s.publish",
    "rollout_to_training_ratio",
    "rollout_busy",
    "train_busy",
    "busy",
    "idle",
    "rollout_effective",
    "train_effective",
    "effective",
    "dropped",
    "adapter_loads",
    "kv_peak",
    "in_flight.mean",
    "queue_depth.mean",
    "fairness_jain",
)
COLUMNS = ("seed", "cell", "error", "metric", "num_seeds", "mean", "sd", "baseline")
"""Columns of the tables that no axis may be named after."""


class Plot(Spec, frozen=True, kw_only=True):
    """A figure for each of `metrics`: `x` is the axis across, `by` the axis told apart by colour."""

    x: str
    by: str | None = None
    metrics: tuple[str, ...] = ("steps_per_hour",)


class _Head(Spec, frozen=True, kw_only=True):
    """The keys of a study; those without a type of their own are read by hand and stand here as nothing."""

    name: Name
    base: str
    description: str = ""
    set: None = None
    profile: None = None
    axes: None = None
    systems: tuple[str, ...] = ()
    replications: Count = 1
    metrics: tuple[str, ...] = DEFAULT_METRICS
    keep_traces: bool = False
    compare: str | None = None
    baseline: None = None
    plot: Plot | None = None


class Comparison(msgspec.Struct, frozen=True):
    """Every other point of `axis` is compared with `baseline`, seed by seed."""

    axis: str
    baseline: Scalar


class Places:
    """Spells a path of a file with the line on which it, or what it stands in, is written."""

    def __init__(self, file: Path, lines: dict[Place, int]) -> None:
        self._file, self._lines = file, lines

    def __call__(self, path: Place) -> str:
        """The path as users write it, behind file and line."""
        lines = (self._lines.get(path[:length]) for length in range(len(path), 0, -1))
        line = next((found for found in lines if found is not None), None)
        return f"{self._file}{'' if line is None else f':{line}'}: {render(path)}"


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """A study as read: `fixed` holds everywhere, `profile` is the study's own, if it has one."""

    name: str
    text: str
    base: Path
    places: Places
    fixed: tuple[Setting, ...]
    profile: dict[str, Any] | None
    axes: tuple[Axis, ...]
    replications: int
    metrics: tuple[str, ...]
    keep_traces: bool
    comparison: Comparison | None
    plot: Plot | None

    def axis(self, name: str) -> Axis:
        """The axis of this name, which exists."""
        return next(axis for axis in self.axes if axis.name == name)


def load_study(path: Path) -> Study:
    """Read and check a study; raises `InputError`. The base is not read yet."""
    text = read_text(path, "a study")
    document = parse(text, str(path))
    places = Places(path, document.lines)
    if not isinstance(document.data, dict):
        raise InputError(str(path), "not a mapping of keys to values", "wanted at least name and base")
    try:
        return _read(document.data, text, path, places)
    except Misfit as misfit:
        raise InputError(places(misfit.path), misfit.problem, misfit.wanted) from None


def require_metrics(study: Study, known: Sequence[str]) -> None:
    """Refuse a metric that no run has; raises `InputError`."""
    asked = [(name, ("metrics", index)) for index, name in enumerate(study.metrics)]
    for name, path in asked:
        if name not in known and not name.startswith("dropped."):
            wanted = one_of(name, known, "metrics")
            raise InputError(study.places(path), f"unknown metric {name!r}", wanted)


def _read(data: dict[str, Any], text: str, path: Path, places: Places) -> Study:
    by_hand = ("set", "profile", "axes", "baseline")
    head = convert({key: None if key in by_hand else value for key, value in data.items()}, _Head)
    axes = _read_axes(data.get("axes", {}), head.systems, places)
    _check_metrics(head)
    return Study(
        name=head.name,
        text=text,
        base=path.parent / head.base,
        places=places,
        fixed=read_settings(data["set"], ("set",), places) if "set" in data else (),
        profile=_read_profile(data, axes),
        axes=axes,
        replications=head.replications,
        metrics=head.metrics,
        keep_traces=head.keep_traces,
        comparison=_read_comparison(head, data, axes),
        plot=_check_plot(head, axes),
    )


def _read_axes(raw: Any, systems: tuple[str, ...], places: Places) -> tuple[Axis, ...]:
    """The axes in the order written; the systems' comes last, so that rows to compare stand together."""
    if not isinstance(raw, dict):
        raise Misfit(("axes",), f"got {raw!r}", "wanted a mapping of axes, each with its values")
    if SYSTEM in raw and systems:
        raise Misfit(("systems",), "systems are given twice", "keep this or axes.system")
    for name in raw:
        if name in COLUMNS and name != "seed":
            wanted = "wanted another name: tables have a column of this one"
            raise Misfit(("axes", name), f"an axis cannot be named {name!r}", wanted)
    axes = [read_axis(name, values, ("axes", name), places) for name, values in raw.items()]
    if systems:
        shorthand = read_axis(SYSTEM, list(systems), ("systems",), places)
        axes.append(shorthand)
    return tuple(axes)


def _check_metrics(head: _Head) -> None:
    for index, name in enumerate(head.metrics):
        if name in head.metrics[:index]:
            raise Misfit(("metrics", index), f"{name!r} is given twice", "keep one of the two")
        if name.startswith("tasks."):
            wanted = "wanted metrics of the whole run; keep_traces: true keeps each cell's own metrics.json"
            raise Misfit(("metrics", index), f"{name!r} is of one task", wanted)


def _read_profile(data: dict[str, Any], axes: tuple[Axis, ...]) -> dict[str, Any] | None:
    """The profile written out in the study, which leaves no other to choose."""
    raw = data.get("profile")
    if raw is None:
        return None
    if not isinstance(raw, dict):
        wanted = "wanted a profile written out; to name one, use set: {profile: NAME}"
        raise Misfit(("profile",), f"got {raw!r}", wanted)
    chosen = [setting for axis in axes for point in axis.points for setting in point.settings]
    if "profile" in data.get("set", {}) or any(setting.key == "profile" for setting in chosen):
        problem = "a profile is written out here and another one is named by set or an axis"
        raise Misfit(("profile",), problem, "keep one of the two")
    return raw


def _read_comparison(head: _Head, data: dict[str, Any], axes: tuple[Axis, ...]) -> Comparison | None:
    """What is asked for, else systems with the first of them, where there are several."""
    several = [axis for axis in axes if axis.name == SYSTEM and len(axis.points) > 1]
    if head.compare is None:
        if "baseline" in data and not several:
            raise Misfit(("baseline",), "there is nothing to compare with it", "add compare: AXIS")
        name = SYSTEM if several else None
    else:
        name = _require_axis(head.compare, axes, ("compare",)).name
    if name is None:
        return None
    axis = _require_axis(name, axes, ("compare",))
    baseline = data.get("baseline", axis.labels[0])
    if baseline not in axis.labels:
        wanted = one_of(str(baseline), [str(label) for label in axis.labels], f"points of {name}")
        raise Misfit(("baseline",), f"{baseline!r} is not on the axis {name}", wanted)
    return Comparison(name, baseline)


def _check_plot(head: _Head, axes: tuple[Axis, ...]) -> Plot | None:
    plot = head.plot
    if plot is None:
        return None
    _require_axis(plot.x, axes, ("plot", "x"))
    if plot.by is not None:
        _require_axis(plot.by, axes, ("plot", "by"))
        if plot.by == plot.x:
            raise Misfit(("plot", "by"), f"{plot.by} is x already", "wanted another axis")
    for index, name in enumerate(plot.metrics):
        if name not in head.metrics:
            wanted = one_of(name, head.metrics, "metrics of this study")
            raise Misfit(("plot", "metrics", index), f"{name!r} is not kept", wanted)
    return plot


def _require_axis(name: str, axes: tuple[Axis, ...], path: Place) -> Axis:
    for axis in axes:
        if axis.name == name:
            return axis
    wanted = one_of(name, [axis.name for axis in axes], "axes")
    raise Misfit(path, f"there is no axis {name!r}", wanted)


__all__ = ["Comparison", "Plot", "Point", "Study", "load_study", "require_metrics"]
