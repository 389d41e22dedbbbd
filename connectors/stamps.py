"""Stamps of publishers: a number of the wrong unit is told from an instant."""

from __future__ import annotations

_FROM_S, _TO_S = 946_684_800, 4_102_444_800  # the years 2000 to 2100
_UNITS = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6}


def other_unit(stamp_ns: int) -> str:
    """Return ` looks like seconds` or its like if an instant is of this century in another unit, else ""."""
    for unit, per_s in _UNITS.items():
        if _FROM_S * per_s <= stamp_ns < _TO_S * per_s:
            return f" looks like {unit}"
    return ""
