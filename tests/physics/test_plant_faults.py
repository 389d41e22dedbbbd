"""Faults of a plant: pumps, heat, feeds and breakers, supplies, errors."""

from __future__ import annotations

import numpy as np
import pytest

from tests.physics.test_breaker import seconds_to_trip
from tests.support.builders import site_of, two_racks
from twin.physics import HOLD_PU
from twin.plant import Plant, Scenario, Script
from twin.telemetry import FaultReported


def loaded(seed: int = 1, budget_w: float = 300_000.0, load: float = 0.95) -> Plant:
    tree = two_racks()
    for feeder in tree["halls"][0]["feeders"]:
        feeder["budget_w"] = budget_w
    plant = Plant(site_of(tree), seed=seed)
    plant.truth.gpu_sm_pu[:], plant.truth.gpu_tensor_pu[:] = load, 0.8 * load
    plant.settle()
    return plant


def test_the_other_pump_takes_over_after_five_seconds() -> None:
    plant = loaded()
    flow = plant.truth.cdu_flow_lpm[0]
    plant.disturbance.cdu_pump_ok[0, 1] = False
    seen = []
    for _ in range(10):
        plant.step()
        seen.append(float(plant.truth.cdu_flow_lpm[0] / flow))
    assert seen[0] < 0.9
    assert max(seen[:4]) < 1.0
    assert seen[-1] > 0.95
    assert plant.truth.cdu_pump_speed_pu[0].tolist() == [1.0, 0.0]
    plant.disturbance.cdu_pump_ok[0, 1] = True
    for _ in range(120):
        plant.step()
    assert plant.truth.cdu_flow_lpm[0] == pytest.approx(flow, rel=1e-3)


def test_a_blocked_branch_starves_its_rack_and_feeds_the_other() -> None:
    plant = loaded()
    before = plant.truth.rack_flow_lpm.copy()
    plant.disturbance.rack_branch_factor[0] = 1e12
    plant.step()
    assert plant.truth.rack_flow_lpm[0] < 1e-3
    assert plant.truth.rack_flow_lpm[1] > before[1]
    assert plant.truth.cdu_flow_lpm[0] == pytest.approx(plant.truth.rack_flow_lpm.sum(), rel=1e-8)
    assert plant.figures()["solver_failures"] == 0


def test_a_network_without_a_solution_keeps_its_flows_and_is_flagged() -> None:
    tree = two_racks()
    tree["halls"][0]["cdus"] = [{"name": f"cdu{i}", "serves": [f"r{i}"]} for i in (1, 2)]
    plant = Plant(site_of(tree), seed=1)
    plant.step()
    t = plant.truth
    assert not plant.unsolved_cdus.any()
    flow, rack, drop = t.cdu_flow_lpm.copy(), t.rack_flow_lpm.copy(), t.cdu_drop_pa.copy()
    plant.disturbance.rack_branch_factor[0] = np.nan
    plant.disturbance.rack_branch_factor[1] = 4.0
    plant.step()
    assert plant.unsolved_cdus.tolist() == [True, False]
    assert plant.figures()["solver_failures"] == 1
    assert t.cdu_flow_lpm[0] == pytest.approx(flow[0], rel=1e-4)
    assert t.rack_flow_lpm[0] == pytest.approx(rack[0], rel=1e-4)
    assert t.cdu_drop_pa[0] == pytest.approx(drop[0], rel=1e-4)
    assert t.rack_flow_lpm[1] < 0.8 * rack[1]
    for _ in range(30):
        plant.step()
        assert max(plant.balances().values()) < 1e-6
    assert t.cdu_flow_lpm[0] == pytest.approx(flow[0], rel=1e-3)
    plant.disturbance.rack_branch_factor[:] = 1.0
    plant.step()
    assert not plant.unsolved_cdus.any()


def test_heat_lowers_clocks_before_it_shuts_down() -> None:
    plant = loaded()
    plant.disturbance.gpu_plate_factor[7] = 2.6
    clocks, temps = [], []
    for _ in range(120):
        plant.step()
        clocks.append(plant.truth.gpu_clock_pu[7])
        temps.append(plant.truth.gpu_temp_c[7])
    slowdown = plant.parameters.gpu_slowdown_c[7]
    assert min(clocks) < 0.9
    assert max(temps) < plant.parameters.gpu_shutdown_c[7]
    assert abs(temps[-1] - slowdown) < 6.0
    assert plant.truth.throttle_s[7] > 10.0
    assert np.delete(plant.truth.throttle_s, 7).sum() == 0.0
    assert plant.truth.gpu_event_bits[7] & 0x60
    assert plant.figures()["lost_gpu_s"] > 1.0


def test_without_coolant_gpus_fall_off_and_say_so() -> None:
    plant = loaded()
    plant.disturbance.cdu_pump_ok[:] = False
    for _ in range(60):
        plant.step()
    assert not plant.truth.gpu_alive.any()
    assert (plant.truth.trips == 1).all()
    codes = [e.code for e in plant.events() if isinstance(e, FaultReported)]
    assert codes == [79] * len(plant.truth.trips)
    assert plant.events() == []
    # They come back with their node, once it was switched off and on
    plant.disturbance.cdu_pump_ok[:] = True
    for _ in range(60):
        plant.step()
    assert not plant.truth.gpu_alive.any()
    plant.disturbance.feeder_ok[:] = False
    plant.step()
    plant.disturbance.feeder_ok[:] = True
    plant.step()
    assert plant.truth.gpu_alive.all()


def test_a_lost_feed_moves_its_load_to_the_other() -> None:
    plant = loaded()
    total = plant.truth.feeder_power_w.sum()
    plant.disturbance.feeder_ok[0] = False
    plant.step()
    t = plant.truth
    assert t.feeder_power_w[0] == 0.0
    assert t.feeder_voltage_pu[0] == 0.0
    assert t.feeder_power_w[1] == pytest.approx(total, rel=0.02)
    assert t.feeder_power_w[1] > total  # supplies that carry all lose more
    assert (t.node_psu_power_w[:, 0] == 0.0).all()
    assert not t.rack_unpowered.any()
    plant.disturbance.feeder_ok[1] = False
    plant.step()
    assert t.rack_unpowered.all()
    assert t.rack_power_w.sum() == 0.0
    assert not t.node_on.any()


def test_a_breaker_trips_by_heat_when_its_time_has_come() -> None:
    plant = loaded(budget_w=110_000.0)
    plant.step()
    plant.disturbance.feeder_ok[0] = False
    plant.step()
    load = plant.truth.feeder_power_w[1] / plant.parameters.feeder_rating_w[1]
    assert load > HOLD_PU
    expected_s = seconds_to_trip(float(plant.truth.feeder_theta[1]), float(load))
    waited = 0
    while not plant.truth.feeder_tripped[1] and waited < 2000:
        plant.step()
        waited += 1
    assert waited == pytest.approx(expected_s, rel=0.05)
    plant.step()
    assert plant.truth.rack_unpowered.all()
    assert plant.figures()["breaker_trips"] == 1


@pytest.mark.parametrize("dense", [True, False])
def test_feeders_carry_what_hangs_on_them(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a matrix or by sums: the recursion over the tree, whatever is lost."""
    monkeypatch.setattr("twin.plant.power.DENSE_MAX", 40_000 if dense else 0)
    tree = two_racks()
    a = tree["halls"][0]["feeders"][0]
    tree["halls"][0]["feeders"] += [{"name": "ups", "serves": [a["name"]], "side": "A"}]
    plant = Plant(site_of(tree), 1)
    site, t, carried = plant.site, plant.truth, plant.power
    for lost in (None, 0, 1):
        plant.disturbance.feeder_ok[:] = True
        if lost is not None:
            plant.disturbance.feeder_ok[lost] = False
        plant.step()

        def load(f: int) -> float:
            mine = carried.tree.feeder == f
            own = (t.rack_power_w[carried.tree.rack] * carried.pair_share)[mine].sum()
            return float(own + sum(load(c) for c in np.flatnonzero(site.parent_of_feeder == f)))

        assert (carried.matrix is not None) == dense
        assert t.feeder_power_w == pytest.approx([load(f) for f in range(len(t.feeder_power_w))])
        roots = site.parent_of_feeder < 0
        assert t.feeder_power_w[roots].sum() == pytest.approx(t.rack_power_w.sum())


def test_a_node_on_one_supply_draws_from_one_feed_and_loses_more() -> None:
    plant = loaded()
    before = plant.truth.node_power_w.copy()
    plant.disturbance.node_psu_ok[4, 0] = False
    plant.step()
    psu = plant.truth.node_psu_power_w
    assert psu[4, 0] == 0.0
    assert psu[4, 1] == plant.truth.node_power_w[4] > before[4] + 5.0
    assert psu[5].min() > 0.0
    plant.disturbance.node_psu_ok[4, 1] = False
    plant.step()
    assert not plant.truth.node_on[4]
    assert plant.truth.node_power_w[4] == 0.0


def test_errors_are_counted_and_reported() -> None:
    plant = loaded()
    d = plant.disturbance
    d.gpu_sbe_per_s[3], d.gpu_nvlink_errors_per_s[3], d.gpu_xid[9] = 0.3, 250.0, 94
    plant.step()
    d.gpu_xid[9] = 0
    for _ in range(9):
        plant.step()
    t = plant.truth
    assert t.gpu_sbe_count[3] in (2, 3)
    assert t.gpu_nvlink_errors[3] == 2500
    assert t.gpu_xid_code[9] == 94
    assert plant.events() == [FaultReported(table="gpu", name="lab/h/r1/node2/gpu1", code=94)]


def test_off_the_bus_and_back() -> None:
    plant = loaded()
    plant.disturbance.gpu_alive[0] = False
    plant.step()
    assert plant.truth.gpu_power_w[0] == 0.0
    plant.disturbance.gpu_alive[0] = True
    plant.step()
    assert plant.truth.gpu_power_w[0] > 100.0


def test_fouling_opens_the_valve_and_a_sag_lowers_the_voltage() -> None:
    plant = loaded(load=0.7)
    valve = plant.truth.cdu_valve_pu[0]
    plant.disturbance.cdu_ua_factor[0] = 0.5
    plant.disturbance.grid_voltage_pu = 0.85
    for _ in range(300):
        plant.step()
    assert plant.truth.cdu_valve_pu[0] > valve + 0.03
    assert plant.truth.cdu_supply_c[0] == pytest.approx(32.0, abs=0.3)
    assert plant.truth.feeder_voltage_pu.max() < 0.86


def test_without_the_grid_nothing_draws_and_with_it_all_draw_again() -> None:
    tree = two_racks(loops=[{"name": "l1", "cooling": "chiller"}])
    tree["halls"][0]["cdus"][0]["loop"] = "l1"
    plant = Plant(site_of(tree), 1)
    t = plant.truth
    before_w = t.rack_power_w.copy()
    for volts_pu, on in ((0.0, False), (0.51, True), (0.5, False), (1.0, True)):
        plant.disturbance.grid_voltage_pu = volts_pu
        for _ in range(60):
            plant.step()
            assert max(plant.balances().values()) < 1e-6
        assert (t.node_on == on).all()
        assert t.rack_power_w == pytest.approx(before_w * on, rel=0.01)
        # Nor does what cools them
        for drawn in (
            t.cdu_pump_power_w,
            t.cdu_flow_lpm,
            t.cdu_primary_flow_lpm,
            t.loop_power_w,
            t.feeder_voltage_pu,
        ):
            assert ((drawn > 0.0) == on).all()
        assert (t.utility_power_w > before_w.sum()) == on


def test_a_clock_that_heat_lowered_rises_again_only_three_kelvin_below() -> None:
    plant = loaded()
    c, t, p = plant.compute, plant.truth, plant.parameters
    for below_k, moves in ((-0.1, -0.05), (0.1, 0.0), (2.9, 0.0), (3.1, 0.02), (20.0, 0.02)):
        c.thermal_clock[:] = 0.6
        t.gpu_temp_c[:] = p.gpu_slowdown_c - below_k
        c._throttle(t, p, 1.0)
        assert c.thermal_clock == pytest.approx(0.6 + moves), below_k
        assert c.cool_running


def test_a_congested_link_carries_less_while_its_node_is_busy() -> None:
    tree = two_racks()
    tree["halls"][0]["planes"] = [{"name": "p", "links_per_node": 1, "racks": ["r[1-2]"]}]
    plant = Plant(site_of(tree), seed=1)
    plant.truth.gpu_tensor_pu[:] = 0.8
    plant.step(dt_s=10.0)
    rate = plant.truth.link_bytes_per_s
    assert rate.min() > 1e9
    before = rate.copy()
    plant.disturbance.link_rate_factor[3] = 0.25
    plant.disturbance.link_down[5] = True
    plant.step(dt_s=6.0)
    assert rate[3] == pytest.approx(0.25 * before[3])
    assert rate[5] == 0.0
    assert np.delete(rate, [3, 5]) == pytest.approx(np.delete(before, [3, 5]))


@pytest.mark.parametrize("kind", ["ecc_growth", "nvlink_flaps"])
def test_errors_go_on_as_long_as_their_script_does(kind: str) -> None:
    site = site_of(two_racks())
    script = Script(kind, "gpu", 3, 20.0, 80.0, 1.0)
    plant = Plant(site, 1, Scenario("errors", faults=(script,)))
    t, seen = plant.truth, []
    for _ in range(120):
        plant.step()
        seen.append(int(t.gpu_sbe_count[3] + t.gpu_nvlink_errors[3]))
    growth = np.diff(seen)
    assert growth[:18].sum() == growth[85:].sum() == 0
    assert np.add.reduceat(growth[20:80], np.arange(0, 60, 20)).min() > 0
    assert np.delete(t.gpu_sbe_count + t.gpu_nvlink_errors, 3).sum() == 0
