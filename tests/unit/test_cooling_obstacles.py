"""Groups of CDUs with their bounds, and all that keeps a group from warmer coolant, one thing at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from policies.cooling_setpoint.groups import (
    DEW_K,
    bounds_c,
    dew_points_c,
    groups_of,
    numbers_of,
    own_c,
    standing_c,
)
from policies.cooling_setpoint.margins import CONTROL, Ceilings
from policies.cooling_setpoint.obstacles import APART_K, WET_K, Obstacle, obstacles_of
from tests.support.builders import Twin
from twin.catalogue import NS
from twin.contracts import View
from twin.physics import dew_point_c
from twin.telemetry import MaintenanceBegun

NAN = np.nan
HEALTHY: dict[str, Any] = {
    "cdu.supply_temp_c": 32.0,
    "cdu.supply_temp_setpoint_c": 32.0,
    "cdu.facility_flow_lpm": 80.0,
    "rack.supply_temp_c": 32.0,
    "rack.return_temp_c": 40.0,
    "rack.flow_lpm": 12.0,
    "loop.supply_temp_c": 25.0,
    "site.outdoor_temp_c": 20.0,
    "site.outdoor_wet_bulb_c": 15.0,
    "gpu.temp_c": 60.0,
}
KNOWN = Ceilings(np.full(5, 40.0), np.full(5, -1.0), np.full(5, -1.0), np.zeros(40, np.bool_))


def two_loops() -> dict[str, Any]:
    """Racks 1 and 2 on CDUs of a loop with a chiller, rack 3 on c3 alone, rack 4 on c4 of a tower's loop."""
    racks = [
        {"name": "r[1-4]", "profile": "gb200-nvl72", "nodes": 2},
        {"name": "air", "profile": "air-8gpu", "nodes": 1},
    ]
    cdus = [{"name": "c1", "loop": "fw1", "serves": ["r1"]}, {"name": "c2", "loop": "fw1", "serves": ["r2"]},
            {"name": "c3", "serves": ["r3"]}, {"name": "c4", "loop": "fw2", "serves": ["r4"]},
            {"name": "c5", "loop": "fw2", "serves": []}]  # fmt: skip
    loops = [{"name": "fw1", "cooling": "chiller"}, {"name": "fw2", "cooling": "tower"}]
    return {
        "site": "lab",
        "max_jobs": 4,
        "loops": loops,
        "halls": [{"name": "h", "racks": racks, "cdus": cdus}],
    }


def looked(*events: Any, **more: Any) -> View:
    twin = Twin(two_loops())
    twin.tick(HEALTHY | {key.replace("__", "."): value for key, value in more.items()}, *events)
    return twin.engine.view()


def found(view: View, ceilings: Ceilings = KNOWN) -> list[tuple[str, str]]:
    return [(one.kind, one.text) for one in obstacles_of(view, groups_of(view.site), ceilings)]


NONE = ("", "")


def of_cdus(at: int, value: float, other: float) -> np.ndarray:
    return np.where(np.arange(5) == at, value, other)


def test_a_group_is_a_loop_or_a_cdu_alone_and_what_it_cools() -> None:
    site = Twin(two_loops()).site
    groups = groups_of(site)
    assert [(g.number, g.loop, g.cdus.tolist(), g.racks.tolist(), g.halls.tolist()) for g in groups] == [
        (0, 0, [0, 1], [0, 1], [0]), (1, 1, [3], [3], [0]), (2, -1, [2], [2], [0])]  # fmt: skip
    assert [g.gpus.tolist() for g in groups] == [[*range(16)], [*range(24, 32)], [*range(16, 24)]]
    assert [g.nodes.tolist() for g in groups] == [[0, 1, 2, 3], [6, 7], [4, 5]]
    numbers = numbers_of(site)
    assert numbers["cdu"].tolist() == [0, 0, 2, 1, -1]
    assert numbers["rack"].tolist() == [0, 0, 2, 1, -1]
    assert numbers["node"].tolist() == [0] * 4 + [2] * 2 + [1] * 2 + [-1]
    assert numbers["gpu"].tolist() == [0] * 16 + [2] * 8 + [1] * 8 + [-1] * 8
    assert numbers["loop"].tolist() == [0, 1]


def test_the_set_point_that_stands_is_the_coldest_as_asked_for_or_as_the_bms_has_it() -> None:
    group = groups_of(Twin(two_loops()).site)[0]
    for want_c, base_c, expected_c in (
        ([NAN, NAN], [33.0, 31.0], 31.0),
        ([36.0, NAN], [30.0, 34.0], 34.0),
        ([36.0, 35.0], [20.0, 20.0], 35.0),
        ([NAN, NAN], [NAN, 30.0], 30.0),
        ([NAN, NAN], [NAN, NAN], np.inf),
    ):
        memory = {"want_c": np.array([*want_c, 1.0, 1.0, 1.0]), "base_c": np.array([*base_c, 1.0, 1.0, 1.0])}
        assert standing_c(memory, group) == expected_c


@pytest.mark.long
@pytest.mark.parametrize("key", ["cdu.supply_temp_setpoint_c", "cdu.supply_temp_setpoint_final_c"])
def test_a_lost_reading_of_a_set_point_leaves_it_in_force_until_it_is_old(key: str) -> None:
    """The coolant, 3 K warmer, stands in for a set point that nobody reports."""
    twin = Twin(two_loops())
    twin.tick({key: 32.0, "cdu.supply_temp_c": 35.0})
    twin.tick({key: NAN, "cdu.supply_temp_c": 35.0})
    assert own_c(twin.engine.view()).tolist() == [32.0] * 5
    for _ in range(400):
        twin.tick({key: NAN, "cdu.supply_temp_c": 35.0})
    assert own_c(twin.engine.view()).tolist() == [35.0] * 5


@pytest.mark.parametrize(("air_c", "rh_pu"), [(24.0, 0.5), (35.0, 0.9), (NAN, 0.5), (24.0, NAN)])
def test_no_set_point_goes_below_the_dew_point_and_a_margin(air_c: float, rh_pu: float) -> None:
    view = looked(hall__cold_aisle_temp_c=air_c, hall__cold_aisle_rh_pu=rh_pu)
    dew_c, envelope = dew_points_c(view), view.envelope(CONTROL)
    known = np.isfinite(air_c + rh_pu)
    if known:
        assert dew_c[0] == pytest.approx(
            float(dew_point_c(np.array([air_c]), np.array([rh_pu]))[0]), rel=1e-6
        )
    for group in groups_of(view.site):
        low_c, safe_c = bounds_c(view, group, dew_c)
        assert safe_c == envelope.safe[0] == 32.0
        assert low_c == pytest.approx(max(25.0, dew_c[0] + DEW_K) if known else 32.0)
    assert bounds_c(view, groups_of(view.site)[0], np.array([28.0]))[0] == 28.0 + DEW_K
    assert bounds_c(view, groups_of(view.site)[0], np.array([10.0]))[0] == 25.0


def test_the_set_point_in_force_is_told_by_the_bms_or_else_by_the_coolant() -> None:
    told = {"cdu.supply_temp_setpoint_c": [30.0, NAN, NAN, NAN, NAN],
            "cdu.supply_temp_setpoint_final_c": [31.0, 33.0, NAN, NAN, NAN],
            "cdu.supply_temp_c": [34.0, 34.0, 35.0, NAN, NAN],
            "rack.supply_temp_c": [36.0, 36.0, 36.0, 37.0, 38.0]}  # fmt: skip
    twin = Twin(two_loops())
    twin.tick(told)
    np.testing.assert_allclose(own_c(twin.engine.view()), [30.0, 33.0, 35.0, 37.0, NAN])
    tree = two_loops()
    tree["halls"][0]["cdus"][3]["serves"] = ["r[1-2]", "r4"]
    tree["halls"][0]["cdus"][:2] = []
    twin = Twin(tree)
    twin.tick({"rack.supply_temp_c": [36.0, 39.0, 36.0, 37.0, 45.0]})
    np.testing.assert_allclose(
        own_c(twin.engine.view()), [36.0, 39.0, NAN], err_msg="the warmest of its racks"
    )


PASSED = "is beyond its guard"


def test_a_healthy_site_has_no_obstacle() -> None:
    assert found(looked()) == [NONE] * 3


@pytest.mark.parametrize(
    ("key", "value", "at"),
    [("cdu__leak_state", of_cdus(1, 1.0, 0.0), ("lab/h/c2 leaks", 0)),
     ("rack__leak_state", of_cdus(3, 1.0, 0.0), ("lab/h/r4 leaks", 1)),
     ("node__leak_state", np.where(np.arange(9) == 5, 1.0, 0.0), ("lab/h/r3/node1 leaks", 2)),
     ("rack__return_temp_c", of_cdus(1, 62.5, 40.0), (f"rack.return_temp_c of lab/h/r2 {PASSED}", 0)),
     ("rack__supply_temp_c", of_cdus(2, 43.5, 32.0), (f"rack.supply_temp_c of lab/h/r3 {PASSED}", 2)),
     ("rack__flow_lpm", of_cdus(0, 4.4, 12.0), ("rack.flow_lpm of lab/h/r1 is beyond its guard", 0)),
     ("gpu__temp_c", np.where(np.arange(40) >= 25, 82.5, 60.0),
      ("gpu.temp_c of lab/h/r4/node0/gpu1 is beyond its guard", 1)),
     ("gpu__hbm_temp_c", np.where(np.arange(40) == 3, 90.5, 60.0),
      ("gpu.hbm_temp_c of lab/h/r1/node0/gpu3 is beyond its guard", 0)),
     ("gpu__thermal_margin_k", np.where(np.arange(40) == 3, 4.5, 20.0),
      ("gpu.thermal_margin_k of lab/h/r1/node0/gpu3 is beyond its guard", 0))],
)  # fmt: skip
def test_what_is_wrong_brings_its_group_back_and_no_other(key: str, value: Any, at: tuple[str, int]) -> None:
    text, number = at
    expected = [NONE] * 3
    expected[number] = ("back", text)
    assert found(looked(**{key: value})) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [("rack__return_temp_c", 62.0), ("rack__flow_lpm", 4.45), ("gpu__temp_c", 82.0),
     ("gpu__hbm_temp_c", 90.0), ("gpu__thermal_margin_k", 5.0), ("rack__leak_state", 0.0)],
)  # fmt: skip
def test_a_guard_that_is_just_held_is_no_obstacle(key: str, value: float) -> None:
    assert found(looked(**{key: value})) == [NONE] * 3


@pytest.mark.parametrize(
    ("table", "name", "number"), [("cdu", "lab/h/c2", 0), ("rack", "lab/h/r4", 1), ("loop", "lab/fw2", 1)]
)
def test_work_on_a_part_brings_its_group_back(table: Any, name: str, number: int) -> None:
    until_ns = 1_700_003_600 * NS
    event = MaintenanceBegun(id="m", author="a", table=table, names=(name,), until_ns=until_ns)
    expected = [NONE] * 3
    expected[number] = ("back", f"{name} is in maintenance")
    assert found(looked(event)) == expected


@pytest.mark.parametrize(
    ("kind", "table", "entity", "signal", "number", "expected"),
    [
        ("pump_failed", "cdu", 3, "", 1, ("back", "pump failed at lab/h/c4")),
        ("cooler_failed", "loop", 0, "", 0, ("back", "cooler failed at lab/fw1")),
        ("leak", "rack", 2, "", 2, ("back", "leak at lab/h/r3")),
        ("tray_blocked", "node", 7, "", 1, ("back", "tray blocked at lab/h/r4/node1")),
        ("branch_blocked", "rack", 0, "", 0, ("back", "branch blocked at lab/h/r1")),
        ("plate_fouled", "gpu", 0, "", 0, NONE),
        ("pump_failed", "site", 0, "", 0, NONE),
        ("leak", "rack", -1, "", 0, NONE),
        ("leak", "rack", 4, "", 0, NONE),  # of no group
        (
            "sensor_offset",
            "rack",
            3,
            "supply_temp_c",
            1,
            ("hold", "sensor offset: rack.supply_temp_c of lab/h/r4"),
        ),
        ("leak", "rack", 0, "flow_lpm", 0, ("hold", "leak: rack.flow_lpm of lab/h/r1")),
        ("sensor_silent", "loop", 1, "power_w", 1, NONE),  # savings are estimates then
        ("sensor_stuck", "loop", 1, "power_w", 1, ("hold", "sensor stuck: loop.power_w of lab/fw2")),
        (
            "sensor_silent",
            "loop",
            0,
            "supply_temp_c",
            0,
            ("hold", "sensor silent: loop.supply_temp_c of lab/fw1"),
        ),
        ("sensor_silent", "site", 0, "outdoor_temp_c", 0, NONE),
    ],
)
def test_faults_of_what_cools_bring_it_back_and_doubted_sensors_hold_it(
    kind: str, table: str, entity: int, signal: str, number: int, expected: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    view = looked()
    fault = SimpleNamespace(kind=kind, table=table, entity=entity, signal=signal)
    monkeypatch.setattr(type(view), "faults", lambda self: [fault])
    wanted = [NONE] * 3
    wanted[number] = expected
    assert found(view) == wanted


def test_the_gravest_and_first_obstacle_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    view = looked(rack__leak_state=of_cdus(1, 1.0, 0.0), cdu__supply_temp_c=of_cdus(0, NAN, 32.0))
    faults = [SimpleNamespace(kind="stuck", table="rack", entity=0, signal="flow_lpm"),
              SimpleNamespace(kind="off", table="rack", entity=1, signal="flow_lpm"),
              SimpleNamespace(kind="off", table="rack", entity=2, signal="flow_lpm")]  # fmt: skip
    monkeypatch.setattr(type(view), "faults", lambda self: faults)
    assert found(view) == [("back", "lab/h/r2 leaks"), NONE, ("hold", "off: rack.flow_lpm of lab/h/r3")]
    dry = looked(cdu__supply_temp_c=of_cdus(0, NAN, 32.0))
    assert found(dry)[0] == ("hold", "stuck: rack.flow_lpm of lab/h/r1")


NOT_HELD = "lab/h/c1 does not hold its set point"
APART = "lab/h/r4 and its CDU read different supply temperatures"


@pytest.mark.parametrize(
    ("readings", "number", "text"),
    [
        ({"cdu__supply_temp_c": of_cdus(1, NAN, 32.0)}, 0, "lab/h/c2 does not report"),
        ({"rack__supply_temp_c": of_cdus(3, 32.1 + APART_K, 32.0)}, 1, APART),
        ({"rack__supply_temp_c": of_cdus(3, 31.9 - APART_K, 32.0)}, 1, APART),
        ({"rack__supply_temp_c": of_cdus(3, 31.9 + APART_K, 32.0)}, 1, ""),
        ({"rack__supply_temp_c": of_cdus(4, 90.0, 32.0)}, 1, ""),  # cooled by air
        ({"cdu__supply_temp_setpoint_c": of_cdus(0, 32.1 + APART_K, 32.0)}, 0, NOT_HELD),
        ({"cdu__supply_temp_setpoint_c": of_cdus(0, 31.9 - APART_K, 32.0)}, 0, NOT_HELD),
        ({"cdu__supply_temp_setpoint_c": of_cdus(0, 31.9 + APART_K, 32.0)}, 0, ""),
        ({"cdu__supply_temp_setpoint_c": of_cdus(0, NAN, 32.0)}, 0, ""),
        ({"loop__supply_temp_c": np.array([NAN, 25.0])}, 0, "no data on the water of lab/fw1"),
        ({"cdu__facility_flow_lpm": of_cdus(1, NAN, 80.0)}, 0, "no data on the water of lab/fw1"),
        ({"cdu__facility_flow_lpm": of_cdus(2, NAN, 80.0)}, 2, ""),  # no loop is known
        ({"site__outdoor_temp_c": NAN}, 0, "no data on the weather"),
        ({"site__outdoor_wet_bulb_c": NAN}, 1, "no data on the weather"),
    ],
)
def test_what_is_not_known_holds_the_group(readings: dict[str, Any], number: int, text: str) -> None:
    expected = [NONE] * 3
    expected[number] = ("hold", text) if text else NONE
    assert found(looked(**readings)) == expected


def test_a_wet_bulb_above_the_dry_one_is_not_believed() -> None:
    text = "the wet bulb reads above the dry one"
    assert found(looked(site__outdoor_wet_bulb_c=20.1 + WET_K)) == [("hold", text), ("hold", text), NONE]
    assert found(looked(site__outdoor_wet_bulb_c=19.9 + WET_K)) == [NONE] * 3


def test_temperatures_that_are_doubted_and_limits_that_are_not_known_hold_the_group() -> None:
    view = looked()
    doubted = np.isin(np.arange(40), [3, 5, 6, 33])
    ceilings = Ceilings(of_cdus(3, np.inf, 40.0), KNOWN.gpu, KNOWN.rack, doubted)
    assert found(view, ceilings) == [
        (
            "hold",
            "the temperature of lab/h/r1/node0/gpu3 is unknown or contradicts its power, "
            "as is that of 2 other GPUs",
        ),
        ("hold", "no limit is known for the equipment that these CDUs cool"),
        NONE,
    ]
    assert obstacles_of(view, [], KNOWN) == []
    assert Obstacle() == Obstacle("", "")
