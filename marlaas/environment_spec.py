"""The part of an experiment that says what sets problems, answers turns and gives rewards.

Environments themselves are the worlds' business: the executor's for real, a distribution in the simulator.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from marlaas.distributions import Count, Distribution, Fixed, Name, Natural, Positive, Spec


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

    `config` is given to the dataset, of which the first `size` problems are used. `instruction` comes before
    the problem, as the system message of a chat; None is one that asks for the answer in its tag. Grading
    runs in `graders` processes of its own, with `grading_s` seconds of CPU time for each answer; one that
    takes more earns nothing.
    """

    dataset: str
    config: dict[str, Any] = msgspec.field(default_factory=dict)
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
    args: dict[str, Any] = msgspec.field(default_factory=dict)


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
