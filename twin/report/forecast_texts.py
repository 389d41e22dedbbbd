"""Forecasts in words: sensible units, spans, and what a forecast rests on as people would say it.

Shared by the command `racktwin forecasts` and the summary, so that both say the same. Imports nothing heavy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from twin.catalogue import duration

# What an expert of `models.load.forecasters` goes by; `ewma5` and its like are averages, with their half-
# life.
EXPERTS = {
    "last": "the last value",
    "seasonal_day": "the same time yesterday",
    "seasonal_week": "the same time a week ago",
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
    """Choose the format of a quantity of this unit whose largest magnitude is `most`; NaN counts as small."""
    if unit == "W":
        if most >= 2e6:
            return Shown("MW", 1e-6, 2)
        return Shown("kW", 1e-3, 1) if most >= 2000 else Shown("W")
    if unit == "USD/kWh":  # as prices are traded
        return Shown("USD/MWh", 1e3, 1)
    if unit in ("count", "state"):
        return Shown("")
    plain = {"degC": "°C", "1": ""}.get(unit, unit)
    return Shown(plain, 1.0, 0 if most >= 1000 else 1 if most >= 10 else 3)


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
