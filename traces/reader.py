"""Reads traces strictly: what is not exactly a trace is refused, with the line and what was wanted.

Refused are: another schema version, unknown types and fields, altered, lost or moved lines, time running
backwards, command ids that do not rise by one from 1, a run that does not begin with `RunStarted`. A torn
tail, the part of a record that a killed run left behind, is no error: it is left out and reported.

Owns reading and the cutting of torn tails; knows nothing of what the records mean.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn
from zlib import crc32

import msgspec
import zstandard

from marlaas.commands import Command
from marlaas.errors import InputError, TraceError
from marlaas.events import Event, RunStarted
from traces.blocks import Place, blocks, lines_of, read_block
from traces.schema import (
    SCHEMA_VERSION,
    Header,
    Record,
    decode_header,
    decode_line,
    decode_lines,
    encode_header,
    encode_record,
    hash_of,
    is_sealed,
    split_seal,
)

TRACE_NAMES = ("trace.jsonl", "trace.jsonl.zst")
WAIT_S = 0.02  # between looks at a trace that is still written


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """A whole trace in memory; `torn` says that an unfinished record at its end was left out."""

    header: Header
    records: list[Record]
    torn: bool = False


class RawRecord(msgspec.Struct, frozen=True, gc=False):
    """A record as found: `line` is of its event (the header is line 1), `crc` what its seal says.

    `is_intact` is False where the lines are not what the seal was made of.
    """

    line: int
    event: Event
    commands: tuple[Command, ...]
    is_intact: bool
    crc_before: int
    crc: int


class Tail(NamedTuple):
    """The end of a trace: the CRC of its last whole record and the bytes found after it."""

    crc: int
    num_torn_bytes: int


def read(path: str | Path) -> Trace:
    """A whole trace; `path` is a trace or a run folder. Raises `InputError` or `TraceError`."""
    reader = TraceReader(path)
    records = list(reader)
    return Trace(header=reader.header, records=records, torn=reader.torn)


def iter_records(path: str | Path) -> Iterator[Record]:
    """Every (event, commands) of a trace, in order, holding one at a time."""
    return iter(TraceReader(path))


def read_header(path: str | Path) -> Header:
    """The header alone."""
    return TraceReader(path).header


def find_trace(path: str | Path) -> Path:
    """The trace file that `path` names, itself or in a run folder; `InputError` when there is none."""
    path = Path(path)
    for candidate in [path] if not path.is_dir() else [path / name for name in TRACE_NAMES]:
        if candidate.is_file():
            return candidate
    raise InputError(str(path), "no trace here", f"name a run folder with {' or '.join(TRACE_NAMES)}")


class TraceReader:
    """One trace, read record by record; iterating again starts again. `torn` is known after an iteration.

    With `is_growing` a trace that is still written is read to its end: where there is no more yet, the reader
    waits for as long as that says True.
    """

    def __init__(self, path: str | Path, *, is_growing: Callable[[], bool] | None = None) -> None:
        self.path = find_trace(path)
        self.torn = False
        self._is_growing = is_growing
        with _open(self.path, is_growing) as stream:
            self.header, _ = self._read_header(stream)

    def __iter__(self) -> Iterator[Record]:
        with _open(self.path, self._is_growing) as stream:
            place = Place(1, self._read_header(stream)[1])
            unread = blocks(stream)
            for block in unread:
                found = read_block(block, place)
                if found is None:
                    yield from self._one_by_one(lines_of(chain([block], unread)), place)
                    return
                records, place = found
                yield from records
        self.torn = False

    def _one_by_one(self, lines: Iterable[bytes], place: Place) -> Iterator[Record]:
        for record in self._in_order(self._sealed_records(lines, place), place):
            if not record.is_intact:
                last = record.line + len(record.commands)
                which = f"lines {record.line} to {last}" if record.commands else "the line"
                self._refuse(record.line, f"{which} altered or moved after writing", "the recorded bytes")
            yield record.event, record.commands

    def raw_records(self) -> Iterator[RawRecord]:
        """Every record, altered ones too, as long as they can be read as events and commands at all."""
        with _open(self.path, self._is_growing) as stream:
            _, crc = self._read_header(stream)
            place = Place(1, crc)
            yield from self._in_order(self._sealed_records(stream, place), place)

    def _in_order(self, records: Iterable[RawRecord], place: Place) -> Iterator[RawRecord]:
        """Pass records on, refusing those out of order; after an altered one nothing is certain."""
        at, last_id, is_first, is_sure = place.at, place.last_id, place.line == 1, True
        for record in records:
            is_sure = is_sure and record.is_intact
            if is_sure:
                event = record.event
                if is_first != (event.__class__ is RunStarted):
                    wanted = "RunStarted first and only once"
                    self._refuse(record.line, f"{type(event).__name__} in the wrong place", wanted)
                if event.at < at:
                    self._refuse(record.line, f"at = {event.at} runs backwards", f"{at} or later")
                for line, command in enumerate(record.commands, start=record.line + 1):
                    last_id += 1
                    if command.id != last_id:
                        self._refuse(line, f"command id {command.id}", f"{last_id}: ids rise by one from 1")
                at, is_first = event.at, False
            yield record

    def _sealed_records(self, lines: Iterable[bytes], place: Place) -> Iterator[RawRecord]:
        number, crc, held = place.line, place.crc, list[bytes]()
        for line in lines:
            number += 1
            if not is_sealed(line):
                held.append(line)
                continue
            line, digits = split_seal(line)
            held.append(line)
            first = number + 1 - len(held)
            body = b"".join(held)
            event, commands = self._decode(first, held, body)
            before, crc = crc, crc32(body, crc)
            is_intact = digits == b"%08x" % crc
            if not is_intact:
                crc = _number(digits)
            yield RawRecord(first, event, commands, is_intact, before, crc)
            held.clear()
        self.torn = bool(held)
        whole = [line for line in held if line.endswith(b"\n")]
        if whole:  # a record cut between two lines; anything else was not left by a killed run
            self._decode(number + 1 - len(held), whole, b"".join(whole))

    def _decode(self, first: int, lines: list[bytes], body: bytes) -> Record:
        try:
            event, *commands = decode_lines(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self._refuse_content(first, lines)
        if not isinstance(event, Event):
            self._refuse(first, f"{type(event).__name__} is a command", "an event to begin a record")
        for i, command in enumerate(commands):
            if not isinstance(command, Command):
                found = f"{type(command).__name__} is an event"
                self._refuse(first + 1 + i, found, f"a command: the record of line {first} is not sealed")
        record = event, tuple(commands)
        if encode_record(*record) != body:  # type: ignore[arg-type]  # checked just above
            self._refuse_form(first, lines)
        return record  # type: ignore[return-value]  # checked just above

    def _refuse_content(self, first: int, lines: list[bytes]) -> NoReturn:
        """Name the line that is no event or command."""
        for i, line in enumerate(lines):
            try:
                decode_line(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._refuse(first + i, str(error), "an event or command of this schema version")
        raise AssertionError("unreachable: lines that decode one by one decode together")

    def _refuse_form(self, first: int, lines: list[bytes]) -> NoReturn:
        """Name the line no writer writes: with an unknown field, a default spelt out, a space."""
        for i, line in enumerate(lines):
            known = decode_line(line)
            unknown = set(msgspec.json.decode(line)) - {"type", *known.__struct_fields__}
            if unknown:
                name = f"{type(known).__name__}.{min(unknown)}"
                self._refuse(first + i, f"unknown field {name}", f"of {', '.join(known.__struct_fields__)}")
            if encode_record(known, ()) != line:  # type: ignore[arg-type]  # any struct has a line
                self._refuse(first + i, "not in canonical form", "the bytes that a writer writes")
        raise AssertionError("unreachable: equal lines make an equal record")

    def _read_header(self, stream: BinaryIO) -> tuple[Header, int]:
        line = stream.readline()
        if not is_sealed(line):
            self._refuse(1, "no header", "a trace begins with a whole header line")
        body, digits = split_seal(line)
        try:
            version = msgspec.json.decode(body, type=_Version).schema
            if version != SCHEMA_VERSION:
                self._refuse(1, f"schema version {version}", f"{SCHEMA_VERSION}, the one this code reads")
            header = decode_header(body)
        except msgspec.DecodeError as error:
            self._refuse(1, str(error), "a header of this schema version")
        if header.experiment_hash != hash_of(header.experiment):
            self._refuse(1, "the experiment was altered", f"the one whose hash is {header.experiment_hash}")
        crc = crc32(body)
        if crc != _number(digits) or encode_header(header) != body:
            self._refuse(1, "the header was altered after writing", "the recorded bytes")
        return header, crc

    def _refuse(self, line: int, problem: str, wanted: str) -> NoReturn:
        raise TraceError(f"{self.path}:{line}: {problem}; wanted {wanted}")


class _Version(msgspec.Struct):
    schema: int


def _number(digits: bytes) -> int:
    try:
        return int(digits, 16)
    except ValueError:
        return -1


# --- files -----------------------------------------------------------------------------------------


class _Growing(io.RawIOBase):
    """A file that somebody else still appends to: at its end, reading waits."""

    def __init__(self, path: Path, is_growing: Callable[[], bool]) -> None:
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with this
        self._is_growing = is_growing

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            is_growing = self._is_growing()  # asked first: what was appended before the answer is read
            num_read = self._file.readinto(buffer)
            if num_read or not is_growing:
                return num_read
            time.sleep(WAIT_S)

    def close(self) -> None:
        self._file.close()
        super().close()


@contextmanager
def _open(path: Path, is_growing: Callable[[], bool] | None = None) -> Iterator[BinaryIO]:
    """The trace's bytes, decompressed; a compressed file that stops early gives what can be had of it."""
    with open(path, "rb") if is_growing is None else io.BufferedReader(_Growing(path, is_growing)) as file:
        if path.suffix != ".zst":
            yield file
            return
        raw = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False)
        try:
            with io.BufferedReader(raw, 1 << 18) as stream:
                yield stream
        except zstandard.ZstdError as error:
            raise TraceError(f"{path}: damaged compression: {error}; wanted a zstd stream") from None


def cut_torn_tail(path: str | Path) -> Tail:
    """Cut an unfinished record off the end of a trace, in place; the trace may be whole already.

    What is cut was never acted upon: a record is written before the first of its commands is started.
    """
    path = find_trace(path)
    num_good = num_seen = crc = 0
    with _open(path) as stream:
        for line in stream:
            num_seen += len(line)
            if is_sealed(line):
                num_good, crc = num_seen, _number(split_seal(line)[1])
    if path.suffix == ".zst":
        _rewrite(path, num_good)
    elif num_good < num_seen:
        os.truncate(path, num_good)
    return Tail(crc, num_seen - num_good)


def _rewrite(path: Path, num_bytes: int) -> None:
    """Replace a compressed trace by its first `num_bytes`, in a finished frame that can be appended to."""
    fresh = path.with_name(path.name + ".part")
    with _open(path) as stream, open(fresh, "wb") as file:
        with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as compressed:
            while num_bytes and (block := stream.read(min(num_bytes, 1 << 20))):
                num_bytes -= compressed.write(block)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
