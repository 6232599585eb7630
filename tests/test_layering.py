"""Imports point one way, read from the sources; the light packages stay light, seen in a fresh process."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "marlaas": {"marlaas"},
    "traces": {"marlaas", "traces"},
    "sim": {"marlaas", "traces", "sim"},
    "executor": {"marlaas", "traces", "executor"},
    "experiments": {"marlaas", "traces", "sim", "executor", "experiments"},
}
# Third parties, and the only packages that may import each, even lazily. Others are free below experiments.
ONLY_IN = {
    "simpy": {"sim"},
    "torch": {"executor"},
    "torch_npu": {"executor"},
    "peft": {"executor"},
    "transformers": {"executor"},
    "safetensors": {"executor"},
    "vllm": {"executor"},
    "ray": {"executor"},
    "pandas": {"traces", "experiments"},
    "pyarrow": {"traces", "experiments"},
    "matplotlib": {"experiments"},
    "jinja2": {"experiments", "executor"},
    "typer": {"experiments"},
    "rich": {"experiments"},
}
# The benchmark compares the core with bare SimPy.
EXCEPTIONS = {("experiments/bench/core.py", "simpy")}
PURE = {"marlaas": {"msgspec"}, "traces": {"msgspec", "zstandard", "pandas", "pyarrow"}}


def violations(root: Path) -> list[str]:
    """Every import under `root` that points the wrong way, as `file:line: reason`."""
    return [
        f"{path.relative_to(root)}:{line}: {reason}"
        for package in MAY_IMPORT
        for path in sorted((root / package).rglob("*.py"))
        for line, name in _imports(path)
        if (reason := _reason(package, name)) and (path.relative_to(root).as_posix(), name) not in EXCEPTIONS
    ]


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """The top-level package of every import, also those inside functions and type-checking blocks."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." if node.level else str(node.module).partition(".")[0]


def _reason(package: str, name: str) -> str:
    if name == "." or name == "tests":
        return f"{package} imports {name!r}"
    if name in MAY_IMPORT:
        return "" if name in MAY_IMPORT[package] else f"{package} must not import {name}"
    if name in ONLY_IN and package not in ONLY_IN[name]:
        return f"{name} belongs to {', '.join(sorted(ONLY_IN[name]))}"
    if package in PURE and name not in sys.stdlib_module_names | PURE[package]:
        return f"{package} is the standard library and {', '.join(sorted(PURE[package]))}; not {name}"
    return ""


def test_imports_point_one_way() -> None:
    """marlaas <- traces <- {sim, executor} <- experiments, and heavy libraries stay where they belong."""
    assert violations(ROOT) == []


def test_the_walk_sees_every_package() -> None:
    """A package that was moved or renamed would make the check above empty."""
    for package in MAY_IMPORT:
        assert list((ROOT / package).rglob("*.py")), package


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("marlaas", "import traces"),
        ("marlaas", "import numpy"),
        ("marlaas", "from sim.engine import Engine"),
        ("traces", "import sim"),
        ("traces", "import numpy as np"),
        ("sim", "from executor import driver"),
        ("sim", "def f() -> None:\n    import torch"),
        ("sim", "from experiments.load import load_experiment"),
        ("executor", "import sim"),
        ("executor", "import simpy"),
        ("experiments", "import torch"),
        ("experiments", "from . import load"),
    ],
)
def test_an_import_the_wrong_way_is_caught(tmp_path: Path, package: str, line: str) -> None:
    """The check bites, also on an import hidden in a function."""
    module = tmp_path / package / "deep" / "bad.py"
    module.parent.mkdir(parents=True)
    module.write_text(f"import json\n{line}\n")
    (found,) = violations(tmp_path)
    assert "bad.py" in found


def test_core_and_simulator_load_nothing_heavy() -> None:
    """`import marlaas, sim` and all their modules load no torch, pandas or matplotlib."""
    program = (
        "import sys, pkgutil, importlib, marlaas, sim\n"
        "for package in (marlaas, sim):\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "        if not module.name.endswith('__main__'):\n"
        "            importlib.import_module(module.name)\n"
        "heavy = {'torch', 'pandas', 'matplotlib', 'transformers', 'peft', 'pyarrow'} & set(sys.modules)\n"
        "print(sorted(heavy))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True, timeout=60
    )
    assert run.stdout.strip() == "[]"


def test_the_command_line_starts_without_the_heavy_libraries() -> None:
    """Help, check and simulate must not wait for torch, pandas or matplotlib."""
    program = "import sys, experiments.cli; print({'torch', 'pandas', 'matplotlib'} & set(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True, timeout=60
    )
    assert run.stdout.strip() == "set()"
