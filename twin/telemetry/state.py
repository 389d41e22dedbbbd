"""The state: the latest image of every signal of every entity, in columns, with time and quality per cell.

`apply` latches a frame; everything else is derived when asked for: age, quality (staleness included), and the
worst case of a value that has not been refreshed. Holds no history and takes no decisions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from twin import kernels
from twin.catalogue import F32, F64, I32, I64, NS, TABLES, U8, Bool, Signal
from twin.telemetry.cadence import LEARNED, REPEAT_ROWS, Arrivals, Cadence
from twin.telemetry.frame import FIRST_VALID_Q, Counts, Frame, Partition, TableUpdate
from twin.telemetry.freshness import LEAST_LATE_S, LEAST_SILENT_S, AgeLimits, Freshness
from twin.telemetry.observation_gaps import nothing

# Qualities; everything but GOOD is a reason not to call something healthy.
GOOD, STALE, UNTRUSTED, OUT_OF_RANGE, MISSING = 0, 1, 2, 3, 4
QUALITY_NAMES = ("good", "stale", "untrusted", "out_of_range", "missing")

MAX_TIMELY = 256  # masks of timely readings that a table remembers
# Stands for an age without end, since infinity times a slew of zero is not a number.
_FOREVER_S = 1e12
_PER_ENTITY = ("value", "quality", "good_ns", "t_ns", "raw", "total", "resets", "generation")


class TableState:
    """One table. Shapes: value, quality [n_gauge, n]; t_ns [n_groups, n]; raw, total, resets [n_counter, n].

    A bad reading leaves the last good value in place: `quality` says that it is not current, `good_ns` (only
    where quality is bad) since when it was good.
    """

    def __init__(self, table: str, n: int, freshness: Freshness | None = None) -> None:
        spec = TABLES[table]
        self.table, self.n = table, n
        self.freshness = Freshness(table) if freshness is None else freshness
        self.signals, self.counters = spec.gauges, spec.counters
        self.value = np.full((len(spec.gauges), n), np.nan, np.float32)
        self.quality = np.full((len(spec.gauges), n), MISSING, np.uint8)
        self.good_ns = np.zeros((len(spec.gauges), n), np.int64)
        self.bad_count = np.full(len(spec.gauges), n, np.int64)  # cells of a row that are not GOOD
        self.partition = Partition(len(spec.gauges) + len(spec.counters))
        self.t_ns = np.zeros((1, n), np.int64)
        self.cadence = Cadence(n)
        self.raw = np.full((len(spec.counters), n), -1, np.int64)
        self.total = np.zeros((len(spec.counters), n), np.int64)
        self.resets = np.zeros((len(spec.counters), n), np.int32)
        self.generation = np.zeros(n, np.int32)
        self.resumed_ns = np.zeros(2, np.int64)  # the last pause in which nobody listened: its end, its begin
        self.quantum = np.array([s.quantum for s in spec.gauges], np.float32)
        self.slew_per_s = np.array([s.slew_per_s for s in spec.gauges], np.float64)
        self._once_good: Bool = np.zeros(
            len(spec.gauges), np.bool_
        )  # rows of which a good reading was followed by a bad one
        self._keys: dict[int, tuple[int, float]] = {}  # group and period by row, until a group splits
        self._sizes: dict[int, int] = {}  # rows by group, until one splits
        self._learns = not self.freshness.fixed.all()
        # Derived from `t_ns` when asked for, until it changes
        self._oldest_ns: dict[int, int] = {}  # by group
        self._timely: dict[tuple[int, float, int], Bool | None] = {}  # by group, period and instant
        self._timely_rows: dict[int, Bool | None] = {}  # the same by row, at one instant
        self._timely_ns = 0
        self._steady: dict[tuple[int, float, int], bool] = {}  # the same: whether no worst case drifts
        self._limits: dict[tuple[int, float], AgeLimits] = {}  # by group and period, of groups that are late

    def _groups_of(self, rows: I32) -> tuple[int, ...]:
        self._times_changed()
        groups, splits = self.partition.resolve(rows)
        if splits:
            self._keys.clear()
            self._sizes.clear()
        for parent, _ in splits:
            self.t_ns = np.vstack([self.t_ns, self.t_ns[parent : parent + 1]])
            self.cadence.split(parent)
        return groups

    def _times_changed(self) -> None:
        self._oldest_ns.clear()
        self._timely.clear()
        self._timely_rows.clear()
        self._steady.clear()

    def _learn(self, group: int, update: TableUpdate | Counts, now_ns: int) -> None:
        """Learn how long a group was awaited; before its values and instants are written."""
        if not self._learns:
            return
        same = None
        if isinstance(update, TableUpdate) and self._size_of(group) <= REPEAT_ROWS:
            same = self._repeated(group, update)
        # A pause has no observation: readings before it end no gap
        arrived, paused_ns = Arrivals(update.t_ns, update.entity, same), int(self.resumed_ns[0])
        if self.cadence.learn(group, self.t_ns[group], arrived, now_ns, paused_ns):
            for key in [key for key in self._limits if key[0] == group]:
                del self._limits[key]

    def _size_of(self, group: int) -> int:
        """Return the number of rows of a group."""
        if group not in self._sizes:
            self._sizes[group] = self.partition.size_of(group)
        return self._sizes[group]

    def _repeated(self, group: int, update: TableUpdate) -> Bool:
        """Return the mask of the entities [k] of which a group brings the values that it brought before."""
        same: Bool = np.ones(len(update.t_ns), np.bool_)
        for k in np.flatnonzero(self.partition.group_of_row[update.rows] == group).tolist():
            row, q = int(update.rows[k]), update.q[k]
            value = q.astype(np.float32) * self.quantum[row]
            old = self.value[row] if update.entity is None else self.value[row, update.entity]
            same &= (q < FIRST_VALID_Q) | (value == old)
        return same

    def apply_update(self, update: TableUpdate, now_ns: int) -> None:
        """Latch gauges and states of a frame of this instant."""
        groups = self._groups_of(update.rows)
        for group in groups:
            self._learn(group, update, now_ns)
        entity = update.entity
        kernels.latch(
            self.value,
            self.quality,
            self.good_ns,
            self.bad_count,
            self._once_good,
            self.quantum,
            update.rows,
            entity,
            update.q,
            self.t_ns,
            self.partition.group_of_row,
        )
        for group in groups:
            if entity is None:
                self.t_ns[group] = update.t_ns
            else:
                self.t_ns[group, entity] = update.t_ns

    def apply_counts(self, update: Counts, now_ns: int) -> None:
        """Latch counters: the total grows by the gain; a raw value that does not follow is a reset or
        wrap.

        "No reading" is latched as such (quality MISSING); it ends no sum.
        """
        groups = self._groups_of(update.rows + np.int32(len(self.signals)))
        for group in groups:
            self._learn(group, update, now_ns)
        columns = self.raw, self.total, self.resets
        kernels.latch_counts(*columns, update.rows, update.entity, update.raw, update.gain)
        for group in groups:
            self.t_ns[group, slice(None) if update.entity is None else update.entity] = update.t_ns

    def received_ns(self, signal: Signal) -> I64:
        """Return the instants of the last messages with a signal, good or not [n]. Read only."""
        group = self.partition.group_of_row[self.freshness.row_of(signal)]
        t_ns: I64 = self.t_ns[group]
        return t_ns

    def last_good_ns(self, signal: Signal, index: Any = slice(None)) -> I64:
        """Return the instants of the last good readings of a gauge or state [k]; 0 for none."""
        t_ns: I64 = self.received_ns(signal)[index]
        if self.bad_count[signal.row]:
            t_ns = np.where(self.quality[signal.row, index] == GOOD, t_ns, self.good_ns[signal.row, index])
        return t_ns

    def limits(self, row: int) -> AgeLimits:
        """Return the ages at which readings of a row are stale and drift [n]. Read only."""
        key = self.time_key(row)
        if key not in self._limits:
            self._limits[key] = self.freshness.limits(row, key[0], self.cadence)
        return self._limits[key]

    def time_key(self, row: int) -> tuple[int, float]:
        """Return group and period of a row: rows with the same are late, stale and silent together."""
        key = self._keys.get(row)
        if key is None:
            declared_s = float(self.freshness.period_s[row])
            # A period of the site's own is kept apart from an equal one of the catalogue
            period_s = -declared_s if self.freshness.fixed[row] else declared_s
            key = self._keys[row] = int(self.partition.group_of_row[row]), period_s
        return key

    def _all_since(self, group: int, at_ns: int) -> bool:
        """Return True if all entities reported this group at or after an instant."""
        oldest_ns = self._oldest_ns.get(group)
        if oldest_ns is None:
            oldest_ns = self._oldest_ns[group] = int(self.t_ns[group].min(initial=2**62))
        return oldest_ns >= at_ns

    def ever_good(self, row: int) -> bool:
        """Return True if any entity ever had a good reading of a gauge or state."""
        if self.bad_count[row] < self.n:
            return True
        return bool(self._once_good[row]) and bool(self.good_ns[row].any())

    def timely(self, row: int, now_ns: int) -> Bool | None:
        """Return the entities whose last message with a row is not stale [n]; None: all. Not to be written
        to.
        """
        if now_ns != self._timely_ns:
            self._timely_ns = now_ns
            self._timely_rows.clear()
        elif row in self._timely_rows:
            return self._timely_rows[row]
        self._timely_rows[row] = timely = self._find_timely(row, now_ns)
        return timely

    def _find_timely(self, row: int, now_ns: int) -> Bool | None:
        """See `timely`."""
        group, period_s = self.time_key(row)
        if self._all_since(group, max(now_ns - self.freshness.stale_ns[row], 1)):
            return None
        key = (group, period_s, now_ns)
        if key not in self._timely:
            if len(self._timely) >= MAX_TIMELY:
                self._times_changed()
            timely = self._in_time(row, now_ns) | self._unchanged(row, now_ns)
            self._timely[key] = None if timely.all() else timely
        return self._timely[key]

    def _in_time(self, row: int, now_ns: int) -> Bool:
        """Return the entities that reported within their own cadence [n]."""
        t_ns: I64 = self.t_ns[self.partition.group_of_row[row]]
        return np.asarray((t_ns >= now_ns - self.limits(row).stale_ns) & (t_ns > 0), np.bool_)

    def _unchanged(self, row: int, now_ns: int) -> Bool:
        """Return the entities that send a row when it changes, and whose other messages prove that they live
        [n].
        """
        group = int(self.partition.group_of_row[row])
        out: Bool = np.zeros(self.n, np.bool_)
        if self.freshness.fixed[row]:
            return out
        on_change = self.cadence.on_change(group)
        if not on_change.any():
            return out
        on_change &= (now_ns - self.t_ns[group]) / NS <= self.limits(row).change_s
        return np.asarray(on_change & self._lives_beside(group, now_ns), np.bool_)

    def _lives_beside(self, group: int, now_ns: int) -> Bool:
        """Return the entities of which a message other than that of this group came in time [n]."""
        out: Bool = np.zeros(self.n, np.bool_)
        for other in range(self.partition.n_groups):
            rows = self.partition.rows_of(other)
            if other != group and len(rows):
                out |= self._in_time(int(rows[np.argmin(self.freshness.period_s[rows])]), now_ns)
        return out

    def poll(self, rows: I32, entity: I32, period_s: float) -> None:
        """Note that the source of these rows of these entities is polled at this period."""
        for group in self._groups_of(rows):
            self.cadence.poll(group, entity, period_s)
        self._limits.clear()

    def learning(self) -> Bool:
        """Return the entities that report, but too little for the cadence of any message to be known [n]."""
        known = ((self.cadence.gaps >= LEARNED) | (self.cadence.poll_s > 0.0)).any(axis=0)
        if self.freshness.fixed.any():  # the site says it of some
            known |= (self.t_ns[self.partition.group_of_row[self.freshness.fixed]] > 0).any(axis=0)
        return np.asarray((self.t_ns > 0).any(axis=0) & ~known, np.bool_)

    def all_current(self, signal: Signal, now_ns: int) -> bool:
        """Return True if every entity has a current reading of a signal; False for an empty table."""
        counter, row = signal.kind == "counter", self.freshness.row_of(signal)
        if self.n == 0 or (not counter and self.bad_count[row]) or self.timely(row, now_ns) is not None:
            return False
        return not counter or bool((self.raw[signal.row] >= 0).all())

    def current(self, signal: Signal, now_ns: int, index: Any = slice(None)) -> Bool:
        """Return the mask of these entities of which a signal is good and not stale [k]. Not to be written
        to.
        """
        row = self.freshness.row_of(signal)
        timely = self.timely(row, now_ns)
        if signal.kind == "counter":
            good = self.raw[signal.row, index] >= 0
        elif self.bad_count[row] == self.n:
            return cast(Bool, np.zeros(self.n, np.bool_)[index])
        elif self.bad_count[row]:
            good = self.quality[row, index] == GOOD
        else:
            return cast(Bool, (np.ones(self.n, np.bool_) if timely is None else timely)[index])
        return cast(Bool, good if timely is None else good & timely[index])

    def lately_good(self, signal: Signal, now_ns: int) -> Bool:
        """Return the entities whose last good reading of a gauge is not stale [n], although a bad one may
        have followed.
        """
        good_ns = self.last_good_ns(signal)
        return np.asarray((good_ns >= now_ns - self.limits(signal.row).stale_ns) & (good_ns > 0), np.bool_)

    def silent(self, signal: Signal, now_ns: int) -> Bool:
        """Return the entities whose last good reading of a gauge is older than its own cadence allows [n]."""
        if self.none_silent(signal.row, now_ns):
            return np.zeros(self.n, np.bool_)
        good_ns = self.last_good_ns(signal)
        if good_ns.min(initial=now_ns) >= now_ns - round(LEAST_SILENT_S * NS):
            return np.zeros(self.n, np.bool_)
        limits = self.limits(signal.row)
        out = (good_ns < now_ns - limits.silent_ns) & (good_ns > 0)
        if out.any():
            out &= ~self._unchanged(signal.row, now_ns)
            group = int(self.partition.group_of_row[signal.row])
            once = out & (self.cadence.gaps[group] == 0) & (self.cadence.poll_s[group] == 0.0)
            once &= ~self.freshness.fixed[signal.row]
            if once.any():  # a value that never changed is sent once, by a device that lives
                out &= ~(once & self._lives_beside(group, now_ns))
        return np.asarray(out, np.bool_)

    def none_silent(self, row: int, now_ns: int) -> bool:
        """Return True if every entity gave a good reading of a gauge too lately for any to be silent."""
        since_ns = now_ns - round(LEAST_SILENT_S * NS)
        return not self.bad_count[row] and self._all_since(self.time_key(row)[0], since_ns)

    def late(self, signal: Signal, now_ns: int) -> Bool:
        """Return the entities of which a gauge is late by its own cadence [n]: people see such a reading with
        its age.
        """
        good_ns = self.last_good_ns(signal)
        if good_ns.min(initial=now_ns) >= now_ns - round(LEAST_LATE_S * NS):
            return np.zeros(self.n, np.bool_)
        out = (now_ns - good_ns > self.limits(signal.row).late_s * NS) & (good_ns > 0)
        return np.asarray(out & ~self._unchanged(signal.row, now_ns) if out.any() else out, np.bool_)

    def reports(self, entity: int, now_ns: int) -> bool:
        """Return True if any gauge or state of an entity is current."""
        return any(bool(self.current(s, now_ns, entity)) for s in self.signals)

    def age_s(self, signal: Signal, now_ns: int, index: Any = slice(None)) -> F64:
        """Return the seconds since the last good reading [k]; inf for none. Never negative."""
        counter = signal.kind == "counter"
        t_ns = self.received_ns(signal)[index] if counter else self.last_good_ns(signal, index)
        age: F64 = np.maximum(now_ns - t_ns, 0) / NS
        age[t_ns == 0] = np.inf
        if counter:
            age[self.raw[signal.row, index] < 0] = np.inf  # when it last read is not kept
        return age

    def quality_of(self, signal: Signal, now_ns: int) -> U8:
        """Return the quality per entity [n], with staleness."""
        if signal.kind == "counter":
            quality = np.where(self.raw[signal.row] < 0, MISSING, GOOD).astype(np.uint8)
        else:
            quality = self.quality[signal.row].copy()
        timely = self.timely(self.freshness.row_of(signal), now_ns)
        if timely is not None:
            quality[(quality == GOOD) & ~timely] = STALE
        return quality

    def silence_s(self, age_s: F64, now_ns: int) -> F64:
        """Return the seconds that something of this age [n] was silent while we listened: without the last
        pause.
        """
        resumed, stopped = (
            (now_ns - float(self.resumed_ns[0])) / NS,
            (now_ns - float(self.resumed_ns[1])) / NS,
        )
        return age_s - np.clip(np.minimum(age_s, stopped) - resumed, 0.0, None)

    def late_s(self, signal: Signal, now_ns: int, urged: Bool | None = None, index: Any = slice(None)) -> F64:
        """Seconds for which the worst case of a gauge has drifted [k]: its age beyond what `AgeLimits` allow,
        of `urged` ones [n] beyond 1.5 of the declared periods.
        """
        limits = self.limits(signal.row)
        free_s = limits.drift_s[index]
        if (unchanged := self._unchanged(signal.row, now_ns)).any():
            free_s = np.where(unchanged[index], limits.change_s[index], free_s)
        if urged is not None:
            free_s = np.where(urged[index], np.minimum(free_s, self.freshness.drift_s[signal.row]), free_s)
        age_s = self.age_s(signal, now_ns, index)
        late_s: F64 = np.maximum(self.silence_s(age_s, now_ns) - free_s, 0.0)
        return late_s

    def worst(
        self, signal: Signal, now_ns: int, slew_per_s: F64 | None = None, urged: Bool | None = None
    ) -> F32:
        """Return the present worst case of the value, towards the dangerous side [n]; NaN without any
        reading.

        `value +/- late_s * slew`, bounded by the physical range. `slew_per_s` [n] overrides
        the catalogue's (a profile knows its cold plates better); for `urged` see `late_s`.
        """
        value: F32 = self.value[signal.row]
        slew = self.slew_per_s[signal.row] if slew_per_s is None else slew_per_s
        if signal.danger == "none" or (slew_per_s is None and slew == 0.0):
            return value.copy()
        if self.steady(signal.row, now_ns, urged):
            return value.copy()
        worst = value.copy()
        at = self._may_drift(signal.row, now_ns)
        if not len(at):
            return worst
        late_s = self.late_s(signal, now_ns, urged, at)
        drift = np.minimum(late_s, _FOREVER_S) * (slew if slew_per_s is None else slew_per_s[at])
        if signal.danger == "low":
            worst[at] = np.maximum(value[at] - drift, signal.low)
        else:
            worst[at] = np.minimum(value[at] + drift, signal.high)
        return worst

    def _may_drift(self, row: int, now_ns: int) -> I64:
        """Return the entities whose reading is bad, or too old for its worst case to be surely itself."""
        least_ns = int(float(self.freshness.drift_s[row]) * NS)  # no limit is lower
        old = self.t_ns[self.partition.group_of_row[row]] < now_ns - least_ns
        return np.flatnonzero(old | (self.quality[row] != GOOD))

    def steady(self, row: int, now_ns: int, urged: Bool | None = None) -> bool:
        """Return True if all entities reported in time, if by their own cadence: no worst case of a gauge
        has drifted from its value; nor has one that nobody ever gave. For `urged` see `late_s`.
        """
        if self.bad_count[row]:
            return not self.ever_good(row)
        fresh_ns = now_ns - round(float(self.freshness.drift_s[row]) * NS)
        if self._all_since(self.time_key(row)[0], max(fresh_ns, 1)):
            return True
        return urged is None and self._undrifted(row, now_ns)

    def _undrifted(self, row: int, now_ns: int) -> bool:
        """Return True if all entities reported so lately that their worst case has not drifted yet."""
        key = (*self.time_key(row), now_ns)
        found = self._steady.get(key)
        if found is None:
            t_ns = self.t_ns[key[0]]
            age_s = np.where(t_ns > 0, (now_ns - t_ns) / NS, np.inf)
            found = self._steady[key] = bool((age_s <= self.limits(row).drift_s).all())
        return found

    def replace(self, entity: int) -> None:
        """Clear the slot of a replaced device."""
        self._times_changed()  # its source is still the same: the cadence is that of the place
        self.generation[entity] += 1
        self.value[:, entity] = np.nan
        self.quality[:, entity] = MISSING
        self.good_ns[:, entity] = 0
        self.t_ns[:, entity] = 0
        self.raw[:, entity] = -1
        self.total[:, entity] = 0
        self.resets[:, entity] = 0
        self._recount()

    def _recount(self) -> None:
        """Recount after an outside write to values and qualities."""
        self.bad_count[:] = np.count_nonzero(self.quality, axis=1)
        self._once_good = np.asarray(self.good_ns.any(axis=1), np.bool_)

    def remapped(self, n: int, old_of_new: I32, freshness: Freshness | None = None) -> TableState:
        """Return this state for other slots: `old_of_new` [n] is the origin of each, -1 for a new one."""
        out = TableState(self.table, n, freshness)
        out.cadence = self.cadence.remapped(n, old_of_new)
        out.partition, out.resumed_ns = self.partition.copy(), self.resumed_ns.copy()
        kept = np.flatnonzero(old_of_new >= 0)
        source = old_of_new[kept]
        out.t_ns = np.zeros((self.t_ns.shape[0], n), np.int64)
        for name in _PER_ENTITY:
            getattr(out, name)[..., kept] = getattr(self, name)[..., source]
        out._recount()
        return out

    def arrays(self) -> dict[str, Any]:
        """Return everything that a snapshot must hold, by name."""
        return {
            "value": self.value, "quality": self.quality, "good_ns": self.good_ns, "t_ns": self.t_ns,
            "raw": self.raw, "total": self.total, "resets": self.resets, "generation": self.generation,
            "group_of_row": self.partition.group_of_row,
            "resumed_ns": self.resumed_ns, **self.cadence.arrays(),
        }  # fmt: skip

    def restore(self, arrays: dict[str, Any]) -> None:
        """Take over what `arrays` gave."""
        self._times_changed()
        self._limits.clear()
        self._keys.clear()
        self._sizes.clear()
        for name in _PER_ENTITY:
            setattr(self, name, np.array(arrays[name]))
        pause = np.array(arrays["resumed_ns"])
        self.resumed_ns = pause if len(pause) == 2 else np.repeat(pause, 2)
        self.partition.restore(arrays["group_of_row"], self.t_ns.shape[0])
        self.cadence.restore(arrays, self.t_ns.shape[0])
        self._recount()


class State:
    """All tables, and the nominal instant of the last frame."""

    def __init__(self, sizes: dict[str, int], periods_s: Mapping[str, float] | None = None) -> None:
        self.tables = {t: TableState(t, n, Freshness(t, periods_s)) for t, n in sizes.items()}
        self.now_ns = 0
        self.tick = -1
        self.unwatched_ns = nothing()  # gaps in which nobody listened [g, 2]

    def apply(self, frame: Frame) -> None:
        """Latch the image of a frame."""
        for update in frame.updates:
            self.tables[update.table].apply_update(update, frame.now_ns)
        for counts in frame.counts:
            self.tables[counts.table].apply_counts(counts, frame.now_ns)
        self.now_ns, self.tick = frame.now_ns, frame.tick

    def checksum(self) -> str:
        """Return blake2b over every array of every table: equal only for equal states."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{self.tick} {self.now_ns}".encode())
        digest.update(self.unwatched_ns.tobytes())
        for name in sorted(self.tables):
            arrays = self.tables[name].arrays()
            for key in sorted(arrays):
                digest.update(f"{name}.{key}".encode())
                digest.update(np.ascontiguousarray(arrays[key]).data)
        return digest.hexdigest()

    def marks(self) -> dict[str, int]:
        """Return a short check of every row with data, so that a drifting replay can name the signal."""
        out: dict[str, int] = {}
        for name in sorted(self.tables):
            table = self.tables[name]
            for signal in table.signals:
                values = table.value[signal.row]
                if table.n and (table.bad_count[signal.row] < table.n or np.isfinite(values).any()):
                    piece = hashlib.blake2b(values.data, digest_size=6).digest()
                    out[signal.key] = int.from_bytes(piece, "little")
        return out
