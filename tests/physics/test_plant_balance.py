"""Energy and mass are kept in every state of a plant, whatever is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from tests.support.builders import site_of, two_racks
from twin.plant import Plant
from twin.plant.disturbance import Disturbance, neutral
from twin.site import Site

CLOSED = 1e-6


def four_racks(**more: Any) -> Site:
    """Four NVL72 racks on two CDUs, a tower, two feeds, a network."""
    tree = two_racks(racks="r[1-4]", loops=[{"name": "l1", "cooling": "tower"}], **more)
    hall = tree["halls"][0]
    hall["cdus"] = [{"name": "cdu[1-2]", "serves": ["r[1-4]"], "loop": "l1"}]
    hall["planes"] = [{"name": "eth", "links_per_node": 1, "racks": ["r[1-4]"]}]
    for feeder in hall["feeders"]:
        feeder["budget_w"] = 600_000
    return site_of(tree)


def put(field: str, at: Any, value: float) -> Callable[[Disturbance], None]:
    def act(d: Disturbance) -> None:
        getattr(d, field)[at] = value

    return act


def heat_wave(d: Disturbance) -> None:
    d.outdoor_add_k = 20.0


def sag(d: Disturbance) -> None:
    d.grid_voltage_pu = 0.8


def black_out(d: Disturbance) -> None:
    d.grid_voltage_pu = 0.0


FAULTS: dict[str, Callable[[Disturbance], None]] = {
    "none": lambda d: None,
    "pump": put("cdu_pump_ok", (0, 0), False),
    "both pumps": put("cdu_pump_ok", (0, slice(None)), False),
    "worn": put("cdu_pump_head_factor", 0, 0.5),
    "filter": put("cdu_filter_factor", 0, 1000.0),
    "branch": put("rack_branch_factor", 0, 1e12),
    "fouled": put("cdu_ua_factor", 0, 0.15),
    "valve": put("cdu_valve_stuck_pu", 0, 0.1),
    "tray": put("node_plate_factor", 0, 5.0),
    "paste": put("gpu_plate_factor", 3, 3.0),
    "tray leak": put("node_leak_lpm", 0, 0.5),
    "rack leak": put("rack_leak_lpm", 0, 4.0),
    "cdu leak": put("cdu_leak_lpm", 0, 60.0),
    "loop leak": put("loop_leak_lpm", 0, 60.0),
    "fans": put("rack_fan_factor", 0, 0.3),
    "cooler": put("loop_fan_factor", 0, 0.0),
    "feed": put("feeder_ok", 0, False),
    "both feeds": put("feeder_ok", slice(None), False),
    "breaker": put("feeder_trip", 1, True),
    "supply": put("node_psu_ok", (0, 0), False),
    "node": put("node_psu_ok", (0, slice(None)), False),
    "off bus": put("gpu_alive", 0, False),
    "heat wave": heat_wave,
    "sag": sag,
    "grid": black_out,
}


def worst(plant: Plant) -> tuple[float, str]:
    return max((error, name) for name, error in plant.balances().items())


@pytest.mark.parametrize("fault", FAULTS)
def test_balances_close_in_every_step(fault: str) -> None:
    plant = Plant(four_racks(), seed=1)
    plant.truth.gpu_sm_pu[:] = 0.9
    FAULTS[fault](plant.disturbance)
    for k in range(150):
        plant.step(dt_s=(1.0, 0.5, 2.0)[k % 3])
        error, name = worst(plant)
        assert error < CLOSED, (k, name)
        assert all(np.isfinite(x).all() for x in (plant.truth.gpu_temp_c, plant.truth.rack_return_c))


def test_balances_close_with_several_faults_that_come_and_go() -> None:
    rng = np.random.default_rng(5)
    plant = Plant(four_racks(), seed=2)
    names = [n for n in FAULTS if n not in ("none", "both feeds", "breaker")]
    for _ in range(12):
        whole = neutral(plant.site)
        for f in fields(whole):
            setattr(plant.disturbance, f.name, getattr(whole, f.name))
        plant.truth.gpu_sm_pu[:] = rng.uniform(0.0, 1.0)
        for name in rng.choice(names, 3, replace=False):
            FAULTS[str(name)](plant.disturbance)
        for _ in range(20):
            plant.step()
            assert worst(plant)[0] < CLOSED


def test_air_and_mixed_sites_close_too() -> None:
    tree = two_racks()
    hall = tree["halls"][0]
    hall["racks"].append({"name": "x1", "profile": "hgx-h100", "nodes": 4})
    hall["racks"].append({"name": "x2", "profile": "hgx-h100", "nodes": 1, "gpus_per_node": 3})
    hall["racks"].append({"name": "bare", "nodes": 2})
    hall["feeders"][0]["serves"] = ["r[1-2]", "x1", "x2"]
    plant = Plant(site_of(tree), seed=3)
    for _ in range(60):
        plant.step()
        assert worst(plant)[0] < CLOSED
    assert plant.truth.rack_flow_lpm[2] == 0.0
    assert plant.truth.rack_liquid_heat_w[2] == 0.0


def test_a_leak_empties_the_reserve_then_the_pressure_falls_and_the_flow_with_it() -> None:
    plant = Plant(four_racks(), seed=4)
    full_pa, full_lpm = plant.truth.cdu_supply_pa[0], plant.truth.cdu_flow_lpm[0]
    plant.disturbance.cdu_leak_lpm[0] = 60.0
    plant.step()
    # The gas above the reserve expands from the reserve's volume by what is lost: p V stays as it was
    lost_pu = plant.truth.cdu_leaked_l[0] / plant.parameters.cdu_reserve_l[0]
    fell_pa = 251_325.0 * (1.0 - 1.0 / (1.0 + lost_pu))
    assert full_pa - plant.truth.cdu_supply_pa[0] == pytest.approx(fell_pa, abs=0.002 * full_pa)
    for _ in range(120):
        plant.step()
    assert plant.truth.cdu_filled_l[0] > 0.0
    assert plant.truth.cdu_leak[0]
    assert not plant.truth.cdu_leak[1]
    assert plant.truth.cdu_supply_pa[0] < 0.5 * full_pa
    assert plant.truth.cdu_flow_lpm[0] < 0.7 * full_lpm


@pytest.mark.long
def test_a_trays_detector_speaks_first_then_the_racks() -> None:
    plant = Plant(four_racks(), seed=4)
    plant.disturbance.node_leak_lpm[5] = 0.5
    first: dict[str, int] = {}
    for k in range(120):
        plant.step()
        for name, wet in (("tray", plant.truth.node_leak[5]), ("rack", plant.truth.rack_leak[0])):
            if wet:
                first.setdefault(name, k)
    assert 0 < first["tray"] < first["rack"]
    wet = np.flatnonzero(plant.truth.node_leak).tolist()
    assert wet == list(range(wet[0], 6)), "it drips from one into the next one below"
    assert len(wet) >= 2
    plant.disturbance.node_leak_lpm[5] = 0.0
    for _ in range(4):
        plant.step(dt_s=1800.0)
    assert not plant.truth.node_leak.any()


@pytest.mark.parametrize("nodes_from, reached", [("bottom", range(6)), ("top", range(5, 18))])
def test_water_runs_down_from_tray_to_tray_and_to_no_other_rack(nodes_from: str, reached: range) -> None:
    tree = two_racks(loops=[{"name": "fw1"}])
    tree["halls"][0]["racks"][0]["nodes_from"] = nodes_from
    plant = Plant(site_of(tree), seed=4)
    plant.disturbance.node_leak_lpm[5] = 0.5
    for _ in range(1200):
        plant.step()
    assert set(np.flatnonzero(plant.truth.node_leak).tolist()) <= set(reached)
    assert plant.truth.node_leak.sum() >= 4
    assert plant.truth.rack_leak.tolist() == [True, False]


def test_isolation_stops_what_leaks_in_the_rack() -> None:
    plant = Plant(four_racks(), seed=4)
    plant.disturbance.rack_leak_lpm[0] = 4.0
    plant.step(dt_s=20.0)
    plant.truth.rack_isolated[0] = True
    before = plant.truth.cdu_leaked_l[0]
    plant.step(dt_s=20.0)
    assert plant.truth.cdu_leaked_l[0] == before
    assert plant.truth.rack_flow_lpm[0] < 1e-3


@pytest.mark.long
@pytest.mark.parametrize(("lpm", "seed"), [(20.0, 1), (20.0, 2), (3.0, 3), (200.0, 4)])
def test_balances_close_until_a_leak_has_drained_its_circuit(lpm: float, seed: int) -> None:
    plant = Plant(four_racks(), seed=seed)
    plant.truth.gpu_sm_pu[:] = 0.5
    plant.disturbance.cdu_leak_lpm[0] = lpm
    for _ in range(1800):
        plant.step()
        error, name = worst(plant)
        assert error < CLOSED, name
    t = plant.truth
    assert t.cdu_flow_lpm[0] < 0.5 * t.cdu_flow_lpm[1]
    assert t.cdu_leaked_l[0] > plant.parameters.cdu_reserve_l[0]
    assert lpm < 10.0 or t.cdu_flow_lpm[0] == 0.0


def test_at_rest_all_that_racks_and_pumps_draw_leaves_as_heat() -> None:
    plant = Plant(four_racks(), seed=6)
    plant.settle(4 * 3600.0)
    t = plant.truth
    drawn_w, pumps_w = t.rack_power_w.sum() + t.cdu_pump_power_w.sum(), t.cdu_pump_power_w.sum()
    left_w = t.loop_rejected_w.sum() + plant.cooling.hall_air_w.sum()
    # The loop's own pumps heat its water too
    assert left_w - plant.facility.pump_heat_w.sum() == pytest.approx(drawn_w, abs=0.02 * pumps_w)
    assert plant.facility.pump_heat_w.sum() > 0.0


def test_heat_into_coolant_and_air_is_shared_as_the_parameters_say() -> None:
    plant = Plant(four_racks(), seed=6)
    plant.settle(3600.0)
    plant.step()
    t, p = plant.truth, plant.parameters
    gpus_w = np.bincount(plant.site.rack_of_gpu, weights=t.gpu_power_w)
    lost_w = p.rack_to_air_w_per_k * (t.rack_return_c - t.rack_inlet_c)
    wanted_w = gpus_w * p.rack_plate_capture_pu + (t.rack_power_w - gpus_w) * p.rack_rest_capture_pu - lost_w
    watt_per_k = t.rack_flow_lpm * p.watt_per_k_per_lpm
    assert watt_per_k * (t.rack_return_c - t.rack_supply_c) == pytest.approx(wanted_w, rel=1e-3)
    assert t.rack_air_heat_w == pytest.approx(t.rack_power_w - wanted_w, rel=3e-3)
