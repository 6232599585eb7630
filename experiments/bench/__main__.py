"""Speed of the core and the simulator, measured and printed: `make bench`, `python -m experiments.bench`.

--quick     leave out the cluster of 10,000 tasks, which takes a minute
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from experiments.bench import core, growth, serving
from experiments.compiled import is_preferred

ROUNDS = 5

Advance = Callable[[], None]


def main() -> None:
    """Measure in turn and print a table for each question."""
    if any(word != "--quick" for word in sys.argv[1:]):
        sys.exit(f"python -m experiments.bench: unknown option in {sys.argv[1:]}; wanted --quick or nothing")
    sizes = growth.NUM_TASKS[:-1] if "--quick" in sys.argv[1:] else growth.NUM_TASKS
    console = Console(width=110) if not Console().is_terminal else Console()
    console.print("as machine code" if is_preferred() else "as plain Python; see `marlaas compile`")
    _print_rates(console)
    _print_serving(console)
    _print_growth(console, sizes)


def _print_rates(console: Console) -> None:
    experiment = core.cluster(8)
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, _rounds("core and simulator", ROUNDS) as advance:
        run = core.record(experiment)
        for _ in range(ROUNDS):
            found = core.rates(experiment, run, Path(folder))
            best = {name: max(rate, best.get(name, 0.0)) for name, rate in found.items()}
            advance()
    bare = best[core.BARE]
    title = f"{len(run.events):,} events of {run.num_trajectories:,} trajectories, best of {ROUNDS} rounds"
    table = _table(title, "what", "per CPU-second", "ratio to bare SimPy")
    for name, rate in best.items():
        table.add_row(name, f"{rate:,.0f}", f"{rate / bare:.3f}" if name != core.TRAJECTORIES else "")
    console.print(table)


def _print_serving(console: Console) -> None:
    load = serving.load_serving(serving.SERVING)
    num, requests = load.requests.count, load.requests
    without, whole = [], []
    with tempfile.TemporaryDirectory() as folder, _rounds("serving", ROUNDS) as advance:
        for round_ in range(ROUNDS):
            trace = Path(folder) / f"{round_}.jsonl"
            without.append(core.cpu_s(partial(serving.simulate_requests, load, core.Blank())))
            whole.append(core.cpu_s(partial(serving.serve_into, load, trace)))
            advance()
        metrics = serving.serve_into(load, Path(folder) / "trace.jsonl")
    title = f"{num:,} requests, {requests.per_s:g}/s, one replica, best of {ROUNDS} rounds"
    table = _table(title, "what", "requests per CPU-second")
    table.add_row("simulation, trace off", f"{num / min(without):,.0f}")
    table.add_row("simulation, trace, all metrics and latencies", f"{num / min(whole):,.0f}")
    console.print(table)
    p50, p99 = (metrics[f"request_latency_s.{name}"] for name in ("p50", "p99"))
    console.print(
        f"simulated latency p50 {p50:.2f} s, p99 {p99:.2f} s; {metrics['tokens_per_s']:.0f} tokens/s"
    )


def _print_growth(console: Console, sizes: tuple[int, ...]) -> None:
    table = _table(
        "Time of a simulation by number of tasks", "tasks", "trajectories", "CPU-s", "µs each", "×"
    )
    with _rounds("growth", len(sizes)) as advance:
        first = None
        for found in growth.growth(sizes):
            first = first or found.us_per_trajectory
            each = found.us_per_trajectory
            row = (
                f"{found.num_tasks:,}",
                f"{found.num_trajectories:,}",
                f"{found.seconds:.2f}",
                f"{each:.0f}",
            )
            table.add_row(*row, f"{each / first:.2f}")
            advance()
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


@contextmanager
def _rounds(what: str, total: int) -> Iterator[Advance]:
    """A bar on a terminal's stderr while inside."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda: progress.advance(bar)


if __name__ == "__main__":
    main()
