"""Folders that appear whole or not at all, and versions that are swept away.

Owns what "committed" means on disk: a folder that exists under its own name is whole and survives a loss of
power. Knows no file's content, and no torch: the driver writes what far workers have made.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

_KEPT_OPTIMIZERS = 2


def commit_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files to a temporary folder, flush them to disk, and give it its name in one rename."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("new", "old"))
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    for name, content in files.items():
        with open(temporary / name, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    _flush_folder(temporary)
    if folder.exists():  # written, but its commit was never recorded: it is being made again
        folder.rename(old)
    temporary.rename(folder)
    _flush_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def sweep_optimizers(folder: Path) -> None:
    """Of a task's optimizer folders keep this one, `v<k>`, and the one before."""
    newest = int(folder.name[1:])
    for old in folder.parent.glob("v*"):
        if old.name[1:].isdigit() and int(old.name[1:]) <= newest - _KEPT_OPTIMIZERS:
            shutil.rmtree(old)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
