"""How much two busy workers slow each other on this machine, measured before a run.

The cores of one machine share caches and memory, and two of them can be two threads of one: what a run shows
of a worker alone then says too little about the same worker beside a busy neighbour. Two probes, pinned like
two workers, multiply matrices alone and together; work is counted per CPU-second, so that other processes
that only take turns with them disturb least. Knows no engine, worker or run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from statistics import median

from executor.affinity import pin

ROUNDS = 5
SECONDS = 0.15


def slowdown_per_busy_worker(cores: Sequence[int], others: Sequence[int]) -> float:
    """The share of its time that work on `cores` takes longer while `others` are busy; 0 where it does not.

    Takes about 3 seconds. The median of several rounds, each alone, together, over both sides.
    """
    probes = [_start(cores[0]), _start(others[0])]
    try:
        ratios = []
        for _ in range(ROUNDS):
            alone = [_rates([probe])[0] for probe in probes]
            together = _rates(probes)
            ratios += [a / t for a, t in zip(alone, together, strict=True)]
    finally:
        for probe in probes:
            probe.kill()
            probe.communicate()
    return max(0.0, median(ratios) - 1)


def _start(core: int) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "executor.contention", str(core)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def _rates(probes: Sequence[subprocess.Popen[str]]) -> list[float]:
    """Let these probes work at once; products per CPU-second of each."""
    for probe in probes:
        assert probe.stdin is not None
        probe.stdin.write("work\n")
        probe.stdin.flush()
    return [_answer(probe) for probe in probes]


def _answer(probe: subprocess.Popen[str]) -> float:
    assert probe.stdout is not None
    return float(probe.stdout.readline())


def _probe(core: int) -> None:
    """Work for a moment each time a line comes, until none does."""
    import numpy as np

    pin([core])
    rows, weights = np.ones((64, 128), np.float32), np.ones((128, 512), np.float32)
    for _ in sys.stdin:
        begin, used = time.monotonic(), time.thread_time()
        count = 0
        while time.monotonic() - begin < SECONDS:
            np.tanh(rows @ weights)
            count += 1
        print(count / (time.thread_time() - used), flush=True)


if __name__ == "__main__":
    _probe(int(sys.argv[1]))
