"""What was said in each live trajectory, as text and as tokens; the driver's only copy of it.

Owns prompts, sampled turns, observations and rewards from the first `Generate` of a trajectory until
its step is committed or it is dropped, and the truncations of a task. A turn counts only if it answers
the last `Generate` its trajectory was in. Tokens come from a `Codec`: no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping

import msgspec

from executor.codec import Codec as Codec
from executor.environments import Environment, Observation, Problem, out_of_turns, problem_seed
from executor.protocols import Sample, TurnResult
from marlaas.commands import Generate
from marlaas.errors import MarlaasError
from marlaas.spec import TaskSpec

Key = tuple[str, int, int]
"""Task, step, trajectory."""


class Unusable(MarlaasError):
    """A turn, an answer or an episode that must not be used any further; the text says why."""


class Turn(msgspec.Struct, kw_only=True):
    """One turn of the model and what the environment appended to the context after it."""

    text: str
    tokens: list[int]
    logprobs: list[float]
    observation_text: str = ""
    observation: list[int] = []


class Episode(msgspec.Struct, kw_only=True):
    """One trajectory so far; `generate` is the command whose turn is awaited."""

    problem: Problem
    prompt: list[int]
    generate: int = 0
    turns: list[Turn] = []
    reward: float | None = None

    def context(self) -> list[int]:
        """Everything said so far, as the next turn's context."""
        tokens = list(self.prompt)
        for turn in self.turns:
            tokens += turn.tokens
            tokens += turn.observation
        return tokens

    def texts(self) -> list[str]:
        """The model's turns so far."""
        return [turn.text for turn in self.turns]


class Transcripts:
    """All live trajectories of a run."""

    def __init__(
        self,
        run_seed: int,
        tasks: Iterable[TaskSpec],
        environments: Mapping[str, Environment],
        codec: Codec,
        problem_seed_of: Callable[[int, str, int, int], int] = problem_seed,
    ) -> None:
        self._run_seed = run_seed
        self._tasks = {task.name: task for task in tasks}
        self._environments = environments
        self._codec = codec
        self._problem_seed_of = problem_seed_of
        self._episodes: dict[Key, Episode] = {}

    def __len__(self) -> int:
        return len(self._episodes)

    def begin_turn(self, command: Generate, trajectory: int) -> list[int]:
        """Context of a turn; begins the episode at turn 0 and forgets an earlier try at this turn."""
        key = (command.task, command.step, trajectory)
        episode = self._begin(key) if command.turn == 0 else self._episodes[key]
        assert len(episode.turns) >= command.turn, f"{key}: turn {command.turn} came too early"
        del episode.turns[command.turn :]
        episode.generate = command.id
        episode.reward = None
        return episode.context()

    def record_turn(self, command: Generate, trajectory: int, result: TurnResult) -> None:
        """Keep what a turn sampled, unless a later `Generate` or a drop has superseded it.

        Raises `Unusable` for log-probabilities that are not one finite number per token.
        """
        episode = self._episodes.get((command.task, command.step, trajectory))
        if episode is None or episode.generate != command.id:
            return
        if len(result.tokens) != len(result.logprobs):
            raise Unusable(f"{len(result.tokens)} tokens came with {len(result.logprobs)} log-probabilities")
        if not all(math.isfinite(logprob) for logprob in result.logprobs):
            raise Unusable("a sampled token has a log-probability that is not a finite number")
        episode.generate = 0
        text = self._codec.decode_turn(result.tokens)
        episode.turns.append(Turn(text=text, tokens=result.tokens, logprobs=result.logprobs))

    async def ask(self, key: Key, turn: int) -> Observation:
        """The environment's answer to a turn; on a task's last turn the episode ends whatever it says.

        Raises what the environment raises, and `Unusable` for an answer that is none.
        """
        task = self._tasks[key[0]]
        episode = self._episodes[key]
        environment = self._environments[task.environment]
        answer = await environment.step(episode.problem, episode.texts()[: turn + 1])
        if not isinstance(answer, Observation):
            raise Unusable(f"the environment answered with a {type(answer).__name__}, not an Observation")
        if turn + 1 >= task.max_turns:
            answer = out_of_turns(answer)
        if answer.done and (answer.reward is None or not math.isfinite(answer.reward)):
            raise Unusable(f"the environment ended the episode with the reward {answer.reward}")
        return answer

    def record_answer(self, key: Key, turn: int, answer: Observation) -> int:
        """Keep an answer; returns how many observation tokens it adds to the context."""
        episode = self._episodes[key]
        said = episode.turns[turn]
        if answer.done:
            episode.reward = answer.reward
            return 0
        said.observation_text = answer.text
        limit = self._tasks[key[0]].max_observation_tokens
        is_closed = self._codec.is_closed(said.tokens)
        said.observation = self._codec.after_turn(answer, limit, is_closed=is_closed)
        return len(said.observation)

    def samples(self, task: str, step: int, trajectories: Iterable[int]) -> list[Sample]:
        """Exactly these trajectories for the trainer; raises `Unusable` if one is missing or unfinished."""
        num_samples = self._tasks[task].samples
        return [
            _sample(self._finished((task, step, trajectory)), trajectory, trajectory // num_samples)
            for trajectory in trajectories
        ]

    def describe(self, task: str, step: int, trajectories: Iterable[int]) -> str:
        """Finished trajectories as JSON lines for people to read."""
        return "".join(_line(t, self._finished((task, step, t))) for t in trajectories)

    def rewards(self, task: str, step: int, trajectories: Iterable[int]) -> list[float]:
        """Rewards of finished trajectories."""
        return [self._finished((task, step, trajectory)).reward or 0.0 for trajectory in trajectories]

    def release(self, task: str, step: int, trajectories: Iterable[int]) -> None:
        """Forget these trajectories; unknown ones are ignored."""
        for trajectory in trajectories:
            self._episodes.pop((task, step, trajectory), None)

    def release_task(self, task: str, up_to_step: int | None = None) -> None:
        """Forget every trajectory of a task, or those of its steps up to and including one."""
        for key in [k for k in self._episodes if k[0] == task and (up_to_step is None or k[1] <= up_to_step)]:
            del self._episodes[key]

    def _begin(self, key: Key) -> Episode:
        name, step, trajectory = key
        task = self._tasks[name]
        seed = self._problem_seed_of(self._run_seed, name, step, trajectory // task.samples)
        problem = self._environments[task.environment].problem(seed)
        prompt = self._codec.opening(problem, task.max_prompt_tokens)
        episode = self._episodes[key] = Episode(problem=problem, prompt=prompt)
        return episode

    def _finished(self, key: Key) -> Episode:
        episode = self._episodes.get(key)
        if episode is None or episode.reward is None:
            raise Unusable(f"trajectory {key[2]} of {key[0]}, step {key[1]}, is not finished")
        return episode


def _sample(episode: Episode, trajectory: int, group: int) -> Sample:
    tokens = list(episode.prompt)
    sampled = [False] * len(tokens)
    logprobs = [0.0] * len(tokens)
    for turn in episode.turns:
        tokens += turn.tokens + turn.observation
        sampled += [True] * len(turn.tokens) + [False] * len(turn.observation)
        logprobs += turn.logprobs + [0.0] * len(turn.observation)
    assert episode.reward is not None
    return Sample(
        trajectory=trajectory,
        group=group,
        tokens=tokens,
        sampled=sampled,
        logprobs=logprobs,
        reward=episode.reward,
    )


def _line(trajectory: int, episode: Episode) -> str:
    line = {
        "trajectory": trajectory,
        "prompt": episode.problem.prompt,
        "turns": [{"model": turn.text, "environment": turn.observation_text} for turn in episode.turns],
        "reward": episode.reward,
    }
    return json.dumps(line, ensure_ascii=False) + "\n"
