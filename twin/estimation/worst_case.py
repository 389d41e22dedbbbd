"""Worst case: how bad an unreported value may be by now, by the fastest drift that a profile states, and for
GPUs no farther than their power can heat them while coolant is known to flow, and at once where it stands.

T = T_in + P R(Q) at rest (domain law); a value that is read is never bettered by this.
"""

from __future__ import annotations

import numpy as np

from twin.catalogue import F32, F64, I32, TABLES, Bool, Signal
from twin.contracts import Windows
from twin.estimation.estimator import Estimator
from twin.physics import resistance_k_per_w
from twin.site import CONVECTIVE_SHARE, FLOW_EXPONENT, Site
from twin.telemetry import State

# Signals that rise, or margins that fall, no more than the silicon does.
HEATED = ("gpu.temp_c", "gpu.hbm_temp_c", "gpu.thermal_margin_k")
# Of the resistance in use, and of the sensors, that may be so much higher. source: estimate
RESISTANCE_PU, SENSOR_K = 1.1, 3.0
LEAST_FLOW_PU = 0.2  # of nominal: below, the coolant counts as stagnant. source: estimate


def worst_case(site: Site, state: State, estimator: Estimator, windows: Windows, signal: Signal) -> F32:
    """Return the present worst case [n]; NaN without any reading."""
    table, limit, slew = state.tables[signal.table], site.limits.get(signal.key), None
    value: F32 = table.value[signal.row]
    urged = _uncooled(site, state) if signal.key in HEATED else None
    if table.steady(signal.row, state.now_ns, urged):
        return value.copy()
    if limit is not None and np.isfinite(limit.slew_per_s).any():
        slew = np.where(np.isfinite(limit.slew_per_s), limit.slew_per_s, signal.slew_per_s)
    slew = windows.gentler(table, signal, state.now_ns, slew)
    if signal.key not in HEATED:
        return table.worst(signal, state.now_ns, slew)
    worst = table.worst(signal, state.now_ns, slew, urged)
    drifted = np.flatnonzero((worst != value) & np.isfinite(value)).astype(np.int32)
    if not len(drifted):
        return worst
    inlet_c, heat_k = _heat(site, state, estimator, drifted)
    # A rise above the temperature that was read; where none was, the whole of it
    read_c = table.value[TABLES["gpu"].by_name["temp_c"].row, drifted].astype(np.float64)
    rise_k = np.where(np.isfinite(read_c), inlet_c + heat_k - read_c, heat_k)
    rise_k = np.where(np.isfinite(inlet_c + heat_k), np.maximum(rise_k, 0.0), np.inf)
    drift = (worst[drifted] - value[drifted]).astype(np.float64)
    worst[drifted] = value[drifted] + np.sign(drift) * np.minimum(np.abs(drift), rise_k)
    return worst


def _uncooled(site: Site, state: State) -> Bool | None:
    """Return the GPUs [n] whose coolant is known to stand: they heat up within seconds, however seldom they
    report. None where all flows.
    """
    racks, flow = state.tables["rack"], TABLES["rack"].by_name["flow_lpm"]
    with np.errstate(invalid="ignore"):
        stands = racks.value[flow.row] < LEAST_FLOW_PU * site.design.rack_flow_lpm
    if not stands.any():
        return None
    stands &= racks.current(flow, state.now_ns)
    return np.asarray(stands[site.rack_of_gpu], np.bool_) if stands.any() else None


def _heat(site: Site, state: State, estimator: Estimator, gpu: I32) -> tuple[F64, F64]:
    """Return (coolant at the racks of these GPUs, degC; rise at rest above it, K) at worst [k]; NaN where the
    coolant is not known to flow.
    """
    racks, gpus, rack_of = state.tables["rack"], state.tables["gpu"], site.rack_of_gpu[gpu]
    supply, flow = (TABLES["rack"].by_name[name] for name in ("supply_temp_c", "flow_lpm"))
    known = racks.current(supply, state.now_ns) & racks.current(flow, state.now_ns)
    flow_pu = racks.worst(flow, state.now_ns) / site.design.rack_flow_lpm
    flows = known & (flow_pu >= LEAST_FLOW_PU)  # NaN is no flow
    inlet_c = np.where(flows, racks.worst(supply, state.now_ns), np.nan).astype(np.float64)
    factor = resistance_k_per_w(np.ones_like(flow_pu), flow_pu, CONVECTIVE_SHARE, FLOW_EXPONENT)
    power_w = gpus.worst(TABLES["gpu"].by_name["power_w"], state.now_ns)[gpu]
    power_w = np.fmin(power_w, site.design.gpu_max_w[rack_of]).astype(np.float64)  # also of an unknown one
    k_per_w = RESISTANCE_PU * estimator.gpus.temp.resistance_k_per_w[gpu] * factor[rack_of]
    return inlet_c[rack_of], k_per_w * power_w + SENSOR_K
