"""Measures the embedded engines beside what a user would write without them, in alternating rounds.

Each round measures every side once, one after another, in CPU time of one thread; a ratio is the median of
the rounds' ratios, so that a machine that slows down in between slows both sides. `python -m
experiments.bench_executor [--rounds N] [--only rollout|training|isolation]`.
"""

from __future__ import annotations

import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

NUM_ADAPTERS, NUM_ROWS = 8, 64
NUM_SPREAD = 96
PLAIN_SIZES = (8, 16, 32, 64)
TRL_SIZE = 32

Side = Callable[[], float]


class Part(StrEnum):
    """What can be measured on its own."""

    ROLLOUT = "rollout"
    TRAINING = "training"
    ISOLATION = "isolation"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Ours beside theirs: the best rate of each, in tokens per CPU-second, and the median of their ratios."""

    what: str
    ours: float
    theirs: float
    ratio: float
    wanted: float | None = None


def compare(what: str, ours: Side, theirs: Side, rounds: int, wanted: float | None = None) -> Comparison:
    """Measure both in turn, so many times."""
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    return Comparison(
        what=what,
        ours=max(pair[0] for pair in pairs),
        theirs=max(pair[1] for pair in pairs),
        ratio=median(a / b for a, b in pairs),
        wanted=wanted,
    )


def rollout(folder: Path, rounds: int) -> Iterable[Comparison]:
    """The rollout engine beside PEFT's `generate(adapter_names=...)`."""
    from executor.bench.adapters import load_peft, write_random_adapters
    from executor.bench.rollout import OurEngine, PeftGenerate, equal_requests, spread_requests

    adapters = write_random_adapters(folder, NUM_ADAPTERS)
    ours, theirs = OurEngine(adapters, NUM_ROWS), PeftGenerate(load_peft(adapters), NUM_ROWS)
    equal = equal_requests(NUM_ROWS, NUM_ADAPTERS)
    rate = max(ours.tokens_per_s(equal), ours.tokens_per_s(equal))
    yield compare(
        "rollout, equal lengths, all there",
        lambda: ours.tokens_per_s(equal),
        lambda: theirs.tokens_per_s(equal),
        rounds,
        wanted=1.0,
    )
    # As many tokens are asked for per second as the engine was seen to make: neither side idles long.
    at_once = spread_requests(NUM_SPREAD, NUM_ADAPTERS, requests_per_s=1e9)
    mean_tokens = sum(request.num_tokens for request in at_once) / NUM_SPREAD
    spread = spread_requests(NUM_SPREAD, NUM_ADAPTERS, rate / mean_tokens)
    yield compare(
        "rollout, spread lengths, all there",
        lambda: ours.tokens_per_s(at_once),
        lambda: theirs.tokens_per_s(at_once),
        rounds,
    )
    yield compare(
        "rollout, spread lengths, staggered",
        lambda: ours.tokens_per_s(spread),
        lambda: theirs.tokens_per_s(spread),
        rounds,
        wanted=2.0,
    )


def training(folder: Path, rounds: int) -> Iterable[Comparison]:
    """The training engine beside a plain PyTorch and PEFT loop, and beside TRL where it is installed."""
    from executor.bench.adapters import load_peft, write_random_adapters
    from executor.bench.training import OurTrainer, PlainLoop, batch, num_tokens

    samples = batch()
    num = num_tokens(samples)
    ours = OurTrainer(folder / "ours", samples)
    adapters = write_random_adapters(folder / "plain", 1)
    loops = {size: PlainLoop(load_peft(adapters), samples, size) for size in PLAIN_SIZES}
    ours.update_s()
    size = min(PLAIN_SIZES, key=lambda size: loops[size].update_s())
    yield compare(
        f"training, plain loop by {size} (its best)",
        lambda: num / ours.update_s(),
        lambda: num / loops[size].update_s(),
        rounds,
        wanted=0.95,
    )
    if importlib.util.find_spec("trl") is None:
        Console(stderr=True).print("TRL is not installed (pip install 'marlaas\\[bench]'): left out")
        return
    from executor.bench import trl_step

    yield compare(
        f"training, TRL's GRPO step by {TRL_SIZE}",
        lambda: num / ours.update_s(),
        lambda: num / min(trl_step.update_s(samples, folder / "trl", 3, TRL_SIZE)),
        rounds,
    )


def isolation(folder: Path, rounds: int) -> Iterable[Comparison]:
    """The rollout engine with isolation to the bit beside itself without."""
    from executor.bench.adapters import write_random_adapters
    from executor.bench.isolation_cost import ROWS, Side

    write_random_adapters(folder, NUM_ADAPTERS)
    isolated, free = Side(folder, True), Side(folder, False)
    try:
        for num_rows in ROWS:
            yield compare(
                f"isolation to the bit, {num_rows} rows",
                lambda num_rows=num_rows: isolated.tokens_per_s(num_rows),  # type: ignore[misc]
                lambda num_rows=num_rows: free.tokens_per_s(num_rows),  # type: ignore[misc]
                rounds,
            )
    finally:
        isolated.close()
        free.close()


PARTS: Mapping[Part, Callable[[Path, int], Iterable[Comparison]]] = {
    Part.ROLLOUT: rollout,
    Part.TRAINING: training,
    Part.ISOLATION: isolation,
}


def main(
    rounds: Annotated[int, typer.Option(min=1, help="How often each side is measured.")] = 3,
    only: Annotated[list[Part] | None, typer.Option(help="Measure these parts; may be repeated.")] = None,
) -> None:
    """Print each comparison; ends with 1 if a ratio is below what is wanted."""
    from executor.bench.clock import use_one_thread

    use_one_thread()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    table = Table(title=f"tokens per CPU-second of one thread, median ratio of {rounds} rounds")
    for column in ("what", "ours", "theirs", "ratio", "wanted"):
        table.add_column(column, justify="left" if column == "what" else "right")
    is_missed = False
    with tempfile.TemporaryDirectory() as folder:
        for part in only or PARTS:
            for found in PARTS[part](Path(folder) / part, rounds):
                wanted = "" if found.wanted is None else f"{found.wanted:g}"
                is_missed |= found.wanted is not None and found.ratio < found.wanted
                table.add_row(
                    found.what, f"{found.ours:,.0f}", f"{found.theirs:,.0f}", f"{found.ratio:.2f}", wanted
                )
    Console().print(table)
    if is_missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
