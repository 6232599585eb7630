"""Environment steps: first come, first served, within each environment's concurrency."""

from __future__ import annotations

from marlaas import batches
from marlaas.commands import StepEnvironment
from marlaas.core import Core
from marlaas.events import EnvironmentStepped
from marlaas.state import Step, Surroundings


def step_environment(core: Core, environment: Surroundings) -> None:
    """Start waiting steps, first come first served, up to the environment's concurrency."""
    queue = environment.queue
    while queue and environment.num_stepping < environment.concurrency:
        step = queue.popleft()
        trajectory = step.trajectory
        if trajectory.state != "acting":
            continue
        number = core.next_id()
        core.outbox.append(
            StepEnvironment(
                id=number,
                environment=environment.name,
                task=step.task,
                step=step.batch.step,
                turn=trajectory.turn,
                trajectory=trajectory.index,
            )
        )
        core.state.steps[number] = step
        environment.num_stepping += 1
        trajectory.move("stepping")
        trajectory.command = number
        core.set_deadline(environment.timeout_ns, "environment", number)


def leave(core: Core, number: int) -> Step | None:
    """Free the place of a step that is over or given up; None when it was freed before."""
    step = core.state.steps.pop(number, None)
    if step is not None:
        environment = core.state.environments[core.state.tasks[step.task].spec.environment]
        environment.num_stepping -= 1
        if environment.queue:
            core.environments_due[environment.name] = None
    return step


def environment_stepped(core: Core, event: EnvironmentStepped) -> None:
    """The environment answered: the trajectory is finished, or wants its next turn."""
    step = leave(core, event.command)
    if step is None:
        return
    task, trajectory = core.state.tasks[step.task], step.trajectory
    if event.done or trajectory.turn + 1 >= task.spec.max_turns:
        trajectory.move("finished")
        step.batch.num_live -= 1
        batches.settle(core, core.state.replicas[trajectory.replica], task, -1)
        batches.finish_if_complete(core, task, step.batch)
    else:
        trajectory.turn += 1
        trajectory.move("waiting")
        batches.queue_turn(core, task, trajectory)


def step_failed(core: Core, number: int, reason: str) -> None:
    """An environment step failed or took too long: try it again, within the trajectory's tries."""
    step = leave(core, number)
    if step is None:
        return
    task, trajectory = core.state.tasks[step.task], step.trajectory
    if trajectory.retries_left:
        trajectory.retries_left -= 1
        trajectory.move("acting")
        batches.queue_step(core, task, step.batch, trajectory)
    else:
        batches.drop(core, task, step.batch, [trajectory], reason)
        batches.finish_if_complete(core, task, step.batch)
