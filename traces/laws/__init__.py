"""The laws of a run: what holds in every one, checked from its trace.

    record ──► scheduler (fresh) ──► its counts ─────────────────────┐
           └─► paths, slots, lanes, stays, read off the record ──► equal, or `LawBroken`

* Conservation: issued = trained + dropped + live; every trajectory is trained or dropped once, and each
  trained one was made turn by turn by the version it trains; a step trains on what was sampled, to the token.
* Whatever is begun ends, once and before its deadline, or is live at the end and not past it.
* Adapters ≤ slots, and resident while in use; a lane does one job; steps ≤ an environment's concurrency;
  contexts that end together fit the KV pool.
* A system is what it says: one task in flight, rounds that do not leak, whose batch is trained next.
* Little's law at every replica, environment, lane and the buffer, exactly: L from the scheduler's counts, λ·W
  from the stays seen in the trace.
* No timer is early.

What needs a simulated world (exact tokens, timers and deadlines to the nanosecond) is not asked of a real
one. Owns the driving of the books; knows neither world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from marlaas.commands import Command
from marlaas.events import Event
from marlaas.scheduler import Scheduler
from marlaas.spec import Experiment
from marlaas.state import State
from traces.laws.books import Books
from traces.laws.paths import totals
from traces.laws.stations import Little
from traces.metrics.run import Source, open_source


class Laws(msgspec.Struct, frozen=True, kw_only=True):
    """What was found to hold: the ledger over all tasks and Little's law by station."""

    num_issued: int
    num_trained: int
    num_dropped: int
    num_live: int
    stations: dict[str, Little]

    def __str__(self) -> str:
        ledger = f"{self.num_issued} issued = {self.num_trained} trained + {self.num_dropped} dropped"
        return f"{ledger} + {self.num_live} live; L = λ·W at {len(self.stations)} stations"


class LawBook:
    """Takes in a run record by record, with the scheduler's state after each; raises `LawBroken` at once."""

    def __init__(self, experiment: Experiment, *, is_simulated: bool) -> None:
        self._books = Books(experiment, is_simulated=is_simulated)
        self._take: Mapping[type, Callable[[Any], None]] = self._books.table()
        self._state: State | None = None

    def take(self, event: Event, commands: Iterable[Command], state: State) -> None:
        """Take in one record; `state` is the scheduler's after it."""
        books, find = self._books, self._take.get
        books.now = event.at
        self._state = state
        take = find(type(event))
        if take is not None:
            take(event)
        for command in commands:
            take = find(type(command))
            if take is not None:
                take(command)
        books.settle(state)

    def close(self) -> Laws:
        """The run, or its trace, has ended."""
        stations = {} if self._state is None else self._books.close(self._state)
        issued, trained, dropped, live = totals(self._books.tasks.values())
        return Laws(
            num_issued=issued, num_trained=trained, num_dropped=dropped, num_live=live, stations=stations
        )


def check(source: Source) -> Laws:
    """Check every law on a trace in memory, a trace file or a run folder.

    The scheduler's counts come from replaying the events; whether its commands are the recorded ones is
    `replay`'s question. Raises `LawBroken`, and what the reader raises.
    """
    header, records = open_source(source)
    scheduler = Scheduler(header.experiment)
    book = LawBook(header.experiment, is_simulated=header.world == "sim")
    for event, commands in records:
        scheduler.handle(event)
        book.take(event, commands, scheduler.state)
    return book.close()
