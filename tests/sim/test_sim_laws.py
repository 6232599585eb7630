"""Laws that hold in every simulated run, over random experiments with and without faults.

Every run here is watched: `traces/laws` is asked after each event and at the end, see `tests/conftest.py`.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace
from random_scenes import ENDLESS, Scene, doubled, scenes
from small_runs import ONE_TURN, PROFILE, Record, experiment

from marlaas.commands import CloseTask, Train
from marlaas.events import AdapterPublished, EnvironmentStepped, TimerFired, TurnGenerated
from marlaas.spec import TaskSpec
from sim import simulate
from sim.profile import assumed
from traces.laws import Laws, check
from traces.reader import Trace
from traces.schema import make_header

RANDOM = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def laws_of(record: Record, scene: Scene) -> Laws:
    """What `check` finds in the record of a scene."""
    return check(Trace(header=make_header(scene.experiment, world="sim"), records=record.records))


@settings(RANDOM, max_examples=40)
@given(scenes())
def test_without_faults_everything_issued_is_trained(scene: Scene) -> None:
    """Every law holds, every task ends, and nothing is dropped under any system."""
    record = scene.run()
    specs = scene.experiment.tasks
    assert [c.outcome for c in record.commands(CloseTask)] == ["done"] * len(specs)
    laws = laws_of(record, scene)
    assert laws.num_trained == sum(task.steps * task.num_trajectories for task in specs)
    assert (laws.num_issued, laws.num_dropped, laws.num_live) == (laws.num_trained, 0, 0)


@settings(RANDOM, max_examples=40)
@given(scenes(has_faults=True))
def test_with_faults_everything_issued_is_trained_or_dropped(scene: Scene) -> None:
    """Workers are killed, tasks cancelled and paused, deadlines missed: every law still holds."""
    record = scene.run()
    assert len(record.commands(CloseTask)) == len(scene.experiment.tasks)
    laws = laws_of(record, scene)
    assert laws.num_issued == laws.num_trained + laws.num_dropped
    assert laws.num_live == 0


@settings(RANDOM, max_examples=30)
@given(scenes(has_faults=True))
def test_doubling_every_duration_doubles_every_instant(scene: Scene) -> None:
    """Exactly, in whole nanoseconds, for all that happens and so for the makespan; faults included.

    What the scenes draw are whole milliseconds: a duration that is not a whole number of nanoseconds is
    rounded to one, and twice its rounding is not always the rounding of its double.
    """
    once, twice = scene.run().records, doubled(scene).run().records
    assert [(2 * event.at, type(event)) for event, _ in once] == [(e.at, type(e)) for e, _ in twice]


def test_the_laws_report_littles_law_by_station() -> None:
    """L = λ·W: at the environment of fixed latency W is that latency, and λ what came by the run's length."""
    record, of = Record(), experiment()
    simulate(of, PROFILE, record)
    laws = laws_of(record, Scene(of, PROFILE))
    station = laws.stations["environment sums"]
    kinds = Counter(type(event) for event, _ in record.records)
    others = laws.stations["environment library"]
    assert station.num_visits + others.num_visits == kinds[EnvironmentStepped] == kinds[TurnGenerated]
    assert station.mean_stay_s == pytest.approx(0.2)
    assert station.mean_number == pytest.approx(station.rate_per_s * station.mean_stay_s)
    assert laws.stations["lane-0"].num_visits == 2 * kinds[AdapterPublished] + len(of.tasks)
    assert kinds[TimerFired] == 0
    assert str(laws) == "86 issued = 86 trained + 0 dropped + 0 live; L = λ·W at 7 stations"


@pytest.mark.parametrize("trajectory_s", [2.0, 5.5])
def test_a_deadline_of_trajectories_that_have_ended_means_nothing(trajectory_s: float) -> None:
    """It passes while their batch waits for the lane, or is trained: the batch is trained once."""
    task = TaskSpec(name="a", environment="sums", steps=1, prompts=1, samples=2, workload=ONE_TURN)
    limits = replace(ENDLESS, trajectory_s=trajectory_s)
    of = experiment(tasks=(task, replace(task, name="b")), limits=limits)
    slow = replace(PROFILE, lane=replace(PROFILE.lane, step_s=assumed(4.0)))
    record = Record()
    assert set(simulate(of, slow, record).values()) == {"done"}
    assert sorted(command.task for command in record.commands(Train)) == ["a", "b"]
