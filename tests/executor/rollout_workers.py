"""A replica in a real worker process of any engine, driven by hand: orders in, events out."""

from __future__ import annotations

import atexit
import contextlib
import queue
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tiny_base import LORA, tiny_base, write_random_adapter

from executor.affinity import usable_cores
from executor.protocols import AdapterFolder, Order, Report, TurnRequest, TurnRequests, TurnResult
from executor.wire import Crashed, Message, WorkerSpec, pack, read
from executor.workers import spawn
from marlaas.commands import Generate, LoadAdapter
from marlaas.events import EngineMeasured, Event, TurnGenerated, TurnsAborted
from marlaas.spec import ClusterSpec, Experiment, ModelSpec, ReplicasSpec, SumsEnvironment, TaskSpec

START_S, ANSWER_S = 300.0, 120.0
END = 0


@cache
def served_base() -> str:
    """The tiny base with wider heads, which vLLM's CPU kernels want; adapters of the tiny base fit it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config.from_pretrained(tiny_base())
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 1, 32
    config.eos_token_id = END
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@cache
def reference(seed: int) -> Any:
    """Plain PEFT: the served base with the random adapter of this seed."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # PEFT asks for a property that newer transformers have renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        write_random_adapter(Path(folder) / "a", seed)
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(served_base()), folder + "/a")
    return model.eval()


def logprobs_by_peft(model: Any, context: list[int], result: TurnResult) -> torch.Tensor:
    """The sampled tokens' log-probabilities by one plain forward pass over the whole sequence."""
    with torch.inference_mode():
        logits = model(torch.tensor([context + result.tokens])).logits[0, len(context) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(result.tokens).unsqueeze(1)).squeeze(1)


def experiment(replicas: ReplicasSpec, model: ModelSpec | None = None) -> Experiment:
    """What a worker needs to know: the model and the replicas; its task is never run."""
    return Experiment(
        name="rollout",
        tasks=(TaskSpec(name="t", environment="sums", steps=1),),
        environments={"sums": SumsEnvironment()},
        model=model or ModelSpec(path=served_base(), lora=LORA),
        cluster=ClusterSpec(replicas=replicas),
    )


class WorkerReplica:
    """A worker process, the orders it was given and all it has reported."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], engine: str) -> None:
        self.folder, self.process, self.engine = folder, process, engine
        self._said: queue.SimpleQueue[Message] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.reports: list[Report] = []
        self.crashed: str | None = None
        self._next_id = 0

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(EOFError):
            while True:
                self._said.put(read(self.process.stdout))

    def hear(self, within_s: float) -> list[Report]:
        """The next message's reports; a crash's reason is kept, and no news in time is an error."""
        message = self._said.get(timeout=within_s)
        if isinstance(message, Crashed):
            self.crashed = message.reason
        reports = message if isinstance(message, list) else []
        self.reports += reports
        return reports

    def order(self, kind: Any, payload: Any = None, **fields: Any) -> int:
        """Give an order; its command id."""
        assert self.process.stdin is not None
        self._next_id += 1
        command = kind(id=self._next_id, replica="replica-0", **fields)
        self.process.stdin.write(pack(Order(command=command, payload=payload)))
        self.process.stdin.flush()
        return self._next_id

    def load(self, task: str, version: int, seed: int) -> AdapterFolder:
        """Order the load of a random adapter as this task's version."""
        payload = write_random_adapter(self.folder / task / f"v{version}", seed)
        self.order(LoadAdapter, payload, task=task, version=version)
        return payload

    def generate(self, task: str, version: int, requests: Sequence[TurnRequest]) -> int:
        """Ask for these turns; the command id."""
        trajectories = tuple(request.trajectory for request in requests)
        payload = TurnRequests(requests=list(requests))
        fields = {"step": 0, "turn": 0, "trajectories": trajectories}
        return self.order(Generate, payload, task=task, version=version, **fields)

    def until(self, number: int) -> list[Event]:
        """Wait for so many further events beside measurements; these events."""
        events: list[Event] = []
        while len(events) < number:
            heard = [report.event for report in self.hear(ANSWER_S)]
            events += [event for event in heard if not isinstance(event, EngineMeasured)]
        assert len(events) == number, events
        return events

    def until_done(self, command: int, trajectories: set[int], abort: int) -> None:
        """Wait until these turns have ended and an abort was answered, whatever else comes."""
        while not (
            {t for c, t in self.turns() if c == command} >= trajectories
            and any(isinstance(r.event, TurnsAborted) and r.event.command == abort for r in self.reports)
        ):
            self.hear(ANSWER_S)

    def turns(self) -> dict[tuple[int, int], tuple[TurnGenerated, TurnResult]]:
        """Everything sampled so far, by command and trajectory."""
        found = {}
        for report in self.reports:
            if isinstance(report.event, TurnGenerated):
                assert report.payload is not None
                found[report.event.command, report.event.trajectory] = (report.event, report.payload)
        return found


@contextmanager
def started(
    folder: Path, spec: Experiment, engine: str = "executor.engines:replica"
) -> Iterator[WorkerReplica]:
    """A worker that is up; killed at the end."""
    worker = WorkerSpec(
        name="replica-0", kind="replica", index=0, engine=engine, experiment=spec, cores=usable_cores()[:1]
    )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "replica-0.log").open("ab") as log, spawn(worker, log) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(pack(worker))
            process.stdin.flush()
            replica = WorkerReplica(folder, process, spec.cluster.replicas.engine)
            replica.hear(START_S)
            yield replica
        finally:
            process.kill()
            process.stdin.close()
