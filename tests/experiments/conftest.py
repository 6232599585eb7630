from pathlib import Path

import pytest
from rich.console import Console

from experiments.load import load_experiment
from experiments.run import simulate

SMALL = """\
name: small
environments:
  calc: {kind: sums, latency_s: {kind: uniform, low: 0.1, high: 0.3}}
  corpus: {kind: lookup}
  letters: {kind: sort}
tasks:
  - {name: adder, environment: calc, steps: 2, count: 2, prompts: 2, samples: 2}
  - name: finder
    environment: corpus
    steps: 2
    prompts: 2
    samples: 2
    max_turns: 2
"""


PROFILE = """\
name: guess
replica:
  iteration_s: {value: 0.01, source: assumed}
lane:
  step_s: {value: 0.2, source: assumed}
workloads:
  calc: &few
    source: assumed
    workload:
      prompt_tokens: {kind: fixed, value: 6}
      output_tokens: {kind: uniform, low: 2, high: 5}
  letters: *few
  corpus:
    source: assumed
    workload:
      prompt_tokens: {kind: fixed, value: 16}
      output_tokens: {kind: uniform, low: 4, high: 6}
      turns: {kind: fixed, value: 2}
"""


@pytest.fixture
def profile() -> str:
    """The text of a profile that fits the small experiment."""
    return PROFILE


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A small valid experiment in a folder of its own."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="session")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Run folders of one small experiment simulated under `single` and `marlaas`."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "small.yaml").write_text(SMALL)
    (folder / "costs.yaml").write_text(PROFILE)
    for system in ("single", "marlaas"):
        experiment = load_experiment(folder / "small.yaml", ["profile=costs.yaml"], system)
        simulate(experiment, folder / system, Console(quiet=True))
    return [folder / "single", folder / "marlaas"]
