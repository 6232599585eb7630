"""Takes the operators that torch_npu implements from its wheel, which lists them; nothing is installed.

    python tests/executor/torch_npu_operators.py            # downloads the wheel that `marlaas[ascend]` pins
    python tests/executor/torch_npu_operators.py FILE.whl   # takes a wheel that is here

writes `torch_npu_operators.json` beside this file: the version, and names of operators with their overloads.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from pathlib import Path

from pinned_wheels import download, pinned_version

HERE = Path(__file__).parent
OPERATORS = HERE / "torch_npu_operators.json"
_LISTS = ("npu_native_functions.yaml", "npu_native_functions_by_codegen.yaml")


def main(arguments: list[str]) -> None:
    """Make the list anew and write it."""
    version = pinned_version("torch-npu")
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(arguments[0]) if arguments else download("torch-npu", Path(folder))
        found = sorted(read_operators(wheel))
    if wheel.name.split("-")[1] != version:
        sys.exit(f"{wheel.name} is not torch_npu {version}, which pyproject.toml pins")
    OPERATORS.write_text(json.dumps({"torch_npu": version, "operators": found}, indent=0) + "\n")


def read_operators(wheel: Path) -> set[str]:
    """Names in the lists from which torch_npu's registrations are generated."""
    import yaml

    found: set[str] = set()
    with zipfile.ZipFile(wheel) as archive:
        for name in _LISTS:
            for items in yaml.safe_load(archive.read(f"torch_npu/csrc/aten/{name}")).values():
                if isinstance(items, list):
                    found.update(item if isinstance(item, str) else item.get("func", "") for item in items)
    return {name.partition("(")[0] for name in found} - {""}


if __name__ == "__main__":
    main(sys.argv[1:])
