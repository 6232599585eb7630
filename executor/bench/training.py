"""The training engine beside a plain loop over PEFT's model and TRL's GRPO step: same model, same batch.

Each does one update per call: every sampled token's log-probability under the policy, the clipped loss as a
mean over tokens, gradients, their norm bounded, AdamW. Tokens counted are those of prompts and answers,
without padding.

    ours    a `Train` order, what it checks and reports included
    plain   what a user would write: micro-batches of so many samples in the order given, padded to the right,
            logits of the whole sequence, `log_softmax` and `gather`
    TRL     `GRPOTrainer.train()` whose generation is replaced by the batch (loss "dapo", beta 0)
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from executor.bench.adapters import LORA, TINY_BASE
from executor.bench.clock import WorkClock
from executor.grpo import advantages
from executor.protocols import NewAdapter, NextVersion, Order, Sample, TrainingBatch
from executor.trainer import PeftTrainingEngine
from marlaas.commands import Command, CreateAdapter, Publish, Train
from marlaas.events import CommandFailed
from marlaas.spec import LanesSpec, TrainingSpec

TRAINING = TrainingSpec()
SAMPLES_PER_GROUP = 8


def batch(num: int = 128) -> list[Sample]:
    """Episodes of one turn: prompts of 16 to 40 tokens, answers of a median of 40 tokens and at most 128."""
    chance, found = random.Random(0), []
    for i in range(num):
        if i % SAMPLES_PER_GROUP == 0:
            prompt = [chance.randrange(3, 100) for _ in range(chance.randint(16, 40))]
        answer = min(128, max(4, round(chance.lognormvariate(3.7, 0.6))))
        found.append(
            Sample(
                trajectory=i,
                group=i // SAMPLES_PER_GROUP,
                tokens=prompt + [chance.randrange(3, 100) for _ in range(answer)],
                sampled=[False] * len(prompt) + [True] * answer,
                logprobs=[0.0] * len(prompt) + [-4.5] * answer,
                reward=float(chance.random() < 0.5),
            )
        )
    return found


def num_tokens(samples: Sequence[Sample]) -> int:
    """Tokens that one update reads."""
    return sum(len(sample.tokens) for sample in samples)


class OurTrainer:
    """The embedded training engine with one task, driven as its worker would drive it."""

    def __init__(self, folder: Path, samples: list[Sample]) -> None:
        self._engine = PeftTrainingEngine("lane-0", str(TINY_BASE), LanesSpec())
        self._folder, self._samples, self._version, self._id = folder, samples, 0, 0
        new = NewAdapter(**self._folders(0), lora=LORA, training=TRAINING, seed=1)
        self._run(CreateAdapter(id=self._next_id(), lane="lane-0", task="t"), new)

    def update_s(self) -> float:
        """Seconds of one update; publishing it is not counted."""
        version, trajectories = self._version, tuple(range(len(self._samples)))
        payload = TrainingBatch(
            samples=self._samples, **self._folders(version), training=TRAINING, temperature=1.0, seed=version
        )
        command = Train(
            id=self._next_id(),
            lane="lane-0",
            task="t",
            step=version,
            version=version,
            trajectories=trajectories,
        )
        clock = WorkClock()
        self._run(command, payload)
        elapsed = clock.now()
        self._version += 1
        publish = Publish(id=self._next_id(), lane="lane-0", task="t", version=self._version)
        self._run(publish, NextVersion(**self._folders(self._version), cursor={"step": self._version}))
        return elapsed

    def _run(self, command: Command, payload: Any) -> None:
        event = self._engine.run(Order(command=command, payload=payload)).event
        assert not isinstance(event, CommandFailed), event.reason

    def _next_id(self) -> int:
        self._id += 1
        return self._id

    def _folders(self, version: int) -> dict[str, str]:
        kinds = ("adapter", "optimizer")
        return {f"{kind}_folder": str(self._folder / kind / f"v{version}") for kind in kinds}


class _Chunk(NamedTuple):
    """A micro-batch of the plain loop; all [samples, length] but `advantages` [samples, 1]."""

    tokens: Tensor
    mask: Tensor
    sampled: Tensor
    logprobs: Tensor
    advantages: Tensor


class PlainLoop:
    """PEFT's model and torch's AdamW in a loop as short as it can be."""

    def __init__(self, model: Any, samples: list[Sample], samples_at_a_time: int) -> None:
        self._model, self._samples, self._size = model, samples, samples_at_a_time
        model.train()
        parameters = [p for name, p in model.named_parameters() if "lora_" in name and ".0." in name]
        self._parameters = [p.requires_grad_(True) for p in parameters if p.is_floating_point()]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=TRAINING.lr, weight_decay=0.0)

    def update_s(self) -> float:
        """Seconds of one update."""
        clock = WorkClock()
        advantage = advantages(self._samples)
        num_sampled = sum(sum(sample.sampled) for sample in self._samples)
        self._optimizer.zero_grad()
        for begin in range(0, len(self._samples), self._size):
            chunk = _padded(self._samples[begin : begin + self._size], advantage)
            (self._loss(chunk) / num_sampled).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._parameters, TRAINING.max_grad_norm)
        self._optimizer.step()
        return clock.now()

    def _loss(self, chunk: _Chunk) -> Tensor:
        logits = self._model(input_ids=chunk.tokens, attention_mask=chunk.mask, use_cache=False).logits
        targets = chunk.tokens[:, 1:].unsqueeze(2)
        logprobs = torch.log_softmax(logits[:, :-1], -1).gather(2, targets).squeeze(2)
        ratio = torch.exp(logprobs - chunk.logprobs[:, 1:])
        bounded = ratio.clamp(1 - TRAINING.clip_low, 1 + TRAINING.clip_high)
        gain = torch.minimum(ratio * chunk.advantages, bounded * chunk.advantages)
        return -(gain * chunk.sampled[:, 1:]).sum()


def _padded(samples: Sequence[Sample], advantage: dict[int, float]) -> _Chunk:
    longest = max(len(sample.tokens) for sample in samples)
    short = [longest - len(sample.tokens) for sample in samples]
    return _Chunk(
        tokens=torch.tensor([s.tokens + [0] * n for s, n in zip(samples, short, strict=True)]),
        mask=torch.tensor([[1] * (longest - n) + [0] * n for n in short]),
        sampled=torch.tensor([s.sampled + [False] * n for s, n in zip(samples, short, strict=True)]),
        logprobs=torch.tensor([s.logprobs + [0.0] * n for s, n in zip(samples, short, strict=True)]),
        advantages=torch.tensor([[advantage[sample.trajectory]] for sample in samples]),
    )
