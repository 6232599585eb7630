"""A whole experiment in simulated time.

Owns the loop over SimPy's events and the complaint when it runs dry; everything else is the core's and the
backend's.
"""

from __future__ import annotations

from marlaas.errors import InvariantViolation
from marlaas.events import RunStarted
from marlaas.runtime import Recorder, Runtime
from marlaas.scheduler import Scheduler
from marlaas.spec import Experiment
from sim.backend import SimBackend
from sim.profile import Profile
from sim.timeline import NS_PER_S, Timeline


def simulate(
    experiment: Experiment, profile: Profile, recorder: Recorder, *, measure_every_s: float | None = None
) -> dict[str, str]:
    """Run an experiment to its end; each task's outcome.

    `measure_every_s` makes replicas report their counters. Raises `InputError` for a task without a
    workload, `InvariantViolation` when nothing more can happen though some task has not ended.
    """
    timeline = Timeline()
    backend = SimBackend(experiment, profile, timeline, measure_every_s=measure_every_s)
    scheduler = Scheduler(experiment)
    runtime = Runtime(scheduler, backend, recorder)
    runtime.post(RunStarted(at=0))
    if not timeline.run_until_over():
        raise InvariantViolation(_stalled(scheduler, timeline.now_ns / NS_PER_S))
    return scheduler.outcomes


def _stalled(scheduler: Scheduler, now_s: float) -> str:
    """Who waits for whom when nothing more can happen."""
    waiting = [
        f"task {task.name} is {task.state}" for task in scheduler.state.tasks.values() if not task.is_closed
    ]
    workers = [f"{replica.name} is {replica.state}" for replica in scheduler.state.replicas.values()]
    workers += [f"{lane.name} is {lane.state}" for lane in scheduler.state.lanes.values()]
    return f"stalled at {now_s:g} s, nothing is left to happen: {'; '.join(waiting + workers)}"
