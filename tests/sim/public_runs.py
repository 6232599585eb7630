"""Public measurements that lie outside the project, for tests that compare and skip where they are absent."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def data_folder() -> Path:
    """The folder of public measurements: `$MARLAAS_DATA`, else `../shared/data` beside the project."""
    return Path(os.environ.get("MARLAAS_DATA", ROOT.parent / "shared" / "data"))


def multi_lora_runs() -> dict[str, dict[str, Any]]:
    """Runs of vLLM with and without adapters, by name; skips the test where they are absent.

    A base run is named after its seats, `..|base|_<max_num_seqs>__..`; one with adapters also after its slots
    and their rank, `..|lora|_<max_num_seqs>_<slots>_<rank>__..`.
    """
    path = data_folder() / "vllm_multilora" / "llama-3.1-8b.json"
    if not path.is_file():
        pytest.skip(f"needs {path}, which is not part of the project")
    runs: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return runs


def vllm_runs() -> Path:
    """The folder of two vLLM runs with one-second counters; skips the test where it is absent."""
    folder = data_folder() / "vllm_runs"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}, which is not part of the project")
    return folder
