"""KV that outlives its sequence: shared while it is used, readable again until it is overwritten.

    enter ──► tokens that need no prefill        leave ──► freed, the newest last
                                                             │
                              overwritten, oldest first ◄────┘  when the pool needs the room

A context is the prompt of its group, held once however many use it, and what the trajectory added since.
Keys name the adapter version, so nothing crosses versions. The front of what was freed outlives its tail, and
a trajectory's own part is freed before the prompt it depends on: whenever an own part is left, so is its
prompt. Owns who may read what; knows no time, and of the pool only its size.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from sim.sequences import Adapter, Sequence

Key = tuple[Adapter, str, Hashable]


class PrefixCache:
    """What of past contexts a replica still holds.

    `saved` is how many tokens the running sequences count in full though they hold them together; contexts
    match in whole blocks of `block_tokens`, and never to their last token, which must be read to go on.
    """

    def __init__(self, pool_tokens: int, block_tokens: int) -> None:
        self.saved = 0
        self._pool_tokens = pool_tokens
        self._block_tokens = block_tokens
        self._users: dict[Key, int] = {}
        self._freed: OrderedDict[Key, int] = OrderedDict()
        self._num_freed = 0

    def find(self, sequence: Sequence) -> tuple[int, int, int]:
        """Of its context: tokens left in the pool; in whole blocks, which need no reading; held by others."""
        shared_tokens = self._shared_tokens(sequence)
        held = shared_tokens if shared_tokens and self._prompt(sequence) in self._users else 0
        left = held or (self._freed.get(self._prompt(sequence), 0) if shared_tokens else 0)
        if left >= shared_tokens:
            left += self._freed.get(self._own(sequence), 0)
        left = min(left, sequence.context_tokens - 1)
        return left, left // self._block_tokens * self._block_tokens, held

    def enter(self, sequence: Sequence) -> None:
        """Take up what there is of its context."""
        self._forget(self._own(sequence))
        if self._shared_tokens(sequence):
            prompt = self._prompt(sequence)
            self._forget(prompt)
            num_users = self._users.get(prompt, 0)
            self._users[prompt] = num_users + 1
            if num_users:
                self.saved += self._shared_tokens(sequence)

    def leave(self, sequence: Sequence, kv_tokens: int, *, keep_own: bool) -> None:
        """Free the KV that a sequence holds; its own part stays readable only if `keep_own`."""
        shared_tokens = self._shared_tokens(sequence)
        if keep_own and kv_tokens > shared_tokens:
            self._free(self._own(sequence), kv_tokens - shared_tokens)
        if shared_tokens:
            prompt = self._prompt(sequence)
            self._users[prompt] -= 1
            if self._users[prompt]:
                self.saved -= shared_tokens
            else:
                del self._users[prompt]
                self._free(prompt, min(shared_tokens, kv_tokens))

    def overwrite(self, in_use: int) -> None:
        """Give up the oldest of what was freed where sequences use so many tokens of the pool."""
        excess = in_use + self._num_freed - self._pool_tokens
        while excess > 0:
            key, tokens = next(iter(self._freed.items()))
            cut = min(tokens, excess)
            excess -= cut
            self._num_freed -= cut
            if cut < tokens:
                self._freed[key] = tokens - cut
            else:
                del self._freed[key]

    def _free(self, key: Key, tokens: int) -> None:
        self._forget(key)
        self._freed[key] = tokens
        self._num_freed += tokens

    def _forget(self, key: Key) -> None:
        self._num_freed -= self._freed.pop(key, 0)

    def _shared_tokens(self, sequence: Sequence) -> int:
        """Tokens that the samples of its prompt can share."""
        return max(0, sequence.shared_tokens - 1) // self._block_tokens * self._block_tokens

    def _prompt(self, sequence: Sequence) -> Key:
        return (sequence.adapter, "prompt", sequence.shared_prompt)

    def _own(self, sequence: Sequence) -> Key:
        return (sequence.adapter, "own", sequence.trajectory)
