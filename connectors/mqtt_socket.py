"""The socket of an MQTT link: opened with or without TLS, and a tap that takes publications out of it.

Knows no client library. May import `twin.errors`, `connectors.mqtt_wire` and `connectors.mqtt_lane`.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from dataclasses import dataclass, field

from connectors.mqtt_lane import Lane
from connectors.mqtt_wire import Backlog, Splitter, WireError
from twin.errors import ConnectorError

RECV_BYTES = 128 * 1024
CONNECT_S = 2.5


@dataclass(frozen=True)
class LinkSettings:
    """What a connection needs to know. `persistent`: the broker keeps our subscriptions while we are away."""

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
    """What a link did since it was made, over all its connections."""

    connections: int = 0
    received: int = 0
    received_bytes: int = 0
    dropped: int = 0  # by a full queue, or too large
    published: int = 0
    canaries_missed: int = 0
    waiting: int = 0
    waiting_bytes: int = 0


class Tap:
    """What the library takes for its socket: it is given every packet but the publications."""

    def __init__(
        self,
        raw: socket.socket,
        settings: LinkSettings,
        counts: LinkCounts,
        ended: asyncio.Event,
        lane: Lane | None = None,
    ) -> None:
        self.raw, self.counts, self.ended = raw, counts, ended
        self.backlog = Backlog(settings.queue_messages, settings.queue_bytes, lane)
        self.fault = ""
        self.dropped = 0  # not reported yet
        self.arrived = asyncio.Event()
        self._splitter = Splitter(settings.max_message_bytes)
        self._control = bytearray()

    def recv(self, size: int) -> bytes:
        """Bytes of packets that are no publications; BlockingIOError if there are none."""
        if not self._control:
            try:
                data = self.raw.recv(RECV_BYTES)
                if not data:
                    self.ended.set()
                    return b""
                self._control += self._splitter.feed(data, time.time_ns())
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise BlockingIOError from None
            except (OSError, WireError) as error:
                self.fault = f"the broker sent {error}" if isinstance(error, WireError) else str(error)
                self.ended.set()
                raise ConnectionError(self.fault) from None
            parcels = self._splitter.parcels
            self.counts.received_bytes += len(data)
            if parcels:
                self.counts.received += len(parcels)
                self.dropped += self.backlog.put(parcels)
                parcels.clear()
                self.arrived.set()
            if not self._control:
                raise BlockingIOError
        out = bytes(self._control[:size])
        del self._control[:size]
        return out

    def pending(self) -> int:
        """Bytes that the selector does not know of."""
        inner = self.raw.pending() if isinstance(self.raw, ssl.SSLSocket) and self.raw.fileno() >= 0 else 0
        return len(self._control) or inner

    def send(self, data: bytes) -> int:
        """As a socket's."""
        return self.raw.send(data)

    def fileno(self) -> int:
        """As a socket's."""
        return self.raw.fileno()

    def setblocking(self, flag: bool) -> None:
        """As a socket's."""
        self.raw.setblocking(flag)

    def close(self) -> None:
        """As a socket's."""
        self.raw.close()


def tls_context(settings: LinkSettings) -> ssl.SSLContext:
    """How we speak TLS. Raises ConnectorError naming the file that is no certificate or key."""
    try:
        context = ssl.create_default_context(cafile=settings.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConnectorError(f"{settings.ca_file}: no certificates of an authority: {error}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if settings.cert_file is not None:
        try:
            # An empty password: a key that needs one is an error and no question on the terminal.
            context.load_cert_chain(settings.cert_file, settings.key_file, password=lambda: "")
        except (OSError, ssl.SSLError) as error:
            raise ConnectorError(
                f"{settings.cert_file}, {settings.key_file}: no certificate with its key: {error}"
            ) from None
    return context


def open_socket(settings: LinkSettings, context: ssl.SSLContext | None) -> socket.socket:
    """A connected socket. Blocks for at most CONNECT_S a step; raises OSError."""
    raw = socket.create_connection((settings.host, settings.port), CONNECT_S)
    try:
        # Requests are short, and each is waited for.
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is None:
            return raw
        wrapped = context.wrap_socket(raw, server_hostname=settings.host, do_handshake_on_connect=False)
    except BaseException:
        raw.close()
        raise
    try:
        wrapped.do_handshake()
    except OSError as error:
        wrapped.close()
        raise OSError(f"TLS handshake failed: {error}") from None
    return wrapped
