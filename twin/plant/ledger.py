"""Ledger of a plant: balances of energy and mass in each step, and the costs of a run so far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twin.catalogue import F64
from twin.physics import J_PER_KWH, pue, tue, wue_l_per_kwh
from twin.plant.compute import Compute
from twin.plant.cooling import Cooling
from twin.plant.facility import Facility
from twin.plant.hydraulics import Hydraulics
from twin.plant.parameters import Parameters
from twin.plant.power import PlantPower
from twin.plant.truth import Truth

CARBON_G_PER_KWH, COST_USD_PER_KWH = 350.0, 0.08  # where a scenario says nothing; source: estimate


@dataclass(slots=True)
class Prices:
    """Price and carbon intensity of energy from the utility."""

    usd_per_kwh: float = COST_USD_PER_KWH
    carbon_g_per_kwh: float = CARBON_G_PER_KWH


@dataclass(slots=True)
class Costs:
    """Sums since the plant began."""

    time_s: float = 0.0
    it_j: float = 0.0  # at the racks
    compute_j: float = 0.0  # of GPUs and CPUs alone
    utility_j: float = 0.0
    cooling_j: float = 0.0
    cost_usd: float = 0.0
    carbon_g: float = 0.0
    breaker_trips: int = 0

    def add(self, t: Truth, it_w: float, compute_w: float, prices: Prices, dt_s: float) -> None:
        """Add one step, with the power of all racks, and of GPUs and CPUs alone."""
        self.time_s += dt_s
        self.it_j += it_w * dt_s
        self.compute_j += compute_w * dt_s
        self.utility_j += t.utility_power_w * dt_s
        self.cooling_j += t.cooling_power_w * dt_s
        kwh = t.utility_power_w * dt_s / J_PER_KWH
        self.cost_usd += kwh * prices.usd_per_kwh
        self.carbon_g += kwh * prices.carbon_g_per_kwh

    def figures(self, t: Truth, water_l: float, lost_gpu_s: float) -> dict[str, float]:
        """Return the energies in J; PUE and TUE as ratios, WUE in l/kWh of water drawn; NaN before the
        first step."""
        return {
            "time_s": self.time_s,
            "it_energy_j": self.it_j,
            "total_energy_j": self.utility_j,
            "cooling_energy_j": self.cooling_j,
            "pue": float(pue(self.utility_j, self.it_j)),
            "tue": float(tue(self.utility_j, self.compute_j)),
            "wue_l_per_kwh": float(wue_l_per_kwh(water_l, self.it_j)),
            "carbon_g": self.carbon_g,
            "cost_usd": self.cost_usd,
            "water_l": water_l,
            "coolant_leaked_l": float(t.cdu_leaked_l.sum()),
            "gpu_trips": float(t.trips.sum()),
            "breaker_trips": float(self.breaker_trips),
            "throttle_s": float(t.throttle_s.sum()),
            "lost_gpu_s": lost_gpu_s,
        }


@dataclass(frozen=True, slots=True)
class PlantParts:
    """The parts of a plant between which energy and mass move."""

    compute: Compute
    hydraulics: Hydraulics
    cooling: Cooling
    facility: Facility
    power: PlantPower


class Ledger:
    """Levels at the begin of the last step."""

    def __init__(self, n_rack: int) -> None:
        self.tank_c = np.zeros(n_rack)
        self.filled: F64 | None = None  # coolant at the beginning, l

    def open(self, t: Truth) -> None:
        """Store the levels before a step that the plant's parts do not store themselves."""
        np.copyto(self.tank_c, t.rack_return_c)
        if self.filled is None:
            self.filled = t.cdu_coolant_l - t.cdu_filled_l + t.cdu_leaked_l

    def balances(self, t: Truth, p: Parameters, parts: PlantParts, dt_s: float) -> dict[str, float]:
        """Return the relative errors of the last step, in relation to its throughput."""
        c, h, w, f = parts.compute, parts.hydraulics, parts.cooling, parts.facility
        gpus = c.store(t, p, np.zeros_like(c.stored_j)) - c.stored_before_j
        tank = (t.rack_return_c - self.tank_c) * p.rack_tank_j_per_k * p.rack_liquid
        legs = (
            (w.hot_c - w.before_hot_c) * p.cdu_hot_j_per_k
            + (w.cold_c - w.before_cold_c) * p.cdu_cold_j_per_k
            + (w.pipe_c - w.before_pipe_c) * p.cdu_pipe_j_per_k
        )
        loops = (f.hot_c - f.before_hot_c + f.cold_c - f.before_cold_c) * p.loop_tank_j_per_k
        halls = (t.hall_cold_c - w.before_hall_c) * p.hall_j_per_k
        it_j, pumps_j, shafts_j, leak_j, primary_j = (
            float(x.sum()) * dt_s
            for x in (t.rack_power_w, t.cdu_pump_power_w, h.pump_heat_w, w.leak_w, f.pump_heat_w)
        )
        racks_j = float((t.rack_liquid_heat_w + t.rack_air_heat_w).sum()) * dt_s
        liquid_j, out_j = (
            float((t.rack_liquid_heat_w * p.rack_liquid).sum()) * dt_s,
            float(w.out_w.sum()) * dt_s,
        )
        across_j, rejected_j = float(t.cdu_heat_w.sum()) * dt_s, float(f.rejected_w.sum()) * dt_s
        air_j, taken_j = float(t.rack_air_heat_w.sum()) * dt_s, float(w.hall_air_w.sum()) * dt_s
        scale = max(it_j + pumps_j, 1.0)
        stored = float(gpus.sum() + tank.sum() + legs.sum() + loops.sum() + halls.sum())
        roots = parts.power.tree.parent < 0
        fed_w = float((t.rack_power_w * parts.power.fed).sum())
        nodes_w = float(t.node_power_w.sum())
        flow = h.racks.sums(t.rack_flow_lpm, np.zeros(len(t.cdu_flow_lpm)))
        held = (
            np.zeros(0)
            if self.filled is None
            else t.cdu_coolant_l - self.filled - t.cdu_filled_l + t.cdu_leaked_l
        )
        errors = {
            "energy": it_j + pumps_j + primary_j - leak_j - rejected_j - taken_j - stored,
            "energy_racks": it_j - racks_j - float(gpus.sum()),
            "energy_coolant": liquid_j - out_j - float(tank.sum()),
            "energy_cdus": out_j + shafts_j - leak_j - across_j - float(legs.sum()),
            "energy_loops": across_j + primary_j - rejected_j - float(loops.sum()),
            "energy_halls": air_j + pumps_j - shafts_j - taken_j - float(halls.sum()),
            "power_feeders": (float(t.feeder_power_w[roots].sum()) - fed_w) * dt_s,
            "power_supplies": (float(t.node_psu_power_w.sum()) - nodes_w) * dt_s,
        }
        out = {name: abs(error) / scale for name, error in errors.items()}
        lpm = np.maximum(np.abs(t.cdu_flow_lpm), 1e-3 * p.cdu_flow_lpm)
        out["mass_flow"] = float((np.abs(flow - t.cdu_flow_lpm) / lpm).max(initial=0.0))
        out["mass_coolant"] = float((np.abs(held) / p.cdu_volume_l).max(initial=0.0)) if len(held) else 0.0
        return out
