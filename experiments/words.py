"""How numbers, runs and metrics are spelt for people, in terminals and reports alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marlaas.errors import InputError

MEANINGS = {
    "makespan_s": "from the first submission to the end of the last task",
    "steps": "policy updates committed, all tasks",
    "steps_per_hour": "steps over the makespan",
    "steps_per_hour_normalised": "mean over tasks of its rate over its rate alone",
    "tokens_per_s": "sampled tokens over the makespan",
    "trajectories": "trajectories trained on",
    "tasks_done": "tasks that reached their last step",
    "tasks_failed": "tasks that ended early for a fault",
    "tasks_cancelled": "tasks that their tenant ended",
    "tasks_open": "tasks that had not ended when the trace did",
    "ttfs_s": "time to first step: from a task's submission to its first commit",
    "step_latency_s": "from one commit of a task to its next",
    "step_latency_s.queue": "waiting for a start, a slot, a replica or a place in the environment",
    "step_latency_s.adapter_load": "waiting while the adapter is brought into a slot",
    "step_latency_s.generate": "sampling",
    "step_latency_s.environment": "the environment at work",
    "step_latency_s.straggler_wait": "finished trajectories waiting for the last of their batch",
    "step_latency_s.buffer_wait": "complete batches waiting for a lane",
    "step_latency_s.train": "training",
    "step_latency_s.publish": "making the new version durable and loadable",
    "rollout_to_training_ratio": "R/T: time to complete a batch over time to train and publish it",
    "rollout_busy": "share of replica time with a turn in flight",
    "train_busy": "share of lane time with work in flight",
    "busy": "share of device time with work in flight",
    "idle": "1 - busy",
    "rollout_effective": "sampled tokens over what replicas could sample at their peak rate",
    "train_effective": "trained tokens over what lanes could train at their peak rate",
    "effective": "device time weighted by achieved over achievable rate",
    "rollout_peak_tokens_per_s": "the peak rate of a replica that `effective` is relative to",
    "train_peak_tokens_per_s": "the peak rate of a lane that `effective` is relative to",
    "dropped": "trajectories given up",
    "adapter_loads": "adapter versions brought into a slot",
    "adapter_load_s": "mean time of one load",
    "preemptions": "sequences that a full replica put off and computed again",
    "kv_peak": "most tokens that turns in flight on a replica held or would hold",
    "in_flight": "turns in flight",
    "queue_depth": "complete batches that no lane works on",
    "fairness_jain": "Jain's index of the tasks' progress when the first is done; 1 is even",
    "reward_first5": "mean reward of each task's first five steps",
    "reward_last5": "mean reward of each task's last five steps",
}


def meaning(metric: str) -> str:
    """A metric in words; a part of it (`.mean`, `.p95`) is described as the whole."""
    return MEANINGS.get(metric) or MEANINGS.get(metric.rpartition(".")[0], "")


def figure(value: Any) -> str:
    """A value: three digits, thousands separated, a dash for what is not known."""
    match value:
        case None:
            return "–"
        case bool():
            return str(value).lower()
        case int():
            return f"{value:,}"
        case float() if abs(value) >= 999.5:
            return f"{value:,.0f}"
        case float():
            return f"{value:.3g}"
        case _:
            return str(value)


def percent(share: float | None, sign: str = "") -> str:
    """A share in percent; `sign` is "+" for a difference."""
    return "–" if share is None else f"{100 * share:{sign}.1f} %"


def labels(folders: Sequence[Path]) -> list[str]:
    """The shortest endings of run folders' paths that tell them apart; raises `InputError` if none does."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, 1 + max(len(part) for part in parts)):
        short = ["/".join(part[-length:]) for part in parts]
        if len(set(short)) == len(short):
            return short
    twice = next(folder for folder, part in zip(folders, parts, strict=True) if parts.count(part) > 1)
    raise InputError(str(twice), "the same run is named twice", "wanted different run folders")
