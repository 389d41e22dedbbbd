"""thermal_guard: keeps GPUs inside their thermal limits by lowering their power caps, on worst-case margins.

Judges every GPU by how hot it may be by now, not by its last reading: silence drifts hot. Between the guard
and the limit the cap falls in proportion, at the limit to the device's minimum; a rack whose coolant is lost
or too hot pulls all of its GPUs down. It only narrows from above; raising again is left to the slew limit.
May import contracts; reads the view, touches nothing.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from twin.contracts import Columns, Memory, Proposal, View, mask_index
from twin.frame import F64

CONTROL = "gpu.power_cap_w"
# Signals of a GPU and of its rack that can pull a cap down; a profile's limits say where.
GPU_KEYS = ("gpu.temp_c", "gpu.hbm_temp_c", "gpu.thermal_margin_k")
RACK_KEYS = ("rack.supply_temp_c", "rack.return_temp_c", "rack.flow_lpm")
# A cap is let go after this long below the guard, so that a temperature at the edge does not toggle it.
RELEASE_S = 60.0


def strain(worst: F64, guard: F64, limit: F64) -> F64:
    """0 at or inside the guard, 1 at or beyond the limit, linear between; 0 where something is unknown.

    Works for either direction: a limit below its guard (flow, margin) strains downwards.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (worst - guard) / (limit - guard)
    share = np.where(worst == limit, 1.0, share)  # also where guard and limit are one
    return np.clip(np.nan_to_num(share, nan=0.0, posinf=1.0, neginf=0.0), 0.0, 1.0)


class ThermalGuard:
    """Proposes upper bounds on GPU power caps."""

    name: ClassVar[str] = "thermal_guard"
    controls: ClassVar[tuple[str, ...]] = (CONTROL,)
    rank: ClassVar[int] = 0
    period_s: ClassVar[float] = 1.0
    urgent: ClassVar[bool] = True
    memory: ClassVar[Columns | None] = Columns("gpu", {"until_ns": "i8", "cap_w": "f8"})

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Caps for the GPUs under strain, and for those that were until a minute ago."""
        n = view.site.sizes["gpu"]
        if n == 0:
            return [], memory
        pull, cause = self._pull(view)
        envelope = view.envelope(CONTROL)
        cap_w = envelope.high - pull * (envelope.high - envelope.low)
        hot = (pull > 0) & np.isfinite(cap_w)
        holding = (memory["until_ns"] > view.now_ns) & np.isfinite(envelope.low)
        if not hot.any() and not holding.any():
            return [], memory
        # While it holds, the lowest cap of the episode rests: no pumping around the guard.
        # The envelope may have moved since, with a changed site.
        held_w = np.where(holding, np.clip(memory["cap_w"], envelope.low, envelope.high), np.inf)
        cap_w = np.where(hot, np.minimum(cap_w, held_w), held_w)
        until_ns = np.where(hot, view.now_ns + round(RELEASE_S * 1e9), memory["until_ns"])
        active = hot | holding
        proposals = []
        for code, key in enumerate((*GPU_KEYS, *RACK_KEYS, "")):
            mask = active & (np.where(hot, cause, len(GPU_KEYS) + len(RACK_KEYS)) == code)
            index = mask_index(mask)
            if len(index):
                why = (
                    f"worst-case {key} beyond its guard"
                    if key
                    else f"was beyond a guard less than {RELEASE_S:.0f} s ago"
                )
                hi = cap_w[index]
                proposals.append(Proposal(CONTROL, index, envelope.low[index], hi, hi.copy(), why))
        cap_kept = np.where(active, np.where(np.isfinite(cap_w), cap_w, 0.0), 0.0)
        return proposals, {"until_ns": np.where(active, until_ns, 0).astype(np.int64), "cap_w": cap_kept}

    @staticmethod
    def _pull(view: View) -> tuple[F64, np.ndarray]:
        """(strain per GPU [n], index of the signal that strains it most)."""
        n = view.site.sizes["gpu"]
        pull, cause = np.zeros(n), np.zeros(n, np.int32)
        for code, key in enumerate((*GPU_KEYS, *RACK_KEYS)):
            limit = view.limit(key)
            if limit is None:
                continue
            worst = view.worst(key)
            # Nearly all are inside their guard nearly always: only the others are worked out.
            with np.errstate(invalid="ignore"):
                beyond = np.where(limit.max > limit.guard, worst > limit.guard, worst < limit.guard)
            at = np.flatnonzero(beyond)
            if len(at) == 0:
                continue
            s = strain(worst[at].astype(np.float64), limit.guard[at], limit.max[at])
            if key in RACK_KEYS:
                of_rack = np.zeros(len(worst))
                of_rack[at] = s
                s = of_rack[view.site.rack_of_gpu]
                at = np.flatnonzero(s)
                s = s[at]
            stronger = s > pull[at]
            pull[at[stronger]], cause[at[stronger]] = s[stronger], code
        return pull, cause
