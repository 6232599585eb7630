"""Whole runs on two nodes of a Ray cluster on this machine: nothing is lost with an actor or with a node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
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
from executor.ray_workers import connect
from marlaas.commands import Command
from marlaas.errors import InputError
from marlaas.events import AdapterPublished, Event, TurnGenerated, WorkerLost, WorkerUp
from marlaas.spec import (
    ClusterSpec,
    Experiment,
    LanesSpec,
    LookupEnvironment,
    ModelSpec,
    ReplicasSpec,
    SumsEnvironment,
    TaskSpec,
)

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
        self.nodes: list[Any] = []
        self.fill()

    def fill(self) -> None:
        """See to it that there are two nodes, each with room for three workers."""
        while len(self.nodes) < 2:
            self.nodes.append(self.cluster.add_node(num_cpus=3))

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
    nodes.fill()
    experiment = replace(small(tmp_path), cluster=nodes.spec(replicas=ReplicasSpec(count=2)))
    outcomes, memory = run(experiment, tmp_path, FAR)
    assert outcomes == {"task-0": "done", "task-1": "done"}
    assert len(of_kind(memory, AdapterPublished)) == 4
    for task in outcomes:
        for version in (0, 1, 2):
            written = json.loads((tmp_path / "adapters" / task / f"v{version}" / "adapter.json").read_text())
            assert written == {"mark": mark(task, version)}


EMBEDDED = Experiment(
    name="tiny",
    seed=5,
    environments={"adding": SumsEnvironment(), "library": LookupEnvironment()},
    tasks=(
        TaskSpec(name="add", environment="adding", steps=3, prompts=8, max_new_tokens=8),
        TaskSpec(name="late", environment="adding", steps=2, prompts=8, max_new_tokens=8, submit_at_s=0.5),
        TaskSpec(name="find", environment="library", steps=2, prompts=8, max_new_tokens=10, max_turns=2),
    ),
)
MODEL = Path(__file__).parents[2] / "executor" / "models" / "tiny-base"


@pytest.fixture
def two_cores() -> Iterator[None]:
    """A machine on which a replica and a lane have one core each."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(usable)[:2])
    yield
    os.sched_setaffinity(0, usable)


def after_turns(number: int, act: Callable[[], None]) -> Callable[[Event], None]:
    """An observer that acts, in a thread of its own, once so many turns are made and others are under way."""
    turns: list[Event] = []

    def see(event: Event) -> None:
        if isinstance(event, TurnGenerated):
            turns.append(event)
            if len(turns) == number:
                threading.Thread(target=act).start()

    return see


def published(out: Path) -> dict[str, bytes]:
    """The bytes of every version's weights, and of the moments that are kept."""
    files = [*out.glob("adapters/*/v*/*.safetensors"), *out.glob("optimizer/*/v*/*.safetensors")]
    return {str(file.relative_to(out)): file.read_bytes() for file in files}


def train(
    out: Path, cluster: ClusterSpec, lose: Callable[[Experiment], None] | None = None, num_tasks: int = 3
) -> tuple[dict[str, bytes], Memory]:
    """Train with the embedded engines, perhaps with a loss in mid-rollout; what was published, the record."""
    model = ModelSpec(path=str(shutil.copytree(MODEL, out / "model")))
    experiment = replace(EMBEDDED, cluster=cluster, model=model, tasks=EMBEDDED.tasks[:num_tasks])
    see = after_turns(100, lambda: lose(experiment)) if lose else lambda event: None
    outcomes, memory = run(experiment, out, Plugins(replica="far_engines:embedded_replica"), see)
    assert outcomes == {task.name: "done" for task in experiment.tasks}
    return published(out), memory


def test_a_seeded_run_trains_the_same_adapters_on_nodes_and_on_one_machine(
    tmp_path: Path, nodes: Nodes, two_cores: None
) -> None:
    """Three tasks on two replicas, bit by bit: every version, and AdamW's moments; also when a node is lost.

    Sums depend on the number of threads, so that is the same in all runs: one a worker.
    """
    nodes.fill()
    two = ReplicasSpec(count=2)
    one_machine, _ = train(tmp_path / "local", ClusterSpec(replicas=two))
    on_nodes, _ = train(tmp_path / "ray", nodes.spec(replicas=two))
    bereft, memory = train(
        tmp_path / "lost",
        nodes.spec(replicas=two),
        lambda experiment: nodes.lose_node_of(experiment, "replica-0"),
    )
    assert len(one_machine) == (4 + 3 + 3) + 3 * 2
    assert on_nodes == one_machine
    assert bereft == one_machine
    assert "replica-0" in {event.worker for event in of_kind(memory, WorkerLost)}


def test_a_lane_of_two_ranks_trains_the_same_on_a_node(tmp_path: Path, nodes: Nodes, two_cores: None) -> None:
    """The ranks of a lane are processes of one node, out of sight of the driver's files."""
    nodes.fill()
    lanes = LanesSpec(devices=2)
    one_machine, _ = train(tmp_path / "local", ClusterSpec(lanes=lanes), num_tasks=1)
    on_a_node, _ = train(tmp_path / "ray", nodes.spec(lanes=lanes), num_tasks=1)
    assert len(one_machine) == 4 + 2
    assert on_a_node == one_machine


@pytest.mark.parametrize("loss", ["actor", "node"])
def test_nothing_is_lost_with_a_replica_in_mid_rollout(tmp_path: Path, nodes: Nodes, loss: str) -> None:
    """Its process is killed, or its whole node: the turns are made again on the node that is left."""
    nodes.fill()
    experiment = replace(small(tmp_path), cluster=nodes.spec())

    def lose() -> None:
        if loss == "actor":
            _process(experiment, "replica-0").kill()
        else:
            nodes.lose_node_of(experiment, "replica-0")

    outcomes, memory = run(experiment, tmp_path, FAR, after_turns(2, lose))
    assert outcomes == {"task-0": "done", "task-1": "done"}
    lost = of_kind(memory, WorkerLost)
    assert "replica-0" in {event.worker for event in lost}
    assert len(of_kind(memory, WorkerUp)) == 2 + len(lost)
    assert len(of_kind(memory, AdapterPublished)) == 4


def test_what_a_cluster_lacks_is_said_before_a_run(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody at the address, too few devices, no Ray at all: where, what, and how to mend it."""
    nodes.fill()
    with pytest.raises(InputError, match=r"no Ray cluster answers at 127.0.0.1:1 .*refused") as error:
        connect(ClusterSpec(placement="ray", ray_address="127.0.0.1:1"))
    assert error.value.where == "cluster.ray_address"
    with pytest.raises(InputError, match="reserve 8 CPU, the Ray cluster has 6"):
        connect(nodes.spec(replicas=ReplicasSpec(count=7)))
    with pytest.raises(InputError, match="reserve 4 NPU, the Ray cluster has 0"):
        connect(nodes.spec(replicas=ReplicasSpec(count=2, devices=2, device="npu")))
    ray.shutdown()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"marlaas\[cluster\]"):
        connect(nodes.spec())


PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from msgspec.structs import replace
from scripted_runs import Memory, small
from test_ray_run import FAR
from executor.driver import execute
from marlaas.commands import Generate
from marlaas.spec import ClusterSpec

class Loud(Memory):
    def write(self, event, commands):
        super().write(event, commands)
        if any(isinstance(command, Generate) for command in commands):
            print("generating", flush=True)

out = Path(sys.argv[1])
cluster = ClusterSpec(placement="ray", ray_address={address!r})
execute(replace(small(out), cluster=cluster), out, Loud(), plugins=FAR)
"""


def test_a_killed_driver_leaves_no_actor(tmp_path: Path, nodes: Nodes) -> None:
    """Ray ends what belongs to a driver that is gone, wherever it runs."""
    nodes.fill()
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    program = PROGRAM.format(paths=paths, address=nodes.cluster.address)
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"generating\n"
        pids = [int(file.read_text()) for file in (tmp_path / "model").glob("*.pid")]
        driver.kill()
    workers = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert len(pids) == 2
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert alive == []
