"""Cadence: a living publisher is never called stale once it is learned; one that stops soon is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from twin.catalogue import F64, I64, NS, TABLES
from twin.engine.snapshot import decode, encode
from twin.telemetry import Frame, State, TableUpdate

T0 = 10**18
N = 40  # publishers side by side
LEARNING_PERIODS = 5
# A publisher that loses 30 % is stale after so many periods at the latest, and a regular one after so many.
LOSSY_PERIODS, REGULAR_PERIODS = 60.0, 8.0
LEAST_S = 30.0  # a shorter silence of one that is faster than declared is none
ROW = TABLES["gpu"].by_name["temp_c"].row
OTHER = TABLES["gpu"].by_name["sm_clock_hz"].row


@dataclass
class Publisher:
    """A source that publishes: seconds between messages, and the share of them that is lost."""

    period_s: float
    loss_pu: float = 0.0
    jitter_pu: float = 0.0
    delay_s: float = 0.0

    def due_s(self, rng: np.random.Generator, begin_s: float, count: int) -> list[F64]:
        """Instants of the messages of each of N places that arrive."""
        at = begin_s + self.period_s * (1 + np.arange(count) + rng.uniform(0, 1, (N, 1)))
        at = at + self.period_s * self.jitter_pu * rng.uniform(-0.5, 0.5, at.shape)
        return [row[rng.uniform(size=count) >= self.loss_pu] for row in at]


class Watch:
    """A state that is told of messages at ticks, and counts places called stale, and feared for."""

    def __init__(self, declared: dict[str, float] | None = None) -> None:
        self.state = State({"gpu": N}, declared)
        self.rng = np.random.default_rng(7)
        self.now_s, self.tick = 0.0, 0

    def run(self, due_s: list[F64], until_s: float, tick_s: float, delay_s: float = 0.0) -> list[F64]:
        """Tick until then; the instant of every tick, the shares of places that are stale in it and whose
        worst case drifts.
        """
        at = [0] * N
        ticks: list[tuple[float, float, float]] = []
        last = [np.searchsorted(due, until_s) for due in due_s]
        while self.now_s < until_s:
            self.now_s += tick_s
            entity, t_ns = [], []
            for i, due in enumerate(due_s):
                k = at[i]
                while k < last[i] and due[k] + delay_s <= self.now_s:
                    k += 1
                if k > at[i]:
                    entity.append(i)
                    t_ns.append(T0 + round(float(due[k - 1]) * NS))
                at[i] = k
            self.apply(np.array(entity, np.int32), np.array(t_ns, np.int64))
            stale = ~self.current()
            ticks.append((self.now_s, float(stale.mean()), float(self.drifts().mean())))
        return [np.array(x) for x in zip(*ticks, strict=True)]

    def apply(self, entity: np.ndarray, t_ns: I64) -> None:
        """A frame with these messages."""
        self.tick += 1
        q = self.rng.integers(60, 100, (1, len(entity))).astype(np.int32)
        rows = np.array([ROW], np.int32)
        updates = (TableUpdate("gpu", rows, entity, q, t_ns),) if len(entity) else ()
        self.state.apply(Frame(self.tick, T0 + round(self.now_s * NS), 1.0, updates))

    def drifts(self) -> np.ndarray:
        """Places whose worst case is no longer what was read last."""
        table = self.state.tables["gpu"]
        return table.late_s(table.signals[ROW], T0 + round(self.now_s * NS)) > 0.0

    def current(self) -> np.ndarray:
        table = self.state.tables["gpu"]
        return table.current(table.signals[ROW], T0 + round(self.now_s * NS))


def tick_of(period_s: float) -> float:
    return min(max(period_s / 4.0, 0.1), 5.0)


publishers = st.builds(
    Publisher,
    period_s=st.sampled_from([0.1, 0.5, 1.0, 2.0, 10.0, 15.0, 60.0, 300.0]),
    loss_pu=st.sampled_from([0.0, 0.02, 0.1, 0.3]),
    jitter_pu=st.sampled_from([0.0, 0.3]),
    delay_s=st.sampled_from([0.0, 0.4, 20.0]),
)


@pytest.mark.long
@settings(max_examples=15, deadline=None, derandomize=True)
@given(publishers, st.integers(0, 2**16))
def test_a_living_publisher_is_not_stale_and_one_that_stops_is(publisher: Publisher, seed: int) -> None:
    rng, watch, period_s = np.random.default_rng(seed), Watch(), publisher.period_s
    count = 120
    due_s = publisher.due_s(rng, 0.0, count)
    known_s = [due[min(LEARNING_PERIODS, len(due) - 1)] for due in due_s]
    tick_s, end_s = max(tick_of(period_s), count * period_s / 600), count * period_s
    at_s, stale_pu, feared_pu = watch.run(due_s, end_s, tick_s, publisher.delay_s)
    learned = at_s > max(known_s) + publisher.delay_s + tick_s
    assert stale_pu[learned].max(initial=0.0) == 0.0
    if period_s > 1.5:  # slower than declared, which is a second
        assert feared_pu[learned].max(initial=0.0) == 0.0
    periods = REGULAR_PERIODS if publisher.loss_pu == 0.0 else LOSSY_PERIODS
    bound_s = max(periods * max(period_s, tick_s), LEAST_S) + 2 * publisher.delay_s
    watch.now_s += bound_s
    watch.apply(np.zeros(0, np.int32), np.zeros(0, np.int64))
    assert not watch.current().any()


@pytest.mark.parametrize("before_s, after_s", [(1.0, 15.0), (15.0, 1.0), (60.0, 10.0), (10.0, 300.0)])
def test_a_cadence_that_changes_is_learned_again(before_s: float, after_s: float) -> None:
    rng, watch = np.random.default_rng(3), Watch()
    tick_s, many = min(before_s, after_s), 150
    turn_s = 40 * before_s
    early = [d[d < turn_s] for d in Publisher(before_s).due_s(rng, 0.0, 40)]
    late = Publisher(after_s).due_s(rng, turn_s, many)
    due_s = [np.concatenate(pair) for pair in zip(early, late, strict=True)]
    at_s, stale_pu, _ = watch.run(due_s, turn_s + (many - 2) * after_s, tick_s)
    settled = (at_s > 7 * before_s) & (at_s < turn_s) | (at_s > turn_s + LEARNING_PERIODS * after_s)
    assert stale_pu[settled].max() == 0.0
    # After two blocks of readings nothing is left of the cadence before
    watch.now_s += max(REGULAR_PERIODS * after_s, LEAST_S)
    watch.apply(np.zeros(0, np.int32), np.zeros(0, np.int64))
    assert not watch.current().any()


def test_bursts_with_pauses_are_a_cadence() -> None:
    rng, watch = np.random.default_rng(5), Watch()
    burst_s = np.concatenate([60.0 * k + np.array([0.0, 0.1, 0.5, 1.0, 2.0]) for k in range(20)])
    due_s = [burst_s + rng.uniform(0, 60) for _ in range(N)]
    at_s, stale_pu, _ = watch.run(due_s, 19 * 60.0, 1.0)
    assert stale_pu[at_s > 6 * 60.0].max() == 0.0
    watch.now_s += 10 * 60.0
    assert not watch.current().any()


def test_one_outage_is_not_learned() -> None:
    watch = Watch()
    due_s = [np.concatenate([np.arange(1.0, 40.0), np.arange(400.0, 440.0)]) for _ in range(N)]
    watch.run(due_s, 440.0, 1.0)
    watch.now_s += 7.0
    assert not watch.current().any()


@pytest.mark.parametrize("step_s", [20.0, 300.0, 3600.0])
def test_a_clock_that_is_put_forward_is_no_gap(step_s: float) -> None:
    watch, period_s = Watch(), 10.0
    for number in range(60):
        watch.now_s += period_s
        late_s = step_s if number // 10 % 2 == 0 else 0.0
        t_ns = np.full(N, T0 + round((watch.now_s - late_s) * NS))
        watch.apply(np.arange(N, dtype=np.int32), t_ns)
    table = watch.state.tables["gpu"]
    period = table.cadence.period_s(int(table.partition.group_of_row[ROW]))
    assert (period < 2.5 * period_s).all()


def test_a_pause_in_which_nobody_listened_is_no_gap() -> None:
    heard, deaf = Watch(), Watch()
    for watch, pause_s in ((heard, 0.0), (deaf, 500.0)):
        watch.run([np.arange(1.0, 4.0)] * N, 3.5, 1.0)
        watch.now_s += pause_s
        now_ns = T0 + round(watch.now_s * NS)
        watch.state.tables["gpu"].resumed_ns[:] = now_ns if pause_s else 0, now_ns - round(pause_s * NS)
        watch.run([np.arange(watch.now_s + 1, watch.now_s + 20)] * N, watch.now_s + 20.0, 1.0)
    group = int(deaf.state.tables["gpu"].partition.group_of_row[ROW])
    cadences = [watch.state.tables["gpu"].cadence for watch in (heard, deaf)]
    assert np.abs(np.diff([c.period_s(group) for c in cadences], axis=0)).max() < 1.5


def test_a_signal_that_is_sent_when_it_changes_is_not_stale_while_its_device_lives() -> None:
    watch, table = Watch(), "rack"
    state = State({table: 1})
    temp, flow = (TABLES[table].by_name[name] for name in ("supply_temp_c", "flow_lpm"))
    rng, now_s, value = np.random.default_rng(2), 0.0, 2000

    def tick(changed: bool, lives: bool) -> None:
        nonlocal now_s, value
        now_s += 1.0
        now_ns = np.array([T0 + round(now_s * NS)])
        value += 1 if changed else 0
        updates = [
            TableUpdate(table, np.array([s.row], np.int32), None, np.array([[q]], np.int32), now_ns)
            for s, q, sent in ((temp, value, changed), (flow, int(rng.integers(50_000, 60_000)), lives))
            if sent
        ]
        state.apply(Frame(int(now_s), int(now_ns[0]), 1.0, tuple(updates)))

    for _ in range(600):
        tick(changed=bool(rng.uniform() < 0.1), lives=True)
    column = state.tables[table]
    for _ in range(1000):
        tick(changed=False, lives=True)
        assert column.current(temp, state.now_ns).all()
    assert (column.worst(temp, state.now_ns) == column.value[temp.row]).all()
    for _ in range(60):
        tick(changed=False, lives=False)
    assert not column.current(temp, state.now_ns).any()
    assert (column.worst(temp, state.now_ns) > column.value[temp.row]).all()
    del watch


def test_what_was_learned_survives_a_snapshot_and_a_changed_site() -> None:
    watch = Watch()
    watch.run(Publisher(15.0).due_s(np.random.default_rng(1), 0.0, 20), 290.0, 5.0)
    table = watch.state.tables["gpu"]
    kept = decode(encode({"table": table.arrays()}))["table"]
    back = State({"gpu": N}).tables["gpu"]
    back.restore(kept)
    moved = back.remapped(2, np.array([3, -1], np.int32))
    now_ns = T0 + round(watch.now_s * NS) + 30 * NS
    signal = table.signals[ROW]
    assert table.current(signal, now_ns).any()
    assert (back.current(signal, now_ns) == table.current(signal, now_ns)).all()
    assert moved.limits(ROW).stale_ns[0] == table.limits(ROW).stale_ns[3] > 3 * NS
    assert moved.limits(ROW).stale_ns[1] == 3 * NS
    old = {name: kept[name] for name in kept if name not in table.cadence.arrays()}
    back.restore(old)  # of a version before
    assert (back.limits(ROW).stale_ns == 3 * NS).all()


def test_a_period_of_the_site_wins() -> None:
    watch = Watch({"gpu.temp_c": 2.0})
    watch.run(Publisher(15.0).due_s(np.random.default_rng(1), 0.0, 20), 290.0, 1.0)
    assert (watch.state.tables["gpu"].limits(ROW).stale_ns == 6 * NS).all()
    assert not watch.state.tables["gpu"].learning().any()
