"""A model's own chat template: how an episode opens, and what is appended after a turn of the model.

Owns rendering and what a template can do: a system message, tools, results of tools. Knows no tokens. A turn
that was sampled is never rendered again: what follows it is found by rendering a conversation whose turn is a
mark, and taking what stands behind the mark. Templates are programs from elsewhere and run in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from executor.environments.problems import Problem, Role, Tool
from executor.environments.tool_calls import describe, parse, schema
from marlaas.errors import InputError
from marlaas.spec import ChatSpec

Message = dict[str, Any]
MARK = "[[turn]]"
ECHO = "[[text]]"
NEXT = "[[next]]"
_PROBE = Tool(
    name="look_up",
    description="Look something up.",
    parameters={"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
)


class Chat:
    """A chat template with its variables; raises `InputError` for one that cannot hold a conversation."""

    def __init__(self, template: str, variables: Mapping[str, object]) -> None:
        self._variables = dict(variables)
        self._template = _sandbox().from_string(template)
        text = self._try([_user("x"), _assistant(MARK), _user(ECHO), _assistant(NEXT)], generate=False)
        if text is None or not 0 <= text.find(MARK) < text.find(ECHO) < text.find(NEXT):
            problem = "the model's chat template does not show a conversation of several turns"
            raise InputError("model.chat", problem, "write `chat: {template: none}`")

    def opening(self, problem: Problem, prompt: str) -> str:
        """The conversation up to where the model's first turn begins; `prompt` is what the user says.

        Where a template has no place for a system message or tools, these stand in the user's message.
        """
        tools = problem.tools if self._shows_tools else ()
        before = [problem.system] if problem.system else []
        if problem.tools and not tools:
            before.append(describe(problem.tools))
        messages = [_user(prompt)]
        if before and self._has_system:
            messages.insert(0, {"role": "system", "content": "\n\n".join(before)})
        elif before:
            messages = [_user("\n\n".join([*before, prompt]))]
        return self._up_to_turn(messages, tools)

    def after_turn(self, text: str, role: Role) -> str:
        """What follows a turn of the model: its end, `text` in its place, the beginning of the next turn."""
        shown = role if role == "user" or self._shows_results else "user"
        rendered = self._up_to_turn([_user("x"), _assistant(MARK), {"role": shown, "content": text}])
        return rendered[rendered.index(MARK) + len(MARK) :]

    def _up_to_turn(self, messages: list[Message], tools: Sequence[Tool] = ()) -> str:
        """A conversation to where the next turn of the model begins, on any template.

        One that knows no `add_generation_prompt` writes that beginning only with a turn; blanks there belong
        to the turn, whose first token holds them.
        """
        if self._begins_turns:
            return self._render(messages, tools)
        rendered = self._render([*messages, _assistant(NEXT)], tools, generate=False)
        return rendered[: rendered.rindex(NEXT)].rstrip(" ")

    @cached_property
    def _begins_turns(self) -> bool:
        return self._render([_user("x")]) != self._render([_user("x")], generate=False)

    @cached_property
    def _has_system(self) -> bool:
        text = self._try([{"role": "system", "content": MARK}, _user(ECHO)])
        return text is not None and 0 <= text.find(MARK) < text.find(ECHO)

    @cached_property
    def _shows_tools(self) -> bool:
        """Whether the template presents tools, and teaches a way of calling them that can be read here."""
        text = self._try([_user("x")], [_PROBE])
        call = {"name": _PROBE.name, "arguments": {"query": ECHO}}
        calls = [{"type": "function", "id": "call00000", "function": call}]
        said = self._try([_user(MARK), {**_assistant(""), "tool_calls": calls}], [_PROBE], generate=False)
        if text is None or said is None or _PROBE.description not in text or MARK not in said:
            return False
        found = parse(said[said.rindex(MARK) + len(MARK) :])
        return [(one.name, one.arguments) for one in found.calls] == [(_PROBE.name, call["arguments"])]

    @cached_property
    def _shows_results(self) -> bool:
        text = self._try([_user("x"), _assistant(MARK), {"role": "tool", "content": ECHO}])
        return text is not None and 0 <= text.find(MARK) < text.find(ECHO)

    def _try(
        self, messages: list[Message], tools: Sequence[Tool] = (), *, generate: bool = True
    ) -> str | None:
        try:
            return self._render(messages, tools, generate=generate)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError):
            return None  # what templates do about messages they have no place for

    def _render(self, messages: list[Message], tools: Iterable[Tool] = (), *, generate: bool = True) -> str:
        return self._template.render(
            **self._variables,
            messages=messages,
            tools=[schema(tool) for tool in tools] or None,
            documents=None,
            add_generation_prompt=generate,
        )


def chat_of(model_folder: Path, spec: ChatSpec) -> Chat | None:
    """The chat template that a model folder comes with, or None where there is none or it is not wanted."""
    if spec.template == "none":
        return None
    file = model_folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    own_file = model_folder / "chat_template.jinja"
    template = own_file.read_text(encoding="utf-8") if own_file.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several by name, as older model folders have them
        by_name = {each["name"]: each["template"] for each in template}
        template = by_name.get("tool_use", by_name.get("default"))
    if not template:
        return None
    try:
        return Chat(template, {**_special_tokens(config), **spec.variables})
    except TemplateError as error:
        problem = f"the model's chat template cannot be read ({error})"
        raise InputError("model.chat", problem, "write `chat: {template: none}`") from None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and their like, which templates name."""
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
    return {key: value for key, value in texts.items() if isinstance(value, str)}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _sandbox() -> ImmutableSandboxedEnvironment:
    """The functions and manners that templates of Hugging Face models expect."""
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    sandbox.filters["tojson"] = _to_json
    sandbox.globals["raise_exception"] = _raise
    sandbox.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return sandbox


def _to_json(value: Any, **options: Any) -> str:
    """As templates want it: no HTML escapes, characters as they are."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise(message: str) -> None:
    raise TemplateError(message)
