"""A plant on the wire: decoded again it gives what the sensors said, and its metadata gives the site."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from connectors.dsx import discover
from connectors.files import encode_row, read_capture
from connectors.mqtt import Router
from tests.support.builders import START_NS, eight_nodes, site_of, spec_of, two_racks
from tests.support.static_plant import StillPlant
from twin.catalogue import NS, TABLES, ConfigError, find_signal
from twin.engine import Engine
from twin.plant import Observation, Sensors
from twin.plant.disturbance import SensorFault
from twin.plant.sensors import Periods
from twin.run import open_source, replay_arrivals
from twin.simulation import Simulation
from twin.simulation.closed_loop import ReportInbox
from twin.simulation.plant_wire import NOT_SENT, POINTS, PlantWire
from twin.site import Site
from twin.telemetry import (
    GOOD,
    Block,
    Event,
    FaultReported,
    Ignored,
    Inbox,
    JobEnded,
    JobStarted,
    Message,
    Reading,
    State,
)

EVERY_SECOND = Periods(1.0, 1.0, 1.0, 1.0)


def big_tree() -> dict[str, Any]:
    """Six racks on three CDUs, a loop, and a power tree of two levels per side."""
    return {
        "site": "lab",
        "loops": [{"name": "fw1"}],
        "halls": [{
            "name": "north",
            "racks": [{"name": "r[1-6]", "profile": "gb200-nvl72"}],
            "cdus": [{"name": "cdu[1-3]", "serves": ["r[1-6]"], "loop": "fw1"}],
            "feeders": [
                {"name": "ups-a", "side": "A", "serves": ["pdu-a[1-2]"]},
                {"name": "pdu-a[1-2]", "side": "A", "serves": ["r[1-6]"]},
                {"name": "ups-b", "side": "B", "serves": ["pdu-b[1-2]"]},
                {"name": "pdu-b[1-2]", "side": "B", "serves": ["r[1-6]"]},
            ],
        }],
    }  # fmt: skip


@pytest.fixture(scope="module")
def site() -> Site:
    return site_of(big_tree())


def observed(site: Site, seconds: int, periods: Periods | None = EVERY_SECOND) -> Iterator[Observation]:
    """A still plant with what can go wrong in it, seen each second."""
    plant, sensors = StillPlant(site), Sensors(site, 3, periods, drop_out_pu=0.005)
    plant.disturbance.sensors = [SensorFault("node", 3, "", "silent")]
    t = plant.truth
    t.gpu_alive[50], t.node_on[40], t.rack_unpowered[5] = False, False, True
    t.rack_leak[2] = t.node_leak[30] = t.cdu_filling[1] = t.feeder_tripped[1] = t.hall_wet[0] = True
    for second in range(seconds):
        plant.step()
        yield sensors.observe(t, plant.disturbance, START_NS + (second + 1) * NS)


def take_in(site: Site, router: Router, inbox: Inbox, messages: list[Message]) -> list[Event]:
    """Decode into the inbox; nothing may be ignored or bad."""
    events: list[Event] = []
    for message in messages:
        got = router.decode(message)
        assert not isinstance(got, Ignored), (message.topic, got)
        for item in got:
            if isinstance(item, Reading):
                inbox.put(item, message.t_ns)
            elif isinstance(item, Block):
                inbox.put_block(item, message.t_ns)
            else:
                events.append(item)
    return events


@pytest.mark.parametrize("msgpack", [False, True])
def test_decoded_messages_give_the_same_state_as_the_sensors_themselves(site: Site, msgpack: bool) -> None:
    wire, router = PlantWire(site, msgpack), Router(site)
    by_wire, direct = Inbox(site.sizes), ReportInbox(site.sizes)
    take_in(site, router, by_wire, wire.metadata(START_NS))
    states = State(site.sizes), State(site.sizes)
    for tick, observation in enumerate(observed(site, 4)):
        take_in(site, router, by_wire, wire.messages(observation))
        for report in observation.reports:
            direct.put_report(report, report.arrival_ns)
        for state, inbox in zip(states, (by_wire, direct), strict=True):
            state.apply(inbox.take(tick, observation.now_ns, 1.0))
    compared = set()
    for name, table in states[1].tables.items():
        other = states[0].tables[name]
        for signal in table.signals:
            if signal.key in NOT_SENT or not (table.quality[signal.row] == GOOD).any():
                continue
            compared.add(signal.key)
            one, two = (s.quality_of(signal, states[0].now_ns) for s in (table, other))
            assert np.array_equal(one, two), signal.key
            assert np.array_equal(table.value[signal.row], other.value[signal.row], equal_nan=True), (
                signal.key
            )
            ages = [s.age_s(signal, states[0].now_ns) for s in (table, other)]
            assert np.allclose(*ages, atol=0.0011), signal.key
        for counter in table.counters:
            if counter.key not in NOT_SENT:
                assert np.array_equal(table.raw[counter.row], other.raw[counter.row]), counter.key
                assert np.array_equal(table.total[counter.row], other.total[counter.row]), counter.key
    said = {f"{r.table}.{s}" for r in observation.reports for s in r.signals}
    assert said - NOT_SENT <= compared
    assert {p.key for p in POINTS} <= compared


def test_what_is_not_sent_has_no_place_on_the_wire(site: Site) -> None:
    said = {f"{r.table}.{s}" for o in observed(site, 1) for r in o.reports for s in (*r.signals, *r.counters)}
    sent = {p.key for p in POINTS}
    it = {key for key in said - NOT_SENT if key.startswith(("gpu.", "node."))}
    assert said - sent - it == {key for key in NOT_SENT if site.sizes[key.partition(".")[0]]}
    assert all(find_signal(key) for key in NOT_SENT)


def test_metadata_alone_rebuilds_racks_cooling_and_power(site: Site) -> None:
    tree = discover(PlantWire(site).metadata(START_NS), "lab").site
    for hall in tree["halls"]:
        for rack in hall["racks"]:
            rack["profile"] = "gb200-nvl72"
    found = site_of(tree)
    for table in ("rack", "cdu", "feeder", "hall"):
        assert sorted(found.names[table]) == sorted(site.names[table]), table
    for rack, path in enumerate(site.names["rack"]):
        index = found.entity("rack", path)
        assert index is not None
        cdu = site.names["cdu"][site.cdu_of_rack[rack]]
        assert found.names["cdu"][found.cdu_of_rack[index]] == cdu
    for feeder, path in enumerate(site.names["feeder"]):
        index = found.entity("feeder", path)
        assert index is not None
        assert found.side_of_feeder[index] == site.side_of_feeder[feeder]
        racks = [site.names["rack"][r] for r in site.racks_below(feeder)]
        assert [found.names["rack"][r] for r in found.racks_below(index)] == racks
        parent = int(site.parent_of_feeder[feeder])
        other = int(found.parent_of_feeder[index])
        assert (parent < 0) == (other < 0)
        assert parent < 0 or site.names["feeder"][parent] == found.names["feeder"][other]


def test_air_cooled_racks_announce_no_coolant() -> None:
    topics = [m.topic for m in PlantWire(site_of(eight_nodes())).metadata(START_NS)]
    assert any("RackPower" in t for t in topics)
    assert not any("RackLiquidFlow" in t for t in topics)


def test_faults_and_jobs_travel_as_events(site: Site) -> None:
    events: list[Event] = [
        FaultReported(table="gpu", name="lab/north/r2/node1/gpu3", code=79, detail="off the bus"),
        FaultReported(id="x1", table="node", name="lab/north/r2/node1", code=1),
        JobStarted(job="j1", nodes=("lab/north/r1/node0",), kind="training", checkpoint_interval_s=600.0),
        JobEnded(job="j1", reason="done"),
        FaultReported(table="cdu", name="lab/north/cdu1", code=3),  # no agent speaks for it
    ]
    seen = Observation([], events, START_NS)
    decoded = take_in(site, Router(site), Inbox(site.sizes), PlantWire(site).messages(seen))
    assert len(decoded) == 4
    assert len({e.id for e in decoded}) == 4
    for one, two in zip(events, decoded, strict=False):
        fields = [f for f in one.__struct_fields__ if f != "id"]
        assert [getattr(one, f) for f in fields] == [getattr(two, f) for f in fields]


def test_a_value_says_when_it_was_read_and_whether_there_is_one(site: Site) -> None:
    (observation,) = observed(site, 1)
    report = observation.find("cdu", "flow_lpm")
    assert report is not None
    report.column("flow_lpm")[1] = np.nan
    said = {}
    for message in PlantWire(site).messages(observation):
        if "/LiquidFlow/lab/cdu" in message.topic and message.topic.endswith("/flow_lpm"):
            said[message.topic.split("/")[-2]] = msgspec.json.decode(message.payload)
            assert message.t_ns == report.arrival_ns
    assert [said[f"cdu{i}"]["quality"] for i in (1, 2, 3)] == [1, 0, 1]
    assert [said[f"cdu{i}"]["timestamp"] for i in (1, 2, 3)] == [int(t) // 10**6 for t in report.t_ns]
    assert said["cdu2"]["value"] is None
    assert said["cdu1"]["value"] == pytest.approx(float(report.column("flow_lpm")[0]), abs=0.01)


def test_mute_nodes_split_the_frame_of_their_rack(site: Site) -> None:
    (observation,) = observed(site, 1)
    frames = [m.topic for m in PlantWire(site).messages(observation) if "/Frame/" in m.topic]
    racks = {t.removeprefix("IT/v1/PUB/Frame/lab/north/") for t in frames}
    assert {"r2", "r4", "r5"} <= racks
    assert not any(t.startswith("r6") for t in racks)
    assert sorted(t for t in racks if t.startswith("r1/")) == sorted(
        f"r1/node{i}" for i in range(18) if i != 3
    )


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_a_capture_replays_as_the_run_went(tmp_path: Path, name: str) -> None:
    tree = two_racks()
    site = site_of(tree)
    simulation = Simulation(
        Engine(site, [], []), cast(Any, StillPlant(site)), Sensors(site, 3), start_ns=START_NS
    )

    def run() -> Iterator[Observation]:
        for _ in range(20):
            simulation.step()
            yield simulation.observation

    path = tmp_path / name
    wire = PlantWire(site)
    sent = wire.metadata(START_NS) + [m for observation in run() for m in wire.messages(observation)]
    packed = gzip.compress if name.endswith(".gz") else bytes
    path.write_bytes(packed(b"".join(encode_row(message, START_NS) for message in sent)))
    rows = list(read_capture(path))
    assert len(rows) == len(sent)
    assert all(isinstance(r, Message) for r in rows)
    engine = Engine(site, [], [])
    source = open_source([path], site, None)
    outcome = replay_arrivals(engine, spec_of(tree), source, 1.0)
    assert outcome.ticks >= 20
    assert source.messages.counts["bad"] == source.messages.counts["ignored"] == 0
    assert engine.state.now_ns == simulation.engine.state.now_ns
    for table in ("gpu", "node", "rack", "cdu"):
        mine, other = engine.state.tables[table], simulation.engine.state.tables[table]
        sent_rows = [signal.row for signal in mine.signals if signal.key not in NOT_SENT]
        assert np.array_equal(mine.value[sent_rows], other.value[sent_rows], equal_nan=True), table
        assert np.array_equal(mine.total, other.total)


def test_two_racks_of_one_local_name_cannot_be_told_apart() -> None:
    tree = big_tree()
    tree["halls"].append({"name": "south", "racks": [{"name": "r1", "profile": "gb200-nvl72"}]})
    with pytest.raises(ConfigError, match="rack r1: expected a name unique"):
        PlantWire(site_of(tree))


def test_points_are_of_the_catalogue_and_each_once() -> None:
    keys = [p.key for p in POINTS]
    assert len(set(keys)) == len(keys)
    for key in keys:
        signal = find_signal(key)
        assert signal is not None
        assert (signal.kind == "state") == (next(p for p in POINTS if p.key == key).unit is None)
        assert signal in TABLES[signal.table].gauges
