"""The command line: arguments in, one call into the package that does the work, an exit code out.

0 done; 1 internal error; 2 the user's input is wrong, one message, nothing written; 3 finished, but some task
failed; 130 interrupted. Everything slow to import is imported by the command that needs it.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from experiments.sweep.command import sweep
from marlaas import __version__
from marlaas.errors import InputError, MarlaasError
from marlaas.systems import SYSTEMS

if TYPE_CHECKING:
    from rich.console import Console

OK, INTERNAL, INPUT, TASK_FAILED = 0, 1, 2, 3

app = typer.Typer(
    name="marlaas",
    help="Multi-tenant asynchronous RL as a service: one scheduler, simulated and really executed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ExperimentFile = Annotated[
    Path, typer.Argument(metavar="EXP.yaml", help="The experiment.", show_default=False)
]
RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="A run folder.", show_default=False)]
RunFolders = Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders.", show_default=False)]
Out = Annotated[
    Path, typer.Option("--out", help="Folder to make; must not exist or be empty.", show_default=False)
]
System = Annotated[
    str | None, typer.Option("--system", help=f"Run under this system instead: {', '.join(SYSTEMS)}.")
]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one key, as in tasks.0.steps=3.",
        default_factory=list,
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def main() -> None:
    """Run the command line and end the process with its exit code."""
    try:
        app(prog_name="marlaas")
    except InputError as error:
        _fail(str(error), INPUT)
    except MarlaasError as error:
        _fail(f"{type(error).__name__}: {error}", INTERNAL)
    except Exception as error:  # noqa: BLE001 - the last handler of the process
        if _Debug.on:
            traceback.print_exc()
        _fail(f"{type(error).__name__}: {error} (marlaas --debug ... shows where)", INTERNAL)


def _fail(message: str, code: int) -> None:
    print(f"marlaas: {message}", file=sys.stderr)
    sys.exit(code)


class _Debug:
    """Whether `--debug` was given; `main` asks after the command has failed."""

    on = False


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on an internal error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of every command."""
    _Debug.on = debug


@app.command()
def check(path: ExperimentFile, settings: Settings, system: System = None) -> None:
    """Parse and resolve an experiment, and print it."""
    from experiments.load import dump_experiment, load_experiment, model_folder

    experiment = load_experiment(path, settings, system)
    print(dump_experiment(experiment), end="")
    try:
        model_folder(experiment)
    except InputError as error:
        print(f"marlaas: this can be simulated but not executed here: {error}", file=sys.stderr)


@app.command()
def simulate(path: ExperimentFile, out: Out, settings: Settings, system: System = None) -> None:
    """Run an experiment in the simulated world."""
    from experiments import run
    from experiments.load import load_experiment

    _ran(run.simulate(load_experiment(path, settings, system), out, _console()), out)


@app.command()
def execute(path: ExperimentFile, out: Out, settings: Settings, system: System = None) -> None:
    """Run an experiment for real: sample, act, train."""
    from experiments import run
    from experiments.load import load_experiment

    experiment = load_experiment(path, settings, system)
    outcomes = run.execute(experiment, out, _console())
    if experiment.evaluation is not None and "stopped" not in outcomes.values():
        _print_evaluation(run.evaluate(experiment, out))
    _ran(outcomes, out)


@app.command()
def compare(
    first: RunFolder,
    second: RunFolder,
    as_json: Json = False,
    tasks: Annotated[bool, typer.Option("--tasks", help="Show each task's metrics too.")] = False,
) -> None:
    """Compare two runs of the same experiment, metric by metric."""
    from experiments.answers import print_comparison, print_json
    from experiments.words import labels
    from traces.compare import compare_runs

    rows = compare_runs(first, second)
    if as_json:
        print_json(rows)
    else:
        shown = [row for row in rows if tasks or not row.metric.startswith("tasks.")]
        print_comparison(labels([first, second]), shown, _console(to_stderr=False))


@app.command()
def calibrate(
    runs: RunFolders,
    out: Annotated[Path, typer.Option("--out", metavar="PROFILE.yaml", help="The profile to write.")],
) -> None:
    """Fit the simulator's costs and distributions from runs, and write a profile."""
    from sim import calibrate as fit

    _require_new_file(out)
    print(fit.report(fit.calibrate(runs), out))


@app.command()
def replay(run: RunFolder) -> None:
    """Feed a run's events to a fresh scheduler: the same commands and all laws kept, or what is not."""
    from traces.replay import replay as replay_run

    result = replay_run(run)
    print(result)
    raise typer.Exit(OK if result.ok else INTERNAL)


@app.command()
def report(
    runs: RunFolders,
    out: Annotated[Path, typer.Option("--out", help="Folder for the page and its pictures.")],
    title: Annotated[str | None, typer.Option("--title", help="Heading of the page.")] = None,
) -> None:
    """Write an HTML page with figures of one or more runs, from their traces alone."""
    from experiments.report.write import write_report
    from experiments.run import require_fresh

    require_fresh(out)
    print(write_report(runs, out, title))


@app.command()
def export(
    run: RunFolder,
    perfetto: Annotated[Path | None, typer.Option("--perfetto", metavar="FILE", help="Chrome trace.")] = None,
    parquet: Annotated[Path | None, typer.Option("--parquet", metavar="FOLDER", help="Tables.")] = None,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", metavar="FOLDER", help="Event files, a folder per task.")
    ] = None,
) -> None:
    """Write a run's trace for other tools: ui.perfetto.dev, Parquet tables, TensorBoard."""
    from experiments.run import require_fresh
    from experiments.tensorboard import export_tensorboard
    from traces.export import export_parquet, export_perfetto
    from traces.reader import find_trace

    if perfetto is None and parquet is None and tensorboard is None:
        wanted = "wanted --perfetto FILE, --parquet FOLDER or --tensorboard FOLDER, or several"
        raise InputError("export", "nothing to write", wanted)
    find_trace(run)
    if perfetto is not None:
        _require_new_file(perfetto, "--perfetto")
    if tensorboard is not None:
        require_fresh(tensorboard, "--tensorboard")
        export_tensorboard(run, tensorboard)
        print(tensorboard)
    if parquet is not None:
        require_fresh(parquet, "--parquet")
        for file in export_parquet(run, parquet).values():
            print(file)
    if perfetto is not None:
        export_perfetto(run, perfetto)
        print(perfetto)


@app.command()
def evaluate(run: RunFolder) -> None:
    """Solve held-out problems with the first and last version of each task of an executed run."""
    from experiments import run as runs
    from experiments.load import load_experiment
    from traces.reader import read_header

    if read_header(run).world != "executor":
        raise InputError(str(run), "a simulated run trained nothing", "wanted a run of `marlaas execute`")
    _print_evaluation(runs.evaluate(load_experiment(run / runs.RESOLVED), run))


@app.command()
def doctor() -> None:
    """Show devices, engines and versions, and what can run here."""
    from experiments.answers import print_diagnosis
    from experiments.doctor import diagnose

    print_diagnosis(diagnose(), _console(to_stderr=False))


@app.command("compile")
def compile_modules() -> None:
    """Make simulations twice as fast: turn the hot modules into machine code, once."""
    from experiments.compiled.make import make

    with _console().status("compiling; this takes about a minute"):
        print(make())


@app.command()
def demo(
    settings: Settings,
    path: Annotated[
        Path | None, typer.Argument(metavar="[EXP.yaml]", help="The experiment; without it, the quickstart.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", help="Folder to make; an older demo in it is replaced.")
    ] = Path("runs/demo"),
) -> None:
    """Execute an experiment under single and marlaas, predict one from the other, and report."""
    from experiments.demo import QUICKSTART, run_demo

    raise typer.Exit(OK if run_demo(path or QUICKSTART, settings, out, _console()) else TASK_FAILED)


app.command()(sweep)


def _console(*, to_stderr: bool = True) -> Console:
    """Where people look: progress on stderr, answers on stdout; no line is cut where it is no terminal."""
    from rich.console import Console

    console = Console(stderr=to_stderr)
    return console if console.is_terminal else Console(stderr=to_stderr, width=160)


def _ran(outcomes: dict[str, str], out: Path) -> NoReturn:
    """Say how a run ended, and end with the exit code that says so too."""
    import json

    from experiments.answers import print_outcome
    from experiments.run import METRICS

    print_outcome(out, outcomes, json.loads((out / METRICS).read_text()), _console(to_stderr=False))
    raise typer.Exit(TASK_FAILED if "failed" in outcomes.values() else OK)


def _print_evaluation(scores: dict[str, dict[str, float | int]]) -> None:
    from experiments.answers import print_evaluation

    print_evaluation(scores, _console(to_stderr=False))


def _require_new_file(path: Path, option: str = "--out") -> None:
    if path.exists():
        raise InputError(option, f"{path} exists already", "name a file that does not exist yet")
    if not path.absolute().parent.is_dir():
        raise InputError(option, f"the folder {path.parent} does not exist", "make it, or name another file")
