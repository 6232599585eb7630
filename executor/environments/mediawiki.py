"""A wiki as a source of pages, over the HTTP interface of MediaWiki: search, extracts, parsed pages.

Owns being a good guest and a patient one: a rate and a number of connections that are never exceeded,
deadlines, pauses between tries that grow and scatter, the server's own wishes first (`Retry-After`), and a
cache, so that the samples of a group ask once. A request under way is shared by all who ask the same.
Knows no questions.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections import OrderedDict
from hashlib import blake2b
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executor.environments.packages import require
from executor.environments.source import Hit, SourceFailed
from marlaas.errors import InputError
from marlaas.spec import MediaWiki

if TYPE_CHECKING:
    import httpx

Params = dict[str, str]
COMMON = {"format": "json", "formatversion": "2", "utf8": "1"}
BUSY = frozenset({"maxlag", "ratelimited", "readonly"})
IMPATIENT = frozenset({429, 500, 502, 503, 504})


class Wiki:
    """A MediaWiki server as a `Source`."""

    def __init__(self, spec: MediaWiki, where: str) -> None:
        self._httpx: Any = require("httpx", where, "search")
        if not spec.url.startswith(("http://", "https://")):
            raise InputError(f"{where}.url", f"{spec.url!r} is no address", "wanted http(s)://.../api.php")
        self._spec = spec
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._folder = None if spec.cache_folder is None else Path(spec.cache_folder)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._under_way: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._next_start_s = 0.0

    async def search(self, query: str, limit: int) -> list[Hit]:
        """Pages by the wiki's own ranking."""
        params = {"action": "query", "list": "search", "srsearch": query[:300], "srlimit": str(limit)}
        answer = await self._get({**params, "srprop": "snippet"})
        found = answer.get("query", {}).get("search", [])
        return [Hit(title=str(each["title"]), snippet=_plain(str(each.get("snippet", "")))) for each in found]

    async def read(self, title: str) -> str | None:
        """A page's extract as plain text, or its text without markup on a wiki that makes no extracts."""
        params = {"action": "query", "prop": "extracts", "explaintext": "1", "redirects": "1"}
        answer = await self._get({**params, "titles": title[:255].replace("|", " ")})
        pages = answer.get("query", {}).get("pages", [])
        if not pages or pages[0].get("missing") or pages[0].get("invalid"):
            return None
        if "extract" in pages[0]:
            return str(pages[0]["extract"]).strip()
        parsed = await self._get(
            {"action": "parse", "page": pages[0]["title"], "prop": "text", "redirects": "1"}
        )
        return _plain(str(parsed.get("parse", {}).get("text", "")))

    async def close(self) -> None:
        """Give up requests under way and close the connections."""
        for task in list(self._under_way.values()):
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
        if self._loop is not None:
            await self._client.aclose()
        self._loop = None

    # --- cache ---

    async def _get(self, params: Params) -> dict[str, Any]:
        key = blake2b(
            json.dumps([self._spec.url, params], sort_keys=True).encode(), digest_size=16
        ).hexdigest()
        if key in self._kept:
            self._kept.move_to_end(key)
            answer: dict[str, Any] = self._kept[key]
            return answer
        self._join_loop()
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = asyncio.create_task(self._find(key, params))
            task.add_done_callback(lambda done: self._done(key, done))
        return await asyncio.shield(task)  # whoever gives up must not take the answer from the others

    async def _find(self, key: str, params: Params) -> dict[str, Any]:
        file = None if self._folder is None else self._folder / f"{key}.json"
        if file is not None:
            with contextlib.suppress(OSError, ValueError):
                return self._keep(key, json.loads(await asyncio.to_thread(file.read_bytes)))
        answer = await self._ask(params)
        if file is not None:
            await asyncio.to_thread(_write, file, json.dumps(answer))
        return self._keep(key, answer)

    def _keep(self, key: str, answer: dict[str, Any]) -> dict[str, Any]:
        self._kept[key] = answer
        while len(self._kept) > self._spec.cached_answers:
            self._kept.popitem(last=False)
        return answer

    def _done(self, key: str, task: asyncio.Task[Any]) -> None:
        self._under_way.pop(key, None)
        if not task.cancelled():
            task.exception()  # told to those who waited; nobody else has to hear of it

    # --- requests ---

    def _join_loop(self) -> None:
        """Connections belong to the event loop that opened them."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        self._loop, self._under_way, self._next_start_s = loop, {}, 0.0
        self._places = asyncio.Semaphore(self._spec.connections)
        self._client: httpx.AsyncClient = self._httpx.AsyncClient(
            headers={"User-Agent": self._spec.user_agent},
            timeout=self._spec.request_s,
            limits=self._httpx.Limits(max_connections=self._spec.connections),
            follow_redirects=True,
        )

    async def _ask(self, params: Params) -> dict[str, Any]:
        """The answer, tried for as often as the spec says; raises `SourceFailed` with the last trouble."""
        spec = self._spec
        for tries_left in range(spec.retries, -1, -1):
            answer, trouble, wished_s = await self._try(params)
            if answer is not None:
                return answer
            if not tries_left or wished_s is None:
                break
            grown = spec.backoff_s * 2 ** (spec.retries - tries_left)
            pause = max(wished_s, random.uniform(0.5, 1.0) * grown)  # scattered, or all come back at once
            await asyncio.sleep(min(pause, spec.max_backoff_s))
        raise SourceFailed(f"{spec.url}: {trouble}")

    async def _try(self, params: Params) -> tuple[dict[str, Any] | None, str, float | None]:
        """An answer, or what went wrong and how long the server wants to be left alone (None: for ever)."""
        try:
            async with self._places:
                await self._wait_for_turn()
                async with asyncio.timeout(self._spec.request_s):
                    response = await self._client.get(self._spec.url, params={**COMMON, **params})
        except TimeoutError:
            return None, f"no answer within {self._spec.request_s:g} s", 0.0
        except self._httpx.HTTPError as error:
            return None, f"{type(error).__name__}: {error}", 0.0
        if response.status_code in IMPATIENT:
            return None, f"HTTP {response.status_code}", _wish(response.headers.get("Retry-After"))
        if response.status_code != 200:
            return None, f"HTTP {response.status_code}", None
        return _understood(response.content, _wish(response.headers.get("Retry-After")))

    async def _wait_for_turn(self) -> None:
        loop = asyncio.get_running_loop()
        start = max(loop.time(), self._next_start_s)
        self._next_start_s = start + 1.0 / self._spec.requests_per_s
        await asyncio.sleep(start - loop.time())


def _understood(content: bytes, wished_s: float) -> tuple[dict[str, Any] | None, str, float | None]:
    try:
        answer = json.loads(content)
    except ValueError as problem:
        return None, f"the answer is not JSON ({problem})", wished_s
    if not isinstance(answer, dict):
        return None, "the answer is not an object", wished_s
    if "error" not in answer:
        return answer, "", 0.0
    error: Any = answer["error"]
    code = str(error.get("code")) if isinstance(error, dict) else "unknown"
    if code in ("missingtitle", "invalidtitle"):
        return {}, "", 0.0
    return None, f"the wiki answers with the error {code!r}", wished_s if code in BUSY else None


def _wish(header: str | None) -> float:
    """Seconds of a `Retry-After`; its other form, a date, is not used by wikis and counts as none."""
    return float(header) if header is not None and header.isdigit() else 0.0


def _write(file: Path, text: str) -> None:
    """Write aside and rename, so that readers see all or nothing; a cache that cannot be written is none."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_text(text, encoding="utf-8")
        aside.replace(file)


class _Text(HTMLParser):
    """Collects what is to be read, leaving markup, styles and scripts out."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden += tag in ("style", "script")
        if tag in ("p", "br", "li", "tr", "h2", "h3"):
            self.pieces.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("style", "script")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.pieces.append(data)


def _plain(html: str) -> str:
    reader = _Text()
    reader.feed(unescape(html) if "<" not in html else html)
    lines = ("".join(reader.pieces)).splitlines()
    return "\n".join(" ".join(line.split()) for line in lines if line.strip())
