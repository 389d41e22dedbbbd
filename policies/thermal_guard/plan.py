"""Thermal plan: seconds until GPUs overheat at each power, from the heat that they store.

C dT/dt = P - G (T - Tc). Whatever the coolant does, another power changes the rate by its difference over C.
So one measured rate shows how fast a GPU warms up at its lowest cap, or with its clock locked at its lowest.
C comes from the design and may be off by a share; where that decides, the end that spares the node counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twin.catalogue import F64, I32, Bool
from twin.contracts import View

CAP, LOCK = "gpu.power_cap_w", "gpu.clock_lock_mhz"
# A plate holds 150 to 300 J/K (domain.md B), a profile names its own; source: estimate
CAPACITY_SPREAD = 0.3
# Dynamic power over the clock, f V(f)^2: 2.5 to 3, and 1 below the lowest voltage; source: estimate
CLOCK_EXPONENT = 2.0
LEAST_SAVED_W = 20.0  # below, a lock is no step of its own; source: estimate


@dataclass(frozen=True, slots=True)
class ThermalPlan:
    """Of some GPUs [k]: heat capacity J/K, and the power of each at its lowest cap and with its clock locked;
    whether its clock can be locked, by word of its agent, and whether it is."""

    capacity_j_per_k: F64
    low_w: F64
    locked_w: F64
    lockable: Bool
    locked: Bool

    @property
    def lock_helps(self) -> Bool:
        """GPUs that draw less with a locked clock than at their lowest cap."""
        return self.low_w - self.locked_w >= LEAST_SAVED_W


def plan_of(view: View, gpu: I32) -> ThermalPlan:
    """The plan of some GPUs, by their design and envelopes. NaN where no profile says."""
    d, rack = view.site.design, view.site.rack_of_gpu[gpu]
    cap, lock = view.envelope(CAP), view.envelope(LOCK)
    idle_w, low_mhz = d.gpu_idle_w[rack], lock.low[gpu]
    low_w = np.fmax(cap.low[gpu], idle_w)
    clock = low_mhz / lock.high[gpu]
    least_w = idle_w + (d.gpu_max_w[rack] - idle_w) * clock**CLOCK_EXPONENT
    read_mhz = view.readback(LOCK)[gpu]
    return ThermalPlan(
        capacity_j_per_k=d.gpu_tau_s[rack] / d.gpu_resistance_k_per_w[rack],
        low_w=low_w,
        locked_w=np.fmin(least_w, low_w),
        lockable=np.isfinite(low_mhz) & np.isfinite(read_mhz),
        locked=read_mhz <= low_mhz + lock.deadband,
    )


def rate_at(rate: F64, drawn_w: F64, power_w: F64, capacity_j_per_k: F64) -> F64:
    """K/s at `power_w`, of what warms up by `rate` while it draws `drawn_w`."""
    return rate - (drawn_w - power_w) / capacity_j_per_k


def seconds(room_k: F64, rate: F64) -> F64:
    """Seconds until `room_k` is used up; inf where nothing warms up or the rate is unknown."""
    warms = rate > 0.0
    left_s: F64 = np.full(len(rate), np.inf)
    np.divide(np.maximum(room_k, 0.0), rate, out=left_s, where=warms)
    return left_s
