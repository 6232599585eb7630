"""Traces for other tools: Perfetto (Chrome trace JSON) and Parquet tables.

Owns the two formats; what happened comes from `metrics`. pyarrow is imported only where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from marlaas.commands import Alarm, Command, Generate, StepEnvironment
from marlaas.events import Event, WorkerLost
from traces.metrics import CAUSES, Run, Source, StepRow, intervals, series
from traces.metrics.run import open_source
from traces.metrics.spans import Span

ROWS_PER_BLOCK = 65_536


# --- Perfetto --------------------------------------------------------------------------------------


def export_perfetto(source: Source, path: str | Path) -> int:
    """Write a trace that ui.perfetto.dev and chrome://tracing open; returns the number of its events.

    Processes are devices, environments and tasks; a track of a device or environment is split by task and
    one of a task by kind, since neighbours overlap. Times are microseconds since the run began.
    """
    encode = msgspec.json.Encoder().encode
    num = 0
    with open(path, "wb") as file:
        for entry in _perfetto_events(source):
            file.write(b'{"traceEvents":[\n' if num == 0 else b",\n")
            file.write(encode(entry))
            num += 1
        file.write(b'\n],"displayTimeUnit":"ms"}\n')
    return num


def _perfetto_events(source: Source) -> Iterator[dict[str, Any]]:
    tracks: dict[tuple[str, str], int] = {}
    processes = {"device": 1, "environment": 2, "task": 3}
    for number, title in enumerate(("devices", "environments", "tasks", "counters", "alarms"), start=1):
        yield _named("process_name", number, 0, title)
    for piece in intervals(source):
        process = processes[piece.track.partition(":")[0]]
        lane = piece.kind if process == 3 else piece.task
        track = tracks.setdefault((piece.track, lane), len(tracks) + 1)
        if track == len(tracks):
            yield _named("thread_name", process, track, f"{piece.track.partition(':')[2]} · {lane}")
        yield {
            "ph": "X",
            "pid": process,
            "tid": track,
            "name": piece.kind if process == 3 else f"{piece.task} {piece.kind}",
            "cat": piece.kind,
            "ts": piece.start_ns / 1000,
            "dur": (piece.end_ns - piece.start_ns) / 1000,
            "args": {"task": piece.task},
        }
    for name, steps in series(source).items():
        for at, level in steps:
            yield {"ph": "C", "pid": 4, "name": name, "ts": at / 1000, "args": {"value": level}}
    yield from _instants(source)


def _instants(source: Source) -> Iterator[dict[str, Any]]:
    for event, commands in open_source(source)[1]:
        texts = [f"{event.worker} lost: {event.reason}"] if isinstance(event, WorkerLost) else []
        texts += [command.message for command in commands if isinstance(command, Alarm)]
        for text in texts:
            yield {"ph": "i", "pid": 5, "tid": 0, "s": "g", "name": text, "ts": event.at / 1000}


def _named(what: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": track, "name": what, "args": {"name": name}}


# --- Parquet ---------------------------------------------------------------------------------------

_EVENT_COLUMNS = {
    "at_ns": "int64",
    "is_command": "bool",
    "type": "string",
    "command": "int64",
    "worker": "string",
    "environment": "string",
    "task": "string",
    "step": "int64",
    "version": "int64",
    "turn": "int64",
    "trajectory": "int64",
    "num_trajectories": "int64",
    "reason": "string",
}
_TURN_COLUMNS = {
    "task": "string",
    "step": "int64",
    "version": "int64",
    "turn": "int64",
    "trajectory": "int64",
    "replica": "string",
    "start_ns": "int64",
    "end_ns": "int64",
    "ending": "string",
    "prompt_tokens": "int64",
    "output_tokens": "int64",
}
_ENVIRONMENT_COLUMNS = {
    "task": "string",
    "step": "int64",
    "turn": "int64",
    "trajectory": "int64",
    "environment": "string",
    "start_ns": "int64",
    "end_ns": "int64",
    "ending": "string",
    "done": "bool",
    "reward": "double",
    "observation_tokens": "int64",
}
_STEP_COLUMNS = {
    **dict.fromkeys(("step", "begin_ns", "generate_ns", "complete_ns", "end_ns"), "int64"),
    **{f"{cause}_ns": "int64" for cause in CAUSES},
    **dict.fromkeys(("tokens", "num_trained", "trained_tokens"), "int64"),
    "updated": "bool",
    **dict.fromkeys(("reward", "loss", "grad_norm", "kl", "logprob_gap", "clip_fraction"), "double"),
}


def export_parquet(source: Source, folder: str | Path) -> dict[str, Path]:
    """Write `events`, `turns`, `environment_steps` and `steps` as `<folder>/<table>.parquet`.

    `events` has one row per event and command; the others have one row per piece of work with its answer.
    Returns the paths by table.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    columns = {
        "events": _EVENT_COLUMNS,
        "turns": _TURN_COLUMNS,
        "environment_steps": _ENVIRONMENT_COLUMNS,
        "steps": {"task": "string", **_STEP_COLUMNS},
    }
    paths = {name: folder / f"{name}.parquet" for name in columns}
    with _Table(paths["events"], _EVENT_COLUMNS) as events:
        for event_row in _event_rows(source):
            events.add(event_row)
    with (
        _Table(paths["turns"], _TURN_COLUMNS) as turns,
        _Table(paths["environment_steps"], _ENVIRONMENT_COLUMNS) as environment_steps,
    ):
        run = Run(source, also=_span_sink(turns, environment_steps))
    with _Table(paths["steps"], columns["steps"]) as steps:
        for task in run.tasks.values():
            for row in task.rows:
                steps.add(_step_row(row))
    return paths


def _event_rows(source: Source) -> Iterator[dict[str, Any]]:
    for event, commands in open_source(source)[1]:
        yield _event_row(event.at, event)
        for command in commands:
            yield _event_row(event.at, command)


def _event_row(at: int, record: Event | Command) -> dict[str, Any]:
    row = {name: getattr(record, name, None) for name in _EVENT_COLUMNS}
    is_command = isinstance(record, Command)
    trajectories = getattr(record, "trajectories", None)
    worker = row["worker"] or getattr(record, "replica", None) or getattr(record, "lane", None)
    return row | {
        "at_ns": at,
        "is_command": is_command,
        "type": type(record).__name__,
        "command": record.id if isinstance(record, Command) else row["command"],
        "worker": worker,
        "num_trajectories": None if trajectories is None else len(trajectories),
    }


def _span_sink(turns: _Table, environment_steps: _Table) -> Callable[[Span], None]:
    def add(span: Span) -> None:
        if isinstance(span.command, Generate):
            turns.add(_span_row(span, _TURN_COLUMNS))
        elif isinstance(span.command, StepEnvironment):
            environment_steps.add(_span_row(span, _ENVIRONMENT_COLUMNS))

    return add


def _span_row(span: Span, columns: Iterable[str]) -> dict[str, Any]:
    """Columns from the command, then the span, then its answer."""
    row = {}
    for name in columns:
        value = getattr(span.command, name, None)
        row[name] = getattr(span.answer, name, None) if value is None else value
    return row | {
        "trajectory": span.trajectory,
        "start_ns": span.start,
        "end_ns": span.end,
        "ending": span.ending,
    }


def _step_row(row: StepRow) -> dict[str, Any]:
    stats = msgspec.structs.asdict(row.stats)
    values = {**msgspec.structs.asdict(row), **stats, "trained_tokens": row.stats.num_tokens}
    causes = {f"{cause}_ns": ns for cause, ns in zip(CAUSES, row.causes_ns, strict=True)}
    return {name: ({**values, **causes})[name] for name in ("task", *_STEP_COLUMNS)}


class _Table:
    """A Parquet file written in blocks of rows."""

    def __init__(self, path: Path, columns: dict[str, str]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        self._schema = pa.schema([(name, pa.type_for_alias(kind)) for name, kind in columns.items()])
        self._from_rows = pa.RecordBatch.from_pylist
        self._writer = parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Append a row."""
        self._rows.append(row)
        if len(self._rows) == ROWS_PER_BLOCK:
            self._flush()

    def __enter__(self) -> _Table:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        self._writer.write_batch(self._from_rows(self._rows, schema=self._schema))
        self._rows.clear()
