"""Where a run keeps what the real world makes. Knows paths, not what is in them."""

from __future__ import annotations

from pathlib import Path


def is_optimizer(folder: str) -> bool:
    """Whether a version's folder holds its optimizer's state."""
    return Path(folder).parts[-3] == "optimizer"


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
