"""What every test may count on."""

import os
import signal
from collections.abc import Iterator

import pytest

# Tests are of the sources, and replace parts of them; `test_compiled` compares machine code with those.
os.environ["MARLAAS_PUREPYTHON"] = "1"

# Run in the background of a shell the tests ignore SIGINT, and would hand that down to what they interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def lawful_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Every run that a test simulates keeps the laws of `traces/laws`, after every event and at its end.

    Yields their law books; a test that breaks the law on purpose clears them.
    """
    import sim.run
    from marlaas.commands import Command
    from marlaas.events import Event
    from marlaas.scheduler import Scheduler
    from marlaas.spec import Experiment
    from traces.laws import LawBook

    books: list[LawBook] = []

    class LawfulScheduler(Scheduler):
        """The real one, watched."""

        def __init__(self, experiment: Experiment) -> None:
            super().__init__(experiment)
            self._book = LawBook(experiment, is_simulated=True)

        def handle(self, event: Event) -> tuple[Command, ...]:
            commands = super().handle(event)
            if self._book not in books[-1:]:
                books.append(self._book)
            self._book.take(event, commands, self.state)
            return commands

    monkeypatch.setattr(sim.run, "Scheduler", LawfulScheduler)
    yield books
    for book in books:
        book.close()
