"""Workers coming and going: first start, loss, restart within a budget, death.

A worker that leaves an order unanswered past its deadline counts as lost and is started afresh.
"""

from __future__ import annotations

from marlaas import training, turns
from marlaas.commands import AbortTurns, Command, LoadAdapter, OpenService, StartWorker, UnloadAdapter
from marlaas.core import Core
from marlaas.events import WorkerLost, WorkerUp
from marlaas.state import Lane, Replica


def exists(core: Core, name: str) -> bool:
    """Whether the experiment has a worker of this name."""
    return name in core.state.replicas or name in core.state.lanes


def _find(core: Core, name: str) -> Replica | Lane:
    return core.state.replicas.get(name) or core.state.lanes[name]


def _all(core: Core) -> list[Replica | Lane]:
    return [*core.state.replicas.values(), *core.state.lanes.values()]


def start_all(core: Core) -> None:
    """Order the first start of every worker."""
    for worker in _all(core):
        _start(core, worker)


def _start(core: Core, worker: Replica | Lane) -> None:
    worker.move("starting")
    core.order(StartWorker, within_s=core.experiment.limits.order_s, worker=worker.name)


def up(core: Core, event: WorkerUp) -> None:
    """A worker is ready for orders."""
    worker = _find(core, event.worker)
    if core.answered(event.command, StartWorker) is None:
        return
    worker.move("up")
    _settle(core, worker)
    if isinstance(worker, Replica):
        worker.waiting.mark_all()
        core.replicas_due[worker.name] = None
    core.are_lanes_due = True


def lost(core: Core, event: WorkerLost) -> None:
    """A worker is gone; nothing it was told will be answered."""
    worker = _find(core, event.worker)
    if worker.state in ("starting", "up"):
        lose(core, worker, event.reason)


def order_is_late(core: Core, number: int) -> None:
    """A worker left an order unanswered: take it for lost."""
    order = core.orders.get(number)
    if order is None:
        return
    lose(core, worker_of(core, order), f"no answer to {type(order).__name__} in time")


def worker_of(core: Core, order: Command) -> Replica | Lane:
    """The worker an open order was given to."""
    return _find(core, _name_of(order))


def _name_of(order: Command) -> str:
    if isinstance(order, StartWorker):
        return order.worker
    if isinstance(order, LoadAdapter | UnloadAdapter | AbortTurns):
        return order.replica
    return str(order.lane)  # type: ignore[attr-defined]  # the other orders are a lane's


def lose(core: Core, worker: Replica | Lane, reason: str) -> None:
    """Forget what a worker was doing, start it afresh while its budget lasts, and redo the work."""
    core.alarm(f"{worker.name} is lost: {reason}")
    for number in [n for n, order in core.orders.items() if _name_of(order) == worker.name]:
        del core.orders[number]
    if worker.restarts_left:
        worker.restarts_left -= 1
        _start(core, worker)
    else:
        worker.move("dead")
        _settle(core, worker)
    if isinstance(worker, Replica):
        turns.replica_lost(core, worker)
    else:
        training.lane_lost(core, worker, reason)
    _fail_all_if_helpless(core)


def _fail_all_if_helpless(core: Core) -> None:
    for kind in (Replica, Lane):
        if all(worker.state == "dead" for worker in _all(core) if isinstance(worker, kind)):
            for task in core.state.tasks.values():
                core.failing.append((task.name, f"no {kind.__name__.lower()} is left"))


def _settle(core: Core, worker: Replica | Lane) -> None:
    core.state.unsettled.discard(worker.name)
    if not core.state.is_open:
        core.is_service_due = not core.state.unsettled


def open_service(core: Core) -> None:
    """Let submissions begin: every worker has come up for the first time or died trying."""
    core.state.is_open = True
    core.issue(OpenService)
