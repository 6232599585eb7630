"""The embedded training engine: GRPO and AdamW on PEFT adapters over one frozen base model.

    CreateAdapter ──► version 0 on disk
    Train         ──► committed version v (from disk, or still in memory) ──► v+1 in memory
    Publish       ──► v+1 on disk

One set of adapter modules is laid into the base; whichever task trains has its weights copied in and out, so
memory does not grow with the number of tasks. Weights are read-only between orders: an order that fails, or
is given twice, has changed nothing. Owns the update; knows no scheduler and no rollout engine.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from executor.adapters import (
    AdapterProblem,
    TrainingState,
    fingerprint,
    pristine,
    read_adapter,
    read_optimizer,
    read_shape,
    write_adapter,
    write_optimizer,
)
from executor.base_model import BaseModel, choose_device, load_base
from executor.grpo import Sums, advantages, loss_sum
from executor.policy import LoraPolicy
from executor.protocols import NewAdapter, NextVersion, Order, Report, Sample, TrainingBatch
from executor.ranks import Alone, Ranks
from marlaas.commands import CreateAdapter, Publish, Train
from marlaas.events import (
    AdapterCreated,
    AdapterPublished,
    CommandFailed,
    Event,
    TrainingFinished,
    TrainingStats,
)
from marlaas.spec import LanesSpec, LoraSpec, TrainingSpec

ALONE = Alone()

_MOMENTS = ("exp_avg", "exp_avg_sq")
# Activations of so few tokens stay in a CPU's caches: a tenth faster for a tiny model, and less padding.
_CPU_CACHE_TOKENS = 2048
_REMEMBERED_ANSWERS = 256
_REMEMBERED_VERSIONS = 8


class Version(NamedTuple):
    """One version of a task's adapter with its optimizer, as tensors nobody writes to."""

    lora: LoraSpec
    number: int
    num_updates: int
    seed: int
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]


class PeftTrainingEngine:
    """Trains one adapter at a time over one frozen base model; a `TrainingEngine`.

    `base` is the model where the caller has loaded it, and `ranks` the peers it is sharded among. Raises
    `InputError` for a missing model or device.
    """

    def __init__(
        self,
        lane: str,
        model_folder: str,
        lanes: LanesSpec,
        *,
        dtype: str = "float32",
        base: BaseModel | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.lane = lane
        self._folder = str(Path(model_folder).resolve())
        self._base = base or load_base(model_folder, dtype, choose_device(lanes.device, lanes.devices))
        self._ranks = ranks
        self._policy: LoraPolicy | None = None
        self._answers: OrderedDict[int, Report] = OrderedDict()
        # Trained, not yet published; bounded, for a task may be cancelled in between.
        self._trained: OrderedDict[str, Version] = OrderedDict()
        self._committed: tuple[str, Version] | None = None

    def run(self, order: Order) -> Report:
        """Carry out a CreateAdapter, Train or Publish order to its end; failures are `CommandFailed`.

        An order whose command id was carried out before gets the same answer again, and nothing is done.
        """
        if order.command.id not in self._answers:
            try:
                event = self._carry_out(order)
            except self._ranks.order_failures as problem:
                event = CommandFailed(at=0, command=order.command.id, reason=str(problem))
            self._answers[order.command.id] = Report(event=event)
            _forget_oldest(self._answers, _REMEMBERED_ANSWERS)
        return self._answers[order.command.id]

    def _carry_out(self, order: Order) -> Event:
        command, payload = order.command, order.payload
        if isinstance(command, CreateAdapter) and isinstance(payload, NewAdapter):
            return self._create(command, payload)
        if isinstance(command, Train) and isinstance(payload, TrainingBatch):
            return self._train(command, payload)
        if isinstance(command, Publish) and isinstance(payload, NextVersion):
            return self._publish(command, payload)
        raise AdapterProblem(f"a training engine cannot carry out {type(command).__name__} with this payload")

    def _create(self, command: CreateAdapter, payload: NewAdapter) -> AdapterCreated:
        policy = self._policy_for(payload.lora)
        weights = pristine(policy.shapes, payload.seed)
        moments = {f"{name}.{part}": torch.zeros_like(w) for name, w in weights.items() for part in _MOMENTS}
        new = Version(payload.lora, 0, 0, payload.seed, weights, moments)
        self._commit(new, payload.adapter_folder, payload.optimizer_folder, {})
        return AdapterCreated(at=0, command=command.id, fingerprint=fingerprint(weights))

    def _train(self, command: Train, payload: TrainingBatch) -> TrainingFinished:
        self._check(payload.samples)
        old = self._ranks.agreed(lambda: self._load(command, payload))
        policy = self._policy_for(old.lora)
        policy.load(old.weights)
        torch.manual_seed(payload.seed)
        advantage = advantages(payload.samples)
        update = any(advantage.values())
        sums = self._gradients(policy, payload, advantage, update)
        new = old._replace(number=old.number + 1, seed=payload.seed)
        norm = 0.0
        if update:
            norm = _clip(policy, payload.training.max_grad_norm)
            new = _stepped(policy, new, payload.training)
        self._trained.pop(command.task, None)
        self._trained[command.task] = new
        _forget_oldest(self._trained, _REMEMBERED_VERSIONS)
        return TrainingFinished(at=0, command=command.id, stats=_stats(payload.samples, sums, norm, update))

    def _publish(self, command: Publish, payload: NextVersion) -> AdapterPublished:
        new = self._trained.get(command.task)
        if new is None or new.number != command.version:
            raise AdapterProblem(f"{command.task}-v{command.version} was not trained here")
        self._commit(new, payload.adapter_folder, payload.optimizer_folder, payload.cursor)
        del self._trained[command.task]
        self._committed = (command.task, new)
        return AdapterPublished(at=0, command=command.id, fingerprint=fingerprint(new.weights))

    # --- versions --------------------------------------------------------------------------------

    def _load(self, command: Train, payload: TrainingBatch) -> Version:
        """The committed version to train from, out of memory if it is exactly that one."""
        if self._committed is not None:
            task, version = self._committed
            if task == command.task and version.number == command.version:
                return version
        folder = Path(payload.adapter_folder)
        lora = read_shape(folder)
        weights = read_adapter(folder, lora, self._policy_for(lora).shapes)
        moments, state = read_optimizer(Path(payload.optimizer_folder))
        if state.version != command.version or state.fingerprint != fingerprint(weights):
            raise AdapterProblem(
                f"{payload.optimizer_folder} is of v{state.version} with fingerprint {state.fingerprint},"
                f" not of {command.task}-v{command.version} in {folder}"
            )
        return Version(lora, state.version, state.num_updates, state.seed, weights, moments)

    def _commit(self, version: Version, adapter: str, optimizer: str, cursor: dict[str, int]) -> None:
        """Make a version durable; the optimizer first, so that what is loadable is trainable."""
        self._ranks.agreed(lambda: self._write(version, adapter, optimizer, cursor))

    def _write(self, version: Version, adapter: str, optimizer: str, cursor: dict[str, int]) -> None:
        if not self._ranks.is_first:
            return
        state = TrainingState(
            version=version.number,
            num_updates=version.num_updates,
            seed=version.seed,
            fingerprint=fingerprint(version.weights),
            cursor=cursor,
        )
        write_optimizer(Path(optimizer), version.moments, state)
        write_adapter(Path(adapter), version.weights, version.lora, self._folder)

    def _policy_for(self, lora: LoraSpec) -> LoraPolicy:
        if self._policy is None or self._policy.lora != lora:
            if self._policy is not None:
                self._policy.remove()
            self._policy = LoraPolicy(self._base, lora)
        return self._policy

    # --- the update ------------------------------------------------------------------------------

    def _check(self, samples: list[Sample]) -> None:
        """Refuse samples that would poison the update, naming the first."""
        if not samples:
            raise AdapterProblem("no samples to train on")
        for sample in samples:
            problem = self._problem(sample)
            if problem:
                raise AdapterProblem(f"trajectory {sample.trajectory}: {problem}")

    def _problem(self, sample: Sample) -> str:
        if not math.isfinite(sample.reward):
            return f"the reward is {sample.reward}"
        if not len(sample.tokens) == len(sample.sampled) == len(sample.logprobs):
            return "tokens, sampled and logprobs differ in length"
        if True not in sample.sampled or sample.sampled[0]:
            return "no token was sampled, or the first one, which nothing predicts"
        if not all(math.isfinite(p) for p in sample.logprobs):
            return "a log-probability of the sampler is not finite"
        if min(sample.tokens) < 0 or max(sample.tokens) >= self._base.vocab_size:
            return f"token ids must be below {self._base.vocab_size}"
        return ""

    def _gradients(
        self, policy: LoraPolicy, payload: TrainingBatch, advantage: dict[int, float], update: bool
    ) -> Sums:
        """Run every micro-batch; leave the mean loss's gradients in the policy if `update`."""
        num_sampled = sum(sum(sample.sampled) for sample in payload.samples)
        total, training = Sums(), payload.training
        budget = training.micro_batch_tokens
        if self._base.device.type == "cpu":
            budget = min(budget, _CPU_CACHE_TOKENS)
        batches = self._ranks.share(payload.samples, advantage, budget, self._base.device)
        with torch.set_grad_enabled(update):
            for batch, weight in batches:
                loss, sums = loss_sum(policy.logits(batch), batch, training, payload.temperature)
                if update:
                    (loss * weight / num_sampled).backward()  # type: ignore[no-untyped-call]
                total = total.plus(sums) if weight else total
        total = self._ranks.total(policy, total, update)
        mean = Sums(*(value / num_sampled for value in total))
        if not all(math.isfinite(value) for value in mean):
            raise AdapterProblem(f"the loss or a log-probability is not finite: {mean}")
        return mean


def _clip(policy: LoraPolicy, max_norm: float) -> float:
    """Bound the gradient's norm; its norm before."""
    norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters.values(), max_norm))
    if not math.isfinite(norm):
        raise AdapterProblem(f"the gradient norm is {norm}")
    return norm


def _stepped(policy: LoraPolicy, version: Version, training: TrainingSpec) -> Version:
    """One AdamW step with the policy's gradients, from the version's moments."""
    optimizer = torch.optim.AdamW(
        policy.parameters.values(), lr=training.lr, weight_decay=training.weight_decay
    )
    for name, parameter in policy.parameters.items():
        state = {part: version.moments[f"{name}.{part}"].to(parameter.device, copy=True) for part in _MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(float(version.num_updates)), **state}
    optimizer.step()
    weights = policy.weights()
    broken = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    if broken:
        raise AdapterProblem(f"the update made {broken[0]} not finite")
    moments = {
        f"{name}.{part}": optimizer.state[parameter][part].cpu()
        for name, parameter in policy.parameters.items()
        for part in _MOMENTS
    }
    return version._replace(num_updates=version.num_updates + 1, weights=weights, moments=moments)


def _stats(samples: list[Sample], sums: Sums, norm: float, updated: bool) -> TrainingStats:
    return TrainingStats(
        num_tokens=sum(len(sample.tokens) for sample in samples),
        updated=updated,
        loss=sums.loss,
        grad_norm=norm,
        kl=sums.kl,
        logprob_gap=sums.gap,
        clip_fraction=sums.clipped,
    )


def _forget_oldest(remembered: OrderedDict[Any, Any], most: int) -> None:
    while len(remembered) > most:
        remembered.popitem(last=False)
