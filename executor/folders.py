"""Where a run keeps what the real world makes. Knows paths, not what is in them."""

from __future__ import annotations

import re
from pathlib import Path

_VERSION = re.compile(r"v(\d+)")


class RunFolder:
    """A run's output folder: `adapters/<task>/v<k>`, `optimizer/<task>/v<k>`, `samples/<task>/`, `logs/`."""

    def __init__(self, out: Path) -> None:
        self.path = out.resolve()

    def adapter(self, task: str, version: int) -> str:
        """The PEFT folder of a version."""
        return str(self.path / "adapters" / task / f"v{version}")

    def optimizer(self, task: str, version: int) -> str:
        """The optimizer's state that belongs to a version."""
        return str(self.path / "optimizer" / task / f"v{version}")

    def samples(self, task: str, step: int) -> Path:
        """The readable trajectories of a committed step."""
        return self.path / "samples" / task / f"step-{step}.jsonl"

    def log(self, worker: str) -> Path:
        """What a worker's process printed."""
        return self.path / "logs" / f"{worker}.log"

    def versions(self, task: str) -> list[int]:
        """The committed versions found on disk, ascending."""
        folder = self.path / "adapters" / task
        names = [child.name for child in folder.iterdir()] if folder.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := _VERSION.fullmatch(name)))
