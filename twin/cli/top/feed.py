"""Live feed: the daemon's stream of events and its answers, over one session that ends when the screen does.

Address, token and TLS are those of the client that the options describe. `twin.api.Client` blocks, which a
screen must not: this asks the same routes with aiohttp.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import msgspec

from twin.api import ApiRefused
from twin.catalogue import ConnectorError

if TYPE_CHECKING:
    from twin.api import Client

API = "/api/v1"
ANSWER_S = 8.0  # for an answer
STREAM_S = 20.0  # without a byte of the stream: its keep-alive comes each 15 s
MOST_BYTES = 64 * 2**20  # of an event


class StreamEvent(NamedTuple):
    """An event of the stream: its kind, its data, and the id to come back with."""

    kind: str
    tree: Any
    id: str


class EventParser:
    """Bytes of a stream of server-sent events, cut into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[StreamEvent]:
        """The events that these bytes complete. Raises ConnectorError for what is no such stream."""
        *blocks, self._rest = (self._rest + chunk).split(b"\n\n")
        if len(self._rest) > MOST_BYTES:
            raise ConnectorError(
                "an event of the stream is too long; check that --url names a racktwin daemon"
            )
        return [event for block in blocks if (event := self._event(block)) is not None]

    def _event(self, block: bytes) -> StreamEvent | None:
        said: dict[bytes, bytes] = {}
        for line in block.split(b"\n"):
            name, _, value = line.partition(b": ")
            said[name] = said.get(name, b"") + value
        if not said.get(b"data"):
            return None
        try:
            tree = msgspec.json.decode(said[b"data"])
        except msgspec.DecodeError:
            raise ConnectorError(
                "the event stream is not JSON; check that --url names a racktwin daemon"
            ) from None
        return StreamEvent(said.get(b"event", b"message").decode(), tree, said.get(b"id", b"").decode())


class LiveFeed:
    """A session with a daemon. `received_s`: last message of the stream, by a clock that never steps."""

    def __init__(self, client: Client) -> None:
        self.client, self.received_s, self.last_id = client, 0.0, ""
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Begin; the loop must run. Raises ConfigError."""
        head = {"Authorization": f"Bearer {self.client.token}"} if self.client.token else {}
        connector = aiohttp.TCPConnector(ssl=self.client.tls_context() or True)
        self._session = aiohttp.ClientSession(self.client.url, headers=head, connector=connector)

    async def close(self) -> None:
        """End all that runs."""
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, **query: Any) -> Any:
        """An answer. Raises ApiRefused with the daemon's sentence, ConnectorError where none comes."""
        assert self._session is not None
        given = {k: str(v) for k, v in query.items()}
        limit = aiohttp.ClientTimeout(total=ANSWER_S)
        try:
            async with self._session.get(API + path, params=given, timeout=limit) as response:
                raw = await response.read()
                if response.status >= 400:
                    raise ApiRefused(response.status, _why(raw, response.status))
                return msgspec.json.decode(raw)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            raise ConnectorError(f"no answer from {self.client.url}: {_short(error)}") from None

    async def events(self) -> AsyncIterator[StreamEvent]:
        """The stream, until it ends. Raises ApiRefused and ConnectorError."""
        assert self._session is not None
        head = {"Last-Event-ID": self.last_id} if self.last_id else {}
        limit = aiohttp.ClientTimeout(total=None, sock_connect=ANSWER_S, sock_read=STREAM_S)
        try:
            async with self._session.get(f"{API}/events", headers=head, timeout=limit) as response:
                if response.status >= 400:
                    raise ApiRefused(response.status, _why(await response.read(), response.status))
                parser = EventParser()
                async for chunk in response.content.iter_any():
                    self.received_s = time.monotonic()
                    for event in parser.feed(chunk):
                        self.last_id = event.id or self.last_id
                        yield event
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ConnectorError(f"no answer from {self.client.url}: {_short(error)}") from None


def _why(raw: bytes, status: int) -> str:
    try:
        return str(msgspec.json.decode(raw)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return f"the daemon answers {status}"


def _short(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "too slow"
    return getattr(error, "strerror", "") or type(error).__name__
