"""thermal_guard: keeps GPUs inside their thermal limits by lowering their power caps, on worst-case margins.

Judges every GPU by how hot it may be by now, not by its last reading: silence drifts hot. Between the guard
and the limit the cap falls in proportion, at the limit to the device's minimum; a rack whose coolant is lost
or too hot pulls all of its GPUs down. It only narrows from above; raising again is left to the slew limit.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from twin.catalogue import F64
from twin.contracts import Columns, Memory, Proposal, View, mask_index
from twin.site import Envelope

CONTROL = "gpu.power_cap_w"
# Signals of a GPU and of its rack that can pull a cap down; a profile's limits say where.
GPU_KEYS = ("gpu.temp_c", "gpu.hbm_temp_c", "gpu.thermal_margin_k")
RACK_KEYS = ("rack.supply_temp_c", "rack.return_temp_c", "rack.flow_lpm")
KEYS = (*GPU_KEYS, *RACK_KEYS)
# A cap is let go after this long below the guard, so that a temperature at the edge does not toggle it.
RELEASE_S = 60.0
# Two for each key, measured and feared, and one for the time after
REASONS = (
    *(f"{key} {how} beyond its guard" for key in KEYS for how in ("is", "was not heard and may be")),
    f"was beyond a guard less than {RELEASE_S:.0f} s ago",
)


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
    memory: ClassVar[Columns | None] = Columns(gpu={"until_ns": "i8", "cap_w": "f8"})

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        """Caps for the GPUs under strain, and for those that were until a minute ago."""
        n = view.site.sizes["gpu"]
        if n == 0:
            return [], memory
        envelope = view.envelope(CONTROL)
        cap_w, cause = self._caps(view, envelope)
        hot = np.isfinite(cap_w)
        holding = (memory["until_ns"] > view.now_ns) & np.isfinite(envelope.low)
        if not hot.any() and not holding.any():
            return [], memory
        # While it holds, the lowest cap of the episode rests: no pumping around the guard.
        # The envelope may have moved since, with a changed site.
        held_w = np.where(holding, np.clip(memory["cap_w"], envelope.low, envelope.high), np.inf)
        cause = np.where(hot, cause, len(REASONS) - 1)
        cap_w = np.where(hot, np.minimum(cap_w, held_w), held_w)
        until_ns = np.where(hot, view.now_ns + round(RELEASE_S * 1e9), memory["until_ns"])
        active = hot | holding
        proposals = []
        for code, why in enumerate(REASONS):
            index = mask_index(active & (cause == code))
            if len(index):
                # No wish: a GPU that stands below its cap is left there.
                want = np.full(len(index), np.nan)
                proposals.append(Proposal(CONTROL, index, envelope.low[index], cap_w[index], want, why))
        kept_w = np.where(active, cap_w, 0.0)
        return proposals, {"until_ns": np.where(active, until_ns, 0).astype(np.int64), "cap_w": kept_w}

    @staticmethod
    def _caps(view: View, envelope: Envelope) -> tuple[F64, np.ndarray]:
        """(cap per GPU [n], inf for none; index of its reason).

        What was read pulls a cap down to the device's minimum. What is only feared, because a sensor fell
        silent, pulls it down to the safe value and no lower: silence alone is not heat.
        """
        n = view.site.sizes["gpu"]
        cap_w, cause = np.full(n, np.inf), np.zeros(n, np.int32)
        for number, key in enumerate(KEYS):
            limit = view.limit(key)
            if limit is None:
                continue
            # Nearly all are inside their guard nearly always: only the others are worked out.
            at = view.beyond(key)
            if len(at) == 0:
                continue
            worst = view.worst(key)
            guard, top = limit.guard[at], limit.max[at]
            for code, values in ((2 * number, view.value(key)), (2 * number + 1, worst)):
                pull = strain(values[at].astype(np.float64), guard, top)
                gpu = at
                if key in RACK_KEYS:
                    of_rack = np.zeros(len(worst))
                    of_rack[at] = pull
                    pull = of_rack[view.site.rack_of_gpu]
                    gpu = mask_index(pull > 0)
                    pull = pull[gpu]
                floor_w = envelope.low[gpu] if code % 2 == 0 else envelope.safe[gpu]
                high_w = envelope.high[gpu]
                # Rounding must not carry the cap out of the envelope.
                wanted = np.clip(high_w - pull * (high_w - floor_w), envelope.low[gpu], high_w)
                lower = (pull > 0) & (wanted < cap_w[gpu])
                cap_w[gpu[lower]], cause[gpu[lower]] = wanted[lower], code
        return cap_w, cause
