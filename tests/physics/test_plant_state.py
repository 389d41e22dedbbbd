"""A plant is a function of its seed; forks go their own ways; nothing grows."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from tests.support.builders import site_of, two_racks
from twin.plant import Plant, Scenario, Script
from twin.plant.truth import Truth, blank
from twin.site import RACK_DROP_PA


def same(one: Truth, other: Truth) -> bool:
    return all(np.array_equal(getattr(one, n), getattr(other, n)) for n in Truth.__slots__)


def scenario() -> Scenario:
    return Scenario("test", faults=(Script("pump_trip", "cdu", 0, 30.0, 90.0),))


def test_equal_seeds_give_equal_plants_and_others_do_not() -> None:
    site = site_of(two_racks())
    one, two, other = (Plant(site, seed, scenario()) for seed in (4, 4, 5))
    for _ in range(120):
        for plant in (one, two, other):
            plant.step()
    assert same(one.truth, two.truth)
    assert one.events() == two.events()
    assert one.figures() == two.figures()
    assert not np.array_equal(one.truth.gpu_temp_c, other.truth.gpu_temp_c)


def test_a_fork_goes_on_by_itself_and_the_original_too() -> None:
    site = site_of(two_racks())
    plant, witness = Plant(site, 4, scenario()), Plant(site, 4, scenario())
    for _ in range(40):
        plant.step()
        witness.step()
    fork = plant.fork()
    assert same(fork.truth, plant.truth)
    assert fork.site is plant.site
    fork.disturbance.rack_branch_factor[0] = 1e12
    for _ in range(40):
        fork.step()
    assert same(plant.truth, witness.truth)
    for _ in range(40):
        plant.step()
        witness.step()
    assert same(plant.truth, witness.truth)
    assert fork.truth.rack_flow_lpm[0] < 1.0 < plant.truth.rack_flow_lpm[0]


def test_an_untouched_fork_does_the_same() -> None:
    plant = Plant(site_of(two_racks()), 4, scenario())
    for _ in range(25):
        plant.step()
    fork = plant.fork()
    for _ in range(60):
        plant.step()
        fork.step()
    assert same(plant.truth, fork.truth)
    assert plant.figures() == fork.figures()
    assert max(fork.balances().values()) < 1e-6


def test_looking_at_the_disturbance_changes_nothing() -> None:
    site = site_of(two_racks())
    one, two = Plant(site, 4), Plant(site, 4)
    assert one.disturbance is one.present
    for _ in range(30):
        one.step()
        two.step()
    assert same(one.truth, two.truth)


@pytest.mark.long
def test_memory_is_flat() -> None:
    plant = Plant(site_of(two_racks()), 1, scenario())
    for _ in range(1500):
        plant.step()
    plant.events()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(1500):
        plant.step()
    plant.events()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 60_000


def test_a_new_plant_starts_at_rest_with_nothing_counted() -> None:
    plant = Plant(site_of(two_racks()), 1, scenario())
    t = plant.truth
    assert t.time_s == 0.0
    assert t.gpu_energy_j.sum() == t.trips.sum() == t.throttle_s.sum() == t.cdu_leaked_l.sum() == 0
    assert (t.gpu_temp_c > 30.0).all()
    assert t.cdu_drop_pa == pytest.approx(RACK_DROP_PA, rel=0.01)
    assert t.utility_power_w > t.rack_power_w.sum() > 0.0
    assert plant.figures()["it_energy_j"] == 0.0


def test_a_lumped_plant_draws_what_the_whole_draws() -> None:
    whole = Plant(site_of(two_racks()), 1, spread=0.0)
    tree = two_racks()
    tree["halls"][0]["racks"][0] |= {"gpus_per_node": 1}
    lumped = Plant(site_of(tree), 1, spread=0.0, lump=True)
    assert lumped.parameters.lump == 4
    assert len(lumped.truth.gpu_power_w) == len(whole.truth.gpu_power_w) / 4
    for plant in (whole, lumped):
        plant.step()
    assert lumped.truth.rack_power_w == pytest.approx(whole.truth.rack_power_w, rel=0.005)
    assert lumped.truth.rack_flow_lpm == pytest.approx(whole.truth.rack_flow_lpm, rel=0.03)
    assert lumped.truth.gpu_temp_c.mean() == pytest.approx(whole.truth.gpu_temp_c.mean(), abs=1.5)


def test_longer_steps_are_done_in_parts_and_count_the_same() -> None:
    site = site_of(two_racks())
    one, two = Plant(site, 4), Plant(site, 4)
    one.step(dt_s=60.0)
    for _ in range(30):
        two.step(dt_s=2.0)
    assert same(one.truth, two.truth)
    with pytest.raises(ValueError, match="above 0"):
        one.step(dt_s=0.0)


def test_a_site_without_anything_is_a_plant() -> None:
    plant = Plant(site_of({"site": "empty", "halls": [{"name": "h"}]}))
    plant.step()
    assert max(plant.balances().values()) < 1e-6
    assert blank(plant.site).time_s == 0.0


def test_large_sites_count_where_small_ones_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    site = site_of(two_racks(loops=[{"name": "l1", "cooling": "chiller"}]))
    small = Plant(site, 4)
    monkeypatch.setattr("twin.plant.layout.DENSE_MAX", 0)
    monkeypatch.setattr("twin.plant.power.DENSE_MAX", 0)
    large = Plant(site, 4)
    for plant in (small, large):
        plant.disturbance.feeder_ok[0] = False
        for _ in range(30):
            plant.step()
    assert large.truth.gpu_temp_c == pytest.approx(small.truth.gpu_temp_c, abs=1e-9)
    assert large.truth.feeder_power_w == pytest.approx(small.truth.feeder_power_w, rel=1e-12)
    assert max(large.balances().values()) < 1e-6
