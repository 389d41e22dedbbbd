"""How a plant begins: everything on, then at rest under the work that it begins with.

May import the plant's parts and NumPy.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np

from twin.plant.obedience import set_caps, set_points

if TYPE_CHECKING:
    from twin.plant.plant import Plant

SETTLE_STEP_S = 2.0
BUSY_PU = (0.6, 0.35, 0.3)  # activities where no workload sets them


def begin(plant: Plant) -> None:
    """Everything on, half warm, with the activity that the workload begins with."""
    t, p, site = plant.truth, plant.parameters, plant.site
    t.gpu_clock_pu[:], t.gpu_alive[:], t.node_on[:] = 1.0, True, True
    set_caps(plant)
    for column, level in zip((t.gpu_sm_pu, t.gpu_tensor_pu, t.gpu_dram_pu), BUSY_PU, strict=True):
        column[:] = level
    t.hall_cold_c[:], t.hall_rh_pu[:] = p.hall_set_c, 0.45
    t.rack_inlet_c[:] = p.hall_set_c[site.hall_of_rack] + p.rack_inlet_add_k
    t.rack_valve_pu[:] = p.rack_valve_pu
    t.cdu_coolant_l[:] = p.cdu_volume_l + p.cdu_reserve_l
    t.cdu_valve_pu[:] = 0.5
    t.gpu_temp_c[:], t.gpu_slowdown_c[:] = 45.0, p.gpu_slowdown_c
    supply = np.append(p.cdu_supply_c, 24.0)[site.cdu_of_rack]
    t.rack_supply_c[:], t.rack_return_c[:] = supply, supply + 8.0 * p.rack_liquid
    set_points(plant)
    plant.facility.cold_c[:] = plant.facility.aim_c
    plant.facility.hot_c[:] = plant.facility.aim_c + 8.0
    plant.facility.supply(plant.cooling.primary_supply_c)
    plant.facility.look_outside(t, p)
    plant.connect()
    plant.compute.store(t, p, plant.compute.stored_j)


def settle(plant: Plant, seconds: float) -> None:
    """Bring the plant to rest under its present activity: no time passes, nothing is counted."""
    t = plant.truth
    counted = ("gpu_energy_j", "throttle_s", "trips", "cdu_leaked_l", "cdu_filled_l", "feeder_theta")
    before = {name: getattr(t, name).copy() for name in counted}
    begun_s, lost_s, water_l = t.time_s, plant.compute.lost_gpu_s, plant.facility.water_l.copy()
    if plant.workload is not None and begun_s == 0.0:
        memo = {id(plant.site): plant.site}  # tidy: allow id because the memo of deepcopy is keyed by it
        copy.deepcopy(plant.workload, memo).step(t, 0.0, 1.0)
    for _ in range(round(seconds / SETTLE_STEP_S)):
        plant.ledger.open(t)
        plant.physics(SETTLE_STEP_S)
    for name, value in before.items():
        getattr(t, name)[:] = value
    t.feeder_theta[:] = plant.power.theta_steady()
    t.time_s, plant.compute.lost_gpu_s = begun_s, lost_s
    plant.facility.water_l[:] = water_l
    _means(plant)


def _means(plant: Plant) -> None:
    t = plant.truth
    t.cooling_power_w = plant.cooling.air_power_w() + float(
        t.cdu_pump_power_w.sum() + plant.facility.power_w.sum()
    )
    t.utility_power_w = plant.power.utility_w(float(t.rack_power_w.sum()), t.cooling_power_w)
    plant.last_dt_s = SETTLE_STEP_S
