"""The HTTP interface: the application over a running daemon, and the service that binds and ends it.

Loopback by default; TLS, limits of size, time and number, a clean end within two seconds. What is served is
in `api_routes`, who may ask in `api_access`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from connectors.jobs import JobLeases
from twin.api import access
from twin.api.actions import KEPT, Kept
from twin.api.answers import LIVE, refusal
from twin.api.client import address_of
from twin.api.job_reports import DECODER, LEASES, decoder_of, end_lapsed
from twin.api.metrics import Metrics
from twin.api.page import (
    DAY,
    FLEET_QUESTIONS,
    MAX_FLEET_QUESTIONS,
    SEARCH,
    SIMULATIONS,
    DayAccount,
    DecisionSearch,
    Simulations,
)
from twin.api.public import METRICS, ROUTES
from twin.api.replacement import READING, ReplacementReader
from twin.api.runtime import Runtime
from twin.api.tokens import Tokens, read_secret, write_private
from twin.api.updates import UPDATES, Updates
from twin.catalogue import ConfigError, ConnectorError
from twin.config import Api, Loaded

log = logging.getLogger(__name__)
MAX_BODY = 2**20
MAX_LINE, MAX_FIELD = 8190, 8190  # of the request line and of a header
IDLE_S = 20.0  # a connection without a whole request for this long is closed
HANDSHAKE_S = 10.0
STOP_S = 1.0
FLUSH_S = 2.0
URL_FILE = "api.url"


def make_app(live: Runtime, tokens: Tokens) -> web.Application:
    """The application. Its background task follows the daemon as long as it runs."""
    app = web.Application(middlewares=[access.admit, _keep_place], client_max_size=MAX_BODY)
    refusals = access.Refusals(live.note)
    updates = Updates(live)
    app[LIVE], app[access.TOKENS], app[access.REFUSALS] = live, tokens, refusals
    app[UPDATES], app[KEPT], app[DECODER] = updates, Kept(), decoder_of(live)
    app[LEASES] = JobLeases()
    app[READING] = ReplacementReader()
    app[SIMULATIONS], app[DAY], app[SEARCH] = Simulations(), DayAccount(), DecisionSearch()
    app[FLEET_QUESTIONS] = asyncio.Semaphore(MAX_FLEET_QUESTIONS)
    app[METRICS] = Metrics(live, updates.pulse, refusals.counts)
    gates: dict[tuple[str, str], access.Gate] = {}
    for route in ROUTES:
        added = app.router.add_route(route.method, route.pattern or route.path, route.serve)
        if route.method == "GET" and route.media == "application/json":
            app.router.add_route("HEAD", route.pattern or route.path, route.serve)
        assert added.resource is not None
        params = None if route.any_param else tuple(p.name for p in route.params)
        gates[route.method, added.resource.canonical] = access.Gate(route.role, params, route.by_hall)
    app[access.GATES] = gates
    app.on_response_prepare.append(access.harden)
    app.on_shutdown.append(_end_streams)
    app.cleanup_ctx.append(_background)
    return app


@web.middleware
async def _keep_place(request: web.Request, handler: access.Answering) -> web.StreamResponse:
    """A client that was admitted by a token is never displaced by another one."""
    if access.WHO in request and isinstance(request.protocol, _Connection):
        request.protocol.admitted = True
    return await handler(request)


async def _end_streams(app: web.Application) -> None:
    app[UPDATES].close()
    await app[SIMULATIONS].close()


async def _background(app: web.Application) -> AsyncIterator[None]:
    """The stream of updates, and refusals that wait to be written down."""
    tasks = [asyncio.create_task(app[UPDATES].run(), name="updates"),
             asyncio.create_task(_flush(app[access.REFUSALS]), name="refusals"),
             asyncio.create_task(_end_lapsed(app), name="registrations of jobs")]  # fmt: skip
    for task in tasks:
        task.add_done_callback(_ended)
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    app[access.REFUSALS].flush(everything=True)


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("%s ended; it is off until the interface restarts", task.get_name(),
                  exc_info=task.exception())  # fmt: skip


async def _end_lapsed(app: web.Application) -> None:
    while True:
        await asyncio.sleep(FLUSH_S)
        end_lapsed(app[LIVE], app[LEASES], time.monotonic())


async def _flush(refusals: access.Refusals) -> None:
    while True:
        await asyncio.sleep(FLUSH_S)
        refusals.flush()


def open_tokens(loaded: Loaded) -> Tokens:
    """The tokens of a configuration; without a tokens file, those of the state folder. Raises ConfigError."""
    config = loaded.config.api or Api()
    if config.tokens_file is not None:
        return Tokens(loaded.file(config.tokens_file))
    return Tokens.local(loaded.state)


def login_link(loaded: Loaded) -> str:
    """Address of the page. Without a tokens file it holds the administrator's token (`open_tokens` makes it).

    It stands behind a #: that part a browser sends to nobody. Raises ConfigError if the token cannot be read.
    """
    url = f"{address_of(loaded)}/"
    if loaded.config.api is not None and loaded.config.api.tokens_file is not None:
        return url
    try:
        return f"{url}#token={read_secret(loaded.token_file)}"
    except ConfigError as error:
        raise ConfigError(
            f"{error}; the daemon makes it when it starts, and its user and root can read it"
        ) from None


def server_tls(loaded: Loaded) -> ssl.SSLContext | None:
    """TLS as configured: our certificate, and with `ca_file` theirs as well. Raises ConfigError."""
    tls = loaded.config.api.tls if loaded.config.api is not None else None
    if tls is None:
        return None
    if tls.cert_file is None or tls.key_file is None:
        raise ConfigError(f"{loaded.path}: $.api.tls: expected cert_file and key_file of a server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    cert, key = loaded.file(tls.cert_file), loaded.file(tls.key_file)
    try:
        context.load_cert_chain(cert, key)
        if tls.ca_file is not None:
            context.load_verify_locations(loaded.file(tls.ca_file))
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or getattr(error, "reason", None) or "not a certificate with its key, in PEM"
        raise ConfigError(f"{loaded.path}: $.api.tls: {cert}, {key}: {why}") from None
    return context


class _Busy(asyncio.Protocol):
    """Protocol of a connection beyond the limit: it gets status 503."""

    TEXT = (b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: 40\r\n\r\n"
            b'{"error":"all places are taken; wait"}\r\n')  # fmt: skip

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say so, and close."""
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self.TEXT)
        transport.close()


class _Connection(web.RequestHandler):
    """A client. What cannot be read is not sent back, as aiohttp would: it may hold a token.

    One that has not shown a valid token gives way to a newcomer when all places are taken: silent strangers
    must not be able to lock the operators out.
    """

    admitted = False
    leaving = False

    def give_way(self) -> None:
        """End, so that another process can take the place."""
        self.leaving = True
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to an invalid request, or to one that made the server fail."""
        super().handle_error(request, status, exc, message)
        why = "the request cannot be read" if status < 500 else "a fault of the daemon; it goes on"
        response = refusal(status, why, access.HEADERS)
        response.force_close()
        return response


class ApiServer:
    """The service: binds, serves until cancelled, and ends cleanly."""

    name = "api"

    def __init__(self, tokens: Tokens | None = None) -> None:
        self.tokens = tokens
        self.url = ""
        self.bound = asyncio.Event()

    def reload(self) -> list[str]:
        """Read the tokens again; the problems, with which the old ones stay in force."""
        if self.tokens is None:
            return []
        try:
            self.tokens.reload()
        except ConfigError as error:
            return list(error.problems)
        return []

    async def run(self, live: Runtime) -> None:
        """Serve until cancelled. Raises ConnectorError if the address is taken, ConfigError for bad files."""
        config = live.loaded.config.api
        if config is None:
            raise ConfigError(f"{live.loaded.path}: $.api: the interface is off")
        self.tokens = self.tokens or open_tokens(live.loaded)
        for warning in self.tokens.warnings:
            log.warning("%s", warning)
        context = server_tls(live.loaded)
        if not access.is_local(config.host) and (context is None or config.tokens_file is None):
            raise ConfigError(
                f"{live.loaded.path}: $.api.host: beyond loopback TLS and a tokens_file are needed"
            )
        runner = web.AppRunner(make_app(live, self.tokens), handle_signals=False, shutdown_timeout=STOP_S)
        await runner.setup()
        server: asyncio.Server | None = None
        try:
            server = await _bind(runner, config, context)
            self._log_start(live, config, server, context)
            await asyncio.Event().wait()
        finally:
            self.bound.clear()
            if server is not None:
                server.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S + 0.5):
                    await runner.cleanup()

    def _log_start(
        self, live: Runtime, config: Api, server: asyncio.Server, context: ssl.SSLContext | None
    ) -> None:
        """Write the address it listens on to the log, and to a file for commands on this host."""
        port = server.sockets[0].getsockname()[1]
        host = f"[{config.host}]" if ":" in config.host else config.host
        self.url = f"{'https' if context else 'http'}://{host}:{port}"
        log.info(
            "the page is %s/; `racktwin token link --config %s` prints the link to log in",
            self.url,
            live.loaded.path,
        )
        if config.port == 0:
            with contextlib.suppress(OSError):
                live.loaded.state.mkdir(parents=True, exist_ok=True)
                write_private(live.loaded.state / URL_FILE, self.url + "\n")
        self.bound.set()


async def _bind(runner: web.AppRunner, config: Api, context: ssl.SSLContext | None) -> asyncio.Server:
    server = runner.server
    assert server is not None

    loop, quiet = asyncio.get_running_loop(), _quiet()

    def protocol() -> asyncio.Protocol:
        clients = [c for c in server.connections if isinstance(c, _Connection) and not c.leaving]
        if len(clients) >= config.max_clients:
            stranger = next((c for c in clients if not c.admitted), None)  # the one that is here longest
            if stranger is None:
                return _Busy()
            stranger.give_way()
        return _Connection(
            server,
            loop=loop,
            access_log=cast(Any, None),
            logger=quiet,
            keepalive_timeout=IDLE_S,
            max_line_size=MAX_LINE,
            max_field_size=MAX_FIELD,
        )

    more: dict[str, Any] = {"ssl_handshake_timeout": HANDSHAKE_S} if context is not None else {}
    try:
        return await loop.create_server(
            protocol, config.host, config.port, ssl=context, backlog=128, reuse_address=True, **more
        )
    except (OSError, socket.gaierror) as error:
        raise ConnectorError(
            f"{config.host}:{config.port}: cannot listen there: {error.strerror}; expected a free "
            "port: end what listens there, or set `api: {port: ...}`"
        ) from None


def _quiet() -> logging.Logger:
    """aiohttp logs malformed requests as they came, and they may hold a token: where it failed is enough."""
    quiet = logging.getLogger("racktwin.http")
    quiet.addFilter(_bare)
    return quiet


def _bare(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    record.exc_text, record.args = None, ()
    if error is None or isinstance(error, HttpProcessingError):
        return False
    record.msg, record.exc_info = "a request could not be answered", access.bare(error)
    return True
