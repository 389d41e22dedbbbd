"""The diagnosis on small sites, driven by plain values and by residuals of known size. May import `twin`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.builders import START_NS, Twin, site_of, two_racks
from tests.support.sampled_cases import sampled
from twin.catalogue import NS, find_signal
from twin.contracts import DEGRADED, Residual
from twin.diagnosis import FAULT_KINDS, Diagnosis, Topology, finding_of
from twin.diagnosis.cause import AGREED_LEAK, MOST_ALIKE, Cause, CauseBook
from twin.diagnosis.cusum import CERTAIN, CusumBoard, DeviationTrack
from twin.diagnosis.isolation import CandidatePairs, FaultIsolation, IsolatedFault, _Pursuit, _Tried
from twin.diagnosis.signature import HEAT, HYPOTHESES, TickValues
from twin.diagnosis.verdict import DiagnosisVerdicts
from twin.telemetry import Block, FaultReported, MaintenanceBegun

QUIET: dict[str, Any] = {
    "node.leak_state": 0.0, "rack.leak_state": 0.0, "cdu.leak_state": 0.0, "feeder.voltage_v": 400.0,
    "feeder.breaker_state": 0.0, "feeder.energised_state": 0.0, "node.power_on_state": 1.0,
}  # fmt: skip


def told(pod: Twin) -> list[tuple[str, str, int, str]]:
    return [(f.kind, f.table, f.entity, f.signal) for f in pod.engine.diagnosis.faults]


def one(n: int, at: int, value: float = 1.0, rest: float = 0.0) -> np.ndarray:
    out = np.full(n, rest)
    out[at] = value
    return out


def test_nothing_is_told_of_a_quiet_site() -> None:
    pod = Twin(two_racks())
    pod.run(60, QUIET)
    assert told(pod) == []


def test_a_wet_tray_is_its_leak_and_a_second_tray_makes_it_the_racks() -> None:
    """The pan of the rack gets wet from above: it agrees, and the tray stays where the leak is."""
    tray = QUIET | {"node.leak_state": one(36, 5)}
    agrees, other = {"rack.leak_state": one(2, 0)}, {"node.leak_state": one(36, 5) + one(36, 7)}
    for more, where in ((agrees, ("leak", "node", 5, "")), (other, ("leak", "rack", 0, ""))):
        pod = Twin(two_racks())
        pod.run(3, QUIET)
        pod.tick(tray)
        assert told(pod) == [("leak", "node", 5, "")]
        alone = pod.engine.diagnosis.faults[0]
        pod.tick(tray | more)
        assert told(pod) == [where]
        fault = pod.engine.diagnosis.faults[0]
        assert fault.count == 2
        assert fault.confidence_pu > alone.confidence_pu
        assert fault.since_ns == alone.since_ns
        assert len(fault.evidence) == 2
        assert any("r1/node5" in text for text in fault.evidence)


def test_a_wet_tray_that_the_building_alone_reports_is_a_leak_of_its_rack() -> None:
    """It is a leak at once if agents report no trays, and a lasting warning if all trays report dry."""
    silent = {key: value for key, value in QUIET.items() if key != "node.leak_state"}
    wet = {"rack.tray_leak_state": one(2, 0)}
    pod = Twin(two_racks())
    pod.run(3, silent)
    pod.tick(silent | wet)
    (finding,) = pod.decision.findings
    assert (finding.id, finding.severity) == ("fault/leak/lab/h/r1", "critical")
    pod = Twin(two_racks())
    pod.run(3, QUIET)
    pod.run(5, QUIET | wet)
    assert told(pod) == []
    pod.run(10, QUIET | wet)
    (finding,) = pod.decision.findings
    assert (finding.id, finding.severity) == ("fault/leak/lab/h/r1", "warning")
    assert finding.evidence[1] == "its 18 trays report that they are dry"
    pod.tick(QUIET | wet | {"node.leak_state": one(36, 5)})
    assert told(pod) == [("leak", "node", 5, "")], "one leak, one alarm"


def test_a_wet_floor_is_an_alarm_until_the_leak_that_wets_it_is_found() -> None:
    pod = Twin(two_racks())
    pod.run(3, QUIET)
    wet = QUIET | {"hall.leak_state": one(1, 0)}
    pod.tick(wet)
    assert told(pod) == [("water_detected", "hall", 0, "")]
    (finding,) = pod.decision.findings
    assert (finding.severity, finding.title) == ("critical", "A leak detector of lab/h is wet")
    pod.tick(wet | {"node.leak_state": one(36, 5)})
    assert told(pod) == [("leak", "node", 5, "")]
    assert pod.decision.findings[0].evidence[-1] == "the detector of lab/h agrees"


@pytest.mark.parametrize("nodes_from, below, where", [
    ("bottom", 4, ("leak", "node", 5, "")), ("bottom", 6, ("leak", "rack", 0, "")),
    ("top", 6, ("leak", "node", 5, "")), ("top", 4, ("leak", "rack", 0, "")),
    ("unknown", 4, ("leak", "node", 5, "")), ("unknown", 3, ("leak", "rack", 0, "")),
])  # fmt: skip
def test_what_runs_down_is_the_leak_of_the_tray_above(
    nodes_from: str, below: int, where: tuple[str, str, int, str]
) -> None:
    tree = two_racks()
    tree["halls"][0]["racks"][0]["nodes_from"] = nodes_from
    pod = Twin(tree)
    pod.run(3, QUIET)
    pod.tick(QUIET | {"node.leak_state": one(36, 5)})
    pod.run(3, QUIET | {"node.leak_state": one(36, 5) + one(36, below)})
    assert told(pod) == [where]
    assert pod.engine.diagnosis.faults[0].count == 2


def test_a_leak_that_dries_stays_where_it_began_and_what_agrees_changes_the_advice() -> None:
    """Trays dry in any order: a gap in their row is no second leak, nor is the last one the source."""
    pod = Twin(two_racks())
    pod.run(3, QUIET)
    actions = []
    for trays in ([5], [5, 4], [5, 4, 3], [5, 3], [3]):
        pod.run(2, QUIET | {"node.leak_state": sum(one(36, tray) for tray in trays)})
        assert told(pod) == [("leak", "node", 5, "")], trays
        actions.append(finding_of(pod.engine.diagnosis.faults[0], pod.site).action)
    assert actions[0] == FAULT_KINDS["leak"].action
    assert set(actions[1:4]) == {AGREED_LEAK}
    pod.run(2, QUIET)
    pod.run(2, QUIET | {"node.leak_state": one(36, 3)})
    assert ("leak", "node", 3, "") in told(pod), "once all were dry, it is another one"


def test_a_pan_that_was_wet_first_is_the_racks_leak() -> None:
    pod = Twin(two_racks())
    pod.run(3, QUIET)
    pod.tick(QUIET | {"rack.leak_state": one(2, 0)})
    pod.run(3, QUIET | {"rack.leak_state": one(2, 0), "node.leak_state": one(36, 5)})
    assert told(pod) == [("leak", "rack", 0, "")]


def test_a_rack_with_one_feed_has_no_second_supply_to_lose() -> None:
    tree = two_racks()
    del tree["halls"][0]["feeders"][1]
    pod = Twin(tree)
    pod.run(8, QUIET | {"node.psu1_power_w": 4000.0, "node.psu2_power_w": one(36, 3, 0.0, 4000.0)})
    assert told(pod) == []


def test_a_leak_is_told_of_the_rack_where_no_tray_is_wet_and_clears_late() -> None:
    pod = Twin(two_racks())
    pod.tick(QUIET | {"rack.leak_state": one(2, 1)})
    assert told(pod) == [("leak", "rack", 1, "")]
    pod.run(100, QUIET)
    assert told(pod) == [("leak", "rack", 1, "")]
    pod.run(40, QUIET)
    assert told(pod) == []


def test_people_who_work_there_are_spared() -> None:
    pod = Twin(two_racks())
    pod.run(2, QUIET)
    window = MaintenanceBegun(
        id="w", author="me", table="rack", names=("r1",), until_ns=pod.now_ns + 600 * NS
    )
    pod.tick(QUIET | {"node.leak_state": one(36, 5)}, window)
    assert told(pod) == []


def test_a_tripped_breaker_and_a_sag() -> None:
    pod = Twin(two_racks())
    pod.run(5, QUIET)
    pod.tick(QUIET | {"feeder.breaker_state": one(2, 1), "feeder.voltage_v": one(2, 1, 0.0, 400.0)})
    assert told(pod) == [("breaker_tripped", "feeder", 1, "")]
    pod.tick(QUIET | {"feeder.breaker_state": np.nan, "feeder.voltage_v": one(2, 1, 0.0, 400.0)})
    assert told(pod) == [("breaker_tripped", "feeder", 1, "")], "not read for once, so not closed"
    pod.run(2, QUIET | {"feeder.breaker_state": 0.0, "feeder.voltage_v": one(2, 1, 0.0, 400.0)})
    assert told(pod) == [("feed_lost", "feeder", 1, "")]
    pod = Twin(two_racks())
    pod.run(5, QUIET)
    pod.run(4, QUIET | {"feeder.voltage_v": 330.0})
    assert told(pod) == [("grid_event", "site", 0, "")]


def dark_feeds(*, apart_s: int, lasts_s: int, back_apart_s: int = 0) -> tuple[set[Any], Twin]:
    """Faults told while both feeds are lost, one so long after the other, and come back alike."""
    pod, ever = Twin(two_racks()), set()
    pod.run(40, QUIET | {"cdu.pump1_speed_pu": 0.7, "cdu.pump2_speed_pu": 0.7})
    for second in range(lasts_s + back_apart_s + 25):
        gone = [0 <= second < lasts_s, apart_s <= second < lasts_s + back_apart_s]
        speed = 0.0 if second < lasts_s else 0.7
        pod.tick(QUIET | {"feeder.energised_state": np.array(gone, float), "cdu.pump1_speed_pu": speed,
                          "cdu.pump2_speed_pu": speed})  # fmt: skip
        ever |= set(told(pod))
    return ever, pod


def test_feeds_that_are_lost_at_once_are_one_event_of_the_grid_that_names_them() -> None:
    """The pumps that stand with them are part of it."""
    ever, pod = dark_feeds(apart_s=0, lasts_s=30)
    assert ever == {("grid_event", "site", 0, "")}
    (fault,) = pod.engine.diagnosis.faults
    assert "a, lab/h/b report no voltage" in fault.evidence[0]
    assert fault.count == 2


def test_feeds_that_come_back_one_after_the_other_were_lost_together() -> None:
    ever, _ = dark_feeds(apart_s=0, lasts_s=20, back_apart_s=4)
    assert ever == {("grid_event", "site", 0, "")}
    ever, _ = dark_feeds(apart_s=0, lasts_s=20, back_apart_s=30)
    assert ("feed_lost", "feeder", 1, "") in ever, "one that stays away is lost by itself"


def test_a_second_feed_that_is_lost_long_after_the_first_is_no_event_of_the_grid() -> None:
    ever, _ = dark_feeds(apart_s=60, lasts_s=90)
    assert {t for t in ever if t[1] != "cdu"} == {
        ("feed_lost", "feeder", 0, ""),
        ("feed_lost", "feeder", 1, ""),
    }


@pytest.mark.parametrize("both", [True, False])
def test_a_lost_feed_waits_for_a_word_of_the_other_that_is_no_older(both: bool) -> None:
    """Feeders that are read one after the other, every second tick each."""
    pod, ever, first = Twin(two_racks()), list[Any](), 0
    others = {key: value for key, value in QUIET.items() if not key.startswith("feeder.")}
    for second in range(60):
        feeder = second % 2
        gone = np.full((1, 1), float(second >= 40 and (feeder == 0 or both)), np.float32)
        none, at_ns = np.empty((0, 1), np.int64), pod.now_ns + NS
        pod.inbox.put_block(Block("feeder", feeder, ("energised_state",), gone, (), none, at_ns), at_ns)
        pod.tick(others)
        first = first or (second if told(pod) else 0)
        ever += told(pod)
    assert set(ever) == {("grid_event", "site", 0, "") if both else ("feed_lost", "feeder", 0, "")}
    assert 40 <= first <= 41


def test_a_dip_of_all_feeds_is_told_at_once_and_a_slight_sag_once_it_lasts() -> None:
    for volts, after_s in ((340.0, 1), (370.0, 3)):
        pod = Twin(two_racks())
        pod.run(5, QUIET)
        for second in range(1, after_s + 1):
            assert told(pod) == [], second
            pod.tick(QUIET | {"feeder.voltage_v": volts})
        assert told(pod) == [("grid_event", "site", 0, "")]


def test_a_lost_supply_is_the_nodes_but_not_when_the_feed_is_lost() -> None:
    powers = {"node.psu1_power_w": one(36, 3, 0.0, 2000.0), "node.psu2_power_w": one(36, 3, 4000.0, 2000.0)}
    pod = Twin(two_racks())
    pod.run(5, QUIET | powers)
    assert told(pod) == [("psu_lost", "node", 3, "")]
    pod = Twin(two_racks())
    dark = {"feeder.energised_state": one(2, 0), "node.psu1_power_w": 0.0, "node.psu2_power_w": 4000.0}
    pod.run(8, QUIET | dark)
    assert told(pod) == [("feed_lost", "feeder", 0, "")]
    # A node that is silent since then was last read without that feed
    pod.tick(QUIET | {"node.psu1_power_w": one(36, 3, 0.0, 2000.0), "feeder.energised_state": one(2, 0)})
    back = {key: value for key, value in QUIET.items() if not key.startswith("node.psu")}
    pod.run(12, back)
    assert ("psu_lost", "node", 3, "") not in told(pod)
    pod.run(8, QUIET | {"node.psu1_power_w": one(36, 3, 0.0, 2000.0)})
    assert ("psu_lost", "node", 3, "") in told(pod)


def test_xids_that_come_again_are_a_burst() -> None:
    pod = Twin(two_racks())
    for i in range(3):
        assert told(pod) == []
        pod.tick(QUIET, FaultReported(id=f"x{i}", table="gpu", name="r1/node0/gpu1", code=94))
    assert told(pod) == [("xid_burst", "gpu", 1, "")]


def test_a_pump_that_ran_and_stands() -> None:
    pod = Twin(two_racks())
    pod.run(40, QUIET | {"cdu.pump1_speed_pu": 0.7, "cdu.pump2_speed_pu": 0.7, "cdu.flow_lpm": 200.0})
    pod.tick(QUIET | {"cdu.pump1_speed_pu": 0.0, "cdu.pump2_speed_pu": 1.0, "cdu.flow_lpm": 160.0})
    assert told(pod) == [("pump_trip", "cdu", 0, "")]
    first = pod.engine.diagnosis.faults[0]
    assert "pump 1 stands still" in first.evidence
    told_otherwise = replace(first, evidence=("no motion of pump 1",))
    assert finding_of(told_otherwise, pod.site).title == "Pump 1 of lab/h/cdu1 has stopped"
    assert finding_of(first, pod.site).title == "Pump 1 of lab/h/cdu1 has stopped"
    pod.tick(QUIET | {"cdu.pump1_speed_pu": 0.0, "cdu.pump2_speed_pu": 0.0, "cdu.flow_lpm": 0.0})
    (both,) = pod.engine.diagnosis.faults
    assert both.evidence[0] == "both pumps stopped, no flow"
    assert finding_of(both, pod.site).title == "Both pumps of lab/h/cdu1 have stopped"
    assert both.count == 2 + 144 > first.count, "so it is journaled anew"


@pytest.mark.parametrize("nodes", [6, 8])
def test_many_nodes_on_one_supply_are_one_alarm_and_each_is_known_to_health_and_policies(nodes: int) -> None:
    pod = Twin(two_racks(racks="r[1-3]"))
    one = np.full(54, 2500.0)
    for second in range(30):
        one[np.arange(54) % 18 < nodes] = 2500.0 if second < 15 else 0.0
        pod.tick(QUIET | {"node.psu1_power_w": one, "node.psu2_power_w": 5000.0 - one})
    mine = np.flatnonzero(one == 0.0).tolist()
    known = {(f.kind, f.table, f.entity) for f in pod.engine.view().faults()}
    assert known == {("psu_lost", "node", i) for i in mine}
    assert np.flatnonzero(pod.engine.health.health("psu").level >= DEGRADED).tolist() == [2 * i for i in mine]
    found = [f for f in pod.decision.findings if f.id.startswith("fault/")]
    assert len(found) == (1 if len(mine) > MOST_ALIKE else len(mine))
    assert sum(f.count for f in found) == len(mine)


@pytest.mark.parametrize(("nodes_off_w", "wrong"), [(8000.0, True), (500.0, False), (np.nan, False)])
def test_a_heat_balance_alone_calls_no_power_meter_wrong(nodes_off_w: float, wrong: bool) -> None:
    """After a restart coolant is not where the power is; the sum of the nodes says nothing, or agrees."""
    (h,) = (h for h in HYPOTHESES if (h.table, h.signal) == ("rack", "power_w"))
    fault = IsolatedFault(h, 0, 8000.0, 40.0, 0.9, {HEAT: np.zeros(1, np.int32)}, 9)
    power = Residual("rack.power_w", np.full(2, 1e5), 1e5 + np.full(2, nodes_off_w), np.full(2, 900.0))
    assert DiagnosisVerdicts._decided(fault, {"rack.power_w": power}) == wrong


def test_a_meter_that_repeats_its_last_digit_stands_still() -> None:
    pod, rng = Twin(two_racks()), np.random.default_rng(1)
    for i in range(120):
        flow = 100.0 + rng.normal(0, 0.5, 2)
        if i >= 90:
            flow[1] = 100.25
        pod.tick(QUIET | {"rack.flow_lpm": flow})
    assert told(pod) == [("sensor_frozen", "rack", 1, "flow_lpm")]


def test_a_meter_may_stand_still_where_nothing_flows_or_draws() -> None:
    pod, rng = Twin(two_racks()), np.random.default_rng(1)
    for i in range(120):
        flow, power, current = 100.0 + rng.normal(0, 0.5, 2), 7e4 + rng.normal(0, 50, 2), 90.0
        cdu, current = float(flow.sum()), current + rng.normal(0, 0.5, 2)
        if i >= 60:
            flow, cdu, power, current = np.zeros(2), 0.0, np.full(2, 9e3), np.full(2, 11.0)
        pod.tick(QUIET | {"rack.flow_lpm": flow, "cdu.flow_lpm": cdu, "rack.power_w": power,
                          "feeder.current_a": current})  # fmt: skip
    assert [t for t in told(pod) if t[0] == "sensor_frozen"] == []


@pytest.mark.parametrize("nodes", [1, pytest.param(5, marks=pytest.mark.long)])
def test_the_power_of_a_node_may_stand_still_as_long_as_nothing_that_it_follows_moves(nodes: int) -> None:
    """GPUs at their lowest cap draw the same all the time, and so does their node."""
    pod, rng, now = Twin(two_racks()), np.random.default_rng(1), set()
    capped, stuck_w = np.arange(36) < nodes, np.zeros(36)
    for i in range(308):
        gpu_w = np.where(np.repeat(capped, 4) & (i >= 210), 200.0, np.rint(rng.uniform(190, 700, 144)))
        if i >= 290:
            gpu_w[:4] += np.rint(rng.uniform(0, 30, 4))  # work again, and its meter stands
        node_w = np.add.reduceat(gpu_w, np.arange(0, 144, 4)) + 700.0
        stuck_w = node_w if i < 290 else stuck_w
        node_w = np.where(np.arange(36) == 0, stuck_w, node_w)
        supplies = {"node.psu1_power_w": 0.5 * node_w, "node.psu2_power_w": 0.5 * node_w}
        pod.tick(QUIET | {"gpu.power_w": gpu_w, "node.power_w": node_w} | supplies)
        now = set(told(pod)) - {("sensor_frozen", "node", 0, f"psu{side}_power_w") for side in (1, 2)}
        if i < 290:
            assert told(pod) == [], i
    assert now == {("sensor_frozen", "node", 0, "power_w")}


def test_parts_that_all_read_0_have_not_moved() -> None:
    """As where agents of a rack report no power of their GPUs, while its nodes draw what they always do."""
    pod = Twin(two_racks())
    pod.run(3, QUIET | {"gpu.power_w": 0.0, "node.power_w": 1500.0})
    diagnosis, stands = pod.engine.diagnosis, np.ones(36, np.bool_)
    for _ in range(3):
        assert not diagnosis.devices._left_behind("node.power_w", stands, diagnosis.watch).any()
    diagnosis.watch.meters["gpu"].last_of("power_w")[:] = 300.0
    assert diagnosis.devices._left_behind("node.power_w", stands, diagnosis.watch).all()


@pytest.mark.parametrize(
    ("table", "racks"),
    [
        ("node", "r1"),
        pytest.param("node", "r[1-3]", marks=pytest.mark.long),
        pytest.param("rack", "r[1-3]", marks=pytest.mark.long),
    ],
)
def test_meters_of_a_whole_site_that_stand_still_while_their_loads_move_are_named(
    table: str, racks: str
) -> None:
    pod, rng = Twin(two_racks(racks=racks)), np.random.default_rng(1)
    n, stuck_w = pod.site.sizes, np.zeros(0)
    for i in range(300):
        gpu_w = np.rint(rng.uniform(300, 900, n["gpu"]))
        node_w = np.add.reduceat(gpu_w, np.arange(0, len(gpu_w), 4)) + 700.0 + rng.normal(0, 5, n["node"])
        rack_w = np.add.reduceat(node_w, np.arange(0, len(node_w), 18)) + rng.normal(0, 50, n["rack"])
        read = {"gpu": gpu_w, "node": node_w, "rack": rack_w}
        stuck_w = read[table] if i < 150 else stuck_w
        pod.tick(QUIET | {f"{t}.power_w": stuck_w if t == table else w for t, w in read.items()})
        if i < 150:
            assert told(pod) == [], i
    mine = {(kind, t, at) for kind, t, at, _ in told(pod) if kind == "sensor_frozen"}
    assert mine == {("sensor_frozen", "rack", i) for i in range(n["rack"])}


@pytest.mark.parametrize(("amperes", "frozen"), [(7.2, 0), (90.0, 1)])
def test_a_current_may_stand_still_where_its_noise_drowns_in_its_last_digit(
    amperes: float, frozen: int
) -> None:
    """A meter of 0.1 % noise and steps of 0.1 A, on a feeder whose load was lively before."""
    pod, rng = Twin(two_racks()), np.random.default_rng(1)
    for i in range(160):
        current = 60.0 + rng.normal(0, 5.0, 2) if i < 80 else np.array([amperes, 60.0 + rng.normal(0, 0.5)])
        pod.tick(
            QUIET | {"feeder.current_a": np.round(current, 1), "rack.power_w": 4e4 + rng.normal(0, 9, 2)}
        )
    assert len([t for t in told(pod) if t[0] == "sensor_frozen"]) == frozen


PRESSURE = "cdu.supply_pressure_pa"  # no comparison judges it


@pytest.mark.long
@pytest.mark.parametrize("swings", [(0.63, 0.67, 0.76), (0.5, 0.62, 0.58, 0.61, 0.59), (1.3, 1.2, 1.15)])
def test_a_pressure_that_steps_and_swings_back_some_of_the_way_is_no_spike(swings: tuple[float, ...]) -> None:
    """As where a pump trips and the other one takes over, and again when it starts: each level lasts."""
    pod, rng, ever = Twin(two_racks()), np.random.default_rng(1), set()
    for i in range(270):
        stepped = i >= 210 and (i - 210) // 10 % 2 == 0
        level = swings[min(i % 10, len(swings) - 1)] if stepped else 1.0
        pod.tick(QUIET | {PRESSURE: 3e5 * level + rng.normal(0, 1e3)})
        ever |= set(told(pod))
    assert ever == set()


@pytest.mark.long
@pytest.mark.parametrize("height_pa", [6e4, -6e4])
def test_a_pressure_that_leaps_there_and_back_is_a_sensor_that_spikes(height_pa: float) -> None:
    pod, rng = Twin(two_racks()), np.random.default_rng(1)
    for i in range(270):
        spike_pa = height_pa if i > 210 and rng.random() < 0.2 else 0.0
        pod.tick(QUIET | {PRESSURE: 3e5 + spike_pa + rng.normal(0, 1e3)})
    assert told(pod) == [("sensor_spiking", "cdu", 0, "supply_pressure_pa")]


@pytest.mark.long
@pytest.mark.parametrize(("drop_pu", "spiking"), [(0.3, 0), (0.0, 1)])
def test_memory_that_cools_while_it_is_not_read_does_not_spike(drop_pu: float, spiking: int) -> None:
    """Bursts of work of one reading: the power leaps with the memory's temperature, or does not."""
    pod, rng = Twin(two_racks()), np.random.default_rng(1)
    for i in range(270):
        burst = i > 210 and rng.random() < 0.2
        hbm_c, power_w = np.full(144, 70.0), np.full(144, 900.0)
        hbm_c[5] -= 15.0 * burst
        power_w[5] *= 1.0 - drop_pu * burst
        read = {"gpu.hbm_temp_c": np.round(hbm_c + rng.normal(0, 0.4, 144)), "gpu.power_w": power_w}
        pod.tick(QUIET | read)
    found = [t for t in told(pod) if t[0] == "sensor_spiking"]
    assert found == [("sensor_spiking", "gpu", 5, "hbm_temp_c")] * spiking


@pytest.mark.long
@pytest.mark.parametrize(
    ("step_k", "noise_k", "to_c", "kinds"),
    sampled(
        [
            (1.0, 0.1, 23.9, {"sensor_biased"}),  # it rests there, and its noise is unseen in the steps
            (0.05, 0.1, 24.4, set()),
            (0.05, 0.1, 21.0, {"sensor_biased", "cooler_failed"}),
            (0.05, 0.0, 21.0, {"sensor_frozen"}),  # of which the digits stand still as well
        ],
        (1.0, 0.1, 23.9, {"sensor_biased"}),
    ),
)
def test_a_coarse_supply_that_rests_at_another_step_does_not_stand_still(
    step_k: float, noise_k: float, to_c: float, kinds: set[str]
) -> None:
    tree = two_racks(loops=[{"name": "fws", "cooling": "dry_cooler"}])
    tree["halls"][0]["cdus"][0]["loop"] = "fws"
    pod, rng, ever = Twin(tree), np.random.default_rng(1), set()
    for i in range(900):
        supply_c = 25.1 + 0.5 * np.sin(i / 30.0) if i < 700 else to_c
        supply_c += rng.normal(0, noise_k if i >= 700 else 0.1)
        supply_c = step_k * np.rint(supply_c / step_k)
        pod.tick(QUIET | {"loop.supply_temp_c": supply_c, "site.outdoor_temp_c": 15.0})
        ever |= {t[0] for t in told(pod)}
    assert ever <= kinds
    assert ("sensor_frozen" in ever) == ("sensor_frozen" in kinds)


@pytest.mark.long
def test_the_usual_supply_of_a_loop_is_known_no_better_than_its_readings_step() -> None:
    tree = two_racks(loops=[{"name": "fws", "cooling": "dry_cooler"}])
    pod = Twin(tree)
    pod.run(310, {"loop.supply_temp_c": 24.0})
    devices, state, tracks = pod.engine.diagnosis.devices, pod.engine.state, pod.engine.diagnosis.tracks
    aim_c = np.array([np.nan])
    fine, coarse = (devices.loops(state, tracks, np.array([k]), aim_c).sigma for k in (0.0, 0.4))
    assert coarse == pytest.approx(np.hypot(fine, 0.4))


@pytest.mark.long
@pytest.mark.parametrize("lost", [True, False])
def test_comparisons_that_a_lost_feed_disturbs_confirm_no_spike_of_a_nodes_power(lost: bool) -> None:
    """Work that leaps on nodes of which one supply is empty; else a meter that does, beside supplies."""
    pod, rng, ever = Twin(two_racks()), np.random.default_rng(1), set()
    for i in range(330):
        after, leaps_w = i >= 270, 2e3 * (i >= 270 and i % 5 == 0) * (np.arange(36) < 3)
        work_w = 5e3 + rng.normal(0, 20, 36) + leaps_w * lost
        share = 1.0 if after and lost else 0.5
        pod.tick(QUIET | {"node.power_w": work_w + leaps_w * (not lost), "node.psu1_power_w": share * work_w,
                          "node.psu2_power_w": (1 - share) * work_w,
                          "feeder.energised_state": one(2, 1, float(after and lost))})  # fmt: skip
        ever |= {t[0] for t in told(pod)}
    assert ("sensor_spiking" in ever) != lost
    assert ("feed_lost" in ever) == lost


@pytest.mark.long
@pytest.mark.parametrize("other", [True, False], ids=["both feeds", "one"])
def test_a_load_that_jumps_is_read_by_both_feeds_some_seconds_apart(other: bool) -> None:
    pod, rng = Twin(two_racks()), np.random.default_rng(1)
    for i in range(330):
        power = 50e3 + rng.normal(0, 40, 2)
        power[0] += 9e3 * (i > 250 and i % 9 == 0)
        power[1] += 9e3 * (i > 250 and i % 9 == 1 and other)
        pod.tick(QUIET | {"feeder.power_w": power, "rack.power_w": power.sum() / 2})
    assert [t for t in told(pod) if t[0] == "sensor_spiking"] == (
        [] if other else [("sensor_spiking", "feeder", 0, "power_w")]
    )


def test_a_meter_that_falls_silent() -> None:
    pod, rng = Twin(two_racks()), np.random.default_rng(1)
    for i in range(80):
        flow = 100.0 + rng.normal(0, 0.5, 2)
        if i >= 60:
            flow[0] = np.nan
        pod.tick(QUIET | {"rack.flow_lpm": flow, "rack.power_w": 50_000.0 + rng.normal(0, 50, 2)})
    assert told(pod) == [("sensor_silent", "rack", 0, "flow_lpm")]


def test_one_far_reading_is_no_deviation_and_two_are() -> None:
    board, track, whole = CusumBoard(1, 3), DeviationTrack(3), slice(0, 3)
    track.sit(board, 0, whole)
    board.update(np.array([[0.0, 7.0, -2.0]], np.float32), None, whole, START_NS)
    assert not track.active
    board.update(np.array([[0.0, 7.0, -2.0]], np.float32), None, whole, START_NS)
    assert track.on.tolist() == [0, 1, 0]
    stale = np.zeros((1, 3), np.bool_)
    for _ in range(50):
        board.update(np.array([[0.0, 7.0, -9.0]], np.float32), stale, whole, START_NS)
    assert track.on.tolist() == [0, 1, 0]
    assert track.below.max() < CERTAIN  # no new reading, no news


class Deduced:
    """A diagnosis that sees residuals of a chosen size, on a site of two racks with coolant, or in air."""

    def __init__(self, air: bool = False) -> None:
        racks = [{"name": "r[1-2]", "profile": "hgx-h100", "nodes": 4}]
        self.pod = Twin({"site": "lab", "halls": [{"name": "h", "racks": racks}]} if air else two_racks())
        self.values = QUIET | {
            "rack.flow_lpm": 100.0, "rack.supply_temp_c": 32.0, "rack.return_temp_c": 42.0,
            "rack.power_w": 70_000.0, "rack.diff_pressure_pa": 80_000.0, "cdu.flow_lpm": 200.0,
            "gpu.temp_c": 55.0, "gpu.power_w": 900.0,
        }  # fmt: skip
        if air:
            self.values = QUIET | {"gpu.temp_c": 55.0, "gpu.power_w": 500.0, "rack.power_w": 30_000.0}
        self.diagnosis = Diagnosis(self.pod.site)

    def see(self, seconds: int, offsets: dict[str, tuple[Any, float]]) -> list[tuple[str, str, int, str]]:
        """Residuals `offsets`: name -> (difference [n], sigma), for so long; what is told then."""
        for _ in range(seconds):
            self.pod.tick(self.values)
            engine = self.pod.engine
            engine.estimator.residuals = {
                name: residual(name, np.asarray(off, float), sigma) for name, (off, sigma) in offsets.items()
            }
            self.diagnosis.update(engine.state, engine.estimator, engine.jobs, engine.windows, (), 1.0)
        return [(f.kind, f.table, f.entity, f.signal) for f in self.diagnosis.faults]


def residual(name: str, off: np.ndarray, sigma: float) -> Residual:
    base = np.full(len(off), 100.0)
    return Residual(name, base, base + off, np.full(len(off), sigma), np.zeros(len(off)))


def test_less_flow_that_all_agree_on_is_a_block_and_else_the_sensor() -> None:
    none = [0.0, 0.0]
    blocked = {"rack.flow_lpm/pressure": ([-30.0, 0.0], 0.6), "rack.flow_lpm/heat": (none, 1.5),
               "cdu.flow_lpm/racks": ([0.0], 1.4), "rack.heat": (none, 0.06)}  # fmt: skip
    assert Deduced().see(3, blocked) == [("branch_blocked", "rack", 0, "")]
    lies = blocked | {"rack.flow_lpm/heat": ([-30.0, 0.0], 1.5), "cdu.flow_lpm/racks": ([30.0], 1.4),
                      "rack.heat": ([-3.0, 0.0], 0.06)}  # fmt: skip
    assert Deduced().see(20, lies) == [("sensor_biased", "rack", 0, "flow_lpm")]


def test_all_gpus_of_a_tray_are_the_tray_and_one_is_its_plate() -> None:
    tray = np.zeros(144)
    tray[8:12] = 6.0
    assert Deduced().see(30, {"gpu.temp_c": (tray, 0.5)}) == [("tray_blocked", "node", 2, "")]
    assert Deduced().see(45, {"gpu.temp_c": (one(144, 9, 6.0), 0.5)}) == [("plate_degraded", "gpu", 9, "")]


def test_seventy_two_gpus_say_that_the_supplys_sensor_is_wrong() -> None:
    gpus = np.zeros(144)
    gpus[72:] = -3.0
    seen = {"gpu.temp_c": (gpus, 0.5), "rack.supply_temp_c": ([0.0, 3.0], 0.06),
            "rack.heat": ([0.0, -3.0], 0.06), "rack.flow_lpm/heat": ([0.0, -30.0], 1.5)}  # fmt: skip
    diagnosis = Deduced()
    assert diagnosis.see(30, seen) == [("sensor_biased", "rack", 1, "supply_temp_c")]
    assert diagnosis.diagnosis.faults[0].count >= 72


@pytest.mark.parametrize("gpus", [slice(8, 16), slice(32, 64)], ids=["node", "rack"])
@pytest.mark.parametrize("relation", ["gpu.temp_c", "gpu.resistance/drift"])
def test_a_rack_in_air_has_no_coolant_that_could_be_blocked_or_read_wrongly(
    relation: str, gpus: slice
) -> None:
    warm = np.zeros(64)
    warm[gpus] = 6.0
    for sign in (1.0, -1.0):
        told = Deduced(air=True).see(45, {relation: (sign * warm, 0.5)})
        assert {(kind, signal) for kind, _, _, signal in told} <= {
            ("plate_degraded", ""),
            ("sensor_biased", "temp_c"),
        }


def test_two_faults_are_two() -> None:
    both = np.zeros(144)
    both[100] = 8.0
    seen = {"gpu.temp_c": (both, 0.5), "rack.flow_lpm/pressure": ([-30.0, 0.0], 0.6),
            "cdu.flow_lpm/racks": ([0.0], 1.4)}  # fmt: skip
    assert sorted(Deduced().see(45, seen)) == [
        ("branch_blocked", "rack", 0, ""),
        ("plate_degraded", "gpu", 100, ""),
    ]


def test_a_pressure_that_is_off_where_the_flow_shows_none_of_it_names_no_sensor() -> None:
    """A meter that is wrong by so much would show in both comparisons that use it."""
    off = {"rack.diff_pressure_pa": ([12_000.0, 0.0], 300.0), "rack.flow_lpm/pressure": ([-7.0, 0.0], 0.6),
           "cdu.flow_lpm/pump": ([0.0], 1.0)}  # fmt: skip
    assert Deduced().see(30, off) == [("sensor_biased", "rack", 0, "diff_pressure_pa")]
    assert Deduced().see(30, off | {"rack.flow_lpm/pressure": ([0.0, 0.0], 0.6)}) == []


@pytest.mark.parametrize(("sigma_k", "wrong"), [(0.1, [("rack.supply_temp_c", 0)]), (0.0, [])])
def test_one_reading_that_is_far_off_is_no_evidence_where_its_uncertainty_is_unknown(
    sigma_k: float, wrong: list[tuple[str, int]]
) -> None:
    pod = Twin(two_racks())
    pod.tick({"rack.supply_temp_c": 32.0})
    topology = Topology(pod.site)
    expected_c, read_c, name = np.full(2, 32.0), np.array([35.0, 32.0]), "rack.supply_temp_c"
    residuals = {name: Residual(name, expected_c, read_c, np.full(2, sigma_k))}
    found = FaultIsolation(topology).outliers(
        residuals, TickValues(pod.engine.state, topology), lambda: lambda name, n: None
    )
    assert [(fault.hypothesis.key, fault.entity) for fault in found] == wrong


@pytest.mark.parametrize("lasts", [False, True])
def test_a_cause_is_named_for_a_deviation_that_lasts_and_not_for_another_that_says_nothing_of_it(
    lasts: bool,
) -> None:
    at, (drop, flow) = np.zeros(1, np.int32), ("rack.diff_pressure_pa", "rack.flow_lpm/pressure")
    meter = next(h for h in HYPOTHESES if (h.kind, h.key) == ("sensor_biased", drop))
    pairs = [CandidatePairs(drop, at, at, np.ones(1)), CandidatePairs(flow, at, at, np.array([-0.1]))]
    sigmas = {drop: np.array([4.0]), flow: np.array([-0.5])}
    on = {drop: np.array([lasts]), flow: np.ones(1, np.bool_)}
    found = _Pursuit([_Tried(meter, at, pairs, None, 1.0)], sigmas, on).best()
    assert (found is not None) == lasts


@pytest.mark.long
def test_a_fault_lasts_while_its_symptoms_do_and_clears_after() -> None:
    seen = {"rack.diff_pressure_pa": ([12_000.0, 0.0], 300.0), "rack.flow_lpm/pressure": ([-7.0, 0.0], 0.6)}
    calm = {name: (np.zeros(2), sigma) for name, (_, sigma) in seen.items()}
    diagnosis = Deduced()
    expected = [("sensor_biased", "rack", 0, "diff_pressure_pa")]
    assert diagnosis.see(30, seen) == expected
    since_ns = diagnosis.diagnosis.faults[0].since_ns
    assert diagnosis.see(60, seen) == expected
    assert diagnosis.diagnosis.faults[0].since_ns == since_ns
    explained = diagnosis.diagnosis.explained("rack.flow_lpm/pressure")
    assert explained is not None
    assert explained.tolist() == [True, False]
    assert diagnosis.see(90, calm) == []


def test_what_was_told_and_learned_survives_a_snapshot() -> None:
    seen = {"rack.diff_pressure_pa": ([12_000.0, 0.0], 300.0), "rack.flow_lpm/pressure": ([-7.0, 0.0], 0.6)}
    diagnosis = Deduced()
    diagnosis.see(40, seen)
    again = Diagnosis(diagnosis.pod.site)
    again.restore(diagnosis.diagnosis.dump())
    assert again.faults == diagnosis.diagnosis.faults
    assert len(again.faults) == 1
    kept = {t: np.arange(n, dtype=np.int32) for t, n in diagnosis.pod.site.sizes.items()}
    kept["rack"] = np.array([1, 0], np.int32)
    assert diagnosis.diagnosis.remapped(diagnosis.pod.site, kept).faults[0].entity == 1
    diagnosis.diagnosis.forget("rack", 0)
    assert diagnosis.diagnosis.faults == ()


def test_an_id_is_the_same_as_long_as_the_fault_lasts() -> None:
    site = site_of(two_racks())
    book = CauseBook()
    for second in range(12):
        book.update([Cause("sensor_biased", "rack", 1, "flow_lpm", evidence=(f"{second}",))], second * NS)
    (fault,) = book.faults()
    assert finding_of(fault, site).id == "fault/sensor_biased/lab/h/r2/flow_lpm"
    assert fault.since_ns == 0
    assert fault.evidence == ("11",)


def test_a_better_account_takes_the_place_of_one_that_lost_its_support() -> None:
    book, rows = CauseBook(), np.array([3], np.int32)
    one_, other = (
        Cause(kind, "rack", 3, "", hold_s=2.0, covers={"rack.heat": rows})
        for kind in ("leak", "branch_blocked")
    )
    for second in range(10):
        book.update([one_ if second < 5 else other], second * NS)
    assert [f.kind for f in book.faults()] == ["branch_blocked"]
    assert book.faults()[0].since_ns == 0


@pytest.mark.parametrize("h", HYPOTHESES, ids=lambda h: f"{h.kind}-{h.table}-{h.signal}")
def test_every_hypothesis_is_of_a_known_kind_and_signal(h: Any) -> None:
    assert h.table in FAULT_KINDS[h.kind].tables
    if h.kind == "sensor_biased":
        assert find_signal(f"{h.table}.{h.signal}") is not None


def test_places_know_who_is_above_whom() -> None:
    places = Topology(site_of(two_racks()))
    assert places.below("cdu", 0, "gpu").tolist() == list(range(144))
    assert places.below("rack", 1, "node").tolist() == list(range(18, 36))
    assert places.above("gpu", "rack")[[0, 71, 72, 143]].tolist() == [0, 0, 1, 1]
    assert places.above("gpu", "loop").tolist() == [-1] * 144


@pytest.mark.parametrize(
    ("read_w", "size_w", "kept"),
    [(72.0, 145.0, False), (72.0, -145.0, True), (700.0, 145.0, True), (700.0, 10.0, False)],
)
def test_a_meter_reads_no_more_too_much_than_it_reads(read_w: float, size_w: float, kept: bool) -> None:
    now: Any = {"gpu.power_w": np.array([read_w])}
    assert DiagnosisVerdicts._slight("gpu", "power_w", 0, size_w, now) != kept
