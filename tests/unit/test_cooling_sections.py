"""Sections of CDUs: each is looked at once in its time, and what a section tells is what the site tells."""

from __future__ import annotations

import numpy as np
import pytest

from policies import REGISTRY
from policies.cooling_setpoint import margins
from policies.cooling_setpoint.groups import groups_of
from policies.cooling_setpoint.margins import NOTHING, ceilings
from policies.cooling_setpoint.sections import LOOK_S, section_of, turn_of
from tests.support.builders import site_of
from twin.catalogue import NS
from twin.engine import Engine
from twin.plant import Plant, Sensors
from twin.plant.sensors import Periods
from twin.simulation import Simulation
from twin.site import Site


def row_of_cdus(cdus: int) -> Site:
    """A rack on each CDU, the first two CDUs on one loop, the others on none."""
    racks = [{"name": f"r[1-{cdus}]", "profile": "gb200-nvl72", "nodes": 2}]
    placed = [
        {"name": f"c{k}", "serves": [f"r{k}"]} | ({"loop": "fw1"} if k < 3 else {})
        for k in range(1, cdus + 1)
    ]
    hall = {"name": "h", "racks": racks, "cdus": placed}
    return site_of({"site": "lab", "max_jobs": 4, "halls": [hall], "loops": [{"name": "fw1"}]})


@pytest.mark.parametrize("step_s", [0.5, 1.0, 2.0, 3.0, 10.0])
def test_each_cdu_is_looked_at_once_in_its_time_and_no_tick_looks_at_many(step_s: float) -> None:
    groups = groups_of(row_of_cdus(21))
    largest = max(len(g.gpus) for g in groups)
    looked = np.zeros(len(groups), np.int64)
    begin_ns, steps = 7_123_456_789 * NS, round(30.0 / step_s)
    for k in range(steps):
        then_ns = begin_ns + round(k * step_s * NS)
        turn = turn_of(groups, then_ns, then_ns + round(step_s * NS))
        looked[[g.number for g in turn]] += 1
        share = sum(len(g.gpus) for g in groups) * min(step_s / LOOK_S, 1.0)
        assert sum(len(g.gpus) for g in turn) <= share + largest
    assert set(looked.tolist()) == {3}


def test_a_site_looked_at_in_parts_is_the_site_looked_at_at_once() -> None:
    site = row_of_cdus(5)
    plant = Plant(site, 3)
    plant.truth.gpu_sm_pu[:] = np.linspace(0.0, 1.0, site.sizes["gpu"])
    plant.settle(600.0)
    engine = Engine(site, [REGISTRY["cooling_setpoint"]()], [], {"cooling_setpoint": "advise"})
    sim = Simulation(engine, plant, Sensors(site, 5, Periods(60.0, 60.0, 60.0, 60.0)), dt_s=60.0)
    sim.run(600.0)
    view, memory, groups = engine.view(), engine.memory["cooling_setpoint"], groups_of(site)
    whole = section_of(site, groups)
    at_once = margins.learn(view, memory, whole, np.full(len(whole.cdus), 60.0))
    found = ceilings(view, at_once, whole, 1e-3, 3600.0)
    assert np.isfinite(found.supply_c).all()
    in_parts = dict(memory)
    for group in (groups[2], groups[0], groups[3], groups[1]):
        part = section_of(site, [group])
        in_parts |= margins.learn(view, in_parts, part, np.full(len(part.cdus), 60.0))
        here = ceilings(view, in_parts, part, 1e-3, 3600.0)
        np.testing.assert_array_equal(here.supply_c[group.cdus], found.supply_c[group.cdus])
        np.testing.assert_array_equal(here.gpu[group.cdus], found.gpu[group.cdus])
        np.testing.assert_array_equal(here.doubted[group.gpus], found.doubted[group.gpus])
    for name, column in at_once.items():
        np.testing.assert_array_equal(in_parts[name], column, err_msg=name)


def test_the_ceiling_of_a_cdu_is_its_least_and_the_first_that_has_it_binds() -> None:
    rng = np.random.default_rng(4)
    values = rng.integers(0, 6, 400).astype(np.float64)
    values[rng.random(400) < 0.2], values[rng.random(400) < 0.2] = np.nan, np.inf
    of, names = rng.integers(0, 60, 400).astype(np.int32), np.arange(1000, 1400, dtype=np.int32)
    least, first = margins._least(values, of, names, 62)
    for cdu in range(62):
        mine = [(v, int(n)) for v, n in zip(values[of == cdu], names[of == cdu], strict=True) if v < np.inf]
        assert (least[cdu], first[cdu]) == min(mine, default=(np.inf, NOTHING))
