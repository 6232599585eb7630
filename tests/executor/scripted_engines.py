"""Scripted engines for worker processes, and a tokenizer they speak; no torch.

Every (task, version) has a token of its own, its watermark, and an adapter made of nothing else. The replica
emits only the watermark of the adapter it was made to load; the lane trains only on samples that bear the
watermark of the version they are to be trained from. So a finished run proves whose weights made what.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import deque
from hashlib import blake2b
from math import nan
from pathlib import Path
from string import printable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from executor.protocols import (
    AdapterFolder,
    NewAdapter,
    NextVersion,
    Order,
    Report,
    TrainingBatch,
    TurnRequests,
    TurnResult,
)
from executor.wire import WorkerSpec
from marlaas.commands import (
    AbortTurns,
    CreateAdapter,
    Generate,
    LoadAdapter,
    Publish,
    Train,
    UnloadAdapter,
)
from marlaas.events import (
    AdapterCreated,
    AdapterLoaded,
    AdapterPublished,
    AdapterUnloaded,
    CommandFailed,
    Event,
    TrainingFinished,
    TrainingStats,
    TurnGenerated,
    TurnsAborted,
)

END = 0
FIRST_MARK, NUM_MARKS = 200, 4_000


def write_model_folder(folder: Path) -> str:
    """A folder with a tokenizer of one token per character, watermarks and an end token; returns its path."""
    words = ["<eos>", "<unk>", *sorted(set(printable))]
    words += [f"<unused-{i}>" for i in range(len(words), FIRST_MARK)]
    words += [f"<mark-{i}>" for i in range(NUM_MARKS)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": END}))
    return str(folder)


def mark(task: str, version: int) -> int:
    """The token that only this version of this task's adapter emits."""
    digest = blake2b(f"{task}/{version}".encode(), digest_size=4).digest()
    return FIRST_MARK + int.from_bytes(digest, "big") % NUM_MARKS


class WatermarkReplica:
    """Generates one turn per iteration: the watermark of the adapter, then the end token."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._marks: dict[tuple[str, int], int] = {}
        self._answers: list[Event] = []
        self._turns: deque[tuple[Generate, int, int]] = deque()

    def start(self, order: Order) -> None:
        match order:
            case Order(command=LoadAdapter() as command, payload=AdapterFolder() as adapter):
                held = json.loads((Path(adapter.folder) / "adapter.json").read_text())
                self._marks[command.task, command.version] = held["mark"]
                assert adapter.fingerprint == str(held["mark"])
                self._answers.append(AdapterLoaded(at=0, command=command.id, fingerprint=str(held["mark"])))
            case Order(command=UnloadAdapter() as command):
                del self._marks[command.task, command.version]
                self._answers.append(AdapterUnloaded(at=0, command=command.id))
            case Order(command=Generate() as command, payload=TurnRequests(requests=requests)):
                assert (command.task, command.version) in self._marks
                self._turns += [(command, r.trajectory, len(r.context)) for r in requests]
            case Order(command=AbortTurns() as command):
                gone = {(command.generate, trajectory) for trajectory in command.trajectories}
                self._turns = deque(t for t in self._turns if (t[0].id, t[1]) not in gone)
                self._answers.append(TurnsAborted(at=0, command=command.id))
            case _:
                raise NotImplementedError(order)

    def step(self) -> list[Report]:
        reports = [Report(event=event) for event in self._answers]
        self._answers.clear()
        if self._turns:
            reports.append(self._generate(*self._turns.popleft()))
        return reports

    def _generate(self, command: Generate, trajectory: int, prompt_tokens: int) -> Report:
        tokens = [self._marks[command.task, command.version], END]
        event = TurnGenerated(
            at=0,
            command=command.id,
            trajectory=trajectory,
            task=command.task,
            version=command.version,
            prompt_tokens=prompt_tokens,
            output_tokens=len(tokens),
        )
        return Report(event=event, payload=TurnResult(tokens=tokens, logprobs=[-0.5, -0.25]))

    def is_busy(self) -> bool:
        return bool(self._answers or self._turns)


class WatermarkLane:
    """Writes watermark adapters; refuses samples that another (task, version) made."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec

    def run(self, order: Order) -> Report:
        match order:
            case Order(command=CreateAdapter() as command, payload=NewAdapter() as new):
                fingerprint = self._write(new, command.task, 0)
                return Report(event=AdapterCreated(at=0, command=command.id, fingerprint=fingerprint))
            case Order(command=Train() as command, payload=TrainingBatch() as batch):
                return Report(event=self._train(command, batch))
            case Order(command=Publish() as command, payload=NextVersion() as place):
                assert place.cursor == {"step": command.version}
                fingerprint = self._write(place, command.task, command.version)
                return Report(event=AdapterPublished(at=0, command=command.id, fingerprint=fingerprint))
        raise NotImplementedError(order)

    def _train(self, command: Train, batch: TrainingBatch) -> Event:
        assert tuple(sample.trajectory for sample in batch.samples) == command.trajectories
        wanted = {mark(command.task, command.version), END}
        made = {t for s in batch.samples for t, own in zip(s.tokens, s.sampled, strict=True) if own}
        if made != wanted:
            return CommandFailed(at=0, command=command.id, reason=f"samples made of {made}, not {wanted}")
        stats = TrainingStats(num_tokens=sum(len(sample.tokens) for sample in batch.samples))
        return TrainingFinished(at=0, command=command.id, stats=stats)

    def _write(self, place: NewAdapter | NextVersion, task: str, version: int) -> str:
        folder = Path(place.adapter_folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter.json").write_text(json.dumps({"mark": mark(task, version)}))
        return str(mark(task, version))


class SlowLane(WatermarkLane):
    """Takes a second for every update."""

    def _train(self, command: Train, batch: TrainingBatch) -> Event:
        time.sleep(1.0)
        return super()._train(command, batch)


class SpinningReplica(WatermarkReplica):
    """Computes for ever once it is told to generate, and never looks at its orders again."""

    def start(self, order: Order) -> None:
        while isinstance(order.command, Generate):
            sum(range(10_000))
        super().start(order)


class StallingReplica(WatermarkReplica):
    """Makes no turns, and otherwise does as it is told."""

    def step(self) -> list[Report]:
        reports = [Report(event=event) for event in self._answers]
        self._answers.clear()
        return reports

    def is_busy(self) -> bool:
        return bool(self._answers)


class StoppedReplica(WatermarkReplica):
    """Stops its own process when told to generate, as a debugger or a frozen container would."""

    def start(self, order: Order) -> None:
        if isinstance(order.command, Generate):
            os.kill(os.getpid(), signal.SIGSTOP)
        super().start(order)


class StoppedOnceReplica(StoppedReplica):
    """The same, but its next incarnation does as it is told."""

    def start(self, order: Order) -> None:
        been_here = Path(self.spec.experiment.model.path) / "been-here"
        if isinstance(order.command, Generate) and been_here.exists():
            WatermarkReplica.start(self, order)
        elif isinstance(order.command, Generate):
            been_here.touch()
            super().start(order)
        else:
            super().start(order)


class RefusingReplica(WatermarkReplica):
    """Raises when told to generate, and otherwise does as it is told."""

    def start(self, order: Order) -> None:
        if isinstance(order.command, Generate):
            raise ValueError("no such\nadapter")
        super().start(order)


class DyingReplica(WatermarkReplica):
    """Raises in the iteration that follows its first Generate."""

    def start(self, order: Order) -> None:
        self._is_doomed = isinstance(order.command, Generate)
        if not self._is_doomed:
            super().start(order)

    def step(self) -> list[Report]:
        if self._is_doomed:
            raise RuntimeError("out of memory")
        return super().step()


class TellingReplica(WatermarkReplica):
    """Answers an unload of anything with where and how it runs."""

    def start(self, order: Order) -> None:
        facts = {
            "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
            "threads": os.environ["OMP_NUM_THREADS"],
            "has_torch": "torch" in sys.modules,
        }
        self._answers.append(CommandFailed(at=0, command=order.command.id, reason=json.dumps(facts)))


class NanReplica(WatermarkReplica):
    """Its first turn of every trajectory comes with a log-probability that is not a number."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self._seen: set[tuple[str, int, int]] = set()

    def _generate(self, command: Generate, trajectory: int, prompt_tokens: int) -> Report:
        report = super()._generate(command, trajectory, prompt_tokens)
        key = (command.task, command.step, trajectory)
        if key in self._seen:
            return report
        self._seen.add(key)
        assert report.payload is not None
        broken = TurnResult(tokens=report.payload.tokens, logprobs=[-1.0, nan])
        return Report(event=report.event, payload=broken)


def unbuildable(spec: WorkerSpec) -> WatermarkReplica:
    """A factory whose model is not there."""
    raise FileNotFoundError(f"no weights for {spec.name}")


def exiting(spec: WorkerSpec) -> WatermarkReplica:
    """A factory that ends the process without a word."""
    os._exit(3)


def talkative(spec: WorkerSpec) -> WatermarkReplica:
    """A factory that prints."""
    print("hello from the library", flush=True)
    return WatermarkReplica(spec)
