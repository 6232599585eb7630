"""Counter-based random streams: a draw is a function of its names and numbers, of nothing before it.

Owns seeds of problems and draws of latency. Never Python's `hash()`, which differs between processes.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from random import Random

import msgspec

from marlaas.spec import Distribution, Empirical, Fixed, Gamma, Lognormal, Mixture, Uniform

Part = int | str


def seed_of(*parts: Part) -> int:
    """A seed of 63 bits fixed by `parts`; different parts give unrelated seeds."""
    digest = blake2b(msgspec.json.encode(parts), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def problem_seed(run_seed: int, task: str, step: int, prompt: int) -> int:
    """The seed of a training problem: an even number."""
    return seed_of("problem", run_seed, task, step, prompt) & ~1


def held_out_seed(run_seed: int, task: str, prompt: int) -> int:
    """The seed of an evaluation problem: an odd number, so no training problem ever shares it."""
    return seed_of("evaluation", run_seed, task, prompt) | 1


def is_held_out(seed: int) -> bool:
    """Whether a problem seed belongs to evaluation."""
    return seed % 2 == 1


def latency_s(distribution: Distribution, *parts: Part) -> float:
    """Seconds drawn from the stream of `parts`: for a turn (run seed, task, step, trajectory, turn)."""
    return _sample(distribution, Random(seed_of("latency", *parts)))


def _sample(distribution: Distribution, random: Random) -> float:
    match distribution:
        case Fixed(value=value):
            return value
        case Uniform(low=low, high=high):
            return random.uniform(low, high)
        case Lognormal(median=median, sigma=sigma, cap=cap):
            drawn = median * math.exp(sigma * random.gauss(0.0, 1.0))
            return drawn if cap is None else min(drawn, cap)
        case Gamma(mean=mean, shape=shape):
            return random.gammavariate(shape, mean / shape)
        case Empirical(values=values):
            return random.choice(values)
        case Mixture(weights=weights, parts=parts):
            return _sample(random.choices(parts, weights)[0], random)
