"""One pass over a trace into everything the metrics are made of: the books of a run.

    records ──► Joiner ──► Run: task ledgers, device covers, token flows, KV level, counters

Computes no metric: their formulas are in `definitions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from marlaas.commands import (
    AnyCommand,
    CloseTask,
    CreateAdapter,
    DropTrajectories,
    Generate,
    LoadAdapter,
    Publish,
    StepEnvironment,
    Train,
)
from marlaas.events import TaskSubmitted
from marlaas.spec import Experiment
from traces.metrics.occupancy import Cover, Flow, Level
from traces.metrics.spans import Joiner, Mark, Span
from traces.metrics.steps import TaskLedger
from traces.reader import Trace, TraceReader
from traces.schema import Header, Record

Source = str | Path | Trace | TraceReader

_OF_A_TASK = frozenset(kind for kind in get_args(AnyCommand) if "task" in kind.__struct_fields__)


def open_source(source: Source) -> tuple[Header, Iterable[Record]]:
    """The header and records of a trace in memory, a trace file, a run folder or an open trace."""
    if isinstance(source, Trace):
        return source.header, source.records
    reader = source if isinstance(source, TraceReader) else TraceReader(source)
    return reader.header, reader


class Run:
    """The books of one run. The window of all rates is [`begin`, `end`], in ns.

    It begins at the first submission; it ends when the last submitted task is closed, or, where a trace
    stops earlier, with its last event. `also` is shown every span, as it ends.
    """

    def __init__(self, source: Source, also: Callable[[Span], None] | None = None) -> None:
        header, records = open_source(source)
        self.header = header
        self.experiment: Experiment = header.experiment
        self.tasks: dict[str, TaskLedger] = {}
        self.outcomes: dict[str, str] = {}
        self.begin = self.end = 0
        self.rollout_covers = {name: Cover() for name in self.experiment.replica_names}
        self.lane_covers = {name: Cover() for name in self.experiment.lane_names}
        self.flows: dict[str, Flow] = {}
        self.kv = {name: Level() for name in self.experiment.replica_names}
        self.turns = Level()
        self.num_tokens = 0
        self.load_times_ns: list[int] = []
        self.updates: list[tuple[int, int]] = []  # (tokens, ns) of each finished Train
        self._specs = {spec.name: spec for spec in self.experiment.tasks}
        self._also = also
        self._takes: Mapping[type, Callable[[Span, Any], None]] = {
            **dict.fromkeys(_OF_A_TASK, self._add_to_task),
            Generate: self._add_turn,
            StepEnvironment: self._add_environment_step,
            LoadAdapter: self._add_load,
            CreateAdapter: self._add_job,
            Train: self._add_job,
            Publish: self._add_job,
        }
        self._finish(Joiner(self._add, self._mark).feed(records))

    def _add(self, span: Span) -> None:
        take = self._takes.get(span.command.__class__)
        if take is not None:
            take(span, span.command)
        if self._also is not None:
            self._also(span)

    def _add_turn(self, span: Span, command: Generate) -> None:
        start, end, replica = span.start, span.end, command.replica
        self.rollout_covers[replica].add(start, end)
        self.turns.add(start, end)
        if span.ending == "ok":
            turn = span.answer
            self.num_tokens += turn.output_tokens
            self.flows[replica].add(start, end, turn.output_tokens)
            self.kv[replica].add(start, end, turn.prompt_tokens + turn.output_tokens)
        self.tasks[command.task].add_turn(span, command)

    def _add_environment_step(self, span: Span, command: StepEnvironment) -> None:
        self.tasks[command.task].add_environment_step(span, command)

    def _add_to_task(self, span: Span, command: Any) -> None:
        self.tasks[command.task].add(span)

    def _add_load(self, span: Span, command: LoadAdapter) -> None:
        self._add_to_task(span, command)
        if span.ending == "ok":
            self.load_times_ns.append(span.end - span.start)

    def _add_job(self, span: Span, command: CreateAdapter | Train | Publish) -> None:
        self._add_to_task(span, command)
        self.lane_covers[command.lane].add(span.start, span.end)
        if isinstance(command, Train) and span.ending == "ok":
            self.updates.append((span.answer.stats.num_tokens, span.end - span.start))

    def _mark(self, at: int, fact: Mark) -> None:
        if isinstance(fact, TaskSubmitted):
            if not self.tasks:
                self.begin = at
                self.flows = {name: Flow(at) for name in self.experiment.replica_names}
            if fact.task not in self.tasks:
                self.tasks[fact.task] = TaskLedger(self._specs[fact.task], at)
        elif isinstance(fact, DropTrajectories):
            self.tasks[fact.task].drop(at, fact)
        elif isinstance(fact, CloseTask):
            self.outcomes[fact.task] = fact.outcome
            if fact.task in self.tasks:
                self.tasks[fact.task].close(at)

    def _finish(self, last: int) -> None:
        still_open = [task for task in self.tasks.values() if task.closed is None]
        for task in still_open:
            task.close(last)
        self.end = max((task.closed or 0 for task in self.tasks.values()), default=self.begin)

    @property
    def length_ns(self) -> int:
        """The makespan."""
        return self.end - self.begin

    def waits(self) -> Level:
        """Batches in the buffer over time."""
        level = Level()
        for task in self.tasks.values():
            for since, until in task.waits:
                level.add(since, until)
        return level
