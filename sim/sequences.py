"""One generation on a replica, and the set of those that decode together.

Owns membership: who decodes, since when, holding how much KV, until which iteration. Knows no time and
no cost. Every operation is O(log n): a sequence's end is a fixed number on a running count of iterations.
"""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heappop, heappush

Adapter = tuple[str, int]  # (task, version)

NOT_DECODING = -1


class Sequence:
    """One turn to generate: `prompt_tokens` of context in, `output_tokens` to sample, at most `limit_tokens`.

    The engine decides by the limit alone: no engine knows where an answer will end. `command` and
    `trajectory` say whose it is; `adapter` is what its cost is shared by. The first `shared_tokens` of the
    contexts of all sequences of one adapter with an equal `shared_prompt` are the very same.

    The remaining fields belong to the engine: place in the order of arrival; tokens sampled so far when it
    last began to decode or left; context tokens read while it is prefilled; and while it decodes, the
    iteration count at which it ends and its KV size less the iteration count.
    """

    __slots__ = (
        "adapter",
        "command",
        "finish_at",
        "kv_offset",
        "limit_tokens",
        "num_read",
        "number",
        "output_tokens",
        "prompt_tokens",
        "sampled",
        "shared_prompt",
        "shared_tokens",
        "trajectory",
    )

    def __init__(
        self,
        command: int,
        trajectory: int,
        adapter: Adapter,
        prompt_tokens: int,
        output_tokens: int,
        limit_tokens: int,
        shared_prompt: Hashable = None,
        shared_tokens: int = 0,
    ) -> None:
        self.command = command
        self.trajectory = trajectory
        self.adapter = adapter
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.limit_tokens = limit_tokens
        self.shared_prompt = shared_prompt
        self.shared_tokens = shared_tokens
        self.number = -1
        self.sampled = 0
        self.num_read = 0
        self.finish_at = NOT_DECODING
        self.kv_offset = 0

    @property
    def context_tokens(self) -> int:
        """Tokens a prefill must process: the prompt and, after a preemption, what was sampled before."""
        return self.prompt_tokens + self.sampled

    @property
    def most_tokens(self) -> int:
        """The longest it can become."""
        return self.prompt_tokens + self.limit_tokens


class DecodingSet:
    """The sequences that decode together, the KV tokens they hold and may come to hold, their adapters."""

    __slots__ = ("_ends", "_members", "adapters", "iterations", "kv_tokens", "most_tokens", "size")

    def __init__(self) -> None:
        self.size = 0
        self.kv_tokens = 0
        self.most_tokens = 0
        self.iterations = 0
        self.adapters: dict[Adapter, int] = {}
        self._ends: list[tuple[int, int, Sequence]] = []  # entries of sequences that left early stay, dead
        self._members: dict[int, Sequence] = {}  # whoever joins arrived after all that are here

    def join(self, sequence: Sequence) -> None:
        """Add a sequence that was just prefilled and so has sampled one more token; some must remain."""
        iterations = self.iterations
        kv_tokens = sequence.prompt_tokens + sequence.sampled
        sequence.sampled += 1
        sequence.finish_at = iterations + sequence.output_tokens - sequence.sampled
        sequence.kv_offset = kv_tokens - iterations
        self.size += 1
        self.kv_tokens += kv_tokens
        self.most_tokens += sequence.prompt_tokens + sequence.limit_tokens
        adapter = sequence.adapter
        self.adapters[adapter] = self.adapters.get(adapter, 0) + 1
        self._members[sequence.number] = sequence
        heappush(self._ends, (sequence.finish_at, sequence.number, sequence))

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence and free its KV; it remembers how many tokens it has sampled."""
        sequence.sampled = sequence.output_tokens - sequence.finish_at + self.iterations
        sequence.finish_at = NOT_DECODING
        del self._members[sequence.number]
        self.size -= 1
        self.kv_tokens -= sequence.kv_offset + self.iterations
        self.most_tokens -= sequence.prompt_tokens + sequence.limit_tokens
        adapter = sequence.adapter
        users = self.adapters[adapter] - 1
        if users:
            self.adapters[adapter] = users
        else:
            del self.adapters[adapter]

    @property
    def attended(self) -> int:
        """Tokens that the next iteration attends to: those held and the one that each sequence adds."""
        return self.kv_tokens + self.size

    def iterations_left(self) -> int:
        """Iterations until the next sequence ends; the set must not be empty."""
        ends = self._ends
        while ends[0][2].finish_at != ends[0][0]:
            heappop(ends)
        return ends[0][0] - self.iterations

    def run(self, num_iterations: int) -> list[Sequence]:
        """Decode so many iterations, at most `iterations_left`; returns those that end, in order."""
        self.iterations = now = self.iterations + num_iterations
        self.kv_tokens += num_iterations * self.size
        ended: list[Sequence] = []
        ends = self._ends
        while ends and ends[0][0] <= now:
            finish_at, _, sequence = heappop(ends)
            if sequence.finish_at == finish_at:
                self.leave(sequence)
                ended.append(sequence)
        return ended

    def youngest(self) -> Sequence:
        """The sequence that arrived last of those decoding."""
        return next(reversed(self._members.values()))

    def members(self) -> list[Sequence]:
        """All sequences that decode now, by arrival."""
        return list(self._members.values())
