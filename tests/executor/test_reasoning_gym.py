"""`reasoning_gym`: any dataset by name, graded by its own scorer."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from executor.environments import Observation, build, close_all, held_out_seed, problem_seed
from executor.environments.answers import MAX_ANSWER, extract, wrap
from marlaas.errors import InputError
from marlaas.spec import AnswerSpec, ReasoningGymEnvironment

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
SUMS = ReasoningGymEnvironment(dataset="chain_sum", config={"min_terms": 2, "max_terms": 2})


def play(spec: ReasoningGymEnvironment, seed: int, *turns: Sequence[str]) -> list[Observation]:
    """What each of several trajectories of one problem earns."""

    async def main() -> list[Observation]:
        environment = build(spec)
        problem = environment.problem(seed)
        seen = [await environment.step(problem, each) for each in turns]
        await close_all([environment])
        return seen

    return asyncio.run(main())


def test_a_problem_depends_on_its_seed_alone() -> None:
    """The same seed poses the same problem in any environment; others pose others."""
    seeds = [problem_seed(1, "t", step, 0) for step in range(40)]
    first, second = build(SUMS), build(SUMS)
    problems = [first.problem(seed) for seed in seeds]
    assert [second.problem(seed) for seed in reversed(seeds)] == problems[::-1]
    assert len({problem.prompt for problem in problems}) > 30
    assert problems[0].prompt.startswith("State the final answer to the following arithmetic problem: ")
    assert "<answer>" in problems[0].system


def test_no_evaluation_problem_occurs_in_training() -> None:
    """Not even in a space so small that different indices pose the same problem."""
    config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    environment = build(ReasoningGymEnvironment(dataset="chain_sum", config=config))
    training = {environment.problem(problem_seed(3, "t", 0, i)).prompt for i in range(400)}
    evaluation = {environment.problem(held_out_seed(3, "t", i)).prompt for i in range(50)}
    assert len(training) > 50
    assert len(evaluation) > 5
    assert not training & evaluation


def test_the_datasets_own_scorer_grades() -> None:
    """A right answer earns 1 wherever it stands, a wrong one nothing, a nearly right one its part."""
    problem = build(SUMS).problem(4)
    (answer,) = problem.solution
    seen = play(
        SUMS,
        4,
        [f"I add.\n<answer> {answer} </answer> Done."],
        [f"<answer>1</answer> no: <answer>{answer}</answer>"],
        [f"It is\n{answer}"],
        [answer],
        ["<answer>none</answer>"],
        [""],
        [f"{answer} or so"],
    )
    assert all(each.done for each in seen)
    rewards = [each.reward or 0.0 for each in seen]
    assert rewards[:6] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert 0.0 < rewards[6] < 1.0


@pytest.mark.slow
def test_scorers_that_compute_are_reached_through_their_process() -> None:
    """Countdown accepts any expression with the right value, not only its own solution."""
    config = {"min_numbers": 2, "max_numbers": 2}
    spec = ReasoningGymEnvironment(dataset="countdown", config=config)
    (solution,) = build(spec).problem(2).solution
    right, wrong = play(spec, 2, [f"({solution})"], ["1 + 1 + 1 + 1 + 1"])
    assert right.reward == 1.0
    assert wrong.reward is not None
    assert wrong.reward < 0.1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"dataset": "chain_sums"}, r"env\.dataset: .*did you mean chain_sum\b"),
        ({"config": {"min_term": 2}}, r"env\.config: chain_sum does not take .*wanted .*min_terms \(2\)"),
        ({"config": {"min_terms": 0}}, r"env\.config: .*min_terms must be positive"),
        ({"config": {"seed": 1}}, r"env\.config\.seed"),
        ({"config": {"size": 1}}, r"env\.config\.size: .*beside config"),
    ],
)
def test_what_the_library_refuses_is_the_users_mistake(change: dict[str, Any], complaint: str) -> None:
    """Named with its place in the YAML and what was wanted."""
    with pytest.raises(InputError, match=complaint):
        build(ReasoningGymEnvironment(**{"dataset": "chain_sum", **change}), "env")


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever did not install it learns how."""
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(InputError, match=r"env: reasoning_gym needs reasoning_gym.*marlaas\[environments\]"):
        build(SUMS, "env")


@pytest.mark.parametrize(
    ("turn", "spec", "answer"),
    [
        ("<answer>a</answer>", {}, "a"),
        ("<answer>a", {}, "<answer>a"),
        ("<answer>a</answer>\nb", {}, "a"),
        ("a\n<answer>b\nc</answer>", {}, "b\nc"),
        ("x <answer> and <answer>b</answer>", {}, "b"),
        ("a\n b \n", {}, "b"),
        ("a\nb", {"otherwise": "all"}, "a\nb"),
        ("a\nb", {"otherwise": "nothing"}, None),
        ("<answer>a</answer>", {"tag": None}, "<answer>a</answer>"),
        ("<final>a</final>", {"tag": "final", "otherwise": "nothing"}, "a"),
        ("<answer></answer>", {}, None),
        (" \n ", {}, None),
        ("9" * (MAX_ANSWER + 1), {}, None),
    ],
)
def test_answers_are_found_where_the_spec_says(turn: str, spec: dict[str, Any], answer: str | None) -> None:
    """In the last tag, else where `otherwise` says; too long ones are none."""
    assert extract(turn, AnswerSpec(**spec)) == answer


def test_the_shortest_right_turn_says_its_answer() -> None:
    """What is asked for before a run, so that every right answer has room."""
    for spec in (AnswerSpec(), AnswerSpec(otherwise="nothing"), AnswerSpec(tag=None, otherwise="all")):
        assert extract(wrap("42", spec), spec) == "42"


def test_what_is_graded_is_what_was_posed() -> None:
    """This dataset poses another problem in every process; its own answers earn 1 all the same."""

    async def main() -> list[float | None]:
        environment = build(ReasoningGymEnvironment(dataset="polynomial_multiplication", size=50))
        problems = [environment.problem(seed) for seed in range(6)]
        answers = [await environment.step(p, [f"<answer>{p.solution[0]}</answer>"]) for p in problems]
        await close_all([environment])
        return [answer.reward for answer in answers]

    rewards = asyncio.run(main())
    assert rewards == [1.0] * 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of the data that the library reads
def test_every_dataset_of_the_library_can_be_played() -> None:
    """Each poses problems, and its own answer, where it has one, earns 1."""
    from reasoning_gym.factory import DATASETS

    async def score(name: str) -> float:
        environment = build(ReasoningGymEnvironment(dataset=name, size=200, grading_s=60))
        problem = environment.problem(6)
        assert problem.prompt
        seen = [await environment.step(problem, [f"<answer>{s}</answer>"]) for s in problem.solution]
        await close_all([environment])
        return seen[0].reward or 0.0 if seen else 1.0

    async def main() -> dict[str, float]:
        return {name: await score(name) for name in sorted(DATASETS) if name != "composite"}

    assert {name for name, reward in asyncio.run(main()).items() if reward < 1.0} == set()
