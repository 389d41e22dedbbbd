"""Simulated broker: sessions, retained messages and wills as in MQTT 3.1.1, over links that fail by seed.

`Connection` stands below `connectors.mqtt.MqttLink` in place of the client library and its socket; `Client`
is the end of a simulated device. What travels is late, lost (QoS 0), doubled (QoS 1) or out of order; a host
may be cut off, and a connection be reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from connectors.mqtt.lane import Lane
from connectors.mqtt.link import ANSWER_S, LOST, SILENT, LinkCounts, LinkSettings, Presence
from connectors.mqtt.source import matcher
from connectors.mqtt.wire import PARCEL_BYTES, MessageBacklog, Parcel
from tests.support.storm.hosts import LIFE, Life, wall_ns
from tests.support.storm.loop import SimulatedLoop

CONNECT_S = 2.5
MAX_QUEUED = 5000  # messages that wait for a session that is away
GIVES_UP_S = (15.0, 22.5)  # until either end of a silent connection gives it up: keep-alive, and half of it


@dataclass
class Weather:
    """Chances per message, and seconds: of a delay, and of one that is far longer."""

    delay_s: float = 0.003
    lost: float = 0.0
    doubled: float = 0.0
    shuffled: float = 0.0  # overtaken by later ones
    slow_s: float = 0.5  # at most, of what is shuffled


@dataclass
class Sent:
    """A message on its way to one session."""

    topic: str
    payload: bytes
    qos: int
    retained: bool
    mid: int = 0


@dataclass
class Session:
    """Session of a client at the broker."""

    client_id: str
    filters: dict[str, Callable[[str], bool]] = field(default_factory=dict)
    queued: list[Sent] = field(default_factory=list)
    unacknowledged: dict[int, Sent] = field(default_factory=dict)
    end: Any = None  # its Client or Connection, while it is connected
    last_s: float = 0.0
    mid: int = 0


class SimulatedBroker:
    """One broker of all hosts. `cut` are the hosts that do not reach it; `heard` is told of each message."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.loop, self.dice, self.weather = loop, loop.dice, Weather()
        self.sessions: dict[str, Session] = {}
        self.retained: dict[str, Sent] = {}
        self.cut: set[str] = set()
        self.is_down = False
        self.heard: list[Callable[[str, bytes], None]] = []
        self.delivered = 0

    def reaches(self, host: str) -> bool:
        """True if this host and the broker hear each other."""
        return not self.is_down and host not in self.cut

    # -- the broker's side of a connection

    def connect(self, end: Any, client_id: str, persistent: bool) -> None:
        """A client is here; another one of the same name is put off."""
        session = self.sessions.get(client_id)
        if session is not None and session.end is not None:
            self.disconnect(session.end, with_will=True)
        if session is None or not persistent:
            session = self.sessions[client_id] = Session(client_id)
        session.end = end
        again = [*session.unacknowledged.values(), *session.queued]
        session.unacknowledged, session.queued = {}, []
        for message in again:
            self._send(session, message)

    def disconnect(self, end: Any, with_will: bool) -> None:
        """A connection is over; with its will unless the client said goodbye."""
        session = self.sessions.get(end.client_id)
        if session is None or session.end is not end:
            return
        session.end = None
        end.lost()
        if with_will and end.will is not None:
            topic, payload = end.will
            self.publish(topic, payload, 1, True)

    def subscribe(self, client_id: str, topic: str) -> None:
        """Also brings what is retained."""
        session = self.sessions[client_id]
        session.filters[topic] = fits = matcher(topic)
        for message in list(self.retained.values()):
            if fits(message.topic):
                self._send(session, Sent(message.topic, message.payload, message.qos, True))

    def publish(self, topic: str, payload: bytes, qos: int, retain: bool) -> None:
        """A message has arrived."""
        for watch in self.heard:
            watch(topic, payload)
        if retain:
            if payload:
                self.retained[topic] = Sent(topic, payload, qos, True)
            else:
                self.retained.pop(topic, None)
        for session in self.sessions.values():
            if any(fits(topic) for fits in session.filters.values()):
                self._send(session, Sent(topic, payload, qos, False))

    def acknowledge(self, client_id: str, mids: list[int]) -> None:
        """The client has these."""
        session = self.sessions.get(client_id)
        for mid in mids:
            if session is not None:
                session.unacknowledged.pop(mid, None)

    def _send(self, session: Session, message: Sent) -> None:
        end = session.end
        if message.qos:
            if end is None:
                session.queued.append(message)
                del session.queued[:-MAX_QUEUED]
                return
            session.mid = session.mid % 65_535 + 1
            message.mid = session.mid
            session.unacknowledged[message.mid] = message
        elif end is None or self.dice.random() < self.weather.lost:
            return
        times = 2 if message.qos and self.dice.random() < self.weather.doubled else 1
        for _ in range(times):
            when = self.loop.time() + self.delay_s()
            if self.dice.random() < self.weather.shuffled:
                when += self.dice.random() * self.weather.slow_s
            else:
                when = session.last_s = max(when, session.last_s)
            self.loop.at(when, self._arrive, end, message, context=end.context)

    def _arrive(self, end: Any, message: Sent) -> None:
        if self.reaches(end.host) and not end.is_over:
            self.delivered += 1
            end.deliver(message)

    def delay_s(self) -> float:
        """Of one way."""
        return self.dice.expovariate(1 / self.weather.delay_s)

    # -- trouble

    def reset(self, client_id: str) -> None:
        """A connection breaks; either end sees it at once."""
        session = self.sessions.get(client_id)
        if session is not None and session.end is not None:
            self.disconnect(session.end, with_will=True)

    def cut_off(self, host: str) -> None:
        """From now on nothing goes to or from this host; after a while either end gives up."""
        self.cut.add(host)
        for session in self.sessions.values():
            if session.end is not None and session.end.host == host:
                self._give_up_on(session.end, lambda: host in self.cut)

    def fail(self) -> None:
        """The broker's process ends; its sessions are on its disk."""
        self.is_down = True
        for session in self.sessions.values():
            if session.end is not None:
                self.disconnect(session.end, with_will=False)

    def _give_up_on(self, end: Any, still: Callable[[], bool]) -> None:
        for theirs in (False, True):
            after_s = self.dice.uniform(*GIVES_UP_S)

            def give_up(theirs: bool = theirs) -> None:
                if not still() or (end.is_over and not theirs):
                    return
                if theirs:
                    self.disconnect(end, with_will=True)
                else:
                    end.silent()

            self.loop.at(self.loop.time() + after_s, give_up)


class Client:
    """A device's end: `take(topic, payload)` is called with each message, inside its own life."""

    def __init__(self, broker: SimulatedBroker, client_id: str, take: Callable[[str, bytes], None]) -> None:
        life = LIFE.get()
        assert life is not None
        self.broker, self.client_id, self.host = broker, client_id, life.host.name
        self.take, self.context, self.will = take, contextvars.copy_context(), None
        self.is_over = True
        self._last_s = 0.0

    def try_connect(self, filters: list[str]) -> bool:
        """Connect where the broker can be reached; its session is kept."""
        if not self.broker.reaches(self.host):
            return False
        self.is_over = False
        self.broker.connect(self, self.client_id, True)
        for topic in filters:
            self.broker.subscribe(self.client_id, topic)
        return True

    def publish(self, topic: str, payload: bytes, qos: int = 0, retain: bool = False) -> None:
        """Send it; QoS 0 may be lost, and the rest too where the connection breaks."""
        broker = self.broker
        if self.is_over or (qos == 0 and broker.dice.random() < broker.weather.lost):
            return
        when = self._last_s = max(self._last_s, broker.loop.time() + broker.delay_s())
        broker.loop.at(when, self._come_through, topic, payload, qos, retain)

    def _come_through(self, topic: str, payload: bytes, qos: int, retain: bool) -> None:
        if not self.is_over and self.broker.reaches(self.host):
            self.broker.publish(topic, payload, qos, retain)

    def deliver(self, message: Sent) -> None:
        """The broker's word, in this life."""
        self.take(message.topic, message.payload)
        self.broker.acknowledge(self.client_id, [message.mid])

    def lost(self) -> None:
        """The connection is over."""
        self.is_over = True

    silent = lost


@contextlib.contextmanager
def _only_while(allowed: Callable[[], bool]) -> Iterator[None]:
    """See `connectors.mqtt.link.Tap`: here a publication leaves within the turn in which it is begun."""
    if not allowed():
        raise OSError("another daemon leads now")
    yield


class Connection:
    """See `connectors.mqtt.link._Connection`."""

    broker: SimulatedBroker  # of the storm
    leaves: Callable[[Life, str, bytes], None]  # told of each request as it leaves

    def __init__(
        self, settings: LinkSettings, presence: Presence | None, counts: LinkCounts, lane: Lane | None
    ) -> None:
        life = LIFE.get()
        assert life is not None
        self.life, self.host, self.client_id = life, life.host.name, settings.client_id
        self.context, self.counts = contextvars.copy_context(), counts
        self.will = None if presence is None else (presence.topic, presence.offline)
        self.down: asyncio.Future[str] = self.broker.loop.create_future()
        backlog = MessageBacklog(settings.queue_messages, settings.queue_bytes, lane)
        arrived = asyncio.Event()
        self.tap = SimpleNamespace(backlog=backlog, arrived=arrived, dropped=0, only_while=_only_while)
        self.is_over = True
        self._waiting: set[asyncio.Future[None]] = set()

    async def open(self) -> None:
        """Connect. Raises OSError."""
        await asyncio.sleep(self.broker.delay_s())
        if not self.broker.reaches(self.host):
            await asyncio.sleep(CONNECT_S)
            raise OSError("timed out")
        self.is_over = False
        self.broker.connect(self, self.client_id, True)

    async def publish(self, topic: str, payload: bytes, qos: int, retain: bool) -> None:
        """Publish; returns when it is sent (QoS 0) or the broker has it (QoS 1)."""
        if self.is_over:
            raise OSError("the link went down before it was acknowledged")
        Connection.leaves(self.life, topic, payload)
        answered: asyncio.Future[None] = self.broker.loop.create_future()
        await self._ask(lambda: self.broker.publish(topic, payload, qos, retain), answered, qos > 0)

    async def subscribe(self, wanted: list[tuple[str, int]]) -> list[bool]:
        """Subscribe to all of these."""
        answered: asyncio.Future[None] = self.broker.loop.create_future()

        def do() -> None:
            for topic, _ in wanted:
                self.broker.subscribe(self.client_id, topic)

        await self._ask(do, answered, True)
        return [True] * len(wanted)

    async def _ask(self, do: Callable[[], None], answered: asyncio.Future[None], wait: bool) -> None:
        """Have the broker do something; wait for its answer."""
        broker = self.broker

        def arrive() -> None:
            if broker.reaches(self.host) and not self.is_over:
                do()
                broker.loop.at(broker.loop.time() + broker.delay_s(), answer, context=self.context)

        def answer() -> None:
            if broker.reaches(self.host) and not self.is_over and not answered.done():
                answered.set_result(None)

        broker.loop.at(broker.loop.time() + broker.delay_s(), arrive)
        if not wait:
            return
        await asyncio.wait((answered, self.down), timeout=ANSWER_S, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            lost = self.down.done()
            raise OSError("the link went down before it was acknowledged" if lost else "Operation timed out")

    async def disconnect(self) -> None:
        """Say goodbye."""
        self.will = None
        if self.broker.reaches(self.host):
            self.broker.disconnect(self, with_will=False)

    def acknowledge(self, mids: list[int]) -> None:
        """These have been taken."""
        if mids and self.broker.reaches(self.host) and not self.is_over:
            self.broker.acknowledge(self.client_id, mids)

    def resume_reading(self) -> None:
        """See `_Connection`; nothing is held back here."""

    async def close(self) -> None:
        """The broker sees the end of the socket, where it can."""
        self.lost()
        if self.broker.reaches(self.host):
            self.broker.disconnect(self, with_will=True)

    def deliver(self, message: Sent) -> None:
        """A publication arrives, in this life."""
        size = len(message.topic) + len(message.payload) + PARCEL_BYTES
        parcel = Parcel(wall_ns(), message.topic, message.payload, message.mid, message.retained, size)
        self.counts.received += 1
        self.tap.dropped += self.tap.backlog.put([parcel])
        self.tap.arrived.set()

    def lost(self) -> None:
        """The connection is over."""
        self._end(LOST)

    def silent(self) -> None:
        """Pings were not answered."""
        self._end(SILENT)

    def _end(self, why: str) -> None:
        self.is_over = True
        if not self.down.done():
            self.down.set_result(why)
        self.tap.arrived.set()
