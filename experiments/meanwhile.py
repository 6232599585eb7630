"""The metrics of a long simulation, computed by a second process while the first still writes the trace.

    simulation ──blocks──► trace.jsonl ──► this process ──► metrics.json
         └───────"done"────────stdin──────────┘

The same code over the same bytes as after the run, on another core. Owns that process; computes nothing.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DONE = b"done"


@contextmanager
def metrics_meanwhile(out: Path) -> Iterator[None]:
    """Let `metrics.json` of a run folder be written when what happens inside has written its trace.

    The trace must exist, header and all, within; without success inside there are no metrics.
    """
    command = [sys.executable, "-P", "-m", "experiments.meanwhile", str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as reader:
        try:
            yield
            reader.communicate(DONE)
        except BaseException:
            reader.kill()
            raise
    if reader.returncode:
        raise RuntimeError(f"the process that computes the metrics of {out} ended with {reader.returncode}")


@contextmanager
def rare_collections() -> Iterator[None]:
    """Look for cycles of garbage less often: simulating makes millions of objects but no cycles."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100 * before[0], before[1], 10 * before[2])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _is_growing() -> bool:
    """Whether the run goes on; ends this process where the run ended without saying that it is done."""
    try:
        said = os.read(sys.stdin.fileno(), len(DONE))
    except BlockingIOError:
        return True
    if said != DONE:
        sys.exit(1)
    return False


def main() -> None:
    """Follow the trace of the run folder that is the first argument."""
    from experiments.run import write_metrics
    from traces.reader import TraceReader

    os.set_blocking(sys.stdin.fileno(), False)
    out = Path(sys.argv[1])
    is_over = False

    def is_growing() -> bool:
        nonlocal is_over
        is_over = is_over or not _is_growing()
        return not is_over

    with rare_collections():
        write_metrics(out, TraceReader(out, is_growing=is_growing))
    os._exit(0)  # somebody waits, and to tear a million objects down takes its time


if __name__ == "__main__":
    main()
