"""What a trace is: the header, the line format, the version.

    {"type":"Header","schema":1,"world":"sim",...,"crc":"91b0e5c2"}
    {"type":"RunStarted","at":0}
    {"type":"StartWorker","id":1,"worker":"replica-0"}
    {"type":"StartWorker","id":2,"worker":"lane-0","crc":"5d0f3a17"}
    {"type":"WorkerUp","at":51000000,"command":1,"worker":"replica-0","crc":"0c6d1e44"}

A *record* is one event and the commands it led to, one line each, in order. The last line of a record
carries a seal: `crc` is the CRC-32 of the record's lines without the seal, started from the CRC of the
record before, the header being the first. So a record is whole or absent, and no line can be altered,
lost, doubled or moved unseen.

Owns the format; does no I/O. Nothing derived is stored in a trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Literal
from zlib import crc32

import msgspec

from marlaas import __version__
from marlaas.commands import AnyCommand, Command
from marlaas.events import AnyEvent, Event
from marlaas.spec import Experiment

SCHEMA_VERSION = 1
SLOWDOWN = "slowdown_per_busy_worker"
"""The fact of a host: which share of its time a busy worker costs another one on the same machine."""

World = Literal["sim", "executor"]
Record = tuple[Event, tuple[Command, ...]]
Scalar = str | int | float | bool | None


class Header(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The first line: what was run, where and with which code.

    `host` and `created_at` (ISO 8601) belong to real runs; a simulated trace has neither, so that it is
    the same byte for byte wherever it is made. `profile` holds the costs a simulation used.
    """

    schema: int
    world: World
    seed: int
    code_version: str
    experiment_hash: str
    experiment: Experiment
    profile: dict[str, Any] | None = None
    host: dict[str, Scalar] | None = None
    created_at: str | None = None

    def __post_init__(self) -> None:
        if self.world == "sim" and (self.host is not None or self.created_at is not None):
            raise ValueError("a simulated trace names no host and no time of day")


def make_header(
    experiment: Experiment,
    *,
    world: World,
    profile: dict[str, Any] | None = None,
    host: dict[str, Scalar] | None = None,
    created_at: str | None = None,
) -> Header:
    """The header of a run of `experiment` with this version of the code."""
    settled = _settled(experiment)
    return Header(
        schema=SCHEMA_VERSION,
        world=world,
        seed=experiment.seed,
        code_version=__version__,
        experiment_hash=hash_of(settled),
        experiment=settled,
        profile=profile,
        host=host,
        created_at=created_at,
    )


def hash_of(experiment: Experiment) -> str:
    """SHA-256 of the experiment's canonical JSON: sorted keys, defaults written out, numbers as decoded."""
    return hashlib.sha256(msgspec.json.encode(_settled(experiment), order="sorted")).hexdigest()


def _settled(experiment: Experiment) -> Experiment:
    """The experiment as it reads back from a trace: a whole number given for a float is a float there."""
    return msgspec.json.decode(msgspec.json.encode(experiment), type=Experiment)


def question_hash(experiment: Experiment) -> str:
    """The hash of what was asked, whoever answers: the system and the cost profile are left out."""
    return hash_of(msgspec.structs.replace(experiment, system="marlaas", profile=None))


# --- lines -----------------------------------------------------------------------------------------

SEAL = b',"crc":"'
SEAL_LENGTH = len(b',"crc":"00000000"}\n')
NUM_BEFORE_DIGITS = len(SEAL)

encode_lines = msgspec.json.Encoder().encode_lines
_line_decoder: msgspec.json.Decoder[Event | Command] = msgspec.json.Decoder(AnyEvent | AnyCommand)
_decode_header = msgspec.json.Decoder(Header).decode


def encode_record(event: Event, commands: tuple[Command, ...]) -> bytes:
    """The lines of a record, not yet sealed."""
    return encode_lines((event, *commands))


def encode_header(header: Header) -> bytes:
    """The header's line, not yet sealed. Keys keep their order: the scheduler may depend on it."""
    return encode_lines((header,))


def decode_line(line: bytes) -> Event | Command:
    """One unsealed line; its errors name a field of the line."""
    return _line_decoder.decode(line)


def decode_lines(lines: bytes) -> list[Event | Command]:
    """Unsealed lines as events and commands; `msgspec.ValidationError` names what is wrong."""
    return _line_decoder.decode_lines(lines)


def decode_header(line: bytes) -> Header:
    """The unsealed first line; `msgspec.ValidationError` names what is wrong."""
    return _decode_header(line)


def seal(lines: bytes, before: int) -> tuple[bytes, int]:
    """Sealed lines and their CRC, from unsealed lines and the CRC of the record before."""
    crc = crc32(lines, before)
    return lines[:-2] + b',"crc":"%08x"}\n' % crc, crc


def seal_all(records: Iterable[Record], before: int) -> tuple[bytes, int]:
    """The sealed lines of several records one after the other, and the CRC of the last."""
    parts = []
    for event, commands in records:
        lines = encode_lines((event, *commands))
        before = crc32(lines, before)
        parts.append(lines[:-2] + b',"crc":"%08x"}\n' % before)
    return b"".join(parts), before


def is_sealed(line: bytes) -> bool:
    """Whether a line, newline included, is the last of its record."""
    return line[-SEAL_LENGTH : NUM_BEFORE_DIGITS - SEAL_LENGTH] == SEAL


def split_seal(line: bytes) -> tuple[bytes, bytes]:
    """A sealed line without its seal, newline included, and the seal's eight digits."""
    return line[:-SEAL_LENGTH] + b"}\n", line[NUM_BEFORE_DIGITS - SEAL_LENGTH : -3]
