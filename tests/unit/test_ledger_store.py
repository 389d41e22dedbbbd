"""Hours of the ledger on the disk: written once, over restarts, and bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from twin.catalogue import NS
from twin.ledger import HourRecord, LedgerRow, encode_hour
from twin.ledger.hour_record import MeteredSum
from twin.report import LedgerStore, ledger_store

HOUR_NS = 3600 * NS
BEGIN_NS = 1_793_491_200 * NS  # 2026-11-01T00:00:00Z
EVER = (0, 2**62)


def hour(number: int, energy_j: float = 1.0) -> bytes:
    row = LedgerRow("h", "job", "q", "t", "a", f"j{number}", (1,) * 10, energy_j)
    return encode_hour(
        HourRecord(BEGIN_NS + number * HOUR_NS, HOUR_NS, MeteredSum(energy_j, 0.1, 0.01), {}, {}, (row,))
    )


def test_hours_survive_a_restart_and_are_written_once(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path / "ledger")
    for n in range(23, 27):  # across midnight
        store.write([hour(n - 1), hour(n)])
    store.write([hour(26, 99.0)])
    again = LedgerStore(tmp_path / "ledger")  # after a crash the twin closes the last hours anew
    again.write([hour(25, 99.0), hour(26, 99.0), hour(27)])
    found = list(again.read(*EVER))
    assert [(h.begin_ns - BEGIN_NS) // HOUR_NS for h in found] == [22, 23, 24, 25, 26, 27]
    assert {h.site.energy_j for h in found} == {1.0}
    assert [h.begin_ns for h in again.read(BEGIN_NS + 24 * HOUR_NS, BEGIN_NS + 25 * HOUR_NS)] == [
        BEGIN_NS + 24 * HOUR_NS
    ]
    assert sorted(p.name for p in (tmp_path / "ledger").iterdir()) == [
        "2026-11-01.json.zst", "2026-11-02.json.zst"
    ]  # fmt: skip


def test_a_damaged_day_is_kept_aside_and_the_others_are_read(tmp_path: Path) -> None:
    store = LedgerStore(tmp_path)
    store.write([hour(1), hour(30)])
    (tmp_path / "2026-11-01.json.zst").write_bytes(b"no archive")
    assert [h.begin_ns for h in store.read(*EVER)] == [BEGIN_NS + 30 * HOUR_NS]
    assert (tmp_path / "2026-11-01.json.zst.unread").exists()


def test_what_cannot_be_written_is_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "ledger"
    folder.write_text("in the way")
    store = LedgerStore(folder)
    store.write([hour(1)])
    assert "ledger" in store.fault
    folder.unlink()
    store.write([hour(1), hour(2)])
    assert store.fault == ""
    assert len(list(store.read(*EVER))) == 2


def test_the_oldest_days_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_store, "KEPT_DAYS", 3)
    store = LedgerStore(tmp_path)
    for day in range(6):
        store.write([hour(24 * day)])
    assert [(h.begin_ns - BEGIN_NS) // HOUR_NS for h in store.read(*EVER)] == [72, 96, 120]
