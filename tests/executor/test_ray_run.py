"""Whole runs on two nodes of a Ray cluster on this machine: nothing is lost with an actor or with a node."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace
from scripted_engines import mark
from scripted_runs import Memory, assert_replays, scripted, small

from executor.backend import Plugins
from executor.driver import execute
from marlaas.commands import Command
from marlaas.events import AdapterPublished, Event, TurnGenerated, WorkerLost, WorkerUp
from marlaas.spec import ClusterSpec, Experiment, ReplicasSpec

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


FAR = Plugins(
    replica="far_engines:FarReplica", lane="far_engines:FarLane", environment=scripted().environment
)


class Nodes:
    """A head that hosts no worker, and nodes that come and go."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.nodes = [self.cluster.add_node(num_cpus=2) for _ in range(2)]

    def spec(self, **changes: Any) -> ClusterSpec:
        """An experiment's cluster: these nodes, one replica and one lane unless said otherwise."""
        return ClusterSpec(placement="ray", ray_address=self.cluster.address, **changes)

    def lose_node_of(self, experiment: Experiment, worker: str) -> None:
        """Kill the node that a worker runs on, with everything on it, as a loss of power would."""
        raylet = _process(experiment, worker).parent()
        assert raylet is not None
        node = next(n for n in self.nodes if n.all_processes["raylet"][0].process.pid == raylet.pid)
        self.nodes.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)


def _process(experiment: Experiment, worker: str) -> psutil.Process:
    return psutil.Process(int((Path(experiment.model.path) / f"{worker}.pid").read_text()))


@pytest.fixture(scope="module")
def nodes(monkeypatch_module: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """One cluster for all tests of this module."""
    made = Nodes()
    yield made
    ray.shutdown()
    made.cluster.shutdown()


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    """What Ray reads when it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where the scripted engines are
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        yield patch


def run(
    experiment: Experiment, out: Path, plugins: Plugins, seen: Callable[[Event], None] = lambda event: None
) -> tuple[dict[str, str], Memory]:
    """Execute; the outcomes and the record, which replays and whose books balance."""
    memory = Memory()

    def observe(event: Event, commands: tuple[Command, ...]) -> None:
        seen(event)

    outcomes = execute(experiment, out, memory, observe, plugins=plugins)
    assert_replays(experiment, memory.entries)
    return outcomes, memory


def of_kind(memory: Memory, kind: type) -> list[Any]:
    """The recorded events of a kind."""
    return [event for event in memory.events if isinstance(event, kind)]


def test_a_run_on_two_nodes_ends_as_on_one_machine(tmp_path: Path, nodes: Nodes) -> None:
    """Adapters travel: workers have folders elsewhere, and every version ends in the run folder, whole."""
    cluster = nodes.spec(replicas=ReplicasSpec(count=2))
    experiment = replace(small(tmp_path), cluster=cluster)
    outcomes, memory = run(experiment, tmp_path, FAR)
    assert outcomes == {"task-0": "done", "task-1": "done"}
    assert len(of_kind(memory, AdapterPublished)) == 4
    for task in outcomes:
        for version in (0, 1, 2):
            written = json.loads((tmp_path / "adapters" / task / f"v{version}" / "adapter.json").read_text())
            assert written == {"mark": mark(task, version)}


def once_generating(memory: Memory, act: Callable[[], None]) -> Callable[[Event], None]:
    """An observer that acts, in a thread of its own, once two turns are made and others are under way."""
    turns: list[Event] = []

    def see(event: Event) -> None:
        if isinstance(event, TurnGenerated):
            turns.append(event)
            if len(turns) == 2:
                threading.Thread(target=act).start()

    return see


@pytest.mark.parametrize("loss", ["actor", "node"])
def test_nothing_is_lost_with_a_replica_in_mid_rollout(tmp_path: Path, nodes: Nodes, loss: str) -> None:
    """Its process is killed, or its whole node: the turns are made again on the node that is left."""
    cluster = nodes.spec(replicas=ReplicasSpec(count=1))
    experiment = replace(small(tmp_path), cluster=cluster)

    def lose() -> None:
        if loss == "actor":
            _process(experiment, "replica-0").kill()
        else:
            nodes.lose_node_of(experiment, "replica-0")

    outcomes, memory = run(experiment, tmp_path, FAR, once_generating(Memory(), lose))
    assert outcomes == {"task-0": "done", "task-1": "done"}
    lost = of_kind(memory, WorkerLost)
    assert "replica-0" in {event.worker for event in lost}
    assert len(of_kind(memory, WorkerUp)) == 2 + len(lost)
    assert len(of_kind(memory, AdapterPublished)) == 4
