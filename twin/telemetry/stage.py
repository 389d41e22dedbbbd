"""Stage of the Inbox: the pending readings of one table, and the rule that merges several within a tick.

One rule holds everywhere: a sane value beats an absurd or untrusted one, which beats "no reading"; among sane
values the signal's own reduction decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from twin.catalogue import F32, I32, I64, TABLES, Signal
from twin.telemetry.frame import MAX_ROW_SETS, Partition

if TYPE_CHECKING:
    from twin.telemetry.state import TableState

LAST, MEAN, MAX, MIN, SUM, LATCH = range(6)
_REDUCE_CODE = {"last": LAST, "mean": MEAN, "max": MAX, "min": MIN, "sum": SUM, "latch": LATCH}
MAX_HITS = 65535


class Drop(NamedTuple):
    """A column that feeds a row of which a fall is urgent: below `share_pu` of the sane value before."""

    column: int
    row: int
    share_pu: float
    low: float
    high: float


class ReportLayout:
    """Map from the columns of one kind of report to rows: companions added, counters after the gauges."""

    def __init__(self, table: str, signals: Sequence[str], counters: Sequence[str]) -> None:
        spec = TABLES[table]
        pairs: dict[int, int] = {}
        for column, name in enumerate(signals):
            pairs[spec.by_name[name].row] = column
        for companion in spec.gauges:
            if companion.base in signals and companion.row not in pairs:
                pairs[companion.row] = list(signals).index(cast(str, companion.base))
        self.rows = np.array(sorted(pairs), np.int32)
        self.source = np.array([pairs[r] for r in sorted(pairs)], np.int32)
        # a dictionary, so that a counter named twice is one row and not counted twice
        columns = {spec.by_name[name].row: i for i, name in enumerate(counters)}
        order = [columns[row] for row in sorted(columns)]
        self.counter_rows = np.array(sorted(columns), np.int32)
        self.counter_source = np.array(order, np.int32)
        self.all_rows = np.concatenate([self.rows, self.counter_rows + len(spec.gauges)]).astype(np.int32)
        self.in_order = order == list(range(len(counters)))
        self.urgent = [
            (k, row, at, spec.gauges[row].high)
            for k, row in enumerate(self.rows.tolist())
            if (at := spec.gauges[row].urgent_at) is not None
        ]
        fed = [(k, row, spec.gauges[row]) for k, row in enumerate(self.rows.tolist())]
        self.drops = [Drop(k, row, g.urgent_drop_pu, g.low, g.high) for k, row, g in fed if g.urgent_drop_pu]


@dataclass(frozen=True, slots=True)
class Cell:
    """One row that a single reading feeds, with what its path needs of the catalogue at hand."""

    row: int
    code: int
    low: float
    high: float
    urgent_at: float | None
    urgent_drop_pu: float
    keeps: bool  # a state keeps its pulses however old they are


class Single:
    """The rows that a reading of one signal feeds, by group; `counter` is the counter's row or -1."""

    def __init__(self, signal: Signal, gauges: Sequence[Signal]) -> None:
        self.counter = signal.row if signal.kind == "counter" else -1
        mine = [] if self.counter >= 0 else [g for g in gauges if signal.name in (g.name, g.base)]
        self.cells = [
            Cell(
                g.row,
                _REDUCE_CODE[g.reduce],
                float(np.float32(g.low)),
                float(np.float32(g.high)),
                g.urgent_at,
                g.urgent_drop_pu,
                g.kind == "state",
            )
            for g in mine
        ]
        rows = [c.row for c in self.cells] or [len(gauges) + self.counter]
        self.rows = np.array(rows, np.int32)
        self.wrap, self.max_per_s = signal.wrap, signal.high
        self.parts: list[tuple[int, list[Cell]]] = []
        self.n_groups = -1  # of the partition, when `parts` was made; it only ever grows


class Stage:
    """The pending readings of one table. Shapes: value [n_gauge, n], raw, gain and held_ns [n_counter, n]."""

    def __init__(self, table: str, n: int) -> None:
        spec = TABLES[table]
        self.table, self.n = table, n
        self.signals, self.counters = spec.gauges, spec.counters
        self.value = np.full((len(spec.gauges), n), np.nan, np.float32)
        self.mean_count = np.zeros((len(spec.gauges), n), np.uint16)  # sane readings; valid where hits > 1
        self.raw = np.full((len(spec.counters), n), -1, np.int64)
        self.gain = np.zeros((len(spec.counters), n), np.int64)
        # Where the last report of a counter was "no reading": the time of the last real one, else 0.
        self.held_ns = np.zeros((len(spec.counters), n), np.int64)
        self.n_held = 0
        self.partition = Partition(len(spec.gauges) + len(spec.counters))
        self.t_ns = np.zeros((1, n), np.int64)  # [n_groups, n] last accepted device time
        self.hits = np.zeros((1, n), np.uint16)  # [n_groups, n] arrivals since the last tick
        self.first_ns = np.zeros((1, n), np.int64)  # [n_groups, n] of what is pending; valid where hits > 1
        self.dirty: set[int] = set()
        self.layouts: dict[tuple[tuple[str, ...], tuple[str, ...]], ReportLayout] = {}
        self.singles: dict[str, Single] = {}
        self.group_rows: dict[int, tuple[I32, I32]] = {}
        self.low = np.array([[s.low] for s in spec.gauges], np.float32)
        self.high = np.array([[s.high] for s in spec.gauges], np.float32)
        self.per_quantum = np.array([1.0 / s.quantum for s in spec.gauges], np.float32)
        self.max_per_s = np.array([[s.high] for s in spec.counters], np.float64)
        self.wrap = np.array([[s.wrap] for s in spec.counters], np.float64)
        self.reduce = np.array([_REDUCE_CODE[s.reduce] for s in spec.gauges], np.int32)
        self.keeps = np.array([s.kind == "state" for s in spec.gauges], np.bool_)

    def layout(self, signals: tuple[str, ...], counters: tuple[str, ...]) -> ReportLayout:
        """Return the cached layout of these columns. Raises KeyError for a name outside the catalogue."""
        key = (signals, counters)
        found = self.layouts.get(key)
        if found is None:
            if len(self.layouts) >= MAX_ROW_SETS:
                self.layouts.clear()
            found = self.layouts[key] = ReportLayout(self.table, signals, counters)
        return found

    def single(self, name: str) -> Single:
        """Return the rows of one signal, by group. Raises KeyError for a name outside the catalogue."""
        found = self.singles.get(name)
        if found is None:
            found = self.singles[name] = Single(TABLES[self.table].by_name[name], self.signals)
        if found.n_groups != self.partition.n_groups:
            groups = self.groups_of(found.rows)
            of_row = self.partition.group_of_row
            found.parts = [(g, [c for c in found.cells if of_row[c.row] == g]) for g in groups]
            found.n_groups = self.partition.n_groups
        return found

    def groups_of(self, rows: I32) -> tuple[int, ...]:
        """Return the groups of these rows; splits times and hits of a partly covered group."""
        groups, splits = self.partition.resolve(rows)
        for parent, child in splits:
            self.t_ns = np.vstack([self.t_ns, self.t_ns[parent : parent + 1]])
            self.hits = np.vstack([self.hits, self.hits[parent : parent + 1]])
            self.first_ns = np.vstack([self.first_ns, self.first_ns[parent : parent + 1]])
            if parent in self.dirty:
                self.dirty.add(child)
            self.group_rows.clear()
        return groups

    def rows_of(self, group: int) -> tuple[I32, I32]:
        """Return (gauge rows, counter rows) of a group."""
        rows = self.group_rows.get(group)
        if rows is None:
            every = self.partition.rows_of(group)
            n_gauge = len(self.signals)
            rows = self.group_rows[group] = (every[every < n_gauge], every[every >= n_gauge] - n_gauge)
        return rows

    def merge(self, rows: I32, entity: I64, new: F32, first: bool | np.ndarray) -> None:
        """Merge `new` [k, m] into the pending values; `first` [m] for a single reading."""
        cells = (rows[:, None], entity)
        old = self.value[cells]
        low, high = self.low[rows], self.high[rows]
        old_sane, new_sane = (old >= low) & (old <= high), (new >= low) & (new <= high)
        both = old_sane & new_sane
        count = np.where(first, 1, self.mean_count[cells].astype(np.int32)) * old_sane + new_sane
        count = np.minimum(count, MAX_HITS)
        self.mean_count[cells] = count
        a, b = np.where(both, old, np.float32(0)), np.where(both, new, np.float32(0))
        out = b.copy()
        for code in np.unique(self.reduce[rows]).tolist():
            pick = self.reduce[rows] == code
            out[pick] = _reduced(code, a[pick], b[pick], np.maximum(count[pick], 1))
        stays = ~new_sane & (old_sane | np.isnan(new))
        self.value[cells] = np.where(both, out, np.where(stays, old, new))

    def begin_anew(self, row: Any, entity: Any, new: Any) -> None:
        """Replace a pending value of an earlier tick by the first of a later one."""
        self.value[row, entity] = new
        self.mean_count[row, entity] = (self.low[row, 0] <= new) & (new <= self.high[row, 0])

    def merge_one(self, cell: Cell, entity: int, new: np.float32, first: bool) -> None:
        """`merge` for one cell."""
        row, code, low, high = cell.row, cell.code, cell.low, cell.high
        old = self.value[row, entity]
        old_sane, new_sane = low <= float(old) <= high, low <= float(new) <= high
        count = ((1 if first else int(self.mean_count[row, entity])) if old_sane else 0) + new_sane
        self.mean_count[row, entity] = min(count, MAX_HITS)
        if not new_sane and (old_sane or new != new):
            return
        if old_sane and new_sane:
            if code == MEAN:
                new = old + (new - old) / np.float32(min(count, MAX_HITS))
            elif code == MAX:
                new = max(old, new)
            elif code == MIN:
                new = min(old, new)
            elif code == SUM:
                new = old + new
            elif code == LATCH:
                new = np.float32(round(float(old)) | round(float(new)))
        self.value[row, entity] = new

    def resume(self, table: TableState) -> None:
        """Restore the times and counters of a table; nothing is pending."""
        self.partition, self.t_ns = table.partition.copy(), table.t_ns.copy()
        self.hits, self.first_ns = np.zeros(self.t_ns.shape, np.uint16), np.zeros(self.t_ns.shape, np.int64)
        self.raw, self.gain[:], self.held_ns[:], self.n_held = table.raw.copy(), 0, 0, 0
        self.dirty.clear()
        self.group_rows.clear()
        self.singles.clear()

    def forget(self, entity: int) -> None:
        """Drop all that is known and pending of one entity."""
        self.n_held -= int(np.count_nonzero(self.held_ns[:, entity]))
        self.held_ns[:, entity] = 0
        self.raw[:, entity] = -1
        self.gain[:, entity] = 0
        self.t_ns[:, entity] = 0
        self.hits[:, entity] = 0


def _reduced(code: int, old: F32, new: F32, count: np.ndarray) -> F32:
    """Return two sane readings as one; `count` is the number of readings behind both."""
    if code == MEAN:
        return cast(F32, old + (new - old) / count.astype(np.float32))
    if code == MAX:
        return np.maximum(old, new)
    if code == MIN:
        return np.minimum(old, new)
    if code == SUM:
        return old + new
    if code == LATCH:
        return (np.rint(old).astype(np.int64) | np.rint(new).astype(np.int64)).astype(np.float32)
    return new
