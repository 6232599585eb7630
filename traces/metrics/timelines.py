"""Work over time, for pictures and exports: intervals per device and task, and step series.

Draws nothing; knows no format.
"""

from __future__ import annotations

from typing import NamedTuple

from marlaas.commands import CreateAdapter, Generate, LoadAdapter, Publish, StepEnvironment, Train
from traces.metrics.occupancy import Cover, Level
from traces.metrics.run import Run, Source, open_source
from traces.metrics.spans import Joiner, Span

Steps = list[tuple[int, int]]

KINDS: dict[type, str] = {
    Generate: "rollout",
    StepEnvironment: "environment",
    Train: "training",
    Publish: "publish",
    LoadAdapter: "load",
    CreateAdapter: "create",
}


class Interval(NamedTuple):
    """A time in which a track did work of one kind for a task.

    Tracks are `device:<replica or lane>`, `environment:<name>` and `task:<name>`; kinds are the values of
    `KINDS`. Intervals of one track, kind and task are disjoint; those of several tasks overlap where a
    replica or an environment serves them together.
    """

    track: str
    kind: str
    task: str
    start_ns: int
    end_ns: int


def intervals(source: Source) -> list[Interval]:
    """All work of a run as intervals, in the order of their starts, each piece on its device and its task."""
    covers: dict[tuple[str, str, str], Cover] = {}

    def add(span: Span) -> None:
        kind = KINDS.get(type(span.command))
        if kind is None:
            return
        task = span.command.task
        for track in (_place_of(span), f"task:{task}"):
            key = track, kind, task
            cover = covers.get(key)
            if cover is None:
                cover = covers[key] = Cover()
            cover.add(span.start, span.end)

    _, records = open_source(source)
    Joiner(add, lambda at, fact: None).feed(records)
    found = [
        Interval(*key, start, end)
        for key, cover in covers.items()
        for start, end in zip(cover.starts, cover.ends, strict=True)
    ]
    return sorted(found, key=lambda i: (i.start_ns, i.track, i.kind, i.task))


def _place_of(span: Span) -> str:
    command = span.command
    if isinstance(command, StepEnvironment):
        return f"environment:{command.environment}"
    if isinstance(command, Generate | LoadAdapter):
        return f"device:{command.replica}"
    return f"device:{command.lane}"


def series(source: Source) -> dict[str, Steps]:
    """What was in flight over time: per name, (time in ns, level from then on) at every change.

    `queue_depth` counts batches in the buffer, `in_flight` turns; `tasks.<name>.turns` and
    `tasks.<name>.environment_steps` are one task's, `environments.<name>` one environment's steps.
    """
    levels: dict[str, Level] = {}

    def add(span: Span) -> None:
        command = span.command
        if isinstance(command, Generate):
            names = ("in_flight", f"tasks.{command.task}.turns")
        elif isinstance(command, StepEnvironment):
            names = (f"tasks.{command.task}.environment_steps", f"environments.{command.environment}")
        else:
            return
        for name in names:
            levels.setdefault(name, Level()).add(span.start, span.end)

    run = Run(source, also=add)
    levels["queue_depth"] = run.waits()
    levels.setdefault("in_flight", Level())
    return {name: levels[name].steps() for name in sorted(levels)}
