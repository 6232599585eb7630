"""What arithmetic allows, whatever the scheduler does: bounds that a simulated gain cannot pass.

Symbols: R is the rollout and environment time of a task's step alone, T the time to train and publish it, N
the number of tasks. Pure functions of numbers; knows no run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Alone(NamedTuple):
    """A task that has the cluster to itself: seconds of its step's rollout (R) and of its training (T)."""

    rollout_s: float
    training_s: float

    @property
    def step_s(self) -> float:
        """R + T."""
        return self.rollout_s + self.training_s


def equal_gain_bound(num_tasks: int, ratio: float) -> float:
    """`min(N, 1 + R/T)`: the most that N equal tasks gain over one at a time, on one lane."""
    return min(float(num_tasks), 1.0 + ratio)


def mixed_gain_bound(tasks: Sequence[Alone]) -> float:
    """The same for unequal tasks with equally many steps: `Σ(R + T) / max(ΣT, max(R + T))`.

    One at a time they take Σ(R + T) a step. Together they take no less than the lane needs for everyone's
    training, nor than the slowest task alone.
    """
    lane_s = sum(task.training_s for task in tasks)
    slowest_s = max(task.step_s for task in tasks)
    return sum(task.step_s for task in tasks) / max(lane_s, slowest_s)


def mixed_gain_limit(tasks: Sequence[Alone]) -> str:
    """Which of the two limits of `mixed_gain_bound` holds: "lane" or "slowest task"."""
    lane_s = sum(task.training_s for task in tasks)
    return "lane" if lane_s >= max(task.step_s for task in tasks) else "slowest task"


def lane_pace(tasks: Sequence[Alone]) -> float:
    """Steps per hour that one lane can train when all tasks have equally many: `3600 N / ΣT`."""
    return 3600.0 * len(tasks) / sum(task.training_s for task in tasks)


def effective_gain_bound(effective: float) -> float:
    """How often an effective utilisation can be multiplied: it ends at 1."""
    return 1.0 / effective


def saving(gain: float) -> float:
    """The share of time that a gain saves: 5.7 times the pace is 82 % less time, 6.7 times is 85 %."""
    return 1.0 - 1.0 / gain


def gain_of_saving(share: float) -> float:
    """The gain that saves this share of the time."""
    return 1.0 / (1.0 - share)


SYNC_BOUND = 2.0
"""Equal work per task: without contention the makespan of `sync` is below twice that of `marlaas`."""
SYNC_BOUND_WITH_STRAGGLERS = 3.0
"""The same with contention and a straggler tail."""
