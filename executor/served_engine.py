"""A rollout engine whose model is served elsewhere: by vLLM in a process of its own, or behind a URL.

    orders ──► one asyncio task each ──► ModelServer
                      │ reports                │ iterations, batching, KV: the server's business
    step()  ◄─────────┘

The event loop runs inside `step` alone, so there are no threads and no locks. A `Generate` or `UnloadAdapter`
waits for the load that was ordered before it. Owns orders, slots by name and refusals; knows neither vLLM nor
HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine
from typing import Any, NamedTuple, Protocol

from executor.adapters import AdapterProblem
from executor.base_facts import BaseFacts
from executor.protocols import AdapterFolder, Order, Report, TurnRequest, TurnRequests, TurnResult
from executor.worker import one_line
from marlaas.commands import AbortTurns, Generate, LoadAdapter, UnloadAdapter
from marlaas.errors import MarlaasError
from marlaas.events import (
    AdapterLoaded,
    AdapterUnloaded,
    CommandFailed,
    EngineMeasured,
    Event,
    TurnGenerated,
    TurnsAborted,
)
from marlaas.spec import ReplicasSpec

_log = logging.getLogger("marlaas")

_PATIENCE_S = 0.01  # how long `step` waits for news before it lets the worker look for orders


class ServerLost(MarlaasError):
    """The model's server is gone, and with it all that was in flight there: the worker ends too."""


class ModelServer(Protocol):
    """Serves one frozen base with adapters by name.

    An adapter that it refuses is an `AdapterProblem`, its own end `ServerLost`.
    """

    async def load(self, name: str, folder: str, fingerprint: str) -> None:
        """Hold the adapter of a PEFT folder with these weights under this name."""

    async def unload(self, name: str) -> None:
        """Forget an adapter."""

    async def sample(self, name: str | None, request: TurnRequest) -> TurnResult:
        """Sample a turn with an adapter that is held, or with the bare base; cancelling stops it there."""


class Counters(Protocol):
    """Counts what the server's iterations do."""

    def begin(self) -> None:
        """Turns are at the server: its next iteration is under way."""

    def window(self, is_idle: bool) -> EngineMeasured | None:
        """What was counted since the last window, if one is due."""


class Resident(NamedTuple):
    """An adapter version in a slot."""

    task: str
    version: int

    @property
    def name(self) -> str:
        """What the server calls it; the same name never stands for other weights."""
        return f"{self.task}-v{self.version}"


class ServedRolloutEngine:
    """A `RolloutEngine` in front of a `ModelServer`; without `counters` it measures nothing."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        server: ModelServer,
        base: BaseFacts,
        replicas: ReplicasSpec,
        counters: Counters | None = None,
    ) -> None:
        self._loop, self._server, self._base, self._replicas = loop, server, base, replicas
        self._counters = counters
        self._residents: dict[Resident, asyncio.Task[str]] = {}
        self._adapters = asyncio.Lock()  # they are loaded and unloaded one at a time, as ordered
        self._turns: dict[tuple[int, int], tuple[Resident, asyncio.Task[None]]] = {}
        self._chores: set[asyncio.Task[None]] = set()
        self._reports: list[Report] = []
        self._has_news = asyncio.Event()
        self._lost: ServerLost | None = None

    def start(self, order: Order) -> None:
        """Take a LoadAdapter, UnloadAdapter, Generate or AbortTurns order; its answers come from `step`."""
        command, payload = order.command, order.payload
        if isinstance(command, LoadAdapter) and isinstance(payload, AdapterFolder):
            self._chore(command.id, self._load(command, payload, self._loading(command, payload)))
        elif isinstance(command, UnloadAdapter):
            self._unload(command)
        elif isinstance(command, Generate) and isinstance(payload, TurnRequests):
            self._generate(command, payload.requests)
        elif isinstance(command, AbortTurns):
            self._chore(command.id, self._abort(command, self._cancel(command)))
        else:
            problem = f"a rollout engine cannot carry out {type(command).__name__} with this payload"
            self._report(CommandFailed(at=0, command=command.id, reason=problem))

    def step(self) -> list[Report]:
        """Let the server's answers in, waiting for one a moment, and return all reports that are due."""
        if self._counters is not None and self._turns:
            self._counters.begin()
        if self._turns or self._chores:
            self._loop.run_until_complete(self._news())
        if self._lost is not None:
            raise self._lost
        measured = self._counters and self._counters.window(is_idle=not self._turns)
        if measured:
            self._report(measured)
        reports, self._reports = self._reports, []
        return reports

    def is_busy(self) -> bool:
        """Whether turns or orders are under way, or answers to give."""
        return bool(self._turns or self._chores or self._reports or self._lost)

    async def _news(self) -> None:
        await asyncio.sleep(0)  # what was ordered just now gets on its way
        if not self._reports:
            alarm = self._loop.call_later(_PATIENCE_S, self._has_news.set)
            await self._has_news.wait()
            alarm.cancel()
            await asyncio.sleep(0)  # others that ended in the same iteration come along
        self._has_news.clear()

    # --- adapters --------------------------------------------------------------------------------

    def _loading(self, command: LoadAdapter, payload: AdapterFolder) -> asyncio.Task[str]:
        """The task that loads this version, which takes its slot from now on; it ends in the fingerprint."""
        resident = Resident(command.task, command.version)
        if resident not in self._residents:
            if len(self._residents) >= self._replicas.slots:
                return self._loop.create_task(_full(self._replicas.slots))
            task = self._loop.create_task(self._fetch(resident, payload))
            task.add_done_callback(lambda done: self._keep_or_forget(resident, done))
            self._residents[resident] = task
        return self._residents[resident]

    async def _fetch(self, resident: Resident, payload: AdapterFolder) -> str:
        async with self._adapters:
            held = await asyncio.to_thread(self._base.fingerprint_of, payload.folder)
            _require_same(held, payload)
            await self._server.load(resident.name, payload.folder, held)
            return held

    def _keep_or_forget(self, resident: Resident, loaded: asyncio.Task[str]) -> None:
        has_failed = loaded.cancelled() or loaded.exception() is not None
        if has_failed and self._residents.get(resident) is loaded:
            del self._residents[resident]

    async def _load(self, command: LoadAdapter, payload: AdapterFolder, loading: asyncio.Task[str]) -> None:
        held = await loading
        _require_same(held, payload)
        self._report(AdapterLoaded(at=0, command=command.id, fingerprint=held))

    def _unload(self, command: UnloadAdapter) -> None:
        resident = Resident(command.task, command.version)
        turns = [turn for owner, turn in self._turns.values() if owner == resident and not turn.done()]
        if any(not turn.cancelling() for turn in turns):
            reason = f"{resident.name} has running turns"
            return self._report(CommandFailed(at=0, command=command.id, reason=reason))
        loaded = self._residents.pop(resident, None)
        return self._chore(command.id, self._remove(command, resident, loaded, turns))

    async def _remove(
        self,
        command: UnloadAdapter,
        resident: Resident,
        loaded: asyncio.Task[str] | None,
        turns: list[asyncio.Task[None]],
    ) -> None:
        await asyncio.gather(*turns, return_exceptions=True)
        if loaded is not None and await _succeeds(loaded):
            async with self._adapters:
                await self._server.unload(resident.name)
        self._report(AdapterUnloaded(at=0, command=command.id))

    # --- turns -----------------------------------------------------------------------------------

    def _generate(self, command: Generate, requests: list[TurnRequest]) -> None:
        resident = Resident(command.task, command.version)
        loaded = self._residents.get(resident)
        for request in requests:
            key = (command.id, request.trajectory)
            turn = self._loop.create_task(self._turn(command.id, resident, loaded, request))
            turn.add_done_callback(lambda _, key=key: self._turns.pop(key))  # type: ignore[misc]
            self._turns[key] = resident, turn

    async def _turn(
        self, command: int, resident: Resident, loaded: asyncio.Task[str] | None, request: TurnRequest
    ) -> None:
        reason = self._base.refusal(request, self._replicas.kv_tokens)
        try:
            if loaded is None or not await _succeeds(loaded):
                reason = f"{resident.name} is not resident"
            if not reason:
                result = await self._server.sample(resident.name, request)
                if all(math.isfinite(logprob) for logprob in result.logprobs):
                    return self._generated(command, resident, request, result)
                reason = "the model's output is not finite"
        except ServerLost as lost:
            return self._lose(lost)
        except Exception as error:  # noqa: BLE001 - one turn's failure is its own
            _log.exception("a turn failed")
            reason = one_line(error)
        failed = CommandFailed(at=0, command=command, trajectory=request.trajectory, reason=reason)
        return self._report(failed)

    def _generated(self, command: int, resident: Resident, request: TurnRequest, result: TurnResult) -> None:
        event = TurnGenerated(
            at=0,
            command=command,
            trajectory=request.trajectory,
            task=resident.task,
            version=resident.version,
            prompt_tokens=len(request.context),
            output_tokens=len(result.tokens),
        )
        self._report(event, result)

    def _cancel(self, command: AbortTurns) -> list[asyncio.Task[None]]:
        keys = [(command.generate, trajectory) for trajectory in command.trajectories]
        turns = [self._turns[key][1] for key in keys if key in self._turns]
        for turn in turns:
            turn.cancel()
        return turns

    async def _abort(self, command: AbortTurns, turns: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*turns, return_exceptions=True)
        self._report(TurnsAborted(at=0, command=command.id))

    # --- ends ------------------------------------------------------------------------------------

    def _chore(self, command: int, work: Coroutine[Any, Any, None]) -> None:
        chore = self._loop.create_task(self._answered(command, work))
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)

    async def _answered(self, command: int, work: Coroutine[Any, Any, None]) -> None:
        """Carry out an order; whatever goes wrong is its answer."""
        try:
            await work
        except ServerLost as lost:
            self._lose(lost)
        except AdapterProblem as problem:
            self._report(CommandFailed(at=0, command=command, reason=str(problem)))
        except Exception as error:  # noqa: BLE001 - one order's failure is its own
            _log.exception("an order failed")
            self._report(CommandFailed(at=0, command=command, reason=one_line(error)))

    def _lose(self, lost: ServerLost) -> None:
        self._lost = self._lost or lost
        self._has_news.set()

    def _report(self, event: Event, payload: TurnResult | None = None) -> None:
        self._reports.append(Report(event=event, payload=payload))
        self._has_news.set()


async def _succeeds(load: asyncio.Task[str]) -> bool:
    """Whether a load, once it has ended, brought its adapter; cancelling the one who asks leaves it alone."""
    await asyncio.wait([load])
    return not load.cancelled() and load.exception() is None


def _require_same(held: str, payload: AdapterFolder) -> None:
    if held != payload.fingerprint:
        raise AdapterProblem(f"{payload.folder} has fingerprint {held}, wanted {payload.fingerprint}")


async def _full(num_slots: int) -> str:
    raise AdapterProblem(f"all {num_slots} slots hold an adapter; unload one first")
