"""A small world explored whole: no order of answers, and no loss, leads to a deadlock or an endless run."""

from __future__ import annotations

import pytest
from exploring import Graph
from worlds import experiment

from marlaas.spec import Experiment, Limits


def _small(*, steps: int, turns: int, system: str = "marlaas") -> Experiment:
    limits = Limits(worker_restarts=1, trajectory_retries=1)
    return experiment(tasks=2, steps=steps, turns=turns, slots=1, limits=limits, system=system)


def _assert_always_ends(graph: Graph) -> None:
    assert graph.dead_ends() == []
    assert not graph.has_cycle()
    assert graph.outcomes
    assert all(set(outcome.values()) == {"done"} for outcome in graph.outcomes.values())


@pytest.mark.parametrize("system", ["single", "sync", "sync-single-lora", "async-single-lora", "marlaas"])
def test_two_tasks_sharing_one_slot_always_end(system: str) -> None:
    """Every interleaving of 2 tasks x 1 step x 2 trajectories x 2 turns over 1 slot ends both tasks."""
    _assert_always_ends(Graph(_small(steps=1, turns=2, system=system), losses=0))


def test_a_worker_loss_at_any_moment_is_survived() -> None:
    """Every interleaving of 2 tasks x 1 step x 2 trajectories with one loss at any moment ends both tasks."""
    _assert_always_ends(Graph(_small(steps=1, turns=1), losses=1))


@pytest.mark.slow
def test_two_steps_two_turns_and_a_loss_always_end() -> None:
    """Every interleaving of 2 tasks x 2 steps x 2 trajectories x 2 turns, 1 slot, with one worker loss."""
    _assert_always_ends(Graph(_small(steps=2, turns=2), losses=1))


def test_the_exploration_sees_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """With eviction taken out, one slot for two tasks is a dead end, and the exploration says so."""
    monkeypatch.setattr("marlaas.policies.evict_idle", lambda state, replica: None)
    monkeypatch.setattr("marlaas.slots.retire", lambda core, name: None)
    assert Graph(_small(steps=1, turns=1), losses=0).dead_ends()
