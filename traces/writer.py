"""Appends a run to its trace, one sealed record per event.

Owns when bytes reach the operating system: at once for a real run, whose trace is its write-ahead log;
in large blocks for a simulation. Knows nothing of what the records mean.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import TracebackType

import msgspec
import zstandard

from marlaas.commands import Command
from marlaas.errors import InputError, TraceError
from marlaas.events import EnvironmentStepped, Event, TrainingFinished
from traces.reader import cut_torn_tail, read_header
from traces.schema import Header, Record, encode_header, seal, seal_all

BLOCK_RECORDS = 4096
_WITH_FLOATS: frozenset[type[Event]] = frozenset((EnvironmentStepped, TrainingFinished))


class TraceWriter:
    """The recorder of one run, a context manager. A path ending in `.zst` is compressed.

    An executor's records reach the operating system before `write` returns (one `os.write` each, so they
    survive the death of the process); a simulation's are encoded and written in blocks of `BLOCK_RECORDS`,
    which costs a third. `close` forces a real run's trace to the disk. With `resume` the trace at `path` must
    have the same header; its torn tail is cut and the run goes on from there.
    """

    def __init__(self, path: str | Path, header: Header, *, resume: bool = False) -> None:
        self.path = Path(path)
        self._is_durable = header.world == "executor"
        self._block_records = 1 if self._is_durable else BLOCK_RECORDS
        self._compressor = zstandard.ZstdCompressor().compressobj() if self.path.suffix == ".zst" else None
        self._held: list[Record] = []
        self._crc = self._check_resumable(header) if resume else 0
        self._file = self._open(os.O_APPEND if resume else os.O_CREAT | os.O_EXCL)
        if not resume:
            sealed, self._crc = seal(encode_header(header), 0)
            self._append(sealed)

    def write(self, event: Event, commands: tuple[Command, ...]) -> None:
        """Append one event and the commands it led to.

        Raises `TraceError`, having written nothing, for a number that JSON cannot hold (not finite).
        """
        if event.__class__ in _WITH_FLOATS:
            _check_finite(event)
        self._held.append((event, commands))
        if len(self._held) >= self._block_records:
            self._flush()

    def close(self) -> None:
        """Write out what is held back and close the file; does nothing the second time."""
        if self._file < 0:
            return
        try:
            self._flush()
            if self._compressor is not None:
                self._write_out(self._compressor.flush())
            if self._is_durable:
                os.fsync(self._file)
        finally:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _flush(self) -> None:
        held, self._held = self._held, []
        if held:
            sealed, self._crc = seal_all(held, self._crc)
            self._append(sealed)

    def _append(self, data: bytes) -> None:
        if self._compressor is not None:
            data = self._compressor.compress(data)
            if self._is_durable:
                data += self._compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        self._write_out(data)

    def _write_out(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            num_written = os.write(self._file, view)  # on its own: mypyc evaluates a slice's bound twice
            view = view[num_written:]

    def _open(self, flags: int) -> int:
        try:
            return os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o644)
        except FileExistsError:
            wanted = "name a folder without a trace, or resume"
            raise InputError(str(self.path), "there is a trace already", wanted) from None

    def _check_resumable(self, header: Header) -> int:
        found = read_header(self.path).experiment_hash
        if found != header.experiment_hash:
            wanted = "resume with the experiment that the run began with"
            raise InputError(str(self.path), "the trace is of another experiment", wanted)
        return cut_torn_tail(self.path).crc


def _check_finite(event: Event) -> None:
    """JSON has no NaN: written as null it would read back as a value that was not known."""
    if isinstance(event, EnvironmentStepped):
        if event.reward is None or math.isfinite(event.reward):
            return
        field, value = "reward", event.reward
    else:
        assert isinstance(event, TrainingFinished)
        stats = msgspec.structs.asdict(event.stats)
        wrong = [(k, v) for k, v in stats.items() if isinstance(v, float) and not math.isfinite(v)]
        if not wrong:
            return
        field, value = wrong[0]
    name = type(event).__name__
    raise TraceError(f"{name}.{field} is {value}; wanted a finite number, or CommandFailed in its place")
