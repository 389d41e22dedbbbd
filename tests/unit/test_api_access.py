"""Access to the interface: every refusal is answered, counted and journaled; none shows a token."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_process_daemon import Pod, serving
from twin.api.access import FREE_TRIES, MAX_LINES, WINDOW_S, Refusals
from twin.api.public import ROUTES
from twin.api.routes import Route
from twin.api.tokens import ROLES, add_token
from twin.contracts import fields_of

ROLE_OF = {
    "/healthz": None, "/readyz": None, "/": None, "/page/{file}": None,
    "/v1/jobs/{job}": "job", "/v1/jobs/{job}/checkpoint": "job", "/api/v1/jobs/{job}/checkpoint": "job",
    "/api/v1/tokens": "admin", "/api/v1/release": "admin", "/api/v1/authority": "admin",
    "/api/v1/reload": "admin", "/api/v1/ledger": "job",
    "/api/v1/whoami": "job",
}  # fmt: skip


def test_who_looks_is_a_viewer_and_who_acts_an_operator() -> None:
    for route in ROUTES:
        usual = "viewer" if route.method == "GET" else "operator"
        if route.method == "POST" and route.path == "/api/v1/site/change":
            usual = "admin"  # it writes the site file
        assert route.role == ROLE_OF.get(route.path, usual), (route.method, route.path)


def concrete(route: Route) -> str:
    """A path that the route's pattern meets."""
    path = route.path
    values = {"table": "rack", "name": "lab/h/r1", "id": "nobody", "job": "1", "file": "app.js"}
    for name, value in values.items():
        path = path.replace(f"{{{name}}}", value)
    return path


def test_every_route_takes_its_role_and_open_ones_are_few(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as pod:
            pod.secrets["job"] = add_token(pod.tokens_file, "job.1", "job")  # a job that does not run
            pod.tokens.reload()
            for route in ROUTES:
                path = concrete(route)
                if route.role is None:
                    assert path in ("/healthz", "/readyz", "/", "/page/app.js")
                    status, _ = await pod.ask(route.method, path, "none")
                    assert status == 200, path
                    continue
                got = {r: (await pod.ask(route.method, path, r, b"not json"))[0] for r in ("none", "wrong")
                       if path != "/api/v1/events"}  # fmt: skip
                assert set(got.values()) <= {401, 429}, (path, got)
                small = ROLES[: ROLES.index(route.role)]
                for role in small:
                    status, said = await pod.ask(route.method, path, role, b"not json")
                    assert status == 403, (path, role, said)
                if path != "/api/v1/events":
                    status, said = await pod.ask(route.method, path, route.role, b"not json")
                    assert status in (200, 400, 404, 409, 503), (path, said)
                    assert "fault of the daemon" not in str(said), (path, said)

    asyncio.run(main())


def test_refusals_are_journaled_with_who_and_why_and_without_the_token(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    async def main() -> None:
        async with serving(tmp_path) as pod:
            body = {"reason": "x"}
            assert (await pod.ask("POST", "/api/v1/hold", "none", body))[0] == 401
            assert (await pod.ask("POST", "/api/v1/hold", "wrong", body))[0] == 401
            assert (await pod.ask("POST", "/api/v1/hold", "viewer", body))[0] == 403
            assert pod.twin.engine.arbiter.mode == "normal"
            told = [(kind, n["remote"], n["why"], n["path"], n.get("name")) for kind, n in pod.notes]
            assert told == [
                ("access", "127.0.0.1", "no token", "/api/v1/hold", None),
                ("access", "127.0.0.1", "no such token", "/api/v1/hold", None),
                ("access", "127.0.0.1", "role too small", "/api/v1/hold", "viewer-1"),
            ]
            # A token in the wrong place is refused as well, and repeated nowhere.
            secret = pod.secrets["admin"]
            said = [await pod.ask("GET", f"/api/v1/whoami?token={secret}", "none"),
                    await pod.ask("GET", f"/api/v1/{secret}", "none"),
                    await pod.ask("GET", f"/api/v1/state/{secret}", "wrong"),
                    await pod.ask("GET", "/api/v1/whoami", "none", Authorization=f"Basic {secret}"),
                    await pod.ask("GET", "/api/v1/whoami", "none", Cookie=f"token={secret}")]  # fmt: skip
            assert {status for status, _ in said} == {401}
            raw = await exchange(
                pod, f"GET /x HTTP/1.1\r\nHost: localhost\r\nAuthorization: {secret}\x01\r\n\r\n"
            )
            assert b" 400 " in raw.split(b"\r\n")[0]
            everything = f"{said} {pod.notes} {caplog.text} {raw!r} {pod.live.lines}"
            for secret in pod.secrets.values():
                assert secret not in everything
                assert secret[5:] not in everything

    asyncio.run(main())


async def exchange(pod: Pod, text: str) -> bytes:
    """Return the server's answer to these bytes, until it closes the connection or for a while."""
    host, port = pod.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(text.encode())
    try:
        async with asyncio.timeout(5):
            out = await reader.read(65536)
    finally:
        writer.close()
        await writer.wait_closed()
    return out


def test_guesses_have_to_wait_but_a_right_token_never_does(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as pod:
            got = [(await pod.ask("GET", "/api/v1/whoami", "wrong"))[0] for _ in range(FREE_TRIES + 4)]
            assert got[:FREE_TRIES] == [401] * FREE_TRIES
            assert got[-1] == 429
            assert (await pod.ask("GET", "/api/v1/whoami", "viewer"))[0] == 200

    asyncio.run(main())


def test_a_foreign_host_name_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as pod:
            for host, expected in (("evil.example", 421), ("localhost:1", 200), ("[::1]:8077", 200),
                                   ("127.0.0.1", 200),
                                   ("127.0.0.1.evil.example", 421), ("", 421)):  # fmt: skip
                for path in ("/healthz", "/api/v1/whoami", "/"):
                    status, _ = await pod.ask("GET", path, "viewer", Host=host)
                    assert status == expected, (host, path)
            assert any(n["why"] == "foreign host name" for _, n in pod.notes)

    asyncio.run(main())


def test_answers_bear_headers_that_keep_browsers_out(tmp_path: Path) -> None:
    import aiohttp

    async def main() -> None:
        async with serving(tmp_path) as pod, aiohttp.ClientSession() as session:
            for path in ("/", "/healthz", "/api/v1/state", "/nowhere"):
                headers = pod.head("viewer") | {"Origin": "http://evil.example"}
                async with session.get(pod.url + path, headers=headers) as response:
                    assert response.headers["X-Content-Type-Options"] == "nosniff"
                    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
                    kept = "no-cache" if path == "/" else "no-store"  # the page holds nothing of the site
                    assert response.headers["Cache-Control"] == kept
                    assert "aiohttp" not in response.headers["Server"].lower()
                    assert not [h for h in response.headers if h.lower().startswith("access-control")]

    asyncio.run(main())


class Watch:
    """A clock by hand, and the notes that were written."""

    def __init__(self) -> None:
        self.now_s, self.notes = 1000.0, list[dict[str, Any]]()
        self.refusals = Refusals(lambda record: self.notes.append(fields_of(record)), lambda: self.now_s)


def test_the_same_refusal_is_one_line_a_window() -> None:
    watch = Watch()
    for _ in range(1000):
        watch.refusals.log("10.0.0.1", "no token", path="/x")
    assert [n["count"] for n in watch.notes] == [1]
    watch.now_s += WINDOW_S
    watch.refusals.flush()
    assert [n["count"] for n in watch.notes] == [1, 999]
    assert sum(n["count"] for n in watch.notes) == watch.refusals.counts["no token"]
    watch.refusals.log("10.0.0.1", "no token", path="/x")
    assert [n["count"] for n in watch.notes] == [1, 999, 1]


def test_a_flood_from_everywhere_is_bounded_and_all_of_it_is_counted() -> None:
    watch = Watch()
    for i in range(20_000):
        watch.refusals.log(f"10.0.{i // 250}.{i % 250}", "no token", path="/x")
    assert len(watch.notes) <= MAX_LINES
    watch.refusals.flush(everything=True)
    assert len(watch.notes) <= MAX_LINES + 1
    assert sum(n["count"] for n in watch.notes) == 20_000
    assert watch.notes[-1]["remote"] == "others"


def test_waiting_grows_and_ends() -> None:
    watch = Watch()
    waits = []
    for _ in range(30):
        watch.refusals.wrong("10.0.0.1")
        waits.append(watch.refusals.wait_s("10.0.0.1"))
    assert waits[:FREE_TRIES] == [0.0] * FREE_TRIES
    assert waits[FREE_TRIES : FREE_TRIES + 3] == [1.0, 2.0, 4.0]
    assert max(waits) == 60.0
    assert watch.refusals.wait_s("10.0.0.2") == 0.0
    watch.now_s += 61
    assert watch.refusals.wait_s("10.0.0.1") == 0.0
