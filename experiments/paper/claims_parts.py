"""The ablations: what is lost without asynchrony, and without multi-LoRA rollouts too."""

from __future__ import annotations

from experiments.paper import bounds
from experiments.paper.claim import (
    NO_ASYNCHRONY,
    NO_MULTI_LORA,
    Bound,
    Cell,
    Claim,
    by_model,
    verdict_of,
)
from experiments.paper.results import ASYNC_SINGLE_LORA, MARLAAS, SYNC, SYNC_SINGLE_LORA, Results
from experiments.words import percent


def no_asynchrony(results: Results) -> Claim:
    """Without asynchrony throughput falls by 66 %."""
    service = results.service
    losses = {
        model: 1 - _aggregate(results, model, SYNC) / _aggregate(results, model, MARLAAS)
        for model in results.models
    }
    model = max(losses, key=lambda name: losses[name])
    makespan = {name: results.gain(name, results.largest, MARLAAS, SYNC) for name in results.models}
    ours, theirs = service[model, MARLAAS], service[model, SYNC]
    most = max(makespan.values())
    return Claim(
        name="ablation: no asynchrony",
        claim="throughput without asynchrony",
        reported=f"−{percent(NO_ASYNCHRONY)}",
        simulated=losses[model],
        unit="share lost, aggregate steps/hour",
        verdict=verdict_of(_spans(losses, NO_ASYNCHRONY)),
        why=(
            f"As the aggregate of a service under way {by_model(losses)} are lost: without a barrier fast"
            " tasks lap slow ones. With equal steps for every task it is"
            f" {by_model({k: bounds.saving(v) for k, v in makespan.items()})}, a makespan {most:.2f} times"
            f" as long at the most: a loss of {percent(NO_ASYNCHRONY)} would be"
            f" {bounds.gain_of_saving(NO_ASYNCHRONY):.2f}×, which arithmetic forbids to equal work without"
            f" contention (below {bounds.SYNC_BOUND:.0f}×). So the reported figure can only be an aggregate"
            " over unequal tasks."
        ),
        bound=Bound(
            bounds.saving(bounds.SYNC_BOUND),
            "1 − 1/gain, gain < 2× of the makespan with equal work and without contention",
            "share of makespan",
        ),
        conditions=(
            f"{model}, {results.largest} tasks that go on for ever; sync, spread over all replicas as suits"
            " rounds, against marlaas"
        ),
        side_by_side={
            "aggregate steps/hour, under way, ratio": float(theirs["aggregate"] / ours["aggregate"]),
            "normalised, under way, ratio": float(theirs["normalised"] / ours["normalised"]),
            "makespan, equal steps, ratio": makespan[model],
        },
        beside={f"aggregate lost, {name}": value for name, value in losses.items()},
        run_folders=tuple(
            str(results.run_folder("sustained", model=model, system=system)) for system in (SYNC, MARLAAS)
        ),
    )


def _spans(losses: dict[str, float], reported: float) -> bool:
    """An ablation is reached where what is reported lies within what the models lose."""
    return min(losses.values()) <= reported <= max(losses.values())


_DEALT_WINS = (
    " A loss below zero is a gain: a replica that is dealt to one task pays for one adapter, and a quick task"
    " does not wait behind a slow one's sequences, while marlaas packs two tasks' batches on each. Dealing"
    " replicas with multi-LoRA kept is a composition of its own (placement: deal)."
)


def no_multi_lora(results: Results) -> Claim:
    """Without multi-LoRA rollouts too, throughput falls by a further 13 %."""
    losses = {
        model: 1 - _aggregate(results, model, SYNC_SINGLE_LORA) / _aggregate(results, model, SYNC)
        for model in results.models
    }
    alone_lost = {
        model: 1 - _aggregate(results, model, ASYNC_SINGLE_LORA) / _aggregate(results, model, MARLAAS)
        for model in results.models
    }
    points = {
        model: (_aggregate(results, model, SYNC) - _aggregate(results, model, SYNC_SINGLE_LORA))
        / _aggregate(results, model, MARLAAS)
        for model in results.models
    }
    nearest = min(
        ((abs(loss - NO_MULTI_LORA), loss, cell) for loss, cell in _single_lora_losses(results)),
        key=lambda row: row[0],
    )
    model = max(losses, key=lambda name: losses[name])
    _, loss, cell = nearest
    return Claim(
        name="ablation: also no multi-LoRA",
        claim="throughput without asynchrony and without multi-LoRA rollouts, a further",
        reported=f"−{percent(NO_MULTI_LORA)}",
        simulated=losses[model],
        unit="share lost against sync, aggregate steps/hour",
        verdict=verdict_of(_spans(losses, NO_MULTI_LORA)),
        why=(
            f"In a service under way {by_model(losses)} of what sync still has are lost, in points of marlaas"
            f" {by_model(points)}; with asynchrony kept, {by_model(alone_lost)}. With equal steps the loss"
            f" grows with the tasks, and nearest to {percent(NO_MULTI_LORA)} comes {cell.model} with"
            f" {cell.num_tasks} tasks, {percent(loss)}. Without multi-LoRA a task is dealt its share of whole"
            " replicas, the others' seats on them stay empty, and where tasks outnumber replicas they queue."
            " Spread over all replicas (placement: spread) a batch would wait its turn at each of them."
            + (_DEALT_WINS if min(alone_lost.values()) < 0 else "")
        ),
        bound=None,
        conditions=f"{model}, {results.largest} tasks that go on for ever; sync-single-lora against sync",
        side_by_side={
            "aggregate steps/hour, under way, ratio": 1 - losses[model],
            "normalised, under way, ratio": float(
                results.service[model, SYNC_SINGLE_LORA]["normalised"]
                / results.service[model, SYNC]["normalised"]
            ),
            "makespan, equal steps, ratio": 1 / results.gain(model, results.largest, SYNC_SINGLE_LORA, SYNC),
        },
        beside={
            **{f"lost against sync, {name}": value for name, value in losses.items()},
            **{f"lost with asynchrony kept, {name}": value for name, value in alone_lost.items()},
        },
        run_folders=tuple(
            str(results.run_folder("sustained", model=model, system=system))
            for system in (SYNC_SINGLE_LORA, SYNC)
        ),
    )


def _single_lora_losses(results: Results) -> list[tuple[float, Cell]]:
    """What equal steps lose without multi-LoRA against sync, in every cell with more than one task."""
    return [
        (1 - results.gain(model, num, SYNC_SINGLE_LORA, SYNC), Cell(model, num, 0.0))
        for model in results.models
        for num in results.num_tasks
        if num > 1
    ]


def _aggregate(results: Results, model: str, system: str) -> float:
    return float(results.service[model, system]["aggregate"])
