"""Pages of a JSONL file, searched by BM25 in this process. Knows no questions and no tools."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from executor.environments.jsonl import read_objects, text_of
from executor.environments.packages import require
from executor.environments.source import Hit
from marlaas.errors import InputError

SNIPPET_CHARS = 160
WORD = r"(?u)\b\w+\b"  # those of one letter too


class Corpus:
    """A local `Source`; the index is made when it is built, in memory."""

    def __init__(self, file: Path, where: str) -> None:
        self._library: Any = require("bm25s", where, "search")
        self._pages: dict[str, str] = {}
        for place, line in read_objects(file):
            title = text_of(place, line, "title")
            if title in self._pages:
                raise InputError(
                    place, f"a second page with the title {title!r}", "wanted titles that differ"
                )
            self._pages[title] = text_of(place, line, "text")
        self._titles = list(self._pages)
        self._by_folded = {title.casefold(): title for title in self._titles}
        words = self._words([f"{title} {text}" for title, text in self._pages.items()])
        if not any(words):
            raise InputError(str(file), "no page has a word", "wanted titles and texts to search in")
        self._index = self._library.BM25()
        self._index.index(words, show_progress=False)

    async def search(self, query: str, limit: int) -> list[Hit]:
        """The best `limit` pages that share a word with the query."""
        return await asyncio.to_thread(self._search, query, limit)

    async def read(self, title: str) -> str | None:
        """The page of this title, capitals aside."""
        found = self._by_folded.get(title.casefold())
        return None if found is None else self._pages[found]

    def _search(self, query: str, limit: int) -> list[Hit]:
        known = [word for word in self._words([query])[0] if word in self._index.vocab_dict]
        if not known:
            return []
        num_hits = min(limit, len(self._titles))
        found, scores = self._index.retrieve([known], k=num_hits, show_progress=False)
        ranked = zip(found[0].tolist(), scores[0].tolist(), strict=True)
        return [self._hit(self._titles[number]) for number, score in ranked if score > 0]

    def _hit(self, title: str) -> Hit:
        return Hit(title=title, snippet=self._pages[title][:SNIPPET_CHARS])

    def _words(self, texts: list[str]) -> list[list[str]]:
        words: list[list[str]] = self._library.tokenize(
            texts, stopwords=None, token_pattern=WORD, return_ids=False, show_progress=False
        )
        return words
