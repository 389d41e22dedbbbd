"""Day one: real telemetry of healthy devices raises no alarm, and a real fault is told all the same.

Publishers in the formats of dcgm-exporter, node_exporter, ipmi_exporter, Telegraf and a BMS, and the public
DSX capture in a loop, at a clock of the test's own: an hour takes half a minute.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import yaml

from tests.support.builders import site_of
from tests.support.publishers import (
    AlarmSpan,
    Building,
    DcgmExporter,
    Listener,
    LoopedCapture,
    NodeExporter,
    Room,
    ScrapeTarget,
    Telegraf,
    capture_site,
)
from tests.support.sampled_cases import sampled
from twin.telemetry import Message

pytestmark = pytest.mark.slow
DCGM_S, COLLECT_S, NODE_S = 15, 30, 30  # dcgm-exporter is scraped twice as often as it collects
LEARNING_S = 5 * 60  # five periods of the slowest publisher
HEALTHY_S = 300
RACKS = "r[1-3]"
HALL = {
    "name": "h",
    "racks": [{"name": RACKS, "profile": "gb200-nvl72", "nodes": 2}],
    "cdus": [{"name": "cdu1", "serves": [RACKS], "loop": "fw1"}],
    "feeders": [
        {"name": n, "side": s, "budget_w": 100_000, "serves": [RACKS]} for n, s in (("a", "A"), ("b", "B"))
    ],
    "planes": [{"name": "rail", "links_per_node": 2}],
}
# Nodes of r1 run dcgm-exporter, those of r2 Telegraf each 10 s, those of r3 each 60 s; all run node_exporter.
INTERVAL_S = {2: 10, 3: 10, 4: 60, 5: 60}


class Floor:
    """A room, who publishes from it, and the daemon's part that listens."""

    def __init__(self, folder: Path) -> None:
        self.room = Room({"site": "lab", "halls": [HALL], "loops": [{"name": "fw1"}]})
        site = self.room.site
        names = {f"gpu{n:03}": site.name("node", n) for n in INTERVAL_S}
        mapping = folder / "telegraf-lab.yaml"
        mapping.write_text(yaml.safe_dump({"extends": "telegraf", "names": names}))
        self.listener = Listener(site, {"telegraf/#": str(mapping)}, self.room.now_ns)
        self.agents = {n: Telegraf(self.room, n, f"gpu{n:03}", INTERVAL_S[n]) for n in INTERVAL_S}
        self.exporters: dict[int, ScrapeTarget] = {}
        for n in range(site.sizes["node"]):
            place, scrape = site.name("node", n), self.listener.scrape
            if n not in INTERVAL_S:
                self.exporters[n] = scrape(DcgmExporter(self.room, n, COLLECT_S), "dcgm", place, DCGM_S)
            scrape(NodeExporter(self.room, n, ipmi=n not in INTERVAL_S), "node", place, NODE_S)
        self.gateway = Building(self.room)
        self.listener.subscribe(self.gateway, *self.agents.values())

    def run(self, seconds: int) -> None:
        self.listener.run(self.room, seconds)

    def telegraf(self, on: bool, *nodes: int) -> None:
        for node in nodes:
            self.agents[node].alive = on

    def exporter(self, on: bool, node: int) -> None:
        self.exporters[node].alive = on

    def building(self, on: bool) -> None:
        self.gateway.alive = on

    def broker(self, on: bool) -> None:
        self.building(on)
        self.telegraf(on, *self.agents)

    def clock(self, ahead_s: int, node: int) -> None:
        self.agents[node].clock_s = ahead_s

    def until(self, identities: tuple[str, ...], most_s: int) -> AlarmSpan:
        """The first alarm whose id begins like one of these, within so many seconds from now."""
        since_s = self.listener.time_s + 0.5
        for _ in range(most_s):
            self.run(1)
            spans = self.listener.alarms(since_s)
            if found := [s for s in spans if s.finding.id.startswith(identities)]:
                return found[0]
        raise AssertionError(f"none of {identities} within {most_s} s, but {self.listener.alarms(since_s)}")


@functools.cache
def _settled(folder: Path) -> Floor:
    floor = Floor(folder)
    floor.run(LEARNING_S + HEALTHY_S)
    return floor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("floor")


@pytest.fixture
def floor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Floor:
    """A floor of its own that has been heard for ten minutes."""
    for kind in (msgspec.json.Decoder, msgspec.msgpack.Decoder):  # they hold nothing, and copies share them
        monkeypatch.setitem(copyreg.dispatch_table, kind, repr)
    return copy.deepcopy(_settled(folder))


def assert_quiet(listener: Listener, since_s: float) -> None:
    """No alarm and no advice from then on."""
    assert listener.alarms(since_s) == []
    assert listener.advice(since_s) == []


@pytest.mark.long
def test_healthy_devices_raise_no_alarm_and_get_no_advice(folder: Path) -> None:
    floor = _settled(folder)
    assert_quiet(floor.listener, LEARNING_S)
    assert floor.listener.ingest.counts["bad"] == 0
    assert floor.listener.ingest.counts["dropped"] == 0


@pytest.mark.long
def test_while_it_learns_silence_alone_is_never_critical(folder: Path) -> None:
    alarms = _settled(folder).listener.alarms()
    assert [a for a in alarms if a.finding.severity == "critical"] == []


@pytest.mark.storm
def test_an_hour_of_healthy_devices(tmp_path: Path) -> None:
    floor = Floor(tmp_path)
    floor.run(3600)
    assert_quiet(floor.listener, LEARNING_S)


class Fault(NamedTuple):
    """A fault of the plant, the alarms of which one must tell of it, and the most seconds that it may take:
    the usual delay of that diagnosis and a period of what publishes it."""

    kind: str
    table: str
    entity: int
    alarms: tuple[str, ...]
    most_s: int
    more: dict[str, Any] = {}  # noqa: RUF012


HOT = ("fault/plate_degraded", "fault/tray_blocked", "beyond/gpu.temp_c")
FAULTS = {
    "dcgm: a GPU overheats": Fault("plate_degraded", "gpu", 1, HOT, 240),
    "dcgm: an XID": Fault(
        "xid_burst", "gpu", 2, ("health/", "fault/gpu"), COLLECT_S + DCGM_S + 10, {"amount": 79}
    ),
    "Telegraf at 10 s: a tray overheats": Fault("tray_blocked", "node", 2, HOT, 240),
    "Telegraf at 60 s: a tray overheats": Fault("tray_blocked", "node", 4, HOT, 240),
    "node_exporter: a link is down": Fault("link_down", "link", 3, ("fault/link_down",), NODE_S + 10),
    "BMS: a pump stops": Fault("pump_trip", "cdu", 0, ("fault/pump_trip",), 10),
    "BMS: a rack leaks": Fault("leak", "rack", 1, ("fault/leak",), 30),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_real_fault_is_told(floor: Floor, name: str) -> None:
    fault = FAULTS[name]
    floor.room.suffer(fault.kind, fault.table, fault.entity, **fault.more)
    span = floor.until(fault.alarms, fault.most_s)
    assert "may be" not in span.finding.title
    assert any(floor.room.site.name(fault.table, fault.entity) in name for name in span.finding.entities)


class Loss(NamedTuple):
    """A loss of publications (`lose(floor, False)`), the place that the one alarm names, and the duration."""

    lose: Callable[[Floor, bool], None]
    place: str
    lasts_s: int = 100


LOSSES = {
    "the only publisher of a rack": Loss(lambda floor, on: floor.telegraf(on, 2, 3), "lab/h/r2"),
    "one agent": Loss(lambda floor, on: floor.telegraf(on, 2), "lab/h/r2/node0"),
    "the exporter": Loss(lambda floor, on: floor.exporter(on, 0), "lab/h/r1/node0", 180),
    "the gateway of the BMS": Loss(lambda floor, on: floor.building(on), "lab/h"),
    "the broker": Loss(lambda floor, on: floor.broker(on), "lab", 280),
    "the clock of one node, an hour late": Loss(lambda floor, on: floor.clock(-3600 * (not on), 2), ""),
    "the clock of one node, an hour ahead": Loss(lambda floor, on: floor.clock(3600 * (not on), 2), ""),
}
BACK_S = 90


HERE = ("the only publisher of a rack", "the exporter", "the broker", "the clock of one node, an hour late")


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(LOSSES, *HERE))
def test_first_contact_losses(floor: Floor, name: str) -> None:
    """Exactly one alarm, which names what is lost, and none critical; all is over when it comes back."""
    loss, listener = LOSSES[name], floor.listener
    begun_s = listener.time_s
    loss.lose(floor, False)
    floor.run(loss.lasts_s)
    alarms = listener.alarms(begun_s + 0.5)
    assert [a for a in alarms if a.finding.severity == "critical"] == []
    clocks = listener.ingest.ledger.wrong_clocks(listener.now_ns)
    if loss.place:
        assert len(alarms) == 1, alarms
        named = {*alarms[0].finding.entities, alarms[0].finding.id.partition("/")[2]}
        named |= {*re.findall(r"lab[\w/]*", alarms[0].finding.title)}
        assert loss.place in named, alarms
    else:  # an alarm of the shell, see test_source_clock.py
        assert alarms == []
        assert [text.partition(":")[0] for text in clocks] == ["topic telegraf/gpu002"]
    loss.lose(floor, True)
    floor.run(BACK_S)
    assert listener.alarms(listener.time_s) == []
    assert listener.ingest.ledger.wrong_clocks(listener.now_ns) == []


# The capture: a BMS that publishes on change, and everything once in 99 s.

TURN_S = 100
Capture = Callable[[str], Path]


def listening(path: Path, profile: str | None) -> tuple[Listener, LoopedCapture]:
    site = site_of(capture_site(path, profile))
    listener, capture = Listener(site), LoopedCapture(path)
    listener.subscribe(capture)
    return listener, capture


def changed(topic_part: str, value: float) -> Callable[[Message], Message]:
    """Values of topics that contain this are another one."""

    def edit(message: Message) -> Message:
        if "/PUB/Value/" not in message.topic or topic_part not in message.topic:
            return message
        body = {**msgspec.json.decode(message.payload), "value": value}
        return Message(message.t_ns, message.topic, msgspec.json.encode(body))

    return edit


@pytest.mark.long
def test_the_capture_in_a_loop_raises_no_alarm_and_then_a_real_fault_is_told(recording: Capture) -> None:
    listener, capture = listening(recording("dsx-bms-capture") / "dsx_exemplar.csv", "gb200-nvl72")
    listener.run(None, 7 * TURN_S)
    assert_quiet(listener, 5 * TURN_S)
    capture.edits = [changed("rack03/leakStatus/state", 1), changed("pump/pump1/speed", 0)]
    begun_s = listener.time_s
    listener.run(None, TURN_S + 30)
    alarms = listener.alarms(begun_s + 1)
    for identity in ("fault/leak", "fault/pump_trip"):
        assert [a for a in alarms if a.finding.id.startswith(identity)], alarms


@pytest.mark.storm
@pytest.mark.parametrize("profile", [None, "gb200-nvl72"])
def test_an_hour_of_the_capture(recording: Capture, profile: str | None) -> None:
    listener, _ = listening(recording("dsx-bms-capture") / "dsx_exemplar.csv", profile)
    listener.run(None, 3600)
    # Without a profile racks have no limits, and that is told until somebody gives them one
    known = {"unguarded/rack"} if profile is None else set()
    assert {s.finding.id for s in listener.alarms(5 * TURN_S)} <= known
    assert listener.advice(5 * TURN_S) == []
