"""Switches of nodes: which ones are off by command, at once or once their system has stopped.

A system that stops ends its work first, takes seconds to unload, and then cuts its own power.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F64, Bool
from twin.plant.truth import Truth

ON, STOPPING, OFF = 0, 1, 2  # as the states of node.power_state
# From the order to stop until a node's power is cut; source: estimate, services of a node end within the 90 s
# that systemd gives each, mostly sooner
SHUTDOWN_S = (12.0, 45.0)


class NodeSwitches:
    """The switch of each node [n_node], and how long its system takes to stop."""

    def __init__(self, n: int, seed: int) -> None:
        self.shutdown_s = np.random.default_rng((seed, 0x0FF)).uniform(*SHUTDOWN_S, n)
        self.off_s = np.full(n, np.inf)  # plant's time from which it is off
        self.off: Bool = np.zeros(n, np.bool_)
        self.stopping: Bool = np.zeros(n, np.bool_)
        self._moved = False

    def obey(self, value: F64, time_s: float) -> None:
        """Take commands [n], NaN = none. A shutdown that is under way is not begun anew."""
        self.off_s = np.where(value == OFF, np.minimum(self.off_s, time_s), self.off_s)
        begun = (value == STOPPING) & np.isinf(self.off_s)
        self.off_s = np.where(begun, time_s + self.shutdown_s, self.off_s)
        self.off_s = np.where(value == ON, np.inf, self.off_s)
        self._moved = True

    def step(self, t: Truth) -> bool:
        """Move to the truth's time; whether any node went off, on, or began to stop."""
        if not self._moved:
            return False
        off, wait = self.off_s <= t.time_s, np.isfinite(self.off_s)
        stopping = wait & ~off
        same = np.array_equal(off, self.off) and np.array_equal(stopping, self.stopping)
        self.off, self.stopping, self._moved = off, stopping, bool(stopping.any())
        t.node_power_level[:] = np.where(off, OFF, np.where(stopping, STOPPING, ON))
        return not same
