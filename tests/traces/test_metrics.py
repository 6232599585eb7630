"""Every metric against the answer worked out by hand from the run drawn in `handmade_traces.py`."""

from __future__ import annotations

import pytest
from handmade_traces import RECORDS, by_hand, s, trace_of

from marlaas.commands import CloseTask
from traces.metrics import CAUSES, Run, alone_rates, compute, quantile
from traces.metrics.steps import shares


@pytest.fixture(scope="module")
def values() -> dict[str, object]:
    """All metrics of the run, with rates alone made up."""
    return compute(by_hand(), alone={"a": 480.0, "b": 200.0})


def expect(values: dict[str, object], wanted: dict[str, object]) -> None:
    """Compare the named metrics: floats within rounding, all else exactly."""
    assert {name: values[name] for name in wanted} == {
        name: pytest.approx(value) if isinstance(value, float) else value for name, value in wanted.items()
    }


def test_pace(values: dict[str, object]) -> None:
    """Three commits and 200 sampled tokens in the 30 s from the first submission to the last close."""
    expect(
        values,
        {
            "makespan_s": 30.0,
            "steps": 3,
            "steps_per_hour": 360.0,  # 3 / 30 s
            "tokens_per_s": 200 / 30,  # 20 + 30 + 40 + 10 + 60 + 20 + 20
            "trajectories": 5,  # 2 + 1 + 2
            "tasks_done": 2,
            "tasks_failed": 0,
            "tasks_cancelled": 0,
            "tasks_open": 0,
        },
    )


def test_rates_relative_to_running_alone(values: dict[str, object]) -> None:
    """a: 2 steps in 30 s = 240 an hour of 480 alone; b: 1 in 20 s = 180 of 200; mean of 0.5 and 0.9."""
    expect(
        values,
        {
            "steps_per_hour_normalised": 0.7,
            "tasks.a.steps_per_hour": 240.0,
            "tasks.b.steps_per_hour": 180.0,
            "tasks.a.steps_per_hour_active": 2 / 27 * 3600,  # first turn at 5, last commit at 32
            "tasks.b.steps_per_hour_active": 1 / 17 * 3600,  # 5, 22
        },
    )
    assert alone_rates(by_hand()) == {"a": pytest.approx(2 / 27 * 3600), "b": pytest.approx(1 / 17 * 3600)}
    assert compute(by_hand())["steps_per_hour_normalised"] is None
    assert compute(by_hand(), alone={"a": 1.0})["steps_per_hour_normalised"] is None


def test_time_to_first_step(values: dict[str, object]) -> None:
    """a: submitted at 2, first commit at 19; b: 2 and 22."""
    expect(
        values,
        {
            "ttfs_s.mean": 18.5,
            "ttfs_s.p50": 18.5,
            "ttfs_s.p95": 17 + 0.95 * 3,
            "ttfs_s.max": 20.0,
            "tasks.a.ttfs_s": 17.0,
            "tasks.b.ttfs_s": 20.0,
        },
    )


# Per step and trajectory, in seconds: queue, load, generate, environment, straggler | buffer, train, publish.
#   a0: [2, 19]  a/0: 1 2 2 1 6    a/1: 1 2 4+2 1+2 0       complete at 14 | 0 4 1
#   b0: [2, 22]  b/0: 2 1 5 1 5    b/1: 2 1 10 1 0          complete at 16 | 3 2 1
#   a1: [19, 32] a/0: 0 1 4 1 1    a/1: 0 1 4 2 0           complete at 26 | 1 2+2 1
SPLITS = {
    ("a", 0): (1, 2, 4, 2, 3, 0, 4, 1),
    ("b", 0): (2, 1, 7.5, 1, 2.5, 3, 2, 1),
    ("a", 1): (0, 1, 4, 1.5, 0.5, 1, 4, 1),
}


@pytest.mark.parametrize(("task", "number"), SPLITS)
def test_the_split_of_each_step(task: str, number: int) -> None:
    """Each cause is the mean over the batch's trajectories; together they are the whole step."""
    row = Run(by_hand()).tasks[task].rows[number]
    assert row.causes_ns == tuple(s(seconds) for seconds in SPLITS[task, number])
    assert sum(row.causes_ns) == row.latency_ns


def test_step_latency(values: dict[str, object]) -> None:
    """Latencies 17, 20 and 13 s, and the mean of each cause over the three steps."""
    expect(
        values,
        {
            "step_latency_s.mean": 50 / 3,
            "step_latency_s.p50": 17.0,
            "step_latency_s.p95": 17 + 0.9 * 3,
            "step_latency_s.max": 20.0,
            **{
                f"step_latency_s.{cause}": sum(split[i] for split in SPLITS.values()) / 3
                for i, cause in enumerate(CAUSES)
            },
            "tasks.a.step_latency_s.mean": 15.0,
            "tasks.a.step_latency_s.train": 4.0,
            "tasks.b.step_latency_s.buffer_wait": 3.0,
        },
    )
    for prefix in ("", "tasks.a.", "tasks.b."):
        causes = [values[f"{prefix}step_latency_s.{cause}"] for cause in CAUSES]
        assert sum(causes) == pytest.approx(values[f"{prefix}step_latency_s.mean"], abs=1e-9)


def test_rollout_to_training_ratio(values: dict[str, object]) -> None:
    """a: (14 - 5) / 5 and (26 - 20) / 5, b: (16 - 5) / 3; the mean over tasks."""
    expect(
        values,
        {
            "tasks.a.rollout_to_training_ratio": 1.5,
            "tasks.b.rollout_to_training_ratio": 11 / 3,
            "rollout_to_training_ratio": (1.5 + 11 / 3) / 2,
        },
    )


def test_devices(values: dict[str, object]) -> None:
    """Turns in flight in [5, 15] and [20, 24]; the lane at work in [2, 4], [14, 22], [26, 28], [29, 32]."""
    expect(
        values,
        {
            "rollout_busy": 14 / 30,
            "train_busy": 15 / 30,
            "busy": (3 * 14 / 30 + 15 / 30) / 4,
            # In [5, 7]: 20/2 + 30/4 + 40/5 + 60/10 tokens a second.
            "rollout_peak_tokens_per_s": 31.5,
            "rollout_effective": 200 / (31.5 * 30),
            "train_peak_tokens_per_s": 30.0,  # 60 tokens in 2 s
            "train_effective": (115 + 48 + 60) / (30 * 30),
            "effective": (3 * 200 / (31.5 * 30) + 223 / 900) / 4,
        },
    )
    assert values["busy"] + values["idle"] == 1


def test_peaks_given_by_the_experiment() -> None:
    """A peak in the experiment goes before the trace's own."""
    expect(
        compute(by_hand(rollout_peak=40.0, train_peak=100.0)),
        {
            "rollout_peak_tokens_per_s": 40.0,
            "rollout_effective": 200 / (40 * 30),
            "train_peak_tokens_per_s": 100.0,
            "train_effective": 223 / (100 * 30),
        },
    )


def test_contention(values: dict[str, object]) -> None:
    """Loads of 2, 1 and 1 s; b waits for the lane in [16, 19] and a in [28, 29]."""
    expect(
        values,
        {
            "dropped": 1,
            "dropped.environment_failed": 1,
            "tasks.a.dropped": 0,
            "tasks.b.dropped": 1,
            "adapter_loads": 3,
            "adapter_load_s": 4 / 3,
            "preemptions": None,
            "kv_peak": 30 + 40 + 48 + 68,  # the four turns in [5, 7]
            "in_flight.mean": (2 + 4 + 5 + 10 + 2 + 4 + 4) / 30,
            "in_flight.max": 4,
            "queue_depth.mean": 4 / 30,
            "queue_depth.max": 1,
        },
    )


def test_fairness(values: dict[str, object]) -> None:
    """When b is done at 22, a has 1 of 2 steps and b 1 of 1, both in 20 s: (0.5 + 1)^2 / (2 (0.25 + 1))."""
    expect(values, {"fairness_jain": 0.9})


def test_learning(values: dict[str, object]) -> None:
    """Rewards are those of the trained trajectories: 1 and 0, then 1 and 1; of b only the one kept."""
    expect(
        values,
        {
            "tasks.a.reward": [0.5, 1.0],
            "tasks.b.reward": [0.5],
            "tasks.a.loss": [0.5, None],
            "tasks.b.loss": None,
            "tasks.a.kl": None,
            "tasks.a.reward_first5": 0.75,
            "tasks.a.reward_last5": 0.75,
            "reward_first5": (0.75 + 0.5) / 2,
            "reward_last5": (0.75 + 0.5) / 2,
            "tasks.a.tokens": 100,
            "tasks.b.tokens": 100,
            "tasks.a.trajectories": 4,
            "tasks.a.outcome": "done",
        },
    )


def test_a_trace_that_stops_early() -> None:
    """Cut after 16 s the window ends there, work in flight counts until then, open tasks are open."""
    values = compute(trace_of(RECORDS[:19]))
    expect(
        values,
        {
            "makespan_s": 14.0,
            "steps": 0,
            "steps_per_hour": 0.0,
            "rollout_busy": 10 / 14,
            "train_busy": 4 / 14,  # created in [2, 4], training since 14
            "tasks_open": 2,
            "queue_depth.mean": 0.0,
            "ttfs_s.mean": None,
            "step_latency_s.mean": None,
            "step_latency_s.queue": None,
            "train_effective": None,
            "effective": None,
            "fairness_jain": None,
            "tasks.a.outcome": "open",
            "tasks.a.ttfs_s": None,
            "tasks.a.reward": None,
        },
    )


def test_a_run_in_which_nothing_was_submitted() -> None:
    """Rates over no time are not known; counts are zero."""
    values = compute(trace_of(RECORDS[:3]))
    expect(values, {"makespan_s": 0.0, "steps": 0, "steps_per_hour": None, "busy": None, "idle": None})
    assert values["tasks_open"] == 2


def test_cancelled_tasks_have_no_part_in_fairness() -> None:
    """Had b been cancelled at 22, the first task done would be a, at 32, alone."""
    records = [(event, tuple(_cancel(command) for command in commands)) for event, commands in RECORDS]
    values = compute(trace_of(records))
    expect(values, {"fairness_jain": 1.0, "tasks_cancelled": 1, "tasks.b.outcome": "cancelled"})


def _cancel(command: object) -> object:
    if isinstance(command, CloseTask) and command.task == "b":
        return CloseTask(id=command.id, task="b", outcome="cancelled")
    return command


def test_shares_sum_to_the_whole() -> None:
    """What rounding down leaves goes to the largest remainders, the earliest first."""
    assert shares((7, 7, 7, 0), 3) == (3, 2, 2, 0)  # 2⅓ each, 7 in all
    assert shares((1, 2, 3), 2) == (1, 1, 1)  # ½, 1, 1½: the first of the two halves
    assert shares((4, 8), 4) == (1, 2)


def test_quantiles_are_interpolated() -> None:
    """As numpy's default does."""
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert quantile([5.0], 0.95) == 5.0
    assert quantile([], 0.5) is None
