"""Faults with a cause in common: found by chance alone, causally, and no mark against a node."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models.backtest.failure_scores import score_failures
from models.backtest.failures import backtest_failures
from models.failure import WINDOW_D, SelfExciting, SharedAndOwn, common_causes, individual_faults
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
    assert individual_faults(quiet) is quiet


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


def test_a_mask_goes_on_from_that_of_the_day_before() -> None:
    log = struck(fleet(5, n=300, rate=0.01), [30.1, 60.2, 60.2 + 0.5 * WINDOW_D, 90.3], 8)
    before = None
    for day in np.arange(20.0, 119.0, 0.97):
        known = log.known_at(day)
        mask = shared_faults(known, before)
        assert (mask == shared_faults(known)).all()
        before = known, mask
    for other in (log.only(log.node != log.node[0]), replace(log, node=np.zeros_like(log.node))):
        assert (shared_faults(other, before) == shared_faults(other)).all(), "nothing of another log"


def test_who_shares_faults_again_and_again_is_told_and_one_cause_tells_of_nobody() -> None:
    quiet = fleet(4, n=150, rate=0.004)
    rng = np.random.default_rng(0)
    rows = list(
        zip(
            quiet.node.tolist(),
            quiet.start_d.tolist(),
            quiet.end_d.tolist(),
            quiet.kind.tolist(),
            strict=True,
        )
    )
    for day in np.arange(10.0, 119.0, 6.0):
        rows += [(node, day + 0.002 * rng.random(), day + 0.1, 0) for node in range(130, 150)]
    again = log_of(sorted(rows, key=lambda row: row[1]), 150, 120.0)
    once = struck(quiet, [80.2], 20)
    for log, ratio in ((again, 20.0), (once, 1.0)):
        model = SharedAndOwn()
        model.fit(log, 120.0)
        shared = log.only(shared_faults(log))
        said = model.shared.predict(shared, 120.0, (1.0,))[0]
        hit = np.bincount(shared.node, minlength=150) > 0
        found = said[hit].mean() / said[~hit].mean()
        assert found > ratio if ratio > 1.0 else found < 2.0
        p = model.predict(log, 120.0, (1.0,))[0]
        assert (p >= said).all()
        assert (p < 1.0).all()


def test_a_shock_is_no_mark_against_the_nodes_it_struck() -> None:
    log = struck(fleet(4, n=150, rate=0.008, excite=0.05), [119.2], 30)
    model = SelfExciting()
    model.load(model.fit(individual_faults(log), 120.0))
    hit = log.node[log.start_d > 119.19]
    up = np.setdiff1d(np.arange(150), log.node)
    own = model.predict(individual_faults(log), 120.0, (7.0,))[0]
    naive = model.predict(log, 120.0, (7.0,))[0]
    spared = np.intersect1d(hit, np.setdiff1d(np.arange(150), log.node[log.start_d < 119.19]))
    assert np.median(own[spared]) == pytest.approx(own[up].mean(), rel=1e-3)
    assert np.median(naive[spared]) > 1.5 * np.median(own[spared])


@pytest.mark.slow
def test_the_report_tells_of_shocks_and_the_audit_holds() -> None:
    log = struck(fleet(6, n=100, rate=0.006, days=90.0), [50.5, 70.5], 12)
    result = backtest_failures(log, (7.0,), 55.0)
    told = score_failures(result, (10,))["shocks"]
    assert (told["count"], told["window_min"]) == (2, 10.0)
    assert 24 <= told["faults"] <= 26
    assert sorted(round(shock["day"], 1) for shock in told["greatest"]) == [50.5, 70.5]
    assert result.days_checked == 3
