"""Account of `idle_power`: the expected savings of sleep, the measured ones, and late wake-ups."""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.idle_power.demand import DemandState
from policies.idle_power.nodes import FOUND, SLEEPING, WOKEN, NodeRoster
from policies.idle_power.wake import BOOT_PU, idle_draw_w
from twin.catalogue import F64
from twin.contracts import Memory, View
from twin.telemetry import GOOD, ColumnSpec

# Of a node that sleeps: its board's controller and network cards on auxiliary power; source: estimate
STANDBY_W = 60.0
COLUMNS = {
    name: ColumnSpec("f8")
    for name in ("expected_j", "saved_j", "boot_j", "measured_s", "slept_s", "counted", "late")
}


def expected_w(view: View, memory: Memory) -> F64:
    """Power that the sleep of each node is expected to save [n_node]; 0 where it does not sleep."""
    saved_w = np.maximum(idle_draw_w(view, memory) - STANDBY_W, 0.0)
    return np.where(memory["phase"] == SLEEPING, saved_w, 0.0)


def count_rise(memory: Memory, roster: NodeRoster, state: DemandState) -> None:
    """Count a rise of demand; it is late where more wait than are ready, and sleepers could have taken them.
    Replaces columns of `memory`."""
    off = np.isin(memory["phase"], (SLEEPING, WOKEN, FOUND))
    ready = float(roster.gpus[roster.serves & roster.idle & ~off].sum())
    memory["counted"] = memory["counted"] + 1.0
    memory["late"] = memory["late"] + float(bool(off.any()) and state.pending > ready)


def settle(view: View, memory: Memory, dt_s: float) -> None:
    """Count the time since the last look. Replaces columns of `memory`.

    What a node would draw idle, less what its meter reads while it sleeps and starts; where that is not
    measured, less what is expected of it.
    """
    asleep, woken = memory["phase"] == SLEEPING, memory["phase"] == WOKEN
    idle_w, expected = idle_draw_w(view, memory), expected_w(view, memory)
    measured = (view.quality("node.power_w") == GOOD) & np.isfinite(memory["idle_w"])
    less_w = np.where(measured, idle_w - view.believed("node.power_w"), expected)
    start_w = np.where(measured, -less_w, (BOOT_PU - 1.0) * idle_w)[woken].sum()
    grown = {
        "expected_j": expected.sum() * dt_s,
        "saved_j": (less_w[asleep].sum() - start_w) * dt_s,
        "boot_j": start_w * dt_s,
        "measured_s": np.count_nonzero(measured & asleep) * dt_s,
        "slept_s": np.count_nonzero(asleep) * dt_s,
    }
    for name, value in grown.items():
        memory[name] = memory[name] + np.nan_to_num(value)


def account_of(memory: Memory) -> dict[str, Any]:
    """The account so far, as plain data."""
    slept_s = float(memory["slept_s"][0])
    return {
        "sleeping": int(np.count_nonzero(memory["phase"] == SLEEPING)),
        "expected_kwh": round(float(memory["expected_j"][0]) / 3.6e6, 3),
        "saved_kwh": round(float(memory["saved_j"][0]) / 3.6e6, 3),
        "starts_kwh": round(float(memory["boot_j"][0]) / 3.6e6, 3),
        "measured_pu": round(float(memory["measured_s"][0]) / slept_s, 3) if slept_s else 0.0,
        "rises": int(memory["counted"][0]),
        "late": int(memory["late"][0]),
    }
