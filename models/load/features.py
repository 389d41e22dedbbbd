"""Features of a series at an origin for learned forecasters: its movements, in its own units of movement.

A case is a row of a panel and one of its series. Every column is a difference from the last known value over
the case's own scale, or a count, so that series of watts and of jobs can be pooled. Looks at rows up to the
case's own, but for the calendar and columns that are known ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from models.load.calendar import days_of_week, hours_of_day, minutes_of_hour
from models.load.forecaster import ForecastGrid
from models.load.panel import SeriesPanel
from twin.catalogue import F64, I64

# source: estimate for all of these; the prototype's ramps and half-lives, and windows that double twice
RAMP_ROWS = (1, 2, 3, 5, 10, 20, 40, 80, 160)
HALF_LIVES = (2.0, 8.0, 30.0, 120.0)
WINDOW_ROWS = (5, 15, 60, 240)
NEAR_ROWS = WINDOW_ROWS[-1] + 1  # rows that are all looked at
FAR_ROWS = tuple(range(0, 1537, 48))  # rows ago that are looked at beyond those; a day of minutes and more
SEASONS_BACK = {0: 7, 1: 4}  # days and weeks that a median of earlier seasons looks at
SMOOTH_S = 300.0  # a value of an earlier season is a mean of five so far apart
LEAST_KNOWN = 8  # values known before a case has a scale
FARTHER_ROWS = tuple(range(0, 10_081, 288))  # a week of minutes, where there is one
CHUNK = 512  # cases whose near rows stay in a second-level cache

_NEAR_NAMES = (
    *(f"ramp_{k}" for k in RAMP_ROWS),
    *(f"ewma_{h:g}" for h in HALF_LIVES),
    *(
        f"{what}_{w}"
        for w in WINDOW_ROWS
        for what in ("mean", "deviation", "lowest", "highest", "move", "still")
    ),
    "place",
    "since_change",
    "since_gap",
    "stale",
)
_FAR_NAMES = (
    *("far_lowest", "far_low", "far_median", "far_high", "far_highest"),
    *("farther_low", "farther_median", "farther_high"),
    *("far_rank", "farther_rank", "level"),
)
_CLOCK_NAMES = ("hour", "hour_sin", "hour_cos", "weekday", "minute")
_COUNTED = ("still", "place", "since", "stale", "far_rank", "farther_rank")  # the others are sizes
_SIZES = np.array([not name.startswith(_COUNTED) for name in (*_NEAR_NAMES, *_FAR_NAMES)])
_SEASON_NAMES = ("lag", "smooth", "rise", "usual", "usual_rise")


@dataclass(frozen=True)
class TrainingCases:
    """Pairs of a row of a panel and a series, int64 [n_case] each."""

    row: I64
    series: I64

    @property
    def n(self) -> int:
        return len(self.row)

    @cached_property
    def neighbours(self) -> slice | None:
        """The series, where all cases are of one row and of series side by side: read as whole pieces."""
        if not self.n or np.any(self.row != self.row[0]) or np.any(np.diff(self.series) != 1):
            return None
        return slice(int(self.series[0]), int(self.series[-1]) + 1)


@dataclass(frozen=True)
class OriginFeatures:
    """Features at an origin that do not depend on the horizon.

    `last` is the last known value and `scale` the size of the local movement, in its unit: 0 where nothing
    moved, NaN where too little is known. `columns` [n_column, n_case] are in units of the scale.
    """

    last: F64
    scale: F64
    columns: F64


def all_cases(origins: I64, n: int) -> TrainingCases:
    """Every series at every origin, series by series: reshape to [n_origin, n]."""
    return TrainingCases(np.repeat(origins, n), np.tile(np.arange(n), len(origins)))


def reach_rows(grid: ForecastGrid) -> int:
    """A case's columns depend on at most so many rows up to its own."""
    reach = [NEAR_ROWS, FAR_ROWS[-1] + 1]
    for place, season in enumerate(grid.seasons):
        back = season * (-(-grid.horizons[-1] // season) + SEASONS_BACK[place] - 1)
        reach.append(back + 2 * _apart(grid) + 1)
    return max(reach)


def names(grid: ForecastGrid, known: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The columns of `columns_at`, in order; `known` as `known_names` gives them."""
    seasons = tuple(f"{what}_{s}" for s in grid.seasons for what in _SEASON_NAMES)
    ahead = tuple(f"{what}_{name}" for name in known for what in ("then", "change"))
    return (*_NEAR_NAMES, *_FAR_NAMES, *_CLOCK_NAMES, *seasons, *ahead)


def known_names(panel: SeriesPanel) -> tuple[str, ...]:
    """The columns known ahead, in the order in which features hold them."""
    return tuple(sorted(panel.known))


def present_features(panel: SeriesPanel, cases: TrainingCases) -> OriginFeatures:
    """Features at the rows of these cases. Takes 5 ms for 2,000 series at one row."""
    out = np.empty((len(_NEAR_NAMES) + len(_FAR_NAMES), cases.n))
    last, scale = np.empty(cases.n), np.empty(cases.n)
    for first in range(0, cases.n, CHUNK):
        part = slice(first, min(first + CHUNK, cases.n))
        some = TrainingCases(cases.row[part], cases.series[part])
        near, far = out[: len(_NEAR_NAMES), part], out[len(_NEAR_NAMES) :, part]
        last[part], spread = _near(_last_rows(panel.values, some), near)
        scale[part] = spread + _far(panel.values, some, last[part], far)
        sizes = out[:, part]
        np.divide(sizes, _divisor(scale[part]), out=sizes, where=_SIZES[:, None])
    return OriginFeatures(last, scale, out)


def _divisor(scale: F64) -> F64:
    """NaN where the scale is 0 or unknown: the sizes of such a case mean nothing."""
    return np.where(scale > 0, scale, np.nan)


def _last_rows(values: F64, cases: TrainingCases) -> F64:
    """The last NEAR_ROWS rows up to each case's [NEAR_ROWS, n_case]; NaN before the beginning."""
    row = int(cases.row[0])
    if cases.neighbours is not None and row >= NEAR_ROWS - 1:
        return values[row + 1 - NEAR_ROWS : row + 1, cases.neighbours]
    return _value_at(values, cases, np.arange(1 - NEAR_ROWS, 1)[:, None])


def _value_at(values: F64, cases: TrainingCases, ahead: I64 | int) -> F64:
    """Each case's value so many rows ahead of it, or behind: [n_case] or, of [k, 1] of them, [k, n_case].

    NaN before the beginning.
    """
    if cases.neighbours is not None:
        row = cases.row[:1] + ahead
        found: F64 = values[np.maximum(row[..., 0], 0), cases.neighbours]
        early = row < 0
    else:
        row = cases.row + ahead
        found = np.take(values, np.maximum(row, 0) * values.shape[1] + cases.series)
        early = row < 0
    return np.where(early, np.nan, found) if early.any() else found


def _near(rows: F64, out: F64) -> tuple[F64, F64]:
    """Fills the near columns, not yet over the scale; gives the last value and the near part of the scale."""
    n_row = len(rows)
    unknown = np.isnan(rows)
    gaps = bool(unknown.any())
    back = np.arange(n_row, 0.0, -1.0)[:, None]  # 1 for the last row
    stale = since_gap = np.zeros(rows.shape[1])
    if gaps:
        at = np.where(unknown, -1, np.arange(n_row)[:, None])
        np.maximum.accumulate(at, axis=0, out=at)
        stale = n_row - 1.0 - at[-1]
        since_gap = np.where(unknown, back, n_row + 1).min(axis=0) - 1
        rows = np.where(at < 0, np.nan, np.take_along_axis(rows, np.maximum(at, 0), axis=0))
    else:
        since_gap = np.full(rows.shape[1], float(n_row))
    last = rows[-1].copy()
    away = rows - last
    known: NDArray[np.bool_] | None = ~np.isnan(away) if gaps else None
    for place, k in enumerate(RAMP_ROWS):
        np.negative(away[n_row - 1 - k], out=out[place])
    moved = np.diff(away, axis=0)
    if known is not None:
        away, moved = np.where(known, away, 0.0), np.where(np.isnan(moved), 0.0, moved)
    weights = 0.5 ** ((back[:, 0] - 1) / np.array(HALF_LIVES)[:, None])
    weight = weights.sum(axis=1)[:, None] if known is None else weights @ known
    at_column = len(RAMP_ROWS)
    with np.errstate(invalid="ignore"):  # a series without any reading has no weight
        np.divide(weights @ away, weight, out=out[at_column : at_column + len(HALF_LIVES)])
    at_column += len(HALF_LIVES)
    spread = _windows(away, np.abs(moved), known, out[at_column : at_column + 6 * len(WINDOW_ROWS)])
    low, high = out[at_column + 6 * len(WINDOW_ROWS) - 4 : at_column + 6 * len(WINDOW_ROWS) - 2]
    place, since_change, gap, old = out[-4:]
    np.divide(-low, high - low, out=place, where=high > low)
    place[~(high > low)] = np.nan
    changed = np.where(moved != 0, back[1:], n_row).min(axis=0) - 1
    np.log1p(changed, out=since_change)
    np.log1p(since_gap, out=gap)
    np.log1p(stale, out=old)
    return last, spread


def _windows(away: F64, moved: F64, known: NDArray[np.bool_] | None, out: F64) -> F64:
    """Six columns for each window, each looking at its rows once; gives the near part of the scale."""
    n_case = away.shape[1]
    total, square, move, still = (np.zeros(n_case) for _ in range(4))
    lowest, highest = np.zeros(n_case), np.zeros(n_case)  # the last value is in every window
    count = np.zeros(n_case)
    first = len(away)
    for place, window in enumerate(WINDOW_ROWS):
        begun = len(away) - window
        piece, steps = away[begun:first], moved[begun - 1 : first - 1]
        total += piece.sum(axis=0)
        square += np.einsum("ij,ij->j", piece, piece)
        np.minimum(lowest, piece.min(axis=0), out=lowest)
        np.maximum(highest, piece.max(axis=0), out=highest)
        move += steps.sum(axis=0)
        still += np.count_nonzero(steps == 0, axis=0)
        count += len(piece) if known is None else known[begun:first].sum(axis=0)
        n = np.maximum(count, 1.0)
        mean = total / n
        deviation = np.sqrt(np.maximum(square / n - mean**2, 0.0))
        gone = window - count  # rows before the beginning: their steps of 0 are not steps
        columns = (mean, deviation, lowest, highest, move / n, np.maximum(still - gone, 0) / n)
        for k, column in enumerate(columns):
            out[6 * place + k] = column
        first = begun
    spread: F64 = np.abs(away[first:] - total / n)
    if known is not None:
        spread = np.where(known[first:], spread, 0.0)
    near: F64 = np.where(count >= LEAST_KNOWN, spread.sum(axis=0) / n + move / n, np.nan)
    return near


def _far(values: F64, cases: TrainingCases, last: F64, out: F64) -> F64:
    """Fills the far columns, not yet over the scale; gives the far part of the scale."""
    quantiles, rank, far = _spread(values, cases, last, FAR_ROWS, (0.0, 0.25, 0.5, 0.75, 1.0))
    out[:5], out[8] = quantiles, rank
    out[10] = last
    out[5:8], out[9], farther = _spread(values, cases, last, FARTHER_ROWS, (0.25, 0.5, 0.75))
    return np.maximum(far, farther)


def _spread(
    values: F64, cases: TrainingCases, last: F64, ago: tuple[int, ...], quantiles: tuple[float, ...]
) -> tuple[F64, F64, F64]:
    """Of the rows so long ago, less the last value: quantiles, rank of the last value and mean deviation."""
    back = np.array([k for k in ago if k <= cases.row.max()], np.int64)
    away = _value_at(values, cases, -back[:, None]) - last
    away.sort(axis=0)  # NaN last
    n = np.maximum(np.count_nonzero(~np.isnan(away), axis=0), 1)
    which = np.round(np.array(quantiles)[:, None] * (n - 1)).astype(np.int64)
    found = np.take_along_axis(away, which, axis=0)
    rank = np.count_nonzero(away <= 0, axis=0) / n
    middle = np.take_along_axis(away, np.round(0.5 * (n - 1)).astype(np.int64)[None, :], axis=0)
    return found, rank, np.nansum(np.abs(away - middle), axis=0) / n


def columns_at(
    panel: SeriesPanel, cases: TrainingCases, seen: OriginFeatures, grid: ForecastGrid, horizon: int
) -> F64:
    """Every column for this horizon [n_column, n_case], as `names`; `.T` gives rows for a forest."""
    n_present = len(seen.columns)
    known = known_names(panel)
    out = np.empty((len(names(grid, known)), cases.n))
    out[:n_present] = seen.columns
    rows, of_row = _rows(cases.row)
    out[n_present : n_present + 5] = clock(panel, rows + horizon)[:, of_row]
    at = n_present + 5
    for place, season in enumerate(grid.seasons):
        _season(
            panel.values, cases, seen, (season, SEASONS_BACK[place], _apart(grid), horizon), out[at : at + 5]
        )
        at += 5
    for name in known:
        column = panel.known[name]
        then = np.where(
            rows + horizon < len(column), column[np.minimum(rows + horizon, len(column) - 1)], np.nan
        )
        out[at], out[at + 1] = then[of_row], (then - column[rows])[of_row]
        at += 2
    return out


def _rows(row: I64) -> tuple[I64, I64]:
    """Each row once, and where each case finds its own."""
    if np.all(row == row[0]):
        return row[:1], np.zeros(len(row), np.int64)
    rows, of_row = np.unique(row, return_inverse=True)
    return rows, of_row


def clock(panel: SeriesPanel, rows: I64) -> F64:
    """Hour of the day and its sine and cosine, day of the week, minute of the hour. [5, n_row]

    Raises ContractError for a zone that this system does not know.
    """
    t_ns = panel.t_ns(rows)
    hour = hours_of_day(t_ns, panel.zone)
    angle = hour * (2 * np.pi / 24)
    weekday = days_of_week(t_ns, panel.zone).astype(np.float64)
    return np.stack([hour, np.sin(angle), np.cos(angle), weekday, minutes_of_hour(t_ns, panel.zone)])


def _apart(grid: ForecastGrid) -> int:
    return max(1, round(SMOOTH_S / grid.step_s))


def _season(
    values: F64, cases: TrainingCases, seen: OriginFeatures, what: tuple[int, int, int, int], out: F64
) -> None:
    """Values one season and more before the target, and their rise over as many rows."""
    season, n_back, apart, horizon = what
    back = season * -(-horizon // season)
    latest = int(cases.row.max()) + horizon - back
    if latest + 2 * apart < 0:
        out[:] = np.nan
        return
    out[0] = _value_at(values, cases, horizon - back) - seen.last
    then = _smooth(values, cases, horizon - back, apart)
    out[1] = then - seen.last
    out[2] = then - _smooth(values, cases, -back, apart)
    ago = season * np.arange(max(1, min(n_back, latest // season + 1)))[:, None]
    then = _value_at(values, cases, horizon - back - ago)
    out[3] = _median(then) - seen.last
    out[4] = _median(then - _value_at(values, cases, -back - ago))
    out /= _divisor(seen.scale)


def _smooth(values: F64, cases: TrainingCases, ahead: int, apart: int) -> F64:
    """Return the mean of the known ones of five rows around this horizon, none after the case's own row."""
    found = _value_at(values, cases, np.minimum(ahead + apart * np.arange(-2, 3)[:, None], 0))
    n = np.count_nonzero(~np.isnan(found), axis=0)
    mean: F64 = np.nansum(found, axis=0) / np.where(n > 0, n, np.nan)
    return mean


def _median(values: F64) -> F64:
    """Return the lower median of the known values in each column; NaN for none."""
    values = np.sort(values, axis=0)
    n = np.count_nonzero(~np.isnan(values), axis=0)
    middle: F64 = np.take_along_axis(values, np.maximum(n - 1, 0)[None, :] // 2, axis=0)[0]
    return middle


def targets(panel: SeriesPanel, cases: TrainingCases, seen: OriginFeatures, horizon: int) -> F64:
    """The change to the target over the scale [n_case]; NaN past the end, in gaps and where nothing moved."""
    inside = cases.row + horizon < panel.n_time
    value = _value_at(panel.values, cases, np.minimum(horizon, panel.n_time - 1 - cases.row))
    change: F64 = (np.where(inside, value, np.nan) - seen.last) / _divisor(seen.scale)
    return change


def sample(rows: int, n: int, most: int) -> TrainingCases:
    """At most so many of the cases of `rows` rows and n series, even in time and sorted by row.

    One case in each of `most` equal stretches, by the golden ratio, so that no season of the data is in step.
    """
    total = rows * n
    most = min(most, total)
    stretch = np.arange(most + 1) * total // most
    golden = (np.sqrt(5.0) - 1) / 2
    inside = (np.arange(most) * golden) % 1.0
    at = stretch[:-1] + np.floor(inside * np.diff(stretch)).astype(np.int64)
    return TrainingCases(at // n, at % n)
