"""The torch rollout engine beside PEFT's `generate(adapter_names=...)`: same model, adapters and requests.

A request has a context, an adapter, a number of tokens to sample and a time of arrival. Both sides have
the same number of rows. The engine takes a request as soon as a row is free. `generate` works on one batch at
a time: when it is free it takes all that have arrived, in order, as many as there are rows, pads them to the
left, and goes on until the longest is done; only the tokens that were asked for count. Neither ends early.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from executor.bench.adapters import LORA, TINY_BASE
from executor.bench.clock import WorkClock
from executor.protocols import AdapterFolder, Order, TurnRequest, TurnRequests
from executor.torch_engine import TorchRolloutEngine
from marlaas.commands import Generate, LoadAdapter
from marlaas.events import CommandFailed, TurnGenerated
from marlaas.spec import ReplicasSpec

VOCABULARY = range(3, 100)


class Request(NamedTuple):
    """One turn to sample."""

    context: list[int]
    adapter: int
    num_tokens: int
    arrives_s: float


def equal_requests(num: int, num_adapters: int, context_tokens: int = 32, tokens: int = 64) -> list[Request]:
    """Requests of one length that are all there at once; no two contexts are equal."""
    chance = random.Random(0)
    return [Request(_context(chance, context_tokens), i % num_adapters, tokens, 0.0) for i in range(num)]


def spread_requests(num: int, num_adapters: int, requests_per_s: float) -> list[Request]:
    """Contexts of 8 to 64 tokens, answers of a median of 40 and at most 256, Poisson arrivals."""
    chance, moment, found = random.Random(0), 0.0, []
    for i in range(num):
        tokens = min(256, max(4, round(chance.lognormvariate(3.7, 0.8))))
        found.append(Request(_context(chance, chance.randint(8, 64)), i % num_adapters, tokens, moment))
        moment += chance.expovariate(requests_per_s)
    return found


def _context(chance: random.Random, num: int) -> list[int]:
    return [chance.choice(VOCABULARY) for _ in range(num)]


class OurEngine:
    """The embedded engine with adapters loaded, driven as its worker would drive it."""

    def __init__(
        self, adapters: Sequence[AdapterFolder], num_rows: int, batch_invariant: bool | None = None
    ) -> None:
        spec = ReplicasSpec(
            slots=len(adapters), max_num_seqs=num_rows, kv_tokens=1 << 20, batch_invariant=batch_invariant
        )
        self._engine = TorchRolloutEngine("replica-0", str(TINY_BASE), spec, LORA, eos_token_ids=())
        for i, adapter in enumerate(adapters):
            command = LoadAdapter(id=i, replica="replica-0", task=f"t{i}", version=0)
            self._engine.start(Order(command=command, payload=adapter))
        self._engine.step()

    def tokens_per_s(self, requests: Sequence[Request]) -> float:
        """Serve requests in order of arrival; tokens asked for per second until the last is done."""
        clock, waiting, num_left = WorkClock(), list(reversed(requests)), len(requests)
        while num_left:
            if not self._engine.is_busy():
                clock.skip_to(waiting[-1].arrives_s)
            while waiting and waiting[-1].arrives_s <= clock.now():
                self._ask(len(requests) - len(waiting), waiting.pop())
            for report in self._engine.step():
                assert not isinstance(report.event, CommandFailed), report.event.reason
                num_left -= isinstance(report.event, TurnGenerated)
        return _num_tokens(requests) / clock.now()

    def _ask(self, number: int, request: Request) -> None:
        turn = TurnRequest(
            trajectory=number,
            context=request.context,
            max_new_tokens=request.num_tokens,
            temperature=1.0,
            seed=number,
        )
        command = Generate(
            id=number,
            replica="replica-0",
            task=f"t{request.adapter}",
            version=0,
            step=0,
            turn=0,
            trajectories=(number,),
        )
        self._engine.start(Order(command=command, payload=TurnRequests(requests=[turn])))


class PeftGenerate:
    """PEFT's model with the same adapters, one batch at a time."""

    def __init__(self, model: Any, num_rows: int) -> None:
        self._model, self._num_rows = model, num_rows

    def tokens_per_s(self, requests: Sequence[Request]) -> float:
        """Serve requests in order of arrival; tokens asked for per second until the last is done."""
        clock, waiting = WorkClock(), list(requests)
        while waiting:
            clock.skip_to(waiting[0].arrives_s)
            arrived = sum(request.arrives_s <= clock.now() for request in waiting)
            size = min(arrived, self._num_rows)
            self._generate(waiting[:size])
            del waiting[:size]
        return _num_tokens(requests) / clock.now()

    @torch.inference_mode()
    def _generate(self, batch: Sequence[Request]) -> None:
        longest = max(len(request.context) for request in batch)
        short = [longest - len(request.context) for request in batch]
        tokens = [[0] * num + request.context for num, request in zip(short, batch, strict=True)]
        mask = [[0] * num + [1] * (longest - num) for num in short]
        num_tokens = max(request.num_tokens for request in batch)
        out = self._model.generate(
            input_ids=torch.tensor(tokens),
            attention_mask=torch.tensor(mask),
            adapter_names=[str(request.adapter) for request in batch],
            max_new_tokens=num_tokens,
            do_sample=True,
            top_k=0,
            temperature=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out.shape[1] == longest + num_tokens, "generate must not end early"


def _num_tokens(requests: Sequence[Request]) -> int:
    return sum(request.num_tokens for request in requests)
