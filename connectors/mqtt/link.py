"""MQTT link: one connection to a broker with a persistent session, late acknowledgement and bounded memory.

The one file that knows the client library (aiomqtt, MQTT 3.1.1), and it uses only the public interface.
aiomqtt connects, subscribes, publishes and keeps the connection alive. It has no bound on what it receives,
so a relay between it and the broker's socket takes publications out of the stream into a bounded backlog,
from which they are staged in short slices of time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import aiomqtt

from connectors.mqtt.lane import Lane
from connectors.mqtt.wire import Boundary, MessageBacklog, Splitter, WireError
from connectors.orders import always
from twin.catalogue import ConnectorError
from twin.telemetry import Message

SLICE_S = 0.005  # a drain or a read gives way to the rest of the loop after this long
CONNECT_S, ANSWER_S, FAREWELL_S, GRACE_S = 2.5, 10.0, 1.0, 0.2
CANARY_S, CANARY_EVERY_S = 15.0, 60.0
MAX_PUBLISHING = 20_000  # publications that wait; one more is refused
IN_FLIGHT = 64
RECV_BYTES = 128 * 1024
MAX_UNSENT = 256 * 1024  # bytes for the broker that wait in the relay; then the library has to wait
PUBACK = b"\x40\x02"  # and the number of the publication. source: MQTT 3.1.1, 3.4
FAILURE = 0x80  # return codes of SUBACK from here on are refusals. source: MQTT 3.1.1, 3.9.3
LOST = "the connection was lost"
SILENT = "the broker did not answer a ping in time"
NOT_ALLOWED = "another daemon leads now: what waits to be sent is dropped with the connection"

_LOG = logging.getLogger("racktwin.mqtt")
_LIBRARY_LOG = logging.getLogger("aiomqtt")
T = TypeVar("T")
_HINTS = (
    ("not authori", "check username, password_file or the client certificate, and the broker's users"),
    ("bad user name", "check username and password_file"),
    ("identifier not valid", "check client_id"),
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
class LinkSettings:
    """Settings of a connection. `persistent`: the broker keeps our subscriptions while we are away."""

    host: str
    port: int = 1883
    client_id: str = "racktwin"
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    keepalive_s: float = 15.0
    queue_messages: int = 5_000
    queue_bytes: int = 64 * 2**20
    max_message_bytes: int = 4 * 2**20
    persistent: bool = True


@dataclass
class LinkCounts:
    """Counters of a link since it was made, over all its connections."""

    connections: int = 0
    received: int = 0
    received_bytes: int = 0
    dropped: int = 0  # by a full queue, or too large
    published: int = 0
    canaries_missed: int = 0
    waiting: int = 0
    waiting_bytes: int = 0


@dataclass(frozen=True)
class Presence:
    """A retained topic with our presence; `offline` is also the last will."""

    topic: str
    online: Callable[[], bytes]  # called on every connection
    offline: bytes


OnMessage = Callable[[Message], object]
OnLost = Callable[[str, str, int], None]  # where, why, how many


class MqttLink:
    """One connection at a time to one broker. `run` maintains it and passes on the subscribed messages.

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
        self.fault = ""  # of a link that is up
        self.retained = False  # the message that is being handed on is a retained one
        self.where = f"broker {settings.host}:{settings.port}"
        self._connection: _Connection | None = None
        self._gate = asyncio.Semaphore(IN_FLIGHT)
        self._publishing = 0
        self._nonce = b""
        self._canary_back = asyncio.Event()
        self._received = 0  # messages other than the canary's

    async def run(self, on_message: OnMessage, on_lost: OnLost) -> None:
        """Connect, subscribe and pass on messages until cancelled; each is acknowledged after
        `on_message`.

        Raises ConnectorError when the link cannot be made or goes down; what had been received is handed on.
        """
        connection = _Connection(self.settings, self.presence, self.counts, self.lane)
        try:
            try:
                await connection.open()
            except (OSError, ValueError) as error:
                raise ConnectorError(f"{self.where}: {_hint(_plain(error))}") from None
            self._connection = connection
            self.counts.connections += 1
            await self._serve_until_down(connection, on_message, on_lost)
        finally:
            self.connected, self._connection = False, None
            await connection.close()

    async def publish(
        self,
        topic: str,
        payload: bytes,
        qos: int = 0,
        retain: bool = False,
        allowed: Callable[[], bool] = always,
    ) -> None:
        """Publish; with QoS 1 the broker has it when this returns. Raises ConnectorError if that fails.

        `allowed` is asked again before the bytes leave: where it is false by then, the connection ends
        instead.
        """
        connection = self._connection
        if connection is None or not self.connected:
            raise ConnectorError(f"{self.where}: not connected, so {topic[:200]} was not published")
        if self._publishing >= MAX_PUBLISHING:
            raise ConnectorError(f"{self.where}: {MAX_PUBLISHING} wait; {topic[:200]} was not published")
        self._publishing += 1
        try:
            async with self._gate:
                with connection.tap.only_while(allowed):
                    await connection.publish(topic, payload, qos, retain)
        except (ValueError, OSError) as error:
            raise ConnectorError(f"{self.where}: {topic[:200]} was not published: {_plain(error)}") from None
        finally:
            self._publishing -= 1
        self.counts.published += 1

    async def announce(self) -> None:
        """Publish the presence again after a change."""
        if self.presence is not None:
            await self.publish(self.presence.topic, self.presence.online(), qos=1, retain=True)

    async def _serve_until_down(
        self, connection: _Connection, on_message: OnMessage, on_lost: OnLost
    ) -> None:
        drain = asyncio.ensure_future(self._drain(connection, on_message, on_lost))
        serve = asyncio.ensure_future(self._serve(connection))
        cancelled = False
        try:
            await asyncio.wait((drain, serve, connection.down), return_when=asyncio.FIRST_COMPLETED)
            for task in (drain, serve):
                if task.done():
                    task.result()
            raise ConnectorError(f"{self.where}: {_hint(connection.down.result())}")
        except asyncio.CancelledError:
            cancelled = True
            raise
        finally:
            for task in (drain, serve):
                task.cancel()
            await asyncio.gather(drain, serve, return_exceptions=True)
            if cancelled:
                await self._farewell(connection)
            elif drain.cancelled():
                # Not acknowledged: QoS 1 comes again with the next connection, and does no harm twice.
                while connection.tap.backlog:
                    self._stage(connection, on_message, on_lost, acknowledge=False)
                    await asyncio.sleep(0)

    async def _farewell(self, connection: _Connection) -> None:
        """Disconnect properly, so that the broker does not publish the will."""
        with contextlib.suppress(OSError, ValueError):
            async with asyncio.timeout(FAREWELL_S):
                if self.presence is not None and self.connected:
                    await connection.publish(self.presence.topic, self.presence.offline, 1, True)
                await connection.disconnect()

    async def _serve(self, connection: _Connection) -> None:
        """Subscribe, announce the presence, then check the loop through the broker from time to time."""
        wanted = list(self.subscriptions)
        if self.canary is not None:
            wanted.append((self.canary, 1))
        if wanted:
            try:
                granted = await connection.subscribe(wanted)
            except OSError as error:
                raise ConnectorError(f"{self.where}: {_hint(_plain(error))}") from None
            for (topic, _), is_granted in zip(wanted, granted, strict=False):
                if not is_granted:
                    raise ConnectorError(f"{self.where}: denies the subscription {topic!r}; check its ACL")
        self.connected = True
        await self.announce()
        while self.canary is not None:
            await self._check_canary(self.canary)
            await asyncio.sleep(CANARY_EVERY_S)
        await asyncio.Event().wait()

    async def _check_canary(self, canary: str) -> None:
        """Publish a message to ourselves. Raises if nothing arrives; notes a fault if only this message is
        missing."""
        received, self._nonce = self._received, b"%d" % time.time_ns()
        self._canary_back.clear()
        await self.publish(canary, self._nonce, qos=1)
        try:
            await asyncio.wait_for(self._canary_back.wait(), CANARY_S)
        except TimeoutError:
            self.counts.canaries_missed += 1
            text = (
                f"{self.where}: accepts the connection, but does not deliver the message of the daemon; its "
                f"ACL may deny publishing to or reading from {canary}"
            )
            if self._received == received:
                raise ConnectorError(f"{text}; nothing else arrives either") from None
            if not self.fault:
                _LOG.warning("%s", text)
            self.fault = text
        else:
            self.fault = ""

    async def _drain(self, connection: _Connection, on_message: OnMessage, on_lost: OnLost) -> None:
        tap = connection.tap
        while True:
            if not tap.backlog:
                tap.arrived.clear()
                await tap.arrived.wait()
            self._stage(connection, on_message, on_lost)
            if not tap.backlog.blocked:
                connection.resume_reading()
            await asyncio.sleep(0)

    def _stage(
        self, connection: _Connection, on_message: OnMessage, on_lost: OnLost, acknowledge: bool = True
    ) -> None:
        """Stage one slice of the waiting messages. Those that `on_message` took are acknowledged, in order
        of arrival."""
        tap, canary = connection.tap, self.canary
        backlog = tap.backlog
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
                    self._canary_back.set()
            else:
                self._received += 1
                self.retained = parcel.retained
                on_message(Message(parcel.t_ns, parcel.topic, parcel.payload))
            if parcel.mid:
                taken.append(parcel.mid)
            if time.monotonic() >= end:
                break
        if acknowledge:
            connection.acknowledge(taken)
        self.counts.waiting, self.counts.waiting_bytes = len(backlog), backlog.bytes


class _Connection:
    """One aiomqtt client behind a tap, from connect to disconnect.

    `down` is done when the connection has ended, with the reason. `publish` and `subscribe` raise OSError
    when it ends before the broker's answer.
    """

    def __init__(
        self, settings: LinkSettings, presence: Presence | None, counts: LinkCounts, lane: Lane | None
    ) -> None:
        self.tap = Tap(settings, counts, lane)
        self.down = self.tap.down
        context = _TapContext(ssl.PROTOCOL_TLS_CLIENT)
        context.tap, context.tls = self.tap, tls_context(settings) if settings.tls else None
        will = None if presence is None else aiomqtt.Will(presence.topic, presence.offline, 1, True)
        self._client = aiomqtt.Client(
            settings.host,
            settings.port,
            identifier=settings.client_id,
            username=settings.username,
            password=settings.password,
            will=will,
            clean_session=not settings.persistent,
            keepalive=max(1, round(settings.keepalive_s)),
            timeout=ANSWER_S,
            max_inflight_messages=IN_FLIGHT,
            max_queued_outgoing_messages=4 * IN_FLIGHT,
            tls_context=context,
            logger=_LIBRARY_LOG,
        )
        self._client.pending_calls_threshold = 4 * IN_FLIGHT
        self._watch: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect and wait for the broker's greeting. Raises OSError or ValueError."""
        connecting = asyncio.ensure_future(self._client.__aenter__())
        connecting.add_done_callback(lambda task: task.cancelled() or task.exception())  # or it is logged
        try:
            await asyncio.wait((connecting, self.down), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self.tap.close()
            await asyncio.wait((connecting,), timeout=GRACE_S)  # its thread cannot be interrupted
            connecting.cancel()
            raise
        if not connecting.done():  # a refusal ends the connection too: then the library says why
            await asyncio.wait((connecting,), timeout=GRACE_S)
        if not connecting.done():
            connecting.cancel()
            raise OSError(self.tap.fault or "the broker closed the connection instead of a CONNACK")
        try:
            connecting.result()
        except aiomqtt.MqttError as error:
            silent = "connected, but it did not answer as a broker: timed out"
            raise OSError(silent if str(error) == "Operation timed out" else str(error)) from None
        self._watch = asyncio.ensure_future(self._until_down())

    async def _until_down(self) -> None:
        """Wait for the end of the connection. The tap takes all publications, so no message comes here."""
        with contextlib.suppress(aiomqtt.MqttError):
            async for _ in self._client.messages:
                pass
        self.tap.end(LOST)

    async def publish(self, topic: str, payload: bytes, qos: int, retain: bool) -> None:
        """Publish; returns when the message is sent (QoS 0) or the broker has it (QoS 1)."""
        await self._answer(self._client.publish(topic, payload, qos, retain))

    async def subscribe(self, wanted: list[tuple[str, int]]) -> list[bool]:
        """Subscribe; returns for each filter True if the broker grants it."""
        codes = await self._answer(self._client.subscribe(wanted))
        return [(code if isinstance(code, int) else code.value) < FAILURE for code in codes]

    async def _answer(self, call: Coroutine[Any, Any, T]) -> T:
        calling = asyncio.ensure_future(call)
        try:
            await asyncio.wait((calling, self.down), return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                raise OSError("the link went down before it was acknowledged")
            return calling.result()
        except aiomqtt.MqttError as error:
            raise OSError(str(error)) from None
        finally:
            calling.cancel()

    async def disconnect(self) -> None:
        """End the connection properly."""
        with contextlib.suppress(aiomqtt.MqttError):
            await self._client.__aexit__(None, None, None)
        self.tap.forward()

    def acknowledge(self, mids: list[int]) -> None:
        """Acknowledge accepted publications of QoS 1."""
        self.tap.acknowledge(mids)

    def resume_reading(self) -> None:
        """Read on, after the backlog has been reduced."""
        self.tap.resume()

    async def close(self) -> None:
        """Close everything still open, without a message to the broker."""
        self.tap.close()
        for _ in range(3):
            await asyncio.sleep(0)  # the library sees the end of its socket and closes it
        if self._watch is not None:
            await asyncio.wait((self._watch,), timeout=GRACE_S)  # who takes the reason of the end from it
            self._watch.cancel()
        self.tap.close_near()


class Tap:
    """A relay between the client library and the broker's socket.

    The library speaks with the near end of a pair of sockets. The relay passes on every packet but received
    publications, which it keeps in the backlog, and their acknowledgements, which it writes itself. `down` is
    done when either side has ended the connection, with the reason.
    """

    def __init__(self, settings: LinkSettings, counts: LinkCounts, lane: Lane | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.backlog = MessageBacklog(settings.queue_messages, settings.queue_bytes, lane)
        self.counts = counts
        self.down: asyncio.Future[str] = self._loop.create_future()
        self.fault = ""
        self.dropped = 0  # not reported yet
        self.arrived = asyncio.Event()
        self._splitter, self._outgoing = Splitter(settings.max_message_bytes), Boundary()
        self.raw: socket.socket | None = None
        self._near: socket.socket | None = None
        self._far: socket.socket | None = None
        self._is_closed = self._reading = self._writing = False
        self._to_broker, self._acks = bytearray(), bytearray()
        self._conditions = Counter[Callable[[], bool]]()  # of publications that are not acknowledged yet

    @contextlib.contextmanager
    def only_while(self, allowed: Callable[[], bool]) -> Iterator[None]:
        """Within this, no byte leaves unless `allowed` at that very moment; else the connection ends.

        A publication passes a gate, the library and two sockets, and the process may be stopped meanwhile.
        Raises OSError where it is not allowed.
        """
        if not allowed():
            raise OSError(NOT_ALLOWED)
        self._conditions[allowed] += 1
        try:
            yield
        finally:
            self._conditions[allowed] -= 1
            self._conditions += Counter()  # drops those of none

    def attach(self, raw: socket.socket) -> _Near:
        """Relay this socket; returns the library's end. Called in the thread that connects.

        Raises OSError if the connection is no longer needed.
        """
        if self._is_closed:
            raw.close()
            raise OSError("the connection is no longer needed")
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # requests are short, and each is awaited
        near, far = socket.socketpair()
        self.raw, self._far, self._near = raw, far, _Near(near, self)
        return self._near

    def start(self) -> None:
        """Perform the TLS handshake if needed, then relay. Called in the thread that connects."""
        assert self.raw is not None
        assert self._far is not None
        if isinstance(self.raw, ssl.SSLSocket):
            self.raw.settimeout(CONNECT_S)
            try:
                self.raw.do_handshake()
            except OSError as error:
                for each in (self.raw, self._far):
                    each.close()
                self.close_near()
                raise OSError(f"TLS handshake failed: {error}") from None
        self.raw.setblocking(False)
        self._far.setblocking(False)
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if not self._is_closed and self._far is not None:
            self._loop.add_reader(self._far.fileno(), self.forward)
            self.resume()

    def resume(self) -> None:
        """Read when the broker's socket has something, a piece at a time."""
        if not self._reading and not self._is_closed and self.raw is not None:
            self._reading = True
            self._loop.add_reader(self.raw.fileno(), self._receive)

    def _pause(self) -> None:
        if self._reading and self.raw is not None:
            self._reading = False
            self._loop.remove_reader(self.raw.fileno())

    def _receive(self) -> None:
        """Take publications out of the broker's stream, and pass the other packets to the library."""
        if self.raw is None or self._far is None:
            return
        try:
            while True:
                data = self.raw.recv(RECV_BYTES)
                if not data:
                    self.end(LOST)
                    return
                self.counts.received_bytes += len(data)
                if control := self._splitter.feed(data, time.time_ns()):
                    self._hand_on(control)
                if parcels := self._splitter.parcels:
                    self.counts.received += len(parcels)
                    self.dropped += self.backlog.put(parcels)
                    parcels.clear()
                    self.arrived.set()
                if not (isinstance(self.raw, ssl.SSLSocket) and self.raw.pending()):
                    break
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except WireError as error:
            self.end(f"the broker sent {error}")
        except OSError as error:
            self.end(str(error))
        if self.backlog.blocked:
            self._pause()

    def _hand_on(self, control: bytes) -> None:
        """Pass packets to the library, which reads them at once; a packet that does not fit is an error."""
        assert self._far is not None
        try:
            self._far.sendall(control)
        except BlockingIOError:
            raise OSError("the broker sends more acknowledgements than requests") from None

    def forward(self) -> None:
        """Forward the output of the library."""
        if self._far is None or len(self._to_broker) > MAX_UNSENT:
            return
        try:
            data = self._far.recv(RECV_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._to_broker += data
        self._outgoing.feed(data)
        self._flush()
        if not data:  # the library has given the connection up: pings were not answered, or we disconnect
            self.end(SILENT)

    def acknowledge(self, mids: list[int]) -> None:
        """Acknowledge publications of QoS 1, between two packets of the library."""
        for mid in mids:
            self._acks += PUBACK + mid.to_bytes(2, "big")
        self._flush()

    def _flush(self) -> None:
        if self.raw is None or self._is_closed:
            return
        if self._acks and self._outgoing.complete:
            self._to_broker += self._acks
            self._acks.clear()
        if self._to_broker and not all(allowed() for allowed in self._conditions):
            self.end(NOT_ALLOWED)
            return
        try:
            while self._to_broker:
                del self._to_broker[: self.raw.send(self._to_broker)]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError as error:
            self.end(str(error))
            return
        if bool(self._to_broker) != self._writing:
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(self.raw.fileno(), self._flush)
            else:
                self._loop.remove_writer(self.raw.fileno())
                self._loop.call_soon(self.forward)  # what came while too much was unsent

    def end(self, reason: str) -> None:
        """Close both sockets; the first reason counts."""
        if not self.down.done():
            self.fault = "" if reason in (LOST, SILENT) else reason
            self.down.set_result(reason)
        self.close()

    def close(self) -> None:
        """Close both sockets; one that is attached later is closed at once."""
        if not self.down.done():
            self.down.set_result(LOST)
        if self._is_closed:
            return
        self._is_closed = True
        for each in (self.raw, self._far):
            if each is not None:
                if each.fileno() >= 0:
                    self._loop.remove_reader(each.fileno())
                    self._loop.remove_writer(each.fileno())
                each.close()
        self.arrived.set()

    def close_near(self) -> None:
        """Close the library's end if the library has not done so."""
        if self._near is not None and self._near.fileno() >= 0:
            self._near.close()


class _Near(socket.socket):
    """The library's end of the relay: a socket whose handshake is that of the relay."""

    def __init__(self, end: socket.socket, tap: Tap) -> None:
        super().__init__(end.family, end.type, end.proto, end.detach())
        self._tap = tap

    def do_handshake(self) -> None:
        """Start the relay; raises OSError if the TLS handshake fails."""
        self._tap.start()


class _TapContext(ssl.SSLContext):
    """Inserts the tap below the library: paho, under aiomqtt, has its TLS context wrap each socket.

    `tls` is the context that encrypts; None for a plain connection.
    """

    tap: Tap
    tls: ssl.SSLContext | None

    def wrap_socket(self, sock: socket.socket, *args: Any, **options: Any) -> ssl.SSLSocket:
        """Return the tap, on `sock` or on TLS over it."""
        try:
            near = self.tap.attach(sock if self.tls is None else self.tls.wrap_socket(sock, *args, **options))
        except BaseException:
            sock.close()
            raise
        return cast(ssl.SSLSocket, near)


def tls_context(settings: LinkSettings) -> ssl.SSLContext:
    """Return the TLS context of a connection. Raises ConnectorError with the invalid file."""
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConnectorError(f"{settings.ca_file}: expected CA certificates in PEM: {error}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if settings.cert_file is not None:
        try:
            # An empty password: a key that needs one is an error and no question on the terminal.
            context.load_cert_chain(settings.cert_file, settings.key_file, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            raise ConnectorError(
                f"{settings.cert_file}, {settings.key_file}: expected a certificate and its key in "
                f"PEM: {error}"
            ) from None
    return context


def _plain(error: BaseException) -> str:
    """Return one line of an error's text."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:300]


def _hint(text: str) -> str:
    """Return an error's text with a remedy."""
    low = text.lower()
    for sign, hint in _HINTS:
        if sign in low:
            return f"{text}; {hint}"
    return text
