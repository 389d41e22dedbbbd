"""The account of a day: counts from the journal, each line once, and the energy of a recorded power."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.support.in_process_daemon import Pod, serve
from twin.api.page import day_account
from twin.api.page.day_account import DAY_NS, DayCount, DayReader
from twin.api.page.ledger_statement import each_hour_once
from twin.catalogue import NS
from twin.contracts import CommandRecord, FindingRecord, JournalRecord, LapsedRecord, ReportsRecord
from twin.ledger import HOUR_NS, HourRecord, statement
from twin.report import LedgerStore
from twin.run import OPEN, JournalWriter

BEGIN = 20_000 * DAY_NS


def command(
    control: str, value: list[float], final: bool = False, names: tuple[str, ...] = ()
) -> CommandRecord:
    index = np.arange(len(value), dtype=np.int32)
    return CommandRecord(
        control=control, policy="p", first_name="a", last_name="b", index=index, names=names,
        value=np.array(value), reason="r", epoch=1, first_command=0, expires_ns=0, deadline_ns=0, final=final,
    )  # fmt: skip


def lapsed(control: str, n: int) -> LapsedRecord:
    return LapsedRecord(control=control, index=np.arange(n, dtype=np.int32), becomes="safe")


def finding(identity: str, severity: str) -> FindingRecord:
    return FindingRecord(id=identity, severity=severity, title="t", entities=(), evidence=(),
                         confidence_pu=None, action="")  # fmt: skip


CAP = "gpu.power_cap_w"
DAY: list[tuple[float, JournalRecord]] = [
    (-100, command(CAP, [700.0, 700.0])),  # of yesterday: holds into today
    (-50, finding("old", "critical")),
    (-40, ReportsRecord(tier="durable", count=9)),
    (60, lapsed(CAP, 2)),  # 60 s of today
    (100, command(CAP, [700.0] * 3)),
    (110, command("node.power_cap_w", [9000.0])),  # beside it: the same capping
    (130, lapsed(CAP, 3)),
    (150, lapsed("node.power_cap_w", 1)),  # 50 s
    (200, finding("x", "warning")),
    (210, finding("x", "critical")),
    (220, finding("x", "info")),
    (230, finding("y", "info")),
    (240, ReportsRecord(tier="durable", count=3)),
    (250, ReportsRecord(refused="unknown", count=7)),
    (260, command("node.service_level", [2.0, 0.0])),
    (270, command("node.service_level", [2.0])),
    (300, command(CAP, [700.0])),  # runs still
    (310, command("cdu.supply_temp_target_c", [30.0])),
]  # fmt: skip


def checked(count: DayCount) -> None:
    now_ns = BEGIN + 340 * NS
    assert (count.cappings, count.capped_s(now_ns)) == (2, 60 + 50 + 40)
    assert (count.saves, len(count.nodes_out)) == (3, 1)
    assert count.alarms == {"x": "critical", "y": "info"}


def test_a_day_is_counted_in_its_order() -> None:
    count = DayCount(BEGIN)
    for at_s, record in DAY:
        count.take(record, BEGIN + round(at_s * NS))
    checked(count)


def test_a_cap_given_back_ends() -> None:
    count = DayCount(BEGIN)
    count.take(command(CAP, [700.0]), BEGIN + 10 * NS)
    count.take(command(CAP, [1200.0], final=True), BEGIN + 40 * NS)
    assert (count.cappings, count.capped_s(BEGIN + 99 * NS)) == (1, 30.0)


@given(st.lists(st.integers(1, len(DAY) - 1), max_size=3))
def test_a_journal_is_read_on_from_where_it_ended(tmp_path_factory: Any, cuts: list[int]) -> None:
    """Whenever it is read meanwhile, each line counts once; a new day begins at nothing."""
    folder = tmp_path_factory.mktemp("run")
    writer, reader = JournalWriter(folder), DayReader(folder)
    for k, (at_s, record) in enumerate(DAY):
        if k in cuts:
            reader.read(BEGIN)
        writer.append([writer.chain.line(record, k, BEGIN + round(at_s * NS))])
    checked(reader.read(BEGIN))
    checked(reader.read(BEGIN))
    writer.close()
    assert reader.read(BEGIN + DAY_NS).cappings == 0


def test_a_segment_that_takes_the_inode_of_a_pruned_one_is_read_from_its_begin(tmp_path: Path) -> None:
    writer, reader = JournalWriter(tmp_path), DayReader(tmp_path)
    for k, (at_s, record) in enumerate(DAY):
        writer.append([writer.chain.line(record, k, BEGIN + round(at_s * NS))])
    writer.close()
    path = tmp_path / OPEN
    lines = path.read_bytes().splitlines(keepends=True)
    for part in (lines[:-4], lines[-4:]):
        path.write_bytes(b"".join(part))
        reader.read(BEGIN)
    checked(reader.count)


def test_of_a_very_long_day_the_first_part_is_left_out_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that were counted before do not count as too much again."""
    writer = JournalWriter(tmp_path)
    follower = DayReader(tmp_path)
    monkeypatch.setattr(day_account, "MOST_BYTES", 1500)
    for k, (at_s, record) in enumerate(DAY):
        writer.append([writer.chain.line(record, k, BEGIN + round(at_s * NS))])
        follower.read(BEGIN)
        if k % 4 == 3:
            writer.rotate()
    checked(follower.count)
    assert not follower.left_out
    writer.close()
    late = DayReader(tmp_path)
    assert late.read(BEGIN).capped_s(BEGIN + 340 * NS) < 150
    assert late.left_out


async def seven_hours(pod: Pod, folder: Path, asks: bool = False) -> LedgerStore:
    """Live from midnight on, with a ledger on the disk; `asks`: a screen asks meanwhile."""
    store = pod.live.energy_ledger = LedgerStore(folder / "ledger")
    pod.twin.now_ns = (pod.twin.now_ns // DAY_NS + 1) * DAY_NS
    for k in range(7 * 12):
        pod.tick({"node.power_w": 5000.0, "rack.power_w": 1e5, "feeder.power_w": 1e5 + k}, dt_s=300.0)
        store.write(pod.twin.engine.ledger.closed)
        if asks and k % 40 == 39:
            await pod.ask("GET", "/api/v1/today")
    return store


@pytest.mark.long
def test_today_has_the_energy_of_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over hours that only the disk has, that the engine has, and the running one; each once."""
    monkeypatch.setattr(day_account, "FRESH_S", 0.0)

    async def check(pod: Pod) -> None:
        store = await seven_hours(pod, tmp_path, asks=True)
        day = pod.twin.engine.state.now_ns // DAY_NS * DAY_NS
        hours = [*store.read(day, day + DAY_NS), pod.twin.engine.ledger.running()]
        assert len(hours) > len(pod.twin.engine.ledger.closed) + 1
        truth = statement([h for h in hours if h is not None], "site", day, day + DAY_NS)
        for _ in range(2):
            _, tree = await pod.ask("GET", "/api/v1/today")
            assert tree["energy_wh"] == pytest.approx(1e3 * truth.total.energy_kwh)
            assert tree["energy_of_s"] == pytest.approx(truth.watched_ns / NS)
        pod.live.energy_ledger = LedgerStore(tmp_path / "empty")
        _, tree = await pod.ask("GET", "/api/v1/today")
        assert tree["energy_wh"] == pytest.approx(1e3 * truth.total.energy_kwh), "each hour is read once"

    serve(tmp_path, check)


@pytest.mark.long
def test_both_pages_take_each_hour_once_and_the_disk_only_for_hours_that_the_engine_has_not(
    tmp_path: Path,
) -> None:
    async def check(pod: Pod) -> None:
        store = await seven_hours(pod, tmp_path)
        day = pod.twin.engine.state.now_ns // DAY_NS * DAY_NS
        end = pod.twin.engine.state.now_ns // HOUR_NS * HOUR_NS
        written = [*store.read(day, end)]
        begins = [hour.begin_ns for hour in written]
        assert len(begins) > 4

        def taken(kept: list[HourRecord], known: list[int]) -> list[int]:
            return [h.begin_ns for h in each_hour_once(pod.live, kept, day, end, known)]

        assert taken(written[-2:], []) == begins
        assert taken(written[-2:], begins[:2]) == begins[2:]
        pod.live.energy_ledger = LedgerStore(tmp_path / "empty")
        assert taken(written[-2:], []) == begins[-2:]
        pod.live.energy_ledger = None
        assert taken(written, begins[:2]) == begins[2:]

    serve(tmp_path, check)


@pytest.mark.long
def test_hours_that_could_not_be_read_are_read_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(day_account, "FRESH_S", 0.0)

    async def check(pod: Pod) -> None:
        store = await seven_hours(pod, tmp_path)

        def refuse(path: Path) -> list[Any]:
            raise PermissionError(path)

        with monkeypatch.context() as disk:
            disk.setattr(store, "_read", refuse)
            _, tree = await pod.ask("GET", "/api/v1/today")
            assert tree["energy_wh"] is None
        _, tree = await pod.ask("GET", "/api/v1/today")
        assert tree["energy_of_s"] == pytest.approx(7 * 3600.0, abs=300.0)

    serve(tmp_path, check)


def test_today_is_told_from_what_the_daemon_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(day_account, "FRESH_S", 0.0)

    async def check(pod: Pod) -> None:
        _, tree = await pod.ask("GET", "/api/v1/today")
        assert (tree["energy_wh"], tree["alarms"]["critical"]) == (None, 0)
        assert any("no run" in note for note in tree["notes"])
        pod.twin.engine.intake.authority["thermal_guard"] = "act"
        pod.tick({"gpu.temp_c": 95.0})
        pod.tick()
        pod.tick()
        _, tree = await pod.ask("GET", "/api/v1/today")
        assert (tree["cappings"], tree["alarms"]["critical"], tree["capped_s"] > 0) == (1, 1, True)
        # In a run folder without a journal nothing is counted, and the reason is told
        pod.live.run_dir = str(tmp_path / "gone")
        _, tree = await pod.ask("GET", "/api/v1/today")
        assert (tree["cappings"], tree["saves"]) == (0, 0)

    serve(tmp_path, check)
