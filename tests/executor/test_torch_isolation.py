"""That what a turn samples is the same to the bit whatever runs beside it."""

import json
import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_base import VOCABULARY, Replica, peft_model, tiny_llama, turn

from executor.driver import execute
from executor.protocols import TurnRequest, TurnResult
from executor.torch_cache import RowCache
from executor.torch_engine import TorchRolloutEngine
from executor.torch_invariance import _steady
from marlaas.errors import InputError
from marlaas.events import CommandFailed, EnvironmentStepped
from marlaas.spec import (
    ClusterSpec,
    Experiment,
    LookupEnvironment,
    LoraSpec,
    ModelSpec,
    ReplicasSpec,
    ReverseEnvironment,
    SumsEnvironment,
    TaskSpec,
)
from traces.reader import read
from traces.schema import make_header
from traces.writer import TraceWriter

BASE = Path(__file__).parents[2] / "executor" / "models" / "tiny-base"
WIDE = LoraSpec(rank=40, alpha=50)  # eight slots are more ranks than one product takes


def words(chance: random.Random, *lengths: int) -> list[int]:
    """A random context of one of these lengths."""
    return [chance.randrange(VOCABULARY) for _ in range(chance.choice(lengths))]


def some_turns(
    chance: random.Random, seed: int, num: int, *lengths: int, longest: int = 40
) -> list[TurnRequest]:
    """Random turns, some of them at other temperatures than one."""
    return [
        turn(
            i,
            words(chance, *lengths),
            chance.randint(1, longest),
            seed=1000 * seed + i,
            temperature=chance.choice([1.0, 1.0, 0.5, 0.0]),
        )
        for i in range(num)
    ]


def sampled_alone(replica: Replica, turns: list[TurnRequest], slot: int = 0) -> list[TurnResult]:
    """What these turns sample as one order on an idle engine."""
    command = replica.generate(f"t{slot}", 0, turns)
    replica.run()
    return [replica.turns()[command, request.trajectory][1] for request in turns]


def sampled_in_traffic(replica: Replica, turns: list[TurnRequest], chance: random.Random) -> list[TurnResult]:
    """What they sample one by one, while turns of other adapters join and leave at random."""
    waiting, asked = list(turns), {}
    for _ in range(400):
        if chance.random() < 0.3:
            neighbours = some_turns(chance, chance.randrange(99), chance.randint(1, 15), 1, 3, 20, 66)
            replica.generate(f"t{chance.randint(1, 7)}", 0, neighbours)
        if waiting and chance.random() < 0.4:
            request = waiting.pop()
            asked[request.trajectory] = replica.generate("t0", 0, [request])
        replica.step()
        if not waiting and all((asked[t], t) in replica.turns() for t in asked):
            break
    assert not any(isinstance(report.event, CommandFailed) for report in replica.reports)
    return [replica.turns()[asked[request.trajectory], request.trajectory][1] for request in turns]


def assert_isolated(folder: Path, seed: int, **replica: Any) -> None:
    """Alone and in traffic give the same tokens and log-probabilities, as Python compares floats."""
    chance = random.Random(seed)
    turns = some_turns(chance, seed, chance.choice([1, 3, 9]), 1, 2, 5, 17, 33, 70)
    alone, crowded = (
        Replica(folder / name, slots=8, batch_invariant=True, **replica) for name in ("alone", "crowded")
    )
    for i in range(8):
        (alone if i == 0 else crowded).load(f"t{i}", 0, seed=i)
    crowded.load("t0", 0, seed=0)
    assert sampled_in_traffic(crowded, turns, chance) == sampled_alone(alone, turns)


@pytest.mark.parametrize("seed", range(3))
def test_neighbours_that_join_and_leave_change_no_bit(tmp_path: Path, seed: int) -> None:
    """Random turns of one adapter, alone and in random traffic, are equal; another slot changes nothing."""
    assert_isolated(tmp_path, seed)


def test_no_bit_changes_with_ranks_beyond_one_product(tmp_path: Path) -> None:
    """The same with adapters so wide that eight of them are projected in pieces."""
    assert_isolated(tmp_path, 3, lora=WIDE)


def test_a_llama_with_uneven_widths_is_served_alike(tmp_path: Path) -> None:
    """Three queries a key head, tied embeddings, an odd inner width: no bit changes, and PEFT agrees."""
    assert_isolated(tmp_path, 4, base=tiny_llama())
    replica = Replica(tmp_path / "long", base=tiny_llama())
    folder = replica.load("t0", 0, seed=1).folder
    chance = random.Random(0)
    turns = some_turns(chance, 5, 4, 3, 250, 400, 700)
    model = peft_model({"t0": folder}, tiny_llama())
    for request, result in zip(turns, sampled_alone(replica, turns), strict=True):
        with torch.inference_mode():
            tokens = torch.tensor([request.context + result.tokens])
            logits = model(tokens).logits[0, len(request.context) - 1 : -1]
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(result.tokens).unsqueeze(1))
        torch.testing.assert_close(torch.tensor(result.logprobs), expected.squeeze(1), atol=2e-5, rtol=0)


def test_attention_of_a_row_does_not_depend_on_the_length_of_others() -> None:
    """Rows of 3 to 900 tokens, decoded together and one by one, with and without longer ones, are equal."""
    lengths, heads = [3, 250, 257, 400, 512, 900], 6
    chance = torch.Generator().manual_seed(0)
    held = [[torch.randn(n, h, 16, generator=chance) for h in (heads, 2, 2)] for n in lengths]
    last = [[torch.randn(1, h, 16, generator=chance) for h in (heads, 2, 2)] for _ in lengths]

    def decoded(which: list[int]) -> list[torch.Tensor]:
        cache = RowCache(len(which))
        cpu = torch.device("cpu")
        cache.prefill([lengths[i] for i in which], [[row] for row in range(len(which))], cpu)
        packed = [torch.cat([held[i][part] for i in which]) for part in range(3)]
        first = cache.attend(0, *packed, 0.3).split([lengths[i] for i in which])
        cache.decode(torch.tensor([lengths[i] for i in which]), max(lengths[i] for i in which))
        second = cache.attend(0, *(torch.cat([last[i][part] for i in which]) for part in range(3)), 0.3)
        return [torch.cat([a, b.unsqueeze(0)]) for a, b in zip(first, second, strict=True)]

    together = decoded([0, 1, 2, 3, 4, 5])
    for i, expected in enumerate(together):
        for which in ([i], [i, 0], [2, i], [i, i]):
            assert torch.equal(decoded(which)[which.index(i)], expected)
        whole = [torch.cat([held[i][part], last[i][part]]).transpose(0, 1) for part in range(3)]
        plain = torch.nn.functional.scaled_dot_product_attention(
            *(part.double() for part in whole), is_causal=True, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(expected, plain.transpose(0, 1).float())


@pytest.mark.parametrize("width", [6, 48, 96, 100, 384])
def test_activations_of_a_row_do_not_depend_on_the_rows_around_it(width: int) -> None:
    """Any part of a batch gives what the whole gives, with one thread and with two."""
    act = _steady(torch.nn.functional.silu)
    rows = 3 * torch.randn(700, width, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([act(row) for row in rows.split(1)])
    torch.testing.assert_close(expected, torch.nn.functional.silu(rows))
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        try:
            for begin, end in [(0, 700), (0, 343), (13, 356), (650, 700), (699, 700)]:
                assert torch.equal(act(rows[begin:end].unsqueeze(0)).squeeze(0), expected[begin:end])
        finally:
            torch.set_num_threads(1)


def test_where_isolation_cannot_be_had_it_is_refused_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the machine fails the examination, `true` is refused by its key, the default says so in the log."""
    monkeypatch.setattr("executor.torch_invariance._is_independent", lambda *_: False)
    with pytest.raises(InputError, match=r"cluster\.replicas\.batch_invariant"):
        Replica(tmp_path, batch_invariant=True)
    with caplog.at_level(logging.WARNING, "marlaas"):
        Replica(tmp_path)
        assert "batch_invariant" in caplog.text
    caplog.clear()
    Replica(tmp_path, batch_invariant=False)
    assert not caplog.text


def test_the_examination_finds_sums_that_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention that adds a trace of its neighbours is found out, whatever the price allowed."""
    attend = RowCache.attend

    def leaking(self: RowCache, *arguments: Any) -> torch.Tensor:
        out = attend(self, *arguments)
        return out + 1e-6 * out.mean(0, keepdim=True)

    monkeypatch.setattr(RowCache, "attend", leaking)
    with pytest.raises(InputError, match="sums depend on the batch"):
        TorchRolloutEngine("replica-0", tiny_llama(), ReplicasSpec(batch_invariant=True), WIDE)


def test_the_examination_leaves_the_slots_empty(tmp_path: Path) -> None:
    """After it a slot holds nothing and a first adapter is served as PEFT would."""
    replica = Replica(tmp_path, batch_invariant=True)
    assert not any(tensor.any() for tensor in replica.engine._slots.held(0).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("products", "threads"), [("AUTO,STRICT", 1), ("AUTO,STRICT", 2), ("AVX2", 1), ("COMPATIBLE", 1)]
)
def test_isolation_holds_whatever_products_the_machine_has(
    tmp_path: Path, products: str, threads: int
) -> None:
    """In a process whose matrix products are asked to be of another kind the engine finds its way."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "import torch; from test_torch_isolation import *\n"
        f"torch.set_num_threads({threads})\n"
        "for seed in range(10, 13): assert_isolated(Path(sys.argv[2]) / str(seed), seed)\n"
        "assert_isolated(Path(sys.argv[2]) / 'llama', 20, base=tiny_llama(), lora=WIDE)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)],
        env=os.environ | {"MKL_CBWR": products},
        check=True,
    )


TASKS = tuple(
    TaskSpec(
        name=f"t{i}",
        environment=("adding", "library", "reversing")[i % 3],
        steps=4,
        prompts=6,
        samples=4,
        max_new_tokens=8 + i,
        max_turns=1 + (i % 3 == 1),
    )
    for i in range(9)
)


def run(folder: Path, tasks: tuple[TaskSpec, ...]) -> dict[str, Any]:
    """Execute these tasks with the real driver; of the task `t1`: its files, and its rewards by step."""
    folder.mkdir()
    experiment = Experiment(
        name="isolation",
        model=ModelSpec(path=str(BASE), dtype="float32"),
        cluster=ClusterSpec(replicas=ReplicasSpec(batch_invariant=True)),
        environments={
            "adding": SumsEnvironment(),
            "library": LookupEnvironment(),
            "reversing": ReverseEnvironment(),
        },
        tasks=tasks,
    )
    with TraceWriter(folder / "trace.jsonl", make_header(experiment, world="executor")) as recorder:
        outcomes = execute(experiment, folder, recorder)
    assert set(outcomes.values()) == {"done"}
    kept = {
        str(file.relative_to(folder)): file.read_bytes()
        for kind in ("adapters", "optimizer", "samples")
        for file in sorted((folder / kind / "t1").rglob("*"))
        if file.is_file() and file.name != "README.md"
    }
    steps = {
        command.id: (command.step, command.trajectory, command.turn)
        for _, commands in read(folder).records
        for command in commands
        if type(command).__name__ == "StepEnvironment" and command.task == "t1"  # type: ignore[union-attr]
    }
    rewards = {
        steps[event.command]: event.reward
        for event, _ in read(folder).records
        if isinstance(event, EnvironmentStepped) and event.command in steps
    }
    return {"files": kept, "rewards": rewards}


@pytest.mark.slow
def test_a_task_alone_and_among_eight_neighbours_is_the_same_to_the_byte(tmp_path: Path) -> None:
    """Samples, rewards, adapters and optimizers of every step are equal; the neighbours really were there."""
    alone = run(tmp_path / "alone", TASKS[1:2])
    among = run(tmp_path / "among", TASKS)
    assert alone["rewards"] == among["rewards"]
    assert len(alone["rewards"]) >= 4 * 24
    names = {name.rsplit("/", 1)[-1] for name in alone["files"]}
    assert {"adapter_model.safetensors", "step-3.jsonl"} <= names
    assert alone["files"] == among["files"]
    versions = {alone["files"][f"adapters/t1/v{v}/adapter_model.safetensors"] for v in range(5)}
    assert len(versions) == 5, "every step changed the adapter"
    mixed = [
        event.adapters_sum / event.num_iterations
        for event, _ in read(tmp_path / "among").records
        if type(event).__name__ == "EngineMeasured" and event.num_iterations
    ]
    assert max(mixed) > 3, json.dumps(mixed)
