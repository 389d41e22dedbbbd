"""Recorded prices and carbon of a grid, what was known of them ahead, and thresholds set by a past month.

Prices of the day ahead are known; carbon is not: what is told for an hour is that of the hour a day before,
moved by how far the last hour that is published differed from its own day before. Nothing that an hour is
judged by comes from later than that hour. Reads files.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, NS, ConfigError
from twin.tables import read_series

ZONES = {"ercot": "US-TEX-ERCO", "germany": "DE-LU"}
FOLDER = "grid-hourly"
PRICES, CARBON = "electricity_prices/standardized", "carbon_intensity"
PRICE_COLUMN, CARBON_COLUMN = "Price (USD/MWh)", "Carbon Intensity gCO₂eq/kWh (direct)"
HOUR_NS = 3600 * NS
DAY_H, MONTH_H = 24, 28 * 24
# Hours until the carbon of an hour is published. source: estimate; grid operators report within one or two
LATE_H = 2


class Grid(NamedTuple):
    """Hour by hour from `start_ns` on: `price` USD/kWh, `carbon` g/kWh [hour]; `foreseen` is the carbon that
    is told at the beginning of each hour, NaN where nobody could know."""

    zone: str
    start_ns: int
    price: F64
    carbon: F64
    foreseen: F64

    @property
    def hours(self) -> int:
        return len(self.price)


def grid_of(root: Path, zone: str) -> Grid:
    """The recordings of a zone of `ZONES` below a folder of recordings. Raises ConfigError."""
    if zone not in ZONES:
        raise ConfigError(f"zone {zone[:100]}: expected one of {', '.join(ZONES)}")
    columns = []
    for folder, column in ((PRICES, PRICE_COLUMN), (CARBON, CARBON_COLUMN)):
        at = root / FOLDER / folder / ZONES[zone]
        files = sorted(at.glob("**/*.csv"))[:1]
        if not files:
            raise ConfigError(f"{at}: no recording here; racktwin trace fetch {FOLDER}")
        panel = read_series(files, "Datetime (UTC)", [column]).panel
        if panel.step_s != 3600.0 or panel.start_ns % HOUR_NS:
            raise ConfigError(f"{files[0]}: steps of {panel.step_s:g} s: expected full hours")
        columns.append(panel)
    price, carbon = columns
    start_ns = max(price.start_ns, carbon.start_ns)
    a, b = (int((start_ns - p.start_ns) // HOUR_NS) for p in columns)
    n = min(price.n_time - a, carbon.n_time - b)
    if n < MONTH_H:
        raise ConfigError(f"{root / FOLDER}: {max(n, 0)} hours in common: expected more than {MONTH_H}")
    actual = carbon.values[b : b + n, 0]
    return Grid(zone, start_ns, price.values[a : a + n, 0] / 1e3, actual, foreseen(actual))


def foreseen(carbon: F64) -> F64:
    """Forecast the carbon of each hour at its begin [hour]; NaN if no forecast is possible."""
    out = np.full(len(carbon), np.nan)
    first = DAY_H + LATE_H
    hour = np.arange(first, len(carbon))
    out[first:] = carbon[hour - DAY_H] + carbon[hour - LATE_H] - carbon[hour - LATE_H - DAY_H]
    return np.asarray(np.maximum(out, 0.0))


def thresholds(grid: Grid, hour: int, above_pu: float) -> tuple[float, float]:
    """(USD/kWh, g/kWh) that this share of the hours of the four weeks before `hour` was above.

    Raises ConfigError where there are no four weeks before it.
    """
    if hour - LATE_H < MONTH_H:
        raise ConfigError(f"hour {hour}: expected four weeks of {grid.zone} before it")
    until = hour - LATE_H
    past = slice(until - MONTH_H, until)
    dear, dirty = (float(np.nanquantile(x[past], 1.0 - above_pu)) for x in (grid.price, grid.carbon))
    return dear, dirty
