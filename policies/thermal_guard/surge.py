"""Surge: GPUs that heat faster than coolant at its usual flow allows, detected in three readings.

With a step of the load, T + tau dT/dt is where it will settle, and that lies inside the limit. What would
settle beyond the limit even with a short tau has lost its coolant, or is about to be too hot in any case; no
flow meter enters it. Two such GPUs of a rack send all of its GPUs to their lowest caps, seconds before the
guard would: neighbours that still have coolant leave theirs to the others. It ends no work, so three readings
are enough. In air a step of the load warms a chip within seconds and its heat sink within a minute, which
looks alike, and no air stops within seconds: air-cooled racks are left to the guard.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.thermal_guard.rise import BEYOND_K, LOST_S, MARGIN_K, NOISE_K, SIGMAS, STEP_K, TEMP, reading_ns
from twin.catalogue import F64, I32, NS
from twin.contracts import Memory, View, mask_index
from twin.telemetry import GOOD

POWER = "gpu.power_w"
TIMES, TEMPS, POWERS = ("r0_ns", "r1_ns", "r2_ns"), ("r0_c", "r1_c", "r2_c"), ("r0_w", "r1_w", "r2_w")
WITNESSES = 2  # of a rack
TAU_SHARE = 0.7  # of the design's time constant: the shortest that a plate may have; source: estimate
# A chip is some kelvins ahead of its plate for two seconds after its power has risen: powers of three
# readings that differ by more are a step of the load; source: estimate
STEADY_PU = 0.8


@dataclass(frozen=True, slots=True)
class Surge:
    """The GPUs `gpu` [k] that bear witness, their rate, room to the shutdown and greatest power meanwhile;
    `capped`: all GPUs of their racks."""

    gpu: I32
    rate: F64
    room_k: F64
    drawn_w: F64
    capped: I32


def surge(view: View, memory: Memory) -> tuple[Surge, Memory]:
    """The surge of all GPUs, and the last three readings of each as they are now."""
    kept = _readings(view, memory)
    t0, t1, t2 = (kept[name] for name in TIMES)
    y0, y1, y2 = (kept[name] for name in TEMPS)
    limit, site = view.limit(TEMP), view.site
    # Most GPUs do not warm up at all: nothing is worked out of them
    at = mask_index((y0 > y1) & (y1 > y2) & (t2 > 0) & (view.now_ns - t2 <= round(LOST_S * NS)))
    at = at[site.design.liquid[site.rack_of_gpu[at]]]
    if limit is None or not len(at):
        none = np.zeros(0)
        return Surge(np.zeros(0, np.int32), none, none, none, np.zeros(0, np.int32)), kept
    rack = site.rack_of_gpu[at]
    temp_c, span_s = y0[at].astype(np.float64), (t0 - t2)[at] / NS
    rate = (temp_c - y2[at]) / span_s
    doubt = (SIGMAS * NOISE_K * np.sqrt(2.0) + 0.5 * STEP_K) / span_s
    # One jump is no rise: both of its parts count
    parts = np.minimum((y0 - y1)[at] / (t0 - t1)[at], (y1 - y2)[at] / (t1 - t2)[at]) * NS
    least = np.minimum(rate - doubt, parts)
    shutdown_c = site.design.gpu_shutdown_c[rack]
    settles_c = temp_c + TAU_SHARE * site.design.gpu_tau_s[rack] * least
    powers = np.stack([kept[name][at] for name in POWERS])
    bears = (least > 0.0) & (settles_c >= limit.max[at]) & (temp_c <= shutdown_c + BEYOND_K)
    bears &= ~(powers.min(axis=0) < STEADY_PU * powers.max(axis=0))
    bears &= (np.bincount(rack[bears], minlength=site.sizes["rack"]) >= WITNESSES)[rack]
    drawn_w = powers.max(axis=0)[bears].astype(np.float64)
    starved = np.zeros(site.sizes["rack"], np.bool_)
    starved[rack[bears]] = True
    return Surge(
        at[bears],
        rate[bears],
        (shutdown_c - MARGIN_K - temp_c)[bears],
        drawn_w,
        mask_index(starved[site.rack_of_gpu]),
    ), kept


def _readings(view: View, memory: Memory) -> Memory:
    """The last three readings of each GPU, the newest first."""
    every = np.arange(view.site.sizes["gpu"], dtype=np.int32)
    read_ns = reading_ns(view, every)
    fresh = (read_ns > memory[TIMES[0]]) & (view.quality(TEMP) == GOOD)
    now = (read_ns, view.value(TEMP), view.believed(POWER))
    every_one = bool(fresh.all())
    out: Memory = {}
    for (newest, middle, oldest), value in zip((TIMES, TEMPS, POWERS), now, strict=True):
        columns = (value, memory[newest], memory[middle])
        for name, new in zip((newest, middle, oldest), columns, strict=True):
            out[name] = new if every_one else np.where(fresh, new, memory[name])
    return out
