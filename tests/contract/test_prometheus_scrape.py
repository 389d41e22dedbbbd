"""Scraping real servers: prometheus_client's own exporter, and ones that misbehave."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from connectors import prometheus
from connectors.prometheus import PageDecoder, PrometheusSource, ScrapeSettings
from connectors.series_map import load_map
from tests.support.builders import site_of, two_racks
from tests.support.inlets import until
from tests.support.patience import PATIENCE_S
from twin.catalogue import TABLES, ConnectorError
from twin.config import Config, Loaded, Scrape
from twin.contracts import Item
from twin.site import Site
from twin.telemetry import Block, Inbox, State
from twin.wiring import make_scrapes

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
PAGE = "".join(f'DCGM_FI_DEV_POWER_USAGE{{gpu="{g}",Hostname="x"}} {100 + g}\n' for g in range(4))


class Kept:
    """An inlet that keeps what it is given."""

    def __init__(self, site: Site) -> None:
        self.inbox = Inbox(site.sizes)
        self.staged: list[Item] = []
        self.spoiled: list[str] = []
        self.poll_s = 0.0

    def stage(self, items: Sequence[Item], now_ns: int, poll_s: float = 0.0) -> None:
        self.poll_s = poll_s
        for item in items:
            self.staged.append(item)
            (self.inbox.put_block if isinstance(item, Block) else self.inbox.put)(item, now_ns)  # type: ignore[arg-type]

    def of(self, source: str, outside: bool = False) -> Self:
        return self

    def skip(self, what: str, why: str, example: str = "", remedy: str = "") -> None: ...

    def reject(self, where: str, why: str, remedy: str = "") -> None:
        self.spoiled.append(f"{where}: {why}")

    def fail(self, why: str, remedy: str = "") -> None:
        self.spoiled.append(why)

    def drop(self, where: str, why: str, count: int = 1) -> None: ...


@pytest.fixture(scope="module")
def site() -> Site:
    return site_of(two_racks())


@asynccontextmanager
async def served(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/{tail:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    server = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await server.start()
    port = runner.addresses[0][1]
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}/metrics"
    finally:
        await runner.cleanup()


def source(site: Site, url: str, **more: Any) -> PrometheusSource:
    settings = ScrapeSettings(**{"period_s": 0.05, "place": "r1/node0", **more})
    return PrometheusSource(url, "dcgm", site, settings)


def test_a_real_exporter_fills_the_state(site: Site) -> None:
    registry = CollectorRegistry()
    power = Gauge("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", ["gpu", "Hostname"], registry=registry)
    xid = Gauge("DCGM_FI_DEV_XID_ERRORS", "Last XID.", ["gpu", "Hostname"], registry=registry)
    replays = Counter("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "Retries.", ["gpu", "Hostname"], registry=registry)
    for g in range(4):
        power.labels(str(g), "r1/node1").set(1000 + g)
        xid.labels(str(g), "r1/node1").set(0)
        replays.labels(str(g), "r1/node1").inc(7)
    server, thread = start_http_server(0, "127.0.0.1", registry)

    async def scrape() -> Kept:
        inlet = Kept(site)
        task = asyncio.create_task(source(site, f"http://127.0.0.1:{server.server_port}/metrics").run(inlet))
        try:
            await until(lambda: bool(inlet.staged), task=task)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        return inlet

    try:
        inlet = asyncio.run(scrape())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert not inlet.spoiled
    assert inlet.poll_s == 0.05, "a scrape brings its own period"
    state = State(site.sizes)
    now_ns = time.time_ns()
    state.apply(inlet.inbox.take(0, now_ns, 1.0))
    row = TABLES["gpu"].by_name["power_w"].row
    assert state.tables["gpu"].value[row, 4:8].tolist() == [1000, 1001, 1002, 1003]


def failing(site: Site, answer: Answer, **more: Any) -> tuple[str, Kept]:
    """The error that ends a source whose exporter answers like this."""

    async def scrape() -> tuple[str, Kept]:
        inlet = Kept(site)
        async with served(answer) as url:
            with pytest.raises(ConnectorError) as caught:
                await asyncio.wait_for(source(site, url, **more).run(inlet), PATIENCE_S)
        return str(caught.value), inlet

    return asyncio.run(scrape())


def reply(status: int = 200, **more: Any) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, **more)

    return answer


def test_an_exporter_that_fails_is_told_and_then_given_up(site: Site) -> None:
    why, inlet = failing(site, reply(500, text=PAGE))
    assert "answers 500; expected 200" in why
    assert len(inlet.spoiled) == prometheus.FAILURES
    assert not inlet.staged


def test_an_exporter_that_was_given_up_is_so_at_its_next_failure_until_it_answers(site: Site) -> None:
    """A supervisor that starts it again sees at once that it is still away."""
    status = 500

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=PAGE)

    async def scrape() -> list[int]:
        nonlocal status
        async with served(answer) as url:
            scraped, rejected = source(site, url), list[int]()
            for _ in range(2):
                inlet = Kept(site)
                with pytest.raises(ConnectorError):
                    await asyncio.wait_for(scraped.run(inlet), PATIENCE_S)
                rejected.append(len(inlet.spoiled))
            status, inlet = 200, Kept(site)
            task = asyncio.create_task(scraped.run(inlet))
            while not inlet.staged:
                await asyncio.sleep(0.01)
            status = 500
            with pytest.raises(ConnectorError):
                await asyncio.wait_for(task, PATIENCE_S)
            return [*rejected, len(inlet.spoiled)]

    most = prometheus.FAILURES
    assert asyncio.run(scrape()) == [most, 1, most]


def test_a_redirect_is_not_followed(site: Site) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return web.Response(status=302, headers={"Location": "/elsewhere"})

    why, _ = failing(site, answer)
    assert "answers 302" in why
    assert set(asked) == {"/metrics"}


def test_half_a_page_is_none(site: Site) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        half = web.StreamResponse(headers={"Content-Length": "100000"})
        await half.prepare(request)
        await half.write(PAGE.encode())
        assert request.transport is not None
        request.transport.close()
        return half

    why, inlet = failing(site, answer)
    assert "the answer ended early" in why or "closed without an answer" in why
    assert not inlet.staged


def test_a_slow_page_is_none(site: Site) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        slow = web.StreamResponse()
        await slow.prepare(request)
        with suppress(ConnectionError, asyncio.CancelledError):
            while True:
                await slow.write(b"#")
                await asyncio.sleep(0.02)
        return slow

    why, _ = failing(site, answer, timeout_s=0.3)
    assert "no complete answer within 0.3 s" in why


def test_an_endless_page_is_cut(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "MAX_PAGE", 1 << 20)

    async def answer(request: web.Request) -> web.StreamResponse:
        page = web.StreamResponse()
        await page.prepare(request)
        with suppress(ConnectionError, asyncio.CancelledError):
            while True:
                await page.write(b"# " + b"x" * 65_000 + b"\n")
        return page

    why, _ = failing(site, answer)
    assert "an answer of more than 1048576 bytes" in why


def test_nobody_there_is_told_without_the_password(site: Site, unused_port: int) -> None:
    async def scrape() -> str:
        with pytest.raises(ConnectorError) as caught:
            await source(site, f"http://me:s3cret@127.0.0.1:{unused_port}/m", token="t0ken").run(Kept(site))
        return str(caught.value)

    why = asyncio.run(scrape())
    assert f"http://127.0.0.1:{unused_port}/m" in why
    assert "s3cret" not in why
    assert "t0ken" not in why


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def test_garbage_is_counted_and_the_link_stays(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage, packed pages, half-garbage; then a good page, with the token and past any proxy."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    bodies = [
        b"<html>",
        b"\x1f\x8b" + b"\x00" * 50,
        PAGE.encode() + b'DCGM_FI_DEV_POWER_USAGE{gpu="1"} hot\n',
    ]
    tokens: set[str | None] = set()

    async def answer(request: web.Request) -> web.StreamResponse:
        tokens.add(request.headers.get("Authorization"))
        body = bodies.pop(0) if bodies else PAGE.encode()
        packed = {"Content-Encoding": "gzip"} if body[:1] == b"\x1f" else {}
        return web.Response(body=body, headers=packed)

    async def scrape() -> Kept:
        inlet = Kept(site)
        async with served(answer) as url:
            task = asyncio.create_task(source(site, url, token="abc").run(inlet))
            try:
                await until(lambda: not bodies and len(inlet.staged) > 8, task=task)
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        return inlet

    inlet = asyncio.run(scrape())
    assert tokens == {"Bearer abc"}
    assert len([s for s in inlet.spoiled if "no series to read" in s or "a page of HTML" in s]) == 2
    assert len([s for s in inlet.spoiled if "hot" in s]) == 1


def test_https_needs_trust_and_an_identity(site: Site, tmp_path: Path, server: Callable[..., Path]) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    made = (
        "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
        "-keyout", key, "-out", cert, "-subj", "/CN=exporter", "-addext", "subjectAltName=IP:127.0.0.1",
    )  # fmt: skip
    subprocess.run([str(server("openssl")), *made], check=True, capture_output=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=cert)
    tls.load_cert_chain(cert, key)
    tls.verify_mode = ssl.CERT_REQUIRED

    async def story() -> Kept:
        inlet = Kept(site)
        async with served(reply(text=PAGE), tls) as url:
            for files in ({}, {"ca_file": cert}):
                with pytest.raises(
                    ConnectorError, match=r"its certificate|a client certificate|closed|reset"
                ):
                    await asyncio.wait_for(source(site, url, **files).run(inlet), PATIENCE_S)
            assert not inlet.staged
            mine = source(site, url, ca_file=cert, cert_file=cert, key_file=key)
            task = asyncio.create_task(mine.run(inlet))
            try:
                await until(lambda: bool(inlet.staged), task=task)
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        return inlet

    assert asyncio.run(story()).staged


@pytest.mark.parametrize("own", [0, 50_000])
def test_a_large_page_holds_up_no_loop(site: Site, own: int) -> None:
    """Exporters of a whole fabric or cluster have pages of many megabytes, most of it of no interest."""
    foreign = b'kube_pod_info{namespace="default",pod="a-0001",uid="1",node="n1"} 1\n' * (200_000 - 3 * own)
    ours = b"".join(
        b'DCGM_FI_DEV_POWER_USAGE{gpu="%d",Hostname="x",uuid="%d"} 1\n' % (i % 4, i) for i in range(own)
    )
    decoder = PageDecoder(site, *load_map("dcgm"), "lab/h/r1/node0")
    page = foreign + ours + PAGE.encode()

    async def story() -> tuple[int, int]:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        found = await decoder.read(page, time.time_ns())
        task.cancel()
        return turns, len(found)

    turns, count = asyncio.run(story())
    assert count == own + 4
    assert turns > len(foreign) // 100_000 + 2 * own // 300


def test_a_token_that_was_renewed_is_read_again(site: Site, tmp_path: Path) -> None:
    """Tokens of Kubernetes live for an hour; meanwhile a file may be absent."""
    valid, seen = "first", list[str]()
    file = tmp_path / "token"
    file.write_text("first\n")

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request.headers["Authorization"])
        return web.Response(text=PAGE) if seen[-1] == f"Bearer {valid}" else web.Response(status=401)

    async def story() -> None:
        nonlocal valid
        async with served(answer) as url:
            scrape = Scrape(url=url, map="dcgm", period_s=0.2, timeout_s=2.0, token_file="token")
            config = Config(site="site.yaml", broker="embedded", scrapes=[scrape])
            (one,) = make_scrapes(Loaded(config, tmp_path / "racktwin.yaml"), site)
            inlet = Kept(site)
            task = asyncio.create_task(one.run(inlet))
            await until(lambda: len(seen) > 1, "the first token", task)
            valid = "second"
            file.unlink()
            await until(lambda: inlet.spoiled, "the refusal", task)
            file.write_text("second\n")
            await until(lambda: seen[-1] == "Bearer second", "the second token")
            task.cancel()

    asyncio.run(story())
