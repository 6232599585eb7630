"""The embedded rollout engine: iteration-level batching of many adapters over one Hugging Face causal LM.

    orders ──► slots (load, unload)      waiting (first come, first served) ──► batch ──► reports
               Generate ─────────────────►                    join when rows and KV tokens allow

Turns of any tasks, adapters and versions join and leave at every iteration. A turn joins only if all running
turns could grow to their limits within `kv_tokens`, so none is ever preempted and the oldest always
progresses. A turn's KV is dropped when it ends; its next turn reads the whole context again.

Owns orders, slots by name, admission and counters; knows nothing of schedulers, rewards or training.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from executor.adapters import AdapterProblem, fingerprint, read_adapter
from executor.base_model import choose_device, load_base
from executor.protocols import AdapterFolder, Order, Report, TurnRequest, TurnRequests, TurnResult
from executor.torch_batch import Batch, Turn
from executor.torch_cache import ATTENTION
from executor.torch_counters import Counters
from executor.torch_invariance import ask_for_strict_products, make_independent
from executor.torch_lora import LoraSlots
from marlaas.commands import AbortTurns, Generate, LoadAdapter, UnloadAdapter
from marlaas.errors import InputError
from marlaas.events import (
    AdapterLoaded,
    AdapterUnloaded,
    CommandFailed,
    Event,
    TurnGenerated,
    TurnsAborted,
)
from marlaas.spec import LoraSpec, ReplicasSpec

_log = logging.getLogger("marlaas")

_PREFILL_TOKENS = (
    2048  # a pass reads at most so many, so that a burst of new turns does not stall the running ones
)


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
        is_wanted = replicas.batch_invariant
        if is_wanted is None:
            is_wanted = device.type == "cpu"
        if is_wanted:
            ask_for_strict_products()
        base = load_base(model_folder, dtype, device, ATTENTION)
        self._base = base if eos_token_ids is None else base._replace(eos_token_ids=eos_token_ids)
        self._lora, self._replicas = lora, replicas
        self._slots = LoraSlots(base.model, lora, replicas.slots)
        self._resident: list[Resident | None] = [None] * replicas.slots
        multiple = self._row_multiple() if is_wanted else 1
        self._batch = Batch(self._base, self._slots, replicas.max_num_seqs, multiple)
        self._waiting: deque[Turn] = deque()
        self._reserved_tokens = 0
        self._reports: list[Report] = []
        self._counters = Counters(worker)
        self._warm_up()

    def _row_multiple(self) -> int:
        """What rows must be padded to for turns to be independent of one another."""
        is_required = self._replicas.batch_invariant is True
        found = make_independent(self._base, self._slots, at_any_price=is_required)
        if found is None:
            where, problem = "cluster.replicas.batch_invariant", "sums depend on the batch on this machine"
            if is_required:
                raise InputError(where, problem, "leave the key out, or use float32 on the CPU")
            _log.warning("%s: %s; true may mend it at a price", where, problem)
        return found or 1

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
        is_new = name not in self._resident
        slot = self._fill_slot(payload) if is_new else self._resident.index(name)
        held = fingerprint(self._slots.held(slot))
        if held != payload.fingerprint:
            if is_new:
                self._slots.clear(slot)
            raise AdapterProblem(f"{payload.folder} has fingerprint {held}, wanted {payload.fingerprint}")
        self._resident[slot] = name
        self._report(AdapterLoaded(at=0, command=command.id, fingerprint=held))

    def _fill_slot(self, payload: AdapterFolder) -> int:
        if None not in self._resident:
            raise AdapterProblem(f"all {len(self._resident)} slots hold an adapter; unload one first")
        slot = self._resident.index(None)
        self._slots.load(slot, read_adapter(Path(payload.folder), self._lora, self._slots.shapes()))
        return slot

    def _unload(self, command: UnloadAdapter) -> None:
        name = Resident(command.task, command.version)
        if name in self._resident:
            slot = self._resident.index(name)
            if any(turn.slot == slot for turn in (*self._batch.turns, *self._waiting)):
                raise AdapterProblem(f"{name.task}-v{name.version} has running turns")
            self._slots.clear(slot)
            self._resident[slot] = None
        self._report(AdapterUnloaded(at=0, command=command.id))

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
            # Contexts that turns share are read once but counted for each: cost per token of context served.
            num_tokens = sum(len(turn.request.context) for turn in turns)
            self._counters.prefilled(num_tokens, time.perf_counter_ns() - began)
            self._finish(finished)
            if self._batch.turns:
                break

    def _next_turns(self) -> list[Turn]:
        turns: list[Turn] = []
        contexts: set[tuple[int, tuple[int, ...]]] = set()
        while self._waiting and len(self._batch.turns) + len(turns) < self._replicas.max_num_seqs:
            turn = self._waiting[0]
            contexts.add((turn.slot, tuple(turn.request.context)))
            fits = self._reserved_tokens + turn.num_tokens <= self._replicas.kv_tokens
            if not fits or (turns and sum(len(context) for _, context in contexts) > _PREFILL_TOKENS):
                break
            self._reserved_tokens += turn.num_tokens
            turns.append(self._waiting.popleft())
        return turns

    def _warm_up(self) -> None:
        """One turn through the bare model: pays first-time costs, refuses a model that cannot work here."""
        request = TurnRequest(trajectory=0, context=[0], max_new_tokens=2, temperature=1.0, seed=0)
        self._batch.join([Turn(0, 0, request)])
        self._batch.decode()
        self._batch.leave([0])

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
        if not all(math.isfinite(logprob) for logprob in result.logprobs):
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
