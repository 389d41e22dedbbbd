"""Silent signals: the entities and signals that stopped reporting, with bounds of the instant.

A signal is silent when `TableState` says so, by its own cadence. States and settings are no evidence: many
sources send them only when they change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from twin.catalogue import F64, I32, I64, NS, TABLES, Bool, Signal
from twin.contracts import Windows
from twin.telemetry import GOOD, MISSING, State, TableState

# Parts of the names of signals that are sent on change, or only while they apply
SETTINGS = ("setpoint", "request", "limit", "readback", "grid_", "_count", "next_start")
SLACK_NS = NS  # of clocks
HOLD_S = 3.0  # for those that are still to fall silent with it
PERIODS = 3.0  # of an entity, about, that make it silent: one that stopped with it may be found one later
# Of each table the gauges that are no companions and no settings
MEASURED = {
    table: tuple(
        s
        for s in spec.gauges
        if s.kind == "gauge" and s.base not in spec.by_name and not any(word in s.name for word in SETTINGS)
    )
    for table, spec in TABLES.items()
}
Part = tuple[
    int, I32, I64, I64
]  # a signal's row; entities, their last readings and the ages that they may have


@dataclass(frozen=True, slots=True)
class Silent:
    """Entities of a table of which some signal is silent, ascending [m], and the bounds of its stop.

    `signals` [m]: how many of the measured ones are silent; `whole` [m]: all that it ever reported are;
    `row` [m]: one of them; `received_ns` [m]: instants of the last messages with any of them.
    """

    entity: I32
    signals: I32
    whole: Bool
    row: I32
    last_ns: I64
    missed_ns: I64
    received_ns: I64

    def hold_s(self) -> F64:
        """Return the seconds for which a simultaneous stop of others may be unnoticed [m]."""
        return np.asarray(HOLD_S + (self.missed_ns - self.last_ns) / (PERIODS * NS), np.float64)

    def where(self, mask: Bool) -> Silent:
        """Return the entities of a mask [m]."""
        return Silent(
            self.entity[mask], self.signals[mask], self.whole[mask], self.row[mask],
            self.last_ns[mask], self.missed_ns[mask], self.received_ns[mask],
        )  # fmt: skip


def silent_signals(state: State, windows: Windows) -> dict[str, Silent]:
    """Return the silent signals by table; entities under maintenance are not expected to report."""
    out = {}
    for table, column in state.tables.items():
        if column.n == 0 or table == "job":
            continue
        parts = _parts(column, state.now_ns)
        if parts and (found := _merged(column, state.now_ns, parts, windows)) is not None:
            out[table] = found
    return out


def _parts(column: TableState, now_ns: int) -> list[Part]:
    """Return the silent entities of each signal of a table."""
    parts: list[Part] = []
    together: dict[tuple[int, float], Bool] = {}
    listened_ns = now_ns - int(column.resumed_ns[0])  # nobody listened before: that is no silence
    for signal in measured(column):
        row = signal.row
        if column.none_silent(row, now_ns) or not column.ever_good(row):
            continue
        if column.bad_count[row]:
            silent = column.silent(signal, now_ns)
            # A device that sends nonsense still sends
            wrong = (column.quality[row] != GOOD) & (column.quality[row] != MISSING)
            if wrong.any():
                silent = silent & ~(
                    wrong & (column.received_ns(signal) >= now_ns - column.limits(row).silent_ns)
                )
        else:
            key = column.time_key(row)
            if key not in together:
                together[key] = column.silent(signal, now_ns)
            silent = together[key]
        if silent.any():
            index = np.flatnonzero(silent).astype(np.int32)
            wait_ns = column.limits(row).silent_ns[index]
            some = wait_ns < listened_ns
            index, wait_ns = index[some], wait_ns[some]
            if len(index):
                parts.append((row, index, _spoke_ns(column, row, index), wait_ns))
    return parts


def _spoke_ns(column: TableState, row: int, index: I32) -> I64:
    """Return the instants of the last messages with a value, good or not [k]."""
    t_ns: I64 = column.t_ns[column.partition.group_of_row[row], index]
    if column.bad_count[row]:
        t_ns = np.where(column.quality[row, index] == MISSING, column.good_ns[row, index], t_ns)
    return t_ns


def measured(column: TableState) -> tuple[Signal, ...]:
    """Return the measured quantities, which a healthy source sends repeatedly, without companions."""
    return MEASURED[column.table]


def _merged(column: TableState, now_ns: int, parts: list[Part], windows: Windows) -> Silent | None:
    """Return the silent entities of a table, with the bounds of the latest stop of each."""
    n = column.n
    signals, row, longest = np.zeros(n, np.int32), np.full(n, -1, np.int32), np.zeros(n, np.int64)
    last, missed = np.zeros(n, np.int64), np.full(n, 2**62, np.int64)
    for at, index, last_ns, wait_ns in parts:
        signals[index] += 1
        row[index] = at
        last[index] = np.maximum(last[index], last_ns)
        longest[index] = np.maximum(longest[index], wait_ns)
    if (excused := windows.excused(column.table, now_ns, longest)) is not None:
        signals[excused] = 0
    found = np.flatnonzero(signals).astype(np.int32)
    if len(found) == 0:
        return None
    for _, index, last_ns, wait_ns in parts:
        # A signal that was silent before the others says nothing of their stop
        end_ns = last_ns + wait_ns + SLACK_NS
        missed[index] = np.where(end_ns >= last[index], np.minimum(missed[index], end_ns), missed[index])
    # A reading received half the limit of silence after the last one was sent after the stop
    received_ns = _last_received_ns(column, found)
    whole = received_ns <= last[found] + longest[found] // 2
    return Silent(found, signals[found], whole, row[found], last[found], missed[found], received_ns)


def _last_received_ns(column: TableState, index: I32) -> I64:
    """Return the instants of the last messages with a measured quantity of these entities [m]; 0 for none."""
    out: I64 = np.zeros(len(index), np.int64)
    of_row: Any = column.partition.group_of_row
    groups: dict[int, list[int]] = {}
    for signal in measured(column):
        groups.setdefault(int(of_row[signal.row]), []).append(signal.row)
    for group, rows in groups.items():
        gave: Bool = np.zeros(len(index), np.bool_)
        for row in rows:
            gave |= column.quality[row, index] != MISSING
            if gave.all():
                break
        np.maximum(out, np.where(gave, column.t_ns[group, index], 0), out=out)
    return out
