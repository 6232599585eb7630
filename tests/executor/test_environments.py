"""Environments: reproducible problems, exact rewards, a tool that answers, no text that breaks them."""

import asyncio
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.environments import (
    Observation,
    Problem,
    build,
    held_out_seed,
    is_held_out,
    latency_s,
    out_of_turns,
    problem_seed,
    seed_of,
)
from marlaas.spec import (
    Distribution,
    Empirical,
    EnvironmentSpec,
    Fixed,
    Gamma,
    Lognormal,
    LookupEnvironment,
    Mixture,
    ReverseEnvironment,
    SortEnvironment,
    SumsEnvironment,
    Uniform,
)

SPECS: list[EnvironmentSpec] = [
    SumsEnvironment(),
    SumsEnvironment(digits=3, operations="+-"),
    SortEnvironment(),
    ReverseEnvironment(min_letters=1, max_letters=2),
    LookupEnvironment(),
]
each_spec = pytest.mark.parametrize("spec", SPECS, ids=str)


def _play(spec: EnvironmentSpec, problem: Problem, *turns: str) -> Observation:
    return asyncio.run(build(spec).step(problem, turns))


@each_spec
def test_problem_depends_on_its_seed_alone(spec: EnvironmentSpec) -> None:
    """The same seed poses the same problem, whatever was asked before; other seeds pose others."""
    environment, seeds = build(spec), [problem_seed(7, "t", step, 0) for step in range(50)]
    problems = [environment.problem(seed) for seed in seeds]
    assert problems == [build(spec).problem(seed) for seed in reversed(seeds)][::-1]
    assert len({problem.prompt for problem in problems}) > 25


@each_spec
def test_perfect_player_earns_one(spec: EnvironmentSpec) -> None:
    """Playing the solution turn by turn goes on until the answer, which earns 1."""
    for index in range(50):
        problem = build(spec).problem(problem_seed(1, "t", 0, index))
        seen = [_play(spec, problem, *problem.solution[: turn + 1]) for turn in range(len(problem.solution))]
        assert [step.done for step in seen] == [False] * (len(seen) - 1) + [True]
        assert seen[-1].reward == 1.0


@each_spec
@settings(max_examples=25)
@given(turns=st.lists(st.text(), min_size=1, max_size=3))
def test_any_text_is_answered_the_same_way_twice(spec: EnvironmentSpec, turns: list[str]) -> None:
    """Whatever a model writes gets an answer, the same on a retry, and a reward of 0 or 1 when it ends."""
    problem = build(spec).problem(4)
    seen = _play(spec, problem, *turns)
    assert seen == _play(spec, problem, *turns)
    assert (seen.reward in (0.0, 1.0)) if seen.done else (seen.reward is None and seen.text != "")
    if turns[-1].strip() != problem.solution[-1]:
        assert not seen.reward


@each_spec
@pytest.mark.parametrize("turn", ["", " ", "\0", "?", "9" * 1_000_000, "?" * 1_000_000, "<eos>", "١٢"])
def test_garbage_earns_nothing(spec: EnvironmentSpec, turn: str) -> None:
    """Empty, huge or odd answers earn 0; as calls they find nothing; none raises."""
    seen = _play(spec, build(spec).problem(2), turn)
    assert not seen.reward
    assert len(seen.text) < 64


def test_answers_are_exact() -> None:
    """A right answer with anything more or less than blanks around it is wrong."""
    spec = SumsEnvironment()
    problem = build(spec).problem(10)
    answer = problem.solution[-1]
    assert _play(spec, problem, f" {answer}\n").reward == 1.0
    for wrong in ("0" + answer, answer + ".", "+" + answer, answer[:-1], answer + answer):
        assert _play(spec, problem, wrong).reward == 0.0


@pytest.mark.parametrize("operations", ["+", "-", "+-"])
def test_sums_are_what_their_prompt_says(operations: str) -> None:
    """The solution of a sum is its arithmetic value, and operands stay within their digits."""
    spec = SumsEnvironment(digits=2, operations=operations)  # type: ignore[arg-type]
    seen = set()
    for index in range(200):
        problem = build(spec).problem(problem_seed(0, "t", index, 0))
        sign = "+" if "+" in problem.prompt else "-"
        left, right = (int(part) for part in problem.prompt.removesuffix("=").split(sign))
        assert int(problem.solution[-1]) == (left + right if sign == "+" else left - right)
        assert max(left, right) < 100
        seen.add(sign)
    assert seen == set(operations)


def test_letters_are_sorted_or_reversed_and_of_every_length_asked_for() -> None:
    """The letters of a prompt appear sorted or reversed in its solution; both bounds of length occur."""
    both = SortEnvironment(min_letters=2, max_letters=4), ReverseEnvironment(min_letters=2, max_letters=4)
    for spec in both:
        lengths = set()
        for index in range(100):
            problem = build(spec).problem(problem_seed(0, "t", index, 0))
            word = problem.prompt.removesuffix(":").split()[1]
            wanted = "".join(sorted(word)) if isinstance(spec, SortEnvironment) else word[::-1]
            assert problem.solution == (wanted,)
            lengths.add(len(word))
        assert lengths == {2, 3, 4}


def test_lookup_needs_its_tool() -> None:
    """The right answer earns nothing before a call for the entry in question, not even after another call."""
    spec = LookupEnvironment()
    first, second = (build(spec).problem(seed) for seed in (20, 22))
    assert first.solution[0] != second.solution[0]
    call, answer = first.solution
    assert _play(spec, first, answer).reward == 0.0
    assert _play(spec, first, second.solution[0], answer).reward == 0.0
    assert _play(spec, first, second.solution[0], call, answer).reward == 1.0


def test_lookup_tool_tells_the_answer_or_that_there_is_none() -> None:
    """A call for an entry shows its facts; any other call says so and the episode goes on."""
    spec = LookupEnvironment()
    problem = build(spec).problem(20)
    call, answer = problem.solution
    assert answer in _play(spec, problem, call).text.removesuffix(":").split()
    assert _play(spec, problem, "?nobody") == Observation(done=False, text="nothing found:")


def test_lookup_facts_cannot_be_learned_by_heart() -> None:
    """The same question has different answers in different problems."""
    environment, answers = build(LookupEnvironment()), dict[str, set[str]]()
    for index in range(3_000):
        problem = environment.problem(problem_seed(0, "t", 0, index))
        answers.setdefault(problem.prompt, set()).add(problem.solution[-1])
    repeated = [found for found in answers.values() if len(found) > 1]
    assert len(repeated) > 500


def test_running_out_of_turns_ends_an_episode_with_nothing() -> None:
    """The last allowed turn ends an open episode with reward 0 and leaves a finished one alone."""
    assert out_of_turns(Observation(done=False, text="x")) == Observation(done=True, reward=0.0)
    assert out_of_turns(Observation(done=True, reward=1.0)) == Observation(done=True, reward=1.0)


@each_spec
def test_no_evaluation_problem_occurs_in_training(spec: EnvironmentSpec) -> None:
    """Held-out seeds and prompts are disjoint from those of training, even in a small problem space."""
    environment = build(spec)
    training = [problem_seed(3, "t", step, prompt) for step in range(40) for prompt in range(20)]
    evaluation = [held_out_seed(3, "t", prompt) for prompt in range(200)]
    assert all(is_held_out(seed) for seed in evaluation)
    assert not any(is_held_out(seed) for seed in training)
    prompts = [{environment.problem(seed).prompt for seed in seeds} for seeds in (training, evaluation)]
    assert not prompts[0] & prompts[1]


def test_a_space_too_small_to_hold_anything_out_still_poses_problems() -> None:
    """Where every prompt belongs to training, evaluation gets one all the same, and the other way round."""
    spec = SumsEnvironment(digits=1, operations="-")
    for seed in range(20):
        assert build(spec).problem(seed).prompt


def test_seeds_are_the_same_in_every_process() -> None:
    """Seeds do not depend on the process or PYTHONHASHSEED, and importing environments loads no torch."""
    code = (
        "import sys; from executor.environments import *; from marlaas.spec import *;"
        "print(seed_of('a', 1), problem_seed(0, 't', 1, 2), build(SumsEnvironment()).problem(8).prompt,"
        " latency_s(Gamma(mean=1.0), 0, 't', 1, 2, 0), 'torch' in sys.modules)"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(runs) == 1
    assert runs.pop().split() == [
        str(seed_of("a", 1)),
        str(problem_seed(0, "t", 1, 2)),
        build(SumsEnvironment()).problem(8).prompt,
        str(latency_s(Gamma(mean=1.0), 0, "t", 1, 2, 0)),
        "False",
    ]


def test_seeds_of_different_parts_differ() -> None:
    """Parts are kept apart: neither joining nor reordering them gives the same seed."""
    parts = [("ab", "c"), ("a", "bc"), ("abc",), ("a", "b", "c"), (1, 12), (11, 2), (2, 11), ("1", 12)]
    assert len({seed_of(*each) for each in parts}) == len(parts)


DISTRIBUTIONS: list[tuple[Distribution, float]] = [
    (Fixed(value=0.4), 0.4),
    (Uniform(low=0.3, high=1.5), 0.9),
    (Lognormal(median=1.0, sigma=0.5), 1.1331),
    (Gamma(mean=0.7, shape=4.0), 0.7),
    (Empirical(values=(1.0, 2.0, 6.0)), 3.0),
    (Mixture(weights=(3.0, 1.0), parts=(Fixed(value=1.0), Fixed(value=5.0))), 2.0),
]


@pytest.mark.parametrize(("distribution", "mean"), DISTRIBUTIONS, ids=str)
def test_latencies_follow_their_distribution(distribution: Distribution, mean: float) -> None:
    """The mean of many draws is the distribution's; a draw depends on its parts alone."""
    draws = [latency_s(distribution, 0, "t", 1, trajectory, 0) for trajectory in range(4_000)]
    assert sum(draws) / len(draws) == pytest.approx(mean, rel=0.05)
    assert min(draws) >= 0
    assert draws[5] == latency_s(distribution, 0, "t", 1, 5, 0)


def test_lognormal_is_cut_at_its_cap() -> None:
    """No draw exceeds the cap."""
    distribution = Lognormal(median=1.0, sigma=2.0, cap=3.0)
    assert max(latency_s(distribution, i) for i in range(1_000)) == 3.0
