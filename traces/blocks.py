"""Reads a sound trace many records at a time, at half the cost of one by one.

A block is sound when sealing what was read gives the very bytes again and times and ids are in order, which
is all that the reader asks for. Any other block is left to the reader, which says what is wrong with it. Owns
no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, get_args

import msgspec

from marlaas.commands import AnyCommand
from marlaas.events import RunStarted
from traces.schema import SEAL, SEAL_LENGTH, Record, decode_lines, seal_all

BLOCK_BYTES = 1 << 17  # what is read of one fits the second-level cache
_COMMANDS = frozenset(get_args(AnyCommand))


class Place(NamedTuple):
    """How far a trace has been read: lines, the CRC of the last record, its time, the last command's id."""

    line: int
    crc: int
    at: int = 0
    last_id: int = 0


def blocks(stream: BinaryIO) -> Iterator[bytes]:
    """The bytes of a trace in blocks of whole records; the last block, or a damaged one, may end anywhere."""
    rest = b""
    while data := stream.read(BLOCK_BYTES):
        data = rest + data
        end = _end_of_records(data) or len(data)
        rest = data[end:]
        yield data[:end]
    if rest:
        yield rest


def _end_of_records(data: bytes) -> int:
    """Where the last whole record ends; 0 when there is none."""
    start = len(data)
    while (start := data.rfind(SEAL, 0, start)) >= 0:
        end = start + SEAL_LENGTH
        if data[end - 1 : end] == b"\n":
            return end
    return 0


def lines_of(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of what is given in parts; the last may lack its newline."""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line + b"\n"
    if rest:
        yield rest


def read_block(block: bytes, place: Place) -> tuple[list[Record], Place] | None:
    """The records that follow a place, and the place after them; None unless the block is sound."""
    try:
        facts = decode_lines(block)  # the seal is no field of theirs and is passed over
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    found = _in_records(facts, place)
    if found is None:
        return None
    records, at, last_id = found
    again, crc = seal_all(records, place.crc)
    if again != block:
        return None
    return records, Place(place.line + len(facts), crc, at, last_id)


def _in_records(facts: list[Any], place: Place) -> tuple[list[Record], int, int] | None:
    """Events, each with the commands that follow it, the last time and id; None when out of order."""
    first = facts[0].__class__ if facts else None
    if first is None or first in _COMMANDS or (first is RunStarted) is not (place.line == 1):
        return None
    records: list[Record] = []
    at, last_id = place.at, place.last_id
    event: Any = None
    commands: list[Any] = []
    for fact in facts:
        kind = fact.__class__
        if kind in _COMMANDS:
            last_id += 1
            if fact.id != last_id:
                return None
            commands.append(fact)
            continue
        if event is not None:
            if kind is RunStarted:
                return None
            records.append((event, tuple(commands)))
            commands.clear()
        if fact.at < at:
            return None
        event, at = fact, fact.at
    records.append((event, tuple(commands)))
    return records, at, last_id
