"""The run's clock: nanoseconds since the run began, never running backwards. Knows no events."""

from __future__ import annotations

import time


class Clock:
    """Starts at zero when made. Must be used from one thread."""

    def __init__(self) -> None:
        self._start_ns = time.monotonic_ns()
        self._last_ns = 0

    def now(self, not_before_ns: int = 0) -> int:
        """Nanoseconds since the start; at least `not_before_ns` and at least every earlier answer."""
        self._last_ns = max(time.monotonic_ns() - self._start_ns, self._last_ns, not_before_ns)
        return self._last_ns

    def monotonic_s(self, at_ns: int) -> float:
        """A time of the run on the scale of `time.monotonic`, which is asyncio's."""
        return (self._start_ns + at_ns) / 1e9
