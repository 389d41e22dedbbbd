"""A source stops, through real wires: one alarm names it, none is critical, and it ends by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import redfish_service
from tests.support.daemon_process import RunningDaemon
from tests.support.live_publishers import LivePublishers
from tests.support.mosquitto import Mosquitto, mosquitto
from tests.support.publishers import Agent, Building, DcgmExporter, NodeExporter, Room, Telegraf

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]
Find = Callable[[str], Path]
RACKS = "r[1-2]"
TREE = {
    "site": "lab",
    "halls": [{
        "name": "h",
        "racks": [{"name": RACKS, "profile": "gb200-nvl72", "nodes": 2}],
        "cdus": [{"name": "cdu1", "serves": [RACKS], "loop": "fw1"}],
        "feeders": [{"name": f"bus-{s}", "side": s, "budget_w": 60_000, "serves": [RACKS]} for s in "AB"],
        "planes": [{"name": "rail", "links_per_node": 2, "racks": [RACKS]}],
    }],
    "loops": [{"name": "fw1"}],
}  # fmt: skip
LEARNING_S = 30.0
HELD_S = 8.0  # for which one alarm must stay the only one


class Site:
    """A daemon and all that publishes to it: r1/node0 has exporters and a BMC, r2/node0 an agent, others
    Telegraf.
    """

    def __init__(self, broker: Mosquitto, bmc: redfish_service.Service, folder: Path) -> None:
        self.broker, self.bmc = broker, bmc
        room = Room(TREE, start_ns=time.time_ns())
        self.building, self.agent = Building(room), Agent(room, 2)
        self.telegraf = [Telegraf(room, 1, "gpu002", 1, 1), Telegraf(room, 3, "gpu004", 1, 1)]
        pages = {"/dcgm": DcgmExporter(room, 0, 1.0), "/node": NodeExporter(room, 0)}
        publishers = [self.building, self.agent, *self.telegraf]
        self.wires = LivePublishers(room, broker.port, publishers, dict(pages))
        self._pages = pages
        scrapes = [
            {"url": self.wires.url(f"/{name}"), "map": name, "place": "r1/node0", "period_s": 1.0}
            for name in ("dcgm", "node")
        ]
        redfish = {"bmcs": {bmc.host: "lab/h/r1/node0"}, "user": redfish_service.USER, "scheme": "http",
                   "password_file": "password", "period_s": 1.0}  # fmt: skip
        self.daemon = RunningDaemon(folder, broker.port, TREE, scrapes=scrapes, redfish=[redfish])
        names = {"extends": "telegraf", "names": {"gpu002": "lab/h/r1/node1", "gpu004": "lab/h/r2/node1"}}
        (folder / "names.yaml").write_text(yaml.safe_dump(names))
        (folder / "password").write_text(redfish_service.PASSWORD)
        (folder / "password").chmod(0o600)
        self.daemon.config["broker"] |= {"topics": ["telegraf/#"], "maps": {"telegraf/#": "names.yaml"}}
        self.daemon.write_config()

    def exporter(self, on: bool) -> None:
        with self.wires.lock:
            self.wires.pages.clear()
            self.wires.pages.update(self._pages if on else {"/node": self._pages["/node"]})

    def clock(self, on: bool) -> None:
        self.telegraf[0].clock_s = 0 if on else -3600

    def ringing(self) -> list[dict[str, Any]]:
        """Alarms above `info` that ring."""
        rows: list[dict[str, Any]] = self.daemon.get("/api/v1/alarms")["alarms"]
        return [row for row in rows if row["severity"] != "info"]


def _alive(name: str) -> Callable[[Site, bool], None]:
    def turn(site: Site, on: bool) -> None:
        getattr(site, name).alive = on

    return turn


# The source that stops, and its words in the alarm
SOURCES: dict[str, tuple[Callable[[Site, bool], None], str]] = {
    "exporter": (Site.exporter, "No data from exporter http://127.0.0.1:"),
    "BMC": (
        lambda site, on: setattr(site.bmc.faults, "error", 0 if on else 10**6),
        "No data from BMC 127.0.0.1:",
    ),
    "agent": (_alive("agent"), "No data from agent lab/h/r2/node0 since "),
    "gateway": (_alive("building"), "No data from BMS gateway lab since "),
    "publisher": (
        lambda site, on: setattr(site.telegraf[0], "alive", on),
        "No data from topic telegraf/gpu002 since ",
    ),
    "clock": (Site.clock, "The clock of topic telegraf/gpu002 is wrong"),
    "broker": (
        lambda site, on: site.broker.start() if on else site.broker.stop(),
        "No data from broker 127.0.0.1:",
    ),
}
SHORT = ("exporter",)


@contextmanager
def listening(server: Find, folder: Path) -> Iterator[Site]:
    """A site whose daemon knows the cadence of all that publishes."""
    with mosquitto(server, folder) as broker, redfish_service.serving(gpus=4) as services:
        site = Site(broker, services[0], folder / "daemon")
        with site.daemon:
            site.wires.start()
            try:
                site.daemon.start()
                time.sleep(LEARNING_S)
                assert site.ringing() == []
                yield site
            finally:
                site.wires.close()


def stop_one(site: Site, name: str) -> None:
    """It stops, and one alarm says so; it is back, and there is none."""
    turn, title = SOURCES[name]
    turn(site, False)
    daemon = site.daemon
    (first,) = daemon.until(site.ringing, f"an alarm of the {name}")
    until = time.monotonic() + HELD_S
    while time.monotonic() < until:
        (alarm,) = site.ringing()
        assert alarm["id"] == first["id"]
        assert alarm["severity"] == "warning"
        time.sleep(0.5)
    assert alarm["title"].startswith(title)
    turn(site, True)
    known = {first["id"]}

    def is_over() -> bool:
        ids = {alarm["id"] for alarm in site.ringing()}
        assert ids <= known, "nothing rings while it comes back"
        return not ids

    daemon.until(is_over, f"the end of the alarm of the {name}")


def test_what_stops_is_one_alarm_that_names_it(server: Find, tmp_path: Path) -> None:
    with listening(server, tmp_path) as site:
        for name in SHORT:
            stop_one(site, name)


@pytest.mark.storm
def test_whatever_stops_is_one_alarm_that_names_it(server: Find, tmp_path: Path) -> None:
    with listening(server, tmp_path) as site:
        time.sleep(LEARNING_S)
        for name in SOURCES:
            stop_one(site, name)
