"""A fixed list of problems, divided into training and held out. Knows prompts, not problems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Generic, TypeVar

from executor.environments.problems import HELD_OUT_SHARE
from executor.environments.streams import is_held_out, seed_of
from marlaas.errors import InputError

T = TypeVar("T")


class Split(Generic[T]):
    """Items for training and items held out; none has a prompt of the other kind."""

    def __init__(self, training: Sequence[T], held_out: Sequence[T]) -> None:
        self._parts = tuple(training), tuple(held_out)

    def draw(self, seed: int) -> T:
        """An item of the seed's part, each equally likely."""
        return Random(seed).choice(self._parts[is_held_out(seed)])

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)


def split(items: Iterable[T], prompt_of: Callable[[T], str], where: str) -> Split[T]:
    """Hold out one item in `HELD_OUT_SHARE`, at least one, chosen by its prompt and by nothing else.

    Of items with one prompt the first counts. Raises `InputError` at `where` for fewer than two.
    """
    by_prompt = _unique(items, prompt_of)
    if len(by_prompt) < 2:
        raise InputError(where, f"{len(by_prompt)} different problems", "wanted at least 2, to hold one out")
    order = sorted(by_prompt, key=lambda prompt: (seed_of("held-out", prompt), prompt))
    num_held_out = max(1, len(order) // HELD_OUT_SHARE)
    held_out = set(order[:num_held_out])
    return Split(
        [item for prompt, item in by_prompt.items() if prompt not in held_out],
        [item for prompt, item in by_prompt.items() if prompt in held_out],
    )


def given_split(
    training: Iterable[T], held_out: Iterable[T], prompt_of: Callable[[T], str], where: str
) -> Split[T]:
    """Two lists as they are, less the training items whose prompt is held out; raises `InputError`."""
    kept = _unique(held_out, prompt_of)
    others = {prompt: item for prompt, item in _unique(training, prompt_of).items() if prompt not in kept}
    if not others or not kept:
        problem = f"{len(others)} problems for training and {len(kept)} held out"
        raise InputError(where, problem, "wanted at least one of each")
    return Split(tuple(others.values()), tuple(kept.values()))


def _unique(items: Iterable[T], prompt_of: Callable[[T], str]) -> dict[str, T]:
    found: dict[str, T] = {}
    for item in items:
        found.setdefault(prompt_of(item), item)
    return found
