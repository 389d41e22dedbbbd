"""Actuators of a plant: the commands in force on its devices, their acknowledgements and their expiry.

A lease runs for its length from the moment its command arrives, as in the node agents, so that no two clocks
need to agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from twin.catalogue import F64, NS, Bool, find_control
from twin.contracts import CommandBatch
from twin.plant.truth import Truth
from twin.site import Site
from twin.telemetry import CommandAcked

OBEYED = (
    "gpu.power_cap_w", "gpu.clock_lock_mhz", "node.power_cap_w", "cdu.supply_temp_target_c",
    "cdu.diff_pressure_target_pa",
    "rack.liquid_isolation", "rack.electrical_isolation", "node.service_level", "node.power_state",
    "node.standby",
    "job.checkpoint_since_s", "job.checkpoint_interval_s",
)  # fmt: skip
SLOW = ("node.standby",)  # answered by its read-back, once it is so
MAX_UNASKED = 10_000  # batches whose answers nobody has asked for; older ones are lost
ON, STOPPING, OFF = 0, 1, 2  # as the states of node.power_state
# From the order to stop until a node's power is cut; source: estimate, services of a node end within the 90 s
# that systemd gives each, mostly sooner
SHUTDOWN_S = (12.0, 45.0)
READY, WAKING, ASLEEP = 0, 1, 2  # as the states of node.standby
WAKE_S = (240.0, 480.0)  # from the order to wake until a node takes jobs; source: estimate
# Of a node that sleeps: its board's controller and network cards on auxiliary power; source: estimate
STANDBY_W = 60.0
# Of a node that starts, over its idle power: fans at full speed. The supplies of a node that sleeps hold
# their charge, so that nothing rushes in; source: estimate
BOOT_PU = 1.25


class Actuators:
    """Values in force per control [n], NaN = never commanded, and their expiry (plant's time)."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.value: dict[str, F64] = {}
        self.until_s: dict[str, F64] = {}
        self.next_s = np.inf  # when the first lease ends
        self.epoch = -1
        self._answers: deque[tuple[CommandBatch, str]] = deque(maxlen=MAX_UNASKED)

    def take(self, commands: Sequence[CommandBatch], time_s: float) -> list[str]:
        """Apply commands; returns the controls with a new value. Refuses commands of a deposed daemon."""
        new: list[str] = []
        for batch in commands:
            control = find_control(batch.control)
            if control is None or batch.control not in OBEYED:
                self._answers.append((batch, "failed"))
                continue
            if batch.epoch < self.epoch:
                self._answers.append((batch, "failed"))
                continue
            self.epoch = batch.epoch
            n = self.site.sizes[control.table]
            value = self.value.setdefault(batch.control, np.full(n, np.nan))
            until = self.until_s.setdefault(batch.control, np.full(n, np.inf))
            value[batch.index] = batch.value
            length_s = (batch.expires_ns - batch.issued_ns) / NS
            ends = batch.final or control.on_expiry == "keep"
            until[batch.index] = np.inf if ends else time_s + length_s
            if not ends:
                self.next_s = min(self.next_s, time_s + length_s)
            if not batch.renewal and not batch.final and batch.control not in SLOW:
                self._answers.append((batch, "done"))
            if batch.control not in new:
                new.append(batch.control)
        return new

    def lapse(self, time_s: float) -> list[str]:
        """End what has run out: the device's own value where the control gives it back, else the safe value
        of the site; where there is none, what was there stays."""
        if time_s < self.next_s:
            return []
        changed: list[str] = []
        self.next_s = np.inf
        for key, until in self.until_s.items():
            over = until <= time_s
            if over.any():
                safe = self.site.envelopes[key].safe[over]
                becomes = np.where(np.isfinite(safe), safe, self.value[key][over])
                control = find_control(key)
                if control is not None and control.on_expiry == "restore":
                    becomes[:] = np.nan
                self.value[key][over] = becomes
                until[over] = np.inf
                changed.append(key)
            self.next_s = min(self.next_s, float(until.min(initial=np.inf)))
        return changed

    def get(self, control: str) -> F64 | None:
        """Return the values in force [n]; None if none was ever commanded."""
        return self.value.get(control)

    def answers(self) -> list[CommandAcked]:
        """Return the acknowledgements since the last call."""
        out: list[CommandAcked] = []
        while self._answers:
            batch, state = self._answers.popleft()
            table = batch.control.partition(".")[0]
            for k, entity in enumerate(batch.index.tolist()):
                out.append(
                    CommandAcked(
                        control=batch.control,
                        name=self.site.name(table, entity),
                        generation=int(batch.generation[k]),
                        command=f"{batch.epoch}-{batch.command[k]}",
                        state="done" if state == "done" else "failed",
                        detail="" if state == "done" else "not accepted here, or of an older epoch",
                    )
                )
        return out


class NodeSwitches:
    """The switch of each node [n_node], and how long its system takes to stop.

    A system that stops ends its work first, takes seconds to unload, and then cuts its own power.
    """

    def __init__(self, n: int, seed: int) -> None:
        self.shutdown_s = np.random.default_rng((seed, 0x0FF)).uniform(*SHUTDOWN_S, n)
        self.off_s = np.full(n, np.inf)  # plant's time from which it is off
        self.off: Bool = np.zeros(n, np.bool_)
        self.stopping: Bool = np.zeros(n, np.bool_)
        self._moved = False

    def obey(self, value: F64, time_s: float) -> None:
        """Apply commands [n], NaN = none. A shutdown in progress does not restart."""
        self.off_s = np.where(value == OFF, np.minimum(self.off_s, time_s), self.off_s)
        begun = (value == STOPPING) & np.isinf(self.off_s)
        self.off_s = np.where(begun, time_s + self.shutdown_s, self.off_s)
        self.off_s = np.where(value == ON, np.inf, self.off_s)
        self._moved = True

    def step(self, t: Truth) -> bool:
        """Advance to the truth's time; returns True if a node went off, on, or began to stop."""
        if not self._moved:
            return False
        off, wait = self.off_s <= t.time_s, np.isfinite(self.off_s)
        stopping = wait & ~off
        same = np.array_equal(off, self.off) and np.array_equal(stopping, self.stopping)
        self.off, self.stopping, self._moved = off, stopping, bool(stopping.any())
        t.node_power_level[:] = np.where(off, OFF, np.where(stopping, STOPPING, ON))
        return not same


class NodeStandby:
    """Standby of each node [n_node]: its scheduler puts it to sleep and wakes it."""

    def __init__(self, site: Site, seed: int) -> None:
        n, design, rack = site.sizes["node"], site.design, site.rack_of_node
        self.wake_s = np.random.default_rng((seed, 0xB007)).uniform(*WAKE_S, n)
        self.level = np.zeros(n, np.int64)
        self.ready_s = np.full(n, np.inf)  # plant's time at which it is ready
        idle_w = np.diff(site.gpu_start_of_node) * design.gpu_idle_w[rack]
        self.boot_w = BOOT_PU * np.nan_to_num(idle_w + (design.cpu_idle_w + design.node_other_w)[rack])

    def obey(self, value: F64, time_s: float) -> None:
        """Apply commands [n], NaN = none. A start in progress does not restart."""
        woken = (value == READY) & (self.level == ASLEEP)
        self.ready_s = np.where(woken, time_s + self.wake_s, self.ready_s)
        self.level = np.where(woken, WAKING, np.where(value == ASLEEP, ASLEEP, self.level))

    def step(self, t: Truth) -> bool:
        """Advance to the truth's time; returns True if a node fell asleep, began to start, or is ready."""
        self.level = np.where((self.level == WAKING) & (self.ready_s <= t.time_s), READY, self.level)
        if np.array_equal(self.level, t.node_standby_level):
            return False
        t.node_standby_level[:] = self.level
        return True

    def power_w(self) -> F64:
        """Return the power of the nodes that are not ready, W [n_node]."""
        return np.where(self.level == ASLEEP, STANDBY_W, np.where(self.level == WAKING, self.boot_w, 0.0))
