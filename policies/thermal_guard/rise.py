"""Rise: how fast GPUs warm up at their lowest caps, and the seconds that this leaves them.

A straight line is fitted to the latest readings of each GPU since its cap was read back at its lowest.
Nothing else enters: no flow, no power, no law of the plate, so none of these can mislead it. The rate that
counts is the least that the noise of the readings allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twin.catalogue import F64, I32, NS, Bool
from twin.contracts import Memory, View
from twin.telemetry import GOOD

CAP, TEMP = "gpu.power_cap_w", "gpu.temp_c"
COLUMNS = ("low_ns", "read_ns", "readings", "s_w", "s_t", "s_y", "s_tt", "s_ty")  # of the memory
# A cap is in force so long after it was read back: readings before are of another power; source: estimate
SETTLE_S = 1.0
MEMORY_S = 6.0  # of the fit: a reading counts 1/e after this
LOST_S = 35.0  # between two readings, above which the fit begins anew; the slowest exporters read each 30 s
FEWEST = 4  # readings of a fit
# 1 sigma of a reading: whole kelvins (0.29 K) and the noise of the sensor; source: estimate
NOISE_K = 0.5
SIGMAS = 3.0  # by which a rise must stand out: thousands of GPUs are judged every second
MARGIN_K = 2.0  # below the shutdown: what devices and sensors differ by
BEYOND_K = 1.0  # above its shutdown no GPU works: such a reading is wrong


@dataclass(frozen=True, slots=True)
class Rise:
    """Of the GPUs `gpu` [k]: seconds left (inf: none counted), and whether each bears witness: it was read,
    is hot, and warms up at its lowest cap beyond doubt."""

    gpu: I32
    left_s: F64
    rises: Bool


def rise(view: View, memory: Memory, gpu: I32) -> tuple[Rise, Memory]:
    """The rise of some GPUs, and the columns of the memory that follow from it."""
    # Most capped GPUs do not stand at their lowest: nothing is fitted, and the memory stays as it is
    envelope = view.envelope(CAP)
    low = view.readback(CAP)[gpu] <= envelope.low[gpu] + envelope.deadband
    gpu = gpu[low | (memory["low_ns"][gpu] > 0)]
    if not len(gpu):
        return Rise(gpu, np.zeros(0), np.zeros(0, np.bool_)), {name: memory[name] for name in COLUMNS}
    old = {name: memory[name][gpu] for name in COLUMNS}
    new = _fitted(view, gpu, old)
    after = {name: memory[name].copy() for name in COLUMNS}
    for name, values in new.items():
        after[name][gpu] = values
    shutdown_c = view.site.design.gpu_shutdown_c[view.site.rack_of_gpu[gpu]]
    s_w, s_t, s_y, s_tt, s_ty = (new[name] for name in COLUMNS[3:])
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = s_tt - s_t * s_t / s_w
        slope = (s_ty - s_t * s_y / s_w) / spread
        rate = slope - SIGMAS * NOISE_K / np.sqrt(spread)
        temp_c = (s_y - slope * s_t) / s_w
        room_k = np.maximum(shutdown_c - MARGIN_K - temp_c, 0.0)
        left_s = room_k / rate
    rises = (new["readings"] >= FEWEST) & (rate > 0) & _hot(view, gpu, temp_c, shutdown_c)
    rises &= view.now_ns - new["read_ns"] <= round(LOST_S * NS)
    return Rise(gpu, np.where(rises, left_s, np.inf), rises), after


def _fitted(view: View, gpu: I32, old: Memory) -> Memory:
    """The sums of the fit with the readings of now; empty where a GPU is not at its lowest cap."""
    now_ns, envelope = view.now_ns, view.envelope(CAP)
    read_ns = _heard_ns(view, TEMP, gpu)
    good = view.quality(TEMP)[gpu] == GOOD
    capped = view.readback(CAP)[gpu] <= envelope.low[gpu] + envelope.deadband
    low_ns = np.where(capped, np.where(old["low_ns"] > 0, old["low_ns"], now_ns), 0)
    fresh = capped & good & (read_ns > old["read_ns"]) & (read_ns >= low_ns + round(SETTLE_S * NS))
    gap_s = (read_ns - old["read_ns"]) / NS
    goes_on = capped & (old["readings"] > 0) & (gap_s <= LOST_S)
    s_w, s_t, s_y, s_tt, s_ty = (np.where(goes_on, old[name], 0.0) for name in COLUMNS[3:])
    dt = np.where(fresh & goes_on, gap_s, 0.0)  # time runs from the newest reading back
    keep = np.exp(-dt / MEMORY_S)
    s_tt = keep * (s_tt - 2.0 * dt * s_t + dt * dt * s_w)
    s_ty = keep * (s_ty - dt * s_y)
    s_t = keep * (s_t - dt * s_w)
    s_w, s_y = keep * s_w + fresh, keep * s_y + np.where(fresh, view.value(TEMP)[gpu], 0.0)
    return {
        "low_ns": low_ns,
        "read_ns": np.where(fresh, read_ns, old["read_ns"]),
        "readings": np.minimum(np.where(goes_on, old["readings"], 0) + fresh, 100),
        "s_w": s_w,
        "s_t": s_t,
        "s_y": s_y,
        "s_tt": s_tt,
        "s_ty": s_ty,
    }


def _hot(view: View, gpu: I32, temp_c: F64, shutdown_c: F64) -> Bool:
    """Beyond the guard, and no hotter than a GPU that works can be."""
    limit = view.limit(TEMP)
    if limit is None:
        return np.zeros(len(gpu), np.bool_)
    guard_c = limit.guard[gpu]
    hot: Bool = (temp_c >= guard_c) & (temp_c <= shutdown_c + BEYOND_K) & (guard_c < shutdown_c - MARGIN_K)
    return hot


def _heard_ns(view: View, key: str, gpu: I32) -> np.ndarray:
    age_ns = np.minimum(view.age_s(key)[gpu] * NS, float(view.now_ns))
    return view.now_ns - np.rint(age_ns).astype(np.int64)
