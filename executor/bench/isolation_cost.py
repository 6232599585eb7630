"""What isolation costs: the engine's speed with and without it, each in a process of its own.

The way products are summed is fixed for the life of a process, so two processes are started; each measures
when told to, and waits meanwhile. Started as `python -m executor.bench.isolation_cost FOLDER true|false`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NUM_ADAPTERS = 8
ROWS = (1, 8, 64)


class Side:
    """A process whose engine is isolated or not, measuring on request."""

    def __init__(self, folder: Path, is_isolated: bool) -> None:
        word = "true" if is_isolated else "false"
        command = [sys.executable, "-m", "executor.bench.isolation_cost", str(folder), word]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tokens_per_s(self, num_rows: int) -> float:
        """Tokens per CPU-second at so many rows in use."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{num_rows}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def _serve(folder: Path, is_isolated: bool) -> None:
    from executor.bench.adapters import read_adapters
    from executor.bench.clock import use_one_thread
    from executor.bench.rollout import OurEngine, equal_requests

    use_one_thread()
    engine = OurEngine(read_adapters(folder, NUM_ADAPTERS), max(ROWS), is_isolated)
    for line in sys.stdin:
        num_rows = int(line)
        requests = equal_requests(num_rows, min(num_rows, NUM_ADAPTERS))
        print(max(engine.tokens_per_s(requests) for _ in range(1 + 16 // num_rows)), flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), sys.argv[2] == "true")
