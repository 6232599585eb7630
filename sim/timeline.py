"""SimPy as the rest of the simulation sees it: the time, and calls put off until later.

Time is a whole number of nanoseconds. Calls due at one instant are made in the order they were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import simpy

NS_PER_S = 1_000_000_000


def to_ns(seconds: float) -> int:
    """Seconds as the nearest whole number of nanoseconds."""
    return round(seconds * NS_PER_S)


class Timeline:
    """The clock of one simulated run."""

    __slots__ = ("_env",)

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env

    @property
    def now_ns(self) -> int:
        """Nanoseconds since the run began."""
        return self._env.now  # type: ignore[return-value]  # whole, as all delays are

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Make a call when so much time has passed."""

        def due(_: Any) -> None:
            call()

        self._env.timeout(delay_ns).callbacks.append(due)
