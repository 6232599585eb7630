"""What must hold between the keys of an experiment, beyond each value's own type.

Every check raises `Misfit` with the path in the YAML. Knows no file: whether models and profiles exist is
asked in `load.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from experiments.schema import Misfit, one_of
from experiments.yaml_strict import Path
from marlaas.spec import (
    ClusterSpec,
    Distribution,
    Environment,
    Experiment,
    Fixed,
    Kill,
    LookupEnvironment,
    Mixture,
    ReplicasSpec,
    ReverseEnvironment,
    SearchEnvironment,
    SortEnvironment,
    TaskSpec,
    Uniform,
)
from marlaas.systems import SYSTEMS


def check(experiment: Experiment) -> None:
    """Raise `Misfit` for the first contradiction in an experiment whose `count`s are not yet expanded."""
    _check_system(experiment)
    _check_replicas(experiment.cluster.replicas, ("cluster", "replicas"))
    _check_placement(experiment.cluster, ("cluster",))
    for name, environment in experiment.environments.items():
        _check_environment(environment, ("environments", name))
    for index, task in enumerate(experiment.tasks):
        _check_task(experiment, task, ("tasks", index))
    _check_names(experiment)
    _check_operations(experiment)
    for path, distribution in _distributions(experiment, ()):
        _check_distribution(distribution, path)


def expand_task(task: TaskSpec) -> list[TaskSpec]:
    """The tasks that a `count` stands for: `<name>-0`, `<name>-1`, ..., or the task itself."""
    if task.count == 1:
        return [task]
    replace = msgspec.structs.replace
    return [replace(task, name=f"{task.name}-{i}", count=1) for i in range(task.count)]


def _check_system(experiment: Experiment) -> None:
    if isinstance(experiment.system, str) and experiment.system not in SYSTEMS:
        wanted = one_of(experiment.system, SYSTEMS, "systems")
        raise Misfit(("system",), f"unknown system {experiment.system!r}", wanted)


def _check_replicas(replicas: ReplicasSpec, path: Path) -> None:
    if replicas.engine == "openai" and len(replicas.urls) != replicas.count:
        problem = f"{len(replicas.urls)} servers for {replicas.count} replicas"
        raise Misfit((*path, "urls"), problem, "wanted one URL for each replica, http://HOST:PORT")
    if replicas.engine != "openai" and replicas.urls:
        raise Misfit((*path, "urls"), f"{replicas.engine} replicas have no servers", "wanted engine: openai")
    for index, url in enumerate(replicas.urls):
        if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
            raise Misfit((*path, "urls", index), f"{url!r} is not a server's URL", "wanted http://HOST:PORT")
    if replicas.devices % replicas.pipeline_parallel:
        problem = f"{replicas.pipeline_parallel} stages do not share {replicas.devices} devices evenly"
        raise Misfit((*path, "pipeline_parallel"), problem, "wanted a divisor of devices")
    if replicas.block_tokens is not None and replicas.kv_tokens < replicas.block_tokens:
        problem = f"{replicas.kv_tokens} are less than one block of {replicas.block_tokens}"
        raise Misfit((*path, "kv_tokens"), problem, "wanted at least block_tokens")


def _check_placement(cluster: ClusterSpec, path: Path) -> None:
    if cluster.placement == "local":
        for key in ("ray_address", "shared_folder"):
            if getattr(cluster, key):
                problem = f"{key} means nothing to workers of one machine"
                raise Misfit((*path, key), problem, "wanted placement: ray with it")
        return
    for kind, pool in (("replicas", cluster.replicas), ("lanes", cluster.lanes)):
        if pool.device == "auto":
            problem = "Ray must be told which devices to reserve"
            raise Misfit((*path, kind, "device"), problem, "wanted cpu, cuda or npu")
    address = cluster.ray_address
    if address is not None and address != "auto" and not re.fullmatch(r"[^/\s:]+:\d+", address):
        problem = f"{address!r} is not the address of a Ray cluster"
        wanted = "wanted HOST:PORT or auto; run marlaas on a node of the cluster, not through ray://"
        raise Misfit((*path, "ray_address"), problem, wanted)


def _check_environment(environment: Environment, path: Path) -> None:
    if isinstance(environment, SortEnvironment | ReverseEnvironment):
        low, high = environment.min_letters, environment.max_letters
        if low > high:
            raise Misfit((*path, "min_letters"), f"{low} is above max_letters", f"wanted at most {high}")
    soonest = _least(environment.latency_s)
    if soonest >= environment.timeout_s:
        problem = f"every answer takes at least {soonest:g} s"
        raise Misfit((*path, "latency_s"), problem, f"wanted less than timeout_s, {environment.timeout_s:g}")


def _check_task(experiment: Experiment, task: TaskSpec, path: Path) -> None:
    if task.environment not in experiment.environments:
        wanted = one_of(task.environment, experiment.environments, "environments")
        raise Misfit((*path, "environment"), f"unknown environment {task.environment!r}", wanted)
    environment = experiment.environments[task.environment]
    if isinstance(environment, LookupEnvironment | SearchEnvironment) and task.max_turns < 2:
        problem = f"asking and answering need a turn each, got {task.max_turns}"
        raise Misfit((*path, "max_turns"), problem, "wanted at least 2")
    kv_tokens = experiment.cluster.replicas.kv_tokens
    if task.max_context_tokens > kv_tokens:
        problem = f"a trajectory can reach {task.max_context_tokens} tokens and never fits a replica"
        wanted = f"wanted at most cluster.replicas.kv_tokens, {kv_tokens}"
        raise Misfit(path, problem, f"{wanted}: fewer or shorter turns, a shorter prompt, or more kv_tokens")
    min_group = experiment.limits_of(task).min_group
    if min_group > task.samples:
        key = "limits" if task.limits else "samples"
        inner = (*path, key, "min_group") if task.limits else (*path, key)
        problem = f"a group of {task.samples} samples is always below min_group, {min_group}"
        raise Misfit(inner, problem, "wanted samples of at least min_group")


def _check_names(experiment: Experiment) -> None:
    first: dict[str, int] = {}
    for index, task in enumerate(experiment.tasks):
        for one in expand_task(task):
            if one.name in first:
                problem = f"duplicate task name {one.name!r}, first given by tasks[{first[one.name]}]"
                wanted = "wanted every task, counted ones included, to have its own name"
                raise Misfit(("tasks", index, "name"), problem, wanted)
            first[one.name] = index


def _check_operations(experiment: Experiment) -> None:
    tasks = [one.name for task in experiment.tasks for one in expand_task(task)]
    workers = [*experiment.replica_names, *experiment.lane_names]
    for index, operation in enumerate(experiment.operations):
        kind, name, valid = (
            ("worker", operation.worker, workers)
            if isinstance(operation, Kill)
            else ("task", operation.task, tasks)
        )
        if name not in valid:
            path = ("operations", index, kind)
            raise Misfit(path, f"unknown {kind} {name!r}", one_of(name, valid, f"{kind}s"))


def _check_distribution(distribution: Distribution, path: Path) -> None:
    if isinstance(distribution, Uniform) and distribution.low > distribution.high:
        problem = f"{distribution.low:g} is above high"
        raise Misfit((*path, "low"), problem, f"wanted at most {distribution.high:g}")
    if isinstance(distribution, Mixture) and len(distribution.weights) != len(distribution.parts):
        problem = f"{len(distribution.weights)} weights for {len(distribution.parts)} parts"
        raise Misfit((*path, "weights"), problem, "wanted one weight for each part")
    if isinstance(distribution, Mixture) and not distribution.parts:
        raise Misfit((*path, "parts"), "a mixture of nothing", "wanted at least one part")


def _distributions(node: Any, path: Path) -> Iterator[tuple[Path, Distribution]]:
    """Every distribution below a node, with its path."""
    if isinstance(node, Distribution):
        yield path, node
    if isinstance(node, msgspec.Struct):
        for field in node.__struct_fields__:
            yield from _distributions(getattr(node, field), (*path, field))
    elif isinstance(node, dict):
        for key, inner in node.items():
            yield from _distributions(inner, (*path, key))
    elif isinstance(node, tuple):
        for index, inner in enumerate(node):
            yield from _distributions(inner, (*path, index))


def _least(distribution: Distribution) -> float:
    """The smallest value that can be drawn, or 0 where that depends on chance."""
    if isinstance(distribution, Fixed):
        return distribution.value
    if isinstance(distribution, Uniform):
        return distribution.low
    return 0.0
