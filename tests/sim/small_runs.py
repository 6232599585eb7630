"""Small simulated experiments and a recorder that keeps what happened."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from marlaas.commands import Command
from marlaas.events import Event
from marlaas.spec import (
    ClusterSpec,
    Experiment,
    Fixed,
    LookupEnvironment,
    ReplicasSpec,
    SumsEnvironment,
    TaskSpec,
    Uniform,
    Workload,
)
from sim.profile import EngineProfile, LaneProfile, Profile, ReplicaProfile, assumed

E = TypeVar("E", bound=Event)
C = TypeVar("C", bound=Command)

PROFILE = Profile(
    name="small",
    engine=EngineProfile(kv_rule="reserve", max_prefill_tokens=512, shares_prompts=True),
    replica=ReplicaProfile(
        iteration_s=assumed(0.010),
        per_sequence_s=assumed(0.0001),
        per_kv_token_s=assumed(0.000001),
        adapters_s=assumed(0.001),
        per_adapter_s=assumed(0.0005),
        prefill_s=assumed(0.005),
        per_prefill_token_s=assumed(0.0001),
        start_s=assumed(2.0),
        load_s=assumed(0.02),
        unload_s=assumed(0.003),
    ),
    lane=LaneProfile(
        step_s=assumed(0.3),
        per_token_s=assumed(0.0001),
        publish_s=assumed(0.04),
        create_adapter_s=assumed(0.05),
        start_s=assumed(3.0),
    ),
)

ONE_TURN = Workload(prompt_tokens=Uniform(low=5.0, high=20.0), output_tokens=Uniform(low=2.0, high=25.0))
SEVERAL = Workload(
    prompt_tokens=Uniform(low=5.0, high=20.0),
    output_tokens=Uniform(low=2.0, high=12.0),
    turns=Uniform(low=1.0, high=3.0),
    observation_tokens=Fixed(value=8.0),
    environment_s=Uniform(low=0.05, high=0.6),
)


def experiment(system: str = "marlaas", **changes: Any) -> Experiment:
    """Three tasks, one of several turns, on one replica with two slots."""
    tasks = (
        TaskSpec(name="add", environment="sums", steps=3, prompts=4, samples=3, workload=ONE_TURN),
        TaskSpec(name="more", environment="sums", steps=2, prompts=4, samples=4, workload=ONE_TURN),
        TaskSpec(
            name="find", environment="library", steps=2, prompts=3, samples=3, max_turns=3, workload=SEVERAL
        ),
    )
    given: dict[str, Any] = {
        "name": "small",
        "tasks": tasks,
        "environments": {
            "sums": SumsEnvironment(latency_s=Fixed(value=0.2), concurrency=8),
            "library": LookupEnvironment(),
        },
        "cluster": ClusterSpec(replicas=ReplicasSpec(slots=2, max_num_seqs=16, kv_tokens=2048)),
        "system": system,
        "seed": 3,
    }
    # As if read from YAML: whole numbers given for fractions become fractions.
    return msgspec.convert(msgspec.to_builtins(Experiment(**(given | changes))), Experiment)


class Record:
    """A recorder that keeps everything."""

    def __init__(self) -> None:
        self.records: list[tuple[Event, tuple[Command, ...]]] = []

    def write(self, event: Event, commands: tuple[Command, ...]) -> None:
        """Keep one event and the commands it led to."""
        self.records.append((event, commands))

    def events(self, kind: type[E]) -> list[E]:
        """All events of a kind."""
        return [event for event, _ in self.records if isinstance(event, kind)]

    def commands(self, kind: type[C]) -> list[C]:
        """All commands of a kind."""
        return [command for _, commands in self.records for command in commands if isinstance(command, kind)]

    @property
    def end_s(self) -> float:
        """When the last event came, in seconds."""
        return self.records[-1][0].at / 1e9
