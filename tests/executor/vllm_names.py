"""Takes the names that our code may use from a wheel of vLLM, by parsing it; nothing is installed or run.

    python tests/executor/vllm_names.py            # downloads the wheel that `marlaas[ascend]` pins
    python tests/executor/vllm_names.py FILE.whl   # takes a wheel that is here

writes `vllm_names.json` beside this file: per module its top-level names; per class its fields, its methods
with their parameters, and its attributes; the values of `Literal` types; environment variables; routes of the
server. Another class or module is added to `CLASSES` or `MODULES` below. Private names are left out.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pinned_wheels import download, pinned_version

HERE = Path(__file__).parent
NAMES = HERE / "vllm_names.json"

# Where each class is; a class inherits from those that stand before it.
CLASSES = {
    "EngineArgs": "vllm/engine/arg_utils.py",
    "AsyncEngineArgs": "vllm/engine/arg_utils.py",
    "EngineClient": "vllm/engine/protocol.py",
    "AsyncLLM": "vllm/v1/engine/async_llm.py",
    "EngineDeadError": "vllm/v1/engine/exceptions.py",
    "LoRARequest": "vllm/lora/request.py",
    "LoRAConfig": "vllm/config/lora.py",
    "SamplingParams": "vllm/sampling_params.py",
    "RequestOutputKind": "vllm/sampling_params.py",
    "RequestOutput": "vllm/outputs.py",
    "CompletionOutput": "vllm/outputs.py",
    "Logprob": "vllm/logprobs.py",
    "_InputOptions": "vllm/inputs/engine.py",
    "TokensInput": "vllm/inputs/engine.py",
    "TokensPrompt": "vllm/inputs/llm.py",
    "Platform": "vllm/platforms/interface.py",
    "KVCacheConfig": "vllm/v1/kv_cache_interface.py",
    "StatLoggerBase": "vllm/v1/metrics/loggers.py",
    "SchedulerStats": "vllm/v1/metrics/stats.py",
    "PromptTokenStats": "vllm/v1/metrics/stats.py",
    "IterationStats": "vllm/v1/metrics/stats.py",
    "ModelCard": "vllm/entrypoints/openai/engine/protocol.py",
    "LoadLoRAAdapterRequest": "vllm/entrypoints/serve/lora/protocol.py",
    "UnloadLoRAAdapterRequest": "vllm/entrypoints/serve/lora/protocol.py",
    "CompletionRequest": "vllm/entrypoints/openai/completion/protocol.py",
    "CompletionLogProbs": "vllm/entrypoints/openai/completion/protocol.py",
    "CompletionResponseChoice": "vllm/entrypoints/openai/completion/protocol.py",
    "CompletionResponse": "vllm/entrypoints/openai/completion/protocol.py",
}
# Modules that are imported from, beside those of the classes.
MODULES = ("vllm/__init__.py", "vllm/platforms/__init__.py", "vllm/inputs/__init__.py")
# Types whose allowed values are kept.
LITERALS = {"LogprobsMode": "vllm/config/model.py", "MaxLoRARanks": "vllm/config/lora.py"}
ENVIRONMENT = "vllm/envs.py"
_ROUTE = re.compile(r"@(?:router|app)\.(?:get|post)\(\s*\"(/[^\"]*)\"")


def main(arguments: list[str]) -> None:
    """Make the list anew and write it."""
    version = pinned_version("vllm")
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(arguments[0]) if arguments else download("vllm", Path(folder))
        names = read_names(wheel)
    if names["vllm"] != version:
        sys.exit(f"{wheel.name} is not vLLM {version}, which pyproject.toml pins for Ascend")
    NAMES.write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")


def read_names(wheel: Path) -> dict[str, Any]:
    """Parse the files named above out of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        files = {*CLASSES.values(), *MODULES, *LITERALS.values(), ENVIRONMENT}
        trees = {file: ast.parse(archive.read(file)) for file in sorted(files)}
        servers = [name for name in archive.namelist() if name.startswith("vllm/entrypoints/serve/")]
        servers += [name for name in archive.namelist() if name.startswith("vllm/entrypoints/openai/")]
        sources = [archive.read(name).decode() for name in servers if name.endswith(".py")]
    return {
        "vllm": wheel.name.split("-")[1],
        "modules": {_dotted(file): sorted(_top_level(tree)) for file, tree in trees.items()},
        "classes": _classes(trees),
        "literals": {name: _literal(trees[file], name) for name, file in LITERALS.items()},
        "environment": sorted(_environment(trees[ENVIRONMENT])),
        "routes": sorted({route for source in sources for route in _ROUTE.findall(source)}),
    }


def _dotted(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _top_level(tree: ast.Module) -> set[str]:
    """Names that can be imported from a module: what it defines, imports, declares or lists."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) if node in tree.body:
                found.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) if node in tree.body:
                found.add(name)
            case ast.AnnAssign(
                target=ast.Name(id=name)
            ):  # also under `if TYPE_CHECKING`, made when asked for
                found.add(name)
            case ast.ImportFrom(names=aliases) if node in tree.body:
                found.update(alias.asname or alias.name for alias in aliases)
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List(elts=listed)):
                found.update(item.value for item in listed if isinstance(item, ast.Constant))
    return {str(name) for name in found if _is_public(name)}


def _classes(trees: dict[str, ast.Module]) -> dict[str, dict[str, Any]]:
    classes: dict[str, dict[str, Any]] = {}
    for name, file in CLASSES.items():
        node = next(n for n in trees[file].body if isinstance(n, ast.ClassDef) and n.name == name)
        own = _members(node)
        for base in (base.id for base in node.bases if isinstance(base, ast.Name)):
            for part, members in classes.get(base, {}).items():
                own[part] = {**members, **own[part]} if isinstance(members, dict) else [*members, *own[part]]
        classes[name] = {
            key: members if isinstance(members, dict) else sorted(set(members))
            for key, members in own.items()
        }
    return classes


def _members(node: ast.ClassDef) -> dict[str, Any]:
    """Annotated fields in order; methods with their parameters; every name that an instance answers to."""
    fields = [
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    ]
    functions = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    methods = {function.name: list(_parameters(function.args)) for function in functions}
    values = [
        item.targets[0].id
        for item in node.body
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)
    ]
    made = [
        inner.attr
        for function in functions
        for inner in ast.walk(function)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    ]
    attributes = [name for name in (*fields, *values, *made, *methods) if _is_public(name)]
    return {
        "fields": [name for name in fields if _is_public(name)],
        "methods": {name: parameters for name, parameters in methods.items() if _is_public(name)},
        "attributes": attributes,
    }


def _is_public(name: object) -> bool:
    return not str(name).startswith("_") or name == "__init__"


def _parameters(arguments: ast.arguments) -> Iterator[str]:
    """Names in order, without self; a star stands before those that must be named."""
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    yield from (name for name in names if name not in ("self", "cls"))
    if arguments.kwonlyargs:
        yield "*"
        yield from (argument.arg for argument in arguments.kwonlyargs)


def _literal(tree: ast.Module, name: str) -> list[Any]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Subscript(slice=inner)) if found == name:
                items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
                return [item.value for item in items if isinstance(item, ast.Constant)]
    raise LookupError(f"vLLM has no literal type {name}")


def _environment(tree: ast.Module) -> set[str]:
    """Keys of the table of variables, and what is declared for type checkers."""
    keys = {
        key.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }
    return {str(key) for key in keys if isinstance(key, str) and key.startswith("VLLM_")}


if __name__ == "__main__":
    main(sys.argv[1:])
