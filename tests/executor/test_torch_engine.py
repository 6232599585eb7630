"""The torch rollout engine: what it samples, with which weights, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_base import LORA, VOCABULARY, Replica, peft_model, random_weights, tiny_base, turn

from executor.adapters import fingerprint, lora_modules, write_adapter
from executor.base_model import load_base
from executor.protocols import AdapterFolder, TurnRequest, TurnResult
from executor.torch_engine import TorchRolloutEngine
from executor.torch_sampling import sample, uniform
from marlaas.commands import AbortTurns, LoadAdapter, UnloadAdapter
from marlaas.errors import InputError
from marlaas.events import (
    AdapterLoaded,
    AdapterUnloaded,
    CommandFailed,
    EngineMeasured,
    TurnGenerated,
    TurnsAborted,
)
from marlaas.spec import ReplicasSpec


def contexts(num: int, shortest: int = 3) -> list[list[int]]:
    """Contexts of different lengths and content."""
    return [[(7 * i + 3 * j) % VOCABULARY for j in range(shortest + i % 5)] for i in range(num)]


def logprobs_by_peft(model: Any, adapter: str, context: list[int], result: TurnResult) -> torch.Tensor:
    """The sampled tokens' log-probabilities by one plain forward pass over the whole sequence."""
    model.set_adapter(adapter)
    with torch.inference_mode():
        logits = model(torch.tensor([context + result.tokens])).logits[0, len(context) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(result.tokens).unsqueeze(1)).squeeze(1)


def test_mixed_adapters_sample_what_peft_says_whatever_joins_and_leaves_meanwhile(tmp_path: Path) -> None:
    """Log-probabilities equal those of a plain PeftModel for each turn's own adapter, within 1e-5."""
    replica = Replica(tmp_path, slots=4)
    folders = {f"t{i}": replica.load(f"t{i}", i, seed=i).folder for i in range(3)}
    asked: dict[tuple[int, int], tuple[str, TurnRequest]] = {}

    def ask(task: str, version: int, num: int, offset: int) -> None:
        requests = [
            turn(i, context, 1 + (5 * i + offset) % 17) for i, context in enumerate(contexts(num, 2 + offset))
        ]
        command = replica.generate(task, version, requests)
        asked.update({(command, r.trajectory): (task, r) for r in requests})

    ask("t0", 0, 6, 0)
    ask("t1", 1, 5, 1)
    for _ in range(4):
        replica.step()
    ask("t2", 2, 4, 2)
    replica.step()
    ask("t0", 0, 3, 3)
    replica.run()
    model, turns = peft_model(folders), replica.turns()
    assert turns.keys() == asked.keys()
    for key, (event, result) in turns.items():
        task, wanted = asked[key]
        assert (event.task, f"t{event.version}") == (task, task)
        assert event.prompt_tokens == len(wanted.context)
        assert event.output_tokens == len(result.tokens) == len(result.logprobs) == wanted.max_new_tokens
        expected = logprobs_by_peft(model, task, wanted.context, result)
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-5, rtol=0)


def test_greedy_turns_are_the_argmax_of_their_own_adapter(tmp_path: Path) -> None:
    """At temperature 0 the same context continues differently under two versions, each as PEFT would."""
    replica = Replica(tmp_path)
    folders = {f"v{v}": replica.load("t", v, seed=v).folder for v in (0, 1)}
    commands = [
        replica.generate("t", v, [turn(0, [1, 2, 3], 12, temperature=0.0), turn(1, [5], 9)]) for v in (0, 1)
    ]
    replica.run()
    model = peft_model(folders)
    told = [replica.turns()[command, 0][1].tokens for command in commands]
    for name, tokens in zip(folders, told, strict=True):
        model.set_adapter(name)
        sequence = [1, 2, 3]
        with torch.inference_mode():
            for _ in range(12):
                sequence.append(int(model(torch.tensor([sequence])).logits[0, -1].argmax()))
        assert tokens == sequence[3:]
    assert told[0] != told[1]


def test_a_sample_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    """A turn alone, and the same turn among forty others of other adapters, sample the same to the bit."""
    alone, crowded = (Replica(tmp_path / name, batch_invariant=True) for name in ("a", "b"))
    for replica in (alone, crowded):
        replica.load("t", 0, seed=1)
        replica.load("u", 0, seed=2)
    wanted = turn(0, [4, 9, 11], 40, seed=2**63 + 5)
    first = alone.generate("t", 0, [wanted])
    crowded.generate("u", 0, [turn(i, c, 5 + i) for i, c in enumerate(contexts(40))])
    crowded.step()
    second = crowded.generate("t", 0, [wanted])
    alone.run()
    crowded.run()
    assert alone.turns()[first, 0][1] == crowded.turns()[second, 0][1]


def test_samples_of_one_prompt_share_its_prefill_but_not_their_luck(tmp_path: Path) -> None:
    """Eight samples of one context cost one read and come out different; log-probabilities are right."""
    replica = Replica(tmp_path, batch_invariant=False)  # no padding in what is counted
    folder = replica.load("t", 0, seed=1).folder
    command = replica.generate("t", 0, [turn(i, [1, 2, 3, 4], 10) for i in range(8)])
    read: list[int] = []
    base = replica.engine._base.model
    base.get_input_embeddings().register_forward_hook(lambda _m, inputs, _o: read.append(inputs[0].numel()))
    replica.run()
    assert read == [4] + [8] * 9
    results = [replica.turns()[command, i][1] for i in range(8)]
    assert len({tuple(result.tokens) for result in results}) > 4
    model = peft_model({"t": folder})
    for result in results:
        expected = logprobs_by_peft(model, "t", [1, 2, 3, 4], result)
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, atol=1e-5, rtol=0)


def test_a_turn_ends_with_the_end_token_and_keeps_it(tmp_path: Path) -> None:
    """An end token ends a turn early and is part of what was sampled."""
    eos = tuple(range(0, VOCABULARY, 4))
    replica = Replica(tmp_path, eos=eos)
    replica.load("t", 0, seed=1)
    replica.generate("t", 0, [turn(i, c, 30) for i, c in enumerate(contexts(20))])
    replica.run()
    results = [result for _, result in replica.turns().values()]
    assert len(results) == 20
    assert all(not set(result.tokens[:-1]) & set(eos) for result in results)
    assert all(result.tokens[-1] in eos or len(result.tokens) == 30 for result in results)
    assert any(len(result.tokens) < 30 for result in results)


def test_rows_are_bounded_and_waiting_turns_join_first_come_first_served(tmp_path: Path) -> None:
    """With two rows, turns of equal length finish in order of arrival and never more than two run."""
    replica = Replica(tmp_path, max_num_seqs=2)
    replica.load("t", 0, seed=1)
    replica.generate("t", 0, [turn(i, [1, i], 3) for i in range(6)])
    ended = []
    while replica.engine.is_busy():
        ended += [event.trajectory for event in replica.step() if isinstance(event, TurnGenerated)]
        assert len(replica.engine._batch.turns) <= 2
    assert ended == list(range(6))


def test_kv_tokens_are_never_exceeded_and_the_oldest_turn_always_progresses(tmp_path: Path) -> None:
    """Turns join only while all running ones could grow to their limits; all end, big ones too."""
    replica = Replica(tmp_path, kv_tokens=40)
    replica.load("t", 0, seed=1)
    sizes = [30, 4, 35, 4, 4, 30]
    replica.generate("t", 0, [turn(i, [1, 2, i], size) for i, size in enumerate(sizes)])
    events = []
    while replica.engine.is_busy():
        events += replica.step()
        assert sum(turn.num_tokens for turn in replica.engine._batch.turns) <= 40
    ended = [event.trajectory for event in events if isinstance(event, TurnGenerated)]
    assert sorted(ended) == list(range(6))
    assert ended.index(2) < ended.index(5)


@pytest.mark.parametrize(
    ("context", "num_tokens", "reason"),
    [([1] * 30, 20, "more than the 40"), ([], 5, "not empty"), ([1, VOCABULARY], 5, "below 48")],
)
def test_a_turn_that_can_never_run_fails_alone(
    tmp_path: Path, context: list[int], num_tokens: int, reason: str
) -> None:
    """It fails at once with its trajectory and reason; the others of the order run."""
    replica = Replica(tmp_path, kv_tokens=40)
    replica.load("t", 0, seed=1)
    replica.generate("t", 0, [turn(0, [1], 3), turn(1, context, num_tokens), turn(2, [2], 3)])
    events = replica.run()
    (failed,) = (event for event in events if isinstance(event, CommandFailed))
    assert failed.trajectory == 1
    assert reason in failed.reason
    assert {e.trajectory for e in events if isinstance(e, TurnGenerated)} == {0, 2}


def test_an_absent_adapter_is_refused_never_replaced_by_the_base(tmp_path: Path) -> None:
    """A Generate for a version that is not resident fails for each trajectory and samples nothing."""
    replica = Replica(tmp_path)
    replica.load("t", 0, seed=1)
    replica.generate("t", 1, [turn(i, [1], 3) for i in range(2)])
    events = [event for event in replica.run() if not isinstance(event, AdapterLoaded)]
    assert [(type(e), e.trajectory) for e in events] == [(CommandFailed, 0), (CommandFailed, 1)]
    assert all("t-v1 is not resident" in event.reason for event in events)


def test_slots_are_bounded_and_running_adapters_are_not_unloaded(tmp_path: Path) -> None:
    """Loading beyond the slots and unloading under running turns fail; after the turns both work."""
    replica = Replica(tmp_path, slots=1)
    replica.load("t", 0, seed=1)
    replica.load("u", 0, seed=2)
    replica.generate("t", 0, [turn(0, [1], 4)])
    replica.order(UnloadAdapter, task="t", version=0)
    loaded, full, busy = replica.step()
    assert isinstance(loaded, AdapterLoaded)
    assert isinstance(full, CommandFailed)
    assert "all 1 slots" in full.reason
    assert isinstance(busy, CommandFailed)
    assert "running turns" in busy.reason
    replica.run()
    replica.order(UnloadAdapter, task="t", version=0)
    replica.load("u", 0, seed=2)
    assert [type(event) for event in replica.run()] == [AdapterUnloaded, AdapterLoaded]


def test_a_load_proves_the_weights_it_holds(tmp_path: Path) -> None:
    """The fingerprint reported is of the slot's tensors, neighbours untouched; a repeat gives it again."""
    replica = Replica(tmp_path, slots=3)
    wanted = [replica.load(f"t{i}", i, seed=i).fingerprint for i in range(3)]
    replica.load("t1", 1, seed=1)
    events = replica.run()
    assert [event.fingerprint for event in events] == [*wanted, wanted[1]]
    assert [fingerprint(replica.engine._slots.held(slot)) for slot in range(3)] == wanted


def broken_adapters(tmp_path: Path) -> dict[str, AdapterFolder]:
    """Adapter folders that must not be loaded, by what the refusal says."""
    good = random_weights(1)
    renamed = {name.replace("q_proj", "query"): tensor for name, tensor in good.items()}
    wild = {name: tensor.clone() for name, tensor in good.items()}
    next(iter(wild.values()))[0, 0] = float("nan")
    found = {"has fingerprint": AdapterFolder(folder=str(tmp_path / "good"), fingerprint="of another")}
    write_adapter(tmp_path / "good", good, LORA, tiny_base())
    for text, weights in {"24 of 28 tensors match": renamed, "holds NaN": wild}.items():
        write_adapter(tmp_path / text, weights, LORA, tiny_base())
        found[text] = AdapterFolder(folder=str(tmp_path / text), fingerprint=fingerprint(weights))
    write_adapter(tmp_path / "torn", good, LORA, tiny_base())
    file = tmp_path / "torn" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    found["damaged"] = AdapterFolder(folder=str(tmp_path / "torn"), fingerprint=fingerprint(good))
    found["cannot be read"] = AdapterFolder(folder=str(tmp_path / "absent"), fingerprint=fingerprint(good))
    return found


def test_adapters_that_are_not_what_was_published_are_refused_and_take_no_slot(tmp_path: Path) -> None:
    """Wrong weights, wrong modules, NaN, a torn file, no folder: each says so, and the slot stays free."""
    replica = Replica(tmp_path / "replica", slots=1)
    for text, payload in broken_adapters(tmp_path).items():
        replica.order(LoadAdapter, payload, task="t", version=0)
        (failed,) = replica.run()
        assert isinstance(failed, CommandFailed)
        assert text in failed.reason
    replica.load("t", 0, seed=1)
    assert isinstance(replica.run()[0], AdapterLoaded)


def test_aborted_turns_leave_at_once_and_the_others_are_not_disturbed(tmp_path: Path) -> None:
    """Running and waiting turns of one order are removed; the rest sample what they would have anyway."""
    plain, aborting = (Replica(tmp_path / name, max_num_seqs=6) for name in ("a", "b"))
    for replica in (plain, aborting):
        replica.load("t", 0, seed=1)
        replica.generate("t", 0, [turn(i, c, 12 + i) for i, c in enumerate(contexts(4))])
        replica.generate("t", 0, [turn(i, c, 9) for i, c in enumerate(contexts(4, 4))])
        replica.step()
        replica.step()
    aborting.order(AbortTurns, generate=2, trajectories=(0, 2))
    aborting.order(AbortTurns, generate=3, trajectories=(3,))
    events = [*aborting.step(), *aborting.run()]
    assert [type(event) for event in events[:2]] == [TurnsAborted, TurnsAborted]
    plain.run()
    left = aborting.turns()
    assert plain.turns().keys() - left.keys() == {(2, 0), (2, 2), (3, 3)}
    assert all(plain.turns()[key][1].tokens == result.tokens for key, (_, result) in left.items())


def test_a_tenant_whose_weights_overflow_fails_alone(tmp_path: Path) -> None:
    """Finite weights so large that logits are not numbers fail their own turns only."""
    replica = Replica(tmp_path)
    replica.load("good", 0, seed=1)
    weights = {name: tensor.sign() * 3e38 for name, tensor in random_weights(2).items()}
    write_adapter(tmp_path / "wild", weights, LORA, tiny_base())
    payload = AdapterFolder(folder=str(tmp_path / "wild"), fingerprint=fingerprint(weights))
    replica.order(LoadAdapter, payload, task="wild", version=0)
    replica.generate("wild", 0, [turn(i, [i], 5) for i in range(3)])
    good = replica.generate("good", 0, [turn(i, [i], 8) for i in range(3)])
    events = replica.run()
    assert [e.reason for e in events if isinstance(e, CommandFailed)] == [
        "the model's output is not finite"
    ] * 3
    calm = Replica(tmp_path / "calm")
    calm.load("good", 0, seed=1)
    alone = calm.generate("good", 0, [turn(i, [i], 8) for i in range(3)])
    calm.run()
    for i in range(3):
        assert replica.turns()[good, i][1].tokens == calm.turns()[alone, i][1].tokens


def test_counters_add_up_to_the_work_done(tmp_path: Path) -> None:
    """Windows sum to the iterations, sequences, KV tokens, adapters and prefills that really happened."""
    replica = Replica(tmp_path)
    replica.load("t", 0, seed=1)
    replica.load("u", 0, seed=2)
    replica.generate("t", 0, [turn(0, [1, 2, 3], 4), turn(1, [1, 2], 2)])
    replica.generate("u", 0, [turn(0, [9], 3)])
    windows = [event for event in replica.run() if isinstance(event, EngineMeasured)]
    totals = {
        name: sum(getattr(window, name) for window in windows)
        for name in EngineMeasured.__struct_fields__
        if name.endswith("_sum") or name.startswith("num_") or name == "prefill_tokens"
    }
    # The first token comes with the prefill; three iterations have 3, 2, 1 rows of 4+3+2, 5+3, 6 tokens.
    assert totals == {
        "num_iterations": 3,
        "sequences_sum": 6,
        "kv_tokens_sum": 23,
        "adapters_sum": 2 + 2 + 1,
        "num_prefills": 1,
        "prefill_tokens": 6,
    }
    assert 0 < sum(w.prefill_ns for w in windows) < sum(w.busy_ns for w in windows)


def test_counters_are_reported_about_four_times_a_second_of_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long busy spell is reported in windows, not only at its end."""
    replica = Replica(tmp_path)
    replica.load("t", 0, seed=1)
    replica.run()
    monkeypatch.setattr("executor.engine_window.FULL_NS", 1)
    replica.generate("t", 0, [turn(0, [1], 6)])
    windows = [event for event in replica.run() if isinstance(event, EngineMeasured)]
    assert [window.num_iterations for window in windows] == [1] * 5


def test_the_stream_of_a_seed_is_even_and_unlike_its_neighbours() -> None:
    """Uniform numbers have the right mean, spread and no correlation between seeds or indices."""
    seeds = torch.arange(200).repeat_interleave(200)
    numbers = uniform(seeds, torch.arange(200).repeat(200)).view(200, 200).double()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    assert abs(numbers.var() - 1 / 12) < 0.003
    flat = numbers - numbers.mean()
    for neighbour in (
        flat.roll(1, 0),
        flat.roll(1, 1),
        flat.roll((1, 1), (0, 1)),
        flat.roll((1, -1), (0, 1)),
    ):
        assert abs((flat * neighbour).mean() * 12) < 0.02
    assert len(set(numbers.flatten().tolist())) > 39_900
    step = 0x9E3779B97F4A7C15 - (1 << 64)
    here, shifted = uniform(torch.tensor([0, step]), torch.tensor([1, 0]))
    assert here != shifted


def test_sampling_follows_the_tempered_distribution_and_reports_the_plain_one() -> None:
    """Over many seeds tokens come as softmax(logits / T) says; impossible tokens never."""
    num = 20_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf"), 0.5])
    for temperature in (1.0, 0.5, 2.0):
        tokens, logprobs = sample(
            logits.expand(num, -1),
            torch.full((num,), temperature),
            torch.arange(num),
            torch.zeros(num).long(),
        )
        shares = torch.bincount(tokens, minlength=6) / num
        torch.testing.assert_close(shares, torch.softmax(logits / temperature, 0), atol=0.012, rtol=0)
        torch.testing.assert_close(logprobs, torch.log_softmax(logits, 0)[tokens])


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj"), r".*layers\.[1]\..*(k|v)_proj"])
def test_the_modules_adapted_are_those_peft_adapts(targets: str | tuple[str, ...]) -> None:
    """Every way of naming targets selects the same modules as PEFT's own rules."""
    from peft import LoraConfig, LoraModel
    from transformers import AutoModelForCausalLM

    base = load_base(tiny_base(), "float32", torch.device("cpu"))
    ours = set(lora_modules(base.model, targets))
    config = LoraConfig(r=2, target_modules=targets if isinstance(targets, str) else list(targets))
    theirs = LoraModel(AutoModelForCausalLM.from_pretrained(tiny_base()), {"default": config}, "default")
    assert ours == set(theirs.targeted_module_names)


def test_a_missing_model_or_device_is_the_users_mistake(tmp_path: Path) -> None:
    """The message names the key of the YAML and what is wanted."""
    with pytest.raises(InputError, match=r"model\.path"):
        TorchRolloutEngine("replica-0", str(tmp_path), ReplicasSpec(), LORA)
    if not torch.accelerator.is_available():
        with pytest.raises(InputError, match="no npu device here"):
            TorchRolloutEngine("replica-0", tiny_base(), ReplicasSpec(device="npu"), LORA)
