"""The hot modules as machine code: the very same sources through mypyc, made once and kept by their hash.

    marlaas, sim, traces ──make──► <environment>/share/marlaas/compiled/<hash>/ ──prefer()──► import

The Python files stay the truth. Compiled or not, a run writes the same trace to the byte; code made of other
sources, or for another Python, has another hash and is never loaded. Nothing needs it: without it, or with
MARLAAS_PUREPYTHON=1 in the environment, all runs as plain Python, half as fast. Owns where compiled code lies
and the finder that leads imports there; knows nothing of what the modules do.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

# Where simulations and their metrics spend their time. Those that mostly define msgspec structs would gain
# nothing, and mypyc refuses some of them.
MODULES = (
    *("marlaas.batches", "marlaas.core", "marlaas.episodes", "marlaas.lifecycle", "marlaas.loads"),
    *("marlaas.policies", "marlaas.rollout", "marlaas.runtime", "marlaas.scheduler", "marlaas.slots"),
    *("marlaas.state", "marlaas.tasks", "marlaas.training", "marlaas.turns", "marlaas.waiting"),
    *("marlaas.workers", "sim.backend", "sim.batch", "sim.costs", "sim.engine", "sim.host", "sim.lane"),
    *("sim.prefix_cache", "sim.replica", "sim.run", "sim.sequences", "sim.serving", "sim.timeline"),
    *("sim.workload", "traces.blocks", "traces.metrics.occupancy", "traces.metrics.run"),
    *("traces.metrics.spans", "traces.metrics.steps", "traces.writer"),
)
PACKAGES = ("marlaas", "sim", "traces")  # all that the modules are compiled against
PURE = "MARLAAS_PUREPYTHON"
ROOT = Path(__file__).parents[2]
_SUFFIX = EXTENSION_SUFFIXES[0]  # names this Python and this kind of machine


def folder() -> Path:
    """Where machine code of these very sources lies, or would."""
    digest = hashlib.sha256(f"{_SUFFIX} {MODULES}".encode())
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            source = file.read_bytes()
            digest.update(f"\n{file.relative_to(ROOT)} {len(source)}\n".encode())
            digest.update(source)
    return Path(sys.prefix) / "share" / "marlaas" / "compiled" / digest.hexdigest()[:32]


def is_preferred() -> bool:
    """Whether the hot modules are imported as machine code in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def prefer() -> None:
    """Import the hot modules as machine code from now on, where there is any.

    Does nothing once one of them has been imported: half of them would not fit together.
    """
    if os.environ.get(PURE) or is_preferred() or any(name in sys.modules for name in MODULES):
        return
    at = folder()
    files = {
        ".".join(file.relative_to(at).parts).removesuffix(_SUFFIX): file for file in at.rglob(f"*{_SUFFIX}")
    }
    if files:
        sys.meta_path.insert(0, _Finder(files))


class _Finder:
    """Leads imports of compiled modules to their files."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a module is, if it is one of these; the import system asks."""
        file = self._files.get(name)
        return None if file is None else spec_from_file_location(name, file)
