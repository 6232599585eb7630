"""Keeps the keys and values of the running sequences and computes attention over them.

One row per running sequence, rows 0..B-1 always dense, each padded to a common length that grows as needed.
It is plugged into any Hugging Face model through its attention interface, so a model needs no change:

    prefill  tokens of new sequences packed one after another in one row of input; causal attention inside each;
             keys and values are stored in the rows given
    decode   one token per running row; attends to its row

Owns storage and attention; knows no tokens, tasks or adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "marlaas_rows"
_GRANULE = 32  # lengths are rounded up to this: few distinct kernel shapes, and no effect on masked-out sums


class RowCache:
    """Keys and values of at most `max_rows` sequences, grown on demand; call `prefill` or `decode` before a pass."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._pass: _Prefill | _Decode | None = None

    def prefill(self, lengths: Sequence[int], rows: Sequence[Sequence[int]], device: torch.device) -> None:
        """The next pass holds new sequences of these lengths, packed; sequence i is stored in each of `rows[i]`."""
        self._pass = _Prefill(lengths, rows, device)

    def decode(self, num_rows: int, positions: Tensor, longest: int) -> None:
        """The next pass holds one token for each of rows 0..num_rows-1, at `positions` [num_rows] <= `longest`."""
        self._pass = _Decode(num_rows, positions, longest)

    def move(self, source: Tensor, target: Tensor, longest: int) -> None:
        """Copy rows `source` over rows `target`, up to `longest` tokens."""
        for keys, values in self._layers.values():
            keys[target, :, :longest] = keys[source, :, :longest]
            values[target, :, :longest] = values[source, :, :longest]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Store this pass's keys and values of a layer and attend; [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim]."""
        assert self._pass is not None, "announce the pass with prefill() or decode() first"
        keys, values = self._room(layer, self._pass.num_rows, self._pass.num_tokens, key, value)
        return self._pass.attend(keys, values, query[0], key[0], value[0], scale)

    def _room(self, layer: int, rows: int, tokens: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        held = self._layers.get(layer)
        if held is None or held[0].shape[0] < rows or held[0].shape[2] < tokens:
            self._layers[layer] = held = (
                self._grown(held and held[0], rows, tokens, key),
                self._grown(held and held[1], rows, tokens, value),
            )
        return held

    def _grown(self, old: Tensor | None, rows: int, tokens: int, like: Tensor) -> Tensor:
        tokens = -(-tokens // _GRANULE) * _GRANULE
        if old is not None:  # double what is short, so that growing costs little in total
            rows = old.shape[0] if rows <= old.shape[0] else min(max(rows, 2 * old.shape[0]), self._max_rows)
            tokens = old.shape[2] if tokens <= old.shape[2] else max(tokens, 2 * old.shape[2])
        new = like.new_zeros(rows, like.shape[1], tokens, like.shape[3])
        if old is not None:
            new[: old.shape[0], :, : old.shape[2]] = old
        return new


class _Prefill:
    """A pass over packed new sequences."""

    def __init__(self, lengths: Sequence[int], rows: Sequence[Sequence[int]], device: torch.device) -> None:
        self.num_rows = 1 + max(max(r) for r in rows)
        self.num_tokens = max(lengths)
        size = torch.tensor(lengths, device=device)
        # Where each packed token sits in the padded batch [sequence, position], in packed order.
        self._where = (torch.arange(self.num_tokens, device=device) < size.unsqueeze(1)).nonzero(
            as_tuple=True
        )
        self._shape = (len(lengths), self.num_tokens)
        self._source = torch.tensor([i for i, r in enumerate(rows) for _ in r], device=device)
        self._target = torch.tensor([row for r in rows for row in r], device=device)

    def attend(
        self, keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        query, key, value = self._padded(query), self._padded(key), self._padded(value)
        keys[self._target, :, : self.num_tokens] = key[self._source]
        values[self._target, :, : self.num_tokens] = value[self._source]
        # Padding is to the right, so causal attention alone keeps it out of every real token.
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        sequence, position = self._where
        return out[sequence, :, position].unsqueeze(0)

    def _padded(self, packed: Tensor) -> Tensor:
        sequence, position = self._where
        batch, length = self._shape
        padded = packed.new_zeros(batch, packed.shape[0], length, packed.shape[2])
        padded[sequence, :, position] = packed.transpose(0, 1)
        return padded


class _Decode:
    """A pass over one token per running row."""

    def __init__(self, num_rows: int, positions: Tensor, longest: int) -> None:
        self.num_rows, self.num_tokens = num_rows, longest + 1
        self._length = -(-self.num_tokens // _GRANULE) * _GRANULE
        self._rows = torch.arange(num_rows, device=positions.device)
        self._positions = positions
        columns = torch.arange(self._length, device=positions.device)
        self._mask = (columns <= positions.unsqueeze(1))[:, None, None, :]

    def attend(
        self, keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        keys[self._rows, :, self._positions] = key.transpose(0, 1)
        values[self._rows, :, self._positions] = value.transpose(0, 1)
        keys = keys[: self.num_rows, :, : self._length]
        values = values[: self.num_rows, :, : self._length]
        heads, rows, head_dim = query.shape
        # The heads that share a key head stand where several query tokens would: no key is copied.
        grouped = query.transpose(0, 1).reshape(rows, keys.shape[1], heads // keys.shape[1], head_dim)
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask, scale=scale)
        return out.reshape(1, rows, heads, head_dim)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    row_cache: RowCache | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    assert row_cache is not None, "this attention runs inside a rollout engine only"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return row_cache.attend(module.layer_idx, query, key, value, scale), None


AttentionInterface.register(ATTENTION, _attention)
