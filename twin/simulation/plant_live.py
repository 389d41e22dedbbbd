"""Live plant: a simulated site on a broker in real time, with its BMS, agents and scheduler.

What is published has the wire formats of real devices (`plant_wire`), and every point's metadata says
`simulated`, so that nobody takes it for a building. What is asked is carried out by the plant: requests to
agents as leases with epochs, requests to the BMS on the points that are the integration's. `speed` lets the
physics run faster than the instants on the wire.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from connectors.agents import publish_all
from connectors.dsx import EVERY_S, MAX_VALUE_BYTES, PUB_METADATA, PUB_VALUE
from connectors.mqtt import MqttLink
from twin.catalogue import NS, BadMessage, ConfigError, ConnectorError, find_control
from twin.contracts import CommandBatch
from twin.plant import Observation, Plant, Sensors
from twin.simulation.plant_jobs import PlantJobs
from twin.simulation.plant_orders import Publication, read_request, results_of
from twin.simulation.plant_wire import PlantWire
from twin.site import Site
from twin.telemetry import CommandAcked, Event, Message

ROUND_S = 1.0  # from one round to the next, as agents report
BEHIND_S = 30.0  # of lost time that is made up for in one round; what is beyond never happens
SETTLE_S, RETRY_S = 1.0, 2.0  # after connecting, in which another's metadata shows; between connections
MAX_PENDING = 10_000  # requests, and messages that must not be lost while there is no broker
MAX_COUNTS = 40
SYSTEM = "System"
# The BMS's point whose metadata a request's is made from -> (its name in topics, its signal, the control)
_ASKED = {
    "RackLiquidIsolationStatus": (
        "RackLiquidIsolationRequest", "liquid_isolation_request_state", "rack.liquid_isolation"),
    "RackElectricalIsolationStatus": (
        "RackElectricalIsolationRequest", "electrical_isolation_request_state", "rack.electrical_isolation"),
}  # fmt: skip
_SUPPLY_REQUEST, _SUPPLY_TARGET = "LiquidTemperatureSpRequest", "cdu.supply_temp_target_c"
# The BMS marks a set point that the integration writes by its integration, in the unit of the control
_PRESSURE, _PRESSURE_REQUEST = "LiquidDifferentialPressure", "diff_pressure_request_pa"
_ISOLATE = [{"value": 0, "text": "None"}, {"value": 1, "text": "Isolate"}]


class _Value(msgspec.Struct):
    value: float | None
    timestamp: int
    quality: int


class LivePlant:
    """The site's devices: `receive` their messages, `move` the time on and have what they say.

    Raises ConfigError for a site whose names a BMS cannot distinguish.
    """

    def __init__(
        self, plant: Plant, sensors: Sensors, integration: str = "racktwin", speed: float = 1.0
    ) -> None:
        self.plant, self.sensors, self.integration, self.speed = plant, sensors, integration, speed
        self.site: Site = plant.site
        self.wire = PlantWire(self.site)
        self.counts: Counter[str] = Counter()
        self.strange = ""  # the topic of metadata that is of no simulated site
        self._requests = f"IT/v1/{integration}/Request/"
        self._presence = f"IT/v1/{integration}/Daemon/"
        self._written = f"BMS/v1/{integration}/Value/"
        self._pending: deque[CommandBatch] = deque(maxlen=MAX_PENDING)
        self._asked: dict[tuple[str, int], float] = {}  # of devices set without a lease here
        self._refused: deque[CommandAcked] = deque(maxlen=MAX_PENDING)
        self._jobs = PlantJobs(integration, speed)
        self._newcomer = False
        self._points: dict[str, tuple[str, int]] = {}  # topic of a request's value -> control, entity
        self._metadata = self._describe()
        self._integration_ms: float | None = None
        self._beat_ns: int | None = None
        self._begun_ns, self._number = time.time_ns(), 0

    def subscriptions(self) -> tuple[tuple[str, int], ...]:
        """Topics that the devices subscribe to."""
        own = (self._requests, self._written, self._presence, self._jobs.prefix, PUB_METADATA)
        return tuple((f"{topic}#", 1) for topic in own)

    # Input.

    def receive(self, message: Message, retained: bool = False) -> None:
        """Take a message; what makes no sense is counted. Carried out by the next `move`."""
        topic, now_ns = message.topic, message.t_ns
        try:
            if topic.startswith(self._requests):
                self._take(read_request(message, self.site, self._requests), now_ns)
            elif topic.startswith(self._written):
                self._ask(message)
            elif topic.startswith(self._jobs.prefix):
                self.counts["advice" if self._jobs.receive(message) else "advice not followed"] += 1
            elif topic.startswith(self._presence):
                self._newcomer |= b'"online"' in message.payload
            elif topic.startswith(PUB_METADATA) and retained and _of_a_building(message.payload):
                self.strange = topic
        except BadMessage as error:
            self.counts["not understood"] += 1
            if len(self.counts) < MAX_COUNTS:
                self.counts[f"not understood: {str(error)[:100]}"] += 1

    def _take(self, batch: CommandBatch, now_ns: int) -> None:
        left_ns = min(batch.expires_ns, batch.expires_ns - batch.issued_ns, batch.expires_ns - now_ns)
        if left_ns <= 0 or not np.isfinite(batch.value).all():
            why = "expired by this site's clock" if left_ns <= 0 else "expected finite values"
            self.counts["refused"] += len(batch.index)
            table = batch.control.partition(".")[0]
            for entity, generation, command in zip(
                batch.index.tolist(), batch.generation.tolist(), batch.command.tolist(), strict=True
            ):
                name, number = self.site.name(table, entity), f"{batch.epoch}-{command}"
                self._refused.append(CommandAcked(control=batch.control, name=name, generation=generation,
                                                  command=number, state="failed", detail=why))  # fmt: skip
            return
        self.counts["requests"] += 1
        self._pending.append(dataclasses.replace(
            batch, issued_ns=now_ns, expires_ns=now_ns + round(left_ns * self.speed)
        ))  # fmt: skip

    def _ask(self, message: Message) -> None:
        """A value that the integration wrote on one of its points."""
        key = message.topic[len(self._written) :]
        beat = key.startswith(f"{SYSTEM}/HeartbeatTimestampIntegration/")
        if key.startswith(f"{SYSTEM}/HeartbeatEchoIntegration/"):
            return  # it received our message
        if not beat and message.topic not in self._points:
            raise BadMessage("no point that is written to")
        if len(message.payload) > MAX_VALUE_BYTES:
            raise BadMessage(f"{len(message.payload)} bytes; expected at most {MAX_VALUE_BYTES}")
        try:
            wire = msgspec.json.decode(message.payload, type=_Value)
        except (ValueError, RecursionError) as error:
            raise BadMessage(f"expected value, timestamp and quality: {str(error)[:120]}") from None
        if wire.quality != 1 or wire.value is None or not abs(wire.value) < 2**62:
            return
        if beat:
            self._integration_ms = wire.value
            return
        control, entity = self._points[message.topic]
        spec = find_control(control)
        assert spec is not None
        if not spec.low <= wire.value <= spec.high:
            raise BadMessage(f"{control} = {wire.value:g}: expected {spec.low:g} to {spec.high:g}")
        self.counts["requests to the BMS"] += 1
        self.ask(control, entity, wire.value)

    def ask(self, control: str, entity: int, value: float) -> None:
        """Set a device by the next `move`; the last word counts, and holds until the next."""
        self._asked[control, entity] = value

    # Output.

    def metadata(self) -> list[Publication]:
        """Messages that the BMS retains."""
        return self._metadata

    def move(self, seconds: float, now_ns: int) -> list[Publication]:
        """Let this much time pass up to `now_ns`; everything that devices say of it."""
        plant = self.plant
        batches = list(self._pending)
        self._pending.clear()
        epoch = max([plant.actuators.epoch, *(b.epoch for b in batches)])
        batches += [_of_bms(key, value, epoch, now_ns) for key, value in self._asked.items()]
        self._asked.clear()
        if self._jobs.running:  # the plant still stands where the wire was a round ago
            self._jobs.follow(plant.workload, plant.truth.time_s, now_ns - round(seconds * NS))
        plant.step(batches, seconds * self.speed)
        plant.start_ns = now_ns - round(plant.truth.time_s * NS)
        acks = [*self._refused, *plant.acks()]
        self._refused.clear()
        before: list[Event] = list(self._jobs.running.values())
        events = [self._jobs.note(self._named(event), now_ns) for event in plant.events()]
        if self._newcomer:
            # A repeated event has its old identity, so that who knows it already takes it once.
            events = [*before, *events]
            self._newcomer = False
        seen = self.shown(self.sensors.observe(plant.truth, plant.present, now_ns, events))
        out = [
            Publication(m.topic, m.payload) for m in self.wire.messages(Observation(seen.reports, (), now_ns))
        ]
        messages = self.wire.messages(Observation([], seen.events, now_ns))
        out += [Publication(m.topic, m.payload, True) for m in messages]
        return out + results_of(acks, self.integration, now_ns) + self._beats(now_ns)

    def shown(self, seen: Observation) -> Observation:
        """Return the published part of an observation: all of it."""
        return seen

    def _named(self, event: Event) -> Event:
        self._number += 1
        return msgspec.structs.replace(event, id=f"{self._begun_ns}-{self._number}")

    def _beats(self, now_ns: int) -> list[Publication]:
        """Return the heartbeats: the BMS's own time, and the integration's as the BMS received it."""
        if self._beat_ns is not None and 0 <= now_ns - self._beat_ns < round(EVERY_S * NS):
            return []
        self._beat_ns, now_ms = now_ns, now_ns // 1_000_000
        values = {"HeartbeatTimestampBms": float(now_ms), "HeartbeatEchoBms": self._integration_ms}
        return [
            Publication(f"{PUB_VALUE}{self._system(kind)}", msgspec.json.encode(
                {"value": value, "timestamp": now_ms, "quality": 1}))
            for kind, value in values.items() if value is not None
        ]  # fmt: skip

    def _system(self, kind: str) -> str:
        return f"{SYSTEM}/{kind}/{self.site.file.site}/{self.integration}"

    def _describe(self) -> list[Publication]:
        """Metadata of all points, with those that the integration writes, each marked as simulated."""
        out: list[Publication] = []
        for message in self.wire.metadata(0):
            topic, body = message.topic, msgspec.json.decode(message.payload)
            kind = body["pointType"]
            if kind == _SUPPLY_REQUEST:
                body["integration"] = self.integration
                self._own(topic, "cdu", body["objectId"], _SUPPLY_TARGET)
            out.append(_retained(topic, body))
            if kind == _PRESSURE and body.get("isSetpoint"):
                body |= {"engUnit": "Pa", "integration": self.integration}
                topic = f"{topic.rpartition('/')[0]}/{_PRESSURE_REQUEST}"
                self._own(topic, "cdu", body["objectId"], "cdu.diff_pressure_target_pa")
                out.append(_retained(topic, body))
            if kind in _ASKED:
                name, signal, control = _ASKED[kind]
                body |= {"pointType": name, "stateText": _ISOLATE, "integration": self.integration}
                topic = f"{topic.replace(kind, name).rpartition('/')[0]}/{signal}"
                self._own(topic, "rack", body["rackLocationId"], control)
                out.append(_retained(topic, body))
        for side in ("Bms", "Integration"):
            for what in ("Timestamp", "Echo"):
                kind = f"Heartbeat{what}{side}"
                body = {"objectType": SYSTEM, "pointType": kind, "objectId": self.integration}
                if side == "Integration":
                    body["integration"] = self.integration
                out.append(_retained(PUB_METADATA + self._system(kind), body))
        return out

    def _own(self, topic: str, table: str, name: str, control: str) -> None:
        entity = self.site.entity(table, name)
        assert entity is not None  # PlantWire names them so
        self._points[self._written + topic[len(PUB_METADATA) :]] = (control, entity)


def _of_a_building(payload: bytes) -> bool:
    """Return True for a point of a real building; an empty one clears the retained message."""
    return bool(payload) and b'"simulated":true' not in payload


def _retained(topic: str, body: dict[str, Any]) -> Publication:
    return Publication(topic, msgspec.json.encode(body | {"simulated": True}), True)


def _of_bms(key: tuple[str, int], value: float, epoch: int, now_ns: int) -> CommandBatch:
    """Return a command to the BMS, which holds until the next one: nothing lapses."""
    one, none = np.array([key[1]], np.int32), np.zeros(1, np.int32)
    return CommandBatch(key[0], "bms", epoch, one, none, np.zeros(1, np.int64), np.array([value]), "",
                        now_ns, now_ns, now_ns, final=True)  # fmt: skip


class Broadcast:
    """A live plant on a link. `lost` are messages for which there was no broker, `skipped_s` time that was
    lost because the machine is too slow for the site."""

    def __init__(self, live: LivePlant, link: MqttLink, say: Callable[[str], None]) -> None:
        self.live, self.link, self.say = live, link, say
        self.rounds = self.published = self.lost = 0
        self.skipped_s = 0.0
        self._connections = 0  # connections on which the metadata was published
        self._held: deque[Publication] = deque(maxlen=MAX_PENDING)

    async def run(self) -> None:
        """Until cancelled. Raises ConnectorError if there is no first connection, and ConfigError on a broker
        that carries a real building."""
        holding = asyncio.ensure_future(self._hold())
        moving = asyncio.ensure_future(self._move())
        try:
            done, _ = await asyncio.wait((holding, moving), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (moving, holding):
                task.cancel()
            await asyncio.gather(moving, holding, return_exceptions=True)

    async def _hold(self) -> None:
        link = self.link
        while True:
            try:
                await link.run(lambda message: self.live.receive(message, link.retained), self._missed)
            except ConnectorError as error:
                if not link.counts.connections:
                    raise
                self.say(f"{error}; trying again")
            await asyncio.sleep(RETRY_S)

    def _missed(self, _: str, why: str, count: int) -> None:
        self.live.counts[f"missed: {why[:80]}"] += count

    async def _move(self) -> None:
        while not self.link.connected:
            await asyncio.sleep(0.05)
        await asyncio.sleep(SETTLE_S)
        begun, done, before_ns = time.monotonic(), 0, 0
        while True:
            if self.live.strange:
                raise ConfigError(
                    f"{self.link.where}: carries the metadata of a building ({self.live.strange[:200]}); "
                    "expected a broker of its own for a simulated site, for the two would mix"
                )
            rounds = int((time.monotonic() - begun) / ROUND_S) - done
            if rounds > 0:
                done += rounds
                seconds = min(rounds * ROUND_S, BEHIND_S)
                self.skipped_s += rounds * ROUND_S - seconds
                before_ns = max(time.time_ns(), before_ns + 1)
                await self._publish(self.live.move(seconds, before_ns))
                self.rounds += 1
            await asyncio.sleep(max(0.0, begun + (done + 1) * ROUND_S - time.monotonic()))

    async def _publish(self, messages: list[Publication]) -> None:
        """Values of this moment if there is a broker; what must not be lost waits for one."""
        link, publish = self.link, self.link.publish
        plain = [(m.topic, m.payload) for m in messages if not m.kept]
        self._held.extend(m for m in messages if m.kept)
        if not link.connected:
            self.lost += len(plain)
            return
        if self._connections != link.counts.connections:
            points = [(m.topic, m.payload) for m in self.live.metadata()]
            if await publish_all(publish, points, retain=True):
                self.lost += len(plain)
                return
            self._connections = link.counts.connections
        failed = len(await publish_all(publish, plain, qos=0))
        self.published += len(plain) - failed
        self.lost += failed
        while self._held and link.connected:
            try:
                await publish(self._held[0].topic, self._held[0].payload, 1)
            except ConnectorError:
                return
            self._held.popleft()
            self.published += 1
