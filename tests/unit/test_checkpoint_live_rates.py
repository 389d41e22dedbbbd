"""checkpoint: the live rate of failures of a job's own nodes, and how sure it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.checkpointing import interruption_rates, job_nodes, rate_per_s, recent_factor, spread_of
from policies.checkpointing.hazard import HALF_LIFE_D, LEAST_FACTOR, MOST_FACTOR, PRIOR_FAILURES
from tests.support.fault_logs import fleet
from tests.support.saving_jobs import DAY_S, EIGHT, N_NODE, OTHERS, Saving, chances, rates_now
from tests.support.scripted_health import Ailing, ailing, days_ago_ns
from twin.backtest.checkpoint_replay import known_rates
from twin.contracts import gamma_factors

LATELY = tuple(0.05 * k for k in range(1, 21))


def test_what_is_not_sure_of_the_fleet_does_not_average_out() -> None:
    """1 / shape is 2 of the nodes of `a`, of which 0.25 is common to all, as others are that sure."""
    twin = Saving({"a": EIGHT, "b": OTHERS})
    twin.says.day, twin.says.shape = 0.2, np.where(np.arange(N_NODE) < 8, 0.5, 4.0)
    twin.wait(5)
    view = twin.engine.view(1.0)
    found = interruption_rates(view, job_nodes(view, np.array([0, 1], np.int32)))
    assert 1.0 / found.shape == pytest.approx([0.25 + (2.0 - 0.25) / 8.0, 0.25], rel=1e-4)
    assert found.per_s == pytest.approx([-8.0 * np.log1p(-0.2) / DAY_S] * 2, rel=1e-3)


def watched(twin: Saving, days: float, fail_d: tuple[float, ...] = (), **more: Any) -> Ailing:
    """A log of failures since so many days, with failures so many days ago."""
    ill = ailing(twin.engine)
    ill.failures.begin_ns = days_ago_ns(twin.now_ns, days)
    for k, ago_d in enumerate(fail_d):
        ill.failed(20 + k % 16, days_ago_ns(twin.now_ns, ago_d), twin.now_ns, **more)
    return ill


@pytest.mark.parametrize(
    ("fail_d", "more"),
    [((), {}), ((0.5,), {}), (LATELY, {}), ((4.0,) * 20, {}), (LATELY * 20, {})],
)
def test_how_often_the_fleet_fails_of_late_moves_all_rates(
    fail_d: tuple[float, ...], more: dict[str, Any]
) -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.05
    twin.wait(5)
    watched(twin, 9.0, fail_d)
    per_d = -N_NODE * np.log1p(-np.float32(0.05))
    expected = sum(per_d / 1000 * 0.5 ** (k / 1000 / HALF_LIFE_D) for k in range(9000))  # day by day
    seen = sum(0.5 ** (ago_d / HALF_LIFE_D) for ago_d in fail_d)
    times = min(max((PRIOR_FAILURES + seen) / (PRIOR_FAILURES + expected), LEAST_FACTOR), MOST_FACTOR)
    found = rates_now(twin)
    assert found.per_s == pytest.approx(times * per_d * 8 / N_NODE / DAY_S, rel=1e-3)
    assert found.soon_per_s == pytest.approx(found.per_s, rel=1e-3)
    assert found.shape == pytest.approx(4.0, rel=1e-3)


@pytest.mark.parametrize("days", [0.0, 1e-4])
def test_on_the_first_day_nothing_is_made_of_no_failures(days: float) -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.9
    twin.wait(5)
    before = rates_now(twin).per_s[0]
    ill = watched(twin, days)
    assert rates_now(twin).per_s[0] == pytest.approx(before, rel=2e-3)
    ill.failures.begin_ns = 0  # nobody watches yet
    for _ in range(9):
        ill.failed(3, twin.now_ns)
    assert rates_now(twin).per_s[0] == pytest.approx(before, rel=1e-3)


def test_only_failures_of_nodes_themselves_since_the_watch_began_count_of_late() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.05
    twin.wait(5)
    ill = watched(twin, 2.0, (0.1,) * 3)
    before = rates_now(twin).per_s[0]
    for _ in range(30):
        for kind in ("software", "taken_out"):
            ill.failed(5, twin.now_ns, 0, kind)
        ill.failed(5, days_ago_ns(twin.now_ns, 2.1))
        ill.failed(5, days_ago_ns(twin.now_ns, -0.1))
    assert rates_now(twin).per_s[0] == before


def test_causes_in_common_stay_in_the_rate_and_raise_it_no_further() -> None:
    """A forecast of 36 x 0.1 a day, of which half is shared: it says neither more nor less of late."""
    twin = Saving({"a": EIGHT})
    rate = 0.1
    twin.says.day = -np.expm1(-rate)
    twin.wait(5)
    ill = watched(twin, 10.0, tuple(np.arange(18) / 1.8 + 0.3))
    for _ in range(18):
        ill.failed(5, days_ago_ns(twin.now_ns, 0.3), twin.now_ns, shared=True)
    got = rates_now(twin).per_s[0] * DAY_S / 8
    assert got == pytest.approx(rate, rel=0.06)
    ill.failures.rows = [row for row in ill.failures.rows if row[4]]  # no node fails by itself any more
    none = rates_now(twin).per_s[0] * DAY_S / 8
    assert none > 0.9 * rate, "few of so many failures are of nodes themselves"
    ill.failures.rows = []
    assert rates_now(twin).per_s[0] * DAY_S / 8 < 0.6 * rate


def test_what_a_nodes_own_signs_tell_does_not_move_with_the_fleet() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day, twin.says.hour = 0.2, chances(0.0, n3=0.6)
    twin.wait(5)
    before = rates_now(twin)
    watched(twin, 30.0)
    after = rates_now(twin)
    times = after.per_s / before.per_s
    assert times < 0.5
    lost = before.soon_per_s - after.soon_per_s
    assert lost == pytest.approx((1.0 - times) * before.per_s / 8.0, rel=1e-3)  # one node's share of the day


def test_one_node_that_is_ill_does_not_make_the_others_look_well() -> None:
    found = []
    for day in (0.005, 0.95):
        twin = Saving({"a": EIGHT})
        twin.says.day = chances(0.005, n20=day)
        twin.wait(5)
        watched(twin, 30.0)
        found.append(rates_now(twin).per_s[0])
    assert found[1] > 0.95 * found[0]


def test_unknown_rates_stay_unknown_however_many_fail() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = np.where(np.arange(N_NODE) < 5, np.nan, 0.1)
    twin.wait(5)
    watched(twin, 9.0, LATELY * 5)
    assert np.isnan(rates_now(twin).per_s).all()


def test_the_backtest_knows_of_late_what_the_daemon_does() -> None:
    log = fleet(6, n=N_NODE, days=60.0, rate=0.05)
    facts = known_rates(log, 40.0)
    for at in (0, 7, len(facts.days) - 1):
        day = facts.days[at]
        seen = log.known_at(day)
        up = np.ones(N_NODE, bool)
        up[seen.node[np.isinf(seen.end_d)]] = False
        twin = Saving({"a": EIGHT})
        twin.says.day = np.where(up, -np.expm1(-facts.per_d[at]), np.nan)
        twin.wait(5)
        plain = rates_now(twin).per_s[0]
        ill = watched(twin, day)
        for node, start_d, end_d in zip(seen.node, seen.start_d, seen.end_d, strict=True):
            end_ns = days_ago_ns(twin.now_ns, day - end_d) if np.isfinite(end_d) else 0
            ill.failed(int(node), days_ago_ns(twin.now_ns, day - start_d), end_ns)
        assert rates_now(twin).per_s[0] / plain == pytest.approx(facts.of_late[at], rel=1e-3)
        assert facts.of_late[at] != 1.0


@pytest.mark.parametrize("per_d", [0.0, 0.3, 13.0, 400.0])
def test_a_fleet_that_fails_as_expected_changes_nothing(per_d: float) -> None:
    each = np.full(100, per_d / 100.0)
    for watched_d in (0.0, 0.4, 3.0, 300.0):
        age_d = (np.arange(round(per_d * watched_d)) + 0.5) / max(per_d, 1e-9)
        assert recent_factor(age_d, each, watched_d) == pytest.approx(1.0, abs=0.1)
    assert recent_factor(np.zeros(0), each, -1.0) == 1.0  # a clock that went back
    assert LEAST_FACTOR <= recent_factor(np.zeros(0), each, 300.0) <= 1.0
    assert 1.0 < recent_factor(np.zeros(10**4), each, 300.0) <= MOST_FACTOR
    assert recent_factor(np.zeros(9), np.zeros(0), 300.0) == 1.0


@pytest.mark.parametrize("shape", [0.4, 1.0, 4.0, 30.0, 1e4])
def test_the_spread_is_read_back_from_a_band(shape: float) -> None:
    _, high = gamma_factors(np.array([shape]))
    assert spread_of(np.array([2e-6]), 2e-6 * high) == pytest.approx(1.0 / shape, rel=1e-6)


def test_rates_of_chances() -> None:
    assert rate_per_s(np.array([0.0, 0.5, 1.0]), 3600.0) == pytest.approx(
        [0.0, np.log(2) / 3600, np.log(1000) / 3600]
    )
    assert np.isnan(rate_per_s(np.array([np.nan]), 3600.0)).all()
    assert spread_of(np.array([1.0, 0.0, np.nan]), np.array([0.5, 1.0, 1.0])).tolist()[:2] == [0.0, 0.0]
