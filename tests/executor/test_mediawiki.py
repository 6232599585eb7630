"""A wiki over HTTP: patience, manners and memory, against a real server with moods."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from wiki_server import PAGES, serving
from wiki_server import Wiki as Server

from executor.environments.mediawiki import Wiki
from executor.environments.source import SourceFailed
from marlaas.errors import InputError
from marlaas.spec import MediaWiki

T = TypeVar("T")
pytest.importorskip("httpx", reason="httpx is not installed")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A wiki on this machine, reached without any proxy."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving() as wiki:
        yield wiki


def ask(server: Server, work: Callable[[Wiki], Awaitable[T]], **spec: Any) -> T:
    """Do `work` with a client that is closed after it."""
    defaults: dict[str, Any] = {"backoff_s": 0.001, "requests_per_s": 10_000.0, "request_s": 5.0}

    async def main() -> T:
        wiki = Wiki(MediaWiki(url=server.url, **{**defaults, **spec}), "source")
        try:
            return await work(wiki)
        finally:
            await wiki.close()

    return asyncio.run(main())


def test_pages_are_found_and_read(server: Server) -> None:
    """Snippets without markup, extracts as they are, no page for a title that has none."""

    async def work(wiki: Wiki) -> Any:
        hits = await wiki.search("velmora", 2)
        pages = [await wiki.read(title) for title in ("Velmora", "Fjörd & Söhne", "Nowhere", "a|b")]
        return hits, pages, await wiki.search("zzz", 3)

    hits, pages, none = ask(server, work, user_agent="test/1 (me@example.org)")
    assert [(hit.title, hit.snippet) for hit in hits] == [
        ("Velmora", "Velmora & more"),
        ("Fjörd & Söhne", "Fjörd & Söhne & more"),
    ]
    assert pages == [PAGES["Velmora"], PAGES["Fjörd & Söhne"], None, None]
    assert none == []
    assert server.agents == {"test/1 (me@example.org)"}
    assert all(params["format"] == "json" for params in server.asked)


def test_a_wiki_without_extracts_is_read_all_the_same(server: Server) -> None:
    """From the parsed page, without markup and styles."""
    server.makes_extracts = False
    assert ask(server, lambda wiki: wiki.read("Velmora")) == "The page of\na&b"


@pytest.mark.parametrize("mood", ["busy", "broken", "garbled", "a list", "hanging up", "maxlag"])
def test_passing_trouble_is_waited_out(server: Server, mood: str) -> None:
    """Twice anything that may pass, then the answer; nobody notices but the server."""
    server.moods = [mood, mood]
    assert ask(server, lambda wiki: wiki.read("Sarn")) == PAGES["Sarn"]
    assert len(server.asked) == 3


@pytest.mark.parametrize("mood", ["slow", "trickling"])
def test_an_answer_that_is_late_is_asked_for_again(server: Server, mood: str) -> None:
    """Also one that never stops arriving."""
    server.moods = [mood]
    assert ask(server, lambda wiki: wiki.read("Sarn"), request_s=0.5, retries=9) == PAGES["Sarn"]
    assert len(server.asked) >= 2


@pytest.mark.parametrize(
    ("mood", "told"),
    [
        ("busy", "HTTP 429"),
        ("broken", "HTTP 500"),
        ("garbled", "not JSON"),
        ("hanging up", "Error"),
        ("maxlag", "'maxlag'"),
    ],
)
def test_lasting_trouble_is_told_after_so_many_tries(server: Server, mood: str, told: str) -> None:
    """Bounded, and with its cause."""
    server.moods = [mood] * 9
    with pytest.raises(SourceFailed, match=told):
        ask(server, lambda wiki: wiki.read("Sarn"), retries=2)
    assert len(server.asked) == 3


def test_a_server_that_is_always_late_is_told_so(server: Server) -> None:
    """With how long it was waited for."""
    server.moods = ["slow"] * 9
    with pytest.raises(SourceFailed, match=r"no answer within 0\.05 s"):
        ask(server, lambda wiki: wiki.read("Sarn"), retries=1, request_s=0.05)


@pytest.mark.parametrize("mood", ["forbidden", "badvalue"])
def test_what_does_not_pass_is_told_at_once(server: Server, mood: str) -> None:
    """Asking again would only be rude."""
    server.moods = [mood]
    with pytest.raises(SourceFailed, match=r"403|badvalue"):
        ask(server, lambda wiki: wiki.read("Sarn"))
    assert len(server.asked) == 1


def test_nobody_is_there() -> None:
    """A server that is down is told with its address."""
    with serving() as gone:
        pass
    with pytest.raises(SourceFailed, match=r"127\.0\.0\.1.*Connect"):
        ask(gone, lambda wiki: wiki.read("Sarn"), retries=1)


def test_the_servers_wish_is_granted_within_reason(server: Server) -> None:
    """An hour is cut to the longest pause that the spec allows."""
    server.moods = ["busy for long"]
    began = time.monotonic()
    assert ask(server, lambda wiki: wiki.read("Sarn"), max_backoff_s=0.2) == PAGES["Sarn"]
    assert time.monotonic() - began >= 0.2


def test_equal_questions_are_asked_once(server: Server) -> None:
    """Also while the answer is under way; and whoever gives up does not take it from the others."""
    server.delay_s = 0.1

    async def work(wiki: Wiki) -> Any:
        impatient = asyncio.create_task(wiki.read("Sarn"))
        others = [asyncio.create_task(wiki.read("Sarn")) for _ in range(20)]
        await asyncio.sleep(0.02)
        impatient.cancel()
        answers = await asyncio.gather(*others)
        return {*answers, await wiki.read("Sarn")}

    assert ask(server, work, request_s=5) == {PAGES["Sarn"]}
    assert len(server.asked) == 1


def test_a_failure_is_told_to_all_who_wait_and_not_remembered(server: Server) -> None:
    """The next one asks again."""
    server.moods = ["broken"]

    async def work(wiki: Wiki) -> Any:
        together = await asyncio.gather(*(wiki.read("Sarn") for _ in range(3)), return_exceptions=True)
        return together, await wiki.read("Sarn")

    together, after = ask(server, work, retries=0)
    assert all(isinstance(each, SourceFailed) for each in together)
    assert after == PAGES["Sarn"]
    assert len(server.asked) == 2


def test_memory_is_bounded_and_the_folder_outlives_it(server: Server, tmp_path: Path) -> None:
    """The least recently used answer goes first; what is on disk is not asked again, unless it is damaged."""

    async def work(wiki: Wiki) -> None:
        for title in ("Sarn", "Velmora", "Sarn", "Fjörd & Söhne", "Sarn", "Velmora"):
            await wiki.read(title)

    ask(server, work, cached_answers=2)
    assert [params["titles"] for params in server.asked] == ["Sarn", "Velmora", "Fjörd & Söhne", "Velmora"]
    server.asked.clear()
    ask(server, work, cached_answers=1, cache_folder=str(tmp_path / "cache"))
    assert len(server.asked) == 3
    ask(server, work, cache_folder=str(tmp_path / "cache"))
    assert len(server.asked) == 3
    for file in (tmp_path / "cache").iterdir():
        file.write_text("{torn")
    ask(server, work, cache_folder=str(tmp_path / "cache"))
    assert len(server.asked) == 6


def test_rate_and_connections_are_never_exceeded(server: Server) -> None:
    """40 different questions at 100 a second over 3 connections."""
    server.delay_s = 0.02

    async def work(wiki: Wiki) -> None:
        await asyncio.gather(*(wiki.read(f"Page {i}") for i in range(40)))

    began = time.monotonic()
    ask(server, work, requests_per_s=100.0, connections=3, request_s=5)
    assert time.monotonic() - began >= 39 / 100
    assert server.most_at_once <= 3
    assert len(server.asked) == 40


def test_closing_gives_up_what_is_under_way(server: Server) -> None:
    """And a client can be used again in another loop."""
    wiki = Wiki(MediaWiki(url=server.url, request_s=30), "source")
    server.moods = ["slow"]

    async def abandon() -> None:
        waiting = asyncio.create_task(wiki.read("Sarn"))
        while not server.asked:  # noqa: ASYNC110 - by a thread, which knows no events of the loop
            await asyncio.sleep(0.01)
        await wiki.close()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    async def again() -> str | None:
        try:
            return await wiki.read("Sarn")
        finally:
            await wiki.close()

    asyncio.run(abandon())
    assert asyncio.run(again()) == PAGES["Sarn"]


def test_an_address_that_is_none_is_the_users_mistake() -> None:
    """Named with its place."""
    with pytest.raises(InputError, match=r"source\.url: .*api\.php"):
        Wiki(MediaWiki(url="en.wikipedia.org"), "source")
