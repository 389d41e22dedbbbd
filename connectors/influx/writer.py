"""Writer to an InfluxDB 2 or a server with its write API: in order, with retries, in bounded memory.

A thread of its own writes batches through influxdb-client, one at a time, so that order and memory stay ours:
the client's batching mode queues without bound and swallows errors. What a server took shortly before it was
killed may not have reached its disk: after it restarted, that is sent again with the same instants.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from connectors.influx.lines import LineColumns, SiteNames, heads_of, lines
from connectors.send_lane import CLOSE_S, SendLane, SendThread
from twin.catalogue import ConfigError

if TYPE_CHECKING:
    from influxdb_client.rest import ApiException

BATCH_POINTS = 5000
TIMEOUT_S = 10.0
MAX_TEXT = 300  # of a server's complaint
MAX_PAGE = 8 * 2**20  # bytes of its metrics
# Statuses of a write that a server refuses however often it is sent; others may be mended there.
REFUSED = (400, 405, 406, 411, 413, 415, 422)
_STARTED = re.compile(rb"^process_start_time_seconds(?:\{[^}]*\})? ([0-9.eE+]+)", re.MULTILINE)


def _not_the_clients(record: logging.LogRecord) -> bool:
    return "influxdb_client" not in record.pathname


# The client logs a server's answers on the root logger, and an answer may repeat the token that it was sent.
logging.getLogger().addFilter(_not_the_clients)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Lines to be formatted: a run of entities of one table at one instant."""

    t_ns: int
    names: SiteNames
    columns: LineColumns
    first: int
    last: int

    @property
    def points(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, kw_only=True)
class InfluxSettings:
    """Settings of a writer: points that wait at most, and acknowledged ones that are sent again."""

    buffer_points: int = 1_000_000
    resend_s: float = 60.0
    timeout_s: float = TIMEOUT_S
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


class InfluxWriter:
    """Accepts points from any thread; `stats` counts their outcomes.

    Raises ConfigError if `url` or `token` cannot be used; the token is never shown.
    """

    def __init__(
        self,
        url: str,
        org: str,
        bucket: str,
        token: str | None = None,
        settings: InfluxSettings | None = None,
    ) -> None:
        # Its import takes 0.3 s, which a daemon without such a server is spared
        from influxdb_client.rest import ApiException

        self._api_error: type[ApiException] = ApiException
        settings = settings or InfluxSettings()
        if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token):
            raise ConfigError("the token of the history server: expected one line of printable ASCII")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("the URL of the history server: expected http:// or https:// and a host")
        self.place = f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"
        self._token, self._bucket, self._org = token or "", bucket, org
        self._url = url.rstrip("/")
        self._secrets = [s for s in (self._token, parts.password) if s]
        files = {
            "ssl_ca_cert": settings.ca_file,
            "cert_file": settings.cert_file,
            "cert_key_file": settings.key_file,
        }
        self._tls: dict[str, Any] = {name: file for name, file in files.items() if file is not None}
        self._timeout_s, self._resend_s = settings.timeout_s, settings.resend_s
        self._room = settings.buffer_points
        self._pending: deque[_Batch] = deque()
        self._acked: deque[tuple[float, _Batch]] = deque()  # (when, what), the oldest first
        self._pending_points = self._acked_points = 0
        self._heads: dict[tuple[str, str], list[bytes]] = {}
        self._started: bytes | None = None  # when the server began, in its own words
        # The server may have begun anew: the connection is another one, or something failed.
        self._reconnected, self._failed = True, False
        self.counts = dict.fromkeys(
            ("written_points", "dropped_points", "refused_points", "resent_points", "write_errors"), 0
        )
        self.refusal = ""
        self._client: Any = None  # made when the first batch is sent, as is its interface for writing
        self._api: Any = None
        lane = SendLane(self._step, self._gave)
        self._thread = SendThread("influx", [lane], lambda: bool(self._pending), self._close)

    def start(self) -> None:
        """Start to write."""
        self._thread.start()

    def offer(self, t_ns: int, names: SiteNames, tables: Sequence[LineColumns]) -> None:
        """Offer one instant of these tables; their arrays must not change later. Never waits for the
        server."""
        with self._thread.changed:
            for columns in tables:
                n = max(columns.value.shape[-1], columns.total.shape[-1])
                for first in range(0, n, BATCH_POINTS):
                    batch = _Batch(t_ns, names, columns, first, min(n, first + BATCH_POINTS))
                    self._pending.append(batch)
                    self._pending_points += batch.points
            self._make_room()
            self._thread.changed.notify()

    def stats(self) -> dict[str, int | str]:
        """Return points written, waiting and lost; `error` is the reason for a present failure, or ""."""
        return {
            **self.counts,
            "queue_points": self._pending_points,
            "error": self._thread.error,
            "refusal": self.refusal,
        }

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Send what waits, until then. Return True if all was sent. A hanging server is left alone."""
        self._thread.close(timeout_s)
        return self._pending_points == 0

    def _make_room(self) -> None:
        """Drop acknowledged points first, then the oldest waiting ones."""
        while self._acked and self._pending_points + self._acked_points > self._room:
            self._acked_points -= self._acked.popleft()[1].points
        while self._pending_points > self._room and len(self._pending) > 1:
            lost = self._pending.popleft().points
            self._pending_points -= lost
            self.counts["dropped_points"] += lost

    def _connect(self) -> None:
        from influxdb_client.client.influxdb_client import InfluxDBClient
        from influxdb_client.client.write_api import SYNCHRONOUS

        self._client = InfluxDBClient(
            self._url, token=self._token, org=self._org, timeout=round(self._timeout_s * 1000), **self._tls
        )
        self._watch()
        self._api = self._client.write_api(write_options=SYNCHRONOUS)

    def _close(self) -> None:
        with contextlib.suppress(Exception):
            if self._client is not None:
                self._client.close()

    def _gave(self, error: Exception) -> str:
        """Count an error; its text."""
        self.counts["write_errors"] += 1
        self._failed = True
        return self._text_of(error)

    def _watch(self) -> None:
        """Notice each new connection: the client silently opens one after a loss."""
        pool = self._client.api_client.rest_client.pool_manager.connection_from_url(self._url)
        usual = pool.ConnectionCls

        def connect(connection: Any) -> None:
            self._reconnected = True
            usual.connect(connection)

        pool.ConnectionCls = type("WatchedConnection", (usual,), {"connect": connect})

    def _step(self) -> bool:
        """Send the oldest batch; first check if the server lost accepted data."""
        with self._thread.changed:
            if not self._pending:
                return False
        if self._api is None:
            self._connect()
        if self._reconnected or self._failed:
            self._settle_doubt()
            self._reconnected = self._failed = False
        with self._thread.changed:
            if not self._pending:
                return True
            batch = self._pending[0]
        text, count = lines(self._heads_of(batch), batch.columns, batch.first, batch.last, batch.t_ns)
        refused = False
        if count:
            try:
                self._api.write(self._bucket, self._org, text)
            except self._api_error as error:
                if error.status not in REFUSED:
                    raise
                refused, self.refusal = True, self._text_of(error)
                self.counts["write_errors"] += 1
        self._done(batch, count, refused)
        return True

    def _done(self, batch: _Batch, count: int, refused: bool) -> None:
        now_s = time.monotonic()
        self.counts["refused_points" if refused else "written_points"] += count
        with self._thread.changed:
            if self._pending and self._pending[0] is batch:  # or it was dropped meanwhile, to make room
                self._pending.popleft()
                self._pending_points -= batch.points
            if refused:
                return
            self._acked.append((now_s, batch))
            self._acked_points += batch.points
            while self._acked and self._acked[0][0] < now_s - self._resend_s:
                self._acked_points -= self._acked.popleft()[1].points
            self._make_room()

    def _settle_doubt(self) -> None:
        """Send the last accepted points again to a restarted server. Raises the errors of the connection.

        One that does not say when it began may have, if something failed; not each time that it closes a
        connection.
        """
        manager = self._client.api_client.rest_client.pool_manager
        answer = manager.request(
            "GET", f"{self._url}/metrics", timeout=self._timeout_s, retries=False, preload_content=False
        )
        page = self._page(answer)
        match = _STARTED.search(page) if answer.status == 200 else None
        began = match.group(1) if match else None
        known, self._started = self._started, began
        if began == known if began is not None else not self._failed:
            return
        with self._thread.changed:
            for _, batch in reversed(self._acked):
                self._pending.appendleft(batch)
            self._pending_points += self._acked_points
            self.counts["resent_points"] += self._acked_points
            self._acked.clear()
            self._acked_points = 0
            self._make_room()

    def _page(self, answer: Any) -> bytes:
        """Return a page of metrics, or its first MAX_PAGE bytes. Raises TimeoutError where it drips on."""
        page, ends_s = bytearray(), time.monotonic() + self._timeout_s
        while (part := answer.read1(MAX_PAGE)) and len(page) < MAX_PAGE:
            page += part
            if time.monotonic() > ends_s:
                answer.close()
                raise TimeoutError(f"no complete page of metrics within {self._timeout_s:g} s")
        if part:
            answer.close()  # its connection would begin with the rest
        answer.release_conn()
        return bytes(page)

    def _heads_of(self, batch: _Batch) -> list[bytes]:
        key = (batch.names.hash, batch.columns.table)
        if key not in self._heads:
            if any(known != batch.names.hash for known, _ in self._heads):
                self._heads.clear()
            self._heads[key] = heads_of(batch.columns.table, batch.names.names(batch.columns.table))
        return self._heads[key]

    def _text_of(self, error: Exception) -> str:
        """Text of an error without secrets, whatever the server repeats of what it was sent."""
        if isinstance(error, self._api_error):
            text = f"{error.status} {error.reason}: {error.body or ''}"
        else:
            text = f"{type(error).__name__}: {error}"
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return f"{self.place}: " + " ".join(text.split())[:MAX_TEXT]
