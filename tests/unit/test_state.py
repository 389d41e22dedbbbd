"""The state: qualities, the last good value, worst cases, counters, identity, checksums, random frames."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from twin.catalogue import NS, TABLES
from twin.run.trace import TraceDecoder, TraceEncoder
from twin.telemetry import GOOD, MISSING, OUT_OF_RANGE, STALE, UNTRUSTED, Counts, Frame, State, TableUpdate
from twin.telemetry.frame import ABSURD_Q, MISSING_Q, UNTRUSTED_Q

GPU = TABLES["gpu"].by_name
T0 = 1_700_000_000 * NS


def i32(*values: int) -> Any:
    return np.array(values, np.int32)


def i64(*values: int) -> Any:
    return np.array(values, np.int64)


def one(signal: Any, q: int, t_ns: int, entity: int | None = 0) -> Frame:
    """A frame with one gauge of one entity, or of all three."""
    n = 3 if entity is None else 1
    where = None if entity is None else i32(entity)
    update = TableUpdate(
        signal.table, i32(signal.row), where, np.full((1, n), q, np.int32), np.full(n, t_ns, np.int64)
    )
    return Frame(0, t_ns, 1.0, (update,))


def count(raw: int, gain: int, t_ns: int) -> Frame:
    signal = GPU["energy_mj"]
    return Frame(
        0,
        t_ns,
        1.0,
        (),
        (Counts("gpu", i32(signal.row), i32(0), i64(raw)[None], i64(gain)[None], i64(t_ns)),),
    )


@pytest.mark.parametrize("entity", [0, None])
@pytest.mark.parametrize(
    "q,quality",
    [(MISSING_Q, MISSING), (UNTRUSTED_Q, UNTRUSTED), (ABSURD_Q, OUT_OF_RANGE), (-(2**31) + 9, MISSING)],
)
def test_a_bad_reading_keeps_the_last_good_value_and_its_time(
    q: int, quality: int, entity: int | None
) -> None:
    state, temp = State({"gpu": 3}), GPU["temp_c"]
    table = state.tables["gpu"]
    assert table.quality_of(temp, T0).tolist() == [MISSING] * 3
    assert np.isinf(table.age_s(temp, T0)).all()
    state.apply(one(temp, q, T0, entity))  # bad from the start: never good
    assert np.isinf(table.age_s(temp, T0)[0])
    assert math.isnan(table.value[temp.row, 0])
    state.apply(one(temp, 100, T0 + NS, entity))
    assert (table.quality_of(temp, T0 + NS)[0], table.value[temp.row, 0]) == (GOOD, 50.0)
    for k in (2, 3, 4):
        state.apply(one(temp, q, T0 + k * NS, entity))
        assert table.quality_of(temp, T0 + k * NS)[0] == quality
        assert table.value[temp.row, 0] == 50.0
        assert table.age_s(temp, T0 + k * NS)[0] == k - 1
    state.apply(one(temp, 102, T0 + 5 * NS, entity))
    assert (table.quality_of(temp, T0 + 5 * NS)[0], table.value[temp.row, 0]) == (GOOD, 51.0)
    assert table.age_s(temp, T0 + 7 * NS)[0] == 2
    others = [0] * 3 if entity is None else [0, MISSING, MISSING]
    assert table.quality[temp.row].tolist() == others
    assert table.bad_count[temp.row] == sum(x > 0 for x in others)


def test_stale_after_three_periods() -> None:
    state, temp = State({"gpu": 3}), GPU["temp_c"]
    state.apply(one(temp, 100, T0))
    table = state.tables["gpu"]
    for age_s, quality in ((0.0, GOOD), (3.0, GOOD), (3.001, STALE), (1e6, STALE)):
        assert table.quality_of(temp, T0 + round(age_s * NS))[0] == quality
    assert table.quality_of(temp, T0 - NS)[0] == GOOD  # a nominal instant a little behind the device's clock
    assert table.age_s(temp, T0 - NS)[0] == 0
    state.apply(one(temp, UNTRUSTED_Q, T0 + NS))
    assert table.quality_of(temp, T0 + 10**6 * NS)[0] == UNTRUSTED  # the reason stays named
    slower = State({"gpu": 3}, {"gpu.temp_c": 10.0})
    slower.apply(one(temp, 100, T0 + 2 * NS))
    assert slower.tables["gpu"].quality_of(temp, T0 + 32 * NS)[0] == GOOD


def test_a_frame_between_others_of_one_group_has_its_own_time() -> None:
    state, temp, power = State({"gpu": 3}), GPU["temp_c"], GPU["power_w"]
    rows = i32(power.row, temp.row)
    both = TableUpdate("gpu", rows, None, np.full((2, 3), 10, np.int32), np.full(3, T0, np.int64))
    state.apply(Frame(0, T0, 1.0, (both,)))
    state.apply(one(temp, 20, T0 + 5 * NS, 1))
    table = state.tables["gpu"]
    assert table.age_s(temp, T0 + 6 * NS).tolist() == [6, 1, 6]
    assert table.age_s(power, T0 + 6 * NS).tolist() == [6, 6, 6]
    assert table.value[temp.row].tolist() == [5, 10, 5]


DRIFTING = [pytest.param(s, id=s.key) for t in TABLES.values() for s in t.gauges if s.danger != "none"]


@pytest.mark.parametrize("signal", DRIFTING)
def test_worst_case_in_closed_form(signal: Any) -> None:
    state = State({signal.table: 3}, {signal.key: signal.period_s})
    table = state.tables[signal.table]
    q = round((signal.low + 0.6 * (signal.high - signal.low)) / signal.quantum)
    state.apply(one(signal, q, T0, 0))
    value = float(table.value[signal.row, 0])
    sign = {"high": 1, "low": -1}[signal.danger]
    for periods in (0.0, 1.5, 1.6, 3.0, 10.0, 1000.0, 1e6):
        age_s = periods * signal.period_s
        free = value + sign * max(0.0, age_s - 1.5 * signal.period_s) * signal.slew_per_s
        expected = min(max(free, signal.low), signal.high)
        for slew in (None, np.full(3, signal.slew_per_s)):
            got = table.worst(signal, T0 + round(age_s * NS), slew)
            assert got[0] == pytest.approx(expected, rel=1e-6, abs=1e-6)
            assert got.dtype == np.float32
            assert np.isnan(got[1:]).all()  # never heard: no worst case, and not "healthy"
    assert table.worst(signal, T0 + 10**18, np.zeros(3))[0] == np.float32(value)
    bad = Frame(
        0, T0, 1.0, (TableUpdate(signal.table, i32(signal.row), i32(0), i32(MISSING_Q)[None], i64(T0 + NS)),)
    )
    state.apply(bad)  # the drift goes on from the last good one
    age_s = 4 * signal.period_s
    free = value + sign * 2.5 * signal.period_s * signal.slew_per_s
    assert table.worst(signal, T0 + round(age_s * NS))[0] == pytest.approx(
        min(max(free, signal.low), signal.high), rel=1e-6, abs=1e-6
    )


def test_worst_case_of_a_value_without_a_time_is_the_limit() -> None:
    """A device whose clock stands at zero: its value is of unknown age."""
    state, temp = State({"gpu": 3}), GPU["temp_c"]
    state.apply(one(temp, 100, 0))
    table = state.tables["gpu"]
    assert table.worst(temp, T0)[0] == temp.high
    assert table.worst(temp, T0, np.zeros(3))[0] == 50.0
    assert table.quality_of(temp, T0)[0] == STALE


def test_without_danger_the_worst_case_is_the_value() -> None:
    state, clock = State({"gpu": 3}), GPU["sm_clock_hz"]
    state.apply(one(clock, 1500, T0))
    worst = state.tables["gpu"].worst(clock, T0 + 10**6 * NS)
    assert worst[0] == 1.5e9
    worst[0] = 0  # a copy
    assert state.tables["gpu"].value[clock.row, 0] == np.float32(1.5e9)


def test_counters_total_resets_and_silence() -> None:
    state, energy = State({"gpu": 3}), GPU["energy_mj"]
    table = state.tables["gpu"]

    def look(now_ns: int) -> tuple[int, int, int, int]:
        cell = energy.row, 0
        return (
            int(table.raw[cell]),
            int(table.total[cell]),
            int(table.resets[cell]),
            int(table.quality_of(energy, now_ns)[0]),
        )

    assert look(T0) == (-1, 0, 0, MISSING)
    state.apply(count(2**53 + 1, 0, T0))
    assert look(T0) == (2**53 + 1, 0, 0, GOOD)
    state.apply(count(2**53 + 4, 3, T0 + NS))
    assert look(T0 + NS) == (2**53 + 4, 3, 0, GOOD)
    state.apply(count(-1, 0, T0 + 2 * NS))  # no reading: not a reset, and not "good"
    assert look(T0 + 2 * NS) == (-1, 3, 0, MISSING)
    assert np.isinf(table.age_s(energy, T0 + 2 * NS)).all()
    state.apply(count(2**53 + 9, 5, T0 + 3 * NS))
    assert look(T0 + 3 * NS) == (2**53 + 9, 8, 0, GOOD)
    state.apply(count(4, 4, T0 + 4 * NS))
    assert look(T0 + 4 * NS) == (4, 12, 1, GOOD)
    assert look(T0 + 8 * NS)[3] == STALE


def filled(n: int = 4, seed: int = 1) -> State:
    """Every array of it holds something, in three groups."""
    rng = np.random.default_rng(seed)
    state = State({"gpu": n, "rack": 2})
    gpu = TABLES["gpu"]
    every = np.arange(len(gpu.gauges), dtype=np.int32)
    q = rng.integers(0, 50, (len(every), n)).astype(np.int32)
    t = T0 + rng.integers(0, NS, n)
    state.apply(Frame(0, T0, 1.0, (TableUpdate("gpu", every, None, q, t),)))
    c = np.arange(len(gpu.counters), dtype=np.int32)
    for k in range(2):
        raw = rng.integers(0, 2**60, (len(c), n))
        state.apply(Frame(1 + k, T0, 1.0, (), (Counts("gpu", c, None, raw, raw // 3, t + 1),)))
    part = i32(2, 5, 7)
    q = np.array([[MISSING_Q, 3], [ABSURD_Q, 4], [5, UNTRUSTED_Q]], np.int32)
    state.apply(Frame(3, T0 + NS, 1.0, (TableUpdate("gpu", part, i32(0, n - 1), q, i64(T0 + 5, T0 + 6)),)))
    state.tables["gpu"].generation[:] = rng.integers(1, 9, n)
    return state


def test_a_replaced_device_is_unknown_and_its_neighbours_are_not() -> None:
    state, other = filled(), filled()
    table, before = state.tables["gpu"], other.tables["gpu"]
    table.replace(0)
    fresh = State({"gpu": 1}).tables["gpu"]
    for name, array in table.arrays().items():
        if name == "group_of_row":
            continue
        assert np.array_equal(
            array[..., 1:], before.arrays()[name][..., 1:], equal_nan=array.dtype.kind == "f"
        ), name
        if name == "generation":
            assert array[0] == before.generation[0] + 1
        else:
            expected = fresh.arrays()[name][..., :1]
            assert (
                np.isnan(array[..., 0]).all() if name == "value" else (array[..., :1] == expected[:1]).all()
            ), name
    assert table.bad_count.tolist() == np.count_nonzero(table.quality, axis=1).tolist()
    assert np.isinf(table.age_s(GPU["temp_c"], T0)[0])


@given(st.lists(st.integers(-1, 3), max_size=6))
def test_remapped_moves_each_column(places: list[int]) -> None:
    table = filled().tables["gpu"]
    moved = table.remapped(len(places), i32(*places))
    fresh = State({"gpu": 1}).tables["gpu"]
    for new, old in enumerate(places):
        for signal in (*table.signals, *table.counters):
            theirs = table if old >= 0 else fresh
            at = max(old, 0)
            assert moved.quality_of(signal, T0 + NS)[new] == theirs.quality_of(signal, T0 + NS)[at]
            assert moved.age_s(signal, T0 + NS)[new] == theirs.age_s(signal, T0 + NS)[at]
        for name in ("value", "good_ns", "raw", "total", "resets", "generation"):
            a, b = getattr(moved, name)[..., new], getattr(theirs, name)[..., at]
            assert np.array_equal(a, b, equal_nan=name == "value")
    assert moved.bad_count.tolist() == np.count_nonzero(moved.quality, axis=1).tolist()


def test_a_remapped_state_and_its_past_go_separate_ways() -> None:
    state = filled()
    table = state.tables["gpu"]
    moved = table.remapped(4, i32(0, 1, 2, 3))
    groups = table.t_ns.shape[0]
    for row in (9, 11):
        q, t_ns = np.zeros((1, 4), np.int32), np.full(4, T0 + 9)
        moved.apply_update(TableUpdate("gpu", i32(row), None, q, t_ns), T0 + 9)
    assert table.t_ns.shape[0] == groups == table.partition.n_groups
    assert np.isfinite(table.age_s(GPU["util_pu"], T0)).all()


def test_restoring_forgets_what_the_partition_knew() -> None:
    """The state had resolved a set of rows before; the restored groups are others."""
    source, target = State({"gpu": 2}), State({"gpu": 2})
    a, b = GPU["power_w"], GPU["temp_c"]
    whole = TableUpdate("gpu", i32(a.row, b.row), None, np.ones((2, 2), np.int32), i64(T0, T0))
    target.apply(Frame(0, T0, 1.0, (whole,)))
    source.apply(
        Frame(0, T0, 1.0, (TableUpdate("gpu", i32(b.row), None, i32(7, 7)[None], i64(T0 + 1, T0 + 1)),))
    )
    source.apply(Frame(1, T0, 1.0, (whole,)))
    target.tables["gpu"].restore(source.tables["gpu"].arrays())
    later = whole._replace(t_ns=i64(T0 + 2 * NS, T0 + 2 * NS))
    for state in (source, target):
        state.apply(Frame(2, T0 + 2 * NS, 1.0, (later,)))
        assert state.tables["gpu"].age_s(b, T0 + 2 * NS).tolist() == [0, 0]
    assert source.checksum() == target.checksum()
    assert source.marks() == target.marks()


def test_the_checksum_differs_for_any_change_of_any_cell() -> None:
    state = filled()
    assert state.checksum() == filled().checksum() != filled(seed=2).checksum()
    seen = {state.checksum()}
    for table in state.tables.values():
        for array in table.arrays().values():
            for k in range(array.size):
                array.reshape(-1)[k : k + 1].view(np.uint8)[0] ^= 1
                seen.add(state.checksum())
                array.reshape(-1)[k : k + 1].view(np.uint8)[0] ^= 1
    cells = sum(a.size for t in state.tables.values() for a in t.arrays().values())
    assert len(seen) == cells + 1
    for name in ("tick", "now_ns"):
        setattr(state, name, getattr(state, name) + 1)
        seen.add(state.checksum())
    assert len(seen) == cells + 3


def test_marks_name_the_signal_that_drifted() -> None:
    state, other = filled(), filled()
    other.tables["gpu"].value[GPU["temp_c"].row, 2] += 0.5
    a, b = state.marks(), other.marks()
    assert a.keys() == b.keys() == {s.key for s in TABLES["gpu"].gauges}
    assert [k for k in a if a[k] != b[k]] == ["gpu.temp_c"]
    assert State({"gpu": 2, "rack": 0}).marks() == {}


def random_frame(rng: np.random.Generator, tick: int, n: int = 6) -> Frame:
    """Disjoint sets of rows, some for all entities and some for a few; sentinels among the values."""
    gpu = TABLES["gpu"]
    now = T0 + tick * NS
    updates: list[TableUpdate] = []
    counts: list[Counts] = []
    rows = rng.permutation(len(gpu.gauges))[: rng.integers(1, 12)]
    for part in np.array_split(rows, rng.integers(1, 4)):
        if len(part):
            entity = None if rng.random() < 0.4 else np.flatnonzero(rng.random(n) < 0.5).astype(np.int32)
            m = n if entity is None else len(entity)
            if m:
                q = rng.integers(0, 2000, (len(part), m)).astype(np.int32)
                q[rng.random(q.shape) < 0.2] = rng.choice([MISSING_Q, UNTRUSTED_Q, ABSURD_Q])
                t = now - rng.integers(0, 3, m) * 1000
                updates.append(TableUpdate("gpu", np.sort(part).astype(np.int32), entity, q, t))
    if rng.random() < 0.7:
        c = np.sort(rng.permutation(len(gpu.counters))[:3]).astype(np.int32)
        raw = rng.integers(-1, 2**62, (3, n))
        counts.append(Counts("gpu", c, None, raw, rng.integers(0, 2**40, (3, n)), np.full(n, now)))
    return Frame(tick, now, 1.0, tuple(updates), tuple(counts), (), bool(rng.random() < 0.1))


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_fed_by_frames_or_by_their_recording_it_is_the_same(seed: int) -> None:
    """And it is what a dictionary of cells says."""
    rng = np.random.default_rng(seed)
    live, replayed = State({"gpu": 6}), State({"gpu": 6})
    encoder, decoder = TraceEncoder(), TraceDecoder()
    cells: dict[tuple[int, int], tuple[float, int, int]] = {}  # value, quality, time of the last good one
    for tick in range(15):
        frame = random_frame(rng, tick)
        live.apply(frame)
        replayed.apply(decoder.decode(encoder.encode(frame)))
        assert live.checksum() == replayed.checksum()
        for u in frame.updates:
            for (k, j), q in np.ndenumerate(u.q):
                row, e = int(u.rows[k]), j if u.entity is None else int(u.entity[j])
                value, _, t = cells.get((row, e), (math.nan, MISSING, 0))
                why = {MISSING_Q: MISSING, UNTRUSTED_Q: UNTRUSTED, ABSURD_Q: OUT_OF_RANGE}.get(int(q), GOOD)
                if why == GOOD:
                    value, t = (
                        float(np.float32(q) * np.float32(live.tables["gpu"].signals[row].quantum)),
                        int(u.t_ns[j]),
                    )
                cells[row, e] = value, why, t
        table = live.tables["gpu"]
        for (row, e), (value, quality, t) in cells.items():
            signal = table.signals[row]
            assert table.value[row, e] == value or math.isnan(value)
            assert table.quality[row, e] == quality
            expected = math.inf if t == 0 else max(frame.now_ns - t, 0) / NS
            assert table.age_s(signal, frame.now_ns)[e] == expected
