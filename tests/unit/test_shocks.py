"""Failures with a cause in common: by a fault above them, or more than chance puts under one entity."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import poisson

from tests.support.builders import START_NS, site_of, two_racks
from tests.support.health_contexts import Look
from tests.unit.test_health_failures import Watch
from twin.catalogue import NS
from twin.contracts import FAILURE_CLASSES, Fault
from twin.health import log_tail
from twin.health.common_cause import MAX_SHOCKS, Fallen, Shocks
from twin.telemetry import JobEnded, JobStarted

# 40 racks of 18 nodes in two halls, a CDU for four racks, and a feeder for ten with one above
TREE = {
    "site": "lab",
    "halls": [
        {
            "name": hall,
            "racks": [{"name": "r[1-20]", "profile": "gb200-nvl72"}],
            "cdus": [{"name": f"c{k}", "serves": [f"r[{4 * k + 1}-{4 * k + 4}]"]} for k in range(5)],
            "feeders": [
                {"name": "top", "budget_w": 5e6, "serves": ["f1", "f2"]},
                {"name": "f1", "budget_w": 3e6, "serves": ["r[1-10]"]},
                {"name": "f2", "budget_w": 3e6, "serves": ["r[11-20]"]},
            ],
        }
        for hall in ("h1", "h2")
    ],
}
SITE = site_of(TREE)
OTHER, THERMAL, POWER, MEMORY = (FAILURE_CLASSES.index(c) for c in ("other", "thermal", "power", "memory"))


def fallen(nodes, at_s, kind=OTHER, shared=()):
    """Failures at these seconds; all are fresh."""
    n = len(nodes)
    start_ns = np.array([START_NS + round(s * NS) for s in at_s], np.int64)
    return Fallen(np.array(nodes, np.int32), start_ns, np.full(n, kind, np.uint8), np.ones(n, np.bool_),
                  np.isin(np.arange(n), shared))  # fmt: skip


def judge(some, *faults, past=0, days=100.0, look=None):
    """(places that are shared, shocks told)"""
    look = look or Look(SITE)
    look.now_ns = START_NS + 1200 * NS
    look.faults = faults
    shocks = Shocks(SITE)
    found = shocks.judge(look, some, past, look.now_ns - round(days * 86_400 * NS))
    return found.tolist(), shocks.log()


@pytest.mark.parametrize("mean", [1e-6, 1e-3, 0.05, 0.5, 2.0])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 12])
def test_the_tail_is_bounded_closely(count, mean):
    found, exact = log_tail(count, mean), poisson.logsf(count - 1, mean)
    assert found >= exact - 1e-9
    if count >= 2 * mean:
        assert found <= exact + 0.35
    assert log_tail(3, 0.0) == -math.inf


def test_racks_hang_under_all_feeders_above_them():
    feeder, rack = SITE.served_racks()
    for f in range(SITE.sizes["feeder"]):
        assert np.sort(rack[feeder == f]).tolist() == SITE.racks_below(f).tolist(), f


@pytest.mark.parametrize(
    ("nodes", "table", "name"),
    [
        ([0, 1, 2], "rack", "lab/h1/r1"),
        ([0, 18, 36], "cdu", "lab/h1/c0"),
        ([0, 18 * 4, 18 * 8], "feeder", "lab/h1/f1"),
        # hardly more would fall within one hall by chance: 3 of 360 within 10 min are one in 1e5
        ([0, 18 * 8, 18 * 18], "hall", "lab/h1"),
    ],
)
def test_three_within_ten_minutes_under_the_smallest_entity_that_has_them_all(nodes, table, name):
    found, told = judge(fallen(nodes, [0.0, 200.0, 500.0]))
    assert found == [0, 1, 2]
    assert [(s.table, s.name, s.nodes, s.count) for s in told] == [(table, name, tuple(nodes), 3)]
    assert told[0].why.startswith("3 of ")
    assert told[0].start_ns == START_NS


@pytest.mark.parametrize(
    ("nodes", "at_s"),
    [
        ([0, 1], [0, 0]),  # two are no crowd
        ([0, 1, 1], [0, 0, 100]),  # of the same node neither
        ([0, 1, 2], [0, 300, 601]),  # not within ten minutes
        ([0, 18 * 18, 18 * 38], [0, 0, 0]),  # nothing above them but the site
    ],
)
def test_what_chance_accounts_for_is_no_shock(nodes, at_s):
    assert judge(fallen(nodes, at_s)) == ([], ())


def test_a_fleet_that_fails_often_needs_more_to_surprise():
    some = fallen([0, 18 * 8, 18 * 18], [0.0, 0.0, 0.0])
    assert judge(some, past=400, days=100.0)[0] == [0, 1, 2]  # 6 per 1000 node-days
    # so many that 0.5 of the 360 nodes fail within 10 min on average: 3 have a chance of 0.014
    often = round(0.5 / 360 * 144 * 720 * 100)
    assert judge(some, past=often, days=100.0)[0] == []


def test_a_fourth_joins_the_shock_and_a_neighbour_beside_it_does_not():
    look, shocks = Look(SITE), Shocks(SITE)
    look.now_ns = START_NS + 900 * NS
    begin_ns = START_NS - 100 * 86_400 * NS
    first = fallen([0, 1, 2, 400], [0.0, 0.0, 0.0, 0.0])
    assert shocks.judge(look, first, 0, begin_ns).tolist() == [0, 1, 2]
    later = fallen([0, 1, 2, 400, 5], [0.0, 0.0, 0.0, 0.0, 500.0], shared=[0, 1, 2])
    later = later._replace(fresh=np.array([False] * 4 + [True]))
    assert shocks.judge(look, later, 0, begin_ns).tolist() == [0, 1, 2, 4]
    assert [(s.name, s.nodes, s.count) for s in shocks.log()] == [("lab/h1/r1", (0, 1, 2, 5), 4)]
    assert shocks.judge(look, later._replace(shared=later.shared | True), 0, begin_ns).tolist() == [
        0,
        1,
        2,
        4,
    ]
    assert shocks.log()[0].count == 4


@pytest.mark.parametrize(
    ("kind", "table", "entity", "failed", "expected"),
    [
        ("feed_lost", "feeder", 1, POWER, [0]),
        ("breaker_tripped", "feeder", 0, POWER, [0, 1]),  # also what is further down
        ("grid_event", "site", 0, POWER, [0, 1, 2]),
        ("pump_trip", "cdu", 0, THERMAL, [0]),
        ("pump_trip", "cdu", 0, MEMORY, []),  # no pump breaks memory
        ("feed_lost", "feeder", 1, THERMAL, []),
        ("leak", "rack", 0, OTHER, [0]),
        ("leak", "node", 0, OTHER, []),  # its own
        ("sensor_biased", "cdu", 0, THERMAL, []),
        ("heat_wave", "site", 0, THERMAL, [0, 1, 2]),
    ],
)
def test_a_fault_above_explains_one_alone(kind, table, entity, failed, expected):
    some = fallen([0, 18 * 18, 18 * 38], [0.0, 300.0, 600.0], failed)
    fault = Fault(kind, table, entity, "", "critical", 0.99, START_NS + 60 * NS, ())
    found, told = judge(some, fault)
    assert found == expected
    assert len(told) == bool(expected)
    if told:
        assert told[0].fault == kind
        assert told[0].why.startswith(kind.replace("_", " "))
    # long after the failures it explains none of them
    late = Fault(kind, table, entity, "", "critical", 0.99, START_NS + 1199 * NS + 600 * NS, ())
    assert judge(some, late)[0] == []


@pytest.mark.parametrize(
    ("kind", "table", "failed", "expected"),
    [("feed_lost", "feeder", POWER, []), ("pump_trip", "cdu", THERMAL, [0])],
)
def test_a_failure_minutes_before_a_feed_is_lost_is_not_explained_by_it(kind, table, failed, expected):
    fault = Fault(kind, table, 0, "", "critical", 0.99, START_NS + 210 * NS, ())
    assert judge(fallen([0], [0.0], failed), fault)[0] == expected


@pytest.mark.parametrize(
    ("after_s", "unpowered", "expected"),
    [(0.0, False, [0]), (1200.0, False, []), (1200.0, True, [0])],
)
def test_a_breaker_that_stays_tripped_explains_no_failure_of_a_rack_that_runs_on_its_other_feed(
    after_s, unpowered, expected
):
    look, shocks = Look(SITE), Shocks(SITE)
    look.now_ns = START_NS + 1300 * NS
    look.faults = (Fault("breaker_tripped", "feeder", 1, "", "critical", 0.99, START_NS, ()),)
    if unpowered:
        look.diagnosis.silence.unpowered_ns[0] = look.now_ns
    found = shocks.judge(look, fallen([0], [after_s], POWER), 0, START_NS - 100 * 86_400 * NS)
    assert found.tolist() == expected


def test_a_feeder_that_goes_dark_later_explains_from_then_on():
    look, shocks = Look(SITE), Shocks(SITE)
    look.now_ns = START_NS + 1300 * NS
    look.faults = (Fault("feed_lost", "feeder", 0, "", "critical", 0.99, START_NS, ()),)
    look.diagnosis.reports.dark_ns[1] = START_NS + 1000 * NS  # below it: its battery is empty
    found = shocks.judge(look, fallen([0, 18 * 10], [1100.0, 1100.0], POWER), 0, START_NS - 100 * 86_400 * NS)
    assert found.tolist() == [0]


def test_a_sensor_in_doubt_explains_nothing():
    fault = Fault("pump_trip", "cdu", 0, "flow_lpm", "warning", 0.9, START_NS, ())
    assert judge(fallen([0], [0.0], THERMAL), fault)[0] == []


@pytest.mark.parametrize("over", [False, True])
def test_a_job_is_a_cause_in_common(over):
    look, nodes = Look(SITE), [5, 18 * 18, 18 * 25, 18 * 38]
    look.jobs.start(JobStarted(job="train", nodes=()), nodes, 0, START_NS)
    shocks = Shocks(SITE)
    look.now_ns = START_NS + 100 * NS
    if over:
        shocks.job_ended("train", look.jobs.nodes[0], look.now_ns)
        look.jobs.end(JobEnded(job="train"), look.now_ns)
    some = fallen(nodes[:3], [0.0, 0.0, 90.0])
    assert shocks.judge(look, some, 0, START_NS - 100 * 86_400 * NS).tolist() == [0, 1, 2]
    assert [(s.table, s.entity, s.name) for s in shocks.log()] == [("job", -1, "train")]


def test_the_log_marks_them_and_single_ones_not():
    watch = Watch(site_of(two_racks()))
    watch.run(300)
    watch.look.fail(3, 4, 5)
    watch.run(100)
    watch.run(3600)
    watch.look.fail(20)
    watch.run(100)
    log = watch.failures.log()
    assert log.node.tolist() == [3, 4, 5, 20]
    assert log.shared.tolist() == [True, True, True, False]
    assert [s.nodes for s in watch.failures.shocks()] == [(3, 4, 5)]


def test_a_power_loss_of_a_whole_hall_is_one_shock_found_quickly():
    nodes = np.arange(360)
    found, told = judge(fallen(nodes, np.zeros(360), POWER))
    assert len(found) == 360
    assert [(s.name, s.count) for s in told] == [("lab/h1", 360)]


def test_shocks_are_bounded_and_survive_a_restart_and_a_changed_site():
    shocks, look = Shocks(SITE), Look(SITE)
    for k in range(MAX_SHOCKS + 20):
        some = fallen([0, 1, 2], [k * 4000.0] * 3)
        look.now_ns = int(some.start_ns[0]) + 100 * NS
        shocks.job_ended(f"job{k}", np.arange(50, 55, dtype=np.int32), look.now_ns)
        assert len(shocks.judge(look, some, 0, START_NS - 10**17)) == 3
    told = shocks.log()
    assert len(told) == MAX_SHOCKS
    assert told[-1].start_ns == START_NS + (MAX_SHOCKS + 19) * 4000 * NS
    again = Shocks(SITE)
    again.restore(shocks.dump())
    assert again.log() == told
    assert again.dump()["jobs"][0][1] == shocks.dump()["jobs"][0][1]
    same = {t: np.arange(n, dtype=np.int32) for t, n in SITE.sizes.items()}
    same["node"] = np.roll(same["node"], 1)
    same["rack"] = np.roll(same["rack"], 2)
    moved, gone = Shocks(SITE), Shocks(SITE)
    moved.adopt(shocks, same)
    assert [(s.entity, s.nodes) for s in moved.log()[-1:]] == [(2, (1, 2, 3))]
    gone.adopt(shocks, {**same, "rack": np.full(40, -1, np.int32)})
    assert gone.log() == ()
