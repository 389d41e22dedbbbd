"""Faults with a cause in common: found by chance alone, causally, and no mark against a node."""

from __future__ import annotations

import numpy as np
import pytest

from models.backtest.failure_scores import score_failures
from models.backtest.failures import backtest_failures
from models.failure import (
    WINDOW_D,
    SelfExciting,
    common_causes,
    either_probability,
    individual_faults,
    shared_rate,
)
from models.failure.common_cause import shared_faults
from tests.support.fault_logs import fleet, log_of, struck


@pytest.mark.parametrize(
    "law", [{}, {"n": 1500, "rate": 0.005, "days": 60.0}, {"excite": 0.06, "rate": 0.004}]
)
def test_chance_alone_has_no_cause_in_common(law: dict[str, float]) -> None:
    for seed in range(8):
        assert common_causes(fleet(seed, **law)) == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("nodes", [5, 20])
def test_many_nodes_within_minutes_have_one(nodes: int) -> None:
    quiet = fleet(3, n=200, rate=0.004)
    log = struck(quiet, [40.2, 80.7], nodes)
    found = common_causes(log)
    assert [round(shock.day, 1) for shock in found] == [40.2, 80.7]
    assert all(shock.nodes == nodes for shock in found)
    assert individual_faults(log).start_d.tolist() == quiet.start_d.tolist()
    assert shared_rate(log) == pytest.approx(2 * nodes / (200 * 120.0))
    assert (shared_rate(quiet), individual_faults(quiet)) == (0.0, quiet)


def test_one_node_that_fails_often_and_a_slow_series_are_no_shock() -> None:
    often = [(7, 50.0 + i * 0.0005, 50.0 + i * 0.0005 + 0.0001, 0) for i in range(12)]
    slow = [(i, 70.0 + i * 2.0 * WINDOW_D, 99.0, 0) for i in range(12)]
    assert common_causes(log_of(often + slow, 100, 100.0)) == ()
    fast = [(i, 70.0 + i * WINDOW_D / 20.0, 99.0, 0) for i in range(12)]
    assert common_causes(log_of(often + fast, 100, 100.0))[0].nodes == 12


def test_what_later_days_bring_changes_no_word_on_a_fault() -> None:
    log = struck(fleet(5, n=300, rate=0.01), [30.1, 60.2, 90.3], 8)
    whole = shared_faults(log)
    assert whole.sum() == 24
    for day in np.arange(20.0, 119.0, 3.37):
        known = log.known_at(day)
        old = known.start_d < day - WINDOW_D
        assert (shared_faults(known)[old] == whole[: known.k][old]).all()


def test_probabilities_of_own_and_shared_faults_add_up_as_rates() -> None:
    p = np.array([0.0, 0.2, 1.0])
    assert either_probability(p, 0.0, 7.0) is p
    assert either_probability(p, 0.01, 7.0) == pytest.approx(1.0 - (1.0 - p) * np.exp(-0.07), abs=1e-11)


def test_a_shock_is_no_mark_against_the_nodes_it_struck() -> None:
    log = struck(fleet(4, n=150, rate=0.008), [119.2], 30)
    model = SelfExciting()
    model.load(model.fit(individual_faults(log), 120.0))
    hit = log.node[log.start_d > 119.19]
    up = np.setdiff1d(np.arange(150), log.node)
    own = model.predict(individual_faults(log), 120.0, (7.0,))[0]
    naive = model.predict(log, 120.0, (7.0,))[0]
    spared = np.intersect1d(hit, np.setdiff1d(np.arange(150), log.node[log.start_d < 119.19]))
    assert own[spared] == pytest.approx(own[up].mean() * np.ones(len(spared)), rel=1e-3)
    assert naive[spared].min() > own[spared].max()


@pytest.mark.slow
def test_the_report_tells_of_shocks_and_the_audit_holds() -> None:
    log = struck(fleet(6, n=100, rate=0.006, days=90.0), [50.5, 70.5], 12)
    result = backtest_failures(log, (7.0,), 55.0)
    told = score_failures(result, (10,))["shocks"]
    assert (told["count"], told["window_min"]) == (2, 10.0)
    assert 24 <= told["faults"] <= 26
    assert sorted(round(shock["day"], 1) for shock in told["greatest"]) == [50.5, 70.5]
    assert result.days_checked == 3
