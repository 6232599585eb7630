"""Costs fitted from tables of iterations: made-up ones come back, real ones predict what was held out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from public_runs import multi_lora_runs

from sim.hardware import load_device, load_model
from sim.profile import ReplicaProfile
from sim.replica_setup import ReplicaSetup
from sim.roofline import replica_costs
from sim.tables import Iteration, fit_table, mean_error


def made_up(knee: int) -> list[Iteration]:
    """Rows that follow the model exactly."""

    def seconds(num: int, kv: int, adapters: int) -> float:
        base = 5e-3 + 1e-5 * num + 3e-8 * kv + (8e-6 * max(0, num - knee) if knee else 0.0)
        return base + (2e-3 + 3e-4 * adapters if adapters else 0.0)

    shapes = [(n, n * k, a) for n in (1, 32, 100, 180, 256, 400) for k in (100, 900) for a in (0, 1, 8, 30)]
    return [
        Iteration(num_sequences=n, kv_tokens=kv, num_adapters=a, seconds=seconds(n, kv, a))
        for n, kv, a in shapes
    ]


@pytest.mark.parametrize("knee", [0, 150])
def test_a_made_up_table_comes_back(knee: int) -> None:
    """Every cost and the knee are found, and the fit says that it is good."""
    fitted = fit_table(made_up(knee))
    assert fitted.knee_sequences == knee
    costs = {name: quantity.value for name, quantity in fitted.costs().items()}
    assert costs["iteration_s"] == pytest.approx(5e-3, rel=0.02)
    assert costs["per_kv_token_s"] == pytest.approx(3e-8, rel=0.02)
    assert costs["adapters_s"] == pytest.approx(2e-3, rel=0.05)
    assert costs["per_adapter_s"] == pytest.approx(3e-4, rel=0.02)
    assert fitted.fit.held_out_error < 0.01
    assert ReplicaProfile(**fitted.costs()).iteration_s.source == "calibrated"


def test_what_no_row_shows_is_left_out() -> None:
    """Without a row that has adapters nothing is said of their cost."""
    rows = [row for row in made_up(0) if not row.num_adapters]
    assert not {"adapters_s", "per_adapter_s"} & set(fit_table(rows).costs())
    with pytest.raises(ValueError, match="at least one row"):
        fit_table([])


def test_one_row_is_explained_near_the_prior() -> None:
    """The roofline says how the seconds of a single row are shared among the terms."""
    prior = replica_costs(ReplicaSetup(device=load_device("h200"), model=load_model("llama-3.1-8b")))
    row = Iteration(num_sequences=64, kv_tokens=64_000, seconds=8e-3)
    fitted = fit_table([row], prior)
    assert fitted.seconds(row) == pytest.approx(8e-3, rel=1e-3)
    ratio = fitted.fit.values["per_kv_token_s"] / prior.per_kv_token_s.value
    assert 0.5 < ratio < 1.5


def row_of(run: dict[str, Any]) -> Iteration:
    """A public run's means as a row; its KV use is a share of its pool."""
    kv_tokens = run["K"] * (
        run["kvtok"] or 324_832
    )  # the one unknown pool: that of the other runs of 1,000 seats
    return Iteration(
        num_sequences=run["B"], kv_tokens=kv_tokens, num_adapters=run["A"], seconds=run["itl"] / 1e3
    )


Pick = Callable[[int], bool]


@pytest.mark.parametrize("is_shown", [lambda i: i % 2 == 0, lambda i: i % 2 == 1], ids=["even", "odd"])
def test_half_of_the_public_multi_lora_runs_predicts_the_other_half(is_shown: Pick) -> None:
    """Mean error of the unseen inter-token latencies within 3 %, with up to 132 distinct adapters."""
    runs = sorted(multi_lora_runs().items())
    base = [row_of(run) for name, run in runs if "|base|" in name]
    lora = [row_of(run) for name, run in runs if "|lora|" in name]
    shown = [row for rows in (base, lora) for i, row in enumerate(rows) if is_shown(i)]
    fitted = fit_table(shown)
    unseen = [row for i, row in enumerate(lora) if not is_shown(i)]
    assert len(unseen) == 5
    assert mean_error(fitted, unseen) < 0.03
    assert mean_error(fitted, [row for i, row in enumerate(base) if not is_shown(i)]) < 0.03
    costs = fitted.costs()
    assert costs["per_adapter_s"].value == pytest.approx(0.325e-3, rel=0.05)
    assert costs["adapters_s"].value == pytest.approx(16.5e-3, rel=0.1)
