"""Reads what our sources ask of vLLM: imports, arguments, methods, attributes, variables, routes.

Which class an expression is of is told by its last name, from `MEANS`: our sources keep to one name a thing.
Knows no vLLM: uses are judged against the list in `vllm_names.json`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

# What the names in our sources stand for; an entry of a sequence is named by the sequence.
MEANS = {
    "llm": "AsyncLLM",
    "_llm": "AsyncLLM",
    "adapter": "LoRARequest",
    "sampling": "SamplingParams",
    "output": "RequestOutput",
    "outputs": "CompletionOutput",
    "last": "CompletionOutput",
    "logprobs": "Logprob",
    "current_platform": "Platform",
    "scheduler_stats": "SchedulerStats",
    "iteration_stats": "IterationStats",
    "LoRARequest": "LoRARequest",
    "SamplingParams": "SamplingParams",
    "RequestOutputKind": "RequestOutputKind",
    "AsyncLLM": "AsyncLLM",
    "KVCacheConfig": "KVCacheConfig",
    "AsyncEngineArgs": "AsyncEngineArgs",
}
# What is sent to a route of the server, and what stands in its answers.
SENT = {
    "/v1/completions": "CompletionRequest",
    "/v1/load_lora_adapter": "LoadLoRAAdapterRequest",
    "/v1/unload_lora_adapter": "UnloadLoRAAdapterRequest",
}
ANSWERED = {
    "answer": "CompletionResponse",
    "choice": "CompletionResponseChoice",
    "base": "ModelCard",
    "model": "ModelCard",
}
_VARIABLE = re.compile(r"VLLM_[A-Z0-9_]+")
_ROUTE = re.compile(r"/(?:v1/\w+|health|ping|version|load)(?![\w/])")


class Use(NamedTuple):
    """Something our source asks vLLM for: an argument or attribute `name` of `owner`, or a bare name."""

    line: int
    kind: str
    owner: str
    name: str


def uses(tree: ast.Module) -> Iterator[Use]:
    """Every use of vLLM in one of our modules."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.split(".")[0] == "vllm":
                yield from (Use(line, "import", module, alias.name) for alias in names)
            case ast.Import(names=names):
                found = [alias.name for alias in names if alias.name.split(".")[0] == "vllm"]
                yield from (Use(line, "import", name, "") for name in found)
            case ast.Attribute(value=value, attr=name) if owner := _class_of(value):
                yield Use(line, "attribute", owner, name)
            case ast.Call():
                yield from _arguments(node)
                yield from _sent(node)
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))) if (
                name in ANSWERED
            ):
                yield Use(line, "attribute", ANSWERED[name], key)
            case ast.Constant(value=str(text)):
                yield from (Use(line, "variable", "", name) for name in _VARIABLE.findall(text))
                yield from (Use(line, "route", "", route) for route in _ROUTE.findall(text))


def _class_of(node: ast.expr) -> str | None:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return MEANS.get(name)
        case ast.Subscript(value=value) | ast.Await(value=value):
            return _class_of(value)
    return None


def _arguments(call: ast.Call) -> Iterator[Use]:
    """Named arguments by name, positional ones by number; of a class, or of a method of its objects."""
    match call.func:
        case ast.Name(id=name) if name in MEANS and name[0].isupper():
            owner = f"{MEANS[name]}()"
        case ast.Attribute(value=value, attr=method) if found := _class_of(value):
            owner = f"{found}.{method}()"
        case _:
            return
    yield from (Use(call.lineno, "argument", owner, f"#{i}") for i in range(len(call.args)))
    yield from (Use(call.lineno, "argument", owner, k.arg) for k in call.keywords if k.arg)


def _sent(call: ast.Call) -> Iterator[Use]:
    """Keyword arguments of a call that names a route: what is sent there."""
    routes = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    owner = next((SENT[route] for route in routes if route in SENT), None)
    if owner is not None:
        yield from (Use(call.lineno, "argument", f"{owner}()", k.arg) for k in call.keywords if k.arg)


def missing(use: Use, names: dict[str, Any]) -> str | None:
    """What vLLM lacks of a use, or None."""
    match use.kind:
        case "import":
            have = names["modules"].get(use.owner)
            if have is None:
                return f"{use.owner} is not in the list: add it to MODULES of vllm_names.py and remake it"
            return None if not use.name or use.name in have else f"{use.owner} has no {use.name}"
        case "attribute":
            return (
                None
                if use.name in names["classes"][use.owner]["attributes"]
                else f"{use.owner} has no {use.name}"
            )
        case "argument":
            return _missing_argument(use, names["classes"])
        case "variable":
            return None if use.name in names["environment"] else f"vLLM reads no {use.name}"
        case _:
            return None if use.name in names["routes"] else f"vLLM serves no {use.name}"


def _missing_argument(use: Use, classes: dict[str, Any]) -> str | None:
    owner, _, method = use.owner.removesuffix("()").partition(".")
    if method and method not in classes[owner]["methods"]:
        return f"{owner} has no method {method}"
    takes = classes[owner]["methods"][method] if method else classes[owner]["fields"]
    by_place = takes[: takes.index("*")] if "*" in takes else takes
    if use.name.startswith("#"):
        return None if int(use.name[1:]) < len(by_place) else f"{use.owner} takes {len(by_place)} by place"
    return None if use.name in takes else f"{use.owner} takes no {use.name}"
