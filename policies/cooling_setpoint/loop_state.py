"""Loop state: parameters that `cooling_setpoint` has learned of each loop, as columns of its memory.

Readings are smoothed; the loop's factors are fitted to its meter; every move of a set point is an experiment
that shows how much more the GPUs draw per kelvin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from policies.cooling_setpoint.balance import LeakSlope, PowerBalance
from policies.cooling_setpoint.loop_model import (
    FACTORS,
    LoopPlate,
    LoopPoint,
    exchanger_of,
    fit,
    fresh_covariance,
    plates_of,
    reached_c,
    water_w_per_k_per_lpm,
)
from policies.cooling_setpoint.sections import LoopCdus, good
from policies.power_capping import COOLANT_C, gain_of
from twin.catalogue import F64, NS
from twin.contracts import Memory, View
from twin.physics import COOLANTS, LEAK_PU_PER_K, LEAK_SPREAD_PU_PER_K, heat_rate_w_per_k
from twin.site import APPROACH_K
from twin.telemetry import ColumnSpec

SMOOTH_S = 300.0  # of a loop's readings: its legs hold water for minutes; source: estimate
LEAK_SMOOTH_S = 150.0  # of what GPUs draw beside what is expected of them; source: estimate
# Leakage rises faster at the temperatures of work than near 40 degC, for which it is stated; source: estimate
LEAK_AT_WORK, LEAK_DRIFT_PU = 1.5, 0.1  # 1 sigma of its drift in a day, as temperatures change
# Share of a move that a learning expectation has taken over after ten minutes; source: estimate
LEARNED_PU = 0.1
OFFSET_K, OFFSET_S = APPROACH_K + 3.0, 3600.0  # of a loop below its CDUs; source: estimate
SEEN_S = 30 * 86_400.0  # in which the range of supplies that were seen is forgotten by e
STEADY_K = 0.5  # by which a loop's supply may move within the smoothing while its meter teaches
LEAST_MOVE_K = 0.4  # of the GPUs' mean temperature, to estimate leakage from; source: estimate
EXPERIMENT_PU = 1e-4  # 1 sigma of what work makes of a difference, of the highest power; source: estimate
EXPERIMENT_AFTER_S = 3600.0  # of watching: before, expectations of power still move by themselves
HEADS = (
    "supply_c",
    "heat_w",
    "air_c",
    "flow_lpm",
    "power_w",
    "warm_w_per_k",
    "coldest_c",
    "error_pu",
    "temp_c",
)

COLUMNS = {
    **{f"loop_{name}": ColumnSpec("f8", np.nan) for name in HEADS},
    "factors": ColumnSpec("f8", lead=(FACTORS,)),
    "covariance": ColumnSpec("f8", lead=(FACTORS * FACTORS,)),  # all 0: nothing learned
    "offset_k": ColumnSpec("f8", OFFSET_K),
    "low_c": ColumnSpec("f8", np.nan),
    "high_c": ColumnSpec("f8", np.nan),
    "leak_pu_per_k": ColumnSpec("f8", LEAK_AT_WORK * LEAK_PU_PER_K),
    "error_var": ColumnSpec("f8", np.nan),
    "leak_var": ColumnSpec("f8", LEAK_SPREAD_PU_PER_K**2),
    "before_pu": ColumnSpec("f8", np.nan),
    "before_c": ColumnSpec("f8", np.nan),
    "watched_s": ColumnSpec("f8"),
    "fitted_ns": ColumnSpec("i8"),
    "off_sigmas": ColumnSpec("f8"),
}


def observe(view: View, memory: Memory, groups: Sequence[LoopCdus], dt_s: F64) -> Memory:
    """Return the smoothed readings of each loop, and the time with all of them present; `dt_s` [n_cdu]."""
    out = {name: memory[name].copy() for name in COLUMNS}
    measured = {name: good(view, f"loop.{name}") for name in ("supply_temp_c", "power_w")}
    residual, site = view.residual("gpu.power_w"), view.site
    for group in groups:
        i, gpus = group.loop, group.gpus
        if i < 0:
            continue
        since_s = float(dt_s[group.cdus[0]])
        share, quick = (-np.expm1(-since_s / s) for s in (SMOOTH_S, LEAK_SMOOTH_S))
        supply_c, heat_w, flow_lpm, warm_w_per_k = _cdu_sums(view, group)
        off_w = np.full(len(gpus), np.nan) if residual is None else residual.difference[gpus]
        temp_c, full_w = good(view, "gpu.temp_c", gpus), site.design.gpu_max_w[site.rack_of_gpu[gpus]]
        known = np.isfinite(off_w + temp_c + full_w)
        whole = known.sum() > 0.5 * len(gpus)
        now = {
            "supply_c": measured["supply_temp_c"][i],
            "heat_w": heat_w,
            "air_c": air_c(view, plates_of(site)[i]),
            "flow_lpm": flow_lpm,
            "power_w": measured["power_w"][i],
            "warm_w_per_k": warm_w_per_k,
            "coldest_c": supply_c,
            "error_pu": off_w[known].sum() / full_w[known].sum() if whole else np.nan,
            "temp_c": temp_c[known].mean() if whole else np.nan,
        }
        off = now["error_pu"] - out["loop_error_pu"][i]
        out["error_var"][i] = _smooth(float(out["error_var"][i]), float(off * off), float(share))
        for name, value in now.items():
            column, step = out[f"loop_{name}"], quick if name in ("error_pu", "temp_c") else share
            column[i] = _smooth(float(column[i]), float(value), float(step))
        if all(np.isfinite(now[name]) for name in HEADS[:4]):
            out["watched_s"][i] += since_s
        _remember_range(out, i, since_s)
    return out


def _cdu_sums(view: View, group: LoopCdus) -> tuple[float, float, float, float]:
    """Return (coldest supply, heat, facility flow, heat rate of the racks' coolant) of a group's CDUs."""
    cdus = group.cdus
    supply_c = good(view, "cdu.supply_temp_c")[cdus]
    lpm = good(view, "cdu.facility_flow_lpm")[cdus]
    rise_k = good(view, "cdu.facility_return_temp_c")[cdus] - good(view, "cdu.facility_supply_temp_c")[cdus]
    coolant = COOLANTS[view.site.file.coolant]
    warm = heat_rate_w_per_k(coolant, good(view, "cdu.flow_lpm")[cdus], np.full(len(cdus), COOLANT_C))
    heat_w = float((lpm * rise_k).sum()) * water_w_per_k_per_lpm()
    return float(supply_c.min()), heat_w, float(lpm.sum()), float(warm.sum())


def air_c(view: View, plate: LoopPlate) -> float:
    """Return the outdoor air of a loop's coolers, degC, for a tower the wet bulb; NaN if unknown."""
    return float(good(view, "site.outdoor_wet_bulb_c" if plate.wet else "site.outdoor_temp_c")[0])


def _smooth(before: float, now: float, share: float) -> float:
    if np.isnan(now):
        return before
    return now if np.isnan(before) else before + share * (now - before)


def _remember_range(out: Memory, i: int, dt_s: float) -> None:
    """Update the range of recent supplies, which shrinks slowly towards the present one."""
    now_c, fade = float(out["loop_coldest_c"][i]), float(-np.expm1(-dt_s / SEEN_S))
    if np.isfinite(now_c):
        for name, beyond in (("low_c", np.fmin), ("high_c", np.fmax)):
            before = float(out[name][i])
            out[name][i] = now_c if np.isnan(before) else beyond(before + fade * (now_c - before), now_c)


def point_of(memory: Mapping[str, np.ndarray], i: int) -> LoopPoint | None:
    """Return the operating point of a loop; None if unknown."""
    values = [float(memory[f"loop_{name}"][i]) for name in HEADS[:4]]
    return LoopPoint(*values) if np.isfinite(values).all() and values[1] > 0.0 else None


def covariance_of(memory: Mapping[str, np.ndarray], i: int) -> F64:
    """Return the covariance of the factors of a loop [4, 4]."""
    kept = memory["covariance"][:, i].reshape(FACTORS, FACTORS)
    return kept.copy() if kept.any() else fresh_covariance()


def teach(view: View, out: Memory, group: LoopCdus, now_ns: int) -> None:
    """Fit the factors of a loop to its meter, and its offset below the CDUs. Changes `out`."""
    i, at = group.loop, point_of(out, group.loop)
    measured_c = float(good(view, "loop.supply_temp_c")[i])
    if at is None or not abs(measured_c - at.supply_c) <= STEADY_K:
        return
    plate, factors = plates_of(view.site)[i], out["factors"][:, i].copy()
    gap_s = (now_ns - int(out["fitted_ns"][i])) / NS if out["fitted_ns"][i] else 0.0
    out["fitted_ns"][i] = now_ns
    power_w = float(out["loop_power_w"][i])
    if np.isfinite(power_w):
        found = fit(plate, factors, covariance_of(out, i), at, power_w, gap_s)
        out["factors"][:, i], out["covariance"][:, i] = found.factors, found.covariance.reshape(-1)
        out["off_sigmas"][i] = found.off_sigmas
    # Fans at their floor cool further than aimed, and full fans without a chiller not so far
    aim_c = float(out["loop_coldest_c"][i]) - float(out["offset_k"][i])
    free = abs(reached_c(plate, out["factors"][:, i], aim_c, at) - aim_c) < 0.1
    offset_k = float(out["loop_coldest_c"][i]) - at.supply_c
    if free and np.isfinite(offset_k):
        share = -np.expm1(-max(gap_s, SMOOTH_S) / OFFSET_S)
        out["offset_k"][i] += share * (offset_k - out["offset_k"][i])


def learn_leakage(out: Memory, i: int, gap_s: float) -> None:
    """Learn leakage from a move of the set point: how much more GPUs draw beside what is expected of them,
    for each kelvin that they are warmer. Changes `out`."""
    drift = (LEAK_DRIFT_PU * LEAK_PU_PER_K) ** 2 * gap_s / 86_400.0
    var = min(float(out["leak_var"][i]) + drift, LEAK_SPREAD_PU_PER_K**2)
    warm_k = float(out["loop_temp_c"][i] - out["before_c"][i])
    changed = float(out["loop_error_pu"][i] - out["before_pu"][i]) / (1.0 - LEARNED_PU)
    if abs(warm_k) >= LEAST_MOVE_K and np.isfinite(changed) and out["watched_s"][i] >= EXPERIMENT_AFTER_S:
        # Two smoothed readings, each of as many as come in the smoothing: two at least
        noise = (2.0 * float(out["error_var"][i]) + EXPERIMENT_PU**2) / warm_k**2
        off = LEAK_PU_PER_K + changed / warm_k - float(out["leak_pu_per_k"][i])
        bounded = float(np.clip(off, -3.0 * np.sqrt(var + noise), 3.0 * np.sqrt(var + noise)))
        gain = var / (var + noise)
        out["leak_pu_per_k"][i] = max(0.0, float(out["leak_pu_per_k"][i]) + gain * bounded)
        var *= 1.0 - gain
    out["leak_var"][i] = var
    out["before_c"][i] = out["before_pu"][i] = np.nan


def begin_experiment(out: Memory, i: int) -> None:
    """Note what GPUs draw before a move. Changes `out`."""
    out["before_c"][i], out["before_pu"][i] = out["loop_temp_c"][i], out["loop_error_pu"][i]


def balance_of(view: View, memory: Mapping[str, np.ndarray], group: LoopCdus) -> PowerBalance | None:
    """Return readings and parameters of a loop now; None if too little is known."""
    i = group.loop
    at = point_of(memory, i) if i >= 0 else None
    if at is None:
        return None
    site, plate = view.site, plates_of(view.site)[i]
    now_c, warm = float(memory["loop_coldest_c"][i]), float(memory["loop_warm_w_per_k"][i])
    racks = group.racks[site.design.liquid[group.racks]]
    of = site.rack_of_gpu[group.gpus]
    full_w = float(np.nansum(site.design.gpu_max_w[of] * gain_of(site)[of]))
    leak = LeakSlope(
        full_w * float(memory["leak_pu_per_k"][i]), full_w * float(np.sqrt(memory["leak_var"][i]))
    )
    if not np.isfinite(now_c + warm):
        return None
    return PowerBalance(
        plate=plate,
        factors=memory["factors"][:, i].copy(),
        covariance=covariance_of(memory, i),
        at=at,
        exchanger=exchanger_of(plate, now_c, warm, at),
        now_c=now_c,
        offset_k=float(memory["offset_k"][i]),
        low_c=float(memory["low_c"][i]),
        high_c=float(memory["high_c"][i]),
        leak=leak,
        racks=len(racks),
    )
