"""Signals that change seldom are read seldom: no change is missed, and a truth made by hand is read whole."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from tests.evaluation.bench.fault_draws import draw, kinds_of
from tests.physics.test_sensors import LOCKS, Bench
from tests.support.builders import site_of, two_racks
from twin.plant import Plant, Scenario, Sensors
from twin.plant.sensors import GPU, NODE
from twin.site import Site


@pytest.fixture(scope="module")
def pod() -> Site:
    return site_of(two_racks())


def test_what_changes_seldom_is_read_when_it_did_and_each_tenth_round_anyway(pod: Site) -> None:
    bench = Bench(pod, drop_out_pu=0.01)
    t = bench.plant.truth
    t.seldom_count = 0
    bench.look()
    t.gpu_xid_code[5], t.node_leak[7], t.gpu_sbe_count[2] = 79, True, 3
    quiet = [bench.look().copy() for _ in range(9)]
    for seen in quiet:
        assert np.nan_to_num(seen.find("gpu", "xid_code").column("xid_code")).sum() == 0  # type: ignore[union-attr]
    gaps = [np.isnan(s.find("node", "leak_state").values).mean() for s in quiet]  # type: ignore[union-attr]
    assert max(gaps) < 0.05  # cells that dropped out come back
    t.seldom_count += 1
    bench.sensors.drop_out_pu = 0.0
    seen = bench.look()
    assert seen.find("gpu", "xid_code").column("xid_code")[5] == 79  # type: ignore[union-attr]
    assert seen.find("gpu", "xid_code").counts[3, 2] == 3  # type: ignore[union-attr]
    assert seen.find("node", "leak_state").column("leak_state")[7] == 1  # type: ignore[union-attr]
    t.gpu_xid_code[5] = 94
    codes = [float(bench.look().find("gpu", "xid_code").column("xid_code")[5]) for _ in range(12)]  # type: ignore[union-attr]
    assert (codes[0], codes[-1]) == (79, 94)


def test_a_plant_counts_what_changes_seldom() -> None:
    """Sensors that trust the count read the same as sensors that look at all in each round."""
    site = site_of(two_racks())
    rng = np.random.default_rng(3)
    faults = tuple(draw(site, rng, kind, begin_s=20.0 + 10.0 * k) for k, kind in enumerate(kinds_of(site))
                   if not kind.startswith("sensor_"))  # fmt: skip
    plant = Plant(site, 1, Scenario("all that can be", faults=faults))
    trusting, looking = Sensors(site, 1), Sensors(site, 1)
    seldom = [m.signal for m in (*GPU, *NODE) if m.seldom]
    rested = 0
    for _ in range(20 + 10 * len(faults) + 40):
        plant.step()
        truth = plant.truth
        rested += truth.seldom_count == trusting._seen
        seen = trusting.observe(truth, plant.present, plant.now_ns)
        counted, truth.seldom_count = truth.seldom_count, -1
        expected = looking.observe(truth, plant.present, plant.now_ns)
        truth.seldom_count = counted
        ours, others = (
            [r for r in x.reports if r.signals not in (LOCKS, ("standby_state",))] for x in (seen, expected)
        )
        for one, other in zip(ours, others, strict=True):
            assert (one.table, one.signals) == (other.table, other.signals)
            for k, signal in enumerate(one.signals):
                if signal in seldom:
                    assert np.array_equal(one.values[k], other.values[k], equal_nan=True), signal
            assert np.array_equal(one.counts, other.counts)
    assert rested > 15


def test_clocks_that_rise_again_are_counted_too() -> None:
    """A cap that binds no more because the work has ended: no command says so."""
    site = site_of(two_racks())
    plant, sensors = Plant(site, 1), Sensors(site, noise=0.0)
    plant.truth.gpu_cap_w[:] = plant.compute.cap_least_w = 500.0
    clocks = []
    for k in range(40):
        plant.truth.gpu_sm_pu[:] = 0.9 if 5 < k < 30 else 0.0
        plant.step()
        report = sensors.observe(plant.truth, plant.present, plant.now_ns).find("gpu", "sm_clock_hz")
        assert report is not None
        clocks.append(float(report.column("sm_clock_hz").min()))
        assert (clocks[-1] < 1.9e9) == (5 < k < 30)


@pytest.mark.parametrize("how", ["fork", "deepcopy", "pickle"])
def test_a_copy_of_the_buildings_sensors_reads_on_its_own(pod: Site, how: str) -> None:
    bench = Bench(pod)
    bench.look()
    made = {"fork": lambda: bench.sensors.fork(), "deepcopy": lambda: copy.deepcopy(bench.sensors),
            "pickle": lambda: pickle.loads(pickle.dumps(bench.sensors))}  # fmt: skip
    other = made[how]()
    for k in range(5):
        bench.plant.truth.rack_supply_c[:] = 30.0 + k
        bench.now_ns += 1_000_000_000
        mine = bench.sensors.observe(bench.plant.truth, bench.plant.present, bench.now_ns).copy()
        its = other.observe(bench.plant.truth, bench.plant.present, bench.now_ns)
        for one, two in zip(mine.reports, its.reports, strict=True):
            assert np.array_equal(one.values, two.values, equal_nan=True)
    assert mine.find("rack", "supply_temp_c").column("supply_temp_c").min() > 30.5  # type: ignore[union-attr]
