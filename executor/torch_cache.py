"""Keeps the keys and values of the running sequences and computes attention over them.

One row per running sequence, rows 0..B-1 always dense, all padded to one length that grows as needed. It is
plugged into any Hugging Face model through its attention interface, so a model needs no change:

    prefill  new sequences packed one after another in one row of input; causal attention inside each; keys
             and values are stored in the rows given
    decode   one token per running row; attends to its row
    either   tokens after those announced are padding: they attend to nothing

What a sequence computes does not depend on the others. New sequences are padded to a length of their own, and
attended with those of the same length. A decoding row meets as many padded cells as the longest row has: they
add exact zeros, and in spans so short that products of matrices sum each in one go, whatever its length.

Owns storage and attention; knows no tokens, tasks or adapters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from marlaas.errors import InputError

ATTENTION = "marlaas_rows"
# Lengths are rounded up to this: few distinct kernel shapes, and padding falls into whole vector lanes.
_GRANULE = 32
# Keys are attended in spans of so many. Matrix products cut longer sums in parts, at places that depend on
# the padded length (MKL 2024 from 385 with AVX-512, from 257 with AVX2).
_SPAN = 256


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
        rows, length, num_tokens = self._pass.num_rows, self._pass.length, self._pass.num_tokens
        held = self._layers.get(layer)
        if held is None or held[0].shape[0] < rows or held[0].shape[1] < length:
            keys, values = held or (None, None)
            held = self._grown(keys, rows, length, key), self._grown(values, rows, length, value)
            self._layers[layer] = held
        out = self._pass.attend(*held, query[:num_tokens], key[:num_tokens], value[:num_tokens], scale)
        padding = len(query) - num_tokens
        return pad(out, (0, 0, 0, 0, 0, padding)) if padding else out

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
        self.num_tokens = sum(lengths)
        self.num_rows = 1 + max(max(own) for own in rows)
        self.length = max(_own_length(length) for length in lengths)
        begins = [0, *accumulate(lengths)]
        alike: dict[int, list[int]] = defaultdict(list)
        for i, length in enumerate(lengths):
            alike[_own_length(length)].append(i)
        self._groups = [
            _Alike(
                length, [begins[i] for i in own], [lengths[i] for i in own], [rows[i] for i in own], device
            )
            for length, own in alike.items()
        ]

    def attend(
        self, keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        if len(self._groups) == 1:
            return self._groups[0].attend(keys, values, query, key, value, scale)
        out = torch.empty_like(query)
        for group in self._groups:
            own = group.tokens
            out[own] = group.attend(keys, values, query[own], key[own], value[own], scale)
        return out


class _Alike:
    """New sequences that are padded to the same length."""

    def __init__(
        self,
        length: int,
        begins: Sequence[int],
        lengths: Sequence[int],
        rows: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        self._shape = (len(lengths), length)
        columns = torch.arange(length, device=device)
        seen = columns < torch.tensor(lengths, device=device).unsqueeze(1)
        # Where each of these tokens sits in the padded batch [sequence, position], in packed order.
        self._cells = seen.nonzero(as_tuple=True)
        # Where they sit among the tokens of the pass.
        self.tokens = (torch.tensor(begins, device=device).unsqueeze(1) + columns)[seen]
        self._source = torch.tensor([i for i, own in enumerate(rows) for _ in own], device=device)
        self._target = torch.tensor([row for own in rows for row in own], device=device)

    def attend(
        self, keys: Tensor, values: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Store and attend; [tokens of these sequences, heads, head_dim]."""
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
        self.num_tokens = self.num_rows = len(positions)
        self.length = _rounded(longest + 1)
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
        held = (keys[: self.num_rows, : self.length], values[: self.num_rows, : self.length])
        return _in_spans(grouped, *held, self._mask, scale).reshape(self.num_rows, query.shape[1], -1)


def _in_spans(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of `query` [rows, key heads, sharing, head_dim] over `keys`, `values` [rows, length, ...]."""
    if keys.shape[1] <= _SPAN or keys.device.type != "cpu":
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    total, norm = _attend_span(query, keys, values, mask, scale, 0)
    for begin in range(_SPAN, keys.shape[1], _SPAN):
        out, own_norm = _attend_span(query, keys, values, mask, scale, begin)
        both = torch.logaddexp(norm, own_norm)
        merged = total * (norm - both).exp() + out * (own_norm - both).exp()
        # A row that ends before this span stays what it is, to the bit.
        unseen = mask[..., begin : begin + 1].isinf()
        total, norm = torch.where(unseen, total, merged), torch.where(unseen, norm, both)
    return total


def _attend_span(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, begin: int
) -> tuple[Tensor, Tensor]:
    """Attention over one span, and the logarithm of its softmax's denominator; the latter [..., 1]."""
    span = slice(begin, begin + _SPAN)
    out, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query,
        keys[:, span].transpose(1, 2),
        values[:, span].transpose(1, 2),
        attn_mask=mask[..., span],
        scale=scale,
    )
    return out, norm.unsqueeze(-1)


def _rounded(length: int) -> int:
    return -(-length // _GRANULE) * _GRANULE


def _own_length(length: int) -> int:
    """The length a new sequence is padded to: at most an eighth longer, so that there are few."""
    granule = max(_GRANULE, 1 << max(0, length.bit_length() - 4))
    return -(-length // granule) * granule


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
