"""A random tiny Qwen3 on disk, random adapters for it, and a replica driven by hand."""

import atexit
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from executor.adapters import adapter_shapes, fingerprint, lora_modules, pristine, write_adapter
from executor.base_model import load_base
from executor.protocols import AdapterFolder, Order, Report, TurnRequest, TurnRequests, TurnResult
from executor.torch_engine import TorchRolloutEngine
from marlaas.commands import Generate, LoadAdapter
from marlaas.events import TurnGenerated
from marlaas.spec import LoraSpec, ReplicasSpec

LORA = LoraSpec(rank=4, alpha=12)
VOCABULARY = 48

torch.set_num_threads(1)


def _saved(model: type[Any], config: type[Any], **changes: Any) -> str:
    """The folder of a random model without end tokens; its embeddings are tied."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    shape = {
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 2,
        "initializer_range": 0.15,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    model(config(**shape, **changes)).save_pretrained(folder)
    return folder


@cache
def tiny_base() -> str:
    """Folder of a random Qwen3 of 2 layers; next-token distributions are far from uniform; no end token."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _saved(
        Qwen3ForCausalLM,
        Qwen3Config,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )


@cache
def tiny_llama() -> str:
    """Folder of a random Llama shaped like SmolLM2: 9 query heads share 3 key heads; embeddings are tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _saved(
        LlamaForCausalLM,
        LlamaConfig,
        hidden_size=72,
        intermediate_size=100,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=1024,
    )


@cache
def shapes(lora: LoraSpec = LORA, folder: str = "") -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of an adapter of a base, the tiny one unless said otherwise."""
    base = load_base(folder or tiny_base(), "float32", torch.device("cpu"))
    return adapter_shapes(lora_modules(base.model, lora.targets), lora.rank)


def random_weights(seed: int, lora: LoraSpec = LORA, base: str = "") -> dict[str, torch.Tensor]:
    """An adapter that changes what the base says a good deal."""
    generator = torch.Generator().manual_seed(seed)
    weights = pristine(shapes(lora, base), seed)
    return {
        name: w if w.any() else 0.1 * torch.randn(w.shape, generator=generator) for name, w in weights.items()
    }


def write_random_adapter(folder: Path, seed: int, lora: LoraSpec = LORA, base: str = "") -> AdapterFolder:
    """Write a random adapter to a folder; what `LoadAdapter` needs to know of it."""
    weights = random_weights(seed, lora, base)
    write_adapter(folder, weights, lora, base or tiny_base())
    return AdapterFolder(folder=str(folder), fingerprint=fingerprint(weights))


def peft_model(folders: dict[str, str], base_folder: str = "") -> Any:
    """The reference: a plain PeftModel with these adapters loaded by PEFT itself."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(base_folder or tiny_base())
    (first, folder), *others = folders.items()
    with warnings.catch_warnings():
        # PEFT asks for a property that newer transformers have renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        model = PeftModel.from_pretrained(base, folder, adapter_name=first)
    for name, other in others:
        model.load_adapter(other, adapter_name=name)
    return model.eval()


class Replica:
    """An engine, the orders it was given and all it has reported."""

    def __init__(
        self,
        folder: Path,
        eos: tuple[int, ...] = (),
        dtype: str = "float32",
        lora: LoraSpec = LORA,
        base: str = "",
        **replicas: Any,
    ) -> None:
        spec = ReplicasSpec(**replicas)
        self.lora, self.base = lora, base or tiny_base()
        self.engine = TorchRolloutEngine("replica-0", self.base, spec, lora, dtype=dtype, eos_token_ids=eos)
        self.folder = folder
        self.reports: list[Report] = []
        self._next_id = 0

    def order(self, kind: Any, payload: Any = None, **fields: Any) -> int:
        """Give an order to the engine without stepping it; its command id."""
        self._next_id += 1
        self.engine.start(
            Order(command=kind(id=self._next_id, replica="replica-0", **fields), payload=payload)
        )
        return self._next_id

    def load(self, task: str, version: int, seed: int) -> AdapterFolder:
        """Load a random adapter as this task's version."""
        folder = self.folder / task / f"v{version}"
        payload = write_random_adapter(folder, seed, self.lora, self.base)
        self.order(LoadAdapter, payload, task=task, version=version)
        return payload

    def generate(self, task: str, version: int, requests: Sequence[TurnRequest]) -> int:
        """Ask for these turns; the command id."""
        trajectories = tuple(request.trajectory for request in requests)
        payload = TurnRequests(requests=list(requests))
        return self.order(
            Generate, payload, task=task, version=version, step=0, turn=0, trajectories=trajectories
        )

    def step(self) -> list[Any]:
        """One step of the engine; the events it reported."""
        reports = self.engine.step()
        self.reports += reports
        return [report.event for report in reports]

    def run(self) -> list[Any]:
        """Step until idle; the events reported meanwhile."""
        events = []
        while self.engine.is_busy():
            events += self.step()
        return events

    def turns(self) -> dict[tuple[int, int], tuple[TurnGenerated, TurnResult]]:
        """Everything sampled so far, by command and trajectory."""
        found = {}
        for report in self.reports:
            if isinstance(report.event, TurnGenerated):
                assert report.payload is not None
                found[report.event.command, report.event.trajectory] = (report.event, report.payload)
        return found


def turn(trajectory: int, context: list[int], num_tokens: int, **changes: Any) -> TurnRequest:
    """A turn to sample at temperature 1, its seed its trajectory unless said otherwise."""
    fields = {"temperature": 1.0, "seed": trajectory, **changes}
    return TurnRequest(trajectory=trajectory, context=context, max_new_tokens=num_tokens, **fields)
