"""The fleet's history reaches a ClickHouse once, whatever happens on the way, and is read back from it.

The server is chdb behind its HTTP interface (the extra `chdb`), or a real one if `clickhouse` is on the PATH.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
from tests.support.builders import Twin, two_racks
from tests.support.chdb_server import PASSWORD, USER, ChdbServer
from tests.support.clickhouse_server import RealServer, clickhouse_program
from tests.support.extras import needs_chdb
from tests.support.patience import PATIENCE_S
from twin.archive import ArchiveWriter, JournalRows, JournalTail
from twin.catalogue import NS
from twin.config import History
from twin.contracts import CommandRecord, FindingRecord, LeaderRecord
from twin.run import HistoryService, JournalWriter, Layout
from twin.run.history_sample import TableSample

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("impatient")]
HALL_A = Labels("lab", "hall-a")
KEEP = Retention(values_days=3000, minutes_days=9000, hours_days=9000, journal_days=9000)


@pytest.fixture(scope="module", params=["chdb", "clickhouse"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChdbServer]:
    folder = tmp_path_factory.mktemp("clickhouse")
    if request.param == "chdb":
        needs_chdb()
        server = ChdbServer(folder)
    else:
        program = clickhouse_program()
        if program is None:
            pytest.skip("server clickhouse (24.3 or later) is not here: expected it on the PATH")
        server = RealServer(folder, program)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(started: ChdbServer) -> ChdbServer:
    if not started.runs:
        started.start()
    started.sql("DROP DATABASE IF EXISTS racktwin")
    for statement in schema_sql("racktwin", KEEP):
        started.sql(statement)
    return started


@pytest.fixture
def chosen_failures(server: ChdbServer) -> ChdbServer:
    if server.name != "chdb":
        pytest.skip("the failures of a real server cannot be chosen")
    return server


@pytest.fixture(scope="module")
def pod() -> Twin:
    return Twin(two_racks())


def link_to(server: ChdbServer, password: str = PASSWORD, timeout_s: float = 20.0) -> ClickHouseLink:
    return ClickHouseLink(server.url, "racktwin", Login(USER, password), timeout_s=timeout_s)


def writer_to(server: ChdbServer, labels: Labels = HALL_A, **more: Any) -> ArchiveWriter:
    room = more.pop("room_bytes", 10**8)
    out = ArchiveWriter(more.pop("link", None) or link_to(server), labels, room, **more)
    out.start()
    return out


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends, "it did not come about"
        time.sleep(0.02)


def drained(writer: ArchiveWriter) -> bool:
    return writer.stats()["queue_points"] == 0


def finish(writer: ArchiveWriter) -> None:
    wait_for(lambda: drained(writer))
    assert writer.close()


def offer(writer: ArchiveWriter, names: Any, t_ns: int, power_w: float) -> None:
    """Power of both racks, the second one 0.5 W more, and the energy of one feeder of two."""
    value = np.array([[power_w, power_w + 0.5]], np.float32)
    none = np.zeros((0, 2), np.int64)
    energy = np.array([[round(power_w), -1]], np.int64)
    tables = (
        TableSample("rack", ("power_w",), value, (), none),
        TableSample("feeder", (), np.zeros((0, 2), np.float32), ("energy_mj",), energy),
    )
    writer.offer(t_ns, names, tables)


def start_ns() -> int:
    return time.time_ns() // (3600 * NS) * 3600 * NS - 7200 * NS


def powers(server: ChdbServer, hall: str = "hall-a", entity: str = "lab/h/r1") -> list[float]:
    """Every row as it lies there, doubles too."""
    sql = (
        f"SELECT value FROM racktwin.value WHERE hall = '{hall}' AND entity = '{entity}' "
        "AND signal = 'rack.power_w' ORDER BY t"
    )
    return [row["value"] for row in server.sql(sql)]


def counted(server: ChdbServer, table: str = "value_1min") -> int:
    (row,) = server.sql(f"SELECT sum(count) AS n FROM racktwin.{table} WHERE signal = 'rack.power_w'")
    return int(row["n"])


def test_what_is_written_is_read_back(server: ChdbServer, pod: Twin) -> None:
    writer, t_ns = writer_to(server), start_ns()
    for i in range(30):
        offer(writer, Layout(pod.site), t_ns + 10 * i * NS, i)
    wait_for(lambda: drained(writer))
    assert powers(server) == [float(i) for i in range(30)]
    assert powers(server, entity="lab/h/r2") == [i + 0.5 for i in range(30)]
    stats = writer.stats()
    assert (stats["written_points"], stats["error"], stats["dropped_points"]) == (90, "", 0)
    (row,) = server.sql("SELECT DISTINCT site, hall, rack, entity, toString(value) AS v FROM racktwin.value "
                        "WHERE signal = 'feeder.energy_mj' AND value = 29")  # fmt: skip
    assert row == {"site": "lab", "hall": "hall-a", "rack": "", "entity": "lab/h/a", "v": "29"}
    assert writer.close()


def test_questions_answer_by_hall_entity_and_step(server: ChdbServer, pod: Twin) -> None:
    t_ns = start_ns()
    for hall, more in (("hall-a", 0), ("hall-b", 1000)):
        writer = writer_to(server, Labels("lab", hall))
        for i in range(24):
            offer(writer, Layout(pod.site), t_ns + 10 * i * NS, i + more)
        finish(writer)
    reader = FleetReader(link_to(server), KEEP)
    span = {"since_ns": t_ns, "until_ns": t_ns + 240 * NS, "entity": "r1", "signal": "rack.power_w"}
    now_ns = time.time_ns()
    found = reader.values(ValueQuestion(**span, step_s=60), now_ns)
    assert (found["table"], found["step_s"], found["more"]) == ("value_1min", 60.0, False)
    assert [(r["hall"], r["mean"], r["min"], r["max"], r["last"]) for r in found["rows"]] == [
        (hall, more + 6 * k + 2.5, more + 6 * k, more + 6 * k + 5, more + 6 * k + 5)
        for hall, more in (("hall-a", 0), ("hall-b", 1000))
        for k in range(4)
    ]
    assert found["rows"][0]["t_ns"] == t_ns
    assert found["rows"][0]["entity"] == "lab/h/r1"
    raw = reader.values(ValueQuestion(**span, step_s=10, hall="hall-b"), now_ns)
    assert raw["table"] == "value"
    assert [r["mean"] for r in raw["rows"]] == [1000.0 + i for i in range(24)]
    assert {(r["hall"], r["rack"]) for r in raw["rows"]} == {("hall-b", "r1")}
    hours = reader.values(ValueQuestion(**span, step_s=3600), now_ns)
    assert [(r["mean"], r["last"]) for r in hours["rows"]] == [(11.5, 23.0), (1011.5, 1023.0)]
    whole = reader.values(ValueQuestion(**{**span, "entity": "lab/h/r1"}, step_s=3600), now_ns)
    assert whole["rows"] == hours["rows"]
    assert reader.values(ValueQuestion(**{**span, "entity": "1"}), now_ns)["rows"] == [], "no end of a name"


def test_the_last_of_a_bucket_is_the_latest_however_late_it_is_written(server: ChdbServer, pod: Twin) -> None:
    writer, t_ns = writer_to(server), start_ns()
    for i in (3, 1, 5, 2):
        offer(writer, Layout(pod.site), t_ns + 10 * i * NS, i)
    finish(writer)
    asked = ValueQuestion(entity="r1", signal="rack.power_w", since_ns=t_ns + 30 * NS,
                          until_ns=t_ns + 60 * NS, step_s=60)  # fmt: skip
    (row,) = FleetReader(link_to(server), KEEP).values(asked, time.time_ns())["rows"]
    assert (row["last"], row["min"], row["max"]) == (5.0, 1.0, 5.0), "the minute that holds the first instant"


@pytest.mark.parametrize("how", ["500", "lost", "quota"])
def test_what_failed_is_sent_again_and_makes_no_doubles(
    chosen_failures: ChdbServer, pod: Twin, how: str
) -> None:
    server, t_ns = chosen_failures, start_ns()
    before = len(server.seen_tokens())
    server.fail(how, 3)
    writer = writer_to(server)
    for i in range(5):
        offer(writer, Layout(pod.site), t_ns + 10 * i * NS, i)
    wait_for(lambda: drained(writer))
    stats = writer.stats()
    assert (stats["write_errors"], stats["error"], stats["written_points"]) == (3, "", 15)
    tokens = server.seen_tokens()[before:]
    assert len(tokens) == 8
    assert len(set(tokens[:4])) == 1, "the first insert came four times under one name"
    assert powers(server) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert (counted(server), counted(server, "value_1h")) == (10, 10)
    assert writer.close()


def test_a_server_that_is_killed_and_away_gets_everything_once(server: ChdbServer, pod: Twin) -> None:
    writer, t_ns = writer_to(server), start_ns()
    for i in range(10):
        offer(writer, Layout(pod.site), t_ns + 30 * i * NS, i)
    wait_for(lambda: drained(writer))
    server.kill()
    for i in range(10, 130):  # an hour
        offer(writer, Layout(pod.site), t_ns + 30 * i * NS, i)
    wait_for(lambda: int(writer.stats()["write_errors"]) >= 3)
    assert "no answer; check that the server runs" in str(writer.stats()["error"])
    assert writer.stats()["queue_points"] == 120 * 4
    server.start()
    wait_for(lambda: drained(writer))
    assert powers(server) == [float(i) for i in range(130)]
    assert (counted(server), writer.stats()["dropped_points"]) == (260, 0)
    assert writer.close()


def test_a_server_away_for_longer_than_there_is_room_loses_the_oldest_and_says_so(
    server: ChdbServer, pod: Twin
) -> None:
    server.kill()
    writer, t_ns = writer_to(server, room_bytes=20 * 40), start_ns()
    for i in range(60):
        offer(writer, Layout(pod.site), t_ns + 30 * i * NS, i)
    stats = writer.stats()
    assert int(stats["dropped_points"]) + int(stats["queue_points"]) == 60 * 4
    assert int(stats["queue_points"]) <= 200
    kept = int(stats["queue_points"]) // 4
    server.start()
    wait_for(lambda: drained(writer))
    assert powers(server) == [float(i) for i in range(60 - kept, 60)]
    assert writer.close()


def test_the_same_samples_again_are_the_same_rows(server: ChdbServer, pod: Twin) -> None:
    t_ns = start_ns()
    for _ in range(2):  # as a trace that is replayed
        writer = writer_to(server)
        for i in range(20):
            offer(writer, Layout(pod.site), t_ns + 10 * i * NS, i)
        finish(writer)
    assert powers(server) == [float(i) for i in range(20)]
    assert (counted(server), counted(server, "value_1h")) == (40, 40)


def test_a_run_that_is_made_again_writes_the_same_rows(server: ChdbServer, tmp_path: Path) -> None:
    for _ in range(2):
        twin = Twin(two_racks())
        twin.now_ns = start_ns()
        archive = ArchiveWriter(link_to(server), HALL_A, 10**8)
        settings = History(embedded=False, every_s=1.0)
        service = HistoryService(settings, tmp_path, twin.site, outside={"clickhouse": archive})
        for i in range(10):
            service.offer(twin.engine, twin.tick({"rack.power_w": float(i), "gpu.temp_c": 60.0 + i}))
        wait_for(lambda service=service: service.stats()["clickhouse"]["queue_points"] == 0)
        points = service.stats()["clickhouse"]["written_points"]
        assert service.alarms() == []
        service.close()
    found = server.sql("SELECT signal, count() AS n FROM racktwin.value GROUP BY signal")
    counts = {row["signal"]: int(row["n"]) for row in found}
    assert (counts["gpu.temp_c"], counts["rack.power_w"]) == (1440, 20)
    assert (sum(counts.values()), counted(server)) == (points, 20)


def test_a_wrong_password_is_said_without_it_and_nothing_is_lost(server: ChdbServer, pod: Twin) -> None:
    wrong = "an0ther-Secret"
    writer = writer_to(server, link=link_to(server, wrong))
    offer(writer, Layout(pod.site), start_ns(), 1)
    wait_for(lambda: int(writer.stats()["write_errors"]) >= 2)
    text = str(writer.stats())
    assert "expected `username` and the password in `password_file`" in text
    assert wrong not in text
    assert (writer.stats()["queue_points"], writer.stats()["refused_points"]) == (4, 0)
    assert not writer.close()


def test_absent_tables_are_named_with_their_remedy_and_waited_for(server: ChdbServer, pod: Twin) -> None:
    server.sql("DROP DATABASE racktwin")
    writer = writer_to(server)
    offer(writer, Layout(pod.site), start_ns(), 7)
    wait_for(lambda: bool(writer.stats()["error"]))
    assert "racktwin fleet history --schema" in str(writer.stats()["error"])
    for statement in schema_sql("racktwin", KEEP):
        server.sql(statement)
    wait_for(lambda: drained(writer))
    assert powers(server) == [7.0]
    assert writer.close()


def test_what_answers_may_be_no_clickhouse(chosen_failures: ChdbServer) -> None:
    chosen_failures.fail("html", 1)
    with pytest.raises(ClickHouseError, match="is not ClickHouse"):
        link_to(chosen_failures).ask("SELECT 1 AS x")


HOSTILE = ["a'b", 'x"y', "back\\slash", "tab\tnew\nline", "'); DROP TABLE racktwin.value; --", "日本 µ",
           "{entity:String}",
           "%s\\N", "\u202e", "a" * 300, " "]  # fmt: skip


class _Names:
    def __init__(self, names: list[str]) -> None:
        self.hash, self._names = "hostile", names

    def names(self, table: str) -> list[str]:
        return self._names


def test_hostile_names_are_names(server: ChdbServer) -> None:
    names, t_ns = [f"lab/h/{name}" for name in HOSTILE], start_ns()
    value = np.arange(len(names), dtype=np.float32)[None]
    table = TableSample("rack", ("power_w",), value, (), np.zeros((0, len(names)), np.int64))
    for hall in HOSTILE:
        writer = writer_to(server, Labels(hall, hall))
        writer.offer(t_ns, _Names(names), (table,))
        finish(writer)
    reader = FleetReader(link_to(server), KEEP)
    for i, (hall, name) in enumerate(zip(HOSTILE, names, strict=True)):
        asked = ValueQuestion(
            entity=name, signal="rack.power_w", hall=hall, since_ns=t_ns, until_ns=t_ns + NS
        )
        (row,) = reader.values(asked, time.time_ns())["rows"]
        assert (row["site"], row["hall"], row["entity"], row["rack"]) == (hall, hall, name, name[6:])
        assert row["mean"] == float(i)


def test_only_a_leader_writes(server: ChdbServer, pod: Twin) -> None:
    leads = [False]
    writer, t_ns = writer_to(server, leads=lambda: leads[0]), start_ns()
    for i in range(6):
        leads[0] = i >= 3
        offer(writer, Layout(pod.site), t_ns + 10 * i * NS, i)
    finish(writer)
    assert powers(server) == [3.0, 4.0, 5.0]


# -- the journal


def finding(name: str, entities: tuple[str, ...] = ("lab/h/r1",)) -> FindingRecord:
    return FindingRecord(
        id=name, severity="critical", title=f"{name}: it's \\ \"hot\"\n\u202e", entities=entities,
        evidence=("x",), confidence_pu=None, action="",
    )  # fmt: skip


def command(index: list[int], value: list[float]) -> CommandRecord:
    return CommandRecord(
        control="gpu.power_cap_w", policy="thermal_guard", first_name="first", last_name="last",
        index=np.array(index, np.int32), value=np.array(value, np.float32), reason="too hot", epoch=1,
        first_command=1, expires_ns=1, deadline_ns=1,
    )  # fmt: skip


@pytest.fixture
def journal_of() -> Iterator[Callable[..., JournalWriter]]:
    made: list[JournalWriter] = []

    def make(folder: Path, records: list[Any], segment_bytes: int = 0) -> JournalWriter:
        """Lines of a daemon that leads; the line that says so has no instant."""
        made.append(JournalWriter(folder, durable=False, segment_bytes=segment_bytes))
        made[-1].append([made[-1].chain.line(LeaderRecord(epoch=1), 0, 0)])
        write(made[-1], records)
        return made[-1]

    yield make
    for writer in made:
        writer.close()


def write(writer: JournalWriter, records: list[Any], t_ns: int = 0) -> None:
    first = t_ns or start_ns()
    for i, record in enumerate(records):
        writer.append([writer.chain.line(record, i, first + i * NS)])
        if writer.full:
            writer.rotate()


def feed(
    server: ChdbServer, folder: Path, pod: Twin, writer: JournalWriter, hall: str = "hall-a"
) -> ArchiveWriter:
    tail = JournalTail(folder, folder / "place.json", lambda: writer.safe[0])
    return writer_to(
        server, Labels("lab", hall), journal=(tail, JournalRows(Labels("lab", hall), lambda: pod.site))
    )


def written(archive: ArchiveWriter, count: int) -> bool:
    return int(archive.stats()["written_lines"]) >= count


def rows_of(server: ChdbServer) -> list[dict[str, Any]]:
    return server.sql("SELECT * EXCEPT body, toUInt32(seq) AS n FROM racktwin.journal ORDER BY t, seq")


def test_findings_and_commands_of_all_halls_are_listed(
    server: ChdbServer, pod: Twin, tmp_path: Path, journal_of: Any
) -> None:
    t_ns = start_ns()
    for hall in ("hall-a", "hall-b"):
        records = [finding(f"{hall}/1"), command([0, 5], [300.0, np.nan]), finding("x", ("lab/h/r2",))]
        folder = tmp_path / hall
        manifest = pod_manifest(pod)
        journal = journal_of(folder, [manifest, *records])
        archive = feed(server, folder, pod, journal, hall)
        wait_for(partial(written, archive, 4))
        assert archive.close()
    reader = FleetReader(link_to(server), KEEP)
    span = {"since_ns": t_ns, "until_ns": t_ns + 3600 * NS}
    alarms = reader.lines(ListQuestion(what="alarms", **span))
    assert [(r["hall"], r["id"]) for r in alarms["rows"]] == [
        ("hall-a", "x"), ("hall-b", "x"), ("hall-a", "hall-a/1"), ("hall-b", "hall-b/1")
    ]  # fmt: skip
    assert alarms["rows"][2]["text"] == 'hall-a/1: it\'s \\ "hot"\n\u202e'
    commands = reader.lines(ListQuestion(what="commands", hall="hall-b", **span))["rows"]
    assert [(r["policy"], r["entities"], r["text"]) for r in commands] == [
        ("thermal_guard", ["lab/h/r1/node0/gpu0", "lab/h/r1/node1/gpu1"], "too hot")
    ]
    for name, kinds in (("lab/h/r1", ("command", "finding")), ("r1", ("command", "finding")),
                        ("r1/node0", ("command",)), ("node1/gpu1", ("command",)), ("r", ())):  # fmt: skip
        named = reader.lines(ListQuestion(what="decisions", entity=name, **span))["rows"]
        assert sorted((r["hall"], r["kind"]) for r in named) == [
            (hall, kind) for hall in ("hall-a", "hall-b") for kind in kinds
        ]
    found = server.sql(
        "SELECT hall, entity, isNaN(value) AS released FROM racktwin.command ORDER BY hall, entity"
    )
    assert [row["released"] for row in found] == [0, 1, 0, 1]
    assert len(server.sql("SELECT * FROM racktwin.finding WHERE active")) == 4
    assert len(server.sql("SELECT * FROM racktwin.decision")) == 6


def pod_manifest(pod: Twin) -> Any:
    from twin.contracts import ManifestRecord

    return ManifestRecord(format=1, site_hash=pod.site.spec_hash)


def test_a_journal_is_sent_once_over_restarts_rotations_and_a_lost_place(
    server: ChdbServer, pod: Twin, tmp_path: Path, journal_of: Any
) -> None:
    journal = journal_of(tmp_path, [finding(f"f{i}") for i in range(20)], segment_bytes=2000)
    archive = feed(server, tmp_path, pod, journal)
    wait_for(lambda: written(archive, 20))
    write(journal, [finding(f"g{i}") for i in range(20)])
    wait_for(lambda: written(archive, 40))
    assert archive.close()
    write(journal, [finding(f"h{i}") for i in range(20)])
    again = feed(server, tmp_path, pod, journal)
    wait_for(lambda: written(again, 20))
    assert again.close()
    assert again.stats()["written_lines"] == 20
    assert [row["n"] for row in rows_of(server)] != []
    (tmp_path / "place.json").unlink()
    third = feed(server, tmp_path, pod, journal)
    wait_for(lambda: written(third, 60))
    assert third.close()
    (row,) = server.sql("SELECT count() AS n, uniqExact(hash) AS lines FROM racktwin.journal FINAL")
    assert (int(row["n"]), int(row["lines"])) == (60, 60)


def test_a_server_away_costs_no_line_of_the_journal(
    server: ChdbServer, pod: Twin, tmp_path: Path, journal_of: Any
) -> None:
    journal = journal_of(tmp_path, [finding("a")])
    archive = feed(server, tmp_path, pod, journal)
    wait_for(lambda: written(archive, 1))
    server.kill()
    write(journal, [finding(f"b{i}") for i in range(5000)])
    wait_for(lambda: int(archive.stats()["write_errors"]) >= 2)
    server.start()
    wait_for(lambda: written(archive, 5001))
    (row,) = server.sql("SELECT count() AS n FROM racktwin.journal")
    assert int(row["n"]) == 5001
    assert archive.stats()["lost_lines"] == 0
    assert archive.close()


def test_lines_of_a_standby_and_lines_that_are_not_yet_safe_are_not_sent(
    server: ChdbServer, pod: Twin, tmp_path: Path, journal_of: Any
) -> None:
    taken = LeaderRecord(epoch=2)
    records = [LeaderRecord(lost=1), finding("standby"), taken, finding("leader"), finding("unsafe")]
    journal = journal_of(tmp_path, records)
    tail = JournalTail(tmp_path, tmp_path / "place.json", lambda: 5)
    rows = JournalRows(Labels("lab", "hall-a"), lambda: pod.site)
    archive = writer_to(server, journal=(tail, rows))
    wait_for(lambda: written(archive, 3))
    assert archive.close()
    assert [row["id"] for row in rows_of(server) if row["kind"] == "finding"] == ["leader"]
    assert journal.safe[0] == 6
