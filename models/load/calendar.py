"""The local calendar of instants: hours of the day, days of the week, the phase of the year.

People's habits follow their own clocks, so a forecast looks at local time, with its changes of summer and
winter. Zones come from the system's time zone database.
"""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import numpy as np

from twin.catalogue import F64, I64, NS, ContractError

_MINUTE_NS, _HOUR_NS, _DAY_NS = 60 * NS, 3600 * NS, 86_400 * NS
_THURSDAY = 3  # weekday of 1 January 1970, where 0 is Monday


def local_ns(t_ns: I64, zone: str) -> I64:
    """Local time in nanoseconds since 1970 began on the local clock. int64 [n] -> int64 [n]

    Raises ContractError for a zone that is not in the IANA time zone database.
    """
    known = _zone(zone)
    if zone == "UTC" or not len(t_ns):
        return t_ns.astype(np.int64)
    day, day_of = np.unique(t_ns // _DAY_NS, return_inverse=True)
    # source: the tz database: no zone since 1970 has changed its clocks and changed them back within a day
    before = {d: _offset_s(known, d * 86_400) for d in sorted({*day.tolist(), *(day + 1).tolist()})}
    first = np.array([before[d] for d in day.tolist()], np.int64)
    then = np.array([before[d + 1] for d in day.tolist()], np.int64)
    change_ns = (day + 1) * _DAY_NS
    for at in np.flatnonzero(first != then):
        change_ns[at] = NS * _change_s(known, int(day[at]) * 86_400, int(first[at]))
    offset_s = np.where(t_ns < change_ns[day_of], first[day_of], then[day_of])
    local: I64 = t_ns + NS * offset_s
    return local


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ValueError, OSError) as error:  # ZoneInfoNotFoundError is a KeyError, which has a case of its own
        raise ContractError(
            f"zone: expected an IANA time zone such as Europe/Berlin, got {name!r}"
        ) from error
    except KeyError as error:
        raise ContractError(
            f"zone: {name!r} is not in this system's time zone database (expected one such as Europe/Berlin)"
        ) from error


def _offset_s(zone: ZoneInfo, t_s: int) -> int:
    """Seconds that the local clock is ahead of UTC."""
    offset = datetime.fromtimestamp(t_s, UTC).astimezone(zone).utcoffset()
    return 0 if offset is None else round(offset.total_seconds())


def _change_s(zone: ZoneInfo, day_s: int, before_s: int) -> int:
    """The first second of this day with another offset than the day began with; there is one."""
    low, high = day_s, day_s + 86_400
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _offset_s(zone, middle) == before_s else (low, middle)
    return high


def hours_of_day(t_ns: I64, zone: str) -> F64:
    """Local hours since midnight with their fraction, 0 up to 24. [n] Raises ContractError as `local_ns`."""
    hours: F64 = (local_ns(t_ns, zone) % _DAY_NS) / _HOUR_NS
    return hours


def minutes_of_hour(t_ns: I64, zone: str) -> F64:
    """Local minutes since the hour with their fraction, 0 up to 60. [n]

    Raises ContractError as `local_ns`.
    """
    minutes: F64 = (local_ns(t_ns, zone) % _HOUR_NS) / _MINUTE_NS
    return minutes


def days_of_week(t_ns: I64, zone: str) -> I64:
    """0 for a local Monday to 6 for a Sunday. int64 [n] Raises ContractError as `local_ns`."""
    days: I64 = (local_ns(t_ns, zone) // _DAY_NS + _THURSDAY) % 7
    return days


def hours_of_week(t_ns: I64, zone: str) -> F64:
    """Local hours since Monday's midnight with their fraction, 0 up to 168. [n]

    Raises ContractError as `local_ns`.
    """
    local = local_ns(t_ns, zone)
    hours: F64 = ((local + _THURSDAY * _DAY_NS) % (7 * _DAY_NS)) / _HOUR_NS
    return hours
