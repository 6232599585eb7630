"""The engine in front of a model server, and the probe, with scripted servers: no model, no processes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_base import LORA, VOCABULARY, random_weights, shapes, tiny_base, turn, write_random_adapter

from executor.adapters import AdapterProblem
from executor.base_facts import BaseFacts, read_facts
from executor.probe import Unfaithful, probe
from executor.protocols import AdapterFolder, Order, Report, TurnRequest, TurnRequests, TurnResult
from executor.served_engine import ServedRolloutEngine, ServerLost
from marlaas.commands import AbortTurns, Generate, LoadAdapter, UnloadAdapter
from marlaas.events import (
    AdapterLoaded,
    AdapterUnloaded,
    CommandFailed,
    TurnsAborted,
)
from marlaas.spec import ReplicasSpec

FACTS = BaseFacts(VOCABULARY, 256, (0,), LORA, shapes(), 256)


class ScriptedServer:
    """Answers a turn with as many tokens 1 as it may have, at once or when `gate` opens."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.log: list[str] = []
        self.is_dead = False

    async def load(self, name: str, folder: str, fingerprint: str) -> None:
        if self.is_dead:
            raise ServerLost("the server is gone")
        if len(self.held) == 2:
            raise AdapterProblem("the server is full")
        self.held[name] = fingerprint
        self.log.append(f"load {name}")

    async def unload(self, name: str) -> None:
        del self.held[name]
        self.log.append(f"unload {name}")

    async def sample(self, name: str | None, request: TurnRequest) -> TurnResult:
        assert name in self.held
        try:
            await self.gate.wait()
            for _ in range(request.trajectory):  # each a little later than the one before
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.log.append(f"cancel {request.trajectory}")
            raise
        if self.is_dead:
            raise ServerLost("the server is gone")
        if request.seed == 13:
            raise RuntimeError("unlucky")
        num = request.max_new_tokens
        return TurnResult(tokens=[1] * num, logprobs=[float("nan") if request.seed == 14 else -1.0] * num)


class Driven:
    """An engine with a scripted server, and all it has reported."""

    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.folder = folder
        self.server = ScriptedServer()
        self.engine = ServedRolloutEngine(loop, self.server, FACTS, ReplicasSpec(slots=2, kv_tokens=200))
        self._next_id = 0

    def order(self, kind: Any, payload: Any = None, **fields: Any) -> int:
        self._next_id += 1
        command = kind(id=self._next_id, replica="replica-0", **fields)
        self.engine.start(Order(command=command, payload=payload))
        return self._next_id

    def load(self, task: str, seed: int = 1) -> AdapterFolder:
        payload = write_random_adapter(self.folder / task, seed)
        self.order(LoadAdapter, payload, task=task, version=0)
        return payload

    def generate(self, task: str, requests: list[TurnRequest]) -> int:
        trajectories = tuple(request.trajectory for request in requests)
        fields = {"version": 0, "step": 0, "turn": 0, "trajectories": trajectories}
        return self.order(Generate, TurnRequests(requests=requests), task=task, **fields)

    def run(self) -> list[Report]:
        reports = []
        while self.engine.is_busy():
            reports += self.engine.step()
        return reports

    def events(self) -> list[Any]:
        return [report.event for report in self.run()]


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[Driven]:
    """An idle engine with two slots."""
    loop = asyncio.new_event_loop()
    yield Driven(tmp_path, loop)
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def test_orders_given_at_once_are_carried_out_in_order(driven: Driven) -> None:
    """Turns and an unload wait for the load that was ordered before them."""
    wanted = driven.load("t")
    driven.generate("t", [turn(0, [1], 3), turn(1, [1, 2], 2)])
    loaded, *turns = driven.events()
    assert loaded == AdapterLoaded(at=0, command=1, fingerprint=wanted.fingerprint)
    assert [(e.trajectory, e.version, e.prompt_tokens, e.output_tokens) for e in turns] == [
        (0, 0, 1, 3),
        (1, 0, 2, 2),
    ]
    driven.load("u")
    driven.order(UnloadAdapter, task="u", version=0)
    assert [type(event) for event in driven.events()] == [AdapterLoaded, AdapterUnloaded]
    assert driven.server.log == ["load t-v0", "load u-v0", "unload u-v0"]


def test_an_abort_stops_turns_at_the_server_before_it_is_answered(driven: Driven) -> None:
    """Cancelled turns report nothing, and their adapter can go at once."""
    driven.load("t")
    driven.events()
    driven.server.gate.clear()
    command = driven.generate("t", [turn(i, [1], 3) for i in range(3)])
    assert driven.engine.step() == []
    driven.order(UnloadAdapter, task="t", version=0)
    driven.order(AbortTurns, generate=command, trajectories=(0, 1, 2))
    driven.order(UnloadAdapter, task="t", version=0)
    refused, aborted, gone = driven.events()
    assert isinstance(refused, CommandFailed)
    assert refused.reason == "t-v0 has running turns"
    assert (type(aborted), type(gone)) == (TurnsAborted, AdapterUnloaded)
    assert driven.server.log == ["load t-v0", "cancel 0", "cancel 1", "cancel 2", "unload t-v0"]


def test_an_adapter_can_go_as_soon_as_its_last_turn_was_reported(driven: Driven) -> None:
    """The unload may be ordered before the engine has taken another step."""
    driven.load("t")
    driven.events()
    driven.server.gate.clear()
    driven.generate("t", [turn(i, [1], 3) for i in range(3)])
    assert driven.engine.step() == []
    driven.server.gate.set()
    assert len(driven.engine.step()) == 3
    driven.order(UnloadAdapter, task="t", version=0)
    assert [type(event) for event in driven.events()] == [AdapterUnloaded]


def test_failures_are_of_one_order_or_one_turn(driven: Driven) -> None:
    """What the server refuses or raises, what is not finite, what fits no slot: each has its own answer."""
    driven.load("t")
    driven.load("u")
    driven.load("w")
    driven.generate("w", [turn(0, [1], 3)])
    seeds = {0: 13, 1: 14, 2: 15}
    driven.generate("t", [turn(i, [1], 300 if i == 3 else 3, seed=seeds.get(i, 0)) for i in range(4)])
    failed = {(e.command, e.trajectory): e.reason for e in driven.events() if isinstance(e, CommandFailed)}
    assert failed == {
        (3, None): "all 2 slots hold an adapter; unload one first",
        (4, 0): "w-v0 is not resident",
        (5, 0): "RuntimeError: unlucky",
        (5, 1): "the model's output is not finite",
        (5, 3): "can reach 301 tokens, more than the 200 this engine can ever hold for one turn",
    }


def test_a_load_that_is_refused_takes_no_slot(driven: Driven, tmp_path: Path) -> None:
    """Weights of another fingerprint never reach the server, now or for whoever asks again."""
    payload = write_random_adapter(tmp_path / "x", 1)
    for _ in range(3):
        wrong = AdapterFolder(folder=payload.folder, fingerprint="of another")
        driven.order(LoadAdapter, wrong, task="x", version=0)
        (failed,) = driven.events()
        assert "wanted of another" in failed.reason
    assert driven.server.log == []
    driven.order(LoadAdapter, payload, task="x", version=0)
    driven.order(LoadAdapter, payload, task="x", version=0)
    assert [type(event) for event in driven.events()] == [AdapterLoaded, AdapterLoaded]
    assert driven.server.log == ["load x-v0"]


def test_the_end_of_the_server_is_the_end_of_the_worker(driven: Driven) -> None:
    """Whoever meets it, `step` raises it with its reason."""
    driven.load("t")
    driven.events()
    driven.server.is_dead = True
    driven.generate("t", [turn(0, [1], 3)])
    with pytest.raises(ServerLost, match="the server is gone"):
        driven.run()


class EchoServer:
    """Says what it was asked with log-probabilities made of the adapter's name, or as its faults have it."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.loads = 0

    async def load(self, name: str, folder: str, fingerprint: str) -> None:
        self.loads += 1

    async def unload(self, name: str) -> None:
        pass

    async def sample(self, name: str | None, request: TurnRequest) -> TurnResult:
        effect = 0.0 if name is None else 1.0
        if self.fault == "ignores" or (self.fault == "needs a push" and self.loads < 3):
            effect = 0.0
        elif self.fault == "forgets":
            effect *= self.loads
        elif self.fault == "leaks" and self.loads:
            effect = 1.0
        return TurnResult(tokens=[1, 2], logprobs=[-1.0 - effect, -2.0])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("ignores", "an adapter changes nothing"),
        ("forgets", "the same adapter loaded again says something else"),
        ("leaks", "the base is not itself again once the adapter is unloaded"),
    ],
)
def test_a_server_that_is_not_faithful_is_refused(fault: str, message: str) -> None:
    """One message says what an adapter did or did not do there."""
    with pytest.raises(Unfaithful, match=message):
        asyncio.run(probe(EchoServer(fault), FACTS, tiny_base()))


@pytest.mark.parametrize("fault", ["", "needs a push"])
def test_a_faithful_server_is_taken(fault: str) -> None:
    """Also one whose base is so sure of itself that only a strong adapter shows."""
    asyncio.run(probe(EchoServer(fault), FACTS, tiny_base()))


def test_a_model_folder_tells_what_an_engine_must_know() -> None:
    """Vocabulary, longest sequence, end tokens, KV and the tensors of an adapter, without reading weights."""
    facts = read_facts(tiny_base(), LORA)
    assert (facts.vocab_size, facts.max_positions, facts.eos_token_ids) == (VOCABULARY, 256, ())
    assert facts.kv_numbers_per_token == 2 * 2 * 2 * 16
    assert {name: tuple(tensor.shape) for name, tensor in random_weights(0).items()} == dict(facts.shapes)
    assert facts.longest(kv_tokens=100) == 100
    assert facts.longest(kv_tokens=1000) == 256
