"""How the time of a simulation grows with the number of tasks.

Tasks of the same kinds on a cluster that grows with them, a replica for each task and a lane for 32: the time
for a trajectory would be the same at any size if nothing ever looked at all tasks and memory were all alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import msgspec

from experiments.bench.core import PROFILE, Blank, cluster, cpu_s, num_trajectories
from experiments.meanwhile import rare_collections
from sim.run import simulate

NUM_TASKS = (32, 1_000, 10_000)


class Growth(msgspec.Struct, frozen=True):
    """A simulation of `num_tasks` tasks, with the trace off: trajectories and CPU-seconds."""

    num_tasks: int
    num_trajectories: int
    seconds: float

    @property
    def us_per_trajectory(self) -> float:
        """CPU-microseconds for each trajectory."""
        return 1e6 * self.seconds / self.num_trajectories


def growth(sizes: tuple[int, ...] = NUM_TASKS) -> Iterator[Growth]:
    """Simulate clusters of these sizes in turn, with garbage collected as by `marlaas simulate`."""
    for num_tasks in sizes:
        experiment = cluster(num_tasks, prompts=4, num_lanes=max(1, num_tasks // 32))
        with rare_collections():
            seconds = cpu_s(partial(simulate, experiment, PROFILE, Blank()))
        yield Growth(num_tasks, num_trajectories(experiment), seconds)
