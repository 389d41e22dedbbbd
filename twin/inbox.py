"""The Inbox: arriving readings coalesce here until the tick cuts a frame.

Rejects what is older than what it has, clamps times from the future, reduces several readings within a tick
by each signal's own rule, rounds to the quantum, and counts all of it. Bounded by the size of the site plus a
limit on events. Pure: time comes in as an argument. May import the catalogue, frames and readings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from twin.events import Event
from twin.frame import (
    ABSURD_Q, F32, I32, I64, MISSING_Q, NS, UNTRUSTED_Q, Counts, Frame, Partition, Update,
)  # fmt: skip
from twin.reading import Block, Reading
from twin.signals import TABLES, Signal

MAX_EVENTS = 100_000
FUTURE_TOLERANCE_NS = 2 * NS
# Stands for "the source itself does not trust this value"; far outside every physical range.
_UNTRUSTED = np.float32(3.0e38)
_NAN = np.float32(np.nan)
_REDUCE_CODE = {"last": 0, "mean": 1, "max": 2, "min": 3, "sum": 4, "latch": 5}


class Layout:
    """How the columns of one kind of report map to rows: companions added, counters after the gauges."""

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
        order = sorted(range(len(counters)), key=lambda i: spec.by_name[counters[i]].row)
        self.counter_rows = np.array([spec.by_name[counters[i]].row for i in order], np.int32)
        self.counter_source = np.array(order, np.int32)
        self.all_rows = np.concatenate([self.rows, self.counter_rows + len(spec.gauges)]).astype(np.int32)
        self.in_order = bool((self.counter_source == np.arange(len(order))).all())
        self.urgent = [(k, at, spec.gauges[row].high) for k, row in enumerate(self.rows.tolist())
                       if (at := spec.gauges[row].urgent_at) is not None]  # fmt: skip


class Stage:
    """The pending readings of one table. Shapes: value [n_gauge, n], raw and gain [n_counter, n]."""

    def __init__(self, table: str, n: int) -> None:
        spec = TABLES[table]
        self.table, self.n = table, n
        self.signals, self.counters = spec.gauges, spec.counters
        self.value = np.full((len(spec.gauges), n), _NAN, np.float32)
        self.mean_count = np.zeros((len(spec.gauges), n), np.uint16)  # valid where hits > 1, rows of "mean"
        self.raw = np.full((len(spec.counters), n), -1, np.int64)
        self.gain = np.zeros((len(spec.counters), n), np.int64)
        self.partition = Partition(len(spec.gauges) + len(spec.counters))
        self.t_ns = np.zeros((1, n), np.int64)  # [n_groups, n] last accepted device time
        self.hits = np.zeros((1, n), np.uint16)  # [n_groups, n] arrivals since the last tick
        self.dirty: set[int] = set()
        self.layouts: dict[tuple[tuple[str, ...], tuple[str, ...]], Layout] = {}
        self.group_rows: dict[int, tuple[I32, I32]] = {}
        self.low = np.array([[s.low] for s in spec.gauges], np.float32)
        self.high = np.array([[s.high] for s in spec.gauges], np.float32)
        self.max_per_s = np.array([[s.high] for s in spec.counters], np.float64)
        self.wrap = np.array([[s.wrap] for s in spec.counters], np.float64)
        self.reduce = np.array([_REDUCE_CODE[s.reduce] for s in spec.gauges], np.int32)

    def layout(self, signals: tuple[str, ...], counters: tuple[str, ...]) -> Layout:
        """The cached layout of these columns. Raises KeyError for a name that the catalogue lacks."""
        key = (signals, counters)
        found = self.layouts.get(key)
        if found is None:
            found = self.layouts[key] = Layout(self.table, signals, counters)
        return found

    def groups_of(self, rows: I32) -> tuple[int, ...]:
        """Groups that make up these rows, splitting times and hits where a group was covered in part."""
        groups, splits = self.partition.resolve(rows)
        for parent, child in splits:
            self.t_ns = np.vstack([self.t_ns, self.t_ns[parent : parent + 1]])
            self.hits = np.vstack([self.hits, self.hits[parent : parent + 1]])
            if parent in self.dirty:
                self.dirty.add(child)
            self.group_rows.clear()
        return groups

    def rows_of(self, group: int) -> tuple[I32, I32]:
        """(gauge rows, counter rows) of a group."""
        rows = self.group_rows.get(group)
        if rows is None:
            every = self.partition.rows_of(group)
            n_gauge = len(self.signals)
            rows = self.group_rows[group] = (every[every < n_gauge], every[every >= n_gauge] - n_gauge)
        return rows


class Inbox:
    """Takes readings for a site of given table sizes and cuts frames."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.stages = {t: Stage(t, n) for t, n in sizes.items() if n > 0}
        self.events: list[Event] = []
        self.urgent = False
        self.counts: dict[str, int] = dict.fromkeys(
            ("accepted", "coalesced", "older", "clamped", "untrusted", "missing", "out_of_range", "unknown_entity",
             "counter_resets", "counter_wraps", "counter_jumps", "events", "events_dropped"), 0)  # fmt: skip

    # -- arriving ---------------------------------------------------------------------------------------------

    def put_event(self, event: Event) -> bool:
        """Queue an event for the next frame; False (and counted) when the queue is full."""
        if len(self.events) >= MAX_EVENTS:
            self.counts["events_dropped"] += 1
            return False
        self.events.append(event)
        self.counts["events"] += 1
        return True

    def put_block(self, block: Block, now_ns: int) -> None:
        """Stage a batch. Raises KeyError for an unknown table or signal: a decoder's bug, not bad data."""
        stage = self.stages.get(block.table)
        n = block.values.shape[1] if len(block.signals) else block.counts.shape[1]
        if stage is None or block.start < 0 or block.start + n > stage.n:
            self.counts["unknown_entity"] += n
            return
        layout = stage.layout(block.signals, block.counters)
        t_ns = self._clamp(block.t_ns, now_ns, n)
        groups = stage.groups_of(layout.all_rows)
        at = slice(block.start, block.start + n)
        values = block.values[layout.source]
        counts = block.counts if layout.in_order else block.counts[layout.counter_source]
        fresh = True
        for group in groups:
            fresh = fresh and not stage.hits[group, at].any() and bool((stage.t_ns[group, at] <= t_ns).all())
        self.counts["accepted"] += values.size + counts.size
        if len(counts):
            self._count(stage, layout.counter_rows, at, counts, t_ns, groups[0])
        if fresh:
            stage.value[layout.rows, at] = values
            for group in groups:
                stage.hits[group, at] = 1
                stage.t_ns[group, at] = t_ns
        else:
            self._merge(stage, layout.rows, at, values, t_ns, groups)
        stage.dirty.update(groups)
        self._watch(layout, values)

    def put(self, reading: Reading, now_ns: int) -> None:
        """Stage one value. Raises KeyError for an unknown table or signal: a decoder's bug, not bad data."""
        stage = self.stages.get(reading.table)
        if stage is None or not 0 <= reading.entity < stage.n:
            self.counts["unknown_entity"] += 1
            return
        spec = TABLES[reading.table].by_name[reading.signal]
        value = reading.value
        if spec.kind == "counter":
            ok = reading.trusted and value is not None and 0 <= value < 2**63
            column = np.array([[int(cast(float, value)) if ok else -1]], np.int64)
            block = Block(reading.table, reading.entity, (), np.empty((0, 1), np.float32), (reading.signal,), column,
                          reading.t_ns)  # fmt: skip
        else:
            number = _NAN if value is None else (_clip32(value) if reading.trusted else _UNTRUSTED)
            block = Block(reading.table, reading.entity, (reading.signal,), np.array([[number]], np.float32), (),
                          np.empty((0, 1), np.int64), reading.t_ns)  # fmt: skip
        self.put_block(block, now_ns)

    def _clamp(self, t_ns: int, now_ns: int, n: int) -> int:
        if t_ns > now_ns + FUTURE_TOLERANCE_NS:
            self.counts["clamped"] += n
            return now_ns
        return min(t_ns, now_ns)

    def _merge(
        self, stage: Stage, rows: I32, at: slice, values: F32, t_ns: int, groups: tuple[int, ...]
    ) -> None:
        """A second arrival within the tick, or one that is older for some entities."""
        width = values.shape[1]
        newer = np.ones(width, np.bool_)
        for group in groups:
            newer &= stage.t_ns[group, at] <= t_ns
        self.counts["older"] += int(width - newer.sum()) * len(rows)
        if not newer.any():
            return
        entity = np.arange(at.start, at.stop)[newer]
        values = values[:, newer]
        seen = stage.hits[groups[0]][entity] > 0
        self.counts["coalesced"] += int(seen.sum()) * len(rows)
        old = stage.value[rows[:, None], entity]
        for sheet in (old, values):
            low, high = stage.low[rows], stage.high[rows]
            absurd = ~((sheet >= low) & (sheet <= high)) & ~np.isnan(sheet)
            # An absurd reading must not hide a sane one of the same tick; alone, it stays, to be named later.
            other = values if sheet is old else old
            sheet[absurd & seen & ~np.isnan(other)] = _NAN
        stage.value[rows[:, None], entity] = np.where(seen, self._reduced(stage, rows, entity, old, values), values)
        for group in groups:
            stage.hits[group, entity] = np.minimum(stage.hits[group, entity], 65534) + 1
            stage.t_ns[group, entity] = t_ns

    @staticmethod
    def _reduced(stage: Stage, rows: I32, entity: I64, old: F32, new: F32) -> F32:
        code = stage.reduce[rows][:, None]
        first_merge = stage.hits[stage.partition.group_of_row[rows[0]], entity] == 1
        count = stage.mean_count[rows[:, None], entity]
        count = np.where(first_merge, ~np.isnan(old), count) + ~np.isnan(new)
        stage.mean_count[rows[:, None], entity] = np.minimum(count, 65535)
        step = (new - old) / np.maximum(count, 1)
        mean = np.where(np.isnan(old), new, np.where(np.isnan(new), old, old + step))
        total = np.where(np.isnan(old), new, np.where(np.isnan(new), old, old + new))
        bits = np.nan_to_num(old).astype(np.int64) | np.nan_to_num(new).astype(np.int64)
        latch = np.where(np.isnan(old), new, np.where(np.isnan(new), old, bits))
        return cast(F32, np.select(
            [code == 1, code == 2, code == 3, code == 4, code == 5],
            [mean, np.fmax(old, new), np.fmin(old, new), total, latch], new).astype(np.float32))  # fmt: skip

    def _count(self, stage: Stage, rows: I32, at: slice, new: I64, t_ns: int, group: int) -> None:
        """Growth of counters since their last reading; resets and wraps are told apart by plausibility."""
        old = stage.raw[rows, at]
        before = stage.t_ns[group, at]
        age_s = np.maximum((t_ns - before) / NS, 0.0) + 1.0  # one second of slack for jittered clocks
        usable = (new >= 0) & (before <= t_ns)
        known = usable & (old >= 0)
        limit = np.minimum(stage.max_per_s[rows] * age_s, 9e18)
        step = (new - old).astype(np.float64)
        if bool((known & (step >= 0) & (step <= limit)).all()):
            stage.gain[rows, at] += new - old
            stage.raw[rows, at] = new
            return
        grown = known & (step >= 0) & (step <= limit)
        wrap = stage.wrap[rows]
        wrapped = known & (step < 0) & (wrap > 0) & (step + wrap <= limit)
        reset = known & (step < 0) & ~wrapped
        jumped = known & (step > limit)
        gain = np.where(grown, new - old, 0)
        gain = np.where(wrapped, new - old + wrap.astype(np.int64), gain)
        gain = np.where(reset & (new <= limit), new, gain)
        stage.gain[rows, at] += gain
        stage.raw[rows, at] = np.where(usable, new, old)
        for name, mask in (("counter_wraps", wrapped), ("counter_resets", reset), ("counter_jumps", jumped)):
            self.counts[name] += int(mask.sum())
        self.counts["missing"] += int((new < 0).sum())

    def _watch(self, layout: Layout, values: F32) -> None:
        """Raise the urgent flag when an urgent signal reads at or above its threshold."""
        for k, at, high in layout.urgent:
            if bool(((values[k] >= at) & (values[k] <= high)).any()):
                self.urgent = True

    # -- the tick ---------------------------------------------------------------------------------------------

    def take(self, tick: int, now_ns: int, dt_s: float) -> Frame:
        """Cut a frame: what arrived since the last one, quantised; then begin anew."""
        updates: list[Update] = []
        counts: list[Counts] = []
        for table in self.stages:
            stage = self.stages[table]
            for group in sorted(stage.dirty):
                self._cut(stage, group, updates, counts)
            stage.dirty.clear()
        events, urgent = tuple(self.events), self.urgent
        self.events, self.urgent = [], False
        return Frame(tick, now_ns, dt_s, tuple(updates), tuple(counts), events, urgent)

    def _cut(self, stage: Stage, group: int, updates: list[Update], counts: list[Counts]) -> None:
        hits = stage.hits[group]
        full = bool(hits.all())
        entity = None if full else np.flatnonzero(hits).astype(np.int32)
        if entity is not None and len(entity) == 0:
            return
        t_ns = stage.t_ns[group].copy() if entity is None else stage.t_ns[group, entity]
        gauges, counters = stage.rows_of(group)
        if len(gauges):
            q = np.empty((len(gauges), len(t_ns)), np.int32)
            scratch = np.empty(len(t_ns), np.float32)
            for k, row in enumerate(gauges.tolist()):
                value = stage.value[row] if entity is None else stage.value[row, entity]
                self._quantise(stage.signals[row], value, scratch, q[k])
            updates.append(Update(stage.table, gauges, entity, q, t_ns))
        if len(counters):
            cells: Any = counters if entity is None else np.ix_(counters, entity)
            raw, gain = stage.raw[cells], stage.gain[cells]
            stage.gain[cells] = 0
            counts.append(Counts(stage.table, counters, entity, raw, gain, t_ns))
        hits.fill(0)

    def _quantise(self, spec: Signal, value: F32, scratch: F32, out: I32) -> None:
        np.multiply(value, np.float32(1.0 / spec.quantum), out=scratch)
        np.rint(scratch, out=scratch)
        low, high = value.min(), value.max()  # NaN propagates through both
        if low >= spec.low and high <= spec.high:
            np.copyto(out, scratch, casting="unsafe")
            return
        missing = np.isnan(value)
        untrusted = value == _UNTRUSTED
        absurd = ~((value >= spec.low) & (value <= spec.high)) & ~missing & ~untrusted
        scratch[missing | untrusted | absurd] = 0
        np.copyto(out, scratch, casting="unsafe")
        out[missing], out[untrusted], out[absurd] = MISSING_Q, UNTRUSTED_Q, ABSURD_Q
        self.counts["missing"] += int(missing.sum())
        self.counts["untrusted"] += int(untrusted.sum())
        self.counts["out_of_range"] += int(absurd.sum())

    def forget(self, table: str, entity: int) -> None:
        """A slot has a new device: its counters start afresh, and its old times no longer reject."""
        stage = self.stages.get(table)
        if stage is not None and 0 <= entity < stage.n:
            stage.raw[:, entity] = -1
            stage.gain[:, entity] = 0
            stage.t_ns[:, entity] = 0


def _clip32(value: float) -> np.float32:
    """`value` as float32, beyond its range as the largest: to be judged OUT_OF_RANGE, not infinite."""
    return np.float32(min(max(value, -1.0e38), 1.0e38))
