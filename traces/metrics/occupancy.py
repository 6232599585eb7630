"""What a device or place was doing over time, from spans in the order in which they end.

Small accumulators that hold one number or interval per change, never one per span: cover, flow and level.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from itertools import accumulate
from operator import mul, sub

NS = 1_000_000_000


class Cover:
    """The union of intervals, as disjoint intervals in order; they must come in the order of their ends."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Take in [start, end] in ns; an empty one adds nothing."""
        if end <= start:
            return
        starts, ends = self.starts, self.ends
        if ends and starts[-1] <= start <= ends[-1]:
            ends[-1] = end
            return
        while ends and start <= ends[-1]:
            ends.pop()
            start = min(start, starts.pop())
        starts.append(start)
        ends.append(end)

    def covered_ns(self, since: int, until: int) -> int:
        """The length of the union within [since, until]."""
        pairs = zip(self.starts, self.ends, strict=True)
        return sum(max(0, min(end, until) - max(start, since)) for start, end in pairs)


class Flow:
    """Tokens made over time, those of a span spread evenly over it, in windows of 1 s from `origin` (ns)."""

    def __init__(self, origin: int) -> None:
        self._origin = origin
        self._parts: list[float] = []
        self._slopes: list[float] = []

    def add(self, start: int, end: int, tokens: int) -> None:
        """Take in `tokens` made between `start` and `end` (ns, at or after the origin)."""
        first, last = (start - self._origin) / NS, (end - self._origin) / NS
        i, j = int(first), int(last)
        if j + 2 > len(self._parts):
            more = [0.0] * (j + 2 + len(self._parts))
            self._parts += more
            self._slopes += more
        if i == j:
            self._parts[i] += tokens
            return
        rate = tokens / (last - first)
        self._parts[i] += rate * (i + 1 - first)
        self._parts[j] += rate * (last - j)
        self._slopes[i + 1] += rate
        self._slopes[j] -= rate

    def peak_per_s(self, length_ns: int) -> float:
        """The highest rate in a window of a run of this length.

        The last window takes in what is left of a second, and is shorter than one only where the run is: so
        the mean rate of the run is never above the peak.
        """
        num = max(1, length_ns // NS)
        tokens = [a + b for a, b in zip(self._parts, accumulate(self._slopes), strict=True)]
        if not tokens or not length_ns:
            return 0.0
        rates = tokens[: num - 1]
        rates.append(sum(tokens[num - 1 :]) / (length_ns / NS - (num - 1)))
        return max(rates)


class Level:
    """A quantity that spans raise while they last."""

    def __init__(self) -> None:
        self._changes: defaultdict[int, int] = defaultdict(int)
        self._ordered: tuple[list[int], list[int]] | None = None

    def add(self, start: int, end: int, amount: int = 1) -> None:
        """Raise the level by `amount` from `start` to `end` (ns)."""
        self._ordered = None
        self._changes[start] += amount
        self._changes[end] -= amount

    def steps(self) -> list[tuple[int, int]]:
        """(time in ns, level from then on), one pair per change, in order."""
        changes = self._changes
        return [(at, level) for at, level in zip(*self._levels(), strict=True) if changes[at]]

    def peak(self) -> int:
        """The highest level."""
        return max(self._levels()[1], default=0)

    def sum_ns(self, since: int, until: int) -> int:
        """The integral of the level over [since, until]."""
        times, levels = self._levels()
        first, last = bisect_right(times, since), bisect_left(times, until)
        inner = times[first:last]
        held = [levels[first - 1] if first else 0, *levels[first:last]]
        return sum(map(mul, held, map(sub, [*inner, until], [since, *inner])))

    def _levels(self) -> tuple[list[int], list[int]]:
        """Times in order, and the level from each on; some may change nothing."""
        if self._ordered is None:
            times = sorted(self._changes)
            self._ordered = times, list(accumulate(map(self._changes.__getitem__, times)))
        return self._ordered
