"""GRPO as arithmetic: advantages of groups, micro-batches of samples, and the clipped token-level loss.

    advantage   A = (reward − mean of its group) / standard deviation of its group; 0 where that is 0
    ratio       r = π(token) / π_sampler(token)
    loss        − mean over the batch's sampled tokens of min(r·A, clip(r, 1 − low, 1 + high)·A)

(Shao et al., "DeepSeekMath", 2024; the mean over tokens instead of sequences as in Yu et al., "DAPO", 2025.)
Owns the numbers; knows no model, adapter or file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

import torch
from torch import Tensor

from executor.protocols import Sample
from marlaas.spec import TrainingSpec


def advantages(samples: Sequence[Sample]) -> dict[int, float]:
    """Each trajectory's advantage within its own group, whatever size drops have left it."""
    groups: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    found = {}
    for members in groups.values():
        rewards = [sample.reward for sample in members]
        mean, deviation = fmean(rewards), pstdev(rewards)
        for sample in members:
            found[sample.trajectory] = (sample.reward - mean) / deviation if deviation > 0 else 0.0
    return found


class MicroBatch(NamedTuple):
    """Samples padded to the right to one length; all tensors are on one device.

    `tokens` [samples, length]; `targets`, `sampler_logprobs`, `advantages` [sampled tokens], in row-major
    order of the True cells of `sampled` [samples, length − first], which begins at column `first`: no token
    before it was sampled in any row.
    """

    tokens: Tensor
    first: int
    sampled: Tensor
    targets: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor


def micro_batches(
    samples: Sequence[Sample], advantage: dict[int, float], budget_tokens: int, device: torch.device
) -> Iterator[MicroBatch]:
    """Samples by falling length, as many at a time as fit the budget when padded, at least one."""
    for rows in cut(samples, budget_tokens):
        yield padded(rows, advantage, device)


def cut(samples: Sequence[Sample], budget_tokens: int) -> list[list[Sample]]:
    """The samples of each micro-batch, by falling length."""
    ordered = sorted(samples, key=lambda sample: (-len(sample.tokens), sample.trajectory))
    found = []
    while ordered:
        count = max(1, budget_tokens // len(ordered[0].tokens))
        found.append(ordered[:count])
        ordered = ordered[count:]
    return found


def padded(samples: Sequence[Sample], advantage: dict[int, float], device: torch.device) -> MicroBatch:
    """The micro-batch of these samples."""
    length = max(len(sample.tokens) for sample in samples)
    first = min(sample.sampled.index(True) for sample in samples if True in sample.sampled)
    tokens = torch.tensor([sample.tokens + [0] * (length - len(sample.tokens)) for sample in samples])
    sampled = torch.tensor([sample.sampled + [False] * (length - len(sample.tokens)) for sample in samples])
    logprobs = [
        p for sample in samples for p, own in zip(sample.logprobs, sample.sampled, strict=True) if own
    ]
    weights = [advantage[sample.trajectory] for sample in samples for own in sample.sampled if own]
    return MicroBatch(
        tokens=tokens.to(device),
        first=first,
        sampled=sampled[:, first:].to(device),
        targets=tokens[sampled].to(device),
        sampler_logprobs=torch.tensor(logprobs, device=device),
        advantages=torch.tensor(weights, device=device),
    )


class Sums(NamedTuple):
    """Sums over sampled tokens of one or more micro-batches; float64 scalars on the CPU."""

    loss: float = 0.0
    gap: float = 0.0
    kl: float = 0.0
    clipped: float = 0.0

    def plus(self, other: Sums) -> Sums:
        """Both together."""
        return Sums(*(a + b for a, b in zip(self, other, strict=True)))


def loss_sum(
    logits: Tensor, batch: MicroBatch, training: TrainingSpec, temperature: float
) -> tuple[Tensor, Sums]:
    """The loss summed over a micro-batch's sampled tokens, with gradient, and what there is to report.

    `logits` [sampled tokens, vocabulary] predict `batch.targets`. The policy that is improved is the one that
    sampled: softmax(logits / temperature). The sampler reports log-probabilities at temperature 1, so its
    difference from the trainer is taken there (`gap`, and `kl` by the estimator E[r − 1 − log r]).
    """
    logits = logits.float()
    tempered = -torch.nn.functional.cross_entropy(logits / temperature, batch.targets, reduction="none")
    with torch.no_grad():
        plain = -torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none")
        difference = plain - batch.sampler_logprobs
    ratio = torch.exp(tempered - tempered.detach() + difference)
    bounded = ratio.clamp(1 - training.clip_low, 1 + training.clip_high)
    gain = torch.minimum(ratio * batch.advantages, bounded * batch.advantages)
    loss = -gain.sum()
    with torch.no_grad():
        clipped = (bounded * batch.advantages < ratio * batch.advantages).sum()
        kl = (torch.expm1(difference) - difference).sum()
        sums = Sums(
            *torch.stack([loss.detach(), difference.abs().sum(), kl, clipped.to(loss.dtype)]).tolist()
        )
    return loss, sums
