"""The forecasters of failures: closed forms, rivals, and what they find in synthetic logs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sklearn.isotonic import IsotonicRegression

from models.failure import (
    Isotonic,
    SelfExciting,
    decayed_count as decayed_count_module,
    fleet_forecast,
    fleet_rate,
)
from models.failure.decayed_count import PRIOR_CASES, decayed_counts
from models.failure.fleet_rate import fleet_forecasts, interval, log_pmf, useful_ends
from models.failure.recalibration import at_level, level
from models.failure.self_exciting import PARTS, START_HALF_LIVES_D, exposures_of, node_sums, strengths
from tests.support.fault_logs import COUNTS, daily_counts, fleet, log_of
from twin.catalogue import ContractError

SPANS = (1.0, 7.0)


def test_a_fault_counts_half_after_a_half_life() -> None:
    log = log_of([(0, 10.0, 11.0, 0), (0, 40.0, 41.0, 0), (1, 40.0, 41.0, 0)], 3, 50.0)
    assert decayed_counts(log, 40.0, 30.0) == pytest.approx([1.5, 1.0, 0.0])


def test_the_isotonic_map_is_that_of_scikit_learn_drawn_to_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    score = np.round(rng.gamma(0.5, 1.0, 4000), 1)
    y = (rng.random(4000) < 1.0 / (1.0 + np.exp(2.0 - score))).astype(float)
    at = np.linspace(0.0, 6.0, 50)
    rival = IsotonicRegression(out_of_bounds="clip").fit(score, y).predict(at)
    assert (np.diff(Isotonic(score, y)(at)) >= 0).all()
    with monkeypatch.context() as patch:
        patch.setattr(decayed_count_module, "PRIOR_CASES", 0.0)
        assert Isotonic(score, y)(at) == pytest.approx(rival)
    alone = Isotonic(np.array([1.0]), np.array([1.0]))
    assert alone(np.array([0.0, 2.0])).tolist() == [1.0, 1.0]
    few = Isotonic(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    assert few(np.array([0.0]))[0] == pytest.approx(0.5 * PRIOR_CASES / (PRIOR_CASES + 1.0))


def test_the_level_is_the_share_that_came_of_late() -> None:
    age_d = np.arange(1.0, 200.0)
    assert level(np.full(199, 2.0), np.full(199, 2.0), age_d) == pytest.approx(1.0)
    assert level(np.zeros(0), np.zeros(0), np.zeros(0)) == 1.0
    many = level(np.full(199, 1e4), np.full(199, 3e4), age_d)
    assert many == pytest.approx(3.0, rel=1e-3)
    assert 1.0 < level(np.full(3, 1.0), np.full(3, 2.0), age_d[:3]) < 1.5, "few faults move it little"
    risen = np.where(age_d < 20.0, 4e4, 1e4)
    assert 2.2 < level(np.full(199, 1e4), risen, age_d) < 2.7, "the last half-life is half of it"
    p = np.array([0.0, 1e-4, 0.3, 1.0])
    assert at_level(p, 1.0) == pytest.approx(p)
    assert at_level(p, 2.0) == pytest.approx(1.0 - (1.0 - p) ** 2, abs=1e-9)


def test_exposures_are_integrals_of_the_parts() -> None:
    log = log_of([(0, 10.0, 12.0, 0), (0, 20.0, 30.0, 0), (1, 28.0, 99.0, 0)], 3, 40.0)
    known, fine = log.known_at(31.0), 2000
    (sums,) = node_sums(known, np.array([31.0]))
    whole = exposures_of(sums, 31.0 - known.begin_d, 10.0)
    at = dict(zip(PARTS, whole.T, strict=True))
    t = (np.arange(fine) + 0.5) * 10.0 / fine
    assert at["mean"].tolist() == [10.0] * 3
    up_d = np.array([31.0 - 12.0, 28.0, 31.0])
    assert at["own_240d"] == pytest.approx(
        [2.0 * np.log1p(10.0 / 259.0), np.log1p(10.0 / 268.0), 0.0], rel=1e-9
    )
    assert at["prior_240d"] == pytest.approx(np.log1p(10.0 / (240.0 + up_d)), rel=1e-9)
    start = sum(0.5 ** ((31.0 + t - s) / 8.0) for s in (10.0, 20.0))
    assert at["start_8d"][0] == pytest.approx(np.mean(start) * 10.0, rel=1e-6)
    back = sum(0.5 ** ((31.0 + t - e) / 1.0) for e in (12.0, 30.0))
    assert at["return_1d"].tolist() == pytest.approx([np.mean(back) * 10.0, 0.0, 0.0], rel=1e-5)


def test_sums_carried_from_day_to_day_are_those_of_each_day_alone() -> None:
    log = fleet(11, n=40, rate=0.03, excite=0.05)
    days = np.array([5.0, 6.0, 9.5, 40.0, 41.0, 119.0])
    for day, sums in zip(days, node_sums(log, days), strict=True):
        known = log.known_at(day)
        assert sums[0] == pytest.approx(known.down_d(day), abs=1e-9)
        assert sums[1].tolist() == known.per_node(np.ones(known.k)).tolist()
        for row, half_life_d in enumerate(START_HALF_LIVES_D, 3):
            assert sums[row] == pytest.approx(decayed_counts(known, day, half_life_d), abs=1e-9)


@pytest.mark.parametrize("true", [0, 2])
def test_the_likelihood_prefers_the_half_life_that_the_log_was_drawn_from(true: int) -> None:
    """Hawkes processes of known law: base rate, excitement and half-life come back."""
    half_life_d = START_HALF_LIVES_D[true]
    share = 0.5  # further faults that each one brings
    log = fleet(
        20 + true, n=600, days=300.0, rate=0.004, excite=share * np.log(2.0) / half_life_d,
        half_life_d=half_life_d,
    )  # fmt: skip
    theta = SelfExciting().fit(log, 300.0)["theta"]
    found = theta[PARTS.index("start_8d") :]
    assert np.flatnonzero(found).tolist() == [true]
    brought = found[true] * half_life_d / np.log(2.0)
    assert brought == pytest.approx(share, abs=0.15)


def test_a_fleet_of_unequal_nodes_is_shrunk_as_gamma_and_poisson_say() -> None:
    """Rates drawn from a Gamma: after 400 days the forecast is the posterior mean of each node."""
    rng = np.random.default_rng(5)
    n, days, shape = 500, 400.0, 2.4
    rate = rng.gamma(shape, 0.01 / shape, n)
    faults = sorted(
        (float(start), node)
        for node in range(n)
        for start in rng.uniform(0.0, days, rng.poisson(rate[node] * days))
    )
    log = log_of([(node, start, start + 1e-3, 0) for start, node in faults], n, days)
    model = SelfExciting()
    model.load(model.fit(log, days))
    said = -np.log1p(-model.predict(log.known_at(days), days, (1.0,))[0])
    posterior = (shape + log.per_node(np.ones(log.k))) / (shape / 0.01 + days)
    assert said.mean() == pytest.approx(posterior.mean(), rel=0.15)
    assert np.corrcoef(said, posterior)[0, 1] > 0.93
    assert np.abs(said - rate).mean() < 0.75 * np.abs(rate.mean() - rate).mean()


def test_strengths_maximise_the_likelihood_of_any_or_none() -> None:
    rng = np.random.default_rng(2)
    true = np.array([0.02, 0.3, 0.0])
    x = np.stack([np.ones(20_000), rng.gamma(0.3, 1.0, 20_000), rng.random(20_000)], axis=1)
    y = rng.random(len(x)) < -np.expm1(-(x @ true))
    found = strengths(x.sum(axis=0), x[y], np.ones(int(y.sum())), rounds=3000)

    def likelihood(theta: np.ndarray) -> float:
        mean = x @ theta
        return float(np.log(-np.expm1(-mean[y])).sum() - mean[~y].sum())

    assert found == pytest.approx(true, abs=0.03)
    # The exposure of cases with a fault is part of `total`: EM counts its own expectation for them.
    assert likelihood(found) >= max(likelihood(found * s) for s in (0.9, 1.1)) - 1e-6
    assert likelihood(found) >= likelihood(true) - 1.0


def test_the_baseline_finds_excitement_and_says_the_right_rate_without() -> None:
    calm, wild = fleet(3, n=150, rate=0.01), fleet(3, n=150, rate=0.006, excite=0.05)
    said = {}
    for name, log in (("calm", calm), ("wild", wild)):
        model = SelfExciting()
        model.load(model.fit(log, 120.0))
        one = log_of([(0, 118.0, 118.5, 0)], 150, 120.0)
        said[name] = model.predict(one, 120.0, SPANS)
        now = model.predict(log, 120.0, SPANS)[1][log.up(np.array([120.0]))[0]].mean()
        days = np.arange(90.0, 113.0)
        rate = (log.next_start(days) <= days[:, None] + 7.0).mean()
        assert now == pytest.approx(rate, rel=0.5)
    assert said["wild"][1, 0] > 4.0 * said["wild"][1, 1]
    assert said["calm"][1, 0] < 3.0 * said["calm"][1, 1]
    with pytest.raises(ContractError):
        SelfExciting().load({"theta": np.full(len(PARTS), -1.0)})


@pytest.mark.parametrize("level", [0.6, 0.9, 0.99])
@pytest.mark.parametrize("mean, variance", [(0.3, 0.3), (5.0, 5.0), (24.0, 60.0), (300.0, 9000.0)])
def test_each_end_of_the_interval_is_where_its_tail_comes_nearest(
    mean: float, variance: float, level: float
) -> None:
    if variance > mean:
        p = mean / variance
        rival = stats.nbinom(mean * p / (1.0 - p), p)
    else:
        rival = stats.poisson(mean)
    tail = (1.0 - level) / 2.0
    low, high = interval(mean, variance, level)
    first = [rival.ppf(tail), min(rival.ppf(tail) + 1.0, rival.ppf(1.0 - tail))]
    last = [rival.ppf(1.0 - tail), max(rival.ppf(1.0 - tail) - 1.0, low)]
    assert low == min(first, key=lambda k: abs(rival.cdf(k - 1.0) - tail))
    assert high == min(last, key=lambda k: abs(rival.sf(k) - tail))
    assert np.exp(log_pmf(mean, variance)).sum() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize("span_d", [1, 14])
def test_nine_in_ten_outcomes_lie_in_the_interval_whatever_the_law(kind: str, span_d: int) -> None:
    """Simulated counts, scored from day 120 on as the recordings are; on average over logs."""
    inside = []
    for seed in range(100, 110):
        counts = daily_counts(kind, seed, 400)
        said = fleet_forecasts(counts, span_d)
        total = np.concatenate([[0.0], np.cumsum(counts)])
        i = np.arange(119, 400 - span_d)
        came = total[i + 1 + span_d] - total[i + 1]
        inside.append(float(((said[i, 1] <= came) & (came <= said[i, 2])).mean()))
    assert np.mean(inside) == pytest.approx(0.9, abs=0.035), inside
    assert min(inside) > 0.75


def test_what_an_interval_says_changes_nothing_that_was_said_before() -> None:
    counts = daily_counts("clustered", 1, 150)
    whole = fleet_forecasts(counts, 14)
    assert np.array_equal(fleet_forecasts(counts[:90], 14), whole[:90], equal_nan=True)


def test_intervals_that_always_hold_narrow_below_what_the_law_says_and_misses_widen_them() -> None:
    """Counts more regular than chance are no Poisson's; a change of level is no longer a surprise twice."""
    regular = np.tile([2.0, 1.0, 2.0], 60)
    said = fleet_forecasts(regular, 14)[-1]
    poisson = interval(float(said[0]), float(said[0]))
    assert said[2] - said[1] < poisson[1] - poisson[0]
    wild = fleet_forecasts(np.tile([0.0] * 20 + [5.0] * 20, 5), 14)[-1]
    assert wild[2] - wild[1] > 2.0 * (poisson[1] - poisson[0])


def test_the_outlook_holds_nine_in_ten_and_follows_a_rise() -> None:
    inside = []
    for seed in range(3):
        counts = np.random.default_rng(seed).poisson(2.0, 160).astype(float)
        for day in range(100, 146):
            said = fleet_forecast(counts[:day], 14)
            inside.append(said.low <= counts[day : day + 14].sum() <= said.high)
    assert 0.8 <= np.mean(inside) <= 0.99
    risen = np.concatenate([np.full(60, 1.0), np.full(60, 4.0)])
    assert 45.0 < fleet_forecast(risen, 14).mean < 60.0
    assert np.isnan(fleet_forecast(np.ones(3), 14).mean)
    assert fleet_forecast(np.zeros(50), 14) == (0.0, 0.0, 0.0)
    big = interval(2.0 * fleet_rate.LARGE, 2.0 * fleet_rate.LARGE)
    assert big[0] < 2.0 * fleet_rate.LARGE < big[1]


def test_an_interval_is_useful_up_to_a_width() -> None:
    assert useful_ends(50.0, 20.0, 90.0) == (20.0, 90.0)
    assert np.isnan(useful_ends(50.0, 0.0, 150.0)).all()
    assert useful_ends(0.2, 0.0, 4.0) == (0.0, 4.0), "of a few faults each interval is narrow enough"
