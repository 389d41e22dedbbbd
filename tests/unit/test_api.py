"""The HTTP interface, over a real socket and a real engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.support.builders import two_racks
from tests.support.in_process_daemon import Pod, serve, serving
from twin.api import Part
from twin.api.public import ROUTES
from twin.catalogue import NS, ConfigError, ConnectorError, StorageError
from twin.config import Api
from twin.run import HistoryError
from twin.telemetry import PollPeriodChanged

GPU = "lab/h/r1/node0/gpu0"
CAP = "gpu.power_cap_w"
PAGE = Path(__file__).parents[2] / "twin" / "web" / "src"


def test_a_table_comes_in_columns_with_quality_age_and_worst_case(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        pod.tick({"gpu.temp_c": 60.0})
        pod.tick({"gpu.temp_c": np.where(np.arange(144) == 1, np.nan, 60.0)}, dt_s=10)
        status, tree = await pod.ask("GET", "/api/v1/state/gpu?signals=temp_c&limit=3&offset=0")
        assert status == 200
        assert (tree["total"], tree["next_offset"]) == (144, 3)
        assert tree["names"] == [f"lab/h/r1/node0/gpu{i}" for i in range(3)]
        column = tree["signals"]["temp_c"]
        assert column["value"] == [60.0, 60.0, 60.0]
        assert column["quality"] == ["good", "missing", "good"]
        assert column["age_s"] == [0.0, 10.0, 0.0]
        assert column["worst"][1] > 100
        assert column["max"] == [87.0, 87.0, 87.0]
        _, last = await pod.ask("GET", "/api/v1/state/gpu?offset=143")
        assert (last["names"], last["next_offset"]) == (["lab/h/r2/node17/gpu3"], None)

    serve(tmp_path, check)


def test_rows_are_chosen_by_name_or_by_what_they_are_below(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        _, tree = await pod.ask("GET", "/api/v1/state/gpu?prefix=lab/h/r1")
        assert tree["total"] == 72  # and not those of r10
        _, tree = await pod.ask("GET", "/api/v1/state/rack?prefix=lab/h/r1/")
        assert tree["names"] == ["lab/h/r1"]
        _, tree = await pod.ask("GET", f"/api/v1/state/gpu?names={GPU},r1/node0/gpu3")
        assert tree["names"] == [GPU, "lab/h/r1/node0/gpu3"]

    serve(tmp_path, check, tree=two_racks(racks="r[1-12]"))


def test_an_entity_says_everything_of_itself(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        pod.tick({"gpu.temp_c": 95.0})
        await pod.ask("POST", "/api/v1/requests", "operator",
                      {"control": CAP, "names": ["lab/h/r1/node0"], "hi": 800, "reason": "test"})  # fmt: skip
        _, gpu = await pod.ask("GET", f"/api/v1/entities/gpu/{GPU}")
        assert gpu["parent"] == "lab/h/r1/node0"
        assert gpu["signals"]["temp_c"]["value"] == 95.0
        assert gpu["leases"][0]["value"] == 800.0
        assert gpu["leases"][0]["policy"] == "operator"
        assert gpu["leases"][0]["readback"] == 1200.0
        assert any(a["id"].startswith("beyond/gpu.temp_c") for a in gpu["alarms"])
        assert any(d["kind"] == "command" for d in gpu["decisions"])
        _, other = await pod.ask("GET", "/api/v1/entities/gpu/lab/h/r2/node0/gpu0")
        assert other["leases"] == []
        assert not [d for d in other["decisions"] if d["kind"] == "command"]
        _, rack = await pod.ask("GET", "/api/v1/entities/rack/r1")
        assert rack["name"] == "lab/h/r1"
        assert rack["children"]["node"]["total"] == 18
        _, leases = await pod.ask("GET", f"/api/v1/leases?control={CAP}&limit=3")
        assert (leases["total"], leases["next_offset"], len(leases["leases"])) == (4, 3, 3)
        _, leases = await pod.ask("GET", f"/api/v1/leases?control={CAP}&offset=3")
        assert [x["name"] for x in leases["leases"]] == ["lab/h/r1/node0/gpu3"]

    serve(tmp_path, check)


def test_nothing_that_is_no_number_is_in_an_answer(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        pod.live.counts["odd"] = 1
        pod.live.messages = lambda: {"rate": math.nan, "worst": math.inf}
        for path in ("summary", "state", "state/rack", "entities/rack/r1", "site", "leases", "decisions",
                     "messages",
                     "approvals", "entities/site/lab", "forecasts", "alarms", "parts"):  # fmt: skip
            status, tree = await pod.ask("GET", f"/api/v1/{path}")
            assert status == 200, path
            json.dumps(tree, allow_nan=False)

    serve(tmp_path, check)


WRONG = [
    ("/state/cpu", 404, "expected one of site, hall"),
    ("/state/gpu?signals=power", 400, "no signal power of gpu; expected power_w"),
    ("/state/gpu?limit=0", 400, "limit: expected a whole number from 1 to 1000"),
    ("/state/gpu?limit=x", 400, "limit: expected"),
    ("/state/gpu?names=r9", 404, "no gpu r9"),
    ("/state/gpu?name=r9", 400, "unknown parameter name; expected prefix"),
    ("/entities/rack/r9", 404, "no rack r9"),
    ("/decisions?before=x", 400, "before: expected the value of `next`"),
    ("/decisions?entity=r9", 404, "no entity r9"),
    ("/decisions?entity=lab/h/rack1/node0", 404, "did you mean lab/h/r1/node0"),
    ("/leases?control=gpu.power_cap", 404, "did you mean gpu.power_cap_w"),
    ("/history?signal=gpu.x&name=r1", 400, "not in the catalogue"),
    ("/history?signal=rack.power_w", 400, "expected 1 to 100 entities, got 0"),
    ("/history?signal=rack.power_w&name=r1&since=5&until=4", 400, "is not before until"),
    ("/history?signal=rack.power_w&name=r1&step=nan", 400, "step: expected a number"),
    ("/history?signal=rack.power_w&name=r1", 503, "keeps no history"),
    ("/nowhere", 404, "openapi.json"),
    ("/state/gpu%00%1b[31m", 404, "no table gpu"),
]


def test_a_wrong_question_is_told_what_is_expected(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        for path, status, why in WRONG:
            got, tree = await pod.ask("GET", "/api/v1" + path)
            assert (got, tree["status"]) == (status, status), path
            assert why in tree["error"], (path, tree)
            assert tree["error"].isprintable(), path

    serve(tmp_path, check)


def test_the_page_asks_for_what_there_is(tmp_path: Path) -> None:
    text = "".join(p.read_text() for p in sorted(PAGE.rglob("*.ts*")))
    asked = set(re.findall(r"(?<!\.)(?:get|usePoll)(?:<[^(]+>)?\([^`\"()]*[`\"]([\w-]+)", text))
    asked |= set(re.findall(r'path: [`"]([\w-]+)', text))
    assert {"sources", "decisions", "racks", "simulations", "hold", "maintenance"} <= asked
    assert asked <= {r.path.split("/")[3] for r in ROUTES if r.path.startswith("/api/v1/")}


def test_the_page_and_its_parts_are_open_bear_a_policy_and_are_kept_by_the_browser(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        async with aiohttp.ClientSession() as session:
            for path, kind in {"/": "html", "/page/app.js": "javascript", "/page/app.css": "css"}.items():
                response = await session.get(pod.url + path)
                assert (response.status, kind in response.headers["Content-Type"]) == (200, True)
                tag = response.headers["ETag"]
                again = await session.get(pod.url + path, headers={"If-None-Match": tag})
                assert (again.status, await again.read()) == (304, b"")
            policy = (await session.get(pod.url + "/")).headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            text = await (await session.get(pod.url + "/")).text()
            assert not re.search(r"<(script|style)>|\bstyle=|\bon\w+=|https?:", text)
            for name in ("index.html", "../routes.py", "app.map", "..%2f..%2ftokens.yaml"):
                assert (await session.get(f"{pod.url}/page/{name}")).status in (401, 404)

    serve(tmp_path, check)


def test_decisions_are_paged_newest_first_without_loss(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        for i in range(40):
            pod.tick({"gpu.temp_c": 95.0 if i % 2 else 60.0})
        _, whole = await pod.ask("GET", "/api/v1/decisions?limit=1000")
        assert whole["next"] is None
        assert len(whole["decisions"]) > 20
        assert all(d["text"] for d in whole["decisions"])
        seen, before = [], ""
        for _ in range(100):
            _, page = await pod.ask("GET", f"/api/v1/decisions?limit=7{before}")
            seen += page["decisions"]
            if page["next"] is None:
                break
            before = f"&before={page['next']}"
        assert seen == whole["decisions"]
        assert [d["now_ns"] for d in seen] == sorted((d["now_ns"] for d in seen), reverse=True)
        _, some = await pod.ask("GET", "/api/v1/decisions?kind=proposals&control=gpu.power_cap_w")
        assert {d["kind"] for d in some["decisions"]} == {"proposals"}
        _, none = await pod.ask("GET", f"/api/v1/decisions?since={pod.twin.now_ns + 1}")
        assert none["decisions"] == []

    serve(tmp_path, check)


def test_periods_of_sources_are_no_decisions_and_are_shown_when_asked_for(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        names = tuple(pod.twin.site.name("gpu", i) for i in range(4))
        event = PollPeriodChanged(table="gpu", signals=("temp_c",), names=names, period_s=15.0)
        pod.live.put_event(event)
        pod.tick({"gpu.temp_c": 60.0})
        told = {}
        for query in ("", "?kind=event"):
            _, answer = await pod.ask("GET", f"/api/v1/decisions{query}")
            told[query] = [d["text"] for d in answer["decisions"]]
        assert not [text for text in told[""] if "every 15 s" in text]
        assert (
            len(
                [
                    text
                    for text in told["?kind=event"]
                    if "temperature" in text and "arrive every 15 s" in text
                ]
            )
            == 1
        )
        _, gpu = await pod.ask("GET", f"/api/v1/entities/gpu/{names[0]}")
        assert not [line for line in gpu["decisions"] if "every 15 s" in line["text"]]

    serve(tmp_path, check)


def test_the_history_is_asked_by_full_name_and_its_refusals_are_told(tmp_path: Path) -> None:
    class History:
        asked: tuple[Any, ...] = ()
        error: Exception | None = None

        async def query(self, *asked: Any) -> dict[str, Any]:
            self.asked = asked
            if self.error is not None:
                raise self.error
            return {"t_ns": [1, 2], "values": {"lab/h/r1": [1.0, None]}}

    async def check(pod: Pod) -> None:
        pod.live.history = history = History()
        status, tree = await pod.ask("GET", "/api/v1/history?signal=rack.power_w&name=r1&last_s=3600&step=60")
        assert (status, tree["values"], tree["unit"]) == (200, {"lab/h/r1": [1.0, None]}, "W")
        key, names, since_ns, until_ns, step_s, _ = history.asked
        assert (key, names, until_ns - since_ns, step_s) == ("rack.power_w", ["lab/h/r1"], 3600 * NS, 60.0)
        for error, expected in ((HistoryError("too much"), 400), (StorageError("torn"), 503)):
            history.error = error
            status, tree = await pod.ask("GET", "/api/v1/history?signal=rack.power_w&name=r1")
            assert (status, tree["error"]) == (expected, str(error))

    serve(tmp_path, check)


def test_ready_says_why_not(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        assert await pod.ask("GET", "/readyz", "none") == (200, {"ready": True, "reasons": []})
        pod.live.parts["mqtt"].state = "waiting"
        assert await pod.ask("GET", "/readyz", "none") == (
            503,
            {"ready": False, "reasons": ["no source runs"]},
        )
        pod.live.parts["slurm"] = Part("slurm", "source", "running")
        pod.live.ready = False
        status, tree = await pod.ask("GET", "/readyz", "none")
        assert (status, tree["reasons"]) == (503, ["the first tick is not done"])
        pod.live.ready, pod.live.stopping = True, True
        assert (await pod.ask("GET", "/readyz", "none"))[1]["reasons"] == ["it stops"]
        pod.live.stopping, pod.live.run_dir = False, str(tmp_path / "gone")
        assert "journal" in (await pod.ask("GET", "/readyz", "none"))[1]["reasons"][0]
        assert await pod.ask("GET", "/healthz", "none") == (200, {"alive": True})

    serve(tmp_path, check)


def test_a_fault_is_answered_counted_and_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(pod: Pod) -> None:
        def broken() -> dict[str, Any]:
            raise ValueError("secret text")

        pod.live.messages = broken
        status, tree = await pod.ask("GET", "/api/v1/messages")
        assert (status, "secret" in str(tree), pod.live.counts["api_faults"]) == (500, False, 1)
        assert (await pod.ask("GET", "/api/v1/parts"))[0] == 200

    serve(tmp_path, check)


def test_the_sources_of_the_page_make_no_markup_from_text() -> None:
    text = "".join(p.read_text() for p in sorted(PAGE.rglob("*.ts*")))
    for word in ("innerHTML", "outerHTML", "dangerouslySet", "insertAdjacent", "document.write", "eval("):
        assert word not in text, word
    assert not re.search(r"https?://|@import", text + (PAGE / "style.css").read_text())


async def kept_open(pod: Pod) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection by which a viewer has asked something."""
    host, port = pod.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"Host: localhost\r\nAuthorization: Bearer {pod.secrets['viewer']}\r\n\r\n"
    writer.write(f"GET /api/v1/whoami HTTP/1.1\r\n{head}".encode())
    assert b" 200 " in await reader.readline()
    return reader, writer


def test_strangers_who_say_nothing_give_way_to_whoever_comes(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        host, port = pod.url.removeprefix("http://").split(":")
        async with asyncio.timeout(20):
            held = await kept_open(pod)
            silent = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
            for _, writer in silent[::2]:
                writer.write(b"GET / HTTP/1.1\r\nHost: loc")
            for _ in range(5):
                assert (await pod.ask("GET", "/api/v1/summary", "viewer"))[0] == 200
            assert await silent[0][0].read() == b""  # it is over, and so is the next to oldest
            assert await silent[1][0].read() == b""
            held[1].write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while b"alive" not in await held[0].readuntil(b"}"):  # who was let in stays
                pass
        for _, writer in (*silent, held):
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    serve(tmp_path, check, api=Api(port=0, max_clients=4))


def test_more_clients_than_places_are_turned_away_and_let_in_again(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        host, port = pod.url.removeprefix("http://").split(":")
        idle = [await kept_open(pod) for _ in range(4)]
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(10):
            said = await reader.read()
        head, _, body = said.partition(b"\r\n\r\n")
        assert b" 503 " in head.split(b"\r\n")[0]
        assert f"Content-Length: {len(body)}".encode() in head
        writer.close()
        for _, held in idle:
            held.close()
            await held.wait_closed()
        await writer.wait_closed()
        async with asyncio.timeout(10):
            while (await pod.ask("GET", "/healthz"))[0] != 200:
                await asyncio.sleep(0.01)

    serve(tmp_path, check, api=Api(port=0, max_clients=4))


def test_it_ends_soon_though_clients_hang_on(tmp_path: Path) -> None:
    async def main() -> float:
        async with serving(tmp_path) as pod:
            host, port = pod.url.removeprefix("http://").split(":")
            writers = []
            head = "HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + pod.secrets["admin"] + "\r\n"
            for text in (
                "",
                "GET /healthz HTTP/1.1\r\nHos",
                f"POST /api/v1/hold {head}Content-Length: 99\r\n\r\n{{",
                f"GET /api/v1/events {head}\r\n",
            ):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(text.encode())
                writers.append(writer)
            async with asyncio.timeout(10):
                await reader.readuntil(b"event: state")
            begun = asyncio.get_running_loop().time()
        took_s = asyncio.get_running_loop().time() - begun
        for writer in writers:
            writer.close()
        return took_s

    assert asyncio.run(main()) < 2.5


def test_a_taken_port_and_bad_files_say_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path / "a") as pod:
            port = int(pod.url.rsplit(":", 1)[1])
            with pytest.raises(ConnectorError, match="cannot listen there"):
                async with serving(tmp_path / "b", Api(port=port)):
                    pass
        with pytest.raises(ConfigError, match="beyond loopback"):
            async with serving(tmp_path / "c", Api(host="0.0.0.0", port=0)):
                pass

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    asyncio.run(main())
