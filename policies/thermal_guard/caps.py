"""Caps against heat: lower the power cap of a GPU by its thermal margin and that of its rack, at worst case.

Every GPU counts with the temperature that it may have by now, not with its last reading: without readings it
drifts hot. Between the guard and the limit the cap falls in proportion, and at the limit it is the device's
minimum. A rack whose coolant is lost or too hot lowers the caps of all its GPUs, and so does a rack whose
GPUs surge, before any of them reaches its guard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from twin.catalogue import F64, I32, I64, NS, Bool
from twin.contracts import Memory, View
from twin.site import Envelope

CONTROL = "gpu.power_cap_w"
# Signals of a GPU and of its rack that can pull a cap down; a profile's limits say where.
GPU_KEYS = ("gpu.temp_c", "gpu.hbm_temp_c", "gpu.thermal_margin_k")
RACK_KEYS = ("rack.supply_temp_c", "rack.return_temp_c", "rack.flow_lpm")
KEYS = (*GPU_KEYS, *RACK_KEYS)
# A cap is let go after this long below the guard, so that a temperature at the edge does not toggle it.
RELEASE_S = 60.0
# Two for each key, measured and feared, one for the time after, one for GPUs that surge
REASONS = (
    *(f"{key} {how} beyond its guard" for key in KEYS for how in ("is", "is silent and may be")),
    f"was beyond a guard less than {RELEASE_S:.0f} s ago",
    "GPUs of its rack warm up faster than coolant at its usual flow allows",
)
# Of them, those that rest on the coolant of the rack alone
BY_COOLANT = range(2 * len(GPU_KEYS), 2 * len(KEYS))
AFTER, SURGE = len(REASONS) - 2, len(REASONS) - 1


def strain(worst: F64, guard: F64, limit: F64) -> F64:
    """0 at or inside the guard, 1 at or beyond the limit, linear between; 0 where something is unknown.

    Works for either direction: a limit below its guard (flow, margin) strains downwards.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (worst - guard) / (limit - guard)
    share = np.where(worst == limit, 1.0, share)  # also where guard and limit are one
    return np.clip(np.nan_to_num(share, nan=0.0, posinf=1.0, neginf=0.0), 0.0, 1.0)


class Pull(NamedTuple):
    """The caps to which one reason lowers some GPUs [k]; `reason` indexes REASONS."""

    reason: int
    gpu: I32
    cap_w: F64


@dataclass(frozen=True, slots=True)
class HeatCaps:
    """The GPUs that are capped now: `cap_w` inf for none, `reason` an index of REASONS, all [n_gpu].

    `until_ns`: the end of the cap if nothing strains the GPU until then; 0 where none is. `coolant`: nothing
    but readings of its rack's coolant has asked for the cap since the episode began.
    """

    active: Bool
    cap_w: F64
    reason: I64
    until_ns: I64
    coolant: Bool


def assess(view: View, memory: Memory, surging: I32) -> HeatCaps:
    """The caps of all GPUs now, the `surging` ones at their lowest; the memory that follows from it gives the
    same assessment again.

    While an episode lasts, its lowest cap rests: no pumping around the guard. Where a reading of the coolant
    alone began it, and others contradict that reading by now, it is over at once.
    """
    envelope = view.envelope(CONTROL)
    cap_w = np.full(len(envelope.low), np.inf)
    reason = np.full(len(cap_w), AFTER, np.int64)
    coolant = (memory["until_ns"] <= view.now_ns) | memory["coolant"].astype(np.bool_)
    for pull in (*_pulls(view, envelope), Pull(SURGE, surging, envelope.low[surging])):
        if pull.reason not in BY_COOLANT:
            coolant[pull.gpu] = False
        lower = pull.cap_w < cap_w[pull.gpu]
        cap_w[pull.gpu[lower]], reason[pull.gpu[lower]] = pull.cap_w[lower], pull.reason
    active = np.isfinite(cap_w)
    hot = np.flatnonzero(active)
    rests = memory["until_ns"] > view.now_ns
    if rests.any() and (refuted := _refuted(view)) is not None:
        rests &= ~(refuted[view.site.rack_of_gpu] & coolant)
    resting = np.flatnonzero(rests)
    resting = resting[np.isfinite(envelope.low[resting])]
    # The envelope may have moved since, with a changed site.
    resting_w = np.clip(memory["cap_w"][resting], envelope.low[resting], envelope.high[resting])
    cap_w[resting] = np.minimum(cap_w[resting], resting_w)
    active[resting] = True
    until_ns = np.zeros(len(cap_w), np.int64)
    until_ns[resting] = memory["until_ns"][resting]
    until_ns[hot] = view.now_ns + round(RELEASE_S * NS)
    return HeatCaps(active, cap_w, reason, until_ns, coolant & active)


def _refuted(view: View) -> Bool | None:
    """Return racks [n] whose coolant reads beyond a guard while other readings refute it; None for none."""
    out: Bool | None = None
    for key in RACK_KEYS:
        if (limit := view.limit(key)) is None:
            continue
        read, believed = view.value(key), view.believed(key)
        at = np.flatnonzero(read != believed)  # NaN is beyond no guard
        if len(at):
            guard, top = limit.guard[at], limit.max[at]
            beyond, is_so = (strain(x[at].astype(np.float64), guard, top) > 0 for x in (read, believed))
            out = np.zeros(len(read), np.bool_) if out is None else out
            out[at] |= beyond & ~is_so
    return out


def _pulls(view: View, envelope: Envelope) -> Iterator[Pull]:
    """Return the caps for each signal, measured values before worst cases.

    A measured value pulls a cap down to the device's minimum. A value that is only feared, because a sensor
    fell silent, pulls it down to the safe value and no lower: silence alone is not heat.
    """
    for number, key in enumerate(KEYS):
        limit = view.limit(key)
        # Nearly all are inside their guard nearly always: only the others are worked out.
        if limit is None or not len(at := view.beyond(key)):
            continue
        guard, top = limit.guard[at], limit.max[at]
        for reason, values in ((2 * number, view.believed(key)), (2 * number + 1, view.worst(key))):
            gpu, pull = at, strain(values[at].astype(np.float64), guard, top)
            if key in RACK_KEYS:
                of_rack = np.zeros(len(values))
                of_rack[at] = pull
                gpu = np.arange(len(envelope.low), dtype=np.int32)
                pull = of_rack[view.site.rack_of_gpu]
            gpu, pull = gpu[pull > 0], pull[pull > 0]
            floor_w = envelope.low[gpu] if reason % 2 == 0 else envelope.safe[gpu]
            high_w = envelope.high[gpu]
            # Rounding must not carry the cap out of the envelope.
            yield Pull(reason, gpu, np.clip(high_w - pull * (high_w - floor_w), envelope.low[gpu], high_w))
