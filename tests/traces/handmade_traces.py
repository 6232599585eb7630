"""A run written by hand, small enough that every metric can be worked out on paper.

Two tasks on one replica (3 devices) and one lane (1 device). `a` has two steps of two trajectories, its second
trajectory takes two turns in step 0; `b` has one step and loses a trajectory to its environment. The lane is
lost once while it trains step 1 of `a`. Times in seconds; the window is [2, 32].

            2 . 3 . 4 . 5 ... 7 . 8 . 9 . 10 ... 12 ... 14 . 15 . 16 ... 18 . 19 . 20 . 21 . 22 ... 24 . 25 . 26 ... 28 . 29 ... 31 . 32
    a loads     [3     5]                                                     [19 20]
    a/0                 [5 gen 7][7 env 8]                                         [20     gen      24][24 env 25]
    a/1                 [5  gen    9][env 10][gen 12][env 14]                      [20     gen      24][24   env   26]
    b loads         [4 5]
    b/0                 [5      gen       10][env 11]
    b/1                 [5               gen                  15][env 16 fails, dropped]
    lane    [create a][create b]                       [14 train a 18][pub 19][train b 21][pub 22]  [26 train a 28 lost] [29 train a 31][pub 32]
"""  # noqa: E501  # a drawing

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from marlaas.commands import (
    Alarm,
    CloseTask,
    Command,
    CreateAdapter,
    DropTrajectories,
    Generate,
    LoadAdapter,
    OpenService,
    Publish,
    StartWorker,
    StepEnvironment,
    Train,
    UnloadAdapter,
)
from marlaas.events import (
    AdapterCreated,
    AdapterLoaded,
    AdapterPublished,
    AdapterUnloaded,
    CommandFailed,
    EnvironmentStepped,
    Event,
    RunStarted,
    TaskSubmitted,
    TrainingFinished,
    TrainingStats,
    TurnGenerated,
    WorkerLost,
    WorkerUp,
)
from marlaas.spec import ClusterSpec, Experiment, LanesSpec, ReplicasSpec, SumsEnvironment, TaskSpec
from traces.reader import Trace
from traces.schema import Record, make_header

R, L = "replica-0", "lane-0"


def s(seconds: float) -> int:
    """Seconds as nanoseconds."""
    return round(seconds * 1_000_000_000)


def experiment(**cluster: Any) -> Experiment:
    """The experiment of the hand-made run."""
    return Experiment(
        name="by-hand",
        environments={"e": SumsEnvironment()},
        cluster=ClusterSpec(
            replicas=ReplicasSpec(devices=3, peak_tokens_per_s=cluster.get("rollout_peak")),
            lanes=LanesSpec(devices=1, peak_tokens_per_s=cluster.get("train_peak")),
        ),
        tasks=(
            TaskSpec(name="a", environment="e", steps=2, prompts=1, samples=2, max_turns=2),
            TaskSpec(name="b", environment="e", steps=1, prompts=1, samples=2),
        ),
    )


def turn(at: float, command: int, trajectory: int, task: str, prompt: int, output: int, v: int = 0) -> Event:
    """A generated turn."""
    return TurnGenerated(
        at=s(at),
        command=command,
        trajectory=trajectory,
        task=task,
        version=v,
        prompt_tokens=prompt,
        output_tokens=output,
    )


def step(number: int, task: str, trajectory: int, turn: int = 0, step: int = 0) -> Command:
    """A step of the environment."""
    return StepEnvironment(id=number, environment="e", task=task, step=step, turn=turn, trajectory=trajectory)


def generate(number: int, task: str, trajectories: tuple[int, ...], turn: int = 0, v: int = 0) -> Command:
    """Turns of step v by version v."""
    return Generate(id=number, replica=R, task=task, version=v, step=v, turn=turn, trajectories=trajectories)


def train(number: int, task: str, step: int, trajectories: tuple[int, ...]) -> Command:
    """An update."""
    return Train(id=number, lane=L, task=task, step=step, version=step, trajectories=trajectories)


def trained(at: float, command: int, num_tokens: int, **stats: float) -> Event:
    """The end of an update."""
    return TrainingFinished(at=s(at), command=command, stats=TrainingStats(num_tokens=num_tokens, **stats))


RECORDS: list[Record] = [
    (RunStarted(at=0), (StartWorker(id=1, worker=R), StartWorker(id=2, worker=L))),
    (WorkerUp(at=s(1), command=1, worker=R), ()),
    (WorkerUp(at=s(1), command=2, worker=L), (OpenService(id=3),)),
    (TaskSubmitted(at=s(2), task="a"), (CreateAdapter(id=4, lane=L, task="a"),)),
    (TaskSubmitted(at=s(2), task="b"), ()),
    (
        AdapterCreated(at=s(3), command=4, fingerprint="a0"),
        (CreateAdapter(id=5, lane=L, task="b"), LoadAdapter(id=6, replica=R, task="a", version=0)),
    ),
    (
        AdapterCreated(at=s(4), command=5, fingerprint="b0"),
        (LoadAdapter(id=7, replica=R, task="b", version=0),),
    ),
    (AdapterLoaded(at=s(5), command=6, fingerprint="a0"), (generate(8, "a", (0, 1)),)),
    (AdapterLoaded(at=s(5), command=7, fingerprint="b0"), (generate(9, "b", (0, 1)),)),
    (turn(7, 8, 0, "a", 10, 20), (step(10, "a", 0),)),
    (EnvironmentStepped(at=s(8), command=10, done=True, reward=1.0), ()),
    (turn(9, 8, 1, "a", 10, 30), (step(11, "a", 1),)),
    (
        EnvironmentStepped(at=s(10), command=11, done=False, observation_tokens=5),
        (generate(12, "a", (1,), turn=1),),
    ),
    (turn(10, 9, 0, "b", 8, 40), (step(13, "b", 0),)),
    (EnvironmentStepped(at=s(11), command=13, done=True, reward=0.5), ()),
    (turn(12, 12, 1, "a", 45, 10), (step(14, "a", 1, turn=1),)),
    (EnvironmentStepped(at=s(14), command=14, done=True, reward=0.0), (train(15, "a", 0, (0, 1)),)),
    (turn(15, 9, 1, "b", 8, 60), (step(16, "b", 1),)),
    (
        CommandFailed(at=s(16), command=16, reason="crash"),
        (DropTrajectories(id=17, task="b", step=0, trajectories=(1,), reason="environment_failed"),),
    ),
    (trained(18, 15, 115, loss=0.5), (Publish(id=18, lane=L, task="a", version=1),)),
    (
        AdapterPublished(at=s(19), command=18, fingerprint="a1"),
        (
            UnloadAdapter(id=19, replica=R, task="a", version=0),
            LoadAdapter(id=20, replica=R, task="a", version=1),
            train(21, "b", 0, (0,)),
        ),
    ),
    (AdapterUnloaded(at=s(19.5), command=19), ()),
    (AdapterLoaded(at=s(20), command=20, fingerprint="a1"), (generate(22, "a", (0, 1), v=1),)),
    (trained(21, 21, 48), (Publish(id=23, lane=L, task="b", version=1),)),
    (
        AdapterPublished(at=s(22), command=23, fingerprint="b1"),
        (
            UnloadAdapter(id=24, replica=R, task="b", version=0),
            CloseTask(id=25, task="b", outcome="done"),
        ),
    ),
    (AdapterUnloaded(at=s(22), command=24), ()),
    (turn(24, 22, 0, "a", 10, 20, v=1), (step(26, "a", 0, step=1),)),
    (turn(24, 22, 1, "a", 10, 20, v=1), (step(27, "a", 1, step=1),)),
    (EnvironmentStepped(at=s(25), command=26, done=True, reward=1.0), ()),
    (EnvironmentStepped(at=s(26), command=27, done=True, reward=1.0), (train(28, "a", 1, (0, 1)),)),
    (
        WorkerLost(at=s(28), worker=L, reason="killed"),
        (Alarm(id=29, message="lane-0 is lost: killed"), StartWorker(id=30, worker=L)),
    ),
    (WorkerUp(at=s(29), command=30, worker=L), (train(31, "a", 1, (0, 1)),)),
    (trained(31, 31, 60), (Publish(id=32, lane=L, task="a", version=2),)),
    (
        AdapterPublished(at=s(32), command=32, fingerprint="a2"),
        (
            UnloadAdapter(id=33, replica=R, task="a", version=1),
            CloseTask(id=34, task="a", outcome="done"),
        ),
    ),
    (AdapterUnloaded(at=s(33), command=33), ()),
]


def by_hand(**cluster: Any) -> Trace:
    """The run above."""
    return trace_of(RECORDS, experiment(**cluster))


def trace_of(records: Iterable[Record], of: Experiment | None = None) -> Trace:
    """A trace in memory; its commands are numbered from 1, as a run's are."""
    header = make_header(of or experiment(), world="executor", host={}, created_at="2026-01-01T00:00:00")
    kept = list(records)
    numbers = [command.id for _, commands in kept for command in commands]
    assert numbers == list(range(1, len(numbers) + 1))
    return Trace(header=header, records=kept)
