"""Outlook services behind a real HTTP server that stands in for them, and misbehaves as servers do.

The answers are written from public documentation; no live service was ever asked.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from aiohttp import web

from connectors.outlooks import (
    ElectricityMaps,
    EntsoePrices,
    HttpsClient,
    OpenMeteo,
    OutlookAnswer,
    OutlookProvider,
    ServiceError,
    WattTime,
)
from tests.support.tls_peers import TlsServer, issue_papers
from twin.catalogue import NS, BadMessage

NOW = datetime(2026, 1, 15, 10, 20, tzinfo=UTC)
NOW_NS = round(NOW.timestamp()) * NS
HOUR = NOW.replace(minute=0)
KEY = "s3cret-key"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get("/{tail:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def fetch(
    handler: Handler, provider: Callable[[str], OutlookProvider], times: int = 1
) -> tuple[OutlookAnswer, HttpsClient]:
    async def ask() -> tuple[OutlookAnswer, HttpsClient]:
        async with served(handler) as url, HttpsClient(5.0) as client:
            made = provider(url)
            for _ in range(times):
                found = await made.fetch(client, NOW_NS)
            return found, client

    return asyncio.run(ask())


def maps(url: str) -> OutlookProvider:
    return ElectricityMaps("DE", KEY, url)


def forecast(count: int = 24) -> str:
    rows = [
        {"carbonIntensity": 300, "datetime": f"{HOUR + timedelta(hours=h):%Y-%m-%dT%H:%M:%SZ}"}
        for h in range(count)
    ]
    return json.dumps({"zone": "DE", "forecast": rows, "updatedAt": f"{HOUR:%Y-%m-%dT%H:%M:%SZ}"})


async def carbon(request: web.Request) -> web.StreamResponse:
    if request.headers.get("auth-token") != KEY:
        return web.json_response({"error": "Invalid auth-token"}, status=401)
    if request.path.endswith("latest"):
        latest = {"zone": "DE", "carbonIntensity": 310, "datetime": f"{HOUR:%Y-%m-%dT%H:%M:%SZ}"}
        return web.json_response(latest)
    assert request.query["zone"] == "DE"
    return web.Response(text=forecast(), content_type="application/json")


def test_carbon_intensity_comes_with_its_present_value() -> None:
    found, _ = fetch(carbon, maps)
    assert len(found.series[0].values) == 24
    assert [r.value for r in found.readings] == [310.0]


def test_a_plan_without_the_latest_value_has_its_forecast() -> None:
    async def partly(request: web.Request) -> web.StreamResponse:
        return web.Response(status=403) if request.path.endswith("latest") else await carbon(request)

    found, _ = fetch(partly, maps)
    assert len(found.series[0].values) == 24
    assert found.readings == ()


def test_prices_are_asked_for_by_the_hour_in_utc_with_the_key_in_no_message() -> None:
    asked = []

    async def prices(request: web.Request) -> web.StreamResponse:
        asked.append(dict(request.query))
        return web.Response(status=401, text=f"<Reason>token {KEY} is not valid</Reason>")

    with pytest.raises(ServiceError) as refused:
        fetch(prices, lambda url: EntsoePrices("10YFR-RTE------C", KEY, {"EUR": 1.1}, url))
    assert asked[0] == {
        "documentType": "A44", "in_Domain": "10YFR-RTE------C", "out_Domain": "10YFR-RTE------C",
        "periodStart": "202601150800", "periodEnd": "202601171000", "securityToken": KEY,
        "contract_MarketAgreement.type": "A01",
    }  # fmt: skip
    assert refused.value.refused
    assert "check the key" in str(refused.value)
    assert KEY not in str(refused.value)


def test_weather_is_asked_for_in_seconds_since_1970() -> None:
    units = {"temperature_2m": "°C", "relative_humidity_2m": "%", "surface_pressure": "hPa"}

    async def weather(request: web.Request) -> web.StreamResponse:
        assert request.query["timeformat"] == "unixtime"
        assert request.query["timezone"] == "GMT"
        hours = [int(HOUR.timestamp()) + 3600 * h for h in range(4)]
        columns = {name: [50.0 if unit == "%" else 20.0] * 4 for name, unit in units.items()}
        return web.json_response({"hourly_units": units, "hourly": {"time": hours, **columns}})

    found, _ = fetch(weather, lambda url: OpenMeteo(50.1, 8.7, None, url))
    assert [s.quantity for s in found.series] == ["site.outdoor_temp_c", "site.outdoor_wet_bulb_c"]


class WattTimeServer:
    """Gives tokens, and takes only the newest."""

    def __init__(self) -> None:
        self.logins = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        said = request.headers.get("Authorization", "")
        if request.path == "/login":
            if said != "Basic YW5uOndvcmQ=":
                return web.Response(status=403)
            self.logins += 1
            return web.json_response({"token": f"t{self.logins}"})
        if said != f"Bearer t{self.logins}":
            return web.Response(status=401)
        rows = [
            {"point_time": f"{HOUR + timedelta(minutes=5 * i):%Y-%m-%dT%H:%M:%S}+00:00", "value": 800.0}
            for i in range(30)
        ]
        return web.json_response({"data": rows, "meta": {"units": "lbs_co2_per_mwh"}})


def test_one_login_serves_many_requests_and_a_refused_token_is_renewed() -> None:
    server = WattTimeServer()
    fetch(server.answer, lambda url: WattTime("CAISO_NORTH", "ann", "word", "co2_moer", url), times=3)
    assert server.logins == 1

    async def renewed() -> None:
        async with served(server.answer) as url, HttpsClient(5.0) as client:
            reader = WattTime("CAISO_NORTH", "ann", "word", "co2_moer", url)
            await reader.fetch(client, NOW_NS)
            server.logins += 1  # somebody else logged in: our token is no more
            assert (await reader.fetch(client, NOW_NS)).series

    asyncio.run(renewed())
    with pytest.raises(ServiceError, match="403") as refused:
        fetch(server.answer, lambda url: WattTime("CAISO_NORTH", "ann", "wrong", "co2_moer", url))
    assert refused.value.refused


def test_who_asks_too_often_is_told_when_to_ask_again() -> None:
    later = format_datetime(NOW + timedelta(minutes=10), usegmt=True)
    for header, seconds in (("120", 120.0), (later, 600.0), ("soon", 0.0), ("-5", 0.0), ("9" * 11, 21_600.0)):

        async def busy(request: web.Request, header: str = header) -> web.StreamResponse:
            return web.Response(status=429, headers={"Retry-After": header})

        with pytest.raises(ServiceError) as refused:
            fetch(busy, maps)
        assert (refused.value.after_s, refused.value.refused) == (seconds, False), header


def test_a_redirect_is_told_and_not_followed() -> None:
    seen = []

    async def moved(request: web.Request) -> web.StreamResponse:
        seen.append(request.path)
        raise web.HTTPMovedPermanently("https://elsewhere.example.net/v4?auth=1")

    with pytest.raises(ServiceError, match=r"301 to elsewhere\.example\.net/v4; redirects are not followed"):
        fetch(moved, maps)
    assert len(seen) == 1


def test_half_an_answer_is_none() -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        text = forecast().encode()
        response = web.StreamResponse(headers={"Content-Length": str(len(text))})
        await response.prepare(request)
        await response.write(text[: len(text) // 2])
        assert request.transport is not None
        request.transport.close()
        return response

    async def cut(request: web.Request) -> web.StreamResponse:
        return web.Response(text=forecast()[:400], content_type="application/json")

    with pytest.raises(ServiceError, match="ended early"):
        fetch(half, maps)
    with pytest.raises(BadMessage, match="no whole JSON"):
        fetch(cut, maps)


def test_wrong_content_and_endless_content_are_refused() -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>maintenance</html>", content_type="text/html")

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(100):
            await response.write(b" " * 2**17)
        return response

    with pytest.raises(BadMessage, match="HTML"):
        fetch(page, maps)
    with pytest.raises(ServiceError, match="an answer of more than"):
        fetch(endless, maps)


def test_a_clock_that_differs_is_measured() -> None:
    async def early(request: web.Request) -> web.StreamResponse:
        answer = await carbon(request)
        answer.headers["Date"] = format_datetime(NOW + timedelta(hours=2), usegmt=True)
        return answer

    _, client = fetch(early, maps)
    assert client.ahead_s == 7200.0


@pytest.mark.parametrize("kind", ["expired", "other-host", "wrong-authority"])
def test_no_key_goes_to_a_server_that_cannot_prove_who_it_is(kind: str, tmp_path: Path) -> None:
    papers = issue_papers(tmp_path)[kind]

    async def ask(port: int) -> None:
        async with HttpsClient(5.0, str(papers.trusted)) as client:
            await ElectricityMaps("DE", KEY, f"https://127.0.0.1:{port}").fetch(client, NOW_NS)

    with TlsServer(papers) as server:
        with pytest.raises(ServiceError, match="certificate is not trusted"):
            asyncio.run(ask(server.port))
        assert server.heard() == b""


def test_a_server_with_sound_papers_is_asked(tmp_path: Path) -> None:
    papers = issue_papers(tmp_path)["sound"]

    async def ask(port: int) -> None:
        async with HttpsClient(5.0, str(papers.trusted)) as client:
            await ElectricityMaps("DE", KEY, f"https://127.0.0.1:{port}").fetch(client, NOW_NS)

    with TlsServer(papers) as server:
        with pytest.raises(BadMessage, match="no list `forecast`"):
            asyncio.run(ask(server.port))
        assert b"auth-token: " + KEY.encode() in server.heard()
