"""Walks every interleaving of a small world: each state once, however it was reached."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any

from worlds import World

from marlaas.commands import AbortTurns, Command, SetTimer
from marlaas.core import Core
from marlaas.scheduler import Scheduler
from marlaas.spec import Experiment, Limits, TaskSpec
from marlaas.state import State

Order = tuple[Command, int | None]


class _Pickler(pickle.Pickler):
    """Pickles the moving part of a scheduler; specs are looked up again instead of copied."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is TaskSpec:
            return _spec, (obj.name,)
        if type(obj) is Limits:
            return _limits, ()
        return NotImplemented


_now: Experiment


def _spec(name: str) -> TaskSpec:
    return next(task for task in _now.tasks if task.name == name)


def _limits() -> Limits:
    return _now.limits


class Snapshot:
    """A world that can be taken up again at one moment, any number of times."""

    def __init__(self, world: World, losses_left: int) -> None:
        global _now
        _now = world.experiment
        core = world.scheduler._core
        moving = {k: v for k, v in vars(core).items() if k not in ("experiment", "system")}
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=5).dump(moving)
        self._bytes = buffer.getvalue()
        self._experiment, self._system = core.experiment, core.system
        self.open = list(world.open)
        self.losses_left = losses_left

    def world(self) -> World:
        """A fresh world at this moment."""
        global _now
        _now = self._experiment
        core = Core.__new__(Core)
        vars(core).update(pickle.loads(self._bytes), experiment=self._experiment, system=self._system)
        world = World.__new__(World)
        scheduler = Scheduler.__new__(Scheduler)
        scheduler._core = core
        world.experiment, world.scheduler, world.now = self._experiment, scheduler, 0
        world.open, world.log, world.events = list(self.open), [], []
        return world


def key(world: World, losses_left: int) -> Any:
    """What distinguishes one moment from another: everything but command ids and clocks."""
    state = world.scheduler.state
    orders = sorted(_described(state, command, index) for command, index in world.open)
    tasks = tuple(
        (
            task.state,
            task.version,
            task.is_pause_requested,
            task.training_retries_left,
            tuple(sorted(task.dropped.items())),
            tuple((t.state, t.turn, t.retries_left, t.replica, t.doom) for t in task.batch.trajectories)
            if task.batch
            else None,
        )
        for task in state.tasks.values()
    )
    replicas = tuple(
        (
            r.state,
            r.restarts_left,
            tuple((s.task, s.version, s.state, s.pins, s.is_retired) for s in _by_use(r.slots.values())),
            tuple((name, tuple(t.index for t in waiting)) for name, waiting in r.waiting.items()),
        )
        for r in state.replicas.values()
    )
    lanes = tuple((lane.state, lane.job, lane.task, lane.restarts_left) for lane in state.lanes.values())
    queues = tuple(
        tuple((step.task, step.trajectory.index) for step in e.queue if step.trajectory.state == "acting")
        for e in state.environments.values()
    )
    waiting = tuple(tuple(state.by_state[s]) for s in ("queued", "ready"))
    queued = (tuple(state.buffer), tuple(state.creations), waiting, queues)
    return losses_left, tuple(orders), tasks, replicas, lanes, queued


def _by_use(slots: Any) -> list[Any]:
    return sorted(slots, key=lambda slot: slot.used)


def _described(state: State, command: Command, index: int | None) -> tuple[Any, ...]:
    fields = [getattr(command, f) for f in command.__struct_fields__ if f not in ("id", "at", "generate")]
    if isinstance(command, AbortTurns):
        flight = state.flights.get(command.generate)
        fields.append(flight is not None and flight.task)
    return type(command).__name__, str(fields), -1 if index is None else index


def successors(now: Snapshot) -> Iterator[tuple[World, int]]:
    """Every world one answer, or one loss, later. Timers never fire: nothing is ever late here."""
    for command, index in now.open:
        if isinstance(command, SetTimer):
            continue
        world = now.world()
        world.answer(command, index)
        yield world, now.losses_left
    if now.losses_left:
        for worker in (*now._experiment.replica_names, *now._experiment.lane_names):
            world = now.world()
            state = world.scheduler.state
            if (state.replicas.get(worker) or state.lanes[worker]).state in ("up", "starting"):
                world.lose(worker)
                yield world, now.losses_left - 1


class Graph:
    """Every reachable moment, numbered; `after[i]` are the moments one answer or loss later."""

    def __init__(self, spec: Experiment, *, losses: int) -> None:
        world = World(spec)
        world.start()
        self._numbers = {key(world, losses): 0}
        self.after: list[list[int]] = [[]]
        self.outcomes: dict[int, dict[str, str]] = {}
        self._visit_all(Snapshot(world, losses))

    def _visit_all(self, first: Snapshot) -> None:
        stack = [(0, first)]
        while stack:
            number, now = stack.pop()
            for world, left in successors(now):
                moment = key(world, left)
                known = self._numbers.get(moment)
                if known is None:
                    known = self._numbers[moment] = len(self.after)
                    self.after.append([])
                    if world.scheduler.finished:
                        self.outcomes[known] = world.scheduler.outcomes
                    else:
                        stack.append((known, Snapshot(world, left)))
                self.after[number].append(known)

    def dead_ends(self) -> list[int]:
        """Moments with no way on in which tasks have not ended."""
        return [n for n, after in enumerate(self.after) if not after and n not in self.outcomes]

    def has_cycle(self) -> bool:
        """Whether some way leads back to where it began, so that a run might never end."""
        num_before = [0] * len(self.after)
        for after in self.after:
            for number in after:
                num_before[number] += 1
        free = [n for n, count in enumerate(num_before) if not count]
        num_sorted = 0
        while free:
            num_sorted += 1
            for number in self.after[free.pop()]:
                num_before[number] -= 1
                if not num_before[number]:
                    free.append(number)
        return num_sorted < len(self.after)
