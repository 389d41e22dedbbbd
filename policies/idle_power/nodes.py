"""Nodes of `idle_power`: nodes in service, nodes that may sleep, and the progress of each transition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.node_replacement import PLACEMENT, RESERVED, current_placement, unwell
from twin.catalogue import F64, I32, NS, Bool
from twin.contracts import ASLEEP, READY, WAKE_S, WAKING, Memory, View
from twin.telemetry import GOOD, ColumnSpec

CONTROL, SERVICE = "node.standby", "node.service_level"
# Phases of a node. One found asleep is no sleeper of ours: it is not asked to sleep on, and may be woken.
# One that came back is kept ready for a while.
AWAKE, ASKED, SLEEPING, WOKEN, FOUND, BACK = range(6)
PHASES = ("awake", "asked to sleep", "asleep", "woken", "found asleep", "came back")
ASKED_S = 900.0  # until a node that was asked to sleep does, or is left alone; source: estimate
REFUSED_S = 3600.0  # that a node which would not sleep is left alone; source: estimate

COLUMNS = {
    "phase": ColumnSpec("i1"),
    "phase_ns": ColumnSpec("i8"),  # since when
    "idle_ns": ColumnSpec("i8"),  # since when no job is on it; 0 = one is, or nobody knows
    "refused_ns": ColumnSpec("i8"),
    "idle_w": ColumnSpec("f8", np.nan),  # drawn before it slept
}


@dataclass(frozen=True, slots=True)
class NodeRoster:
    """Of each node [n]: `gpus`; `serves`: jobs may begin on it now, but for standby; `idle`: no job is on it;
    `standby`: as its scheduler reports now; NaN: it does not."""

    gpus: F64
    serves: Bool
    idle: Bool
    standby: F64
    may_sleep: Bool

    def ready_gpus(self, phase: np.ndarray) -> float:
        """Idle GPUs of nodes that are ready, or on their way back."""
        awake = np.isin(phase, (AWAKE, BACK)) & ~np.isin(self.standby, (WAKING, ASLEEP))
        return float(self.gpus[self.serves & self.idle & (awake | (phase == WOKEN))].sum())


def roster_of(view: View) -> NodeRoster:
    """The nodes as they are now."""
    site, n = view.site, view.site.sizes["node"]
    current = view.quality(f"{CONTROL}_state") == GOOD
    standby = np.where(current, view.readback(CONTROL), np.nan)
    level = np.fmax(view.readback(SERVICE), view.commanded(SERVICE))
    with np.errstate(invalid="ignore"):
        out = level >= 1.0
    work = view.maintenance("node", asleep=False)
    worked = np.zeros(n, np.bool_) if work is None else np.asarray(work)
    serves = ~out & ~worked & ~site.spare_node
    idle = view.jobs.job_of_node < 0
    known = (view.quality(f"{SERVICE}_state") == GOOD) & ~np.isnan(view.readback(SERVICE))
    kept = (current_placement(view) == RESERVED) | (view.commanded(PLACEMENT) == RESERVED)
    may = serves & idle & known & ~kept & (standby == READY) & ~unwell(view)
    if not view.jobs.known:
        may[:] = False
    else:
        may &= ~view.protected_nodes()
    return NodeRoster(np.diff(site.gpu_start_of_node).astype(np.float64), serves, idle, standby, may)


def follow(view: View, memory: Memory, roster: NodeRoster) -> None:
    """Move nodes on as their schedulers report. Replaces columns of `memory`."""
    now_ns, was = view.now_ns, memory["phase"]
    age_s = (now_ns - memory["phase_ns"]) / NS
    phase, standby, busy = was.copy(), roster.standby, ~roster.idle
    phase[(was == ASKED) & (standby == ASLEEP)] = SLEEPING
    refused = (was == ASKED) & (standby != ASLEEP) & (busy | (age_s > ASKED_S))
    # Its scheduler, or somebody else, wakes it
    taken = (was == SLEEPING) & (busy | (standby == READY) | (standby == WAKING))
    back = (was == WOKEN) & ((standby == READY) | busy)
    lost = (was == WOKEN) & ~back & (age_s > WAKE_S)
    gone = (was == FOUND) & (standby != ASLEEP)
    phase[refused | taken | lost | gone] = AWAKE
    phase[back] = BACK
    phase[np.isin(phase, (AWAKE, BACK)) & (standby == ASLEEP) & roster.serves & roster.idle] = FOUND
    if back.any():
        memory["wake_s"] = memory["wake_s"].copy()
        # The slowest counts, and is forgotten slowly
        slowest = min(float(age_s[back].max()), WAKE_S)  # where nobody looked for longer, nothing is learned
        memory["wake_s"][0] = max(slowest, 0.99 * float(memory["wake_s"][0]))
    memory["refused_ns"] = np.where(refused | lost, now_ns, memory["refused_ns"])
    memory["phase_ns"] = np.where(phase != was, now_ns, memory["phase_ns"])
    memory["phase"] = phase
    since = np.where(memory["idle_ns"] > 0, memory["idle_ns"], now_ns)
    memory["idle_ns"] = np.where(roster.idle & view.jobs.known, since, 0)
    resting = np.isin(phase, (AWAKE, BACK)) & roster.may_sleep & (view.quality("node.power_w") == GOOD)
    memory["idle_w"] = np.where(resting, view.believed("node.power_w"), memory["idle_w"])


def sleepable(view: View, memory: Memory, roster: NodeRoster, idle_s: float, awake_s: float) -> I32:
    """Nodes that may be asked to sleep, the best first.

    Racks of which most nodes sleep or may go first, so that whole racks sleep, and of these the fullest.
    """
    now_ns = view.now_ns
    rested = (memory["idle_ns"] > 0) & (now_ns - memory["idle_ns"] >= round(idle_s * NS))
    turned = (memory["phase_ns"] > 0) & (now_ns - memory["phase_ns"] < round(awake_s * NS))
    refused = (memory["refused_ns"] > 0) & (now_ns - memory["refused_ns"] < round(REFUSED_S * NS))
    may = roster.may_sleep & np.isin(memory["phase"], (AWAKE, BACK)) & rested & ~turned & ~refused
    at = np.flatnonzero(may).astype(np.int32)
    rack, n_rack = view.site.rack_of_node, view.site.sizes["rack"]
    off = may | np.isin(memory["phase"], (ASKED, SLEEPING, FOUND))
    awake = np.bincount(rack[~off], minlength=n_rack)[rack[at]]
    return at[np.lexsort((at, awake))]
