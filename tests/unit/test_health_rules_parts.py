"""Evidence against switches, links, pumps and supplies. May import `twin`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.builders import two_racks
from tests.support.health_site import Ward, fault, on
from twin.contracts import DEGRADED, FAILED, HEALTHY, UNKNOWN, WATCH, action
from twin.telemetry import FaultReported

PUMPS = {"cdu.pump1_speed_pu": 0.7, "cdu.pump2_speed_pu": 0.7}


def meshed() -> Ward:
    """Two racks with two links a node, and four switches."""
    tree = two_racks()
    tree["halls"][0]["planes"] = [{"name": "compute", "racks": ["r[1-2]"], "links_per_node": 2}]
    tree["halls"][0]["switches"] = [{"name": "sw[1-4]"}]
    return Ward(tree)


def levels(ward: Ward, part: str) -> list[int]:
    return ward.verdicts.health(part).level.tolist()


@pytest.mark.parametrize("speeds", [(0.7, 0.7), (0.7, 0.3)])
def test_pumps_that_run_are_healthy(speeds: tuple[float, float]) -> None:
    ward = Ward(two_racks())
    ward.look(dict(zip(PUMPS, speeds, strict=True)))
    assert levels(ward, "pump") == [HEALTHY, HEALTHY]
    assert ward.verdicts.health("pump").sure_pu.tolist() == [0.25, 0.25]


def test_pumps_of_which_nothing_is_heard_are_unknown() -> None:
    ward = Ward(two_racks())
    ward.look()
    assert levels(ward, "pump") == [UNKNOWN, UNKNOWN]
    assert [e.rule for e in ward.verdicts.evidence("pump", 0)] == ["missing:everything"]
    ward.look({"cdu.pump2_speed_pu": 0.7})
    assert levels(ward, "pump") == [UNKNOWN, HEALTHY]


def test_the_pump_that_tripped_is_the_one_that_stands() -> None:
    ward = Ward(two_racks())
    ward.look(PUMPS)
    tripped = replace(fault("pump_trip", "cdu", 0), parts=(2,))
    ward.look(PUMPS | {"cdu.pump2_speed_pu": 0.0}, faults=[tripped])
    assert levels(ward, "pump") == [HEALTHY, FAILED]
    ward.look(PUMPS, faults=[tripped])
    assert levels(ward, "pump") == [HEALTHY, FAILED], "both run again, and the diagnosis waits for a while"
    assert ward.action("pump", 1) == action("check_facility")
    assert set(ward.evidence("pump", 1)) == {"pump_trip"}


def test_a_pump_that_stands_by_is_well() -> None:
    ward = Ward(two_racks())
    ward.look(PUMPS | {"cdu.pump2_speed_pu": 0.0})
    assert levels(ward, "pump") == [HEALTHY, HEALTHY]
    assert "carries the flow" in ward.evidence("pump", 1)["stands_by"].text


@pytest.mark.parametrize("kind", ["pump_worn", "filter_blocked"])
def test_what_concerns_both_pumps_is_told_of_those_that_run(kind: str) -> None:
    ward = Ward(two_racks())
    ward.look(PUMPS)
    ward.look(PUMPS, faults=[fault(kind, "cdu", 0)])
    assert levels(ward, "pump") == [DEGRADED, DEGRADED]
    other = Ward(two_racks())
    other.look(PUMPS | {"cdu.pump1_speed_pu": 0.0}, faults=[fault(kind, "cdu", 0)])
    assert levels(other, "pump") == [HEALTHY, DEGRADED]


def test_a_supply_that_is_not_read_is_unknown_and_its_node_is_not() -> None:
    ward = Ward(two_racks())
    ward.look({"node.psu2_power_w": on(36, 2, np.nan, 2000.0)})
    assert [ward.level("psu", i) for i in (4, 5, 6, 7)] == [HEALTHY, UNKNOWN, HEALTHY, HEALTHY]
    assert ward.level("node", 2) == HEALTHY


def test_a_supply_that_gives_nothing_without_a_fault_is_unknown() -> None:
    ward = Ward(two_racks())
    one = {"node.psu1_power_w": on(36, range(18), 4000.0, 2000.0),
           "node.psu2_power_w": on(36, range(18), 0.0, 2000.0)}  # fmt: skip
    ward.run(4, one)
    assert [ward.level("psu", i) for i in (4, 5)] == [HEALTHY, UNKNOWN]
    assert ward.action("psu", 5) == action("check_facility")
    assert ward.level("node", 2) == HEALTHY


def test_an_odd_meter_is_its_supplys() -> None:
    ward = Ward(two_racks())
    ward.look(faults=[fault("sensor_biased", "node", 2, "psu2_power_w")])
    assert [ward.level("psu", i) for i in (4, 5)] == [HEALTHY, WATCH]


def test_links_and_switches_that_nobody_reports_are_unknown() -> None:
    ward = meshed()
    ward.run(2)
    assert levels(ward, "link") == [UNKNOWN] * 72
    assert levels(ward, "switch") == [UNKNOWN] * 4
    assert [e.rule for e in ward.verdicts.evidence("link", 3)] == ["missing:everything"]


LINKS = [
    ("link.flap_count", 1, "link_flaps", WATCH),
    ("link.flap_count", 4, "link_flaps", DEGRADED),
    ("link.error_count", 150, "link_errors", WATCH),
    ("link.symbol_error_count", 150, "link_symbols", WATCH),
    ("link.recovery_count", 3, "link_recoveries", WATCH),
    ("link.discard_count", 5000, "link_discards", HEALTHY),
]


@pytest.mark.parametrize(("key", "grown", "rule", "level"), LINKS)
def test_what_grows_at_one_link(key: str, grown: int, rule: str, level: int) -> None:
    ward = meshed()
    n = 72
    ward.run(2, {"link.up_state": 0.0}, counts={key: 10})
    assert set(levels(ward, "link")) == {HEALTHY}
    ward.look({"link.up_state": 0.0}, counts={key: on(n, 7, 10 + grown, 10)})
    assert {r: e.level for r, e in ward.evidence("link", 7).items()} == {rule: level}
    assert np.flatnonzero(ward.verdicts.health("link").level).tolist() == ([7] if level else [])
    ward.look({"link.up_state": 0.0}, counts={key: 10 + grown})
    assert ward.level("link", 8) == HEALTHY or "flap" in key


def test_a_link_that_is_down_has_failed() -> None:
    ward = meshed()
    n = 72
    ward.look({"link.up_state": 0.0})
    ward.look({"link.up_state": on(n, 7, 1)})
    assert ward.level("link", 7) == FAILED
    ward.run(12, {"link.up_state": 0.0})
    assert ward.level("link", 7) == HEALTHY


@pytest.mark.parametrize(("state", "level"), [(0, HEALTHY), (1, DEGRADED), (2, FAILED)])
def test_a_switch_says_how_it_is(state: int, level: int) -> None:
    fabric = meshed()
    fabric.look({"switch.health_state": on(4, 1, state)})
    assert fabric.level("switch", 1) == level


def test_ports_that_never_were_up_are_no_fault() -> None:
    fabric = meshed()
    fabric.run(10, {"switch.port_down_count": 12})
    assert set(levels(fabric, "switch")) == {HEALTHY}
    fabric.run(9, {"switch.port_down_count": on(4, 1, 14, 12)})
    assert levels(fabric, "switch")[:2] == [HEALTHY, WATCH]
    assert fabric.evidence("switch", 1)["ports_down"].text == "2 more ports are down than the usual 12"


def test_codes_of_switches() -> None:
    fabric = meshed()
    fabric.look({"switch.health_state": 0})
    name = fabric.site.name("switch", 1)
    fabric.look({"switch.health_state": 0}, FaultReported(table="switch", name=name, code=20_001))
    assert fabric.level("switch", 1) >= WATCH
    assert fabric.evidence("switch", 1)["sxid"].text.startswith("SXID 20001")


@pytest.mark.parametrize(("ber", "level"), [(2e-5, HEALTHY), (3e-5, WATCH), (2.5e-4, DEGRADED)])
def test_bits_that_are_wrong_before_correction(ber: float, level: int) -> None:
    ward = meshed()
    for _ in range(9):
        ward.look({"link.up_state": 0.0, "link.pre_fec_ber_pu": on(ward.site.sizes["link"], 3, ber, 1e-8)})
    assert ward.level("link", 3) == level
    assert ward.level("link", 2) == HEALTHY
    if level == DEGRADED:
        assert "250 bits of a million" in ward.evidence("link", 3)["link_ber"].text


def test_a_link_that_is_up_in_the_dark_is_watched() -> None:
    ward = meshed()
    links = ward.site.sizes["link"]
    dark = {"link.rx_optical_w": on(links, [3, 4], 5e-5, 5e-4), "link.tx_optical_w": 1e-3}
    for _ in range(9):
        ward.look({"link.up_state": on(links, 4, 1.0), **dark})
    assert (ward.level("link", 3), ward.level("link", 2)) == (WATCH, HEALTHY)
    assert (
        "receive 50 uW on the weakest lane; they send 1000 uW" in ward.evidence("link", 3)["link_dark"].text
    )
    assert "link_dark" not in ward.evidence("link", 4)  # it is down: of that another rule tells
