"""Lines of JSON from a file the user named or from a shipped sample; a bad line is refused by number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from marlaas.errors import InputError

SAMPLES = Path(__file__).parent / "samples"


def find(name: str, where: str) -> Path:
    """The shipped sample or the file of this name; raises `InputError` at `where` if there is neither."""
    shipped, file = SAMPLES / f"{name}.jsonl", Path(name)
    if shipped.is_file():
        return shipped
    if not file.is_file():
        samples = ", ".join(sorted(path.stem for path in SAMPLES.glob("*.jsonl")))
        raise InputError(where, f"no such file {name!r}", f"wanted a JSONL file or a sample: {samples}")
    return file


def read_objects(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Each line's place, `FILE:LINE`, and its object; blank lines are passed over. Raises `InputError`."""
    found = list[tuple[str, dict[str, Any]]]()
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    found.append((f"{file}:{number}", _object(f"{file}:{number}", line)))
    except OSError as error:
        raise InputError(str(file), f"cannot be read ({error})", "wanted a JSONL file") from None
    if not found:
        raise InputError(str(file), "the file is empty", "wanted a JSON object a line")
    return found


def text_of(place: str, line: dict[str, Any], *keys: str) -> str:
    """The text under the first of `keys` that a line has; raises `InputError` at the line."""
    for key in keys:
        value = line.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(int(value)) if value == int(value) else repr(value)
        if isinstance(value, str) and value.strip():
            return value.strip()
    raise InputError(
        place, f"no text under {' or '.join(keys)}", f"the line has {', '.join(line) or 'no keys'}"
    )


def _object(place: str, line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise InputError(place, f"not a JSON object ({error})", "wanted a JSON object a line") from None
