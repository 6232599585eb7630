"""Where pages come from: what a corpus and a wiki have in common."""

from __future__ import annotations

from typing import Protocol

import msgspec

from marlaas.errors import MarlaasError


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A page that a search found, and some of its text."""

    title: str
    snippet: str


class Source(Protocol):
    """Pages by search and by title. Raises `SourceFailed` where it cannot answer."""

    async def search(self, query: str, limit: int) -> list[Hit]:
        """The best pages, best first; none if nothing fits."""

    async def read(self, title: str) -> str | None:
        """The plain text of a page, or None if there is no such page."""


class SourceFailed(MarlaasError):
    """A source gave no usable answer, also when asked again; the text says why."""
