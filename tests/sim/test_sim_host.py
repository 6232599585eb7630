"""Workers that share a machine slow each other while both are busy."""

from __future__ import annotations

from msgspec.structs import replace
from small_runs import PROFILE, Record, experiment

from marlaas.events import TrainingFinished, TurnGenerated
from sim import simulate
from sim.host import Host
from sim.lane import Lane
from sim.profile import assumed
from sim.timeline import Timeline


class Two:
    """Two lanes of one host, and what they finish."""

    def __init__(self, slowdown: float) -> None:
        self.timeline = Timeline()
        host = Host(slowdown)
        self.lanes = [Lane("lane-0", self.timeline, host), Lane("lane-1", self.timeline, host)]
        self.ended: list[tuple[int, str]] = []

    def run(self, lane: int, duration_ns: int, name: str) -> None:
        """Give a lane a job."""
        self.lanes[lane].run(duration_ns, lambda: self.ended.append((self.timeline.now_ns, name)))


def test_work_alone_takes_its_own_time() -> None:
    """One job after another, at full pace."""
    two = Two(0.5)
    two.run(0, 100, "first")
    two.run(0, 100, "second")
    two.timeline.run()
    assert two.ended == [(100, "first"), (200, "second")]


def test_only_the_time_when_both_are_busy_is_slowed() -> None:
    """At 50 %: 40 ns alone, then 60 of each take 90; the other's last 40 are alone again."""
    two = Two(0.5)
    two.run(0, 100, "one")
    two.timeline.after(40, lambda: two.run(1, 100, "other"))
    two.timeline.run()
    assert two.ended == [(130, "one"), (170, "other")]


def test_devices_of_their_own_do_not_notice_each_other() -> None:
    """No slowdown, no difference."""
    two = Two(0.0)
    two.run(0, 100, "one")
    two.run(1, 100, "other")
    two.timeline.run()
    assert two.ended == [(100, "one"), (100, "other")]


def test_a_worker_that_dies_slows_nobody_any_more_and_answers_nothing() -> None:
    """Ten ns together, worth five, then the other dies: the rest is at full pace."""
    two = Two(1.0)
    two.run(0, 100, "one")
    two.run(1, 100, "other")
    two.timeline.after(10, two.lanes[1].stop)
    two.timeline.run()
    assert two.ended == [(105, "one")]


def test_sharing_a_machine_costs_the_asynchronous_system_and_not_the_sequential_one() -> None:
    """Under `single` rollout and training never meet, so the very same run; under `marlaas` they do."""
    # Without time to unload, which the next task's first adapter is made alongside.
    apart_profile = replace(PROFILE, replica=replace(PROFILE.replica, unload_s=assumed(0.0)))
    shared_profile = replace(apart_profile, slowdown_per_busy_worker=assumed(0.6))

    def run(system: str, *, is_shared: bool) -> list[tuple[int, str]]:
        record = Record()
        simulate(experiment(system), shared_profile if is_shared else apart_profile, record)
        kinds = (TrainingFinished, TurnGenerated)
        return [(e.at, type(e).__name__) for e, _ in record.records if isinstance(e, kinds)]

    assert run("single", is_shared=True) == run("single", is_shared=False)
    apart, together = run("marlaas", is_shared=False), run("marlaas", is_shared=True)
    assert len(apart) == len(together)
    assert apart[-1][0] < together[-1][0] < 1.6 * apart[-1][0]
