"""Makes the tiny base: a small Qwen3 taught the embedded environments to a middling skill, so RL has room.

    python -m executor.pretrain --out DIR [--seed S] [--steps N] [--skill P]

Owns the model's shape, its supervised training on the turns of perfect players, and its model card. Each
environment's share of a batch follows the skill it still lacks; training ends when a share of `--skill` of
the training problems is solved in each, sampled at temperature 1. Knows no scheduler, adapter or RL.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

from executor.environments import Environment, Problem, build, held_out_seed, out_of_turns, problem_seed
from executor.tokenizer import character_tokenizer
from marlaas.spec import LookupEnvironment, ReverseEnvironment, SortEnvironment, SumsEnvironment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

ENVIRONMENTS: dict[str, Environment] = {
    "sums": build(SumsEnvironment()),
    "sort": build(SortEnvironment()),
    "reverse": build(ReverseEnvironment()),
    "lookup": build(LookupEnvironment()),
}
# Problems per batch that keep a skill once it is taught, and how hard teaching it is beside the others:
# found by trial, so that all four arrive together.
KEEP = {"sums": 4, "sort": 4, "reverse": 4, "lookup": 1}
EFFORT = {"sums": 10.0, "sort": 3.0, "reverse": 1.0, "lookup": 0.5}
BATCH = 128
LEARNING_RATE = 2e-3
WARMUP_STEPS = 50
MEASURE_EVERY = 40
MEASURED_PROBLEMS = 256
CARD_PROBLEMS = 1024
MAX_TURNS = 2
MAX_NEW_TOKENS = 9
IGNORED = -100

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# tiny-base

A Qwen3 of {parameters:,} parameters (4 layers of width 128) over single characters, trained from scratch by

    python -m executor.pretrain --out executor/models/tiny-base --seed {seed} --skill {skill}

on the project's own problems, and stopped early: it solves each kind of problem sometimes, so that
reinforcement learning has something to reward and room to improve. It can do nothing else. The same command
on the same machine and library versions gives the same weights; elsewhere, weights of similar skill.

Problems solved, of {problems} held-out ones of each kind (default settings of the environments):

| environment | sampled at temperature 1 | greedy |
|---|---|---|
{rows}

Licence: Apache-2.0. The training problems are generated; no outside text was used.
"""


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """An untrained Qwen3 of 0.8M parameters over the tokenizer's vocabulary."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Qwen3ForCausalLM(config)


# --- supervised examples -------------------------------------------------------------------------


async def transcript(problem: Problem, environment: Environment) -> list[tuple[str, bool]]:
    """The perfect player's episode as texts; True marks the model's own turns."""
    pieces, turns = [(problem.prompt, False)], list[str]()
    for turn in problem.solution:
        turns.append(turn)
        observation = await environment.step(problem, turns)
        pieces += [(turn, True), (observation.text, False)]
    return pieces


def encode(
    pieces: Sequence[tuple[str, bool]], tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[int]]:
    """Tokens of a transcript, an end token after each of the model's turns, and the labels to learn from."""
    tokens, labels = list[int](), list[int]()
    for text, is_own in pieces:
        new = tokenizer.encode(text) + [tokenizer.eos_token_id] * is_own
        tokens += new
        labels += new if is_own else [IGNORED] * len(new)
    return tokens, labels


async def examples(
    name: str, seed: int, step: int, count: int, tokenizer: PreTrainedTokenizerFast
) -> list[tuple[list[int], list[int]]]:
    """`count` training problems of an environment, solved and encoded."""
    environment = ENVIRONMENTS[name]
    seeds = [problem_seed(seed, f"teach-{name}", step, index) for index in range(count)]
    problems = [environment.problem(each) for each in seeds]
    return [encode(await transcript(problem, environment), tokenizer) for problem in problems]


def loss_sum(model: Qwen3ForCausalLM, rows: Sequence[tuple[list[int], list[int]]], pad: int) -> torch.Tensor:
    """Summed cross-entropy of the model's own tokens; rows are padded on the right, which causality hides."""
    width = max(len(tokens) for tokens, _ in rows)
    tokens = torch.tensor([row + [pad] * (width - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [IGNORED] * (width - len(row)) for _, row in rows])
    logits = model(input_ids=tokens[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")


# --- measuring -----------------------------------------------------------------------------------


@torch.no_grad()
def measure(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    environment: Environment,
    problems: Sequence[Problem],
    *,
    greedy: bool = False,
) -> float:
    """Mean reward over the problems, sampled at temperature 1 or greedily, within `MAX_TURNS` turns."""
    total, live = 0.0, [(problem, tokenizer.encode(problem.prompt), list[str]()) for problem in problems]
    for turn in range(MAX_TURNS):
        outputs = _generate(model, tokenizer, [context for _, context, _ in live], greedy)
        going = []
        for (problem, context, turns), output in zip(live, outputs, strict=True):
            turns.append(
                str(tokenizer.decode([token for token in output if token != tokenizer.eos_token_id]))
            )
            seen = asyncio.run(environment.step(problem, turns))
            seen = out_of_turns(seen) if turn == MAX_TURNS - 1 else seen
            total += seen.reward or 0.0
            if not seen.done:
                going.append((problem, context + output + tokenizer.encode(seen.text), turns))
        live = going
    return total / len(problems)


def _generate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, contexts: Sequence[list[int]], greedy: bool
) -> list[list[int]]:
    """One turn for each context: sampled tokens up to and with the end token."""
    if not contexts:
        return []
    batch = tokenizer.pad({"input_ids": list(contexts)}, return_tensors="pt")
    sampling: dict[str, Any] = {"do_sample": False}
    if not greedy:
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    grown: Any = model.generate(**batch, **sampling, max_new_tokens=MAX_NEW_TOKENS)
    rows: list[list[int]] = grown[:, batch["input_ids"].shape[1] :].tolist()
    end = tokenizer.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def skills_of(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seeds: Sequence[int], *, greedy: bool = False
) -> dict[str, float]:
    """Mean reward in each environment over the problems of these seeds."""
    return {
        name: measure(model, tokenizer, each, [each.problem(seed) for seed in seeds], greedy=greedy)
        for name, each in ENVIRONMENTS.items()
    }


# --- teaching ------------------------------------------------------------------------------------


def teach(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, seed: int, steps: int, skill: float
) -> None:
    """Train until every environment is solved with probability `skill`, at most `steps` steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    shares = shares_of(dict.fromkeys(ENVIRONMENTS, 0.0), skill)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / WARMUP_STEPS)
        for name, share in shares.items():
            rows = asyncio.run(examples(name, seed, step, share, tokenizer))
            (loss_sum(model, rows, tokenizer.pad_token_id) / BATCH).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % MEASURE_EVERY == 0:
            seeds = [problem_seed(seed, "measure", step, index) for index in range(MEASURED_PROBLEMS)]
            skills = skills_of(model, tokenizer, seeds)
            print(f"step {step:5d}", *(f"  {name} {value:.2f}" for name, value in skills.items()), flush=True)
            if min(skills.values()) >= skill:
                return
            shares = shares_of(skills, skill)


def shares_of(skills: dict[str, float], skill: float) -> dict[str, int]:
    """Problems per batch: by the skill lacking and how hard it is to teach, beside a few that keep it."""
    lacking = {name: EFFORT[name] * max(skill - value, 0.0) for name, value in skills.items()}
    total, free = sum(lacking.values()) or 1.0, BATCH - sum(KEEP.values())
    return {name: KEEP[name] + round(free * value / total) for name, value in lacking.items()}


def save(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path, *, seed: int, skill: float
) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load, with a card of measured skills."""
    seeds = [held_out_seed(seed, "card", index) for index in range(CARD_PROBLEMS)]
    sampled, greedy = (skills_of(model, tokenizer, seeds, greedy=greedy) for greedy in (False, True))
    rows = "\n".join(f"| `{name}` | {sampled[name]:.2f} | {greedy[name]:.2f} |" for name in ENVIRONMENTS)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    card = CARD.format(parameters=parameters, seed=seed, skill=skill, problems=CARD_PROBLEMS, rows=rows)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "README.md").write_text(card, encoding="utf-8")
    print(rows)


def main() -> None:
    """Teach, measure on held-out problems, save model, tokenizer and card."""
    parser = argparse.ArgumentParser(description="Make the tiny base model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000, help="at most this many training steps")
    parser.add_argument(
        "--skill", type=float, default=0.3, help="share of problems to solve at temperature 1"
    )
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    tokenizer = character_tokenizer()
    model = new_model(tokenizer)
    teach(model, tokenizer, seed=given.seed, steps=given.steps, skill=given.skill)
    save(model, tokenizer, given.out, seed=given.seed, skill=given.skill)


if __name__ == "__main__":
    main()
