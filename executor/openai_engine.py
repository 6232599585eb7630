"""A replica that is a vLLM server which runs elsewhere, reached through its OpenAI-compatible API.

    worker ──► ServedRolloutEngine ──► OpenaiServer ──HTTP──► vLLM server, this run's alone

The server must have been started with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=True` and `--enable-lora`, on the
same base model, and must see the run folder and this machine's temporary folder under the same paths, for it
reads adapters itself. A key in `VLLM_API_KEY`, which the server reads too, is sent along. aiohttp, because
hundreds of requests are open at once, and one that is cancelled must close its connection: so vLLM aborts it.

Owns the talk with the server; knows no orders and no slots. The API tells no iterations: nothing is measured.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import aiohttp

from executor.adapters import AdapterProblem
from executor.base_facts import read_facts
from executor.probe import probe
from executor.protocols import TurnRequest, TurnResult
from executor.served_engine import ServedRolloutEngine, ServerLost
from executor.wire import WorkerSpec
from executor.worker import one_line
from marlaas.errors import InputError, MarlaasError

_CONNECT_S = 10.0
_SHOWN_CHARACTERS = 300


class Refused(MarlaasError):
    """The server's answer to a request that it does not carry out."""


def reach_server(spec: WorkerSpec) -> ServedRolloutEngine:
    """Connect to this replica's server, empty it, and prove that it serves adapters."""
    model, replicas = spec.experiment.model, spec.experiment.cluster.replicas
    base = read_facts(model.path, model.lora)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)

    async def reach() -> OpenaiServer:
        server = OpenaiServer(replicas.urls[spec.index], base.eos_token_ids)
        await server.empty(base.longest(replicas.kv_tokens))
        await probe(server, base, model.path)
        return server

    return ServedRolloutEngine(loop, loop.run_until_complete(reach()), base, replicas)


class OpenaiServer:
    """Serves turns through `/v1/completions`; must be made on a running loop."""

    def __init__(self, url: str, eos_token_ids: tuple[int, ...]) -> None:
        self._url = url.rstrip("/")
        self._eos_token_ids = list(eos_token_ids)
        self._base_name = ""
        self._fingerprints: dict[str, str] = {}
        key = os.environ.get("VLLM_API_KEY")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            # A turn takes as long as it takes; the scheduler has deadlines and aborts what is late.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    async def empty(self, longest: int) -> None:
        """Learn the base's name and unload what an earlier run or worker left; refuse a server too small."""
        models = (await self._ask("GET", "/v1/models"))["data"]
        base = next(model for model in models if not model.get("parent"))
        self._base_name = base["id"]
        if base.get("max_model_len", longest) < longest:
            problem = f"{self._url} reads at most {base['max_model_len']} tokens"
            wanted = f"start it with --max-model-len {longest}, or lower kv_tokens"
            raise InputError("cluster.replicas.urls", problem, wanted)
        for model in models:
            if model.get("parent"):
                await self._ask("POST", "/v1/unload_lora_adapter", lora_name=model["id"])

    async def load(self, name: str, folder: str, fingerprint: str) -> None:
        """Have the server read and hold an adapter's folder."""
        await self._change("/v1/load_lora_adapter", lora_name=name, lora_path=folder)
        self._fingerprints[name] = fingerprint

    async def unload(self, name: str) -> None:
        """Have the server forget an adapter."""
        del self._fingerprints[name]
        await self._change("/v1/unload_lora_adapter", lora_name=name)

    async def sample(self, name: str | None, request: TurnRequest) -> TurnResult:
        """Sample one turn; cancelling it closes the connection."""
        # The server may have served other weights under this name and path before: the salt keeps KV apart.
        salt = {} if name is None else {"cache_salt": self._fingerprints[name]}
        answer = await self._ask(
            "POST",
            "/v1/completions",
            model=name or self._base_name,
            prompt=request.context,
            max_tokens=request.max_new_tokens,
            temperature=request.temperature,
            seed=request.seed & (2**63 - 1),
            stop_token_ids=self._eos_token_ids,
            ignore_eos=True,  # the end tokens are ours to name
            logprobs=0,
            return_token_ids=True,
            return_tokens_as_token_ids=True,
            skip_special_tokens=False,
            **salt,
        )
        choice = answer["choices"][0]
        return TurnResult(tokens=choice["token_ids"], logprobs=choice["logprobs"]["token_logprobs"])

    async def _change(self, path: str, **body: Any) -> None:
        try:
            await self._ask("POST", path, **body)
        except Refused as refused:
            raise AdapterProblem(str(refused)) from refused

    async def _ask(self, method: str, path: str, **body: Any) -> Any:
        """The server's answer; raises `Refused` for one that is no success, `ServerLost` for none."""
        try:
            async with self._session.request(method, self._url + path, json=body or None) as answer:
                if answer.status != 200:
                    text = " ".join((await answer.text()).split())[:_SHOWN_CHARACTERS]
                    await self._require_health()
                    raise Refused(f"{self._url}{path} answered {answer.status}: {text}")
                is_json = answer.content_type == "application/json"
                return await answer.json() if is_json else await answer.text()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
            raise ServerLost(f"the server at {self._url} is gone: {one_line(error)}") from error

    async def _require_health(self) -> None:
        """A failure of the whole server answers each request with an error too."""
        async with self._session.get(self._url + "/health") as answer:
            if answer.status != 200:
                raise ServerLost(f"the server at {self._url} is not well: /health answers {answer.status}")
