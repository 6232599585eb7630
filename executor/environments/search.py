"""`search`: answer a question with the tools `search` and `read`, over a local corpus or a wiki.

    user         In which year was Velmora founded?
    model        <tool_call>{"name": "search", "arguments": {"query": "Velmora"}}</tool_call>
    tool         1. Velmora: Velmora is a town on the river Sarn. ...
    model        <answer>1342</answer>           a turn without a call is the answer and ends the episode

With `style: short` a turn that begins with `?` is a search and shows the text of the best page. Calls that
make no sense are answered by what is wrong with them; a source that fails raises, which is an event like
any other.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from executor.environments import answers
from executor.environments.corpus import Corpus
from executor.environments.jsonl import find, read_objects, text_of
from executor.environments.mediawiki import Wiki
from executor.environments.problems import Observation, Problem, Tool
from executor.environments.source import Source
from executor.environments.split import split
from executor.environments.tool_calls import ToolCall, argument, parse
from marlaas.errors import InputError
from marlaas.spec import LocalCorpus, SearchEnvironment

INSTRUCTION = "Answer the question. Use the tools to find out; do not guess."
SHORT_CALL = "?"
NOT_FOUND = "nothing found"


def _tool(name: str, description: str, parameter: str, meaning: str) -> Tool:
    properties = {parameter: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return Tool(name=name, description=description, parameters=parameters)


TOOLS = (
    _tool(
        "search", "Find pages; lists titles with the beginning of each page.", "query", "words to look for"
    ),
    _tool("read", "Read a page.", "title", "the title of a page, as a search lists it"),
)


class Question(NamedTuple):
    """A question and every answer that is right."""

    text: str
    answers: tuple[str, ...]


class Search:
    """Questions of a file, two tools over a source of pages, and an answer at the end."""

    def __init__(self, spec: SearchEnvironment, where: str) -> None:
        self._spec = spec
        self._source = _source(spec, where)
        questions = read(find(spec.questions, f"{where}.questions"))
        self._split = split(questions, lambda question: question.text, f"{where}.questions")

    def problem(self, seed: int) -> Problem:
        """Each question of the seed's part of the file is equally likely."""
        question = self._split.draw(seed)
        if self._spec.style == "short":
            return Problem(prompt=question.text, solution=question.answers[:1], seed=seed)
        instruction = self._spec.instruction
        if instruction is None:
            instruction = f"{INSTRUCTION} {answers.request(self._spec.answer)}"
        answer = answers.wrap(question.answers[0], self._spec.answer)
        return Problem(prompt=question.text, solution=(answer,), seed=seed, system=instruction, tools=TOOLS)

    async def step(self, problem: Problem, turns: Sequence[str]) -> Observation:
        """Carry out the calls of a turn, or grade it."""
        if self._spec.style == "short":
            return await self._short_step(problem, turns[-1].strip())
        said = parse(turns[-1], [tool.name for tool in TOOLS])
        results = [await self._call(call) for call in said.calls]
        results += [f"error: {error}" for error in said.errors]
        if results:
            return Observation(done=False, text="\n\n".join(results), role="tool")
        return self._graded(problem, answers.extract(turns[-1], self._spec.answer))

    async def close(self) -> None:
        """Close the connections of a wiki."""
        if isinstance(self._source, Wiki):
            await self._source.close()

    async def _short_step(self, problem: Problem, turn: str) -> Observation:
        if not turn.startswith(SHORT_CALL):
            return self._graded(problem, turn)
        hits = await self._source.search(turn.removeprefix(SHORT_CALL).strip(), 1)
        text = await self._source.read(hits[0].title) if hits else None
        return Observation(done=False, text=f"{(text or NOT_FOUND)[: self._spec.page_chars]}:")

    async def _call(self, call: ToolCall) -> str:
        match call.name:
            case "search":
                query = argument(call, "query")
                return await self._search(query) if query else "error: search needs a query, a text"
            case "read":
                title = argument(call, "title")
                return await self._read(title) if title else "error: read needs a title, a text"
            case _:
                return f"error: there is no tool {call.name[:40]!r}; the tools are search and read"

    async def _search(self, query: str) -> str:
        hits = await self._source.search(query, self._spec.results)
        listed = (f"{number}. {hit.title}: {hit.snippet}" for number, hit in enumerate(hits, 1))
        return "\n".join(listed) or NOT_FOUND

    async def _read(self, title: str) -> str:
        text = await self._source.read(title)
        if text is None:
            return f"there is no page with the title {title[:80]!r}"
        return text[: self._spec.page_chars] or "the page is empty"

    def _graded(self, problem: Problem, answer: str | None) -> Observation:
        right = self._split.draw(problem.seed).answers
        score = exact if self._spec.reward == "exact" else f1
        reward = max(score(answer, each) for each in right) if answer else 0.0
        return Observation(done=True, reward=reward)


def read(file: Path) -> list[Question]:
    """The questions of a JSONL file; raises `InputError` with file and line for one that is none."""
    return [_question(place, line) for place, line in read_objects(file)]


def _question(place: str, line: dict[str, Any]) -> Question:
    given = line.get("answers", line.get("answer"))
    right = [given] if isinstance(given, str) else given
    if not isinstance(right, list) or not right or not all(isinstance(a, str) and words(a) for a in right):
        raise InputError(place, "no answers", 'wanted "answers": a list of texts, at least one')
    return Question(text_of(place, line, "question"), tuple(right))


def _source(spec: SearchEnvironment, where: str) -> Source:
    if isinstance(spec.source, LocalCorpus):
        return Corpus(find(spec.source.pages, f"{where}.source.pages"), f"{where}.source")
    return Wiki(spec.source, f"{where}.source")


# --- grading ---------------------------------------------------------------------------------------


def exact(answer: str, right: str) -> float:
    """1 for the same words, as for SQuAD: capitals, punctuation and articles aside."""
    return float(words(answer) == words(right))


def f1(answer: str, right: str) -> float:
    """Harmonic mean of the shares of words that the two have in common."""
    said, wanted = words(answer), words(right)
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


def words(text: str) -> list[str]:
    """Words as they are compared: in small letters, without punctuation and articles."""
    bare = text.casefold().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", bare).split() or bare.split()
