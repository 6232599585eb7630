"""The workload: what every trajectory of a rollout batch will do, whoever runs it and however often.

A plan is drawn from streams keyed by (seed, task, step, purpose), one row per turn and one column per
trajectory, so two systems, any order of events and any number of retries meet the same prompts, answers and
latencies. Owns plans; knows no engine and no clock.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from marlaas.spec import Distribution, Experiment, Fixed, TaskSpec, Workload
from sim.profile import Profile, environment_latency, workload_of
from sim.streams import Floats, Streams, sample

Integers = npt.NDArray[np.int64]


class BatchPlan:
    """What every trajectory of one rollout batch will do, whoever runs it and however often.

    Lists are indexed `[turn][trajectory]`: `contexts` and `outputs` in tokens, `observations` in tokens,
    `environment_ns`; `turns` and `lengths` (the whole trajectory, in tokens) by trajectory.
    """

    __slots__ = ("contexts", "environment_ns", "lengths", "observations", "outputs", "turns")

    def __init__(
        self,
        streams: Streams,
        task: TaskSpec,
        step: int,
        workload: Workload,
        latency_s: Distribution,
        overhead_s: float = 0.0,
    ) -> None:
        shape = (task.max_turns, task.num_trajectories)

        def draw(purpose: str, distribution: Distribution, size: tuple[int, ...]) -> Floats:
            return sample(distribution, streams.of(task.name, step, purpose), size)

        def tokens(purpose: str, of: Distribution, size: tuple[int, ...], low: int, high: int) -> Integers:
            return np.clip(np.rint(draw(purpose, of, size)), low, high).astype(np.int64)

        prompts = tokens("prompt", workload.prompt_tokens, (task.prompts,), 1, task.max_prompt_tokens)
        outputs = tokens("output", workload.output_tokens, shape, 1, task.max_new_tokens)
        observed = tokens("observation", workload.observation_tokens, shape, 0, task.max_observation_tokens)
        turns = tokens("turns", workload.turns, shape[1:], 1, task.max_turns)
        ends = np.repeat(prompts, task.samples) + np.cumsum(outputs + observed, axis=0) - observed
        self.turns: list[int] = turns.tolist()
        self.lengths: list[int] = ends[turns - 1, np.arange(shape[1])].tolist()
        self.contexts: list[list[int]] = (ends - outputs).tolist()
        self.outputs: list[list[int]] = outputs.tolist()
        self.observations: list[list[int]] = observed.tolist()
        latency_ns = np.rint((draw("environment", latency_s, shape) + overhead_s) * 1e9)
        self.environment_ns: list[list[int]] = latency_ns.astype(np.int64).tolist()


class Plans:
    """The plans of an experiment, each drawn when it is first asked for and kept until it is forgotten."""

    def __init__(self, experiment: Experiment, profile: Profile) -> None:
        self.tasks = {task.name: task for task in experiment.tasks}
        self._streams = Streams(experiment.seed)
        self._workloads = {task.name: workload_of(task, profile) for task in experiment.tasks}
        self._latencies = {
            task.name: environment_latency(task, profile, experiment) for task in experiment.tasks
        }
        self._variation = profile.variation
        self._plans: dict[str, dict[int, BatchPlan]] = {task.name: {} for task in experiment.tasks}

    def of(self, task: str, step: int) -> BatchPlan:
        """The plan of a task's rollout batch."""
        plan = self._plans[task].get(step)
        if plan is None:
            workload, (latency_s, overhead_s) = self._workloads[task], self._latencies[task]
            plan = BatchPlan(self._streams, self.tasks[task], step, workload, latency_s, overhead_s)
            self._plans[task][step] = plan
        return plan

    def factor(self, of: Literal["training", "publish"], task: str, step: int) -> float:
        """How much longer than its cost this takes in a step of a task; the same whenever it is asked."""
        distribution: Distribution = getattr(self._variation, of)
        if isinstance(distribution, Fixed):
            return distribution.value
        return float(sample(distribution, self._streams.of(task, step, of), (1,))[0])

    def forget(self, task: str, step: int | None = None) -> None:
        """Free the plan of a step, or all of a task's; one asked for again is drawn again, the same."""
        if step is None:
            self._plans[task].clear()
        else:
            self._plans[task].pop(step, None)
