"""NATS link: one connection to a server, with one subscription, bounded memory and no hidden reconnects.

The one file that knows the client library (nats-py). A connection that is lost ends `run`, and the
supervisor makes the next one: so its alarm, its backoff and its state are those of all other links.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from connectors.nats.nkey import NKey, read_nkey
from twin.catalogue import ConnectorError, clean
from twin.telemetry import Message

if TYPE_CHECKING:
    import ssl

    from nats.aio.client import Client
    from nats.aio.msg import Msg

log = logging.getLogger("racktwin.nats")
CONNECT_S, FLUSH_S = 3.0, 2.0
PING_S, MISSED_PINGS = 2, 2  # a server that is gone is noticed within 6 s
QUEUE_MESSAGES, QUEUE_BYTES = 2_000, 8 * 2**20  # what waits beyond is dropped, and counted
STREAM_S, STREAM_MESSAGES, TWICE_S = 3600.0, 4_000, 120.0  # an hour of summaries. source: estimate


@dataclass(frozen=True)
class NatsSettings:
    """Servers and identity of a connection. Of keys it holds only the paths of their files."""

    servers: tuple[str, ...]
    name: str = "racktwin"
    credentials_file: str | None = None
    nkey_file: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None


class NatsLink:
    """One connection at a time. `run` maintains it and passes on messages of `subject` ("" for none).

    `streams`: subjects by the name of the JetStream stream that keeps them for an hour, made where absent.
    """

    def __init__(
        self, settings: NatsSettings, subject: str = "", streams: Mapping[str, str] | None = None
    ) -> None:
        self.settings, self.subject, self.streams = settings, subject, dict(streams or {})
        self.where = f"NATS {', '.join(s.partition('://')[2].rpartition('@')[2] for s in settings.servers)}"
        self.counts = {"connections": 0, "received": 0, "published": 0, "dropped": 0}
        self.fault = ""  # of a link that is up
        self._client: Client | None = None

    @property
    def connected(self) -> bool:
        """Return True while messages can be published."""
        return self._client is not None and self._client.is_connected

    async def run(self, on_message: Callable[[Message], object], on_lost: Callable[[str, int], None]) -> None:
        """Connect, subscribe and pass on messages until cancelled. Raises ConnectorError when the link
        goes down."""
        closed, lost = asyncio.Event(), list[str]()

        async def ended() -> None:
            closed.set()

        async def failed(error: Exception) -> None:
            from nats.errors import SlowConsumerError

            if isinstance(error, SlowConsumerError):
                self.counts["dropped"] += 1
                on_lost("messages arrived faster than they were read", 1)
            elif "permissions violation" in (text := str(error).lower()):
                self.fault = f"{self.where}: denies us {clean(text.rpartition('violation ')[2], 200)}"
                log.warning("%s; check the permissions of the daemon's user at NATS", self.fault)
            else:
                lost.append(clean(f"{type(error).__name__}: {error}", 200))

        async def hand_on(msg: Msg) -> None:
            self.counts["received"] += 1
            on_message(Message(time.time_ns(), msg.subject, msg.data))

        client, self.fault = await self._connect(ended, failed), ""
        try:
            if self.subject:
                await client.subscribe(
                    self.subject,
                    cb=hand_on,
                    pending_msgs_limit=QUEUE_MESSAGES,
                    pending_bytes_limit=QUEUE_BYTES,
                )
                await client.flush(int(FLUSH_S))
            self._client = client
            self.counts["connections"] += 1
            await self._make_streams(client)
            await closed.wait()
        except ConnectorError:
            raise
        except Exception as error:
            raise ConnectorError(f"{self.where}: {clean(str(error) or type(error).__name__, 200)}") from error
        finally:
            self._client = None
            with contextlib.suppress(Exception):
                await client.close()
        raise ConnectorError(f"{self.where}: {lost[-1] if lost else 'the connection was lost'}")

    async def publish(self, subject: str, payload: bytes, key: str = "") -> None:
        """Publish, and wait until the server has the message. `key` names the message: a stream takes it
        once.

        Raises ConnectorError.
        """
        client = self._client
        if client is None or not client.is_connected:
            raise ConnectorError(f"{self.where}: not connected")
        try:
            await client.publish(subject, payload, headers={"Nats-Msg-Id": key} if key else None)
            await client.flush(int(FLUSH_S))
        except Exception as error:  # the library has a dozen of its own
            raise ConnectorError(f"{self.where}: {clean(str(error) or type(error).__name__, 200)}") from error
        self.counts["published"] += 1

    async def _connect(self, ended: Callable[[], Any], failed: Callable[[Exception], Any]) -> Client:
        from nats.aio.client import Client

        settings, client = self.settings, Client()
        who: dict[str, Any] = {
            "user": settings.username,
            "password": settings.password,
            "tls": settings.tls,
        }
        if file := settings.credentials_file or settings.nkey_file:
            nkey = read_nkey(file, with_token=settings.credentials_file is not None)
            vars(client)["_setup_nkeys_connect"] = lambda: _identify(client, nkey)
            who["nkeys_seed"] = file
        try:
            await client.connect(
                list(settings.servers),
                name=settings.name,
                allow_reconnect=False,
                connect_timeout=int(CONNECT_S),
                max_reconnect_attempts=1,
                ping_interval=PING_S,
                max_outstanding_pings=MISSED_PINGS,
                closed_cb=ended,
                error_cb=failed,
                **{key: value for key, value in who.items() if value is not None},
            )
        except BaseException as error:
            with contextlib.suppress(Exception):
                await client.close()
            transport: Any = client._transport
            if transport is not None:  # a refusal leaves it open
                transport.close()
            if not isinstance(error, Exception):
                raise
            raise ConnectorError(f"{self.where}: {clean(str(error) or type(error).__name__, 200)}") from error
        return client

    async def _make_streams(self, client: Client) -> None:
        """A stream for each subject: what was published, for an hour. Without JetStream the link works all
        the same, as only the newest message counts."""
        from nats.js.api import StreamConfig

        context = client.jetstream(timeout=FLUSH_S)
        for name, subject in self.streams.items():
            try:
                await context.add_stream(
                    StreamConfig(
                        name=name,
                        subjects=[subject],
                        max_age=STREAM_S,
                        max_msgs_per_subject=STREAM_MESSAGES,
                        duplicate_window=TWICE_S,
                    )
                )
            except Exception as error:
                self.fault = (
                    f"{self.where}: no stream {name}: {clean(str(error) or type(error).__name__, 200)}"
                )
                log.warning("%s; summaries and budgets are not kept", self.fault)
                return


def _identify(client: Client, nkey: NKey) -> None:
    """Let a client sign with this key, for which the library needs an extra package."""
    client._signature_cb, client._public_nkey = nkey.sign, nkey.public
    client._user_jwt_cb = (lambda: nkey.token) if nkey.token else None
