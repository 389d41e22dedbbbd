"""Plans of many jobs: as good as other searches find, bounded by storage, with an answer in every limit."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.optimize import minimize
from scipy.stats import gamma

from policies.checkpointing import IntervalPlan, SaveTerms, best_interval, best_plan, ettr, ettr_at, young_s
from policies.checkpointing.plan import least_interval_s
from policies.checkpointing.single_tier import daly_s
from tests.support.believed_rates import best_believed, ettr_believed

HOUR = 3600.0
NONE = np.nan


def terms(**given: object) -> SaveTerms:
    """One job of a 60 s save at an MTTF of 7.9 h, one tier, unless told; what is given may be arrays."""
    tier = {"local_block_s": NONE, "local_restart_s": NONE}
    rates = {"hard_shape": np.inf, "hard_per_s": 1.0 / (7.9 * HOUR), "soft_per_s": 0.0}
    told = {"block_s": 60.0, "flush_s": 0.0, "restart_s": 600.0} | tier | rates | given
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(v, np.float64)) for v in told.values()))
    return SaveTerms(*arrays)


def random_terms(n: int, seed: int, tiered: float = 0.6) -> SaveTerms:
    rng = np.random.default_rng(seed)

    def drawn(low: float, high: float) -> np.ndarray:
        return np.exp(rng.uniform(np.log(low), np.log(high), n))

    tier = rng.random(n) < tiered
    shape = np.where(rng.random(n) < 0.2, np.inf, drawn(0.5, 500.0))
    local_block, local_restart = np.where(tier, drawn(0.05, 20), NONE), np.where(tier, drawn(5, 300), NONE)
    hard, soft = 1.0 / drawn(HOUR, 1e7), 1.0 / drawn(HOUR, 1e7)
    return SaveTerms(
        drawn(1, 600), drawn(1, 900), drawn(30, 1800), local_block, local_restart, shape, hard, soft
    )


def test_one_tier_and_a_sure_rate_are_the_closed_form() -> None:
    x = random_terms(500, 1, tiered=0.0)._replace(hard_shape=np.full(500, np.inf))
    found = best_plan(x)
    mttf = 1.0 / (x.hard_per_s + x.soft_per_s)
    interval, worth = best_interval(x.block_s, x.restart_s, mttf, x.flush_s)
    assert found.interval_s == pytest.approx(interval, rel=1e-5)
    assert found.ettr == pytest.approx(worth, rel=1e-9)
    assert np.isnan(found.local_interval_s).all()
    assert found.young_s == pytest.approx(young_s(x.block_s, mttf))
    assert found.daly_s == pytest.approx(daly_s(x.block_s, mttf))
    hours = np.array([0.5, 1.0, 2.0]) * HOUR
    assert ettr_at(terms(), hours) == pytest.approx(ettr(hours, 60.0, 600.0, 7.9 * HOUR))


def test_one_tier_and_a_belief_are_the_golden_sections() -> None:
    x = random_terms(300, 2, tiered=0.0)._replace(soft_per_s=np.zeros(300))
    interval, worth = best_believed(x.block_s, x.restart_s, x.hard_shape, x.hard_per_s, x.flush_s)
    found = best_plan(x)
    assert found.ettr == pytest.approx(worth, abs=1e-7)
    assert found.interval_s == pytest.approx(interval, rel=0.01)
    at = ettr_believed(found.interval_s, x.block_s, x.restart_s, x.hard_shape, x.hard_per_s, x.flush_s)
    assert found.ettr == pytest.approx(at, rel=1e-9)


def test_only_the_hard_rate_is_doubted() -> None:
    """The soft rate is known, and beside it the belief is averaged over by plain integration."""
    for tier, soft in (({}, 5e-5), ({"local_block_s": 2.0, "local_restart_s": 60.0}, 3e-4)):
        x = terms(hard_shape=1.5, soft_per_s=soft, **tier)
        law = gamma(1.5, scale=1.0 / 1.5 / (7.9 * HOUR))
        rates = law.ppf((np.arange(20_000) + 0.5) / 20_000)
        sure = SaveTerms(*(np.full(20_000, column[0]) for column in x))
        sure = sure._replace(hard_shape=np.full(20_000, np.inf), hard_per_s=rates)
        for interval, local in ((1500.0, 500.0), (6000.0, 300.0)):
            mean = ettr_at(sure, interval, local).mean()
            assert ettr_at(x, interval, local)[0] == pytest.approx(mean, abs=2e-5)


@pytest.mark.parametrize("seed", [3, 4])
def test_no_other_intervals_are_better(seed: int) -> None:
    """Every job against 240 pairs around its own, and against doing without its memory tier."""
    x = random_terms(400, seed)
    found = best_plan(x)
    used = np.isfinite(found.local_interval_s)
    assert 50 < used.sum() < 350
    parts = np.where(used, np.rint(found.interval_s / np.where(used, found.local_interval_s, 1.0)), 1.0)
    for factor in np.geomspace(0.1, 10.0, 31):
        interval = np.maximum(found.interval_s * factor, x.flush_s)
        for more in (-1.0, 0.0, 1.0, 2.0):
            k = np.maximum(parts + more, 1.0)
            assert (ettr_at(x, interval, interval / k) <= found.ettr + 1e-7).all()
        assert (ettr_at(x, interval, np.inf) <= found.ettr + 1e-7).all()
    k = found.interval_s[used] / found.local_interval_s[used]
    assert k == pytest.approx(np.rint(k), rel=1e-9), "a whole number of local intervals"
    assert (found.interval_s >= x.flush_s).all()


def test_two_tiers_against_another_optimiser() -> None:
    """Nelder and Mead over the logarithms of both intervals, from first-order intervals of each tier."""
    x = random_terms(12, 5, tiered=1.0)
    x = x._replace(flush_s=np.zeros(12), local_block_s=x.local_block_s / 10.0, soft_per_s=5.0 * x.soft_per_s)
    found = best_plan(x)
    for i in range(12):
        job = SaveTerms(*(column[i : i + 1] for column in x))

        def loss(logs: np.ndarray, job: SaveTerms = job) -> float:
            local, k = np.exp(logs[0]), max(1.0, np.rint(np.exp(logs[1])))
            return -float(ettr_at(job, local * k, local)[0])

        local = float(young_s(x.local_block_s[i], 1.0 / x.soft_per_s[i]))
        durable = float(young_s(x.block_s[i], 1.0 / x.hard_per_s[i]))
        begun = np.log([local, max(1.0, durable / local)])
        rival = minimize(loss, begun, method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-12})
        assert found.ettr[i] >= -rival.fun - 1e-8
        assert found.ettr[i] == pytest.approx(-rival.fun, abs=1e-3)


def test_a_memory_tier_is_worth_its_soft_failures() -> None:
    one = best_plan(terms(soft_per_s=1e-4))
    two = best_plan(terms(soft_per_s=1e-4, local_block_s=1.0, local_restart_s=60.0))
    assert two.ettr[0] > one.ettr[0] + 0.05
    assert two.local_interval_s[0] == pytest.approx(float(young_s(1.0, 1e4)), rel=0.2)
    assert two.interval_s[0] == pytest.approx(float(young_s(60.0, 7.9 * HOUR)), rel=0.2)
    assert two.young_s[0] == pytest.approx(float(young_s(60.0, 7.9 * HOUR)))
    useless = best_plan(terms(soft_per_s=1e-9, local_block_s=30.0, local_restart_s=600.0))
    assert np.isinf(useless.local_interval_s[0])
    assert useless.ettr[0] == pytest.approx(best_plan(terms(soft_per_s=1e-9)).ettr[0])
    assert useless.ettr[0] == pytest.approx(ettr_at(terms(soft_per_s=1e-9), useless.interval_s)[0])


def test_a_local_interval_left_open_is_the_best_one() -> None:
    x = terms(soft_per_s=1e-4, local_block_s=1.0, local_restart_s=60.0, hard_shape=3.0)
    found = best_plan(x)
    assert ettr_at(x, found.interval_s)[0] == pytest.approx(found.ettr[0], abs=1e-7)
    left_open = ettr_at(x, 2 * HOUR)[0]
    tried = [float(ettr_at(x, 2 * HOUR, 2 * HOUR / k)[0]) for k in range(1, 300)]
    assert left_open == pytest.approx(max(tried), abs=1e-6)


def test_an_asynchronous_save_is_never_begun_before_the_last_has_drained() -> None:
    short = best_plan(terms(block_s=1.0, flush_s=[0.0, 100.0, 3000.0]))
    assert short.interval_s[0] == short.interval_s[1]
    assert short.interval_s[2] == 3000.0
    assert (np.diff(short.ettr) < 0.0).all(), "a flush delays what is durable"
    bound = best_plan(terms(block_s=1.0), least_s=np.array([5000.0]))
    assert bound.interval_s[0] == 5000.0
    tiered = best_plan(
        terms(block_s=1.0, local_block_s=0.5, local_restart_s=60.0, soft_per_s=1e-4), least_s=5000.0
    )
    assert tiered.interval_s[0] >= 5000.0
    assert np.isnan(best_plan(terms(block_s=1.0), least_s=np.nan).ettr).sum() == 0


LIMITS = (0.0, 60.0, np.inf)
RATES = (0.0, 1e-9, 1e-5, np.inf)


def test_every_limit_has_an_answer() -> None:
    grid = product(LIMITS, LIMITS, LIMITS, (NONE, 0.0, 1.0, np.inf), (NONE, 0.0, np.inf),
                   (0.0, 2.0, np.inf), RATES, RATES)  # fmt: skip
    x = SaveTerms(*np.array(list(grid)).T)
    found = best_plan(x)
    assert ((found.ettr >= 0.0) & (found.ettr <= 1.0)).all()
    assert (found.interval_s >= np.minimum(x.flush_s, 1e12)).all()
    tiered = ~np.isnan(x.local_block_s) & ~np.isnan(x.local_restart_s)
    assert (np.isnan(found.local_interval_s) == ~tiered).all()
    assert (found.local_interval_s[tiered] > 0.0).all()
    assert ((found.young_s >= 0.0) & (found.daly_s >= 0.0)).all()
    for interval, local in product((0.0, 1.0, HOUR, np.inf), (NONE, 0.0, 30.0, np.inf)):
        worth = ettr_at(x, interval, local)
        assert ((worth >= 0.0) & (worth <= 1.0)).all()
        fair = (interval >= x.flush_s) & (np.maximum(x.hard_per_s, x.soft_per_s) < 0.1)
        assert (worth <= found.ettr + 1e-5)[fair].all()


def test_what_is_not_known_is_not_planned_and_hurts_no_other_job() -> None:
    good = terms(soft_per_s=[1e-5] * 8, local_block_s=1.0, local_restart_s=60.0)
    clean = best_plan(good)
    for column in ("block_s", "flush_s", "restart_s", "hard_shape", "hard_per_s", "soft_per_s"):
        array = getattr(good, column).copy()
        array[3] = np.nan
        found = best_plan(good._replace(**{column: array}))
        for name in ("interval_s", "ettr", "local_interval_s"):
            assert np.isnan(getattr(found, name)[3]), (column, name)
            assert np.array_equal(np.delete(getattr(found, name), 3), np.delete(getattr(clean, name), 3))
        assert np.isnan(ettr_at(good._replace(**{column: array}), 600.0)[3])


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 30), seed=st.integers(0, 1000))
def test_a_job_is_planned_the_same_alone_and_among_others(n: int, seed: int) -> None:
    x = random_terms(n, seed)
    together, last = best_plan(x), best_plan(SaveTerms(*(column[-1:] for column in x)))
    for name in IntervalPlan._fields:
        one, of_many = getattr(last, name)[0], getattr(together, name)[-1]
        assert one == pytest.approx(of_many, rel=1e-12, nan_ok=True)


def test_no_job_is_no_plan() -> None:
    assert all(len(column) == 0 for column in best_plan(SaveTerms(*(np.empty(0) for _ in SaveTerms._fields))))
    assert len(least_interval_s(np.empty(0), np.empty(0, np.int64))) == 0


def test_saves_of_one_storage_fit() -> None:
    flush = np.array([60.0, 120.0, 20.0, 500.0, 7.0])
    storage = np.array([0, 0, 1, -1, 0])
    least = least_interval_s(flush, storage, share=0.5)
    assert least == pytest.approx([374.0, 374.0, 40.0, 500.0, 374.0])
    wanted = np.array([100.0, 1000.0, 1000.0, 400.0, 1e9])
    least = least_interval_s(flush, storage, wanted, share=0.5)
    assert least == pytest.approx([60.0 / 0.38, 120.0, 20.0, 500.0, 7.0]), "what fits is left alone"
    least = least_interval_s(flush, storage, wanted, 0.5, np.array([1.0, 1.0, 1.0, 1.0, 1e9]))
    assert least[0] == pytest.approx(60.0 / 0.38), "who wants little leaves its weight to the others"
    assert np.isfinite(least_interval_s(np.array([np.inf, 0.0, np.nan]), [0, 0, 0], np.zeros(3))).all()


CLAIM = st.tuples(st.floats(0.1, 1e6), st.floats(0.0, 1e7), st.floats(0.5, 400.0))


@settings(max_examples=200, deadline=None)
@given(st.lists(CLAIM, min_size=1, max_size=12), st.integers(0, 11), CLAIM, st.floats(0.05, 1.0))
def test_whatever_one_job_claims_nobody_is_pushed_below_its_fair_share(
    claims: list[tuple[float, float, float]], which: int, lie: tuple[float, float, float], share: float
) -> None:
    """A liar says what it likes of its flush and of what it wants; its nodes are not for it to say."""
    honest = np.array(claims)
    liar = which % len(claims)
    told = honest.copy()
    told[liar, :2] = lie[:2]
    storage, weight = np.zeros(len(claims), np.int64), honest[:, 2]
    least = least_interval_s(told[:, 0], storage, told[:, 1], share, weight)
    fair_s = told[:, 0] / (share * weight / weight.sum())
    wanted_s = np.maximum(told[:, 1], told[:, 0])
    assert (least <= np.maximum(wanted_s, fair_s) * (1.0 + 1e-9)).all()
    used = told[:, 0] / np.maximum(least, wanted_s)
    assert used.sum() <= share * (1.0 + 1e-9)
    wish = told[:, 0] / wanted_s
    if wish.sum() > share:
        assert used.sum() == pytest.approx(share), "nothing is wasted while somebody wants more"
        short = used < wish * (1.0 - 1e-9)
        level = (used / weight)[short]
        assert level == pytest.approx(level[0]), "who gets less than it wants gets as much as the others"
        assert ((used / weight)[~short] <= level[0] * (1.0 + 1e-9)).all()
