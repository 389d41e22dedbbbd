"""The parameters of a mirrored plant: what the twin has learned of its site, and what readings say at once.

Flows and pressures of one moment tell resistances and pump heads without delay; what has memory (plates,
exchangers, the share of the liquid) is taken as the estimator has learned it. What nobody knows stays as it
was drawn. May import the state, hidden parameters and NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from twin.frame import F64, Bool
from twin.plant.parameters import Parameters
from twin.signals import find_signal
from twin.state import GOOD, MISSING, STALE

if TYPE_CHECKING:
    from twin.engine import Engine

LEAST_FLOW_PU, LEAST_DROP_PA = 0.05, 500.0  # below, a reading tells no resistance; source: estimate
RUNNING_PU = 0.05  # a pump below this speed stands; source: estimate
FULL_SPEED_PU = 0.98  # above it a pump can give no more, and its pressure is no set point
BUSY_PU = 0.10  # of the dynamic power, below which it tells no coefficient; source: estimate
SHARES = (0.35, 0.65)  # of one side of a rack's feeds, while both carry; source: estimate
LATELY_S = 10.0  # source: estimate
TRUST = (0.5, 2.0)  # a reading that asks for more or less of a parameter than that is not believed
BIT_ANY_SLOW = 0x4 | 0x20 | 0x40  # power cap and thermal slowdown, DCGM field 112


class Seen:
    """What the twin holds of its site: readings that are good or at most old, and learned parameters."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.site = engine, engine.site
        self.now_ns = engine.state.now_ns
        self._parameters = getattr(engine.estimator, "parameters", {})

    def reading(self, key: str) -> F64:
        """The last value of a gauge or state [n]; NaN where there is none that may be used."""
        signal = find_signal(key)
        assert signal is not None, key
        column = self.engine.state.tables[signal.table]
        quality = column.quality_of(signal, self.now_ns)
        value = column.value[signal.row].astype(np.float64)
        # One reading that was left out does not make a device unknown
        lately = (quality == MISSING) & (column.age_s(signal, self.now_ns) <= LATELY_S)
        return np.where((quality == GOOD) | (quality == STALE) | lately, value, np.nan)

    def count(self, key: str) -> F64:
        """The raw value of a counter [n]; 0 where it never spoke."""
        signal = find_signal(key)
        assert signal is not None, key
        raw = self.engine.state.tables[signal.table].raw[signal.row]
        out: F64 = np.maximum(raw, 0).astype(np.float64)
        return out

    def learned(self, name: str, n: int, reference: bool = False) -> F64:
        """A parameter of the estimator [n], or what it was when it had settled; NaN where it has none."""
        found = self._parameters.get(name)
        if found is None or len(found.value) != n:
            return np.full(n, np.nan)
        return np.array(found.reference if reference else found.value, np.float64)

    def told(self, kind: str, table: str) -> Bool:
        """Entities [n] of which the diagnosis tells this fault now."""
        out = np.zeros(self.site.sizes[table], np.bool_)
        for fault in self.engine.diagnosis.faults:
            if fault.kind == kind and fault.table == table:
                out[fault.entity] = True
        return out


def calibrate(seen: Seen, p: Parameters, activity: F64, fan_w: F64) -> dict[str, F64]:
    """Set parameters to what is known; returns factors [n] of a Disturbance where a fault is told.

    `activity` [3, n_gpu] is what GPUs do now, `fan_w` [n_rack] what the fans of nodes draw. What a told fault
    has changed goes into the factor of that fault, over what the parameter was when it was well.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        _gpus(seen, p, activity)
        _nodes(seen, p, activity, fan_w)
        _racks(seen, p)
        factors = _circuits(seen, p)
        factors |= _exchangers(seen, p) | _plates(seen, p)
    return factors


def _near(wanted: F64, drawn: F64, low: float = TRUST[0], high: float = TRUST[1]) -> F64:
    """What a reading asks for, if it is not absurd beside what was drawn; else that."""
    known = np.isfinite(wanted) & (wanted > 0.0)
    return np.where(known, np.clip(wanted, low * drawn, high * drawn), drawn)


def _gpus(seen: Seen, p: Parameters, activity: F64) -> None:
    """Power coefficients, so that a GPU that is not held back draws what it is seen to draw."""
    sm, tensor, dram = activity
    power, temp = seen.reading("gpu.power_w"), seen.reading("gpu.temp_c")
    bits = np.nan_to_num(seen.reading("gpu.clock_event_bits")).astype(np.int64)
    free = (bits & BIT_ANY_SLOW) == 0
    over_k = np.where(np.isfinite(temp), temp, 45.0) - 40.0
    static = p.gpu_idle_w + p.gpu_leak_w_per_k * over_k * (1.0 + over_k / 120.0)
    dynamic = sm * (p.gpu_sm_w + tensor * p.gpu_cross_w) + tensor * p.gpu_tensor_w + dram * p.gpu_dram_w
    most = p.gpu_sm_w + p.gpu_tensor_w + p.gpu_dram_w + p.gpu_cross_w
    tells = free & (dynamic >= BUSY_PU * most)
    factor = np.where(tells, _near((power - static) / dynamic, np.ones_like(dynamic)), 1.0)
    for name in ("gpu_sm_w", "gpu_tensor_w", "gpu_dram_w", "gpu_cross_w"):
        getattr(p, name)[:] *= factor


def _nodes(seen: Seen, p: Parameters, activity: F64, fan_w: F64) -> None:
    """What a node draws beside its GPUs, from its own meter."""
    site, n = seen.site, seen.site.sizes["node"]
    count = np.maximum(np.diff(site.gpu_start_of_node), 1)
    use = np.bincount(site.node_of_gpu, weights=activity[0], minlength=n) / count
    cpu = seen.reading("node.cpu_power_w")
    p.node_cpu_idle_w[:] = _near(cpu - p.node_cpu_dynamic_w * use, p.node_cpu_idle_w, 0.2, 5.0)
    cpu = np.where(np.isfinite(cpu), cpu, p.node_cpu_idle_w + p.node_cpu_dynamic_w * use)
    gpus = np.bincount(site.node_of_gpu, weights=seen.reading("gpu.power_w"), minlength=n)
    delivered = (seen.reading("node.power_w") - p.node_loss0_w) / (1.0 + p.node_loss1)
    fans = (fan_w / np.maximum(np.diff(site.node_start_of_rack), 1))[site.rack_of_node]
    p.node_other_w[:] = _near(delivered - gpus - cpu - fans, p.node_other_w, 0.1, 5.0)


def _racks(seen: Seen, p: Parameters) -> None:
    """Overhead, and the share of the heat that the coolant takes."""
    site, n = seen.site, seen.site.sizes["rack"]
    power = seen.reading("rack.power_w")
    nodes = np.bincount(site.rack_of_node, weights=seen.reading("node.power_w"), minlength=n)
    overhead, factor = seen.learned("rack.overhead", n), seen.learned("rack.loss_factor", n)
    learned = np.isfinite(overhead) & np.isfinite(factor)
    p.rack_overhead_pu[learned] = np.maximum(factor[learned] - 1.0, 0.0)
    rest = np.where(learned, overhead, power - nodes * (1.0 + p.rack_overhead_pu))
    p.rack_overhead_w[:] = _near(rest, np.maximum(p.rack_overhead_w, 1.0), 0.0, 5.0)
    one, two = (
        np.bincount(site.rack_of_node, weights=seen.reading(f"node.psu{k}_power_w"), minlength=n)
        for k in (1, 2)
    )
    share = one / (one + two)
    both = (share > SHARES[0]) & (share < SHARES[1])  # else one side is lost, which says nothing of both
    p.rack_share_a_pu[both] = share[both]
    capture = seen.engine.estimator.liquid_capture()
    gpus = np.bincount(site.rack_of_gpu, weights=seen.reading("gpu.power_w"), minlength=n)
    to_air = p.rack_to_air_w_per_k * (seen.reading("rack.return_temp_c") - seen.reading("rack.inlet_temp_c"))
    wanted = capture * power + np.nan_to_num(to_air)
    others = np.maximum(power - gpus, 1.0)
    part = np.clip((wanted - p.rack_plate_capture_pu * gpus) / others, 0.0, 0.99)
    known = np.isfinite(part) & p.rack_liquid
    p.rack_rest_capture_pu[known] = part[known]
    plates = np.clip((wanted - part * others) / gpus, 0.5, 1.0)
    known &= np.isfinite(plates)
    p.rack_plate_capture_pu[known] = plates[known]


def _circuits(seen: Seen, p: Parameters) -> dict[str, F64]:
    """Resistances of branches and filters, pressure set points and pumps."""
    flow, drop = seen.reading("rack.flow_lpm"), seen.reading("rack.diff_pressure_pa")
    tells = p.rack_liquid & (flow >= LEAST_FLOW_PU * p.rack_flow_lpm) & (drop >= LEAST_DROP_PA)
    now = np.where(tells, drop / flow**2, seen.learned("rack.branch", len(flow)))
    blocked = seen.told("branch_blocked", "rack")
    well = np.where(blocked, seen.learned("rack.branch", len(flow), reference=True), now)
    p.rack_branch[:] = np.where(p.rack_liquid, _near(well, p.rack_branch, 0.1, 10.0), p.rack_branch)
    # Where nothing flows any more, nothing tells how little: it is shut
    shut = blocked & ~(flow >= LEAST_FLOW_PU * p.rack_flow_lpm)
    factors = {
        "rack_branch_factor": _factor(blocked, np.where(shut, 1e12 * p.rack_branch, now), p.rack_branch)
    }

    through, across = seen.reading("cdu.flow_lpm"), seen.reading("cdu.diff_pressure_pa")
    running = through >= LEAST_FLOW_PU * p.cdu_flow_lpm
    now = np.where(running, seen.reading("cdu.filter_diff_pressure_pa") / through**2, np.nan)
    clogged = seen.told("filter_blocked", "cdu")
    well = np.where(clogged, seen.learned("cdu.filter", len(through), reference=True), now)
    p.cdu_filter[:] = _near(well, p.cdu_filter, 0.1, 10.0)
    factors["cdu_filter_factor"] = _factor(clogged, now, p.cdu_filter)

    speeds = np.stack([seen.reading("cdu.pump1_speed_pu"), seen.reading("cdu.pump2_speed_pu")], axis=1)
    on = speeds > RUNNING_PU
    pumps = np.maximum(on.sum(axis=1), 1)
    squared = np.where(on, speeds**2, 0.0).sum(axis=1) / pumps
    filter_now = p.cdu_filter * factors["cdu_filter_factor"]
    inner = (p.cdu_inner + filter_now) * through**2
    head = across + inner + p.cdu_curve.mean(axis=1) * (through / pumps) ** 2
    drawn = p.cdu_head0_pa.mean(axis=1)
    tells = running & on.any(axis=1) & (across >= LEAST_DROP_PA)
    factor = _near(np.where(tells, head / squared, np.nan), drawn) / drawn
    p.cdu_head0_pa[:] *= factor[:, None]
    held = seen.reading("cdu.diff_pressure_setpoint_pa")
    steady = tells & (np.nanmax(np.where(on, speeds, 0.0), axis=1, initial=0.0) < FULL_SPEED_PU)
    steady &= ~clogged & on.all(axis=1)
    held = np.where(np.isfinite(held), held, np.where(steady, across, np.nan))
    p.cdu_drop_set_pa[:] = _near(held, p.cdu_drop_set_pa)
    return factors


def _exchangers(seen: Seen, p: Parameters) -> dict[str, F64]:
    n = len(p.cdu_flow_lpm)
    ua = seen.learned("cdu.ua", n)
    fouled = seen.told("exchanger_fouled", "cdu")
    well = np.where(fouled, seen.learned("cdu.ua", n, reference=True), ua)
    p.cdu_ua_w_per_k[:] = _near(well, p.cdu_ua_w_per_k, 0.2, 3.0)
    valve, primary = seen.reading("cdu.facility_valve1_pu"), seen.reading("cdu.facility_flow_lpm")
    full = np.where(valve >= 0.05, primary / valve, seen.learned("cdu.valve_full_lpm", n))
    p.cdu_primary_lpm[:] = _near(full, p.cdu_primary_lpm, 0.2, 5.0)
    return {"cdu_ua_factor": np.minimum(_factor(fouled, ua, p.cdu_ua_w_per_k), 1.0)}


def _plates(seen: Seen, p: Parameters) -> dict[str, F64]:
    """Cold plates. The estimator's resistance stands over the rack's supply: what the first half of a tray
    adds to the water of the second is no resistance of the second."""
    site, n = seen.site, seen.site.sizes["gpu"]
    now, was = seen.learned("gpu.resistance", n), seen.learned("gpu.resistance", n, reference=True)
    bad = seen.told("plate_degraded", "gpu") | seen.told("tray_blocked", "node")[site.node_of_gpu]
    drawn = p.gpu_conduction_k_per_w + p.gpu_convection_k_per_w
    count = np.diff(site.gpu_start_of_node)[site.node_of_gpu]
    place = np.arange(n) - site.gpu_start_of_node[site.node_of_gpu]
    later = (count > 1) & (count % 2 == 0) & (place >= count // 2)
    added = np.where(later, p.rack_upstream_k_per_w[site.rack_of_gpu], 0.0)
    well = np.where(bad, was, now) - added
    ratio = _near(well, drawn, 0.3, 4.0) / drawn
    p.gpu_conduction_k_per_w[:] *= ratio
    p.gpu_convection_k_per_w[:] *= ratio
    capacity = seen.learned("gpu.tau_s", n) / np.where(np.isfinite(now), now, drawn)
    p.gpu_heat_capacity_j_per_k[:] = _near(capacity, p.gpu_heat_capacity_j_per_k)
    return {"gpu_plate_factor": np.maximum(_factor(bad, now - added, drawn * ratio), 1.0)}


def _factor(told: Bool, now: F64, well: F64) -> F64:
    """By how much a told fault has changed a parameter [n]; 1 where none is told or nothing is known."""
    ratio = now / well
    return np.where(told & np.isfinite(ratio) & (ratio > 0.0), ratio, 1.0)
