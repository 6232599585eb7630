"""Adapters in the slots of a replica: loaded for those who wait, proved, kept while pinned, retired.

An adapter with a turn in flight is never evicted. Knows nothing of trajectories.
"""

from __future__ import annotations

from marlaas.commands import LoadAdapter, UnloadAdapter
from marlaas.core import Core
from marlaas.events import AdapterLoaded, AdapterUnloaded
from marlaas.state import Adapter, Replica, Slot, Task


def find_slots(core: Core, replica: Replica) -> None:
    """Load adapters into free slots, oldest waiter first; evict for those that find none.

    A waiter's wait is bounded: the task whose adapter it needs to go finishes its batch, and no task
    that came later is served from an empty slot before it.
    """
    waiting = replica.waiting
    while waiting.num_lacking and len(replica.slots) < replica.capacity:
        _load(core, replica, core.state.tasks[waiting.oldest_lacking()])
    leaving = sum(1 for slot in replica.slots.values() if slot.state == "unloading")
    for _ in range(waiting.num_lacking - leaving):
        victim = core.system.evict(core.state, replica)
        if victim is None:
            return
        unload(core, replica, victim)


def _load(core: Core, replica: Replica, task: Task) -> None:
    slot = Slot(task=task.name, version=task.version, used=core.tick())
    replica.slots[task.name, task.version] = slot
    replica.waiting.note_slot(task.name, has_slot=True)
    task.holders[replica.name] = task.holders.get(replica.name, 0) + 1
    core.order(
        LoadAdapter,
        within_s=core.experiment.limits.order_s,
        replica=replica.name,
        task=task.name,
        version=task.version,
    )


def unload(core: Core, replica: Replica, slot: Slot) -> None:
    """Order an unpinned adapter out of its slot."""
    slot.move("unloading")
    core.order(
        UnloadAdapter,
        within_s=core.experiment.limits.order_s,
        replica=replica.name,
        task=slot.task,
        version=slot.version,
    )


def adapter_loaded(core: Core, event: AdapterLoaded) -> None:
    """An adapter is resident; it must be the very weights that were published."""
    order = core.answered(event.command, LoadAdapter)
    if order is None:
        return
    replica = core.state.replicas[order.replica]
    slot = replica.slots[order.task, order.version]
    task = core.state.tasks[order.task]
    slot.move("resident")
    replica.waiting.mark(order.task)
    core.replicas_due[replica.name] = None
    is_right = event.fingerprint == task.fingerprint
    if slot.is_retired or not is_right:
        unload(core, replica, slot)
    if not (slot.is_retired or is_right):
        core.alarm(f"{replica.name} loaded other weights than {task.name}-v{order.version}", task.name)
        _count_load_failure(core, task, "loaded weights differ from the published ones")


def adapter_unloaded(core: Core, event: AdapterUnloaded) -> None:
    """A slot is free."""
    order = core.answered(event.command, UnloadAdapter)
    if order is not None:
        _free(core, core.state.replicas[order.replica], (order.task, order.version))


def load_failed(core: Core, order: LoadAdapter, reason: str) -> None:
    """An adapter could not be loaded: the slot is free again and the task tries a bounded number of times."""
    replica = core.state.replicas[order.replica]
    slot = _free(core, replica, (order.task, order.version))
    core.alarm(f"{replica.name} could not load {order.task}-v{order.version}: {reason}", order.task)
    if not slot.is_retired:
        _count_load_failure(core, core.state.tasks[order.task], reason)


def _count_load_failure(core: Core, task: Task, reason: str) -> None:
    batch = task.batch
    if batch is None:
        return
    batch.load_failures += 1
    if batch.load_failures > task.limits.trajectory_retries:
        core.failing.append((task.name, f"version {task.version} cannot be loaded: {reason}"))


def _free(core: Core, replica: Replica, adapter: Adapter) -> Slot:
    """Take an adapter out of its slot; another may have it."""
    slot = replica.slots.pop(adapter)
    _count_out(core.state.tasks[slot.task], replica)
    replica.waiting.mark(slot.task)
    core.replicas_due[replica.name] = None
    return slot


def _count_out(task: Task, replica: Replica) -> None:
    task.holders[replica.name] -= 1
    if not task.holders[replica.name]:
        del task.holders[replica.name]


def lose(core: Core, replica: Replica) -> None:
    """All adapters that a replica held are gone with it."""
    for slot in replica.slots.values():
        _count_out(core.state.tasks[slot.task], replica)
    replica.slots.clear()


def retire(core: Core, name: str) -> None:
    """No further turn needs any resident adapter of this task: free each slot as soon as it is unpinned."""
    holders = [core.state.replicas[holder] for holder in core.state.tasks[name].holders]
    for replica in sorted(holders, key=lambda holder: holder.index):
        for slot in [s for s in replica.slots.values() if s.task == name and not s.is_retired]:
            slot.is_retired = True
            if slot.state == "resident" and not slot.pins:
                unload(core, replica, slot)
