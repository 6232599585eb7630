"""The laws of a run, asked of recorded ones: as they are, cut short, and with facts that cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from timed_world import FAULTS, TimedWorld, small_experiment

from marlaas.commands import Command
from marlaas.errors import LawBroken
from marlaas.events import EnvironmentStepped, Event, TrainingFinished, TurnGenerated
from marlaas.systems import SYSTEMS
from traces.laws import check
from traces.reader import Trace
from traces.replay import replay
from traces.schema import World, make_header
from traces.writer import TraceWriter

Alter = Callable[[Event], Event]


class Tape:
    """A recorder that keeps records, some of them altered."""

    def __init__(self, alter: Alter = lambda event: event) -> None:
        self.records: list[tuple[Event, tuple[Command, ...]]] = []
        self._alter = alter

    def write(self, event: Event, commands: tuple[Command, ...]) -> None:
        """Keep a record, its event altered."""
        self.records.append((self._alter(event), commands))


def recorded(
    system: str = "marlaas", alter: Alter = lambda event: event, world: World = "sim", **kwargs: Any
) -> Trace:
    """A run of two tasks, some facts altered on their way to the record."""
    tape, of = Tape(alter), small_experiment(system)
    TimedWorld(of, tape, **kwargs).run()
    host = {"host": {"machine": "x"}, "created_at": "2026-01-01T00:00:00"} if world == "executor" else {}
    return Trace(header=make_header(of, world=world, **host), records=tape.records)


@pytest.mark.parametrize("faults", [{}, FAULTS], ids=["calm", "faults"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_recorded_run_keeps_the_laws(system: str, faults: dict[str, Any]) -> None:
    """All that was issued is trained in the end, with workers lost and deadlines passed too."""
    laws = check(recorded(system, **faults))
    assert (laws.num_issued, laws.num_trained, laws.num_dropped, laws.num_live) == (8, 8, 0, 0)


@pytest.mark.parametrize("faults", [{}, FAULTS], ids=["calm", "faults"])
def test_a_run_cut_short_keeps_the_laws_with_what_is_live(faults: dict[str, Any]) -> None:
    """After any record the ledger balances, and somewhere in between something is live."""
    whole = recorded(**faults)
    lives = []
    for length in range(0, len(whole.records), 5):
        laws = check(Trace(header=whole.header, records=whole.records[:length]))
        assert laws.num_issued == laws.num_trained + laws.num_dropped + laws.num_live
        lives.append(laws.num_live)
    assert lives[0] == 0 < max(lives)


def _more_trained(event: Event) -> Event:
    if isinstance(event, TrainingFinished):
        return replace(event, stats=replace(event.stats, num_tokens=event.stats.num_tokens + 1))
    return event


def _longer_context(event: Event) -> Event:
    if isinstance(event, TurnGenerated) and event.prompt_tokens > 10:
        return replace(event, prompt_tokens=event.prompt_tokens + 1)
    return event


def _too_long_an_answer(event: Event) -> Event:
    return replace(event, output_tokens=33) if isinstance(event, TurnGenerated) else event


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (_more_trained, "task t0, step 0: trained on .* tokens, not on"),
        (_longer_context, "goes on from 31 tokens, not from 30"),
        (_too_long_an_answer, "trajectory 0 sampled 33 tokens in a turn"),
    ],
)
def test_facts_that_replay_but_cannot_be_break_a_law(tmp_path: Path, alter: Alter, message: str) -> None:
    """The scheduler's commands are the recorded ones, and the replay says which law is broken and where."""
    trace = recorded(alter=alter)
    with pytest.raises(LawBroken, match=message):
        check(trace)
    with TraceWriter(tmp_path / "trace.jsonl", trace.header) as writer:
        for event, commands in trace.records:
            writer.write(event, commands)
    result = replay(tmp_path)
    assert result.difference is None
    assert not result.ok
    assert re.search(f"agree; broken law: line [0-9]+: .*{message}", str(result))


def test_a_real_world_is_not_asked_for_exact_tokens() -> None:
    """A template may add to a context; what is asked of a simulation only is let pass."""
    laws = check(recorded(alter=lambda event: _longer_context(_more_trained(event)), world="executor"))
    assert laws.num_trained == 8


def test_a_duplicate_answer_changes_nothing() -> None:
    """Every answer of the environment recorded twice: the second is late."""
    trace = recorded()
    doubled = []
    for event, commands in trace.records:
        doubled.append((event, commands))
        if isinstance(event, EnvironmentStepped):
            doubled.append((event, ()))
    laws = check(Trace(header=trace.header, records=doubled))
    assert laws == check(trace)
