"""Standby: the nodes that are off on purpose, as their scheduler put them to sleep or wakes them.

What a scheduler last reported of a node counts, however long ago, unless the node's GPUs report again. Once
it reports that it does not know, nothing counts; nor does sleep of WAKE_S or more while GPUs report. A node
that is woken and not ready within WAKE_S is off on purpose no longer: from then on it is judged like any
other.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import I64, NS, TABLES, Bool
from twin.telemetry import GOOD, MISSING, EntityState, State, column

CONTROL, SIGNAL = "node.standby", "node.standby_state"
READY, WAKING, ASLEEP = range(3)
# Until a node that is woken is back: servers with eight GPUs test memory and train links for 5 to 10 min.
# source: estimate
WAKE_S = 900.0
# Controls of the node's own agent; the scheduler and the board's controller answer while it sleeps
BY_AGENT = ("node.power_cap_w",)


class Standby(EntityState):
    """`off` [n]: silent on purpose; `woken_ns`, `asleep_ns` [n]: since when a node wakes, sleeps; 0 = not."""

    off: Bool = column("node", "?")
    woken_ns: I64 = column("node", "i8")
    asleep_ns: I64 = column("node", "i8")

    def update(self, state: State, node_of_gpu: np.ndarray) -> bool:
        """Take in the present state. Return True if other nodes than before are off on purpose."""
        table, signal = state.tables["node"], TABLES["node"].by_name["standby_state"]
        if not table.ever_good(signal.row):
            return False
        value = table.value[signal.row]
        waking, asleep, wake_ns = value == WAKING, value == ASLEEP, round(WAKE_S * NS)
        self.woken_ns = np.where(waking, np.where(self.woken_ns > 0, self.woken_ns, state.now_ns), 0)
        self.asleep_ns = np.where(asleep, np.where(self.asleep_ns > 0, self.asleep_ns, state.now_ns), 0)
        off: Bool = asleep | (waking & (state.now_ns - self.woken_ns < wake_ns))
        off &= table.quality[signal.row] != MISSING
        if off.any():
            long = asleep & (state.now_ns - self.asleep_ns >= wake_ns)  # it has had the time to go down
            stale = off & (long | (table.quality_of(signal, state.now_ns) != GOOD))
            if stale.any():
                off &= ~(stale & _reporting(state, node_of_gpu, len(off)))
        if np.array_equal(off, self.off):
            return False
        self.off = off
        return True


def _reporting(state: State, node_of_gpu: np.ndarray, n: int) -> Bool:
    """Nodes with a GPU whose power is read now [n]."""
    power = TABLES["gpu"].by_name["power_w"]
    out: Bool = np.zeros(n, np.bool_)
    out[node_of_gpu[state.tables["gpu"].quality_of(power, state.now_ns) == GOOD]] = True
    return out
