"""autoregression: predicts from the last rows, the time of day and the day of the week.

One linear rule for all series of a panel, each scaled by its own recent mean and spread: z(t) = constant +
sum of phi(j) z(t - j) + harmonics of the local day and week at t. It is fitted by statsmodels' least squares
and iterated to each horizon once, when parameters are loaded, so that a forecast is one product of matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from models.load.calendar import hours_of_week
from models.load.climatology import of_recent_rows
from models.load.forecaster import DAY_S, WEEK_S, ForecastGrid, Parameters, QuantileForecast
from models.load.last_value import fill_gaps
from models.load.panel import SeriesPanel
from models.load.seasonal_naive import season_rows
from twin.catalogue import F64, I64, ContractError

ORDERS = (1, 2, 4, 8, 15, 30, 60)  # numbers of lags to choose from. source: estimate
ROWS_PER_LAG = 20  # source: estimate
# Harmonics of (the day, the week); the week's own shape is coarser than the day's. source: estimate
HARMONICS = (4, 3)
LEAST_SEASONS = 2  # source: estimate; with fewer, a harmonic is one more trend
SERIES, FIT_ROWS = 16, 40_000  # for one fit, all series together. source: estimate
LARGEST_ROOT = 0.9999  # source: estimate; a larger one explodes within a season
MEAN_ROWS = 1000  # of the recent mean, where the grid has no day. source: estimate
SAMPLE_ROWS = 300  # of those rows, at most so many count. source: estimate
LEAST_ROWS = 8  # for a mean and a spread
CELLS = 4_000_000  # numbers that are held at once
HOURS = (24.0, 168.0)
KEYS = ("phi", "constant", "day", "week")


class AutoRegression:
    """A pooled autoregression with harmonics.

    Parameters: phi [lags], constant [1], and of each harmonic of the day and the week (cos, sin) [k, 2].
    """

    name: ClassVar[str] = "autoregression"
    fitted: ClassVar[bool] = True

    def __init__(self, grid: ForecastGrid) -> None:
        self.grid = grid
        self._seasons = (season_rows(grid, DAY_S), season_rows(grid, WEEK_S))
        # Whole weeks, so that a mean does not follow the days of the week.
        self._mean_rows = max((s for s in self._seasons if s), default=MEAN_ROWS)
        self._lags: F64 | None = None  # [n_horizon, lags] weight of each last row, the latest first
        self._harmonics: list[tuple[float, int, F64]] = []  # period in hours, k, [n_horizon, 2] gains
        self._constant = np.zeros(len(grid.horizons))

    @property
    def reach_rows(self) -> int:
        return max(self._mean_rows, 2 * ORDERS[-1])

    def fit(self, past: SeriesPanel, seed: int) -> Parameters:
        """Order by the Bayesian information criterion; roots of more than LARGEST_ROOT are shrunk."""
        import warnings

        from statsmodels.regression.linear_model import OLS

        counts = self._harmonic_counts(past.n_time)
        target, lagged, shape = _design(past, counts)
        if len(target) < 2 * ROWS_PER_LAG:
            return {}
        best: tuple[float, int, Any] | None = None
        for order in ORDERS:
            if order > lagged.shape[1] or (order > 1 and order * ROWS_PER_LAG > len(target)):
                break
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a design that is short of rank: pinv copes
                try:
                    result = OLS(target, np.hstack([lagged[:, :order], shape])).fit()
                except np.linalg.LinAlgError:
                    continue
                bic = float(result.bic)
            if np.isfinite(bic) and (best is None or bic < best[0]):
                best = bic, order, np.asarray(result.params, np.float64)
        if best is None or not np.isfinite(best[2]).all():
            return {}
        _, order, params = best
        phi, waves = _shrunk(params[:order]), params[order + 1 :].reshape(-1, 2)
        return {
            "phi": phi,
            "constant": _bounded(phi, np.inf, params[order : order + 1]),
            "day": self._bounded_waves(phi, 0, waves[: counts[0]]),
            "week": self._bounded_waves(phi, 1, waves[counts[0] :]),
        }

    def load(self, parameters: Mapping[str, np.ndarray]) -> None:
        self._lags = None
        if not parameters:
            return
        if set(parameters) != set(KEYS):
            raise ContractError(f"expected {', '.join(KEYS)}, got {sorted(parameters)}")
        phi, constant, *seasons = (parameters[key] for key in KEYS)
        shapes = phi.ndim == 1 and 1 <= len(phi) <= ORDERS[-1] and constant.shape == (1,)
        shapes = shapes and all(s.ndim == 2 and s.shape[1] == 2 for s in seasons)
        if not shapes or not all(np.isfinite(a).all() for a in (phi, constant, *seasons)):
            raise ContractError("expected finite phi [lags], constant [1], day and week [k, 2]")
        drives, names = [np.ones(self.grid.horizons[-1] + 1)], []
        for rows, hours, waves in zip(self._seasons, HOURS, seasons, strict=True):
            if len(waves) and not rows:
                raise ContractError("expected no harmonics on a grid without such a season")
            for k in range(1, len(waves) + 1):
                angle = 2 * np.pi * k / rows * np.arange(self.grid.horizons[-1] + 1)
                drives += [np.cos(angle), np.sin(angle)]
                names.append((hours, k))
        lags, driven = _iterated(phi, np.stack(drives, axis=1), self.grid.horizons)
        self._constant = constant[0] * driven[:, 0]
        self._harmonics = []
        for place, ((hours, k), (cos, sin)) in enumerate(zip(names, np.vstack(seasons), strict=True)):
            wave_cos, wave_sin = driven[:, 1 + 2 * place], driven[:, 2 + 2 * place]
            gains = np.stack([cos * wave_cos + sin * wave_sin, sin * wave_cos - cos * wave_sin], axis=1)
            self._harmonics.append((hours, k, gains))
        self._lags = lags

    def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
        point = np.full((len(self.grid.horizons), len(origins), panel.n), np.nan)
        if self._lags is None or not len(origins):
            return QuantileForecast(point)
        order = self._lags.shape[1]
        mean, spread = of_recent_rows(panel, origins, self._mean_rows, SAMPLE_ROWS, _moments)
        begin = max(0, int(origins[0]) - 2 * ORDERS[-1] + 1)
        values = fill_gaps(panel.values[begin : int(origins[-1]) + 1], ORDERS[-1])
        drive = self._drive(panel, origins)
        step = max(1, CELLS // (order * max(1, panel.n)))
        for part in (slice(i, i + step) for i in range(0, len(origins), step)):
            at = (origins[part, None] - begin) - np.arange(order)
            rows = values[np.maximum(at, 0)] - mean[part, None]
            rows[at < 0] = 0.0
            rows[~np.isfinite(rows)] = 0.0  # what is not known is taken as usual
            point[:, part] = np.moveaxis(self._lags @ rows, 1, 0) + mean[part]
        point += drive[:, :, None] * spread
        return QuantileForecast(point)

    def _harmonic_counts(self, n_time: int) -> tuple[int, int]:
        day, week = (
            min(most, (rows - 1) // 2) if rows and n_time >= LEAST_SEASONS * rows else 0
            for rows, most in zip(self._seasons, HARMONICS, strict=True)
        )
        return day, week

    def _bounded_waves(self, phi: F64, season: int, waves: F64) -> F64:
        rows = self._seasons[season]
        return np.array([_bounded(phi, rows / (k + 1), wave) for k, wave in enumerate(waves)]).reshape(-1, 2)

    def _drive(self, panel: SeriesPanel, origins: I64) -> F64:
        """Sum of the constant and the harmonics at each target, in spreads [n_horizon, n_origin]."""
        out = np.repeat(self._constant[:, None], len(origins), axis=1)
        if not self._harmonics:
            return out
        for place, horizon in enumerate(self.grid.horizons):
            local = hours_of_week(panel.t_ns(origins + horizon), panel.zone)
            # The hour of the origin, if clocks had already been what they are at the target.
            local = local - horizon * self.grid.step_s / 3600.0
            for hours, k, gains in self._harmonics:
                angle = 2 * np.pi * k / hours * local
                out[place] += gains[place, 0] * np.cos(angle) + gains[place, 1] * np.sin(angle)
        return out


def _moments(window: F64) -> F64:
    """Mean and standard deviation [2, m, n] of windows [m, rows, n]; NaN for fewer than LEAST_ROWS known."""
    known = np.isfinite(window)
    count = known.sum(axis=1)
    enough = np.maximum(count, 1)
    mean = np.where(known, window, 0.0).sum(axis=1) / enough
    off = np.where(known, window - mean[:, None], 0.0)
    spread = np.sqrt(np.square(off).sum(axis=1) / enough)
    mean[count < LEAST_ROWS] = np.nan
    return np.stack([mean, spread])


def fit_series(values: F64, most: int) -> I64:
    """Columns to fit on, ascending: complete ones that vary, at most `most`, spread over the panel."""
    known = np.isfinite(values)
    counts = known.sum(axis=0)
    low = np.where(known, values, np.inf).min(axis=0, initial=np.inf)
    high = np.where(known, values, -np.inf).max(axis=0, initial=-np.inf)
    varied = np.flatnonzero(high > low)
    if len(varied) > most:
        complete = varied[counts[varied] >= np.sort(counts[varied])[-most]]
        varied = complete[np.linspace(0, len(complete) - 1, most).round().astype(np.int64)]
    return np.unique(varied)


def _design(past: SeriesPanel, counts: tuple[int, int]) -> tuple[F64, F64, F64]:
    """Targets [m], lags [m, lags], constant and harmonics [m, 1 + 2 k] of all chosen series, scaled."""
    columns = fit_series(past.values, SERIES)
    most = ORDERS[-1]
    order = max((o for o in ORDERS if o * ROWS_PER_LAG <= past.n_time * max(1, len(columns))), default=1)
    order = min(order, max((o for o in ORDERS if 2 * o <= past.n_time), default=1), most)
    kept = FIT_ROWS // max(1, len(columns)) + order
    values = past.values[-kept:, columns]
    rows = np.arange(past.n_time - len(values), past.n_time)
    local = hours_of_week(past.t_ns(rows), past.zone) if any(counts) else np.zeros(len(rows))
    waves = list(_waves(local, counts))
    shape = np.stack([np.ones(len(rows)), *waves], axis=1)[order:]
    targets, lagged, shapes = [np.empty(0)], [np.empty((0, order))], [shape[:0]]
    known = fill_gaps(values, ORDERS[-1])
    for column, lags in zip(values.T, known.T, strict=True):
        finite = column[np.isfinite(column)]
        if len(finite) < 2 * ROWS_PER_LAG or not finite.std() > 0:
            continue
        target = (column[order:] - finite.mean()) / finite.std()
        scaled = (lags[:-1] - finite.mean()) / finite.std()
        before = np.lib.stride_tricks.sliding_window_view(scaled, order)[:, ::-1]
        whole = np.isfinite(before).all(axis=1) & np.isfinite(target)
        targets.append(target[whole])
        lagged.append(before[whole])
        shapes.append(shape[whole])
    return np.concatenate(targets), np.concatenate(lagged), np.concatenate(shapes)


def _waves(local: F64, counts: tuple[int, int]) -> Iterator[F64]:
    for hours, count in zip(HOURS, counts, strict=True):
        for k in range(1, count + 1):
            angle = 2 * np.pi * k / hours * local
            yield np.cos(angle)
            yield np.sin(angle)


def _shrunk(phi: F64) -> F64:
    """The same with every root scaled down so that the largest is at most LARGEST_ROOT."""
    largest = float(np.abs(np.roots(np.concatenate([[1.0], -phi]))).max(initial=0.0))
    return phi * min(1.0, LARGEST_ROOT / max(largest, 1e-12)) ** np.arange(1, len(phi) + 1)


def _bounded(phi: F64, period: float, drive: F64) -> F64:
    """The same drive, smaller where its response in the long run would be larger than a series of spread 1.

    `drive` [1] a constant, or [2] a wave of `period` rows.
    """
    filtered = 1.0 - np.sum(phi * np.exp(-2j * np.pi / period * np.arange(1, len(phi) + 1)))
    response = float(np.hypot.reduce(drive) / max(abs(filtered), 1e-12))
    largest = np.sqrt(len(drive))  # a wave of spread 1 has an amplitude of sqrt(2)
    smaller: F64 = drive * min(1.0, largest / max(response, 1e-12))
    return smaller


def _iterated(phi: F64, drives: F64, horizons: tuple[int, ...]) -> tuple[F64, F64]:
    """Weights of the last rows [n_horizon, lags] and of drives [n_horizon, k].

    `drives` [steps + 1, k]: what is added at each step after the origin, from row 1 on.
    """
    order, wanted = len(phi), set(horizons)
    # Row i: how the value i steps before the present depends on the rows up to the origin and on the drives.
    state = np.hstack([np.eye(order), np.zeros((order, drives.shape[1]))])
    said = []
    for step in range(1, horizons[-1] + 1):
        ahead = phi @ state
        ahead[order:] += drives[step]
        state = np.vstack([ahead, state[:-1]])
        if step in wanted:
            said.append(ahead)
    out = np.stack(said)
    return out[:, :order], out[:, order:]
