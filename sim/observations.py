"""What a run's trace shows of costs and workloads: durations, engine windows, lengths, latencies.

One pass over the records. Work that failed, was aborted or was lost with its worker is left out of durations,
and so is what a retry made twice. Owns the gathering; fits nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from marlaas.commands import (
    CreateAdapter,
    Generate,
    LoadAdapter,
    Publish,
    StartWorker,
    StepEnvironment,
    Train,
    UnloadAdapter,
)
from marlaas.events import EngineMeasured, EnvironmentStepped, TurnGenerated, WorkerLost
from marlaas.spec import ReplicasSpec
from traces.metrics.spans import Joiner, Mark, Span
from traces.reader import TraceReader
from traces.schema import SLOWDOWN, Record

NS = 1e-9

Interval = tuple[int, int]


class Chores(msgspec.Struct):
    """Adapter loads and unloads that a replica did in one go, answered at one instant."""

    seconds: float
    num_loads: int
    num_unloads: int


class Training(msgspec.Struct):
    """One training step: its duration, the tokens of its trajectories, and the sum of squared lengths."""

    seconds: float
    num_tokens: int
    squares: int


class TaskLengths:
    """What the trajectories of a task were like; an entry per prompt, turn, observation, trajectory, step."""

    def __init__(self) -> None:
        self.prompt_tokens: list[float] = []
        self.output_tokens: list[float] = []
        self.observation_tokens: list[float] = []
        self.turns: list[float] = []
        self.environment_s: list[float] = []


class Observations:
    """All that was seen, of one run or several; durations in seconds."""

    def __init__(self) -> None:
        self.replica_starts: list[float] = []
        self.lane_starts: list[float] = []
        self.creations: list[float] = []
        self.publishes: list[float] = []
        self.chores: list[Chores] = []
        self.trainings: list[Training] = []
        self.windows: list[EngineMeasured] = []
        self.overheads: list[float] = []
        self.rollout_seconds = 0.0
        self.overlap_seconds = 0.0  # of them, while a lane worked too
        self.is_one_machine = True  # every worker of every run computes on the cores of one machine
        self.pools: list[ReplicasSpec] = []  # of each run
        self.slowdowns: list[float] = []  # per other busy worker, as probed before a run
        self.tasks: dict[str, TaskLengths] = {}


def observe(paths: Iterable[Path]) -> Observations:
    """Gather from the traces of these runs; raises `InputError` or `TraceError` for what is no trace."""
    seen = Observations()
    for path in paths:
        _Observer(seen, TraceReader(path)).run()
    return seen


class _Episode(msgspec.Struct):
    """A replica's time from its first running turn until none runs; `busy_s` is what its engine counted."""

    start: int
    end: int = 0
    num_open: int = 0
    busy_s: float = 0.0
    is_clean: bool = True


class _Observer:
    """One trace's contribution."""

    def __init__(self, seen: Observations, reader: TraceReader) -> None:
        self._seen = seen
        self._reader = reader
        self._samples = {task.name: task.samples for task in reader.header.experiment.tasks}
        self._replicas = frozenset(reader.header.experiment.replica_names)
        self._lengths: dict[tuple[str, int, int], int] = {}
        self._chores: dict[str, list[Span]] = defaultdict(list)
        self._episodes: dict[str, _Episode] = {}
        self._rollouts: list[Interval] = []
        self._jobs: list[Interval] = []

    def run(self) -> None:
        """Read the trace to its end."""
        Joiner(self._add, self._mark).feed(self._watched(self._reader))
        for replica in list(self._chores):
            self._end_chores(replica)
        for replica in list(self._episodes):
            self._end_episode(replica)
        probed = (self._reader.header.host or {}).get(SLOWDOWN)
        if isinstance(probed, int | float):
            self._seen.slowdowns.append(float(probed))
        cluster = self._reader.header.experiment.cluster
        self._seen.pools.append(cluster.replicas)
        self._seen.is_one_machine &= {cluster.replicas.device, cluster.lanes.device} == {"cpu"}
        self._seen.rollout_seconds += sum(end - start for start, end in self._rollouts) * NS
        self._seen.overlap_seconds += _overlap(self._rollouts, self._jobs) * NS

    def _watched(self, records: Iterable[Record]) -> Iterator[Record]:
        for event, commands in records:
            if isinstance(event, EngineMeasured):
                self._seen.windows.append(event)
                if event.worker in self._episodes:
                    self._episodes[event.worker].busy_s += event.busy_ns * NS
            yield event, commands
            for command in commands:
                if isinstance(command, Generate):
                    self._begin_turns(command, event.at)
                elif isinstance(command, LoadAdapter | UnloadAdapter):
                    self._disturb(command.replica)

    # --- spans -------------------------------------------------------------------------------------

    def _add(self, span: Span) -> None:
        command = span.command
        if isinstance(command, Generate):
            self._end_turn(span)
        if span.ending != "ok":
            return
        seconds = (span.end - span.start) * NS
        if isinstance(command, CreateAdapter | Train | Publish):
            self._jobs.append((span.start, span.end))
        if isinstance(command, StepEnvironment):
            self._add_environment_step(command, span.answer, seconds)
        elif isinstance(command, Train):
            self._add_training(command, span.answer.stats.num_tokens, seconds)
        elif isinstance(command, LoadAdapter | UnloadAdapter):
            self._add_chore(span)
        elif isinstance(command, StartWorker):
            is_replica = command.worker in self._replicas
            (self._seen.replica_starts if is_replica else self._seen.lane_starts).append(seconds)
        elif isinstance(command, CreateAdapter):
            self._seen.creations.append(seconds)
        elif isinstance(command, Publish):
            self._seen.publishes.append(seconds)

    def _mark(self, _: int, fact: Mark) -> None:
        if isinstance(fact, WorkerLost):
            self._episodes.pop(fact.worker, None)

    def _of(self, task: str) -> TaskLengths:
        return self._seen.tasks.setdefault(task, TaskLengths())

    def _add_environment_step(
        self, command: StepEnvironment, answer: EnvironmentStepped, seconds: float
    ) -> None:
        lengths = self._of(command.task)
        lengths.environment_s.append(seconds)
        if answer.done:
            lengths.turns.append(command.turn + 1)
        else:
            lengths.observation_tokens.append(answer.observation_tokens)

    def _add_training(self, command: Train, num_tokens: int, seconds: float) -> None:
        lengths = [self._lengths.get((command.task, command.step, i), 0) for i in command.trajectories]
        squares = sum(length * length for length in lengths)
        self._seen.trainings.append(Training(seconds, num_tokens, squares))

    # --- turns and episodes --------------------------------------------------------------------------

    def _begin_turns(self, command: Generate, at: int) -> None:
        episode = self._episodes.get(command.replica)
        if episode is not None and not episode.num_open:
            self._end_episode(command.replica)
            episode = None
        if episode is None:
            episode = self._episodes[command.replica] = _Episode(start=at)
        episode.num_open += len(command.trajectories)

    def _disturb(self, replica: str) -> None:
        """Note that turns under way share their time with something else."""
        episode = self._episodes.get(replica)
        if episode is not None and episode.num_open:
            episode.is_clean = False

    def _end_turn(self, span: Span) -> None:
        command: Generate = span.command
        episode = self._episodes.get(command.replica)
        if episode is not None:
            episode.num_open -= 1
            episode.end = span.end
            episode.is_clean = episode.is_clean and span.ending == "ok"
        if span.ending == "ok":
            self._add_turn(command, span.trajectory, span.answer)

    def _add_turn(self, command: Generate, trajectory: int, turn: TurnGenerated) -> None:
        lengths = self._of(command.task)
        lengths.output_tokens.append(turn.output_tokens)
        if command.turn == 0 and trajectory % self._samples[command.task] == 0:
            lengths.prompt_tokens.append(turn.prompt_tokens)
        self._lengths[command.task, command.step, trajectory] = turn.prompt_tokens + turn.output_tokens

    def _end_episode(self, replica: str) -> None:
        """What passed beside the engine's own work: orders and answers on their way."""
        episode = self._episodes.pop(replica)
        self._rollouts.append((episode.start, max(episode.start, episode.end)))
        if episode.is_clean and not episode.num_open and episode.busy_s > 0:
            seconds = (episode.end - episode.start) * NS
            self._seen.overheads.append(max(0.0, seconds - episode.busy_s))

    # --- chores ----------------------------------------------------------------------------------------

    def _add_chore(self, span: Span) -> None:
        """Gather chores answered together; those asked for while turns ran also waited for an iteration."""
        replica = span.command.replica
        episode = self._episodes.get(replica)
        if episode is not None and episode.num_open:
            return
        before = self._chores[replica]
        if before and before[0].end != span.end and span.start >= before[-1].end:
            self._end_chores(replica)
        self._chores[replica].append(span)

    def _end_chores(self, replica: str) -> None:
        spans = self._chores.pop(replica)
        num_loads = sum(isinstance(span.command, LoadAdapter) for span in spans)
        start, end = min(span.start for span in spans), max(span.end for span in spans)
        self._seen.chores.append(Chores((end - start) * NS, num_loads, len(spans) - num_loads))


def _overlap(some: list[Interval], others: list[Interval]) -> int:
    """How long, in all, intervals of one list meet intervals of the other."""
    total = 0
    others = sorted(others)
    first = 0
    for start, end in sorted(some):
        while first < len(others) and others[first][1] <= start:
            first += 1
        for other_start, other_end in others[first:]:
            if other_start >= end:
                break
            total += max(0, min(end, other_end) - max(start, other_start))
    return total
