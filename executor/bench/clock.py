"""A clock that counts the work of this process alone, so that other processes disturb a measurement little.

Everything measured with it runs on one thread: CPU time adds up over threads. Knows nothing of what is
measured.
"""

from __future__ import annotations

import time


def use_one_thread() -> None:
    """Let torch compute on one thread in this process."""
    import torch

    torch.set_num_threads(1)


class WorkClock:
    """Seconds of CPU time since it was made, plus the idle time that was skipped."""

    def __init__(self) -> None:
        self._begin = time.process_time()
        self._skipped = 0.0

    def now(self) -> float:
        """Seconds since the beginning."""
        return time.process_time() - self._begin + self._skipped

    def skip_to(self, moment: float) -> None:
        """Let a moment come, if it has not, without waiting for it."""
        self._skipped += max(0.0, moment - self.now())
