"""Requests served by one replica of the base model, an iteration at a time, with all that a server would log.

    requests ──► Batch ──► iterations, timed by a clock ──► first and last tokens, the work of each iteration

The batch, its rules and its costs are those that `engine` simulates with, and so are the ends that come out;
beside them this shows when first tokens come and what every iteration does. The clock is a choice: one that
adds up costs predicts a run, one that follows a log retraces it. Owns the loop; knows no log, fits nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Row
from typing import Protocol

import msgspec

from sim.batch import Batch
from sim.costs import FS_PER_NS, FS_PER_S, IterationCosts
from sim.rules import EngineRules
from sim.sequences import Sequence

BASE = ("base", 0)
NO_ADAPTERS = 0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a request before it is served; `arrival_ns` counts from the clock's zero."""

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int


class Iteration(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration: what it did, in the units that costs are given in, what came of it, and when it ended.

    `prefill_pairs` are of a token that was read and one that it attends to. `running` and `waiting` are left
    when it has ended; `prompt_tokens` are of prompts of which the first token came with it.
    """

    decoding: int
    kv_tokens: int
    prefill_tokens: int
    prefill_pairs: float
    prompt_tokens: int
    generated_tokens: int
    running: int
    waiting: int
    end_fs: int


class Served(msgspec.Struct, kw_only=True):
    """When each request's first and last token came, in seconds by order of arrival, and all iterations."""

    arrival_s: list[float]
    first_s: list[float]
    last_s: list[float]
    output_tokens: list[int]
    iterations: list[Iteration]

    def ttft_s(self) -> list[float]:
        """Arrival to first token, of each request."""
        return [first - arrival for first, arrival in zip(self.first_s, self.arrival_s, strict=True)]

    def latency_s(self) -> list[float]:
        """Arrival to last token, of each request."""
        return [last - arrival for last, arrival in zip(self.last_s, self.arrival_s, strict=True)]

    def tpot_s(self) -> list[float]:
        """Mean time between tokens, of each request that has several."""
        rows = zip(self.first_s, self.last_s, self.output_tokens, strict=True)
        return [(last - first) / (num - 1) for first, last, num in rows if num > 1]


class Clock(Protocol):
    """Says when an iteration ends."""

    def end_fs(self, start_fs: int, duration_fs: int, num_tokens: int) -> int:
        """The end of one that began then and costs so much; by then `num_tokens` of all are done."""
        ...


class CostClock:
    """Iterations take what they cost."""

    def end_fs(self, start_fs: int, duration_fs: int, num_tokens: int) -> int:
        """The start and the cost."""
        return start_fs + duration_fs


def serve(
    requests: Row[Request],
    costs: IterationCosts,
    rules: EngineRules,
    clock: Clock | None = None,
    *,
    plans_ahead: bool = False,
) -> Served:
    """Serve requests, given in order of arrival, to the last token.

    The rules must mix prefills into iterations, and every request must fit the KV pool. An engine that plans
    ahead, as vLLM does since 0.14, decides on an iteration when the one before begins, so who comes meanwhile
    waits for one more; `engine` does not. That a seat stays taken for one more too is left out.
    """
    assert rules.prefill == "mixed", "iterations contain the reading of prompts"
    return _Server(requests, costs, rules, clock or CostClock(), plans_ahead).run()


class _Server:
    """The loop and what it has written down so far."""

    def __init__(
        self,
        requests: Row[Request],
        costs: IterationCosts,
        rules: EngineRules,
        clock: Clock,
        plans_ahead: bool,
    ) -> None:
        self._requests = requests
        self._costs = costs
        self._clock = clock
        self._batch = Batch(rules)
        self._sequences = [_sequence(number, request) for number, request in enumerate(requests)]
        self._num_come = 0
        self._begun: deque[Sequence] = deque()  # have come and have no token yet
        self._num_ended = 0
        self._num_tokens = 0
        self._plans_ahead = plans_ahead
        self._began_fs = 0  # when the last iteration did
        self._now_fs = 0
        self._first_fs = [0] * len(requests)
        self._last_fs = [0] * len(requests)
        self._iterations: list[Iteration] = []

    def run(self) -> Served:
        """Go on until nothing is left."""
        requests = self._requests
        while True:
            self._let_come((self._began_fs if self._plans_ahead else self._now_fs) - 1)
            if self._batch.begin_step() is not None:
                self._iterate()
            elif self._num_come < len(requests):
                self._now_fs = requests[self._num_come].arrival_ns * FS_PER_NS
                self._let_come(self._now_fs)
            else:
                break
        return Served(
            arrival_s=[request.arrival_ns * 1e-9 for request in requests],
            first_s=[time / FS_PER_S for time in self._first_fs],
            last_s=[time / FS_PER_S for time in self._last_fs],
            output_tokens=[request.output_tokens for request in requests],
            iterations=self._iterations,
        )

    def _let_come(self, until_fs: int) -> None:
        """Queue who has arrived; at the very end of an iteration is too late for the next, as in `engine`."""
        requests = self._requests
        while self._num_come < len(requests) and requests[self._num_come].arrival_ns * FS_PER_NS <= until_fs:
            sequence = self._sequences[self._num_come]
            self._batch.waiting.append(sequence)
            self._begun.append(sequence)
            self._num_come += 1

    def _iterate(self) -> None:
        batch, costs = self._batch, self._costs
        decoding = batch.decoding
        size, kv_tokens = decoding.size, decoding.attended
        prefill_tokens, twice_pairs = batch.prefill_tokens, batch.prefill_pairs
        duration_fs = costs.decode_fs(size, kv_tokens, NO_ADAPTERS) + costs.reading_fs(
            prefill_tokens, twice_pairs
        )
        ended = batch.end_step(1)
        prompt_tokens, newcomers = self._note_first_tokens(ended)
        # Whoever decoded and whoever joined is here still or has ended.
        generated = decoding.size + len(ended)
        self._num_tokens += prompt_tokens + generated
        self._began_fs = self._now_fs
        self._now_fs = self._clock.end_fs(self._now_fs, duration_fs, self._num_tokens)
        for sequence in newcomers:
            self._first_fs[sequence.number] = self._now_fs
        for sequence in ended:
            self._last_fs[sequence.number] = self._now_fs
        self._num_ended += len(ended)
        self._iterations.append(
            Iteration(
                decoding=size,
                kv_tokens=kv_tokens,
                prefill_tokens=prefill_tokens,
                prefill_pairs=twice_pairs / 2,
                prompt_tokens=prompt_tokens,
                generated_tokens=generated,
                running=self._num_come - self._num_ended - len(batch.waiting),
                waiting=len(batch.waiting),
                end_fs=self._now_fs,
            )
        )

    def _note_first_tokens(self, ended: Row[Sequence]) -> tuple[int, list[Sequence]]:
        """Whose first token came with the iteration, and the tokens of their prompts."""
        newcomers = []
        while self._begun and (self._begun[0].sampled or self._begun[0] in ended):
            newcomers.append(self._begun.popleft())
        return sum(sequence.prompt_tokens for sequence in newcomers), newcomers


def _sequence(number: int, request: Request) -> Sequence:
    sequence = Sequence(
        command=0,
        trajectory=number,
        adapter=BASE,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        limit_tokens=request.output_tokens,
    )
    sequence.number = number
    return sequence
