"""The Inbox against a rival: one dictionary per cell, every reading of a tick kept, reduced at the end."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from twin.catalogue import NS, TABLES
from twin.telemetry import Block, Frame, Inbox, Reading, State
from twin.telemetry.frame import ABSURD_Q, MISSING_Q, UNTRUSTED_Q, Partition
from twin.telemetry.inbox import FUTURE_TOLERANCE_NS

SIZES = {"gpu": 5, "rack": 3}
GAUGES = {
    "gpu": ("power_w", "power_w_max", "temp_c", "thermal_margin_k", "mem_used_pu", "clock_event_bits"),
    "rack": ("power_w", "flow_lpm", "leak_state", "valve_pu", "power_w_max"),
}
COUNTERS = {"gpu": ("energy_mj", "pcie_replay_count", "ecc_dbe_count"), "rack": ()}
UNTRUSTED = np.float32(3e38)
T0 = 1_700_000_000 * NS


class Slow:
    """Per cell: the time last accepted and the readings since the last tick. Companions are spelt out."""

    def __init__(self) -> None:
        self.t_ns: dict[Any, int] = {}
        self.pending: dict[Any, list[float]] = {}
        self.raw: dict[Any, int] = {}
        self.real_ns: dict[Any, int] = {}
        self.gain: dict[Any, int] = {}
        self.null: dict[Any, bool] = {}
        self.counts: Counter[str] = Counter()
        self.urgent = False
        self.first_ns: dict[Any, int] = {}  # of the pending readings of this tick
        self.before: dict[Any, list[float]] = {}  # the readings of the last tick that had any

    def put(self, table: str, start: int, columns: dict[str, list[Any]], t_ns: int, now_ns: int) -> None:
        """`columns` by name, gauges and counters alike."""
        n = len(next(iter(columns.values())))
        if start + n > SIZES[table]:
            self.counts["unknown_entity"] += n
            return
        if t_ns > now_ns + FUTURE_TOLERANCE_NS:
            self.counts["clamped"] += n
        t_ns = min(t_ns, now_ns)
        fed = dict(columns)
        for signal in TABLES[table].gauges:
            if signal.base in columns and signal.name not in fed:
                fed[signal.name] = columns[signal.base]
        for name, values in fed.items():
            for i, value in enumerate(values):
                self.cell((table, name, start + i), value, t_ns)

    def cell(self, key: Any, value: Any, t_ns: int) -> None:
        before = self.t_ns.get(key, 0)
        if before > t_ns:
            self.counts["older"] += 1
            return
        self.counts["accepted"] += 1
        self.watch_drop(key, value)
        self.counts["coalesced"] += bool(self.pending.get(key))
        first = self.first_ns.get(key, t_ns) if self.pending.get(key) else t_ns
        if t_ns - first >= NS:
            first = t_ns
            if TABLES[key[0]].by_name[key[1]].kind == "gauge":
                self.pending[key] = []  # a backlog: what belongs to an earlier tick
        self.first_ns[key] = first
        self.pending.setdefault(key, []).append(value)
        self.t_ns[key] = t_ns
        signal = TABLES[key[0]].by_name[key[1]]
        if signal.kind == "counter":
            self.counter(key, value, t_ns)

    def watch_drop(self, key: Any, value: Any) -> None:
        signal, held = TABLES[key[0]].by_name[key[1]], self.pending.get(key) or self.before.get(key)
        if signal.urgent_at is not None and signal.urgent_at <= value <= signal.high:
            sane = [v for v in held or [] if signal.low <= v <= signal.high]
            if not sane or max(sane) < signal.urgent_at:
                self.urgent = True
        if signal.urgent_drop_pu and held:
            sane = [v for v in held if signal.low <= v <= signal.high]
            if sane and signal.low <= value < signal.urgent_drop_pu * min(sane):
                self.urgent = True

    def counter(self, key: Any, new: int, t_ns: int) -> None:
        self.null[key] = new < 0
        if new < 0:
            self.counts["missing"] += 1
            return
        signal = TABLES[key[0]].by_name[key[1]]
        old = self.raw.get(key)
        self.raw[key] = new
        since, self.real_ns[key] = self.real_ns.get(key, 0), t_ns
        if old is None:
            return
        most = min(signal.high * ((t_ns - since) / NS + 1.0), 9e18)
        if new >= old:
            if new - old <= most:
                self.gain[key] = self.gain.get(key, 0) + new - old
            else:
                self.counts["counter_jumps"] += 1
        elif signal.wrap and new + signal.wrap - old <= most:
            self.gain[key] = self.gain.get(key, 0) + new + signal.wrap - old
            self.counts["counter_wraps"] += 1
        else:
            self.gain[key] = self.gain.get(key, 0) + (new if new <= most else 0)
            self.counts["counter_resets"] += 1

    def take(self) -> dict[Any, Any]:
        """Cell -> (integer, or (raw, gain), and time)."""
        out: dict[Any, Any] = {}
        for key, values in self.pending.items():
            signal = TABLES[key[0]].by_name[key[1]]
            if signal.kind == "counter":
                raw = -1 if self.null[key] else self.raw[key]
                out[key] = (raw, self.gain.pop(key, 0), self.t_ns[key])
            else:
                out[key] = (self.reduced(signal, values), self.t_ns[key])
        self.before |= self.pending
        self.pending, self.urgent = {}, False
        return out

    def reduced(self, signal: Any, values: list[float]) -> int:
        low, high = np.float32(signal.low), np.float32(signal.high)
        sane = [float(v) for v in values if low <= v <= high]
        if not sane:
            heard = [v for v in values if not math.isnan(v)]
            if not heard:
                self.counts["missing"] += 1
                return MISSING_Q
            trusted = heard[-1] != UNTRUSTED
            self.counts["out_of_range" if trusted else "untrusted"] += 1
            return ABSURD_Q if trusted else UNTRUSTED_Q
        if signal.reduce == "latch":
            bits = 0
            for v in sane:
                bits |= round(v)
            return bits
        one = {"last": sane[-1], "mean": math.fsum(sane) / len(sane), "max": max(sane), "min": min(sane)}
        return round(one[signal.reduce] / signal.quantum)


def cells_of(frame: Frame) -> dict[Any, Any]:
    """A frame in the rival's form; a cell that appears twice is a fault."""
    out: dict[Any, Any] = {}
    for u in frame.updates:
        entities = range(SIZES[u.table]) if u.entity is None else u.entity.tolist()
        assert u.q.shape == (len(u.rows), len(u.t_ns)) == (len(u.rows), len(entities))
        for k, row in enumerate(u.rows.tolist()):
            for j, e in enumerate(entities):
                key = (u.table, TABLES[u.table].gauges[row].name, e)
                assert key not in out
                out[key] = (int(u.q[k, j]), int(u.t_ns[j]))
    for c in frame.counts:
        entities = range(SIZES[c.table]) if c.entity is None else c.entity.tolist()
        for k, row in enumerate(c.rows.tolist()):
            for j, e in enumerate(entities):
                key = (c.table, TABLES[c.table].counters[row].name, e)
                assert key not in out
                out[key] = (int(c.raw[k, j]), int(c.gain[k, j]), int(c.t_ns[j]))
    return out


def same(fast: dict[Any, Any], slow: dict[Any, Any]) -> None:
    assert fast.keys() == slow.keys()
    for key, expected in slow.items():
        signal = TABLES[key[0]].by_name[key[1]]
        if signal.kind != "counter" and signal.reduce == "mean" and expected[0] >= 0:
            # a running mean in float32 may round to the neighbour
            assert abs(fast[key][0] - expected[0]) <= 1, key
            assert fast[key][1] == expected[1], key
        else:
            assert fast[key] == expected, key


class Both:
    """The Inbox and its rival, fed alike."""

    def __init__(self) -> None:
        self.fast, self.slow, self.tick, self.now_ns = Inbox(SIZES), Slow(), 0, T0

    def put(self, table: str, start: int, columns: dict[str, list[Any]], t_ns: int, as_block: bool) -> None:
        gauges = tuple(n for n in columns if TABLES[table].by_name[n].kind != "counter")
        counters = tuple(n for n in columns if n not in gauges)
        n = len(next(iter(columns.values())))
        if as_block:
            values = np.array([columns[g] for g in gauges], np.float32).reshape(len(gauges), n)
            counts = np.array([columns[c] for c in counters], np.int64).reshape(len(counters), n)
            self.fast.put_block(Block(table, start, gauges, values, counters, counts, t_ns), self.now_ns)
            self.slow.put(table, start, columns, t_ns, self.now_ns)
            return
        for name, values in columns.items():
            for i, v in enumerate(values):
                trusted = v != UNTRUSTED
                none = v < 0 if name in counters else math.isnan(v)
                reading = Reading(table, start + i, name, None if none else v, t_ns, bool(trusted))
                self.fast.put(reading, self.now_ns)
                self.slow.put(table, start + i, {name: [v]}, t_ns, self.now_ns)

    def cut(self, seconds: int) -> None:
        self.now_ns += seconds * NS
        assert self.fast.urgent == self.slow.urgent
        frame = self.fast.take(self.tick, self.now_ns, float(seconds))
        self.tick += 1
        same(cells_of(frame), self.slow.take())
        assert {k: v for k, v in self.fast.counts.items() if v} == {
            k: v for k, v in self.slow.counts.items() if v
        }


def a_gauge(rng: random.Random, signal: Any) -> Any:
    chance = rng.random()
    if chance < 0.70:
        most = int(min(signal.high, 200) / signal.quantum)
        return np.float32(rng.randint(0, most) * signal.quantum)
    if chance < 0.80:
        return np.float32("nan")
    if chance < 0.90:
        return np.float32(rng.choice([-1e9, 1e12, 1e38, -1e38]))
    return UNTRUSTED


def a_count(rng: random.Random, old: int) -> int:
    chance = rng.random()
    if chance < 0.6:
        return old + rng.randint(0, 1000)
    if chance < 0.75:
        return rng.randint(0, 50)
    if chance < 0.85:
        return -1
    return rng.choice([2**32 - rng.randint(1, 50), 2**53 + 1, 2**63 - 1, old + 10**7])


def walk(rng: random.Random, steps: int) -> None:
    both = Both()
    last: dict[Any, int] = {}
    for _ in range(steps):
        if rng.random() < 0.25:
            both.cut(rng.randint(1, 3))
            continue
        table = rng.choice(["gpu", "gpu", "rack"])
        every = GAUGES[table] + COUNTERS[table]
        names = rng.sample(every, rng.randint(1, len(every)))
        start, n = rng.randint(0, SIZES[table] - 1), rng.randint(1, SIZES[table])
        t_ns = both.now_ns + rng.choice([0, 0, 0, -1, -NS, -3 * NS, 1, NS, 2 * NS, 2 * NS + 1, 10 * NS, -T0])
        columns: dict[str, list[Any]] = {}
        for name in names:
            signal = TABLES[table].by_name[name]
            if signal.kind == "counter":
                columns[name] = [a_count(rng, max(0, last.get((name, start + i), 0))) for i in range(n)]
                columns[name] = [min(v, 2**63 - 1) for v in columns[name]]
                last |= {(name, start + i): v for i, v in enumerate(columns[name])}
            else:
                columns[name] = [a_gauge(rng, signal) for i in range(n)]
        if start + n <= SIZES[table] or rng.random() < 0.1:
            both.put(table, start, columns, t_ns, rng.random() < 0.5)
    both.cut(1)


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.integers(2, 25))
def test_equals_a_dictionary_of_cells(seed: int, steps: int) -> None:
    walk(random.Random(seed), steps)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_dictionary_of_cells_over_a_long_walk(seed: int) -> None:
    walk(random.Random(seed), 1500)


values_s = st.one_of(
    st.integers(0, 40).map(np.float32),
    st.sampled_from([np.float32("nan"), np.float32(-1e9), np.float32(1e9), UNTRUSTED]),
)


@given(st.sampled_from(["temp_c", "power_w", "thermal_margin_k", "mem_used_pu", "clock_event_bits"]),
       st.lists(values_s, min_size=1, max_size=8))  # fmt: skip
def test_one_cell_within_a_tick(name: str, values: list[Any]) -> None:
    """The same readings as blocks and as readings give the same integers, and the rival's."""
    frames = []
    for as_block in (True, False):
        both = Both()
        for v in values:
            both.put("gpu", 2, {name: [v]}, both.now_ns, as_block)
        frames.append(cells_of(both.fast.take(0, T0, 1.0)))
        same(frames[-1], both.slow.take())
    assert frames[0] == frames[1]  # to the last bit, running means included


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_sum_of_gains_is_the_truth(seed: int) -> None:
    """A device counts, reboots, wraps at 2**32, falls silent; reports come once or several times a tick."""
    rng = random.Random(seed)
    inbox = Inbox({"gpu": 1})
    shown = rng.choice([0, 10**6, 2**32 - 10**5, rng.randint(0, 2**32 - 1)])
    truth, total, now, heard = 0, 0, T0, False
    for tick in range(40):
        for _ in range(rng.randint(0, 3)):
            now += rng.randint(1, NS // 4)
            if rng.random() < 0.15:  # no reading; the device stands still
                inbox.put(Reading("gpu", 0, "pcie_replay_count", None, now), now)
                continue
            step = rng.randint(0, 20_000)
            if rng.random() < 0.1 and 20_000 < shown < 2**32 - 10**8:
                shown = (
                    step  # booted, and counted on; near either end nobody can tell this from growth or a wrap
                )
            else:
                shown = (shown + step) % 2**32
            truth += step if heard else 0
            heard = True
            inbox.put(Reading("gpu", 0, "pcie_replay_count", shown, now), now)
        now += NS // 4
        frame = inbox.take(tick, now, 1.0)
        total += sum(int(c.gain.sum()) for c in frame.counts)
    assert total == truth


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_a_restart_changes_nothing_that_the_state_holds(seed: int) -> None:
    """Between two ticks the Inbox is made anew from the state: totals, times, rejections agree."""
    rng = random.Random(seed)
    whole, broken = Inbox(SIZES), Inbox(SIZES)
    one, other = State(SIZES), State(SIZES)
    raw, now = 10**6, T0
    for tick in range(12):
        for _ in range(rng.randint(0, 4)):
            now += NS // 10
            raw = rng.choice([raw + rng.randint(0, 10**5), raw + rng.randint(0, 10**5), 7])
            t_ns = now - rng.choice([0, 0, 0, 2 * NS])
            for inbox in (whole, broken):
                if seed % 2:
                    inbox.put(Reading("gpu", 1, "energy_mj", raw, t_ns), now)
                else:
                    values = np.full((1, 5), raw % 50, np.float32)
                    counts = np.full((1, 5), raw, np.int64)
                    inbox.put_block(Block("gpu", 0, ("temp_c",), values, ("energy_mj",), counts, t_ns), now)
                inbox.put(Reading("gpu", 2, "power_w", float(raw % 700), t_ns), now)
        now += NS
        one.apply(whole.take(tick, now, 1.0))
        other.apply(broken.take(tick, now, 1.0))
        assert one.checksum() == other.checksum()
        if rng.random() < 0.5:
            broken = Inbox(SIZES)
            broken.resume(other)


@given(st.integers(1, 9), st.data())
def test_partition_times_are_per_cell(n_rows: int, data: st.DataObject) -> None:
    """Whatever sets of rows report in whatever order, a group's time is the time of each of its rows."""
    partition = Partition(n_rows)
    group_t, row_t = [0], [0] * n_rows
    sets = data.draw(st.lists(st.sets(st.integers(0, n_rows - 1), min_size=1), max_size=12))
    for t, chosen in enumerate(sets, 1):
        rows = np.array(sorted(chosen), np.int32)
        groups, splits = partition.resolve(rows)
        for parent, child in splits:
            assert child == len(group_t)
            group_t.append(group_t[parent])
        for g in groups:
            group_t[g] = t
        for r in chosen:
            row_t[r] = t
        assert sorted(np.concatenate([partition.rows_of(g) for g in groups]).tolist()) == sorted(chosen)
        assert partition.n_groups == len(group_t) <= n_rows
        assert [group_t[partition.group_of_row[r]] for r in range(n_rows)] == row_t
        again, none = partition.resolve(rows)
        assert (again, none) == (groups, [])
