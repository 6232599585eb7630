"""Prints what random experiments and shipped ones come to: run twice, as plain Python and as machine code.

python scenes_run.py      a line per run, a digest of its trace and metrics; the last says which it was
"""

from __future__ import annotations

import sys
import tempfile
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "sim")]

import experiments  # isort: skip  # noqa: E402, F401 - first, as it leads imports to machine code

import msgspec  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from random_scenes import Scene, scenes  # noqa: E402

from experiments.bench.serving import SERVING, load_serving, serve_into  # noqa: E402
from experiments.load import load_experiment, load_profile  # noqa: E402
from sim import engine, simulate  # noqa: E402
from sim.profile import Profile  # noqa: E402
from traces.metrics import compute, spans  # noqa: E402
from traces.replay import replay  # noqa: E402
from traces.schema import make_header  # noqa: E402
from traces.writer import TraceWriter  # noqa: E402

SHIPPED = {
    "quickstart.yaml": ("marlaas", "sync", "single"),
    "tools.yaml": ("marlaas", "async-single-lora"),
    "ascend/node16.yaml": ("marlaas", "sync-single-lora"),
}


def digest(scene: Scene, folder: Path) -> str:
    """The run of a scene in a few letters."""
    trace = folder / "trace.jsonl"
    trace.unlink(missing_ok=True)
    header = make_header(scene.experiment, world="sim")
    with TraceWriter(trace, header) as writer:
        outcomes = simulate(scene.experiment, scene.profile, writer, measure_every_s=0.05)
    assert replay(trace).ok
    metrics = msgspec.json.encode([outcomes, compute(trace)])
    return f"{scene.experiment.system} {sha256(trace.read_bytes() + metrics).hexdigest()[:16]}"


@settings(max_examples=150, derandomize=True, database=None, deadline=None, suppress_health_check=HealthCheck)
@given(scenes(has_faults=True))
def print_random(scene: Scene) -> None:
    """One line each."""
    with tempfile.TemporaryDirectory() as folder:
        print(digest(scene, Path(folder)))


def print_shipped() -> None:
    """One line for each system of each."""
    for name, systems in SHIPPED.items():
        for system in systems:
            experiment = load_experiment(ROOT / "experiments" / name, (), system)
            profile: Profile = load_profile(experiment)
            with tempfile.TemporaryDirectory() as folder:
                print(name, digest(Scene(experiment, profile), Path(folder)))


def print_served() -> None:
    """One line for requests that arrive one by one."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        metrics = serve_into(load_serving(SERVING), trace)
        print("serving", sha256(trace.read_bytes() + msgspec.json.encode(metrics)).hexdigest()[:16])


if __name__ == "__main__":
    print_random()
    print_shipped()
    print_served()
    print({Path(str(module.__file__)).suffix for module in (engine, spans)})
