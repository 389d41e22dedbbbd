"""Live updates: each client gets what is new, learns what it missed, and cannot make the daemon keep more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.in_process_daemon import Pod, serving
from twin.api import updates as api_updates
from twin.api.tokens import revoke_token
from twin.api.updates import KEPT, QUEUE, Update, Updates, Watcher
from twin.config import Api


class Stream:
    """A reader of server-sent events."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response

    async def next(self, kind: str = "") -> tuple[str, str, Any]:
        """(kind, id, data) of the next event, or of the next one of a kind."""
        async with asyncio.timeout(10):
            while True:
                block = (await self.response.content.readuntil(b"\n\n")).decode()
                said = dict(
                    line.split(": ", 1) for line in block.splitlines() if ": " in line and line[0] != ":"
                )
                if "data" in said and kind in ("", said["event"]):
                    return said["event"], said.get("id", ""), json.loads(said["data"])

    async def until(self, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The events so far by kind, once they are as expected. Kinds come in any order: a second may end
        between a tick and its decisions."""
        told: dict[str, Any] = {}
        while not true(told):
            kind, identity, tree = await self.next()
            told[kind] = told.get(kind, {}) | tree | {"id": identity}
        return told


@asynccontextmanager
async def watching(pod: Pod, **headers: str) -> AsyncIterator[Stream]:
    """A client that follows."""
    given = pod.head("viewer") | {k.replace("_", "-"): v for k, v in headers.items()}
    async with (
        aiohttp.ClientSession() as session,
        session.get(pod.url + "/api/v1/events", headers=given) as response,
    ):
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        yield Stream(response)


def test_a_client_gets_the_state_at_once_and_decisions_as_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_updates, "EVERY_S", 0.05)

    async def main() -> None:
        async with serving(tmp_path) as pod, watching(pod) as stream:
            kind, _, first = await stream.next()
            assert (kind, first["site"], first["ticks"]["tick"]) == ("state", "lab", 0)
            pod.tick({"gpu.temp_c": 95.0})
            told = await stream.until(
                lambda told: (
                    {"decisions", "alarms", "state"} <= told.keys()
                    and told["alarms"]["counts"]["critical"] == 1
                    and told["state"].get("ticks", {}).get("tick") == 1
                )
            )
            assert told["decisions"]["id"]
            assert {d["kind"] for d in told["decisions"]["decisions"]} == {"finding", "advice"}
            pod.tick({"gpu.temp_c": 40.0, "rack.flow_lpm": 96.0})
            _, _, alarms = await stream.next("alarms")
            assert alarms["counts"]["critical"] == 0

    asyncio.run(main())


def test_who_comes_back_gets_what_it_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_updates, "EVERY_S", 0.05)

    async def main() -> None:
        async with serving(tmp_path) as pod:
            async with watching(pod) as stream:
                pod.tick({"gpu.temp_c": 95.0})
                _, identity, first = await stream.next("decisions")
            async with watching(pod) as other:
                await other.next("state")
                pod.tick({"gpu.temp_c": 40.0})
                _, last, second = await other.next("decisions")
            async with watching(pod, Last_Event_ID=identity) as stream:
                seen = []
                while (event := await stream.next())[0] != "state":
                    seen.append(event)
                kept = [tree for kind, _, tree in seen if kind == "decisions"]
                assert kept == [second]
                assert "missed" not in [kind for kind, _, _ in seen]
            async with watching(pod, Last_Event_ID=last) as stream:
                assert (await stream.next())[0] in ("alarms", "state")
            async with watching(pod, Last_Event_ID="another-run.5") as stream:
                assert (await stream.next())[::2] == ("missed", {"count": None})
            assert first != second

    asyncio.run(main())


def test_there_is_room_for_so_many_and_who_leaves_makes_room(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, Api(port=0, max_clients=4)) as pod:
            async with watching(pod), watching(pod):
                status, tree = await pod.ask("GET", "/api/v1/events")
                assert (status, "2 clients watch already" in tree["error"]) == (503, True)
            async with asyncio.timeout(10):
                while True:
                    try:
                        async with watching(pod) as stream:
                            await stream.next("state")
                            break
                    except AssertionError:
                        await asyncio.sleep(0.01)

    asyncio.run(main())


def test_the_stream_ends_when_the_daemon_does(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path) as pod, aiohttp.ClientSession() as session:
            response = await session.get(pod.url + "/api/v1/events", headers=pod.head("viewer"))
            await Stream(response).next("state")
            for queue in list(pod.live._followers):
                queue.put_nowait(None)
            async with asyncio.timeout(10):
                await response.content.read()
            status, _ = await pod.ask("GET", "/api/v1/events")
            assert status == 503

    asyncio.run(main())


@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_the_stream_ends_with_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(api_updates, "EVERY_S", 0.05)

    async def main() -> None:
        async with serving(tmp_path) as pod, watching(pod) as stream:
            await stream.next("alarms")
            if end == "revoked":
                revoke_token(pod.tokens_file, "viewer-1")
                pod.tokens.reload()
            else:
                pod.tokens._ends["viewer-1"] = 0.0
            async with asyncio.timeout(5):
                await stream.response.content.read()  # to its end

    asyncio.run(main())


def test_a_slow_client_loses_the_oldest_and_is_told_how_many() -> None:
    watcher = Watcher()
    for number in range(QUEUE + 10):
        watcher.give(Update(number, "decisions", b""))
    assert watcher.missed == 10
    assert watcher.waiting.qsize() == QUEUE
    first = watcher.waiting.get_nowait()
    assert first is not None
    assert first.number == 10


def test_what_is_kept_for_those_who_come_back_has_a_bound(tmp_path: Path) -> None:
    updates = Updates(Pod(tmp_path).live)
    for _ in range(KEPT + 50):
        updates.send("decisions", {})
    assert len(updates.kept) == KEPT
    assert updates.since(f"{updates.name}.{updates.number}") == ([], False)
    assert [u.number for u in updates.since(f"{updates.name}.{updates.number - 1}")[0]] == [updates.number]
    assert updates.since(f"{updates.name}.3")[1]
    assert not updates.since(f"{updates.name}.{updates.number - KEPT}")[1]
    for odd in ("", "x", f"{updates.name}.-1", f"{updates.name}.{'9' * 50}"):
        assert updates.since(odd) == ([], bool(odd))
