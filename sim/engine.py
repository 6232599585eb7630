"""A replica's continuous batching, in closed form between changes of its batch.

    submit ──► batch ──► step, run as often as it is the same ──► ended
    chore  ─────────────► done between two steps

Work proceeds in steps: an iteration in which everyone who decodes samples a token, and what is read of the
contexts of those who join, before it in a pass of its own (as in the embedded engine) or mixed into it (as
in vLLM). Orders take effect between steps. There, in order: sequences that ended leave, aborted ones leave,
chores (adapter loads and the like) run one by one, the next step begins. Steps that read nothing are alike
until the batch changes, so a whole run of them is one pass here.

Owns the order of passes and their exact time in femtoseconds; who is in the batch is `batch`'s. Knows no
clock, commands or events. `stepwise` is its naive twin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from marlaas.errors import InputError
from sim.batch import Batch
from sim.costs import FS_PER_NS, IterationCosts, iterations_until, run_fs
from sim.rules import EngineRules
from sim.sequences import Adapter, Sequence

NEVER = 1 << 200  # femtoseconds
# Femtoseconds are counted from an origin that follows the passes, so that they fit a machine word.
_NEW_ORIGIN_AFTER_FS = 10**18


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


class Engine:
    """One replica's batch, driven from outside: call `advance` at `wake_ns` or later, and before any order.

    `wake_ns` is a time, in whole nanoseconds rounded up, before which nothing ends; None when there is
    nothing to do. With `counts` off, `counters` stay 0.
    """

    def __init__(self, costs: IterationCosts, rules: EngineRules, *, counts: bool = True) -> None:
        self.counters = Counters()
        self.wake_ns: int | None = None
        self._costs = costs
        self._kv_tokens = rules.kv_tokens
        self._is_mixed = rules.prefill == "mixed"
        self._counts = counts
        self._batch = Batch(rules)
        self._aborting: list[Sequence] = []
        self._chores: deque[Chore] = deque()
        self._num_submitted = 0
        # The present pass: a chore, or a run of steps; idle when its end is NEVER. Since the origin.
        self._origin_ns = 0
        self._is_chore = False
        self._start_fs = 0
        self._end_fs = NEVER
        # Of the present steps: how long reading takes before the first; how many iterations, how long the
        # first takes and how much longer each next one.
        self._reading_fs = 0
        self._planned = 0
        self._first_fs = 0
        self._growth_fs = 0

    # --- what the world asks ---------------------------------------------------------------------

    @property
    def num_preemptions(self) -> int:
        """How often a sequence had to give way to older ones."""
        return self._batch.num_preemptions

    def is_using(self, adapter: Adapter) -> bool:
        """Whether any sequence here, waiting or running, uses this adapter."""
        return self._batch.is_using(adapter)

    def submit(self, now_ns: int, sequences: Iterable[Sequence]) -> None:
        """Queue sequences; one that could never fit the KV pool is an `InputError`."""
        waiting, number = self._batch.waiting, self._num_submitted
        blocked = bool(waiting)
        soonest = NEVER
        for sequence in sequences:
            if sequence.prompt_tokens + sequence.limit_tokens > self._kv_tokens:
                raise _can_never_fit(sequence, self._kv_tokens)
            sequence.number = number
            number += 1
            waiting.append(sequence)
            soonest = min(soonest, sequence.output_tokens)
        self._num_submitted = number
        if self._end_fs == NEVER:
            self._begin_pass(self._since_origin_fs(now_ns))
            self._wake_at_end()
            return
        # Behind a blocked head nothing changes: what blocks it goes away only at an end of a sequence.
        if not blocked and waiting:
            self._cut(now_ns, for_newcomers=True)
        # Those that run end no sooner for the newcomers, so only these might end before the wake-up.
        assert self.wake_ns is not None
        if self._end_fs + (soonest - 1) * self._costs.iteration_fs <= self._since_origin_fs(self.wake_ns):
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
        self._aborting += self._batch.take_out(
            lambda sequence: sequence.command == command and sequence.trajectory in trajectories
        )
        self.run_chore(now_ns, answer)

    def advance(self, now_ns: int) -> list[Sequence | Chore]:
        """Carry the engine on to `now_ns`; returns the sequences and chores that ended, in order."""
        ended: list[Sequence | Chore] = []
        if self._end_fs > self._since_origin_fs(now_ns):
            return ended
        while self._end_fs <= self._since_origin_fs(now_ns):
            if self._is_chore:
                self._is_chore = False
                ended.append(self._chores.popleft())
            else:
                if self._counts:
                    self._count()
                ended += self._batch.end_step(self._planned)
            self._begin_pass(self._end_fs)
        self._wake_at_end()
        return ended

    # --- boundaries --------------------------------------------------------------------------------

    def _since_origin_fs(self, at_ns: int) -> int:
        return (at_ns - self._origin_ns) * FS_PER_NS

    def _wake_at_end(self) -> None:
        end_fs = self._end_fs
        self.wake_ns = None if end_fs == NEVER else self._origin_ns - (-end_fs // FS_PER_NS)

    def _interrupt(self, now_ns: int) -> None:
        """Let an order that came at `now_ns` take effect at the end of the step it landed in."""
        if self._end_fs == NEVER:
            self._begin_pass(self._since_origin_fs(now_ns))
        else:
            self._cut(now_ns)
        self._wake_at_end()

    def _cut(self, now_ns: int, *, for_newcomers: bool = False) -> None:
        """End the present pass with the step that `now_ns` lies in; newcomers want that only if they fit.

        A step that ends at that very instant is over before the order comes, as at the end of a pass.
        """
        if self._is_chore or self._planned < 2:
            return
        elapsed_fs = self._since_origin_fs(now_ns) - self._start_fs - self._reading_fs
        num_iterations = iterations_until(self._first_fs, self._growth_fs, elapsed_fs + 1)
        if num_iterations < self._planned and (not for_newcomers or self._batch.head_may_fit(num_iterations)):
            self._plan(num_iterations)

    def _begin_pass(self, start_fs: int) -> None:
        batch = self._batch
        if start_fs > _NEW_ORIGIN_AFTER_FS:
            passed_ns = start_fs // FS_PER_NS
            self._origin_ns += passed_ns
            start_fs -= passed_ns * FS_PER_NS
        self._start_fs = start_fs
        if self._aborting:
            for sequence in self._aborting:
                batch.drop(sequence)
            self._aborting.clear()
        if self._chores:
            self._is_chore = True
            self._end_fs = start_fs + self._chores[0].duration_fs
            return
        num_iterations = batch.begin_step()
        if num_iterations is None:
            assert not batch.waiting, "an empty engine lets every sequence in"
            self._end_fs = NEVER
        else:
            self._begin_steps(batch, num_iterations)

    def _begin_steps(self, batch: Batch, num_iterations: int) -> None:
        costs, decoding = self._costs, batch.decoding
        size = decoding.size
        num_adapters = len(decoding.adapters)
        reading_fs = 0
        if batch.prefill_tokens:
            tokens, pairs = batch.prefill_tokens, batch.prefill_pairs
            if self._is_mixed:
                reading_fs = costs.reading_fs(tokens, pairs)
                num_adapters = len(batch.prefill_adapters.union(decoding.adapters))
            else:
                reading_fs = costs.prefill_pass_fs(tokens, pairs, len(batch.prefill_adapters))
        self._reading_fs = reading_fs
        self._first_fs = first_fs = costs.decode_fs(size, decoding.kv_tokens + size, num_adapters)
        self._growth_fs = growth_fs = costs.per_kv_token_fs * size
        self._planned = num_iterations
        self._end_fs = self._start_fs + reading_fs + run_fs(first_fs, growth_fs, num_iterations)

    def _plan(self, num_iterations: int) -> None:
        self._planned = num_iterations
        decode_fs = run_fs(self._first_fs, self._growth_fs, num_iterations)
        self._end_fs = self._start_fs + self._reading_fs + decode_fs

    def _count(self) -> None:
        counters, batch, planned = self.counters, self._batch, self._planned
        decoding = batch.decoding
        counters.busy_fs += self._end_fs - self._start_fs
        if batch.prefill_tokens:
            counters.num_prefills += 1
            counters.prefill_tokens += batch.prefill_tokens
            counters.prefill_fs += self._reading_fs
        counters.num_iterations += planned
        counters.sequences_sum += planned * decoding.size
        counters.kv_tokens_sum += run_fs(decoding.kv_tokens + decoding.size, decoding.size, planned)
        counters.adapters_sum += planned * len(decoding.adapters)


def _can_never_fit(sequence: Sequence, kv_tokens: int) -> InputError:
    return InputError(
        "cluster.replicas.kv_tokens",
        f"a turn of {sequence.most_tokens} tokens can never fit {kv_tokens}",
        "raise kv_tokens or shorten the task's prompts, turns or answers",
    )
