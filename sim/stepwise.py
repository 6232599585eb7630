"""The naive twin of `engine`: the same semantics, one step at a time, everything counted afresh.

Slow and obvious on purpose: it keeps no running totals, so it shows what `engine`'s closed form must equal
to the last bit. Same calls, same answers.
"""

from __future__ import annotations

from collections.abc import Iterable

from sim.costs import FS_PER_NS, IterationCosts
from sim.engine import Chore
from sim.rules import EngineRules
from sim.sequences import Sequence

Key = tuple[object, ...]


class StepwiseEngine:
    """One replica's batch, token by token; driven like `engine.Engine`."""

    def __init__(self, costs: IterationCosts, rules: EngineRules) -> None:
        self._costs = costs
        self._rules = rules
        self._sampled: dict[Sequence, int] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []  # in order of arrival
        self._reading: list[Sequence] = []  # of these, whose context is read in part
        self._kv: dict[Sequence, int] = {}  # tokens held by each that runs
        self._aborting: list[Sequence] = []
        self._ended: list[Sequence] = []
        self._chores: list[Chore] = []
        self._freed: list[tuple[Key, int]] = []  # oldest first
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

    # --- boundaries --------------------------------------------------------------------------------

    def _begin_if_idle(self, now_ns: int) -> None:
        if self._is_idle:
            self._begin_pass(now_ns * FS_PER_NS)

    def _begin_pass(self, start_fs: int) -> None:
        for sequence in self._aborting:
            if sequence in self._running:
                self._leave(sequence, keeps_own=True)
        self._aborting = []
        self._is_chore = bool(self._chores)
        self._is_idle = not (self._chores or self._running or self._waiting)
        if self._is_chore:
            self._end_fs = start_fs + self._chores[0].duration_fs
        elif not self._is_idle:
            is_mixed = self._rules.prefill == "mixed"
            self._end_fs = start_fs + (self._mixed_step_fs() if is_mixed else self._step_fs())

    def _end_pass(self, ended: list[Sequence | Chore]) -> None:
        if self._is_chore:
            ended.append(self._chores.pop(0))
        ended += self._ended
        self._ended = []

    # --- steps, done in memory at once; each returns how long it takes -------------------------------------

    def _step_fs(self) -> int:
        """What joins is read in a pass of its own, then everyone decodes."""
        duration_fs = 0
        joining, num_tokens, num_pairs = self._let_in()
        if joining:
            num_adapters = len({s.adapter for s in joining})
            duration_fs += self._costs.prefill_pass_fs(num_tokens, num_pairs, num_adapters)
            self._sample(joining)
        if self._running:
            self._make_room(self._running)
            num_adapters = len({s.adapter for s in self._running})
            duration_fs += self._decode(self._running, num_adapters)
        return duration_fs

    def _let_in(self) -> tuple[list[Sequence], int, int]:
        """Who joins, the tokens that are read of their contexts, and twice the pairs that attend."""
        joining: list[Sequence] = []
        num_tokens, num_pairs, num_filled = 0, 0, 0
        seen: list[object] = []
        limit = self._rules.max_prefill_tokens
        while self._waiting and len(self._running) < self._rules.max_num_seqs:
            sequence = self._waiting[0]
            context, found = self._context(sequence), self._found(sequence)
            is_shared = self._rules.shares_prompts and sequence.shared_tokens == context
            content = (sequence.adapter, sequence.shared_prompt) if is_shared else sequence
            num_filled += 0 if content in seen else context - found
            seen.append(content)
            if joining and limit is not None and num_filled > limit:
                break
            if not self._fits(sequence, context, len(self._running) + 1):
                break
            self._enter(sequence, context)
            joining.append(sequence)
            num_tokens += context - found
            num_pairs += context * context - found * found
        return joining, num_tokens, num_pairs

    def _mixed_step_fs(self) -> int:
        """Everyone who decodes does, and what is left of the token budget is for contexts."""
        num_before = self.num_preemptions
        self._make_room(self._decoding())
        decoding = self._decoding()
        self._overwrite(len(decoding))
        limit = self._rules.max_prefill_tokens
        budget = (10**9 if limit is None else limit) - len(decoding)
        chunks: list[tuple[Sequence, int, int]] = []
        for sequence in list(self._reading):
            num_read = min(budget, self._context(sequence) - self._kv[sequence])
            if self._in_use() + num_read + len(decoding) > self._rules.kv_tokens:
                self._preempt(sequence)
            elif num_read > 0:
                chunks.append((sequence, self._kv[sequence], num_read))
                self._kv[sequence] += num_read
                budget -= num_read
                self._overwrite(len(decoding))
        self._reading = [s for s in self._reading if self._kv[s] < self._context(s)]
        while self._waiting and not self._reading and budget > 0 and self.num_preemptions == num_before:
            sequence, found = self._waiting[0], self._found(self._waiting[0])
            num_read = min(budget, self._context(sequence) - found)
            is_full = len(self._running) >= self._rules.max_num_seqs
            claim = min(self._left(sequence) + num_read, self._context(sequence))
            if is_full or not self._fits(sequence, claim, len(decoding)):
                break
            self._enter(sequence, found + num_read, len(decoding))
            chunks.append((sequence, found, num_read))
            budget -= num_read
            if found + num_read < self._context(sequence):
                self._reading.append(sequence)
        num_pairs = sum((before + num) ** 2 - before**2 for _, before, num in chunks)
        reading_fs = self._costs.reading_fs(sum(num for _, _, num in chunks), num_pairs)
        adapters = {s.adapter for s in (*decoding, *(s for s, _, _ in chunks))}
        duration_fs = self._decode(decoding, len(adapters))
        self._sample([s for s, _, _ in chunks if s not in self._reading])
        return reading_fs + duration_fs

    def _decoding(self) -> list[Sequence]:
        return [s for s in self._running if s not in self._reading]

    def _decode(self, sequences: list[Sequence], num_adapters: int) -> int:
        attended = sum(self._context(s) for s in sequences)
        for sequence in sequences:
            self._kv[sequence] += 1
        self._overwrite(0)
        duration_fs = self._costs.decode_fs(len(sequences), attended, num_adapters)
        self._sample(list(sequences))
        return duration_fs

    def _sample(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._sampled[sequence] += 1
        for sequence in sequences:
            if self._sampled[sequence] == sequence.output_tokens:
                self._ended.append(sequence)
                self._leave(sequence, keeps_own=self._rules.prefix_cache == "turns")

    # --- who gets in and who must go ---------------------------------------------------------------------

    def _fits(self, sequence: Sequence, kv_tokens: int, growth: int) -> bool:
        if self._rules.kv_rule == "reserve":
            most = sum(s.prompt_tokens + s.limit_tokens for s in (*self._running, sequence))
            return most <= self._rules.kv_tokens
        needed = kv_tokens - (self._shared(sequence) if self._users(sequence) else 0)
        return self._in_use() + needed + growth <= self._rules.kv_tokens

    def _enter(self, sequence: Sequence, kv_tokens: int, growth: int = 0) -> None:
        assert self._waiting.pop(0) is sequence
        gone = [self._own_key(sequence)]
        if self._shared(sequence):
            gone.append(self._prompt_key(sequence))
        self._freed = [(key, tokens) for key, tokens in self._freed if key not in gone]
        self._running.append(sequence)
        self._kv[sequence] = kv_tokens
        self._overwrite(growth)

    def _make_room(self, decoding: list[Sequence]) -> None:
        remaining = list(decoding)
        while self._in_use() + len(remaining) > self._rules.kv_tokens:
            self._preempt(self._running[-1])
            remaining = [s for s in remaining if s in self._running]

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence, keeps_own=True)
        self._waiting.insert(0, sequence)
        self.num_preemptions += 1

    def _context(self, sequence: Sequence) -> int:
        return sequence.prompt_tokens + self._sampled[sequence]

    # --- the KV pool -------------------------------------------------------------------------------------

    def _in_use(self) -> int:
        """Tokens held, those of a prompt once however many hold them."""
        prompts = {self._prompt_key(s): self._shared(s) for s in self._running}
        return sum(prompts.values()) + sum(self._kv[s] - self._shared(s) for s in self._running)

    def _leave(self, sequence: Sequence, *, keeps_own: bool) -> None:
        self._running.remove(sequence)
        if sequence in self._reading:
            self._reading.remove(sequence)
        kv_tokens, shared = self._kv.pop(sequence), self._shared(sequence)
        if self._rules.prefix_cache == "none":
            return
        if keeps_own and kv_tokens > shared:
            self._free(self._own_key(sequence), kv_tokens - shared)
        if shared and not self._users(sequence):
            self._free(self._prompt_key(sequence), min(shared, kv_tokens))

    def _free(self, key: Key, num_tokens: int) -> None:
        self._freed = [entry for entry in self._freed if entry[0] != key] + [(key, num_tokens)]

    def _overwrite(self, growth: int) -> None:
        """Let go of the oldest of what was freed, a token at a time, until the pool is not overfull."""
        while (
            self._freed and self._in_use() + growth + sum(n for _, n in self._freed) > self._rules.kv_tokens
        ):
            key, num_tokens = self._freed.pop(0)
            if num_tokens > 1:
                self._freed.insert(0, (key, num_tokens - 1))

    def _found(self, sequence: Sequence) -> int:
        """Tokens of its context that need no reading: whole blocks."""
        left = self._left(sequence)
        return left - left % self._rules.block_tokens

    def _left(self, sequence: Sequence) -> int:
        """Tokens of its context that are in the pool still."""
        if self._rules.prefix_cache == "none":
            return 0
        freed, shared = dict(self._freed), self._shared(sequence)
        left = shared if self._users(sequence) else freed.get(self._prompt_key(sequence), 0)
        if not shared or left == shared:
            left = shared + freed.get(self._own_key(sequence), 0)
        return min(left, self._context(sequence) - 1)

    def _users(self, sequence: Sequence) -> list[Sequence]:
        """Who runs and holds its prompt."""
        key = self._prompt_key(sequence)
        return [s for s in self._running if self._shared(s) and self._prompt_key(s) == key]

    def _shared(self, sequence: Sequence) -> int:
        """Tokens of its prompt that other samples may hold too."""
        if self._rules.prefix_cache == "none" or not sequence.shared_tokens:
            return 0
        num_tokens = sequence.shared_tokens - 1
        return num_tokens - num_tokens % self._rules.block_tokens

    def _prompt_key(self, sequence: Sequence) -> Key:
        return ("prompt", sequence.adapter, sequence.shared_prompt)

    def _own_key(self, sequence: Sequence) -> Key:
        return ("own", sequence.adapter, sequence.trajectory)
