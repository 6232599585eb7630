"""Feeds the events of a trace to a fresh scheduler and compares its commands with the recorded ones.

On the way the laws of a run are asked (`laws`), as far as both agree.
The first difference is named with its line, its field, what was expected and what was found. Because
records are sealed, an altered event is told from an altered command even where it changes no command.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import msgspec

from marlaas import __version__
from marlaas.commands import Command
from marlaas.errors import LawBroken, MarlaasError
from marlaas.scheduler import Scheduler
from traces.laws import LawBook, Laws
from traces.reader import RawRecord, TraceReader
from traces.schema import encode_record


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first place where a trace and its replay part: `field` is `Type.field`, or the type alone."""

    line: int
    field: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.field}: expected {self.expected}, found {self.found}"


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay came to; `num_events` and `num_commands` agree. `torn` is as in a `Trace`.

    `laws` is what was found to hold, where commands agree and no law is broken.

    `code_version` made the trace; with another version than this code's a difference may be a change
    of the scheduler and no damage.
    """

    path: str
    code_version: str
    num_events: int
    num_commands: int
    torn: bool
    difference: Difference | None = None
    laws: Laws | None = None
    broken_law: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the scheduler gave exactly the recorded commands and every law holds."""
        return self.difference is None and self.broken_law is None

    def __str__(self) -> str:
        counts = f"{self.num_events} events and {self.num_commands} commands agree"
        if self.difference is None:
            text = f"{self.path}: {counts}" + (", a torn record at the end left out" if self.torn else "")
            return f"{text}; " + (f"broken law: {self.broken_law}" if self.laws is None else f"{self.laws}")
        text = f"{self.path}:{self.difference} ({counts} before it)"
        if self.code_version != __version__:
            text += f"; recorded by version {self.code_version}, replayed by {__version__}"
        return text


def replay(path: str | Path) -> Replay:
    """Replay a trace or run folder. Raises `TraceError` for what is not a trace, `InputError` for none."""
    reader = TraceReader(path)
    num_events = num_commands = 0
    difference = laws = broken_law = None
    header = reader.header
    core = Scheduler(header.experiment)
    book = LawBook(header.experiment, is_simulated=header.world == "sim")
    for record in reader.raw_records():
        difference = _difference(core, record)
        if difference is not None:
            break
        num_events += 1
        num_commands += len(record.commands)
        if broken_law is None:
            try:
                book.take(record.event, record.commands, core.state)
            except LawBroken as error:
                broken_law = f"line {record.line}: {error}"
    if difference is None and broken_law is None:
        try:
            laws = book.close()
        except LawBroken as error:
            broken_law = str(error)
    return Replay(
        path=str(reader.path),
        code_version=header.code_version,
        num_events=num_events,
        num_commands=num_commands,
        torn=reader.torn,
        difference=difference,
        laws=laws,
        broken_law=broken_law,
    )


def _difference(core: Scheduler, record: RawRecord) -> Difference | None:
    try:
        expected = core.handle(record.event)
    except (MarlaasError, LookupError, AssertionError) as error:  # altered facts may be nonsense to the core
        if record.is_intact:
            return _of_event(record, f"an event the scheduler accepts ({type(error).__name__}: {error})")
        return _of_event(record, "the event that was recorded")
    if record.is_intact:
        return None if expected == record.commands else _of_commands(record, expected)
    if crc32(encode_record(record.event, expected), record.crc_before) == record.crc:
        return _of_commands(record, expected)  # with the replayed commands the seal is right
    return _of_event(record, "the event that was recorded")


def _of_event(record: RawRecord, expected: str) -> Difference:
    name = type(record.event).__name__
    if not record.is_intact:
        expected += f", sealed with {record.crc:08x}"
    return Difference(line=record.line, field=name, expected=expected, found=repr(record.event))


def _of_commands(record: RawRecord, expected: tuple[Command, ...]) -> Difference:
    for i, (wanted, found) in enumerate(zip(expected, record.commands, strict=False)):
        for field, a, b in _fields(wanted, found):
            return Difference(line=record.line + 1 + i, field=field, expected=a, found=b)
    i = min(len(expected), len(record.commands))
    rest, extra = expected[i:], record.commands[i:]
    one = (rest or extra)[0]
    return Difference(
        line=record.line + 1 + i,
        field=type(one).__name__,
        expected=repr(one) if rest else "no further command",
        found=repr(one) if extra else "no further command",
    )


def _fields(wanted: Command, found: Command) -> Iterator[tuple[str, str, str]]:
    if type(wanted) is not type(found):
        yield "type", repr(wanted), repr(found)
        return
    for name in wanted.__struct_fields__:
        a, b = getattr(wanted, name), getattr(found, name)
        if a != b:
            yield f"{type(wanted).__name__}.{name}", repr(a), repr(b)
