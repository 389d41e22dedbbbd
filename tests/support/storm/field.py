"""Field of a storm: a plant of one rack with its BMS, and the real agents of its nodes on its devices.

Loads and coolant come and go by seed, so that policies have something to do.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from racktwin_agent.clock import Instant, current_instant
from racktwin_agent.devices import GPU_CAP, GPU_LOCK, NODE_CAP, DeviceError, Key, Sample
from racktwin_agent.leases import RUNNING
from racktwin_agent.node import Node
from racktwin_agent.store import MemoryStore
from racktwin_agent.triggers import Watch
from racktwin_agent.wire import Refused

from tests.support.storm.broker import Client, SimulatedBroker
from tests.support.storm.hosts import LIFE, Host, Life, wall_ns
from tests.support.storm.loop import SimulatedLoop
from twin.catalogue import F64, NS
from twin.config import spec_of
from twin.plant import Campaign, Plant, Script, Sensors
from twin.simulation.plant_live import LivePlant
from twin.site import Site, SiteSpec, build_site
from twin.telemetry import Message

LOW_W, HIGH_W = 200.0, 1200.0
LOCK_MHZ = (345.0, 1980.0)
FEED_W = 17_600.0  # less than the rack draws at full load from one feed
SHARES = {"site_share": 1.0, "rack_share": 1.0, "domain_share": 1.0, "job_share": 1.0}
ACTING = (
    "thermal_guard", "leak_guard", "operator", "checkpoint", "cooling_setpoint", "power_guard",
)  # fmt: skip


def site_tree(nodes: int = 2) -> dict[str, Any]:
    """One rack under two feeds, every policy at `act`."""
    return {
        "site": "storm",
        "halls": [
            {
                "name": "h1",
                "racks": [{"name": "r1", "profile": "gb200-nvl72", "nodes": nodes}],
                "cdus": [{"name": "cdu1", "serves": ["r1"]}],
                "feeders": [
                    {"name": "a", "side": "A", "budget_w": FEED_W, "serves": ["r1"]},
                    {"name": "b", "side": "B", "budget_w": FEED_W, "serves": ["r1"]},
                ],
            }
        ],
        "max_jobs": 4,
        "controls": {
            "gpu.power_cap_w": {"blast_radius": 4, "safe": 220.0},
            "node.service_level": {"blast_radius": 1},
        },
        "policies": {p: {"authority": "act"} for p in ACTING}
        | {
            "replacement": {"authority": "act", "settings": SHARES},
            "power_cap": {"authority": "act", "settings": {"margin_pu": 0.0}},
        },
    }


def storm_spec() -> SiteSpec:
    """The site of every storm."""
    return spec_of(site_tree(), None, "storm")


class FieldPlant(LivePlant):
    """The BMS and what is measured; requests to agents are for the agents."""

    def receive(self, message: Message, retained: bool = False) -> None:
        """See LivePlant."""
        if not message.topic.startswith(self._requests):
            super().receive(message, retained)


class PlantDevices:
    """See `racktwin_agent.devices.Devices`: settings of a node that the plant takes up at its next step."""

    def __init__(self, live: FieldPlant, node: int) -> None:
        site = live.site
        self._live, self._node = live, node
        self._first = int(site.gpu_start_of_node[node])
        self.gpus = int(site.gpu_start_of_node[node + 1]) - self._first
        self.values: dict[Key, float] = {Key(GPU_CAP, f"gpu{i}"): HIGH_W for i in range(self.gpus)}
        self.values |= {Key(GPU_LOCK, f"gpu{i}"): LOCK_MHZ[1] for i in range(self.gpus)}
        self.values[Key(NODE_CAP, "")] = HIGH_W * self.gpus
        self.refuses, self.refused = False, set[Key]()  # what was refused and not set since

    def sample(self, t_ns: int) -> Sample:
        """The plant publishes what is measured."""
        return Sample(t_ns, {})

    def limits(self, key: Key) -> tuple[float, float] | None:
        """See Devices."""
        if key == Key(NODE_CAP, ""):
            return LOW_W * self.gpus, HIGH_W * self.gpus
        if key not in self.values:
            return None
        return LOCK_MHZ if key.control == GPU_LOCK else (LOW_W, HIGH_W)

    def get(self, key: Key) -> float | None:
        """See Devices."""
        return self.values.get(key)

    def set(self, key: Key, value: float) -> None:
        """See Devices."""
        if self.refuses or key not in self.values:
            self.refused.add(key)
            raise DeviceError(f"{key.name or 'the node'} refuses")
        self.refused.discard(key)
        self.values[key] = value
        entity = self._node if key.control == NODE_CAP else self._first + int(key.name[3:])
        self._live.ask(key.control, entity, value)

    def nvlinks(self) -> list[Any]:
        """None are simulated."""
        return []

    def serials(self) -> list[str | None]:
        """See Devices."""
        return [None] * self.gpus

    def gpu_at(self, bus_id: str) -> int | None:
        """See Devices."""
        return None

    def close(self) -> None:
        """See Devices."""


class Field:
    """Runs the plant in a life of its own, and the agents in another, which may be killed."""

    def __init__(
        self, loop: SimulatedLoop, broker: SimulatedBroker, spec: SiteSpec, seed: int, round_s: float
    ) -> None:
        self.loop, self.broker, self.round_s = loop, broker, round_s
        self.site: Site = build_site(spec)
        self.dice = random.Random(seed ^ 0xF1E1D)
        self.plant_life = Life(Host("plant", loop))
        self.agent_host = Host("agents", loop, drift=self.dice.uniform(-2e-5, 2e-5))
        self.agent_life = Life(self.agent_host)
        self.nodes: dict[str, Node] = {}
        LIFE.set(self.plant_life)
        self.plant = Plant(self.site, seed)
        self.live = FieldPlant(self.plant, Sensors(self.site, seed))
        LIFE.set(None)
        self.devices = [PlantDevices(self.live, n) for n in range(self.site.sizes["node"])]
        self._stores = [MemoryStore() for _ in self.devices]
        self.load_pu = 0.5
        self.accepted: Callable[..., None] = lambda *_: None
        self.plant.campaign = Campaign(self.site, (), seed)

    def start(self) -> None:
        """Begin both."""
        self._run(self.plant_life, self._move())
        self.start_agents()

    def start_agents(self) -> None:
        """A new process of the agents, on what the one before had stored."""
        self.nodes = {}
        self.agent_life = Life(self.agent_host, frozen_until_s=self.loop.time())
        self._run(self.agent_life, self._agents())

    def _run(self, life: Life, work: Any) -> None:
        context = contextvars.copy_context()
        context.run(LIFE.set, life)
        self.loop.create_task(work, context=context)

    # -- the plant

    async def _move(self) -> None:
        client = Client(self.broker, "plant", self._hear)
        filters = [t for t, _ in self.live.subscriptions() if "Request/" not in t]
        while True:
            await asyncio.sleep(self.round_s)
            if client.is_over:
                if not client.try_connect(filters):
                    continue
                for point in self.live.metadata():
                    client.publish(point.topic, point.payload, 1, True)
            self._work()
            for out in self.live.move(self.round_s, wall_ns()):
                client.publish(out.topic, out.payload, 1 if out.kept else 0)

    def _hear(self, topic: str, payload: bytes) -> None:
        self.live.receive(Message(wall_ns(), topic, payload))

    def _work(self) -> None:
        """Loads of jobs come and go; now and then all of them at once."""
        truth, dice = self.plant.truth, self.dice
        if dice.random() < self.round_s / 300.0:
            self.load_pu = dice.choice((0.05, 0.4, 0.8, 1.0))
        if dice.random() < self.round_s / 30.0:
            n = len(truth.gpu_sm_pu)
            shares = np.array([min(1.0, max(0.0, dice.gauss(self.load_pu, 0.1))) for _ in range(n)])
            truth.gpu_sm_pu[:] = shares
            truth.gpu_tensor_pu[:], truth.gpu_dram_pu[:] = 0.7 * shares, 0.6 * shares

    def strike(self, kind: str, table: str, entity: int, seconds: float) -> None:
        """A fault of the plant, from now on for so long."""
        assert self.plant.campaign is not None
        now_s = self.plant.truth.time_s
        script = Script(kind, table, entity, now_s + 1.0, now_s + 1.0 + seconds)
        lasting = [s for s in self.plant.campaign.scripts if s.end_s is not None and s.end_s > now_s]
        self.plant.campaign = Campaign(self.site, [*lasting, script])

    def caps_w(self) -> F64:
        """Limits that the GPUs have, in the order of the site."""
        return np.array([d.values[Key(GPU_CAP, f"gpu{i}")] for d in self.devices for i in range(d.gpus)])

    # -- the agents

    async def _agents(self) -> None:
        at = current_instant()
        self.nodes = {}
        client = Client(self.broker, "agents", self._take)
        self._client = client
        for number, device in enumerate(self.devices):
            watch, path = Watch(60.0), self.site.name("node", number)
            watch.connected(False, at)
            node = Node(path, device, self._stores[number], watch, "boot-1")
            node.resume(at)
            self._overhear(path, node)
            self.nodes[path] = node
        topics = sorted({t for node in self.nodes.values() for t in node.topics()})
        first = next(iter(self.nodes.values()))
        while True:
            at = current_instant()
            if client.is_over and client.try_connect(topics):
                out = first.status("offline", at)
                client.will = (out.topic, out.payload)  # type: ignore[assignment]
                for node in self.nodes.values():
                    self._say([node.status("online", at)])
            for node in self.nodes.values():
                node.watch.connected(not client.is_over, at)
                self._say(node.step(at))
            ends = [end for node in self.nodes.values() if (end := node.next_ns()) is not None]
            left_s = (min(ends, default=at.boot_ns + 5 * NS) - at.boot_ns) / NS
            await asyncio.sleep(min(self.round_s, max(0.0, left_s)))

    def _overhear(self, path: str, node: Node) -> None:
        take = node.book.take

        def overheard(request: Any, orders: Any, at: Instant) -> Any:
            answers = take(request, orders, at)
            self.accepted(path, request, answers, at)
            return answers

        node.book.take = overheard  # type: ignore[method-assign]

    def _take(self, topic: str, payload: bytes) -> None:
        at = current_instant()
        for node in self.nodes.values():
            try:
                self._say(node.take(topic, payload, at))
            except Refused:
                continue

    def _say(self, outs: list[Any]) -> None:
        for out in outs:
            self._client.publish(out.topic, out.payload, out.qos, out.retain)

    def running(self) -> list[tuple[str, Key, Any]]:
        """(node, setting, lease) of all leases that run."""
        return [
            (path, key, lease)
            for path, node in self.nodes.items()
            for key, lease in node.book.leases.items()
            if lease.phase == RUNNING
        ]

    def agent_instant(self) -> Instant:
        """The present on the agents' host."""
        return Instant(self.agent_host.wall_ns(), self.agent_host.boot_ns())
