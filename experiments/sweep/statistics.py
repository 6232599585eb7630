"""What replications say: means with confidence intervals, and differences and ratios of pairs.

Intervals are two-sided at 95 % by Student's t with n-1 degrees of freedom: mean ± t · sd / sqrt(n). Pure
arithmetic; knows no study.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy.special import stdtrit

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A mean over `num` values with its sample standard deviation and interval; None where num < 2."""

    num: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of independent values, of which there is at least one."""
    num, mean = len(values), statistics.fmean(values)
    if num < 2:
        return Estimate(num, mean, None, None, None)
    sd = statistics.stdev(values)
    half_width = float(stdtrit(num - 1, (1 + CONFIDENCE) / 2)) * sd / math.sqrt(num)
    return Estimate(num, mean, sd, mean - half_width, mean + half_width)


def paired_difference(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """The mean of value - baseline over (baseline, value) pairs.

    Pairs that share their random numbers vary together, so this interval is narrower than one made of two.
    """
    return estimate([value - baseline for baseline, value in pairs])


def paired_ratio(pairs: Sequence[tuple[float, float]]) -> Estimate | None:
    """The geometric mean of value / baseline over pairs, with the interval of the logarithms taken back.

    So the ratio of a to b is the inverse of that of b to a. `sd` is of the logarithms. None where a number
    is not above 0.
    """
    if not all(baseline > 0 and value > 0 for baseline, value in pairs):
        return None
    num, mean, sd, low, high = estimate([math.log(value / baseline) for baseline, value in pairs])
    if low is None or high is None:
        return Estimate(num, math.exp(mean), None, None, None)
    return Estimate(num, math.exp(mean), sd, math.exp(low), math.exp(high))
