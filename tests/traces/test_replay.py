"""Replaying recorded runs of the real scheduler, as they are and with one thing altered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from timed_world import record, small_experiment

from marlaas.commands import Generate, SetTimer
from marlaas.errors import TraceError
from marlaas.systems import SYSTEMS
from traces.reader import read
from traces.replay import Difference, replay
from traces.schema import split_seal
from traces.writer import TraceWriter


@pytest.mark.parametrize("faults", [False, True], ids=["calm", "faults"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_recorded_run_replays(tmp_path: Path, system: str, faults: bool) -> None:
    """The scheduler gives the recorded commands again, with workers lost and deadlines passed too."""
    outcomes = record(tmp_path / "trace.jsonl", small_experiment(system, tasks=3), faults=faults)
    assert set(outcomes.values()) == {"done"}
    result = replay(tmp_path)
    assert result.ok, result
    records = read(tmp_path).records
    assert result.num_events == len(records)
    assert result.num_commands == sum(len(commands) for _, commands in records)
    assert not result.torn
    assert f"{result.num_events} events and {result.num_commands} commands agree" in str(result)


def test_a_compressed_run_replays(tmp_path: Path) -> None:
    """From a run folder whose trace is compressed."""
    record(tmp_path / "trace.jsonl.zst", small_experiment())
    assert replay(tmp_path).ok


# --- alterations -----------------------------------------------------------------------------------


def _altered(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case list():
            return value[:-1] if value else [0]
        case dict():
            first = next(iter(value))
            return {**value, first: _altered(value[first])}
    return 0


def _alterations(line: bytes) -> Iterator[tuple[str, bytes]]:
    """Each field of a line altered in turn, the rest of it left byte for byte."""
    body, digits = split_seal(line) if b',"crc":"' in line else (line, b"")
    fields = msgspec.json.decode(body)
    for name, value in fields.items():
        text = msgspec.json.encode(fields | {name: _altered(value)})
        yield name, text[:-1] + (b',"crc":"%s"}\n' % digits if digits else b"}\n")
    if digits:
        other = b"00000000" if digits != b"00000000" else b"00000001"
        yield "crc", body[:-2] + b',"crc":"%s"}\n' % other


def _line_of(text: str, path: Path) -> int:
    return int(text.removeprefix(f"{path}:").split(":")[0].removeprefix("line "))


def test_any_altered_field_of_any_line_is_named(tmp_path: Path) -> None:
    """Whatever one field of one line is changed to, replaying names the line; of a command the field too.

    A seal that is altered is laid to its record's event, where the record begins.
    """
    path = tmp_path / "trace.jsonl"
    record(path, small_experiment(steps=1), faults=True)
    lines = path.read_bytes().splitlines(keepends=True)
    first_of_record = 2
    num_tried = 0
    for i, line in enumerate(lines):
        for name, altered in _alterations(line):
            path.write_bytes(b"".join([*lines[:i], altered, *lines[i + 1 :]]))
            text, difference = _verdict(path)
            named = _line_of(text, path)
            is_command = b'"id":' in line
            assert named == (first_of_record if name == "crc" and i else i + 1), (name, altered, text)
            if difference is not None and is_command and name != "crc":
                assert difference.field.split(".")[-1] == name, (altered, text)
            num_tried += 1
        if b',"crc":"' in line:
            first_of_record = i + 2
    assert num_tried > 3 * len(lines) > 250


def _verdict(path: Path) -> tuple[str, Difference | None]:
    try:
        result = replay(path)
    except TraceError as error:
        return str(error), None
    assert not result.ok
    return str(result), result.difference


def _rewrite(path: Path, change: Any) -> Path:
    """The trace again, properly sealed, with its records changed."""
    trace = read(path)
    target = path.with_name("changed.jsonl")
    with TraceWriter(target, trace.header) as writer:
        for event, commands in change(trace.records):
            writer.write(event, commands)
    return target


def test_another_scheduler_is_told_by_its_first_command(tmp_path: Path) -> None:
    """A trace that is whole, but not what this scheduler does: the command, the field and both values."""
    path = tmp_path / "trace.jsonl"
    record(path, small_experiment())

    def reverse_trajectories(records: list[Any]) -> Iterator[Any]:
        for event, commands in records:
            yield event, tuple(_reversed(command) for command in commands)

    def _reversed(command: Any) -> Any:
        if not isinstance(command, Generate):
            return command
        return msgspec.structs.replace(command, trajectories=command.trajectories[::-1])

    changed = _rewrite(path, reverse_trajectories)
    difference = replay(changed).difference
    assert difference is not None
    assert (difference.field, difference.expected, difference.found) == (
        "Generate.trajectories",
        "(0, 1)",
        "(1, 0)",
    )
    found = changed.read_bytes().splitlines()[difference.line - 1]
    assert found.startswith(b'{"type":"Generate"')


def test_a_missing_and_an_additional_command_are_told(tmp_path: Path) -> None:
    """Where the lists have different lengths the first command without a partner is named."""
    path = tmp_path / "trace.jsonl"
    record(path, small_experiment())
    missing = replay(_rewrite(path, lambda records: [(records[0][0], records[0][1][:1])])).difference
    assert missing is not None
    assert (missing.line, missing.field, missing.found) == (4, "StartWorker", "no further command")
    path.with_name("changed.jsonl").unlink()
    event, commands = read(path).records[0]
    extra = SetTimer(id=len(commands) + 1, at=5)
    result = replay(_rewrite(path, lambda records: [(event, (*commands, extra))]))
    assert result.difference is not None
    assert result.difference.line == 3 + len(commands)
    assert (result.difference.field, result.difference.expected) == ("SetTimer", "no further command")
    assert ": SetTimer: expected no further command, found SetTimer(" in str(result)


def test_an_event_the_scheduler_refuses_is_told(tmp_path: Path) -> None:
    """A fact that cannot have happened, in a trace that is whole."""
    path = tmp_path / "trace.jsonl"
    record(path, small_experiment())

    def unknown_task(records: list[Any]) -> Iterator[Any]:
        for event, commands in records:
            if type(event).__name__ == "TaskSubmitted":
                yield msgspec.structs.replace(event, task="nobody"), commands
            else:
                yield event, commands

    difference = replay(_rewrite(path, unknown_task)).difference
    assert difference is not None
    assert difference.field == "TaskSubmitted"
    assert "IllegalEvent" in difference.expected
