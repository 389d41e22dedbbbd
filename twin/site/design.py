"""Design of a site: the expected physics from profiles and topology, before any reading.

Priors for the estimator, and the centre around which a plant draws its hidden truth. NaN = no profile says,
and nothing may be derived. Every default stands beside its source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from twin.site.profile import Profile

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
Bool = NDArray[np.bool_]

# Drop across a rack between supply and return at its nominal flow. Racks 03-06 of the DSX BMS capture read
# 78-82 kPa at 49-52 l/min, their valves 61-67 % open. If half of that is lost in an equal-percentage valve
# (50:1), a rack with its valve open passes 115 l/min at 224 kPa; source: estimate. OCP's reservoir and
# pumping unit gives 1.5 l/min per kW at 276 kPa (40 psi). Frontier's CDUs draw 0.8 % of its peak power
# (configuration of RAPS); pumps for this drop draw 1.0 % of the heat.
RACK_DROP_PA = 220_000.0
# Pressure drop inside a CDU at nominal flow: plate exchanger, pipes, valves; source: estimate.
CDU_INNER_DROP_PA = 60_000.0
CDU_FILTER_DROP_PA = 15_000.0  # of that, its filter when clean; source: estimate
PUMP_SPEED_NOMINAL_PU = 0.75  # where the pumps of a CDU run at nominal flow; source: estimate
PUMP_SHUTOFF_RATIO = 1.3  # head at no flow over head at nominal flow, same speed; source: estimate
PUMP_EFFICIENCY_PU = 0.55  # wire to water, of a CDU's pump with its drive; source: estimate
PUMPS_PER_CDU = 2
# Warm end of a liquid-to-liquid CDU at its nominal heat; domain.md B gives 3-5 K.
APPROACH_K = 4.0
# Of a loop's supply over the wet bulb (towers) or over the air, at nominal heat and full fans; domain.md B:
# 3-5 K and 6-10 K
TOWER_APPROACH_K, COOLER_APPROACH_K = 4.0, 8.0
# ASHRAE 90.1-2019 G3.1.3.10 and G3.1.3.11: 22 W/gpm for a primary and a secondary pump, 19 W/gpm for the
# pump between tower and exchanger
LOOP_PUMP_W_PER_LPM, TOWER_PUMP_W_PER_LPM = 5.8, 5.0
SUPPLY_C = 32.0  # where no envelope says; running racks of this class get 31.9-33.1 degC
PRIMARY_FLOW_RATIO = 1.1  # facility water through a CDU over its secondary flow at nominal; source: estimate
FLOW_EXPONENT = -0.7  # of the convective part of a cold plate; domain.md B gives -0.6 to -0.8
# Of the resistance from silicon to coolant at nominal flow that falls with the flow. With data of plates of
# the Open Compute Project it changes by -0.21 % per 1 % of flow: the plate by twice as much, and half of the
# way is solid.
CONVECTIVE_SHARE = 0.3
# Water held per l/min of nominal flow: a rack's manifolds and plates pass in about 12 s, a CDU with its pipes
# in about 20 s; source: estimate.
RACK_VOLUME_MIN, CDU_VOLUME_MIN, LOOP_VOLUME_MIN = 0.2, 0.33, 2.0
RISE_NOMINAL_K = 10.0  # of a rack's coolant where a profile states no flow; domain.md B
GPU_TAU_LIQUID_S, GPU_TAU_AIR_S = 7.0, 30.0  # domain.md B: 5-9 s and 20-60 s
NODE_OTHER_LEAST_W = 50.0  # fans, NICs, disks of the smallest node; source: estimate
NODE_LOSS_LEAST_PU, NODE_LOSS_MOST_PU = 0.02, 0.45  # beyond, a profile is doubted; source: estimate
SLOWDOWN_C, SHUTDOWN_C = 89.0, 95.0  # as an H100 reports; source: estimate elsewhere


@dataclass(frozen=True, slots=True)
class Design:
    """Nominal parameters. `[n_rack]` of one entity of that rack where the name says gpu or node."""

    liquid: Bool  # [n_rack] cooled by a CDU
    gpu_idle_w: F64
    gpu_max_w: F64
    gpu_resistance_k_per_w: F64  # over supply (or inlet, in air) at nominal flow
    gpu_tau_s: F64
    gpu_slowdown_c: F64
    gpu_shutdown_c: F64
    cpu_idle_w: F64  # of all CPUs of a node
    cpu_max_w: F64
    node_other_w: F64  # fans, NICs, disks: what an idle node draws beside its GPUs and CPUs
    node_loss_pu: F64  # of the power of its GPUs and CPUs: regulators and fans, which rise with the load
    rack_overhead_w: F64  # switches, shelves: what a rack draws beside its nodes
    rack_max_w: F64
    rack_filled_pu: F64  # its nodes, of those that its profile has in a rack
    capture_pu: F64  # share of a rack's power that its liquid carries; 0 in air
    rack_flow_lpm: F64  # nominal; NaN in air
    scale_up_links: F64  # of a GPU, into its scale-up domain
    scale_up_switches: F64  # chips of its domain; 0 = GPUs are wired directly
    scale_up_nodes: F64  # of its domain
    cdu_flow_lpm: F64  # [n_cdu] nominal, the sum over its racks; NaN if unknown
    cdu_heat_w: F64  # nominal
    cdu_supply_c: F64  # nominal set point
    cdu_ua_w_per_k: F64  # clean, at nominal flows
    loop_heat_w: F64  # [n_loop]
    loop_flow_lpm: F64

    def freeze(self) -> None:
        """From here on read only."""
        for f in fields(self):
            getattr(self, f.name).flags.writeable = False


def counterflow_ua_w_per_k(heat_w: F64, approach_k: float, warm_w_per_k: F64, cold_w_per_k: F64) -> F64:
    """Conductance of a counterflow exchanger that brings `heat_w` across with this approach.

    The stream `warm` leaves `approach_k` above the entry of the stream `cold`; both are W/K. From the mean
    logarithmic temperature difference.
    """
    cold_end_k = np.full_like(heat_w, approach_k)
    warm_end_k = approach_k + heat_w / warm_w_per_k - heat_w / cold_w_per_k
    ratio = warm_end_k / cold_end_k
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_k = np.where(np.abs(ratio - 1.0) < 1e-6, cold_end_k, (warm_end_k - cold_end_k) / np.log(ratio))
    return heat_w / mean_k


@dataclass(frozen=True)
class RackLayout:
    """Racks as the site file has them [n_rack]."""

    profile: Sequence[str | None]
    nodes: I32
    gpus_per_node: I32
    cdu: I32


@dataclass(frozen=True)
class CduLayout:
    """CDUs as the site file has them [n_cdu]; `supply_target_c`: NaN = none set. Heat and flow of loops that
    state them [n_loop], NaN = those of their CDUs."""

    loop: I32
    supply_target_c: F64
    loop_heat_w: F64
    loop_flow_lpm: F64

    def of_loops(self, of_cdu: F64, stated: F64) -> F64:
        """Return the values that loops state [n_loop], or the sums of those of their CDUs [n_cdu]."""
        looped = (self.loop >= 0) & np.isfinite(of_cdu)
        sums = np.bincount(self.loop[looped], weights=of_cdu[looped], minlength=len(stated))
        return np.where(np.isfinite(stated), stated, sums).astype(np.float64)


def design_of(profiles: Mapping[str, Profile], racks: RackLayout, cdus: CduLayout) -> Design:
    n = len(racks.profile)
    rack: dict[str, F64] = {name: np.full(n, np.nan) for name in _RACK}
    liquid = np.zeros(n, np.bool_)
    for i, name in enumerate(racks.profile):
        if name is None:
            continue
        profile, nodes, gpus = profiles[name], int(racks.nodes[i]), int(racks.gpus_per_node[i])
        liquid[i] = profile.has_liquid and nodes > 0
        for key, value in _of_rack(profile, nodes, gpus).items():
            rack[key][i] = value
    rack["capture_pu"][~liquid & np.isfinite(rack["capture_pu"])] = 0.0
    rack["rack_flow_lpm"][~liquid] = np.nan
    n_cdu = len(cdus.loop)
    served = liquid & (racks.cdu >= 0) & np.isfinite(rack["rack_flow_lpm"])
    at = racks.cdu[served]
    heat = (rack["capture_pu"] * rack["rack_max_w"])[served]
    cdu_flow = np.bincount(at, weights=rack["rack_flow_lpm"][served], minlength=n_cdu).astype(np.float64)
    cdu_heat = np.bincount(at, weights=heat, minlength=n_cdu).astype(np.float64)
    cdu_flow[cdu_flow == 0], cdu_heat[cdu_heat == 0] = np.nan, np.nan
    # PG25 or water carry about 67 W/K per l/min (domain.md B: 15.0 l/min K per kW)
    warm = cdu_flow * 1000.0 / 15.0
    ua = counterflow_ua_w_per_k(cdu_heat, APPROACH_K, warm, PRIMARY_FLOW_RATIO * warm)
    return Design(
        liquid=liquid,
        **rack,
        cdu_flow_lpm=cdu_flow,
        cdu_heat_w=cdu_heat,
        cdu_supply_c=np.where(np.isfinite(cdus.supply_target_c), cdus.supply_target_c, SUPPLY_C),
        cdu_ua_w_per_k=ua,
        loop_heat_w=cdus.of_loops(cdu_heat, cdus.loop_heat_w),
        loop_flow_lpm=cdus.of_loops(PRIMARY_FLOW_RATIO * cdu_flow, cdus.loop_flow_lpm),
    )


_RACK = ("gpu_idle_w", "gpu_max_w", "gpu_resistance_k_per_w", "gpu_tau_s", "gpu_slowdown_c", "gpu_shutdown_c",
         "cpu_idle_w", "cpu_max_w", "node_other_w", "node_loss_pu", "rack_overhead_w", "rack_max_w",
         "rack_filled_pu", "capture_pu", "rack_flow_lpm", "scale_up_links", "scale_up_switches",
         "scale_up_nodes")  # fmt: skip


def _of_rack(profile: Profile, nodes: int, gpus: int) -> dict[str, float]:
    """Design values of a profile for a rack with so many nodes of so many GPUs (a site may override them)."""

    def get(name: str, otherwise: float) -> float:
        found = profile.get(name)
        return otherwise if found is None else found

    if nodes == 0:
        idle = get("switch_rack_max_w", 0.0)
        return {"rack_overhead_w": idle, "rack_max_w": idle, "capture_pu": 0.0}
    usual = profile.nodes_per_rack
    gpu_max, gpu_idle = get("gpu_max_w", np.nan), get("gpu_idle_w", np.nan)
    cpus = profile.cpus_per_node
    cpu_idle, cpu_max = cpus * get("cpu_idle_w", 60.0), cpus * get("cpu_max_w", 300.0)
    # By difference from the profile's own node, so that an overridden count of GPUs does not eat it up
    other = get("node_idle_w", np.nan) - profile.gpus_per_node * gpu_idle - cpu_idle
    other = max(NODE_OTHER_LEAST_W, other) if np.isfinite(other) else NODE_OTHER_LEAST_W
    chips_w = profile.gpus_per_node * gpu_max + cpu_max
    loss = get("node_max_w", np.nan) - chips_w - other
    loss_pu = NODE_LOSS_LEAST_PU
    if np.isfinite(loss):
        loss_pu = min(max(loss / chips_w, NODE_LOSS_LEAST_PU), NODE_LOSS_MOST_PU)
    overhead = get("rack_overhead_w", 0.0)
    whole = nodes * ((gpus * gpu_max + cpu_max) * (1.0 + loss_pu) + other) + overhead
    rack_max = min(get("rack_max_w", np.inf) * max(1.0, nodes / usual), whole)
    capture = get("liquid_fraction_pu", 0.9) if profile.has_liquid else 0.0
    flow = get("rack_flow_nominal_lpm", np.nan)
    size = profile.layout.scale_up_domains
    domains = 1.0 if size is None else size.value
    links = sum(p.links_per_node.value for p in profile.planes if p.kind == "scale_up")
    return {
        "scale_up_links": links / profile.gpus_per_node if links else np.nan,
        "scale_up_switches": profile.layout.switches.value / domains,
        "scale_up_nodes": profile.nodes / domains,
        "gpu_idle_w": gpu_idle,
        "gpu_max_w": gpu_max,
        "gpu_resistance_k_per_w": get("gpu_rise_k", np.nan) / gpu_max,
        "gpu_tau_s": get("gpu_tau_s", GPU_TAU_LIQUID_S if profile.has_liquid else GPU_TAU_AIR_S),
        "gpu_slowdown_c": get("gpu_slowdown_temp_c", SLOWDOWN_C),
        "gpu_shutdown_c": get("gpu_shutdown_temp_c", SHUTDOWN_C),
        "cpu_idle_w": cpu_idle,
        "cpu_max_w": cpu_max,
        "node_other_w": other,
        "node_loss_pu": loss_pu,
        "rack_overhead_w": overhead,
        "rack_max_w": rack_max,
        "rack_filled_pu": nodes / usual,
        "capture_pu": capture,
        "rack_flow_lpm": flow * nodes / usual
        if np.isfinite(flow)
        else capture * rack_max / 1000.0 * 15.0 / RISE_NOMINAL_K,
    }
