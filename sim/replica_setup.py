"""How a replica is set up on its devices: the choices that its costs and its memory depend on.

Owns the words for these choices; what they cost is `roofline`'s, what fits is `memory`'s.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from marlaas.errors import InputError
from marlaas.spec import Count, Natural, Spec
from sim.hardware import Device, Mode, Model
from sim.profile import Quantity

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Rollout(Spec, frozen=True, kw_only=True):
    """What a profile says of its rollout engines.

    Without `tensor_parallel` a replica's devices are split by tensor, but for the pipeline's stages. A
    measured `kv_blocks`, of 16 tokens, takes the place of the arithmetic of memory; `other_bytes` is what the
    engine holds beside weights, activations, slots and KV. `added_tokens` an adapter may add to the
    vocabulary: 256 in vLLM before 0.12, none since. `adapters_from` is where published adapters are read.
    """

    tensor_parallel: Count | None = None
    pipeline_parallel: Count = 1
    mode: Mode = "graph"
    max_batched_tokens: Count = 8192
    memory_utilisation: Share = 0.9
    other_bytes: Quantity | None = None
    kv_blocks: Count | None = None
    added_tokens: Natural = 0
    adapters_from: Literal["host", "disk"] = "disk"


class ReplicaSetup(msgspec.Struct, frozen=True, kw_only=True):
    """One replica: a model on so many devices, and the adapters it can hold."""

    device: Device
    model: Model
    tensor_parallel: int = 1
    rollout: Rollout = Rollout()
    rank: int = 16
    targets: str | tuple[str, ...] = "all-linear"
    slots: int = 8
    max_num_seqs: int = 256

    @property
    def num_devices(self) -> int:
        """Devices of the replica."""
        return self.tensor_parallel * self.rollout.pipeline_parallel

    def check(self) -> None:
        """Raise `InputError` when the model cannot be split so."""
        where = "hardware.rollout.tensor_parallel"
        for what, number in (("attention heads", self.model.heads), ("MLP columns", self.model.intermediate)):
            if number % self.tensor_parallel:
                problem = (
                    f"{number} {what} of {self.model.name} are not split evenly by {self.tensor_parallel}"
                )
                raise InputError(where, problem, "wanted a divisor, such as a power of two")
        if self.rollout.pipeline_parallel > self.model.layers:
            problem = f"{self.model.layers} layers cannot fill {self.rollout.pipeline_parallel} stages"
            raise InputError("hardware.rollout.pipeline_parallel", problem, "wanted fewer stages")
