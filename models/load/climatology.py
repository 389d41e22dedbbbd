"""climatology: predicts the usual value, recent or of the time of day.

Good far ahead, where the present is forgotten. Medians, since a forecast is judged by its absolute error.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import ClassVar

import numpy as np

from models.load.calendar import local_ns
from models.load.forecaster import DAY_S, WEEK_S, ForecastGrid, QuantileForecast
from models.load.last_value import Unfitted, last_within, rows_since_epoch
from models.load.panel import SeriesPanel
from models.load.seasonal_naive import season_rows
from twin.catalogue import F64, I64, NS

# Two weeks hold every hour of the week twice. source: estimate
RECENT_S = 14 * DAY_S
RECENT_ROWS = 1000  # where a day is no whole number of rows. source: estimate
# A window counts a third of so many rows up to all of them; more would hardly move a median. source: estimate
SAMPLE_ROWS = 400
DEVIATION_HALF_LIFE_S = DAY_S  # source: estimate
MOST_SHIFT = 2  # hours that clocks are put forward or back. source: estimate
HOUR_S = 3600.0
CELLS = 4_000_000  # numbers that are held at once
FEW = 32  # hours that are kept in the memo of a panel. source: estimate; twice what one origin asks for
MOST_CLOCKS = 4096  # hours of which the memo keeps what clocks showed. source: estimate; half a year


class Climatology(Unfitted):
    """Running median of the recent past, the same at every horizon.

    The window is two weeks, or twice the largest horizon where that is longer, of which a sample counts.
    """

    name: ClassVar[str] = "climatology"

    @property
    def reach_rows(self) -> int:
        recent = round(RECENT_S / self.grid.step_s) if self.grid.seasons else RECENT_ROWS
        return max(recent, 2 * self.grid.horizons[-1])

    def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
        point = of_recent_rows(panel, origins, self.reach_rows, SAMPLE_ROWS, _medians)
        return QuantileForecast(np.broadcast_to(point, (len(self.grid.horizons), *point.shape[1:])))


class _Usual(Unfitted):
    """Climatology of an hour: from the hours whole seasons (days, weeks) before it, by local clocks.

    An hour is a whole number of rows that divides a day, at most 3,600 s, and is known when its last row is.
    """

    span_s: ClassVar[float] = DAY_S
    seasons: ClassVar[int] = 28  # four weeks hold four of each day of the week. source: estimate
    least: ClassVar[int] = 5  # source: estimate

    def __init__(self, grid: ForecastGrid) -> None:
        super().__init__(grid)
        day, season = season_rows(grid, DAY_S), season_rows(grid, self.span_s)
        most = max(1, int(HOUR_S / grid.step_s + 1e-9))
        self._hour = next((rows for rows in range(min(most, day), 0, -1) if day % rows == 0), 1)
        self._season = season // self._hour  # in hours; 0 where the grid has no such season

    @property
    def reach_rows(self) -> int:
        # Clocks may move both the first and the last of the hours; and an hour may not be over.
        return (self.seasons * self._season + 2 * MOST_SHIFT + 3) * self._hour

    def _usual(self, panel: SeriesPanel, hours: I64, latest: I64) -> F64:
        """Climatology of these hours since 1970 [..., n], as known when the hour `latest` is over."""
        clock = self._clock_hours(panel, hours)
        ahead = np.maximum(0, hours - latest)
        heads = hours - self._season * -(-ahead // self._season)
        heads = heads + _shift(clock, self._clock_hours(panel, heads))
        heads = np.where(heads > latest, heads - self._season, heads)
        heads, inverse = np.unique(heads, return_inverse=True)
        if hours.size <= FEW:
            usual = self._of_few(panel, heads)
        else:
            usual = self._of_hours(panel, self._back(panel, heads))
        return usual[inverse.reshape(hours.shape)]

    def _back(self, panel: SeriesPanel, heads: I64) -> I64:
        """These hours and those whole seasons before, the latest first [m, seasons]."""
        back = heads[:, None] - self._season * np.arange(self.seasons)
        back += _shift(self._clock_hours(panel, heads)[:, None], self._clock_hours(panel, back))
        return back

    def _of_hours(self, panel: SeriesPanel, back: I64) -> F64:
        """Climatology from these hours since 1970 [m, seasons]. [m, n]"""
        sources, where = np.unique(back, return_inverse=True)
        typical = self._typical(panel, sources * self._hour - rows_since_epoch(panel))
        where = where.reshape(back.shape)
        usual = np.empty((len(back), panel.n))
        for part in _parts(len(back), self.seasons * panel.n):
            usual[part] = self._over_seasons(np.moveaxis(typical[where[part]], 1, -1))
        return usual

    def _of_few(self, panel: SeriesPanel, heads: I64) -> F64:
        """As `_of_hours` back from these, with the panel's memo: what is usual changes when an hour ends."""
        key: Hashable = type(self).__name__
        memo: dict[int, tuple[I64, int, F64]] = panel.memo.setdefault(key, {})
        first = rows_since_epoch(panel)
        usual = []
        for head in heads.tolist():
            held = memo.pop(head, None)
            back = self._back(panel, np.array([head])) if held is None else held[0]
            # An hour of the past stays as it is until it begins before the panel.
            inside = int(np.count_nonzero(back * self._hour >= first))
            if held is None or held[1] != inside:
                held = back, inside, self._of_hours(panel, back)[0]
            memo[head] = held  # the last that was asked for is the last to go
            usual.append(held[2])
        for head in list(memo)[:-FEW]:
            del memo[head]
        return np.stack(usual)

    def _clock_hours(self, panel: SeriesPanel, hours: I64) -> I64:
        """By how many hours local clocks are ahead of UTC then; all zero where zones do not matter."""
        if panel.zone == "UTC":
            return np.zeros_like(hours)
        if hours.size > FEW:
            return self._looked_up(panel, hours.ravel()).reshape(hours.shape)
        # A few at a time are asked for row after row, most of them again.
        memo: dict[int, int] = panel.memo.setdefault(("clocks", self._hour), {})
        asked = hours.ravel().tolist()
        if len(memo) > MOST_CLOCKS:
            memo.clear()
        if new := [hour for hour in dict.fromkeys(asked) if hour not in memo]:
            memo.update(zip(new, self._looked_up(panel, np.array(new)).tolist(), strict=True))
        return np.array([memo[hour] for hour in asked], np.int64).reshape(hours.shape)

    def _looked_up(self, panel: SeriesPanel, hours: I64) -> I64:
        """`_clock_hours` by the time zone database. [m] -> [m]"""
        hour_ns = round(self._hour * panel.step_s * NS)
        t_ns = hours * hour_ns
        return np.round((local_ns(t_ns, panel.zone) - t_ns) / hour_ns).astype(np.int64)

    def _typical(self, panel: SeriesPanel, starts: I64) -> F64:
        """One value for each hour that begins at these rows [n_hour, n]; NaN where nothing is known."""
        out = np.full((len(starts), panel.n), np.nan)
        # An hour that begins before the panel is not there, lest it depend on where a panel was cut.
        inside = np.flatnonzero(starts >= 0)
        for part in _parts(len(inside), self._hour * panel.n):
            rows = starts[inside[part], None] + np.arange(self._hour)
            out[inside[part]] = self._within(np.moveaxis(panel.values[rows], 1, -1))
        return out

    def _within(self, values: F64) -> F64:
        """One value for an hour [m, n] from its rows [m, n, hour]."""
        raise NotImplementedError

    def _over_seasons(self, values: F64) -> F64:
        """Climatology [m, n] from hours, the latest first [m, n, seasons]; NaN if too few are known."""
        raise NotImplementedError


class HourlyMedian(_Usual):
    """Median over the days of the median within the hour."""

    name: ClassVar[str] = "hourly_median"

    def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
        if not self._season or not len(origins):
            return QuantileForecast(np.full((len(self.grid.horizons), len(origins), panel.n), np.nan))
        at = rows_since_epoch(panel) + origins
        target = (at + np.asarray(self.grid.horizons)[:, None]) // self._hour
        return QuantileForecast(self._usual(panel, target, (at + 1) // self._hour - 1))

    def _within(self, values: F64) -> F64:
        return known_median(values)

    def _over_seasons(self, values: F64) -> F64:
        known = np.isfinite(values).sum(axis=-1)
        return np.where(known >= self.least, known_median(values), np.nan)


class SeasonalMean(_Usual):
    """Mean over the days of the mean within the hour, and what is left of the present deviation from it.

    A day weighs half after a week; of the deviation half is left after a day. Between the middles of two
    hours the mean goes in a line. A deviation is forgotten when no reading arrives for an hour.
    """

    name: ClassVar[str] = "seasonal_ewma"
    half_life: ClassVar[float] = 7.0  # seasons. source: estimate

    def predict(self, panel: SeriesPanel, origins: I64) -> QuantileForecast:
        if not self._season or not len(origins):
            return QuantileForecast(np.full((len(self.grid.horizons), len(origins), panel.n), np.nan))
        horizons = np.asarray(self.grid.horizons)
        at = rows_since_epoch(panel) + origins
        point = self._between(panel, at + horizons[:, None], (at + 1) // self._hour - 1)
        # As predicted before this hour began.
        present = self._between(panel, at, at // self._hour - 1)
        off = last_within(panel.values, origins, self._hour) - present
        off[~np.isfinite(off)] = 0.0
        left = 0.5 ** (horizons * self.grid.step_s / DEVIATION_HALF_LIFE_S)
        return QuantileForecast(point + left[:, None, None] * off)

    def _between(self, panel: SeriesPanel, rows: I64, latest: I64) -> F64:
        """Climatology at these rows since 1970 [..., n]."""
        middle = (rows + 0.5) / self._hour - 0.5
        hours = np.floor(middle).astype(np.int64)
        share = (middle - hours)[..., None]
        usual = self._usual(panel, hours, latest)
        if self._hour == 1:
            return usual
        usual = usual * (1.0 - share)
        usual += share * self._usual(panel, hours + 1, latest)
        return usual

    def _within(self, values: F64) -> F64:
        return _known_mean(values, np.ones(values.shape[-1]), 1)

    def _over_seasons(self, values: F64) -> F64:
        return _known_mean(values, 0.5 ** (np.arange(self.seasons) / self.half_life), self.least)


class WeeklyMean(SeasonalMean):
    """The same over weeks: for what differs by the day of the week."""

    name: ClassVar[str] = "weekly_ewma"
    span_s: ClassVar[float] = WEEK_S
    seasons: ClassVar[int] = 8  # source: estimate
    least: ClassVar[int] = 2  # source: estimate
    half_life: ClassVar[float] = 2.0  # source: estimate


def _shift(wanted: I64, there: I64) -> I64:
    """Hours to go further so that local clocks show the wanted hour; at most MOST_SHIFT."""
    shift: I64 = np.clip(wanted - there, -MOST_SHIFT, MOST_SHIFT)
    return shift


def known_median(values: F64) -> F64:
    """Return the median of the finite values along the last axis; NaN for none."""
    ordered = np.array(values, order="C")  # a copy whose last axis lies together, to be sorted in place
    known = np.isfinite(ordered)
    ordered[~known] = np.nan
    ordered.sort(axis=-1)  # NaN comes last
    count = known.sum(axis=-1)[..., None]
    low = np.take_along_axis(ordered, np.maximum(count - 1, 0) // 2, axis=-1)
    high = np.take_along_axis(ordered, count // 2, axis=-1)
    middle: F64 = (0.5 * low + 0.5 * high)[..., 0]
    return middle


def _known_mean(values: F64, weights: F64, least: int) -> F64:
    """Return the weighted mean of the finite values along the last axis; NaN for fewer than `least`."""
    known = np.isfinite(values)
    total = known @ weights
    enough = known.sum(axis=-1) >= least
    said = np.where(known, values, 0.0) @ weights
    mean: F64 = np.where(enough, said / np.where(enough, total, 1.0), np.nan)
    return mean


def of_recent_rows(
    panel: SeriesPanel, origins: I64, reach: int, most: int, summarise: Callable[[F64], F64]
) -> F64:
    """`summarise` of windows [m, rows, n]: [k, m, n], here for each origin [k, n_origin, n].

    A window holds every k-th of the last `reach` rows up to its origin, a third of `most` up to `most` of
    them, NaN before the panel; k is a power of three that grows with the rows there are. Rows are counted
    since 1970, so that a window ends less than k rows before its origin, and k origins share it.
    """
    if not len(origins):
        return summarise(np.empty((0, 1, panel.n)))
    ages = np.minimum(origins + 1, reach)
    first = rows_since_epoch(panel)
    out = np.empty((0, len(origins), panel.n))
    thin, longest = 1, most
    while True:
        places = np.flatnonzero((ages <= longest) & (ages > (longest // 3 if thin > 1 else 0)))
        ends, inverse = np.unique((first + origins[places]) // thin * thin - first, return_inverse=True)
        # Less than the reach, since an origin may lie so far after the window's end.
        back = np.arange(0, min(longest, reach - thin + 1), thin)
        parts = []
        if len(origins) == 1 and len(ends):
            parts.append(_one_window(panel, int(ends[0]), back, summarise))
        else:
            for part in _parts(len(ends), len(back) * panel.n):
                parts.append(summarise(_rows_at(panel, ends[part, None] - back)))
        if parts:
            made = np.concatenate(parts, axis=1)
            out = out if len(out) else np.full((len(made), len(origins), panel.n), np.nan)
            out[:, places] = made[:, inverse]
        if longest >= reach:
            return out
        thin, longest = thin * 3, longest * 3


def _one_window(panel: SeriesPanel, end: int, back: I64, summarise: Callable[[F64], F64]) -> F64:
    """`summarise` of one window [k, 1, n]; from the panel's memo where it was computed before."""
    key = _one_window, summarise, back[-1], len(back)
    window = rows_since_epoch(panel) + end, int(np.count_nonzero(back <= end))
    held: tuple[tuple[int, int], F64] | None = panel.memo.get(key)
    if held is None or held[0] != window:
        held = window, summarise(_rows_at(panel, end - back[None, :]))
        panel.memo[key] = held
    return held[1]


def _rows_at(panel: SeriesPanel, at: I64) -> F64:
    """Rows at these places [m, rows, n]; NaN before the panel."""
    found: F64 = panel.values[np.maximum(at, 0)]
    found[at < 0] = np.nan
    return found


def _medians(window: F64) -> F64:
    return known_median(np.moveaxis(window, 1, -1))[None]


def _parts(count: int, cells: int) -> Iterator[slice]:
    """Slices of `count` things of so many cells each, of at most CELLS cells."""
    step = max(1, CELLS // max(1, cells))
    for begin in range(0, count, step):
        yield slice(begin, min(count, begin + step))
