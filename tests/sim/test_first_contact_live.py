"""Day one through real wires: Mosquitto, exporters over HTTP, and the daemon in a process of its own.

The same publishers as in test_first_contact.py, in real time and with short periods; `make storm` runs them
for an hour with their usual ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.daemon_process import RunningDaemon
from tests.support.live_publishers import LivePublishers
from tests.support.mosquitto import Mosquitto, mosquitto
from tests.support.publishers import (
    Building,
    DcgmExporter,
    Exporter,
    LoopedCapture,
    NodeExporter,
    Publisher,
    Room,
    Telegraf,
    capture_site,
)

pytestmark = [pytest.mark.slow, pytest.mark.long]
Find = Callable[[str], Path]
RACKS = "r1"
HALL = {
    "name": "h",
    "racks": [{"name": RACKS, "profile": "gb200-nvl72", "nodes": 2}],
    "cdus": [{"name": "cdu1", "serves": [RACKS], "loop": "fw1"}],
    "feeders": [{"name": f"bus-{s}", "side": s, "budget_w": 60_000, "serves": [RACKS]} for s in "AB"],
    "planes": [{"name": "rail", "links_per_node": 2, "racks": [RACKS]}],
}


@dataclass(frozen=True, slots=True)
class Pace:
    """Periods in seconds of what publishes: dcgm-exporter, node_exporter, Telegraf; and the healthy time."""

    dcgm_s: float
    collect_s: float
    node_s: float
    telegraf_s: int
    healthy_s: float

    @property
    def learning_s(self) -> float:
        """Five periods of the slowest publisher, or the capture's turns where there is time for them."""
        slowest_s = max(self.dcgm_s, self.collect_s, self.node_s, float(self.telegraf_s))
        return max(5.0 * slowest_s, 500.0 if self.healthy_s > 1000 else 0.0)


SHORT = Pace(dcgm_s=1.0, collect_s=2.0, node_s=1.0, telegraf_s=1, healthy_s=4.0)
USUAL = Pace(dcgm_s=15.0, collect_s=30.0, node_s=30.0, telegraf_s=60, healthy_s=3600.0)


class Wires(LivePublishers):
    """The publishers of a room of nodes, and the capture beside them."""

    def __init__(self, broker: Mosquitto, capture: Path, pace: Pace) -> None:
        # Without a type the racks of the capture have no GPUs, of which nobody would publish
        tree = capture_site(capture, None, "lab")
        self.tree = {**tree, "halls": [*tree["halls"], HALL], "loops": [{"name": "fw1"}]}
        room = Room({"site": "lab", "halls": [HALL], "loops": [{"name": "fw1"}]}, start_ns=time.time_ns())
        telegraf = Telegraf(room, 1, "gpu002", pace.telegraf_s, min(10, pace.telegraf_s))
        publishers: list[Publisher] = [Building(room), telegraf, LoopedCapture(capture, time.time_ns())]
        pages: dict[str, Exporter] = {
            "/dcgm": DcgmExporter(room, 0, pace.collect_s),
            "/node1": NodeExporter(room, 0, ipmi=True),
            "/node2": NodeExporter(room, 1),
        }
        super().__init__(room, broker.port, publishers, pages)
        self.scrapes = [
            {"url": self.url("/dcgm"), "map": "dcgm", "place": "r1/node0", "period_s": pace.dcgm_s},
            {"url": self.url("/node1"), "map": "node", "place": "r1/node0", "period_s": pace.node_s},
            {"url": self.url("/node2"), "map": "node", "place": "r1/node1", "period_s": pace.node_s},
        ]


@contextmanager
def first_day(
    server: Find, recording: Find, folder: Path, pace: Pace
) -> Iterator[tuple[Wires, RunningDaemon]]:
    """A daemon that hears all publishers."""
    with mosquitto(server, folder) as broker:
        wires = Wires(broker, recording("dsx-bms-capture") / "dsx_exemplar.csv", pace)
        names = {"extends": "telegraf", "names": {"gpu002": "lab/h/r1/node1"}}
        with RunningDaemon(folder / "daemon", broker.port, wires.tree, scrapes=wires.scrapes) as daemon:
            (daemon.folder / "names.yaml").write_text(yaml.safe_dump(names))
            daemon.config["broker"] |= {"topics": ["telegraf/#"], "maps": {"telegraf/#": "names.yaml"}}
            daemon.write_config()
            wires.start()
            try:
                daemon.start()
                yield wires, daemon
            finally:
                wires.close()


def alarms(daemon: RunningDaemon) -> list[tuple[str, str]]:
    """(severity, id) of what is active and above `info`; racks without a profile are told apart."""
    rows = daemon.get("/api/v1/alarms")["alarms"]
    return [
        (row["severity"], row["id"])
        for row in rows
        if row["severity"] != "info" and not row["id"].startswith("unguarded/")
    ]


def messages(daemon: RunningDaemon) -> dict[str, Any]:
    """Counts of messages by outcome."""
    counts: dict[str, Any] = daemon.get("/api/v1/messages")["messages"]
    return counts


def advice(daemon: RunningDaemon) -> list[dict[str, Any]]:
    return daemon.journal("advice")


def quiet(daemon: RunningDaemon, pace: Pace) -> None:
    """After the learning time no alarm and no advice, for as long as it shall be healthy."""
    time.sleep(pace.learning_s)
    known_advice = len(advice(daemon))
    until = time.monotonic() + pace.healthy_s
    while time.monotonic() < until:
        assert alarms(daemon) == []
        time.sleep(1.0)
    if pace is USUAL:  # forecasts of load need minutes before they mean something
        assert len(advice(daemon)) == known_advice


def test_healthy_devices_through_real_wires_and_then_an_xid(
    server: Find, recording: Find, tmp_path: Path
) -> None:
    with first_day(server, recording, tmp_path, SHORT) as (wires, daemon):
        daemon.until(lambda: messages(daemon)["staged"] > 300, what="messages of all publishers")
        quiet(daemon, SHORT)
        counts = messages(daemon)
        assert counts["bad"] == counts["dropped"] == 0
        wires.room.suffer("xid_burst", "gpu", 1, amount=79)
        # A report comes each ten seconds of the room, which passes late on a busy machine
        daemon.until(lambda: [i for _, i in alarms(daemon) if "lab/h/r1/node0" in i], "an alarm of the XID")


@pytest.mark.storm
@pytest.mark.timeout(5000)
def test_an_hour_through_real_wires(server: Find, recording: Find, tmp_path: Path) -> None:
    with first_day(server, recording, tmp_path, USUAL) as (_, daemon):
        quiet(daemon, USUAL)
