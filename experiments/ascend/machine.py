"""What an Ascend machine has: driver, CANN, and the Python packages that must match them.

Owns reading; judges nothing and imports neither torch nor any package it looks for. Every place it looks at
can be given, so that a folder can stand in for a machine.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("torch", "torch_npu", "vllm", "vllm_ascend", "triton_ascend", "transformers")
# CANN's own set_env.sh sets the first; older releases set the second. Where neither is set, it lies here.
CANN_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
CANN_FOLDERS = ("usr/local/Ascend/cann", "usr/local/Ascend/ascend-toolkit/latest")
# Files that tell CANN's version, the first that is there; the first two lie in a folder per architecture.
_VERSION_FILES = (
    "*-linux/ascend_toolkit_install.info",
    "ascend_toolkit_install.info",
    "compiler/version.info",
    "toolkit/version.info",
    "version.info",
    "version.cfg",
)
# `version=9.1.0`, `Version=9.1.0`, or `runtime_running_version=[9.1.0.1:9.1.0]`.
_VERSION = re.compile(r"(?im)^\s*\w*version\s*=\s*\[?(?:[\w.]+:)?(\d[\w.]*)")


class Machine(NamedTuple):
    """Facts of one machine; None or 0 is what is absent."""

    cann: str | None
    cann_folder: Path | None
    cann_is_set_up: bool
    npu_smi: str | None
    num_devices: int
    python: tuple[int, int]
    packages: dict[str, str | None]

    @property
    def is_ascend(self) -> bool:
        """Whether anything here says that this is, or is to be, an Ascend machine."""
        package = any(self.packages[name] for name in ("torch_npu", "vllm_ascend"))
        return bool(package or self.cann_folder or self.npu_smi or self.num_devices)


def version_of(package: str) -> str | None:
    """The installed version of a distribution without its local part (`+cpu`), or None."""
    try:
        return metadata.version(package.replace("_", "-")).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def look(
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    version: Callable[[str], str | None] = version_of,
) -> Machine:
    """Look at this machine, or at folders that stand for one."""
    folder, is_set_up = _cann_folder(root, environ)
    return Machine(
        cann=None if folder is None else cann_version(folder),
        cann_folder=folder,
        cann_is_set_up=is_set_up,
        npu_smi=shutil.which("npu-smi", path=environ.get("PATH", "")),
        num_devices=len([node for node in root.glob("dev/davinci*") if node.name[7:].isdigit()]),
        python=(sys.version_info.major, sys.version_info.minor),
        packages={name: version(name) for name in PACKAGES},
    )


def cann_version(folder: Path) -> str | None:
    """The version a CANN toolkit folder says it has, or None where no file tells."""
    for pattern in _VERSION_FILES:
        for file in sorted(folder.glob(pattern)):
            found = _VERSION.search(file.read_text(encoding="utf-8", errors="replace"))
            if found:
                return found.group(1).rstrip(".")
    return None


def _cann_folder(root: Path, environ: Mapping[str, str]) -> tuple[Path | None, bool]:
    """Where CANN is, and whether the environment says so."""
    for variable in CANN_VARIABLES:
        if environ.get(variable) and Path(environ[variable]).is_dir():
            return Path(environ[variable]), True
    found = next((root / folder for folder in CANN_FOLDERS if (root / folder).is_dir()), None)
    return found, False
