"""Which cores each worker runs on, so that rollout and training are really disaggregated on a CPU.

Owns the split alone; knows no process. Rules, in order: with at least as many cores as workers every
worker has its own cores, split evenly, the odd ones going to replicas first; with fewer, replicas and
lanes still have disjoint cores and workers of one kind share theirs; one core is shared by all. The
driver is not pinned: it is idle most of the time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

CorePlan = dict[str, tuple[int, ...]]


def usable_cores() -> tuple[int, ...]:
    """The cores this process may use, ascending; platforms that cannot say count all of them."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def pin(cores: Sequence[int]) -> None:
    """Keep this process and its threads to come on `cores`; does nothing where that is unknown."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def split_cores(replicas: Sequence[str], lanes: Sequence[str], cores: Sequence[int]) -> CorePlan:
    """Give every worker its cores by the rules above; `cores` must not be empty."""
    num_workers = len(replicas) + len(lanes)
    if len(cores) >= num_workers:
        return _even([*replicas, *lanes], cores)
    if len(cores) == 1:
        return dict.fromkeys((*replicas, *lanes), (cores[0],))
    num_lane_cores = round(len(cores) * len(lanes) / num_workers)
    cut = len(cores) - min(max(num_lane_cores, 1), len(cores) - 1)
    return _in_turn(replicas, cores[:cut]) | _in_turn(lanes, cores[cut:])


def _even(names: Sequence[str], cores: Sequence[int]) -> CorePlan:
    share, extra = divmod(len(cores), len(names))
    plan: CorePlan = {}
    begin = 0
    for position, name in enumerate(names):
        end = begin + share + (position < extra)
        plan[name] = tuple(cores[begin:end])
        begin = end
    return plan


def _in_turn(names: Sequence[str], cores: Sequence[int]) -> CorePlan:
    """Kinds with fewer workers than cores split evenly; otherwise workers take single cores in turn."""
    if len(cores) >= len(names):
        return _even(names, cores)
    return {name: (cores[position % len(cores)],) for position, name in enumerate(names)}
