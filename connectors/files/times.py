"""Times in text tables: ISO 8601, dates with dots or slashes, and seconds since any start, as instants.

A format that is not given is decided by the first rows of a file and holds for all of it. A local time that
occurs twice, in the hour repeated when summer time ends, is the earlier one until the file's times step back
(or if each occurs twice, for the first of the two), the later one from there on. If the rows are in no order
and such times occur twice, nothing shows which is which: the hour is a gap. A time that is skipped is none.
pandas is imported inside functions, because it takes long to load.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np

from twin.catalogue import I64, NS, Bool, ConfigError

NO_TIME = np.iinfo(np.int64).min
_LAST_NS = np.iinfo(np.int64).max // 2  # 2116: beyond it a cell is no time but another number
MAX_TIME = 64  # characters
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY_NS = 86_400 * NS
# (above this number, a time counts in this unit): 1e8 s is 1973, and each unit is a thousand times finer.
_UNITS = ((1e17, 1), (1e14, 1_000), (1e11, 1_000_000), (-1.0, NS))
_COMPACT = {8: "%Y%m%d", 12: "%Y%m%d%H%M", 14: "%Y%m%d%H%M%S"}
_DATES = ("%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%m-%d-%Y", "%d-%m-%Y", "%d %b %Y", "%d-%b-%Y")
_CLOCKS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p")
# A clock, then an offset: the end of a bare date such as 2023-11-16 is none.
_ZONED = r"[T :].*(?:[Zz]|[+-]\d{2}(?::?\d{2})?)$"
EXPECTED = (
    "expected ISO 8601 (2023-11-16 18:15:46), seconds, ms, us or ns since 1970, or seconds from any start"
)


def zone_of(name: str) -> ZoneInfo:
    """Return the time zone of this IANA name. ConfigError for another name."""
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, KeyError):
        raise ConfigError(f"zone: expected UTC or an IANA name such as Europe/Berlin, got {name!r}") from None


def instant_text(t_ns: int, zone: str = "UTC") -> str:
    """Return this instant for people, in their zone: 2023-11-16 18:15:46+01:00."""
    moment = _EPOCH + timedelta(microseconds=int(t_ns) // 1000)
    return moment.astimezone(ZoneInfo(zone)).isoformat(" ")


def span_text(span_s: float) -> str:
    """Return a span of time for people: 27 h, 12 min, 5 s."""
    for unit, name in ((86_400 * 3, "d"), (3600 * 2, "h"), (60 * 2, "min")):
        if span_s >= unit:
            return f"{span_s / {'d': 86_400, 'h': 3600, 'min': 60}[name]:.4g} {name}"
    return f"{span_s:.4g} s"


def instant(text: str, zone: str) -> int:
    """Return ISO 8601 as ns; without an offset it is in `zone`, the earlier if it occurs twice.
    ConfigError."""
    try:
        moment = datetime.fromisoformat(text.strip())
        moment = moment if moment.tzinfo else moment.replace(tzinfo=zone_of(zone))
        return (moment.astimezone(UTC) - _EPOCH) // timedelta(microseconds=1) * 1000
    except (ValueError, OverflowError):
        raise ConfigError(
            f"gap: expected a time such as '2023-11-16 18:15' (ISO 8601), got {text!r}"
        ) from None


@dataclass
class TimeFormat:
    """Format of the times of one file. `pattern`: "" until the first rows, iso, number, or strptime's."""

    where: str  # the file and column, for errors
    pattern: str = ""
    unit_ns: int = NS

    @classmethod
    def named(cls, name: str, where: str) -> TimeFormat:
        """Return the format of a mapping: iso, epoch_s, epoch_ms or a strptime pattern."""
        units = {"epoch_s": NS, "epoch_ms": 1_000_000}
        return cls(where, "number", units[name]) if name in units else cls(where, name)

    def instants(self, cells: Any, first_line: int) -> tuple[I64, Bool]:
        """Return (ns [n], has no zone [n]) of a pandas Series of text [n]; NO_TIME for other text.

        Raises ConfigError if no cell of the first rows is a time, or if days and months cannot be
        distinguished.
        """
        cells = cells.str.strip()
        # Only digits begin a time; a library would take "now" for one, and "23" for a year.
        begin = r"." if "%" in self.pattern else r"\d"
        likely = (cells.str.match(begin) & (cells.str.len() <= MAX_TIME)).fillna(False).to_numpy(bool)
        if not self.pattern:
            self._decide(cells, cells[likely], first_line)
        t_ns, naive = np.full(len(cells), NO_TIME), np.zeros(len(cells), bool)
        if self.pattern == "number":
            t_ns[likely] = _from_numbers(cells[likely], self.unit_ns)
        elif self.pattern == "iso":
            t_ns[likely], naive[likely] = _from_iso(cells[likely])
        else:
            t_ns[likely] = _from_pattern(cells[likely], self.pattern)
            naive[likely] = "%z" not in self.pattern
        t_ns[(t_ns < 0) | (t_ns > _LAST_NS)] = NO_TIME
        return t_ns, naive

    def _decide(self, cells: Any, likely: Any, first_line: int) -> None:
        import pandas as pd

        numbers: Any = pd.to_numeric(likely, errors="coerce").dropna()
        if len(numbers) and len(numbers) * 2 >= len(likely):
            lengths = {len(c) for c in likely[numbers.index]}
            compact = _COMPACT.get(lengths.pop()) if len(lengths) == 1 else None
            if compact and (_from_pattern(likely[numbers.index], compact) != NO_TIME).all():
                self.pattern = compact
                return
            middle = float(np.median(numbers.to_numpy(np.float64)))
            self.pattern, self.unit_ns = "number", next(unit for above, unit in _UNITS if middle > above)
            return
        best, matches, same = "iso", int((_from_iso(likely)[0] != NO_TIME).sum()), False
        if matches * 2 < len(likely):
            best, matches, same = _best_pattern(likely, best, matches)
        if not matches:
            given = cells.dropna()
            line, text = (first_line + int(given.index[0]), given.iloc[0]) if len(given) else (first_line, "")
            raise ConfigError(f"{self.where}, line {line}: {text[:60]!r} is not a time: {EXPECTED}")
        if same:
            raise ConfigError(
                f"{self.where}: {likely.iloc[0]!r}: day or month first? No row shows it: expected ISO 8601 "
                "(2023-11-16 18:15:46); write the times so"
            )
        self.pattern = best


def _best_pattern(cells: Any, best: str, matches: int) -> tuple[str, int, bool]:
    """Return (the pattern that reads the most cells, their number, True if another one reads as many
    differently)."""
    sample, read = cells.iloc[:2000], dict[str, I64]()
    for pattern in (d + c for d in _DATES for c in _CLOCKS):
        if (_from_pattern(sample, pattern) != NO_TIME).any():
            read[pattern] = _from_pattern(cells, pattern)
    counts = {p: int((t != NO_TIME).sum()) for p, t in read.items()}
    most = max(counts.values(), default=0)
    if most <= matches:
        return best, matches, False
    first, *rest = [p for p, n in counts.items() if n == most]
    return first, most, any((read[p] != read[first]).any() for p in rest)


def _ns_of(moments: Any) -> I64:
    """Return a pandas Series of datetimes, of any resolution, as ns; NO_TIME for values out of range."""
    values = moments.dt.tz_convert(None) if moments.dt.tz is not None else moments
    array = values.to_numpy()
    if array.dtype == np.dtype("M8[ns]"):
        exact: I64 = array.astype(np.int64)
        return exact
    micros: I64 = array.astype("M8[us]").astype(np.int64)
    fits = (micros >= 0) & (micros < _LAST_NS // 1000)
    return np.where(fits, micros * 1000, NO_TIME)


def _from_pattern(cells: Any, pattern: str) -> I64:
    import pandas as pd

    return _ns_of(pd.to_datetime(cells, format=pattern, errors="coerce", utc="%z" in pattern))


def _from_iso(cells: Any) -> tuple[I64, Bool]:
    """Return (ns [n], has no zone [n]); cells that the library cannot read are corrected and tried once
    more."""
    t_ns, naive = _iso_once(cells)
    bad = t_ns == NO_TIME
    if bad.any():
        put_right = cells[bad].str.replace(r"(?<=:\d\d),(?=\d)", ".", regex=True)
        put_right = put_right.str.replace(r"\s*(?:UTC|GMT)$", "Z", regex=True)
        t_ns[bad], naive[bad] = _iso_once(put_right)
    return t_ns, naive


def _iso_once(cells: Any) -> tuple[I64, Bool]:
    import pandas as pd

    short = (cells.str.len() < len("20231116")).to_numpy(bool)  # a year, or the number in front of a word
    cells = cells.mask(short)
    try:
        moments = pd.to_datetime(cells, format="ISO8601", errors="coerce")
        return _ns_of(moments), np.full(len(cells), moments.dt.tz is None)
    except ValueError:  # several offsets, such as those of winter and summer
        zoned = cells.str.contains(_ZONED, regex=True).fillna(False).to_numpy(bool)
        return _ns_of(pd.to_datetime(cells, format="ISO8601", errors="coerce", utc=True)), ~zoned


def _from_numbers(cells: Any, unit_ns: int) -> I64:
    """Return whole numbers exactly, others to the microsecond: the precision of a double for seconds since
    1970."""
    import pandas as pd

    numbers = pd.to_numeric(cells, errors="coerce").to_numpy()
    good = np.isfinite(numbers) & (numbers >= 0) & (numbers < float(_LAST_NS) / unit_ns)
    t_ns = np.full(len(numbers), NO_TIME)
    kept = pd.to_numeric(cells[good]).to_numpy()  # integers stay integers without the words between them
    whole = np.floor(kept).astype(np.int64)
    part_ns = np.round((kept - whole) * (unit_ns / 1000)).astype(np.int64) * 1000
    t_ns[good] = whole * unit_ns + part_ns
    return t_ns


@dataclass(frozen=True)
class Localised:
    """`t_ns` [n] (NO_TIME where dropped), spans of which the file says nothing, and what was done.

    `twice` [n]: the local time occurs twice.
    """

    t_ns: I64
    twice: Bool
    gaps: list[tuple[int, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def localise(local_ns: I64, zone: str) -> Localised:
    """Return local times [n], in the order of the file, as instants."""
    import pandas as pd

    if zone == "UTC" or not len(local_ns):
        return Localised(local_ns, np.zeros(len(local_ns), bool))
    clock = pd.DatetimeIndex(local_ns.view("M8[ns]"))
    early, late = (
        clock.tz_localize(zone, ambiguous=np.full(len(clock), summer), nonexistent="NaT").asi8
        for summer in (True, False)
    )
    t_ns, skipped = early.copy(), early == NO_TIME
    twice = (early != late) & ~skipped
    out = Localised(t_ns, twice)
    if skipped.any():
        out.notes.append(
            f"{skipped.sum()} rows at times that do not exist in {zone}, as summer time skips them: dropped "
            f"(first: {local_ns[skipped][0].astype('M8[ns]').astype('M8[s]')}); are the times in {zone}?"
        )
    if twice.any():
        _repeated_hours(local_ns, early, late, twice, out)
    return out


def _repeated_hours(local_ns: I64, early: I64, late: I64, twice: Bool, out: Localised) -> None:
    """Choose the earlier or later instant of each row whose local time occurs twice."""
    steps = np.diff(local_ns)
    upwards = (steps >= 0).sum() >= (steps <= 0).sum()
    order = np.arange(len(local_ns))[:: 1 if upwards else -1]
    ordered = bool((np.diff(local_ns[order][~twice[order]]) >= 0).all())
    rows = order[twice[order]]
    times = np.unique(local_ns[rows])
    fold = np.concatenate(([0], np.cumsum(np.diff(times) > _DAY_NS)))[np.searchsorted(times, local_ns[rows])]
    lost = 0
    for each in range(int(fold.max()) + 1):
        here = rows[fold == each]
        _, inverse, count = np.unique(local_ns[here], return_inverse=True, return_counts=True)
        back = np.flatnonzero(np.diff(local_ns[here]) < 0)
        if not ordered or len(back) > 1:
            if (count > 1).any():
                out.t_ns[here], lost = NO_TIME, lost + len(here)
                out.gaps.append((int(early[here].min()), int(late[here].max()) + 1))
        elif len(back):
            out.t_ns[here[back[0] + 1 :]] = late[here[back[0] + 1 :]]
        elif (count == 2).all():
            second = here[np.unique(inverse[::-1], return_index=True)[1] * -1 + len(here) - 1]
            out.t_ns[second] = late[second]
    out.notes.append(
        f"{len(rows)} rows in the hour repeated when summer time ends: "
        f"{int((out.t_ns[rows] == late[rows]).sum())} read as its second pass, "
        + (
            f"{lost} dropped (the rows are not in order, so the two passes cannot be distinguished)"
            if lost
            else ""
        )
        + ("" if lost else "the others as its first")
    )
