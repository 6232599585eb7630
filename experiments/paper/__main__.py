"""`python -m experiments.paper --out runs/paper`: simulate the whole study and write its report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from marlaas.errors import MarlaasError

CELL_FAILED = 3


def main(
    out: Annotated[Path, typer.Option("--out", help="Folder to make, or of an earlier run to go on with.")],
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Processes; all cores if not given.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A miniature of it, to try the whole path.")] = False,
) -> None:
    """Simulate the study, going on where an earlier run stopped, and write claims.json and the report."""
    from rich.console import Console

    from experiments.paper.run import run_paper

    num_failed = run_paper(out, Console(stderr=True), jobs, quick=quick)
    print(out / "claims.json")
    print(out / "report" / "index.html")
    raise typer.Exit(CELL_FAILED if num_failed else 0)


if __name__ == "__main__":
    try:
        typer.run(main)
    except MarlaasError as error:
        print(f"experiments.paper: {error}", file=sys.stderr)
        sys.exit(2)
