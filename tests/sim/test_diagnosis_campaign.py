"""The diagnosis of faults in a simulated plant, whose truth says what is wrong. May import `twin`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.evaluation.bench.diagnosis import Outcome, Watched, inject, run_one
from tests.support.builders import site_of, two_racks
from tests.support.sampled_cases import sampled
from twin.engine import Engine
from twin.plant import Script, scenario_of
from twin.simulation import Simulation

pytestmark = pytest.mark.slow
WARM_S = 500


@pytest.fixture(scope="module")
def warmed() -> Watched:
    """A plant with work on it that has run for a while; what was told of it meanwhile is false."""
    site = site_of(two_racks(loops=[{"name": "fws1", "cooling": "dry_cooler"}]))
    scenario = scenario_of({"name": "test", "seed": 3, "hours": 1.0}, site)
    watched = Watched(Simulation.of(Engine(site, [], []), seed=3, scenario=scenario))
    for _ in range(WARM_S):
        assert watched.step() == ()
    return watched


def suffer(watched: Watched, kind: str, table: str, entity: int, **more: Any) -> Outcome:
    begin_s = watched.simulation.plant.truth.time_s + 5.0
    script = Script(kind, table, entity, begin_s, **more)
    return run_one(watched, watched.simulation.site, "test", 1, [script])


FAULTS = [
    ("pump_trip", "cdu", 0, {}, 5.0),
    ("grid_event", "site", 0, {"severity": 0.6}, 5.0),  # dark, with pumps and fans
    ("grid_event", "site", 0, {"severity": 0.3}, 5.0),
    ("feed_lost", "feeder", 1, {}, 5.0),
    ("branch_blocked", "rack", 1, {}, 9.0),
    ("sensor_biased", "rack", 0, {"signal": "flow_lpm", "amount": -25.0}, 60.0),
    ("sensor_biased", "rack", 0, {"signal": "return_temp_c", "amount": 4.0}, 60.0),
    ("sensor_frozen", "rack", 0, {"signal": "flow_lpm"}, 60.0),
    ("leak", "node", 4, {"severity": 0.6}, 5.0),
    ("tray_blocked", "node", 4, {"severity": 0.5}, 120.0),
    ("node_down", "node", 4, {}, 10.0),
    ("gpu_off_bus", "gpu", 40, {}, 30.0),
]
HERE = ("pump_trip", "grid_event", "branch_blocked", "sensor_frozen", "leak", "gpu_off_bus")


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "table", "entity", "more", "within_s"),
    sampled(FAULTS, *(fault for fault in FAULTS if fault[0] in HERE)),
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_fault_is_told_in_time_and_nothing_beside_it(
    warmed: Watched, kind: str, table: str, entity: int, more: dict[str, Any], within_s: float
) -> None:
    outcome = suffer(warmed, kind, table, entity, **more)
    assert outcome.right_class == [True], outcome
    assert outcome.beside == [], outcome
    assert outcome.delay_s[0] <= within_s, outcome


@pytest.mark.long
def test_a_clock_that_reads_too_low_is_wrong_and_not_the_power_that_is_expected_by_it(
    warmed: Watched,
) -> None:
    watched = warmed.fork()
    for _ in range(500):  # until its power is known well
        assert watched.step() == ()
    outcome = suffer(watched, "sensor_biased", "gpu", 131, signal="sm_clock_hz", amount=-3.6e8)
    assert [line.partition(" @")[0] for line in outcome.told] == [
        "sensor_biased lab/h/r2/node14/gpu3 sm_clock_hz"
    ]


@pytest.mark.long
def test_heat_from_lost_coolant_is_blamed_on_no_gpu(warmed: Watched) -> None:
    site, watched = warmed.simulation.site, warmed.fork()
    inject(watched, [Script("branch_blocked", "rack", 0, watched.simulation.plant.truth.time_s + 1.0)], 1)
    told: set[tuple[str, str]] = set()
    for _ in range(180):
        told |= {(f.kind, site.name(f.table, f.entity)) for f in watched.step()}
    assert watched.simulation.plant.truth.trips[:72].any(), "the GPUs were to shut down by heat"
    assert told == {("branch_blocked", "lab/h/r1")}
