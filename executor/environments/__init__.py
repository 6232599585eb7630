"""Environments: what sets a problem, answers a turn and gives the reward. Knows no torch and no scheduler.

An environment is stateless: its answer is a function of the problem and the turns so far, so asking again
after a failure is safe. Seeds and latencies are counter-based, so nothing depends on the order of calls.
"""

from __future__ import annotations

from executor.environments.letters import Reverse, Sort
from executor.environments.lookup import Lookup
from executor.environments.problems import Environment, Observation, Problem, out_of_turns
from executor.environments.streams import held_out_seed, is_held_out, latency_s, problem_seed, seed_of
from executor.environments.sums import Sums
from marlaas.spec import (
    EnvironmentSpec,
    LookupEnvironment,
    ReverseEnvironment,
    SortEnvironment,
    SumsEnvironment,
)

__all__ = [
    "Environment",
    "Observation",
    "Problem",
    "build",
    "held_out_seed",
    "is_held_out",
    "latency_s",
    "out_of_turns",
    "problem_seed",
    "seed_of",
]


def build(spec: EnvironmentSpec) -> Environment:
    """The environment that a spec describes."""
    match spec:
        case SumsEnvironment():
            return Sums(spec)
        case SortEnvironment():
            return Sort(spec)
        case ReverseEnvironment():
            return Reverse(spec)
        case LookupEnvironment():
            return Lookup()
