"""One task's steps from the spans of its work: where the time of each went, and what came out.

A step begins at submission (step 0) or at the commit of its version, and ends at the next commit. Until the
batch is complete each trajectory is in one state at any time; after that the batch is. So with n trajectories

    cause = sum over trajectories of the time in that state / n,    latency = sum of the causes,

exactly, in whole nanoseconds: the rounding of the division goes to the largest remainders. The states are

    queue          waits for version 0, the step's start, a slot, a place on a replica or in the environment,
                   and for a pause to end
    adapter_load   the part of a wait before a turn in which its (replica, version) was being loaded
    generate       a turn is in flight, whatever comes of it
    environment    an environment step is in flight, until answered or tried again
    straggler_wait the trajectory has ended, others of its batch have not
    buffer_wait    the batch is complete and no lane works on it
    train, publish the lane works on it, failed tries included

Knows no other task and no device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from marlaas.commands import DropTrajectories, Generate, LoadAdapter, Publish, StepEnvironment, Train
from marlaas.events import TrainingStats
from marlaas.spec import TaskSpec
from traces.metrics.spans import Span

CAUSES = (
    "queue",
    "adapter_load",
    "generate",
    "environment",
    "straggler_wait",
    "buffer_wait",
    "train",
    "publish",
)
_QUEUE, _LOAD, _GENERATE, _ENVIRONMENT, _STRAGGLER, _BUFFER, _TRAIN, _PUBLISH = range(len(CAUSES))


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """A committed step. `causes_ns` is in the order of `CAUSES` and sums to `end_ns - begin_ns`.

    `generate_ns` is when the first turn began, `complete_ns` when the last trajectory ended; `tokens` were
    sampled in it, dropped trajectories included; `reward` is the mean over the trained trajectories.
    """

    task: str
    step: int
    begin_ns: int
    generate_ns: int
    complete_ns: int
    end_ns: int
    causes_ns: tuple[int, ...]
    tokens: int
    num_trained: int
    reward: float | None
    stats: TrainingStats

    @property
    def latency_ns(self) -> int:
        """From the step's begin to its commit."""
        return self.end_ns - self.begin_ns


class TaskLedger:
    """The books of one task: `rows` are its committed steps, `waits` when its batches lay in the buffer."""

    def __init__(self, spec: TaskSpec, submitted: int) -> None:
        self.spec = spec
        self.submitted = submitted
        self.closed: int | None = None
        self.rows: list[StepRow] = []
        self.waits: list[tuple[int, int]] = []
        self.dropped: dict[str, int] = {}
        self.num_tokens = 0
        self._begin_step(submitted)

    def _begin_step(self, at: int) -> None:
        num = self.spec.num_trajectories
        self._begin = at
        self._first_turn: int | None = None
        self._until = [at] * num  # each trajectory is accounted for until here
        self._ended = [False] * num
        self._num_live = num
        self._times = [0] * len(CAUSES)
        self._rewards: dict[int, float] = {}
        self._tokens_before = self.num_tokens
        self._loads: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._overlap = (0, 0, 0)
        self._complete: int | None = None
        self._since = 0  # the complete batch is accounted for until here
        self._trained: Span | None = None

    # --- spans ---

    def add(self, span: Span) -> None:
        """Take in a span of this task's work, in the order in which spans end."""
        command = span.command
        take = _TAKES.get(command.__class__)
        if take is not None:
            take(self, span, command)

    def _add_load(self, span: Span, command: LoadAdapter) -> None:
        self._loads.setdefault((command.replica, command.version), []).append((span.start, span.end))

    def add_turn(self, span: Span, command: Generate) -> None:
        """Take in a turn; what `add` does with one."""
        if span.ending == "ok":
            self.num_tokens += span.answer.output_tokens
        if command.step != len(self.rows) or self._complete is not None:
            return
        if self._first_turn is None or span.start < self._first_turn:
            self._first_turn = span.start
        i = span.trajectory
        until = self._until[i]
        if span.start > until:
            loading = self._loading(command, until, span.start)
            self._times[_QUEUE] += span.start - until - loading
            self._times[_LOAD] += loading
            until = span.start
        self._times[_GENERATE] += span.end - until
        self._go_on(i, span.end)

    def add_environment_step(self, span: Span, command: StepEnvironment) -> None:
        """Take in an environment step; what `add` does with one."""
        if command.step != len(self.rows) or self._complete is not None:
            return
        i = span.trajectory
        until = self._until[i]
        if span.start > until:
            self._times[_QUEUE] += span.start - until
            until = span.start
        self._times[_ENVIRONMENT] += span.end - until
        self._go_on(i, span.end)
        if span.ending == "ok":
            if span.answer.reward is not None:
                self._rewards[i] = span.answer.reward
            if span.answer.done or command.turn + 1 >= self.spec.max_turns:
                self._end(i)

    def _go_on(self, i: int, at: int) -> None:
        self._until[i] = at
        if self._ended[i]:  # a late answer was taken for its end
            self._ended[i] = False
            self._num_live += 1

    def _end(self, i: int) -> None:
        if not self._ended[i]:
            self._ended[i] = True
            self._num_live -= 1

    def _loading(self, command: Generate, since: int, until: int) -> int:
        """How long (ns) the command's adapter was being loaded on its replica within [since, until]."""
        loads = self._loads.get((command.replica, command.version))
        if not loads or loads[-1][1] <= since:  # loads of one adapter end in order
            return 0
        number, asked, overlap = self._overlap
        if number == command.id and asked == since:
            return overlap
        overlap = sum(max(0, min(end, until) - max(start, since)) for start, end in loads)
        self._overlap = command.id, since, overlap
        return overlap

    def _add_training(self, span: Span, command: Train) -> None:
        if command.step == len(self.rows):
            self._complete_batch(span.start)
            self._work(span, _TRAIN)
            if span.ending == "ok":
                self._trained = span

    def _add_publishing(self, span: Span, command: Publish) -> None:
        if command.version != len(self.rows) + 1:
            return
        self._work(span, _PUBLISH)
        if span.ending == "ok" and self._trained is not None:
            self._commit(span.end, self._trained)

    def _complete_batch(self, at: int) -> None:
        """The batch goes to a lane: whoever has not been seen to end has ended when the last one did."""
        if self._complete is not None:
            return
        num = len(self._until)
        self._complete = self._since = min(at, max(self._until))
        for i in range(num):
            waited = self._complete - self._until[i]
            self._times[_STRAGGLER if self._ended[i] else _QUEUE] += waited

    def _work(self, span: Span, cause: int) -> None:
        num = len(self._until)
        if span.start > self._since:
            self._times[_BUFFER] += num * (span.start - self._since)
            self.waits.append((self._since, span.start))
            self._since = span.start
        self._times[cause] += num * (span.end - self._since)
        self._since = span.end

    # --- marks ---

    def drop(self, at: int, order: DropTrajectories) -> None:
        """Trajectories were given up; one that was waiting waited until now."""
        self.dropped[order.reason] = self.dropped.get(order.reason, 0) + len(order.trajectories)
        if order.step != len(self.rows) or self._complete is not None:
            return
        for i in order.trajectories:
            if not self._ended[i]:
                self._times[_QUEUE] += at - self._until[i]
                self._until[i] = at
                self._end(i)

    def close(self, at: int) -> None:
        """The task ended, or the trace did: a batch in the buffer stays there no longer."""
        self.closed = at
        if self._complete is not None:
            waiting_since = self._since
        elif self._num_live == 0:
            waiting_since = max(self._until)
        else:
            return
        if waiting_since < at:
            self.waits.append((waiting_since, at))

    # --- the end of a step ---

    def _commit(self, at: int, trained: Span) -> None:
        assert self._complete is not None
        rewards = [self._rewards[i] for i in trained.command.trajectories if i in self._rewards]
        row = StepRow(
            task=self.spec.name,
            step=len(self.rows),
            begin_ns=self._begin,
            generate_ns=self._complete if self._first_turn is None else self._first_turn,
            complete_ns=self._complete,
            end_ns=at,
            causes_ns=shares(self._times, len(self._until)),
            tokens=self.num_tokens - self._tokens_before,
            num_trained=len(trained.command.trajectories),
            reward=sum(rewards) / len(rewards) if rewards else None,
            stats=trained.answer.stats,
        )
        assert sum(row.causes_ns) == row.latency_ns
        self.rows.append(row)
        self._begin_step(at)


_TAKES: Mapping[type, Callable[[TaskLedger, Span, Any], None]] = {
    Generate: TaskLedger.add_turn,
    StepEnvironment: TaskLedger.add_environment_step,
    LoadAdapter: TaskLedger._add_load,
    Train: TaskLedger._add_training,
    Publish: TaskLedger._add_publishing,
}


def shares(totals: Sequence[int], num: int) -> tuple[int, ...]:
    """`totals / num` in whole numbers whose sum is `sum(totals) / num`, rounded down.

    What rounding down leaves goes one by one to the largest remainders, the earliest first.
    """
    parts = [total // num for total in totals]
    left = sum(totals) // num - sum(parts)
    by_remainder = sorted(range(len(totals)), key=lambda i: -(totals[i] % num))
    for i in by_remainder[:left]:
        parts[i] += 1
    return tuple(parts)
