"""The running batch: one row per turn, all its state in tensors, so that an iteration has no loop over rows.

    join(turns)   one packed prefill pass; each new row gets its first token
    decode()      one more token for every row
    leave(rows)   the last rows move into the holes: rows stay dense

Turns that ask for the same context under the same adapter (the samples of a prompt) share one prefill.
Knows neither orders nor tasks; who may join is decided elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from executor.base_model import BaseModel
from executor.protocols import TurnRequest, TurnResult
from executor.torch_cache import RowCache
from executor.torch_lora import LoraSlots
from executor.torch_sampling import sample

# Columns of a row's integers: its last token, where that goes, tokens made and allowed, adapter slot, seed.
_TOKEN, _POSITION, _MADE, _ALLOWED, _SLOT, _SEED = range(6)


class Turn(NamedTuple):
    """One turn to sample: the order it belongs to, the slot of its adapter, and what to sample."""

    command: int
    slot: int
    request: TurnRequest

    @property
    def num_tokens(self) -> int:
        """The most tokens it can come to hold."""
        return len(self.request.context) + self.request.max_new_tokens


class Batch:
    """At most `max_rows` turns over one base model whose attention is `RowCache`'s.

    Every pass is padded to a multiple of `row_multiple` tokens.
    """

    def __init__(self, base: BaseModel, slots: LoraSlots, max_rows: int, row_multiple: int = 1) -> None:
        self.turns: list[Turn] = []
        self._row_multiple = row_multiple
        self._base, self._slots, self._cache = base, slots, RowCache(max_rows)
        device = base.device
        self._ints = torch.zeros(max_rows, 6, dtype=torch.int64, device=device)
        self._temperatures = torch.ones(max_rows, device=device)
        self._tokens = torch.zeros(max_rows, 0, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(max_rows, 0, device=device)
        self._eos = torch.tensor(base.eos_token_ids, dtype=torch.int64, device=device)
        # A row's length grows by one per iteration, so `length - iteration` is fixed while it runs.
        self._iteration = 0
        self._offsets: list[int] = []
        self._per_slot: Counter[int] = Counter()

    @property
    def num_kv_tokens(self) -> int:
        """Tokens the running rows hold now, the last sampled ones included."""
        return sum(self._offsets) + self._iteration * len(self._offsets)

    @property
    def num_adapters(self) -> int:
        """Distinct adapters among the running rows."""
        return len(self._per_slot)

    @torch.inference_mode()
    def join(self, turns: Sequence[Turn]) -> list[int]:
        """Add turns, read their contexts, sample a first token of each; the rows that are finished by it."""
        groups: dict[tuple[int, tuple[int, ...]], list[Turn]] = {}
        for turn in turns:
            groups.setdefault((turn.slot, tuple(turn.request.context)), []).append(turn)
        first = len(self.turns)
        self._enter([turn for members in groups.values() for turn in members])
        logits = self._prefill(list(groups), [len(members) for members in groups.values()], first)
        return self._sample(first, logits)

    @torch.inference_mode()
    def decode(self) -> list[int]:
        """Sample one more token of every row; the rows that are finished by it."""
        rows = self._ints[: len(self.turns)]
        positions = rows[:, _POSITION]
        self._cache.decode(positions, longest=max(self._offsets) + self._iteration - 1)
        self._iteration += 1
        logits = self._forward(rows[:, _TOKEN], positions, rows[:, _SLOT], self._per_slot)
        return self._sample(0, logits)

    @torch.inference_mode()
    def results(self, rows: Sequence[int]) -> list[TurnResult]:
        """What these rows have sampled so far."""
        made = self._ints[rows, _MADE].tolist()
        tokens, logprobs = self._tokens[rows].tolist(), self._logprobs[rows].tolist()
        return [
            TurnResult(tokens=t[:m], logprobs=p[:m]) for t, p, m in zip(tokens, logprobs, made, strict=True)
        ]

    @torch.inference_mode()
    def leave(self, rows: Collection[int]) -> None:
        """Remove rows; rows after them may get another number."""
        gone, keep = set(rows), len(self.turns) - len(rows)
        for row in gone:
            self._per_slot[self.turns[row].slot] -= 1
        self._per_slot = +self._per_slot
        target = sorted(row for row in gone if row < keep)
        source = [row for row in range(keep, len(self.turns)) if row not in gone]
        if source:
            self._move(source, target)
        for old, new in zip(source, target, strict=True):
            self.turns[new], self._offsets[new] = self.turns[old], self._offsets[old]
        del self.turns[keep:], self._offsets[keep:]

    def _enter(self, turns: Sequence[Turn]) -> None:
        """Give turns the rows after the last, in order."""
        rows = slice(len(self.turns), len(self.turns) + len(turns))
        requests = [turn.request for turn in turns]
        state = [
            [
                0,
                len(turn.request.context) - 1,
                0,
                turn.request.max_new_tokens,
                turn.slot,
                _signed(turn.request.seed),
            ]
            for turn in turns
        ]
        self._ints[rows] = torch.tensor(state, device=self._ints.device)
        self._temperatures[rows] = torch.tensor([request.temperature for request in requests]).to(
            self._ints.device
        )
        self.turns.extend(turns)
        self._offsets.extend(len(request.context) + 1 - self._iteration for request in requests)
        self._per_slot.update(turn.slot for turn in turns)
        short = max(request.max_new_tokens for request in requests) - self._tokens.shape[1]
        if short > 0:
            self._tokens = torch.nn.functional.pad(self._tokens, (0, short))
            self._logprobs = torch.nn.functional.pad(self._logprobs, (0, short))

    def _prefill(self, groups: list[tuple[int, tuple[int, ...]]], sizes: list[int], first: int) -> Tensor:
        """Read each group's context once, for all its rows; logits of its end, [rows, vocabulary]."""
        device, lengths, row = self._ints.device, [len(context) for _, context in groups], first
        rows = []
        for size in sizes:
            rows.append(range(row, row + size))
            row += size
        self._cache.prefill(lengths, rows, device)
        counts = torch.tensor(lengths, device=device)
        owners = torch.tensor([slot for slot, _ in groups], device=device)
        tokens = torch.tensor([token for _, context in groups for token in context], device=device)
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        owners = owners.repeat_interleave(counts)
        logits = self._forward(tokens, positions, owners, {slot for slot, _ in groups}, counts.cumsum(0) - 1)
        return logits.repeat_interleave(torch.tensor(sizes, device=device), dim=0)

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        active: Collection[int],
        keep: Tensor | None = None,
    ) -> Tensor:
        """One pass over packed tokens of these `slots`; logits of all, or of those at the indices `keep`."""
        num = len(tokens) if keep is None else len(keep)
        self._slots.use(self._padded(slots), active)
        logits: Tensor = self._base.model(
            input_ids=self._padded(tokens).unsqueeze(0),
            position_ids=self._padded(positions).unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if keep is None else self._padded(keep),
            row_cache=self._cache,
        ).logits
        return logits[0, :num]

    def _padded(self, numbers: Tensor) -> Tensor:
        """These numbers and as many more of the first as the multiple asks for."""
        short = -len(numbers) % self._row_multiple
        return torch.cat([numbers, numbers[:1].expand(short)]) if short else numbers

    def _sample(self, first: int, logits: Tensor) -> list[int]:
        """Give rows `first` and on their next token; the rows that are finished by it."""
        rows = self._ints[first : first + len(logits)]
        made = rows[:, _MADE]
        tokens, logprobs = sample(
            logits, self._temperatures[first : first + len(logits)], rows[:, _SEED], made
        )
        numbers = torch.arange(first, first + len(logits), device=made.device)
        self._tokens[numbers, made] = tokens
        self._logprobs[numbers, made] = logprobs
        rows[:, _TOKEN] = tokens
        rows[:, _POSITION : _MADE + 1] += 1
        # A row whose logits are not numbers ends at once; whoever reads its log-probability will see why.
        ended = (made >= rows[:, _ALLOWED]) | torch.isin(tokens, self._eos) | ~logprobs.isfinite()
        return [first + int(i) for i in ended.nonzero().flatten().tolist()]

    def _move(self, source: list[int], target: list[int]) -> None:
        longest = self._iteration + max(self._offsets[row] for row in source)
        old, new = (torch.tensor(rows, device=self._ints.device) for rows in (source, target))
        for state in (self._ints, self._temperatures, self._tokens, self._logprobs):
            state[new] = state[old]
        self._cache.move(old, new, longest)


def _signed(seed: int) -> int:
    """The same 64 bits as a signed integer."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
