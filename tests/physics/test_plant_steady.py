"""A plant at rest: inside its limits for every profile, hotter with more load and with less flow."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.support.builders import PROFILES, profile_tree, site_of, two_racks
from tests.support.sampled_cases import sampled
from twin.plant import Plant
from twin.plant.weather import Weather
from twin.site import Site

NAMES = [p.stem for p in sorted(PROFILES.glob("*.yaml"))]
TRUTH_OF = {
    "gpu.temp_c": "gpu_temp_c",
    "gpu.hbm_temp_c": "gpu_hbm_temp_c",
    "node.inlet_temp_c": "node_inlet_c",
    "rack.power_w": "rack_power_w",
    "rack.supply_temp_c": "rack_supply_c",
    "rack.return_temp_c": "rack_return_c",
}


def site_with(profile: str) -> Site:
    racks = int(profile_tree(profile)["layout"]["racks"]["value"])
    tree = two_racks(profile, f"r[1-{2 * racks}]")
    for feeder in tree["halls"][0]["feeders"]:
        feeder["budget_w"] = 2_000_000
    return site_of(tree)


def settled(site: Site, load: float, seed: int = 0, **more: Any) -> Plant:
    plant = Plant(site, seed, **more)
    for column, part in (("sm", 1.0), ("tensor", 0.7), ("dram", 0.6)):
        getattr(plant.truth, f"gpu_{column}_pu")[:] = load * part
    plant.settle()
    plant.step()
    return plant


@pytest.mark.parametrize("profile", NAMES)
@pytest.mark.parametrize("load", sampled([0.0, 0.5, 0.9], 0.9))
def test_every_profile_rests_inside_its_limits(profile: str, load: float) -> None:
    plant = settled(site_with(profile), load, seed=7)
    t, site = plant.truth, plant.site
    for key, name in TRUTH_OF.items():
        limit = site.limits.get(key)
        value = getattr(t, name)
        if limit is not None and not (
            key.startswith("rack.") and "power" not in key and not t.rack_flow_lpm.any()
        ):
            bound = np.where(np.isfinite(limit.max), limit.max, np.inf)
            assert (value <= bound).all(), (key, value.max(), np.nanmin(limit.max))
    flow = site.limits.get("rack.flow_lpm")
    if flow is not None and plant.parameters.rack_liquid.any():
        liquid = plant.parameters.rack_liquid
        assert (t.rack_flow_lpm[liquid] >= flow.guard[liquid]).all()
    assert (t.gpu_clock_pu > 0.9).all()
    assert plant.figures()["gpu_trips"] == 0
    # It rests: another ten minutes change nothing that matters
    before = t.gpu_temp_c.copy()
    for _ in range(300):
        plant.step(dt_s=2.0)
    assert np.abs(t.gpu_temp_c - before).max() < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("profile", sampled(["gb200-nvl72", "gb300-nvl72", "hgx-h100"], "gb300-nvl72"))
def test_more_load_is_hotter_everywhere(profile: str) -> None:
    site = site_with(profile)
    plants = [settled(site, load) for load in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    for less, more in pairwise(plants):
        assert (more.truth.gpu_power_w > less.truth.gpu_power_w).all()
        assert (more.truth.gpu_temp_c > less.truth.gpu_temp_c).all() or profile == "hgx-h100"
        assert (more.truth.rack_power_w > less.truth.rack_power_w).all()
        if plants[0].parameters.rack_liquid.any():
            assert (more.truth.rack_return_c > less.truth.rack_return_c).all()


def test_less_flow_is_hotter() -> None:
    site = site_of(two_racks())
    temps, flows, returns = [], [], []
    for factor in (1.0, 3.0, 10.0, 30.0):
        plant = Plant(site, 1)
        plant.disturbance.rack_branch_factor[0] = factor
        for _ in range(400):
            plant.step()
        flows.append(plant.truth.rack_flow_lpm[0])
        temps.append(plant.truth.gpu_temp_c[:72].mean())
        returns.append(plant.truth.rack_return_c[0])
    assert flows == sorted(flows, reverse=True)
    assert temps == sorted(temps)
    assert returns == sorted(returns)
    assert temps[-1] - temps[0] > 5.0


def test_a_stagnant_plate_warms_as_fast_as_known() -> None:
    """domain facts: 4-8 K/s on a stagnant plate at full power, 0.8-1.7 K/s of a rack's loop."""
    plant = settled(site_of(two_racks()), 0.95)
    plant.disturbance.cdu_pump_ok[:] = False
    for _ in range(4):  # until the pumps have run down
        plant.step()
    before = plant.truth.gpu_temp_c.copy()
    plant.step()
    rate = plant.truth.gpu_temp_c - before
    assert 3.0 < np.median(rate) < 8.0


def test_hotter_weather_makes_a_loop_hotter_or_its_fans_faster() -> None:
    tree = two_racks(loops=[{"name": "l1", "cooling": "dry_cooler"}])
    tree["halls"][0]["cdus"][0]["loop"] = "l1"
    site = site_of(tree)
    results = []
    for outdoor in (0.0, 15.0, 22.0, 35.0):
        plant = settled(site, 0.8, weather=Weather(mean_c=outdoor, swing_k=0.0))
        results.append((plant.truth.loop_fan_pu[0], plant.truth.loop_supply_c[0], plant.figures()["pue"]))
    fans = [r[0] for r in results]
    assert fans == sorted(fans)
    assert results[-1][1] > results[0][1] + 5.0
    assert results[-1][0] == 1.0


def test_figures_are_those_of_a_data_centre() -> None:
    plant = settled(site_of(two_racks()), 0.8)
    plant.step(dt_s=60.0)
    figures = plant.figures()
    assert 1.03 < figures["pue"] < 1.4
    assert figures["tue"] > figures["pue"]
    assert figures["it_energy_j"] == pytest.approx(
        plant.truth.rack_power_w.sum() * figures["time_s"], rel=0.02
    )


def test_spread_makes_differences_and_no_spread_makes_none() -> None:
    site = site_of(two_racks())
    same, other = Plant(site, 3, spread=0.0), Plant(site, 3)
    rise = same.truth.gpu_temp_c.reshape(2, 18, 4)
    assert np.ptp(rise[:, :, :2]) < 0.05
    # gpu2 and gpu3 sit downstream of gpu0 and gpu1
    assert (rise[:, :, 2:] > rise[:, :, :2] + 0.5).all()
    assert np.ptp(other.truth.gpu_temp_c) > 3.0
    assert np.ptp(other.truth.rack_flow_lpm) > 0.5


@pytest.mark.parametrize("profile", NAMES)
def test_a_node_draws_what_its_profile_says_full_and_idle(profile: str) -> None:
    site, power = site_with(profile), profile_tree(profile)["power"]
    for load, key in ((1.0, "node_max_w"), (0.0, "node_idle_w")):
        plant = Plant(site, spread=0.0)
        for column in ("sm", "tensor", "dram"):
            getattr(plant.truth, f"gpu_{column}_pu")[:] = load
        plant.settle()
        said = float(power[key]["value"])
        assert plant.truth.node_power_w == pytest.approx(said, rel=0.03 if load else 0.10), key


def test_a_rack_of_few_nodes_loses_the_share_of_a_full_one_in_its_shelves() -> None:
    """The loss is what its power rises by beyond that of its nodes, from rest to full load."""
    tree = two_racks()
    tree["halls"][0]["racks"] = [
        {"name": "r1", "profile": "gb200-nvl72"},
        {"name": "r2", "profile": "gb200-nvl72", "nodes": 1},
    ]
    site = site_of(tree)
    rest, busy = (settled(site, load, spread=0.0).truth for load in (0.0, 0.9))
    rise_w = busy.rack_power_w - rest.rack_power_w
    nodes_w = site.sum_by_rack("node", busy.node_power_w - rest.node_power_w)
    loss_pu = rise_w / nodes_w - 1.0
    assert loss_pu[1] == pytest.approx(loss_pu[0], rel=0.01)
    assert 0.01 < loss_pu[0] < 0.03
