"""A replica's continuous batching, in closed form between changes of its batch.

    submit ──► waiting (FIFO) ──► prefill ──► decoding set ──► ended
                   ▲                               │
                   └── preempted (youngest first) ◄┘  when the next iteration's KV does not fit

Work proceeds in steps, as in the embedded engine: waiting sequences that fit are prefilled together, which
samples the first token of each, then everyone decodes one iteration. Orders take effect between steps. There,
in order: sequences that ended leave, aborted ones leave, chores (adapter loads and the like) run one by one,
the next step begins. Steps without a prefill are alike until the batch changes, so a whole run of them is one
pass here.

Waiting is strictly first come, first served, and fewer than `max_num_seqs` must run. What fits is a rule:
`reserve` lets a sequence in when all could grow to their limits within the KV pool, and so never preempts;
`preempt` lets it in when its context and one further token for each fit now, and when the pool is full the
youngest gives way, keeps its place and recomputes its context. So whoever runs arrived before whoever
waits, and the oldest always goes on.

Owns the order of passes and their exact time in femtoseconds. Knows no clock, commands or events. How
sequences are prefilled is `_prefill` alone. `stepwise` is its naive twin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Literal

import msgspec

from marlaas.errors import InputError
from sim.costs import FS_PER_NS, IterationCosts, iterations_until, run_fs
from sim.sequences import Adapter, DecodingSet, Sequence

NEVER = 1 << 200  # femtoseconds


class EngineRules(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine admits: its KV pool, its seats, and the most context tokens of one prefill pass.

    A prefill pass takes at least one sequence, however long; None means that it has no bound. With
    `shares_prompts`, a context that several sequences of a pass have in common fills that bound once; its
    cost is per token of context served all the same, as the embedded engine counts it.
    """

    max_num_seqs: int
    kv_tokens: int
    kv_rule: Literal["reserve", "preempt"] = "preempt"
    max_prefill_tokens: int | None = None
    shares_prompts: bool = False


class Chore:
    """Work that stops the batch for a fixed time, such as loading an adapter; its owner calls `done`."""

    __slots__ = ("done", "duration_fs")

    def __init__(self, duration_ns: int, done: Callable[[], None]) -> None:
        self.duration_fs = duration_ns * FS_PER_NS
        self.done = done


class Counters(msgspec.Struct, kw_only=True):
    """Totals since the engine began, in the terms of the `EngineMeasured` event."""

    num_iterations: int = 0
    busy_fs: int = 0
    sequences_sum: int = 0
    kv_tokens_sum: int = 0
    adapters_sum: int = 0
    num_prefills: int = 0
    prefill_tokens: int = 0
    prefill_fs: int = 0
    num_preemptions: int = 0


class Engine:
    """One replica's batch, driven from outside: call `advance` at `wake_ns` or later, and before any order.

    `wake_ns` is a time, in whole nanoseconds rounded up, before which nothing ends; None when there is
    nothing to do. With `counts` off, only preemptions are counted.
    """

    def __init__(self, costs: IterationCosts, rules: EngineRules, *, counts: bool = True) -> None:
        self.counters = Counters()
        self.wake_ns: int | None = None
        self._costs = costs
        self._rules = rules
        self._counts = counts
        self._decoding = DecodingSet()
        self._waiting: deque[Sequence] = deque()
        self._aborting: list[Sequence] = []
        self._chores: deque[Chore] = deque()
        self._num_submitted = 0
        # The present pass: a chore, or steps; idle when its end is NEVER.
        self._is_chore = False
        self._start_fs = 0
        self._end_fs = NEVER
        # Of the present steps: a prefill before them and who ended with it; how many, how long the first
        # iteration takes and how much longer each next one.
        self._prefill_fs = 0
        self._prefill_tokens = 0
        self._ended_early: list[Sequence] = []
        self._planned = 0
        self._first_fs = 0
        self._growth_fs = 0

    # --- what the world asks ---------------------------------------------------------------------

    def is_using(self, adapter: Adapter) -> bool:
        """Whether any sequence here, waiting or running, uses this adapter."""
        if adapter in self._decoding.adapters:
            return True
        return any(sequence.adapter == adapter for sequence in (*self._ended_early, *self._waiting))

    def submit(self, now_ns: int, sequences: Iterable[Sequence]) -> None:
        """Queue sequences; one that could never fit the KV pool is an `InputError`."""
        waiting, kv_tokens, number = self._waiting, self._rules.kv_tokens, self._num_submitted
        blocked = bool(waiting)
        soonest = None
        for sequence in sequences:
            if sequence.prompt_tokens + sequence.limit_tokens > kv_tokens:
                raise _can_never_fit(sequence, kv_tokens)
            sequence.number = number
            number += 1
            waiting.append(sequence)
            if soonest is None or sequence.output_tokens < soonest:
                soonest = sequence.output_tokens
        self._num_submitted = number
        if soonest is None:
            return
        # Behind a blocked head nothing changes: what blocks it goes away only at an end of a sequence.
        if self._end_fs == NEVER:
            self._begin_pass(now_ns * FS_PER_NS)
            self._wake_at_end()
            return
        if not blocked:
            self._cut(now_ns, for_newcomers=True)
        # Those that run end no sooner for the newcomers, so only these might end before the wake-up.
        assert self.wake_ns is not None
        if self._end_fs + (soonest - 1) * self._costs.iteration_fs <= self.wake_ns * FS_PER_NS:
            self._wake_at_end()

    def run_chore(self, now_ns: int, chore: Chore) -> None:
        """Do a chore at the next boundary, after those asked for before."""
        self._chores.append(chore)
        self._interrupt(now_ns)

    def set_costs(self, now_ns: int, costs: IterationCosts) -> None:
        """Go on at these costs from the next boundary on."""
        self._costs = costs
        if self._end_fs != NEVER:
            self._interrupt(now_ns)

    def abort(self, now_ns: int, command: int, trajectories: frozenset[int], answer: Chore) -> None:
        """Stop these sequences of a command at the next boundary, where the chore `answer` is done."""

        def meant(sequence: Sequence) -> bool:
            return sequence.command == command and sequence.trajectory in trajectories

        self._waiting = deque(s for s in self._waiting if not meant(s))
        self._aborting += [s for s in self._decoding.members() if meant(s)]
        self.run_chore(now_ns, answer)

    def advance(self, now_ns: int) -> list[Sequence | Chore]:
        """Carry the engine on to `now_ns`; returns the sequences and chores that ended, in order."""
        ended: list[Sequence | Chore] = []
        limit_fs = now_ns * FS_PER_NS
        if self._end_fs <= limit_fs:
            while self._end_fs <= limit_fs:
                self._end_pass(ended)
                self._begin_pass(self._end_fs)
            self._wake_at_end()
        return ended

    # --- boundaries --------------------------------------------------------------------------------

    def _wake_at_end(self) -> None:
        self.wake_ns = None if self._end_fs == NEVER else -(-self._end_fs // FS_PER_NS)

    def _interrupt(self, now_ns: int) -> None:
        """Let an order that came at `now_ns` take effect at the end of the step it landed in."""
        if self._end_fs == NEVER:
            self._begin_pass(now_ns * FS_PER_NS)
        else:
            self._cut(now_ns)
        self._wake_at_end()

    def _cut(self, now_ns: int, *, for_newcomers: bool = False) -> None:
        """End the present pass with the step that `now_ns` lies in; newcomers want that only if they fit."""
        if self._is_chore:
            return
        elapsed_fs = now_ns * FS_PER_NS - self._start_fs - self._prefill_fs
        num_iterations = iterations_until(self._first_fs, self._growth_fs, elapsed_fs)
        if num_iterations < self._planned and (not for_newcomers or self._head_fits(num_iterations)):
            self._plan(num_iterations)

    def _begin_pass(self, start_fs: int) -> None:
        self._start_fs = start_fs
        if self._aborting:
            self._drop_aborted()
        if self._chores:
            self._is_chore = True
            self._end_fs = start_fs + self._chores[0].duration_fs
            return
        if self._waiting and self._head_fits(0):
            self._prefill()
        if self._decoding.size:
            self._begin_decode()
        elif self._ended_early:
            self._plan(0)
        else:
            assert not self._waiting, "an empty engine lets every sequence in"
            self._end_fs = NEVER

    def _end_pass(self, ended: list[Sequence | Chore]) -> None:
        if self._is_chore:
            self._is_chore = False
            ended.append(self._chores.popleft())
            return
        if self._counts:
            self._count()
        if self._prefill_tokens:
            self._prefill_fs = self._prefill_tokens = 0
            ended += self._ended_early
            self._ended_early.clear()
        ended += self._decoding.run(self._planned)

    def _count(self) -> None:
        counters, decoding, planned = self.counters, self._decoding, self._planned
        counters.busy_fs += self._end_fs - self._start_fs
        if self._prefill_tokens:
            counters.num_prefills += 1
            counters.prefill_tokens += self._prefill_tokens
            counters.prefill_fs += self._prefill_fs
        counters.num_iterations += planned
        counters.sequences_sum += planned * decoding.size
        counters.kv_tokens_sum += run_fs(decoding.attended, decoding.size, planned)
        counters.adapters_sum += planned * len(decoding.adapters)

    def _drop_aborted(self) -> None:
        for sequence in self._aborting:
            if sequence.finish_at >= 0:
                self._decoding.leave(sequence)
        self._aborting.clear()

    # --- decoding ------------------------------------------------------------------------------------

    def _begin_decode(self) -> None:
        decoding, kv_tokens = self._decoding, self._rules.kv_tokens
        while (room := (kv_tokens - decoding.kv_tokens) // decoding.size) < 1:
            self._preempt(decoding.youngest())
        size = decoding.size
        self._first_fs = self._costs.decode_fs(size, decoding.kv_tokens + size, len(decoding.adapters))
        self._growth_fs = self._costs.per_kv_token_fs * size
        if self._ended_early or (self._prefill_tokens and self._waiting and self._head_fits(1)):
            self._plan(1)
        else:
            self._plan(min(room, decoding.iterations_left()))

    def _plan(self, num_iterations: int) -> None:
        self._planned = num_iterations
        decode_fs = run_fs(self._first_fs, self._growth_fs, num_iterations)
        self._end_fs = self._start_fs + self._prefill_fs + decode_fs

    def _preempt(self, sequence: Sequence) -> None:
        self._decoding.leave(sequence)
        self._waiting.appendleft(sequence)
        self.counters.num_preemptions += 1

    # --- prefilling ----------------------------------------------------------------------------------

    def _head_fits(self, after_iterations: int) -> bool:
        """Whether the first waiting sequence may join once that many more iterations have run."""
        if self._decoding.size >= self._rules.max_num_seqs:
            return False
        return self._room(after_iterations) >= self._claim(self._waiting[0])

    def _room(self, after_iterations: int) -> int:
        """KV tokens that newcomers may claim."""
        decoding, rules = self._decoding, self._rules
        if rules.kv_rule == "reserve":
            return rules.kv_tokens - decoding.most_tokens
        return rules.kv_tokens - decoding.kv_tokens - (after_iterations + 1) * decoding.size

    def _claim(self, sequence: Sequence) -> int:
        return sequence.most_tokens if self._rules.kv_rule == "reserve" else sequence.context_tokens + 1

    def _prefill(self) -> None:
        """Let in, in order, all that fit, and prefill them together."""
        rules, waiting, decoding = self._rules, self._waiting, self._decoding
        room = self._room(0)
        seats = rules.max_num_seqs - decoding.size
        joining: list[Sequence] = []
        num_read = 0
        seen: set[Hashable] = set()
        while waiting and len(joining) < seats:
            sequence = waiting[0]
            room -= self._claim(sequence)
            num_read += self._tokens_to_read(sequence, seen)
            is_long = rules.max_prefill_tokens is not None and num_read > rules.max_prefill_tokens
            if room < 0 or (joining and is_long):
                break
            joining.append(waiting.popleft())
        self._prefill_tokens = sum(sequence.context_tokens for sequence in joining)
        num_adapters = len({sequence.adapter for sequence in joining})
        self._prefill_fs = self._costs.prefill_pass_fs(self._prefill_tokens, num_adapters)
        for sequence in joining:
            if sequence.sampled + 1 == sequence.output_tokens:
                self._ended_early.append(sequence)
            else:
                decoding.join(sequence)

    def _tokens_to_read(self, sequence: Sequence, seen: set[Hashable]) -> int:
        """Context tokens that a sequence adds to a pass that reads those of `seen` already."""
        is_fresh = not sequence.sampled  # else nobody's context is the same
        if self._rules.shares_prompts and sequence.shared_prompt is not None and is_fresh:
            key = (sequence.adapter, sequence.shared_prompt)
            if key in seen:
                return 0
            seen.add(key)
        return sequence.context_tokens


def _can_never_fit(sequence: Sequence, kv_tokens: int) -> InputError:
    return InputError(
        "cluster.replicas.kv_tokens",
        f"a turn of {sequence.most_tokens} tokens can never fit {kv_tokens}",
        "raise kv_tokens or shorten the task's prompts, turns or answers",
    )
