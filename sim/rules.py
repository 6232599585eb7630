"""How an engine admits sequences, and in what steps it works."""

from __future__ import annotations

from typing import Literal

import msgspec

KvRule = Literal["reserve", "preempt"]
PrefillRule = Literal["own-pass", "mixed"]
CacheRule = Literal["none", "prompts", "turns"]


class EngineRules(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's seats, its KV pool, and what it does with them.

    `prefill`: in a pass of its own before the next iteration, or mixed into iterations in chunks, as vLLM v1
    does. `max_prefill_tokens` bounds the context tokens of such a pass, which takes at least one sequence
    however long; mixed, it is the token budget of an iteration, a token of each decoding sequence included.
    None is no bound. With `shares_prompts` a context that several sequences of a pass have in common fills
    that bound once; its cost is per token of context served all the same, as the embedded engine counts it.

    `prefix_cache` reads again what is still there: of `prompts` that samples share and of sequences that were
    preempted or aborted, or also of earlier `turns`; in whole blocks of `block_tokens`.
    """

    max_num_seqs: int
    kv_tokens: int
    kv_rule: KvRule = "preempt"
    prefill: PrefillRule = "own-pass"
    max_prefill_tokens: int | None = None
    shares_prompts: bool = False
    prefix_cache: CacheRule = "none"
    block_tokens: int = 1
