"""The claims of the original, each with what was simulated, what arithmetic allows, and the verdict.

Every claim is a function of the results alone: numbers first, then the words that they bring about. `reached`
is decided by a rule that stands beside the number it judges; the words follow. Knows no figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from experiments.paper import bounds
from experiments.paper.results import (
    ASYNC_SINGLE_LORA,
    MARLAAS,
    SINGLE,
    SYNC,
    SYNC_SINGLE_LORA,
    Results,
    workload_of,
)
from experiments.words import percent

Number = float | int | None
Verdict = Literal["reached", "not reached"]

THROUGHPUT, UTILISATION, IDLE, TIME = 5.7, 4.3, 0.45, 0.85
NO_ASYNCHRONY, NO_MULTI_LORA = 0.66, 0.13
ASYMMETRY = (10.0, 100.0)
MODEST = 2.0
"""A step latency of at most twice that alone is taken for "modestly higher"."""
HELD = 0.9
"""Throughput that nowhere falls below 0.9 of what fewer tasks had is taken for "held"."""
SATURATED = 0.85
"""A lane that is busy for more than this share of the time is taken for a bottleneck."""


class Bound(msgspec.Struct, frozen=True):
    """A number that arithmetic does not let pass, and its formula in words."""

    value: float
    formula: str


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One claim and its fate; `simulated` is the number that is judged, `beside` puts it in its place.

    `side_by_side` has aggregate, normalised and makespan wherever the claim is about throughput.
    `run_folders` are relative to the study's folder.
    """

    name: str
    claim: str
    reported: str
    simulated: float
    unit: str
    verdict: Verdict
    why: str
    bound: Bound | None
    conditions: str
    side_by_side: dict[str, Number] = {}
    beside: dict[str, Number] = {}
    run_folders: tuple[str, ...] = ()


class Cell(msgspec.Struct, frozen=True):
    """A place in the main grid and the gain of marlaas there."""

    model: str
    num_tasks: int
    gain: float


def all_claims(results: Results) -> list[Claim]:
    """Every claim of the original, judged."""
    return [claim(results) for claim in CLAIMS]


def write_claims(results: Results, path: Path) -> list[Claim]:
    """Judge all claims and write them as JSON."""
    claims = all_claims(results)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(claims), indent=2) + b"\n")
    return claims


# --- what several claims ask -----------------------------------------------------------------------


def gains(results: Results, baseline: str = SINGLE) -> list[Cell]:
    """The gain of marlaas over a baseline in steps per hour, in every cell of the main grid."""
    return [
        Cell(model, num, results.gain(model, num, MARLAAS, baseline))
        for model in results.models
        for num in results.num_tasks
    ]


def best(cells: Sequence[Cell]) -> Cell:
    """The cell with the largest gain."""
    return max(cells, key=lambda cell: cell.gain)


def smallest_reaching(cells: Sequence[Cell], wanted: float) -> dict[str, int]:
    """By model, the fewest tasks with which the gain is `wanted` or more; absent where it never is."""
    found: dict[str, int] = {}
    for cell in cells:
        if cell.gain >= wanted:
            found[cell.model] = min(cell.num_tasks, found.get(cell.model, cell.num_tasks))
    return found


def mixed_bound(results: Results, model: str) -> Bound:
    """The bound on the gain over single with the most tasks, from what each task took alone."""
    alone = list(results.alone(model).values())
    limit = bounds.mixed_gain_limit(alone)
    return Bound(
        bounds.mixed_gain_bound(alone),
        f"Σ(R+T) / max(ΣT, max(R+T)) over {len(alone)} tasks on one lane; the {limit} limits",
    )


def side_by_side(results: Results, model: str, num_tasks: int, baseline: str = SINGLE) -> dict[str, Number]:
    """Aggregate, normalised and makespan of marlaas and a baseline, and their ratios."""
    ours, theirs = (results.at(model, num_tasks, system) for system in (MARLAAS, baseline))
    found: dict[str, Number] = {}
    for metric in ("steps_per_hour", "steps_per_hour_normalised", "makespan_s"):
        a, b = float(ours[metric]), float(theirs[metric])
        found |= {f"{metric}.{MARLAAS}": a, f"{metric}.{baseline}": b, f"{metric}.ratio": a / b}
    return found


def _folders(results: Results, models: Sequence[str], systems: Sequence[str]) -> tuple[str, ...]:
    return tuple(str(results.headline_folder(model, system)) for model in models for system in systems)


def _at(cell: Cell) -> str:
    return f"{cell.model}, {cell.num_tasks} tasks in turn GSM8K, AMC12 and agentic search, equal steps each"


def _verdict(is_reached: bool) -> Verdict:
    return "reached" if is_reached else "not reached"


def _spelt(found: dict[str, int]) -> str:
    return ", ".join(f"{num} tasks on {model}" for model, num in found.items()) or "nowhere"


def _short(results: Results, wanted: float) -> str:
    """For each model that stays below a gain: how far it comes, and what forbids or takes the rest."""
    parts = []
    for model in results.models:
        top = best([cell for cell in gains(results) if cell.model == model])
        if top.gain >= wanted:
            continue
        bound = mixed_bound(results, model)
        forbids = "which forbids it" if bound.value < wanted else "so arithmetic would allow it"
        busy = results.at(model, results.largest, MARLAAS)["train_busy"]
        parts.append(
            f"{model} ends at {top.gain:.2f}×: the bound is {bound.value:.2f}×, {forbids}; its lane is busy"
            f" {percent(busy)} of the time and shared replicas make rollouts"
            f" {results.latency_ratio(model, results.largest):.1f} times as long as alone, waits included"
        )
    return "; ".join(parts)


# --- the claims ------------------------------------------------------------------------------------


def throughput(results: Results) -> Claim:
    """Up to 5.7 times the steps per hour."""
    cells = gains(results)
    top, reaching = best(cells), smallest_reaching(cells, THROUGHPUT)
    over_sync = best(gains(results, SYNC))
    bound = mixed_bound(results, top.model)
    low, high = results.gain_range(top.model, top.num_tasks, MARLAAS, SINGLE)
    why = (
        f"marlaas commits {top.gain:.2f} times the steps per hour of single ({low:.2f} to {high:.2f} over"
        f" seeds) on {top.model} with {top.num_tasks} tasks. {THROUGHPUT}× is first reached with"
        f" {_spelt(reaching)}. It takes R/T of at least {THROUGHPUT - 1:.1f} and {THROUGHPUT:.0f} tasks or"
        f" more, and a lane that is not yet full. Over sync the most is {over_sync.gain:.2f}×, on"
        f" {over_sync.model} with {over_sync.num_tasks} tasks."
    )
    short = _short(results, THROUGHPUT)
    return Claim(
        name="throughput",
        claim="training throughput in steps per hour, up to",
        reported=f"{THROUGHPUT}×",
        simulated=top.gain,
        unit="× single",
        verdict=_verdict(top.gain >= THROUGHPUT),
        why=why + (f" {short}." if short else ""),
        bound=bound,
        conditions=_at(top),
        side_by_side=side_by_side(results, top.model, top.num_tasks),
        beside={f"gain, {cell.model}, {cell.num_tasks} tasks": cell.gain for cell in cells},
        run_folders=_folders(results, [top.model], [SINGLE, MARLAAS]),
    )


def utilisation(results: Results) -> Claim:
    """Up to 4.3 times the accelerator utilisation."""
    found = [Cell(cell.model, cell.num_tasks, _ratio(results, cell, "effective")) for cell in gains(results)]
    top, reaching = best(found), smallest_reaching(found, UTILISATION)
    alone = results.at(top.model, top.num_tasks, SINGLE)["effective"]
    ours = results.at(top.model, top.num_tasks, MARLAAS)["effective"]
    busy = best([Cell(c.model, c.num_tasks, _ratio(results, c, "busy")) for c in found])
    return Claim(
        name="utilisation",
        claim="accelerator utilisation, up to",
        reported=f"{UTILISATION}×",
        simulated=top.gain,
        unit="× single, effective",
        verdict=_verdict(top.gain >= UTILISATION),
        why=(
            f"Effective utilisation, the share of what the devices could do, rises from {percent(alone)}"
            f" to {percent(ours)}; {UTILISATION}× is first reached with {_spelt(reaching)}. With equal work"
            f" and fixed peaks it rises exactly as the makespan falls, so {UTILISATION}× and {THROUGHPUT}×"
            f" are different operating points. Pool-busy time rises {busy.gain:.2f}× at the most"
            f" ({busy.model}, {busy.num_tasks} tasks): half of the devices are always busy under single"
            " already, so it cannot reach it."
        ),
        bound=Bound(bounds.effective_gain_bound(alone), "1 / effective utilisation of single"),
        conditions=_at(top),
        side_by_side=side_by_side(results, top.model, top.num_tasks),
        beside={"effective.single": alone, "effective.marlaas": ours, "busy, largest ratio": busy.gain},
        run_folders=_folders(results, [top.model], [SINGLE, MARLAAS]),
    )


def _ratio(results: Results, cell: Cell, metric: str) -> float:
    ours, alone = (float(results.at(cell.model, cell.num_tasks, s)[metric]) for s in (MARLAAS, SINGLE))
    return ours / alone


def idle(results: Results) -> Claim:
    """Up to 45 % less idle time than single and sync."""
    cells = [
        Cell(c.model, c.num_tasks, min(_idle_less(results, c, SINGLE), _idle_less(results, c, SYNC)))
        for c in gains(results)
    ]
    cell = best(cells)
    less = cell.gain
    ours, single, sync = (
        results.at(cell.model, cell.num_tasks, system)["idle"] for system in (MARLAAS, SINGLE, SYNC)
    )
    effective = [
        1 - results.at(cell.model, cell.num_tasks, system)["effective"] for system in (MARLAAS, SINGLE, SYNC)
    ]
    under_way = results.service
    service = {
        model: (float(under_way[model, SYNC]["busy"]), float(under_way[model, MARLAAS]["busy"]))
        for model in results.models
    }
    reached_under_way = [
        f"{model} {percent(1 - b)} against {percent(1 - a)} of sync" for model, (a, b) in service.items()
    ]
    most = max(1 - (1 - b) / (1 - a) for a, b in service.values())
    value = max(less, most)
    return Claim(
        name="idle time",
        claim="idle time, up to so much lower than single and sync",
        reported=f"{percent(IDLE)}; older systems idle 70–90 %",
        simulated=value,
        unit="share less",
        verdict=_verdict(value >= IDLE),
        why=(
            f"To the end of the last task, devices idle {percent(ours)} of the time under marlaas,"
            f" {percent(single)} under single and {percent(sync)} under sync: {percent(less)} less than the"
            " better of the two. In a service under way they idle less, as nobody waits for the last task:"
            f" {'; '.join(reached_under_way)}, up to {percent(most)} less. Counted against what they could"
            f" do, they are unused {percent(effective[0])} (marlaas), {percent(effective[1])} (single) and"
            f" {percent(effective[2])} (sync): the 70–90 % of older systems are of this kind, since half of"
            " the devices are busy under single at any time."
        ),
        bound=Bound(0.5, "pool-busy time of a half-and-half split under single: one of the two pools works"),
        conditions=_at(cell) + "; and 32 tasks that go on for ever",
        side_by_side=side_by_side(results, cell.model, cell.num_tasks),
        beside={
            "equal steps: less than the better baseline": less,
            "under way: less than sync": most,
            "idle.marlaas": ours,
            "idle.single": single,
            "idle.sync": sync,
        },
        run_folders=_folders(results, [cell.model], [SINGLE, SYNC, MARLAAS]),
    )


def _idle_less(results: Results, cell: Cell, baseline: str) -> float:
    """The share by which marlaas idles less than a baseline."""
    ours, theirs = (results.at(cell.model, cell.num_tasks, system)["idle"] for system in (MARLAAS, baseline))
    return 1 - ours / theirs


def end_to_end(results: Results) -> Claim:
    """85 % less time from start to end."""
    cells = gains(results)
    top = best(cells)
    wanted = bounds.gain_of_saving(TIME)
    value = bounds.saving(top.gain)
    bound = mixed_bound(results, top.model)
    short = _short(results, wanted)
    return Claim(
        name="end-to-end time",
        claim="end-to-end training time with up to 32 tasks",
        reported=f"−{percent(TIME)}",
        simulated=value,
        unit="share of time saved",
        verdict=_verdict(value >= TIME),
        why=(
            f"The makespan falls by {percent(value)} on {top.model} with {top.num_tasks} tasks."
            f" {percent(TIME)} less time is a gain of {wanted:.2f}×, more than the {THROUGHPUT}× of the"
            " first claim, so the two are different operating points; it is first reached with"
            f" {_spelt(smallest_reaching(cells, wanted))}." + (f" {short}." if short else "")
        ),
        bound=Bound(bounds.saving(bound.value), f"1 − 1/gain, gain ≤ {bound.formula}"),
        conditions=_at(top),
        side_by_side=side_by_side(results, top.model, top.num_tasks),
        run_folders=_folders(results, [top.model], [SINGLE, MARLAAS]),
    )


def scaling(results: Results) -> Claim:
    """Throughput and utilisation are held from 1 to 32 tasks; baselines flatten and idle more."""
    held: dict[str, bool] = {}
    words: list[str] = []
    beside: dict[str, Number] = {}
    first, last = results.num_tasks[0], results.largest
    middle = results.num_tasks[len(results.num_tasks) // 2]
    for model in results.models:
        curves = {
            system: [results.gain(model, num, system, SINGLE) for num in results.num_tasks]
            for system in (SYNC, MARLAAS)
        }
        ours = curves[MARLAAS]
        held[model] = all(b >= HELD * max(ours[: i + 1]) for i, b in enumerate(ours))
        for system, curve in curves.items():
            beside[f"{model}: gain of {system} over single at {last}"] = curve[-1]
            beside[f"{model}: growth of {system}, {middle} to {last}"] = (
                curve[-1] / curve[results.num_tasks.index(middle)]
            )
        idle_first, idle_last = (results.at(model, num, SYNC)["idle"] for num in (first, last))
        words.append(
            f"{model}: marlaas goes from {ours[0]:.2f}× to {ours[-1]:.2f}× single, sync from"
            f" {curves[SYNC][0]:.2f}× to {curves[SYNC][-1]:.2f}× and idles {percent(idle_first)} of the"
            f" time with {first} and {percent(idle_last)} with {last}"
        )
    num_held = sum(held.values())
    is_ahead = all(results.gain(model, last, MARLAAS, SYNC) >= 1 for model in results.models)
    top = best(gains(results))
    return Claim(
        name="scaling",
        claim="throughput and utilisation held from 1 to 32 tasks while baselines flatten",
        reported="held",
        simulated=float(num_held),
        unit=f"of {len(results.models)} models hold it",
        verdict=_verdict(num_held == len(results.models) and is_ahead),
        why=(
            "; ".join(words)
            + ". Single stays at one task's pace, whatever their number; sync grows while a round is"
            " longer than the training in it and flattens when the lane's time for everyone is added to"
            " every round."
        ),
        bound=mixed_bound(results, top.model),
        conditions=f"{first} to {last} tasks, all models; held: never below {HELD} of what fewer tasks had",
        side_by_side=side_by_side(results, top.model, last, SYNC),
        beside=beside,
        run_folders=_folders(results, results.models, [SINGLE, SYNC, MARLAAS]),
    )


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
        verdict=_verdict(losses[model] >= NO_ASYNCHRONY),
        why=(
            f"As the aggregate of a service under way {_losses(losses)} are lost: without a barrier fast"
            " tasks lap slow ones. With equal steps for every task it is"
            f" {_losses({k: bounds.saving(v) for k, v in makespan.items()})}, a makespan {most:.2f} times"
            f" as long at the most: a loss of {percent(NO_ASYNCHRONY)} would be"
            f" {bounds.gain_of_saving(NO_ASYNCHRONY):.2f}×, which arithmetic forbids to equal work without"
            f" contention (below {bounds.SYNC_BOUND:.0f}×). So the reported figure can only be an aggregate"
            " over unequal tasks."
        ),
        bound=Bound(
            bounds.saving(bounds.SYNC_BOUND), "of the makespan with equal work, without contention: gain < 2×"
        ),
        conditions=f"{model}, 32 tasks that go on for ever, aggregate of their rates; sync against marlaas",
        side_by_side={
            "aggregate steps/hour, under way.ratio": float(theirs["aggregate"] / ours["aggregate"]),
            "normalised, under way.ratio": float(theirs["normalised"] / ours["normalised"]),
            "makespan, equal steps.ratio": makespan[model],
        },
        beside={f"aggregate lost, {name}": value for name, value in losses.items()},
        run_folders=tuple(
            str(results.run_folder("sustained", model=model, system=system)) for system in (SYNC, MARLAAS)
        ),
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
        verdict=_verdict(losses[model] >= NO_MULTI_LORA),
        why=(
            f"In a service under way with 32 tasks {_losses(losses)} of what sync still has are lost, in"
            f" points of marlaas {_losses(points)}; with asynchrony kept, {_losses(alone_lost)}. That is"
            " more than reported: one task's 256 trajectories leave most seats of the replicas empty, and"
            " an iteration takes its floor of time however few decode, so sharing replicas is here worth"
            f" more than overlapping with training. Nearest to {percent(NO_MULTI_LORA)} comes {cell.model}"
            f" with {cell.num_tasks} tasks, {percent(loss)}."
        ),
        bound=None,
        conditions=f"{model}, 32 tasks that go on for ever; sync-single-lora against sync",
        side_by_side={
            "aggregate steps/hour, under way.ratio": 1 - losses[model],
            "normalised, under way.ratio": float(
                results.service[model, SYNC_SINGLE_LORA]["normalised"]
                / results.service[model, SYNC]["normalised"]
            ),
            "makespan, equal steps.ratio": 1 / results.gain(model, results.largest, SYNC_SINGLE_LORA, SYNC),
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


def _losses(losses: dict[str, float]) -> str:
    return ", ".join(f"{percent(value)} ({model})" for model, value in losses.items())


def first_step(results: Results) -> Claim:
    """The time to first step is much lower than one after another."""
    last = results.largest
    ratios = {
        model: float(
            results.at(model, last, MARLAAS)["ttfs_s.mean"] / results.at(model, last, SINGLE)["ttfs_s.mean"]
        )
        for model in results.models
    }
    model = min(ratios, key=lambda name: ratios[name])
    ours, alone = (results.at(model, last, system) for system in (MARLAAS, SINGLE))
    return Claim(
        name="time to first step",
        claim="time to first step against tasks one after another",
        reported="much lower",
        simulated=1 - ratios[model],
        unit="share lower, mean over tasks",
        verdict=_verdict(all(ratio <= 0.5 for ratio in ratios.values())),
        why=(
            f"With {last} tasks the mean falls by {_losses({k: 1 - v for k, v in ratios.items()})}; on"
            f" {model} from {float(alone['ttfs_s.mean']):,.0f} s to {float(ours['ttfs_s.mean']):,.0f} s,"
            f" the slowest tenant's from {float(alone['ttfs_s.max']):,.0f} s to"
            f" {float(ours['ttfs_s.max']):,.0f} s. Much lower is taken for at most half. Under single it"
            " grows with the number of steps of those before; with longer tasks the fall is deeper."
        ),
        bound=None,
        conditions=f"{model}, {last} tasks, all submitted at once, {int(ours['steps'] / last)} steps each",
        side_by_side=side_by_side(results, model, last),
        beside={f"ttfs of marlaas / single, {name}": value for name, value in ratios.items()},
        run_folders=_folders(results, [model], [SINGLE, MARLAAS]),
    )


def step_latency(results: Results) -> Claim:
    """A step takes modestly longer than in isolation."""
    ratios = {
        model: {num: results.latency_ratio(model, num) for num in results.num_tasks}
        for model in results.models
    }
    modest = {
        model: max((num for num, ratio in of_model.items() if ratio <= MODEST), default=0)
        for model, of_model in ratios.items()
    }
    last = results.largest
    model = min(results.models, key=lambda name: ratios[name][last])
    return Claim(
        name="step latency",
        claim="step latency against isolated runs",
        reported="modestly higher",
        simulated=ratios[model][last],
        unit="× alone",
        verdict=_verdict(modest[model] == last),
        why=(
            "; ".join(
                f"{name}: {_curve(of_model)}, at most {MODEST:.0f} times as long up to {modest[name]} tasks"
                for name, of_model in ratios.items()
            )
            + ". A step grows by what shared replicas slow down and by waiting for the one lane; where the"
            " lane is full, latency grows with every further task and only the throughput stays."
        ),
        bound=None,
        conditions=f"{model}, {last} tasks; mean over tasks of time per step while served over that alone",
        beside={
            f"{name}, {num} tasks": r for name, of_model in ratios.items() for num, r in of_model.items()
        },
        run_folders=_folders(results, [model], [SINGLE, MARLAAS]),
    )


def _curve(values: dict[int, float]) -> str:
    return ", ".join(f"{value:.2f}× ({num})" for num, value in values.items())


def asymmetry(results: Results) -> Claim:
    """Rollout and environment take 10 to 100 times as long as a training update."""
    found: dict[tuple[str, str], list[float]] = {}
    for model in results.models:
        for name, task in results.alone(model).items():
            found.setdefault((model, workload_of(name)), []).append(task.rollout_s / task.training_s)
    means = {key: sum(group) / len(group) for key, group in found.items()}
    (model, workload), top = max(means.items(), key=lambda item: item[1])
    inside = [key for key, ratio in means.items() if ASYMMETRY[0] <= ratio <= ASYMMETRY[1]]
    return Claim(
        name="asymmetry",
        claim="rollout and environment over training, alone",
        reported="10–100×",
        simulated=top,
        unit="R/T",
        verdict=_verdict(bool(inside)),
        why=(
            "R/T is "
            + ", ".join(f"{ratio:.1f} ({load} on {name})" for (name, load), ratio in means.items())
            + f"; {len(inside)} of {len(means)} lie within 10–100. Training an adapter costs in proportion to"
            " the model and the tokens, rollouts hardly: their time is that of the longest answer at the"
            " floor of an iteration."
        ),
        bound=None,
        conditions=f"{workload} on {model}, alone on 32 rollout and 32 training NPUs",
        beside={f"{load} on {name}": ratio for (name, load), ratio in means.items()},
        run_folders=_folders(results, [model], [SINGLE]),
    )


def serialised(results: Results) -> Claim:
    """Admitted: updates are serialised."""
    last = results.largest
    busy = {model: results.at(model, last, MARLAAS)["train_busy"] for model in results.models}
    service = {model: float(results.service[model, MARLAAS]["train_busy"]) for model in results.models}
    model = max(service, key=lambda name: service[name])
    pace = bounds.lane_pace(list(results.alone(model).values()))
    return Claim(
        name="limit: serialised updates",
        claim="updates are serialised, a bottleneck under extreme concurrency",
        reported="admitted",
        simulated=service[model],
        unit="share of time that the lane is busy, under way",
        verdict=_verdict(service[model] >= SATURATED),
        why=(
            f"With {last} tasks under way the lane is busy {_losses(service)} of the time, with equal"
            f" steps {_losses(busy)}. On {model} one lane trains {pace:,.0f} steps per hour at the most"
            " when tasks have equally many, whatever the rollouts do; marlaas commits"
            f" {float(results.at(model, last, MARLAAS)['steps_per_hour']):,.0f}."
        ),
        bound=Bound(pace, "3600 N / ΣT steps per hour of one lane"),
        conditions=f"{model}, {last} tasks, one lane of 32 NPUs",
        side_by_side=side_by_side(results, model, last),
        beside={f"lane busy, equal steps, {name}": value for name, value in busy.items()},
        run_folders=(str(results.run_folder("sustained", model=model, system=MARLAAS)),),
    )


def memory(results: Results) -> Claim:
    """Admitted: the KV cache's capacity bounds long contexts."""
    column = "cluster.replicas.kv_tokens"
    table = results.memory[results.memory["system"] == MARLAAS].sort_values(column)
    least, most = table.iloc[0], table.iloc[-1]
    loss = 1 - float(least["steps_per_hour"]) / float(most["steps_per_hour"])
    curve = ", ".join(
        f"{float(row['steps_per_hour']):,.0f} steps/hour with {int(row[column]):,}"
        for _, row in table.iterrows()
    )
    return Claim(
        name="limit: KV capacity",
        claim="KV-cache capacity bounds long-context and agentic tasks",
        reported="admitted",
        simulated=loss,
        unit="share of throughput lost with the least KV",
        verdict=_verdict(loss > 0),
        why=(
            f"{curve} KV tokens a replica. Turns that do not fit wait or are put off and computed again;"
            " with KV for few trajectories, more tasks only queue."
        ),
        bound=None,
        conditions=f"Qwen3-14B, {int(least[column]):,} against {int(most[column]):,} KV tokens a replica",
        side_by_side={
            "steps_per_hour.least": float(least["steps_per_hour"]),
            "steps_per_hour.most": float(most["steps_per_hour"]),
            "makespan_s.least": float(least["makespan_s"]),
            "makespan_s.most": float(most["makespan_s"]),
        },
        run_folders=(),
    )


CLAIMS: tuple[Callable[[Results], Claim], ...] = (
    throughput,
    utilisation,
    idle,
    end_to_end,
    scaling,
    no_asynchrony,
    no_multi_lora,
    first_step,
    step_latency,
    asymmetry,
    serialised,
    memory,
)
