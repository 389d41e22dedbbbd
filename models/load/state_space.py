"""state_space: predicts a level, a damped slope and, on a coarse grid, a daily profile.

Exponential smoothing as a state space with one source of error (Hyndman, Koehler, Ord, Snyder 2008,
"Forecasting with Exponential Smoothing", models AAdN and AAdA). statsmodels fits its gains on a few series of
a panel; the medians serve all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from models.load.autoregression import fit_series
from models.load.forecaster import DAY_S, ForecastGrid, Parameters, QuantileForecast
from models.load.last_value import fill_gaps, rows_since_epoch
from models.load.panel import SeriesPanel
from models.load.seasonal_naive import season_rows
from twin.catalogue import F64, I64, ContractError

KEYS = ("level", "slope", "season", "damping")
SERIES, FIT_ROWS, LEAST_ROWS = 8, 3000, 40  # source: estimate
LONGEST_SEASON = 48  # rows; a gain per row of a longer day would learn for weeks. source: estimate
NO_SEASON = -1.0
ROOT_SLACK = 1e-6  # of eigenvalues of matrices of this size
LEAST_SEASONS = 4  # source: estimate
WARM_ROWS, CHUNK_ROWS = 192, 128  # source: estimate; a gain of 0.03 forgets its start in them
WARM_SEASONS = 14  # source: estimate; they give the shape to start from


class States(NamedTuple):
    """After each row [n_time, n]: level, slope, and what the season's place of that row has become."""

    level: F64
    slope: F64
    season: F64


class StateSpace:
    """Damped trend with errors added. Parameters: the gains level, slope and season, and damping, each [1].

    The shape of the day is part of it where a day has at most LONGEST_SEASON rows and the fit took it: season
    is NO_SEASON where it did not.
    """

    name: ClassVar[str] = "state_space"
    fitted: ClassVar[bool] = True

    def __init__(self, grid: ForecastGrid) -> None:
        self.grid = grid
        day = season_rows(grid, DAY_S)
        self._period = day if day <= LONGEST_SEASON else 0
        self._warm = max(WARM_ROWS, WARM_SEASONS * self._period)
        self._gains: tuple[float, ...] = ()

    @property
    def reach_rows(self) -> int:
        return self._warm + CHUNK_ROWS

    def fit(self, past: SeriesPanel, seed: int) -> Parameters:
        """Gains that make the errors over one step smallest; with a season where that has the lower AIC."""
        columns = fit_series(past.values, SERIES)
        found: list[F64] = []
        for column in columns:
            values = fill_gaps(past.values[-FIT_ROWS:, [column]], past.n_time)[:, 0]
            values = values[np.isfinite(values)]
            if len(values) >= LEAST_ROWS and values.std() > 0:
                found += _gains((values - values.mean()) / values.std(), self._period)
        if not found:
            return {}
        fits = np.stack(found)
        shaped = fits[:, 2] >= 0  # the majority decides about the shape of the day
        gains = _stable(
            np.median(fits[shaped if 2 * shaped.sum() > len(fits) else ~shaped], axis=0), self._period
        )
        return dict(zip(KEYS, gains[:, None], strict=True))

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        self._gains = ()
        if not parameters:
            return
        if set(parameters) != set(KEYS) or any(parameters[key].shape != (1,) for key in KEYS):
            raise ContractError(f"expected {', '.join(KEYS)}, each of shape [1], got {sorted(parameters)}")
        level, slope, season, damping = (float(parameters[key][0]) for key in KEYS)
        sound = all(0.0 <= gain <= 1.0 for gain in (level, slope, damping)) and (season < 0 or self._period)
        if not sound or not season <= 1.0:
            raise ContractError(f"expected gains and damping from 0 to 1, got {parameters}")
        self._gains = level, slope, season, damping

    def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
        horizons = np.asarray(self.grid.horizons)
        point = np.full((len(horizons), len(origins), panel.n), np.nan)
        if not self._gains or not len(origins):
            return QuantileForecast(point)
        damping, period = self._gains[3], self._period if self._gains[2] >= 0 else 0
        fading = np.cumsum(damping ** np.arange(1, horizons[-1] + 1))
        first = rows_since_epoch(panel)
        if len(origins) == 1:
            now, row = self._followed(panel, int(origins[0]), period)
            for said, horizon in zip(point, horizons, strict=True):
                said[0] = now.level + fading[horizon - 1] * now.slope
                if period:
                    said[0] += now.season[(row + horizon) % period]
                said[0, now.seen == 0] = np.nan
            return QuantileForecast(point)
        chunks, chunk_of = np.unique((first + origins) // CHUNK_ROWS, return_inverse=True)
        begins = chunks * CHUNK_ROWS - first - self._warm  # of each chunk's window, perhaps before the panel
        within = origins - begins[chunk_of]
        at = np.arange(int(within.max()) + 1)[:, None] + begins
        values = panel.values[np.clip(at, 0, panel.n_time - 1)]
        values[(at < 0) | (at >= panel.n_time)] = np.nan
        states = smooth(values.reshape(len(at), -1), self._gains, period, WARM_SEASONS)
        level, slope, season = (state.reshape(len(at), len(chunks), panel.n) for state in states)
        for said, horizon in zip(point, horizons, strict=True):
            said[:] = level[within, chunk_of] + fading[horizon - 1] * slope[within, chunk_of]
            if period:
                back = period * -(-horizon // period)
                said += season[within + horizon - back, chunk_of]
        return QuantileForecast(point)

    def _followed(self, panel: SeriesPanel, origin: int, period: int) -> tuple[Smoother, int]:
        """State of a chunk's start at this row, and the row's place in the chunk's window.

        The panel's memo holds how far the chunk was followed: rows come one by one.
        """
        first = rows_since_epoch(panel)
        begin = (first + origin) // CHUNK_ROWS * CHUNK_ROWS - first - self._warm
        missing, place = max(-begin, 0), origin - begin  # rows before the panel say nothing
        what = first + begin, missing, self._gains, period
        held: tuple[object, Smoother, int] | None = panel.memo.get(StateSpace)
        if held is None or held[0] != what or held[2] > place + 1:
            early = np.full((period * WARM_SEASONS, panel.n), np.nan)
            early[missing:] = panel.values[begin + missing : begin + max(missing, len(early))]
            held = what, Smoother(self._gains, _first_shape(early, period)), missing
        _, now, done = held
        for row in range(done, place + 1):
            now.follow(row, panel.values[begin + row])
        panel.memo[StateSpace] = what, now, place + 1
        return now, place


class Smoother:
    """Of `n` series after a row: level, slope, how many values were known [n], and season [period, n].

    The level starts as a running mean, so that a small gain does not hold on to the first value. A gap
    changes nothing.
    """

    def __init__(self, gains: tuple[float, ...], season: F64) -> None:
        self._gains, self.season = gains, season
        self.level, self.slope, self._error = np.zeros((3, season.shape[1]))
        self.seen = np.zeros(season.shape[1], np.int64)

    def follow(self, row: int, value: F64) -> None:
        """The value [n] of the next row, which is the `row`-th from where the season begins."""
        gain, slope_gain, season_gain, damping = self._gains
        known, error = np.isfinite(value), self._error
        self.seen += known
        # A gap is an error of nothing. The first error is the distance from nothing: it says where the level
        # is, and no more.
        learns = known & (self.seen > 1)
        if slope_gain > 0:
            self.slope *= damping
            self.level += self.slope
        np.subtract(np.where(known, value, 0.0), self.level, out=error)
        if len(self.season):
            season = self.season[row % len(self.season)]
            error -= season
            season += season_gain * learns * error
        if slope_gain > 0:
            self.slope += slope_gain * learns * error
        error *= np.maximum(gain, 1.0 / np.maximum(self.seen, 1)) * known
        self.level += error


def smooth(values: F64, gains: tuple[float, ...], period: int, first_seasons: int) -> States:
    """States after each of the rows [n_time, n]; NaN before the first known value.

    The season starts as the mean shape of the first `first_seasons` periods.
    """
    now = Smoother(gains, _first_shape(values[: period * first_seasons], period))
    out = States(*np.zeros((3, *values.shape)))
    for row, value in enumerate(values):
        now.follow(row, value)
        out.level[row], out.slope[row] = np.where(now.seen > 0, now.level, np.nan), now.slope
        if period:
            out.season[row] = now.season[row % period]
    return out


def _first_shape(values: F64, period: int) -> F64:
    """Mean deviation of each place of a period from the mean of some periods [period, n]; 0 if unknown."""
    known = np.isfinite(values)
    values = np.where(known, values, 0.0)
    mean = values.sum(axis=0) / np.maximum(known.sum(axis=0), 1)
    off = np.where(known, values - mean, 0.0).reshape(-1, period, values.shape[1]) if period else values[None]
    count = known.reshape(off.shape).sum(axis=0)
    shape: F64 = off.sum(axis=0) / np.maximum(count, 1)
    return shape


def _stable(gains: F64, period: int) -> F64:
    """The same gains where errors of the state die out; else without that of the slope: then they do."""
    return gains if _largest_root(gains, period) <= 1.0 + ROOT_SLACK else gains * (1.0, 0.0, 1.0, 1.0)


def _largest_root(gains: F64, period: int) -> float:
    """Of what is left of a state's error one row later; 1 with a season, where level and season may swap."""
    level, slope, season, damping = gains
    period = period if season >= 0 else 0
    size = 2 + period
    step, seen, gain = np.zeros((size, size)), np.zeros(size), np.zeros(size)
    step[0, :2], step[1, 1] = (1.0, damping), damping
    seen[:2], gain[:2] = (1.0, damping), (level, slope)
    if period:
        # Places of the season, the latest first: the last one is the one to come.
        step[2, -1] = seen[-1] = 1.0
        step[np.arange(3, size), np.arange(2, size - 1)] = 1.0
        gain[2] = season
    return float(np.abs(np.linalg.eigvals(step - np.outer(gain, seen))).max())


def _gains(values: F64, period: int) -> list[F64]:
    """Fitted level, slope, season and damping of one scaled series without gaps; none if the fit fails."""
    import warnings

    from statsmodels.tsa.exponential_smoothing.ets import ETSModel

    best: tuple[float, F64] | None = None
    for season in ("add", None) if period and len(values) >= LEAST_SEASONS * period else (None,):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fit that did not converge is judged by its AIC like any other
            try:
                model = ETSModel(
                    values,
                    error="add",
                    trend="add",
                    damped_trend=True,
                    seasonal=season,
                    seasonal_periods=period if season else None,
                    initialization_method="heuristic",
                )
                result = model.fit(disp=False, maxiter=100)
            except (ValueError, np.linalg.LinAlgError):
                continue
        seasonal = np.clip(result.smoothing_seasonal, 0.0, 1.0) if season else NO_SEASON
        shares = np.clip((result.smoothing_level, result.smoothing_trend, result.damping_trend), 0.0, 1.0)
        gains = np.array((shares[0], shares[1], seasonal, shares[2]), np.float64)
        # The shape to start from counts as parameters too, though statsmodels does not estimate it.
        cost = float(result.aic) + (2.0 * period if season else 0.0)
        if np.isfinite([*gains, cost]).all() and (best is None or cost < best[0]):
            best = cost, gains
    return [] if best is None else [best[1]]
