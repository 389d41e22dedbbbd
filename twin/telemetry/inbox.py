"""Inbox: merges arriving readings until the tick cuts a frame.

Rejects readings older than the pending ones, clamps times from the future, reduces several readings within a
tick by each signal's own rule, rounds to the quantum, and counts all of it. Bounded by the size of the site
plus a limit on events. A late burst (a broker's backlog) is reduced by its own times: only readings within a
tick of each other are merged. Pure: time comes in as an argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from twin import kernels
from twin.catalogue import F32, I32, I64, NS, Signal
from twin.telemetry.events import Event
from twin.telemetry.frame import Counts, Frame, TableUpdate
from twin.telemetry.reading import Block, Reading
from twin.telemetry.stage import MAX_HITS, ReportLayout, Stage

if TYPE_CHECKING:
    from twin.telemetry.state import State

MAX_EVENTS = 100_000
FUTURE_TOLERANCE_NS = 2 * NS
# Stands for "the source itself does not trust this value"; far outside every physical range.
_UNTRUSTED = np.float32(3.0e38)
_NAN = np.float32(np.nan)
_MAX_GAIN = 9e18  # below 2**63, and a float


class _Arrival(NamedTuple):
    """Rows of a block by the layout, for the entities at `at`."""

    at: slice
    values: F32
    counts: I64
    t_ns: int


class Inbox:
    """Takes readings for a site of given table sizes and cuts frames.

    `counts`: accepted, coalesced and older are cells (companions included; accepted + older is what was
    offered to a known entity); clamped and unknown_entity are entities; untrusted, missing and out_of_range
    are cells of frames, and readings of counters.
    """

    def __init__(self, sizes: dict[str, int], tick_s: float = 1.0) -> None:
        self.tick_ns = round(tick_s * NS)
        self.stages = {t: Stage(t, n) for t, n in sizes.items() if n > 0}
        self.events: list[Event] = []
        self.urgent = False
        self.absurd: list[tuple[Signal, int, float, int]] = []
        """(signal, entity, value, number of cells) out of range in the last frame; the first of each."""
        self.counts: dict[str, int] = dict.fromkeys(
            ("accepted", "coalesced", "older", "clamped", "untrusted", "missing", "out_of_range",
             "unknown_entity", "counter_resets", "counter_wraps", "counter_jumps", "events",
             "events_dropped"), 0)  # fmt: skip

    def resume(self, state: State) -> None:
        """Resume from a restored state: its times reject older readings, and its counters continue."""
        for name, stage in self.stages.items():
            stage.resume(state.tables[name])

    def put_event(self, event: Event) -> bool:
        """Queue an event for the next frame; returns False and counts the event if the queue is full."""
        if len(self.events) >= MAX_EVENTS:
            self.counts["events_dropped"] += 1
            return False
        self.events.append(event)
        self.counts["events"] += 1
        return True

    def put_block(self, block: Block, now_ns: int) -> None:
        """Stage a batch. Raises KeyError for an unknown signal: a decoder's bug, not bad data."""
        stage = self.stages.get(block.table)
        n = block.values.shape[1] if len(block.signals) else block.counts.shape[1]
        if stage is None or block.start < 0 or block.start + n > stage.n:
            self.counts["unknown_entity"] += n
            return
        layout = stage.layout(block.signals, block.counters)
        t_ns = self._clamp(block.t_ns, now_ns, n)
        groups = stage.groups_of(layout.all_rows)
        at = slice(block.start, block.start + n)
        values = np.ascontiguousarray(block.values, np.float32)
        counts = np.ascontiguousarray(block.counts, np.int64)
        counts = counts if layout.in_order else counts[layout.counter_source]
        times = np.full(n, t_ns)
        if all(
            kernels.first_arrival(stage.hits[group, at], stage.t_ns[group, at], times) for group in groups
        ):
            self.counts["accepted"] += len(layout.rows) * n + counts.size
            rows = layout.counter_rows
            grow = stage.raw, stage.gain, rows, block.start, counts, stage.max_per_s
            if len(counts) and (stage.n_held or not kernels.count_up(*grow)):
                of_row = stage.partition.group_of_row[rows + np.int32(len(stage.signals))]
                before = stage.t_ns[groups[0], at] if len(groups) == 1 else stage.t_ns[of_row, at]
                self._count(stage, rows, at, counts, t_ns, before)
            if layout.urgent or layout.drops:
                self._watch(stage, layout, values[layout.source], at)
            if len(layout.rows):
                kernels.stage_block(stage.value, layout.rows, layout.source, block.start, values)
            for group in groups:
                stage.hits[group, at] = 1
                stage.t_ns[group, at] = t_ns
        else:
            values = values[layout.source]
            for group in groups:
                self._merge(stage, group, layout, _Arrival(at, values, counts, t_ns))
        stage.dirty.update(groups)

    def put(self, reading: Reading, now_ns: int) -> None:
        """Stage one value, as a block of one would. Raises KeyError for an unknown signal."""
        table, entity, name, value, t_ns, trusted = reading
        stage = self.stages.get(table)
        if stage is None or not 0 <= entity < stage.n:
            self.counts["unknown_entity"] += 1
            return
        if t_ns > now_ns:
            t_ns = self._clamp(t_ns, now_ns, 1)
        single = stage.single(name)
        number = _NAN
        if value is not None and single.counter < 0:
            # beyond float32: the largest, to be judged out of range, not infinite
            number = np.float32(min(max(value, -1.0e38), 1.0e38)) if trusted else _UNTRUSTED
        for group, cells in single.parts:
            before = stage.t_ns.item(group, entity)
            size = len(cells) or 1
            if before > t_ns:
                self.counts["older"] += size
                continue
            hits = stage.hits.item(group, entity)
            self.counts["accepted"] += size
            self.counts["coalesced"] += size if hits else 0
            if single.counter >= 0:
                ok = trusted and value is not None and 0 <= value < 2**63
                raw = int(cast(float, value)) if ok else -1
                self._count_one(stage, single.counter, entity, raw, t_ns, before)
            anew = False
            if hits:
                first_ns = before if hits == 1 else stage.first_ns.item(group, entity)
                anew = t_ns - first_ns >= self.tick_ns
                stage.first_ns[group, entity] = t_ns if anew else first_ns
            for cell in cells:
                if cell.urgent_at is not None and cell.urgent_at <= number <= cell.high:
                    # A value that lasts is urgent once: on the way in.
                    was = cell.urgent_at <= stage.value.item(cell.row, entity) <= cell.high
                    self.urgent = self.urgent or not was
                if cell.urgent_drop_pu:
                    last = stage.value.item(cell.row, entity)
                    if last <= cell.high and cell.low <= number < cell.urgent_drop_pu * last:
                        self.urgent = True
                if hits and (cell.keeps or not anew):
                    stage.merge_one(cell, entity, number, hits == 1)
                elif hits:
                    stage.begin_anew(cell.row, entity, number)
                else:
                    stage.value[cell.row, entity] = number
            stage.hits[group, entity] = min(hits + 1, MAX_HITS)
            stage.t_ns[group, entity] = t_ns
            stage.dirty.add(group)

    def _clamp(self, t_ns: int, now_ns: int, n: int) -> int:
        if t_ns > now_ns + FUTURE_TOLERANCE_NS:
            self.counts["clamped"] += n
            return now_ns
        return min(t_ns, now_ns)

    def _merge(self, stage: Stage, group: int, layout: ReportLayout, arrival: _Arrival) -> None:
        """Merge a second arrival within the tick, or one that is older for some entities; of one group's
        rows.

        Rejected cells of `values` become NaN, so that what was not accepted raises no alarm.
        """
        at, values, counts, t_ns = arrival
        gauges, counters = stage.rows_of(group)
        mine = np.searchsorted(layout.rows, gauges)
        before = stage.t_ns[group, at]
        newer = before <= t_ns
        entity = np.arange(at.start, at.stop)[newer]
        size = len(gauges) + len(counters)
        self.counts["older"] += (len(newer) - len(entity)) * size
        values[np.ix_(mine, ~newer)] = _NAN
        if len(entity) == 0:
            return
        hits = stage.hits[group, entity]
        seen = hits > 0
        self.counts["accepted"] += len(entity) * size
        self.counts["coalesced"] += int(np.count_nonzero(seen)) * size
        if len(counters):
            new = counts[np.searchsorted(layout.counter_rows, counters)][:, newer]
            self._count(stage, counters, entity, new, t_ns, before[newer])
        first_ns = np.where(hits > 1, stage.first_ns[group, entity], before[newer])
        anew = seen & (t_ns - first_ns >= self.tick_ns)
        stage.first_ns[group, entity] = np.where(anew, t_ns, first_ns)
        if layout.urgent or layout.drops:
            self._watch(stage, layout, np.ascontiguousarray(values[:, newer]), entity, gauges)
        if len(gauges):
            fresh = values[np.ix_(mine, newer)]
            stage.value[gauges[:, None], entity[~seen]] = fresh[:, ~seen]
            if anew.any():
                free = ~stage.keeps[gauges]
                seen &= ~anew
                stage.begin_anew(gauges[free, None], entity[anew], fresh[np.ix_(free, anew)])
                if not free.all():
                    stage.merge(gauges[~free], entity[anew], fresh[np.ix_(~free, anew)], hits[anew] == 1)
            if seen.any():
                stage.merge(gauges, entity[seen], fresh[:, seen], hits[seen] == 1)
        stage.hits[group, entity] = np.minimum(hits, MAX_HITS - 1) + 1
        stage.t_ns[group, entity] = t_ns

    def _count(self, stage: Stage, rows: I32, at: slice | I64, new: I64, t_ns: int, before: I64) -> None:
        """Count the growth since the last reading; plausibility distinguishes resets from wraps."""
        cells: Any = (rows, at) if isinstance(at, slice) else np.ix_(rows, at)
        old = stage.raw[cells]
        gap_ns = stage.held_ns[cells] if stage.n_held else None
        since = before if gap_ns is None else np.where(gap_ns > 0, gap_ns, before)
        age_s = np.maximum((t_ns - since) / NS, 0.0) + 1.0  # one second of slack for jittered clocks
        usable = new >= 0
        known = usable & (old >= 0)
        limit = np.minimum(stage.max_per_s[rows] * age_s, _MAX_GAIN)
        step = (new - old).astype(np.float64)
        grown = known & (step >= 0) & (step <= limit)
        if bool(grown.all()) and (gap_ns is None or not gap_ns.any()):
            stage.gain[cells] += new - old
            stage.raw[cells] = new
            return
        wrap = stage.wrap[rows]
        wrapped = known & (step < 0) & (wrap > 0) & (step + wrap <= limit)
        reset = known & (step < 0) & ~wrapped
        jumped = known & (step > limit)
        gain = np.where(grown, new - old, 0)
        gain = np.where(wrapped, new - old + wrap.astype(np.int64), gain)
        gain = np.where(reset & (new <= limit), new, gain)
        stage.gain[cells] += gain
        stage.raw[cells] = np.where(usable, new, old)
        for name, mask in (
            ("counter_wraps", wrapped),
            ("counter_resets", reset),
            ("counter_jumps", jumped),
            ("missing", ~usable),
        ):
            self.counts[name] += int(np.count_nonzero(mask))
        was = stage.held_ns[cells]
        holds = np.where(usable | (old < 0), 0, np.where(was > 0, was, np.maximum(before, 1)))
        stage.n_held += int(np.count_nonzero(holds)) - int(np.count_nonzero(was))
        stage.held_ns[cells] = holds

    def _count_one(self, stage: Stage, row: int, entity: int, new: int, t_ns: int, before: int) -> None:
        """`_count` for one counter; `new` is -1 for "no reading"."""
        old = stage.raw.item(row, entity)
        gap_ns = stage.held_ns.item(row, entity) if stage.n_held else 0
        if new < 0:
            self.counts["missing"] += 1
            if old >= 0 and not gap_ns:
                stage.held_ns[row, entity] = max(before, 1)
                stage.n_held += 1
            return
        if old >= 0:
            spec = stage.counters[row]
            limit = min(spec.high * (max((t_ns - (gap_ns or before)) / NS, 0.0) + 1.0), _MAX_GAIN)
            step = new - old
            gain = 0
            if step > limit:
                self.counts["counter_jumps"] += 1
            elif step >= 0:
                gain = step
            elif spec.wrap and step + spec.wrap <= limit:
                self.counts["counter_wraps"] += 1
                gain = step + spec.wrap
            else:
                self.counts["counter_resets"] += 1
                gain = new if new <= limit else 0
            stage.gain[row, entity] += gain
        stage.raw[row, entity] = new
        if gap_ns:
            stage.held_ns[row, entity] = 0
            stage.n_held -= 1

    def _watch(
        self, stage: Stage, layout: ReportLayout, values: F32, at: Any, rows: I32 | None = None
    ) -> None:
        """Raise the urgent flag where a value enters its threshold, or falls below a share of the last.

        Asked before `values` are staged; what lasts is urgent once. `rows`: those staged (None: all).
        """
        for k, row, threshold, high in layout.urgent:
            if (rows is None or row in rows) and not self.urgent:
                self.urgent = kernels.enters(stage.value[row, at], values[k], threshold, high)
        for k, row, share, low, high in layout.drops:
            if (rows is None or row in rows) and not self.urgent:
                self.urgent = kernels.falls(stage.value[row, at], values[k], share, low, high)

    def take(self, tick: int, now_ns: int, dt_s: float) -> Frame:
        """Return a frame of everything that arrived since the last one, quantised, and start an empty one."""
        updates: list[TableUpdate] = []
        counts: list[Counts] = []
        self.absurd.clear()
        for table in self.stages:
            stage = self.stages[table]
            for group in sorted(stage.dirty):
                self._cut(stage, group, updates, counts)
            stage.dirty.clear()
        events, urgent = tuple(self.events), self.urgent
        self.events, self.urgent = [], False
        return Frame(tick, now_ns, dt_s, tuple(updates), tuple(counts), events, urgent)

    def _cut(self, stage: Stage, group: int, updates: list[TableUpdate], counts: list[Counts]) -> None:
        hits = stage.hits[group]
        full = bool(hits.all())
        entity = None if full else np.flatnonzero(hits).astype(np.int32)
        if entity is not None and len(entity) == 0:
            return
        t_ns = stage.t_ns[group].copy() if entity is None else stage.t_ns[group, entity]
        gauges, counters = stage.rows_of(group)
        if len(gauges):
            q = np.empty((len(gauges), len(t_ns)), np.int32)
            self._quantise(stage, gauges, entity, q)
            updates.append(TableUpdate(stage.table, gauges, entity, q, t_ns))
        if len(counters):
            cells: Any = counters if entity is None else np.ix_(counters, entity)
            raw, gain = stage.raw[cells], stage.gain[cells]
            if stage.n_held:
                raw[stage.held_ns[cells] > 0] = -1
            stage.gain[cells] = 0
            counts.append(Counts(stage.table, counters, entity, raw, gain, t_ns))
        hits.fill(0)

    def _quantise(self, stage: Stage, rows: I32, entity: I32 | None, out: I32) -> None:
        """Write whole quanta of some rows into `out` [k, m]; missing, untrusted and absurd values are
        counted."""
        odd = np.empty((len(rows), 4), np.int64)
        limits = stage.per_quantum, stage.low, stage.high
        if not kernels.quantise(stage.value, rows, entity, *limits, out, odd, float(_UNTRUSTED)):
            return
        for name, many in zip(
            ("missing", "untrusted", "out_of_range"), odd.sum(axis=0).tolist(), strict=False
        ):
            self.counts[name] += many
        for k in np.flatnonzero(odd[:, 2]).tolist():
            first, row = int(odd[k, 3]), int(rows[k])
            at = first if entity is None else int(entity[first])
            self.absurd.append((stage.signals[row], at, float(stage.value[row, at]), int(odd[k, 2])))

    def forget(self, table: str, entity: int) -> None:
        """Drop the pending and earlier readings of a replaced device."""
        stage = self.stages.get(table)
        if stage is not None and 0 <= entity < stage.n:
            stage.forget(entity)
