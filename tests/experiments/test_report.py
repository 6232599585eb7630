import base64
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from matplotlib.figure import Figure

from experiments.report import figures
from experiments.report.views import RunView, view
from experiments.report.write import PICTURES, write_report
from experiments.words import figure, labels, meaning
from marlaas.errors import InputError
from traces.metrics import compute

Draw = Callable[[list[RunView]], Figure]
DRAW = [picture.draw for picture in PICTURES]


@pytest.fixture(scope="module")
def views(two_runs: list[Path]) -> list[RunView]:
    """The two runs as figures see them, with rewards that a simulation would not know."""
    rewards = {"adder-0": [0.1, 0.4], "adder-1": [0.2, 0.3], "finder": [0.0, 1.0]}
    return [msgspec.structs.replace(view(run, run.name), rewards=rewards) for run in two_runs]


@pytest.fixture(scope="module")
def report(two_runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report of the two runs, under a title that would like to be markup."""
    out = tmp_path_factory.mktemp("out") / "report"
    write_report(two_runs, out, "<script>alert(1)</script>")
    return out


def test_the_page_needs_no_other_file(report: Path) -> None:
    """Pictures are embedded, and nothing is fetched from anywhere or run."""
    page = (report / "index.html").read_text()
    embedded = re.findall(r'src="([^"]*)"', page)
    assert len(embedded) == len(PICTURES) - 1  # a simulation knows no rewards
    for source in embedded:
        kind, _, data = source.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
    assert "http" not in page
    assert "<script" not in page
    assert {path.name for path in report.glob("*.png")} == {
        picture.file for picture in PICTURES if picture.draw is not figures.rewards
    }


def test_the_page_gives_the_numbers_of_the_traces(report: Path, two_runs: list[Path]) -> None:
    """Headline and table agree with the metrics."""
    page = (report / "index.html").read_text()
    single, marlaas = (compute(run) for run in two_runs)
    gain = marlaas["steps_per_hour"] / single["steps_per_hour"]
    assert f"{gain:.2f} times" in page
    for value in (single["makespan_s"], marlaas["makespan_s"], marlaas["busy"]):
        assert f"<td>{figure(value)}</td>" in page


@pytest.mark.parametrize("draw", DRAW)
def test_axes_say_what_they_show_and_legends_cover_nothing(draw: Draw, views: list[RunView]) -> None:
    """Every panel has a title, the lowest a labelled time or value axis; legends stand outside."""
    drawn = draw(views)
    panels = [axes for axes in drawn.axes if axes.get_visible()]
    assert all(axes.get_title(loc="left") for axes in panels) or all(axes.get_title() for axes in panels)
    assert any(axes.get_xlabel() or axes.get_ylabel() for axes in panels)
    assert all(axes.get_legend() is None for axes in panels)
    assert drawn.legends


@pytest.mark.parametrize("draw", DRAW)
def test_figures_take_many_tasks_and_one_run(draw: Draw, views: list[RunView]) -> None:
    """Forty tasks get forty colours, and the picture stays of a size that can be read."""
    one = views[0]
    tasks = tuple(f"task-{i}" for i in range(40))
    spans = tuple(msgspec.structs.replace(span, task=tasks[i % 40]) for i, span in enumerate(one.spans * 10))
    many = msgspec.structs.replace(
        one,
        tasks=tasks,
        spans=spans,
        commits=tuple((at_s, tasks[i % 40]) for i, (at_s, _) in enumerate(one.commits)),
        rewards={task: [0.1, 0.2] for task in tasks},
        causes=dict.fromkeys(tasks, one.causes["finder"]),
    )
    width, height = draw([many]).get_size_inches()
    assert width < 12
    assert height < 30


def test_spans_begin_with_the_first_submission_and_lie_in_the_run(views: list[RunView]) -> None:
    """The start-up of workers is not drawn, and nothing goes on after the end."""
    for run in views:
        assert run.end_s > 0
        assert all(0 <= span.start_s <= span.end_s <= run.end_s + 1e-9 for span in run.spans)
        assert [at_s for at_s, _ in run.commits] == sorted(at_s for at_s, _ in run.commits)


def test_labels_are_the_shortest_that_differ() -> None:
    """Folders of one name are told apart by their parents."""
    assert labels([Path("/a/single"), Path("/a/marlaas")]) == ["single", "marlaas"]
    assert labels([Path("/a/x/r"), Path("/a/y/r")]) == ["x/r", "y/r"]
    with pytest.raises(InputError, match="named twice"):
        labels([Path("/a/r"), Path("/a/b/../r")])


def test_every_metric_is_explained(two_runs: list[Path]) -> None:
    """No name stands in a table without words."""
    names = [name for name in compute(two_runs[0]) if not name.startswith("tasks.")]
    assert [name for name in names if not meaning(name)] == []


def test_figures_of_speech() -> None:
    """Three digits, thousands separated, a dash for what is not known."""
    shown = [figure(value) for value in (None, 3, 1234567, 0.12345, 999.6, 12345.6, "done")]
    assert shown == ["–", "3", "1,234,567", "0.123", "1,000", "12,346", "done"]


def test_smoothing_is_the_mean_of_what_came_before() -> None:
    """The first value is itself; no value looks ahead."""
    assert figures.smooth([1.0, 3.0, 5.0], window=2) == [1.0, 2.0, 4.0]
