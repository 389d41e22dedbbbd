"""Margins: the warmest supply at which every GPU of a CDU keeps its thermal margin with a stated probability.

A GPU is warmer than the coolant that its rack gets by its resistance times its power. The resistance is
learned from smoothed readings around the design; the power is the most that the load forecast expects, within
the GPU's limit. Racks have limits of their own, of supply and return.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from policies.cooling_setpoint.sections import CduSection, good, last_good
from policies.power_capping import COOLANT_C
from twin.catalogue import F64, I32, Bool
from twin.contracts import Z90, Memory, View
from twin.physics import COOLANTS, heat_rate_w_per_k, resistance_k_per_w as plate_k_per_w
from twin.site import CONVECTIVE_SHARE, FLOW_EXPONENT
from twin.telemetry import ColumnSpec

POWER, TEMP, HBM, MARGIN = "gpu.power_w", "gpu.temp_c", "gpu.hbm_temp_c", "gpu.thermal_margin_k"
RACK_W, SUPPLY, RETURN = "rack.power_w", "rack.supply_temp_c", "rack.return_temp_c"
FLOW = "rack.flow_lpm"
# Faults (kind, table, signal) of sensors that the margins do without
JUMPING_RETURN = (("sensor_spiking", "rack", "return_temp_c"),)
WRONG_POWER = tuple((f"sensor_{how}", "gpu", "power_w") for how in ("biased", "frozen", "spiking"))
# The way of a resistance with the flow is known to this share of the way from nominal; source: estimate
FLOW_DOUBT_PU = 0.3
SMOOTH_S = 300.0  # many times the time constant of a plate, and of swings of work; source: estimate
MEMORY_S = 86_400.0  # of a resistance: paste dries and plates foul over months; source: estimate
LOOK_PU = 0.1  # of the variance of differences that is left in their mean; source: estimate
ERROR_S = 900.0  # of the difference of a temperature from what power makes of it; source: estimate
# No work asks more of a GPU than the highest reading of any that its CDU cools, once these were watched so
# long; a month on it is forgotten by e; source: estimate
TOP_AFTER_S, TOP_S = 86_400.0, 30 * 86_400.0
PEAK_S = 3600.0  # in which the highest and lowest power of late are forgotten by e; source: estimate
# From a forecast to coolant at the GPUs: a look, the BMS with its valves, a loop; source: estimate
REACT_S = 300.0
MOST_RISE_K = 60.0  # of a GPU at work above its coolant; source: estimate
DESIGN_S = 300.0  # of readings at full power that the design is worth; source: estimate
RESISTANCE_PU = 0.01  # 1 sigma of a learned resistance: flow, and heat of the neighbours; source: estimate
SENSOR_K = 0.25  # 1 sigma of what a GPU's thermometer is off by itself; source: estimate
# No plate of a rack counts as better than this share of its median, and one below the other is not believed:
# plates differ by 8 %; source: estimate
LOW_PU, DOUBT_PU = 0.85, 0.72
HEAT_PU = 0.05  # of a rack's highest power: below, its heat says nothing about its rise; source: estimate
IDLE_PU = 0.25  # of the range of power above idle: below, a GPU may get a job at any time; source: estimate
DOUBT_SIGMAS, DOUBT_K = 4.0, 3.0  # by which temperatures contradict their power; source: estimate
# 1 sigma of racks' coolant above the set point of their CDU before it was learned, of thermometers against
# each other besides, how long what was seen of it counts, and how long a set point that was lowered counts as
# it was; source: estimate
SUPPLY_K, SENSORS_K, SPREAD_S, LATE_S = 0.3, 0.1, 4 * 3600.0, 300.0
SET_POINTS = ("cdu.supply_temp_setpoint_final_c", "cdu.supply_temp_setpoint_c")
CONTROL = "cdu.supply_temp_target_c"
NOTHING = -1

GPU_COLUMNS = {
    "power_w": ColumnSpec("f8", np.nan),
    "rise_k": ColumnSpec("f8", np.nan),
    "s_py": ColumnSpec("f8"),
    "s_pp": ColumnSpec("f8"),
    "error_k": ColumnSpec("f8", np.nan),
    "error_k2": ColumnSpec("f8"),
    "peak_w": ColumnSpec("f8", np.nan),
    "trough_w": ColumnSpec("f8", np.nan),
    "hbm_rise_k": ColumnSpec("f8", np.nan),
}
CDU_COLUMNS = {
    "top_w": ColumnSpec("f8"),
    "top_s": ColumnSpec("f8"),
    "late_c": ColumnSpec("f8", np.nan),
    "over_k2": ColumnSpec("f8", SUPPLY_K**2),
}
RACK_COLUMNS = {
    "rack_peak_w": ColumnSpec("f8", np.nan),
    "rack_w": ColumnSpec("f8", np.nan),
    "rack_rise_k": ColumnSpec("f8", np.nan),
    "rack_s_k": ColumnSpec("f8"),  # of its rise at nominal flow, and of its power in the same time
    "rack_s_w": ColumnSpec("f8"),
}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The warmest supply of every CDU [n_cdu] and its binding GPU or rack.

    inf: nothing binds, or not looked at. `gpu` is the GPU that binds, `rack` the rack where one does, -1
    none; `doubted` [n_gpu]: GPUs whose temperature is not known or contradicts their power.
    """

    supply_c: F64
    gpu: F64
    rack: F64
    doubted: Bool


def learn(view: View, memory: Mapping[str, np.ndarray], section: CduSection, dt_s: F64) -> Memory:
    """The columns of GPUs, racks and CDUs after the readings of now; `dt_s` since the last look at each CDU
    of the section."""
    gpus, racks = section.at_gpus, section.at_racks
    own = own_of(memory, section)
    # Mostly all CDUs were looked at together: one number then, which spreads by itself
    same = bool((dt_s == dt_s[0]).all())
    of_gpu, of_rack = (dt_s[:1] if same else dt_s[of] for of in (section.cdu_of_gpu, section.cdu_of_rack))
    share, keep = -np.expm1(-of_gpu / SMOOTH_S), np.exp(-of_gpu / MEMORY_S)
    slow, fade = -np.expm1(-of_gpu / ERROR_S), -np.expm1(-of_gpu / PEAK_S)
    power_w, temp_c, supply_c = good(view, POWER, gpus), good(view, TEMP, gpus), good(view, SUPPLY, racks)
    # At nominal flow, so that slower pumps change no resistance that was learned
    rise_k = (temp_c - supply_c[section.rack_of_gpu]) / film_of(flow_pu(view, section))[section.rack_of_gpu]
    both = np.isfinite(rise_k + power_w)
    smooth_w = _smoothed(own["power_w"], np.where(both, power_w, np.nan), share)
    smooth_k = _smoothed(own["rise_k"], np.where(both, rise_k, np.nan), share)
    s_py = keep * own["s_py"] + np.where(both, of_gpu * smooth_w * smooth_k, 0.0)
    s_pp = keep * own["s_pp"] + np.where(both, of_gpu * smooth_w**2, 0.0)
    off_k = np.where(both, rise_k - resistance_k_per_w(section, own) * power_w, np.nan)
    error_k = _smoothed(own["error_k"], off_k, slow)
    peak_w = np.fmax(power_w, own["peak_w"] + fade * (smooth_w - own["peak_w"]))
    trough_w = np.fmin(power_w, own["trough_w"] + fade * (smooth_w - own["trough_w"]))
    over_k = good(view, HBM, gpus) - temp_c
    hbm_k = np.fmax(over_k, own["hbm_rise_k"] + fade * (over_k - own["hbm_rise_k"]))
    share, fade = -np.expm1(-of_rack / SMOOTH_S), -np.expm1(-of_rack / PEAK_S)
    rack_w = _smoothed(memory["rack_w"][racks], good(view, RACK_W, racks), share)
    rack_peak_w = memory["rack_peak_w"][racks]
    return_k, now_w, fresh = (
        good(view, RETURN, racks) - supply_c,
        good(view, RACK_W, racks),
        np.exp(-of_rack / MEMORY_S),
    )
    # The rise of a rack that is off is the difference of its thermometers
    known = np.isfinite(now_w) & (return_k > 0.0) & ~np.isin(section.racks, _accused(view, JUMPING_RETURN))
    known &= ~(rack_w <= HEAT_PU * view.site.design.rack_max_w[racks])
    found = {
        "power_w": smooth_w,
        "rise_k": smooth_k,
        "s_py": s_py,
        "s_pp": s_pp,
        "error_k": error_k,
        "error_k2": _smoothed(own["error_k2"], (off_k - error_k) ** 2, slow),
        "peak_w": np.where(np.isnan(peak_w), own["peak_w"], peak_w),
        "trough_w": np.where(np.isnan(trough_w), own["trough_w"], trough_w),
        "hbm_rise_k": np.where(np.isnan(hbm_k), own["hbm_rise_k"], hbm_k),
        "rack_w": rack_w,
        "rack_peak_w": np.fmax(rack_w, rack_peak_w + fade * (rack_w - rack_peak_w)),
        "rack_rise_k": _smoothed(memory["rack_rise_k"][racks], return_k, share),
        "rack_s_k": fresh * memory["rack_s_k"][racks]
        + of_rack * np.where(known, return_k * flow_pu(view, section), 0.0),
        "rack_s_w": fresh * memory["rack_s_w"][racks] + of_rack * np.where(known, now_w, 0.0),
        **_tops(section, memory, power_w, dt_s),
        **_control(view, section, memory, supply_c, dt_s),
    }
    out = {name: memory[name].copy() for name in found}
    for name, values in found.items():
        at = gpus if name in GPU_COLUMNS else racks if name in RACK_COLUMNS else section.cdus
        out[name][at] = values
    return out


def flow_pu(view: View, section: CduSection) -> F64:
    """Return the flow of each rack of a section over its nominal one; 1 if unknown."""
    out: F64 = good(view, FLOW, section.at_racks) / view.site.design.rack_flow_lpm[section.at_racks]
    return np.where(out > 0.0, out, 1.0)


def film_of(flow: F64) -> F64:
    """Return the factor of a flow over nominal on the resistance of cold plates."""
    return plate_k_per_w(np.ones_like(flow), flow, CONVECTIVE_SHARE, FLOW_EXPONENT)


def own_of(memory: Mapping[str, np.ndarray], section: CduSection) -> Mapping[str, np.ndarray]:
    """Return the columns of the GPUs of a section."""
    return {name: memory[name][section.at_gpus] for name in GPU_COLUMNS}


def _tops(section: CduSection, memory: Mapping[str, np.ndarray], power_w: F64, dt_s: F64) -> Memory:
    """Return the highest power of a GPU of each CDU, and the observed time."""
    cdu, known = section.cdu_of_gpu, np.isfinite(power_w)
    top_w = memory["top_w"][section.cdus] * np.exp(-dt_s / TOP_S)
    np.maximum.at(top_w, cdu[known], power_w[known])
    watched = np.zeros(len(top_w), np.bool_)
    watched[cdu[known]] = True
    return {"top_w": top_w, "top_s": memory["top_s"][section.cdus] + dt_s * watched}


def _control(
    view: View, section: CduSection, memory: Mapping[str, np.ndarray], supply_c: F64, dt_s: F64
) -> Memory:
    """Return the recent set point, and the mean square excess of the racks' coolant over it, of each CDU."""
    cdus, of = section.cdus, section.cdu_of_rack
    final_c, own_c = (last_good(view, key)[cdus] for key in SET_POINTS)
    set_c, late_c = np.where(np.isfinite(final_c), final_c, own_c), memory["late_c"][cdus]
    late_c = np.fmax(set_c, late_c + -np.expm1(-dt_s / LATE_S) * (set_c - late_c))
    over_k = np.full(len(cdus), -np.inf)
    np.fmax.at(over_k, of, supply_c - late_c[of])
    # Coolant may be off to both sides alike, and what is colder is no danger
    over_k2 = np.where(np.isfinite(over_k), 2.0 * np.maximum(over_k, 0.0) ** 2, np.nan)
    share = -np.expm1(-dt_s / SPREAD_S)
    return {"late_c": late_c, "over_k2": _smoothed(memory["over_k2"][cdus], over_k2, share)}


def supply_sigma_k(memory: Mapping[str, np.ndarray], section: CduSection) -> F64:
    """Return 1 sigma of the racks' coolant above the set point of each CDU of a section, K."""
    return np.sqrt(memory["over_k2"][section.cdus] + SENSORS_K**2)


def resistance_k_per_w(section: CduSection, own: Mapping[str, np.ndarray]) -> F64:
    """Return the learned resistance of each GPU of a section to the coolant of its rack; NaN if unknown.

    `own` has the columns of the section's GPUs.
    """
    design, racks, place = section.site.design, section.at_racks, section.rack_of_gpu
    usual, full_w = design.gpu_resistance_k_per_w[racks][place], design.gpu_max_w[racks][place]
    weight = np.where(np.isfinite(usual * full_w), DESIGN_S * full_w**2, 0.0)
    s_py = own["s_py"] + weight * np.nan_to_num(usual)
    out: F64 = np.divide(s_py, own["s_pp"] + weight, out=np.full(len(s_py), np.nan), where=s_py > 0.0)
    return out


def ceilings(
    view: View,
    memory: Mapping[str, np.ndarray],
    section: CduSection,
    probability: float,
    horizon_s: float,
    slower: float = 1.0,
) -> Ceilings:
    """The warmest supply of each CDU of a section at which no GPU or rack passes its guard within the
    horizon. Each GPU passes its guard with at most this probability. `slower`: the flow over that of now.
    """
    site, z = view.site, NormalDist().inv_cdf(1.0 - probability)
    own = own_of(memory, section)
    most_w, growth = _most_w(view, memory, own, section, z, horizon_s)
    learned = resistance_k_per_w(section, own)
    usual = _of_rack(section, learned)
    film = film_of(slower * flow_pu(view, section))[section.rack_of_gpu]
    # A power that reads too high hides a bad plate
    wrong = np.isin(section.gpus, _accused(view, WRONG_POWER))
    resistance = np.fmax(_feared(own, learned, usual), np.where(wrong, usual, 0.0)) * film
    law_pu = FLOW_DOUBT_PU * (film - 1.0) / film
    spread_k = supply_sigma_k(memory, section)
    noise_k2 = SENSOR_K**2 + spread_k[section.cdu_of_gpu] ** 2
    noise_k = np.sqrt((RESISTANCE_PU**2 + law_pu**2) * (resistance * most_w) ** 2 + noise_k2)
    guard_c = _guard_c(view, own, section)
    of_gpu = guard_c - resistance * most_w - z * noise_k
    of_gpu = np.fmin(of_gpu, _now_c(view, section, guard_c))
    liquid = site.design.liquid[section.at_racks]
    of_gpu[~liquid[section.rack_of_gpu]] = np.inf
    of_rack = _rack_c(view, memory, section, growth, slower) - z * spread_k[section.cdu_of_rack]
    of_rack[~liquid] = np.inf
    out, by_gpu, by_rack = (np.full(site.sizes["cdu"], x) for x in (np.inf, NOTHING, NOTHING))
    gpu_c, gpu = _least(of_gpu, section.cdu_of_gpu, section.gpus, len(section.cdus))
    rack_c, rack = _least(of_rack, section.cdu_of_rack, section.racks, len(section.cdus))
    out[section.cdus] = np.minimum(gpu_c, rack_c)
    by_gpu[section.cdus] = np.where(rack_c < gpu_c, NOTHING, gpu)
    by_rack[section.cdus] = np.where(rack_c < gpu_c, rack, NOTHING)
    doubted = np.zeros(site.sizes["gpu"], np.bool_)
    doubted[section.at_gpus] = _doubted(view, own, section, (learned, usual))
    return Ceilings(out, by_gpu, by_rack, doubted)


def _least(values: F64, of: I32, names: I32, n: int) -> tuple[F64, I32]:
    """Return (minimum of each CDU [n], the first one with it); NaN is unknown and does not bind."""
    least, first = np.full(n, np.inf), np.full(n, NOTHING, np.int32)
    known = np.flatnonzero(values < np.inf)
    np.minimum.at(least, of[known], values[known])
    binding = known[values[known] == least[of[known]]][::-1]
    first[of[binding]] = names[binding]
    return least, first


def _now_c(view: View, section: CduSection, guard_c: F64) -> F64:
    """Return the supply at which GPUs now beyond their guard would not be; inf elsewhere.

    One alone of a CDU is a bad plate or a bad sensor, for which the coolant of all is not lowered.
    """
    over_k, cdu = good(view, TEMP, section.at_gpus) - guard_c, section.cdu_of_gpu
    hot = over_k > 0.0
    hot &= np.bincount(cdu[hot], minlength=len(section.cdus))[cdu] > 1
    return np.where(hot, good(view, SUPPLY, section.at_racks)[section.rack_of_gpu] - over_k, np.inf)


def _guard_c(view: View, own: Mapping[str, np.ndarray], section: CduSection) -> F64:
    """Return the temperature that a GPU must not exceed, from its guards and those of its memory."""
    gpus = section.at_gpus
    out = np.full(len(section.gpus), np.inf)
    if (limit := view.limit(TEMP)) is not None:
        out = np.fmin(out, limit.guard[gpus])
    if (limit := view.limit(HBM)) is not None:
        out = np.fmin(out, limit.guard[gpus] - np.maximum(own["hbm_rise_k"], 0.0))
    if (limit := view.limit(MARGIN)) is not None:
        out = np.fmin(out, good(view, TEMP, gpus) + good(view, MARGIN, gpus) - limit.guard[gpus])
    return out


def _most_w(
    view: View,
    memory: Mapping[str, np.ndarray],
    own: Mapping[str, np.ndarray],
    section: CduSection,
    z: float,
    horizon_s: float,
) -> tuple[F64, F64]:
    """Return (highest expected power of each GPU, growth of each rack over its recent peak) of a section.

    A GPU that works follows the forecast of its rack, from its own peak of late; one that idles may be given
    work that takes the most. A forecast is of any time since the horizon before it. Caps are not
    counted on: they may be lifted at any time.
    """
    design, racks, rack = view.site.design, section.at_racks, section.rack_of_gpu
    idle_w, full_w = design.gpu_idle_w[racks][rack], design.gpu_max_w[racks][rack]
    seen = memory["top_s"][section.cdus] >= TOP_AFTER_S
    top_w = np.where(seen, memory["top_w"][section.cdus], np.inf)
    limit_w = np.fmin(full_w, top_w[section.cdu_of_gpu])
    now_w = np.maximum(memory["rack_peak_w"][racks], 1.0)
    # Load that comes later leaves time to go colder
    slew = view.envelope(CONTROL).slew_per_s[section.cdus][section.cdu_of_rack]
    growth, earliest_s = np.full(len(now_w), np.nan), np.zeros(len(now_w))
    for (key, ahead_s), forecast in sorted(view.forecasts.items()):
        if key == RACK_W and ahead_s <= horizon_s:
            mean, hi = forecast.mean[racks], forecast.hi[racks]
            most_w = mean + np.maximum(hi - mean, 0.0) * max(1.0, z / Z90)
            spare_pu = slew * np.maximum(0.0, earliest_s - REACT_S) / MOST_RISE_K
            growth = np.fmax(growth, most_w / now_w - spare_pu)
            earliest_s[np.isfinite(most_w)] = ahead_s
    growth = np.maximum(growth, 1.0)
    of_gpu = growth[rack]
    known = (own["power_w"] > idle_w + IDLE_PU * (full_w - idle_w)) & np.isfinite(of_gpu)
    if view.jobs.known:
        known &= view.jobs.job_of_node[view.site.node_of_gpu[section.at_gpus]] >= 0
    known &= ~np.isin(section.gpus, _accused(view, WRONG_POWER))
    return np.where(known, np.fmin(own["peak_w"] * of_gpu, limit_w), limit_w), growth


def _feared(own: Mapping[str, np.ndarray], learned: F64, usual: F64) -> F64:
    """Resistances to reckon with: as learned, and not far below the rack's; as of now where a GPU is
    clearly warmer."""
    out = np.fmax(learned, LOW_PU * usual)
    over_k = own["rise_k"] - out * own["power_w"]
    clear = _contradicts(own, learned) > 0.0
    clear &= over_k > 0.0
    return np.where(clear, own["rise_k"] / np.maximum(own["power_w"], 1.0), out)


def _contradicts(own: Mapping[str, np.ndarray], learned: F64) -> F64:
    """Return the sign of the lasting difference between temperatures and power; 0 without one.

    Work that swings while readings are rare makes a difference of its own, for as long as both beat: the
    power behind a temperature is known to no better than the highest and the lowest one of late.
    """
    least_k = np.maximum(DOUBT_K, DOUBT_SIGMAS * np.sqrt(own["error_k2"] * LOOK_PU))
    warm_k = learned * (own["peak_w"] - own["power_w"])
    cold_k = learned * (own["power_w"] - own["trough_w"])
    error_k = own["error_k"]
    warm = error_k > np.fmax(least_k, warm_k)
    out: F64 = np.where(warm, 1.0, np.where(-error_k > np.fmax(least_k, cold_k), -1.0, 0.0))
    return out


def _of_rack(section: CduSection, resistance: F64) -> F64:
    """Return the median resistance of each GPU's rack."""
    rack, racks = section.rack_of_gpu, len(section.racks)
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


def _doubted(
    view: View, own: Mapping[str, np.ndarray], section: CduSection, resistances: tuple[F64, F64]
) -> Bool:
    """Return the GPUs of a section with an unknown temperature, or one that contradicts their power.

    `resistances`: those learned, and the median of each GPU's rack.
    """
    site, gpus, (learned, usual) = view.site, section.at_gpus, resistances
    off = view.value("node.power_on_state")[site.node_of_gpu[gpus]] == 0.0
    readings = good(view, TEMP, gpus) + good(view, POWER, gpus)
    unknown = ~np.isfinite(readings + good(view, SUPPLY, section.at_racks)[section.rack_of_gpu])
    wrong = (_contradicts(own, learned) != 0.0) | (learned < DOUBT_PU * usual)
    out: Bool = (unknown | wrong) & ~off & site.design.liquid[section.at_racks][section.rack_of_gpu]
    for mask in (view.vacant("gpu"), view.maintenance("gpu")):
        if mask is not None:
            out &= ~mask[gpus]
    return out


def _rack_c(
    view: View, memory: Mapping[str, np.ndarray], section: CduSection, growth: F64, slower: float
) -> F64:
    """Return the warmest supply at which a rack keeps its own guards; growth NaN counts as its design."""
    racks = section.at_racks
    out = np.full(len(section.racks), np.inf)
    if (limit := view.limit(SUPPLY)) is not None:
        out = np.fmin(out, limit.guard[racks])
    if (limit := view.limit(RETURN)) is not None:
        full_w = view.site.design.rack_max_w[racks]
        most_w = np.fmin(full_w, growth * memory["rack_peak_w"][racks])
        # Of hours, as the power of one look and the heat of another one do not belong together
        s_k, s_w = memory["rack_s_k"][racks], memory["rack_s_w"][racks]
        nominal_lpm = view.site.design.rack_flow_lpm[racks]
        warm_c = np.full(len(nominal_lpm), COOLANT_C)
        w_per_k = heat_rate_w_per_k(COOLANTS[view.site.file.coolant], nominal_lpm, warm_c)
        # A return that never reported, or jumps: all of the power warms the nominal flow
        k_per_w = np.divide(1.0, w_per_k, out=np.full(len(w_per_k), np.nan), where=w_per_k > 0.0)
        jumps = np.isin(section.racks, _accused(view, JUMPING_RETURN))
        np.divide(s_k, s_w, out=k_per_w, where=(s_w > 0.0) & ~jumps)
        now_k = np.where(jumps, 0.0, memory["rack_rise_k"][racks])
        rise_k = np.fmax(k_per_w * most_w / flow_pu(view, section), now_k)
        out = np.fmin(out, limit.guard[racks] - rise_k / slower)
    return out


def _accused(view: View, faults: Collection[tuple[str, str, str]]) -> list[int]:
    """Return the rows of sensors with one of these reported faults."""
    return [f.entity for f in view.faults() if (f.kind, f.table, f.signal) in faults]


def _smoothed(before: F64, now: F64, share: F64) -> F64:
    """Return an exponentially smoothed value; the first reading counts fully, a missing one not at all."""
    moved = np.where(np.isnan(before), now, before + share * (now - before))
    return np.where(np.isnan(now), before, moved)
