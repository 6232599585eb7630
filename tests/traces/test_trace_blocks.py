"""Reading many records at once gives what reading one by one gives, of sound and of damaged traces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from handmade_traces import RECORDS, experiment

from marlaas.errors import TraceError
from traces import blocks
from traces.reader import TraceReader
from traces.schema import Record, make_header
from traces.writer import TraceWriter


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hand-made run, to be read in blocks of a few records."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 700)
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, make_header(experiment(), world="sim")) as writer:
        for event, commands in RECORDS:
            writer.write(event, commands)
    return path


def _what_comes_of(records: Iterator[Record]) -> tuple[list[Record], str]:
    found = []
    try:
        for record in records:
            found.append(record)  # noqa: PERF402 - what came before an error is kept
    except TraceError as error:
        return found, str(error)
    return found, ""


def _one_by_one(reader: TraceReader) -> Iterator[Record]:
    with open(reader.path, "rb") as stream:
        header = stream.readline()
        place = blocks.Place(1, int(header[-11:-3], 16))
        yield from reader._one_by_one(stream, place)


def test_a_trace_of_several_blocks_reads_back(path: Path) -> None:
    """A sound trace is read in several blocks, every one of them at once."""
    reader = TraceReader(path)
    assert list(reader) == RECORDS
    with open(path, "rb") as stream:
        place = blocks.Place(1, int(stream.readline()[-11:-3], 16))
        found: list[Record] = []
        num_blocks = 0
        for block in blocks.blocks(stream):
            read = blocks.read_block(block, place)
            assert read is not None
            records, place = read
            found += records
            num_blocks += 1
    assert num_blocks > 3
    assert found == RECORDS
    assert place.line == len(path.read_bytes().splitlines())


def test_damage_anywhere_is_named_as_by_reading_one_by_one(path: Path) -> None:
    """Any byte altered, any line lost or doubled, any place cut: the same records, then the same refusal."""
    whole = path.read_bytes()
    begin = whole.index(b"\n") + 1
    lines = whole[begin:].splitlines(keepends=True)
    damaged = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(begin, len(whole), 61)]
    damaged += [whole[:i] for i in range(begin, len(whole), 97)]
    for i in range(0, len(lines), 7):
        damaged.append(whole[:begin] + b"".join(lines[:i] + lines[i + 1 :]))
        damaged.append(whole[:begin] + b"".join(lines[: i + 1] + lines[i:]))
    num_refused = 0
    for data in damaged:
        path.write_bytes(data)
        quick, careful = TraceReader(path), TraceReader(path)
        found, problem = _what_comes_of(iter(quick))
        assert (found, problem) == _what_comes_of(_one_by_one(careful))
        assert problem or quick.torn == careful.torn
        num_refused += bool(problem)
    assert num_refused > len(damaged) // 2


def test_a_block_of_nothing_is_no_block() -> None:
    """Empty lines are not records."""
    assert blocks.read_block(b"\n\n", blocks.Place(1, 0)) is None


def test_lines_are_put_together_across_parts() -> None:
    """A line cut between two parts is whole again, and the last may lack its newline."""
    assert list(blocks.lines_of([b"a\nb", b"c\n", b"", b"d\ne"])) == [b"a\n", b"bc\n", b"d\n", b"e"]


def test_a_growing_trace_is_read_to_its_end(path: Path) -> None:
    """The reader waits for what is not written yet, even within a line, until no more will come."""
    whole = path.read_bytes()
    begin = whole.index(b"\n") + 1
    path.write_bytes(whole[:begin])
    parts = [whole[i : i + 1000] for i in range(begin, len(whole), 1000)]

    def is_growing() -> bool:
        if not parts:
            return False
        with open(path, "ab") as file:
            file.write(parts.pop(0))
        return True

    reader = TraceReader(path, is_growing=is_growing)
    assert list(reader) == RECORDS
    assert not reader.torn
