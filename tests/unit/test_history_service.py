"""The history beside the daemon: kills, full disks and files that cannot be used cost it nothing it had."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.evaluation.bench.history import bench_history
from tests.support.builders import START_NS, Twin, two_racks
from tests.support.forked_children import ForkedChildren
from tests.support.history_samples import T0, ask, filled, rack_sample, store_in, wait_for
from twin.catalogue import NS, StorageError
from twin.config import History
from twin.contracts import Decision
from twin.run import (
    FILE_NAME,
    HistoryError,
    HistoryReader,
    HistoryService,
    HistoryStore,
    Layout,
    Sample,
    take_sample,
)
from twin.run.history_sample import TableSample
from twin.run.history_schema import MIGRATIONS, move_aside, open_store
from twin.run.history_service import Sampler
from twin.run.history_writer import Backlog, HistoryWriter


@pytest.fixture(scope="module")
def pod() -> Twin:
    return Twin(two_racks())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twin.run.history_writer.RETRY_S", 0.05)


def test_a_newer_file_is_moved_aside_never_deleted(tmp_path: Path, pod: Twin) -> None:
    filled(tmp_path, pod.site, 3).close()
    path = tmp_path / FILE_NAME
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(StorageError, match="version 99; this racktwin knows up to"):
        open_store(path)
    writer = HistoryWriter(path, lambda: store_in(tmp_path), Backlog())
    writer.backlog.put(rack_sample(pod.site, T0 + 900 * NS, [5, 5]))
    writer.start()
    wait_for(lambda: writer.written == 1)
    assert writer.close()
    assert writer.moved_aside == 1
    kept = sqlite3.connect(tmp_path / "history-aside1.db")
    assert kept.execute("SELECT COUNT(*) FROM sample").fetchone()[0] == 6
    kept.close()
    assert ask(tmp_path, "rack.power_w", ["r1"], 0, 1000)["values"]["r1"] == [5.0]


def test_an_older_file_is_migrated(tmp_path: Path, pod: Twin) -> None:
    filled(tmp_path, pod.site, 3).close()
    later = (*MIGRATIONS, ("CREATE TABLE more(x)", "INSERT INTO more VALUES(1)"))
    open_store(tmp_path / FILE_NAME, later).close()
    db = open_store(tmp_path / FILE_NAME, later)
    assert db.execute("PRAGMA user_version").fetchone()[0] == len(MIGRATIONS) + 1
    assert db.execute("SELECT COUNT(*) FROM more").fetchone()[0] == 1
    assert db.execute("SELECT COUNT(*) FROM sample").fetchone()[0] == 6
    db.close()


def test_a_file_that_is_no_database_is_moved_aside(tmp_path: Path, pod: Twin) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"something else entirely" * 1000)
    writer = HistoryWriter(tmp_path / FILE_NAME, lambda: store_in(tmp_path), Backlog())
    writer.backlog.put(rack_sample(pod.site, T0, [5, 5]))
    writer.start()
    wait_for(lambda: writer.written == 1)
    assert writer.close()
    assert (tmp_path / "history-aside1.db").read_bytes().startswith(b"something else")


def test_what_is_moved_aside_stays_within_the_quota(tmp_path: Path, pod: Twin) -> None:
    """A disk that damages the file again and again is not filled with damaged files."""
    path = tmp_path / FILE_NAME
    for number in range(1, 31):
        path.write_bytes(b"%02d is no database" % number * 1000)
        path.with_name(f"{FILE_NAME}-wal").write_bytes(b"x" * 1000)
        move_aside(path, 40_000)
    kept = sorted(p.name for p in tmp_path.iterdir())
    assert kept == [
        "history-aside29.db",
        "history-aside29.db-wal",
        "history-aside30.db",
        "history-aside30.db-wal",
    ]
    path.write_bytes(b"large" * 20_000)
    assert move_aside(path, 40_000).name == "history-aside31.db", "the newest stays in any case"
    assert [p.name for p in tmp_path.iterdir()] == ["history-aside31.db"]
    for _ in range(30):
        path.write_bytes(b"")
        move_aside(path, 10**9)
    assert len(list(tmp_path.iterdir())) == 20


class Full(HistoryStore):
    """A store on a disk that is as full as a test wants it."""

    pages: int | None = None

    def add(self, sample: Sample) -> None:
        if Full.pages is not None:
            self.db.execute(f"PRAGMA max_page_count={Full.pages}")
        super().add(sample)


@pytest.fixture
def full_disk() -> Iterator[None]:
    yield
    Full.pages = None


def test_a_full_disk_is_counted_and_written_later(tmp_path: Path, pod: Twin, full_disk: None) -> None:
    filled(tmp_path, pod.site, 5).close()
    path, backlog = tmp_path / FILE_NAME, Backlog(most_samples=50)
    Full.pages = 1  # SQLite takes the present size where that is more
    writer = HistoryWriter(path, lambda: Full(path, 10.0, 30.0, 10**9), backlog)
    layout = Layout(pod.site)
    n = pod.site.sizes["gpu"]

    def gpu_sample(i: int) -> Sample:
        value = np.full((8, n), i, np.float32)
        names = ("power_w", "temp_c", "hbm_temp_c", "util_pu", "sm_clock_hz", "mem_used_pu", "xid_code",
                 "power_limit_w")  # fmt: skip
        part = TableSample("gpu", names, value, (), np.zeros((0, n), np.int64))
        return Sample(T0 + i * 10 * NS, layout, (part,), 0)

    for i in range(10, 110):
        backlog.put(gpu_sample(i))
    assert backlog.dropped == 50
    writer.start()
    wait_for(lambda: writer.write_errors > 0 and "full" in writer.error)
    got = ask(tmp_path, "rack.power_w", ["r1"], 0, 50)
    assert got["values"]["r1"] == [0.0, 1.0, 2.0, 3.0, 4.0], "readers still work"
    Full.pages = 2**30
    wait_for(lambda: len(backlog) == 0)
    assert writer.close()
    assert writer.error == ""
    got = ask(tmp_path, "gpu.power_w", ["r1/node0/gpu0"], 0, 2000)
    assert [v for v in got["values"]["r1/node0/gpu0"] if v is not None] == list(range(60, 110))


def test_a_sample_that_cannot_be_written_does_not_block_the_others(tmp_path: Path, pod: Twin) -> None:
    writer = HistoryWriter(tmp_path / FILE_NAME, lambda: store_in(tmp_path), Backlog())
    bad = Sample(T0, Layout(pod.site), (None,), 0)  # type: ignore[arg-type]
    object.__setattr__(bad, "tables", ())
    writer.backlog.put(bad)
    object.__setattr__(bad, "tables", (None,))
    writer.backlog.put(rack_sample(pod.site, T0 + NS, [5, 5]))
    writer.backlog._pop = lambda: writer.backlog._samples.popleft()  # type: ignore[method-assign]
    writer.start()
    wait_for(lambda: writer.written == 1)
    assert writer.close()
    assert (writer.backlog.dropped, writer.write_errors) == (1, 3)


def write(path: str, first: str) -> None:
    """Samples one after the other, each number printed once it is committed."""
    store, site = HistoryStore(Path(path), 1.0, 30.0, 10**9), Twin(two_racks()).site
    for i in itertools.count(int(first)):
        store.add(rack_sample(site, T0 + i * NS, [i, i + 0.5], 10 * i))
        print(i, flush=True)
        store.upkeep()


@pytest.mark.long
def test_kill_9_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    path, last = tmp_path / FILE_NAME, -1
    with ForkedChildren(f"{__name__}:write") as children:
        for _ in range(8):
            pid = children.start(str(path), str(last + 1))
            for _ in range(rng.integers(1, 20)):
                last = int(children.line())
            time.sleep(rng.uniform(0.0, 0.01))
            last = int(([str(last), *children.kill(pid)])[-1])
            store = HistoryStore(path, 1.0, 30.0, 10**9)
            assert store.db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
            store.close()
            got = HistoryReader(path, 1.0).query("rack.power_w", ["r1"], T0, T0 + 10**6 * NS, None, 50_000)
            values = got["values"]["r1"]
            assert values[: last + 1] == [float(i) for i in range(last + 1)]
            last = len(values) - 1  # one more may have been committed before it could be said
    assert last > 50


def test_the_sampler_takes_what_is_known_and_when_it_is_due(pod: Twin) -> None:
    pod = Twin(two_racks())
    sampler = Sampler(pod.site, 10.0)
    taken = []
    for i in range(31):
        decision = pod.tick({"gpu.temp_c": 60.0 + i} if i < 15 else {"rack.flow_lpm": 90.0})
        taken.append(sampler.offer(pod.engine, decision))
    kept = [s for s in taken if s is not None]
    assert [(s.t_ns - START_NS) // NS for s in kept] == [1, 10, 20, 30]
    first, last = kept[0], kept[-1]
    gpu = next(t for t in first.tables if t.table == "gpu")
    assert "temp_c" in gpu.gauges
    assert "xid_code" not in gpu.gauges
    assert set(gpu.value[gpu.gauges.index("temp_c")].tolist()) == {60.0}
    gpu = next(t for t in last.tables if t.table == "gpu")
    row = gpu.value[gpu.gauges.index("temp_c")]
    assert np.isnan(row).all(), "silent for 15 s at a period of 1 s"
    assert last.bad_cells >= len(row)
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 1.0


def test_a_sample_is_not_changed_by_later_ticks(pod: Twin) -> None:
    pod = Twin(two_racks())
    pod.tick({"gpu.temp_c": 60.0})
    sample = take_sample(pod.engine, Layout(pod.site), pod.now_ns)
    pod.tick({"gpu.temp_c": 99.0})
    gpu = next(t for t in sample.tables if t.table == "gpu")
    assert set(gpu.value[gpu.gauges.index("temp_c")].tolist()) == {60.0}


def test_names_are_those_of_the_site(pod: Twin) -> None:
    layout = Layout(pod.site)
    for table, n in pod.site.sizes.items():
        assert layout.names(table) == [pod.site.name(table, i) for i in range(n)]


def test_the_service_answers_and_counts(tmp_path: Path) -> None:
    pod = Twin(two_racks())
    service = HistoryService(History(every_s=1.0), tmp_path / "history", pod.site)
    try:
        for i in range(20):
            service.offer(pod.engine, pod.tick({"rack.power_w": 1000.0 + i}))
        wait_for(lambda: service.stats()["samples"] == 20)
        got = asyncio.run(service.query("rack.power_w", ["r2"], START_NS, START_NS + 60 * NS))
        assert got["values"]["r2"] == [1000.0 + i for i in range(20)]
        with pytest.raises(HistoryError):
            asyncio.run(service.query("rack.power_w", ["nowhere"], 0, 1))
        wait_for(lambda: service.stats()["newest_ns"] == pod.now_ns)
        stats = service.stats()
        assert stats["bytes"] > 0
        assert (stats["queue"], stats["dropped"], stats["write_errors"]) == (0, 0, 0)
        assert service.alarms() == []
        service.offer(None, Decision(1, pod.now_ns + 60 * NS))  # type: ignore[arg-type]
        assert service.stats()["dropped"] == 1
        assert [a[0] for a in service.alarms()] == ["history/dropped"]
    finally:
        service.close()


def test_a_store_that_cannot_be_opened_stops_nobody(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("twin.run.history_service.FAILING_S", 0.0)
    (tmp_path / "history").write_text("a file where the folder should be")
    pod = Twin(two_racks())
    service = HistoryService(History(every_s=1.0), tmp_path / "history", pod.site)
    try:
        for _ in range(3):
            service.offer(pod.engine, pod.tick({"rack.power_w": 1000.0}))
        wait_for(lambda: service.stats()["write_errors"] > 0)
        assert service.stats()["queue"] == 3
        assert [a[0] for a in service.alarms()] == ["history/failing"]
    finally:
        service.close()


def test_without_a_store_questions_are_refused(tmp_path: Path) -> None:
    pod = Twin(two_racks())
    service = HistoryService(History(embedded=False), tmp_path, pod.site)
    service.offer(pod.engine, pod.tick({"rack.power_w": 1000.0}))
    assert service.stats()["bytes"] == 0
    with pytest.raises(HistoryError, match="embedded is false"):
        asyncio.run(service.query("rack.power_w", ["r1"], 0, 1))
    service.close()


def test_the_benchmark_runs() -> None:
    found = bench_history(day_samples=130, large_gpus=1000, large_samples=61)
    assert found["history.n576.store_points_per_s"] > 0
    assert found["history.n1k.store_bytes_per_point"] < 2
    assert found["history.n576.query_rack_day_ms"] > 0
    assert found["history.n1k.influx_text_points_per_s"] > 0
