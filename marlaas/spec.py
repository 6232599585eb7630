"""The experiment: one strict, frozen tree that both worlds and the scheduler read.

Pure data. Parsing YAML, defaults that need files and checks across keys live in `experiments/`.
Units are in the names; `None` means "no limit" or "not given", never a number with a second meaning.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=80)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node of the experiment tree; unknown keys are refused."""


# --- distributions -------------------------------------------------------------------------------


class Fixed(Spec, frozen=True, kw_only=True, tag_field="kind", tag="fixed"):
    """Always `value`."""

    value: NonNegative


class Uniform(Spec, frozen=True, kw_only=True, tag_field="kind", tag="uniform"):
    """Evenly between `low` and `high`."""

    low: NonNegative
    high: NonNegative


class Lognormal(Spec, frozen=True, kw_only=True, tag_field="kind", tag="lognormal"):
    """`median · exp(sigma · N(0, 1))`, cut at `cap`."""

    median: Positive
    sigma: NonNegative
    cap: Positive | None = None


class Gamma(Spec, frozen=True, kw_only=True, tag_field="kind", tag="gamma"):
    """Gamma with this mean and shape; shape 1 is exponential."""

    mean: Positive
    shape: Positive = 1.0


class Empirical(Spec, frozen=True, kw_only=True, tag_field="kind", tag="empirical"):
    """One of `values`, each equally likely; sorted ascending when fitted from a trace."""

    values: Annotated[tuple[NonNegative, ...], msgspec.Meta(min_length=1)]


class Mixture(Spec, frozen=True, kw_only=True, tag_field="kind", tag="mixture"):
    """`parts[i]` with probability proportional to `weights[i]`; a heavy tail is one of the parts."""

    weights: tuple[Positive, ...]
    parts: tuple[Distribution, ...]


Distribution = Fixed | Uniform | Lognormal | Gamma | Empirical | Mixture


# --- the cluster ---------------------------------------------------------------------------------


class LoraSpec(Spec, frozen=True, kw_only=True):
    """Shape of every task's adapter."""

    rank: Count = 8
    alpha: Count = 16
    targets: str | tuple[str, ...] = "all-linear"


class ChatSpec(Spec, frozen=True, kw_only=True):
    """How conversations are written: `auto` uses the model's own chat template where its folder has one.

    `variables` are given to the template, for example `enable_thinking: false`.
    """

    template: Literal["auto", "none"] = "auto"
    variables: dict[str, bool | str] = {}


class ModelSpec(Spec, frozen=True, kw_only=True):
    """The frozen base model: a Hugging Face folder, relative to the YAML file or absolute.

    `dtype: auto` is bfloat16 on an accelerator and float32 on the CPU.
    """

    path: str = "tiny-base"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    lora: LoraSpec = LoraSpec()
    chat: ChatSpec = ChatSpec()


class ReplicasSpec(Spec, frozen=True, kw_only=True):
    """Rollout engines: `count` replicas of `devices` devices each.

    `torch` is the embedded engine, `vllm` runs vLLM in the worker, `openai` speaks to vLLM servers that are
    up elsewhere, replica i to `urls[i]`. The last four keys are for `vllm`: the pipeline's stages share
    `devices` evenly, each stage's part being tensor-parallel; `eager` runs without compiling or capturing
    graphs; `memory_utilization` is the share of a device's memory that may be taken; `block_tokens` is the
    KV block, None being what suits the device. A KV pool holds `kv_tokens` whatever memory there is.

    `batch_invariant` is for `torch`: a turn's tokens and log-probabilities are the same to the bit
    whatever runs beside it. None is that on a CPU where it can be had; true refuses to start where it
    cannot.
    """

    count: Count = 1
    devices: Count = 1
    engine: Literal["torch", "vllm", "openai"] = "torch"
    device: Literal["cpu", "cuda", "npu", "auto"] = "cpu"
    slots: Count = 8
    max_num_seqs: Count = 256
    kv_tokens: Count = 65_536
    peak_tokens_per_s: Positive | None = None
    batch_invariant: bool | None = None
    urls: tuple[str, ...] = ()
    pipeline_parallel: Count = 1
    eager: bool = True
    memory_utilization: Share = 0.9
    block_tokens: Count | None = None


class LanesSpec(Spec, frozen=True, kw_only=True):
    """Training engines: `count` lanes of `devices` devices each, all of one machine.

    A lane of several devices is as many processes (ranks) over one base model, sharded among them; on the CPU
    a device is such a process with its share of the lane's cores.
    """

    count: Count = 1
    devices: Count = 1
    engine: Literal["torch"] = "torch"
    device: Literal["cpu", "cuda", "npu", "auto"] = "cpu"
    peak_tokens_per_s: Positive | None = None


class ClusterSpec(Spec, frozen=True, kw_only=True):
    """What there is to run on, and who starts workers there.

    `placement: local` starts processes of this machine; `ray` starts actors on the nodes of the Ray
    cluster at `ray_address`: `HOST:PORT`, `auto` for the cluster this machine belongs to, None for one of
    this machine alone, made for the run. With `shared_folder` every node sees the run folder under the
    same path; without it adapters travel through Ray's object store.
    """

    replicas: ReplicasSpec = ReplicasSpec()
    lanes: LanesSpec = LanesSpec()
    placement: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    shared_folder: bool = False


# --- environments --------------------------------------------------------------------------------


class Environment(Spec, frozen=True, kw_only=True):
    """What every environment has: how many steps may run at once, how long one may take, extra latency.

    `latency_s` is waited before each answer, drawn per (task, step, trajectory, turn): it stands for
    a verifier's or tool's own time.
    """

    concurrency: Count = 64
    timeout_s: Positive = 60.0
    latency_s: Distribution = Fixed(value=0.0)


class SumsEnvironment(Environment, frozen=True, kw_only=True, tag_field="kind", tag="sums"):
    """Addition and subtraction of numbers of up to `digits` digits."""

    digits: Count = 2
    operations: Literal["+", "-", "+-"] = "+"


class SortEnvironment(Environment, frozen=True, kw_only=True, tag_field="kind", tag="sort"):
    """Put between `min_letters` and `max_letters` letters in alphabetical order."""

    min_letters: Count = 3
    max_letters: Count = 7


class ReverseEnvironment(Environment, frozen=True, kw_only=True, tag_field="kind", tag="reverse"):
    """Write between `min_letters` and `max_letters` letters backwards."""

    min_letters: Count = 3
    max_letters: Count = 7


class LookupEnvironment(Environment, frozen=True, kw_only=True, tag_field="kind", tag="lookup"):
    """Ask a tool for a fact of a small corpus, then answer with it; needs `max_turns` of 2 or more."""


class AnswerSpec(Spec, frozen=True, kw_only=True):
    """Where a turn says its answer: in the last `<tag>...</tag>`, else its last line, or all of it.

    `otherwise` is for turns without the tag: `last-line` reads on, `nothing` gives no reward. With
    `tag: null` a turn is read as `otherwise` says, `all` being the whole turn.
    """

    tag: Name | None = "answer"
    otherwise: Literal["last-line", "all", "nothing"] = "last-line"


class ReasoningGymEnvironment(Environment, frozen=True, kw_only=True, tag_field="kind", tag="reasoning_gym"):
    """Problems of a dataset of the library reasoning-gym, graded by the dataset's own scorer.

    `config` is given to the dataset, of which the first `size` problems are used. `instruction` comes before the problem, as the system message of a chat;
    None is one that asks for the answer in its tag. Grading runs in `graders` processes of its own, with
    `grading_s` seconds of CPU time for each answer; one that takes more earns nothing.
    """

    dataset: str
    config: dict[str, Any] = {}
    size: Count = 10_000
    answer: AnswerSpec = AnswerSpec()
    instruction: str | None = None
    graders: Count = 1
    grading_s: Positive = 5.0


class MathEnvironment(Environment, frozen=True, kw_only=True, tag_field="kind", tag="math"):
    """Mathematical problems of a JSONL file, graded by math-verify.

    `problems` is a file or a shipped sample, `gsm8k-sample` or `amc12-sample`. A line is an object with
    `question` or `problem` and with `answer` (GSM8K's ends in `#### 42`) or a `solution` that ends in
    `\\boxed{...}`. `prompt` is the message to the model, `{problem}` standing for the problem. With
    `held_out`, that file's problems are for evaluation and all of `problems` for training; otherwise one
    problem in eight is held out.
    """

    problems: str = "gsm8k-sample"
    held_out: str | None = None
    prompt: str = "{problem}"
    instruction: str | None = None
    graders: Count = 1
    grading_s: Positive = 5.0


class LocalCorpus(Spec, frozen=True, kw_only=True, tag_field="kind", tag="local"):
    """Pages of a JSONL file, objects with `title` and `text`, searched by BM25; or a shipped sample."""

    pages: str = "towns-pages"


class MediaWiki(Spec, frozen=True, kw_only=True, tag_field="kind", tag="mediawiki"):
    """A wiki, by the HTTP interface of MediaWiki at `url`, which ends in `api.php`.

    Of each request: `request_s` is its deadline, `retries` the further tries after an answer of 429 or 5xx
    or none, with pauses that grow from `backoff_s` to at most `max_backoff_s`. At most `requests_per_s`
    begin in a second and `connections` are under way. The last `cached_answers` answers are kept in
    memory, and under `cache_folder`, if given, all of them.
    """

    url: str
    user_agent: str = "marlaas (reinforcement learning research; set user_agent to your contact)"
    request_s: Positive = 10.0
    retries: Natural = 3
    backoff_s: Positive = 0.5
    max_backoff_s: Positive = 10.0
    requests_per_s: Positive = 5.0
    connections: Count = 4
    cached_answers: Count = 4_096
    cache_folder: str | None = None


class SearchEnvironment(Environment, frozen=True, kw_only=True, tag_field="kind", tag="search"):
    """Answer questions with two tools, `search` and `read`, over a corpus or a wiki; needs `max_turns` of 2.

    `questions` is a JSONL file, objects with `question` and `answers`, or a shipped sample. `results` is
    how many titles a search lists and `page_chars` how much of a page is read at once. `style: short` is
    for models of few words: a turn that begins with `?` is a search, answered by the text of the best
    page, and any other turn is the answer. `reward` is 1 for exactly one of the answers, or the best F1
    over their words.
    """

    questions: str = "towns-questions"
    source: LocalCorpus | MediaWiki = LocalCorpus()
    style: Literal["tools", "short"] = "tools"
    results: Count = 3
    page_chars: Count = 800
    reward: Literal["exact", "f1"] = "exact"
    answer: AnswerSpec = AnswerSpec()
    instruction: str | None = None


class VerifiersEnvironment(Environment, frozen=True, kw_only=True, tag_field="kind", tag="verifiers"):
    """An installed environment of the library verifiers, by its name, made with `args`.

    Problems come from its dataset, the answers to turns from itself and the reward from its rubric. Of its
    evaluation dataset, if it has one of its own, come the held-out problems; else one problem in eight is.
    """

    environment: str
    args: dict[str, Any] = {}


EnvironmentSpec = (
    SumsEnvironment
    | SortEnvironment
    | ReverseEnvironment
    | LookupEnvironment
    | ReasoningGymEnvironment
    | MathEnvironment
    | SearchEnvironment
    | VerifiersEnvironment
)


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


class SystemSpec(Spec, frozen=True, kw_only=True):
    """A system as a composition of policies; the named ones are in `systems.py`.

    Placement `spread` gives a batch's groups to all replicas, `deal` to whole replicas, a task's fair share;
    where none is given, `multi-lora` spreads and `single-lora` deals.
    """

    tasks_in_flight: Literal["one", "all"] = "all"
    barrier: Literal["none", "round"] = "none"
    batching: Literal["multi-lora", "single-lora"] = "multi-lora"
    training_order: Literal["fifo", "registration"] = "fifo"
    placement: Literal["spread", "deal"] | None = None


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
