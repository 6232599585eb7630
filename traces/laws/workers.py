"""What workers may hold at once: adapters in slots, jobs on lanes, contexts in the KV pool.

Read off the trace alone. Owns one replica's slots and one lane's job; knows no trajectory's path.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from marlaas.commands import CreateAdapter, Generate, Publish, Train
from marlaas.errors import LawBroken
from traces.laws.paths import Path

Adapter = tuple[str, int]


class ReplicaHold:
    """The adapters in a replica's slots and the turns that use them."""

    def __init__(self, name: str, num_slots: int, kv_tokens: int) -> None:
        self.name = name
        self._num_slots = num_slots
        self._kv_tokens = kv_tokens
        self._slots: dict[Adapter, Literal["loading", "resident", "unloading"]] = {}
        self._pins: Counter[Adapter] = Counter()
        self._instant = -1
        self._held = 0
        self._groups: set[tuple[Adapter, int]] = set()

    def law(self, holds: bool, what: str) -> None:
        """Raise `LawBroken` for this replica where something does not hold."""
        if not holds:
            raise LawBroken(f"{self.name}: {what}")

    def load(self, adapter: Adapter) -> None:
        """A slot is taken."""
        self.law(adapter not in self._slots, f"{adapter} is loaded twice")
        self._slots[adapter] = "loading"
        self.law(
            len(self._slots) <= self._num_slots, f"{len(self._slots)} adapters in {self._num_slots} slots"
        )

    def loaded(self, adapter: Adapter) -> None:
        """An adapter may be used."""
        self._slots[adapter] = "resident"

    def unload(self, adapter: Adapter) -> None:
        """An adapter is to leave its slot."""
        self.law(self._slots.get(adapter) == "resident", f"{adapter} is unloaded, but not resident")
        self.law(not self._pins[adapter], f"{adapter} is unloaded under {self._pins[adapter]} turns")
        self._slots[adapter] = "unloading"

    def free(self, adapter: Adapter) -> None:
        """A slot is free again."""
        self._slots.pop(adapter, None)

    def generate(self, command: Generate) -> None:
        """Turns begin."""
        adapter = (command.task, command.version)
        self.law(self._slots.get(adapter) == "resident", f"turns of {adapter}, which is not resident")
        self._pins[adapter] += len(command.trajectories)

    def turn_ended(self, command: Generate) -> None:
        """A turn is over, whatever came of it."""
        self._pins[command.task, command.version] -= 1

    def held_at_once(self, at: int, command: Generate, path: Path, group: int) -> None:
        """A turn of this path ended now: those that end at one instant held their contexts together.

        A group's first prompt counts once: its samples may share it.
        """
        if at != self._instant:
            self._instant, self._held = at, 0
            self._groups.clear()
        key = (command.task, command.version), group
        if key not in self._groups:
            self._groups.add(key)
            self._held += path.first_prompt - 1
        self._held += path.length - path.first_prompt
        self.law(self._held <= self._kv_tokens, f"{self._held} tokens held at once of {self._kv_tokens}")

    def lose(self) -> None:
        """All is gone."""
        self._slots.clear()
        self._pins.clear()


Job = CreateAdapter | Train | Publish


class LaneHold:
    """The one job that a lane does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.job: Job | None = None

    def begin(self, job: Job) -> None:
        """A job begins; there must be no other."""
        if self.job is not None:
            raise LawBroken(f"{self.name}: command {job.id} begins while {self.job.id} is under way")
        self.job = job

    def end(self) -> Job | None:
        """The job is over; returns it."""
        job, self.job = self.job, None
        return job
