"""The body of an answer is read whole up to its limit, and no further; a failure says what to look at."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from connectors.http_answer import body_of, failing_as

PART, PARTS, LIMIT = b"x" * 1000, 50_000, 100_000


class TooLong(Exception):
    pass


def test_no_further_than_the_limit(tmp_path: Path) -> None:
    """A server that never says how long its answer is, on a socket of this test's own."""
    sent = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        sent = 0
        while sent < int(request.query["parts"]):
            await response.write(PART)
            sent += 1
        return response

    async def play() -> None:
        app = web.Application()
        app.router.add_get("/", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "socket")).start()
        try:
            connector = aiohttp.UnixConnector(str(tmp_path / "socket"))
            async with aiohttp.ClientSession("http://box", connector=connector) as session:
                async with session.get("/?parts=100") as whole:
                    assert await body_of(whole, "here", LIMIT, TooLong) == PART * 100
                async with session.get(f"/?parts={PARTS}") as long:
                    with pytest.raises(TooLong, match=r"^here: an answer of more than 100000 bytes$"):
                        await body_of(long, "here", LIMIT, TooLong)
        finally:
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(play(), 60))
    assert 100 < sent < PARTS / 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TimeoutError(), "no complete answer within 5 s"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "check that the server runs, and its port"),
        (OSError(errno.EHOSTUNREACH, "x"), "check the address and the firewalls"),
        (aiohttp.ServerDisconnectedError(), "closed without an answer"),
        (aiohttp.ClientPayloadError("x"), "the answer ended early"),
        (aiohttp.InvalidURL("http://me:secret@host"), "is not a valid URL"),
        (ValueError("odd"), "ValueError: odd"),
    ],
)
def test_a_failure_says_what_to_look_at(error: Exception, said: str) -> None:
    with pytest.raises(TooLong) as caught, failing_as(TooLong, "here", 5.0):
        raise error
    assert str(caught.value).startswith("here: ")
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)
