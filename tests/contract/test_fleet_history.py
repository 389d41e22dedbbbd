"""`racktwin fleet history`, the interface behind it, its schema, the check of the server; wrong input."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from connectors.clickhouse import (
    ClickHouseError,
    ClickHouseLink,
    FleetReader,
    Labels,
    ListQuestion,
    Login,
    Retention,
    ValueQuestion,
    schema_sql,
)
from tests.support.agent_pod import pod
from tests.support.builders import Twin, two_racks
from tests.support.chdb_server import PASSWORD, USER, ChdbServer
from tests.support.daemon_process import running
from tests.support.extras import needs_chdb
from tests.support.in_process_daemon import Desk, serving_aside
from tests.support.mosquitto import mosquitto
from tests.support.online_checks import check
from tests.support.thread_server import http_thread
from tests.support.victoriametrics import free_port
from twin.api.page import fleet_history
from twin.archive import labels_of
from twin.catalogue import NS, ConfigError
from twin.cli.main import main
from twin.config import ClickHouse, FleetSettings, load_config

JSON = "--json"


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    with serving_aside(tmp_path, monkeypatch) as desk:
        yield desk


def asks_at(desk: Desk, url: str, password: str = PASSWORD) -> None:
    """The daemon of the desk asks this server."""
    (desk.folder / "password").write_text(password)
    live = desk.pod.live
    config = live.loaded.config
    history = msgspec.structs.replace(
        config.history, clickhouse=ClickHouse(url=url, username=USER, password_file="password")
    )
    object.__setattr__(live.loaded, "config", msgspec.structs.replace(config, history=history))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChdbServer]:
    needs_chdb()
    server = ChdbServer(tmp_path_factory.mktemp("chdb"))
    server.start()
    for statement in schema_sql("racktwin", Retention()):
        server.sql(statement)
    server.sql(
        "INSERT INTO racktwin.value SELECT 'lab', 'hall-b', 'r2', 'lab/h/r2', 'rack.power_w', now64(3), 1"
    )
    for hall in ("hall-a", "hall-b"):
        server.sql(
            f"INSERT INTO racktwin.value SELECT 'lab', '{hall}', 'r1', 'lab/h/r1', 'rack.power_w', "
            "toStartOfMinute(now64(3)) - 600 + number * 10, number FROM numbers(30)"
        )
        server.sql(
            "INSERT INTO racktwin.journal (site, hall, t, seq, hash, kind, severity, text, entities) "
            f"SELECT 'lab', '{hall}', now64(3) - 60, number, toString(number), 'finding', 'critical', "
            "'hot \\x1b[31m', ['lab/h/r1'] FROM numbers(3)"
        )
    yield server
    server.kill()


@pytest.mark.slow
def test_values_of_all_halls_and_of_one(
    desk: Desk, filled: ChdbServer, capsys: pytest.CaptureFixture[str]
) -> None:
    asks_at(desk, filled.url)
    assert desk.run("fleet", "history", "r1", "rack.power_w", "--step", "5min", "--since", "1h") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "mean W" in lines[0]
    assert {"hall-a", "hall-b"} <= {word for line in lines for word in line.split()}
    assert desk.run("fleet", "history", "r1", "rack.power_w", "--hall", "hall-b", "--step", "10s", JSON) == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["table"], tree["unit"], len(tree["rows"])) == ("value", "W", 30)
    assert [row["mean"] for row in tree["rows"]] == [float(i) for i in range(30)]
    both = FleetReader(ClickHouseLink(filled.url, "racktwin", Login(USER, PASSWORD)), Retention()).values(
        ValueQuestion(entity="r1,lab/h/r2", signal="rack.power_w", since_ns=0, until_ns=2**62), time.time_ns()
    )
    assert {row["entity"] for row in both["rows"]} == {"lab/h/r1", "lab/h/r2"}
    assert desk.run("fleet", "history", "r7", "rack.power_w") == 0
    assert "no hall wrote such values" in capsys.readouterr().out


@pytest.mark.slow
def test_lists_of_all_halls(desk: Desk, filled: ChdbServer, capsys: pytest.CaptureFixture[str]) -> None:
    asks_at(desk, filled.url)
    assert desk.run("fleet", "history", "--list", "alarms") == 0
    text = capsys.readouterr().out
    assert (text.count("hall-a"), text.count("hall-b"), "\x1b" in text) == (3, 3, False)
    assert desk.run("fleet", "history", "r1", "--list", "alarms", "--limit", "2", "--format", "csv") == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert desk.run("fleet", "history", "--list", "commands", "--hall", "hall-a") == 0
    assert "no commands of any hall" in capsys.readouterr().out


def test_without_a_server_it_says_what_is_missing(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    assert desk.run("fleet", "history", "r1", "rack.power_w") == 1
    assert "$.history.clickhouse: missing; expected" in capsys.readouterr().err


def test_a_server_that_is_gone_is_said_without_the_password(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    asks_at(desk, f"http://127.0.0.1:{free_port()}")
    assert desk.run("fleet", "history", "r1", "rack.power_w") == 1
    said = capsys.readouterr().err
    assert "no answer; check that the server runs" in said
    assert PASSWORD not in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["r1"], "expected ENTITY and SIGNAL"),
        ([], "expected ENTITY and SIGNAL"),
        (["r1", "rack.power"], "is not in the catalogue"),
        (["r1", "rack.power_w", "--list", "alarms"], "a list takes no SIGNAL"),
        (["r1", "rack.power_w", "--since", "tomorrow"], "expected a time such as"),
        (["r1", "rack.power_w", "--since", "1h", "--until", "2h"], "is not before until"),
        (["x" * 4001, "rack.power_w"], "at most 4000 characters"),
    ],
)
def test_wrong_questions_say_what_was_expected(
    desk: Desk, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert desk.run("fleet", "history", *words) != 0
    assert expected in capsys.readouterr().err


SETTINGS = {"url": "https://clickhouse.example:8443", "username": "hall", "password_file": "password"}


def config_of(folder: Path, more: dict[str, Any], **sections: Any) -> Path:
    (folder / "site.yaml").write_text(yaml.safe_dump(two_racks()))
    tree = {
        "site": "site.yaml",
        "broker": "embedded",
        "history": {"clickhouse": {**SETTINGS, **more}},
        **sections,
    }
    (folder / "racktwin.yaml").write_text(yaml.safe_dump(tree))
    return folder / "racktwin.yaml"


def test_the_schema_is_printed_with_the_least_rights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config_of(tmp_path, {"database": "halls", "values_days": 7})
    assert main(["fleet", "history", "--schema", "--config", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("CREATE DATABASE IF NOT EXISTS halls;\n")
    assert "TTL toDateTime(t) + toIntervalHour(168)" in text
    assert "-- GRANT INSERT ON halls.value TO hall;" in text
    assert "racktwin." not in text
    assert text.count("IF NOT EXISTS") == text.count("CREATE ")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"url": "clickhouse:8443"}, "$.history.clickhouse.url: expected a URL"),
        ({"url": "https://u:secret@h:1"}, "without user and options"),
        ({"url": "https://h/?password=secret"}, "without user and options"),
        ({"url": "http://h:8123"}, "would show the password"),
        ({"username": None}, "$.history.clickhouse.username: missing"),
        ({"database": "a; DROP"}, "$.history.clickhouse.database: expected letters"),
        ({"hall": ""}, "$.history.clickhouse.hall: expected a line"),
        ({"buffer_mb": 0}, "$.history.clickhouse.buffer_mb"),
        ({"values_days": 36500}, "$.history.clickhouse.values_days"),
        ({"quota": 1}, "quota"),
    ],
)
def test_a_wrong_section_is_refused_with_its_place(
    tmp_path: Path, more: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match="expected") as refused:
        load_config(config_of(tmp_path, more))
    assert expected in str(refused.value)
    assert "secret" not in str(refused.value).replace("a secret", "")


def test_rows_are_of_the_hall_that_the_fleet_knows(tmp_path: Path) -> None:
    fleet = {"hall": "hall-a", "feeder": "main"}
    site = Twin(two_racks()).site
    for more, sections, expected in (
        ({}, {}, Labels("lab", "lab")),
        ({}, {"fleet": fleet}, Labels("lab", "hall-a")),
        ({"site": "campus", "hall": "north"}, {"fleet": fleet}, Labels("campus", "north")),
        ({"site": "campus"}, {}, Labels("campus", "campus")),
    ):
        loaded = load_config(config_of(tmp_path, more, **sections))
        assert labels_of(loaded, site) == expected
    assert FleetSettings().hall is None


@pytest.mark.slow
def test_the_online_check_tries_an_empty_insert(
    tmp_path: Path, filled: ChdbServer, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "password").write_text(PASSWORD)
    (tmp_path / "password").chmod(0o600)
    good = {"url": filled.url, "username": USER, "password_file": "password"}
    code, text = check(tmp_path, capsys, history={"clickhouse": good})
    assert (code, "ok    history.clickhouse" in text) == (0, True)
    code, text = check(tmp_path, capsys, history={"clickhouse": {**good, "database": "nowhere"}})
    assert (code, "racktwin fleet history --schema" in text) == (1, True)
    (tmp_path / "password").write_text("wr0ng-one")
    code, text = check(tmp_path, capsys, history={"clickhouse": good})
    assert code == 1
    assert "expected the user and password of `history.clickhouse`" in text
    assert "wr0ng-one" not in text


class Redirects(BaseHTTPRequestHandler):
    """Sends each request elsewhere, and notes what it was sent."""

    target = ""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(307)
        self.send_header("Location", self.target)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


class Catches(BaseHTTPRequestHandler):
    caught: list[str]

    def do_POST(self) -> None:
        self.caught.append(str(self.headers))
        self.send_error(500)

    def log_message(self, format: str, *args: Any) -> None: ...


def test_a_password_does_not_follow_a_redirection() -> None:
    Catches.caught = []
    with http_thread(Catches) as elsewhere, http_thread(Redirects) as port:
        Redirects.target = f"http://127.0.0.1:{elsewhere}/"
        link = ClickHouseLink(f"http://127.0.0.1:{port}", "racktwin", Login(USER, PASSWORD))
        with pytest.raises(Exception, match="answers 307"):
            link.ask("SELECT 1")
        link.close()
    assert Catches.caught == []


class Strange(BaseHTTPRequestHandler):
    """Answers 200 with `body`, a byte at a time where `pace_s` is given."""

    body, pace_s = b"", 0.0
    ended = threading.Event()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        if not self.pace_s:
            self.wfile.write(self.body)
            return
        with contextlib.suppress(OSError):
            for byte in self.body:
                self.wfile.write(bytes([byte]))
                if self.ended.wait(self.pace_s):
                    return

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def strange(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ClickHouseLink]]:
    """Links to a server that answers so."""
    ended = threading.Event()
    with http_thread(Strange) as port:

        def link(body: bytes, pace_s: float = 0.0, timeout_s: float = 15.0) -> ClickHouseLink:
            for name, value in (("body", body), ("pace_s", pace_s), ("ended", ended)):
                monkeypatch.setattr(Strange, name, value)
            return ClickHouseLink(f"http://127.0.0.1:{port}", "racktwin", timeout_s=timeout_s)

        yield link
        ended.set()


def test_rows_that_another_server_takes_are_not_called_written(strange: Any) -> None:
    with pytest.raises(ClickHouseError, match="is not ClickHouse"):
        strange(b"<html>welcome</html>").insert("value", ("t",), "Native", b"rows")
    strange(b"").insert("value", ("t",), "Native", b"rows")


@pytest.mark.parametrize("line", [b"{}", b'{"t_ms": "x"}', b'{"t_ms": null, "count": []}'])
def test_rows_of_another_form_are_no_answer(strange: Any, line: bytes) -> None:
    reader = FleetReader(strange(line + b"\n"), Retention())
    with pytest.raises(ClickHouseError, match="is not ClickHouse"):
        reader.values(ValueQuestion(entity="r1", signal="rack.power_w", since_ns=0, until_ns=NS), NS)
    with pytest.raises(ClickHouseError, match="is not ClickHouse"):
        reader.lines(ListQuestion(what="alarms", since_ns=0, until_ns=NS))


def test_an_answer_that_only_trickles_ends_in_time(strange: Any) -> None:
    link = strange(b"x" * 1000, pace_s=0.05, timeout_s=0.5)
    began_s = time.monotonic()
    with pytest.raises(ClickHouseError, match="no complete answer within"):
        link.ask("SELECT 1")
    assert time.monotonic() - began_s < 20


def test_a_question_that_hangs_does_not_hold_the_end_of_the_daemon() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), list[bool]()

    def hang() -> None:
        begun.set()
        ended.append(may_end.wait(10))

    async def main() -> None:
        asking = asyncio.ensure_future(fleet_history.beside(hang))
        while not begun.is_set():
            await asyncio.sleep(0)
        asking.cancel()

    asyncio.run(main())
    assert ended == []
    may_end.set()


@pytest.mark.slow
def test_a_daemon_writes_its_values_and_decisions_and_answers_from_there(
    server: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_chdb()
    store = ChdbServer(tmp_path)
    store.start()
    for statement in schema_sql("racktwin", Retention()):
        store.sql(statement)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "password").write_text(PASSWORD)
    section = {"url": store.url, "username": USER, "password_file": "password", "hall": "north"}
    history = {"every_s": 1.0, "clickhouse": section}
    try:
        with (
            mosquitto(server, tmp_path) as broker,
            running(tmp_path / "d", broker.port, history=history) as daemon,
            pod(broker.port),
        ):

            def known() -> dict[str, Any]:
                found: dict[str, Any] = daemon.get("/api/v1/messages")["messages"]["history"]["clickhouse"]
                return found

            daemon.until(lambda: known()["written_points"] > 400 and known()["written_lines"] > 2,
                         what="points and lines written")  # fmt: skip
            assert (known()["error"], known()["dropped_points"], known()["refused_points"]) == ("", 0, 0)
            words = ["--config", str(daemon.config_path), "--json"]
            assert main(["fleet", "history", "r1/node7/gpu2", "gpu.power_w", "--step", "1s", *words]) == 0
            rows = json.loads(capsys.readouterr().out)["rows"]
            assert {(r["site"], r["hall"], r["rack"], r["entity"]) for r in rows} == {
                ("lab", "north", "r1", "lab/h/r1/node7/gpu2")
            }
            assert abs(rows[-1]["t_ns"] - time.time_ns()) < 60 * NS
            assert main(["fleet", "history", "--list", "decisions", *words]) == 0
            kinds = {row["kind"] for row in json.loads(capsys.readouterr().out)["rows"]}
            assert "event" in kinds
            assert daemon.stop() == 0
    finally:
        store.kill()
