"""Wheels of what `marlaas[ascend]` pins, fetched to be read and not installed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

_PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def pinned_version(package: str) -> str:
    """The version of a package that `marlaas[ascend]` asks for."""
    pins = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]["ascend"]
    return next(str(pin).partition("==")[2] for pin in pins if pin.startswith(f"{package}=="))


def download(package: str, folder: Path) -> Path:
    """Fetch the pinned wheel, without what it depends on; vLLM's has several hundred MB."""
    options = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    wanted = f"{package}=={pinned_version(package)}"
    subprocess.run([sys.executable, "-m", "pip", "download", *options, wanted], check=True)
    return next(folder.glob(f"{package.replace('-', '_')}-*.whl"))
