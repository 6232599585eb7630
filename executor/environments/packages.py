"""Libraries that an environment needs, imported when it is built. Knows which extra brings them."""

from __future__ import annotations

import importlib
from types import ModuleType

from marlaas.errors import InputError

EXTRAS = {"verifiers": "verifiers"}


def require(package: str, where: str, kind: str) -> ModuleType:
    """Import a package; raises `InputError` at `where` with what to install if it is not there."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        extra = EXTRAS.get(package, "environments")
        problem = f"{kind} needs {package}, which cannot be imported ({error})"
        raise InputError(where, problem, f"pip install 'marlaas[{extra}]'") from None
