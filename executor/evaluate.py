"""Held-out problems of each task, solved greedily by its first and its last version.

Owns the examination of a finished run: which versions, which problems, the score. Which versions there are
and what their weights must be is read from the run's trace. Needs no scheduler: one worker process with all
cores serves every adapter.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from executor.affinity import usable_cores
from executor.backend import Plugins
from executor.driver import EMBEDDED
from executor.environments import close_all, held_out_seed
from executor.folders import RunFolder
from executor.payloads import Payloads
from executor.protocols import Report
from executor.transcripts import Codec, Transcripts
from executor.wire import Hello, WorkerSpec
from executor.workers import WorkerProcess
from marlaas.commands import Command, CreateAdapter, Generate, LoadAdapter, Publish, UnloadAdapter
from marlaas.errors import MarlaasError
from marlaas.events import AdapterCreated, AdapterPublished, CommandFailed, TurnGenerated
from marlaas.spec import EvaluationSpec, Experiment, TaskSpec
from traces.reader import iter_records

FILE = "evaluation.json"
WORKER = "evaluator"

Adapter = tuple[str, int]
Scores = dict[str, float | int]


def evaluate(experiment: Experiment, out: Path, *, plugins: Plugins = EMBEDDED) -> dict[str, Scores]:
    """Examine every task of the run in `out` that has a version 0; returns and writes `evaluation.json`.

    Each task maps to `before` and `after`, the mean rewards on the same `prompts` held-out problems with
    version 0 and with the last version. Environments answer without their extra latency. Raises
    `MarlaasError` when the worker or an adapter fails.
    """
    published = published_versions(out)
    rewards = asyncio.run(_Examination(experiment, out, published, plugins).rewards())
    scores: dict[str, Scores] = {
        task: {"before": rewards[task, 0], "after": rewards[task, last], "prompts": _num_prompts(experiment)}
        for task, last in _last_versions(published).items()
    }
    (out / FILE).write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
    return scores


def published_versions(out: Path) -> dict[Adapter, str]:
    """Every version the run's trace says became durable, with the fingerprint of its weights."""
    made: dict[int, Adapter] = {}
    published: dict[Adapter, str] = {}
    for event, commands in iter_records(out):
        if isinstance(event, AdapterCreated | AdapterPublished):
            published[made[event.command]] = event.fingerprint
        for command in commands:
            if isinstance(command, CreateAdapter):
                made[command.id] = command.task, 0
            elif isinstance(command, Publish):
                made[command.id] = command.task, command.version
    return published


def _num_prompts(experiment: Experiment) -> int:
    return (experiment.evaluation or EvaluationSpec()).prompts


def _examined(experiment: Experiment) -> Experiment:
    """Every task as an examination: one greedy sample of each held-out problem."""
    prompts = _num_prompts(experiment)
    tasks = [replace(task, prompts=prompts, samples=1, temperature=0.0) for task in experiment.tasks]
    return replace(experiment, tasks=tuple(tasks))


class _Examination:
    """One worker, asked about every adapter; `step` in its commands is the version examined."""

    def __init__(
        self, experiment: Experiment, out: Path, published: dict[Adapter, str], plugins: Plugins
    ) -> None:
        experiment = _examined(experiment)
        folder = RunFolder(out)
        self._experiment = experiment
        self._environments = {name: plugins.environment(e) for name, e in experiment.environments.items()}
        self._transcripts = Transcripts(
            experiment.seed,
            experiment.tasks,
            self._environments,
            Codec(Path(experiment.model.path), experiment.model.chat),
            lambda run_seed, task, step, prompt: held_out_seed(run_seed, task, prompt),
        )
        self._payloads = Payloads(experiment, folder, self._transcripts)
        for (task, version), fingerprint in published.items():
            self._payloads.published(task, version, fingerprint)
        lasts = _last_versions(published)
        self._adapters = sorted({*((task, 0) for task in lasts), *lasts.items()})
        spec = WorkerSpec(
            name=WORKER,
            kind="replica",
            index=0,
            engine=plugins.replica,
            experiment=experiment,
            cores=usable_cores(),
        )
        self._worker = WorkerProcess(spec, folder.log(spec.name), self._receive)
        self._is_up = asyncio.Event()
        self._answers: dict[int, asyncio.Queue[Report]] = {}
        self._ids = itertools.count(1)

    async def rewards(self) -> dict[Adapter, float]:
        """Mean reward of every adapter examined."""
        life = asyncio.create_task(self._worker.run())
        work = asyncio.create_task(self._examine_all())
        try:
            await asyncio.wait({life, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise MarlaasError(f"the evaluation's worker was lost: {life.result()}")
            return work.result()
        finally:
            for task in (work, life):
                task.cancel()
            await asyncio.gather(work, life, return_exceptions=True)
            await close_all(self._environments.values())

    async def _examine_all(self) -> dict[Adapter, float]:
        await self._is_up.wait()
        slots = asyncio.Semaphore(self._experiment.cluster.replicas.slots)

        async def examine(adapter: Adapter) -> float:
            async with slots:
                return await self._examine(*adapter)

        rewards = await asyncio.gather(*(examine(adapter) for adapter in self._adapters))
        return dict(zip(self._adapters, rewards, strict=True))

    async def _examine(self, name: str, version: int) -> float:
        task = next(task for task in self._experiment.tasks if task.name == name)
        everyone = live = tuple(range(task.num_trajectories))
        await self._ask(LoadAdapter(id=next(self._ids), replica=WORKER, task=name, version=version))
        for turn in range(task.max_turns):
            await self._generate(name, version, turn, live)
            live = await self._step(task, version, turn, live)
            if not live:
                break
        await self._ask(UnloadAdapter(id=next(self._ids), replica=WORKER, task=name, version=version))
        rewards = self._transcripts.rewards(name, version, everyone)
        self._transcripts.release(name, version, everyone)
        return sum(rewards) / len(rewards)

    async def _generate(self, task: str, version: int, turn: int, live: tuple[int, ...]) -> None:
        command = Generate(
            id=next(self._ids),
            replica=WORKER,
            task=task,
            version=version,
            step=version,
            turn=turn,
            trajectories=live,
        )
        for report in await self._ask(command, len(command.trajectories)):
            assert isinstance(report.event, TurnGenerated)
            assert report.payload is not None
            self._transcripts.record_turn(command, report.event.trajectory, report.payload)

    async def _step(self, task: TaskSpec, version: int, turn: int, live: Iterable[int]) -> tuple[int, ...]:
        """Ask the environment about every live trajectory; those that go on."""
        environment = self._experiment.environments[task.environment]
        places = asyncio.Semaphore(environment.concurrency)

        async def step(trajectory: int) -> bool:
            key = (task.name, version, trajectory)
            async with places, asyncio.timeout(environment.timeout_s):
                answer = await self._transcripts.ask(key, turn)
            self._transcripts.record_answer(key, turn, answer)
            return answer.done

        ends = await asyncio.gather(*(step(trajectory) for trajectory in live))
        return tuple(trajectory for trajectory, is_done in zip(live, ends, strict=True) if not is_done)

    async def _ask(self, command: Command, num_answers: int = 1) -> list[Report]:
        answers = self._answers[command.id] = asyncio.Queue()
        self._worker.send(self._payloads.order(command))
        reports = [await answers.get() for _ in range(num_answers)]
        del self._answers[command.id]
        for report in reports:
            if isinstance(report.event, CommandFailed):
                raise MarlaasError(f"evaluation: {type(command).__name__} failed: {report.event.reason}")
        return reports

    def _receive(self, message: Hello | list[Report]) -> None:
        if isinstance(message, Hello):
            self._is_up.set()
            return
        for report in message:
            answers = self._answers.get(getattr(report.event, "command", 0))
            if answers is not None:
                answers.put_nowait(report)


def _last_versions(published: Iterable[Adapter]) -> dict[str, int]:
    lasts: dict[str, int] = {}
    for task, version in published:
        lasts[task] = max(version, lasts.get(task, 0))
    return lasts
