"""The metrics, each by its formula. The same for simulated and real runs.

Symbols: the window is [first submission, last close] (or the last event of a trace that stops earlier), its
length the makespan M; a device of replica or lane counts `devices` times; `mean`, `p50`, `p95`, `max` are
over the named population, quantiles interpolated linearly. A metric with nothing to be computed from is
None (null), never 0. Names without a task are of the whole run; per task they begin with `tasks.<name>.`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from traces.metrics.occupancy import NS
from traces.metrics.run import Run, Source
from traces.metrics.spans import Span
from traces.metrics.steps import CAUSES, StepRow, TaskLedger, shares

Values = dict[str, Any]


def compute(
    source: Source,
    alone: Mapping[str, float] | None = None,
    also: Callable[[Span], None] | None = None,
) -> Values:
    """Every metric of a run, flat, in a fixed order; the source is a trace, its file or a run folder.

    `alone` gives each task's steps per hour when it has the cluster to itself (`alone_rates` of a `single`
    run); without it `steps_per_hour_normalised` is None. `also` is shown every span on the way.
    """
    run = Run(source, also)
    values: Values = {}
    for group in _GROUPS:
        values |= group(run)
    values["steps_per_hour_normalised"] = _normalised(run, alone)
    for name, task in run.tasks.items():
        values |= {f"tasks.{name}.{key}": value for key, value in _of_task(run, task).items()}
    return values


def alone_rates(source: Source) -> dict[str, float]:
    """`tasks.<name>.steps_per_hour_active` of each task that committed a step: its rate while it was served.

    In a run of `single` that is its rate alone.
    """
    rates = {name: _active_rate(task) for name, task in Run(source).tasks.items()}
    return {name: rate for name, rate in rates.items() if rate is not None}


# --- pace ------------------------------------------------------------------------------------------


def _pace(run: Run) -> Values:
    """How fast the run went.

    makespan_s      M
    steps           committed steps of all tasks
    steps_per_hour  steps / M
    steps_per_hour_normalised  mean over tasks of own rate / own rate alone, own rate = its steps / (its
                    close - its submission); None without `alone` or for tasks that it lacks
    tokens_per_s    output tokens of all turns, of dropped trajectories too / M
    trajectories    trajectories in the batches of committed steps
    tasks_done, tasks_failed, tasks_cancelled, tasks_open   tasks of the experiment by outcome
    """
    steps = sum(len(task.rows) for task in run.tasks.values())
    outcomes = [run.outcomes.get(spec.name, "open") for spec in run.experiment.tasks]
    return {
        "makespan_s": run.length_ns / NS,
        "steps": steps,
        "steps_per_hour": _ratio(steps * 3600 * NS, run.length_ns),
        "steps_per_hour_normalised": None,
        "tokens_per_s": _ratio(run.num_tokens * NS, run.length_ns),
        "trajectories": sum(row.num_trained for row in _rows(run)),
        **{f"tasks_{name}": outcomes.count(name) for name in ("done", "failed", "cancelled", "open")},
    }


def _normalised(run: Run, alone: Mapping[str, float] | None) -> float | None:
    shares_of_alone = []
    for name, task in run.tasks.items():
        rate = _own_rate(task)
        if alone is None or name not in alone or rate is None:
            return None
        shares_of_alone.append(rate / alone[name])
    return _mean(shares_of_alone)


def _own_rate(task: TaskLedger) -> float | None:
    assert task.closed is not None
    return _ratio(len(task.rows) * 3600 * NS, task.closed - task.submitted)


def _active_rate(task: TaskLedger) -> float | None:
    if not task.rows:
        return None
    return _ratio(len(task.rows) * 3600 * NS, task.rows[-1].end_ns - task.rows[0].generate_ns)


# --- waiting ---------------------------------------------------------------------------------------


def _waiting(run: Run) -> Values:
    """How long tenants waited.

    ttfs_s.*          first commit - submission; over tasks with a committed step
    step_latency_s.*  commit - begin of a step (submission or the commit before); over committed steps
    step_latency_s.<cause>  mean over committed steps of the time spent in that state (`steps.py`); the
                      causes sum to the mean latency
    rollout_to_training_ratio  R/T: mean over tasks of the task's mean over steps of
                      (batch complete - first turn begun) / (train + publish)
    """
    firsts = [_ttfs_ns(task) / NS for task in run.tasks.values() if task.rows]
    ratios = [_rollout_to_training(task) for task in run.tasks.values()]
    return {
        **_spread("ttfs_s", firsts),
        **_latency(list(_rows(run))),
        "rollout_to_training_ratio": _mean([ratio for ratio in ratios if ratio is not None]),
    }


def _ttfs_ns(task: TaskLedger) -> int:
    return task.rows[0].end_ns - task.submitted


def _latency(rows: Sequence[StepRow]) -> Values:
    """The causes are rounded to whole ns as in a step, so that they sum to the mean latency."""
    values = _spread("step_latency_s", [row.latency_ns / NS for row in rows])
    if not rows:
        return values | {f"step_latency_s.{cause}": None for cause in CAUSES}
    totals = [sum(row.causes_ns[i] for row in rows) for i in range(len(CAUSES))]
    means = shares(totals, len(rows))
    return values | {f"step_latency_s.{cause}": mean / NS for cause, mean in zip(CAUSES, means, strict=True)}


def _rollout_to_training(task: TaskLedger) -> float | None:
    training = CAUSES.index("train")
    ratios = [_ratio(row.complete_ns - row.generate_ns, sum(row.causes_ns[training:])) for row in task.rows]
    return _mean([ratio for ratio in ratios if ratio is not None])


# --- devices ---------------------------------------------------------------------------------------


def _utilisation(run: Run) -> Values:
    """What the devices did. n replicas and m lanes of `devices` devices each.

    rollout_busy       sum over replicas of the time with a turn in flight / (n M)
    train_busy         sum over lanes of the time with a CreateAdapter, Train or Publish in flight / (m M)
    busy, idle         mean of the two weighted by devices; 1 - busy
    rollout_effective  output tokens of turns / (rollout_peak_tokens_per_s n M)
    train_effective    trained tokens of finished updates / (train_peak_tokens_per_s m M)
    effective          mean of the two weighted by devices
    rollout_peak_tokens_per_s  the experiment's `cluster.replicas.peak_tokens_per_s`, else the highest rate
                       that a replica reached in this trace over one second, a turn's tokens spread evenly
                       over the turn
    train_peak_tokens_per_s    the experiment's `cluster.lanes.peak_tokens_per_s`, else tokens / time of the
                       best single update of this trace

    Rates relative to a trace's own peak compare within a run; to compare runs give the peaks.
    """
    cluster, length = run.experiment.cluster, run.length_ns
    peak = cluster.replicas.peak_tokens_per_s or max(
        (flow.peak_per_s(length) for flow in run.flows.values()), default=0.0
    )
    best = cluster.lanes.peak_tokens_per_s or max((n * NS / ns for n, ns in run.updates if ns), default=0.0)
    trained = sum(tokens for tokens, _ in run.updates)
    rollout_busy = _covered(run, run.rollout_covers.values())
    train_busy = _covered(run, run.lane_covers.values())
    rollout = _ratio(run.num_tokens * NS, peak * cluster.replicas.count * length)
    train = _ratio(trained * NS, best * cluster.lanes.count * length)
    busy = _weighted(run, rollout_busy, train_busy)
    return {
        "rollout_busy": rollout_busy,
        "train_busy": train_busy,
        "busy": busy,
        "idle": None if busy is None else 1 - busy,
        "rollout_effective": rollout,
        "train_effective": train,
        "effective": _weighted(run, rollout, train),
        "rollout_peak_tokens_per_s": peak or None,
        "train_peak_tokens_per_s": best or None,
    }


def _covered(run: Run, covers: Iterable[Any]) -> float | None:
    covered = [cover.covered_ns(run.begin, run.end) for cover in covers]
    return _ratio(sum(covered), len(covered) * run.length_ns)


def _weighted(run: Run, rollout: float | None, train: float | None) -> float | None:
    """The mean weighted by devices; None where one is."""
    if rollout is None or train is None:
        return None
    cluster = run.experiment.cluster
    a = cluster.replicas.count * cluster.replicas.devices
    b = cluster.lanes.count * cluster.lanes.devices
    return (a * rollout + b * train) / (a + b)


# --- adapters, memory, queues, fairness ------------------------------------------------------------


def _contention(run: Run) -> Values:
    """What tasks did to one another.

    dropped, dropped.<reason>  trajectories given up
    adapter_loads   adapter versions brought into a slot; adapter_load_s: mean time of one
    preemptions     None: engines do not report them in this schema version
    kv_peak         highest sum on a replica, over the turns in flight, of prompt + output tokens, counted
                    for the whole turn: an upper bound of resident KV tokens (turns without answer left out)
    in_flight.*     turns in flight, mean over the window and highest
    queue_depth.*   batches complete with no lane at work on them, mean over the window and highest
    fairness_jain   (sum x)^2 / (n sum x^2) over the tasks submitted before the instant T at which the first
                    task was done (the end of the window if none was) and neither cancelled nor failed by
                    then; x = steps committed by T / steps wanted / (T - submission)
    """
    dropped: dict[str, int] = {}
    for task in run.tasks.values():
        for reason, num in task.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + num
    waits = run.waits()
    loads = run.load_times_ns
    kv = [level.peak() for level in run.kv.values()]
    return {
        "dropped": sum(dropped.values()),
        **{f"dropped.{reason}": num for reason, num in sorted(dropped.items())},
        "adapter_loads": len(loads),
        "adapter_load_s": _ratio(sum(loads), len(loads) * NS),
        "preemptions": None,
        "kv_peak": max(kv) or None,
        "in_flight.mean": _ratio(run.turns.sum_ns(run.begin, run.end), run.length_ns),
        "in_flight.max": run.turns.peak(),
        "queue_depth.mean": _ratio(waits.sum_ns(run.begin, run.end), run.length_ns),
        "queue_depth.max": waits.peak(),
        "fairness_jain": _fairness(run),
    }


def _fairness(run: Run) -> float | None:
    closed = {name: task.closed or 0 for name, task in run.tasks.items() if name in run.outcomes}
    until = min((at for name, at in closed.items() if run.outcomes[name] == "done"), default=run.end)
    progress = []
    for name, task in run.tasks.items():
        has_left = closed.get(name, until) <= until and run.outcomes.get(name) in ("cancelled", "failed")
        if task.submitted < until and not has_left:
            num = sum(1 for row in task.rows if row.end_ns <= until)
            progress.append(num / task.spec.steps / (until - task.submitted))
    largest = max(progress, default=0.0)
    if not largest:
        return None
    x = [rate / largest for rate in progress]
    return sum(x) ** 2 / (len(x) * sum(a * a for a in x))


# --- learning --------------------------------------------------------------------------------------


def _learning(run: Run) -> Values:
    """What the worlds report about learning; None in simulation.

    reward_first5, reward_last5  mean over tasks of the task's mean reward of its first and last five steps
    """
    firsts = [_mean(_rewards(task)[:5]) for task in run.tasks.values()]
    lasts = [_mean(_rewards(task)[-5:]) for task in run.tasks.values()]
    return {
        "reward_first5": _mean([value for value in firsts if value is not None]),
        "reward_last5": _mean([value for value in lasts if value is not None]),
    }


def _rewards(task: TaskLedger) -> list[float]:
    return [row.reward for row in task.rows if row.reward is not None]


def _of_task(run: Run, task: TaskLedger) -> Values:
    """The same of one task; further:

    outcome               done, failed, cancelled, or open where the trace stops earlier
    steps_per_hour        steps / (its close - its submission)
    steps_per_hour_active steps / (its last commit - its first turn begun)
    reward, loss, grad_norm, kl, logprob_gap   lists with one value per committed step, the reward that of
                          the trained trajectories; None where no step has the value
    """
    rewards = _rewards(task)
    stats = {
        name: _known([getattr(row.stats, name) for row in task.rows])
        for name in ("loss", "grad_norm", "kl", "logprob_gap")
    }
    return {
        "outcome": run.outcomes.get(task.spec.name, "open"),
        "steps": len(task.rows),
        "steps_per_hour": _own_rate(task),
        "steps_per_hour_active": _active_rate(task),
        "ttfs_s": _ttfs_ns(task) / NS if task.rows else None,
        **_latency(task.rows),
        "rollout_to_training_ratio": _rollout_to_training(task),
        "tokens": task.num_tokens,
        "trajectories": sum(row.num_trained for row in task.rows),
        "dropped": sum(task.dropped.values()),
        "reward": _known([row.reward for row in task.rows]),
        "reward_first5": _mean(rewards[:5]),
        "reward_last5": _mean(rewards[-5:]),
        **stats,
    }


_GROUPS: tuple[Callable[[Run], Values], ...] = (_pace, _waiting, _utilisation, _contention, _learning)


# --- arithmetic ------------------------------------------------------------------------------------


def _rows(run: Run) -> Iterable[StepRow]:
    return (row for task in run.tasks.values() for row in task.rows)


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _known(values: list[float | None]) -> list[float | None] | None:
    return values if any(value is not None for value in values) else None


def _spread(name: str, values: Sequence[float]) -> Values:
    ordered = sorted(values)
    return {
        f"{name}.mean": _mean(ordered),
        f"{name}.p50": quantile(ordered, 0.5),
        f"{name}.p95": quantile(ordered, 0.95),
        f"{name}.max": ordered[-1] if ordered else None,
    }


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The quantile of ascending values, interpolated linearly; None for none."""
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    i = int(place)
    above = ordered[min(i + 1, len(ordered) - 1)]
    return ordered[i] + (place - i) * (above - ordered[i])
