from pathlib import Path

import pytest

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


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A small valid experiment in a folder of its own."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path
