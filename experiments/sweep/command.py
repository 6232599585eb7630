"""`marlaas sweep`: the command's arguments, and what it says when it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CELL_FAILED = 3


def sweep(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The study.", show_default=False)],
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="Folder to make, or of an earlier sweep of this study.", show_default=False
        ),
    ],
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, help="Processes at work; as many as there are cores if not given."),
    ] = None,
) -> None:
    """Simulate an experiment along axes, replicated; go on where an earlier sweep stopped."""
    from rich.console import Console

    from experiments.sweep.run import sweep as run_sweep
    from experiments.sweep.study import load_study

    done = run_sweep(load_study(study), out, Console(stderr=True), jobs)
    print(
        f"{done.num_rows} cells: {done.num_simulated} simulated, {done.num_reused} kept from before,"
        f" {done.num_failed} failed"
    )
    for file in done.files:
        print(file)
    raise typer.Exit(CELL_FAILED if done.num_failed else 0)
