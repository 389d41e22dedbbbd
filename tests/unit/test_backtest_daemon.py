"""The backtest lives as the daemon: from the same past, both give the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from models.backtest.load import BacktestTerms, backtest, published_band
from models.load import FORECASTERS, KNOWN, SeriesPanel, fits, model as load_model
from models.load.fits import GRIDS, KeptSpan, fit_rows, lives
from models.load.model import Load
from models.load.schedule import EXPERTS as OUTSIDE
from twin.catalogue import F64, NS

POWER, HOUR_S = "rack.power_w", 3600.0
EXPERTS = ("last", "seasonal_week", "ewma60", "climatology", "weekly_ewma", "linear")
HORIZONS = (1, 48)  # rows; the last is forecast from every third row
ROWS, FIRST_ROW = 560, 480_001


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that keeps little, so that a few weeks of hours are more than it knows."""
    grids = (("fine", 60.0, 490, HOUR_S), ("coarse", 900.0, 500, 7 * 86_400.0))
    for module in (fits, load_model):
        monkeypatch.setattr(module, "GRIDS", grids)
    monkeypatch.setattr(fits, "MOST_BLOCK_ROWS", 7)


def hours(n: int, seed: int = 0) -> F64:
    """Loads of two racks with days, weeks and noise, in single precision; the second has gaps."""
    rng = np.random.default_rng(seed)
    at = np.arange(n)[:, None]
    day = np.sin(2 * np.pi * at / 24) + 0.5 * (at // 24 % 7 > 4)
    values = 60e3 + 5e3 * day + np.cumsum(rng.normal(0, 150, (n, 2)), axis=0) + rng.normal(0, 300, (n, 2))
    values[rng.random(n) < 0.03, 1] = np.nan
    return np.asarray(values.astype(np.float32), np.float64)


def lived(values: F64) -> tuple[dict[int, dict[int, F64]], dict[int, dict[int, F64]]]:
    """Quantiles that the daemon's model issues as rows come and its fits fall due, and the bands that it
    tells, each by horizon and row.
    """
    model = Load((POWER,), tuple(h * HOUR_S for h in HORIZONS), experts=",".join(EXPERTS))
    model._shape(HOUR_S, {POWER: values.shape[1]})
    issued: dict[int, dict[int, F64]] = {h: {} for h in HORIZONS}
    bands: dict[int, dict[int, F64]] = {h: {} for h in HORIZONS}
    for blend in model._blends.values():
        for online in blend.online:
            wrap(online, issued[online.horizon])
    last = 0
    for row, now in enumerate(values):
        for blend in model._blends.values():
            blend.append(FIRST_ROW + row, now)
            nothing = np.full((len(blend.grid.horizons), blend.n), np.nan)
            for online, band in zip(blend.online, blend.say(dict.fromkeys(OUTSIDE, nothing)), strict=True):
                bands[online.horizon][row] = band
        if (row + 1 - last) * HOUR_S >= model.next_fit_s():
            model.load(model.fit(model.training(), 0))
            last = row + 1
    return issued, bands


def wrap(online: Any, kept: dict[int, F64]) -> None:
    """Write down what is issued."""
    issue = online.issue

    def written(row: int, given: Any) -> F64:
        kept[row - FIRST_ROW] = out = issue(row, given)
        return np.asarray(out)

    online.issue = written


@pytest.mark.long  # three weeks of hours, twice
@pytest.mark.usefixtures("_small")
def test_the_daemon_and_the_backtest_say_the_same_of_the_same_past() -> None:
    values = hours(ROWS)
    daemon, bands = lived(values)
    kinds = {name: FORECASTERS[name] for name in EXPERTS}
    unknown = {key: np.full(ROWS, np.nan) for key in KNOWN}  # nobody told the weather
    panel = SeriesPanel(round(HOUR_S) * NS * FIRST_ROW, HOUR_S, values, known=unknown)
    result = backtest(panel, HORIZONS, kinds, BacktestTerms(start=0.1, checks_fits=False))
    assert len(result.cuts) >= 2
    for place, course in enumerate(result.courses):
        mine, band = daemon[course.horizon], bands[course.horizon]
        given = np.array([band[row] for row in course.origins.tolist()])
        np.testing.assert_allclose(published_band(result, place), given, rtol=1e-4)
        assert np.isnan(given).any() == (course.horizon > 1)  # an hour's band is there from the start
        assert np.isfinite(given[-1]).all()
        said = np.array([mine[row] for row in course.origins.tolist()])
        np.testing.assert_allclose(course.quantiles, said, rtol=1e-4)
        # But for sums in another order, now and then across the edge of a bin of errors
        assert np.isclose(course.quantiles, said, rtol=1e-9, equal_nan=True).mean() > 0.97


def test_a_backtest_keeps_what_the_daemon_keeps() -> None:
    minutes, hours_of = lives((1, 5, 60, 360, 1440), 60.0), lives((1, 5, 24, 500), HOUR_S)
    assert minutes == [
        ((1, 5, 60), KeptSpan(1560, 64)),
        ((360, 1440), KeptSpan(2688 * 15, 64 * 15)),  # four weeks, in minutes
    ]
    assert hours_of == [((1,), KeptSpan(1560, 64)), ((5, 24, 500), KeptSpan(2688, 64))]
    assert [most for _, _, most, _ in GRIDS] == [1560, 2688]
    held = minutes[0][1]
    for row in (5000, 5001, 5063, 5064):
        assert held.rows <= row - held.first(row) + 1 <= held.most


def test_fits_begin_after_two_hours_of_minutes_and_come_every_third_of_a_second_day() -> None:
    at = np.array(fit_rows((1, 60, 1440), 60.0, 30 * 1440))
    assert at[0] == 120
    assert np.diff(at).max() == 2000
    assert fit_rows((24,), 900.0, 200)[0] == 120  # thirty hours
    assert fit_rows((1,), 60.0, 100) == ()
