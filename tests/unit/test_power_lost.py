"""The power guard after a loss: of a feed as supplies report it, of flow, of sight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from policies.power_capping import PowerGuard
from policies.power_capping.budgets import dead_feeders
from policies.power_capping.loads import lifted, unfed_feeders
from tests.support.builders import Twin
from tests.support.powered_plant import CAP, Loop
from tests.unit.test_power_cap import site

SOME, HALF = np.arange(36) < 2, np.arange(36) < 18  # of the nodes


@pytest.mark.parametrize(
    ("psu1_w", "psu2_w", "found"),
    [
        (2000.0, 2000.0, [False, False]),
        (0.0, 4000.0, [True, False]),
        (4000.0, 0.0, [False, True]),
        (0.0, 2000.0, [False, False]),  # a meter that reads zero: the other supply says otherwise
        (0.0, 0.0, [False, False]),
        (np.where(SOME, 0.0, 2000.0), np.where(SOME, 4000.0, 2000.0), [False, False]),
        (np.where(HALF, 0.0, 2000.0), np.where(HALF, 4000.0, 2000.0), [False, False]),
        (np.where(HALF, 0.0, 4000.0), np.where(HALF, 4000.0, 0.0), [False, False]),
    ],
)  # fmt: skip
def test_all_racks_of_a_feeder_have_to_say_that_it_feeds_them_no_more(
    psu1_w: Any, psu2_w: Any, found: list[bool]
) -> None:
    twin = Twin(site())
    twin.tick({"node.power_w": 4000.0, "node.psu1_power_w": psu1_w, "node.psu2_power_w": psu2_w})
    view = twin.engine.view(1.0)
    assert unfed_feeders(view, np.zeros(2, np.bool_)).tolist() == found


@pytest.mark.parametrize(
    ("meter_w", "psu1_w", "dead"),
    [
        (5e4, 2000.0, [False, False]),  # a contact that sticks
        (0.0, 2000.0, [True, False]),  # the meter shows the loss first
        (5e4, 0.0, [True, False]),  # the supplies do
        (5e4, np.nan, [True, False]),  # nobody else speaks
        (100.0, 2000.0, [False, False]),  # as little as a meter reads of a load
        (99.0, 2000.0, [True, False]),
        (5e4, 801.0, [False, False]),  # a fifth of what nodes draw comes from a side that feeds them
        (5e4, 799.0, [True, False]),
    ],
)  # fmt: skip
def test_a_feed_is_dead_by_its_word_unless_its_meter_and_supplies_draw_on(
    meter_w: float, psu1_w: float, dead: list[bool]
) -> None:
    twin = Twin(site())
    supplies = {"node.psu1_power_w": psu1_w, "node.psu2_power_w": 4000.0 - psu1_w}
    feeders = {"feeder.energised_state": np.array([1.0, 0.0]), "feeder.power_w": np.array([meter_w, 5e4])}
    twin.tick({"node.power_w": 4000.0} | supplies | feeders)
    assert dead_feeders(twin.engine.view(1.0)).tolist() == dead


@pytest.mark.parametrize(("later_s", "dead"), [(4.0, False), (5.0, True)])
@pytest.mark.parametrize("old", ["feeder", "supplies"])
def test_only_what_was_just_read_tells_of_a_contact_that_sticks(old: str, later_s: float, dead: bool) -> None:
    twin = Twin(site())
    feeders = {"feeder.energised_state": np.array([1.0, 0.0]), "feeder.power_w": 5e4}
    supplies = {"node.power_w": 4000.0, "node.psu1_power_w": 2000.0, "node.psu2_power_w": 2000.0}
    twin.tick(feeders | supplies)
    twin.tick(supplies if old == "feeder" else feeders, dt_s=later_s)
    assert dead_feeders(twin.engine.view(1.0)).tolist() == [dead, False]


@pytest.mark.parametrize("kind", ["feed_lost", "breaker_tripped", "meter_stuck"])
def test_a_diagnosed_feeder_and_all_below_it_are_dead_unless_its_meter_tells_of_a_load(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = site()
    tree["halls"][0]["feeders"].append({"name": "u", "serves": ["a"]})
    twin = Twin(tree)
    names = [name.rpartition("/")[2] for name in twin.site.names["feeder"]]
    for reads_w, expected in ((np.nan, {"a", "u"}), (99.0, {"a", "u"}), (100.0, set())):
        twin.tick({"feeder.power_w": np.where(np.array(names) == "u", reads_w, np.nan)})
        view = twin.engine.view(1.0)
        faults = [SimpleNamespace(kind=kind, table="feeder", entity=names.index("u")),
                  SimpleNamespace(kind=kind, table="rack", entity=names.index("b"))]  # fmt: skip
        monkeypatch.setattr(type(view), "faults", lambda self, faults=faults: faults)
        dead = {name for name, one in zip(names, dead_feeders(view), strict=True) if one}
        assert dead == (expected if kind != "meter_stuck" else set())


def test_supplies_that_contradict_the_feeds_are_not_believed() -> None:
    """B is known to be dead, and all supplies on A say that it is: something feeds the racks all the same."""
    twin = Twin(site())
    twin.tick({"node.power_w": 4000.0, "node.psu1_power_w": 0.0, "node.psu2_power_w": 4000.0})
    assert not unfed_feeders(twin.engine.view(1.0), np.array([False, True])).any()


@given(
    st.lists(st.tuples(st.floats(0.05, 1.0), st.floats(0.0, 1e5)), min_size=1, max_size=8),
    st.floats(0.0, 4e5),
)
def test_shares_account_for_a_load_as_far_as_racks_can(
    racks: list[tuple[float, float]], load_w: float
) -> None:
    share, rack_w = np.array(racks).T
    out = lifted(share, rack_w, load_w)
    assert (out >= share).all()
    assert (out <= 1.0).all()
    target_w = min(max(load_w, float(share @ rack_w)), float(rack_w.sum()))
    assert float(out @ rack_w) == pytest.approx(target_w, rel=1e-5, abs=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("feeders", [True, False])
def test_a_cdu_that_lost_flow_bounds_the_caps_below_it(feeders: bool) -> None:
    tree = site()
    if not feeders:
        del tree["halls"][0]["feeders"]
    loop = Loop(tree, [PowerGuard()])
    if not feeders:
        loop.silent = {"feeder.power_w", "feeder.energised_state"}
    loop.wants_w[:] = 1200.0
    design = loop.site.design
    nominal_lpm = float(design.cdu_flow_lpm[0])
    loop.more = {"cdu.flow_lpm": nominal_lpm}
    loop.run(10)
    assert np.isnan(loop.twin.lease(CAP)).all()
    loop.more = {"cdu.flow_lpm": 0.5 * nominal_lpm}
    loop.tick()
    heat_w = float(design.capture_pu @ loop.rack_w)
    assert 0.42 * design.cdu_heat_w[0] < heat_w <= 0.5 * design.cdu_heat_w[0]
    rng, moved = np.random.default_rng(1), 0
    for _ in range(60):
        loop.more = {"cdu.flow_lpm": nominal_lpm * 0.5 * rng.uniform(0.99, 1.01)}
        loop.tick()
        moved += len(loop.twin.commands(CAP))
    assert moved <= 4, "a meter's noise moves no caps"
    assert (loop.cap_w >= 200.0).all()
    loop.more = {"cdu.flow_lpm": nominal_lpm}
    loop.run(60)
    assert (loop.cap_w >= 1199.0).all()


def test_silence_below_a_feeder_that_nobody_reads_leads_to_safe_caps() -> None:
    """Three periods: 1 s of GPUs, 2 s of a building's meters. No wish lifts a cap that is lower."""
    tree = site(200_000, 200_000) | {"periods_s": {"rack": 2.0, "feeder": 2.0}}
    loop = Loop(tree, [PowerGuard()])
    loop.wants_w[:] = 500.0
    loop.run(20)
    loop.silent = {"feeder.power_w", "rack.power_w", "gpu.power_w", "gpu.power_limit_w"}
    loop.run(5)
    assert np.isnan(loop.twin.lease(CAP)).all()
    loop.run(3)
    safe_w = loop.site.envelopes[CAP].safe
    np.testing.assert_array_equal(loop.twin.lease(CAP), safe_w)
    loop.silent = {"gpu.power_w"}
    loop.run(30)
    assert np.isnan(loop.twin.lease(CAP)).all(), "the meters are back, and tell that all is well"


def test_a_silent_gpu_below_a_meter_that_speaks_is_left_alone() -> None:
    loop = Loop(site(80_000, 80_000), [PowerGuard()])
    loop.run(3)
    loop.silent = {"gpu.power_w"}
    loop.run(30)
    assert np.isnan(loop.twin.lease(CAP)).all()


def test_a_feeder_beyond_its_budget_is_told() -> None:
    twin, key = Twin(site(80_000, 80_000)), "beyond/feeder.power_w/budget"
    twin.tick({"feeder.power_w": [79_000.0, 80_000.0]})
    assert key not in twin.engine.findings.active
    twin.tick({"feeder.power_w": [79_000.0, 81_000.0]})
    found = twin.engine.findings.active[key]
    assert (found.severity, found.entities) == ("critical", ("lab/h/b",))
    twin.tick({"feeder.power_w": 70_000.0})
    assert key not in twin.engine.findings.active


def test_a_feeder_without_voltage_is_dead_where_no_state_of_it_comes() -> None:
    """As from a building that publishes voltages and no more; a meter that tells of a load is believed."""
    twin = Twin(site())
    volts = {"feeder.power_w": 1e5, "feeder.voltage_v": 415.0}
    for _ in range(20):
        twin.tick(volts)
    assert not dead_feeders(twin.engine.view(1.0)).any()
    for _ in range(8):
        twin.tick({"feeder.power_w": np.array([0.0, 2e5]), "feeder.voltage_v": np.array([0.0, 415.0])})
    assert dead_feeders(twin.engine.view(1.0)).tolist() == [True, False]
    twin.tick({"feeder.power_w": np.array([5e4, 2e5]), "feeder.voltage_v": np.array([0.0, 415.0])})
    assert not dead_feeders(twin.engine.view(1.0)).any()
