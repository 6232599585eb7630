"""What a model folder says about itself, without its weights: for engines that leave loading them to others.

Owns what may be asked of a turn and what an adapter of this base must look like. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from executor.adapters import adapter_shapes, fingerprint, lora_modules, read_adapter
from executor.protocols import TurnRequest
from marlaas.errors import InputError
from marlaas.spec import LoraSpec


class BaseFacts(NamedTuple):
    """Of a base model: its vocabulary, its longest sequence, its end tokens, the tensors of an adapter.

    `kv_numbers_per_token` is over all layers; `max_positions` None means that it does not say.
    """

    vocab_size: int
    max_positions: int | None
    eos_token_ids: tuple[int, ...]
    lora: LoraSpec
    shapes: Mapping[str, tuple[int, ...]]
    kv_numbers_per_token: int

    def longest(self, kv_tokens: int) -> int:
        """The tokens a turn may ever reach, its context included, on a replica with this KV pool."""
        return min(kv_tokens, self.max_positions or kv_tokens)

    def refusal(self, request: TurnRequest, kv_tokens: int) -> str:
        """Why a turn can never run on a replica with this KV pool, or nothing."""
        most, num_tokens = self.longest(kv_tokens), len(request.context) + request.max_new_tokens
        if num_tokens > most:
            return (
                f"can reach {num_tokens} tokens, more than the {most} this engine can ever hold for one turn"
            )
        if not request.context or min(request.context) < 0 or max(request.context) >= self.vocab_size:
            return f"the context must be token ids below {self.vocab_size}, and not empty"
        return ""

    def fingerprint_of(self, folder: str) -> str:
        """The fingerprint of an adapter's weights; raises `AdapterProblem` for one that does not fit."""
        return fingerprint(read_adapter(Path(folder), self.lora, self.shapes))


def read_facts(folder: str, lora: LoraSpec) -> BaseFacts:
    """Read a Hugging Face causal LM folder, never a hub; raises `InputError` where there is none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (Path(folder) / "config.json").is_file():
        raise InputError("model.path", f"no model at {folder}", "a Hugging Face folder with config.json")
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):  # the modules without their weights
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    limit = getattr(config, "max_position_embeddings", None)
    return BaseFacts(
        vocab_size=int(model.get_input_embeddings().weight.shape[0]),
        max_positions=None if limit is None else int(limit),
        eos_token_ids=_eos_token_ids(folder, config),
        lora=lora,
        shapes=adapter_shapes(lora_modules(model, lora.targets), lora.rank),
        kv_numbers_per_token=_kv_numbers(config),
    )


def _eos_token_ids(folder: str, config: Any) -> tuple[int, ...]:
    """The end tokens of the generation settings, else of the configuration."""
    from transformers import GenerationConfig

    settings = [config]
    if (Path(folder) / "generation_config.json").is_file():
        settings.insert(0, GenerationConfig.from_pretrained(folder, local_files_only=True))
    declared = [getattr(each, "eos_token_id", None) for each in settings]
    ids: Any = next((each for each in declared if each is not None), [])
    return tuple(ids) if isinstance(ids, list) else (int(ids),)


def _kv_numbers(config: Any) -> int:
    """Keys and values of a token over all layers; latent attention needs fewer."""
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return int(2 * config.num_hidden_layers * kv_heads * head_dim)
