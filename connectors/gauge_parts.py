"""Gauge parts: combine several series or sources of one gauge, such as the replicas of a service.

Counters become rates by their growth. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping

from twin.catalogue import NS

FRESH_S = 60.0  # a part of a gauge counts so long
GONE_S = 600.0  # a source that is silent for so long is left out. source: estimate
MAX_SERIES = 500_000

Cell = tuple[str, int, str]  # table, entity, signal


class GaugeParts:
    """Gauges with parts from several sources: their sum, or the greatest.

    A sum is unknown while a source that had a part of it is silent, `fresh_s` after its last report, and
    while one that may have a part of its table never reported; after GONE_S that source is left out.
    """

    def __init__(self, fresh_s: float = FRESH_S) -> None:
        self._fresh_ns, self._gone_ns = round(fresh_s * NS), round(GONE_S * NS)
        self._parts: dict[Cell, dict[int, tuple[float, int]]] = {}
        self._awaited: dict[int, frozenset[str]] = {}  # sources that never reported, with their tables
        self._sources, self._began_ns = 0, 0

    def source(self, tables: Iterable[str]) -> int:
        """Return the number of a new source, with the tables of its parts."""
        self._sources += 1
        self._awaited[self._sources] = frozenset(tables)
        return self._sources

    def join(self, source: int, report: GaugeReport, t_ns: int) -> dict[Cell, float | None]:
        """Return the combined gauges for a source's parts; None: unknown."""
        self._began_ns = self._began_ns or t_ns
        self._awaited.pop(source, None)
        if t_ns - self._began_ns > self._gone_ns:
            self._awaited.clear()
        out: dict[Cell, float | None] = {}
        for cell, value in report.values.items():
            known = self._parts.setdefault(cell, {})
            if value is None:
                known.pop(source, None)
            else:
                known[source] = value, t_ns
            limit_ns = self._fresh_ns if cell in report.greatest else self._gone_ns
            for other in [s for s, (_, at_ns) in known.items() if t_ns - at_ns > limit_ns]:
                del known[other]
            out[cell] = self._value(cell, known, cell in report.greatest, t_ns)
        return out

    def _value(
        self, cell: Cell, known: Mapping[int, tuple[float, int]], greatest: bool, t_ns: int
    ) -> float | None:
        values = [value for value, _ in known.values()]
        if greatest:
            return max(values, default=None)
        late = any(t_ns - at_ns > self._fresh_ns for _, at_ns in known.values())
        if late or not values or any(cell[0] in tables for tables in self._awaited.values()):
            return None
        total = sum(values)
        return total if math.isfinite(total) else None


class GaugeReport:
    """Parts in one report of a source. NaN: not known yet, None: it has none."""

    def __init__(self) -> None:
        self.values: dict[Cell, float | None] = {}
        self.greatest: set[Cell] = set()

    def add(self, cell: Cell, value: float) -> None:
        """Add one more series to a sum."""
        self.values[cell] = (self.values.get(cell) or 0.0) + value

    def most(self, cell: Cell, value: float | None) -> None:
        """Add one more series to a maximum."""
        self.greatest.add(cell)
        before = self.values.get(cell)
        self.values[cell] = value if before is None else before if value is None else max(before, value)


class SeriesGrowth:
    """Growth of the counters of one source from report to report.

    A series that comes later than the first report began at zero, but where each message is a `piece` of what
    is reported; one that fell began anew.
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[float, int]] = {}
        self._now: dict[Hashable, tuple[float, float] | None] = {}
        self._before_ns = self._report_ns = 0

    def begin(self, t_ns: int) -> None:
        """Begin a report."""
        self._now.clear()
        if t_ns != self._report_ns:
            self._before_ns, self._report_ns = self._report_ns, t_ns

    def of(self, key: Hashable, value: float, t_ns: int, piece: bool = False) -> tuple[float, float] | None:
        """(growth, seconds that it took) of a series; None in its first report, no seconds where it comes
        again.
        """
        if key in self._now:
            return self._now[key]
        last, at_ns = self._last.get(key, (0.0, 0 if piece else self._before_ns))
        span_s = (t_ns - at_ns) / NS
        found = None if not at_ns else (0.0, 0.0) if span_s <= 0 else (growth_of(last, value), span_s)
        if span_s > 0 and (key in self._last or len(self._last) < MAX_SERIES):
            self._last[key] = value, t_ns
        self._now[key] = found
        return found


def growth_of(last: float, value: float) -> float:
    """Return the growth of a counter; a counter that fell was restarted."""
    return value - last if value >= last else value
