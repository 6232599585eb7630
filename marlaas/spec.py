"""The experiment: one strict, frozen tree that both worlds and the scheduler read.

Pure data. Parsing YAML, defaults that need files and checks across keys live in `experiments/`.
Units are in the names; `None` means "no limit" or "not given", never a number with a second meaning.
Its other parts, which this module names too: `distributions`, `cluster_spec`, `environment_spec`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from marlaas.cluster_spec import (
    ChatSpec,
    ClusterSpec,
    LanesSpec,
    LoraSpec,
    ModelSpec,
    ReplicasSpec,
)
from marlaas.distributions import (
    Count,
    Distribution,
    Empirical,
    Fixed,
    Gamma,
    Lognormal,
    Mixture,
    Name,
    Natural,
    NonNegative,
    Positive,
    Share,
    Spec,
    Uniform,
)
from marlaas.environment_spec import (
    AnswerSpec,
    Environment,
    EnvironmentSpec,
    LocalCorpus,
    LookupEnvironment,
    MathEnvironment,
    MediaWiki,
    ReasoningGymEnvironment,
    ReverseEnvironment,
    SearchEnvironment,
    SortEnvironment,
    SumsEnvironment,
    VerifiersEnvironment,
)

__all__ = [
    "AnswerSpec",
    "Cancel",
    "ChatSpec",
    "ClusterSpec",
    "Count",
    "Distribution",
    "Empirical",
    "Environment",
    "EnvironmentSpec",
    "EvaluationSpec",
    "Experiment",
    "Fixed",
    "Gamma",
    "Kill",
    "LanesSpec",
    "Limits",
    "LocalCorpus",
    "Lognormal",
    "LookupEnvironment",
    "LoraSpec",
    "MathEnvironment",
    "MediaWiki",
    "Mixture",
    "ModelSpec",
    "Name",
    "Natural",
    "NonNegative",
    "Operation",
    "Pause",
    "Positive",
    "ReasoningGymEnvironment",
    "ReplicasSpec",
    "Resume",
    "ReverseEnvironment",
    "SearchEnvironment",
    "Share",
    "SortEnvironment",
    "Spec",
    "SumsEnvironment",
    "SystemSpec",
    "TaskSpec",
    "TrainingSpec",
    "Uniform",
    "VerifiersEnvironment",
    "Workload",
]

# --- tasks ---------------------------------------------------------------------------------------


class Limits(Spec, frozen=True, kw_only=True):
    """Deadlines and budgets; a task may override the experiment's.

    A turn that is late is aborted and tried again; each trajectory has `trajectory_retries` further
    tries over turns and environment steps together, then it is dropped. A group that keeps fewer than
    `min_group` trajectories is dropped whole.
    """

    turn_s: Positive = 120.0
    trajectory_s: Positive = 600.0
    training_s: Positive = 600.0
    order_s: Positive = 120.0
    trajectory_retries: Natural = 2
    training_retries: Natural = 1
    worker_restarts: Natural = 3
    min_group: Count = 2


class TrainingSpec(Spec, frozen=True, kw_only=True):
    """GRPO with AdamW; `clip_low` and `clip_high` bound the probability ratio to [1-low, 1+high]."""

    lr: Positive = 3e-3
    clip_low: Positive = 0.2
    clip_high: Positive = 0.2
    max_grad_norm: Positive = 1.0
    weight_decay: NonNegative = 0.0
    micro_batch_tokens: Count = 16_384


class Workload(Spec, frozen=True, kw_only=True):
    """What a task's trajectories are like, for simulation. Tokens per prompt, per turn, per observation."""

    prompt_tokens: Distribution
    output_tokens: Distribution
    turns: Distribution = Fixed(value=1.0)
    observation_tokens: Distribution = Fixed(value=0.0)
    environment_s: Distribution | None = None


class TaskSpec(Spec, frozen=True, kw_only=True):
    """One RL fine-tuning job: one adapter, one environment, `steps` policy updates.

    `count` writes the same task several times, named `<name>-0`, `<name>-1`, ...
    """

    name: Name
    environment: Name
    steps: Count
    tenant: Name = "default"
    count: Count = 1
    prompts: Count = 16
    samples: Count = 8
    max_prompt_tokens: Count = 64
    max_new_tokens: Count = 32
    max_turns: Count = 1
    max_observation_tokens: Natural = 64
    temperature: Positive = 1.0
    submit_at_s: NonNegative = 0.0
    training: TrainingSpec = TrainingSpec()
    limits: Limits | None = None
    workload: Workload | None = None

    @property
    def num_trajectories(self) -> int:
        """Trajectories of one rollout batch: prompts × samples."""
        return self.prompts * self.samples

    @property
    def max_context_tokens(self) -> int:
        """The longest context a trajectory can reach, in tokens."""
        turns = self.max_turns * self.max_new_tokens
        return self.max_prompt_tokens + turns + (self.max_turns - 1) * self.max_observation_tokens


# --- operations, the system, the whole -----------------------------------------------------------


class Pause(Spec, frozen=True, kw_only=True, tag_field="do", tag="pause"):
    """Pause a task at this time of the run."""

    at_s: NonNegative
    task: Name


class Resume(Spec, frozen=True, kw_only=True, tag_field="do", tag="resume"):
    """Resume a task at this time of the run."""

    at_s: NonNegative
    task: Name


class Cancel(Spec, frozen=True, kw_only=True, tag_field="do", tag="cancel"):
    """Cancel a task at this time of the run."""

    at_s: NonNegative
    task: Name


class Kill(Spec, frozen=True, kw_only=True, tag_field="do", tag="kill"):
    """Kill a worker (`replica-0`, `lane-0`, ...) at this time of the run: fault injection."""

    at_s: NonNegative
    worker: Name


Operation = Pause | Resume | Cancel | Kill


Placement = Literal["spread", "pack", "deal"]


class SystemSpec(Spec, frozen=True, kw_only=True):
    """A system as a composition of policies; the named ones are in `systems.py`.

    Placement `spread` gives a batch's groups to all replicas, `deal` to one task's fair share of them, `pack`
    to twice as many. Where none is given `single-lora` deals, rounds spread, and the rest packs.
    """

    tasks_in_flight: Literal["one", "all"] = "all"
    barrier: Literal["none", "round"] = "none"
    batching: Literal["multi-lora", "single-lora"] = "multi-lora"
    training_order: Literal["fifo", "registration"] = "fifo"
    placement: Placement | None = None


class EvaluationSpec(Spec, frozen=True, kw_only=True):
    """Held-out problems, solved greedily with version 0 and with the last version of each task."""

    prompts: Count = 128


class Experiment(Spec, frozen=True, kw_only=True):
    """Everything a run depends on."""

    name: Name
    tasks: Annotated[tuple[TaskSpec, ...], msgspec.Meta(min_length=1)]
    environments: dict[str, EnvironmentSpec]
    description: str = ""
    seed: Natural = 0
    system: str | SystemSpec = "marlaas"
    model: ModelSpec = ModelSpec()
    cluster: ClusterSpec = ClusterSpec()
    limits: Limits = Limits()
    operations: tuple[Operation, ...] = ()
    evaluation: EvaluationSpec | None = None
    profile: str | None = None

    def limits_of(self, task: TaskSpec) -> Limits:
        """The limits in force for a task: its own, else the experiment's."""
        return task.limits or self.limits

    @property
    def replica_names(self) -> tuple[str, ...]:
        """Names of the replicas: `replica-0`, `replica-1`, ..."""
        return tuple(f"replica-{i}" for i in range(self.cluster.replicas.count))

    @property
    def lane_names(self) -> tuple[str, ...]:
        """Names of the lanes: `lane-0`, `lane-1`, ..."""
        return tuple(f"lane-{i}" for i in range(self.cluster.lanes.count))
