"""Machine code of the hot modules does what their sources do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from random_scenes import Scene, scenes

from experiments import compiled
from experiments.compiled.make import make
from marlaas.systems import SYSTEMS

NUM_SCENES = 300


def random_scenes(num: int) -> list[Scene]:
    """Scenes of any kind, with faults; the same ones every time."""
    found: list[Scene] = []

    @settings(
        max_examples=num, derandomize=True, database=None, deadline=None, suppress_health_check=HealthCheck
    )
    @given(scenes(has_faults=True))
    def keep(scene: Scene) -> None:
        found.append(scene)

    keep()
    return found


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_machine_code_writes_the_same_traces_and_metrics(tmp_path: Path) -> None:
    """Random experiments with faults under every system, and shipped ones, to the byte."""
    make()
    given_scenes = tmp_path / "scenes.json"
    given_scenes.write_bytes(msgspec.json.encode(random_scenes(NUM_SCENES)))
    program = [sys.executable, str(Path(__file__).parent / "scenes_run.py"), str(given_scenes)]
    preferring = {name: value for name, value in os.environ.items() if name != compiled.PURE}
    printed = [
        subprocess.run(program, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
        for env in (preferring | {compiled.PURE: "1"}, preferring)
    ]
    assert [lines.pop() for lines in printed] == ["{'.py'}", "{'.so'}"]
    assert printed[0] == printed[1]
    assert len(printed[0]) > NUM_SCENES
    assert set(SYSTEMS) <= {line.split()[0] for line in printed[0]}
