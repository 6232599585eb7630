"""The driver's transcripts: contexts, truncation, and which word counts."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from scripted_engines import END, FIRST_MARK, write_model_folder
from scripted_runs import GOOD, ScriptedEnvironment

from executor.environments import Observation, Problem
from executor.protocols import TurnResult
from executor.transcripts import Codec, Transcripts, Unusable
from marlaas.commands import Generate
from marlaas.errors import InputError
from marlaas.spec import TaskSpec

TURN = TurnResult(tokens=[FIRST_MARK, END], logprobs=[-0.5, -0.25])
TASK = TaskSpec(
    name="a",
    environment="env",
    steps=1,
    prompts=2,
    samples=2,
    max_turns=3,
    max_prompt_tokens=4,
    max_observation_tokens=3,
)
KEY = ("a", 0, 3)


@pytest.fixture
def transcripts(tmp_path: Path) -> Transcripts:
    """Transcripts of one task whose environment says `observe` until the third turn."""

    def answer(problem: Problem, turns: Sequence[str]) -> Observation:
        assert problem.prompt == f"p{problem.seed % 100}="
        return GOOD if len(turns) == 3 else Observation(done=False, text="observe")

    codec = Codec(Path(write_model_folder(tmp_path / "model")))
    return Transcripts(5, [TASK], {"env": ScriptedEnvironment(answer)}, codec)


def generate(turn: int, number: int) -> Generate:
    """A Generate of trajectory 3 alone."""
    return Generate(id=number, replica="r", task="a", version=0, step=0, turn=turn, trajectories=(3,))


def play(transcripts: Transcripts, turns: range, first_id: int = 1) -> list[int]:
    """Let trajectory 3 go through these turns; the context of the last."""
    context: list[int] = []
    for turn in turns:
        command = generate(turn, first_id + turn)
        context = transcripts.begin_turn(command, 3)
        transcripts.record_turn(command, 3, TURN)
        answer = asyncio.run(transcripts.ask(KEY, turn))
        transcripts.record_answer(KEY, turn, answer)
    return context


def test_a_context_is_prompt_turns_and_observations_cut_to_the_task(transcripts: Transcripts) -> None:
    """Prompts lose their beginning, observations their end; sampled tokens are kept as they are."""
    prompt = transcripts.begin_turn(generate(0, 1), 3)
    context = play(transcripts, range(2))
    assert len(prompt) <= 4
    assert context[: len(prompt)] == prompt
    assert context[len(prompt) : len(prompt) + 2] == [FIRST_MARK, END]
    assert len(context) == len(prompt) + 2 + 3


def test_a_sample_marks_what_the_policy_sampled(transcripts: Transcripts) -> None:
    """Equal lengths; log-probabilities only on sampled tokens; the group is the prompt."""
    play(transcripts, range(3))
    (sample,) = transcripts.samples("a", 0, [3])
    num_prompt = len(sample.tokens) - 3 * 2 - 2 * 3
    turn, observation = [True, True], [False] * 3
    assert sample.sampled == [False] * num_prompt + turn + observation + turn + observation + turn
    assert [p for p, own in zip(sample.logprobs, sample.sampled, strict=True) if own] == [-0.5, -0.25] * 3
    assert {p for p, own in zip(sample.logprobs, sample.sampled, strict=True) if not own} == {0.0}
    assert (sample.group, sample.reward) == (1, 1.0)


def test_a_turn_tried_again_forgets_the_first_try_and_its_late_answer(transcripts: Transcripts) -> None:
    """The later Generate counts, also when the earlier one's turn comes after all."""
    first, second = generate(0, 1), generate(0, 2)
    transcripts.begin_turn(first, 3)
    transcripts.begin_turn(second, 3)
    late = TurnResult(tokens=[FIRST_MARK + 1, END], logprobs=[-9.0, -9.0])
    transcripts.record_turn(first, 3, late)
    transcripts.record_turn(second, 3, TURN)
    transcripts.record_turn(second, 3, late)  # a duplicate
    assert transcripts.begin_turn(generate(1, 3), 3)[-2:] == TURN.tokens


def test_an_unfinished_or_dropped_trajectory_never_becomes_a_sample(transcripts: Transcripts) -> None:
    """Asking for it is refused; releasing twice is not."""
    play(transcripts, range(2))
    with pytest.raises(Unusable, match="not finished"):
        transcripts.samples("a", 0, [3])
    transcripts.release("a", 0, [3, 4])
    transcripts.record_turn(generate(1, 2), 3, TURN)
    with pytest.raises(Unusable, match="not finished"):
        transcripts.samples("a", 0, [3])
    assert len(transcripts) == 0


def test_a_retried_last_turn_loses_the_reward_of_the_first_try(transcripts: Transcripts) -> None:
    """A reward belongs to the turns it was given for."""
    play(transcripts, range(3))
    transcripts.begin_turn(generate(2, 9), 3)
    with pytest.raises(Unusable, match="not finished"):
        transcripts.samples("a", 0, [3])


@pytest.mark.parametrize("logprobs", [[-0.5], [-0.5, float("nan")], [float("-inf"), -0.5]])
def test_log_probabilities_are_one_finite_number_per_token(
    transcripts: Transcripts, logprobs: list[float]
) -> None:
    """Anything else is refused before it is kept."""
    command = generate(0, 1)
    transcripts.begin_turn(command, 3)
    with pytest.raises(Unusable):
        transcripts.record_turn(command, 3, TurnResult(tokens=TURN.tokens, logprobs=logprobs))


def test_samples_of_one_prompt_share_it_and_prompts_differ(transcripts: Transcripts) -> None:
    """Two samples per prompt: trajectories 0 and 1 are one group."""
    contexts = [transcripts.begin_turn(generate(0, 1), trajectory) for trajectory in range(4)]
    assert contexts[0] == contexts[1]
    assert contexts[2] == contexts[3] != contexts[0]


def test_only_the_end_token_that_closed_a_turn_is_invisible(tmp_path: Path) -> None:
    """A special token inside an answer must not make it right."""
    codec = Codec(Path(write_model_folder(tmp_path)))
    one, two = codec.encode_observation("12", 9)
    assert codec.decode_turn([one, two, END]) == "12"
    assert codec.decode_turn([one, END, two]) == "1<eos>2"
    assert codec.decode_turn([one, two]) == "12"


def test_end_tokens_come_from_the_generation_settings_first(tmp_path: Path) -> None:
    """As the rollout engine reads them; a list means any of them."""
    folder = Path(write_model_folder(tmp_path))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    codec = Codec(folder)
    assert codec.decode_turn([FIRST_MARK, 8]) == "<mark-0>"
    assert codec.decode_turn([FIRST_MARK, END]) == "<mark-0><eos>"


def test_a_folder_without_a_tokenizer_is_the_users_mistake(tmp_path: Path) -> None:
    """Named with its place in the experiment."""
    with pytest.raises(InputError, match=r"model\.path.*tokenizer\.json"):
        Codec(tmp_path)
