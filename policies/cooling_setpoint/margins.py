"""Margins: the warmest supply at which every GPU of a CDU keeps its thermal margin with a stated probability.

A GPU is warmer than the coolant that its rack gets by its resistance times its power. The resistance is
learned from smoothed readings around the design; the power is the most that the load forecast expects, within
the GPU's limit. Racks have limits of their own, of supply and return.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from twin.catalogue import F64, Bool
from twin.contracts import Z90, Memory, View
from twin.site import Site
from twin.telemetry import GOOD, ColumnSpec

POWER, TEMP, HBM, MARGIN = "gpu.power_w", "gpu.temp_c", "gpu.hbm_temp_c", "gpu.thermal_margin_k"
RACK_W, SUPPLY, RETURN = "rack.power_w", "rack.supply_temp_c", "rack.return_temp_c"
SMOOTH_S = 300.0  # many times the time constant of a plate, and of swings of work; source: estimate
MEMORY_S = 86_400.0  # of a resistance: paste dries and plates foul over months; source: estimate
LOOK_PU = 0.1  # of the variance of differences that is left in their mean; source: estimate
ERROR_S = 900.0  # of the difference of a temperature from what power makes of it; source: estimate
# No work asks more of a GPU than the highest reading of any that its CDU cools, once these were watched so
# long; a month on it is forgotten by e; source: estimate
TOP_AFTER_S, TOP_S = 86_400.0, 30 * 86_400.0
PEAK_S = 3600.0  # in which the highest power of late is forgotten by e; source: estimate
DESIGN_S = 300.0  # of readings at full power that the design is worth; source: estimate
RESISTANCE_PU = 0.01  # 1 sigma of a learned resistance: flow, and heat of the neighbours; source: estimate
SENSOR_K = 0.25  # 1 sigma of what a GPU's thermometer is off by itself; source: estimate
# No plate of a rack counts as better than this share of its median, and one below the other is not believed:
# plates differ by 8 %; source: estimate
LOW_PU, DOUBT_PU = 0.85, 0.72
IDLE_PU = 0.25  # of the range of power above idle: below, a GPU may get a job at any time; source: estimate
DOUBT_SIGMAS, DOUBT_K = 4.0, 3.0  # by which temperatures contradict their power; source: estimate
SUPPLY_K = 0.3  # 1 sigma of a CDU's control; source: estimate
NOTHING = -1

GPU_COLUMNS = {
    "power_w": ColumnSpec("f8", np.nan),
    "rise_k": ColumnSpec("f8", np.nan),
    "s_py": ColumnSpec("f8"),
    "s_pp": ColumnSpec("f8"),
    "error_k": ColumnSpec("f8", np.nan),
    "error_k2": ColumnSpec("f8"),
    "peak_w": ColumnSpec("f8", np.nan),
    "hbm_rise_k": ColumnSpec("f8", np.nan),
}
CDU_COLUMNS = {"top_w": ColumnSpec("f8"), "top_s": ColumnSpec("f8")}
RACK_COLUMNS = {
    "rack_peak_w": ColumnSpec("f8", np.nan),
    "rack_w": ColumnSpec("f8", np.nan),
    "rack_rise_k": ColumnSpec("f8", np.nan),
}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The warmest supply of every CDU [n_cdu] and what binds it.

    inf: nothing binds; NaN: unknown. `gpu` is the GPU that binds, `rack` the rack where one does, -1 none;
    `doubted` [n_gpu]: GPUs whose temperature is not known or contradicts their power.
    """

    supply_c: F64
    gpu: F64
    rack: F64
    doubted: Bool


def good(view: View, key: str) -> F64:
    """Readings that are current [n]; NaN elsewhere."""
    return np.where(view.quality(key) == GOOD, view.value(key), np.nan).astype(np.float64)


def learn(view: View, memory: Memory, dt_s: float) -> Memory:
    """The columns of GPUs and racks after the readings of now; `dt_s` since the last look."""
    site, rack = view.site, view.site.rack_of_gpu
    share = -np.expm1(-dt_s / SMOOTH_S)
    power_w, temp_c, supply_c = good(view, POWER), good(view, TEMP), good(view, SUPPLY)
    rise_k = temp_c - supply_c[rack]
    both = np.isfinite(rise_k + power_w)
    smooth_w = _smoothed(memory["power_w"], np.where(both, power_w, np.nan), share)
    smooth_k = _smoothed(memory["rise_k"], np.where(both, rise_k, np.nan), share)
    keep = np.exp(-dt_s / MEMORY_S)
    s_py = keep * memory["s_py"] + np.where(both, dt_s * smooth_w * smooth_k, 0.0)
    s_pp = keep * memory["s_pp"] + np.where(both, dt_s * smooth_w**2, 0.0)
    off_k = np.where(both, rise_k - resistance_k_per_w(site, memory) * power_w, np.nan)
    slow = -np.expm1(-dt_s / ERROR_S)
    error_k = _smoothed(memory["error_k"], off_k, slow)
    error_k2 = _smoothed(memory["error_k2"], (off_k - error_k) ** 2, slow)
    fade = -np.expm1(-dt_s / PEAK_S)
    peak_w = np.fmax(power_w, memory["peak_w"] + fade * (smooth_w - memory["peak_w"]))
    rack_w = _smoothed(memory["rack_w"], good(view, RACK_W), share)
    rack_peak_w = np.fmax(rack_w, memory["rack_peak_w"] + fade * (rack_w - memory["rack_peak_w"]))
    over_k = good(view, HBM) - temp_c
    hbm_k = np.fmax(over_k, memory["hbm_rise_k"] + fade * (over_k - memory["hbm_rise_k"]))
    return {
        "power_w": smooth_w,
        "rise_k": smooth_k,
        "s_py": s_py,
        "s_pp": s_pp,
        "error_k": error_k,
        "error_k2": error_k2,
        "peak_w": np.where(np.isnan(peak_w), memory["peak_w"], peak_w),
        "hbm_rise_k": np.where(np.isnan(hbm_k), memory["hbm_rise_k"], hbm_k),
        "rack_w": rack_w,
        "rack_peak_w": rack_peak_w,
        **_tops(site, memory, power_w, dt_s),
        "rack_rise_k": _smoothed(memory["rack_rise_k"], good(view, RETURN) - supply_c, share),
    }


def _tops(site: Site, memory: Memory, power_w: F64, dt_s: float) -> Memory:
    """The most that a GPU of each CDU has drawn, and for how long it was watched [n_cdu]."""
    cdu = site.cdu_of_rack[site.rack_of_gpu]
    known = np.isfinite(power_w) & (cdu >= 0)
    top_w = memory["top_w"] * np.exp(-dt_s / TOP_S)
    np.maximum.at(top_w, cdu[known], power_w[known])
    watched = np.zeros(len(top_w), np.bool_)
    watched[cdu[known]] = True
    return {"top_w": top_w, "top_s": memory["top_s"] + dt_s * watched}


def resistance_k_per_w(site: Site, memory: Mapping[str, np.ndarray]) -> F64:
    """Learned resistance of each GPU to the coolant of its rack [n_gpu]; NaN where nothing is known."""
    rack, design = site.rack_of_gpu, site.design
    usual, full_w = design.gpu_resistance_k_per_w[rack], design.gpu_max_w[rack]
    weight = np.where(np.isfinite(usual * full_w), DESIGN_S * full_w**2, 0.0)
    s_py = memory["s_py"] + weight * np.nan_to_num(usual)
    out: F64 = np.divide(s_py, memory["s_pp"] + weight, out=np.full(len(s_py), np.nan), where=s_py > 0.0)
    return out


def ceilings(view: View, memory: Mapping[str, np.ndarray], probability: float, horizon_s: float) -> Ceilings:
    """The warmest supply of each CDU at which no GPU or rack passes its guard within the horizon.

    Each GPU passes its guard with at most this probability.
    """
    site, z = view.site, NormalDist().inv_cdf(1.0 - probability)
    n, cdu, rack = site.sizes["cdu"], site.cdu_of_rack, site.rack_of_gpu
    most_w, growth = _most_w(view, memory, z, horizon_s)
    learned = resistance_k_per_w(site, memory)
    usual = _of_rack(site, learned)
    resistance = _feared(memory, learned, usual)
    noise_k = np.sqrt((RESISTANCE_PU * resistance * most_w) ** 2 + SENSOR_K**2 + SUPPLY_K**2)
    guard_c = _guard_c(view, memory)
    of_gpu = guard_c - resistance * most_w - z * noise_k
    of_gpu = np.fmin(of_gpu, _now_c(view, guard_c))
    doubted = _doubted(view, memory, learned < DOUBT_PU * usual)
    of_gpu[~site.design.liquid[rack] | (cdu[rack] < 0)] = np.inf
    of_rack = _rack_c(view, memory, growth, z)
    of_rack[~site.design.liquid | (cdu < 0)] = np.inf
    out, by_gpu, by_rack = np.full(n, np.inf), np.full(n, NOTHING), np.full(n, NOTHING)
    for values, of, by in ((of_gpu, cdu[rack], by_gpu), (of_rack, cdu, by_rack)):
        order = np.lexsort((values, of))
        order = order[(of[order] >= 0) & (values[order] < np.inf)]  # NaN is unknown and binds nothing
        places, first = np.unique(of[order], return_index=True)
        tighter = values[order[first]] < out[places]
        out[places[tighter]], by[places[tighter]] = values[order[first[tighter]]], order[first[tighter]]
    by_gpu[by_rack >= 0] = NOTHING
    return Ceilings(out, by_gpu, by_rack, doubted)


def _now_c(view: View, guard_c: F64) -> F64:
    """The supply at which GPUs that are beyond their guard now would not be [n_gpu]; inf elsewhere.

    One alone of a CDU is a bad plate or a bad sensor, for which the coolant of all is not lowered.
    """
    site, temp_c = view.site, good(view, TEMP)
    cdu = site.cdu_of_rack[site.rack_of_gpu]
    over_k = np.where(cdu >= 0, temp_c - guard_c, np.nan)
    hot = over_k > 0.0
    hot &= np.bincount(cdu[hot], minlength=site.sizes["cdu"])[np.maximum(cdu, 0)] > 1
    return np.where(hot, good(view, SUPPLY)[site.rack_of_gpu] - over_k, np.inf)


def _guard_c(view: View, memory: Mapping[str, np.ndarray]) -> F64:
    """The temperature that a GPU must not pass [n_gpu], from its own guards and those of its memory."""
    out = np.full(view.site.sizes["gpu"], np.inf)
    if (limit := view.limit(TEMP)) is not None:
        out = np.fmin(out, limit.guard)
    if (limit := view.limit(HBM)) is not None:
        out = np.fmin(out, limit.guard - np.maximum(memory["hbm_rise_k"], 0.0))
    if (limit := view.limit(MARGIN)) is not None:
        out = np.fmin(out, good(view, TEMP) + good(view, MARGIN) - limit.guard)
    return out


def _most_w(view: View, memory: Mapping[str, np.ndarray], z: float, horizon_s: float) -> tuple[F64, F64]:
    """(highest power expected of each GPU [n_gpu], growth of each rack over its peak of late [n_rack]).

    A GPU that works follows the forecast of its rack, from its own peak of late; one that idles may be given
    work that takes the most. Caps are not counted on: they may be lifted at any time.
    """
    site, rack = view.site, view.site.rack_of_gpu
    idle_w, full_w = site.design.gpu_idle_w[rack], site.design.gpu_max_w[rack]
    cdu = site.cdu_of_rack[rack]
    seen = (cdu >= 0) & (memory["top_s"][cdu] >= TOP_AFTER_S)
    limit_w = np.where(seen, np.fmin(full_w, memory["top_w"][cdu]), full_w)
    now_w = np.maximum(memory["rack_peak_w"], 1.0)
    most = np.full(len(now_w), np.nan)
    for (key, ahead_s), forecast in sorted(view.forecasts.items()):
        if key == RACK_W and ahead_s <= horizon_s:
            wide = np.maximum(forecast.hi - forecast.mean, 0.0) * max(1.0, z / Z90)
            most = np.fmax(most, forecast.mean + wide)
    growth = np.maximum(most / now_w, 1.0)
    of_gpu = growth[rack]
    working = memory["power_w"] > idle_w + IDLE_PU * (full_w - idle_w)
    known = (
        working
        & np.isfinite(of_gpu)
        & (view.jobs.job_of_node[site.node_of_gpu] >= 0 if view.jobs.known else True)
    )
    return np.where(known, np.fmin(memory["peak_w"] * of_gpu, limit_w), limit_w), growth


def _feared(memory: Mapping[str, np.ndarray], learned: F64, usual: F64) -> F64:
    """Resistances to reckon with [n_gpu]: as learned, and not far below the rack's; as of now where a GPU is
    clearly warmer."""
    out = np.fmax(learned, LOW_PU * usual)
    over_k = memory["rise_k"] - out * memory["power_w"]
    clear = (memory["error_k"] > _doubt_k(memory)) & (over_k > 0.0)
    return np.where(clear, memory["rise_k"] / np.maximum(memory["power_w"], 1.0), out)


def _doubt_k(memory: Mapping[str, np.ndarray]) -> F64:
    """The lasting difference from which a temperature contradicts its power [n_gpu]: work that swings while
    readings are rare makes some of its own."""
    of_mean_k = np.sqrt(memory["error_k2"] * LOOK_PU)
    return np.maximum(DOUBT_K, DOUBT_SIGMAS * of_mean_k)


def _of_rack(site: Site, resistance: F64) -> F64:
    """The median resistance of each GPU's rack [n_gpu]."""
    rack, racks = site.rack_of_gpu, site.sizes["rack"]
    known = np.isfinite(resistance)
    counts = np.bincount(rack, minlength=racks)
    order = np.argsort(rack, kind="stable")
    place = np.arange(len(rack)) - np.repeat(np.cumsum(counts) - counts, counts)
    # A row for each rack, what is unknown behind all others
    rows = np.full((racks, max(1, int(counts.max(initial=0)))), np.inf)
    rows[rack[order], place] = np.where(known, resistance, np.inf)[order]
    rows.sort(axis=1)
    n = np.bincount(rack[known], minlength=racks)
    each, last = np.arange(racks), np.maximum(n - 1, 0)
    middle = (rows[each, last // 2] + rows[each, (last + 1) // 2]) / 2.0
    out: F64 = np.where(n > 0, middle, np.nan)[rack]
    return out


def _doubted(view: View, memory: Mapping[str, np.ndarray], too_good: Bool) -> Bool:
    """GPUs whose temperature is not known, or contradicts their power [n_gpu]."""
    site = view.site
    off = view.value("node.power_on_state")[site.node_of_gpu] == 0.0
    unknown = ~np.isfinite(good(view, TEMP) + good(view, POWER) + good(view, SUPPLY)[site.rack_of_gpu])
    wrong = (np.abs(memory["error_k"]) > _doubt_k(memory)) | too_good
    out: Bool = (unknown | wrong) & ~off & site.design.liquid[site.rack_of_gpu]
    for mask in (view.vacant("gpu"), view.maintenance("gpu")):
        if mask is not None:
            out &= ~mask
    return out


def _rack_c(view: View, memory: Mapping[str, np.ndarray], growth: F64, z: float) -> F64:
    """The warmest supply at which a rack keeps its own guards [n_rack]; growth NaN counts as its design."""
    out = np.full(view.site.sizes["rack"], np.inf)
    spread_k = z * SUPPLY_K
    if (limit := view.limit(SUPPLY)) is not None:
        out = np.fmin(out, limit.guard - spread_k)
    if (limit := view.limit(RETURN)) is not None:
        usual = np.maximum(view.site.design.rack_max_w / np.maximum(memory["rack_w"], 1.0), 1.0)
        grown = np.where(np.isfinite(growth), np.fmin(growth, usual), usual)
        out = np.fmin(out, limit.guard - memory["rack_rise_k"] * grown - spread_k)
    return out


def _smoothed(before: F64, now: F64, share: float) -> F64:
    """Exponentially smoothed; the first reading counts whole, one that is missing not at all."""
    moved = np.where(np.isnan(before), now, before + share * (now - before))
    return np.where(np.isnan(now), before, moved)
