"""The path of every trajectory through a run, and the ledger of its task.

    new ──► turn ──► acting ──► stepping ──► finished ──► trained
             ▲ │       ▲ │          │
             │ └ retry ┘ └── retry ─┤          anything but trained ──► dropped
             └───────── next turn ──┘

Read off the trace alone, knowing nothing of the scheduler's own books: issued = trained + dropped + live,
every trained trajectory was made turn by turn by the version it trains, and contexts add up token by token.
Owns one task's batch; knows no worker and no place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, get_args

from marlaas.commands import CloseTask, DropTrajectories, Generate, StepEnvironment, Train
from marlaas.errors import LawBroken
from marlaas.events import EnvironmentStepped, TrainingStats, TurnGenerated
from marlaas.spec import TaskSpec

Where = Literal["new", "waiting", "turn", "acting", "stepping", "finished", "dropped"]
_NAMES = get_args(Where)


class Path:
    """One trajectory: where it is, which order it waits for, which turn comes next, how long it is."""

    __slots__ = ("first_prompt", "length", "next_prompt", "number", "turn", "where")

    def __init__(self) -> None:
        self.where: Where = "new"
        self.number = 0
        self.turn = 0
        self.first_prompt = 0
        self.next_prompt = 0
        self.length = 0


class TaskPaths:
    """The trajectories of a task's present batch and what became of all before."""

    def __init__(self, spec: TaskSpec, *, is_simulated: bool) -> None:
        self.spec = spec
        self.version = -1
        self.step = -1  # of the present batch; `paths` is empty between batches
        self.paths: list[Path] = []
        self.is_closed = False
        self.on_lane = False
        self.computed_on: str | None = None  # the lane that has computed the next version
        self.num_issued = 0
        self.num_trained = 0
        self.dropped: Counter[str] = Counter()
        self._num_unfinished = 0
        self._is_simulated = is_simulated

    @property
    def num_live(self) -> int:
        """Trajectories issued that are neither trained nor dropped."""
        return sum(1 for path in self.paths if path.where != "dropped")

    @property
    def is_rolling(self) -> bool:
        """Whether its batch has begun and is not complete."""
        return bool(self._num_unfinished) and bool(self.paths)

    @property
    def is_buffered(self) -> bool:
        """Whether a complete batch waits for a lane."""
        return bool(self.paths) and not (self._num_unfinished or self.on_lane or self.is_closed)

    def law(self, holds: bool, what: str) -> None:
        """Raise `LawBroken` for this task where something does not hold."""
        if not holds:
            raise LawBroken(f"task {self.spec.name}, step {self.step}: {what}")

    def path(self, command: Generate | StepEnvironment, trajectory: int) -> Path | None:
        """The path that an order still speaks of; None once its batch is over."""
        if self.is_closed or not self.paths or command.step != self.step:
            return None
        return self.paths[trajectory]

    # --- turns and steps ---

    def _begin_batch(self, step: int) -> None:
        self.law(not self.paths, f"step {step} begins before this one is over")
        self.law(step == self.version, f"step {step} begins though version {self.version} is the last one")
        self.step = step
        self.paths = [Path() for _ in range(self.spec.num_trajectories)]
        self.num_issued += len(self.paths)
        self._num_unfinished = len(self.paths)

    def generate(self, command: Generate) -> None:
        """Turns are ordered."""
        self.law(not self.is_closed, f"turns are ordered (command {command.id}) after its end")
        if command.step != self.step or not self.paths:
            self._begin_batch(command.step)
        self.law(command.version == self.version, f"turns of version {command.version}, not {self.version}")
        for i in command.trajectories:
            path = self.paths[i]
            self.law(path.where in ("new", "waiting"), f"trajectory {i} takes a turn while {path.where}")
            self.law(path.turn == command.turn, f"trajectory {i} takes turn {command.turn}, not {path.turn}")
            path.where, path.number = "turn", command.id

    def turn_ended(self, command: Generate, i: int, event: TurnGenerated | None) -> None:
        """A turn is over: with its answer, or (None) to be tried again."""
        path = self.path(command, i)
        if path is None or path.where != "turn" or path.number != command.id:
            return
        if event is None or (event.task, event.version) != (command.task, command.version):
            path.where = "waiting"
            return
        path.where = "acting"
        prompt, output = event.prompt_tokens, event.output_tokens
        if not path.turn:
            path.first_prompt = prompt
        elif self._is_simulated:
            wanted = path.next_prompt
            self.law(prompt == wanted, f"trajectory {i} goes on from {prompt} tokens, not from {wanted}")
        self.law(output <= self.spec.max_new_tokens, f"trajectory {i} sampled {output} tokens in a turn")
        path.length = prompt + output

    def step_environment(self, command: StepEnvironment) -> None:
        """A turn is handed to the environment."""
        path = self.path(command, command.trajectory)
        where = f"trajectory {command.trajectory}"
        if path is None:
            raise LawBroken(f"task {self.spec.name}: {where} is stepped after its batch")
        self.law(path.where == "acting", f"{where} is stepped while {path.where}")
        self.law(path.turn == command.turn, f"{where} is stepped in turn {command.turn}, not {path.turn}")
        path.where, path.number = "stepping", command.id

    def step_ended(self, command: StepEnvironment, event: EnvironmentStepped | None) -> None:
        """An environment step is over: with its answer, or (None) to be tried again."""
        path = self.path(command, command.trajectory)
        if path is None or path.where != "stepping" or path.number != command.id:
            return
        if event is None:
            path.where = "acting"
        elif event.done or path.turn + 1 >= self.spec.max_turns:
            path.where = "finished"
            self._num_unfinished -= 1
        else:
            path.where = "waiting"
            path.turn += 1
            path.next_prompt = path.length + event.observation_tokens

    def drop(self, command: DropTrajectories) -> list[Path]:
        """Trajectories are given up; returns their paths as they were."""
        if not self.paths:
            self._begin_batch(command.step)
        self.law(command.step == self.step, f"trajectories of step {command.step} are dropped")
        given_up = []
        for i in command.trajectories:
            path = self.paths[i]
            self.law(path.where != "dropped", f"trajectory {i} is dropped twice")
            before = Path()
            before.where, before.number = path.where, path.number
            given_up.append(before)
            self._num_unfinished -= path.where != "finished"
            path.where = "dropped"
        self.dropped[command.reason] += len(command.trajectories)
        return given_up

    # --- versions ---

    def train(self, command: Train) -> None:
        """A batch goes to a lane: exactly those that finished, and nobody is missing."""
        self.law(bool(self.paths) and command.step == self.step, f"step {command.step} is trained")
        self.law(command.version == self.version, f"version {command.version} is trained, not {self.version}")
        self.law(not self._num_unfinished, f"trained with {self._num_unfinished} trajectories unfinished")
        finished = tuple(i for i, path in enumerate(self.paths) if path.where == "finished")
        self.law(command.trajectories == finished, f"trained on {command.trajectories}, not on {finished}")
        self.on_lane = True

    def trained(self, command: Train, stats: TrainingStats, lane: str) -> None:
        """The next version is computed."""
        if self._is_simulated and not self.is_closed:
            wanted = sum(self.paths[i].length for i in command.trajectories)
            self.law(stats.num_tokens == wanted, f"trained on {stats.num_tokens} tokens, not on {wanted}")
        self.computed_on = lane

    def commit(self, version: int) -> None:
        """A version is durable: the batch it was made of is over."""
        self.law(version == self.version + 1, f"version {version} follows {self.version}")
        if version:
            self.num_trained += sum(1 for path in self.paths if path.where == "finished")
        self.paths = []
        self.version, self.on_lane, self.computed_on = version, False, None

    def job_lost(self) -> None:
        """What a lane did for this task came to nothing."""
        self.on_lane, self.computed_on = False, None

    def close(self, command: CloseTask) -> None:
        """The task ends: nothing of it may be left."""
        self.law(not self.num_live, f"ends as {command.outcome} with {self.num_live} live trajectories")
        is_whole = command.outcome != "done" or self.version == self.spec.steps
        self.law(is_whole, f"is done at version {self.version} of {self.spec.steps}")
        self.is_closed = True
        self.paths = []

    def balance(self) -> None:
        """Issued = trained + dropped + live. Raises `LawBroken`."""
        dropped = sum(self.dropped.values())
        sums = (
            f"{self.num_issued} issued, {self.num_trained} trained, {dropped} dropped, {self.num_live} live"
        )
        self.law(self.num_issued == self.num_trained + dropped + self.num_live, sums)


def totals(tasks: Iterable[TaskPaths]) -> tuple[int, int, int, int]:
    """Issued, trained, dropped and live over all tasks."""
    issued = trained = dropped = live = 0
    for task in tasks:
        issued += task.num_issued
        trained += task.num_trained
        dropped += sum(task.dropped.values())
        live += task.num_live
    return issued, trained, dropped, live
