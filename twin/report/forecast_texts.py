"""Forecasts in words: sensible units, spans, and the basis of a forecast.

Shared by the command `racktwin forecast list` and the summary, so that both say the same. Imports little.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from twin.catalogue import duration

# Basis of each expert of `models.load.forecasters`; `ewma5` and its like are averages, with their half-
# life.
EXPERTS = {
    "last": "the last value",
    "seasonal_day": "the same time yesterday",
    "seasonal_week": "the same time a week ago",
    "own_period": "its last cycle",
    "climatology": "the usual level",
    "hourly_median": "the usual at this hour",
    "seasonal_ewma": "this time of the past days",
    "weekly_ewma": "this time of the past weeks",
    "state_space": "state space",
    "autoregression": "autoregression",
    "linear": "regression",
    "gradient_boosting": "boosted trees",
    "lstm": "LSTM",
    "schedule": "ends of jobs",
    "outlook": "what was told",
}
_PART = re.compile(r"(?P<name>\w+) (?P<share>\d+) %")
_AVERAGE = re.compile(r"ewma(?P<rows>\d+)")


@dataclass(frozen=True, slots=True)
class Shown:
    """Number format of a quantity: its value times `factor`, with so many digits, and a unit."""

    unit: str
    factor: float = 1.0
    digits: int = 0


def shown(unit: str, most: float) -> Shown:
    """Return the format of a quantity of this unit whose largest magnitude is `most`; NaN counts as small."""
    if unit == "W":
        if most >= 2e6:
            return Shown("MW", 1e-6, 2)
        return Shown("kW", 1e-3, 1) if most >= 2000 else Shown("W")
    if unit == "USD/kWh":  # as prices are traded
        return Shown("USD/MWh", 1e3, 1)
    if unit in ("count", "state"):
        return Shown("", 1.0, 2 if unit == "count" and most < 10 else 0)
    plain = {"degC": "°C", "1": ""}.get(unit, unit)
    return Shown(plain, 1.0, 0 if most >= 1000 else 1 if most >= 10 else 3)


def time_left(seconds: float) -> str:
    """A time to wait in one unit, rounded up: "3 min", "12 h", "30 d"."""
    minutes = max(1, math.ceil(seconds / 60.0))
    if minutes < 120:
        return f"{minutes} min"
    return f"{math.ceil(minutes / 60)} h" if minutes < 2880 else f"{math.ceil(minutes / 1440)} d"


def known_ahead(ahead: list[dict[str, Any]], row_s: Callable[[float], float | None]) -> list[dict[str, Any]]:
    """The horizons that have a band, ascending; the `note` of one narrower than an earlier one says why.

    `row_s` gives the length of the rows behind a horizon, None where nobody knows.
    """
    out: list[dict[str, Any]] = []
    widest: dict[str, Any] | None = None
    for point in sorted((a for a in ahead if a["lo"] is not None), key=lambda a: a["horizon_s"]):
        if widest is None or point["hi"] - point["lo"] >= widest["hi"] - widest["lo"]:
            widest = point
        out.append(point | {"note": "" if point is widest else _narrower(widest, point, row_s)})
    return out


def _narrower(wide: dict[str, Any], point: dict[str, Any], row_s: Callable[[float], float | None]) -> str:
    """The reason why a band is narrower than one of a shorter horizon; "" where none is known."""
    mine, before = row_s(point["horizon_s"]), row_s(wide["horizon_s"])
    than = f"narrower than in {duration(wide['horizon_s'])}"
    if mine is not None and before is not None and mine > before:
        return f"{than}: a mean over {duration(mine)} varies less than one over {duration(before)}"
    return f"{than}: it cannot fall below 0" if point["lo"] == 0 else ""


def why(basis: str, row_s: float | None = None) -> str:
    """Write the basis of a forecast; `row_s` is the length of the rows that averages go over."""
    return ", ".join(_part(part, row_s) for part in basis.split(", ")) if basis else ""


def _part(part: str, row_s: float | None) -> str:
    found = _PART.fullmatch(part)
    if found is None:
        return part
    name, average = found["name"], _AVERAGE.fullmatch(found["name"])
    if average is not None:
        rows = int(average["rows"])
        name = f"average of {rows} rows" if row_s is None else f"{duration(rows * row_s)} average"
    return f"{EXPERTS.get(name, name)} {found['share']} %"
