"""The training engine: what an update is, what it refuses, and that nothing is lost or done twice."""

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_base import LORA, VOCABULARY, Replica, peft_model, shapes, tiny_base, tiny_llama, turn

from executor.adapters import fingerprint, read_adapter, read_optimizer
from executor.grpo import MicroBatch, advantages, loss_sum, micro_batches
from executor.protocols import AdapterFolder, NewAdapter, NextVersion, Order, Sample, TrainingBatch
from executor.trainer import PeftTrainingEngine
from marlaas.commands import CreateAdapter, LoadAdapter, Publish, Train, UnloadAdapter
from marlaas.events import AdapterCreated, AdapterPublished, CommandFailed, TrainingFinished, TrainingStats
from marlaas.spec import LanesSpec, LoraSpec, TrainingSpec

TRAINING = TrainingSpec(lr=1e-2, micro_batch_tokens=100)


class Lane:
    """A training engine driven by hand; folders under one run folder."""

    def __init__(self, run: Path, lora: LoraSpec = LORA, dtype: str = "float32", base: str = "") -> None:
        self.engine = PeftTrainingEngine("lane-0", base or tiny_base(), LanesSpec(), dtype=dtype)
        self.run, self.lora = run, lora
        self.next_id = 0

    def folders(self, task: str, version: int) -> dict[str, str]:
        """Where a version lives."""
        return {
            f"{kind}_folder": str(self.run / kind / task / f"v{version}") for kind in ("adapter", "optimizer")
        }

    def order(self, command: Any, payload: Any) -> Any:
        """Carry out an order; the event."""
        return self.engine.run(Order(command=command, payload=payload)).event

    def id(self) -> int:
        """A new command id."""
        self.next_id += 1
        return self.next_id

    def create(self, task: str = "t", seed: int = 7) -> AdapterCreated:
        """Make version 0."""
        payload = NewAdapter(**self.folders(task, 0), lora=self.lora, training=TRAINING, seed=seed)
        event = self.order(CreateAdapter(id=self.id(), lane="lane-0", task=task), payload)
        assert isinstance(event, AdapterCreated), event
        return event

    def train(self, version: int, samples: list[Sample], task: str = "t", **changes: Any) -> Any:
        """Train from a version; the event."""
        number = changes.pop("id", None) or self.id()
        fields: dict[str, Any] = {"training": TRAINING, "temperature": 1.0, "seed": 5, **changes}
        payload = TrainingBatch(samples=samples, **self.folders(task, version) | fields)
        trajectories = tuple(sample.trajectory for sample in samples)
        command = Train(
            id=number, lane="lane-0", task=task, step=version, version=version, trajectories=trajectories
        )
        return self.order(command, payload)

    def publish(self, version: int, task: str = "t") -> Any:
        """Publish a version; the event."""
        payload = NextVersion(**self.folders(task, version), cursor={"step": version})
        return self.order(Publish(id=self.id(), lane="lane-0", task=task, version=version), payload)

    def weights(self, version: int, task: str = "t") -> dict[str, torch.Tensor]:
        """A published version's weights."""
        return read_adapter(Path(self.folders(task, version)["adapter_folder"]), self.lora, shapes(self.lora))

    def files(self, version: int, task: str = "t") -> dict[str, bytes]:
        """Every file of a published version."""
        found = [Path(folder) for folder in self.folders(task, version).values()]
        return {str(f.relative_to(self.run)): f.read_bytes() for folder in found for f in folder.iterdir()}


def samples(seed: int, num: int = 16, reward: float | None = None) -> list[Sample]:
    """Random episodes of two turns in groups of four; a wrong sampler's log-probabilities."""
    chance = random.Random(seed)
    found = []
    for i in range(num):
        sizes = [chance.randint(2, 6), chance.randint(1, 6), chance.randint(1, 3), chance.randint(1, 6)]
        sampled = [kind % 2 == 1 for kind, size in enumerate(sizes) for _ in range(size)]
        found.append(
            Sample(
                trajectory=i,
                group=i // 4,
                tokens=[chance.randrange(VOCABULARY) for _ in sampled],
                sampled=sampled,
                logprobs=[-3 * chance.random() if own else 0.0 for own in sampled],
                reward=chance.choice([0.0, 0.5, 1.0]) if reward is None else reward,
            )
        )
    return found


def plain_steps(folder: str, batches: list[list[Sample]], training: TrainingSpec) -> dict[str, torch.Tensor]:
    """GRPO written plainly: each step all samples in one masked batch, PEFT's model, torch's AdamW."""
    model = peft_model({"default": folder})
    parameters = {n.replace(".default.", "."): p for n, p in model.named_parameters() if "lora_" in n}
    for parameter in parameters.values():
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters.values(), lr=training.lr, weight_decay=training.weight_decay)
    for batch in batches:
        optimizer.zero_grad()
        plain_loss(model, batch, training).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters.values(), training.max_grad_norm)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def plain_loss(model: Any, batch: list[Sample], training: TrainingSpec) -> torch.Tensor:
    """The clipped token-level loss of groups of four, with tensors of the whole batch."""
    longest = max(len(sample.tokens) for sample in batch)

    def padded(rows: list[list[Any]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=dtype)

    tokens = padded([s.tokens for s in batch], torch.int64)
    mask = padded([[1] * len(s.tokens) for s in batch], torch.int64)
    sampled = padded([list(s.sampled) for s in batch], torch.bool)[:, 1:]
    old = padded([s.logprobs for s in batch], torch.float32)[:, 1:]
    rewards = torch.tensor([s.reward for s in batch]).view(-1, 4)
    spread = rewards.std(1, correction=0, keepdim=True)
    advantage = torch.where(spread > 0, (rewards - rewards.mean(1, keepdim=True)) / spread, 0.0).view(-1, 1)
    logits = model(tokens, attention_mask=mask).logits[:, :-1]
    new = torch.log_softmax(logits, -1).gather(2, tokens[:, 1:, None]).squeeze(2)
    ratio = torch.exp(new - old)
    bounded = ratio.clamp(1 - training.clip_low, 1 + training.clip_high)
    return -torch.minimum(ratio * advantage, bounded * advantage)[sampled].mean()


def test_updates_in_micro_batches_equal_plain_steps(tmp_path: Path) -> None:
    """Whatever the micro-batches, two updates give what one masked batch each, PEFT and AdamW give."""
    lane, batches = Lane(tmp_path), [samples(1), samples(2)]
    lane.create()
    training = TrainingSpec(lr=1e-2, weight_decay=0.1, max_grad_norm=0.05, micro_batch_tokens=60)
    for version, batch in enumerate(batches):
        event = lane.train(version, batch, training=training)
        assert isinstance(event, TrainingFinished)
        assert event.stats.num_tokens == sum(len(sample.tokens) for sample in batch)
        lane.publish(version + 1)
    expected = plain_steps(lane.folders("t", 0)["adapter_folder"], batches, training)
    trained = lane.weights(2)
    assert trained.keys() == expected.keys()
    for name, weight in trained.items():
        # Adam divides tiny gradients by their own size, so the last bits of a gradient show.
        torch.testing.assert_close(weight, expected[name], atol=1e-4, rtol=0)
    assert len({fingerprint(lane.weights(version)) for version in range(3)}) == 3


@pytest.mark.parametrize(
    ("dtype", "most", "base"),
    [
        ("float32", 1e-5, tiny_base),
        ("float32", 1e-5, tiny_llama),
        ("bfloat16", 0.05, tiny_base),
        ("float16", 0.01, tiny_base),
    ],
)
def test_on_policy_samples_show_no_gap_and_no_clipping(
    tmp_path: Path, dtype: str, most: float, base: Callable[[], str]
) -> None:
    """What a replica samples with a published version, the trainer finds as likely, up to rounding."""
    lane = Lane(tmp_path, dtype=dtype, base=base())
    lane.create()
    lane.train(0, samples(1))
    published = lane.publish(1)
    replica = Replica(tmp_path / "replica", dtype=dtype, base=base())
    folder = lane.folders("t", 1)["adapter_folder"]
    payload = AdapterFolder(folder=folder, fingerprint=published.fingerprint)
    replica.order(LoadAdapter, payload, task="t", version=1)
    command = replica.generate("t", 1, [turn(i, [1, 2, i // 4], 4 + i) for i in range(16)])
    replica.run()
    batch = []
    for i in range(16):
        result = replica.turns()[command, i][1]
        prompt, num = [1, 2, i // 4], len(result.tokens)
        batch.append(
            Sample(
                trajectory=i,
                group=i // 4,
                tokens=prompt + result.tokens,
                sampled=[False] * 3 + [True] * num,
                logprobs=[0.0] * 3 + result.logprobs,
                reward=float(i % 2),
            )
        )
    stats = lane.train(1, batch).stats
    assert 0 < stats.logprob_gap < most
    assert stats.clip_fraction == 0
    assert abs(stats.kl) < most**2
    assert abs(stats.loss) < 0.5
    assert stats.grad_norm > 0


def test_the_order_in_which_samples_come_changes_no_bit(tmp_path: Path) -> None:
    """An update is a function of the batch as a set, to the last byte of what is published."""
    given, shuffled = Lane(tmp_path / "a"), Lane(tmp_path / "b")
    batch = samples(1)
    for lane, order in ((given, batch), (shuffled, random.Random(3).sample(batch, len(batch)))):
        lane.create()
        assert isinstance(lane.train(0, order), TrainingFinished)
        lane.publish(1)
    assert given.files(1) == shuffled.files(1)


def test_training_resumed_in_a_fresh_process_is_bit_identical(tmp_path: Path) -> None:
    """v1 → v2 from disk by a new engine writes the same files as going on in memory."""
    going_on, resumed = Lane(tmp_path / "a"), Lane(tmp_path / "b")
    for lane in (going_on, resumed):
        lane.create()
        lane.train(0, samples(1))
        lane.publish(1)
    fresh = Lane(tmp_path / "b")
    fresh.create("other")
    fresh.train(0, samples(3), task="other")
    for lane in (going_on, fresh):
        assert isinstance(lane.train(1, samples(2), id=100), TrainingFinished)
        assert isinstance(lane.publish(2), AdapterPublished)
    assert going_on.files(2) == fresh.files(2)
    moments, state = read_optimizer(Path(fresh.folders("t", 2)["optimizer_folder"]))
    assert (state.version, state.num_updates, state.cursor, state.seed) == (2, 2, {"step": 2}, 5)
    assert all(tensor.any() for tensor in moments.values())


def test_neighbours_on_the_lane_change_nothing(tmp_path: Path) -> None:
    """A task trained between others, with another shape even, is bit-identical to the task alone."""
    alone, crowded, other = Lane(tmp_path / "a"), Lane(tmp_path / "b"), LoraSpec(rank=2, targets=("v_proj",))
    created = [lane.create() for lane in (alone, crowded)]
    assert created[0].fingerprint == created[1].fingerprint
    for version in range(2):
        crowded.lora = other
        if version == 0:
            crowded.create("u", seed=1)
        assert isinstance(crowded.train(version, samples(9 + version), task="u"), TrainingFinished)
        crowded.lora = LORA
        for lane in (alone, crowded):
            assert isinstance(lane.train(version, samples(version)), TrainingFinished)
        for lane in (alone, crowded):
            assert isinstance(lane.publish(version + 1), AdapterPublished)
        assert isinstance(crowded.publish(version + 1, task="u"), AdapterPublished)
    assert alone.files(2) == crowded.files(2)
    crowded.lora = other
    assert {name: tuple(w.shape) for name, w in crowded.weights(2, "u").items()} == shapes(other)


def test_an_order_given_twice_is_carried_out_once(tmp_path: Path) -> None:
    """The same Train id again gives the same answer and no second step; so does training v0 afresh."""
    once, twice = Lane(tmp_path / "a"), Lane(tmp_path / "b")
    for lane in (once, twice):
        lane.create()
    first = [lane.train(0, samples(1), id=50) for lane in (once, twice)]
    again = twice.train(0, samples(1), id=50)
    retried = twice.train(0, samples(1), id=51)
    assert first[0] == first[1] == again
    assert retried.stats == again.stats
    for lane in (once, twice):
        lane.publish(1)
    assert once.files(1) == twice.files(1)
    published = twice.engine.run(Order(command=Publish(id=twice.next_id, lane="lane-0", task="t", version=1)))
    assert isinstance(published.event, AdapterPublished)


def test_equal_rewards_commit_a_no_op_and_leave_the_optimizer_alone(tmp_path: Path) -> None:
    """With all advantages zero the version rises, but neither a weight nor a moment changes."""
    lane = Lane(tmp_path)
    lane.create()
    lane.train(0, samples(1))
    lane.publish(1)
    stats = lane.train(1, samples(2, reward=1.0), training=TrainingSpec(weight_decay=0.5)).stats
    assert (stats.updated, stats.loss, stats.grad_norm) == (False, 0.0, 0.0)
    assert stats.logprob_gap > 0
    lane.publish(2)
    assert fingerprint(lane.weights(2)) == fingerprint(lane.weights(1))
    old, new = (read_optimizer(Path(lane.folders("t", v)["optimizer_folder"])) for v in (1, 2))
    assert fingerprint(old[0]) == fingerprint(new[0])
    assert (new[1].version, new[1].num_updates) == (2, 1)


def spoiled(**changes: Any) -> list[Sample]:
    """Samples whose third is changed."""
    batch = samples(1)
    fields = {name: getattr(batch[2], name) for name in Sample.__struct_fields__}
    size = len(batch[2].tokens)
    made = {name: change(size) if callable(change) else change for name, change in changes.items()}
    batch[2] = Sample(**{**fields, **made})
    return batch


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        (spoiled(reward=float("nan")), "trajectory 2: the reward is nan"),
        (spoiled(reward=float("-inf")), "trajectory 2: the reward is -inf"),
        (spoiled(logprobs=lambda n: [0.0] * (n - 1) + [float("nan")]), "log-probability of the sampler"),
        (spoiled(logprobs=lambda n: [-200.0] * n), "not finite"),
        (spoiled(tokens=lambda n: [VOCABULARY] * n), "below 48"),
        (spoiled(sampled=lambda n: [True] * n), "the first one"),
        (spoiled(sampled=lambda n: [False] * n), "no token was sampled"),
        (spoiled(logprobs=[0.0]), "differ in length"),
        ([], "no samples"),
    ],
)
def test_poison_is_refused_with_its_reason_and_changes_nothing(
    tmp_path: Path, batch: list[Sample], reason: str
) -> None:
    """NaN or infinite rewards, log-probabilities, losses and malformed samples fail; good ones then train."""
    plain, lane = Lane(tmp_path / "a"), Lane(tmp_path / "b")
    for each in (plain, lane):
        each.create()
    failed = lane.train(0, batch)
    assert isinstance(failed, CommandFailed)
    assert reason in failed.reason
    assert isinstance(lane.publish(1), CommandFailed)
    for each in (plain, lane):
        each.train(0, samples(3))
        each.publish(1)
    assert plain.files(1) == lane.files(1)


def test_a_task_trains_only_from_the_version_that_was_ordered(tmp_path: Path) -> None:
    """Folders of another version, an unknown version and an untrained publish are refused."""
    lane = Lane(tmp_path)
    lane.create()
    assert "cannot be read" in lane.train(1, samples(1)).reason
    folders = lane.folders("t", 0)
    payload = TrainingBatch(samples=samples(1), **folders, training=TRAINING, temperature=1.0, seed=1)
    wrong = lane.order(Train(id=90, lane="l", task="t", step=3, version=3, trajectories=()), payload)
    assert "is of v0" in wrong.reason
    assert "was not trained here" in lane.publish(1).reason
    lane.create("u", seed=8)
    mixed = TrainingBatch(
        samples=samples(1),
        adapter_folder=folders["adapter_folder"],
        optimizer_folder=lane.folders("u", 0)["optimizer_folder"],
        training=TRAINING,
        temperature=1.0,
        seed=1,
    )
    wrong = lane.order(Train(id=91, lane="l", task="t", step=0, version=0, trajectories=()), mixed)
    assert "with fingerprint" in wrong.reason


def test_memory_does_not_grow_with_tasks(tmp_path: Path) -> None:
    """Forty tasks, half of them cancelled before publishing: live bytes stay those after twenty."""
    lane = Lane(tmp_path, LoraSpec(rank=2, targets=("q_proj",)))

    def live_bytes() -> int:
        gc.collect()
        # Not isinstance: asking some lazy modules for their class makes them warn.
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    held = []
    for number in range(40):
        task = f"t{number}"
        lane.create(task, seed=number)
        assert isinstance(lane.train(0, samples(number, num=4), task=task), TrainingFinished)
        if number % 2:
            assert isinstance(lane.publish(1, task), AdapterPublished)
        if number in (19, 39):
            held.append(live_bytes())
    assert held[1] <= held[0]


def test_advantages_use_real_group_sizes() -> None:
    """Ragged groups are normalised by themselves; a lone or unanimous group has advantage zero."""
    rewards = {0: [1.0, 0.0, 0.0], 1: [1.0], 2: [0.5, 0.5], 3: [2.0, 4.0]}
    batch, number = [], 0
    for group, values in rewards.items():
        for reward in values:
            fields = {"tokens": [1, 2], "sampled": [False, True], "logprobs": [0.0, -1.0]}
            batch.append(Sample(trajectory=number, group=group, reward=reward, **fields))  # type: ignore[arg-type]
            number += 1
    random.Random(1).shuffle(batch)
    found = advantages(batch)
    root = 2**0.5
    assert [found[i] for i in range(8)] == pytest.approx([root, -root / 2, -root / 2, 0, 0, 0, -1, 1])


def test_micro_batches_fit_the_budget_and_hold_every_sample_once() -> None:
    """Padded tokens stay within the budget unless one sample alone exceeds it; padding is not trained on."""
    batch = samples(4, num=40)
    weight = {sample.trajectory: float(sample.trajectory) for sample in batch}
    made = list(micro_batches(batch, weight, 50, torch.device("cpu")))
    assert all(m.tokens.numel() <= 50 for m in made)
    assert sum(len(m.tokens) for m in made) == 40
    seen = sorted((float(a), int(t)) for m in made for a, t in zip(m.advantages, m.targets, strict=True))
    wanted = sorted(
        (float(s.trajectory), token)
        for s in batch
        for token, own in zip(s.tokens, s.sampled, strict=True)
        if own
    )
    assert seen == wanted
    assert [len(m.tokens) for m in micro_batches(batch, weight, 1, torch.device("cpu"))] == [1] * 40


def test_the_loss_is_the_clipped_objective_worked_out_by_hand() -> None:
    """Two tokens with ratios 2 and 1/2: gains are clipped above for praise, kept below for blame."""
    logits = torch.log(torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.5, 0.5], [0.25, 0.75]]))
    batch = MicroBatch(
        tokens=torch.zeros(1, 5).long(),
        first=1,
        sampled=torch.ones(1, 4).bool(),
        targets=torch.zeros(4).long(),
        sampler_logprobs=torch.log(torch.tensor([0.25, 0.5, 0.25, 0.5])),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
    )
    loss, sums = loss_sum(logits, batch, TrainingSpec(clip_low=0.2, clip_high=0.3), temperature=1.0)
    assert float(loss) == pytest.approx(-(1.3 + 0.5 - 2.0 - 0.8))
    assert sums.clipped == 2
    assert sums.gap == pytest.approx(4 * 0.693147)
    assert sums.kl == pytest.approx(2 * (2 - 1 - 0.693147) + 2 * (0.5 - 1 + 0.693147))


def test_stats_of_a_run_are_plain_numbers(tmp_path: Path) -> None:
    """Every field is filled in, so that a trace never lacks one."""
    lane = Lane(tmp_path)
    lane.create()
    stats = lane.train(0, samples(1)).stats
    assert isinstance(stats, TrainingStats)
    assert all(isinstance(getattr(stats, name), bool | int | float) for name in stats.__struct_fields__)


def test_rollouts_and_updates_together_learn(tmp_path: Path) -> None:
    """Rewarded for one token, a policy says it far more often after ten versions, each loaded and proved."""
    lane, replica = Lane(tmp_path), Replica(tmp_path / "replica", slots=1)
    fingerprint_now, shares = lane.create().fingerprint, []
    for version in range(10):
        folder = lane.folders("t", version)["adapter_folder"]
        payload = AdapterFolder(folder=folder, fingerprint=fingerprint_now)
        replica.order(LoadAdapter, payload, task="t", version=version)
        command = replica.generate(
            "t", version, [turn(i, [3, i // 8], 6, seed=1000 * version + i) for i in range(64)]
        )
        replica.run()
        batch = []
        for i in range(64):
            result = replica.turns()[command, i][1]
            batch.append(
                Sample(
                    trajectory=i,
                    group=i // 8,
                    tokens=[3, i // 8, *result.tokens],
                    sampled=[False] * 2 + [True] * 6,
                    logprobs=[0.0] * 2 + result.logprobs,
                    reward=result.tokens.count(5) / 6,
                )
            )
        shares.append(sum(sample.reward for sample in batch) / 64)
        lane.train(version, batch, training=TrainingSpec(lr=1e-2))
        fingerprint_now = lane.publish(version + 1).fingerprint
        replica.order(UnloadAdapter, task="t", version=version)
    assert shares[-1] > shares[0] + 0.3
