"""The clock against two made-up clocks: no drift, no step back, missed ticks counted."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from twin.catalogue import NS
from twin.daemon.clock import Clock

START = 1_700_000_000 * NS


class World:
    """A wall clock and a monotonic one that a test moves."""

    def __init__(self) -> None:
        self.wall, self.mono = START, 5 * NS

    def clock(self, step_s: float = 1.0, last_ns: int = 0) -> Clock:
        return Clock(step_s, last_ns, lambda: self.wall, lambda: self.mono)

    def pass_(self, ns: int, wall_ns: int | None = None) -> None:
        self.mono += ns
        self.wall += ns if wall_ns is None else wall_ns


def test_ticks_lie_on_the_grid_and_never_drift_although_each_comes_late() -> None:
    world = World()
    world.pass_(NS // 3)
    clock = world.clock()
    for n in range(1, 5000):
        world.pass_(round(clock.wait_s() * NS) + 3_000_000)  # the loop wakes 3 ms late, each time
        tick = clock.regular()
        assert (tick.now_ns, tick.skipped, tick.dt_s) == (START + n * NS, 0, 1.0)
        assert tick.late_s == pytest.approx(0.003, abs=1e-3)


def test_missed_ticks_are_skipped_and_counted() -> None:
    world = World()
    clock = world.clock()
    world.pass_(NS)
    clock.regular()
    world.pass_(round(4.4 * NS))
    tick = clock.regular()
    assert (tick.skipped, tick.why, tick.dt_s) == (3, "overload", 4.0)
    assert clock.wait_s() == pytest.approx(0.6, abs=0.02)


def test_a_clock_that_goes_ahead_skips_and_says_so() -> None:
    world = World()
    clock = world.clock()
    world.pass_(NS)
    clock.regular()
    world.pass_(NS, 3601 * NS)  # a suspended host: the monotonic clock stood still
    tick = clock.regular()
    assert (tick.skipped, tick.why) == (3600, "the clock went ahead, or the host slept")
    assert tick.now_ns == START + 3602 * NS


def test_a_clock_that_steps_back_is_followed_slowly_and_time_advances() -> None:
    world = World()
    clock = world.clock()
    world.pass_(NS)
    last = clock.regular().now_ns
    world.wall -= 2 * NS
    for _ in range(60):
        world.pass_(round(clock.wait_s() * NS))
        tick = clock.regular()
        assert tick.now_ns > last
        assert 0.9 < tick.dt_s <= 1.0
        last = tick.now_ns
    assert abs(last - world.wall) <= NS // 3
    assert clock.ahead_ns == 0


def test_a_restart_goes_on_behind_the_last_tick_even_if_that_is_in_the_future() -> None:
    world = World()
    clock = world.clock(last_ns=START + 10 * NS)
    assert clock.now_ns() >= START + 10 * NS
    world.pass_(round(clock.wait_s() * NS))
    assert clock.regular().now_ns > START + 10 * NS


def test_an_urgent_tick_comes_between_regular_ones_at_least_100_ms_apart() -> None:
    world = World()
    clock = world.clock()
    world.pass_(NS)
    clock.regular()
    world.pass_(NS // 20)
    assert clock.urgent() is None
    assert clock.wait_urgent_s() == pytest.approx(0.05)
    world.pass_(NS // 20)
    tick = clock.urgent()
    assert tick is not None
    assert tick.urgent
    assert tick.dt_s == pytest.approx(0.1)
    world.pass_(round(0.89 * NS))
    assert clock.urgent() is None, "the regular tick is 10 ms away"
    world.pass_(NS // 100)
    regular = clock.regular()
    assert (regular.now_ns, regular.skipped) == (START + 2 * NS, 0)
    assert regular.dt_s == pytest.approx(0.9)


@given(
    st.lists(st.tuples(st.integers(0, 7 * NS), st.integers(-10 * NS, 10 * NS), st.booleans()), max_size=40),
    st.sampled_from([0.1, 1.0, 30.0]),
)
def test_time_always_advances(moves: list[tuple[int, int, bool]], step_s: float) -> None:
    world = World()
    clock, last = world.clock(step_s), 0
    for ns, step, urgent in moves:
        world.pass_(ns, ns + step)
        tick = clock.urgent() if urgent else (clock.regular() if clock.wait_s() == 0 else None)
        if tick is not None:
            assert tick.now_ns > last
            assert tick.dt_s > 0
            last = tick.now_ns
        assert clock.now_ns() >= last


def test_a_step_ahead_of_less_than_a_tick_is_followed_at_once() -> None:
    world = World()
    clock = world.clock(300.0)
    world.pass_(round(clock.wait_s() * NS))
    clock.regular()
    world.wall += 120 * NS
    world.pass_(round(clock.wait_s() * NS))
    tick = clock.regular()
    assert abs(tick.now_ns - world.wall) < NS
    assert (tick.skipped, tick.dt_s) == (0, pytest.approx(420.0))


@pytest.mark.parametrize(
    ("rate", "least_pace", "most_pace"),
    [
        (1.0005, 1.0, 1.001),
        (0.9995, 0.999, 1.0),
        (1.05, 1.049, 1.051),
        (0.95, 0.949, 0.96),
        (0.0, 0.949, 0.951),
    ],
    ids=["fast by 500 ppm", "slow by 500 ppm", "fast by 5 %", "slow by 5 %", "stands"],
)
def test_a_wall_clock_of_another_pace_is_followed_within_a_second_or_by_a_twentieth(
    rate: float, least_pace: float, most_pace: float
) -> None:
    world = World()
    clock = world.clock()
    for _ in range(1000):
        ns = round(clock.wait_s() * NS)
        world.pass_(ns, round(ns * rate))
        tick = clock.regular()
        assert 0.5 < tick.dt_s < 1.5
        assert tick.skipped == 0
    passed_ns = world.mono - 5 * NS
    assert least_pace < (clock.last_ns - START) / passed_ns < most_pace
    assert rate == 0.0 or abs(clock.last_ns - world.wall) < NS


def test_a_leap_second_that_is_repeated_is_followed_within_half_a_minute() -> None:
    world = World()
    clock = world.clock()
    for second in range(40):
        world.pass_(round(clock.wait_s() * NS))
        if second == 10:
            world.wall -= NS
        tick = clock.regular()
        assert 0.94 < tick.dt_s <= 1.0
        assert tick.skipped == 0
    assert abs(clock.last_ns - world.wall) <= NS // 3
