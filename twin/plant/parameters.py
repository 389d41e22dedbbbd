"""Hidden parameters of a simulated site, drawn once around its design and unknown to the twin.

Spreads are one standard deviation, cut at two; `spread` scales them all, 0 gives the design itself.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from twin.catalogue import F64, Bool
from twin.physics import COOLANTS, FAN_RATED_W_PER_W, heat_rate_w_per_k
from twin.plant.layout import Index
from twin.site import (
    APPROACH_K,
    CDU_FILTER_DROP_PA,
    CDU_INNER_DROP_PA,
    CDU_VOLUME_MIN,
    CONVECTIVE_SHARE,
    COOLER_APPROACH_K,
    FLOW_EXPONENT,
    LOOP_PUMP_W_PER_LPM,
    LOOP_VOLUME_MIN,
    PRIMARY_FLOW_RATIO,
    PUMP_EFFICIENCY_PU,
    PUMP_SHUTOFF_RATIO,
    PUMP_SPEED_NOMINAL_PU,
    PUMPS_PER_CDU,
    RACK_DROP_PA,
    RACK_VOLUME_MIN,
    TOWER_APPROACH_K,
    TOWER_PUMP_W_PER_LPM,
    Design,
    LoopGroup,
    Site,
    expand,
)

# Shares of a GPU's dynamic power: SMs, tensor cores, memory, and what SMs and tensor cores together add
# beyond their sum. The last has no place in a linear model of power; source: estimate.
POWER_SHARES = (0.44, 0.29, 0.22, 0.05)
LEAKAGE_W_PER_K_PER_W = 0.0004  # at 40 degC, of rated power: 0.5 W/K at 1200 W; source: estimate
LEAKAGE_SCALE_K = 60.0  # over which leakage grows by e; source: estimate
AIR_RISE_K = 12.0  # of the air through a rack at full fans and full heat; source: estimate
AIR_FAN_SHARE = (
    0.06  # of a node's other power, fans at full speed over rated GPU power in air; source: estimate
)
LIQUID_FAN_SHARE = 0.008  # the same where liquid carries the most; source: estimate
CPU_BUSY_PU = 0.9  # of a CPU's dynamic power, beside GPUs that are fully busy; source: estimate
NODE_LOSS_PU = 0.1  # of regulators and fans, where no profile says; source: estimate
STANDING_LOSS, OHMIC_LOSS = 0.001, 0.005  # of a node's supplies, over its rated power; source: estimate
# Of the share of a resistance that falls with the flow: what plates of one make have in common, unknown to
# the twin, and each for itself; source: estimate
SHARE_OF_SITE, SHARE_OF_GPU = 0.04, 0.03
AIR_CONVECTIVE_SHARE = 0.6  # of heat sinks in air, at nominal fans; source: estimate
PLATE_CAPTURE_PU = 0.97  # of a GPU's heat that goes into its plate; source: estimate
RACK_TO_AIR_W_PER_K = 25.0  # from warm manifolds and hoses to the room; source: estimate
STAGNANT_SHARE = 0.03  # of a rack's warm coolant that the plates see at nominal flow; source: estimate
HALL_SET_C = 24.0  # cold aisle; source: estimate, inside ASHRAE's recommended 18-27 degC
HALL_J_PER_K_PER_RACK = 2.5e5  # air and steel of a hall per rack; source: estimate
RESERVOIR_L_PER_LPM = 0.12  # reserve of a CDU's circuit over its nominal flow; source: estimate
BREAKER_RATING_OVER_BUDGET = 1.25  # a continuous load takes at most 80 % of a breaker, domain.md B
FACILITY_MARGIN_K = 3.0  # loop colder than the exchangers need at nominal heat; source: estimate
# Of a pump's motor with its drive: IEC 60034-30-1 asks for 0.90 of a four-pole IE3 motor of 7.5 kW, and a
# drive keeps 0.95 of that. The rest warms the room; what reaches the shaft ends as heat in the water.
MOTOR_EFFICIENCY_PU = 0.86
BYPASS_PU = 0.1  # of a loop's nominal flow, which passes the CDUs by; source: estimate
FACILITY_WATER_C = 30.0  # at which the facility water's heat capacity is taken; source: estimate
LUMPED = 4  # GPUs that one stands for where a plant is lumped without saying how many


@dataclass(slots=True)
class Parameters:
    """The true parameters of one plant. Shapes as the names say; W, K, s, l/min, Pa."""

    lump: int
    # [n_gpu]
    gpu_idle_w: F64
    gpu_leak_w_per_k: F64
    gpu_sm_w: F64
    gpu_tensor_w: F64
    gpu_dram_w: F64
    gpu_cross_w: F64
    gpu_exponent: F64
    gpu_conduction_k_per_w: F64  # share of the resistance that no flow changes
    gpu_convection_k_per_w: F64  # at nominal flow
    gpu_heat_capacity_j_per_k: F64
    gpu_hbm_rise_k: F64  # over the GPU at full traffic of its memory
    gpu_slowdown_c: F64
    gpu_shutdown_c: F64
    gpu_cap_max_w: F64
    # [n_node]
    node_cpu_idle_w: F64
    node_cpu_dynamic_w: F64
    node_other_w: F64
    node_loss0_w: F64
    node_loss1: F64
    node_loss2_per_w: F64
    node_inlet_add_k: F64  # warmer air higher up
    node_cap_max_w: F64  # the highest limit that its board takes
    # [n_rack]
    rack_liquid: Bool  # has coolant
    rack_exponent: F64  # of convection over flow
    rack_upstream_k_per_w: F64  # rise of the second half of a tray per W of the first, at nominal flow
    rack_flow_lpm: F64  # nominal; of air-cooled racks 1
    rack_branch: F64  # Pa per (l/min)^2
    rack_segment: F64
    rack_tank_j_per_k: F64
    rack_rest_capture_pu: F64  # of all heat but the GPUs' that the liquid takes
    rack_plate_capture_pu: F64
    rack_to_air_w_per_k: F64
    rack_overhead_w: F64
    rack_overhead_pu: F64  # of the nodes' power
    rack_share_a_pu: F64
    rack_air_max_w: F64  # heat into air that its fans are sized for
    rack_fan_w: F64  # of all its nodes at full speed
    rack_inlet_add_k: F64
    rack_valve_pu: F64
    # [n_cdu]
    cdu_flow_lpm: F64
    cdu_inner: F64  # Pa per (l/min)^2, without the filter
    cdu_filter: F64
    cdu_head0_pa: F64  # [n_cdu, 2] at full speed and no flow
    cdu_curve: F64  # [n_cdu, 2] Pa per (l/min)^2
    cdu_efficiency_pu: F64
    cdu_drop_set_pa: F64
    cdu_ua_w_per_k: F64
    cdu_primary_lpm: F64  # with the valve open
    cdu_hot_j_per_k: F64
    cdu_cold_j_per_k: F64
    cdu_pipe_j_per_k: F64
    cdu_supply_c: F64
    cdu_reserve_l: F64
    cdu_volume_l: F64
    # [n_loop + 1]: the last one serves CDUs of which no loop is known
    loop_of_cdu: Index
    loop_heat_w: F64
    loop_flow_lpm: F64
    loop_tank_j_per_k: F64  # of each leg
    loop_approach_k: F64
    loop_wet: Bool
    loop_chiller_pu: F64  # of the nominal heat
    loop_pump_w_per_lpm: F64  # of what passes CDUs and bypass; a tower's own circuit, with as much, included
    loop_fan_w: F64  # at full speed
    # [n_hall]
    hall_air_max_w: F64
    hall_j_per_k: F64
    hall_set_c: F64
    hall_moisture_c: F64  # dew point
    # [n_feeder]
    feeder_rating_w: F64
    feeder_impedance_pu: F64
    watt_per_k_per_lpm: float  # of the racks' coolant
    water_w_per_k_per_lpm: float  # of the facility water


def keep_equipment(new: Parameters, old: Parameters) -> None:
    """Keep CDUs, loops, halls and feeders of a plant with fewer racks: they do not grow with the racks.

    Their coolant does: a rack is filled as it is joined on.
    """
    for one in fields(Parameters):
        is_kept = one.name.startswith(("cdu_", "loop_", "hall_", "feeder_"))
        if is_kept and one.name not in ("cdu_volume_l", "cdu_reserve_l"):
            getattr(new, one.name)[:] = getattr(old, one.name)


class _Draw:
    """Normal factors around 1 and spans, cut at two sigmas, scaled by one spread."""

    def __init__(self, rng: np.random.Generator, spread: float) -> None:
        self.rng, self.spread = rng, spread

    def about(self, centre: F64, sigma: float) -> F64:
        return centre * (1.0 + self.add(len(centre), sigma))

    def add(self, n: int, sigma: float) -> F64:
        return self.spread * sigma * np.clip(self.rng.standard_normal(n), -2.0, 2.0)


def _known(values: F64, otherwise: float | F64) -> F64:
    return np.where(np.isfinite(values), values, otherwise)


def draw(site: Site, seed: int, spread: float = 1.0, lump: int = 1) -> Parameters:
    """The parameters of a site for one seed; a part never changes because another part drew more."""
    streams = [_Draw(np.random.default_rng(s), spread) for s in np.random.SeedSequence(seed).spawn(6)]
    rack = _rack_design(site, lump)
    values: dict[str, object] = {"lump": lump}
    share = CONVECTIVE_SHARE + float(streams[5].add(1, SHARE_OF_SITE)[0])
    values |= _gpus(site, rack, streams[0], lump, share)
    values |= _nodes(site, rack, streams[1])
    values |= _racks(site, rack, streams[2])
    values |= _cdus(site, values, rack, streams[3])
    values |= _halls_and_feeders(site, rack, values, streams[4])
    return Parameters(**values)  # type: ignore[arg-type]


def _rack_design(site: Site, lump: int) -> dict[str, F64]:
    """Return the design per rack with every gap filled, GPUs lumped."""
    d: Design = site.design
    nodes = np.diff(site.node_start_of_rack).astype(np.float64)
    gpus = np.diff(site.gpu_start_of_node[site.node_start_of_rack]).astype(np.float64) * lump
    gpu_max = _known(d.gpu_max_w, 400.0)
    cpu_max = np.where(nodes > 0, _known(d.cpu_max_w, 300.0), 0.0)
    other = np.where(nodes > 0, _known(d.node_other_w, 200.0), 0.0)
    overhead = _known(d.rack_overhead_w, 0.0)
    loss = _known(d.node_loss_pu, NODE_LOSS_PU)
    whole = (gpus * gpu_max + nodes * cpu_max) * (1.0 + loss) + nodes * other + overhead
    liquid = d.liquid & (site.cdu_of_rack >= 0) & (nodes > 0)
    capture = np.where(liquid, _known(d.capture_pu, 0.9), 0.0)
    rated = np.where(np.isfinite(d.rack_max_w), np.minimum(d.rack_max_w * (1.0 if lump == 1 else np.inf),
                                                           whole), whole)  # fmt: skip
    flow = np.where(liquid, _known(d.rack_flow_lpm, capture * rated / 1000.0 * 1.5), 1.0)
    tau = _known(d.gpu_tau_s, 10.0)
    return {
        "nodes": nodes, "gpus": gpus, "gpu_max": gpu_max, "gpu_idle": _known(d.gpu_idle_w, 0.15 * gpu_max),
        "cpu_max": cpu_max, "cpu_idle": np.where(nodes > 0, _known(d.cpu_idle_w, 60.0), 0.0),
        "other": other, "loss": loss, "overhead": overhead, "whole": whole, "rated": rated,
        "filled": _known(d.rack_filled_pu, 1.0), "capture": capture,
        "liquid": liquid.astype(np.float64), "flow": np.maximum(flow, 1.0), "tau": tau,
        "resistance": _known(d.gpu_resistance_k_per_w, 40.0 / gpu_max),
        "slowdown": _known(d.gpu_slowdown_c, 89.0), "shutdown": _known(d.gpu_shutdown_c, 95.0),
    }  # fmt: skip


def _gpus(site: Site, rack: dict[str, F64], draw: _Draw, lump: int, share: float) -> dict[str, object]:
    """`share` is that of convection in the resistance of the site's plates."""
    of = site.rack_of_gpu
    n = len(of)
    idle = draw.about(rack["gpu_idle"][of], 0.05) * lump
    dynamic = draw.about((rack["gpu_max"] - rack["gpu_idle"])[of], 0.03) * lump
    shares = [draw.about(np.full(n, x), 0.05) for x in POWER_SHARES]
    resistance = draw.about(rack["resistance"][of], 0.08) / lump
    convective = np.where(rack["liquid"][of] > 0, share, AIR_CONVECTIVE_SHARE) + draw.add(n, SHARE_OF_GPU)
    capacity = draw.about((rack["tau"] / rack["resistance"])[of], 0.10) * lump
    return {
        "gpu_idle_w": idle,
        "gpu_leak_w_per_k": draw.about(rack["gpu_max"][of] * LEAKAGE_W_PER_K_PER_W * lump, 0.25),
        "gpu_sm_w": shares[0] * dynamic,
        "gpu_tensor_w": shares[1] * dynamic,
        "gpu_dram_w": shares[2] * dynamic,
        "gpu_cross_w": shares[3] * dynamic,
        "gpu_exponent": np.clip(2.7 + draw.add(n, 0.15), 2.4, 3.0),
        "gpu_conduction_k_per_w": resistance * (1.0 - convective),
        "gpu_convection_k_per_w": resistance * convective,
        "gpu_heat_capacity_j_per_k": capacity,
        "gpu_hbm_rise_k": np.maximum(5.0 + draw.add(n, 1.0), 0.0),
        "gpu_slowdown_c": rack["slowdown"][of].copy(),
        "gpu_shutdown_c": rack["shutdown"][of].copy(),
        "gpu_cap_max_w": rack["gpu_max"][of] * lump,
    }


def _nodes(site: Site, rack: dict[str, F64], draw: _Draw) -> dict[str, object]:
    of = site.rack_of_node
    n = len(of)
    loss1, other, rated = (x[of] for x in _losses(rack))
    depth = np.arange(n) - site.node_start_of_rack[of]
    last = np.maximum(rack["nodes"][of] - 1.0, 1.0)
    envelope = site.envelopes["node.power_cap_w"].high
    return {
        "node_cpu_idle_w": draw.about(rack["cpu_idle"][of], 0.05),
        "node_cpu_dynamic_w": draw.about(CPU_BUSY_PU * (rack["cpu_max"] - rack["cpu_idle"])[of], 0.05),
        "node_other_w": draw.about(other, 0.10),
        "node_loss0_w": draw.about(STANDING_LOSS * rated, 0.2),
        "node_loss1": draw.about(loss1, 0.03),
        "node_loss2_per_w": draw.about(OHMIC_LOSS / np.maximum(rated, 1.0), 0.3),
        "node_inlet_add_k": draw.spread * 1.5 * depth / last + draw.add(n, 0.2),
        "node_cap_max_w": np.where(np.isfinite(envelope), envelope, rated),
    }


def _losses(rack: dict[str, F64]) -> tuple[F64, F64, F64]:
    """(loss in proportion, what else a node draws, its rated power, W) of a node of each rack [n_rack].

    Such that a node draws in all what the design says, idle and full: fans and supplies have their part of
    the design's loss.
    """
    nodes = np.maximum(rack["nodes"], 1.0)
    full = rack["gpus"] * rack["gpu_max"] / nodes + rack["cpu_max"]
    idle = rack["gpus"] * rack["gpu_idle"] / nodes + rack["cpu_idle"]
    rated = full * (1.0 + rack["loss"]) + rack["other"]
    fans = _fan_share(rack) * rack["whole"] / nodes
    at_full = (1.0 - STANDING_LOSS - OHMIC_LOSS) * rated
    at_idle = idle + rack["other"] - STANDING_LOSS * rated
    slope = (at_full - at_idle) / np.maximum(full + fans - idle, 1.0)
    other = np.maximum(at_idle / np.maximum(slope, 1.0) - idle, 0.3 * rack["other"])
    loss1 = np.clip(at_full / np.maximum(full + fans + other, 1.0) - 1.0, 0.005, 0.6)
    return loss1, other, rated


def _fan_share(rack: dict[str, F64]) -> F64:
    """Return the fan power at full speed as a share of the rack's power."""
    return np.where(rack["liquid"] > 0, LIQUID_FAN_SHARE, AIR_FAN_SHARE)


def _racks(site: Site, rack: dict[str, F64], draw: _Draw) -> dict[str, object]:
    n = len(rack["nodes"])
    liquid = rack["liquid"] > 0
    coolant = COOLANTS[site.file.coolant]
    watt = coolant.density_kg_per_m3 * coolant.heat_capacity_j_per_kg_k / 60_000.0  # W/K per l/min
    capture = np.clip(draw.about(rack["capture"], 0.03), 0.0, 0.97)
    gpu_w = rack["gpus"] * rack["gpu_max"]
    wanted = capture * rack["whole"]
    rest = np.clip((wanted - PLATE_CAPTURE_PU * gpu_w) / np.maximum(rack["whole"] - gpu_w, 1.0), 0.0, 0.97)
    plate = np.where(
        wanted < PLATE_CAPTURE_PU * gpu_w,
        wanted / np.maximum(gpu_w, 1.0),
        np.where(liquid, PLATE_CAPTURE_PU, 0),
    )
    tray_w_per_k = rack["flow"] * watt / np.maximum(rack["nodes"], 1.0)
    air_w = rack["whole"] - wanted
    return {
        "rack_liquid": liquid,
        "rack_exponent": np.where(liquid, FLOW_EXPONENT, -0.8) * (1.0 + draw.add(n, 0.05)),
        "rack_upstream_k_per_w": np.where(liquid, 0.5 * PLATE_CAPTURE_PU / tray_w_per_k, 0.0),
        "rack_flow_lpm": rack["flow"],
        "rack_branch": draw.about(np.where(liquid, RACK_DROP_PA / rack["flow"] ** 2, 1e12), 0.10),
        "rack_segment": np.zeros(n),  # set with the CDUs
        "rack_tank_j_per_k": draw.about(RACK_VOLUME_MIN * 60.0 * rack["flow"] * watt, 0.10),
        "rack_rest_capture_pu": np.where(liquid, rest, 0.0),
        "rack_plate_capture_pu": plate,
        "rack_to_air_w_per_k": np.where(liquid, RACK_TO_AIR_W_PER_K, 0.0),
        "rack_overhead_w": draw.about(0.8 * rack["overhead"], 0.20),
        # Shelves lose a share of what they deliver: the same with few nodes
        "rack_overhead_pu": draw.about(
            0.2 * rack["overhead"] * rack["filled"] / np.maximum(rack["whole"] - rack["overhead"], 1.0), 0.2
        ) * (rack["nodes"] > 0),
        "rack_share_a_pu": np.clip(0.5 + draw.add(n, 0.01), 0.4, 0.6),
        "rack_air_max_w": np.maximum(air_w, 500.0),
        "rack_fan_w": draw.about(_fan_share(rack) * rack["whole"], 0.1) * (rack["nodes"] > 0),
        "rack_inlet_add_k": draw.add(n, 0.5),
        "rack_valve_pu": np.where(liquid, np.clip(0.64 + draw.add(n, 0.015), 0.0, 1.0), 0.0),
        "watt_per_k_per_lpm": watt,
    }  # fmt: skip


def _cdus(site: Site, values: dict[str, object], rack: dict[str, F64], draw: _Draw) -> dict[str, object]:
    n, d = site.sizes["cdu"], site.design
    watt = float(values["watt_per_k_per_lpm"])  # type: ignore[arg-type]
    water = float(heat_rate_w_per_k(COOLANTS["water"], np.ones(1), np.full(1, FACILITY_WATER_C))[0])
    served = rack["liquid"] > 0
    at = site.cdu_of_rack[served]
    flow = np.bincount(at, weights=rack["flow"][served], minlength=n)[:n].astype(np.float64)
    heat = np.bincount(at, weights=(rack["capture"] * rack["rated"])[served], minlength=n)[:n]
    flow, heat = np.maximum(flow, 1.0), np.maximum(heat, 1000.0)
    ua = np.where(np.isfinite(d.cdu_ua_w_per_k), d.cdu_ua_w_per_k, heat / APPROACH_K)
    segment = np.zeros(len(served))
    # A segment of manifold takes two hundredths of a rack's drop at the CDU's whole flow; source: estimate
    segment[served] = 0.02 * RACK_DROP_PA / flow[at] ** 2
    values["rack_segment"] = segment
    inner = (CDU_INNER_DROP_PA - CDU_FILTER_DROP_PA) / flow**2
    nominal_pa = RACK_DROP_PA + CDU_INNER_DROP_PA
    head0 = np.full((n, PUMPS_PER_CDU), PUMP_SHUTOFF_RATIO * nominal_pa / PUMP_SPEED_NOMINAL_PU**2)
    curve = ((PUMP_SHUTOFF_RATIO - 1.0) * nominal_pa / (flow / PUMPS_PER_CDU) ** 2)[:, None]
    loops = site.sizes["loop"]
    loop_of = np.where(site.loop_of_cdu >= 0, site.loop_of_cdu, loops).astype(np.intp)
    served_w = np.bincount(loop_of, heat, loops + 1).astype(np.float64)
    served_lpm = np.bincount(loop_of, flow, loops + 1).astype(np.float64)
    return {
        "cdu_flow_lpm": flow,
        "cdu_inner": draw.about(inner, 0.05),
        "cdu_filter": draw.about(CDU_FILTER_DROP_PA / flow**2, 0.05),
        "cdu_head0_pa": head0 * (1.0 + draw.add(2 * n, 0.02).reshape(n, 2)),
        "cdu_curve": curve * (1.0 + draw.add(2 * n, 0.05).reshape(n, 2)),
        "cdu_efficiency_pu": np.clip(PUMP_EFFICIENCY_PU + draw.add(n, 0.02), 0.3, 0.8),
        "cdu_drop_set_pa": np.full(n, RACK_DROP_PA),
        "cdu_ua_w_per_k": draw.about(ua, 0.10) * 1.15,
        "cdu_primary_lpm": draw.about(1.35 * PRIMARY_FLOW_RATIO * flow, 0.03),
        "cdu_hot_j_per_k": draw.about(0.4 * CDU_VOLUME_MIN * 60.0 * flow * watt, 0.05),
        "cdu_cold_j_per_k": draw.about(0.25 * CDU_VOLUME_MIN * 60.0 * flow * watt, 0.05),
        "cdu_pipe_j_per_k": draw.about(0.35 * CDU_VOLUME_MIN * 60.0 * flow * watt, 0.05),
        "cdu_supply_c": d.cdu_supply_c.copy(),
        "cdu_reserve_l": draw.about(RESERVOIR_L_PER_LPM * flow, 0.05),
        "water_w_per_k_per_lpm": water,
        "cdu_volume_l": (RACK_VOLUME_MIN + CDU_VOLUME_MIN) * flow,
        "loop_of_cdu": loop_of,
    } | _loops(site, served_w, served_lpm, water, draw)  # fmt: skip


def _loops(site: Site, heat_w: F64, cdu_lpm: F64, water: float, draw: _Draw) -> dict[str, object]:
    """Loops with this heat and flow of their CDUs [n_loop + 1], W and l/min: as stated, else as usual.

    `water` is the heat per kelvin of the facility water, W/K per l/min.
    """
    heat_w, flow_lpm = np.maximum(heat_w, 1000.0), np.maximum(PRIMARY_FLOW_RATIO * cdu_lpm, 1.0)
    stated = {name: group for group in site.file.loops for name in expand(group.name)}
    names = [name.rpartition("/")[2] for name in site.names["loop"]]
    groups = [stated.get(name, LoopGroup(name=name)) for name in names] + [LoopGroup(name="unknown")]
    wet = np.array([g.cooling == "tower" for g in groups], np.bool_)

    def nameplate(key: str) -> F64:
        return np.array([getattr(g, key) for g in groups], np.float64)  # None is NaN

    passed_lpm = (1.0 + BYPASS_PU) * flow_lpm
    usual_w = (LOOP_PUMP_W_PER_LPM + TOWER_PUMP_W_PER_LPM * wet) * passed_lpm
    return {
        "loop_heat_w": heat_w,
        "loop_flow_lpm": flow_lpm,
        "loop_tank_j_per_k": draw.about(0.5 * LOOP_VOLUME_MIN * 60.0 * flow_lpm * water, 0.1),
        "loop_approach_k": draw.about(
            _known(nameplate("approach_k"), np.where(wet, TOWER_APPROACH_K, COOLER_APPROACH_K)), 0.10
        ),
        "loop_wet": wet,
        "loop_chiller_pu": np.array([1.2 if g.cooling in ("chiller", "unknown") else 0.0 for g in groups]),
        "loop_pump_w_per_lpm": _known(nameplate("pumps_w"), usual_w) / passed_lpm,
        "loop_fan_w": _known(nameplate("fans_w"), FAN_RATED_W_PER_W * heat_w),
    }


def _halls_and_feeders(
    site: Site, rack: dict[str, F64], values: dict[str, object], draw: _Draw
) -> dict[str, object]:
    halls = site.sizes["hall"]
    racks = np.bincount(site.hall_of_rack, minlength=halls).astype(np.float64)
    air = np.asarray(values["rack_air_max_w"])
    budget = site.budget_w.copy()
    n = len(budget)
    below = np.zeros(n)
    for feeder in range(n):
        below[feeder] = rack["rated"][site.racks_below(feeder)].sum() if n else 0.0
    rating: NDArray[np.float64] = np.where(np.isfinite(budget), budget, np.maximum(below, 1000.0))
    return {
        "hall_air_max_w": 1.3 * np.bincount(site.hall_of_rack, weights=air, minlength=halls) + 1000.0,
        "hall_j_per_k": HALL_J_PER_K_PER_RACK * np.maximum(racks, 1.0),
        "hall_set_c": HALL_SET_C + draw.add(halls, 0.3),
        "hall_moisture_c": 11.0 + draw.add(halls, 0.7),
        "feeder_rating_w": BREAKER_RATING_OVER_BUDGET * rating,
        "feeder_impedance_pu": np.abs(0.01 + draw.add(n, 0.002)),
    }
