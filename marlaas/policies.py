"""The choices a system is made of: pure functions over the read-only state.

Each answers one question and changes nothing; the scheduler asks and acts. Ties are broken by
registration order, so equal states give equal answers.
"""

from __future__ import annotations

from collections.abc import Callable

from marlaas.state import Replica, Slot, State

Admit = Callable[[State], list[str]]
StartBatches = Callable[[State], list[str]]
TrainNext = Callable[[State], str | None]
Place = Callable[[State, int, int], list[str]]
Evict = Callable[[State, Replica], Slot | None]


_MORE_THAN_ANY_LOAD = 1 << 60  # groups of such a size go to a replica each, as far as these go round

# --- admission: which queued tasks become active ---------------------------------------------------


def admit_one(state: State) -> list[str]:
    """One task at a time, in order of submission."""
    return [] if state.num_in_flight() else state.in_state("queued")[:1]


def admit_all(state: State) -> list[str]:
    """Everyone at once."""
    return state.in_state("queued")


# --- starts: whose next rollout batch may begin ----------------------------------------------------


def start_at_once(state: State) -> list[str]:
    """Each task as soon as its own last version is committed."""
    return state.in_state("ready")


def start_together(state: State) -> list[str]:
    """All ready tasks together, once the last round is trained and every new task has its version 0."""
    if any(state.by_state[busy] for busy in ("creating", "rolling", "buffered", "training", "publishing")):
        return []
    return state.in_state("ready")


# --- training: whose finished batch is trained next ------------------------------------------------


def train_oldest(state: State) -> str | None:
    """The batch that has been complete for longest."""
    return state.buffer[0] if state.buffer else None


def train_registered(state: State) -> str | None:
    """The batch of the task registered first."""
    return min(state.buffer, key=lambda name: state.tasks[name].index, default=None)


def train_after_round(choose: TrainNext) -> TrainNext:
    """`choose`, but only when every rollout batch of the round is complete."""

    def choose_after_round(state: State) -> str | None:
        return None if state.by_state["rolling"] else choose(state)

    return choose_after_round


# --- placement: which replica serves each prompt group ---------------------------------------------


def spread(state: State, num_groups: int, group_size: int) -> list[str]:
    """Each group to the replica with the fewest unfinished trajectories; restarting ones only in need.

    Returns one replica name per group, or nothing when every replica is dead.
    """
    replicas = state.replicas
    placed = state.loads.place(num_groups, group_size, lambda name: replicas[name].state == "up")
    if placed:
        return placed
    return state.loads.place(num_groups, group_size, lambda name: replicas[name].state == "starting")


def share_out(overlap: int) -> Place:
    """Groups to as many replicas as are `overlap` times one task's fair share, those with the least to do.

    A batch on few replicas costs each of them few adapters: fewer to load, fewer at work together. A task
    that is alone still gets them all. Returns one replica name per group, or nothing when every one is dead.
    """

    def place(state: State, num_groups: int, group_size: int) -> list[str]:
        num_replicas = len(state.replicas)
        share = max(1, overlap * num_replicas // max(1, state.num_in_flight()))
        if share >= num_replicas:
            return spread(state, num_groups, group_size)
        dealt = spread(state, min(share, num_groups), _MORE_THAN_ANY_LOAD)
        return state.loads.place_among(dealt, num_groups, group_size)

    return place


pack: Place = share_out(2)
"""Two batches on each replica when all tasks roll out: the usual choice for multi-LoRA without rounds.

With more overlap each replica serves more adapters; with none, as in `deal`, the replicas of a task that has
nothing to roll out are idle. Where KV is so short that one batch fills a replica, `spread` does better.
"""

deal: Place = share_out(1)
"""Whole replicas: without multi-LoRA they serve one task at a time, and a batch on all waits at each."""


# --- eviction: whose slot is given to a task that waits for one ------------------------------------


def evict_idle(state: State, replica: Replica) -> Slot | None:
    """The least recently used unpinned adapter, those with no unfinished trajectory here first."""
    free = [s for s in replica.slots.values() if s.state == "resident" and not s.pins]
    return min(free, key=lambda s: (replica.live.get(s.task, 0) > 0, s.used), default=None)


def evict_finished(state: State, replica: Replica) -> Slot | None:
    """Only an adapter with no unfinished trajectory here: one adapter keeps the replica to its end."""
    free = [s for s in replica.slots.values() if s.state == "resident" and not s.pins]
    return min((s for s in free if not replica.live.get(s.task, 0)), key=lambda s: s.used, default=None)
