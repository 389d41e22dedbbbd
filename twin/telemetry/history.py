"""History: a ring of past values for the signals that a plug-in declares to need, and for no others.

Memory is fixed when the site is known. Decides nothing.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F32, NS, ConfigError, Signal, find_signal
from twin.telemetry.state import State


class Ring:
    """The last values of one signal of all entities, at most one column per `step_s`. [n_slot, n] float32."""

    def __init__(self, signal: Signal, n: int, length_s: float, step_s: float) -> None:
        self.signal, self.step_s = signal, step_s
        slots = max(2, int(np.ceil(length_s / step_s)) + 1)
        self.values = np.full((slots, n), np.nan, np.float32)
        self.t_ns = np.zeros(slots, np.int64)
        self.at = -1
        self.filled = 0

    def push(self, values: F32, now_ns: int) -> None:
        """Keep this column if a step has passed since the last."""
        if self.filled and now_ns - self.t_ns[self.at] < self.step_s * NS - NS // 1000:
            return
        self.at = (self.at + 1) % len(self.t_ns)
        self.values[self.at], self.t_ns[self.at] = values, now_ns
        self.filled = min(self.filled + 1, len(self.t_ns))

    def ordered(self) -> tuple[np.ndarray, F32]:
        """Return (instants, values [n_kept, n]), oldest first."""
        order = (self.at - np.arange(self.filled)[::-1]) % len(self.t_ns)
        return self.t_ns[order], self.values[order]


class SignalHistory:
    """Rings by signal key."""

    def __init__(self, declared_s: dict[str, float], sizes: dict[str, int], step_s: float = 1.0) -> None:
        self.rings: dict[str, Ring] = {}
        for key in sorted(declared_s):
            signal = find_signal(key)
            if signal is None or signal.kind == "counter":
                raise ConfigError(f"history_s.{key}: expected a gauge or state of the catalogue")
            step = max(step_s, min(signal.period_s, declared_s[key] / 60))
            self.rings[key] = Ring(signal, sizes.get(signal.table, 0), declared_s[key], step)

    def forget(self, table: str, entity: int) -> None:
        """Clear the history of a replaced device."""
        for ring in self.rings.values():
            if ring.signal.table == table:
                ring.values[:, entity] = np.nan

    def push(self, state: State) -> None:
        """Push the current column of each declared signal; values not known to be good are NaN."""
        for ring in self.rings.values():
            table = state.tables[ring.signal.table]
            value = table.value[ring.signal.row]
            if table.bad_count[ring.signal.row]:
                value = np.where(table.quality[ring.signal.row] == 0, value, np.float32(np.nan))
            ring.push(value, state.now_ns)
