"""A claim of the original: its numbers, its verdict, and what several claims ask of the results.

Numbers come first, then the words that they bring about. `reached` is decided by a rule that stands beside
the number it judges. Owns the rules' constants; the claims themselves are in `claims_*`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from experiments.paper import bounds
from experiments.paper.results import MARLAAS, SINGLE, Results
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
MAJORITY = 0.5
"""What is said of all models or workloads is taken to hold when it does for half of them or more."""
SATURATED = 0.85
"""A lane that is busy for more than this share of the time is taken for a bottleneck."""


class Bound(msgspec.Struct, frozen=True):
    """A number that arithmetic does not let pass, what it is of, and its formula in words."""

    value: float
    formula: str
    unit: str = "×"


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


def mixed_bound(results: Results, model: str, num_tasks: int) -> Bound:
    """The bound on the gain over single with so many tasks, from what each took alone."""
    alone = list(results.alone(model).values())[:num_tasks]
    limit = bounds.mixed_gain_limit(alone)
    return Bound(
        bounds.mixed_gain_bound(alone),
        f"Σ(R+T) / max(ΣT, max(R+T)) over {len(alone)} tasks on one lane; the {limit} limits",
    )


def side_by_side(results: Results, model: str, num_tasks: int, baseline: str = SINGLE) -> dict[str, Number]:
    """Aggregate, normalised and makespan of marlaas and a baseline, and their ratios."""
    ours, theirs = (results.at(model, num_tasks, system) for system in (MARLAAS, baseline))
    found: dict[str, Number] = {}
    words = {
        "steps_per_hour": "aggregate steps/hour",
        "steps_per_hour_normalised": "normalised",
        "makespan_s": "makespan (s)",
    }
    for metric, word in words.items():
        a, b = ours[metric], theirs[metric]
        found |= {f"{word}, {MARLAAS}": a, f"{word}, {baseline}": b, f"{word}, ratio": a / b}
    return found


def headline_folders(
    results: Results, models: Sequence[str], systems: Sequence[str], num_tasks: int | None = None
) -> tuple[str, ...]:
    """The run folders of these models and systems with the most tasks; none for another number of them."""
    if num_tasks not in (None, results.largest):
        return ()
    return tuple(str(results.headline_folder(model, system)) for model in models for system in systems)


def spell_cell(cell: Cell) -> str:
    """A cell of the main grid in words."""
    return f"{cell.model}, {cell.num_tasks} tasks in turn GSM8K, AMC12 and agentic search, equal steps each"


def verdict_of(is_reached: bool) -> Verdict:
    """The word for whether a claim is reached."""
    return "reached" if is_reached else "not reached"


def spell_reached(found: dict[str, int]) -> str:
    """Where something is first reached, in words."""
    return ", ".join(f"{num} tasks on {model}" for model, num in found.items()) or "nowhere"


def shortfall(results: Results, wanted: float) -> str:
    """For each model that stays below a gain: how far it comes, and what forbids or takes the rest."""
    parts = []
    for model in results.models:
        top = best([cell for cell in gains(results) if cell.model == model])
        if top.gain >= wanted:
            continue
        bound = mixed_bound(results, model, top.num_tasks)
        forbids = "which forbids it" if bound.value < wanted else "so arithmetic would allow it"
        busy = results.at(model, top.num_tasks, MARLAAS)["train_busy"]
        parts.append(
            f"{model} ends at {top.gain:.2f}×: the bound is {bound.value:.2f}×, {forbids}; its lane is busy"
            f" {percent(busy)} of the time and a step takes {results.latency_ratio(model, top.num_tasks):.1f}"
            " times as long as alone, waits included"
        )
    return "; ".join(parts)


def by_model(losses: dict[str, float]) -> str:
    """Shares by model, in words."""
    return ", ".join(f"{percent(value)} ({model})" for model, value in losses.items())
