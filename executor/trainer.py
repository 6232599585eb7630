"""The embedded training engine (skeleton: signatures first)."""

from __future__ import annotations

from executor.protocols import Order, Report
from marlaas.spec import LanesSpec


class PeftTrainingEngine:
    """Trains one PEFT adapter at a time over one frozen base with GRPO and AdamW; a `TrainingEngine`."""

    def __init__(self, lane: str, model_folder: str, lanes: LanesSpec, *, dtype: str = "float32") -> None:
        raise NotImplementedError

    def run(self, order: Order) -> Report:
        """Carry out a CreateAdapter, Train or Publish order to its end; failures are `CommandFailed`."""
        raise NotImplementedError
