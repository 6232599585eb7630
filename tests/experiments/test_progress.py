import io

from rich.console import Console

from experiments.progress import watch
from marlaas.commands import CloseTask, Command, DropTrajectories, Publish, StepEnvironment, Train
from marlaas.events import (
    AdapterPublished,
    EnvironmentStepped,
    Event,
    RunStarted,
    TrainingFinished,
    TrainingStats,
    TurnGenerated,
    WorkerLost,
)
from marlaas.spec import Experiment, SumsEnvironment, TaskSpec

EXPERIMENT = Experiment(
    name="x",
    tasks=(TaskSpec(name="add", environment="calc", steps=1, prompts=1, samples=2),),
    environments={"calc": SumsEnvironment()},
)


def step(number: int, trajectory: int) -> StepEnvironment:
    """The order to step one trajectory's environment."""
    return StepEnvironment(id=number, environment="calc", task="add", step=0, turn=0, trajectory=trajectory)


def turn(trajectory: int) -> TurnGenerated:
    """A turn of four tokens."""
    return TurnGenerated(
        at=0, command=1, trajectory=trajectory, task="add", version=0, prompt_tokens=3, output_tokens=4
    )


RECORDS: list[tuple[Event, tuple[Command, ...]]] = [
    (RunStarted(at=0), ()),
    (turn(0), (step(1, 0),)),
    (turn(1), (step(2, 1),)),
    (EnvironmentStepped(at=1_000_000_000, command=1, done=True, reward=1.0), ()),
    (WorkerLost(at=2_000_000_000, worker="replica-0", reason="killed [red]"), ()),
    (
        EnvironmentStepped(at=3_000_000_000, command=2, done=True, reward=0.0),
        (
            DropTrajectories(id=3, task="add", step=0, trajectories=(7,), reason="late"),
            Train(id=4, lane="lane-0", task="add", step=0, version=0, trajectories=(0, 1)),
        ),
    ),
    (EnvironmentStepped(at=3_500_000_000, command=99, done=True, reward=0.0), ()),
    (
        TrainingFinished(at=3_600_000_000, command=4, stats=TrainingStats(num_tokens=9)),
        (Publish(id=5, lane="lane-0", task="add", version=1),),
    ),
    (
        AdapterPublished(at=4_000_000_000, command=5, fingerprint=""),
        (CloseTask(id=6, task="add", outcome="done"),),
    ),
]


def shown(*, is_terminal: bool) -> str:
    """What a run of the records above prints."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=100)
    with watch(EXPERIMENT, console) as watcher:
        for event, commands in RECORDS:
            watcher(event, commands)
    return out.getvalue()


def test_a_pipe_gets_one_line_per_thing_worth_saying() -> None:
    """No bars and no colours; losses, drops and ends with the last reward."""
    assert shown(is_terminal=False).splitlines() == [
        "     2.0 s  replica-0 lost: killed [red]",
        "     3.0 s  add: 1 trajectories dropped: late",
        "     4.0 s  add: done after 1 steps reward 0.50",
    ]


def test_a_terminal_gets_a_bar_per_task() -> None:
    """The bar counts committed steps."""
    assert "1/1" in shown(is_terminal=True)
