"""The plant's steps against an independent integrator, and against themselves with half the step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.integrate import solve_ivp

import twin.plant.cooling as cooling_module
from tests.support.builders import site_of, two_racks
from twin.plant import Plant


def shaken(dt_s: float, seconds: float) -> Plant:
    """Load and pumps change at once: the stiffest that a plant gets."""
    plant = Plant(site_of(two_racks()), seed=2)
    plant.truth.gpu_sm_pu[:] = 0.9
    plant.disturbance.cdu_pump_ok[0, 0] = False
    for _ in range(round(seconds / dt_s)):
        plant.step(dt_s=dt_s)
    return plant


def test_half_the_step_halves_the_error() -> None:
    exact = shaken(1 / 64, 16.0).truth
    errors: dict[str, list[float]] = {}
    for dt_s in (1.0, 0.5, 0.25, 0.125):
        truth = shaken(dt_s, 16.0).truth
        for name in ("gpu_temp_c", "rack_return_c", "cdu_return_c", "cdu_supply_c"):
            errors.setdefault(name, []).append(np.abs(getattr(truth, name) - getattr(exact, name)).max())
    for name, found in errors.items():
        assert found[0] < 1.0, (name, found)
        # Down to where flows that hardly move leave resistances as they are
        assert found[3] < 0.45 * found[0] + 0.02, (name, found)


class Rival:
    """The same equations as one system of ordinary differential equations, flows and controls held."""

    def __init__(self, plant: Plant) -> None:
        p, c, h, w, t = plant.parameters, plant.compute, plant.hydraulics, plant.cooling, plant.truth
        self.plant, self.p, self.n = plant, p, len(t.gpu_temp_c)
        self.rack = plant.site.rack_of_gpu
        self.resistance, self.upstream = c.resistance.copy(), c.upstream.copy()
        self.w_rack, self.w_cdu = h.rack_w_per_k.copy(), h.cdu_w_per_k.copy()
        self.pump_w, self.stagnant = h.pump_heat_w.copy(), w.stagnant.copy()
        self.air_c, self.water_c = t.rack_inlet_c.copy(), w.primary_supply_c.copy()
        self.base_w, self.loss2 = c.base_w.copy(), c.loss2.copy()
        self.film = w.ua_w_per_k(t, p, t.cdu_primary_flow_lpm * w.ratio_per_lpm)
        self.cold = t.cdu_valve_pu * p.cdu_primary_lpm * p.water_w_per_k_per_lpm
        self.sm, self.tensor, self.dram = t.gpu_sm_pu, t.gpu_tensor_pu, t.gpu_dram_pu

    def state(self) -> np.ndarray:
        t, w = self.plant.truth, self.plant.cooling
        return np.concatenate([t.gpu_temp_c, t.rack_return_c, w.hot_c, w.cold_c, w.pipe_c])

    def powers(self, temp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        p, site = self.p, self.plant.site
        away = temp - 40.0
        gpu = p.gpu_idle_w + p.gpu_leak_w_per_k * away * (1.0 + away / 120.0)
        gpu += p.gpu_sm_w * self.sm + p.gpu_tensor_w * self.tensor + p.gpu_dram_w * self.dram
        gpu += p.gpu_cross_w * self.sm * self.tensor
        node = np.bincount(site.node_of_gpu, weights=gpu)
        mean = np.bincount(site.node_of_gpu, weights=self.sm) / 4.0
        node = node + p.node_cpu_idle_w + p.node_cpu_dynamic_w * mean + self.base_w
        node = p.node_loss0_w + (1.0 + p.node_loss1) * node + self.loss2 * node**2
        rack = np.bincount(site.rack_of_node, weights=node)
        return gpu, rack * (1.0 + p.rack_overhead_pu) + p.rack_overhead_w

    def slope(self, _: float, y: np.ndarray) -> np.ndarray:
        p, n = self.p, self.n
        temp, tank, (hot, cold, pipe) = y[:n], y[n : n + 2], y[n + 2 :]
        gpu, rack_w = self.powers(temp)
        reference = (pipe + self.stagnant * (tank - pipe))[self.rack]
        partner = np.where(np.arange(n) % 4 >= 2, np.roll(self.upstream * gpu, 2), 0.0)
        flow = (temp - reference - partner) / self.resistance
        d_temp = (gpu - flow) / p.gpu_heat_capacity_j_per_k
        plates, gpus = np.bincount(self.rack, weights=flow), np.bincount(self.rack, weights=gpu)
        into = p.rack_plate_capture_pu * plates + p.rack_rest_capture_pu * (rack_w - gpus)
        into -= p.rack_to_air_w_per_k * (tank - self.air_c)
        d_tank = (into - self.w_rack * (tank - pipe)) / p.rack_tank_j_per_k
        least, most = min(self.w_cdu[0], self.cold[0]), max(self.w_cdu[0], self.cold[0])
        ratio = least / most
        e = np.exp(-self.film[0] / least * (1.0 - ratio))
        across = (1.0 - e) / (1.0 - ratio * e) * least * (hot - self.water_c[0])
        d_hot = ((self.w_rack * tank).sum() - self.w_cdu[0] * hot + self.pump_w[0]) / p.cdu_hot_j_per_k[0]
        d_cold = (self.w_cdu[0] * (hot - cold) - across) / p.cdu_cold_j_per_k[0]
        d_pipe = self.w_cdu[0] * (cold - pipe) / p.cdu_pipe_j_per_k[0]
        return np.concatenate([d_temp, d_tank, [d_hot, d_cold, d_pipe]])


@pytest.mark.parametrize(("dt_s", "allowed_k"), [(1.0, 0.35), (0.25, 0.09), (0.0625, 0.03)])
def test_steps_agree_with_an_integrator_for_stiff_systems(
    dt_s: float, allowed_k: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cooling_module, "FAN_TAU_S", 1e15)
    monkeypatch.setattr(cooling_module, "FILM_PU", 1e9)
    plant = Plant(site_of(two_racks()), seed=4)
    plant.step()
    plant.disturbance.cdu_valve_stuck_pu[:] = plant.truth.cdu_valve_pu

    def hold(*args: Any) -> None:
        return None

    monkeypatch.setattr(plant.facility, "step", hold)
    monkeypatch.setattr(plant.cooling, "hall_step", hold)
    plant.step()
    rival = Rival(plant)
    plant.truth.gpu_sm_pu[:] = 0.95
    begun = rival.state()
    for until in (4.0, 12.0, 40.0):
        exact = solve_ivp(rival.slope, (0.0, until), begun, "Radau", rtol=1e-8, atol=1e-7).y[:, -1]
        while plant.truth.time_s < 2.0 + until - 1e-9:
            plant.step(dt_s=dt_s)
        assert np.abs(rival.state() - exact).max() < allowed_k, until
    assert np.abs(exact - begun).max() > 5.0
