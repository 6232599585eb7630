"""Graders that do as they are told, for processes that grade."""

from __future__ import annotations

import os
import signal
from typing import Any

from executor.environments.judge import Grade


def obedient(setting: Any) -> Grade:
    """Gives the number it is asked for, or misbehaves as its request says."""

    def grade(request: Any) -> float:
        match request:
            case "spin":
                while True:
                    pass
            case "compute":  # one call into C, which no signal handler of Python interrupts
                return float(len(str(7 ** (10**9))))
            case "raise":
                raise ValueError("no such answer")
            case "print":
                print("hello from the library")
                return float(setting)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "devour":
                return float(len(b"x" * (64 << 30)))
        return float(request)

    return grade


def unmade(setting: Any) -> Grade:
    """Cannot be made."""
    raise RuntimeError(f"no grader for {setting}")
