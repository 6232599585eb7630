"""Our `vllm` engine beside vLLM's own offline `LLM.generate`: same turns, adapters, lengths and cores.

    python -m executor.vllm_bench [--turns N] [--rounds N] [--model FOLDER]

Ours is measured from outside: orders down the pipe of a real worker, reports back up it. Both are pinned to
the same cores, and one is idle while the other works. Owns the workload and the comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import msgspec

from executor.affinity import pin, usable_cores
from executor.protocols import AdapterFolder, Order, TurnRequest, TurnRequests
from executor.wire import Crashed, Hello, Message, WorkerSpec, pack, read
from executor.workers import settings, spawn
from marlaas.commands import Generate, LoadAdapter
from marlaas.errors import MarlaasError
from marlaas.events import AdapterLoaded, TurnGenerated
from marlaas.spec import ClusterSpec, Experiment, ModelSpec, ReplicasSpec, SumsEnvironment, TaskSpec

BASE = Path(__file__).parent / "models" / "tiny-base"
NUM_ADAPTERS = 4
WORKER = "replica-0"

Round = Callable[[], float]
"""Does all turns once; the seconds it took."""


class Workload(msgspec.Struct, frozen=True):
    """What both sides do: turn i uses adapter i modulo `NUM_ADAPTERS`."""

    spec: WorkerSpec
    adapters: list[AdapterFolder]
    requests: list[TurnRequest]

    @property
    def num_tokens(self) -> int:
        """Tokens sampled in one round; no turn ends early."""
        return sum(request.max_new_tokens for request in self.requests)


def workload(folder: Path, model: Path, num_turns: int) -> Workload:
    """Turns of 8 to 40 prompt tokens and 16 to 64 sampled ones, random adapters written to `folder`."""
    from executor.adapters import fingerprint, write_adapter
    from executor.base_facts import read_facts
    from executor.probe import random_adapter

    endless = _without_end(model, folder / "model")
    experiment = _experiment(endless, num_turns)
    base = read_facts(endless, experiment.model.lora)
    adapters = []
    for seed in range(NUM_ADAPTERS):
        tensors, path = random_adapter(base.shapes, seed), folder / f"bench-{seed}" / "v0"
        write_adapter(path, tensors, base.lora, endless)
        adapters.append(AdapterFolder(folder=str(path), fingerprint=fingerprint(tensors)))
    requests = [
        TurnRequest(
            trajectory=i,
            context=[1 + (7 * i + 3 * j) % (base.vocab_size - 1) for j in range(8 + 5 * i % 33)],
            max_new_tokens=16 + 11 * i % 49,
            temperature=1.0,
            seed=i,
        )
        for i in range(num_turns)
    ]
    return Workload(_worker(experiment), adapters, requests)


def _without_end(model: Path, copy: Path) -> str:
    """A copy of a model folder that names no end token, so that lengths are what was asked for."""
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("generation_config.json"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    return str(copy)


def _experiment(model: str, num_turns: int) -> Experiment:
    replicas = ReplicasSpec(
        engine="vllm", slots=NUM_ADAPTERS, max_num_seqs=num_turns, kv_tokens=num_turns * 128
    )
    return Experiment(
        name="bench",
        tasks=(TaskSpec(name="bench", environment="sums", steps=1),),
        environments={"sums": SumsEnvironment()},
        model=ModelSpec(path=model, dtype="float32"),
        cluster=ClusterSpec(replicas=replicas),
    )


def _worker(experiment: Experiment) -> WorkerSpec:
    engine, cores = "executor.engines:replica", usable_cores()[-1:]
    return WorkerSpec(name=WORKER, kind="replica", index=0, engine=engine, experiment=experiment, cores=cores)


# --- ours ----------------------------------------------------------------------------------------


@contextmanager
def ours(work: Workload) -> Iterator[Round]:
    """Our engine in a worker process, its adapters loaded."""
    with spawn(work.spec, None) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def order(command: LoadAdapter | Generate, payload: AdapterFolder | TurnRequests) -> None:
            assert process.stdin is not None
            process.stdin.write(pack(Order(command=command, payload=payload)))
            process.stdin.flush()

        def hear(kind: type, number: int) -> None:
            assert process.stdout is not None
            while number > 0:
                message: Message = read(process.stdout)
                if isinstance(message, Crashed):
                    raise MarlaasError(message.reason)
                heard = [report.event for report in message] if isinstance(message, list) else [message]
                number -= sum(isinstance(each, kind) for each in heard)

        def do_round() -> float:
            began = time.perf_counter()
            for number in range(NUM_ADAPTERS):
                requests = work.requests[number::NUM_ADAPTERS]
                command = Generate(
                    id=100 + number,
                    replica=WORKER,
                    task=f"bench-{number}",
                    version=0,
                    step=0,
                    turn=0,
                    trajectories=tuple(request.trajectory for request in requests),
                )
                order(command, TurnRequests(requests=requests))
            hear(TurnGenerated, len(work.requests))
            return time.perf_counter() - began

        try:
            process.stdin.write(pack(work.spec))
            process.stdin.flush()
            hear(Hello, 1)
            for number, adapter in enumerate(work.adapters):
                order(LoadAdapter(id=number, replica=WORKER, task=f"bench-{number}", version=0), adapter)
            hear(AdapterLoaded, NUM_ADAPTERS)
            yield do_round
        finally:
            process.kill()


# --- vLLM's --------------------------------------------------------------------------------------


@contextmanager
def theirs(file: Path, work: Workload) -> Iterator[Round]:
    """`LLM.generate` in a process of its own, which reads its workload from a file."""
    file.write_bytes(msgspec.msgpack.encode(work))
    command = [sys.executable, "-m", "executor.vllm_bench", "--offline", str(file)]
    surroundings = {**os.environ, **settings(work.spec)}
    with subprocess.Popen(
        command, env=surroundings, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def answer() -> str:
            assert process.stdout is not None
            line: str = process.stdout.readline()
            if not line:
                raise MarlaasError("vLLM's offline engine ended")
            return line

        def do_round() -> float:
            print("go", file=process.stdin, flush=True)
            return float(answer())

        try:
            answer()
            yield do_round
        finally:
            process.stdin.close()
            process.wait(30)


def serve_offline(file: Path) -> None:
    """Be the other side: one line per round asked for, the seconds it took."""
    from executor.base_facts import read_facts
    from executor.vllm_settings import engine_arguments, set_surroundings

    work = msgspec.msgpack.decode(file.read_bytes(), type=Workload)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is not an answer
    experiment = work.spec.experiment
    replicas, model = experiment.cluster.replicas, experiment.model
    base = read_facts(model.path, model.lora)
    pin(work.spec.cores)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = (
        "1"  # vLLM's own choice, as all else that is not named here
    )
    set_surroundings(replicas, base, "cpu", model.dtype, work.spec.cores)
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    arguments = engine_arguments(model, replicas, base, "cpu", model.dtype)
    arguments.pop("distributed_executor_backend")
    llm = LLM(**arguments)
    prompts = [{"prompt_token_ids": request.context} for request in work.requests]
    sampling = [
        SamplingParams(
            max_tokens=request.max_new_tokens,
            temperature=1.0,
            seed=request.seed,
            logprobs=0,
            detokenize=False,
        )
        for request in work.requests
    ]
    names = [f"bench-{i % NUM_ADAPTERS}" for i in range(len(prompts))]
    adapters = [
        LoRARequest(name, 1 + i % NUM_ADAPTERS, work.adapters[i % NUM_ADAPTERS].folder)
        for i, name in enumerate(names)
    ]
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling, lora_request=adapters, use_tqdm=False)
        seconds = time.perf_counter() - began
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == work.num_tokens
        print(seconds, file=answers, flush=True)


# --- the comparison ------------------------------------------------------------------------------


def compare(model: Path, num_turns: int, num_rounds: int) -> float:
    """Print both sides' tokens per second and their ratio, the median over rounds; returns it."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as sides:
        work = workload(Path(folder), model, num_turns)
        other = sides.enter_context(theirs(Path(folder) / "workload", work))
        mine = sides.enter_context(ours(work))
        other()  # both pay first-time costs before anything is measured
        mine()
        pairs = [(mine(), other()) for _ in range(num_rounds)]
    ratio = median(b / a for a, b in pairs)
    for name, seconds in (("ours", median(a for a, _ in pairs)), ("vLLM's", median(b for _, b in pairs))):
        print(
            f"{name:<7}{work.num_tokens / seconds:>8,.0f} tokens/s  ({num_turns} turns, {num_rounds} rounds)"
        )
    print(f"ratio   {ratio:>8.3f}")
    return ratio


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Our vllm engine beside vLLM's own offline generate.")
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, default=BASE)
    parser.add_argument("--offline", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.offline is not None:
        serve_offline(options.offline)
    else:
        compare(options.model, options.turns, options.rounds)


if __name__ == "__main__":
    main()
