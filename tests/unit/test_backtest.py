"""A backtest lives through time: what is learned, issued and fitted when, and that chunks change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, strategies as st

from models.backtest import load as under_test
from models.backtest.load import BacktestTerms, backtest, cuts
from models.backtest.scores import score_load
from models.load import (
    LEVELS,
    ForecastGrid,
    Issue,
    Parameters,
    QuantileForecast,
    SeriesPanel,
    forward_fill,
    lives,
    stride,
)
from twin.catalogue import F64, I64, ContractError


class Last:
    """The last value, and a count of what it was asked."""

    name: ClassVar[str] = "last"
    fitted: ClassVar[bool] = False
    seen: ClassVar[list[tuple[int, int, int]]] = []

    def __init__(self, grid: ForecastGrid) -> None:
        self.grid = grid

    @property
    def reach_rows(self) -> int:
        return 30

    def fit(self, past: SeriesPanel, seed: int) -> Parameters:
        raise AssertionError("is not fitted")

    def load(self, parameters: Mapping[str, np.ndarray]) -> None: ...

    def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
        first = panel.start_ns // 60_000_000_000
        self.seen.append((first, first + panel.n_time - 1, first + int(origins[-1])))
        return QuantileForecast(
            np.repeat(forward_fill(panel.values)[origins][None], len(self.grid.horizons), axis=0)
        )


class Level(Last):
    """The mean of the rows that it was fitted on."""

    name = "level"
    fitted = True
    fits: ClassVar[list[int]] = []

    def __init__(self, grid: ForecastGrid) -> None:
        super().__init__(grid)
        self.level = np.nan

    def fit(self, past: SeriesPanel, seed: int) -> Parameters:
        self.fits.append(past.n_time)
        return {"level": np.array([np.nanmean(past.values)])}

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        self.level = float(parameters["level"][0])

    def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
        return QuantileForecast(np.full((len(self.grid.horizons), len(origins), panel.n), self.level))


class Silent(Last):
    name = "silent"

    def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
        return QuantileForecast(np.full((len(self.grid.horizons), len(origins), panel.n), np.nan))


class Diary:
    """An `Online` that writes down what it is told."""

    def __init__(self, horizon: int, n: int, experts: tuple[str, ...], stride: int) -> None:
        self.horizon, self.n, self.stride, self.k = horizon, n, stride, len(experts)
        self.told: list[tuple[str, int]] = []
        self.values: list[float] = []

    @property
    def looks(self) -> bool:
        return True

    @property
    def spans(self) -> I64:
        return np.zeros(self.n, np.int64)

    @property
    def largest(self) -> F64:
        return np.zeros((2, self.n))

    def learn(self, row: int, actual: F64) -> None:
        self.told.append(("learn", row))
        self.values.append(float(actual[0]))

    def issue(self, row: int, issue: Issue) -> F64:
        self.told.append(("issue", row))
        assert issue.last.shape == issue.scale.shape == issue.quantum.shape == (self.n,)
        return np.repeat(issue.points[0][:, None], len(LEVELS), axis=1)

    def weights(self) -> F64:
        return np.full((self.n, self.k), 1.0 / self.k)


def panel_of(n: int, k: int = 1, seed: int = 0) -> SeriesPanel:
    rng = np.random.default_rng(seed)
    return SeriesPanel(0, 60.0, np.cumsum(rng.normal(size=(n, k)), axis=0), tuple(f"s{i}" for i in range(k)))


def diaries(panel: SeriesPanel, horizons: tuple[int, ...]) -> list[Diary]:
    kept: list[Diary] = []

    class Kept(Diary):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            kept.append(self)

        def __deepcopy__(self, memo: object) -> Diary:  # what the audit lives through is not the run
            copied = Diary(self.horizon, self.n, ("x",) * self.k, self.stride)
            return copied

    backtest(panel, horizons, {"last": Last}, BacktestTerms(online=Kept))
    return kept


@pytest.mark.parametrize("horizons", [(1, 5), (16, 40, 100)])
def test_every_outcome_is_learned_once_it_has_come_and_before_the_next_forecast(
    horizons: tuple[int, ...],
) -> None:
    panel = panel_of(400)
    for diary in diaries(panel, horizons):
        step = stride(diary.horizon)
        issued = [row for what, row in diary.told if what == "issue"]
        learned = [row for what, row in diary.told if what == "learn"]
        assert issued == list(range(0, 400, step))
        assert learned == list(range(diary.horizon, issued[-1] + 1, step))
        now = -1
        for what, row in diary.told:
            if what == "learn":
                assert now < row
                waiting = row
            else:
                now = row
                assert waiting <= now if learned and now >= diary.horizon else True
        single = panel.values[learned, 0].astype(np.float32)  # as rows are kept
        np.testing.assert_array_equal(diary.values, single)
        # At an issue, the outcomes of all rows so far are known.
        at = {row: i for i, (what, row) in enumerate(diary.told) if what == "learn"}
        for i, (what, row) in enumerate(diary.told):
            if what == "issue":
                assert all((r <= row) == (at[r] < i) for r in learned)


def test_experts_see_rows_up_to_the_last_origin_and_as_far_back_as_they_reach() -> None:
    Last.seen.clear()
    backtest(panel_of(300), (1, 4), {"last": Last})
    for first, last, origin in Last.seen:
        assert last == origin
        assert first >= 0
    assert max(first for first, _, _ in Last.seen) > 100


def test_fits_end_before_their_cut_and_grow() -> None:
    Level.fits.clear()
    result = backtest(panel_of(500), (4,), {"last": Last, "level": Level}, BacktestTerms(refits=8))
    assert result.cuts[0] == 100
    assert Level.fits[:2] == [100, 100]  # the audit repeats the first
    assert tuple(Level.fits[1:]) == result.cuts
    assert len(result.cuts) == 8
    for course in result.courses:
        assert course.origins[0] == 250
        assert course.weights.shape == (1, 2)
        np.testing.assert_allclose(course.weights.sum(axis=1), 1.0)


@given(st.integers(2, 60_000), st.integers(1, 12))
def test_cuts_grow_inside_the_rows(n: int, refits: int) -> None:
    held = cuts(n, refits)
    assert all(a < b for a, b in itertools.pairwise(held))
    assert len(held) <= refits
    assert all(30 <= cut < n for cut in held)
    assert (held == ()) == (max(30, round(0.2 * n)) >= n)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=9, unique=True))
def test_each_horizon_is_in_one_group(horizons: list[int]) -> None:
    ordered = tuple(sorted(horizons))
    for step_s in (10.0, 60.0, 900.0, 3600.0):
        groups = [group for group, _ in lives(ordered, step_s)]
        assert tuple(h for group in groups for h in group) == ordered
        assert len(groups) <= 2


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    panel = panel_of(300, 2)
    experts = {"last": Last, "level": Level}
    whole = backtest(panel, (1, 5, 40), experts)
    monkeypatch.setattr(under_test, "CHUNK_ROWS", 70)
    parts = backtest(panel, (1, 5, 40), experts)
    for one, other in zip(whole.courses, parts.courses, strict=True):
        np.testing.assert_array_equal(one.origins, other.origins)
        np.testing.assert_allclose(one.quantiles, other.quantiles, rtol=1e-12)


def test_an_hour_of_minutes_is_enough() -> None:
    result = backtest(panel_of(58), (1, 5), {"last": Last, "level": Level})
    told = score_load(result)
    assert [h["targets"] for h in told] == [58 - 29 - 1, 58 - 29 - 5]
    assert all(np.isfinite(h["mase"]) for h in told)


def test_one_silent_expert_alone_is_stood_in_for_by_the_last_value() -> None:
    panel = panel_of(200)
    alone = backtest(panel, (3,), {"silent": Silent})
    last = backtest(panel, (3,), {"last": Last})
    np.testing.assert_array_equal(alone.courses[0].quantiles, last.courses[0].quantiles)
    two = backtest(panel, (3,), {"silent": Silent, "last": Last})
    assert two.courses[0].weights[0].tolist() == [0.0, 1.0]


def test_time_is_told_by_the_clock_that_is_passed_in() -> None:
    ticks = iter(range(10**9))
    result = backtest(
        panel_of(300),
        (1, 100),
        {"last": Last, "level": Level},
        BacktestTerms(clock=lambda: float(next(ticks))),
    )
    assert result.fit_s == 2.0  # both groups of horizons, a tick each
    assert all(course.predict_ms > 0.0 for course in result.courses)
    shares: list[float] = []
    backtest(panel_of(300), (1, 100), {"last": Last}, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_horizon_without_a_scored_outcome_is_refused() -> None:
    with pytest.raises(ContractError, match="expected at most 49"):
        backtest(panel_of(100), (50,), {"last": Last})


def test_an_expert_that_says_another_shape_is_refused() -> None:
    class Wrong(Last):
        def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
            return QuantileForecast(np.zeros((1, 1, 1)))

    with pytest.raises(ContractError, match="wrong: expected"):
        backtest(panel_of(100), (1, 2), {"wrong": Wrong})


def test_a_series_that_was_never_heard_and_one_that_starts_late_are_lived_through() -> None:
    panel = panel_of(300, 3)
    panel.values[:, 1] = np.nan
    panel.values[:180, 2] = np.nan
    told = score_load(backtest(panel, (1, 5), {"last": Last, "level": Level}))
    for horizon in told:
        assert horizon["series"]["s1"]["targets"] == 0
        assert np.isnan(horizon["series"]["s1"]["mase"])
        assert horizon["series"]["s2"]["mase"] > 0
        assert horizon["mase"] > 0
