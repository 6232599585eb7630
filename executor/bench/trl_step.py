"""TRL's GRPO step over a given batch. Needs TRL (`pip install 'marlaas[bench]'`); imported when called."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from executor.bench.adapters import LORA, TINY_BASE
from executor.bench.clock import WorkClock
from executor.bench.training import SAMPLES_PER_GROUP, TRAINING
from executor.grpo import advantages
from executor.protocols import Sample


def update_s(
    samples: Sequence[Sample], folder: Path, num_updates: int, samples_at_a_time: int
) -> list[float]:
    """Seconds of each of several updates by `GRPOTrainer.train()`, the first of them to warm up."""
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, PrinterCallback, TrainerCallback

    # Imported so that types are the same whether they are installed or not.
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")

    class GivenBatch(trl.GRPOTrainer):  # type: ignore[misc, name-defined]
        """Does not generate: its batch is the one given."""

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            return _inputs(samples)

    class Stopwatch(TrainerCallback):
        """Takes the time of each update."""

        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.clock = WorkClock()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(self.clock.now())

    stopwatch = Stopwatch()
    trainer = GivenBatch(
        model=AutoModelForCausalLM.from_pretrained(TINY_BASE, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=samples_at_a_time,
            gradient_accumulation_steps=len(samples) // samples_at_a_time,
            num_generations=SAMPLES_PER_GROUP,
            max_steps=num_updates,
            beta=0.0,
            loss_type="dapo",
            learning_rate=TRAINING.lr,
            max_grad_norm=TRAINING.max_grad_norm,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * len(samples)}),
        processing_class=_tokenizer(),
        peft_config=LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules="all-linear"),
        callbacks=[stopwatch],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return stopwatch.seconds


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer = tokenizer(tokenizer_file=str(TINY_BASE / "tokenizer.json"))
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(2)
    return tokenizer


def _inputs(samples: Sequence[Sample]) -> dict[str, Any]:
    """The batch as TRL's own generation hands it over: prompts padded to the left, answers to the right."""
    begins = [sample.sampled.index(True) for sample in samples]
    prompts = [sample.tokens[:begin] for sample, begin in zip(samples, begins, strict=True)]
    answers = [sample.tokens[begin:] for sample, begin in zip(samples, begins, strict=True)]
    wide, long = max(map(len, prompts)), max(map(len, answers))
    advantage = advantages(samples)
    return {
        "prompt_ids": torch.tensor([[2] * (wide - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (wide - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": torch.tensor([a + [2] * (long - len(a)) for a in answers]),
        "completion_mask": torch.tensor([[1] * len(a) + [0] * (long - len(a)) for a in answers]),
        "advantages": torch.tensor([advantage[sample.trajectory] for sample in samples]),
        "num_items_in_batch": torch.tensor(sum(map(len, answers))),
    }
