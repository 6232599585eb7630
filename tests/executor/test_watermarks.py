"""No token comes from another task or version: whole runs with adapters that betray themselves."""

import asyncio
import importlib.util
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import watermarks
from scripted_runs import Memory, ScriptedEnvironment, assert_replays

from executor.backend import Plugins
from executor.driver import execute
from executor.environments import Observation, Problem
from marlaas.commands import Generate, LoadAdapter, Publish, Train
from marlaas.events import AdapterPublished, CommandFailed, TurnGenerated
from marlaas.spec import (
    ClusterSpec,
    Experiment,
    Limits,
    ModelSpec,
    ReplicasSpec,
    SumsEnvironment,
    TaskSpec,
)

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: make test-vllm"
)


async def patient(problem: Problem, turns: Sequence[str]) -> Observation:
    """Goes on after the first of two turns, and takes its time, another for each problem."""
    await asyncio.sleep(problem.seed % 97 / 1000)
    is_last = len(turns) == 2
    return Observation(done=is_last, reward=float(is_last), text="" if is_last else "more")


def experiment(folder: Path, engine: str, tasks: int, slots: int, steps: int, samples: int) -> Experiment:
    """More tasks than slots, each of two turns, with answers of another length for each task."""
    return Experiment(
        name="watermarks",
        tasks=tuple(
            TaskSpec(
                name=f"task-{i}",
                environment="env",
                steps=steps,
                prompts=4,
                samples=samples,
                max_turns=2,
                max_new_tokens=4 + 2 * i,
            )
            for i in range(tasks)
        ),
        environments={"env": SumsEnvironment(concurrency=512)},
        model=ModelSpec(path=watermarks.write_base(folder / "model"), lora=watermarks.LORA, dtype="float32"),
        cluster=ClusterSpec(replicas=ReplicasSpec(engine=engine, slots=slots, kv_tokens=16_384)),
        limits=Limits(order_s=400),
    )


@pytest.mark.parametrize(
    ("engine", "tasks", "slots", "steps", "samples"),
    [
        pytest.param("torch", 5, 2, 2, 2, marks=pytest.mark.slow),
        pytest.param("vllm", 12, 4, 6, 8, marks=[pytest.mark.slow, needs_vllm]),
    ],
)
def test_every_token_is_of_its_own_task_and_version(
    tmp_path: Path, engine: str, tasks: int, slots: int, steps: int, samples: int
) -> None:
    """Adapters come, go and are published while others decode; each turn bears its own adapter's token."""
    spec = experiment(tmp_path, engine, tasks, slots, steps, samples)
    memory = Memory()
    plugins = Plugins(lane="watermarks:WatermarkLane", environment=lambda spec: ScriptedEnvironment(patient))
    outcomes = execute(spec, tmp_path, memory, plugins=plugins)
    failures = [event for event in memory.events if isinstance(event, CommandFailed)]
    assert failures == []
    assert set(outcomes.values()) == {"done"}
    trained = sum(len(command.trajectories) for command in memory.commands if isinstance(command, Train))
    assert trained == tasks * steps * 4 * samples
    assert trained >= 2_000 or engine == "torch"
    loads = Counter((c.task, c.version) for c in memory.commands if isinstance(c, LoadAdapter))
    assert len(loads) == tasks * steps
    assert num_published_while_decoding(memory) >= tasks * steps / 4
    assert_replays(spec, memory.entries)


def num_published_while_decoding(memory: Memory) -> int:
    """Publishes that ended while turns of other tasks were being sampled."""
    running: Counter[str] = Counter()
    generates: dict[int, str] = {}
    publishes: dict[int, str] = {}
    number = 0
    for event, commands in memory.entries:
        if isinstance(event, TurnGenerated):
            running[generates[event.command]] -= 1
        if isinstance(event, AdapterPublished):
            number += any(n and task != publishes[event.command] for task, n in running.items())
        for command in commands:
            if isinstance(command, Generate):
                generates[command.id] = command.task
                running[command.task] += len(command.trajectories)
            elif isinstance(command, Publish):
                publishes[command.id] = command.task
    return number


# PEFT asks for a property that newer transformers have renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_watermark_is_certain(tmp_path: Path) -> None:
    """Whatever was read, the adapter's token has a log-probability of zero for all that float32 can tell."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from executor.adapters import write_adapter
    from executor.base_facts import read_facts

    folder = watermarks.write_base(tmp_path / "model")
    tensors = watermarks.adapter(read_facts(folder, watermarks.LORA).shapes, "task-3", 2)
    write_adapter(tmp_path / "adapter", tensors, watermarks.LORA, folder)
    base = AutoModelForCausalLM.from_pretrained(folder)
    contexts = torch.randint(0, watermarks.VOCABULARY, (64, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        bare = torch.log_softmax(base(contexts).logits, -1)
        marked = torch.log_softmax(PeftModel.from_pretrained(base, tmp_path / "adapter")(contexts).logits, -1)
    due = watermarks.mark("task-3", 2)
    rest = marked.clone()
    rest[..., due] = -torch.inf
    assert rest.max() < -50
    assert bare[..., due].exp().mean() < 0.2
