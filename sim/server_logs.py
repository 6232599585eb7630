"""Logs of a real inference server: what it was asked for, what it counted each second, and how it did.

    NAME.meta.json   engine arguments, when the counters began     NAME.cfg.json   hardware
    NAME.ts.csv      counters of each second                       NAME.jsonl      requests, one a line

This is the layout of the vLLM runs that LLMServingSim publishes. Requests as they were asked for and what was
measured of them are kept apart, so that a fit can be given the one without the other. Owns the reading.
"""

from __future__ import annotations

import csv
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from marlaas.errors import InputError
from sim.counters import Second
from sim.hardware import library_names, load_device, load_model
from sim.memory import kv_pool
from sim.replica_setup import ReplicaSetup, Rollout
from sim.requests import Request
from sim.rules import EngineRules
from sim.strict_yaml import nearest

T = TypeVar("T")
META, COUNTERS, HARDWARE, REQUESTS = ".meta.json", ".ts.csv", ".cfg.json", ".jsonl"
# The first version of vLLM whose asynchronous scheduling is on unless switched off.
PLANS_AHEAD_SINCE = (0, 14)
NOTHING = Second(prompt_tokens=0, generated_tokens=0, running=0, waiting=0)

Positive = Annotated[int, msgspec.Meta(ge=1)]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """How a request did, in seconds since the counters began."""

    queued_s: float
    first_s: float
    last_s: float


class ServerLog(msgspec.Struct, frozen=True, kw_only=True):
    """One server's run: its setup and rules, requests by arrival, counted seconds, what was measured."""

    name: str
    setup: ReplicaSetup
    rules: EngineRules
    plans_ahead: bool
    requests: list[Request]
    seconds: list[Second]
    measured: list[Measured]


# --- the files' own terms; keys that are not used are left alone -----------------------------------------


class _EngineArguments(msgspec.Struct):
    tensor_parallel_size: Positive
    max_num_seqs: Positive
    max_num_batched_tokens: Positive


class _Meta(msgspec.Struct):
    model: str
    vllm_version: Annotated[str, msgspec.Meta(pattern=r"^\d+\.\d+")]
    engine_kwargs: _EngineArguments
    started_at: datetime
    tick_seconds: float


class _Instance(msgspec.Struct):
    hardware: str


class _Node(msgspec.Struct):
    instances: list[_Instance]


class _Cluster(msgspec.Struct):
    nodes: list[_Node]


class _Line(msgspec.Struct):
    input_toks: Positive
    output_toks: Positive
    arrival_time: float
    queued_ts: float
    first_token_ts: float
    last_token_ts: float


def log_names(folder: Path) -> list[str]:
    """The runs that a folder has; raises `InputError` when there is none."""
    names = sorted(path.name.removesuffix(META) for path in folder.glob(f"*{META}"))
    if not names:
        raise InputError(str(folder), f"no *{META} in it", "name a folder of a server's logs")
    return names


def read_log(folder: Path, name: str) -> ServerLog:
    """Read a run; raises `InputError` for what is missing, malformed or not in the library."""
    meta = _read(folder / f"{name}{META}", _Meta)
    if meta.tick_seconds != 1.0:
        problem = f"counters of {meta.tick_seconds:g} s"
        raise InputError(f"{folder / name}{META}: tick_seconds", problem, "wanted one-second counters")
    arguments = meta.engine_kwargs
    setup = ReplicaSetup(
        device=load_device(_device(folder / f"{name}{HARDWARE}")),
        model=load_model(meta.model.rpartition("/")[2].lower()),
        tensor_parallel=arguments.tensor_parallel_size,
        rollout=Rollout(max_batched_tokens=arguments.max_num_batched_tokens),
        slots=0,
        max_num_seqs=arguments.max_num_seqs,
    )
    rules = EngineRules(
        max_num_seqs=arguments.max_num_seqs,
        kv_tokens=int(kv_pool(setup).value),
        prefill="mixed",
        max_prefill_tokens=arguments.max_num_batched_tokens,
    )
    requests, measured = _requests(folder / f"{name}{REQUESTS}", meta.started_at.timestamp())
    return ServerLog(
        name=name,
        setup=setup,
        rules=rules,
        plans_ahead=tuple(map(int, meta.vllm_version.split(".")[:2])) >= PLANS_AHEAD_SINCE,
        requests=requests,
        seconds=_seconds(folder / f"{name}{COUNTERS}"),
        measured=measured,
    )


def _device(path: Path) -> str:
    """The library's name of the hardware, which files write without hyphens."""
    hardware = [instance.hardware for node in _read(path, _Cluster).nodes for instance in node.instances]
    known = {name.replace("-", ""): name for name in library_names("devices")}
    name = ", ".join(hardware).lower()
    if name not in known:
        raise InputError(
            str(path), f"hardware {name or 'none'}", f"one instance; {nearest(name, list(known))}"
        )
    return known[name]


def _requests(path: Path, began: float) -> tuple[list[Request], list[Measured]]:
    """Requests and what was measured of them, by arrival.

    Arrivals are on the clock of the day and all else on the engine's own. Both are laid so that the quickest
    way into the engine's queue took no time.
    """
    lines = sorted(_lines(path), key=lambda line: line.arrival_time)
    offset = max(line.arrival_time - line.queued_ts for line in lines) - began
    requests = [
        Request(
            arrival_ns=round((line.arrival_time - began) * 1e9),
            prompt_tokens=line.input_toks,
            output_tokens=line.output_toks,
        )
        for line in lines
    ]
    if requests[0].arrival_ns < 0:
        raise InputError(str(path), "a request arrived before the counters began", "see started_at")
    measured = [
        Measured(
            queued_s=line.queued_ts + offset,
            first_s=line.first_token_ts + offset,
            last_s=line.last_token_ts + offset,
        )
        for line in lines
    ]
    return requests, measured


def _lines(path: Path) -> list[_Line]:
    lines = []
    for number, text in enumerate(_text(path).splitlines(), 1):
        if text.strip():
            lines.append(_decoded(text, _Line, f"{path}:{number}"))
    if not lines:
        raise InputError(str(path), "no request", "wanted a line per request")
    return lines


def _seconds(path: Path) -> list[Second]:
    """The rows of the counters; a second in which nothing was logged has none and counted nothing."""
    seconds: list[Second] = []
    for number, row in enumerate(csv.DictReader(_text(path).splitlines()), 2):
        try:
            until = round(float(row["t"]))
            second = Second(
                prompt_tokens=round(float(row["prompt_throughput"])),
                generated_tokens=round(float(row["gen_throughput"])),
                running=int(row["running"]),
                waiting=int(row["waiting"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            wanted = "wanted t, prompt_throughput, gen_throughput, running, waiting as numbers"
            raise InputError(f"{path}:{number}", f"not a row of counters ({error})", wanted) from None
        if until <= len(seconds):
            raise InputError(f"{path}:{number}", f"time {until} again", "wanted rows in order of time")
        while len(seconds) < until - 1:
            last = seconds[-1] if seconds else NOTHING
            seconds.append(msgspec.structs.replace(last, prompt_tokens=0, generated_tokens=0))
        seconds.append(second)
    return seconds


def _read(path: Path, kind: type[T]) -> T:
    return _decoded(_text(path), kind, str(path))


def _decoded(text: str, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise InputError(where, str(error), "wanted a server's log as its program wrote it") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InputError(str(path), f"cannot be read ({problem})", "name a server's logs") from None
