"""Year weather: sampled days of a recorded year of hours, strung together as the weather of a plant.

EnergyPlus weather files (EPW): eight lines of header, then a row for each hour; dry bulb in column 7 and
relative humidity in column 9. Source of the format: EnergyPlus, Auxiliary Programs, "EnergyPlus weather file
(EPW) data dictionary".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twin.catalogue import F64, ConfigError
from twin.plant.weather import DAY_S

HEADER, HOURS = 8, 8760
DRY_BULB, HUMIDITY = 6, 8
JOINT_H = 6.0  # at the end of a day, in which the air moves over to the next one


@dataclass(frozen=True)
class YearWeather:
    """Outdoor air of some days of a year [365, 24], one after the other; between hours it is interpolated.

    In the last hours of a day the air moves over to the next day that is sampled, as no air jumps.
    """

    dry_c: F64
    rh_pu: F64
    days: tuple[int, ...]

    def at(self, time_s: float) -> tuple[float, float]:
        """(dry bulb in degC, relative humidity) so long after the plant began."""
        day, second = divmod(max(time_s, 0.0), DAY_S)
        hour = second / 3600.0
        today, next_day = (self.days[(int(day) + k) % len(self.days)] for k in (0, 1))
        at, share = today * 24 + int(hour), hour % 1.0
        joined = max(0.0, (hour - 24.0 + JOINT_H) / JOINT_H)
        dry, humid = (
            float((1.0 - share) * column.flat[at] + share * column.flat[(at + 1) % HOURS])
            + joined * float(column.flat[next_day * 24] - column.flat[(today + 1) * 24 % HOURS])
            for column in (self.dry_c, self.rh_pu)
        )
        return dry, min(max(humid, 0.05), 1.0)


def days_of(count: int) -> tuple[int, ...]:
    """So many days of the year, evenly spread, counted from 0."""
    return tuple(int((k + 0.5) * 365.0 / count) for k in range(count))


def read_year(path: Path, days: tuple[int, ...]) -> YearWeather:
    """These days of the year of a weather file. Raises ConfigError for one that is none."""
    rows = [line.split(",") for line in path.read_text(encoding="latin-1").splitlines()[HEADER:]]
    if len(rows) != HOURS or any(len(row) <= HUMIDITY for row in rows):
        raise ConfigError([f"{path}: expected {HOURS} hours of EPW below {HEADER} lines of header"])
    dry = np.array([float(row[DRY_BULB]) for row in rows])
    humid = np.array([float(row[HUMIDITY]) for row in rows]) / 100.0
    return YearWeather(dry.reshape(365, 24), humid.reshape(365, 24), days)
