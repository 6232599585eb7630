"""The naive twin of `engine`: the same semantics, one iteration at a time, everything counted afresh.

Slow and obvious on purpose: it keeps no running totals, so it shows what `engine`'s closed form must equal
to the last bit. Same calls, same answers.
"""

from __future__ import annotations

from collections.abc import Iterable

from sim.costs import FS_PER_NS, IterationCosts
from sim.engine import Chore, EngineRules
from sim.sequences import Sequence


class StepwiseEngine:
    """One replica's batch, token by token; driven like `engine.Engine`."""

    def __init__(self, costs: IterationCosts, rules: EngineRules) -> None:
        self._costs = costs
        self._rules = rules
        self._sampled: dict[Sequence, int] = {}
        self._waiting: list[Sequence] = []
        self._decoding: list[Sequence] = []
        self._aborting: list[Sequence] = []
        self._ended: list[Sequence] = []
        self._chores: list[Chore] = []
        self._is_chore = False
        self._is_idle = True
        self._end_fs = 0
        self.num_preemptions = 0

    @property
    def wake_ns(self) -> int | None:
        """When the current pass ends, in whole nanoseconds rounded up; None when there is nothing to do."""
        return None if self._is_idle else -(-self._end_fs // FS_PER_NS)

    def submit(self, now_ns: int, sequences: Iterable[Sequence]) -> None:
        """Queue sequences."""
        for sequence in sequences:
            self._sampled[sequence] = 0
            self._waiting.append(sequence)
        self._begin_if_idle(now_ns)

    def run_chore(self, now_ns: int, chore: Chore) -> None:
        """Do a chore at the next boundary, after those asked for before."""
        self._chores.append(chore)
        self._begin_if_idle(now_ns)

    def set_costs(self, _: int, costs: IterationCosts) -> None:
        """Go on at these costs from the next boundary on."""
        self._costs = costs

    def abort(self, now_ns: int, command: int, trajectories: frozenset[int], answer: Chore) -> None:
        """Stop these sequences of a command at the next boundary, where the chore `answer` is done."""
        meant = [s for s in self._sampled if s.command == command and s.trajectory in trajectories]
        self._waiting = [s for s in self._waiting if s not in meant]
        self._aborting += meant
        self.run_chore(now_ns, answer)

    def advance(self, now_ns: int) -> list[Sequence | Chore]:
        """Carry the engine on to `now_ns`; returns the sequences and chores that ended, in order."""
        ended: list[Sequence | Chore] = []
        while not self._is_idle and self._end_fs <= now_ns * FS_PER_NS:
            self._end_pass(ended)
            self._begin_pass(self._end_fs)
        return ended

    def _begin_if_idle(self, now_ns: int) -> None:
        if self._is_idle:
            self._begin_pass(now_ns * FS_PER_NS)

    def _kv_tokens(self) -> int:
        # The token sampled last enters the cache only with the next iteration.
        return sum(s.prompt_tokens + self._sampled[s] - 1 for s in self._decoding)

    def _begin_pass(self, start_fs: int) -> None:
        self._decoding = [s for s in self._decoding if s not in self._aborting]
        self._aborting = []
        self._is_chore = bool(self._chores)
        self._is_idle = not (self._chores or self._decoding or self._waiting)
        if self._is_chore:
            self._end_fs = start_fs + self._chores[0].duration_fs
        elif not self._is_idle:
            self._end_fs = start_fs + self._step_fs()

    def _end_pass(self, ended: list[Sequence | Chore]) -> None:
        if self._is_chore:
            ended.append(self._chores.pop(0))
        ended += self._ended
        self._ended = []

    def _step_fs(self) -> int:
        """One step, done in memory at once; returns how long it takes."""
        duration_fs = 0
        joining = self._let_in()
        if joining:
            num_adapters = len({s.adapter for s in joining})
            num_tokens = sum(self._context(s) for s in joining)
            duration_fs += self._costs.prefill_pass_fs(num_tokens, num_adapters)
            self._decoding += joining
            self._sample(joining)
        if self._decoding:
            self._preempt()
            adapters = {s.adapter for s in self._decoding}
            attended = sum(self._context(s) for s in self._decoding)
            duration_fs += self._costs.decode_fs(len(self._decoding), attended, len(adapters))
            self._sample(self._decoding)
        return duration_fs

    def _sample(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._sampled[sequence] += 1
        self._ended += [s for s in sequences if self._sampled[s] == s.output_tokens]
        self._decoding = [s for s in self._decoding if self._sampled[s] < s.output_tokens]

    def _let_in(self) -> list[Sequence]:
        joining: list[Sequence] = []
        while self._waiting and self._may_join([*joining, self._waiting[0]]):
            joining.append(self._waiting.pop(0))
        return joining

    def _may_join(self, together: list[Sequence]) -> bool:
        rules = self._rules
        if len(self._decoding) + len(together) > rules.max_num_seqs:
            return False
        num_read = self._tokens_to_read(together)
        if len(together) > 1 and rules.max_prefill_tokens is not None and num_read > rules.max_prefill_tokens:
            return False
        if rules.kv_rule == "reserve":
            needed = sum(s.prompt_tokens + s.limit_tokens for s in (*self._decoding, *together))
        else:
            needed = self._kv_tokens() + sum(self._context(s) for s in together)
            needed += len(self._decoding) + len(together)
        return needed <= rules.kv_tokens

    def _preempt(self) -> None:
        while self._kv_tokens() + len(self._decoding) > self._rules.kv_tokens:
            self._waiting.insert(0, self._decoding.pop())
            self.num_preemptions += 1

    def _context(self, sequence: Sequence) -> int:
        return sequence.prompt_tokens + self._sampled[sequence]

    def _tokens_to_read(self, sequences: list[Sequence]) -> int:
        contexts: dict[object, int] = {}
        for s in sequences:
            is_shared = self._rules.shares_prompts and s.shared_prompt is not None and not self._sampled[s]
            contexts[(s.adapter, s.shared_prompt) if is_shared else s] = self._context(s)
        return sum(contexts.values())
