"""Axes: what varies in a study, as points that each set keys of the experiment.

    cluster.replicas.slots: [1, 2, 4]                               a key and its values
    tasks.*.prompts: {from: 4, to: 64, num: 5, scale: log}          a key and a range; `*` is every item
    load: [{label: light, set: {tasks.*.prompts: 4, ...}}, ...]     a name, and points that set several keys
    num_tasks: [1, 2, 4]                                            the first so many tasks of the base

Owns their syntax. Whether a key exists and takes a value is for the experiment's loader to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from experiments.schema import Misfit, convert, one_of
from experiments.yaml_strict import Path
from marlaas.spec import Spec

Scalar = str | int | float | bool
Scale = Literal["linear", "log"]
Places = Callable[[Path], str]
"""Spells where a path of the study stands: `slots.yaml:9: axes.num_tasks`."""

NUM_TASKS = "num_tasks"
SIGNIFICANT_DIGITS = 12


class Setting(msgspec.Struct, frozen=True):
    """A key of the experiment, the value it gets, and where the study says so."""

    key: str
    value: Any
    place: str


class Point(msgspec.Struct, frozen=True):
    """One place on an axis: what tables call it, and what it sets, later settings over earlier ones."""

    label: Scalar
    settings: tuple[Setting, ...]


class Axis(msgspec.Struct, frozen=True):
    """One dimension of a study; labels are distinct."""

    name: str
    points: tuple[Point, ...]
    scale: Scale = "linear"

    @property
    def labels(self) -> list[Scalar]:
        """What tables call the points, in order."""
        return [point.label for point in self.points]


class Range(Spec, frozen=True, kw_only=True, rename={"from_": "from"}):
    """Values from `from` to `to`, both included: `num` of them, or one every `step`.

    Where both ends are whole numbers, and the step if there is one, all values are rounded to whole ones.
    """

    from_: float
    to: float
    step: Annotated[float, msgspec.Meta(gt=0)] | None = None
    num: Annotated[int, msgspec.Meta(ge=2)] | None = None
    scale: Scale = "linear"


def read_axis(name: str, raw: Any, path: Path, places: Places) -> Axis:
    """Read the axis `name` from plain data at `path` of the study; raises `Misfit`."""
    if isinstance(raw, dict):
        values, scale = _read_range(raw, path)
        place = places(path)
        points = [Point(label_of(value), (Setting(name, value, place),)) for value in values]
        return Axis(name, tuple(points), scale)
    if not isinstance(raw, list) or not raw:
        got = "an empty axis" if raw == [] else f"got {raw!r}"
        raise Misfit(path, got, "wanted a list of at least one value, or a range {from: 1, to: 64, num: 7}")
    is_named = any(isinstance(item, dict) and "set" in item for item in raw)
    read = _read_point if is_named else _read_value
    points = [read(name, item, (*path, index), places) for index, item in enumerate(raw)]
    _require_distinct([point.label for point in points], path)
    return Axis(name, tuple(points))


def read_settings(raw: Any, path: Path, places: Places) -> tuple[Setting, ...]:
    """Read a mapping of keys to values; raises `Misfit`."""
    if not isinstance(raw, dict) or not raw:
        raise Misfit(path, f"got {raw!r}", "wanted a mapping of keys to values, as in {tasks.0.steps: 3}")
    for key in raw:
        _require_no_seed(key, (*path, key))
    return tuple(Setting(key, value, places((*path, key))) for key, value in raw.items())


def label_of(value: Any) -> Scalar:
    """What tables call a value: itself, or its JSON where it has parts."""
    return value if isinstance(value, Scalar) else msgspec.json.encode(value).decode()


def _read_value(name: str, value: Any, path: Path, places: Places) -> Point:
    _require_no_seed(name, path)
    if isinstance(value, float) and not math.isfinite(value):
        raise Misfit(path, f"got {value}", "wanted a finite number")
    return Point(label_of(value), (Setting(name, value, places(path)),))


def _read_point(name: str, raw: Any, path: Path, places: Places) -> Point:
    """A point of a named axis: a label and what it sets."""
    if not isinstance(raw, dict):
        raise Misfit(path, f"got {raw!r}", "wanted {label: ..., set: {...}}, as the other points have")
    for key in raw:
        if key not in ("label", "set"):
            raise Misfit((*path, key), "unknown key", one_of(key, ("label", "set"), "keys"))
    if not isinstance(raw.get("label"), Scalar) or raw["label"] == "":
        raise Misfit((*path, "label"), f"got {raw.get('label')!r}", f"wanted a word for this point of {name}")
    return Point(raw["label"], read_settings(raw.get("set"), (*path, "set"), places))


def _read_range(raw: dict[str, Any], path: Path) -> tuple[list[float], Scale]:
    try:
        spec = convert(raw, Range)
    except Misfit as misfit:
        raise Misfit((*path, *misfit.path), misfit.problem, misfit.wanted) from None
    _check_range(spec, path)
    are_whole = all(isinstance(raw[key], int) for key in ("from", "to", "step") if raw.get(key) is not None)
    values = [round(value) if are_whole else value for value in _spread(spec)]
    return list(dict.fromkeys(values)), spec.scale


def _check_range(spec: Range, path: Path) -> None:
    if (spec.step is None) == (spec.num is None):
        given = "neither step nor num" if spec.step is None else "both step and num"
        raise Misfit(path, given, "wanted one of the two")
    if spec.to <= spec.from_:
        raise Misfit((*path, "to"), f"{spec.to:g} is not above from", f"wanted more than {spec.from_:g}")
    if spec.scale == "log" and spec.num is None:
        raise Misfit((*path, "step"), "a step on a log scale", "wanted num")
    if spec.scale == "log" and spec.from_ <= 0:
        raise Misfit((*path, "from"), f"got {spec.from_:g} on a log scale", "wanted a number above 0")


def _spread(spec: Range) -> list[float]:
    """The values of a range, without the noise of floating point in their last digits."""
    low, high = spec.from_, spec.to
    if spec.step is not None:
        num = math.floor((high - low) / spec.step * (1 + 1e-12)) + 1
        values = [low + i * spec.step for i in range(num)]
    elif spec.scale == "log":
        values = [low * (high / low) ** (i / (_num(spec) - 1)) for i in range(_num(spec))]
    else:
        values = [low + (high - low) * i / (_num(spec) - 1) for i in range(_num(spec))]
    return [float(f"{value:.{SIGNIFICANT_DIGITS}g}") for value in values]


def _num(spec: Range) -> int:
    assert spec.num is not None
    return spec.num


def _require_distinct(labels: list[Scalar], path: Path) -> None:
    for index, label in enumerate(labels):
        if label in labels[:index]:
            raise Misfit((*path, index), f"{label!r} is given twice", "keep one of the two")


def _require_no_seed(key: str, path: Path) -> None:
    if key == "seed" and path[0] == "axes":
        wanted = "wanted replications: R, which gives every configuration the same R seeds"
        raise Misfit(path, "seeds are not varied along an axis", wanted)
