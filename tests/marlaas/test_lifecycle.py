"""The tables: every pair is either in its table or refused without effect."""

from __future__ import annotations

import pytest
from worlds import experiment

from marlaas.errors import IllegalTransition
from marlaas.lifecycle import LANE, SLOT, TASK, TERMINAL, TRAJECTORY, WORKER
from marlaas.state import Lane, Replica, Slot, Trajectory, initial_state

_TABLES = {"task": TASK, "trajectory": TRAJECTORY, "worker": WORKER, "slot": SLOT, "lane": LANE}
_PAIRS = [(kind, a, b) for kind, table in _TABLES.items() for a in table for b in table]


@pytest.mark.parametrize("table", _TABLES.values(), ids=_TABLES)
def test_tables_are_closed(table: dict[str, tuple[str, ...]]) -> None:
    """Every state that can be reached has a row of its own."""
    assert {finish for row in table.values() for finish in row} <= set(table)


@pytest.mark.parametrize(("kind", "start", "finish"), _PAIRS, ids=lambda value: str(value))
def test_a_move_is_in_the_table_or_changes_nothing(kind: str, start: str, finish: str) -> None:
    """The entity goes where its table says, and stays where it is otherwise."""
    state = initial_state(experiment(tasks=1), 1)
    if kind == "task":
        entity = state.tasks["t0"]
        del state.by_state["expected"]["t0"]
        entity.state = start
        state.by_state[start]["t0"] = None
        move = lambda to: state.move_task(entity, to)  # noqa: E731
    elif kind == "trajectory":
        entity = Trajectory(index=0, retries_left=0, replica="r", state=start)
        move = entity.move
    elif kind == "slot":
        entity = Slot(task="t0", version=0, state=start)
        move = entity.move
    elif kind == "worker":
        entity = Replica(name="r", index=0, capacity=1, restarts_left=0, state=start)
        move = entity.move
    else:
        entity = Lane(name="l", restarts_left=0, job=start)
        move = entity.turn_to
    if finish in _TABLES[kind][start]:
        move(finish)
        assert (entity.job if kind == "lane" else entity.state) == finish
    else:
        with pytest.raises(IllegalTransition):
            move(finish)
        assert (entity.job if kind == "lane" else entity.state) == start


def test_terminal_states_lead_nowhere() -> None:
    """Done, failed and cancelled are ends."""
    assert all(TASK[state] == () for state in TERMINAL)
