"""The backtest of failure forecasts and its scores: rivals, planted looks ahead, verdicts."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics

from models.backtest import (
    LookAhead,
    failures,
    reliability,  # fmt: skip
)
from models.backtest.failure_scores import (
    UNKNOWN,
    JudgedForecasts,
    Ranking,
    lead_time_h,
    score_counts,
    score_failures,
    top,
    verdict,
)
from models.backtest.failures import (
    BASELINE,
    CHAMPION,
    METHODS,
    REFERENCE,
    FailureResult,
    FailureRun,
    IssuedForecasts,
    backtest_failures,
)
from models.failure import FaultLog, SelfExciting
from models.moving_block import interval, resampled
from tests.support.fault_logs import fleet, log_of
from twin.catalogue import F64, Bool

SPANS = (1.0, 7.0)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result() -> FailureResult:
    return backtest_failures(fleet(5, n=80, rate=0.006, excite=0.04), SPANS, 50.0)


def test_each_scored_day_has_a_whole_outcome_in_the_log(result: FailureResult) -> None:
    assert [issued.days[0] for issued in result.horizons] == [50.0, 50.0]
    assert [issued.days[-1] for issued in result.horizons] == [119.0, 113.0]
    assert result.days_checked == 3
    log = result.log
    week = result.horizons[1]
    for i in (0, 20, 63):
        day = week.days[i]
        came = {int(n) for n, s in zip(log.node, log.start_d, strict=True) if day < s <= day + 7.0}
        assert set(np.flatnonzero(week.y[i])) == came
    for p in week.p.values():
        assert ((p >= 0.0) & (p <= 1.0)).all()
    assert set(week.p) == {*METHODS, CHAMPION}


def test_a_log_that_tells_of_later_days_is_caught() -> None:
    log = fleet(6, n=60, rate=0.03, days=100.0)
    backtest_failures(log, (7.0,), 60.0)
    with pytest.raises(LookAhead):
        backtest_failures(log, (7.0,), 60.0, known=lambda log, day: log.known_at(day + 2.0))


def test_ends_that_are_not_known_yet_do_not_count() -> None:
    def leaky(log: FaultLog, day: float) -> FaultLog:
        known = log.known_at(day)
        k = known.k
        return FaultLog(log.n, known.node, known.start_d, log.end_d[:k], known.kind, log.classes, 0.0, day)

    log = fleet(6, n=60, rate=0.03, days=80.0)
    honest, told = (
        backtest_failures(log, (7.0,), 60.0, known=known).horizons[0].p
        for known in (FaultLog.known_at, leaky)
    )
    for name in (*METHODS, CHAMPION):
        assert (honest[name] == told[name]).all()


def test_a_forecaster_that_remembers_the_outcome_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    log = fleet(7, n=60, rate=0.03, days=100.0)
    honest = SelfExciting.predict

    def told(self: SelfExciting, known: FaultLog, day: float, spans_d: tuple[float, ...]) -> F64:
        # The features that the backtest handed over are fine; this reads the log they were made of.
        later = seen[-1].next_start(np.array([day]))[0]
        return honest(self, known, day, spans_d) + np.where(later < day + 3.0, 0.1, 0.0)

    seen: list[FaultLog] = []

    def known_at(log: FaultLog, day: float) -> FaultLog:
        seen.append(log)
        return log.known_at(day)

    monkeypatch.setattr(SelfExciting, "predict", told)
    with pytest.raises(LookAhead, match="self_exciting"):
        backtest_failures(log, (7.0,), 60.0, known=known_at)


def test_ranking_scores_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    score_, day = np.round(rng.random(500), 1), rng.integers(0, 20, 500)
    y = rng.random(500) < 0.1 + 0.3 * score_
    ranking = Ranking(score_, y, day)
    assert ranking.pr_auc() == pytest.approx(metrics.average_precision_score(y, score_))
    assert ranking.roc_auc() == pytest.approx(metrics.roc_auc_score(y, score_))
    weight = rng.integers(0, 4, 20).astype(float)
    w = weight[day]
    assert ranking.pr_auc(weight) == pytest.approx(
        metrics.average_precision_score(y, score_, sample_weight=w)
    )
    assert ranking.roc_auc(weight) == pytest.approx(metrics.roc_auc_score(y, score_, sample_weight=w))
    assert np.isnan(Ranking(score_, np.zeros(500, bool), day).pr_auc())


def test_ties_at_the_edge_of_the_list_share_what_is_left() -> None:
    rank = np.array([[3.0, 1.0, 1.0, 1.0, 9.0]])
    up = np.array([[True, True, True, True, False]])
    assert top(rank, up, 2)[0] == pytest.approx([1.0, 1 / 3, 1 / 3, 1 / 3, 0.0])
    assert top(rank, up, 10)[0].tolist() == [1.0, 1.0, 1.0, 1.0, 0.0]


def issued_of(p: F64, up: Bool, next_d: F64, span_d: float = 7.0) -> IssuedForecasts:
    days = np.arange(len(p), dtype=np.float64)
    every = dict.fromkeys((*METHODS, CHAMPION), p)
    return IssuedForecasts(span_d, days, up, next_d <= span_d, next_d, every, every, (BASELINE,) * len(p))


def test_scores_of_a_day_by_hand() -> None:
    p = np.array([[0.9, 0.5, 0.1, 0.0]])
    up = np.array([[True, True, True, False]])
    judged = JudgedForecasts(issued_of(p, up, np.array([[3.0, 99.0, 6.0, 1.0]])), CHAMPION, (1, 2))
    found = judged.scores()
    assert found["precision_at_1"] == 1.0
    assert found["precision_at_2"] == 0.5
    assert found["recall_at_1"] == 0.5
    assert found["lift_at_1"] == pytest.approx(1.5)
    assert found["brier"] == pytest.approx((0.01 + 0.25 + 0.81) / 3)


def test_lead_time_counts_a_fault_once_from_the_first_day_in_the_list() -> None:
    next_d = np.array([[3.0, 9.0], [2.0, 8.0], [1.0, 7.0]])
    p = np.array([[0.1, 0.9], [0.9, 0.1], [0.9, 0.1]])
    issued = issued_of(p, np.ones((3, 2), bool), next_d)
    found = lead_time_h(issued, top(p, issued.up, 1))
    assert found == {"median": 48.0, "q25": 48.0, "q75": 48.0, "foreseen": 1, "faults": 2}


def test_a_constant_forecast_is_calibrated_and_useless() -> None:
    rng = np.random.default_rng(0)
    p = rng.beta(0.5, 4.0, 20_000)
    y = rng.random(20_000) < p
    assert reliability(p, y)["ece"] < 0.01
    assert reliability(p, y)["resolution"] > 0.01
    flat = reliability(np.full(20_000, y.mean()), y)
    assert flat["ece"] < 0.01
    assert flat["resolution"] < 1e-4
    assert reliability(p**2, y)["ece"] > 0.04
    assert [b["pairs"] for b in flat["bins"]] == [2000] * 10


def test_verdicts_and_blocks() -> None:
    assert verdict(0.1, 0.2, True) == "better"
    assert verdict(0.1, 0.2, False) == "worse"
    assert verdict(-0.2, -0.1, False) == "better"
    assert verdict(-0.1, 0.2, True) == "not distinguishable"
    assert verdict(np.nan, np.nan, True) == UNKNOWN
    drawn = resampled(30, 7, 0)
    assert drawn.shape == (500, 30)
    assert (np.diff(drawn[:, :7], axis=1) == 1).all()
    assert drawn.max() <= 29
    assert not len(resampled(13, 7, 0))
    rng = np.random.default_rng(0)
    noise = np.repeat(rng.normal(size=40), 10)
    narrow, wide = interval(noise, 1, 0), interval(noise, 20, 0)
    assert wide[1] - wide[0] > 2.0 * (narrow[1] - narrow[0])


def test_the_champion_is_the_baseline_until_the_decayed_count_is_better_beyond_chance() -> None:
    rng = np.random.default_rng(0)
    days, n = 140, 200
    risk = np.where(rng.random(n) < 0.2, 0.5, 0.02)
    y = rng.random((days, n)) < risk
    case = np.ones((days, n), bool)
    for good, days, expected in (
        (REFERENCE, 140, REFERENCE),
        (None, 140, BASELINE),
        (REFERENCE, 60, BASELINE),
    ):
        run = FailureRun(n, (7.0,), 0)
        for _ in range(days):
            p = np.full((len(METHODS) + 1, 1, n), float(risk.mean()))
            if good is not None:
                p[METHODS.index(good), 0] = risk
            run.keep(0.0, failures.DayForecast(p[:-1], p, (1,), p[1, 0]))
        assert METHODS[run._champion(0, case[:days], y[:days])] == expected


def test_scores_of_a_backtest(result: FailureResult) -> None:
    told = score_failures(result, (5, 10))
    week = told["horizons"][1]
    assert sum(week["champion_days"].values()) == week["origins"] == 64
    assert week["pr_auc"] > 1.3 * week["base_rate"]
    assert week["brier_base_rate"] == pytest.approx(week["base_rate"] * (1.0 - week["base_rate"]))
    assert set(week["precision_at_k"]) == {"5", "10"}
    assert week["lift_at_k"]["5"] == pytest.approx(week["precision_at_k"]["5"] / week["base_rate"])
    assert week["ece"] <= 0.05
    assert week["fleet"]["span_d"] == 7
    for found in week["against_reference"].values():
        assert found["low"] <= found["high"]
    assert {c["span_d"] for c in told["fleet"]} == {1, 7, 14}


def test_homogeneous_faults_are_told_as_such() -> None:
    told = score_failures(backtest_failures(fleet(8, n=80, rate=0.01), (7.0,), 60.0), (10,))
    week = told["horizons"][0]
    assert week["roc_auc"] == pytest.approx(0.5, abs=0.1)
    assert week["brier"] == pytest.approx(week["brier_base_rate"], rel=0.05)
    assert week["resolution"] < 0.003


def test_counts_are_judged_with_ends_within() -> None:
    counted = failures.CountForecast(
        14,
        np.arange(4.0),
        np.full(4, 10.0),
        np.full(4, 5.0),
        np.full(4, 15.0),
        np.array([5.0, 15.0, 4.0, 16.0]),
    )
    found = score_counts(counted)
    assert found["coverage90"] == 0.5
    assert found["mtbf_forecast_h"] == pytest.approx(33.6)
    assert found["latest"]["mtbf_low_h"] == pytest.approx(22.4)


def test_a_log_without_faults_so_far_says_little() -> None:
    late = log_of([(0, 70.0, 71.0, 0), (1, 75.0, 99.0, 1)], 10, 90.0)
    told = score_failures(backtest_failures(late, (7.0,), 40.0), (3,))
    assert told["horizons"][0]["positives"] > 0
