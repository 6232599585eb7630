"""Adapters that say one token and nothing else, on a base made for them, and a lane that knows whose it was.

The base reads a 1 in the first coordinate of every token. An adapter multiplies that into its own token's
direction by the last layer's gate, up and down projections, so strongly that no other token has any chance.
Every (task, version) has its own token: what a replica sampled proves which weights it sampled with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import printable

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from executor.adapters import fingerprint, tensor_name, write_adapter
from executor.base_facts import read_facts
from executor.protocols import NewAdapter, NextVersion, Order, Report, TrainingBatch
from executor.wire import WorkerSpec
from marlaas.commands import CreateAdapter, Publish, Train
from marlaas.events import (
    AdapterCreated,
    AdapterPublished,
    CommandFailed,
    Event,
    TrainingFinished,
    TrainingStats,
)
from marlaas.spec import LoraSpec

LORA = LoraSpec(rank=8, alpha=8)
NUM_TASKS, NUM_VERSIONS = 12, 7
CHARACTERS = ["<unk>", *sorted(set(printable))]
VOCABULARY = len(CHARACTERS) + NUM_TASKS * NUM_VERSIONS
_WIDTH, _LAYERS = 192, 2
_GAIN = 40.0
_LOUDNESS = 5.0  # logits of a watermark are this times the square root of the width, others near zero


def mark(task: str, version: int) -> int:
    """The token of this version of `task-<number>`."""
    return len(CHARACTERS) + int(task.split("-")[1]) * NUM_VERSIONS + version


def write_base(folder: Path) -> str:
    """The base and a tokenizer of single characters; returns the folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=_WIDTH,
        intermediate_size=64,
        num_hidden_layers=_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        embeddings = torch.zeros(VOCABULARY, _WIDTH)
        embeddings[:, 0] = 1
        embeddings[:, 1 : 1 + VOCABULARY] = _LOUDNESS * torch.eye(VOCABULARY)
        model.get_input_embeddings().weight.copy_(embeddings)
    model.save_pretrained(folder)
    words = [*CHARACTERS, *(f"<mark-{i}>" for i in range(VOCABULARY - len(CHARACTERS)))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def adapter(shapes: Mapping[str, tuple[int, ...]], task: str, version: int) -> dict[str, Tensor]:
    """The tensors, of these shapes, of the adapter that says `mark(task, version)`."""
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    last = f"model.layers.{_LAYERS - 1}.mlp"
    for part in ("gate_proj", "up_proj"):  # both are `_GAIN` in the first of their outputs, whatever was read
        tensors[tensor_name(f"{last}.{part}", "A")][0, 0] = 1
        tensors[tensor_name(f"{last}.{part}", "B")][0, 0] = _GAIN
    tensors[tensor_name(f"{last}.down_proj", "A")][0, 0] = 1
    tensors[tensor_name(f"{last}.down_proj", "B")][1 + mark(task, version), 0] = _GAIN
    return tensors


class WatermarkLane:
    """A training engine that writes these adapters and refuses samples of any token but the due one."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._model = spec.experiment.model.path
        self._shapes = read_facts(self._model, LORA).shapes

    def run(self, order: Order) -> Report:
        match order:
            case Order(command=CreateAdapter() as command, payload=NewAdapter() as place):
                held = self._write(place, command.task, 0)
                return Report(event=AdapterCreated(at=0, command=command.id, fingerprint=held))
            case Order(command=Train() as command, payload=TrainingBatch() as batch):
                return Report(event=_train(command, batch))
            case Order(command=Publish() as command, payload=NextVersion() as place):
                held = self._write(place, command.task, command.version)
                return Report(event=AdapterPublished(at=0, command=command.id, fingerprint=held))
        raise NotImplementedError(order)

    def _write(self, place: NewAdapter | NextVersion, task: str, version: int) -> str:
        tensors = adapter(self._shapes, task, version)
        write_adapter(Path(place.adapter_folder), tensors, LORA, self._model)
        return fingerprint(tensors)


def _train(command: Train, batch: TrainingBatch) -> Event:
    due = mark(command.task, command.version)
    made = {t for s in batch.samples for t, own in zip(s.tokens, s.sampled, strict=True) if own}
    if made != {due}:
        return CommandFailed(at=0, command=command.id, reason=f"made of tokens {sorted(made)}, not {due}")
    stats = TrainingStats(num_tokens=sum(sum(sample.sampled) for sample in batch.samples))
    return TrainingFinished(at=0, command=command.id, stats=stats)
