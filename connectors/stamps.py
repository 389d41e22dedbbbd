"""Timestamps of publishers: recognises a timestamp in the wrong unit."""

from __future__ import annotations

_FROM_S, _TO_S = 946_684_800, 4_102_444_800  # the years 2000 to 2100
_UNITS = {"seconds": 1, "milliseconds": 10**3, "microseconds": 10**6}


def other_unit(stamp_ns: int) -> str:
    """Return a text such as ` looks like seconds` if another unit puts it in this century, or else ""."""
    for unit, per_s in _UNITS.items():
        if _FROM_S * per_s <= stamp_ns < _TO_S * per_s:
            return f" looks like {unit}"
    return ""
