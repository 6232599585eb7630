"""Whole experiments in simulated time, with the real scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

import pytest
import small_runs
from msgspec.structs import replace
from small_runs import PROFILE, Record, experiment

from marlaas.commands import (
    Alarm,
    DropTrajectories,
    Generate,
    LoadAdapter,
    StartWorker,
    StepEnvironment,
    Train,
    UnloadAdapter,
)
from marlaas.errors import InputError, InvariantViolation
from marlaas.events import (
    AdapterPublished,
    CommandFailed,
    EngineMeasured,
    EnvironmentStepped,
    Event,
    TaskSubmitted,
    TrainingFinished,
    TurnGenerated,
    TurnsAborted,
    WorkerLost,
    WorkerUp,
)
from marlaas.spec import (
    Cancel,
    ClusterSpec,
    Experiment,
    Fixed,
    Kill,
    Limits,
    Pause,
    ReplicasSpec,
    Resume,
    SumsEnvironment,
    TaskSpec,
    Workload,
)
from sim import simulate
from sim.backend import SimBackend
from sim.profile import LaneProfile, Profile, ReplicaProfile, assumed
from sim.timeline import Timeline
from traces.replay import replay

Costs = TypeVar("Costs", ReplicaProfile, LaneProfile)

SYSTEMS = ("single", "sync", "sync-single-lora", "async-single-lora", "marlaas")


def run(of: Experiment, profile: Profile = PROFILE) -> tuple[dict[str, str], Record]:
    """Simulate; outcomes and record."""
    record = Record()
    return simulate(of, profile, record), record


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_commits_every_step_and_conserves_turns(system: str) -> None:
    """All done; each turn ordered is generated once and stepped once; each trajectory is trained once."""
    of = experiment(system)
    outcomes, record = run(of)
    assert outcomes == dict.fromkeys(("add", "more", "find"), "done")
    assert len(record.events(AdapterPublished)) == sum(task.steps for task in of.tasks)
    ordered = [(c.id, i) for c in record.commands(Generate) for i in c.trajectories]
    generated = [(e.command, e.trajectory) for e in record.events(TurnGenerated)]
    assert sorted(generated) == sorted(ordered)
    stepped = sorted(e.command for e in record.events(EnvironmentStepped))
    assert stepped == sorted(c.id for c in record.commands(StepEnvironment))
    trained = sum(len(c.trajectories) for c in record.commands(Train))
    assert trained == sum(task.steps * task.num_trajectories for task in of.tasks)


def test_one_task_alone_takes_exactly_what_the_profile_says() -> None:
    """Start, create, then per step: load, prefill, iterations, environment, train, publish."""
    task = TaskSpec(
        name="a",
        environment="sums",
        steps=2,
        prompts=1,
        samples=2,
        workload=Workload(prompt_tokens=Fixed(value=10), output_tokens=Fixed(value=5)),
    )
    sums = SumsEnvironment(latency_s=Fixed(value=0.2))
    _, record = run(experiment(tasks=(task,), environments={"sums": sums}))
    prefill_s = 0.005 + 0.0001 * 2 * 10 + 0.001 + 0.0005
    decode_s = 4 * (0.010 + 2 * 0.0001 + 0.001 + 0.0005) + 0.000001 * 2 * (11 + 12 + 13 + 14)
    train_s = 0.3 + 0.0001 * 30
    per_step_s = 0.02 + prefill_s + decode_s + 0.2 + train_s + 0.04
    # From the second step on the old adapter is unloaded first: it stops the batch, the load comes after.
    assert record.end_s == pytest.approx(3.0 + 0.05 + 2 * per_step_s + 0.003, abs=1e-8)


def test_doubling_every_duration_doubles_every_time() -> None:
    """The whole record is the same with every instant twice as late."""

    slower = replace(PROFILE, replica=_doubled(PROFILE.replica), lane=_doubled(PROFILE.lane))
    tasks = tuple(
        replace(t, workload=replace(small_runs.ONE_TURN, environment_s=Fixed(value=0.25)))
        for t in experiment().tasks
    )
    twice = tuple(
        replace(t, workload=replace(small_runs.ONE_TURN, environment_s=Fixed(value=0.5))) for t in tasks
    )
    _, record = run(experiment(tasks=tasks))
    _, slow_record = run(experiment(tasks=twice), slower)
    assert [2 * e.at for e, _ in record.records] == [e.at for e, _ in slow_record.records]


def _doubled(costs: Costs) -> Costs:
    """Costs that are twice as large."""
    quantities = [(name, getattr(costs, name)) for name in costs.__struct_fields__ if name.endswith("_s")]
    return replace(costs, **{name: replace(q, value=2 * q.value) for name, q in quantities})


def test_two_systems_meet_the_same_workload() -> None:
    """Every turn has the same context and answer under `single` as under `marlaas`."""

    def turns(record: Record) -> set[tuple[object, ...]]:
        orders = {c.id: c for c in record.commands(Generate)}
        return {
            (
                e.task,
                orders[e.command].step,
                orders[e.command].turn,
                e.trajectory,
                e.prompt_tokens,
                e.output_tokens,
            )
            for e in record.events(TurnGenerated)
        }

    assert turns(run(experiment("single"))[1]) == turns(run(experiment("marlaas"))[1])


def test_marlaas_is_never_slower_than_one_task_at_a_time() -> None:
    """Sharing pays where rollouts wait for environments."""
    assert run(experiment("marlaas"))[1].end_s < 0.8 * run(experiment("single"))[1].end_s


def test_what_a_killed_replica_was_doing_is_never_answered() -> None:
    """Its turns are lost with it and made again by its next incarnation; every task still ends."""
    outcomes, record = run(experiment(operations=(Kill(at_s=0.3, worker="replica-0"),)))
    assert set(outcomes.values()) == {"done"}
    assert [e.worker for e in record.events(WorkerLost)] == ["replica-0"]
    (lost_ns,) = (e.at for e in record.events(WorkerLost))
    up_again_ns = max(e.at for e in record.events(WorkerUp))
    assert up_again_ns == lost_ns + 2_000_000_000
    given_before = {c.id for e, cs in record.records if e.at < lost_ns for c in cs if isinstance(c, Generate)}
    assert given_before
    assert not [e for e in record.events(TurnGenerated) if e.at >= lost_ns and e.command in given_before]


def test_a_killed_lane_trains_again_from_the_committed_version() -> None:
    """A Train under way is lost and ordered once more."""
    _, record = run(experiment())
    first = record.events(TrainingFinished)[0]
    opened_s = record.events(TaskSubmitted)[0].at / 1e9
    kill = Kill(at_s=first.at / 1e9 - opened_s - 0.1, worker="lane-0")
    outcomes, record = run(experiment(operations=(kill,)))
    assert set(outcomes.values()) == {"done"}
    assert len(record.commands(Train)) == len(record.events(TrainingFinished)) + 1


def test_a_killed_worker_that_is_starting_comes_up_once() -> None:
    """The first start dies silently; only the second says that it is up."""
    kills = (Kill(at_s=0.3, worker="replica-0"), Kill(at_s=0.4, worker="replica-0"))
    outcomes, record = run(experiment(operations=kills))
    assert set(outcomes.values()) == {"done"}
    starts = [c for c in record.commands(StartWorker) if c.worker == "replica-0"]
    assert len(starts) == 3
    answered = [e.command for e in record.events(WorkerUp) if e.worker == "replica-0"]
    assert answered == [starts[0].id, starts[2].id]


def test_operations_reach_the_scheduler_at_their_times() -> None:
    """A paused task resumes and ends, a cancelled one does not."""
    operations = (Pause(at_s=0.1, task="add"), Resume(at_s=9.0, task="add"), Cancel(at_s=0.5, task="find"))
    outcomes, record = run(experiment(operations=operations))
    assert outcomes == {"add": "done", "more": "done", "find": "cancelled"}
    assert record.end_s > record.events(TaskSubmitted)[0].at / 1e9 + 9.0


def test_a_turn_past_its_deadline_is_aborted_and_its_trajectory_dropped() -> None:
    """Turns that always take longer than `turn_s` are tried, aborted, and given up by the stated reason."""
    task = TaskSpec(
        name="slow",
        environment="sums",
        steps=1,
        prompts=2,
        samples=2,
        max_new_tokens=500,
        workload=Workload(prompt_tokens=Fixed(value=5), output_tokens=Fixed(value=400)),
        limits=Limits(turn_s=0.5, trajectory_retries=1),
    )
    outcomes, record = run(experiment(tasks=(task,)))
    assert outcomes == {"slow": "failed"}
    assert len(record.events(TurnsAborted)) == 2
    drops = [(i, c.reason) for c in record.commands(DropTrajectories) for i in c.trajectories]
    assert sorted(drops) == [(i, "turn_deadline") for i in range(4)]
    assert not record.events(TurnGenerated)


def test_no_world_can_use_an_adapter_it_does_not_hold() -> None:
    """Refused: turns of an adapter in no slot, a load without a free slot, an unload of one in use."""
    one = experiment(cluster=ClusterSpec(replicas=ReplicasSpec(slots=1)))
    events: list[Event] = []
    backend = SimBackend(one, PROFILE, Timeline())
    orders = (
        StartWorker(id=1, worker="replica-0"),
        Generate(id=2, replica="replica-0", task="add", version=0, step=0, turn=0, trajectories=(4,)),
        LoadAdapter(id=3, replica="replica-0", task="add", version=0),
        LoadAdapter(id=4, replica="replica-0", task="more", version=0),
        Generate(id=5, replica="replica-0", task="add", version=0, step=0, turn=0, trajectories=(4,)),
        UnloadAdapter(id=6, replica="replica-0", task="add", version=0),
    )
    for order in orders:
        backend.start(order, events.append)
    failures = [(e.command, e.trajectory, e.reason) for e in events if isinstance(e, CommandFailed)]
    assert failures == [
        (2, 4, "add-v0 is not resident"),
        (4, None, "all 1 slots hold an adapter; unload one first"),
        (6, None, "add-v0 has running turns"),
    ]


def test_counters_add_up_to_the_work_done() -> None:
    """Windows of EngineMeasured sum to all decoded tokens, all prefills and all busy time."""
    record = Record()
    simulate(experiment(), PROFILE, record, measure_every_s=0.05)
    windows = record.events(EngineMeasured)
    assert len(windows) > 5
    num_tokens = sum(e.output_tokens for e in record.events(TurnGenerated))
    num_turns = len(record.events(TurnGenerated))
    assert sum(w.sequences_sum for w in windows) == num_tokens - num_turns
    assert all(w.prefill_ns <= w.busy_ns for w in windows)


def test_an_overhead_delays_what_is_told_and_nothing_else() -> None:
    """The first turn is heard of 7 ms later, when the engine has long gone on."""
    alone = experiment(tasks=experiment().tasks[:1])
    slow_pipe = replace(PROFILE, replica=replace(PROFILE.replica, turn_overhead_s=assumed(0.007)))
    first, later = (run(alone, p)[1].events(TurnGenerated)[0].at for p in (PROFILE, slow_pipe))
    assert later == first + 7_000_000


def test_a_task_nobody_described_is_refused_before_anything_happens() -> None:
    """The error says which task and what to add."""
    bare = tuple(replace(task, workload=None) for task in experiment().tasks)
    record = Record()
    with pytest.raises(InputError, match="named add or sums"):
        simulate(experiment(tasks=bare), PROFILE, record)
    assert not record.records


def test_a_run_that_stalls_says_who_waits_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishes that are never answered, without timers to notice: an error, not an endless loop."""
    ignore = lambda self, command: None  # noqa: E731
    monkeypatch.setattr(SimBackend, "_publish", ignore)
    monkeypatch.setattr(SimBackend, "_set_timer", ignore)
    with pytest.raises(InvariantViolation, match=r"task add is publishing.*lane-0 is up"):
        run(experiment("single"))


def test_nothing_goes_wrong_unnoticed() -> None:
    """A healthy run raises no alarm and drops nothing."""
    _, record = run(experiment())
    assert not record.commands(Alarm)
    assert not record.commands(DropTrajectories)


SCRIPT = """
import sys
from pathlib import Path
from typing import TypeVar
sys.path.insert(0, sys.argv[1])
from small_runs import PROFILE, experiment
from sim import simulate
from traces.schema import make_header
from traces.writer import TraceWriter
with TraceWriter(Path(sys.argv[2]), make_header(experiment(), world="sim")) as recorder:
    simulate(experiment(), PROFILE, recorder, measure_every_s=0.1)
"""


def test_a_trace_is_the_same_bytes_whatever_the_hash_seed_and_replays(tmp_path: Path) -> None:
    """Three processes with hash seeds 0, 1 and 2 write one trace, and a fresh core agrees with it."""
    traces = []
    for hash_seed in ("0", "1", "2"):
        path = tmp_path / f"{hash_seed}.jsonl"
        root = Path(__file__).parents[2]
        subprocess.run(
            [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(path)],
            check=True,
            cwd=root,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
        )
        traces.append(path.read_bytes())
    assert traces[0] == traces[1] == traces[2]
    assert len(traces[0].splitlines()) > 300
    assert replay(tmp_path / "0.jsonl").ok
