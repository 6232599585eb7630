"""The tiny base: small, ordinary, of middling skill as its card says, and made again by one command."""

import asyncio
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from executor import pretrain
from executor.environments import held_out_seed
from executor.tokenizer import character_tokenizer

BASE = Path(pretrain.__file__).parent / "models" / "tiny-base"
CARD = (BASE / "README.md").read_text(encoding="utf-8")


def _skills(folder: Path, num_problems: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seeds = [held_out_seed(1, "test", index) for index in range(num_problems)]
    return pretrain.skills_of(model, AutoTokenizer.from_pretrained(folder), seeds)


def test_shipped_folder_is_small_and_ordinary() -> None:
    """The folder stays under 8 MB and holds a Qwen3 of 0.8M to 3M parameters over its tokenizer's tokens."""
    model = AutoModelForCausalLM.from_pretrained(BASE)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    assert sum(file.stat().st_size for file in BASE.iterdir()) < 8_000_000
    assert model.config.model_type == "qwen3"
    assert 800_000 <= model.num_parameters() <= 3_000_000
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.slow
def test_shipped_base_has_the_middling_skill_its_card_states() -> None:
    """At temperature 1 it solves 20 to 50 % of each kind of problem, as its card says within noise."""
    stated = {name: float(share) for name, share in re.findall(r"\| `(\w+)` \| ([\d.]+) \|", CARD)}
    measured = _skills(BASE, 1024)
    assert stated.keys() == measured.keys()
    for name, skill in measured.items():
        assert 0.2 <= skill <= 0.5
        assert skill == pytest.approx(stated[name], abs=0.07)  # 3.3 standard errors of the difference


def test_card_names_the_command_that_remakes_it() -> None:
    """The card gives the licence and a command whose options exist."""
    assert "license: apache-2.0" in CARD
    assert re.search(
        r"python -m executor\.pretrain --out executor/models/tiny-base --seed \d+ --skill [\d.]+", CARD
    )


def test_command_writes_a_folder_that_loads_and_is_the_same_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command makes a loadable folder with a card; the seed alone decides the weights."""
    monkeypatch.setattr(pretrain, "CARD_PROBLEMS", 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    weights = []
    for index, seed in enumerate(("3", "3", "4")):
        out = tmp_path / str(index)
        monkeypatch.setattr(sys, "argv", ["pretrain", "--out", str(out), "--seed", seed, "--steps", "2"])
        pretrain.main()
        weights.append((out / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]
    assert _skills(tmp_path / "0", 4).keys() == pretrain.ENVIRONMENTS.keys()
    assert "| `lookup` | 0.00 | 0.00 |" in (tmp_path / "0" / "README.md").read_text(encoding="utf-8")


def test_only_the_models_own_tokens_are_learned() -> None:
    """Labels cover exactly the model's turns and their end tokens; prompt and observations are left out."""
    tokenizer = character_tokenizer()
    pieces = [("place of x:", False), ("?x", True), ("x red oslo:", False), ("oslo", True), ("", False)]
    tokens, labels = pretrain.encode(pieces, tokenizer)
    assert tokenizer.decode(tokens) == "place of x:?x<eos>x red oslo:oslo<eos>"
    learned = [label for label in labels if label != pretrain.IGNORED]
    assert tokenizer.decode(learned) == "?x<eos>oslo<eos>"
    assert all(label in (token, pretrain.IGNORED) for token, label in zip(tokens, labels, strict=True))


def test_shares_go_where_skill_is_lacking() -> None:
    """An environment that is taught keeps its few problems; the rest go to the others."""
    skills = {"sums": 0.1, "sort": 0.3, "reverse": 0.5, "lookup": 0.4}
    shares = pretrain.shares_of(skills, 0.3)
    assert {name: shares[name] for name in ("sort", "reverse", "lookup")} == {
        name: pretrain.KEEP[name] for name in ("sort", "reverse", "lookup")
    }
    assert sum(shares.values()) == pretrain.BATCH
    assert pretrain.shares_of(dict.fromkeys(skills, 1.0), 0.3) == pretrain.KEEP


def test_teaching_raises_the_likelihood_of_right_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps of teaching lower the loss on problems not taught."""
    monkeypatch.setattr(pretrain, "BATCH", 32)
    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    model = pretrain.new_model(tokenizer)
    rows = asyncio.run(pretrain.examples("sort", 5, 999, 32, tokenizer))
    before = pretrain.loss_sum(model, rows, tokenizer.pad_token_id).item()
    pretrain.teach(model, tokenizer, seed=0, steps=10, skill=0.3)
    assert pretrain.loss_sum(model, rows, tokenizer.pad_token_id).item() < 0.9 * before
