"""Engine costs fitted from what an engine counts each second, and from no time of a request's tokens.

    arrivals and token counts ──► the engine's rules say what each iteration does ──┐
    counters of each second   ──► how many iterations were over when it ended     ──┴─► rows ──► fit

Counted are prompt tokens, all of a prompt with its first token, and generated tokens. As an engine's rules
leave no choice, it follows how many iterations were over at the end of each second, and of how many
sequences, KV tokens and tokens read they were. So every few seconds make a row of

    seconds ≈ a·iterations + b·ΣB + c·ΣKV + p·Σ tokens read + q·Σ pairs attended in reading

Retracing takes a clock within seconds too, so costs are fitted a few times over, each time with the clock of
the last. What the counters leave open stays near a prior, as near as its intervals say that it is right. Owns
the retracing and the rows; the numerics are `fitting`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import msgspec

from sim.costs import FS_PER_S, IterationCosts
from sim.fitting import Fit, Trust, fit
from sim.profile import FREE, Quantity, ReplicaProfile, iteration_costs
from sim.requests import Iteration, Request, serve
from sim.rules import EngineRules

# A row's seconds end within an iteration, of which a half is taken to be done: at the most so much is wrong.
MIN_ITERATIONS = 30
ROW_NOISE = 1 / MIN_ITERATIONS
# An interval of what is thought possible is as wide as so many standard deviations.
INTERVAL_DEVIATIONS = 4.0
NUM_ROUNDS = 6
COLUMNS = (
    "iteration_s",
    "per_sequence_s",
    "per_kv_token_s",
    "per_prefill_token_s",
    "per_attended_token_s",
)


class Second(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine counted in one second, and what it saw at its end."""

    prompt_tokens: int
    generated_tokens: int
    running: int
    waiting: int


class CounterFit(msgspec.Struct, frozen=True, kw_only=True):
    """Fitted costs, and how well they explain the rows that they come from."""

    fit: Fit
    replica: ReplicaProfile


class CounterClock:
    """Iterations end in the second in which the counters reach what was done, and take what they cost beside.

    `totals` are tokens of prompts and answers by the end of each second. Beyond the last of them iterations
    take what they cost.
    """

    def __init__(self, totals: Sequence[int]) -> None:
        self._totals = totals
        self._second = 0

    def end_fs(self, start_fs: int, duration_fs: int, num_tokens: int) -> int:
        """The end of an iteration after which so many tokens are done."""
        totals = self._totals
        while self._second < len(totals) and num_tokens > totals[self._second]:
            self._second += 1
        earliest = self._second * FS_PER_S
        if self._second == len(totals):
            return max(start_fs + duration_fs, earliest)
        return min(max(start_fs + duration_fs, earliest), earliest + FS_PER_S)


def fit_counters(
    requests: Sequence[Request],
    seconds: Sequence[Second],
    rules: EngineRules,
    prior: ReplicaProfile,
    is_shown: Callable[[int, int], bool] = lambda begin, end: True,
    *,
    plans_ahead: bool = False,
) -> CounterFit:
    """Fit what the counters show of a base model's costs; all else stays as in the prior.

    Requests' times count from the beginning of the first second. Of the rows, each from the end of one second
    to the end of another, those that `is_shown` accepts are fitted; `plans_ahead` is as in `requests.serve`.
    Raises `ValueError` when there is no row.
    """
    replica = prior
    totals = list(accumulate(second.prompt_tokens + second.generated_tokens for second in seconds))
    trust = Trust(noise=ROW_NOISE, spreads={name: _spread(getattr(prior, name)) for name in COLUMNS})
    fitted: Fit | None = None
    for _ in range(NUM_ROUNDS):
        clock = CounterClock(totals)
        retraced = serve(requests, base_costs(replica), rules, clock, plans_ahead=plans_ahead)
        columns, lengths = _rows(retraced.iterations, totals, is_shown)
        if not lengths:
            raise ValueError(f"a fit needs seconds with {MIN_ITERATIONS} iterations at least")
        fitted = fit(columns, lengths, {name: getattr(prior, name).value for name in COLUMNS}, trust)
        replica = msgspec.structs.replace(replica, **_quantities(fitted))
    assert fitted is not None, "there is a round at least"
    return CounterFit(fit=fitted, replica=replica)


def base_costs(replica: ReplicaProfile) -> IterationCosts:
    """The costs of a replica that serves the base model alone, which pays for no adapter."""
    return iteration_costs(msgspec.structs.replace(replica, adapters_s=FREE, per_adapter_s=FREE))


def _spread(prior: Quantity) -> float:
    """The standard deviation of a prior; one without an interval may be off by all of it."""
    low, high = prior.interval or (0.0, prior.value * INTERVAL_DEVIATIONS)
    return (high - low) / INTERVAL_DEVIATIONS


def _rows(
    iterations: Sequence[Iteration], totals: Sequence[int], is_shown: Callable[[int, int], bool]
) -> tuple[Mapping[str, Sequence[float]], list[float]]:
    """Work and length of stretches of whole seconds, each of the fewest that have `MIN_ITERATIONS`.

    The first second is left out: its beginning is not seen.
    """
    done = _work_at_ends(iterations, totals)
    rows: list[list[float]] = []
    lengths: list[float] = []
    begin = 0
    for end in range(1, len(done)):
        work = [after - before for after, before in zip(done[end], done[begin], strict=True)]
        if work[0] >= MIN_ITERATIONS:
            if is_shown(begin, end):
                rows.append(work)
                lengths.append(float(end - begin))
            begin = end
    return {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}, lengths


def _work_at_ends(iterations: Sequence[Iteration], totals: Sequence[int]) -> list[list[float]]:
    """All work done at the end of each second: the iterations that the counters hold and half of the next."""
    done: list[list[float]] = []
    work, num_tokens = [0.0] * len(COLUMNS), 0
    ahead = iter(iterations)
    following = next(ahead, None)
    for total in totals:
        while following is not None and num_tokens + _num_tokens(following) <= total:
            num_tokens += _num_tokens(following)
            work = [so_far + more for so_far, more in zip(work, _work(following), strict=True)]
            following = next(ahead, None)
        if following is None:
            break
        done.append([so_far + more / 2 for so_far, more in zip(work, _work(following), strict=True)])
    return done


def _num_tokens(iteration: Iteration) -> int:
    return iteration.prompt_tokens + iteration.generated_tokens


def _work(iteration: Iteration) -> tuple[float, ...]:
    """An iteration in the order of `COLUMNS`."""
    return (
        1.0,
        iteration.decoding,
        iteration.kv_tokens,
        iteration.prefill_tokens,
        iteration.prefill_pairs,
    )


def _quantities(fitted: Fit) -> dict[str, Quantity]:
    note = f"{fitted.num_points} rows of counted seconds, held-out error {fitted.held_out_error:.1%}"
    return {
        name: Quantity(
            value=float(f"{value:.6g}"), source="calibrated", interval=fitted.intervals[name], note=note
        )
        for name, value in fitted.values.items()
    }
