"""Calls of tools in what a model wrote: found in any of the usual forms; described for models without one.

    <tool_call>{"name": "search", "arguments": {"query": "Oslo"}}</tool_call>     Qwen, Hermes and many others
    <tool_call><function=search><parameter=query>Oslo</parameter></function></tool_call>        Qwen3-Coder
    [TOOL_CALLS] [{"name": "search", "arguments": {"query": "Oslo"}}]                               Mistral
    <|python_tag|>{"name": "search", "parameters": {"query": "Oslo"}}                             Llama 3
    {"name": "search", "arguments": {"query": "Oslo"}}                     bare or in a fenced block
    search[query]                                              one argument, the last line of the turn

Knows no environment and no template. A call that cannot be read is an error to show the model, never raised.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from executor.environments.problems import Tool

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_LEADS = ("[TOOL_CALLS]", "<|python_tag|>")
_FENCED = re.compile(r"```(?:json)?\s*(\{.*?\})\s*```", re.DOTALL)
_SHORT = re.compile(r"([A-Za-z_]\w*)\[(.*)\]")
MAX_CALLS = 8


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool's name and arguments; `text` is the single argument of a short call, which names none."""

    name: str
    arguments: dict[str, Any] = {}
    text: str | None = None


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What a turn holds: calls in order and what is wrong with those that cannot be read."""

    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()


class _Unreadable(Exception):
    """A call of which no name and arguments can be made; the text says why."""


def parse(turn: str, short_names: Sequence[str] = ()) -> Said:
    """The calls in a turn; with `short_names` also `name[argument]` for these names, on the last line."""
    calls, errors = list[ToolCall](), list[str]()
    for candidate in _candidates(turn):
        try:
            calls += _read(candidate)
        except _Unreadable as error:
            errors.append(str(error))
    if not calls and not errors:
        last = turn.strip().rpartition("\n")[2].strip()
        match = _SHORT.search(last)
        if match and match[1] in short_names:
            calls.append(ToolCall(name=match[1], text=match[2].strip()))
    return Said(calls=tuple(calls[:MAX_CALLS]), errors=tuple(errors[:MAX_CALLS]))


def argument(call: ToolCall, name: str) -> str | None:
    """The text of the argument `name` of a call, or None; a short call has one, whatever its name."""
    value = call.text if call.text is not None else call.arguments.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return str(value).strip() or None


def schema(tool: Tool) -> dict[str, Any]:
    """A tool as chat templates expect it: a function with a JSON schema of its parameters."""
    return {"type": "function", "function": msgspec.to_builtins(tool)}


def describe(tools: Sequence[Tool]) -> str:
    """Tools and how to call them, for models whose template does not present tools."""
    listed = "\n".join(json.dumps(msgspec.to_builtins(tool), ensure_ascii=False) for tool in tools)
    return (
        f"You can call these tools:\n{listed}\n"
        "To call one, end your turn with its name and arguments, for example\n"
        '<tool_call>{"name": "' + tools[0].name + '", "arguments": {...}}</tool_call>\n'
        "Its result comes next."
    )


def _candidates(turn: str) -> Iterator[str]:
    """The stretches of a turn that claim to be calls."""
    blocks = _BLOCK.findall(turn)
    if blocks:
        yield from blocks
        return
    for lead in _LEADS:
        if lead in turn:
            yield turn.partition(lead)[2]
            return
    fenced = _FENCED.findall(turn)
    if fenced or turn.lstrip().startswith("{"):
        yield from (text for text in fenced or [turn] if '"name"' in text)


def _read(candidate: str) -> list[ToolCall]:
    function = _FUNCTION.search(candidate)
    if function:
        found = _PARAMETER.findall(function[2])
        return [ToolCall(name=function[1], arguments={key: value.strip() for key, value in found})]
    try:
        value, _ = json.JSONDecoder().raw_decode(candidate.strip())
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"the call is not JSON ({error})") from None
    return [_call(each) for each in (value if isinstance(value, list) else [value])]


def _call(value: Any) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise _Unreadable('the call has no "name"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON, as the OpenAI interface has it
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise _Unreadable('the "arguments" are not JSON') from None
    if not isinstance(arguments, dict):
        raise _Unreadable('the "arguments" are not an object')
    return ToolCall(name=value["name"], arguments=arguments)
