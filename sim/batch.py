"""Who waits, who is prefilled and who decodes on a replica, and who gets in next.

    waiting (FIFO) ──► prefilled ──► decoding set ──► ended
        ▲                                │
        └── preempted (youngest first) ◄─┘  when the next iteration's KV does not fit

Waiting is strictly first come, first served, and fewer than `max_num_seqs` must run. What fits is a rule:
`reserve` lets a sequence in when all could grow to their limits within the KV pool, and so never preempts;
`preempt` lets it in when what it reads now and one further token for each fit now, and when the pool is full
the youngest gives way, keeps its place and recomputes its context. So whoever runs arrived before whoever
waits, and the oldest always goes on.

Owns admission, preemption and what is held of the KV pool; knows no time and no cost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable

from sim.prefix_cache import PrefixCache
from sim.rules import EngineRules
from sim.sequences import Adapter, DecodingSet, Sequence

UNBOUNDED = 1 << 62


class Batch:
    """The sequences of one replica, and the prefill of the step under way.

    Of that prefill: `prefill_tokens` read; `prefill_pairs`, twice the pairs of a token and one it attends to;
    `prefill_adapters`.
    """

    def __init__(self, rules: EngineRules) -> None:
        self.waiting: deque[Sequence] = deque()
        self.decoding = DecodingSet()
        self.prefill_tokens = 0
        self.prefill_pairs = 0
        self.prefill_adapters: set[Adapter] = set()
        self.num_preemptions = 0
        self._rules = rules
        self._kv_tokens = rules.kv_tokens
        self._reserves = rules.kv_rule == "reserve"
        self._is_mixed = rules.prefill == "mixed"
        self._max_prefill_tokens = rules.max_prefill_tokens or UNBOUNDED
        self._cache: PrefixCache | None = None
        if rules.prefix_cache != "none":
            self._cache = PrefixCache(rules.kv_tokens, rules.block_tokens)
        self._partial: Sequence | None = None  # read in part: the one that came last of those running
        self._joining: list[Sequence] = []  # read with this step, to decode from the next one on
        self._ending: list[Sequence] = []  # need no more than this step

    def is_using(self, adapter: Adapter) -> bool:
        """Whether any sequence here, waiting or running, uses this adapter."""
        if adapter in self.decoding.adapters:
            return True
        return any(s.adapter == adapter for s in (*self._prefilling(), *self._ending, *self.waiting))

    def take_out(self, is_meant: Callable[[Sequence], bool]) -> list[Sequence]:
        """Remove waiting sequences; returns the running ones that are meant, for `drop` at the boundary."""
        self.waiting = deque(s for s in self.waiting if not is_meant(s))
        return [s for s in (*self.decoding.members(), *self._prefilling()) if is_meant(s)]

    def drop(self, sequence: Sequence) -> None:
        """Let go of a sequence that runs; one that has ended or was dropped before is let be."""
        if sequence is self._partial or sequence.finish_at >= 0:
            self._leave(sequence)

    def _prefilling(self) -> list[Sequence]:
        return self._joining if self._partial is None else [*self._joining, self._partial]

    # --- steps ---------------------------------------------------------------------------------------

    def begin_step(self) -> int | None:
        """Make room for an iteration and let in whoever fits; None when there is nothing to do.

        Returns how often the step is the same until a sequence ends or the pool is full; 0: a prefill alone.
        """
        decoding = self.decoding
        if self._is_mixed:
            if not (decoding.size or self.waiting or self._partial is not None):
                return None
            can_repeat = self._begin_mixed_step()
            if not decoding.size:
                return 1
        else:
            if self.waiting and self.head_may_fit(0):
                self._read_in_own_pass()
            if not decoding.size:
                return 0 if self._ending else None
            if not self._reserves and self.room() < decoding.size:
                self._make_room()
            is_crowded = self.prefill_tokens and self.waiting and self.head_may_fit(1)
            can_repeat = not (is_crowded or self._ending)
        if not can_repeat:
            return 1
        left = decoding.iterations_left()
        return left if self._reserves else min(left, self.room() // decoding.size)

    def end_step(self, num_iterations: int) -> list[Sequence]:
        """The step has been run so often; returns those that end with it, in order."""
        decoding, cache = self.decoding, self._cache
        if cache is not None:
            cache.overwrite(self._in_use() + num_iterations * decoding.size)
        ended = decoding.run(num_iterations)
        if self.prefill_tokens:
            return self._end_prefill(ended)
        if cache is not None:
            for sequence in ended:
                self._end_turn(cache, sequence)
        return ended

    def _end_prefill(self, ended: list[Sequence]) -> list[Sequence]:
        """Let those whose contexts were read decode, or end; returns all that end with the step."""
        for sequence in self._joining:
            if sequence.sampled + 1 == sequence.output_tokens:
                ended.append(sequence)
            else:
                self.decoding.join(sequence)
        if self._cache is not None:
            for sequence in ended:
                self._end_turn(self._cache, sequence)
        ended = self._ending + ended
        self._ending.clear()
        self._joining.clear()
        self.prefill_adapters.clear()
        self.prefill_tokens = self.prefill_pairs = 0
        return ended

    # --- the KV pool -------------------------------------------------------------------------------

    def room(self) -> int:
        """KV tokens that nobody uses."""
        if self._is_mixed or self._cache is not None:
            return self._kv_tokens - self._in_use()
        return self._kv_tokens - self.decoding.kv_tokens

    def _in_use(self) -> int:
        tokens = self.decoding.kv_tokens
        if self._is_mixed:
            for sequence in self._prefilling():
                tokens += sequence.num_read
        return tokens if self._cache is None else tokens - self._cache.saved

    def _make_room(self) -> bool:
        """Preempt until everyone can decode one iteration; True when nobody had to give way."""
        had_room = True
        while self.decoding.size and self.room() < self.decoding.size:
            self._preempt_youngest()
            had_room = False
        return had_room

    def _preempt_youngest(self) -> None:
        sequence = self._partial or self.decoding.youngest()
        self._leave(sequence)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        """Take a running sequence out, however far it has come."""
        if sequence is self._partial:
            self._partial = None
            kv_tokens = sequence.num_read
        else:
            self.decoding.leave(sequence)
            kv_tokens = sequence.context_tokens - 1  # the last one sampled is not read yet
        if self._cache is not None:
            self._cache.leave(sequence, kv_tokens, keep_own=True)

    def _end_turn(self, cache: PrefixCache, sequence: Sequence) -> None:
        kv_tokens = sequence.prompt_tokens + sequence.output_tokens - 1
        cache.leave(sequence, kv_tokens, keep_own=self._rules.prefix_cache == "turns")

    # --- who gets in ---------------------------------------------------------------------------------

    def head_may_fit(self, after_iterations: int) -> bool:
        """Whether the first waiting sequence might get in once that many more iterations have run.

        Never false where it would; what the cache will still hold then is not foreseen.
        """
        size, sequence = self.decoding.size, self.waiting[0]
        if size >= self._rules.max_num_seqs or self._partial is not None:
            return False
        if self._reserves:
            return self._rules.kv_tokens - self.decoding.most_tokens >= sequence.most_tokens
        claim = sequence.prompt_tokens + sequence.sampled + 1
        if self._is_mixed:
            budget = self._max_prefill_tokens - size
            if budget < 1:
                return False
            claim = min(claim - 1, budget)
        if self._cache is not None:
            claim -= self._cache.find(sequence)[2]
        return self.room() - (after_iterations + 1) * size >= claim

    # --- prefills in a pass of their own --------------------------------------------------------------

    def _read_in_own_pass(self) -> None:
        """Let in, in order, all that fit, and read their contexts together before the next iteration."""
        waiting, decoding, cache = self.waiting, self.decoding, self._cache
        reserves, limit = self._reserves, self._max_prefill_tokens
        seats = self._rules.max_num_seqs - decoding.size
        room = self._rules.kv_tokens - decoding.most_tokens if reserves else self.room() - decoding.size
        num_filled = num_ending = found = held = 0
        seen: set[Hashable] = set()
        while waiting and seats:
            sequence = waiting[0]
            num_tokens = sequence.prompt_tokens + sequence.sampled
            if cache is not None:
                _, found, held = cache.find(sequence)
            room -= sequence.prompt_tokens + sequence.limit_tokens if reserves else num_tokens + 1 - held
            num_filled += max(0, self._num_filling(sequence, num_tokens, seen) - found)
            if room < 0 or (num_filled > limit and self.prefill_tokens):
                break
            waiting.popleft()
            seats -= 1
            if cache is not None:
                cache.enter(sequence)
            self._note_read(sequence, found, num_tokens - found)
            if sequence.sampled + 1 < sequence.output_tokens:
                decoding.join(sequence)
            else:
                self._ending.append(sequence)
                num_ending += num_tokens
            if cache is not None:
                cache.overwrite(self._in_use() + num_ending)
        if cache is not None:
            for sequence in self._ending:
                self._end_turn(cache, sequence)

    def _num_filling(self, sequence: Sequence, num_tokens: int, seen: set[Hashable]) -> int:
        """How much of a pass's bound a context takes up: nothing if one of `seen` is the very same."""
        if sequence.shared_tokens < num_tokens or not self._rules.shares_prompts:
            return num_tokens
        key = (sequence.adapter, sequence.shared_prompt)
        if key in seen:
            return 0
        seen.add(key)
        return num_tokens

    # --- prefills mixed into iterations ------------------------------------------------------------------

    def _begin_mixed_step(self) -> bool:
        """Whoever decodes takes a token of the budget each; the rest is for contexts, in order of arrival.

        Returns whether the next step will be the same if no sequence ends.
        """
        has_room = self._make_room()
        budget = self._max_prefill_tokens - self.decoding.size
        if self._cache is not None:
            self._cache.overwrite(self._in_use() + self.decoding.size)
        if self._partial is not None and budget > 0:
            num_read = min(budget, self._partial.context_tokens - self._partial.num_read)
            if num_read <= self.room() - self.decoding.size:
                self._read_on(self._partial, num_read)
                budget -= num_read
            else:
                self._preempt_youngest()
                has_room = False
        while has_room and self.waiting and self._partial is None and budget > 0:
            num_read = self._let_in(budget)
            if not num_read:
                break
            budget -= num_read
        # A step that preempted somebody lets nobody in, but the next one may.
        may_let_in = not has_room and bool(self.waiting) and self.head_may_fit(1)
        return not (may_let_in or self.prefill_tokens)

    def _let_in(self, budget: int) -> int:
        """Let the first of those who wait in if it fits; returns how much of its context is read now."""
        sequence, size, cache = self.waiting[0], self.decoding.size, self._cache
        if size + len(self._joining) >= self._rules.max_num_seqs:
            return 0
        left, found, held = cache.find(sequence) if cache is not None else (0, 0, 0)
        num_read = min(budget, sequence.context_tokens - found)
        if self._reserves:
            most_tokens = self.decoding.most_tokens + sum(s.most_tokens for s in self._joining)
            fits = most_tokens + sequence.most_tokens <= self._rules.kv_tokens
        else:
            # What is left counts to the last token, so that a blocked head stays so until a sequence ends.
            claim = min(left + num_read, sequence.context_tokens) - held
            fits = claim <= self.room() - size
        if not fits:
            return 0
        self.waiting.popleft()
        if cache is not None:
            cache.enter(sequence)
        sequence.num_read = found
        self._read_on(sequence, num_read)
        return num_read

    def _read_on(self, sequence: Sequence, num_read: int) -> None:
        """Read a chunk of a context."""
        self._note_read(sequence, sequence.num_read, num_read)
        sequence.num_read += num_read
        if sequence.num_read == sequence.context_tokens:
            self._partial = None
            self._joining.append(sequence)
        else:
            self._partial = sequence
        if self._cache is not None:
            self._cache.overwrite(self._in_use() + self.decoding.size)

    def _note_read(self, sequence: Sequence, num_before: int, num_read: int) -> None:
        self.prefill_tokens += num_read
        self.prefill_pairs += num_read * (2 * num_before + num_read)
        self.prefill_adapters.add(sequence.adapter)
