"""Messages between the driver and a worker process, and their frames on the pipes between them.

A frame is an 8-byte big-endian length and a pickle. Both ends are ours and the pipes are private to one
machine, so pickle is safe here; nothing read from a file or a network passes through this module.
Knows nothing of what the messages mean.
"""

from __future__ import annotations

import pickle
import struct
from typing import IO, Literal

import msgspec

from executor.protocols import Order, Report
from marlaas.spec import Experiment

HEAD = struct.Struct(">Q")


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker process needs to become a worker; the first message it is sent.

    `engine` names a function `package.module:function` that is called with this spec inside the worker
    and returns its `RolloutEngine` or `TrainingEngine`. `index` counts workers of one kind from 0;
    it may compute with as many threads as there are `cores`, and if `is_pinned` on these cores alone.
    """

    name: str
    kind: Literal["replica", "lane"]
    index: int
    engine: str
    experiment: Experiment
    cores: tuple[int, ...]
    is_pinned: bool = True


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The engine is built and takes orders."""

    pid: int


class Crashed(msgspec.Struct, frozen=True, kw_only=True):
    """The worker ends itself; `reason` is its exception in one line."""

    reason: str


Message = WorkerSpec | Order | Hello | list[Report] | Crashed


def pack(message: Message) -> bytes:
    """The frame of a message."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEAD.pack(len(body)) + body


def unpack(body: bytes) -> Message:
    """The message of a frame's body."""
    message: Message = pickle.loads(body)
    return message


def read(stream: IO[bytes]) -> Message:
    """Block for the next message; raises `EOFError` when the other end is gone."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        raise EOFError
    (length,) = HEAD.unpack(head)
    body = stream.read(length)
    if len(body) < length:
        raise EOFError
    return unpack(body)
