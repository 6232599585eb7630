"""Two probes of how much busy workers slow each other."""

from __future__ import annotations

import psutil
import pytest

from executor import contention


def test_the_slowdown_is_a_share_and_leaves_no_process() -> None:
    """Not negative, not beyond what two processes taking turns on one core would cost."""
    before = set(psutil.Process().children(recursive=True))
    slowdown = contention.slowdown_per_busy_worker([0], [0])
    assert 0 <= slowdown < 1
    assert set(psutil.Process().children(recursive=True)) <= before


def test_probes_that_work_half_as_fast_together_have_a_slowdown_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rates alone over rates together, less one."""
    monkeypatch.setattr(contention, "_rates", lambda probes: [100.0 / len(probes)] * len(probes))
    assert contention.slowdown_per_busy_worker([0], [0]) == 1.0
