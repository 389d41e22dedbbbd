"""Wear from the plant to the date: a filter that clogs under a simulated day's work, and a rack that is well.

A day of wear passes in six minutes, and the points of the trends with it: the twin is otherwise as it is.
"""

from __future__ import annotations

import pytest

from tests.support.builders import site_of
from twin.catalogue import utc
from twin.engine import Engine
from twin.estimation import comparisons
from twin.health import wear
from twin.plant import Scenario, Script
from twin.plant.faults import LIVES
from twin.plant.jobs import Mix
from twin.plant.weather import Weather
from twin.simulation import Simulation

PACE, CLEAN_D, LIFE_D, RUN_D, DAY_S = 240.0, 4.0, 30.0, 16.0, 86_400.0


@pytest.mark.long
def test_a_filter_that_clogs_is_told_with_the_date_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POINT_S", "LEAST_SPAN_S", "LONGEST_S"):
        monkeypatch.setattr(wear, name, getattr(wear, name) / PACE)
    monkeypatch.setattr(comparisons, "SETTLED_COUNT", 60)  # else it wears before its early value is known
    racks = [{"name": f"r{k}", "profile": "gb200-nvl72", "nodes": 2} for k in (1, 2)]
    cdus = [{"name": f"cdu{k}", "serves": [f"r{k}"]} for k in (1, 2)]
    site = site_of({"site": "lab", "halls": [{"name": "h", "racks": racks, "cdus": cdus}]})
    worn = LIVES["filter_blocked"].worn
    clogs = Script(
        "filter_blocked", "cdu", 0, CLEAN_D * DAY_S / PACE, None, worn * 1.25, LIFE_D * 1.25 * DAY_S / PACE
    )
    calm = Weather(swing_k=0.0)  # a day's swing lasts for months at this pace
    scenario = Scenario("clogging", 1, weather=calm, faults=(clogs,), workload=Mix(constant_pu=0.7))
    run = Simulation.of(Engine(site, (), ()), seed=1, scenario=scenario, dt_s=20.0)
    run.plant.step_max_s = 5.0
    run.run((CLEAN_D + RUN_D) * DAY_S / PACE)
    found = {r.what: r for r in run.engine.health.wear.remaining()}
    assert set(found) == {"cdu.filter"}, "what does not wear is not told"
    left = found["cdu.filter"]
    low, mid, high = (v[0] * PACE / DAY_S for v in (left.lo_s, left.mid_s, left.hi_s))
    assert low <= LIFE_D - RUN_D <= high
    assert mid == pytest.approx(LIFE_D - RUN_D, rel=0.25)
    assert not left.mid_s[1] >= 0.0
    (sentence,) = run.engine.health.wear.evidence("cdu", 0)
    assert f"is reached on {utc(run.now_ns, '%Y-%m-%d')} (90 %: " in sentence, "some minutes at this pace"
