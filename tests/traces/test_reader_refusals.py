"""The reader refuses what is not exactly a trace, and says where and what was wanted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from handmade_traces import RECORDS, experiment, s

from marlaas.commands import SetTimer
from marlaas.errors import TraceError
from marlaas.events import RunStarted, TaskSubmitted
from traces.reader import iter_records, read
from traces.schema import Record, make_header, seal, split_seal
from traces.writer import TraceWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The first nine records of the hand-made run."""
    return _write(tmp_path / "trace.jsonl", RECORDS[:9])


def _write(path: Path, records: list[Record]) -> Path:
    with TraceWriter(path, make_header(experiment(), world="sim")) as writer:
        for event, commands in records:
            writer.write(event, commands)
    return path


def _edit(path: Path, line: int, old: bytes, new: bytes, *, resealed: bool = False) -> None:
    """Replace bytes of one line (from 1), and where asked make all seals right again."""
    lines = path.read_bytes().splitlines(keepends=True)
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new)
    path.write_bytes(_reseal(lines) if resealed else b"".join(lines))


def _reseal(lines: list[bytes]) -> bytes:
    crc, held, out = 0, b"", b""
    for line in lines:
        is_last = b',"crc":"' in line
        held += split_seal(line)[0] if is_last else line
        if is_last:
            sealed, crc = seal(held, crc)
            out, held = out + sealed, b""
    return out


def _refusal(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read(path)
    return str(caught.value)


# Line 1 is the header, 2 to 4 RunStarted with two StartWorkers, 5 WorkerUp, 6 WorkerUp, 7 OpenService, ...
EDITS = {
    "another schema version": (1, b'"schema":1', b'"schema":2', ":1: schema version 2; wanted 1"),
    "another world": (1, b'"world":"sim"', b'"world":"moon"', ":1: Invalid enum value 'moon' - at `$.world`"),
    "an unknown header field": (1, b'"schema":1', b'"schema":1,"x":1', "unknown field `x`"),
    "another experiment": (
        1,
        b'"steps":2',
        b'"steps":3',
        ":1: the experiment was altered; wanted the one",
    ),
    "a host in a simulation": (1, b'"host":null', b'"host":{}', "names no host"),
    "an unknown type": (5, b'"type":"WorkerUp"', b'"type":"WorkerOut"', ":5: Invalid value 'WorkerOut'"),
    "a wrong type": (5, b'"command":1', b'"command":"1"', ":5: Expected `int`, got `str` - at `$.command`"),
    "a missing field": (5, b',"command":1', b"", ":5: Object missing required field `command`"),
    "an unknown field": (5, b'"command":1', b'"command":1,"colour":3', ":5: unknown field WorkerUp.colour"),
    "a field twice": (5, b'"command":1', b'"command":1,"command":1', ":5: not in canonical form"),
    "a space": (5, b'"command":1', b'"command": 1', ":5: not in canonical form"),
    "no JSON": (5, b'"command":1', b'"command":', ":5: JSON is malformed"),
    "time running backwards": (8, b'"at":2000000000', b'"at":999999999', ":8: at = 999999999 runs backwards"),
    "a command id left out": (7, b'"id":3', b'"id":4', ":7: command id 4; wanted 3: ids rise by one from 1"),
    "a command id twice": (4, b'"id":2', b'"id":1', ":4: command id 1; wanted 2"),
    "a first event that is not RunStarted": (
        2,
        b'"type":"RunStarted","at":0',
        b'"type":"TaskSubmitted","at":0,"task":"a"',
        ":2: TaskSubmitted in the wrong place; wanted RunStarted first and only once",
    ),
    "a command in the place of an event": (
        5,
        b'"type":"WorkerUp","at":1000000000,"command":1',
        b'"type":"StartWorker","id":3',
        ":5: StartWorker is a command; wanted an event",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_trace_written_wrong_is_refused(path: Path, name: str) -> None:
    """Even with right seals, as by a writer with another idea of the format."""
    line, old, new, wanted = EDITS[name]
    _edit(path, line, old, new, resealed=True)
    refusal = _refusal(path)
    assert refusal.startswith(f"{path}:{line}: ")
    assert wanted in refusal


def test_resealing_alone_is_harmless(path: Path) -> None:
    """The edits above are refused for what they change."""
    path.write_bytes(_reseal(path.read_bytes().splitlines(keepends=True)))
    assert read(path).records == RECORDS[:9]


def test_an_altered_event_is_refused_though_it_fits(path: Path) -> None:
    """A value that no rule forbids is not what the seal was made of."""
    _edit(path, 5, b'"worker":"replica-0"', b'"worker":"replica-7"')
    assert f"{path}:5: the line altered or moved after writing" in _refusal(path)
    _edit(path, 5, b'"worker":"replica-7"', b'"worker":"replica-0"')
    _edit(path, 3, b'"replica-0"', b'"replica-7"')
    assert f"{path}:2: lines 2 to 4 altered or moved after writing" in _refusal(path)


def test_an_altered_header_is_refused_though_it_fits(path: Path) -> None:
    """The code version is not part of the experiment's hash, but of the seal."""
    _edit(path, 1, b'"code_version":"', b'"code_version":"9')
    assert f"{path}:1: the header was altered after writing" in _refusal(path)


@pytest.mark.parametrize("change", ["lost", "doubled", "swapped"])
def test_records_lost_doubled_or_moved_are_refused(path: Path, change: str) -> None:
    """Each seal goes on from the one before."""
    lines = path.read_bytes().splitlines(keepends=True)
    one, other = lines[4], lines[9]  # two records of one line each: a WorkerUp and a TaskSubmitted
    kept = {
        "lost": [*lines[:4], *lines[5:]],
        "doubled": [*lines[:5], one, *lines[5:]],
        "swapped": [*lines[:4], other, *lines[5:9], one, *lines[10:]],
    }
    path.write_bytes(b"".join(kept[change]))
    assert f"{path}:{6 if change == 'doubled' else 5}: " in _refusal(path)


def test_a_lost_seal_in_the_middle_is_refused(path: Path) -> None:
    """Two records run into one: the second event stands where a command should."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = split_seal(lines[4])[0]
    path.write_bytes(b"".join(lines))
    assert f"{path}:6: WorkerUp is an event; wanted a command: the record of line 5 is not" in _refusal(path)


def test_a_spoilt_seal_at_the_end_is_no_torn_tail(path: Path) -> None:
    """A whole last line that no writer writes was altered, not cut."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[-1] = lines[-1].replace(b'"crc":"', b'"crc":"0')
    path.write_bytes(b"".join(lines))
    assert "unknown field Generate.crc" in _refusal(path)


def test_a_second_run_started_is_refused(tmp_path: Path) -> None:
    """A run begins once."""
    path = _write(tmp_path / "t.jsonl", [(RunStarted(at=0), ()), (RunStarted(at=1), ())])
    assert f"{path}:3: RunStarted in the wrong place" in _refusal(path)


def test_damaged_compression_is_refused(tmp_path: Path) -> None:
    """What cannot be decompressed is damage, not a torn tail."""
    path = _write(tmp_path / "t.jsonl.zst", RECORDS)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))
    assert str(path) in _refusal(path)
    path.write_bytes(b"no zstd at all, but long enough to be read as a frame")
    assert str(path) in _refusal(path)


def test_records_before_the_damage_are_had_by_streaming(path: Path) -> None:
    """The error comes when its line does."""
    _edit(path, 8, b'"at":2000000000', b'"at":2000000001')
    records = iter_records(path)
    assert [next(records) for _ in range(3)] == RECORDS[:3]
    with pytest.raises(TraceError, match=":8: "):
        next(records)


def test_ids_and_times_may_stand_still_where_they_should(tmp_path: Path) -> None:
    """Equal times and events without commands are the rule."""
    records: list[Record] = [
        (RunStarted(at=0), (SetTimer(id=1, at=s(1)),)),
        (TaskSubmitted(at=0, task="a"), ()),
        (TaskSubmitted(at=0, task="b"), (SetTimer(id=2, at=s(1)), SetTimer(id=3, at=s(1)))),
    ]
    assert read(_write(tmp_path / "t.jsonl", records)).records == records
    assert msgspec.json.decode((tmp_path / "t.jsonl").read_bytes().splitlines()[-1])["id"] == 3
