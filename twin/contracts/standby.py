"""Standby: the nodes that are off on purpose, as their scheduler put them to sleep or wakes them.

What a node last reported of itself counts, however long ago, unless its GPUs report again. A node that is
woken and not ready within WAKE_S is off on purpose no longer: from then on it is judged like any other.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import I64, NS, TABLES, Bool
from twin.telemetry import GOOD, EntityState, State, column

CONTROL, SIGNAL = "node.standby", "node.standby_state"
READY, WAKING, ASLEEP = range(3)
# Until a node that is woken is back: servers with eight GPUs test memory and train links for 5 to 10 min.
# source: estimate
WAKE_S = 900.0
# What the node's own agent carries out; the scheduler and the board's controller answer while it sleeps
BY_AGENT = ("node.power_cap_w",)


class Standby(EntityState):
    """`off` [n]: silent on purpose; `woken_ns` [n]: since when a node is waking, 0 = it is not."""

    off: Bool = column("node", "?")
    woken_ns: I64 = column("node", "i8")

    def update(self, state: State, node_of_gpu: np.ndarray) -> bool:
        """Take in the present state; whether other nodes are off on purpose than before."""
        table, signal = state.tables["node"], TABLES["node"].by_name["standby_state"]
        if not table.ever_good(signal.row):
            return False
        value = table.value[signal.row]
        waking = value == WAKING
        self.woken_ns = np.where(waking, np.where(self.woken_ns > 0, self.woken_ns, state.now_ns), 0)
        off: Bool = (value == ASLEEP) | (waking & (state.now_ns - self.woken_ns < round(WAKE_S * NS)))
        if off.any():
            stale = off & (table.quality_of(signal, state.now_ns) != GOOD)
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
