"""Random streams that depend on names and numbers alone, never on what was drawn before.

Owns keys and sampling; knows no task and no clock.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from marlaas.spec import Distribution, Empirical, Fixed, Gamma, Lognormal, Mixture, Uniform

Floats = npt.NDArray[np.float64]


def _key(seed: int, names: tuple[str | int, ...]) -> bytes:
    return blake2b(msgspec.json.encode([seed, *names]), digest_size=16).digest()


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """The generator of this seed and these names: the same in every process, unrelated to any other."""
    return np.random.Generator(np.random.Philox(key=int.from_bytes(_key(seed, names), "little")))


class Streams:
    """The streams of one seed, for those who need many: a generator for each would cost far more."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._philox = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._philox)
        self._start: Any = self._philox.state

    def of(self, *names: str | int) -> np.random.Generator:
        """What `stream` returns for these names, good until the next call."""
        self._start["state"]["key"] = np.frombuffer(_key(self._seed, names), dtype="<u8")
        self._philox.state = self._start
        return self._generator


def sample(distribution: Distribution, random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Independent draws from a distribution."""
    match distribution:
        case Fixed(value=value):
            return np.full(shape, value, dtype=np.float64)
        case Uniform(low=low, high=high):
            return random.uniform(low, high, shape)
        case Lognormal(median=median, sigma=sigma, cap=cap):
            drawn = median * np.exp(sigma * random.standard_normal(shape))
            return drawn if cap is None else np.minimum(drawn, cap)
        case Gamma(mean=mean, shape=gamma_shape):
            return random.gamma(gamma_shape, mean / gamma_shape, shape)
        case Empirical(values=values):
            return np.asarray(values, dtype=np.float64)[random.integers(len(values), size=shape)]
        case Mixture(weights=weights, parts=parts):
            return _sample_mixture(weights, parts, random, shape)


def _sample_mixture(
    weights: tuple[float, ...],
    parts: tuple[Distribution, ...],
    random: np.random.Generator,
    shape: tuple[int, ...],
) -> Floats:
    bounds = np.cumsum(weights) / np.sum(weights)
    chosen = np.searchsorted(bounds, random.random(shape), side="right")
    return np.choose(chosen, [sample(part, random, shape) for part in parts])
