"""HCCL's place taken by gloo: collectives of the stand-in NPUs, on copies in the host's memory.

torch_npu registers `hccl` with torch.distributed; so does this, for tensors of `npu`. Nothing here is
asynchronous: what a collective returns has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def register() -> None:
    """Let `init_process_group` know the backend."""
    dist.Backend.register_backend("hccl", _make, devices=["npu"])


def _make(store: Any, rank: int, size: int, timeout: Any) -> CopyingGroup:
    return CopyingGroup(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout))


class Done:
    """A collective that has ended before anybody could wait for it."""

    def wait(self, timeout: Any = None) -> bool:
        """At once."""
        return True


class CopyingGroup(dist.ProcessGroup):
    """A process group whose tensors may be on any device; each collective runs on the CPU."""

    def __init__(self, rank: int, size: int, gloo: Any) -> None:
        super().__init__(rank, size)
        self._gloo, self._name = gloo, ""

    @property
    def group_name(self) -> str:
        """The name it is registered by."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch's name
        """What it stands for."""
        return "hccl"

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Done:
        """In place."""
        return self._in_place(tensors, lambda host: self._gloo.allreduce(host, options))

    def reduce(self, tensors: list[torch.Tensor], options: Any) -> Done:
        """In place on the root."""
        return self._in_place(tensors, lambda host: self._gloo.reduce(host, options))

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Done:
        """In place on all but the root."""
        return self._in_place(tensors, lambda host: self._gloo.broadcast(host, options))

    def _allgather_base(self, output: torch.Tensor, part: torch.Tensor, options: Any = None) -> Done:
        host = output.cpu()
        self._gloo._allgather_base(host, part.cpu()).wait()
        output.copy_(host)
        return Done()

    all_gather_single = _allgather_base  # its name from torch 2.13 on

    def barrier(self, options: Any = None) -> Done:
        """All are here."""
        self._gloo.barrier().wait()
        return Done()

    def _in_place(self, tensors: list[torch.Tensor], run: Callable[[list[torch.Tensor]], Any]) -> Done:
        host = [tensor.cpu() for tensor in tensors]
        run(host).wait()
        for tensor, new in zip(tensors, host, strict=True):
            tensor.copy_(new)
        return Done()
