"""The folder of a sweep: what is kept in it, whose it is, and what of it is finished.

    study.yaml  base.yaml          what was asked
    cells/<key>.json               a finished cell each, named by the content of its question
    runs/<key>/                    its run folder, with keep_traces
    results.csv results.parquet summary.csv comparison.csv figures/     made anew from the cells by every run
    partial/  lock                 cells at work, and who works

A folder belongs to the study whose `name` it holds. The study may be changed and extended under that name:
cells are found by what they simulate and by the code that simulates it, so a result is reused only where it
answers the same question. Any other folder with something in it is refused.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib import metadata
from pathlib import Path

import msgspec

import marlaas
import sim
import traces
from experiments.load import dump_experiment
from experiments.run import TRACE, require_fresh
from experiments.yaml_strict import parse
from marlaas.errors import InputError
from marlaas.spec import Experiment

STUDY, BASE = "study.yaml", "base.yaml"
RESULTS, PARQUET, SUMMARY, COMPARISON = "results.csv", "results.parquet", "summary.csv", "comparison.csv"
FIGURES = "figures"
KEY_LENGTH = 16
"""Digits of a key that name its files and stand in tables: 64 bits, enough for millions of cells."""

Number = int | float | None


class CellRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cell's result: the metrics of the whole run, and each task's steps per hour (own, while served)."""

    key: str
    metrics: dict[str, Number] = {}
    rates: dict[str, tuple[Number, Number]] = {}
    wall_s: float = 0.0
    error: str | None = None


class Folder:
    """Paths and files of one sweep's folder."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def partial(self, key: str) -> Path:
        """Where a cell at work writes, in a folder that is there while the sweep is owned."""
        return self.out / "partial" / key[:KEY_LENGTH]

    def run(self, key: str) -> Path:
        """The run folder of a finished cell."""
        return self.out / "runs" / key[:KEY_LENGTH]

    def emptied_run(self, key: str) -> Path:
        """The same, made free for a new run folder to move to."""
        run = self.run(key)
        shutil.rmtree(run, ignore_errors=True)
        run.parent.mkdir(exist_ok=True)
        return run

    def keep(self, record: CellRecord) -> None:
        """Write a finished cell's file, whole or not at all."""
        path = self._cell(record.key)
        replace_file(path, msgspec.json.encode(record) + b"\n")

    def finished(self, key: str, *, with_trace: bool) -> CellRecord | None:
        """The result of a cell that was simulated before; with its trace, where that is wanted."""
        if with_trace and not (self.run(key) / TRACE).is_file():
            return None
        try:
            record = msgspec.json.decode(self._cell(key).read_bytes(), type=CellRecord)
        except (OSError, msgspec.DecodeError):
            return None  # absent, or cut short by a machine that went down: simulate it again
        return record if record.key == key else None

    @contextmanager
    def owned(self, name: str, text: str, base: Experiment) -> Iterator[None]:
        """Take the folder for the study `name`, written as `text`; raises `InputError` if it is another's.

        Nothing is written before the folder is known to be free; what a killed sweep left is removed.
        """
        self._require_own(name)
        self.out.mkdir(parents=True, exist_ok=True)
        with open(self.out / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                wanted = "wait for it, or name another folder"
                raise InputError("--out", f"another sweep is at work in {self.out}", wanted) from None
            replace_file(self.out / STUDY, text.encode())
            replace_file(self.out / BASE, dump_experiment(base).encode())
            self._remove_partial()
            for inner in ("partial", "cells"):
                (self.out / inner).mkdir(exist_ok=True)
            try:
                yield
            finally:
                self._remove_partial()

    def _require_own(self, name: str) -> None:
        path = self.out / STUDY
        if not path.is_file():
            require_fresh(self.out)
            return
        found = parse(path.read_text(encoding="utf-8"), str(path)).data
        owner = found.get("name") if isinstance(found, dict) else None
        if owner != name:
            wanted = f"name another folder, or call the study {owner} if it is a new edition of that one"
            raise InputError("--out", f"{self.out} holds the study {owner!r}, not {name!r}", wanted)

    def _remove_partial(self) -> None:
        shutil.rmtree(self.out / "partial", ignore_errors=True)

    def _cell(self, key: str) -> Path:
        return self.out / "cells" / f"{key[:KEY_LENGTH]}.json"


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that it is seen whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


def code_fingerprint() -> str:
    """What simulates: the sources of the core, the traces and the simulator, and the versions under them."""
    digest = sha256(f"numpy {metadata.version('numpy')}, simpy {metadata.version('simpy')}".encode())
    for package in (marlaas, traces, sim):
        root = Path(package.__path__[0])
        for file in sorted(root.rglob("*.py")):
            digest.update(f"{package.__name__}/{file.relative_to(root).as_posix()}".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
