"""Truth of a simulated site: the true value of every quantity, before any sensor.

float64 columns per entity, in the order of the site's tables. The plant moves them, sensors read them, checks
compare with them; the twin never sees them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np

from twin.catalogue import F64, I64, Bool
from twin.site import Site


@dataclass(slots=True)
class Truth:
    """A state of the plant. Levels hold at `time_s`; powers and flows are means over the last step."""

    time_s: float  # since the plant began
    # [n_gpu]; where GPUs are lumped, one stands for all of its node
    gpu_sm_pu: F64  # activities, set by the workload
    gpu_tensor_pu: F64
    gpu_dram_pu: F64
    gpu_power_w: F64
    gpu_temp_c: F64
    gpu_hbm_temp_c: F64
    gpu_clock_pu: F64  # of the highest clock
    gpu_cap_w: F64
    gpu_lock_mhz: F64  # the highest clock that its lock allows; NaN where there is none
    gpu_event_bits: I64  # reasons for a lower clock, DCGM field 112
    gpu_energy_j: F64
    gpu_alive: Bool  # on the bus; a GPU that is not neither draws nor reports
    gpu_xid_code: I64  # the last one; 0 = none
    gpu_sbe_count: I64
    gpu_dbe_count: I64
    gpu_nvlink_errors: I64
    gpu_nvlink_replays: I64
    gpu_nvlink_recoveries: I64
    gpu_pcie_replays: I64
    gpu_row_remaps: I64
    gpu_slowdown_c: F64  # where it lowers its clock
    # [n_node]
    node_power_w: F64  # at the node's input
    node_cpu_power_w: F64
    node_psu_power_w: F64  # [n_node, 2]: from feeds A and B
    node_inlet_c: F64  # air
    node_outlet_c: F64
    node_on: Bool
    node_power_level: I64  # of its switch: 0 on, 1 its system stops, 2 off
    node_standby_level: I64  # 0 ready, 1 it starts, 2 it sleeps
    node_rest_w: F64  # drawn while it is not on
    node_leak: Bool  # its detector
    node_service_level: I64  # as commanded
    node_cap_w: F64  # as it stands
    node_unfit: Bool  # on, but no work runs on it
    node_reboots: I64
    # [n_rack]
    rack_power_w: F64
    rack_flow_lpm: F64
    rack_supply_c: F64
    rack_return_c: F64
    rack_drop_pa: F64  # between supply and return manifold
    rack_valve_pu: F64
    rack_liquid_heat_w: F64  # into the coolant
    rack_air_heat_w: F64
    rack_inlet_c: F64  # air
    rack_leak: Bool
    rack_isolated: Bool  # liquid
    rack_unpowered: Bool  # electrically isolated, or no feed left
    # [n_cdu]
    cdu_flow_lpm: F64
    cdu_supply_c: F64
    cdu_return_c: F64
    cdu_drop_pa: F64  # across its racks: supply minus return pressure
    cdu_drop_set_pa: F64  # of the pressure control, in force
    cdu_supply_pa: F64
    cdu_return_pa: F64
    cdu_filter_drop_pa: F64
    cdu_pump_speed_pu: F64  # [n_cdu, 2]
    cdu_pump_power_w: F64
    cdu_valve_pu: F64  # of the facility water
    cdu_primary_flow_lpm: F64
    cdu_primary_supply_c: F64
    cdu_primary_return_c: F64
    cdu_heat_w: F64  # across the exchanger
    cdu_setpoint_c: F64
    cdu_coolant_l: F64  # held in the secondary circuit
    cdu_leaked_l: F64  # lost since the beginning
    cdu_filled_l: F64  # made up since the beginning
    cdu_filling: Bool
    cdu_leak: Bool
    # [n_hall] air
    hall_cold_c: F64
    hall_hot_c: F64
    hall_rh_pu: F64  # of the cold aisle
    hall_wet: Bool
    # [n_loop]
    loop_supply_c: F64
    loop_return_c: F64
    loop_flow_lpm: F64
    loop_power_w: F64  # pumps, fans, compressors
    loop_fan_pu: F64
    loop_rejected_w: F64
    loop_water_l: F64  # drawn since the beginning
    loop_leak: Bool
    # [n_feeder]
    feeder_power_w: F64
    feeder_energised: Bool
    feeder_tripped: Bool
    feeder_theta: F64  # of the breaker's thermal accumulator; trips at 1
    feeder_voltage_pu: F64
    # [n_link]
    link_down: Bool
    link_bytes_per_s: F64
    link_error_count: I64
    link_flap_count: I64
    link_discard_count: I64
    # the site
    outdoor_c: float
    wet_bulb_c: float
    utility_power_w: float
    cooling_power_w: float  # pumps, fans, compressors, air handlers
    # outcome
    throttle_s: F64  # [n_gpu] with a clock lowered by heat
    trips: I64  # [n_gpu] shut down by heat
    # Raised with each step in which something may have changed that seldom does: states, clocks, caps, error
    # counts; -1 = not counted
    seldom_count: int
    # The same for what agents say of the health of parts; -1 = they say nothing of it
    health_count: int

    def copy(self) -> Truth:
        """Return an independent copy."""
        return copy.deepcopy(self)


def shapes(site: Site) -> dict[str, int]:
    """Return the rows of each prefix of a column's name."""
    tables = ("gpu", "node", "rack", "cdu", "hall", "loop", "feeder", "link")
    return {t: site.sizes[t] for t in tables}


def blank(site: Site) -> Truth:
    """Return a truth of zeros with the right shapes; the plant settles it before its first step."""
    n = shapes(site)
    made: dict[str, object] = {}
    for name, kind in Truth.__annotations__.items():
        if kind in ("float", "int"):
            made[name] = 0.0 if kind == "float" else -1
            continue
        table = name.partition("_")[0]
        rows = n["gpu"] if name in ("throttle_s", "trips") else n.get(table, 0)
        dtype = {"F64": np.float64, "I64": np.int64, "Bool": np.bool_}[str(kind)]
        # The columns of pairs are contiguous: A and B, or both pumps, are each computed in one go
        pair = name in ("node_psu_power_w", "cdu_pump_speed_pu")
        made[name] = np.zeros((2, rows), dtype).T if pair else np.zeros(rows, dtype)
    # Work writes the activities of a job's GPUs together
    made["gpu_sm_pu"], made["gpu_tensor_pu"], made["gpu_dram_pu"] = np.zeros((3, n["gpu"]))
    return Truth(**made)  # type: ignore[arg-type]


def alive_in(truth: Truth) -> tuple[int, int, int]:
    """Return the numbers of GPUs on the bus, nodes on, and unfit nodes: while they stay, no work moves."""
    alive, on = np.count_nonzero(truth.gpu_alive), np.count_nonzero(truth.node_on)
    return int(alive), int(on), int(np.count_nonzero(truth.node_unfit))
