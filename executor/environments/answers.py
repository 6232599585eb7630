"""The answer in a turn: what stands in its tags, or its last line. Knows no problem and no grading."""

from __future__ import annotations

import re

from marlaas.spec import AnswerSpec

MAX_ANSWER = 4_000


def extract(turn: str, spec: AnswerSpec) -> str | None:
    """The answer in a turn, blanks around it aside, or None where the spec finds none.

    The last tagged answer counts; one that was cut before its closing tag is none. An answer of more than
    `MAX_ANSWER` characters is none either.
    """
    answer = _tagged(turn, spec.tag) if spec.tag else None
    if answer is None and spec.otherwise == "all":
        answer = turn
    elif answer is None and spec.otherwise == "last-line":
        answer = turn.strip().rpartition("\n")[2]
    answer = (answer or "").strip()
    return answer if 0 < len(answer) <= MAX_ANSWER else None


def wrap(answer: str, spec: AnswerSpec) -> str:
    """The shortest turn that says `answer`."""
    if spec.tag and spec.otherwise == "nothing":
        return f"<{spec.tag}>{answer}</{spec.tag}>"
    return answer


def request(spec: AnswerSpec) -> str:
    """What to tell a model about where its answer goes."""
    if spec.tag is None:
        return "Write the final answer and nothing else." if spec.otherwise == "all" else _LAST_LINE
    return f"Write the final answer between <{spec.tag}> and </{spec.tag}>."


_LAST_LINE = "Write the final answer, and nothing else, on the last line."


def _tagged(turn: str, tag: str) -> str | None:
    found = re.findall(
        rf"<{re.escape(tag)}>((?:(?!<{re.escape(tag)}>).)*?)</{re.escape(tag)}>", turn, re.DOTALL
    )
    return found[-1] if found else None
