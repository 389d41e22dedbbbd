"""Sensor checks: sensors that fall silent, stand still or jump, each judged by its own usual behaviour.

Every meter of a physical quantity has noise: one that repeats its last digit far longer than it ever did
stands still. A jump is a reading far from both of its neighbours. These checks do not find *wrong* readings:
only relations to other meters can. Gauges of all small tables lie side by side in one bank, and rare tests
run on few cells only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twin.catalogue import F64, I64, NS, TABLES, Bool
from twin.diagnosis.bank import CELLS, WATCHED, Bank, GaugeState, traits_of
from twin.diagnosis.deviations import NewReadings
from twin.telemetry import GOOD, OWN, EntityState, OldOfNew, Sizes, State, column, part

SILENT_PERIODS, SILENT_LEAST_S = 4.0, 6.0


class Meters(GaugeState):
    """The watched gauges of a table: arrays [k, n], views of a bank's; reporting rates [k] of all tables'."""

    silent: Bool = column(OWN, "?", lead=("k",))
    period_s: F64 = column("signal", "f8", np.nan)  # between readings, as learned
    heard_s: F64 = column("signal", "f8")

    def __init__(self, table: str, n: int, bank: Bank, begin: int) -> None:
        self.table, self.n, self.names, self.bank = table, n, WATCHED[table], bank
        k = len(self.names)
        super().__init__({"k": k, "signal": k, table: n}, table)
        self.rows = np.array([TABLES[table].by_name[name].row for name in self.names], np.int32)
        self.cells = slice(begin, begin + k * n)  # of a flat bank
        self.parts = 1 if bank.flat else -(-n * k // CELLS)
        for name in bank.declared:
            whole = getattr(bank, name)
            setattr(self, name, whole[0, self.cells].reshape(k, n) if bank.flat else whole)
        self.anything = self.any_silent = False
        self._known, self._groups = b"", list[tuple[int, int, Any]]()

    def groups(self, state: State) -> list[tuple[int, int, Any]]:
        """Signals that are read together: their group, a row of them, and which of ours they are."""
        of_row = state.tables[self.table].partition.group_of_row
        if (known := of_row.tobytes()) != self._known:
            mine = of_row[self.rows]
            self._known, self._groups = known, []
            for group in sorted(set(mine.tolist())):
                at = np.flatnonzero(mine == group)
                which = slice(None) if len(at) == len(mine) else at
                self._groups.append((group, int(self.rows[at[0]]), which))
        return self._groups

    def fresh(self, state: State, readings: NewReadings, part: slice, out: Bool) -> Bool | None:
        """Return the cells with a good new reading [k, w], written in `out`; None: all cells."""
        column, every = state.tables[self.table], True
        for _, row, which in self.groups(state):
            new, _ = readings.fresh(state, self.table, row)
            every &= new is None
            out[which] = True if new is None else new[part]
        if column.bad_count[self.rows].any():
            out &= column.quality[self.rows, part] == GOOD
            return out
        return None if every else out

    def hush(
        self, state: State, gauges: np.ndarray, late_ns: I64, oldest_ns: I64, spared: Bool | None
    ) -> None:
        """Mark meters without a good reading since `late_ns` [k]; `oldest_ns` [k]: of their last readings.

        `gauges`: those of which some may have been silent for so long.
        """
        column = state.tables[self.table]
        for k in gauges.tolist():
            row = int(self.rows[k])
            self.silent[k] = False
            late: Any = slice(None)
            if oldest_ns[k] >= late_ns[k]:  # all were read: of those that are bad
                late = np.flatnonzero(column.quality[row])
            t_ns = column.t_ns[column.partition.group_of_row[row], late]
            since = np.where(column.quality[row, late] == GOOD, t_ns, column.good_ns[row, late])
            silent = (since > 0) & (since < late_ns[k])
            if not silent.any():
                continue
            silent &= np.isfinite(column.value[row, late])
            if spared is not None:
                silent &= ~spared[late]
            self.silent[k, late] = silent
        self.any_silent = bool(self.silent.any())  # of the others, too
        self.anything |= self.any_silent

    def settle(self, spared: Bool | None) -> None:
        """After new readings: whether anything is odd. Where people work, nothing is."""
        odd = self.bank.odd
        if odd and spared is not None:
            self.frozen[:, spared], self.jumping[:, spared] = False, False
        odd = odd and bool(self.frozen.any() or self.jumping.any())
        self.anything = odd or self.any_silent

    def derive(self) -> None:
        """The bank's columns were written through the views."""
        self.bank.wake()
        self.any_silent = bool(self.silent.any())
        self.anything = bool(self.any_silent or self.frozen.any() or self.jumping.any())

    def adopt(self, old: Meters, old_of_new: OldOfNew) -> None:
        """Take over what was learned on another site; its signals are the same."""
        super().adopt(old, {**old_of_new, "signal": np.arange(len(self.names), dtype=np.int32)})

    def index(self, name: str) -> int:
        return self.names.index(name)


class SensorChecks(EntityState):
    """The meters of all tables."""

    meters: dict[str, Meters] = part()

    def __init__(self, sizes: Sizes) -> None:
        super().__init__({t: sizes[t] for t in WATCHED if sizes.get(t, 0)})
        small = [t for t, n in self.sizes.items() if n * len(WATCHED[t]) <= CELLS]
        each = [{k: np.repeat(v, sizes[t]) for k, v in traits_of(t).items()} for t in small]
        traits = {k: np.concatenate([e[k] for e in each]) for k in (each[0] if each else ())}
        cells = sum(sizes[t] * len(WATCHED[t]) for t in small)
        flat = Bank(1, cells, traits, True)
        self._value, self._new = np.zeros((1, cells), np.float32), np.zeros((1, cells), np.bool_)
        self.meters: dict[str, Meters] = {}
        self._at: dict[str, slice] = {}  # its signals among all
        begin = at = 0
        for t, n in self.sizes.items():
            k = len(WATCHED[t])
            bank = flat if t in small else Bank(k, n, traits_of(t), False)
            self.meters[t], self._at[t] = Meters(t, n, bank, begin), slice(at, at + k)
            begin, at = begin + k * n * (t in small), at + k
        self.flat = flat
        self.period_s, self.heard_s = np.full(at, np.nan), np.zeros(at)
        self._share, self._oldest_ns = np.zeros(at), np.zeros(at, np.int64)
        self._bad: Bool = np.zeros(at, np.bool_)  # signals of which some cell has no good reading now
        for t, m in self.meters.items():
            m.period_s, m.heard_s = self.period_s[self._at[t]], self.heard_s[self._at[t]]

    def update(self, state: State, readings: NewReadings, spared: dict[str, Bool], dt_s: float) -> None:
        """Take in the readings of this tick; of a large table a part."""
        counts: dict[str, int] = {}
        for table, meters in self.meters.items():
            share, oldest_ns = self._share[self._at[table]], self._oldest_ns[self._at[table]]
            counts[table] = 0
            bad = state.tables[table].bad_count[meters.rows]
            np.not_equal(bad, 0, out=self._bad[self._at[table]])
            for group, row, which in meters.groups(state):
                _, count = readings.fresh(state, table, row)
                share[which] = count / meters.n
                oldest_ns[which] = readings.oldest_ns(table, group)
                counts[table] += count
        self._silence(state, spared, dt_s)
        with np.errstate(all="ignore"):
            self._side_by_side(state, readings, counts)
            for table, meters in self.meters.items():
                if not meters.bank.flat and counts[table]:
                    self._part(meters, state, readings)
        for table, meters in self.meters.items():
            if counts[table]:
                meters.settle(spared.get(table))

    def _silence(self, state: State, spared: dict[str, Bool], dt_s: float) -> None:
        """Learn how often each signal is read; look for those that are not."""
        self.heard_s += dt_s
        np.minimum(self.heard_s, 1e6, out=self.heard_s)
        per_s, known = self._share / dt_s, np.isfinite(self.period_s)
        with np.errstate(all="ignore"):
            usual = np.where(known, 1.0 / self.period_s, per_s)
            usual += np.maximum(0.01, np.minimum(1.0, dt_s / self.heard_s)) * (per_s - usual)
            np.divide(1.0, usual, out=self.period_s)
            known = np.isfinite(self.period_s)
            wait_s = np.maximum(SILENT_PERIODS * self.period_s + 2.0, SILENT_LEAST_S)
        late_ns = state.now_ns - np.rint(np.where(known, wait_s, 0.0) * NS).astype(np.int64)
        oldest_ns = np.minimum(self._oldest_ns, state.now_ns)
        suspect = known & (self._bad | (oldest_ns < late_ns))
        if not (suspect.any() or any(m.any_silent for m in self.meters.values())):
            return
        for table, m in self.meters.items():
            at = self._at[table]
            mine = np.flatnonzero(suspect[at])
            if m.any_silent:
                m.silent[known[at] & ~suspect[at]] = False
            if len(mine) or m.any_silent:
                m.hush(state, mine, late_ns[at], oldest_ns[at], spared.get(table))

    def _side_by_side(self, state: State, readings: NewReadings, counts: dict[str, int]) -> None:
        """All small tables at once."""
        every, some = True, False
        for table, m in self.meters.items():
            if not m.bank.flat:
                continue
            new = self._new[0, m.cells].reshape(-1, m.n)
            if not counts[table]:
                new.fill(False)
                every = False
                continue
            some = True
            every &= m.fresh(state, readings, slice(0, m.n), new) is None
            value = self._value[0, m.cells].reshape(-1, m.n)
            np.take(state.tables[table].value, m.rows, axis=0, out=value, mode="clip")
        if some:
            self.flat.update(self._value, None if every else self._new, slice(0, self.flat.n))

    @staticmethod
    def _part(m: Meters, state: State, readings: NewReadings) -> None:
        """A part of a large table."""
        at = state.tick % m.parts
        part = slice(at * m.n // m.parts, (at + 1) * m.n // m.parts)
        new = m.fresh(state, readings, part, np.empty((len(m.rows), part.stop - part.start), np.bool_))
        if new is None or new.any():
            m.bank.update(state.tables[m.table].value[m.rows, part], new, part)

    def __getstate__(self) -> tuple[Sizes, dict[str, Any]]:
        """For a copy: pieces of a bank, copied one by one, would no longer be its pieces."""
        return self.sizes, self.dump()

    def __setstate__(self, known: tuple[Sizes, dict[str, Any]]) -> None:
        self.__init__(known[0])  # type: ignore[misc]
        self.restore(known[1])
