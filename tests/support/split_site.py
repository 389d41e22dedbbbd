"""A split site on real servers: one simulated plant, the daemons of its parts and of their hub, and beside
them a daemon that mirrors the whole site and commands nothing.

with split_site(server, tmp_path, tree) as site:
    site.parts["part-1"].get("/api/v1/state/gpu?..."); site.hub; site.whole
    site.plant.lose("main-b"); site.plant.rest(); site.plant.round()
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from connectors.mqtt import LinkSettings, MqttLink
from tests.support.daemon_process import RunningDaemon
from tests.support.mosquitto import free_port, mosquitto
from tests.support.nats_servers import NatsFleet, nats_fleet
from twin.catalogue import F64
from twin.cli.main import main
from twin.config import load_site
from twin.plant import Campaign, Plant, Script, Sensors, scenario_of
from twin.simulation import Broadcast, LivePlant
from twin.simulation.plant_orders import Publication, read_request
from twin.site import Site
from twin.telemetry import Message

SETTINGS = {"failover": False, "silent_s": 6}  # the parts may use both feeds, and give way when one is lost
IDLE_PU, BUSY_PU = 0.15, 0.95  # activity of all GPUs at first, and once they are busy
IDLE = {"name": "idle", "hours": 1, "seed": 1, "workload": {"constant_pu": IDLE_PU}}


class SplitPlant(LivePlant):
    """The devices of a whole site, whose agents obey the daemon of their own part.

    Each agent remembers the epoch of the daemon that it obeys; the plant has one for all, so that epochs are
    taken off requests here and put on answers again. `feeder_w`: the true power of each feeder, by second.
    """

    def __init__(self, site: Site, parts: dict[str, Site]) -> None:
        super().__init__(Plant(site, 1, scenario_of(IDLE, site)), Sensors(site, 1), "whole")
        self._part_of = {rack: name for name, part in parts.items() for rack in part.names["rack"]}
        self._epoch = dict.fromkeys(parts, 0)
        self.feeder_w: list[F64] = []
        self._rounds: int | None = None  # left to go; None for any number
        self._busy = threading.Event()

    def subscriptions(self) -> tuple[tuple[str, int], ...]:
        """Requests of all parts beside what the devices of one daemon hear."""
        return (*super().subscriptions(), *((f"IT/v1/{part}/Request/#", 1) for part in self._epoch))

    def receive(self, message: Message, retained: bool = False) -> None:
        """Take a message; a request by the daemon of another part, or of an older epoch, is refused."""
        part = message.topic.split("/")[2]
        if part not in self._epoch:
            return super().receive(message, retained)
        batch = read_request(message, self.site, f"IT/v1/{part}/Request/")
        assert {self._part_of[self._rack_of(batch.control, i)] for i in batch.index.tolist()} == {part}
        if batch.epoch >= self._epoch[part]:
            self._epoch[part] = batch.epoch
            self._take(dataclasses.replace(batch, epoch=0), message.t_ns)
        return None

    def _rack_of(self, control: str, entity: int) -> str:
        name = self.site.name(control.partition(".")[0], entity)
        return "/".join(name.split("/")[:3])

    def move(self, seconds: float, now_ns: int) -> list[Publication]:
        """Let time pass, or nothing happen while it rests."""
        if self._rounds == 0:
            return []
        self._rounds = None if self._rounds is None else self._rounds - 1
        if self._busy.is_set():
            self._busy.clear()
            truth = self.plant.truth
            for column in (truth.gpu_sm_pu, truth.gpu_tensor_pu, truth.gpu_dram_pu):
                column *= BUSY_PU / IDLE_PU
        said = super().move(seconds, now_ns)
        self.feeder_w.append(self.plant.truth.feeder_power_w.copy())
        return [self._of_part(one) for one in said]

    def _of_part(self, said: Publication) -> Publication:
        prefix = f"IT/v1/{self.integration}/Result/"
        if not said.topic.startswith(prefix):
            return said
        part = self._part_of["/".join(said.topic[len(prefix) :].split("/")[1:4])]
        body = msgspec.json.decode(said.payload) | {"epoch": self._epoch[part]}
        return said._replace(
            topic=said.topic.replace(prefix, f"IT/v1/{part}/Result/"), payload=msgspec.json.encode(body)
        )

    def rest(self) -> None:
        """Say nothing any more."""
        self._rounds = 0

    def go_on(self) -> None:
        """Speak each second again."""
        self._rounds = None

    def round(self) -> None:
        """Speak once more, and rest."""
        self._rounds = 1

    def work(self) -> None:
        """Let all GPUs be busy from the next second on."""
        self._busy.set()

    def lose(self, feeder: str) -> None:
        """Take the voltage off a feeder from now on."""
        at = self.site.entity("feeder", feeder)
        assert at is not None
        script = Script("feed_lost", "feeder", at, self.plant.truth.time_s)
        self.plant.campaign = Campaign(self.site, [script], 1)


@dataclass
class SplitSite:
    """The plant and the daemons of a split site."""

    plant: SplitPlant
    parts: dict[str, RunningDaemon]
    hub: RunningDaemon
    whole: RunningDaemon

    @property
    def daemons(self) -> tuple[RunningDaemon, ...]:
        """Those of the parts and of the hub."""
        return *self.parts.values(), self.hub


@contextmanager
def split_site(server: Callable[..., Path], tmp_path: Path, tree: dict[str, Any]) -> Iterator[SplitSite]:
    """All processes of a site that `racktwin site split` halves, once each daemon has ticked."""
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(tree))
    out = tmp_path / "parts"
    assert main(["site", "split", str(tmp_path / "site.yaml"), "--parts", "2", "--out", str(out)]) == 0
    trees = {path.stem: yaml.safe_load(path.read_text()) for path in out.glob("*.yaml")}
    names = [name for name in sorted(trees) if name != "hub"]
    trees["hub"]["policies"] = {"hall_budgets": {"authority": "act", "settings": SETTINGS}}
    with ExitStack() as stack:
        apart = free_port()  # for the daemon of the whole site, which stands for no election with the hub
        broker = stack.enter_context(mosquitto(server, tmp_path, (f"listener {apart} 127.0.0.1",)))
        fleet = stack.enter_context(nats_fleet(server, tmp_path, tuple(names), as_parts))
        settings = {name: _section(tmp_path, fleet, name) for name in trees}

        def daemon(name: str, site: dict[str, Any], port: int, **more: Any) -> RunningDaemon:
            link = {"host": "127.0.0.1", "port": port, "client_id": name, "integration": name}
            made = RunningDaemon(tmp_path / name, link, site, tick_s=0.5, **more)
            made.start(wait=False)
            return stack.enter_context(made)

        whole = daemon("whole", {k: v for k, v in tree.items() if k != "policies"}, apart)
        made = {name: daemon(name, trees[name], broker.port, fleet=settings[name]) for name in trees}
        sites = {name: load_site(out / f"{name}.yaml")[1] for name in names}
        plant = SplitPlant(load_site(tmp_path / "site.yaml")[1], sites)
        for one in (whole, *made.values()):
            one.until(one.is_up, what="the daemon's first tick")
        stack.enter_context(speaking(plant, broker.port))
        yield SplitSite(plant, {name: made[name] for name in names}, made["hub"], whole)


def as_parts(name: str, text: str) -> str:
    """The configuration of a server with parts in place of halls."""
    for letter, part in (("a", "part-1"), ("b", "part-2")):
        text = text.replace(f"hall-{letter}", part).replace(f"HALL-{letter.upper()}", part.upper())
    return text


def _section(tmp_path: Path, fleet: NatsFleet, name: str) -> dict[str, Any]:
    is_hub = name == "hub"
    login = fleet.daemon() if is_hub else fleet.hall(name)
    folder = tmp_path / name
    folder.mkdir()
    (folder / "password").write_text(f"{login.password}\n")
    (folder / "password").chmod(0o600)
    part = {} if is_hub else {"hall": name, "feeder": "grant", "every_s": 0.5}
    return {"servers": list(login.servers), "username": login.username, "password_file": "password"} | part


@contextmanager
def speaking(plant: SplitPlant, port: int) -> Iterator[None]:
    """The plant on its broker, from a thread of its own."""
    link = MqttLink(LinkSettings("127.0.0.1", port, "plant", persistent=False), plant.subscriptions())
    cast, loop, failures = Broadcast(plant, link, print), asyncio.new_event_loop(), list[BaseException]()

    def run() -> None:
        try:
            loop.run_until_complete(running)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            failures.append(error)

    running = loop.create_task(cast.run())
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(running.cancel)
        thread.join(20)
        loop.close()
    if failures:
        raise failures[0]
