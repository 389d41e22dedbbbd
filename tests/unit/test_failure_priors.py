"""Failure priors: statistics that one node cannot move far, their merger, and a model that starts from it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from models.failure import (
    SENSITIVITY,
    Failure,
    FailureHistory,
    FailurePrior,
    FaultLog,
    FleetStatistics,
    baseline,
    merge_statistics,
    parse_prior,
    random_effects,
    site_statistics,
)
from models.failure.prior_merger import Estimate, count_shares, gamma_of
from models.failure.priors import AGES_D, WIDTHS_D, excess_posterior, expected_failures, life_table
from models.failure.rates import unknown_node
from models.failure.self_exciting import PARTS
from models.failure.site_statistics import COUNT_EDGES, FOLLOWED, exposure_d
from tests.support.failing_fleet import View, log_of as health_log, quiet
from tests.support.fault_logs import fleet, log_of
from twin.catalogue import ContractError

EXCESS = (0.05, 0.03, 0.01, 0.005, 0.003, 0.001)
PRIOR = FailurePrior(0.004, 500.0, 1.5, EXCESS, 2.0, 0.1, 0.25)
QUIET = dict.fromkeys(SENSITIVITY, 0.0)


def statistics_of(log: FaultLog) -> FleetStatistics:
    """Without any noise."""
    groups = {name: part.astype(float) for name, part in site_statistics(log, 0.0, log.until_d).items()}
    return FleetStatistics(log.until_d, groups, QUIET)


def without(log: FaultLog, node: int) -> FaultLog:
    """The fleet with one node less."""
    keep = log.node != node
    moved = log.only(keep)
    return FaultLog(
        log.n - 1, np.where(moved.node > node, moved.node - 1, moved.node).astype(np.int32), moved.start_d,
        moved.end_d, moved.kind, log.classes, log.begin_d, log.until_d,
    )  # fmt: skip


def test_a_prior_is_written_and_read_as_a_line() -> None:
    again = parse_prior(PRIOR.text)
    assert again == PRIOR
    assert again.offspring == pytest.approx(float(np.dot(EXCESS, WIDTHS_D)))
    for text, words in (
        ("", "version ''"), ("2 1 1", "version '2'"), ("1 1 x", "expected 12 numbers"),
        (PRIOR.text + " 1", "got 13"), (PRIOR.text.replace("0.004", "-1"), "rate_per_d"),
        (PRIOR.text.replace("0.004", "nan"), "rate_per_d"),
    ):  # fmt: skip
        with pytest.raises(ContractError, match=words):
            parse_prior(text)


def test_the_half_life_is_that_of_an_exponential() -> None:
    """Of an excess that is one exponential, up to what lies beyond the last age."""
    edges = np.array(AGES_D)
    excess = tuple(np.diff(-(0.5 ** (edges / 8.0))) / WIDTHS_D)
    assert FailurePrior(0.004, 500.0, 1.5, excess, 2.0, 0.1).half_life_d == pytest.approx(8.0, rel=0.1)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.0, 0.4))
def test_one_node_moves_each_group_by_no_more_than_its_sensitivity(seed: int, excite: float) -> None:
    """Definition 3.1 of Dwork and Roth: the l1 distance of neighbours, for every node of a fleet."""
    log = fleet(seed, n=6, days=40.0, rate=0.05, excite=excite, half_life_d=3.0)
    whole = site_statistics(log, 0.0, 40.0)
    for node in range(log.n):
        less = site_statistics(without(log, node), 0.0, 40.0)
        for name, bound in SENSITIVITY.items():
            moved = whole[name] - less[name]
            assert np.abs(moved).sum() <= bound
            assert (moved >= 0).all()


def test_statistics_by_hand() -> None:
    """Node 0 fails twice, 1.5 days after its repair; node 1 is open; node 2 is well again for 40 days."""
    rows = [(2, 10.0, 60.0, 0), (0, 50.0, 51.0, 0), (0, 52.5, 52.6, 0), (1, 90.0, np.inf, 0)]
    found = site_statistics(log_of(rows, 4, 100.0), 0.0, 100.0)
    assert found["counts"].tolist() == [1, 2, 1] + [0] * (len(COUNT_EDGES) - 3)
    assert found["again"].tolist() == [0, 1, 0, 0, 0, 0, 3]
    assert found["censored"].tolist() == [1, 0, 0, 0, 0, 0, 2]
    assert found["repairs"].sum() == 2


def test_nodes_are_followed_to_a_certain_failure() -> None:
    rows = [(0, float(day), day + 0.5, 0) for day in range(1, 20)]
    found = site_statistics(log_of(rows, 1, 30.0), 0.0, 30.0)
    assert found["again"].sum() == FOLLOWED
    assert found["censored"].tolist() == [1, 0, 0, 0, 0, 0, 0]


def test_exposure_is_near_that_of_the_whole_log() -> None:
    log = fleet(3, n=600, days=120.0, rate=0.003, excite=0.01)
    groups = statistics_of(log).groups
    _, lived = life_table(log, 120.0)
    found = exposure_d(np.asarray(groups["again"]), np.asarray(groups["censored"]))
    assert found == pytest.approx(lived, rel=0.15)


def test_the_merger_finds_what_fleets_have_in_common() -> None:
    """Fleets of one law, without noise: its rate, and an excess that brings about what it really does."""
    logs = [fleet(seed, n=200, days=150.0, rate=0.004, excite=0.03, half_life_d=8.0) for seed in range(5)]
    prior = merge_statistics([statistics_of(log) for log in logs])
    rate = sum(log.k for log in logs) / sum(log.n * log.until_d for log in logs)
    gamma = gamma_of(0.2)  # the assumed variance as that of one of five fleets
    assert prior.rate_per_d / gamma.factor == pytest.approx(rate, rel=0.2)
    assert 0.1 < prior.offspring < 0.8  # 0.03 * 8 / log(2) = 0.35
    assert 3.0 < prior.half_life_d < 16.0
    assert prior.excess_per_d[0] > 3.0 * prior.excess_per_d[-1]
    # The same fleets without excitation
    calm = [fleet(seed, n=200, days=150.0, rate=0.006) for seed in range(5)]
    assert merge_statistics([statistics_of(log) for log in calm]).offspring < 0.5 * prior.offspring


def test_fleets_tell_how_the_excess_goes_with_the_rate() -> None:
    """Failures that multiply their node's rate, and failures that add as much at any rate."""
    rates = (0.001, 0.002, 0.004, 0.008, 0.016)

    def prior_of(excess: dict[float, float]) -> FailurePrior:
        logs = [
            fleet(i, n=300, days=100.0, rate=rate, excite=excess[rate], half_life_d=4.0)
            for i, rate in enumerate(rates)
        ]
        return merge_statistics([statistics_of(log) for log in logs])

    assert prior_of({rate: 6.0 * rate for rate in rates}).excess_power >= 0.75
    assert prior_of(dict.fromkeys(rates, 0.06)).excess_power <= 0.25


def test_one_odd_fleet_does_not_outweigh_the_others() -> None:
    """Its nodes are as many as those of all others, and fail thirty times as often."""
    usual = [statistics_of(fleet(seed, n=100, days=100.0, rate=0.004)) for seed in range(6)]
    odd = statistics_of(fleet(9, n=600, days=100.0, rate=0.12))
    before, after = merge_statistics(usual), merge_statistics([*usual, odd])
    pooled = (6 * 100 * 0.004 + 600 * 0.12) / 1200  # as if all nodes were of one fleet
    middle = after.rate_per_d / gamma_of(2.0).factor
    assert middle < 3.0 * before.rate_per_d < pooled
    # Fleets differ: what a new one believes of the mean is worth fewer failures
    assert after.rate_per_d * after.node_days < 0.5 * before.rate_per_d * before.node_days


def test_random_effects_of_equal_parts_is_their_mean() -> None:
    mean, between = random_effects([Estimate(x, 0.01) for x in (1.0, 2.0, 3.0)])
    assert mean.log == pytest.approx(2.0)
    # DerSimonian and Laird by hand: (Q - 2) / 200 with Q = 200, and the assumed variance of one fleet more
    assert between == pytest.approx((2 * 0.99 + 1.0) / 3)
    with pytest.raises(ContractError, match="noise"):
        random_effects([Estimate(0.0, math.inf)])


@given(st.floats(-6.0, 5.0), st.floats(-3.0, 3.0))
def test_the_law_of_counts_is_one(log_mean: float, log_shape: float) -> None:
    shares = count_shares(np.array([log_mean]), np.array([log_shape]))[0]
    assert shares.sum() == pytest.approx(1.0)
    mean, shape = math.exp(log_mean), math.exp(log_shape)
    assert shares[0] == pytest.approx((shape / (shape + mean)) ** shape, rel=1e-6)


def test_before_any_failure_the_prior_speaks() -> None:
    log = log_of([], 10, 0.0)
    found = expected_failures(PRIOR, log, 0.0, (1.0,), PRIOR.rate_per_d)
    # Gamma-Poisson of the node's own rate, over a day
    expected = PRIOR.shape * math.log1p(PRIOR.rate_per_d / PRIOR.shape)
    assert found == pytest.approx(np.full((1, 10), expected))


def test_a_failure_adds_the_excess_of_its_age() -> None:
    log = log_of([(0, 1.0, 2.0, 0)], 50, 10.0)  # 8 days ago; ages 7 to 16
    rate = 0.004
    excess, base = excess_posterior(PRIOR, log, 10.0, rate)
    # A fleet that fails sixteen times as often has twice the excess before it shows its own
    many = replace(PRIOR, excess_shape=1e6)
    assert excess_posterior(many, log, 10.0, 16 * rate)[0] == pytest.approx(2 * np.array(EXCESS), rel=1e-4)
    found = expected_failures(PRIOR, log, 10.0, (2.0,), rate)[0]
    own = (PRIOR.shape + 1.0) * math.log1p(2.0 / (PRIOR.shape / base + 9.0))
    assert found[0] == pytest.approx(own + 2.0 * excess[3])
    assert base < rate
    assert excess / np.array(EXCESS) == pytest.approx(np.full(6, excess[0] / EXCESS[0]))


def test_own_failures_outweigh_the_prior() -> None:
    """A fleet whose failures bring about nothing, and one where they bring about far more than elsewhere."""
    calm = fleet(1, n=300, days=200.0, rate=0.01)
    rate = calm.k / (calm.n * 200.0)
    assert excess_posterior(PRIOR, calm, 200.0, rate)[0][0] < 0.3 * EXCESS[0]
    wild = fleet(1, n=300, days=100.0, rate=0.004, excite=0.2, half_life_d=3.0)
    assert excess_posterior(PRIOR, wild, 100.0, wild.k / (300 * 100.0))[0][0] > 1.5 * EXCESS[0]


def test_the_model_starts_from_it_and_says_so() -> None:
    model = Failure(prior=PRIOR.text)
    assert Failure(**model.settings()).prior == PRIOR  # type: ignore[arg-type]
    view = View(20, 0.0, health_log([]), quiet(20))
    model.update(view)
    day = next(f for f in model.predict(view) if f.signal == "node.failure_pu" and f.horizon_s == 86_400.0)
    expected = -math.expm1(-PRIOR.shape * math.log1p(PRIOR.rate_per_d / PRIOR.shape))
    assert day.mean == pytest.approx(np.full(20, expected), rel=1e-4)
    assert "other fleets" in day.basis
    with pytest.raises(ContractError, match="prior"):
        Failure(prior="0.5")


def test_another_prior_speaks_at_once_after_a_restart() -> None:
    """The snapshot holds what the former prior said."""
    held, views = Failure(), [View(20, day, health_log([]), quiet(20)) for day in (0.0, 0.001)]
    held.update(views[0])
    model, fresh = (Failure(prior=PRIOR.text) for _ in range(2))
    model.restore(held.memory())
    for one in (model, fresh):
        one.update(views[1])
    for told, expected in zip(model.predict(views[1]), fresh.predict(views[1]), strict=True):
        assert told.mean == pytest.approx(expected.mean, rel=1e-3)  # the watch began a minute earlier


def test_the_band_is_as_wide_as_nodes_differ_by_the_prior() -> None:
    log = log_of([(0, 1.0, 2.0, 0)], 10, 3.0)
    past = FailureHistory(log, np.zeros(10, np.bool_), np.zeros(0), np.zeros(0), log.start_d, 3.0)
    fleet_shape = PRIOR.rate_per_d * PRIOR.node_days + 1.0
    rate = fleet_shape / (PRIOR.node_days + past.node_days)
    own = np.array([PRIOR.shape + 1.0, *[PRIOR.shape] * 9])
    said = baseline(past, (1.0,), None, 0.0, PRIOR)
    assert said.shape == pytest.approx(1.0 / (1.0 / own + 1.0 / fleet_shape))
    hazard, shape = unknown_node(past, (30.0,), PRIOR)
    assert shape == pytest.approx(said.shape[1])
    assert hazard == pytest.approx(PRIOR.shape * math.log1p(30.0 * rate / PRIOR.shape))


def test_a_fit_on_many_failures_takes_its_place() -> None:
    log = fleet(2, n=40, days=30.0)
    past = FailureHistory(log, np.zeros(40, np.bool_), np.zeros(0), np.zeros(0), log.start_d, 30.0)
    theta = np.full(len(PARTS), 0.01)
    few, many = (baseline(past, (1.0,), theta, faults, PRIOR).hazard for faults in (0.0, 1e12))
    assert few == pytest.approx(baseline(past, (1.0,), None, 0.0, PRIOR).hazard)
    assert many == pytest.approx(baseline(past, (1.0,), theta, 1e12).hazard)
    assert not np.allclose(few, many)
