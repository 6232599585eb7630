"""`math`: problems of GSM8K and AMC12 in their public forms, graded by what they are equal to."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from executor.environments import build, close_all, held_out_seed, problem_seed
from executor.environments.jsonl import find
from executor.environments.mathematics import Entry, boxed, choice, grader, read
from marlaas.errors import InputError
from marlaas.spec import MathEnvironment

pytest.importorskip("math_verify", reason="math-verify is not installed")


def write(folder: Path, *lines: Any, name: str = "problems.jsonl") -> str:
    """A JSONL file; texts are written as they are."""
    file = folder / name
    file.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return str(file)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ({"question": "How many?", "answer": "5 + 7 = <<5+7=12>>12.\n#### 12"}, "12"),
        ({"question": "How many?", "answer": "Many.\n#### 1,234"}, "1234"),
        ({"id": 0, "problem": "What?", "answer": 142.0, "url": ""}, "142"),
        ({"problem": "What?", "answer": 0.5}, "0.5"),
        ({"problem": "What?", "answer": "\\frac{1}{2}", "solution": "\\boxed{3}"}, "\\frac{1}{2}"),
        ({"problem": "What?", "solution": "So \\boxed{\\frac{1}{2}}, not \\boxed{\\sqrt{3}}."}, "\\sqrt{3}"),
        ({"question": "Which? (A) 1 (B) 2", "answer": "B"}, "B"),
    ],
)
def test_public_forms_are_read(tmp_path: Path, line: dict[str, Any], answer: str) -> None:
    """The answer is the final one, without the way to it."""
    (entry,) = read(Path(write(tmp_path, line, "")))
    assert entry == Entry(line.get("question") or line["problem"], answer)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"question": "What?"}', "no text under solution; the line has question"),
        ('{"answer": "4"}', "no text under question or problem; the line has answer"),
        ('{"question": " ", "answer": "4"}', "no text under question"),
        ('{"question": "What?", "answer": "Nine.\\nOr ten."}', "no final one"),
        ('{"question": "What?", "answer": "Nine.\\n####"}', "no final answer"),
        ('{"problem": "What?", "solution": "Nine, \\\\boxed{9"}', "no final answer"),
        ('{"problem": "What?", "answer": true}', "no text under answer"),
        ('{"problem": "What?", "answer": "\\ud800"}', "not a JSON object"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(tmp_path: Path, line: str, complaint: str) -> None:
    """With its file, what is wrong and what was wanted."""
    file = write(tmp_path, {"problem": "What?", "answer": 1}, "", line)
    with pytest.raises(InputError, match=r"problems\.jsonl:3: ") as caught:
        read(Path(file))
    assert complaint in str(caught.value)


RIGHT = [
    ("42", "The answer is 42."),
    ("42", "First 40, then \\boxed{42}"),
    ("1234", "1,234"),
    ("1/2", "\\boxed{0.5}"),
    ("\\frac{1}{2}", "$\\frac{2}{4}$"),
    ("x+1", "$1+x$"),
    ("142", "#### 142"),
    ("D", "\\boxed{\\textbf{(D)}}"),
    ("D", "I think\n(D)"),
    ("D", "So the correct answer is **D**."),
]
WRONG = [
    ("42", "41"),
    ("42", ""),
    ("42", "forty"),
    ("42", "9^{9^{9^{9}}}"),
    ("D", "\\boxed{C}"),
    ("A", "A man"),
]


def test_equal_answers_are_right_however_they_are_written() -> None:
    """And others are wrong."""
    grade = grader(None)
    assert [pair for pair in RIGHT if grade({"right": pair[0], "turn": pair[1]}) != 1.0] == []
    assert [pair for pair in WRONG if grade({"right": pair[0], "turn": pair[1]}) != 0.0] == []


def test_boxes_and_choices() -> None:
    """The last box counts, braces within it and all; no choice is no choice."""
    assert boxed("\\boxed{a} \\boxed{b{c}d} e}") == "b{c}d"
    assert boxed("\\boxed{a") == boxed("a") == ""
    assert choice("") == choice("No idea.") == choice("\\boxed{42}") == ""


@pytest.mark.parametrize("sample", [pytest.param("gsm8k-sample", marks=pytest.mark.slow), "amc12-sample"])
def test_samples_are_played_to_their_end(sample: str) -> None:
    """The perfect player earns 1 on every problem, training and held out; any other answer nothing."""

    async def main() -> None:
        environment = build(MathEnvironment(problems=sample, prompt="Problem: {problem}", instruction=""))
        seeds = [problem_seed(0, "t", 0, i) for i in range(30)] + [held_out_seed(0, "t", i) for i in range(9)]
        problems = {problem.prompt: problem for problem in map(environment.problem, seeds)}
        assert len(problems) > 8
        for problem in problems.values():
            assert problem.prompt.startswith("Problem: ")
            assert (await environment.step(problem, problem.solution)).reward == 1.0
            assert (await environment.step(problem, ["-7"])).reward == 0.0
            assert (await environment.step(problem, [" "])).reward == 0.0
        await close_all([environment])

    asyncio.run(main())


def test_one_problem_in_eight_is_held_out_and_never_trained_on(tmp_path: Path) -> None:
    """Also when a problem stands there twice."""
    lines = [{"problem": f"What is {i % 40}?", "answer": i % 40} for i in range(80)]
    environment = build(MathEnvironment(problems=write(tmp_path, *lines)))
    training = {environment.problem(problem_seed(0, "t", 0, i)).prompt for i in range(1_000)}
    held_out = {environment.problem(held_out_seed(0, "t", i)).prompt for i in range(200)}
    assert len(training) == 35
    assert len(held_out) == 5
    assert not training & held_out


def test_a_file_of_its_own_may_hold_the_held_out_problems(tmp_path: Path) -> None:
    """What is in both is never trained on."""
    lines = [{"problem": f"What is {i}?", "answer": i} for i in range(6)]
    spec = MathEnvironment(
        problems=write(tmp_path, *lines), held_out=write(tmp_path, *lines[4:], name="test.jsonl")
    )
    environment = build(spec)
    training = {environment.problem(problem_seed(0, "t", 0, i)).prompt for i in range(100)}
    held_out = {environment.problem(held_out_seed(0, "t", i)).prompt for i in range(100)}
    assert training == {f"What is {i}?" for i in range(4)}
    assert held_out == {"What is 4?", "What is 5?"}


def test_mistakes_are_named_with_their_keys(tmp_path: Path) -> None:
    """A file that is not there, one without problems, a prompt that leaves the problem out."""
    empty = write(tmp_path)
    one = write(tmp_path, {"problem": "What?", "answer": 1}, name="one.jsonl")
    for change, complaint in [
        ({"problems": "nowhere.jsonl"}, r"env\.problems: no such file .*amc12-sample, gsm8k-sample"),
        ({"problems": empty}, "the file is empty"),
        ({"problems": one}, r"env\.problems: 1 different problems"),
        ({"problems": one, "held_out": one}, r"env\.held_out: 0 problems for training and 1 held out"),
        ({"prompt": "Solve!"}, r"env\.prompt: .*wanted \{problem\}"),
    ]:
        with pytest.raises(InputError, match=complaint):
            build(MathEnvironment(**change), "env")
    with pytest.raises(InputError, match="wanted a JSONL file or a sample"):
        find("gsm8k", "env")
