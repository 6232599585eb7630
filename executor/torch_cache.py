"""Keeps the keys and values of the running sequences and computes attention over them.

One row per running sequence, rows 0..B-1 always dense, all padded to one length that grows as needed. It is
plugged into any Hugging Face model through its attention interface, so a model needs no change:

    prefill  new sequences packed one after another in one row of input; causal attention inside each; keys
             and values are stored in the rows given
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

from marlaas.errors import InputError

ATTENTION = "marlaas_rows"
# Lengths are rounded up to this: few distinct kernel shapes, and padding falls into whole vector lanes.
_GRANULE = 32


class RowCache:
    """Keys and values of at most `max_rows` sequences; announce each pass with `prefill` or `decode`."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._pass: _Prefill | _Decode | None = None

    def prefill(self, lengths: Sequence[int], rows: Sequence[Sequence[int]], device: torch.device) -> None:
        """The next pass holds new sequences of these lengths; sequence i is stored in each of `rows[i]`."""
        self._pass = _Prefill(lengths, rows, device)

    def decode(self, positions: Tensor, longest: int) -> None:
        """The next pass holds one token of each row from 0 on, at `positions` [rows], at most `longest`."""
        self._pass = _Decode(positions, longest)

    def move(self, source: Tensor, target: Tensor, longest: int) -> None:
        """Copy rows `source` over rows `target`, up to `longest` tokens."""
        for keys, values in self._layers.values():
            keys[target, :longest] = keys[source, :longest]
            values[target, :longest] = values[source, :longest]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Store this pass's keys and values of a layer and attend; all [tokens, heads, head_dim]."""
        assert self._pass is not None, "announce the pass with prefill() or decode() first"
        rows, length = self._pass.num_rows, self._pass.length
        held = self._layers.get(layer)
        if held is None or held[0].shape[0] < rows or held[0].shape[1] < length:
            keys, values = held or (None, None)
            held = self._grown(keys, rows, length, key), self._grown(values, rows, length, value)
            self._layers[layer] = held
        return self._pass.attend(*held, query, key, value, scale)

    def _grown(self, old: Tensor | None, rows: int, length: int, like: Tensor) -> Tensor:
        """A larger tensor [rows, length, heads, head_dim] with the old content; what is short is doubled."""
        if old is not None:
            rows = old.shape[0] if rows <= old.shape[0] else min(max(rows, 2 * old.shape[0]), self._max_rows)
            length = old.shape[1] if length <= old.shape[1] else max(length, 2 * old.shape[1])
        new = like.new_zeros(rows, length, *like.shape[1:])
        if old is not None:
            new[: old.shape[0], : old.shape[1]] = old
        return new


class _Prefill:
    """A pass over packed new sequences."""

    def __init__(self, lengths: Sequence[int], rows: Sequence[Sequence[int]], device: torch.device) -> None:
        self.num_rows = 1 + max(max(own) for own in rows)
        self.length = _rounded(max(lengths))
        self._shape = (len(lengths), max(lengths))
        columns = torch.arange(self._shape[1], device=device)
        # Where each packed token sits in the padded batch [sequence, position], in packed order.
        self._cells = (columns < torch.tensor(lengths, device=device).unsqueeze(1)).nonzero(as_tuple=True)
        self._source = torch.tensor([i for i, own in enumerate(rows) for _ in own], device=device)
        self._target = torch.tensor([row for own in rows for row in own], device=device)

    def attend(
        self, keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        query, key, value = self._padded(query), self._padded(key), self._padded(value)
        keys[self._target, : key.shape[1]] = key[self._source]
        values[self._target, : key.shape[1]] = value[self._source]
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        # Padding is to the right, so causal attention alone keeps it out of every real token.
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)[self._cells]

    def _padded(self, packed: Tensor) -> Tensor:
        padded = packed.new_zeros(*self._shape, *packed.shape[1:])
        padded[self._cells] = packed
        return padded


class _Decode:
    """A pass over one token per running row."""

    def __init__(self, positions: Tensor, longest: int) -> None:
        self.num_rows, self.length = len(positions), _rounded(longest + 1)
        self._cells = (torch.arange(self.num_rows, device=positions.device), positions)
        self._unseen = torch.arange(self.length, device=positions.device) > positions.unsqueeze(1)
        self._mask: Tensor | None = None

    def attend(
        self, keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        keys[self._cells] = key
        values[self._cells] = value
        if self._mask is None:
            mask = query.new_zeros(self._unseen.shape).masked_fill_(self._unseen, float("-inf"))
            self._mask = mask[:, None, None, :]
        # [rows, key heads, query heads that share one, head_dim]: the latter stand where several query tokens
        # would, so no key is copied.
        grouped = query.reshape(self.num_rows, key.shape[1], -1, query.shape[2])
        own_keys = keys[: self.num_rows, : self.length].transpose(1, 2)
        own_values = values[: self.num_rows, : self.length].transpose(1, 2)
        out = scaled_dot_product_attention(grouped, own_keys, own_values, attn_mask=self._mask, scale=scale)
        return out.reshape(self.num_rows, query.shape[1], -1)


def _rounded(length: int) -> int:
    return -(-length // _GRANULE) * _GRANULE


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    row_cache: RowCache | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's interface: [1, heads, tokens, head_dim] in, [1, tokens, heads, head_dim] out."""
    assert row_cache is not None, "this attention runs inside a rollout engine only"
    if sliding_window is not None or softcap is not None:
        raise InputError("model.path", "attention with a sliding window or soft cap", "a model without them")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return row_cache.attend(module.layer_idx, query, key, value, scale).unsqueeze(0), None


AttentionInterface.register(ATTENTION, _attention)
