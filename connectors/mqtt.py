"""The MQTT link: one connection to a broker, a persistent session, late acknowledgement, bounded memory.

The one file that knows the client library (aiomqtt over paho-mqtt, MQTT 3.1.1), so that another can take its
place. The library connects, subscribes and publishes; what is received never enters its unbounded queue: a
tap on its socket takes publications out of the stream, and a drain hands them on in short slices of time. May
import `twin.errors`, `twin.reading`, `connectors.mqtt_socket` and `connectors.mqtt_wire`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import aiomqtt

from connectors.mqtt_lane import Lane
from connectors.mqtt_socket import CONNECT_S, LinkCounts, LinkSettings, Tap, open_socket, tls_context
from twin.errors import ConnectorError
from twin.reading import Message

SLICE_S = 0.005  # a drain or a read gives way to the rest of the loop after this long
ANSWER_S, FAREWELL_S, GRACE_S = 10.0, 1.0, 0.2
CANARY_S, CANARY_EVERY_S = 15.0, 60.0
MAX_PUBLISHING = 20_000  # publications that wait; one more is refused
IN_FLIGHT = 64
PUBACK = b"\x40\x02"
LOST = "the connection was lost"

__all__ = ["Link", "LinkCounts", "LinkSettings", "Lost", "Presence"]
_QUIET, _LOG = logging.getLogger("racktwin.mqtt.library"), logging.getLogger("racktwin.mqtt")
_QUIET.setLevel(logging.CRITICAL + 1)
_HINTS = (
    ("not authori", "check username, password_file or the client certificate, and the broker's users"),
    ("bad user name", "check username and password_file"),
    ("identifier rejected", "check client_id"),
    ("certificate_verify_failed", "check tls.ca_file, and that the broker's certificate names this host"),
    ("certificate required", "the broker wants tls.cert_file and tls.key_file"),
    ("wrong_version_number", "the broker does not speak TLS on this port"),
    ("name or service not known", "expected a host name that resolves"),
    ("name resolution", "expected a host name that resolves"),
    ("no address", "expected a host name that resolves"),
    ("connection refused", "is the broker running, and is this its port?"),
    ("timed out", "no answer; is this the broker's port, with TLS or without it?"),
    ("connection was lost", "another client may use the same client_id, or the broker is gone"),
)


@dataclass(frozen=True)
class Presence:
    """A retained topic that says whether we are there; `offline` is also the last will."""

    topic: str
    online: Callable[[], bytes]  # asked on every connection
    offline: bytes


Lost = Callable[[str, str, int], None]  # where, why, how many


class Link:
    """One connection at a time to one broker. `run` holds it up; what was subscribed to arrives meanwhile.

    `subscriptions` are (filter, QoS 0 or 1), made on every connection, so that retained messages come again.
    `canary` is a topic that we publish to and read back, so that a broker that silently denies us is noticed.
    Topics of the `lane` wait apart.
    """

    def __init__(
        self,
        settings: LinkSettings,
        subscriptions: tuple[tuple[str, int], ...] = (),
        presence: Presence | None = None,
        canary: str | None = None,
        lane: Lane | None = None,
    ) -> None:
        self.settings, self.subscriptions = settings, subscriptions
        self.presence, self.canary, self.lane = presence, canary, lane
        self.counts = LinkCounts()
        self.connected = False
        self.fault = ""  # what is wrong with a link that is up
        self.retained = False  # whether the message that is being handed on is a retained one
        self.where = f"broker {settings.host}:{settings.port}"
        self._client: aiomqtt.Client | None = None
        self._tap: Tap | None = None
        self._down: asyncio.Future[None] | None = None
        self._gate = asyncio.Semaphore(IN_FLIGHT)
        self._publishing = 0
        self._nonce = b""
        self._back, self._ended = asyncio.Event(), asyncio.Event()
        self._given_up = False
        self._heard = 0

    async def run(self, on_message: Callable[[Message], None], on_lost: Lost) -> None:
        """Connect, subscribe and hand on messages until cancelled; each is acknowledged after `on_message`.

        Raises ConnectorError when the link cannot be made or goes down; what had been received is handed on.
        """
        client = self._make()
        self._given_up = False
        try:
            await self._connect(client)
            await self._hold(client, on_message, on_lost)
        finally:
            self.connected, self._given_up = False, True
            if self._down is not None and not self._down.done():
                self._down.set_result(None)
            self._client = None
            _abandon(client)
            self._tap = None

    async def publish(self, topic: str, payload: bytes, qos: int = 0, retain: bool = False) -> None:
        """Publish; with QoS 1 the broker has it when this returns. Raises ConnectorError if that fails."""
        client, down = self._client, self._down
        if client is None or down is None or not self.connected:
            raise ConnectorError(f"{self.where}: not connected, so {topic[:200]} was not published")
        if self._publishing >= MAX_PUBLISHING:
            raise ConnectorError(f"{self.where}: {MAX_PUBLISHING} wait; {topic[:200]} was not published")
        self._publishing += 1
        sending = asyncio.ensure_future(self._send(client, topic, payload, qos, retain))
        try:
            await asyncio.wait((sending, down), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise ConnectorError(
                    f"{self.where}: the link went down before {topic[:200]} was acknowledged"
                )
            sending.result()
        except (aiomqtt.MqttError, ValueError, OSError) as error:
            raise ConnectorError(f"{self.where}: {topic[:200]} was not published: {_plain(error)}") from None
        finally:
            self._publishing -= 1
            sending.cancel()
        self.counts.published += 1

    async def announce(self) -> None:
        """Publish our presence again, because what it says has changed."""
        if self.presence is not None:
            await self.publish(self.presence.topic, self.presence.online(), qos=1, retain=True)

    async def _send(self, client: aiomqtt.Client, topic: str, payload: bytes, qos: int, retain: bool) -> None:
        async with self._gate:
            await client.publish(topic, payload, qos, retain)

    def _make(self) -> aiomqtt.Client:
        given, presence = self.settings, self.presence
        client = aiomqtt.Client(
            given.host,
            given.port,
            username=given.username,
            password=given.password,
            logger=_QUIET,
            identifier=given.client_id,
            will=None if presence is None else aiomqtt.Will(presence.topic, presence.offline, 1, True),
            clean_session=not given.persistent,
            timeout=ANSWER_S,
            keepalive=max(1, round(given.keepalive_s)),
            max_inflight_messages=IN_FLIGHT,
            max_queued_outgoing_messages=4 * IN_FLIGHT,
        )
        client.pending_calls_threshold = 4 * IN_FLIGHT
        paho = _library(client)
        paho.manual_ack_set(True)
        context = tls_context(given) if given.tls else None

        ended = self._ended = asyncio.Event()

        def tapped() -> Tap:
            raw = open_socket(given, context)
            if self._given_up:
                raw.close()
                raise OSError("nobody waits for the connection any more")
            self._tap = Tap(raw, given, self.counts, ended, self.lane)
            return self._tap

        paho._create_socket = tapped
        return client

    async def _connect(self, client: aiomqtt.Client) -> None:
        connecting = asyncio.ensure_future(client.__aenter__())
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait((connecting, ended), return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():  # the library would wait on for an answer
                await asyncio.wait((connecting,), timeout=GRACE_S)
            if not connecting.done():
                fault = self._tap.fault if self._tap is not None else ""
                raise ConnectorError(
                    f"{self.where}: {fault or 'it ended the connection instead of a greeting'}"
                )
            connecting.result()
        except asyncio.CancelledError:
            if self._tap is None:  # the library connects in a thread, which cannot be interrupted
                await asyncio.wait((connecting,), timeout=CONNECT_S + GRACE_S)
            raise
        except (aiomqtt.MqttError, OSError, ValueError) as error:
            text = _plain(error)
            if isinstance(error, aiomqtt.MqttError) and text == "Operation timed out":
                text = "connected, but it did not answer as a broker: timed out"
            raise ConnectorError(f"{self.where}: {_hint(text)}") from None
        finally:
            connecting.cancel()
            ended.cancel()
            await asyncio.gather(connecting, ended, return_exceptions=True)

    async def _hold(
        self, client: aiomqtt.Client, on_message: Callable[[Message], None], on_lost: Lost
    ) -> None:
        tap, paho, loop = self._tap, _library(client), asyncio.get_running_loop()
        assert tap is not None
        self._client, self._down = client, loop.create_future()
        self.counts.connections += 1
        reader = _Reader(tap, paho, loop)
        reader.start()
        drain = asyncio.ensure_future(self._drain(tap, paho, reader, on_message, on_lost))
        watch = asyncio.ensure_future(_until_down(client))
        serve = asyncio.ensure_future(self._serve(client))
        tasks = {drain, watch, serve}
        cancelled = False
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in (drain, serve, watch):
                if task in done:
                    task.result()
            raise ConnectorError(f"{self.where}: {_hint(tap.fault or LOST)}")
        except asyncio.CancelledError:
            cancelled = True
            raise
        except aiomqtt.MqttError as error:
            # The library tells a lost connection as the cause of another error, "Unspecified error".
            why = tap.fault or (_plain(error) if error.__cause__ is None else LOST)
            raise ConnectorError(f"{self.where}: {_hint(why)}") from None
        finally:
            self.connected = self.connected and cancelled
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            reader.stop()
            if cancelled:
                await self._farewell(client)
            elif not drain.done() or drain.cancelled():
                # Not acknowledged: QoS 1 comes again with the next connection, and does no harm twice.
                while tap.backlog:
                    self._stage(tap, None, on_message, on_lost)
                    await asyncio.sleep(0)

    async def _farewell(self, client: aiomqtt.Client) -> None:
        """Leave in good order: a clean end of a connection makes the broker keep the will to itself."""
        with contextlib.suppress(aiomqtt.MqttError, OSError, TimeoutError, ValueError):
            async with asyncio.timeout(FAREWELL_S):
                if self.presence is not None and self.connected:
                    await client.publish(self.presence.topic, self.presence.offline, 1, True)
                await client.__aexit__(None, None, None)

    async def _serve(self, client: aiomqtt.Client) -> None:
        """Subscribe, say that we are there, then let the canary sing."""
        wanted = list(self.subscriptions)
        if self.canary is not None:
            wanted.append((self.canary, 1))
        if wanted:
            granted = await client.subscribe(wanted)
            for (topic, _), code in zip(wanted, granted, strict=False):
                if cast(int, getattr(code, "value", code)) >= 128:
                    raise ConnectorError(f"{self.where}: denies us the subscription {topic!r}; check its ACL")
        self.connected = True
        await self.announce()
        while self.canary is not None:
            await self._sing(self.canary)
            await asyncio.sleep(CANARY_EVERY_S)
        await asyncio.Event().wait()

    async def _sing(self, canary: str) -> None:
        """Publish our own message and wait for it. If nothing arrives, an error; if only this, a fault."""
        heard, self._nonce = self._heard, b"%d" % time.time_ns()
        self._back.clear()
        await self.publish(canary, self._nonce, qos=1)
        try:
            await asyncio.wait_for(self._back.wait(), CANARY_S)
        except TimeoutError:
            self.counts.canaries_missed += 1
            text = (
                f"{self.where}: accepts the connection, but does not deliver our own message; its "
                f"ACL may deny publishing to or reading from {canary}"
            )
            if self._heard == heard:
                raise ConnectorError(f"{text}; nothing else arrives either") from None
            if not self.fault:
                _LOG.warning("%s", text)
            self.fault = text
        else:
            self.fault = ""

    async def _drain(
        self, tap: Tap, paho: Any, reader: _Reader, on_message: Callable[[Message], None], on_lost: Lost
    ) -> None:
        while True:
            if not tap.backlog:
                tap.arrived.clear()
                await tap.arrived.wait()
            self._stage(tap, paho, on_message, on_lost)
            if reader.paused and not tap.backlog.blocked:
                reader.start()
            await asyncio.sleep(0)

    def _stage(self, tap: Tap, paho: Any, on_message: Callable[[Message], None], on_lost: Lost) -> None:
        """One slice of what waits. What `on_message` has taken is acknowledged, in the order of arrival."""
        backlog, canary = tap.backlog, self.canary
        if tap.dropped:
            number, tap.dropped = tap.dropped, 0
            self.counts.dropped += number
            most = f"{backlog.max_messages} messages or {backlog.max_bytes} bytes"
            on_lost(self.where, f"more than {most} wait", number)
        taken, backlog.refused = backlog.refused, []
        end = time.monotonic() + SLICE_S
        while backlog:
            parcel = backlog.pop()
            if parcel.lost:
                self.counts.dropped += 1
                on_lost(parcel.topic[:200], parcel.lost, 1)
            elif parcel.topic == canary:
                if parcel.payload == self._nonce:
                    self._back.set()
            else:
                self._heard += 1
                self.retained = parcel.retained
                on_message(Message(parcel.t_ns, parcel.topic, parcel.payload))
            if parcel.mid:
                taken.append(parcel.mid)
            if time.monotonic() >= end:
                break
        if taken and paho is not None:  # in one piece: one by one they would cost more than what they are for
            paho._packet_queue(PUBACK[0], b"".join(PUBACK + mid.to_bytes(2, "big") for mid in taken), 0, 1)
        self.counts.waiting, self.counts.waiting_bytes = len(backlog), backlog.bytes


class _Reader:
    """Reads when the socket has something, a piece at a time, and not while the backlog is full."""

    def __init__(self, tap: Tap, paho: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.tap, self.paho, self.loop = tap, paho, loop
        self.paused = True

    def start(self) -> None:
        """Listen to the socket (the library's own listener is replaced)."""
        if self.tap.fileno() >= 0:
            self.loop.add_reader(self.tap.fileno(), self._read)
            self.paused = False

    def stop(self) -> None:
        """Do not listen."""
        if self.tap.fileno() >= 0:
            self.loop.remove_reader(self.tap.fileno())
        self.paused = True

    def _read(self) -> None:
        try:
            self.paho.loop_read()
            while self.tap.fileno() >= 0 and self.tap.pending():
                self.paho.loop_read()
        except Exception as error:  # whatever the library raises, the link is over
            self.tap.fault = self.tap.fault or _plain(error)
            self.paho._loop_rc_handle(7)
        if self.tap.backlog.blocked:
            self.stop()


def _library(client: aiomqtt.Client) -> Any:
    """The library below the library: it alone can acknowledge late, and lets its socket be replaced."""
    return client._client


async def _until_down(client: aiomqtt.Client) -> None:
    async for _ in client.messages:
        pass


def _abandon(client: aiomqtt.Client) -> None:
    """Close whatever is still open; the library does so only if the connection was made and ended well."""
    with contextlib.suppress(OSError, ValueError):
        _library(client)._sock_close()
    if client._disconnected.done() and not client._disconnected.cancelled():
        client._disconnected.exception()  # it has been told; asyncio need not complain


def _plain(error: BaseException) -> str:
    """One line of what an error says."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:300]


def _hint(text: str) -> str:
    """What an error says and what to do about it."""
    low = text.lower()
    for sign, hint in _HINTS:
        if sign in low:
            return f"{text}; {hint}"
    return text
