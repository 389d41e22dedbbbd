"""A plant that stands still: a plausible hand-made truth, so that sensors, wire and loop are tested alone.

plant = StillPlant(site)
plant.truth.rack_flow_lpm[0] = 10.0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from twin.contracts import CommandBatch
from twin.plant.disturbance import neutral
from twin.plant.truth import Truth, blank
from twin.site import Site
from twin.telemetry import CommandAcked, Event


def truth_of(site: Site) -> Truth:
    """A busy site, all well; entities differ a little, so that a mix-up shows."""
    t = blank(site)

    def around(n: int, middle: float) -> np.ndarray:
        return middle * (1.0 + 0.01 * np.arange(n) / max(n, 1))

    for name, middle in {
        "gpu_sm_pu": 0.9, "gpu_tensor_pu": 0.4, "gpu_dram_pu": 0.5, "gpu_power_w": 900.0, "gpu_temp_c": 52.0,
        "gpu_hbm_temp_c": 60.0, "gpu_clock_pu": 0.9, "gpu_cap_w": 1200.0, "node_power_w": 5000.0,
        "node_cpu_power_w": 600.0, "node_inlet_c": 25.0, "node_outlet_c": 38.0, "rack_power_w": 100e3,
        "rack_flow_lpm": 96.0, "rack_supply_c": 32.0, "rack_return_c": 46.0, "rack_drop_pa": 80e3,
        "rack_valve_pu": 0.7, "rack_inlet_c": 25.0, "cdu_flow_lpm": 200.0, "cdu_supply_c": 32.0,
        "cdu_return_c": 46.0, "cdu_drop_pa": 90e3, "cdu_supply_pa": 300e3, "cdu_return_pa": 180e3,
        "cdu_filter_drop_pa": 15e3, "cdu_valve_pu": 0.5, "cdu_primary_flow_lpm": 220.0,
        "cdu_primary_return_c": 38.0,
        "cdu_primary_supply_c": 27.0, "cdu_setpoint_c": 32.0, "hall_cold_c": 24.0, "hall_hot_c": 38.0,
        "hall_rh_pu": 0.45, "loop_supply_c": 27.0, "loop_return_c": 38.0,
        "loop_flow_lpm": 250.0, "feeder_power_w": 120e3, "feeder_voltage_pu": 1.0,
        "link_bytes_per_s": 3e10,
    }.items():  # fmt: skip
        column = getattr(t, name)
        column[:] = around(len(column), middle)
    t.gpu_cap_w[:], t.node_cap_w[:] = 1200.0, 6500.0
    t.gpu_alive[:] = t.node_on[:] = t.feeder_energised[:] = True
    t.node_psu_power_w[:] = t.node_power_w[:, None] * (0.52, 0.48)
    t.cdu_pump_speed_pu[:], t.cdu_drop_set_pa[:] = 0.75, 90e3
    t.outdoor_c, t.wet_bulb_c = 15.0, 11.0
    return t


class StillPlant:
    """Obeys caps, counts energy, and changes nothing else by itself."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.start_ns, self.job_names = 0, dict[int, str]()
        self.truth, self.disturbance = truth_of(site), neutral(site)
        self.present = self.disturbance
        self.coming: list[Event] = []
        self.obeyed: list[CommandBatch] = []
        self._acks: list[CommandAcked] = []

    def step(self, commands: Sequence[CommandBatch] = (), dt_s: float = 1.0) -> None:
        t = self.truth
        for batch in commands:
            self.obeyed.append(batch)
            if batch.control == "node.service_level":
                t.node_service_level[batch.index] = batch.value
            if batch.control != "gpu.power_cap_w":
                continue
            t.gpu_cap_w[batch.index] = batch.value
            if not (batch.renewal or batch.final):
                self._acks += [
                    CommandAcked(control=batch.control, name=self.site.name("gpu", e), state="done",
                                 generation=int(batch.generation[k]),
                                 command=f"{batch.epoch}-{batch.command[k]}")
                    for k, e in enumerate(batch.index.tolist())
                ]  # fmt: skip
        t.time_s += dt_s
        t.gpu_energy_j += t.gpu_power_w * dt_s * t.gpu_alive

    def acks(self) -> list[CommandAcked]:
        out, self._acks = self._acks, []
        return out

    def events(self) -> list[Event]:
        out, self.coming = self.coming, []
        return out

    def fork(self) -> Any:
        out = StillPlant(self.site)
        out.truth = self.truth.copy()
        out._acks, out.coming = list(self._acks), list(self.coming)
        out.disturbance.sensors = list(self.disturbance.sensors)
        return out
