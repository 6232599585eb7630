"""The embedded rollout engine (skeleton: signatures first)."""

from __future__ import annotations

from executor.protocols import Order, Report
from marlaas.spec import LoraSpec, ReplicasSpec


class TorchRolloutEngine:
    """Serves many adapters at once over one frozen Hugging Face causal LM; a `RolloutEngine`.

    `eos_token_ids` None means those of the model folder's configuration.
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
        raise NotImplementedError

    def start(self, order: Order) -> None:
        """Take a LoadAdapter, UnloadAdapter, Generate or AbortTurns order."""
        raise NotImplementedError

    def step(self) -> list[Report]:
        """Run one iteration of the batch, if any; return everything that ended."""
        raise NotImplementedError

    def is_busy(self) -> bool:
        """Whether `step` has something to do."""
        raise NotImplementedError
