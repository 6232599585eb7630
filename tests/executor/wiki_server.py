"""A small wiki that speaks MediaWiki's HTTP interface, with moods; a real server on a thread."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

PAGES = {
    "Velmora": "Velmora is a town on the river Sarn. It was founded in 1181.",
    "Sarn": "The Sarn flows into Lake Munin.",
    "Fjörd & Söhne": "A firm <of> Velmora.",
}


class Wiki(ThreadingHTTPServer):
    """Answers as `moods` say, one for each request, then well; keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.moods: list[str] = []
        self.asked: list[dict[str, str]] = []
        self.agents: set[str] = set()
        self.makes_extracts = True
        self.delay_s = 0.0
        self.num_now = self.most_at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/w/api.php"


@contextmanager
def serving() -> Iterator[Wiki]:
    """A wiki that is up while inside."""
    wiki = Wiki()
    thread = threading.Thread(target=wiki.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield wiki
    finally:
        wiki.shutdown()
        thread.join()
        wiki.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Wiki

    def do_GET(self) -> None:
        wiki = self.server
        params = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        with wiki.lock:
            wiki.asked.append(params)
            wiki.agents.add(self.headers["User-Agent"])
            mood = wiki.moods.pop(0) if wiki.moods else "well"
            wiki.num_now += 1
            wiki.most_at_once = max(wiki.most_at_once, wiki.num_now)
        time.sleep(wiki.delay_s)
        with wiki.lock:  # before the answer, which may bring the next request at once
            wiki.num_now -= 1
        with suppress(BrokenPipeError, ConnectionResetError):  # the client would not wait
            self._answer(mood, params)

    def _answer(self, mood: str, params: dict[str, str]) -> None:
        match mood:
            case "busy":
                self._send(429, b"slow down", {"Retry-After": "0"})
            case "busy for long":
                self._send(429, b"slow down", {"Retry-After": "3600"})
            case "broken":
                self._send(500, b"<html>oops</html>")
            case "forbidden":
                self._send(403, b"no")
            case "garbled":
                self._send(200, b"{not json")
            case "a list":
                self._send(200, b"[]")
            case "slow":
                time.sleep(2.0)
                self._send(200, b"{}")
            case "trickling":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                for _ in range(40):
                    self.wfile.write(b" ")
                    self.wfile.flush()
                    time.sleep(0.05)
            case "hanging up":
                self.connection.close()
            case "maxlag" | "badvalue":
                self._send(200, json.dumps({"error": {"code": mood, "info": "x"}}).encode())
            case _:
                self._send(200, json.dumps(self._found(params)).encode())

    def _found(self, params: dict[str, str]) -> dict[str, Any]:
        if params.get("list") == "search":
            words = params["srsearch"].lower().split()
            hits = [t for t, text in PAGES.items() if any(word in f"{t} {text}".lower() for word in words)]
            found = [
                {"title": t, "snippet": f'<span class="searchmatch">{t}</span> &amp; more'} for t in hits
            ]
            return {"query": {"search": found[: int(params["srlimit"])]}}
        if params.get("prop") == "extracts":
            page: dict[str, Any] = {"title": params["titles"]}
            if params["titles"] not in PAGES:
                page["missing"] = True
            elif self.server.makes_extracts:
                page["extract"] = PAGES[params["titles"]]
            return {"query": {"pages": [page]}}
        assert params["action"] == "parse"
        style = "<style>p {color: red}</style>"
        return {"parse": {"title": params["page"], "text": f"{style}<p>The <b>page</b> of</p><p>a&amp;b</p>"}}

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Say nothing."""
