"""Outlook series: future values of one quantity of the site, in equal steps."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import msgspec

from twin.catalogue import NS, BadMessage
from twin.telemetry import Reading

MAX_VALUES = 2000  # of one outlook; `twin.engine.outlook` has the same
LEAST_STEP_S = 60
_ZONE = re.compile(r"(Z|[+-]\d\d:?\d\d)$")


@dataclass(frozen=True, slots=True)
class OutlookSeries:
    """Values from `start_ns` on, each for `step_ns`; None = unknown."""

    quantity: str
    start_ns: int
    step_ns: int
    values: tuple[float | None, ...]

    def to_come(self, now_ns: int) -> OutlookSeries | None:
        """Return the values from the present one on, without unknown ones at the end; None if none is
        left."""
        first = max(0, (now_ns - self.start_ns) // self.step_ns)
        values = self.values[first : first + MAX_VALUES]
        known = [i for i, value in enumerate(values) if value is not None]
        if not known:
            return None
        start_ns = self.start_ns + first * self.step_ns
        return OutlookSeries(self.quantity, start_ns, self.step_ns, values[: known[-1] + 1])

    def at(self, now_ns: int) -> float | None:
        """Return the value in force; None without one."""
        step = (now_ns - self.start_ns) // self.step_ns
        return self.values[step] if 0 <= step < len(self.values) else None

    @property
    def end_ns(self) -> int:
        """Return the instant at which the last value ends."""
        return self.start_ns + self.step_ns * len(self.values)

    @property
    def unknown(self) -> int:
        """Return the number of unknown values."""
        return sum(value is None for value in self.values)


@dataclass(frozen=True, slots=True)
class OutlookAnswer:
    """Series and present readings of one answer. `made_ns`: their time of issue; 0 = unknown."""

    series: tuple[OutlookSeries, ...]
    readings: tuple[Reading, ...] = ()
    made_ns: int = 0


def series_of(quantity: str, points: Iterable[tuple[int, float | None]], where: str) -> OutlookSeries:
    """Return a series from (ns, value), in any order; missing instants are unknown. Raises BadMessage."""
    found = dict(points)
    times = sorted(found)
    if len(times) < 2:
        raise BadMessage(f"{where}: {len(times)} values of {quantity}; expected two at least")
    step_ns = min(b - a for a, b in pairwise(times))
    if step_ns < LEAST_STEP_S * NS:
        raise BadMessage(f"{where}: steps of {step_ns / NS:g} s; expected {LEAST_STEP_S} s at least")
    if any((t - times[0]) % step_ns for t in times):
        raise BadMessage(f"{where}: uneven times of {quantity}; expected steps of {step_ns / NS:g} s")
    count = (times[-1] - times[0]) // step_ns + 1
    if count > 10 * MAX_VALUES:
        raise BadMessage(f"{where}: {count} steps of {quantity}; expected at most {10 * MAX_VALUES}")
    values = tuple(found.get(times[0] + i * step_ns) for i in range(count))
    return OutlookSeries(quantity, times[0], step_ns, values)


def instant_ns(text: Any, where: str) -> int:
    """Return ISO 8601 with an offset as ns since 1970. Raises BadMessage."""
    try:
        if not isinstance(text, str) or len(text) > 40 or not _ZONE.search(text):
            raise ValueError
        instant = datetime.fromisoformat(text).astimezone(UTC)
        if not 1971 <= instant.year <= 2200:
            raise ValueError
    except (ValueError, OverflowError):
        raise BadMessage(
            f"{where}: time {str(text)[:40]!r}; expected ISO 8601 with an offset: 2026-11-29T06:00:00Z"
        ) from None
    return round(instant.timestamp()) * NS


def number_of(value: Any, where: str) -> float | None:
    """Return a finite number, or None for null. Raises BadMessage."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e12 < value < 1e12:
        raise BadMessage(f"{where}: value {str(value)[:40]!r}; expected a number or null")
    return float(value)


def json_object(text: bytes, where: str) -> dict[str, Any]:
    """Return the object in an answer. Raises BadMessage with its actual type."""
    try:
        tree = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        what = "HTML" if text.lstrip()[:1] == b"<" else "no whole JSON"
        raise BadMessage(f"{where}: an answer of {len(text)} bytes that is {what}; expected JSON") from None
    if not isinstance(tree, dict):
        raise BadMessage(f"{where}: expected a JSON object, got {type(tree).__name__}")
    return tree
