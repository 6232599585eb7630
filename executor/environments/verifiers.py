"""`verifiers`: an installed environment of the library of that name, played turn by turn.

The library has its own loop, which asks a client for each turn of the model. Here the client waits for the
turn that the executor samples, so that prompts, tools, states and sandboxes are the library's own
business:

    step(turns) ──turn──► client ──► the environment's rollout ──► next prompt, or the end and its reward

A rollout is kept between the turns of its trajectory. One that is gone, after a retry or a restart, is
played again from its turns: the answers of such environments must depend on nothing else. Knows the
classic interface of verifiers (`load_environment`, `rollout`, `rubric.score_rollout`), versions 0.1.14 to
0.3.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from executor.environments.packages import require
from executor.environments.problems import Observation, Problem, Role, Tool
from executor.environments.split import given_split, split
from executor.environments.tool_calls import Said, parse
from marlaas.errors import InputError, MarlaasError
from marlaas.spec import VerifiersEnvironment

KEPT_ROLLOUTS = 2_048
Key = tuple[int, tuple[str, ...]]
"""A problem's seed and the turns so far."""


class Verifiers:
    """Problems, answers and rewards of an environment of the library verifiers."""

    def __init__(self, spec: VerifiersEnvironment, where: str) -> None:
        self._library: Any = require("verifiers", where, "verifiers")
        try:
            self._environment = self._library.load_environment(spec.environment, **spec.args)
        except Exception as error:  # noqa: BLE001 - the user's to mend, whatever it is
            problem = f"{spec.environment!r} cannot be loaded ({error})"
            raise InputError(
                where, problem, "install the environment, and give it the args it takes"
            ) from None
        if self._environment.rubric.has_group_rewards:
            problem = f"{spec.environment!r} rewards samples by comparing them"
            raise InputError(where, problem, "wanted a rubric that scores each sample alone")
        self._split = self._rows(where)
        self._kept: OrderedDict[Key, list[_Rollout]] = OrderedDict()
        self._num_kept = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def problem(self, seed: int) -> Problem:
        """Each row of the dataset is equally likely; the end of its prompt is what the user says."""
        row = self._split.draw(seed)
        system = "\n\n".join(text for role, text in _texts(row["prompt"]) if role == "system")
        said = [text for role, text in _texts(row["prompt"]) if role != "system"]
        tools = self._environment.tool_defs or ()
        return Problem(
            prompt="\n\n".join(said),
            solution=(),  # a right answer is known, not how it is to be written
            seed=seed,
            system=system,
            tools=tuple(_tool(tool) for tool in tools),
        )

    async def step(self, problem: Problem, turns: Sequence[str]) -> Observation:
        """What the environment answers to the last turn, or the rubric's reward."""
        self._join_loop()
        said = [parse(turn) if problem.tools else Said() for turn in turns]
        if said[-1].errors and not said[-1].calls:
            return Observation(done=False, text=f"error: {said[-1].errors[0]}", role="tool")
        heard = [(t, s) for t, s in zip(turns, said, strict=True) if s.calls or not s.errors]
        rollout = await self._resume(problem.seed, heard[:-1])
        try:
            observation = await rollout.say(*heard[-1])
        except BaseException:
            rollout.cancel()
            raise
        if not observation.done:
            self._keep((problem.seed, tuple(turn for turn, _ in heard)), rollout)
        return observation

    async def close(self) -> None:
        """Give up every rollout and let the environment clean up."""
        rollouts = [rollout for kept in self._kept.values() for rollout in kept]
        self._kept.clear()
        self._num_kept = 0
        for rollout in rollouts:
            rollout.cancel()
        await asyncio.gather(*(rollout.task for rollout in rollouts), return_exceptions=True)
        await self._environment._teardown()

    def _rows(self, where: str) -> Any:
        environment, where = self._environment, f"{where}.environment"
        rows = list(environment.get_dataset())
        if environment.build_eval_dataset() is None:
            return split(rows, _identity, where)
        return given_split(rows, list(environment.get_eval_dataset()), _identity, where)

    # --- rollouts under way ---

    def _join_loop(self) -> None:
        """Rollouts are tasks of the event loop that began them."""
        if asyncio.get_running_loop() is not self._loop:
            self._kept.clear()
            self._num_kept = 0
            self._loop = asyncio.get_running_loop()

    async def _resume(self, seed: int, heard: Sequence[tuple[str, Said]]) -> _Rollout:
        kept = self._kept.get((seed, tuple(turn for turn, _ in heard)))
        if kept:
            self._num_kept -= 1
            return kept.pop()
        rollout = _Rollout(self._library, self._environment, self._split.draw(seed))
        await rollout.begin()
        for turn, said in heard:
            if (await rollout.say(turn, said)).done:
                raise MarlaasError("the environment ended earlier than when it was first asked")
        return rollout

    def _keep(self, key: Key, rollout: _Rollout) -> None:
        self._kept.setdefault(key, []).append(rollout)
        self._kept.move_to_end(key)
        self._num_kept += 1
        while self._num_kept > KEPT_ROLLOUTS:  # dropped trajectories leave theirs behind
            oldest, rollouts = next(iter(self._kept.items()))
            if rollouts:
                rollouts.pop().cancel()
                self._num_kept -= 1
            else:
                del self._kept[oldest]


class _Rollout:
    """One rollout of the library; its client hands prompts out and turns in."""

    def __init__(self, library: Any, environment: Any, row: dict[str, Any]) -> None:
        self._library, self._environment, self._row = library, environment, row
        self._prompts: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._turns: asyncio.Queue[Any] = asyncio.Queue()
        self._context: list[tuple[str, str]] = []

    async def begin(self) -> None:
        """Start it and wait until it asks for the first turn."""
        client = _client(self._library, self._prompts, self._turns)
        row = dict(self._row)
        self.task: asyncio.Task[Any] = asyncio.create_task(
            self._environment.rollout(row, client, "policy", {})
        )
        prompt = await self._next_prompt()
        self._context = _texts(self._row["prompt"])
        if prompt is None or _texts(prompt) != self._context:
            raise MarlaasError("the environment begins with another prompt than its dataset's")

    async def say(self, turn: str, said: Said) -> Observation:
        """Hand in a turn; wait for what follows it, or for the end and the reward."""
        message = _message(turn, said)
        self._turns.put_nowait(message)
        prompt = await self._next_prompt()
        if prompt is None:
            return Observation(done=True, reward=await self._reward())
        texts = _texts(prompt)
        num_before = len(self._context)
        if texts[:num_before] != self._context or len(texts) <= num_before:
            raise MarlaasError("the environment rewrites the conversation, which cannot be followed here")
        self._context = texts
        new = texts[num_before + 1 :]
        role: Role = "tool" if new and all(each == "tool" for each, _ in new) else "user"
        return Observation(done=False, text="\n\n".join(text for _, text in new), role=role)

    def cancel(self) -> None:
        """Give it up; the environment cleans up after it."""
        self.task.cancel()

    async def _next_prompt(self) -> list[Any] | None:
        asked = asyncio.create_task(self._prompts.get())
        try:
            await asyncio.wait({asked, self.task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not asked.done():
                asked.cancel()
        if asked.done() and not asked.cancelled():
            return asked.result()
        self.task.result()  # raises what the rollout raised
        return None

    async def _reward(self) -> float:
        state = self.task.result()
        error = state.get("error")
        if isinstance(error, self._library.InfraError | self._library.ModelError):
            raise MarlaasError(f"the environment failed: {error!r}")
        await self._environment.rubric.score_rollout(state)
        await self._environment.rubric.cleanup(state)
        return float(state["reward"])


def _client(library: Any, prompts: asyncio.Queue[list[Any]], turns: asyncio.Queue[Any]) -> Any:
    """A client of the library whose model is whoever puts turns into the queue."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    async def get_response(prompt: list[Any], *_: Any, **__: Any) -> Any:
        prompts.put_nowait(prompt)
        content, calls = await turns.get()
        called = [ToolCall(id=f"call-{i}", name=name, arguments=text) for i, (name, text) in enumerate(calls)]
        message = ResponseMessage(
            content=content,
            tool_calls=called or None,
            finish_reason="tool_calls" if called else "stop",
            is_truncated=False,
        )
        return Response(id=uuid.uuid4().hex, created=0, model="policy", message=message)

    unused = dict.fromkeys(Client.__abstractmethods__, _unused)
    kind = type("Awaiting", (Client,), {**unused, "get_response": staticmethod(get_response)})
    return kind(None)


async def _unused(*_: Any, **__: Any) -> None:
    raise NotImplementedError("turns are sampled elsewhere")


def _message(turn: str, said: Said) -> tuple[str, list[tuple[str, str]]]:
    """A turn as text and calls, arguments as JSON."""
    calls = [(call.name, json.dumps(call.arguments)) for call in said.calls]
    return turn.partition("<tool_call>")[0].strip() if calls else turn, calls


def _texts(messages: Any) -> list[tuple[str, str]]:
    """Roles and texts of messages, as the dataset has them or as the library's own objects."""
    if isinstance(messages, str):
        return [("user", messages)]
    return [(str(_of(message, "role")), _text(_of(message, "content"))) for message in messages]


def _of(message: Any, key: str) -> Any:
    return message.get(key) if isinstance(message, dict) else getattr(message, key, None)


def _text(content: Any) -> str:
    """The text of a message; parts that are no text, such as pictures, cannot be shown and are named."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_of(part, "text") or f"[{_of(part, 'type')}]" for part in content]
    return "\n".join(parts)


def _tool(tool: Any) -> Tool:
    return Tool(name=tool.name, description=tool.description, parameters=dict(tool.parameters))


def _identity(row: dict[str, Any]) -> str:
    """What tells problems apart: the prompt with its right answer."""
    return msgspec.json.encode([_texts(row["prompt"]), str(row.get("answer", ""))]).decode()
