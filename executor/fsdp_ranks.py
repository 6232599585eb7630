"""Ranks of one lane: a base model sharded among them, samples dealt to them, gradients added up.

    parameters of the base      sharded (FSDP2): gathered layer by layer, forwards and backwards
    parameters of the adapter   replicated: about a hundredth, sharding them would save nothing and would
                                change how they are clipped, updated and saved

Each rank runs the trainer of one device on its share of the samples; the loss is divided by the whole batch's
number of tokens, so that gradients and sums only have to be added. Owns the collectives; knows no process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from executor.adapters import AdapterProblem
from executor.base_model import BaseModel
from executor.devices import DEVICES
from executor.grpo import MicroBatch, Sums, cut, padded
from executor.policy import LoraPolicy
from executor.protocols import Sample

T = TypeVar("T")


def join(rank: int, num_ranks: int, port: int, device: torch.device, timeout_s: float) -> None:
    """Meet the other ranks of this machine at rank 0's port. Tensors on the CPU go through gloo."""
    collectives = DEVICES[device.type].collectives
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{collectives}"
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_s),
    )


def shard(base: BaseModel, device: torch.device) -> BaseModel:
    """Keep of a base model in the CPU's memory this rank's part alone, on its device.

    Must come before adapter modules are laid in: what is there now is sharded, what comes later is not.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers = set(base.model._no_split_modules or ())
    for module in list(base.model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh)
    fully_shard(base.model, mesh=mesh)
    return base._replace(device=device)


class JoinedRanks:
    """A trainer's peers, once joined. A failure that is not agreed upon leaves them out of step for good."""

    order_failures: tuple[type[Exception], ...] = (AdapterProblem,)

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num = rank, num_ranks
        self.is_first = rank == 0

    def share(
        self, samples: Sequence[Sample], advantage: dict[int, float], budget_tokens: int, device: torch.device
    ) -> Iterator[tuple[MicroBatch, float]]:
        """Samples dealt by falling length, so that ranks have equal work; every forward is a collective."""
        ordered = sorted(samples, key=lambda sample: (-len(sample.tokens), sample.trajectory))
        shares = [cut(ordered[rank :: self._num], budget_tokens) for rank in range(self._num)]
        own = shares[self._rank]
        for rows in own:
            yield padded(rows, advantage, device), 1.0
        for _ in range(max(map(len, shares)) - len(own)):
            yield padded(ordered[-1:], advantage, device), 0.0

    def total(self, policy: LoraPolicy, sums: Sums, has_gradients: bool) -> Sums:
        """Add up gradients, in place and to the same bits on every rank, and sums."""
        if has_gradients:
            gradients = [p.grad for p in policy.parameters.values() if p.grad is not None]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.reduce(flat, 0)
            dist.broadcast(flat, 0)  # and not all_reduce, which need not give every rank the same bits
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        whole = torch.tensor(sums, dtype=torch.float64)
        dist.reduce(whole, 0)
        dist.broadcast(whole, 0)
        return Sums(*whole.tolist())

    def agreed(self, work: Callable[[], T]) -> T:
        """Do work that may fail on one rank; raises `AdapterProblem` on all if it does."""
        try:
            result, problem = work(), None
        except (AdapterProblem, OSError) as error:
            problem = error
        has_failed = torch.tensor(int(problem is not None))
        dist.all_reduce(has_failed, dist.ReduceOp.MAX)
        if problem is not None or has_failed:
            raise AdapterProblem(str(problem or "another rank of this lane failed; see the lane's log"))
        return result
