"""One ratio of errors over horizons, and one forecast beside another: closed forms and known intervals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from models.backtest import (
    BacktestResult,
    Cells,
    HorizonForecasts,
    compare_errors,
    each_cells,
    overall,
    to_best,
    to_rival,
)
from models.backtest.comparison import ErrorRatio, mean_interval, mean_ratio
from models.backtest.scores import score_load, summed
from models.load import SeriesPanel
from twin.catalogue import F64, ContractError

N = 800


def panel_of(k: int = 2, seed: int = 0) -> SeriesPanel:
    rng = np.random.default_rng(seed)
    return SeriesPanel(0, 60.0, rng.normal(size=(N, k)).cumsum(axis=0), tuple(f"s{i}" for i in range(k)))


def result_of(panel: SeriesPanel, error: float | F64, horizons: tuple[int, ...] = (1, 8)) -> BacktestResult:
    """Forecasts that miss each target by so much."""
    courses = []
    for h in horizons:
        origins = np.arange(N // 2, N)
        known = np.minimum(origins + h, N - 1)
        said = panel.values[known] + np.broadcast_to(error, (N, panel.n))[known]
        bands = np.array([-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0])
        courses.append(HorizonForecasts(h, 1, origins, said[..., None] + bands, np.ones((panel.n, 1)), 0.0))
    return BacktestResult(panel, N // 2, ("x",), tuple(courses), 0.0, (), 0)


def cells_of(panel: SeriesPanel, error: float | F64) -> list[Cells]:
    return each_cells(result_of(panel, error))


def ratio(horizon: int, error: F64, rival: F64) -> ErrorRatio:
    return ErrorRatio(horizon, 1, np.arange(100, 100 + len(error)), error, rival, len(error))


def test_a_forecast_that_errs_half_as_much_has_half_the_error_and_surely_wins() -> None:
    panel = panel_of()
    ours, other = cells_of(panel, 1.0), cells_of(panel, 2.0)
    for held, rival in zip(ours, other, strict=True):
        told = compare_errors(held, rival, [0, 1])
        assert (told["mae"], told["mae_rival"]) == (pytest.approx(1.0), pytest.approx(2.0))
        assert told["ratio"] == pytest.approx(0.5)
        assert (told["low"], told["high"]) == (pytest.approx(0.5), pytest.approx(0.5))
        assert (told["better"], told["sure"]) == ("ours", True)
        back = compare_errors(rival, held, [0, 1])
        assert (back["ratio"], back["better"], back["sure"]) == (pytest.approx(2.0), "rival", True)
    assert compare_errors(ours[0], ours[0], [0])["better"] == "none"


def test_only_targets_of_both_count() -> None:
    panel = panel_of()
    held, other = cells_of(panel, 1.0)[0], cells_of(panel, 2.0)[0]
    gappy = other.error.copy()
    gappy[::2, 0] = np.nan
    gappy[:, 1] = np.nan
    told = compare_errors(held, replace(other, error=gappy), [0, 1])
    assert told["targets"] == len(gappy) // 2
    assert told["ratio"] == pytest.approx(0.5)
    nothing = compare_errors(held, replace(other, error=np.full(gappy.shape, np.nan)), [0])
    assert nothing["targets"] == 0
    assert np.isnan(nothing["mae"])  # type: ignore[call-overload]
    assert nothing["better"] == "none"
    with pytest.raises(ContractError, match="same origins"):
        to_rival(held, replace(other, origins=other.origins + 1), [0])


def test_who_wins_by_a_little_is_not_sure() -> None:
    rng = np.random.default_rng(3)
    panel = panel_of(1)
    one, two = (rng.normal(size=(N, 1)) for _ in range(2))
    told = compare_errors(cells_of(panel, one)[0], cells_of(panel, two)[0], [0])
    assert not told["sure"]
    assert told["low"] < 1.0 < told["high"]  # type: ignore[operator]


def test_the_whole_is_the_geometric_mean_and_agrees_with_the_scores() -> None:
    panel = panel_of()
    result = result_of(panel, 1.5)
    held = each_cells(result)
    ratios = [to_best(one, [0, 1]) for one in held]
    mases = [h["mase"] for h in score_load(result, held=held)]
    assert [r.value for r in ratios] == pytest.approx(mases)
    assert mean_ratio(ratios) == pytest.approx(float(np.sqrt(mases[0] * mases[1])))  # type: ignore[operator]
    assert [to_best(one, [1]).value for one in held] == pytest.approx([summed(o, [1])["mase"] for o in held])
    assert score_load(result) == score_load(result, held=held)


def test_an_interval_has_no_width_where_the_ratio_never_changes_and_covers_where_it_does() -> None:
    error = np.abs(np.random.default_rng(0).normal(size=400))
    same = [ratio(1, error, 2 * error), ratio(5, error, 8 * error)]
    assert list(mean_interval(same)) == pytest.approx([0.25, 0.25])
    hit = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        drawn = [ratio(h, rng.exponential(size=400), 2 * rng.exponential(size=400)) for h in (1, 3)]
        low, high = mean_interval(drawn)
        hit += low <= 0.5 <= high
    assert 30 <= hit <= 40  # 36 are due


def test_what_horizons_share_does_not_average_out() -> None:
    rng = np.random.default_rng(5)
    error, rival = rng.exponential(size=600), rng.exponential(size=600)
    one = np.diff(mean_interval([ratio(1, error, rival)]))
    same_four = np.diff(mean_interval([ratio(1, error, rival)] * 4))
    apart = np.diff(
        mean_interval([ratio(1, rng.exponential(size=600), rng.exponential(size=600)) for _ in range(4)])
    )
    assert same_four == pytest.approx(one)
    assert apart < 0.75 * one


def test_too_few_blocks_and_nothing_to_compare_tell_nothing() -> None:
    assert np.isnan(mean_interval([ratio(50, np.ones(100), np.ones(100))])).all()
    assert np.isnan(mean_interval([])).all()
    assert np.isnan(mean_ratio([]))
    zero = ratio(1, np.zeros(50), np.zeros(50))
    assert zero.value == 1.0
    assert np.isnan(ratio(1, np.ones(50), np.zeros(50)).value)
    assert np.isnan(ErrorRatio(1, 1, np.arange(9), np.zeros(9), np.zeros(9), 0).value)
    told = overall([ratio(1, np.ones(50), np.zeros(50))])
    assert all(np.isnan(v) for v in told.values() if v is not None)
    assert overall([ratio(1, np.ones(90), 2 * np.ones(90))])["ratio"] == pytest.approx(0.5)
