"""What `effective` utilisation is relative to: the rates that the profiles allow, independent of any run.

Owns the definition of a peak; the YAMLs of the study state the numbers, and a test compares the two.
"""

from __future__ import annotations

from marlaas.spec import Experiment
from sim.costs import FS_PER_S
from sim.profile import Profile, iteration_costs

CONTEXT_TOKENS = 1000


def replica_peak(experiment: Experiment, profile: Profile, num_trajectories: int) -> float:
    """Output tokens per second of a replica that decodes its share of `num_trajectories`.

    Each has 1,000 tokens of context, one adapter is active, and no more take part than have a seat and fit
    the KV pool.
    """
    replicas = experiment.cluster.replicas
    share = num_trajectories / replicas.count
    batch = int(min(share, replicas.max_num_seqs, replicas.kv_tokens / CONTEXT_TOKENS))
    costs = iteration_costs(profile.replica)
    return batch * FS_PER_S / costs.decode_fs(batch, batch * CONTEXT_TOKENS, 1)


def lane_peak(experiment: Experiment, profile: Profile) -> float:
    """Trained tokens per second of a lane in full micro-batches, its fixed times left out."""
    lane = profile.lane
    tokens = experiment.tasks[0].training.micro_batch_tokens * lane.num_parallel_micro_batches
    return tokens / (lane.per_micro_batch_s.value + lane.per_token_s.value * tokens)


def peaks(experiment: Experiment, profile: Profile, num_trajectories: int) -> tuple[float, float]:
    """Both peaks to three digits, as they stand in YAML."""
    replica = replica_peak(experiment, profile, num_trajectories)
    lane = lane_peak(experiment, profile)
    return float(f"{replica:.3g}"), float(f"{lane:.3g}")
