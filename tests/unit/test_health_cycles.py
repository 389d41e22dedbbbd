"""The likelihood ratio of trouble that recurs, and what is learned of usual rates, against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import gammaln
from scipy.stats import gamma, nbinom, poisson

from tests.support.builders import START_NS
from twin.catalogue import NS
from twin.health.recurring import (
    DAY_NS,
    HOUR_NS,
    LEAST_SHAPE,
    MEMORY_NS,
    MOST_SHAPE,
    MUCH,
    PRIOR_DAYS,
    PRIOR_PER_DAY,
    PRIOR_SHAPE,
    RECURS_PER_DAY,
    BaselineRate,
    Cycles,
)
from twin.telemetry import OWN

R = RECURS_PER_DAY


def at(days: float) -> int:
    return START_NS + round(days * DAY_NS)


def ints(*index: int) -> np.ndarray:
    return np.array(index, np.int32)


def cycle(a: float, b: float, times: int) -> Cycles:
    """Of device 3, so many times within a day, the first at its begin."""
    cycles = Cycles()
    for k in range(times):
        cycles.add(ints(3), at(k / times), np.array([a]), np.array([b]))
    return cycles


@pytest.mark.parametrize(("a", "b"), [(0.3, 15.0), (0.02, 1.0), (4.0, 2.0), (17.5, 31.0), (0.3, 0.06)])
@pytest.mark.parametrize("times", [1, 2, 5, 60])
@pytest.mark.parametrize("days", [0.01, 1.0, 6.9])
def test_the_score_is_the_ratio_of_a_poisson_to_a_negative_binomial(
    a: float, b: float, times: int, days: float
) -> None:
    if b * R <= a:
        assert cycle(a, b, 1).index.size == 0
        return
    score, whole = cycle(a, b, times).scores(at(days))
    first = poisson.logpmf(times, R * days) - nbinom.logpmf(times, a, b / (b + days))
    rest = poisson.logpmf(times - 1, R * days) - nbinom.logpmf(times - 1, a + 1.0, b / (b + days))
    assert whole[0] == pytest.approx(first, rel=1e-9, abs=1e-9)
    assert score[0] == pytest.approx(rest, rel=1e-9, abs=1e-9)


def test_the_usual_likelihood_is_the_integral_over_its_rate() -> None:
    rate = np.geomspace(1e-9, 60.0, 400_001)
    density = gamma.pdf(rate, 0.7, scale=1.0 / 2.5) * rate**4 * np.exp(-rate * 1.5)
    usual = np.log(np.trapezoid(density, rate))
    _, whole = cycle(0.7, 2.5, 4).scores(at(1.5))
    assert whole[0] == pytest.approx(4 * np.log(R) - R * 1.5 - usual, rel=1e-5)


def test_trouble_that_comes_as_often_as_expected_of_what_recurs_speaks_for_it() -> None:
    score = [cycle(0.3, 15.0, k).scores(at(k / R))[0][0] for k in range(2, 9)]
    assert np.all(np.diff(score) > 1.0)
    once = cycle(0.3, 15.0, 1)
    assert once.scores(at(0.0))[0][0] == 0.0  # once is no recurrence
    assert once.scores(at(0.2))[0][0] < 0.0
    falling = [cycle(0.3, 15.0, 5).scores(at(d))[0][0] for d in (1.0, 1.5, 3.0, 7.0)]
    assert np.all(np.diff(falling) < 0.0)


@pytest.mark.long
def test_a_chance_alarm_is_as_rare_as_wald_says() -> None:
    """Gamma-Poisson trouble after a first time crosses a bound of x nats with a chance below e^-x."""
    rng, a, b, bound = np.random.default_rng(5), 2.0, 1.0, 2.0
    crossed, runs = 0, 2000
    for _ in range(runs):
        rate = rng.gamma(a + 1.0, 1.0 / b)
        cycles, day = Cycles(), 0.0
        cycles.add(ints(0), at(0.0), np.array([a]), np.array([b]))
        while (day := day + rng.exponential(1.0 / rate)) < 7.0:
            cycles.add(ints(0), at(day), np.array([a]), np.array([b]))
            if cycles.scores(at(day))[0][0] >= bound:
                crossed += 1
                break
    assert 0.15 * np.exp(-bound) < crossed / runs < np.exp(-bound)


def test_a_clock_that_goes_back_adds_no_evidence_and_breaks_nothing() -> None:
    cycles = cycle(0.3, 15.0, 3)
    now = cycles.scores(at(0.0))
    for days in (-0.5, -16.0, -400.0):
        back = cycles.scores(at(days))
        assert np.array_equal(back[0], now[0])
        assert np.array_equal(back[1], now[1])


def test_devices_stay_in_order_however_they_come() -> None:
    cycles, n = Cycles(), 40
    rng, times = np.random.default_rng(3), np.zeros(n, np.int64)
    for k in range(60):
        some = np.sort(rng.choice(n, int(rng.integers(0, 9)), replace=False)).astype(np.int32)
        cycles.add(some, at(k / 60), np.full(len(some), 0.3), np.full(len(some), 15.0 + k))
        times[some] += 1
    assert cycles.index.tolist() == np.flatnonzero(times).tolist()
    assert cycles.count.tolist() == times[times > 0].tolist()
    expected = gammaln(cycles.a + cycles.count) - gammaln(cycles.a + 1.0)
    assert cycles.logs == pytest.approx(expected, rel=1e-12, abs=1e-12)
    first = cycles.first_ns.copy()
    cycles.keep(cycles.index % 2 == 0)
    assert (cycles.index % 2 == 0).all()
    assert cycles.first_ns.tolist() == first[np.flatnonzero(np.flatnonzero(times) % 2 == 0)].tolist()


def test_what_comes_so_often_anyhow_begins_nothing() -> None:
    cycles = Cycles()
    a, b = np.array([5.9, 6.0, 0.3]), np.array([1.0, 1.0, 15.0])
    assert cycles.add(ints(1, 4, 9), at(0.0), a, b).tolist() == [4]
    assert cycles.index.tolist() == [1, 9]
    # one that is open goes on, whatever is known of it by now
    assert cycles.add(ints(1, 4), at(0.1), np.array([9.0, 9.0]), np.array([1.0, 1.0])).tolist() == [4]
    assert cycles.count.tolist() == [2, 1]
    assert cycles.a.tolist() == [5.9, 0.3]


def test_more_knowledge_of_what_is_usual_weighs_the_same_trouble_anew() -> None:
    cycles, anew = cycle(0.3, 15.0, 4), cycle(2.0, 0.8, 4)
    cycles.again(np.array([2.0]), np.array([0.8]))
    assert cycles.scores(at(1.2))[0] == pytest.approx(anew.scores(at(1.2))[0], rel=1e-12)
    cycles.add(ints(3), at(1.3), np.zeros(1), np.zeros(1))
    anew.add(ints(3), at(1.3), np.zeros(1), np.zeros(1))
    assert cycles.scores(at(1.4))[1] == pytest.approx(anew.scores(at(1.4))[1], rel=1e-12)


# -- what is usual


def watched(n: int) -> BaselineRate:
    usual = BaselineRate(n)
    usual.watch(np.ones(n, np.bool_), at(0.0))
    return usual


def test_before_anything_is_known_the_prior_holds() -> None:
    a, b = BaselineRate(3).rates(ints(0, 2), at(0.0))
    assert a.tolist() == [PRIOR_SHAPE] * 2
    assert (a / b).tolist() == pytest.approx([PRIOR_PER_DAY] * 2)


def test_a_device_is_watched_since_it_was_first_heard() -> None:
    usual = BaselineRate(3)
    usual.watch(np.array([True, False, False]), at(0.0))
    usual.watch(np.array([True, True, False]), at(5.0))
    usual.watch(np.array([False, True, False]), at(6.0))
    assert usual.n_reporting == 2
    b = usual.rates(ints(0, 1, 2), at(10.0))[1]
    assert b - b[2] == pytest.approx([10.0, 5.0, 0.0])
    back = usual.rates(ints(0, 1), at(-3.0))[1]  # a clock that went back
    assert back.tolist() == [b[2]] * 2


def test_trouble_within_minutes_is_the_same_trouble() -> None:
    usual, minute = watched(4), 60 * NS
    found = [usual.apart(ints(1), at(0.0) + k * 4 * minute, 600 * NS).tolist() for k in range(8)]
    assert found == [[1], [], [], [1], [], [], [1], []]
    assert usual.apart(ints(0, 1, 2), at(0.0) + 29 * minute, 600 * NS).tolist() == [0, 2]
    # a clock that went back a day is no reason to be deaf for a day
    assert usual.apart(ints(1), at(-1.0), 600 * NS).tolist() == [1]


def test_the_mean_weighs_what_is_known_against_the_prior() -> None:
    usual = watched(100)
    usual.count(np.arange(40, dtype=np.int32), np.full(40, 2, np.int32))
    usual.learn(at(10.0), Cycles())
    expected = (80 + PRIOR_PER_DAY * PRIOR_DAYS) / (1000 + PRIOR_DAYS)
    assert usual.mean_per_day == pytest.approx(expected)
    cycles = Cycles()
    cycles.add(ints(7, 50), at(9.0), np.full(2, 0.3), np.full(2, 15.0))
    cycles.add(ints(7), at(9.5), np.full(1, 0.3), np.full(1, 15.0))
    usual.learn(at(10.0) + HOUR_NS, cycles)  # what is open counts once
    expected = (82 + PRIOR_PER_DAY * PRIOR_DAYS) / (100 * (10.0 + 1 / 24) + PRIOR_DAYS)
    assert usual.mean_per_day == pytest.approx(expected)


def test_learning_waits_for_its_hour_unless_much_began() -> None:
    usual = watched(10)
    usual.learn(at(1.0), Cycles())
    mean = usual.mean_per_day
    usual.count(ints(0), ints(5))
    usual.learn(at(1.0) + HOUR_NS - 1, Cycles())
    assert usual.mean_per_day == mean
    usual.begun = MUCH - 1
    usual.learn(at(1.01), Cycles())
    assert usual.mean_per_day == mean
    usual.begun = MUCH
    usual.learn(at(1.01), Cycles())
    assert usual.mean_per_day > mean
    assert usual.begun == 0
    mean = usual.mean_per_day
    usual.count(ints(0), ints(5))
    usual.learn(at(0.0), Cycles())  # a clock that went back: learned at once, then hourly again
    assert usual.mean_per_day > mean


def test_what_is_open_is_weighed_by_what_was_learned_since() -> None:
    usual, cycles = watched(200), Cycles()
    everyone = np.arange(200, dtype=np.int32)
    cycles.add(everyone, at(0.1), *usual.rates(everyone, at(0.1)))
    before = cycles.scores(at(0.2))[1].copy()
    usual.learn(at(0.2), cycles)
    assert usual.mean_per_day > 2.0
    assert (cycles.scores(at(0.2))[1] < before - 2.0).all()
    assert cycles.b == pytest.approx(usual.shape / usual.mean_per_day + 0.1)  # as watched when it began


@pytest.mark.parametrize(("shape", "tolerance"), [(0.1, 0.25), (0.5, 0.25), (2.0, 0.35)])
def test_the_spread_over_the_fleet_is_found_again(shape: float, tolerance: float) -> None:
    rng, n, days = np.random.default_rng(11), 4000, 50.0
    usual = watched(n)
    usual.times += rng.poisson(rng.gamma(shape, 0.05 / shape, n) * days).astype(np.float32)
    usual.learn(at(days), Cycles())
    assert usual.shape == pytest.approx(shape, rel=tolerance)
    assert usual.mean_per_day == pytest.approx(0.05, rel=0.15)


def test_the_spread_stays_within_bounds() -> None:
    alike = watched(1000)
    alike.times += np.float32(10.0)
    alike.learn(at(30.0), Cycles())
    assert alike.shape == pytest.approx(MOST_SHAPE, rel=0.02)
    one = watched(1000)
    one.times[3] = 1e6
    one.learn(at(30.0), Cycles())
    assert one.shape == pytest.approx(LEAST_SHAPE, rel=0.02)


def test_a_device_of_its_own_kind_keeps_its_own_rate() -> None:
    usual = watched(1000)
    usual.times[5] = 60.0
    usual.learn(at(30.0), Cycles())
    a, b = usual.rates(ints(5, 6), at(30.0))
    assert 1.0 < a[0] / b[0] < 2.0
    assert a[1] / b[1] < 0.05


def test_what_is_long_past_counts_half_and_the_rate_stays() -> None:
    usual = watched(50)
    usual.times += np.float32(120.0)
    now = START_NS + MEMORY_NS + HOUR_NS
    days = (now - START_NS) / DAY_NS
    usual.learn(now, Cycles())
    assert usual.times.tolist() == [60.0] * 50
    a, b = usual.rates(ints(0), now)
    assert a[0] - usual.shape == pytest.approx(60.0)
    assert b[0] - usual.shape / usual.mean_per_day == pytest.approx(days / 2)


def test_another_device_is_watched_anew_and_the_fleet_remembers() -> None:
    usual = watched(3)
    usual.count(ints(1), ints(9))
    usual.apart(ints(1), at(1.0), 1)
    usual.forget(OWN, 1)
    assert usual.n_reporting == 2
    assert usual.apart(ints(1), at(1.0), 600 * NS).tolist() == [1]
    usual.watch(np.ones(3, np.bool_), at(4.0))
    a, b = usual.rates(ints(0, 1), at(6.0))
    assert a.tolist() == [usual.shape] * 2
    assert b[0] - b[1] == pytest.approx(4.0)
