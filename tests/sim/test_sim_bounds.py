"""What arithmetic forbids, the simulator never shows: bounds as properties of random experiments.

With R the time of a task's rollout and environment alone, T of its training and publishing, N tasks:

    marlaas ≤ min(lanes/T, N/(R + T)) steps per second    any experiment; R: the longest trajectory by itself
    gain over single ≤ min(N, 1 + R/T)                    tasks alike, one lane
    gain over sync < 2                                    tasks and steps alike, no contention, one lane
    gain over sync < 3                                    the same with contention for one thing
    gain over sync < 1 + S                                stragglers, no contention; S as in `straggling`
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from random_scenes import ENDLESS, MS, Scene, ms, scenes, times
from small_runs import Record

from marlaas.events import AdapterPublished, TaskSubmitted
from marlaas.spec import (
    ClusterSpec,
    Experiment,
    Fixed,
    LanesSpec,
    Mixture,
    ReplicasSpec,
    SumsEnvironment,
    TaskSpec,
    Workload,
)
from sim.profile import LaneProfile, Profile, ReplicaProfile, assumed, iteration_costs, training_seconds
from sim.timeline import to_ns
from sim.workload import Plans

RANDOM = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def span_ns(record: Record) -> int:
    """From the first submission to the last commit."""
    return record.events(AdapterPublished)[-1].at - record.events(TaskSubmitted)[0].at


class Work(NamedTuple):
    """What one step of a task takes at the very least, in ns: its longest trajectory, and its lane."""

    rollout: int
    training: int


def work_of(scene: Scene) -> dict[str, list[Work]]:
    """The least work of every step of every task, from the costs alone.

    A trajectory takes its iterations in a batch of one, its environment and what lies between; its first
    tokens may come with the reading of its contexts, whose time is left out.
    """
    experiment, profile = scene
    plans, lane = Plans(experiment, profile), profile.lane
    iteration_ns = iteration_costs(profile.replica).decode_fs(1, 0, 1) // 10**6
    overhead_ns = to_ns(profile.replica.turn_overhead_s.value)

    def step(task: TaskSpec, number: int) -> Work:
        plan = plans.of(task.name, number)
        paths = [
            sum(
                (plan.outputs[turn][i] - 1) * iteration_ns + overhead_ns + plan.environment_ns[turn][i]
                for turn in range(plan.turns[i])
            )
            for i in range(task.num_trajectories)
        ]
        train_s = training_seconds(lane, plan.lengths, task.training.micro_batch_tokens)
        train_ns = to_ns(train_s * plans.factor("training", task.name, number))
        publish_ns = to_ns(lane.publish_s.value * plans.factor("publish", task.name, number))
        return Work(max(paths), train_ns + publish_ns)

    return {task.name: [step(task, k) for k in range(task.steps)] for task in experiment.tasks}


def rate_bounds(scene: Scene) -> tuple[float, float]:
    """Steps per ns that the lanes, and the tasks' own cycles, allow at most."""
    work = work_of(scene)
    steps = [step for own in work.values() for step in own]
    by_lanes = scene.experiment.cluster.lanes.count * len(steps) / sum(step.training for step in steps)
    by_cycles = sum(len(own) / sum(step.rollout + step.training for step in own) for own in work.values())
    return by_lanes, by_cycles


@settings(RANDOM, max_examples=40)
@given(scenes())
def test_no_system_is_faster_than_its_lanes_and_its_tasks_cycles(scene: Scene) -> None:
    """min(1/T, N/(R + T)), for unlike tasks the sum of their cycles' rates, under every system."""
    num_steps = sum(task.steps for task in scene.experiment.tasks)
    rate = num_steps / span_ns(scene.run())
    by_lanes, by_cycles = rate_bounds(scene)
    assert rate <= by_lanes * (1 + 1e-12)
    assert rate <= by_cycles * (1 + 1e-12)


# --- tasks alike -------------------------------------------------------------------------------------------


class Alike(NamedTuple):
    """N tasks of K steps, all alike and none with any chance in it."""

    scene: Scene
    num_tasks: int
    num_steps: int

    def alone(self) -> Scene:
        """One of the tasks, with all to itself."""
        experiment = self.scene.experiment
        return self.scene._replace(experiment=replace(experiment, tasks=experiment.tasks[:1]))

    def gain(self, over: str) -> float:
        """How much shorter `marlaas` makes the whole."""
        return span_ns(self.scene.run(over)) / span_ns(self.scene.run("marlaas"))


@st.composite
def alike(draw: st.DrawFn, *, contended: str = "nothing", has_tail: bool = False) -> Alike:
    """Equal tasks that contend for nothing, or for one thing: `iterations`, `slots` or `environment`."""
    num_tasks, num_steps = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    num_each = draw(st.integers(1, 4))
    latency = draw(times(0, 2000)) if has_tail else Fixed(value=draw(ms(0, 2000)))
    task = TaskSpec(
        name="t",
        environment="e",
        steps=num_steps,
        prompts=num_each,
        samples=1,
        workload=Workload(
            prompt_tokens=Fixed(value=5.0),
            output_tokens=Fixed(value=float(draw(st.integers(1, 30)))),
            environment_s=latency,
        ),
    )
    most = num_tasks * num_each
    replica = ReplicaProfile(iteration_s=assumed(draw(ms(1, 20))))
    if contended == "iterations":
        replica = replace(
            replica, per_sequence_s=assumed(draw(ms(0, 20))), per_adapter_s=assumed(draw(ms(0, 20)))
        )
    experiment = Experiment(
        name="alike",
        tasks=tuple(replace(task, name=f"t{i}") for i in range(num_tasks)),
        seed=draw(st.integers(0, 99)),
        limits=ENDLESS,
        environments={
            "e": SumsEnvironment(
                concurrency=draw(st.integers(1, most)) if contended == "environment" else most, timeout_s=1e6
            )
        },
        cluster=ClusterSpec(
            replicas=ReplicasSpec(
                slots=draw(st.integers(1, num_tasks)) if contended == "slots" else num_tasks,
                max_num_seqs=most,
                kv_tokens=1000 * most,
            ),
            lanes=LanesSpec(),
        ),
    )
    lane = LaneProfile(step_s=assumed(draw(ms(1, 3000))), publish_s=assumed(draw(ms(0, 200))))
    return Alike(Scene(experiment, Profile(name="alike", replica=replica, lane=lane)), num_tasks, num_steps)


CONTENDED = ("nothing", "iterations", "slots", "environment")


@pytest.mark.parametrize("contended", CONTENDED)
@settings(RANDOM, max_examples=12)
@given(st.data())
def test_the_gain_over_one_task_at_a_time_is_bounded(contended: str, data: st.DataObject) -> None:
    """At most N, and at most 1 + R/T, with R and T of a task that is alone; `single` is N times that task."""
    of = data.draw(alike(contended=contended))
    train_ns = work_of(of.scene)["t0"][0].training
    alone_ns = span_ns(of.alone().run("marlaas"))
    rollout_ns = alone_ns / of.num_steps - train_ns
    assert span_ns(of.scene.run("single")) == of.num_tasks * alone_ns
    assert of.gain("single") <= min(of.num_tasks, 1 + rollout_ns / train_ns) * (1 + 1e-12)


@settings(RANDOM, max_examples=25)
@given(alike())
def test_the_gain_over_rounds_is_below_two_where_nothing_is_contended(of: Alike) -> None:
    """A round takes R + N·T, and `marlaas` at least the larger of R + T and N·T a step."""
    assert of.gain("sync") < 2


@pytest.mark.parametrize("contended", CONTENDED[1:])
@settings(RANDOM, max_examples=15)
@given(st.data())
def test_the_gain_over_rounds_is_below_three_where_one_thing_is_contended(
    contended: str, data: st.DataObject
) -> None:
    """A round takes at most R + W + N·T, W its work at what is contended, and W bounds `marlaas` too."""
    assert data.draw(alike(contended=contended)).gain("sync") < 3


# --- stragglers --------------------------------------------------------------------------------------------


def straggling(scene: Scene) -> float:
    """S: the sum over rounds of the slowest rollout by the sum over steps of the slowest task's, 1 to N."""
    work = list(work_of(scene).values())
    rounds = sum(max(own[k].rollout for own in work) for k in range(len(work[0])))
    return rounds / max(sum(step.rollout for step in own) for own in work)


@settings(RANDOM, max_examples=25)
@given(alike(has_tail=True))
def test_the_gain_over_rounds_is_bounded_by_how_much_stragglers_differ(of: Alike) -> None:
    """Rounds take Σ max R + N·K·T, at the most; `marlaas` at least Σ R of the slowest task and N·K·T."""
    work = work_of(of.scene)
    assume(all(step.rollout for own in work.values() for step in own))
    # A turn that joins a batch waits for the end of the iteration under way: not contention, but its grain.
    grain_ns = of.num_steps * to_ns(of.scene.profile.replica.iteration_s.value)
    rounds_ns = span_ns(of.scene.run("sync")) - grain_ns
    assert rounds_ns / span_ns(of.scene.run("marlaas")) < 1 + straggling(of.scene)


def test_stragglers_that_take_turns_beat_any_fixed_bound() -> None:
    """The bound of 3 needs steps alike: where one trajectory in a hundred is slow, rounds wait for each."""
    task = TaskSpec(
        name="t",
        environment="e",
        steps=25,
        prompts=4,
        samples=1,
        workload=Workload(
            prompt_tokens=Fixed(value=5.0),
            output_tokens=Fixed(value=2.0),
            environment_s=Mixture(weights=(99.0, 1.0), parts=(Fixed(value=1.0), Fixed(value=200.0))),
        ),
    )
    experiment = Experiment(
        name="turns",
        tasks=tuple(replace(task, name=f"t{i}") for i in range(12)),
        limits=ENDLESS,
        environments={"e": SumsEnvironment(timeout_s=1e6)},
        cluster=ClusterSpec(replicas=ReplicasSpec(slots=12)),
    )
    profile = Profile(
        name="turns",
        replica=ReplicaProfile(iteration_s=assumed(MS)),
        lane=LaneProfile(step_s=assumed(0.1)),
    )
    of = Alike(Scene(experiment, profile), 12, 25)
    assert 3.0 < of.gain("sync") < 1 + straggling(of.scene)


@pytest.mark.slow
@settings(RANDOM, max_examples=300)
@given(scenes())
def test_no_system_is_faster_than_it_can_be_over_many_experiments(scene: Scene) -> None:
    """The bounds of lanes and cycles once more, over many."""
    rate = sum(task.steps for task in scene.experiment.tasks) / span_ns(scene.run())
    assert rate <= min(rate_bounds(scene)) * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("contended", CONTENDED)
@settings(RANDOM, max_examples=60)
@given(st.data())
def test_gains_are_bounded_over_many_experiments(contended: str, data: st.DataObject) -> None:
    """Over `single` and over `sync`, once more, over many."""
    of = data.draw(alike(contended=contended))
    work = work_of(of.scene)["t0"][0]
    alone_ns = span_ns(of.alone().run("marlaas"))
    most = min(of.num_tasks, alone_ns / of.num_steps / work.training)
    assert of.gain("single") <= most * (1 + 1e-12)
    assert of.gain("sync") < (2 if contended == "nothing" else 3)
