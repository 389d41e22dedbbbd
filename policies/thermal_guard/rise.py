"""Rise: heating rate of GPUs at their lowest caps, and the seconds that it leaves them.

Two straight lines are fitted to the latest readings of each GPU since its cap was read back at its lowest, or
since it draws no more than that anyway; where a locked clock has lowered its power further, they begin anew.
The rate that counts is the least that the noise of the readings allows. The line over some seconds shows a
loss of flow. Nothing else enters it: no flow, no power, no law of the plate, so none of these can mislead it.
The line over half a minute shows a creep. As harmless things creep too, it counts only in a rack whose flow
is measured beyond its guard, or of which several GPUs have warmed up by more than a change of the supply
explains; and no further than the other line allows, since what slows down looks faster over a longer time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.thermal_guard.plan import CAP, plan_of, seconds
from twin.catalogue import F64, I32, NS, Bool
from twin.contracts import Memory, View
from twin.telemetry import GOOD

TEMP, POWER = "gpu.temp_c", "gpu.power_w"
FLOW = "rack.flow_lpm"
FAST, SLOW = (
    ("s_w", "s_t", "s_y", "s_tt", "s_ty"),
    ("l_w", "l_t", "l_y", "l_tt", "l_ty"),
)  # weighted sums of both fits: of 1, t, y, t t, t y
COLUMNS = ("low_ns", "read_ns", "readings", "locked", "least_c", *FAST, *SLOW)  # of the memory
# A cap is in force so long after it was read back: readings before are of another power; source: estimate
SETTLE_S = 1.0
MEMORY_S = {FAST: 6.0, SLOW: 30.0}  # of the fits: a reading counts 1/e after this
LOST_S = 35.0  # between two readings, above which the fit begins anew; the slowest exporters read each 30 s
FEWEST = 4  # readings of a fit
# 1 sigma of a reading: whole kelvins (0.29 K) and the noise of the sensor; source: estimate
NOISE_K = 0.5
STEP_K = 1.0  # a device that reports whole kelvins may have crossed a border by next to nothing
SIGMAS = 3.0  # by which a rise must stand out: thousands of GPUs are judged every second
MARGIN_K = 2.0  # below the shutdown: what devices and sensors differ by
BEYOND_K = 1.0  # above its shutdown no GPU works: such a reading is wrong
# Where the flow meter does not say so, a rack counts as starved if so many of its GPUs creep and have warmed
# up by so much since they were coolest at their lowest caps. At 200 W a GPU is 6 K above its coolant, and set
# points of the supply move by a few kelvins; source: estimate
CREEPING, RISEN_K = 4, 8.0


@dataclass(frozen=True, slots=True)
class Rise:
    """Of the GPUs `gpu` [k]: seconds left (inf: none counted), and whether each bears witness: it was read,
    is hot, and warms up at its lowest cap beyond doubt. `rate`, `most`: the rate that counts, K/s, and the
    greatest that the noise allows; `room_k`: how far below its shutdown each is."""

    gpu: I32
    left_s: F64
    rises: Bool
    rate: F64
    most: F64
    room_k: F64


@dataclass(frozen=True, slots=True)
class _Line:
    """A fit [k]: the least and the greatest rate that the noise allows, K/s; its temperature of now, degC."""

    least: F64
    most: F64
    temp_c: F64


def rise(view: View, memory: Memory, gpu: I32) -> tuple[Rise, Memory]:
    """The rise of some GPUs, and the columns of the memory that follow from it."""
    # Most capped GPUs do not stand at their lowest: nothing is fitted, and the memory stays as it is
    gpu = gpu[_lowest(view, gpu) | (memory["low_ns"][gpu] > 0)]
    if not len(gpu):
        none = np.zeros(0)
        return Rise(gpu, none, none > 0, none, none, none), {name: memory[name] for name in COLUMNS}
    old = {name: memory[name][gpu] for name in COLUMNS}
    new = _fitted(view, gpu, old)
    after = {name: memory[name].copy() for name in COLUMNS}
    for name, values in new.items():
        after[name][gpu] = values
    known = (new["readings"] >= FEWEST) & (view.now_ns - new["read_ns"] <= round(LOST_S * NS))
    shutdown_c = view.site.design.gpu_shutdown_c[view.site.rack_of_gpu[gpu]]
    fast, slow = _line(new, FAST, 0.0), _line(new, SLOW, STEP_K)
    known &= _hot(view, gpu, fast.temp_c, shutdown_c)
    creep = np.where(known, np.minimum(slow.least, fast.most), 0.0)
    creeps = creep > 0
    creeps &= _starved(view, gpu, creeps & (fast.temp_c - new["least_c"] >= RISEN_K))
    rate = np.maximum(np.where(known, fast.least, 0.0), np.where(creeps, creep, 0.0))
    rises = rate > 0
    room_k = np.maximum(shutdown_c - MARGIN_K - fast.temp_c, 0.0)
    return Rise(gpu, seconds(room_k, rate), rises, rate, fast.most, room_k), after


def _lowest(view: View, gpu: I32) -> Bool:
    """GPUs [k] at their lowest power: the cap is there, or would change nothing."""
    envelope = view.envelope(CAP)
    capped = view.readback(CAP)[gpu] <= envelope.low[gpu] + envelope.deadband
    idle = (view.believed(POWER)[gpu] <= envelope.low[gpu]) & (view.quality(POWER)[gpu] == GOOD)
    lowest: Bool = capped | idle
    return lowest


def _line(sums: Memory, names: tuple[str, ...], step_k: float) -> _Line:
    """The line through the readings whose sums are given, in doubt about their noise and one step: of all
    weights with this spread in time, none makes more of a step than half of it over the spread."""
    s_w, s_t, s_y, s_tt, s_ty = (sums[name] for name in names)
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = s_tt - s_t * s_t / s_w
        slope = (s_ty - s_t * s_y / s_w) / spread
        doubt = SIGMAS * NOISE_K / np.sqrt(spread) + 0.5 * step_k / np.sqrt(spread / s_w)
        return _Line(slope - doubt, slope + doubt, (s_y - slope * s_t) / s_w)


def _starved(view: View, gpu: I32, risen: Bool) -> Bool:
    """GPUs [k] of racks whose flow is measured beyond its guard, or of which enough GPUs have risen."""
    rack_of = view.site.rack_of_gpu[gpu]
    racks = view.site.sizes["rack"]
    starved: Bool = np.bincount(rack_of[risen], minlength=racks) >= CREEPING
    if (limit := view.limit(FLOW)) is not None:
        with np.errstate(invalid="ignore"):
            starved |= (view.quality(FLOW) == GOOD) & (view.believed(FLOW) < limit.guard)
    return starved[rack_of]


def _fitted(view: View, gpu: I32, old: Memory) -> Memory:
    """The sums of both fits with the readings of now; empty where a GPU is not at its lowest cap."""
    now_ns, plan = view.now_ns, plan_of(view, gpu)
    read_ns = reading_ns(view, gpu)
    good = view.quality(TEMP)[gpu] == GOOD
    capped = _lowest(view, gpu)
    locked = plan.locked & plan.lock_helps
    same = locked == (old["locked"] > 0)
    low_ns = np.where(capped, np.where((old["low_ns"] > 0) & same, old["low_ns"], now_ns), 0)
    fresh = capped & good & (read_ns > old["read_ns"]) & (read_ns >= low_ns + round(SETTLE_S * NS))
    gap_s = (read_ns - old["read_ns"]) / NS
    goes_on = capped & same & (old["low_ns"] > 0) & (old["readings"] > 0) & (gap_s <= LOST_S)
    temp_c = view.value(TEMP)[gpu]
    least_c = np.where(goes_on, old["least_c"], np.inf)
    out: Memory = {
        "low_ns": low_ns,
        "read_ns": np.where(fresh, read_ns, old["read_ns"]),
        "locked": locked.astype(np.int8),
        "readings": np.minimum(np.where(goes_on, old["readings"], 0) + fresh, 100),
        "least_c": np.where(fresh, np.minimum(least_c, temp_c), least_c),
    }
    dt = np.where(fresh & goes_on, gap_s, 0.0)  # time runs from the newest reading back
    for names, memory_s in MEMORY_S.items():
        s_w, s_t, s_y, s_tt, s_ty = (np.where(goes_on, old[name], 0.0) for name in names)
        keep = np.exp(-dt / memory_s)
        s_tt = keep * (s_tt - 2.0 * dt * s_t + dt * dt * s_w)
        s_ty = keep * (s_ty - dt * s_y)
        s_t = keep * (s_t - dt * s_w)
        s_w, s_y = keep * s_w + fresh, keep * s_y + np.where(fresh, temp_c, 0.0)
        out |= dict(zip(names, (s_w, s_t, s_y, s_tt, s_ty), strict=True))
    return out


def _hot(view: View, gpu: I32, temp_c: F64, shutdown_c: F64) -> Bool:
    """Beyond the guard, and no hotter than a GPU that works can be."""
    limit = view.limit(TEMP)
    if limit is None:
        return np.zeros(len(gpu), np.bool_)
    guard_c = limit.guard[gpu]
    hot: Bool = (temp_c >= guard_c) & (temp_c <= shutdown_c + BEYOND_K) & (guard_c < shutdown_c - MARGIN_K)
    return hot


def reading_ns(view: View, gpu: I32) -> np.ndarray:
    """Instants of the last good temperatures of some GPUs."""
    age_ns = np.minimum(view.age_s(TEMP)[gpu] * NS, float(view.now_ns))
    return view.now_ns - np.rint(age_ns).astype(np.int64)
