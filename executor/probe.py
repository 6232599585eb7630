"""Asks a model server, before any tenant does, whether an adapter makes the difference it should.

A server that takes adapters and then ignores them, keeps an old one, or leaks one into the base would train
nothing and say nothing. Owns the question; knows no engine.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from executor.adapters import fingerprint, pristine, write_adapter
from executor.base_facts import BaseFacts
from executor.protocols import TurnRequest, TurnResult
from executor.served_engine import ModelServer
from marlaas.errors import MarlaasError

_SEED = 20_231
_NUM_TOKENS = 8
_STRENGTHS = (0.05, 0.5, 5.0)  # a base that is very sure of itself needs a push to say something else
_SAME, _DIFFERENT = 1e-2, 5e-2  # nats; bf16 rounds a log-probability to about 1e-3 of its logits


class Unfaithful(MarlaasError):
    """A model server does not serve adapters faithfully; it must not be used."""


async def probe(server: ModelServer, base: BaseFacts, base_name: str) -> None:
    """Raise `Unfaithful` unless an adapter changes what the base says, alike after a reload and only then."""
    context = [(7 * i + 3) % base.vocab_size for i in range(16)]
    request = TurnRequest(
        trajectory=0, context=context, max_new_tokens=_NUM_TOKENS, temperature=0.0, seed=_SEED
    )
    bare = await server.sample(None, request)
    names = (f"probe-v{number}" for number in itertools.count())  # always new, so that no KV is found again

    async def ask(folder: Path, fingerprint: str) -> TurnResult:
        name = next(names)
        await server.load(name, str(folder), fingerprint + name)
        answer = await server.sample(name, request)
        await server.unload(name)
        return answer

    with tempfile.TemporaryDirectory(prefix="marlaas-probe-") as root:
        for strength in _STRENGTHS:
            tensors, folder = (
                random_adapter(base.shapes, _SEED, strength),
                Path(root) / f"strength-{strength}",
            )
            write_adapter(folder, tensors, base.lora, base_name)
            first = await ask(folder, fingerprint(tensors))
            if _gap(bare, first) > _DIFFERENT:
                break
        again = await ask(folder, fingerprint(tensors))
    _judge(bare, first, again, await server.sample(None, request))


def _judge(bare: TurnResult, first: TurnResult, again: TurnResult, after: TurnResult) -> None:
    found = {
        "an adapter changes nothing": _gap(bare, first) > _DIFFERENT,
        "the same adapter loaded again says something else": _gap(first, again) < _SAME,
        "the base is not itself again once the adapter is unloaded": _gap(bare, after) < _SAME,
    }
    failures = [problem for problem, holds in found.items() if not holds]
    if failures:
        raise Unfaithful(f"this server cannot be trusted with adapters: {'; '.join(failures)}")


def _gap(one: TurnResult, other: TurnResult) -> float:
    """The largest difference of the tokens' log-probabilities; infinite where the tokens differ."""
    if one.tokens != other.tokens:
        return math.inf
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


def random_adapter(
    shapes: Mapping[str, tuple[int, ...]], seed: int, strength: float = 0.05
) -> dict[str, torch.Tensor]:
    """An adapter of these tensors; `strength` is the spread of B, and 0.05 changes most bases a good deal."""
    generator = torch.Generator().manual_seed(seed)
    tensors = pristine(shapes, seed)
    for name in sorted(tensors):
        if name.endswith(".lora_B.weight"):
            tensors[name] = strength * torch.randn(tensors[name].shape, generator=generator)
    return tensors
