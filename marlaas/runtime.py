"""The one loop that both worlds run.

    backend ──event──► Runtime.post ──► recorder.write(event)
                          │
                          ├──► scheduler.handle(event) ──► commands ──► recorder.write(each)
                          │
                          └──► backend.start(command, post) for each, in order

Events posted while another is being handled wait their turn, so a world may answer a command from
inside `start`. Owns the order of things; knows neither time nor any world.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from marlaas.commands import Command
from marlaas.events import Event

Emit = Callable[[Event], None]
Observer = Callable[[Event, tuple[Command, ...]], None]


class Decider(Protocol):
    """Who decides: the scheduler of a run, or what stands in its place."""

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Take in one fact and return the orders that follow from it."""


class Backend(Protocol):
    """A world: begins the work of a command and, later or at once, emits the event that ends it."""

    def start(self, command: Command, emit: Emit) -> None:
        """Begin `command`; never block."""


class Recorder(Protocol):
    """The record of a run; what is written must survive a crash before any of it is acted on."""

    def write(self, event: Event, commands: tuple[Command, ...]) -> None:
        """Append one event and the commands it led to."""


class Observed:
    """A recorder that shows each record to an observer once it is written."""

    def __init__(self, recorder: Recorder, observer: Observer) -> None:
        self._recorder = recorder
        self._observer = observer

    def write(self, event: Event, commands: tuple[Command, ...]) -> None:
        """Write a record, then show it."""
        self._recorder.write(event, commands)
        self._observer(event, commands)


class Runtime:
    """Feeds events to the scheduler one at a time and its commands to a world."""

    def __init__(self, scheduler: Decider, backend: Backend, recorder: Recorder) -> None:
        self.scheduler = scheduler
        self._backend = backend
        self._recorder = recorder
        self._inbox: deque[Event] = deque()
        self._draining = False
        self._emit: Emit = self.post

    def post(self, event: Event) -> None:
        """Take one event; returns when it and everything it caused at once has been handled."""
        inbox = self._inbox
        inbox.append(event)
        if self._draining:
            return
        self._draining = True
        try:
            while inbox:
                event = inbox.popleft()
                commands = self.scheduler.handle(event)
                self._recorder.write(event, commands)
                for command in commands:
                    self._backend.start(command, self._emit)
        finally:
            self._draining = False
