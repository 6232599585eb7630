"""Little's law at one place of a run: what the scheduler counts there against who was seen to be there.

The mean number is the scheduler's own: after every record that touches the place its count is read, and the
area under that curve is kept. Times of stay are the trace's: from the order that begins a stay to the fact
that ends it, by name. Over a whole run both are the same number of nanoseconds, or somebody was counted
twice, left unseen or was never there. Owns the two sums; knows no records.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import msgspec

from marlaas.errors import LawBroken
from marlaas.state import State

NS = 1_000_000_000


class Little(msgspec.Struct, frozen=True, kw_only=True):
    """A station over a run of `length_ns`: `area_ns` = L·T = λ·W·T, from `num_visits` stays."""

    num_visits: int
    area_ns: int
    length_ns: int

    @property
    def mean_number(self) -> float:
        """L: how many are there on average over the run."""
        return self.area_ns / self.length_ns if self.length_ns else 0.0

    @property
    def rate_per_s(self) -> float:
        """λ: how many come per second."""
        return self.num_visits * NS / self.length_ns if self.length_ns else 0.0

    @property
    def mean_stay_s(self) -> float:
        """W: how long one stays on average."""
        return self.area_ns / self.num_visits / NS if self.num_visits else 0.0


class Station:
    """A place where turns, steps, batches or jobs stay; `count` reads how many the scheduler holds there."""

    def __init__(self, name: str, count: Callable[[State], int]) -> None:
        self.name = name
        self.is_comparable = True  # False once the scheduler may keep names of those that left
        self._count = count
        self._level = 0
        self._since = 0
        self._area = 0
        self._here: dict[Hashable, int] = {}
        self._stays = 0
        self._num_visits = 0

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._here)

    def __contains__(self, who: Hashable) -> bool:
        return who in self._here

    def __len__(self) -> int:
        return len(self._here)

    def enter(self, who: Hashable, at: int) -> None:
        """Somebody comes."""
        if who in self._here:
            raise LawBroken(f"{self.name}: {who} comes at {at} ns, but is here already")
        self._here[who] = at
        self._num_visits += 1

    def leave(self, who: Hashable, at: int) -> None:
        """Somebody goes."""
        if who not in self._here:
            raise LawBroken(f"{self.name}: {who} leaves at {at} ns, but is not here")
        self._stays += at - self._here.pop(who)

    def sample(self, at: int, state: State) -> None:
        """Read the scheduler's count, which holds from `at` on."""
        self._area += self._level * (at - self._since)
        self._since = at
        self._level = self._count(state)

    def close(self, at: int, state: State) -> Little:
        """The end of the run: both sums must agree. Raises `LawBroken`."""
        self.sample(at, state)
        stays = self._stays + sum(at - since for since in self._here.values())
        if self.is_comparable and (stays != self._area or self._level != len(self._here)):
            raise LawBroken(
                f"{self.name}: Little's law: the scheduler's counts sum to {self._area} ns and end at"
                f" {self._level}, the {self._num_visits} stays to {stays} ns and end at {len(self._here)}"
            )
        return Little(num_visits=self._num_visits, area_ns=stays, length_ns=at)


# --- what the scheduler counts ------------------------------------------------------------------------------


def turns_on(name: str) -> Callable[[State], int]:
    """Turns in flight on a replica, by the pins of its slots."""
    return lambda state: sum(slot.pins for slot in state.replicas[name].slots.values())


def jobs_on(name: str) -> Callable[[State], int]:
    """Jobs on a lane."""
    return lambda state: int(state.lanes[name].job != "idle")


def steps_in(name: str) -> Callable[[State], int]:
    """Steps in an environment."""
    return lambda state: state.environments[name].num_stepping


def queued_for(name: str) -> Callable[[State], int]:
    """Turns that wait for a place in an environment."""
    return lambda state: len(state.environments[name].queue)
