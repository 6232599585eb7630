"""Prints what random experiments and shipped ones come to: run twice, as plain Python and as machine code.

python scenes_run.py      a line per run, a digest of its trace and metrics; the last says which it was
"""

from __future__ import annotations

import sys
import tempfile
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import experiments  # isort: skip  # noqa: E402, F401 - first, as it leads imports to machine code

import msgspec  # noqa: E402

from experiments.bench.serving import SERVING, load_serving, serve_into  # noqa: E402
from experiments.load import load_experiment, load_profile  # noqa: E402
from marlaas.spec import Experiment  # noqa: E402
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


def digest(experiment: Experiment, profile: Profile) -> str:
    """A run in a few letters."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        with TraceWriter(trace, make_header(experiment, world="sim")) as writer:
            outcomes = simulate(experiment, profile, writer, measure_every_s=0.05)
        assert replay(trace).ok
        metrics = msgspec.json.encode([outcomes, compute(trace)])
        return f"{experiment.system} {sha256(trace.read_bytes() + metrics).hexdigest()[:16]}"


def print_given(scenes: Path) -> None:
    """One line each."""
    for experiment, profile in msgspec.json.decode(
        scenes.read_bytes(), type=list[tuple[Experiment, Profile]]
    ):
        print(digest(experiment, profile))


def print_shipped() -> None:
    """One line for each system of each."""
    for name, systems in SHIPPED.items():
        for system in systems:
            experiment = load_experiment(ROOT / "experiments" / name, (), system)
            print(name, digest(experiment, load_profile(experiment)))


def print_served() -> None:
    """One line for requests that arrive one by one."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        metrics = serve_into(load_serving(SERVING), trace)
        print("serving", sha256(trace.read_bytes() + msgspec.json.encode(metrics)).hexdigest()[:16])


if __name__ == "__main__":
    print_given(Path(sys.argv[1]))
    print_shipped()
    print_served()
    print({Path(str(module.__file__)).suffix for module in (engine, spans)})
