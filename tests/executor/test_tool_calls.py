"""Calls of tools in what models write: every usual form, every kind of nonsense."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.environments.problems import Tool
from executor.environments.tool_calls import MAX_CALLS, ToolCall, argument, describe, parse, schema

SEARCH = ToolCall(name="search", arguments={"query": "Oslo, Rome"})
CALL = '{"name": "search", "arguments": {"query": "Oslo, Rome"}}'
TOOL = Tool(name="search", description="Find.", parameters={"type": "object", "properties": {}})


@pytest.mark.parametrize(
    "turn",
    [
        f"<tool_call>{CALL}</tool_call>",
        f"I look it up.\n<tool_call>\n{CALL}\n</tool_call>",
        f"<tool_call>{CALL}",  # the end token came first
        "<tool_call><function=search>\n<parameter=query>\nOslo, Rome\n</parameter>\n</function></tool_call>",
        f"[TOOL_CALLS] [{CALL}]",
        '<|python_tag|>{"name": "search", "parameters": {"query": "Oslo, Rome"}}',
        '{"name": "search", "parameters": {"query": "Oslo, Rome"}}',
        f"So:\n```json\n{CALL}\n```",
        '<tool_call>{"type": "function", "function": ' + CALL + "}</tool_call>",
        '<tool_call>{"name": "search", "arguments": "{\\"query\\": \\"Oslo, Rome\\"}"}</tool_call>',
    ],
)
def test_a_call_is_read_in_every_usual_form(turn: str) -> None:
    """Whatever stands around it."""
    said = parse(turn)
    assert said.calls == (SEARCH,)
    assert said.errors == ()


def test_short_calls_are_read_where_their_names_are_known() -> None:
    """The last line counts, the argument may hold brackets, and other names are text."""
    (call,) = parse("I think.\nsearch[Oslo [city]]", ["search"]).calls
    assert argument(call, "query") == "Oslo [city]"
    assert parse("search[Oslo]").calls == ()
    assert parse("a[i] = 3", ["search"]).calls == ()
    assert parse("search[Oslo]\nOslo", ["search"]).calls == ()


def test_several_calls_keep_their_order_and_are_bounded() -> None:
    """A turn full of calls costs no more than `MAX_CALLS` of them."""
    turn = "".join(f'<tool_call>{{"name": "t{i}"}}</tool_call>' for i in range(50))
    assert [call.name for call in parse(turn).calls] == [f"t{i}" for i in range(MAX_CALLS)]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("{bad", "not JSON"),
        ("", "not JSON"),
        ('"search"', 'no "name"'),
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": 3}', 'no "name"'),
        ('{"name": "search", "arguments": [1]}', "not an object"),
        ('{"name": "search", "arguments": "Oslo"}', "not JSON"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_an_error_to_show(body: str, problem: str) -> None:
    """It says what is wrong, and the good call beside it is read."""
    said = parse(f"<tool_call>{body}</tool_call><tool_call>{CALL}</tool_call>")
    assert said.calls == (SEARCH,)
    assert len(said.errors) == 1
    assert problem in said.errors[0]


def test_ordinary_answers_are_no_calls() -> None:
    """Neither is JSON that names no tool."""
    for turn in ("42", "", "The answer is {x}.", '{"answer": 42}', "<answer>4</answer>", "tool_call"):
        assert parse(turn, ["search"]) == parse("")


@settings(max_examples=200, deadline=None)
@given(st.text() | st.builds(lambda text: f"<tool_call>{text}</tool_call>", st.text()))
def test_no_text_makes_it_raise(turn: str) -> None:
    """A model may write anything."""
    parse(turn, ["search"])


@settings(max_examples=50, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_arguments_of_any_kind_are_a_text_or_nothing(value: object) -> None:
    """Numbers are written out, blanks are nothing, other kinds are nothing."""
    text = argument(ToolCall(name="search", arguments={"query": value}), "query")
    assert text is None or (text and text == text.strip())


def test_tools_are_described_with_how_to_call_them() -> None:
    """The example in the description is a call that can be read; the schema is what templates expect."""
    text = describe([TOOL]).replace("{...}", "{}")
    assert parse(text).calls == (ToolCall(name="search"),)
    assert json.dumps(schema(TOOL)["function"]["name"]) in text
    assert schema(TOOL)["type"] == "function"
