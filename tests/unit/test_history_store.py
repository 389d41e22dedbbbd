"""The embedded history: what was added is found again by name, whatever happens in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.builders import Twin, two_racks
from tests.support.history_samples import T0, ask, filled, rack_sample, settle, store_in
from twin.catalogue import NS, StorageError
from twin.run import FILE_NAME, HistoryError, HistoryReader, Layout, Sample, history_store
from twin.run.history_sample import TableSample
from twin.run.history_store import window_ns


@pytest.fixture(scope="module")
def pod() -> Twin:
    return Twin(two_racks())


@pytest.mark.parametrize("count", [5, 61, 200])
def test_samples_come_back_raw_compacted_or_not(tmp_path: Path, pod: Twin, count: int) -> None:
    filled(tmp_path, pod.site, count).close()
    got = ask(tmp_path, "rack.power_w", ["lab/h/r2", "r1"], 0, count * 10)
    assert got["t_ns"] == [T0 + i * 10 * NS for i in range(count)]
    assert got["values"] == {
        "lab/h/r2": [i + 0.5 for i in range(count)],
        "r1": [float(i) for i in range(count)],
    }
    assert got["names"] == {"lab/h/r2": "lab/h/r2", "r1": "lab/h/r1"}
    assert got["step_s"] is None
    assert got["unit"] == "W"
    energy = ask(tmp_path, "feeder.energy_mj", ["a"], 20, 50)
    assert energy["values"] == {"a": [20, 30, 40]}


def test_samples_are_compacted_when_their_window_is_over(tmp_path: Path, pod: Twin) -> None:
    store = filled(tmp_path, pod.site, 125)
    left = store.db.execute("SELECT COUNT(*) FROM sample").fetchone()[0]
    chunks = store.db.execute("SELECT COUNT(*) FROM chunk").fetchone()[0]
    store.close()
    assert (left, chunks) == (2 * 5, 2 * 2)  # of two tables


def test_steps_are_means_with_their_extremes(tmp_path: Path, pod: Twin) -> None:
    filled(tmp_path, pod.site, 130).close()
    for step_s in (30.0, 120.0):
        n = round(step_s / 10)
        got = ask(tmp_path, "rack.power_w", ["r1"], 0, 1200, step_s=step_s)
        assert got["t_ns"] == [T0 + i * round(step_s) * NS for i in range(1200 // round(step_s))]
        firsts = [i * n for i in range(120 // n)]
        assert got["values"]["r1"] == [pytest.approx(i + (n - 1) / 2, abs=0.05) for i in firsts]
        assert got["min"]["r1"] == firsts
        assert got["max"]["r1"] == [i + n - 1 for i in firsts]
        energy = ask(tmp_path, "feeder.energy_mj", ["a"], 0, 1200, step_s=step_s)
        assert energy["values"]["a"] == [10 * (i + n - 1) for i in firsts]
        assert "min" not in energy


@pytest.mark.parametrize("step_s", [100.0, 600.0, 5000.0, 100_000.0])
def test_a_long_span_is_the_same_folded_or_not(
    tmp_path: Path, pod: Twin, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path, pod.site, 1500)
    store.add(rack_sample(pod.site, T0 + 20_000 * NS, [7, np.nan], 9))
    store.close()
    found = []
    for pieces in (2, 10**6):
        monkeypatch.setattr("twin.run.history_query.FOLD_PIECES", pieces)
        found.append(ask(tmp_path, "rack.power_w", ["r1", "r2"], 0, 21_000, step_s=step_s))
    assert found[0] == found[1]
    assert len([v for v in found[0]["values"]["r1"] if v is not None]) >= min(1, 15_000 / step_s)


def test_gaps_stay_gaps(tmp_path: Path, pod: Twin) -> None:
    store = filled(tmp_path, pod.site, 70)
    store.add(rack_sample(pod.site, T0 + 700 * NS, [np.nan, 7.0]))
    for i in range(200, 280):
        store.add(rack_sample(pod.site, T0 + i * 10 * NS, [i, np.nan]))
    settle(store)
    store.close()
    raw = ask(tmp_path, "rack.power_w", ["r1", "r2"], 600, 2100)
    by_t = dict(zip(raw["t_ns"], zip(raw["values"]["r1"], raw["values"]["r2"], strict=True), strict=True))
    assert by_t[T0 + 700 * NS] == (None, 7.0)
    assert by_t[T0 + 710 * NS] == (None, None), "a line would be drawn across the silence"
    assert by_t[T0 + 2000 * NS] == (200.0, None)
    stepped = ask(tmp_path, "rack.power_w", ["r1", "r2"], 0, 2400, step_s=60)
    values = stepped["values"]["r1"]
    assert len(values) == 40
    assert values[12:33] == [None] * 21
    assert None not in values[33:]
    assert stepped["values"]["r2"][33:] == [None] * 7
    assert stepped["min"]["r1"][20] is None


def test_a_name_is_followed_through_a_change_of_the_site(tmp_path: Path, pod: Twin) -> None:
    store = filled(tmp_path, pod.site, 30)
    wider = Twin(two_racks(racks="r[0-3]")).site  # r1 and r2 are now second and third
    for i in range(30, 90):
        store.add(rack_sample(wider, T0 + i * 10 * NS, [1000, i, i + 0.5, 3000]))
    settle(store)
    store.close()
    got = ask(tmp_path, "rack.power_w", ["r1", "lab/h/r2", "r3"], 0, 900)
    assert got["values"]["r1"] == [float(i) for i in range(90)]
    assert got["values"]["lab/h/r2"] == [i + 0.5 for i in range(90)]
    assert got["values"]["r3"] == [None] * 30 + [3000.0] * 60
    gone = filled(tmp_path, pod.site, 5, first=100)  # r3 is no more; what it did is still there
    gone.close()
    got = ask(tmp_path, "rack.power_w", ["lab/h/r3"], 0, 1100, step_s=300)
    assert got["values"]["lab/h/r3"][1] == 3000.0


def test_a_table_that_came_with_an_upgrade_has_names(tmp_path: Path, pod: Twin) -> None:
    """The site is the same, and an earlier version of racktwin stored it without that table."""
    store = filled(tmp_path, pod.site, 5)
    store.db.execute("DELETE FROM names WHERE tbl='feeder'")
    store.close()
    reader = HistoryReader(tmp_path / FILE_NAME, 10.0)
    with pytest.raises(HistoryError, match="no feeder that was ever here"):
        reader.query("feeder.energy_mj", ["a"], T0, T0 + 100 * NS)
    filled(tmp_path, pod.site, 5, first=5).close()
    found = reader.query("feeder.energy_mj", ["a"], T0, T0 + 100 * NS)
    assert found["values"]["a"] == [10 * i for i in range(10)]


def test_wrong_questions_are_told_what_was_expected(tmp_path: Path, pod: Twin) -> None:
    filled(tmp_path, pod.site, 3).close()
    cases: list[tuple[str, list[str], dict[str, Any], str]] = [
        ("rack.colour", ["r1"], {}, "no signal"),
        ("rack.power_w", ["r9"], {}, "'r9' is no rack"),
        ("node.power_w", ["node0"], {}, "not the only one"),
        ("rack.power_w", [], {}, "expected 1 to"),
        ("rack.power_w", ["r1"], {"step_s": -1}, "seconds > 0"),
        ("rack.power_w", ["r1"], {"step_s": 20, "max_points": 1}, "at least"),
        ("rack.power_w", ["r1"], {"max_points": 0}, "expected 1 to"),
        ("rack.power_w", ["r1"], {"timeout_s": -1.0}, "took too long"),
    ]
    for key, names, more, expected in cases:
        with pytest.raises(HistoryError, match=expected):
            ask(tmp_path, key, names, 0, 100, **more)
    with pytest.raises(HistoryError, match="span"):
        ask(tmp_path, "rack.power_w", ["r1"], 100, 0)
    with pytest.raises(StorageError, match="no history yet"):
        ask(tmp_path / "none", "rack.power_w", ["r1"], 0, 100)
    assert ask(tmp_path, "rack.flow_lpm", ["r1"], 0, 100)["t_ns"] == []


def test_a_step_below_the_samples_gives_them_as_they_are(tmp_path: Path, pod: Twin) -> None:
    filled(tmp_path, pod.site, 70).close()
    got = ask(tmp_path, "rack.power_w", ["r1"], 0, 700, step_s=7.2)
    assert got["step_s"] is None
    assert got["values"]["r1"] == list(map(float, range(70)))


def test_a_long_span_chooses_its_step_and_no_grid_over_nothing(tmp_path: Path, pod: Twin) -> None:
    filled(tmp_path, pod.site, 700).close()
    got = ask(tmp_path, "rack.power_w", ["r1"], 0, 7000, max_points=100)
    assert got["step_s"] == 120
    assert len(got["t_ns"]) <= 100
    reader = HistoryReader(tmp_path / FILE_NAME, 10.0)
    ever = reader.query("rack.power_w", ["r1"], 0, 2**62, None, 2000)
    assert ever["step_s"] is None
    assert len(ever["t_ns"]) == 700


def test_fine_chunks_go_first_and_the_coarse_ones_answer_for_them(tmp_path: Path, pod: Twin) -> None:
    store = filled(tmp_path, pod.site, 300)
    store.keep_days = 1000 / 86_400
    store.add(rack_sample(pod.site, T0 + 3000 * NS, [300, 300.5], 3000))
    settle(store)
    store.close()
    got = ask(tmp_path, "rack.power_w", ["r1"], 0, 3010)
    assert got["step_s"] is None
    assert got["t_ns"][:3] == [T0, T0 + 60 * NS, T0 + 120 * NS]
    assert got["values"]["r1"][:2] == [2.5, 8.5]
    assert got["min"]["r1"][:2] == [0.0, 6.0]
    assert got["values"]["r1"][-1] == 300.0
    assert got["t_ns"] == sorted(set(got["t_ns"]))


def test_the_quota_holds_and_the_newest_stay(tmp_path: Path, pod: Twin, monkeypatch: Any) -> None:
    rng = np.random.default_rng(1)
    quota = 2_000_000
    store = store_in(tmp_path, quota=quota)
    n, value = pod.site.sizes["gpu"], None
    for i in range(2500):
        value = rng.integers(0, 4000, (3, n)).astype(np.float32) / 2
        part = TableSample("gpu", ("power_w", "temp_c", "hbm_temp_c"), value, (), np.zeros((0, n), np.int64))
        store.add(Sample(T0 + i * 10 * NS, Layout(pod.site), (part,), 0))
        for _ in range(50):
            if not store.upkeep():
                break
    pages = store.db.execute("PRAGMA page_count").fetchone()[0] * 8192
    facts = store.facts()
    coarse = store.db.execute("SELECT MIN(t0) FROM coarse").fetchone()[0]
    fine = store.db.execute("SELECT MIN(t0) FROM chunk").fetchone()[0]
    assert store.db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    store.close()
    assert pages <= quota * 1.1
    assert facts["newest_ns"] == T0 + 2499 * 10 * NS
    assert coarse < fine, "coarse chunks outlive the fine ones"
    assert value is not None
    got = ask(tmp_path, "gpu.power_w", ["lab/h/r1/node0/gpu0"], 24900, 25000)
    assert got["values"]["lab/h/r1/node0/gpu0"][-1] == value[0, 0]


def test_room_that_became_free_is_given_back_to_the_disk(
    tmp_path: Path, pod: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that hold nothing any more leave the file, as far as they are more than a quarter of it."""
    monkeypatch.setattr(history_store, "VACUUM_PAGES", 7)
    store = filled(tmp_path, pod.site, 100)
    store.db.execute("CREATE TABLE ballast AS SELECT zeroblob(200 * 8192) AS data")
    store.db.execute("DROP TABLE ballast")
    settle(store)
    store.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    free, pages = (
        store.db.execute(f"PRAGMA {what}").fetchone()[0] for what in ("freelist_count", "page_count")
    )
    store.close()
    assert free <= max(7, 0.25 * pages)
    assert (tmp_path / FILE_NAME).stat().st_size == pages * 8192 < 50 * 8192


def test_a_clock_that_was_set_back_loses_nothing(tmp_path: Path, pod: Twin) -> None:
    store = filled(tmp_path, pod.site, 130)
    for i in range(20, 130):  # again, half a period later
        store.add(rack_sample(pod.site, T0 + i * 10 * NS + 5 * NS, [1000 + i, 0]))
        store.upkeep()
    settle(store)
    store.close()
    got = ask(tmp_path, "rack.power_w", ["r1"], 300, 330)
    assert got["values"]["r1"] == [30.0, 1030.0, 31.0, 1031.0, 32.0, 1032.0]


@pytest.mark.slow
def test_a_clock_that_leaps_ahead_does_not_cost_the_history(tmp_path: Path, pod: Twin) -> None:
    store = filled(tmp_path, pod.site, 6000)
    store.add(rack_sample(pod.site, T0 + 40 * 365 * 86_400 * NS, [1, 1]))
    settle(store)
    left = store.db.execute("SELECT COUNT(*) FROM chunk").fetchone()[0]
    store.close()
    assert left >= 2 * 99 - 2 * history_store.EXPIRE_STEPS


def test_compaction_may_be_cut_off_at_any_step(tmp_path: Path, pod: Twin) -> None:
    store = store_in(tmp_path)
    for i in range(65):
        store.add(rack_sample(pod.site, T0 + i * 10 * NS, [i, i], i))
    for steps in range(1, 4):
        for _ in range(steps):
            store.upkeep()
        store.close()
        got = ask(tmp_path, "rack.power_w", ["r1"], 0, 650)
        assert got["values"]["r1"] == [float(i) for i in range(65)]
        got = ask(tmp_path, "rack.power_w", ["r1"], 0, 600, step_s=60)
        assert got["max"]["r1"] == [6.0 * i + 5 for i in range(10)]
        store = store_in(tmp_path)
    settle(store)
    store.close()
    assert ask(tmp_path, "feeder.energy_mj", ["a"], 0, 650)["values"]["a"] == list(range(65))


def test_windows_are_whole_slots() -> None:
    assert [window_ns(s) / NS for s in (0.1, 1, 10, 11, 3600)] == [60, 60, 600, 660, 216_000]


def test_damage_is_a_gap_that_is_counted(tmp_path: Path, pod: Twin) -> None:
    store = filled(tmp_path, pod.site, 125)
    for table in ("chunk", "coarse"):
        data = store.db.execute(f"SELECT data FROM {table} WHERE t0=? AND signal=1", (T0,)).fetchone()[0]
        broken = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
        store.db.execute(f"UPDATE {table} SET data=? WHERE t0=? AND signal=1", (broken, T0))
    store.db.execute("UPDATE sample SET data=x'0011' WHERE t_ns=?", (T0 + 1210 * NS,))
    store.close()
    got = ask(tmp_path, "rack.power_w", ["r1"], 0, 1250)
    assert got["damaged"] == 3
    assert [v for v in got["values"]["r1"] if v is not None] == [*map(float, range(60, 121)), 122, 123, 124]
    store = store_in(tmp_path)
    store.add(rack_sample(pod.site, T0 + 9000 * NS, [1, 1], 1))
    settle(store)
    assert store.facts()["damaged"] == 2, "of two tables; and the others were compacted"
    assert store.db.execute("SELECT COUNT(*) FROM sample").fetchone()[0] == 2
    store.close()
