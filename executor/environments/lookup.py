"""`lookup`: ask a tool for an entry of a corpus, then answer from what it says.

    prompt       colour of bako:
    model        ?bako               a turn that begins with `?` calls the tool
    observation  bako teal oslo:     or `nothing found:`
    model        teal                any other turn is the answer and ends the episode

The corpus has `len(NAMES)` entries of two facts. Its facts are drawn anew for every problem, so they cannot
be learned by heart: the answer earns its reward only after a call for the entry in question.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from executor.environments.problems import Observation, Problem, draw, grade
from executor.environments.streams import seed_of

CALL = "?"
NOT_FOUND = "nothing found:"
SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou")
NAMES = tuple(first + second for i, first in enumerate(SYLLABLES) for second in SYLLABLES[i % 5 :: 5])
COLOURS = ("red", "blue", "green", "teal", "pink", "grey", "black", "white", "gold", "lime", "navy", "plum")
PLACES = (
    "oslo",
    "rome",
    "lima",
    "cairo",
    "delhi",
    "paris",
    "quito",
    "seoul",
    "tunis",
    "accra",
    "bern",
    "kyiv",
)
FACTS = {"colour": COLOURS, "place": PLACES}


class Lookup:
    """A question about one entry of the corpus, a tool that tells an entry's facts, an exact answer."""

    def problem(self, seed: int) -> Problem:
        """The entry and the fact asked for are drawn evenly."""
        return draw(seed, lambda random: _pose(random, seed))

    async def step(self, problem: Problem, turns: Sequence[str]) -> Observation:
        """Answer a call with the entry's facts, anything else with the reward.

        Never ends an episode after a call, not even one that found nothing: whoever counts turns does.
        """
        turn = turns[-1].strip()
        if turn.startswith(CALL):
            return Observation(done=False, text=_look_up(problem.seed, turn))
        if problem.solution[0] not in (earlier.strip() for earlier in turns[:-1]):
            return Observation(done=True, reward=0.0)
        return grade(problem, turn)


def _pose(random: Random, seed: int) -> tuple[str, tuple[str, ...]]:
    name, kind = random.choice(NAMES), random.choice(tuple(FACTS))
    return f"{kind} of {name}:", (CALL + name, _facts(seed, name)[kind])


def _look_up(seed: int, call: str) -> str:
    name = call.removeprefix(CALL)
    if name not in NAMES:
        return NOT_FOUND
    return f"{name} {' '.join(_facts(seed, name).values())}:"


def _facts(seed: int, name: str) -> dict[str, str]:
    random = Random(seed_of("facts", seed, name))
    return {kind: random.choice(values) for kind, values in FACTS.items()}
