"""vLLM's asynchronous engine as a `ModelServer`: adapters by integer id, turns as token ids.

vLLM finds KV of earlier requests again by tokens and by the adapter's name and folder, which stand for one
set of weights while a worker lives: no KV can cross versions. Owns ids and how requests are put.
"""

from __future__ import annotations

import itertools
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from executor.adapters import AdapterProblem
from executor.protocols import TurnRequest, TurnResult
from executor.served_engine import ServerLost


class VllmServer:
    """Serves turns with an `AsyncLLM`; integer ids of adapters are never used again."""

    def __init__(self, llm: Any, eos_token_ids: tuple[int, ...]) -> None:
        self._llm = llm
        self._eos_token_ids = list(eos_token_ids)
        self._adapters: dict[str, LoRARequest] = {}
        self._adapter_ids = itertools.count(1)
        self._request_ids = itertools.count(1)

    async def load(self, name: str, folder: str, fingerprint: str) -> None:
        """Load and pin an adapter; what vLLM refuses is an `AdapterProblem`."""
        adapter = LoRARequest(name, next(self._adapter_ids), folder)
        try:
            is_there = await self._llm.add_lora(adapter) and await self._llm.pin_lora(adapter.lora_int_id)
        except EngineDeadError as error:
            raise _lost(error) from error
        if not is_there:
            raise AdapterProblem(f"vLLM did not load {folder}")
        self._adapters[name] = adapter

    async def unload(self, name: str) -> None:
        """Remove an adapter."""
        adapter = self._adapters.pop(name)
        try:
            is_gone = await self._llm.remove_lora(adapter.lora_int_id)
        except EngineDeadError as error:
            raise _lost(error) from error
        if not is_gone:
            raise AdapterProblem(f"vLLM held no {name}")

    async def sample(self, name: str | None, request: TurnRequest) -> TurnResult:
        """Sample one turn; cancelling it aborts the request in vLLM."""
        sampling = SamplingParams(
            max_tokens=request.max_new_tokens,
            temperature=request.temperature,
            seed=request.seed & (2**63 - 1),
            logprobs=0,
            stop_token_ids=self._eos_token_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # The type spares vLLM a thread in which it would look for text to tokenise.
        prompt = {"type": "token", "prompt_token_ids": request.context}
        adapter = None if name is None else self._adapters[name]
        number = str(next(self._request_ids))
        try:
            async for output in self._llm.generate(prompt, sampling, number, lora_request=adapter):
                last = output.outputs[0]
        except EngineDeadError as error:
            raise _lost(error) from error
        tokens = list(last.token_ids)
        found = zip(tokens, last.logprobs, strict=True)
        return TurnResult(tokens=tokens, logprobs=[logprobs[token].logprob for token, logprobs in found])


def _lost(error: BaseException) -> ServerLost:
    return ServerLost(f"vLLM's engine died: {error}")
