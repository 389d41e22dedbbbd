"""Values and journals on their way to ClickHouse: in order, once, bounded; without a server."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from connectors import send_lane
from connectors.clickhouse import ClickHouseError, Labels, ValueBlocks, ValueBuffer, rack_of
from connectors.clickhouse.value_blocks import BLOCK_ROWS
from tests.support.builders import Twin, two_racks
from tests.support.patience import PATIENCE_S
from twin.archive import ArchiveWriter, JournalRows, JournalTail, TailPlace
from twin.catalogue import NS
from twin.config import History
from twin.contracts import (
    AdviceRecord,
    CommandRecord,
    ContingencyNote,
    DaemonRecord,
    FindingRecord,
    LapsedRecord,
    LeaderRecord,
    ManifestRecord,
    SiteRecord,
)
from twin.run import HistoryService, JournalWriter, Layout, closed_segments, line_head
from twin.run.history_sample import TableSample

pytestmark = pytest.mark.usefixtures("impatient")
LABELS = Labels("lab", "hall-a")
T_NS = 1_800_000_000 * NS


@pytest.fixture(scope="module")
def pod() -> Twin:
    return Twin(two_racks())


class Link:
    """A server that takes all, but for the errors that wait."""

    place = "stand-in"

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.tried, self.taken = list(errors), [], []  # type: ignore[var-annotated]

    def insert(self, table: str, columns: Any, form: str, body: bytes) -> None:
        self.tried.append((table, body))
        if self.errors:
            raise self.errors.pop(0)
        self.taken.append((table, body))

    def close(self) -> None: ...


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends, "it did not come about"
        time.sleep(0.005)


def table(rows: int, name: str = "rack") -> TableSample:
    value = np.arange(rows, dtype=np.float32)[None]
    return TableSample(name, ("power_w",), value, (), np.zeros((0, rows), np.int64))


class Names:
    hash = "x"

    def __init__(self, count: int) -> None:
        self.count = count

    def names(self, table: str) -> list[str]:
        return [f"lab/h/r{i}" for i in range(self.count)]


def writer_to(link: Link, **more: Any) -> ArchiveWriter:
    out = ArchiveWriter(link, LABELS, more.pop("room_bytes", 10**6), **more)  # type: ignore[arg-type]
    out.start()
    return out


def read_block(data: bytes) -> dict[str, list[Any]]:
    """Columns of a block in format Native, read by another hand."""

    def count(at: int) -> tuple[int, int]:
        number = shift = 0
        while True:
            byte = data[at]
            number, shift, at = number | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                return number, at

    def text(at: int) -> tuple[str, int]:
        size, at = count(at)
        return data[at : at + size].decode(), at + size

    (columns, at), out = count(0), {}
    rows, at = count(at)
    for _ in range(columns):
        name, at = text(at)
        kind, at = text(at)
        values: list[Any] = []
        for _ in range(rows):
            if kind == "String":
                value, at = text(at)
            else:
                value, at = (
                    struct.unpack_from("<q" if kind.startswith("DateTime64") else "<d", data, at)[0],
                    at + 8,
                )
            values.append(value)
        out[name] = values
    assert at == len(data)
    return out


def test_a_block_has_what_was_read_and_nothing_else() -> None:
    value = np.array([[1.5, np.nan, 3.0], [np.nan, np.nan, np.nan]], np.float32)
    total = np.array([[-1, 2**40, 0]], np.int64)
    buffer = ValueBuffer(10**6)
    buffer.put(
        T_NS + 7_999_999, Names(3), (TableSample("rack", ("power_w", "temp_c"), value, ("e",), total),)
    )
    assert buffer.oldest is not None
    ((block, rows),) = ValueBlocks(LABELS).of(buffer.oldest)
    assert rows == 4
    assert read_block(block) == {
        "site": ["lab"] * 4,
        "hall": ["hall-a"] * 4,
        "rack": ["r0", "r2", "r1", "r2"],
        "entity": ["lab/h/r0", "lab/h/r2", "lab/h/r1", "lab/h/r2"],
        "signal": ["rack.power_w", "rack.power_w", "rack.e", "rack.e"],
        "t": [T_NS // 10**6 + 7] * 4,
        "value": [1.5, 3.0, 2.0**40, 0.0],
    }


def test_a_large_sample_is_cut_into_blocks_that_are_always_the_same() -> None:
    buffer, count = ValueBuffer(10**9), BLOCK_ROWS + 5
    buffer.put(T_NS, Names(count), (table(count), table(3, "node")))
    sample = buffer.oldest
    assert sample is not None
    blocks = ValueBlocks(LABELS).of(sample)
    assert [rows for _, rows in blocks] == [BLOCK_ROWS, 8]
    assert ValueBlocks(LABELS).of(sample) == blocks
    assert read_block(blocks[1][0])["value"] == [1e5, 100001, 100002, 100003, 100004, 0, 1, 2]


@pytest.mark.parametrize(
    ("name", "path", "rack"),
    [
        ("rack", "lab/h/r1", "r1"), ("node", "lab/h/r1/node0", "r1"), ("gpu", "lab/h/r1/node0/gpu1", "r1"),
        ("cdu", "lab/h/cdu1", ""), ("hall", "lab/h", ""), ("site", "lab", ""), ("tenant", "a", ""),
    ],
)  # fmt: skip
def test_the_rack_of_an_entity(name: str, path: str, rack: str) -> None:
    assert rack_of(name, path) == rack


def test_what_fails_is_sent_again_as_the_same_bytes_and_in_order() -> None:
    link = Link(*(ClickHouseError("busy", 500, 241) for _ in range(3)), OSError("odd"))
    writer = writer_to(link)
    for i in range(4):
        writer.offer(T_NS + i * NS, Names(2), (table(2),))
    wait_for(lambda: writer.stats()["queue_points"] == 0)
    assert len({body for _, body in link.tried[:5]}) == 1
    assert [read_block(body)["t"][0] for _, body in link.taken] == [
        T_NS // 10**6 + 1000 * i for i in range(4)
    ]
    stats = writer.stats()
    assert (stats["written_points"], stats["write_errors"], stats["error"]) == (8, 4, "")
    assert writer.close()


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (ClickHouseError("cannot parse", 400, 27), True), (ClickHouseError("too large", 413, 0), True),
        (ClickHouseError("no table", 404, 60), False), (ClickHouseError("quota", 500, 201), False),
        (ClickHouseError("no right", 403, 497), False), (ClickHouseError("gone"), False),
    ],
)  # fmt: skip
def test_only_what_no_server_would_ever_take_is_passed_over(error: ClickHouseError, refused: bool) -> None:
    link = Link(error)
    writer = writer_to(link)
    writer.offer(T_NS, Names(2), (table(2),))
    writer.offer(T_NS + NS, Names(2), (table(2),))
    wait_for(lambda: writer.stats()["queue_points"] == 0)
    assert writer.stats()["refused_points"] == (2 if refused else 0)
    assert len(link.taken) == (1 if refused else 2)
    assert (str(error) in str(writer.stats()["refusal"])) is refused
    assert writer.close()


def test_the_oldest_go_first_and_are_counted() -> None:
    buffer = ValueBuffer(10 * 8)  # bytes of ten samples of two
    for i in range(25):
        buffer.put(T_NS + i * NS, Names(2), (table(2),))
    assert (buffer.queue_points, buffer.dropped_points) == (20, 30)
    assert buffer.oldest is not None
    assert buffer.oldest.t_ns == T_NS + 15 * NS
    sample = buffer.oldest
    buffer.done(sample)
    buffer.done(sample)  # it is gone already
    assert buffer.queue_points == 18


def test_one_sample_that_is_larger_than_the_room_is_kept() -> None:
    buffer = ValueBuffer(4)
    buffer.put(T_NS, Names(2), (table(2),))
    assert (buffer.queue_points, buffer.dropped_points) == (2, 0)


class Losing:
    """A database outside that tells of losses."""

    def __init__(self) -> None:
        self.told = {"error": "", "refusal": "", "queue_points": 0, "dropped_points": 0}
        self.started = self.closed = False

    def start(self) -> None:
        self.started = True

    def offer(self, *_: object) -> None: ...

    def stats(self) -> dict[str, Any]:
        return self.told

    def close(self) -> bool:
        self.closed = True
        return True


def test_losses_and_failures_of_each_database_outside_are_alarms_of_its_name(
    pod: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losing = Losing()
    service = HistoryService(History(embedded=False), tmp_path, pod.site, outside={"clickhouse": losing})
    assert (losing.started, service.alarms()) == (True, [])
    losing.told |= {"dropped_points": 5, "lost_lines": 2, "refused_lines": 1, "refusal": "no: why"}
    ((name, severity, _, text),) = service.alarms()
    assert (name, severity) == ("history/clickhouse_dropped", "warning")
    assert text == "5 points and 3 lines of the journal since the start no: why"
    monkeypatch.setattr("twin.run.history_service.FAILING_S", 0.0)
    losing.told |= {"error": "gone", "queue_points": 7}
    assert ("history/clickhouse", "gone; 7 points wait") in [(a[0], a[3]) for a in service.alarms()]
    assert service.stats()["clickhouse"] == losing.told
    service.close()
    assert losing.closed


# -- the journal


@pytest.fixture
def journal_of(tmp_path: Path) -> Iterator[Callable[..., JournalWriter]]:
    made: list[JournalWriter] = []

    def make(count: int, folder: str = "run", segment_bytes: int = 0, title: str = "t") -> JournalWriter:
        """Lines of a daemon that leads."""
        made.append(JournalWriter(tmp_path / folder, durable=False, segment_bytes=segment_bytes))
        add(made[-1], count, title)
        return made[-1]

    yield make
    for writer in made:
        writer.close()


def add(writer: JournalWriter, count: int, title: str = "t") -> None:
    for _ in range(count):
        seq = writer.chain.seq
        record = FindingRecord(id=f"f{seq}", severity="info", title=title, entities=("a",), evidence=(),
                               confidence_pu=None, action="")  # fmt: skip
        writer.append([writer.chain.line(record, seq, T_NS + seq * NS)])
        if writer.full:
            writer.rotate()


def tail_of(writer: JournalWriter, place: str = "place.json") -> JournalTail:
    return JournalTail(writer.path.parent, writer.path.parent / place, lambda: writer.safe[0])


def take_all(tail: JournalTail, site_now: Callable[[], Any]) -> list[int]:
    """Numbers of the lines until there are no more."""
    rows_of, out = JournalRows(LABELS, site_now), list[int]()
    while (batch := tail.read()) is not None:
        out += [line_head(line).seq for line in batch.lines]
        _, place = rows_of.of(batch.lines, tail.place)
        tail.taken(batch, place)
    return out


def test_each_line_comes_once_over_rotations_and_restarts(journal_of: Any, pod: Twin) -> None:
    writer = journal_of(10, segment_bytes=700)
    assert len(closed_segments(writer.path.parent)) >= 2
    tail = tail_of(writer)
    assert take_all(tail, lambda: pod.site) == list(range(10))
    for k in range(10, 40):
        add(writer, 1)
        assert take_all(tail, lambda: pod.site) == [k]
        if k % 7 == 0:
            tail.close()
            tail = tail_of(writer)
    assert take_all(tail, lambda: pod.site) == []
    assert tail.lost_lines == 0
    tail.close()


def test_a_batch_that_was_not_taken_comes_again(journal_of: Any) -> None:
    tail = tail_of(journal_of(5))
    first, again = tail.read(), tail.read()
    assert first == again
    assert first is not None
    tail.close()


def test_lines_that_were_pruned_first_are_lost_and_counted(journal_of: Any, pod: Twin) -> None:
    writer = journal_of(4, segment_bytes=700)
    tail = tail_of(writer)
    assert take_all(tail, lambda: pod.site) == [0, 1, 2, 3]
    tail.close()
    add(writer, 30)
    gone = closed_segments(writer.path.parent)[:4]
    for path in gone:
        path.unlink()
    tail = tail_of(writer)
    numbers = take_all(tail, lambda: pod.site)
    assert numbers == list(range(numbers[0], 34))
    assert tail.lost_lines == numbers[0] - 4 > 0
    tail.close()


@pytest.mark.parametrize("count", [5, 8, 12])
def test_another_journal_or_a_cut_one_is_sent_from_its_beginning(
    journal_of: Any, pod: Twin, count: int
) -> None:
    writer = journal_of(8)
    tail = tail_of(writer)
    assert take_all(tail, lambda: pod.site) == list(range(8))
    tail.close()
    place = (writer.path.parent / "place.json").read_bytes()
    other = journal_of(count, "other", title="another")
    (other.path.parent / "place.json").write_bytes(place)
    tail = tail_of(other)
    assert take_all(tail, lambda: pod.site) == list(range(count))
    assert tail.lost_lines == 0
    tail.close()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"seq":"x"}', b"\xff\x00"])
def test_a_damaged_place_is_none(journal_of: Any, pod: Twin, content: bytes) -> None:
    writer = journal_of(3)
    (writer.path.parent / "place.json").write_bytes(content)
    tail = tail_of(writer)
    assert take_all(tail, lambda: pod.site) == [0, 1, 2]
    tail.close()


def test_a_line_that_cannot_be_read_costs_itself_alone(journal_of: Any, pod: Twin) -> None:
    writer = journal_of(6, segment_bytes=700)
    path = closed_segments(writer.path.parent)[0]
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:-2], b"\x00" * 20, b""]))
    tail = tail_of(writer)
    numbers = take_all(tail, lambda: pod.site)
    assert len(numbers) == 5
    assert numbers[-1] == 5
    assert tail.lost_lines == 1
    tail.close()


def test_a_journal_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    tail = JournalTail(tmp_path / "run", tmp_path / "place.json", lambda: 0)
    assert tail.read() is None


def test_what_is_not_safe_is_not_sent(journal_of: Any) -> None:
    writer = journal_of(5)
    tail = JournalTail(writer.path.parent, writer.path.parent / "p.json", lambda: 3)
    batch = tail.read()
    assert batch is not None
    assert [line_head(line).seq for line in batch.lines] == [0, 1, 2]
    tail.close()


def test_the_writer_sends_the_journal_and_its_place_outlives_it(journal_of: Any, pod: Twin) -> None:
    writer, link = journal_of(3), Link(ClickHouseError("gone"))
    (writer.path.parent / "place.json").write_bytes(msgspec.json.encode(TailPlace(leads=True)))
    journal = (tail_of(writer), JournalRows(LABELS, lambda: pod.site))
    archive = writer_to(link, journal=journal)
    wait_for(lambda: archive.stats()["written_lines"] == 3)
    assert archive.close()
    assert [name for name, _ in link.taken] == ["journal"]
    rows = [msgspec.json.decode(line) for line in link.taken[0][1].splitlines()]
    first = rows[0]
    assert (first["id"], first["t"], first["hall"]) == ("f0", "2027-01-15 08:00:00.000", "hall-a")
    again = writer_to(Link(), journal=(tail_of(writer), journal[1]))
    add(writer, 1)
    wait_for(lambda: again.stats()["written_lines"] == 1)
    assert again.close()


def test_a_journal_that_cannot_be_sent_does_not_hold_values_back(
    journal_of: Any, pod: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send_lane, "RETRY_S", 1000.0)
    monkeypatch.setattr(send_lane, "MAX_RETRY_S", 1000.0)

    class NoJournal(Link):
        def insert(self, table: str, columns: Any, form: str, body: bytes) -> None:
            if table == "journal":
                raise ClickHouseError("no right", 403, 497)
            super().insert(table, columns, form, body)

    link, writer = NoJournal(), journal_of(3)
    (writer.path.parent / "place.json").write_bytes(msgspec.json.encode(TailPlace(leads=True)))
    archive = writer_to(link, journal=(tail_of(writer), JournalRows(LABELS, lambda: pod.site)))
    wait_for(lambda: archive.stats()["error"] == "no right")
    for i in range(5):
        archive.offer(T_NS + i * NS, Names(2), (table(2),))
    wait_for(lambda: archive.stats()["queue_points"] == 0)
    assert (archive.stats()["error"], len(link.taken)) == ("no right", 5)
    assert archive.close()


@pytest.mark.parametrize("body", [b'{"id":"\xff"}', b"[]", b"3"])
def test_a_damaged_body_stops_no_line_behind_it(pod: Twin, body: bytes) -> None:
    head = b'{"seq":%d,"prev":"","kind":"finding","tick":1,"now_ns":1800000000000000000,"body":%s}'
    lines = [head % (0, body), head % (1, b"{}")]
    rows, place = JournalRows(LABELS, lambda: pod.site).of(lines, TailPlace(leads=True))
    assert ([row["seq"] for row in rows], place.seq) == ([0, 1], 1)
    assert msgspec.json.decode(msgspec.json.encode(rows[0]))["body"] == body.decode("utf-8", "replace")


def made_rows(pod: Twin, records: list[Any], folder: Path) -> list[dict[str, Any]]:
    writer = JournalWriter(folder, durable=False)
    for i, record in enumerate(records):
        writer.append([writer.chain.line(record, i, T_NS)])
    writer.close()
    tail = JournalTail(folder, folder / "place.json", lambda: len(records))
    batch = tail.read()
    tail.close()
    assert batch is not None
    return JournalRows(LABELS, lambda: pod.site).of(batch.lines, TailPlace(leads=True))[0]


def test_entities_are_named_by_the_site_of_the_line_only(pod: Twin, tmp_path: Path) -> None:
    of = {"control": "gpu.power_cap_w", "first_name": "first", "last_name": "last", "reason": "r",
          "index": np.array([0, 5], np.int32), "value": np.array([300.0, 400.0], np.float32)}  # fmt: skip
    more = {"epoch": 1, "first_command": 1, "expires_ns": 1, "deadline_ns": 1}
    records = [
        ManifestRecord(format=1, site_hash=pod.site.spec_hash),
        CommandRecord(**of, **more),
        LapsedRecord(control="gpu.power_cap_w", index=np.array([5], np.int32), becomes="default"),
        AdviceRecord(**{**of, "index": np.array([10**6], np.int32), "value": np.array([np.nan])}),
        SiteRecord(site_hash="another", was=pod.site.spec_hash, sizes={}),
        CommandRecord(**of, **more),
    ]
    rows = made_rows(pod, records, tmp_path)
    names = ["lab/h/r1/node0/gpu0", "lab/h/r1/node1/gpu1"]
    assert [(r["kind"], r["entities"], r["values"]) for r in rows] == [
        ("manifest", [], []),
        ("command", names, [300.0, 400.0]),
        ("lapsed", names[1:], []),
        ("advice", ["first"], ["nan"]),
        ("site", [], []),
        ("command", ["first", "last"], [300.0, 400.0]),
    ]
    assert len({r["hash"] for r in rows}) == len(rows)


def texts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["id"] for row in rows if row["kind"] == "finding"]


def test_lines_are_sent_of_the_time_in_which_the_daemon_led(pod: Twin, tmp_path: Path) -> None:
    def finding(name: str) -> FindingRecord:
        return FindingRecord(
            id=name, severity="info", title="t", entities=(), evidence=(), confidence_pu=None, action=""
        )

    start = DaemonRecord(started="1", wall_ns=1)
    records = [
        start, finding("standby"), LeaderRecord(epoch=1), finding("first"),
        LeaderRecord(lost=1), finding("lost"), LeaderRecord(epoch=3), finding("again"),
        DaemonRecord(contingency=ContingencyNote(gpus=1)), finding("on"),
        ManifestRecord(format=1), finding("rotated"), start, finding("killed and now a standby"),
    ]  # fmt: skip
    writer = JournalWriter(tmp_path, durable=False)
    lines = [writer.chain.line(record, i, T_NS) for i, record in enumerate(records)]
    writer.close()
    rows_of = JournalRows(LABELS, lambda: pod.site)
    rows, place = rows_of.of(lines, TailPlace())
    assert texts(rows) == ["first", "again", "on", "rotated"]
    assert (place.seq, place.leads) == (13, False)
    parts, place = list[dict[str, Any]](), TailPlace()
    for line in lines:  # cut anywhere it is the same
        more, place = rows_of.of([line], place)
        parts += more
    assert parts == rows
    for leads, expected in ((True, ["lost"]), (False, [])):  # a journal whose beginning was pruned
        cut = JournalRows(LABELS, lambda: pod.site, lambda leads=leads: leads)  # type: ignore[misc]
        assert texts(cut.of(lines[5:6], TailPlace())[0]) == expected


def test_a_layout_gives_the_names_of_a_site(pod: Twin) -> None:
    link = Link()
    writer = writer_to(link)
    writer.offer(T_NS, Layout(pod.site), (table(2),))
    wait_for(lambda: bool(link.taken))
    assert read_block(link.taken[0][1])["entity"] == ["lab/h/r1", "lab/h/r2"]
    assert writer.close()
