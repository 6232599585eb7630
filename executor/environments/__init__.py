"""Environments: what sets a problem, answers a turn and gives the reward. Knows no torch and no scheduler.

An environment's answer is a function of the problem and the turns so far, so asking again after a failure is
safe. Seeds and latencies are counter-based, so nothing depends on the order of calls. Libraries that an
environment needs are imported when it is built; processes and connections are opened when they are used and
closed by `close_all`.
"""

from __future__ import annotations

from executor.environments.letters import Reverse, Sort
from executor.environments.lookup import Lookup
from executor.environments.mathematics import Mathematics
from executor.environments.problems import (
    Closing,
    Environment,
    Observation,
    Problem,
    Tool,
    close_all,
    out_of_turns,
)
from executor.environments.reasoning_gym import ReasoningGym
from executor.environments.search import Search
from executor.environments.streams import held_out_seed, is_held_out, latency_s, problem_seed, seed_of
from executor.environments.sums import Sums
from executor.environments.verifiers import Verifiers
from marlaas.spec import (
    EnvironmentSpec,
    LookupEnvironment,
    MathEnvironment,
    ReasoningGymEnvironment,
    ReverseEnvironment,
    SearchEnvironment,
    SortEnvironment,
    SumsEnvironment,
    VerifiersEnvironment,
)

__all__ = [
    "Closing",
    "Environment",
    "Observation",
    "Problem",
    "Tool",
    "build",
    "close_all",
    "held_out_seed",
    "is_held_out",
    "latency_s",
    "out_of_turns",
    "problem_seed",
    "seed_of",
]


def build(spec: EnvironmentSpec, where: str = "environments") -> Environment:
    """The environment that a spec describes.

    Raises `InputError` below `where` for a library that is not installed, a file that is not there, and what
    else only the environment can know to be wrong.
    """
    match spec:
        case SumsEnvironment():
            return Sums(spec)
        case SortEnvironment():
            return Sort(spec)
        case ReverseEnvironment():
            return Reverse(spec)
        case LookupEnvironment():
            return Lookup()
        case ReasoningGymEnvironment():
            return ReasoningGym(spec, where)
        case MathEnvironment():
            return Mathematics(spec, where)
        case SearchEnvironment():
            return Search(spec, where)
        case VerifiersEnvironment():
            return Verifiers(spec, where)
