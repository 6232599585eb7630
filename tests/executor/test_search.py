"""`search`: questions answered with two tools, over a corpus and a wiki, by big models and small ones."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wiki_server import Wiki as Server
from wiki_server import serving

from executor.codec import Codec
from executor.environments import Environment, Observation, build, close_all, held_out_seed, problem_seed
from executor.environments.search import exact, f1, words
from executor.environments.source import SourceFailed
from marlaas.errors import InputError
from marlaas.spec import LocalCorpus, MediaWiki, SearchEnvironment

pytest.importorskip("bm25s", reason="bm25s is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")
TINY_BASE = Path(__file__).parents[2] / "executor" / "models" / "tiny-base"
TOWNS = SearchEnvironment()
NAMES = SearchEnvironment(
    questions="names-questions", source=LocalCorpus(pages="names-pages"), style="short", page_chars=60
)


@pytest.fixture(scope="module")
def towns() -> Environment:
    """The shipped corpus."""
    return build(TOWNS)


def call(name: str, **arguments: Any) -> str:
    """A call as most models write it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(environment: Environment, seed: int, *turns: str) -> list[Observation]:
    """What is seen after each turn of one episode."""

    async def main() -> list[Observation]:
        problem = environment.problem(seed)
        return [await environment.step(problem, turns[: n + 1]) for n in range(len(turns))]

    return asyncio.run(main())


def test_a_question_is_answered_with_the_tools(towns: Environment) -> None:
    """Search, read, answer: what a perfect player does in three turns."""
    seed = next(s for s in range(2, 999, 2) if towns.problem(s).prompt.startswith("In which year"))
    problem = towns.problem(seed)
    town = problem.prompt.removeprefix("In which year was ").removesuffix(" founded?")
    found, page, end = play(
        towns, seed, call("search", query=town), call("read", title=town), problem.solution[0]
    )
    assert (found.done, found.role, page.done, page.role) == (False, "tool", False, "tool")
    assert f"{town}: " in found.text
    assert problem.solution[0] in page.text
    assert (end.done, end.reward) == (True, 1.0)
    assert [tool.name for tool in problem.tools] == ["search", "read"]
    assert "<answer>" in problem.system


@pytest.mark.parametrize(
    ("turn", "seen"),
    [
        (call("search", query="qqqq"), "nothing found"),
        (call("search", query="  "), "error: search needs a query"),
        (call("search", title="Velmora"), "error: search needs a query"),
        (call("search", query=["Velmora"]), "error: search needs a query"),
        (call("read", title="Nowhere"), "there is no page with the title 'Nowhere'"),
        (call("read"), "error: read needs a title"),
        (call("fetch", url="x"), "error: there is no tool 'fetch'"),
        ("<tool_call>{oops</tool_call>", "error: the call is not JSON"),
        ("read[velmora]", "Velmora is a town"),
        (call("read", title="Velmora") + call("read", title="Sarn"), "Velmora is a town"),
    ],
)
def test_whatever_is_called_is_answered(towns: Environment, turn: str, seen: str) -> None:
    """A call that makes no sense is told so; the episode goes on."""
    (observation,) = play(towns, 2, turn)
    assert not observation.done
    assert seen in observation.text


@settings(max_examples=60, deadline=None)
@given(query=st.text(min_size=1, max_size=300))
def test_no_query_is_too_odd(towns: Environment, query: str) -> None:
    """Any text is searched for, and is a title of no page."""
    for turn in (call("search", query=query), call("read", title=query)):
        (observation,) = play(towns, 2, turn)
        assert observation.text
        assert len(observation.text) < 1_000


def test_pages_are_cut_and_lists_bounded() -> None:
    """As the spec says, so that observations fit."""
    spec = SearchEnvironment(results=2, page_chars=20)
    found, page = play(build(spec), 2, call("search", query="the town river"), call("read", title="Velmora"))
    assert len(found.text.splitlines()) == 2
    assert page.text == "Velmora is a town on"


def test_a_model_of_few_words_can_play() -> None:
    """`?name` shows the page as `lookup` would; the tiny base can read and write all of it."""
    environment, codec = build(NAMES), Codec(TINY_BASE)
    for index in range(20):
        seed = problem_seed(0, "t", 0, index)
        problem = environment.problem(seed)
        name = problem.prompt.split()[-1].removesuffix(":")
        page, end = play(environment, seed, f"?{name}", problem.solution[0])
        assert page.text.startswith(f"{name} ")
        assert page.text.endswith(":")
        assert problem.solution[0] in page.text.removesuffix(":").split()
        assert end.reward == 1.0
        assert len(codec.opening(problem, 99)) == len(problem.prompt)
        assert len(codec.after_turn(page, 99, is_closed=True)) == len(page.text) < 24
        nothing, wrong = play(environment, seed, "?zzzz", "purple")
        assert nothing.text == "nothing found:"
        assert wrong.reward == 0.0


def test_held_out_questions_are_never_trained_on(towns: Environment) -> None:
    """One in eight, the same ones in every run."""
    training = {towns.problem(problem_seed(0, "t", 0, i)).prompt for i in range(600)}
    held_out = {towns.problem(held_out_seed(0, "t", i)).prompt for i in range(100)}
    assert len(training) == 57
    assert len(held_out) == 8
    assert not training & held_out


def test_answers_are_compared_by_their_words() -> None:
    """Capitals, punctuation and articles aside; F1 counts what two answers share."""
    assert exact("the Lake Munin.", "lake munin") == 1.0
    assert exact("Munin", "Lake Munin") == 0.0
    assert f1("Munin", "Lake Munin") == pytest.approx(2 / 3)
    assert f1("x", "Lake Munin") == 0.0
    assert words("The") == ["the"]
    spec = SearchEnvironment(reward="f1")
    environment = build(spec)
    seed = next(s for s in range(2, 999, 2) if environment.problem(s).prompt.startswith("For which dish"))
    half = environment.problem(seed).solution[0].split()[0]
    (observation,) = play(environment, seed, f"<answer>{half}</answer>")
    assert 0.0 < (observation.reward or 0.0) < 1.0


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("questions", '{"question": "Who?"}', r"questions\.jsonl:2: no answers; wanted \"answers\""),
        ("questions", '{"question": "Who?", "answers": []}', r"questions\.jsonl:2: no answers"),
        ("questions", '{"question": "Who?", "answers": ["."]}', r"questions\.jsonl:2: no answers"),
        ("questions", '{"answers": ["I"]}', r"questions\.jsonl:2: no text under question"),
        ("pages", '{"title": "A"}', r"pages\.jsonl:2: no text under text"),
        ("pages", '{"title": "B", "text": "again"}', r"pages\.jsonl:2: a second page with the title 'B'"),
    ],
)
def test_bad_lines_are_refused_by_their_number(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    """In questions and in pages."""
    good = {"questions": '{"question": "Where?", "answer": "Here"}', "pages": '{"title": "B", "text": "b"}'}
    for name, first in good.items():
        (tmp_path / f"{name}.jsonl").write_text(f"{first}\n{line if name == file else ''}\n")
    spec = SearchEnvironment(
        questions=str(tmp_path / "questions.jsonl"), source=LocalCorpus(pages=str(tmp_path / "pages.jsonl"))
    )
    with pytest.raises(InputError, match=complaint):
        build(spec)


def test_missing_libraries_are_named_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the source that needs them."""
    for package, source in (("bm25s", LocalCorpus()), ("httpx", MediaWiki(url="http://127.0.0.1/api.php"))):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(
            InputError, match=rf"env\.source: search needs {package}.*marlaas\[environments\]"
        ):
            build(SearchEnvironment(source=source), "env")


# --- over HTTP -------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A wiki on this machine, reached without any proxy."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as wiki:
        yield wiki


@pytest.mark.parametrize("style", ["tools", "short"])
def test_the_same_tools_reach_a_wiki(server: Server, style: Any) -> None:
    """A source that cannot answer raises; a page that is not there is only told."""
    source = MediaWiki(url=server.url, retries=0, requests_per_s=1_000)
    environment = build(SearchEnvironment(source=source, style=style))
    problem = environment.problem(2)
    look = "?Velmora" if style == "short" else call("read", title="Velmora")
    none = "?zzz" if style == "short" else call("read", title="zzz")

    async def main() -> tuple[Observation, Observation]:
        found, missing = [await environment.step(problem, [turn]) for turn in (look, none)]
        server.moods = ["broken"]
        with pytest.raises(SourceFailed, match="HTTP 500"):
            await environment.step(problem, ["?Sarn" if style == "short" else call("read", title="Sarn")])
        await close_all([environment])
        return found, missing

    found, missing = asyncio.run(main())
    assert "founded in 1181" in found.text
    assert not missing.done
    assert "no" in missing.text
