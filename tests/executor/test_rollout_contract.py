"""What every rollout engine promises, asked of each engine in a real worker process.

The torch engine is always asked; vLLM, and its server through the `openai` engine, where vLLM is installed.
"""

import importlib.util
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_workers import END, WorkerReplica, experiment, logprobs_by_peft, reference, served_base, started
from tiny_base import LORA, VOCABULARY, random_weights, turn
from vllm_servers import vllm_server

from executor.adapters import fingerprint, write_adapter
from executor.protocols import AdapterFolder, TurnRequest
from marlaas.commands import AbortTurns, LoadAdapter, UnloadAdapter
from marlaas.events import (
    AdapterLoaded,
    AdapterUnloaded,
    CommandFailed,
    EngineMeasured,
    TurnGenerated,
    TurnsAborted,
)
from marlaas.spec import ReplicasSpec

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here: make test-vllm"
)
ENGINES = [
    pytest.param("torch", marks=pytest.mark.slow),
    pytest.param("vllm", marks=[pytest.mark.slow, needs_vllm]),
    pytest.param("openai", marks=[pytest.mark.slow, needs_vllm]),
]
SLOTS, KV_TOKENS = 3, 4096
TOLERANCE = 1e-4  # nats; float32 on all sides

_number = itertools.count()


@pytest.fixture(scope="module", params=ENGINES)
def replica(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerReplica]:
    """One worker for all tests of an engine; each test gives back the slots it takes."""
    folder = tmp_path_factory.mktemp(request.param)
    fields: dict[str, Any] = {"engine": request.param, "slots": SLOTS, "kv_tokens": KV_TOKENS}
    if request.param != "openai":
        with started(folder, experiment(ReplicasSpec(**fields))) as worker:
            yield worker
        return
    with (
        vllm_server(served_base(), folder / "server.log", SLOTS, KV_TOKENS) as url,
        started(folder, experiment(ReplicasSpec(**fields, urls=(url,)))) as worker,
    ):
        yield worker


class Slots:
    """Adapters a test has loaded; each seed is a set of weights, each task name is new."""

    def __init__(self, replica: WorkerReplica) -> None:
        self.replica = replica
        self.loaded: list[tuple[str, int]] = []

    def load(self, seed: int, version: int = 0, task: str | None = None) -> str:
        """Load random weights under a new name, and see them loaded; the task's name."""
        task = task or f"t{next(_number)}"
        wanted = self.replica.load(task, version, seed)
        (loaded,) = self.replica.until(1)
        assert isinstance(loaded, AdapterLoaded)
        assert loaded.fingerprint == wanted.fingerprint
        self.loaded.append((task, version))
        return task

    def unload(self, task: str, version: int = 0) -> None:
        """Unload an adapter, and see it go."""
        self.replica.order(UnloadAdapter, task=task, version=version)
        (gone,) = self.replica.until(1)
        assert isinstance(gone, AdapterUnloaded), gone
        self.loaded.remove((task, version))


@pytest.fixture
def slots(replica: WorkerReplica) -> Iterator[Slots]:
    """The slots of the replica, empty again when the test ends."""
    held = Slots(replica)
    yield held
    for task, version in list(held.loaded):
        held.unload(task, version)


def contexts(num: int, shortest: int = 3) -> list[list[int]]:
    """Contexts of different lengths and content."""
    return [[1 + (7 * i + 3 * j) % (VOCABULARY - 1) for j in range(shortest + i % 5)] for i in range(num)]


def assert_is_of(replica: WorkerReplica, command: int, seed: int, requests: list[TurnRequest]) -> None:
    """Every turn of a command was sampled by the weights of this seed, as plain PEFT says."""
    model, turns = reference(seed), replica.turns()
    for request in requests:
        event, result = turns[command, request.trajectory]
        assert event.prompt_tokens == len(request.context)
        assert event.output_tokens == len(result.tokens) == len(result.logprobs)
        ends = END in result.tokens
        assert (
            result.tokens.index(END) == len(result.tokens) - 1
            if ends
            else len(result.tokens) == request.max_new_tokens
        )
        expected = logprobs_by_peft(model, request.context, result)
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=TOLERANCE, rtol=0)


def test_mixed_adapters_sample_what_peft_says(replica: WorkerReplica, slots: Slots) -> None:
    """Log-probabilities of each turn are those of its own adapter, whatever runs beside it."""
    tasks = {slots.load(seed, version=seed): seed for seed in (1, 2, 3)}
    asked = {}
    for task, seed in tasks.items():
        requests = [turn(i, context, 1 + (5 * i + seed) % 23) for i, context in enumerate(contexts(9, seed))]
        asked[replica.generate(task, seed, requests)] = task, seed, requests
    events = replica.until(27)
    assert {type(event) for event in events} == {TurnGenerated}
    for command, (task, seed, requests) in asked.items():
        assert {(e.task, e.version) for e in events if e.command == command} == {(task, seed)}
        assert_is_of(replica, command, seed, requests)


def test_a_context_of_many_tokens_is_read_once_for_an_adapter_and_never_for_another(
    replica: WorkerReplica, slots: Slots
) -> None:
    """The same long context under two adapters, twice over, and again after one was loaded anew."""
    context = [1 + (11 * i) % (VOCABULARY - 1) for i in range(150)]
    tasks = {seed: slots.load(seed) for seed in (1, 2)}
    for again in range(2):
        for seed, task in tasks.items():
            request = turn(again, context, 6)
            command = replica.generate(task, 0, [request])
            replica.until(1)
            assert_is_of(replica, command, seed, [request])
    slots.unload(tasks[1])
    slots.load(3, version=1, task=tasks[1])
    request = turn(0, context, 6)
    command = replica.generate(tasks[1], 1, [request])
    replica.until(1)
    assert_is_of(replica, command, 3, [request])


def test_later_turns_go_on_from_the_very_tokens_of_earlier_ones(replica: WorkerReplica, slots: Slots) -> None:
    """Three turns of one trajectory with observations between them: each continues one sequence."""
    task, context = slots.load(5), [3, 1, 4, 1, 5] * 8
    for number in range(3):
        request = turn(0, context, 12, seed=number)
        command = replica.generate(task, 0, [request])
        replica.until(1)
        assert_is_of(replica, command, 5, [request])
        context = [*context, *replica.turns()[command, 0][1].tokens, 9, 2, 6]


def test_greedy_turns_are_the_argmax_of_their_own_adapter(replica: WorkerReplica, slots: Slots) -> None:
    """At temperature 0 two versions go on differently, each as PEFT would."""
    tasks = {seed: slots.load(seed) for seed in (1, 2)}
    request = turn(0, [1, 2, 3], 12, temperature=0.0)
    commands = {seed: replica.generate(task, 0, [request]) for seed, task in tasks.items()}
    replica.until(2)
    told = []
    for seed, command in commands.items():
        assert_is_of(replica, command, seed, [request])
        told.append(replica.turns()[command, 0][1].tokens)
        sequence = [1, 2, 3]
        with torch.inference_mode():
            while len(sequence) < 15 and sequence[-1] != END:
                sequence.append(int(reference(seed)(torch.tensor([sequence])).logits[0, -1].argmax()))
        assert told[-1] == sequence[3:]
    assert told[0] != told[1]


def test_a_seed_fixes_what_is_sampled(replica: WorkerReplica, slots: Slots) -> None:
    """The same turns again, and among others, sample the same tokens; other seeds sample others."""
    task, other = slots.load(1), slots.load(2)
    wanted = [turn(i, [4, 9, 11], 20, seed=2**62 + i) for i in range(6)]
    first = replica.generate(task, 0, wanted)
    replica.until(6)
    replica.generate(other, 0, [turn(i, context, 9 + i) for i, context in enumerate(contexts(10))])
    second = replica.generate(task, 0, wanted)
    replica.until(16)
    turns = replica.turns()
    tokens = [turns[first, i][1].tokens for i in range(6)]
    assert [turns[second, i][1].tokens for i in range(6)] == tokens
    assert len({tuple(each) for each in tokens}) > 4


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_come_as_often_as_the_tempered_distribution_says(
    replica: WorkerReplica, slots: Slots, temperature: float
) -> None:
    """Of 600 first tokens of one context the likely ones come as often as they should, within four sigmas."""
    task, num = slots.load(4), 600
    requests = [turn(i, [1, 2, 3], 1, temperature=temperature, seed=1000 + i) for i in range(num)]
    command = replica.generate(task, 0, requests)
    replica.until(num)
    with torch.inference_mode():
        logits = reference(4)(torch.tensor([[1, 2, 3]])).logits[0, -1]
    expected = torch.softmax(logits / temperature, -1)
    drawn = torch.tensor([replica.turns()[command, i][1].tokens[0] for i in range(num)])
    shares = torch.bincount(drawn, minlength=VOCABULARY) / num
    sigmas = (expected * (1 - expected) / num).sqrt()
    assert ((shares - expected).abs() < 4 * sigmas + 1 / num).all()


def test_orders_are_carried_out_in_order_without_waiting(replica: WorkerReplica, slots: Slots) -> None:
    """A load and the turns that need it may be ordered at once, and so may an abort and an unload."""
    task = f"t{next(_number)}"
    replica.load(task, 0, 1)
    short = replica.generate(task, 0, [turn(0, [1, 2], 4)])
    long = replica.generate(task, 0, [turn(1, [1, 2], 200)])
    replica.order(AbortTurns, generate=long, trajectories=(1,))
    assert {type(event) for event in replica.until(3)} <= {AdapterLoaded, TurnGenerated, TurnsAborted}
    assert (short, 0) in replica.turns()
    replica.order(UnloadAdapter, task=task, version=0)
    (gone,) = replica.until(1)
    assert isinstance(gone, AdapterUnloaded)


def test_aborted_turns_end_unsampled_and_the_others_are_not_disturbed(
    replica: WorkerReplica, slots: Slots
) -> None:
    """Of one order two turns are stopped in the middle: the rest are sampled, the adapter can go at once."""
    task = slots.load(6)
    requests = [turn(i, context, 190) for i, context in enumerate(contexts(6))]
    command = replica.generate(task, 0, requests)
    time.sleep(0.1)
    abort = replica.order(AbortTurns, generate=command, trajectories=(0, 3))
    replica.until_done(command, {1, 2, 4, 5}, abort)
    left = [request for request in requests if (command, request.trajectory) in replica.turns()]
    assert_is_of(replica, command, 6, left)


def test_a_turn_that_can_never_run_fails_alone(replica: WorkerReplica, slots: Slots) -> None:
    """It fails with its trajectory and the reason; the others of the order run."""
    task = slots.load(1)
    most = min(KV_TOKENS, 256)
    bad = {
        1: ([1] * 100, most - 99, f"more than the {most}"),
        2: ([], 5, "not empty"),
        3: ([1, VOCABULARY], 5, f"below {VOCABULARY}"),
    }
    requests = [turn(i, context, num) for i, (context, num, _) in bad.items()]
    replica.generate(task, 0, [turn(0, [1], 3), *requests, turn(4, [2], 3)])
    events = replica.until(5)
    failed = {e.trajectory: e.reason for e in events if isinstance(e, CommandFailed)}
    assert failed.keys() == bad.keys()
    assert all(reason in failed[i] for i, (_, _, reason) in bad.items()), failed
    assert {e.trajectory for e in events if isinstance(e, TurnGenerated)} == {0, 4}


def test_an_absent_adapter_is_refused_never_replaced_by_the_base(
    replica: WorkerReplica, slots: Slots
) -> None:
    """A Generate for a version that is not resident, or not any more, fails for each trajectory."""
    task = slots.load(1)
    replica.generate(task, 1, [turn(i, [1], 3) for i in range(2)])
    slots.replica.until(2)
    slots.unload(task)
    replica.generate(task, 0, [turn(2, [1], 3)])
    replica.until(1)
    failed = [report.event for report in replica.reports if isinstance(report.event, CommandFailed)][-3:]
    assert [event.trajectory for event in failed] == [0, 1, 2]
    assert [event.reason for event in failed] == [f"{task}-v{v} is not resident" for v in (1, 1, 0)]


def test_slots_are_as_many_as_declared_and_freed_by_unloading(replica: WorkerReplica, slots: Slots) -> None:
    """One load too many is refused; loading again what is there and unloading what is not are answered."""
    tasks = [slots.load(seed) for seed in range(SLOTS)]
    replica.load("one-too-many", 0, 9)
    (refused,) = replica.until(1)
    assert isinstance(refused, CommandFailed)
    assert "slots" in refused.reason
    replica.load(tasks[0], 0, 0)
    replica.order(UnloadAdapter, task="nobody", version=0)
    assert {type(event) for event in replica.until(2)} == {AdapterLoaded, AdapterUnloaded}
    slots.unload(tasks[1])
    slots.load(9)


def test_an_adapter_with_running_turns_is_not_unloaded(replica: WorkerReplica, slots: Slots) -> None:
    """The order fails, and the turns end as if it had not come."""
    task = slots.load(2)
    request = turn(0, [1, 2, 3], 190)
    command = replica.generate(task, 0, [request])
    replica.order(UnloadAdapter, task=task, version=0)
    events = replica.until(2)
    (refused,) = (event for event in events if isinstance(event, CommandFailed))
    assert "running turns" in refused.reason
    assert_is_of(replica, command, 2, [request])


def broken_adapters(folder: Path) -> dict[str, AdapterFolder]:
    """Adapter folders that must not be loaded, by what the refusal says."""
    good = random_weights(1)
    renamed = {name.replace("q_proj", "query"): tensor for name, tensor in good.items()}
    wild = {name: tensor.clone() for name, tensor in good.items()}
    next(iter(wild.values()))[0, 0] = math.nan
    found = {}
    for number, (text, weights) in enumerate(
        {
            "has fingerprint": good,
            "of 28 tensors match": renamed,
            "holds NaN": wild,
            "damaged": good,
        }.items()
    ):
        place = folder / f"broken-{number}"
        write_adapter(place, weights, LORA, served_base())
        told = "of another" if text == "has fingerprint" else fingerprint(weights)
        found[text] = AdapterFolder(folder=str(place), fingerprint=told)
    file = Path(found["damaged"].folder) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    found["cannot be read"] = AdapterFolder(folder=str(folder / "absent"), fingerprint=fingerprint(good))
    return found


def test_adapters_that_are_not_what_was_published_are_refused_and_take_no_slot(
    replica: WorkerReplica, slots: Slots, tmp_path: Path
) -> None:
    """Wrong weights or modules, NaN, a torn file, no folder: each says so; good weights load thereafter."""
    slots.load(1)
    slots.load(2)
    for text, payload in broken_adapters(tmp_path).items():
        replica.order(LoadAdapter, payload, task="broken", version=0)
        (failed,) = replica.until(1)
        assert isinstance(failed, CommandFailed)
        assert text in failed.reason
    slots.load(3)


def test_a_tenant_whose_weights_overflow_fails_alone(
    replica: WorkerReplica, slots: Slots, tmp_path: Path
) -> None:
    """Finite weights so large that logits are not numbers fail their own turns only, then and later."""
    good = slots.load(1)
    weights = {name: tensor.sign() * 3e38 for name, tensor in random_weights(2).items()}
    write_adapter(tmp_path / "wild", weights, LORA, served_base())
    wild = f"t{next(_number)}"
    payload = AdapterFolder(folder=str(tmp_path / "wild"), fingerprint=fingerprint(weights))
    replica.order(LoadAdapter, payload, task=wild, version=0)
    assert isinstance(replica.until(1)[0], AdapterLoaded)
    slots.loaded.append((wild, 0))
    requests = [turn(i, [1 + i] * 40, 8) for i in range(3)]
    replica.generate(wild, 0, requests)
    command = replica.generate(good, 0, requests)
    events = replica.until(6)
    assert len([e for e in events if isinstance(e, CommandFailed)]) == 3, events
    assert_is_of(replica, command, 1, requests)
    command = replica.generate(good, 0, requests)
    replica.until(3)
    assert_is_of(replica, command, 1, requests)


def test_counters_add_up_to_the_work_done(replica: WorkerReplica, slots: Slots) -> None:
    """Windows sum to the decoded and read tokens of what was asked, where an engine can count."""
    task, other = slots.load(1), slots.load(2)
    before = len(replica.reports)
    commands = [replica.generate(t, 0, [turn(i, [1, 2, 3 + i], 30) for i in range(4)]) for t in (task, other)]
    events = replica.until(8)
    assert {type(event) for event in events} == {TurnGenerated}, events
    time.sleep(0.3)
    replica.order(UnloadAdapter, task="nobody", version=0)  # what was due before this answer has come with it
    replica.until(1)
    windows = [r.event for r in replica.reports[before:] if isinstance(r.event, EngineMeasured)]
    if not windows:
        assert replica.engine == "openai"
        return
    turns = [result for (command, _), (_, result) in replica.turns().items() if command in commands]
    sampled = sum(len(result.tokens) for result in turns)
    totals = {
        name: sum(getattr(w, name) for w in windows)
        for name in EngineMeasured.__struct_fields__
        if name not in ("at", "worker")
    }
    assert totals["sequences_sum"] == sampled - len(turns)  # the first token comes with the prefill
    assert totals["prefill_tokens"] == 3 * len(turns)
    assert totals["num_prefills"] >= 1
    assert 1 <= totals["adapters_sum"] / totals["num_iterations"] <= 2
    assert totals["kv_tokens_sum"] >= totals["sequences_sum"]
    assert 0 < totals["prefill_ns"] < totals["busy_ns"]
