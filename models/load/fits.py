"""Fits of the model `load`: grids, training series, and a fit of all experts.

`fit_all` runs in a worker, where the experts import libraries of statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from models.load.forecaster import ForecastGrid
from models.load.forecasters import FORECASTERS
from models.load.panel import SeriesPanel
from twin.catalogue import F64, I64

# Measured until now and, where an outlook is published, known ahead: what learned experts may look at.
KNOWN = ("site.outdoor_temp_c", "site.outdoor_wet_bulb_c")
# (name, longest step, rows kept, longest horizon): 26 hours of minutes, four weeks of quarters of an hour, so
# that a day, and four times the same hour of the week, lie behind every origin. source: estimate
GRIDS = (("fine", 60.0, 1560, 3600.0), ("coarse", 900.0, 2688, 7 * 86400.0))
MOST_BLOCK_ROWS = 64  # rows kept begin at a whole block of so many, counted from 1970
TAUGHT = 256  # series that a fit pools: their rows are copied on their way to the worker. source: estimate
# Between two fits: at least this, and this many rows, and a quarter of the time gathered so far; at most a
# day, or this many rows. What changes faster is learned online. source: estimate
FIT_LEAST_S, FIT_LEAST_ROWS, FIT_GROWTH, FIT_MOST_S, FIT_MOST_ROWS = 3600.0, 120, 0.25, 86_400.0, 2000


def grids_of(horizons_s: Sequence[float], dt_s: float) -> dict[str, ForecastGrid]:
    """The grids for ticks of this length: no row is shorter than a tick, and horizons are whole rows."""
    out, least_s = {}, 0.0
    for name, step_s, _, most_s in GRIDS:
        mine = [h for h in horizons_s if least_s < h <= most_s]
        least_s = most_s
        if mine:
            common_ms = int(np.gcd.reduce([max(1, round(h * 1000)) for h in mine]))
            common_s = common_ms / 1000
            step_s = max(common_s / math.ceil(common_s / step_s), dt_s)
            rows = sorted({round(h / step_s) for h in mine if h >= step_s})
            if rows:
                out[name] = ForecastGrid(step_s, tuple(rows))
    return out


@dataclass(frozen=True)
class KeptSpan:
    """The rows that a forecast may know: the newest `rows`, and those older ones that complete a block.

    They begin at a whole block of rows since 1970, so that neighbouring origins know the same past, and a
    backtest asks for many of them at once.
    """

    rows: int
    block: int

    def first(self, row: int) -> int:
        """The oldest row, by number since 1970, that is known when `row` is the newest."""
        return (row - self.rows + 1) // self.block * self.block

    @property
    def most(self) -> int:
        """The largest number of rows that may be known."""
        return self.rows + self.block - 1


def kept_span(rows: int, scale: int = 1) -> KeptSpan:
    """The span of so many rows, each `scale` rows of a finer grid."""
    return KeptSpan(rows * scale, max(1, min(MOST_BLOCK_ROWS, rows // 24)) * scale)


def lives(horizons: Sequence[int], step_s: float) -> list[tuple[tuple[int, ...], KeptSpan]]:
    """(horizons, rows kept) of each grid on which the daemon would forecast horizons of such rows.

    Where the daemon's rows are longer than `step_s`, the span is as long, in the shorter rows. Horizons
    beyond the daemon's longest are lived through as on its last grid.
    """
    most_s = GRIDS[-1][3]
    made = grids_of([min(h * step_s, most_s) for h in horizons], step_s)
    out, least_s = [], 0.0
    for name, _, rows, end_s in GRIDS:
        end_s = np.inf if name == GRIDS[-1][0] else end_s
        mine = tuple(h for h in horizons if least_s < h * step_s <= end_s)
        least_s = end_s
        if mine:
            out.append((mine, kept_span(rows, max(1, round(made[name].step_s / step_s)))))
    return out


def fit_rows(horizons: Sequence[int], step_s: float, n_time: int) -> tuple[int, ...]:
    """Numbers of rows after which the daemon would fit, had it begun with the first of `n_time`."""
    out, last = [], 0
    spans = lives(horizons, step_s)
    most = max(span.rows for _, span in spans)
    made = grids_of([min(h * step_s, GRIDS[-1][3]) for h in horizons], step_s)
    first_s = next(iter(made.values())).step_s
    for row in range(1, n_time):
        if (row - last) * step_s >= between_fits_s(first_s, min(row, most) * step_s):
            out.append(row)
            last = row
    return tuple(out)


def between_fits_s(step_s: float, past_s: float) -> float:
    """Seconds from one fit to the next, with rows of `step_s` and so much past."""
    most_s = max(FIT_MOST_S, FIT_MOST_ROWS * step_s)
    return min(max(FIT_LEAST_S, FIT_LEAST_ROWS * step_s, FIT_GROWTH * past_s), most_s)


def training_series(values: F64, tables: Sequence[slice]) -> I64:
    """At most TAUGHT series of `values` [n_time, n], ascending: large tables are thinned."""
    known = np.isfinite(values[:: -max(1, len(values) // 16)])
    chosen, left = [np.zeros(0, np.int64)], TAUGHT
    tables = sorted(tables, key=lambda series: series.stop - series.start)
    for place, series in enumerate(tables):
        some, share = np.arange(series.start, series.stop), left // (len(tables) - place)
        if len(some) > share:
            some = some[known[:, some].any(axis=0)]
            most = min(share, len(some))
            some = some[np.linspace(0, max(0, len(some) - 1), most).round().astype(np.int64)]
        chosen.append(some)
        left -= len(some)
    return np.sort(np.concatenate(chosen))


def fit_all(
    series: Mapping[str, np.ndarray], seed: int, experts: Sequence[str], zone: str
) -> dict[str, np.ndarray]:
    """Parameters of these experts on every grid: `GRID/EXPERT/name`, from `GRID/values` and its like."""
    out: dict[str, np.ndarray] = {}
    for name, *_ in GRIDS:
        if f"{name}/values" not in series:
            continue
        shape = series[f"{name}/grid"]
        grid = ForecastGrid(float(shape[0]), tuple(int(h) for h in shape[1:]))
        start_ns = int(series[f"{name}/start_ns"][0])
        values, known = (series[f"{name}/{what}"].astype(np.float64) for what in ("values", "known"))
        ahead = dict(zip(KNOWN, known, strict=True))
        panel = SeriesPanel(start_ns, grid.step_s, values, zone=zone, known=ahead)
        out[f"{name}/grid"] = shape
        for expert in experts:
            if FORECASTERS[expert].fitted:
                fitted = FORECASTERS[expert](grid).fit(panel, seed)
                out |= {f"{name}/{expert}/{key}": array for key, array in fitted.items()}
    return out
