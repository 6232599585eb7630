"""What no distribution may say, wherever in a profile it stands.

Owns the checks that a value's own type cannot make; draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from marlaas.spec import Mixture, Uniform


def require_sound(node: msgspec.Struct) -> None:
    """Raise `ValueError`, naming the place below `node`, for the first distribution that cannot be drawn."""
    for path, problem in _problems(node, ""):
        raise ValueError(f"{path}: {problem}")


def _problems(node: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Uniform) and node.low > node.high:
        yield f"{path}.low", f"{node.low:g} is above high; wanted at most {node.high:g}"
    if isinstance(node, Mixture):
        if not node.parts:
            yield f"{path}.parts", "a mixture of nothing; wanted at least one part"
        if len(node.weights) != len(node.parts):
            problem = (
                f"{len(node.weights)} weights for {len(node.parts)} parts; wanted one weight for each part"
            )
            yield f"{path}.weights", problem
        for index, part in enumerate(node.parts):
            yield from _problems(part, f"{path}.parts[{index}]")
    elif isinstance(node, msgspec.Struct):
        for name in node.__struct_fields__:
            yield from _problems(getattr(node, name), f"{path}.{name}" if path else name)
