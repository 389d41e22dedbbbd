"""The clock of a source: a step back is found and corrected, a slow path and a backlog are not touched."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from policies.thermal_guard import ThermalGuard
from tests.support.builders import site_of, two_racks
from tests.support.sampled_cases import sampled
from twin.catalogue import NS, find_signal
from twin.daemon import Ingest
from twin.engine import Engine
from twin.sources import SourceClock
from twin.sources.clock import moved
from twin.telemetry import Block, FaultReported, JobStarted, Reading, TicksSkipped

T = 1_700_000_000 * NS
HOUR_S = 3600.0


def stamps(clock: SourceClock, *messages: tuple[float, float]) -> list[float]:
    """Return the corrected stamps of messages (arrival, stamp), in seconds from T."""
    out = []
    for arrival_s, stamp_s in messages:
        reading = Reading("rack", 0, "power_w", 1.0, T + round(stamp_s * NS))
        (found,) = clock.corrected([reading], T + round(arrival_s * NS))
        assert isinstance(found, Reading)
        out.append((found.t_ns - T) / NS)
    return out


@pytest.mark.parametrize("back_s", [25.0, 100.0, HOUR_S, 5 * HOUR_S])
def test_a_clock_that_is_set_back_is_corrected_from_the_second_message_on(back_s: float) -> None:
    clock = SourceClock()
    before = [(10.0 * k, 10.0 * k - 1.0) for k in range(5)]
    assert stamps(clock, *before) == [s for _, s in before]
    late = [(t, t - 1.0 - back_s) for t in (50.0, 60.0, 70.0)]
    assert stamps(clock, *late) == [49.0 - back_s, 59.0, 69.0]
    assert clock.found_ns == T + 60 * NS
    assert stamps(clock, (80.0, 79.0)) == [79.0]
    assert clock.back_ns == 0


def test_a_step_of_less_than_a_period_costs_nothing_and_is_left() -> None:
    clock = SourceClock()
    stamps(clock, *((60.0 * k, 60.0 * k) for k in range(5)))
    late = [(60.0 * k, 60.0 * k - 50.0) for k in range(5, 9)]
    assert stamps(clock, *late) == [s for _, s in late]


@pytest.mark.parametrize(
    "messages",
    [
        [(600.0, 50.0 + k) for k in range(60)],  # what was kept while the broker was away, at once
        [(600.0 + k, 50.0 + 10.0 * k) for k in range(50)],  # the same, more slowly
        [(600.0 + 10 * k, 50.0 + 10.0 * k) for k in range(50)],  # a path that became slow
        [
            (50.0 + k, 45.0 - 700.0 * (k % 3)) for k in range(50)
        ],  # points of a gateway that have stood for long
        [(50.0 + 10 * k, 50.0 + 10.0 * k - 40.0 * (k == 3)) for k in range(9)],  # one that came twice
    ],
    ids=["backlog", "slow backlog", "slow path", "old points", "again"],
)
def test_what_is_late_in_order_is_late(messages: list[tuple[float, float]]) -> None:
    clock = SourceClock()
    stamps(clock, *((10.0 * k, 10.0 * k - 1.0) for k in range(5)))
    assert stamps(clock, *messages) == [s for _, s in messages]


def test_signals_that_are_gathered_apart_may_lag_apart() -> None:
    clock = SourceClock()
    for k in range(200):
        at_ns = T + 10 * k * NS
        for signal, lag_s in (("power_w", 1.0), ("flow_lpm", 90.0), ("flow_lpm", 90.0)):
            item = Reading("rack", 0, signal, 1.0, at_ns - round(lag_s * NS))
            assert list(clock.corrected([item], at_ns + 2 * NS)) == [item]


class Course(NamedTuple):
    """The arrivals of a source, the age of each reading by its corrected stamp, and its clock in the end."""

    arrived_s: list[float]
    age_s: list[float]
    clock: SourceClock


def course(
    shown: Callable[[float], float],
    period_s: float,
    seconds: float,
    varies: bool = True,
    clock: SourceClock | None = None,
) -> Course:
    """A source whose clock shows `shown(t)` when it sends at t; its way takes up to 0.2 s."""
    rng, out = random.Random(7), Course([], [], clock or SourceClock())
    for k in range(round(seconds / period_s)):
        sent_s = k * period_s
        arrived_s = sent_s + rng.uniform(0.0, min(0.2, period_s / 2))
        value = rng.random() if varies else 1.0
        reading = Reading("rack", 0, "power_w", value, T + round(shown(sent_s) * NS))
        for item in out.clock.corrected([reading], T + round(arrived_s * NS)):
            assert isinstance(item, Reading)
            out.arrived_s.append(arrived_s)
            out.age_s.append(arrived_s - (item.t_ns - T) / NS)
    return out


PERIODS = (0.1, 1.0, 10.0, 60.0)


@pytest.mark.parametrize("period_s", PERIODS)
@pytest.mark.parametrize("back_s", [130.0, HOUR_S, 5 * HOUR_S])
def test_a_clock_that_was_behind_from_the_beginning_is_corrected_before_its_readings_are_taken(
    period_s: float, back_s: float
) -> None:
    found = course(lambda t: t - back_s, period_s, 40.0 + 20 * period_s)
    assert max(found.age_s[1:]) < 0.5
    assert found.age_s[0] < period_s + 0.5, "that of the message before"
    assert found.arrived_s[0] < 21.0 + 6 * period_s
    assert found.clock.mistake == "behind"
    assert found.clock.back_ns / NS == pytest.approx(back_s, abs=0.3)
    again = SourceClock()
    again.resume(found.clock.back_ns)  # the daemon was restarted
    after = course(lambda t: t - back_s, period_s, 3 * period_s, clock=again)
    assert len(after.age_s) == 3
    assert max(after.age_s) < 0.5


def test_a_start_of_a_job_moves_with_the_clock_of_its_source_and_never_past_now() -> None:
    job = JobStarted(job="j", nodes=(), started_ns=T - 7200 * NS)
    assert moved(job, 3600 * NS, T) == replace(job, started_ns=T - 3600 * NS)
    assert moved(job, 9000 * NS, T) == replace(job, started_ns=T)
    unknown = replace(job, started_ns=0)
    assert moved(unknown, 3600 * NS, T) == unknown


def test_what_waits_for_the_verdict_comes_with_it_and_only_the_last_of_each_signal() -> None:
    clock, out = SourceClock(), []
    for k in range(30):
        at_ns = T + k * NS
        pair = [Reading("rack", 0, name, float(k), at_ns - 3600 * NS) for name in ("power_w", "flow_lpm")]
        fault = FaultReported(id=f"f{k}", table="rack", name="r", code=1, at_ns=at_ns - 3600 * NS)
        out.append(clock.corrected([*pair, fault], at_ns))
        assert out[-1][-1] == (fault if clock.is_held else replace(fault, at_ns=at_ns))
    kept = [[item for item in items if isinstance(item, Reading)] for items in out]
    assert [len(items) for items in kept[:22]] == [0] * 20 + [4, 2]
    assert [item.value for item in kept[20]] == [19.0, 19.0, 20.0, 20.0]
    assert {item.t_ns for item in kept[21]} == {T + 21 * NS}


@pytest.mark.parametrize(
    ("slow_pu", "seconds", "period_s"),
    [
        (0.05, 3000.0, 0.1),
        *((0.05, 6000.0, p) for p in PERIODS[1:]),
        *((5e-4, 4.0e5, p) for p in PERIODS[2:]),
    ],
)
def test_a_clock_that_runs_slow_is_followed_before_its_readings_count_as_old(
    slow_pu: float, seconds: float, period_s: float
) -> None:
    found = course(lambda t: t * (1.0 - slow_pu), period_s, seconds)
    assert max(found.age_s) < max(51.0, 2.5 * period_s), "a minute is taken for the way"
    assert found.clock.back_ns > 0.3 * slow_pu * seconds * NS
    fast = course(lambda t: t * (1.0 + slow_pu), period_s, 100 * period_s)
    assert fast.clock.back_ns == 0


@pytest.mark.parametrize("period_s", PERIODS)
@pytest.mark.parametrize("from_s", [0.0, 300.0])
def test_a_clock_that_stands_is_found_by_the_values_that_change(period_s: float, from_s: float) -> None:
    found = course(lambda t: min(t, from_s), period_s, 600.0 + 20 * period_s)
    assert max(found.age_s) < max(13.0, 3.5 * period_s)
    assert found.clock.mistake == "stands"
    for late_s in (600.0, 0.0):  # it goes on from where it stood, or is put right
        seconds = from_s + 700.0 + 9 * period_s
        after = course(lambda t, to=late_s: _restarts(t, from_s, to), period_s, seconds)
        assert after.clock.back_ns / NS == pytest.approx(late_s, abs=0.3)
        assert after.age_s[-1] < 0.5
    same = course(lambda t: min(t, from_s), period_s, 600.0 + 20 * period_s, varies=False)
    assert same.clock.back_ns == 0, "the same value under the same stamp is an old reading"


def _restarts(time_s: float, from_s: float, late_s: float) -> float:
    """A clock that stands for ten minutes and then is so late."""
    return time_s - late_s if time_s > from_s + 600.0 else min(time_s, from_s)


def test_a_leap_second_that_is_repeated_is_no_step() -> None:
    for period_s in PERIODS:
        found = course(lambda t: t - (t >= 100.0), period_s, 200.0 + 5 * period_s)
        assert found.clock.found_ns == 0
        assert max(found.age_s) < 1.3


@pytest.mark.parametrize("period_s", PERIODS)
@pytest.mark.parametrize("speed", [1.25, 2.0, 20.0])
def test_a_backlog_at_the_first_contact_is_old_until_it_has_drained(speed: float, period_s: float) -> None:
    found = course(lambda t: min(t, speed * t - 900.0), period_s, 900.0 / (speed - 1.0) + 5 * period_s + 60.0)
    assert found.clock.found_ns == 0
    true_age_s = [max(0.0, 900.0 - (speed - 1.0) * (t - period_s)) for t in found.arrived_s]
    assert all(age >= true - speed * period_s for age, true in zip(found.age_s, true_age_s, strict=True))
    assert found.age_s[-1] < 0.5


def test_a_backlog_of_a_clock_that_is_behind_is_old_until_it_has_drained() -> None:
    found = course(lambda t: min(t, 2.0 * t - 300.0) - HOUR_S, 1.0, 400.0)
    drained = [age for at, age in zip(found.arrived_s, found.age_s, strict=True) if at > 325.0]
    assert min(found.age_s[:250]) > HOUR_S, "nothing of the backlog is taken for new"
    assert len(drained) == 75
    assert max(drained) < 0.5
    assert found.clock.back_ns / NS == pytest.approx(HOUR_S, abs=0.3)


def test_a_recording_that_is_published_at_once_is_shown_at_once() -> None:
    found = course(lambda t: 1000.0 * t - 2 * HOUR_S, 0.001, 0.5)
    assert found.arrived_s[0] < 0.02
    assert len(found.age_s) > 480
    assert not found.clock.is_held


def test_a_way_that_became_slower_by_less_than_two_periods_is_left() -> None:
    found = course(lambda t: t - 55.0 * (t >= 600.0), 60.0, 3000.0)
    assert found.clock.back_ns == 0
    assert found.age_s[-1] > 54.0


def test_a_clock_that_is_put_right_in_part_is_followed() -> None:
    found = course(lambda t: t - HOUR_S + 1200.0 * (t >= 100.0), 1.0, 200.0)
    assert found.clock.back_ns / NS == pytest.approx(2400.0, abs=0.3)


def test_a_signal_that_comes_once_does_not_keep_the_others_from_telling() -> None:
    clock = SourceClock()
    once = Reading("rack", 0, "flow_lpm", 90.0, T - 3590 * NS)
    assert list(clock.corrected([once], T)) == []
    for k in range(1, 40):
        now_ns = T + k * NS
        out = clock.corrected([Reading("rack", 0, "power_w", 1.0, now_ns - 3600 * NS)], now_ns)
    assert [item.t_ns for item in out if isinstance(item, Reading)] == [now_ns]


def test_a_device_whose_stamps_stand_is_not_the_clock_of_its_gateway() -> None:
    clock, mistakes = SourceClock(), set[str]()
    for k in range(100):
        now_ns = T + k * NS
        new = Reading("rack", 0, "power_w", float(k), now_ns - 3600 * NS)
        stuck = Reading("rack", 1, "power_w", float(k), T - 3600 * NS)
        for item in (stuck, new):
            out = clock.corrected([item], now_ns + NS // 10)
            mistakes.add(clock.mistake)
    assert mistakes == {"", "behind"}
    assert [item.t_ns for item in out if isinstance(item, Reading)] == [now_ns + NS // 10]


def test_points_that_stood_for_long_are_taken_as_they_are_once_a_source_is_heard_in_time() -> None:
    clock = SourceClock()
    old = [Reading("rack", k, "flow_lpm", 90.0, T - (k + 1) * 86_400 * NS) for k in range(5)]
    leak = Reading("rack", 6, "leak_state", 1.0, T - 3600 * NS)
    assert [list(clock.corrected([item], T)) for item in (*old, leak)] == [[]] * 5 + [[leak]]
    new = Reading("rack", 7, "flow_lpm", 90.0, T)
    assert list(clock.corrected([new], T + NS)) == [*old, new]


def test_a_second_stamp_in_whole_minutes_is_not_told() -> None:
    ingest = Ingest(site_of(two_racks()), {})
    account = ingest.of("topic coarse/stamps")
    for k in range(600):
        now_ns = T + k * NS
        account.stage([Reading("rack", 0, "power_w", float(k), now_ns // (60 * NS) * 60 * NS)], now_ns)
        assert ingest.ledger.wrong_clocks(now_ns) == ingest.ledger.odd_clocks(now_ns) == []


@pytest.mark.parametrize("offset_s", [HOUR_S, -HOUR_S])
def test_a_wrong_clock_is_one_sentence_until_it_is_right(offset_s: float) -> None:
    ingest = Ingest(site_of(two_racks()), {})
    account = ingest.of("topic telegraf/gpu001")
    found = []
    for k in range(60):
        now_ns = T + 10 * k * NS
        off_s = offset_s if 20 <= k < 40 else 0.0
        account.stage([Reading("rack", 0, "power_w", 1.0, now_ns + round(off_s * NS))], now_ns)
        found.append(ingest.ledger.wrong_clocks(now_ns))
    assert not any(found[:20])
    assert not any(found[48:])
    ((text,),) = [found[39]]
    side = "ahead of" if offset_s > 0 else "behind"
    assert text == f"topic telegraf/gpu001: 1 h {side} our clock; its readings count from their arrival"


class Hall:
    """Agents of one rack and their clocks, our clocks, and the engine behind them; a tick a second.

    `offset_s` [n_node]: of the agents' clocks; `wall_s`: of ours; neither is known to the other side.
    """

    def __init__(self, period_s: int, jitter_s: float = 0.0) -> None:
        self.site = site_of(two_racks(racks="r1"))
        self.engine = Engine(self.site, [ThermalGuard()], [])
        self.passed_s, self.wall_s, self.ahead_s, self.number = 0.0, 0.0, 0.0, 0
        self.ingest = Ingest(self.site, {}, passed_ns=lambda: round(self.passed_s * NS))
        self.offset_s = np.zeros(self.site.sizes["node"])
        self.period_s, self.jitter_s = period_s, jitter_s
        self.rng, self.last_ns = np.random.default_rng(4), T
        self.alarms: dict[str, str] = {}
        self.clocks: set[str] = set()

    def step_wall(self, by_s: float) -> None:
        """Our clock steps; ticks skip ahead with it, or wait for it."""
        self.wall_s += by_s
        self.ahead_s = max(self.ahead_s - by_s, 0.0)

    def second(self) -> None:
        """Messages, a tick, and a look at the alarms."""
        self.passed_s += 1.0
        self.number += 1
        now_ns = T + round((self.passed_s + self.wall_s) * NS)
        for node in range(self.site.sizes["node"]):
            if (self.number + node) % self.period_s == 0:
                self._send(node, now_ns)
        tick_ns = now_ns + round(self.ahead_s * NS)
        self.ingest.ahead_ns = round(self.ahead_s * NS)
        if tick_ns - self.last_ns > 2 * NS:
            self.ingest.put_event(TicksSkipped(count=5, why="the clock went ahead, or the host slept"))
        frame = self.ingest.take(self.number, tick_ns, (tick_ns - self.last_ns) / NS)
        self.last_ns = tick_ns
        decision = self.engine.tick(frame)
        self.alarms |= {f.id: f.severity for f in decision.findings if f.severity != "info"}
        assert not self.engine.in_force["thermal_guard"], f"capped after {self.number} s"
        ledger = self.ingest.ledger
        self.clocks |= {
            text.partition(":")[0] for text in (*ledger.wrong_clocks(now_ns), *ledger.odd_clocks(now_ns))
        }

    def _send(self, node: int, now_ns: int) -> None:
        jitter_s = float(self.rng.uniform(-self.jitter_s, self.jitter_s))
        at_ns = T + round((self.passed_s + self.offset_s[node] + jitter_s) * NS)
        start, n = int(self.site.gpu_start_of_node[node]), 4
        values = np.stack([self.rng.uniform(48, 54, n), self.rng.uniform(380, 420, n)]).astype(np.float32)
        block = Block("gpu", start, ("temp_c", "power_w"), values, (), np.zeros((0, n), np.int64), at_ns)
        self.ingest.of(f"agent node{node}", outside=True).stage([block], now_ns)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.second()

    def period_of(self, gpu: int) -> float:
        """The learned period."""
        signal, table = find_signal("gpu.temp_c"), self.engine.state.tables["gpu"]
        assert signal is not None
        return float(table.cadence.period_s(int(table.partition.group_of_row[signal.row]))[gpu])

    def known_alarms(self) -> dict[str, str]:
        """Those that are not of what was never heard."""
        return {k: v for k, v in self.alarms.items() if not k.startswith("unheard/")}


STEPS = [(-5 * HOUR_S, 1), (-HOUR_S, 10), (-70.0, 1), (-20.0, 2), (3.0, 1), (70.0, 10), (HOUR_S, 1)]


@pytest.mark.long
@pytest.mark.parametrize(("step_s", "period_s"), sampled(STEPS, STEPS[1], STEPS[3], STEPS[6]))
def test_a_device_whose_clock_steps_raises_nothing_but_its_clock(step_s: float, period_s: int) -> None:
    hall = Hall(period_s)
    hall.run(12 * period_s + 20)
    hall.offset_s[3] += step_s
    hall.run(8 * period_s + 40)
    hall.offset_s[3] -= step_s  # NTP puts it right
    hall.run(8 * period_s + 40)
    assert hall.known_alarms() == {}
    assert hall.clocks <= {"agent node3"}
    if abs(step_s) > 2 * period_s + 2:
        assert hall.clocks == {"agent node3"}
    assert hall.period_of(12) <= 2.2 * period_s, "its cadence is not poisoned"


@pytest.mark.long
def test_clocks_that_step_again_and_again_do_not_poison_the_cadence() -> None:
    hall, rng = Hall(5), random.Random(5)
    hall.run(40)
    for _ in range(12):
        hall.offset_s[:4] = [rng.choice([-1, 1]) * 10 ** rng.uniform(0.5, 4.0) for _ in range(4)]
        hall.run(20)
    assert {k: v for k, v in hall.known_alarms().items() if v == "critical"} == {}
    assert max(hall.period_of(4 * node) for node in range(4)) <= 4 * 5.0


@pytest.mark.long
def test_a_clock_that_jitters_raises_nothing() -> None:
    hall = Hall(1, jitter_s=2.5)
    hall.run(150)
    assert hall.known_alarms() == {}
    assert max(hall.period_of(g) for g in range(0, 72, 4)) < 8.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("first_s", "then_s"),
    sampled(
        [(HOUR_S, -HOUR_S), (20.0, -20.0), (-20.0, 20.0), (-HOUR_S, HOUR_S)], (HOUR_S, -HOUR_S), (-20.0, 20.0)
    ),
)
def test_our_own_clock_steps_and_is_put_right(first_s: float, then_s: float) -> None:
    hall = Hall(5)
    hall.run(60)
    for step_s in (first_s, then_s):
        hall.step_wall(step_s)
        hall.run(100)
    assert hall.known_alarms() == {}
    assert hall.clocks <= {"this host"}
    if first_s == HOUR_S:
        assert hall.clocks == {"this host"}


def test_a_point_that_stands_for_long_holds_back_nothing_that_comes_with_it() -> None:
    """A gateway sends all of its points in one message, the last of a device that is gone for an hour."""
    clock = SourceClock()
    for k in range(700):
        at_ns = T + k * NS
        fresh = Reading("rack", 0, "flow_lpm", float(k), at_ns)
        gone = Reading("rack", 1, "flow_lpm", 1.0, T - 3600 * NS)
        assert list(clock.corrected([fresh, gone], at_ns)) == [fresh, gone]
    assert clock.back_ns == 0


def test_states_of_a_block_do_not_wait_for_the_verdict_on_a_clock() -> None:
    clock, states = SourceClock(), np.array([[0.0, 1.0]], np.float32)
    values = np.concatenate([np.full((1, 2), 90.0, np.float32), states])
    none = np.zeros((0, 2), np.int64)
    block = Block("rack", 0, ("flow_lpm", "leak_state"), values, (), none, T - 3600 * NS)
    (found,) = clock.corrected([block], T)
    assert isinstance(found, Block)
    assert (found.signals, found.t_ns) == (("leak_state",), block.t_ns)
    assert np.array_equal(found.values, states)
    assert clock.is_held
    (held, late, _) = clock.corrected(
        [Reading("rack", 0, "leak_state", 1.0, T), Reading("rack", 1, "leak_state", 1.0, T)], T
    )
    assert isinstance(held, Block)
    assert held.signals == ("flow_lpm",)
    assert late.t_ns == T  # type: ignore[union-attr]
