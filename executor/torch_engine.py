"""The embedded rollout engine: iteration-level batching of many adapters over one frozen Hugging Face causal LM.

    orders ──► slots (load, unload)      waiting (first come, first served) ──► batch ──► reports
               Generate ─────────────────►                    join when rows and KV tokens allow

Turns of any tasks, adapters and versions join and leave at every iteration. A turn joins only if all running
turns could grow to their limits within `kv_tokens`, so none is ever preempted and the oldest always progresses.
A turn's KV is dropped when it ends; its next turn reads the whole context again.

Owns orders, slots by name, admission and counters; knows nothing of schedulers, rewards or training.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from executor.adapters import AdapterProblem, fingerprint, read_adapter
from executor.base_model import choose_device, load_base
from executor.protocols import AdapterFolder, Order, Report, TurnRequest, TurnRequests, TurnResult
from executor.torch_batch import Batch, Turn
from executor.torch_cache import ATTENTION
from executor.torch_lora import LoraSlots
from marlaas.commands import AbortTurns, Generate, LoadAdapter, UnloadAdapter
from marlaas.events import (
    AdapterLoaded,
    AdapterUnloaded,
    CommandFailed,
    EngineMeasured,
    Event,
    TurnGenerated,
    TurnsAborted,
)
from marlaas.spec import LoraSpec, ReplicasSpec

_PREFILL_TOKENS = (
    2048  # a pass reads at most so many, so that a burst of new turns does not stall the running ones
)
_REPORT_NS = 250_000_000


class Resident(NamedTuple):
    """The adapter version in a slot."""

    task: str
    version: int


class TorchRolloutEngine:
    """Serves many adapters at once over one frozen base model; a `RolloutEngine`.

    `eos_token_ids` None means those of the model folder. Raises `InputError` for a missing model or device.
    """

    def __init__(
        self,
        worker: str,
        model_folder: str,
        replicas: ReplicasSpec,
        lora: LoraSpec,
        *,
        dtype: str = "float32",
        eos_token_ids: tuple[int, ...] | None = None,
    ) -> None:
        device = choose_device(replicas.device, replicas.devices)
        base = load_base(model_folder, dtype, device, ATTENTION)
        self._base = base if eos_token_ids is None else base._replace(eos_token_ids=eos_token_ids)
        self._lora, self._replicas = lora, replicas
        self._slots = LoraSlots(base.model, lora, replicas.slots)
        self._resident: list[Resident | None] = [None] * replicas.slots
        self._batch = Batch(self._base, self._slots, replicas.max_num_seqs)
        self._waiting: deque[Turn] = deque()
        self._reserved_tokens = 0
        self._reports: list[Report] = []
        self._counters = _Counters(worker)

    def start(self, order: Order) -> None:
        """Take a LoadAdapter, UnloadAdapter, Generate or AbortTurns order; its answers come from `step`."""
        command, payload = order.command, order.payload
        try:
            if isinstance(command, LoadAdapter) and isinstance(payload, AdapterFolder):
                self._load(command, payload)
            elif isinstance(command, UnloadAdapter):
                self._unload(command)
            elif isinstance(command, Generate) and isinstance(payload, TurnRequests):
                self._generate(command, payload.requests)
            elif isinstance(command, AbortTurns):
                self._abort(command)
            else:
                raise AdapterProblem(
                    f"a rollout engine cannot carry out {type(command).__name__} with this payload"
                )
        except AdapterProblem as problem:
            self._report(CommandFailed(at=0, command=command.id, reason=str(problem)))

    def step(self) -> list[Report]:
        """Let waiting turns join, run one iteration, and return all answers that are due."""
        if self._waiting or self._batch.turns:
            began = time.perf_counter_ns()
            self._admit()
            if self._batch.turns:
                self._decode()
            self._counters.busy(time.perf_counter_ns() - began)
            if self._counters.is_due(idle=not self._batch.turns and not self._waiting):
                self._report(self._counters.take())
        reports, self._reports = self._reports, []
        return reports

    def is_busy(self) -> bool:
        """Whether `step` has turns to advance or answers to give."""
        return bool(self._batch.turns or self._waiting or self._reports)

    # --- orders ----------------------------------------------------------------------------------

    def _load(self, command: LoadAdapter, payload: AdapterFolder) -> None:
        name = Resident(command.task, command.version)
        if name not in self._resident:
            if None not in self._resident:
                raise AdapterProblem(f"all {len(self._resident)} slots hold an adapter; unload one first")
            slot = self._resident.index(None)
            self._slots.load(slot, read_adapter(Path(payload.folder), self._lora, self._slots.shapes()))
            self._resident[slot] = name
        slot = self._resident.index(name)
        held = fingerprint(self._slots.held(slot))
        if held != payload.fingerprint:
            self._free(slot)
            raise AdapterProblem(
                f"{payload.folder}: weights have fingerprint {held}, wanted {payload.fingerprint}"
            )
        self._report(AdapterLoaded(at=0, command=command.id, fingerprint=held))

    def _unload(self, command: UnloadAdapter) -> None:
        name = Resident(command.task, command.version)
        if name in self._resident:
            slot = self._resident.index(name)
            if any(turn.slot == slot for turn in (*self._batch.turns, *self._waiting)):
                raise AdapterProblem(f"{name.task}-v{name.version} has running turns")
            self._free(slot)
        self._report(AdapterUnloaded(at=0, command=command.id))

    def _free(self, slot: int) -> None:
        self._slots.clear(slot)
        self._resident[slot] = None

    def _generate(self, command: Generate, requests: list[TurnRequest]) -> None:
        name = Resident(command.task, command.version)
        slot = self._resident.index(name) if name in self._resident else None
        for request in requests:
            reason = (
                f"{name.task}-v{name.version} is not resident" if slot is None else self._refusal(request)
            )
            if slot is None or reason:
                self._fail(command.id, request.trajectory, reason)
            else:
                self._waiting.append(Turn(command.id, slot, request))

    def _refusal(self, request: TurnRequest) -> str:
        """Why this turn can never run here, or nothing."""
        most = min(self._replicas.kv_tokens, self._base.max_positions or self._replicas.kv_tokens)
        num_tokens = len(request.context) + request.max_new_tokens
        if num_tokens > most:
            return (
                f"can reach {num_tokens} tokens, more than the {most} this engine can ever hold for one turn"
            )
        if not request.context or min(request.context) < 0 or max(request.context) >= self._base.vocab_size:
            return f"the context must be token ids below {self._base.vocab_size}, and not empty"
        return ""

    def _abort(self, command: AbortTurns) -> None:
        wanted = set(command.trajectories)

        def is_wanted(turn: Turn) -> bool:
            return turn.command == command.generate and turn.request.trajectory in wanted

        self._waiting = deque(turn for turn in self._waiting if not is_wanted(turn))
        self._leave([row for row, turn in enumerate(self._batch.turns) if is_wanted(turn)])
        self._report(TurnsAborted(at=0, command=command.id))

    # --- iterations ------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let waiting turns join in order of arrival, as many as rows, KV tokens and one pass allow."""
        while turns := self._next_turns():
            began = time.perf_counter_ns()
            finished = self._batch.join(turns)
            num_tokens = sum(len(turn.request.context) for turn in turns)
            self._counters.prefilled(num_tokens, time.perf_counter_ns() - began)
            self._finish(finished)
            if self._batch.turns:
                break

    def _next_turns(self) -> list[Turn]:
        turns: list[Turn] = []
        num_tokens = 0
        while self._waiting and len(self._batch.turns) + len(turns) < self._replicas.max_num_seqs:
            turn = self._waiting[0]
            num_tokens += len(turn.request.context)
            fits = self._reserved_tokens + turn.num_tokens <= self._replicas.kv_tokens
            if not fits or (turns and num_tokens > _PREFILL_TOKENS):
                break
            self._reserved_tokens += turn.num_tokens
            turns.append(self._waiting.popleft())
        return turns

    def _decode(self) -> None:
        self._counters.iteration(self._batch)
        self._finish(self._batch.decode())

    def _finish(self, rows: list[int]) -> None:
        if not rows:
            return
        for row, result in zip(rows, self._batch.results(rows), strict=True):
            self._answer(self._batch.turns[row], result)
        self._leave(rows)

    def _answer(self, turn: Turn, result: TurnResult) -> None:
        trajectory = turn.request.trajectory
        if not all(-float("inf") < value <= 1e-3 for value in result.logprobs):
            return self._fail(turn.command, trajectory, "the model's output is not finite")
        adapter = self._resident[turn.slot]
        assert adapter is not None, "a slot with running turns is never freed"
        event = TurnGenerated(
            at=0,
            command=turn.command,
            trajectory=trajectory,
            task=adapter.task,
            version=adapter.version,
            prompt_tokens=len(turn.request.context),
            output_tokens=len(result.tokens),
        )
        return self._report(event, result)

    def _leave(self, rows: list[int]) -> None:
        self._reserved_tokens -= sum(self._batch.turns[row].num_tokens for row in rows)
        self._batch.leave(rows)

    def _fail(self, command: int, trajectory: int, reason: str) -> None:
        self._report(CommandFailed(at=0, command=command, trajectory=trajectory, reason=reason))

    def _report(self, event: Event, payload: TurnResult | None = None) -> None:
        self._reports.append(Report(event=event, payload=payload))


class _Counters:
    """What `EngineMeasured` reports, since the last report."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._reset()

    def _reset(self) -> None:
        self._iterations = self._busy_ns = self._sequences = self._kv_tokens = self._adapters = 0
        self._prefills = self._prefill_tokens = self._prefill_ns = 0

    def iteration(self, batch: Batch) -> None:
        self._iterations += 1
        self._sequences += len(batch.turns)
        self._kv_tokens += batch.num_kv_tokens
        self._adapters += batch.num_adapters

    def prefilled(self, num_tokens: int, elapsed_ns: int) -> None:
        self._prefills += 1
        self._prefill_tokens += num_tokens
        self._prefill_ns += elapsed_ns

    def busy(self, elapsed_ns: int) -> None:
        self._busy_ns += elapsed_ns

    def is_due(self, idle: bool) -> bool:
        return idle or self._busy_ns >= _REPORT_NS

    def take(self) -> EngineMeasured:
        measured = EngineMeasured(
            at=0,
            worker=self._worker,
            num_iterations=self._iterations,
            busy_ns=self._busy_ns,
            sequences_sum=self._sequences,
            kv_tokens_sum=self._kv_tokens,
            adapters_sum=self._adapters,
            num_prefills=self._prefills,
            prefill_tokens=self._prefill_tokens,
            prefill_ns=self._prefill_ns,
        )
        self._reset()
        return measured
