"""Limits from outside: load targets, contract, ramps and prices, each on its own and all at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from policies.power_capping.external_limits import (
    ARRIVE_S,
    BACK_PU,
    CARBON,
    GAP_S,
    LEAST_PU,
    PRICE,
    QUARTER_S,
    RESERVE_PU,
    SHAVE_S,
    SLACK_PU,
    ExternalLimits,
    LimitMemory,
    Settings,
    outside,
    targets_now,
)
from tests.support.builders import site_of, two_racks
from twin.catalogue import NS, ContractError
from twin.contracts import LoadTarget, View

SITE = site_of(two_racks("gb300-nvl72"))
QUARTER_NS = 1_700_000_100 * NS  # begin of a quarter hour
assert QUARTER_NS % (QUARTER_S * NS) == 0
C = 200e3
RANGE_W = float(np.nansum(SITE.envelopes["gpu.power_cap_w"].high - SITE.envelopes["gpu.power_cap_w"].low))
MOST_W = float(SITE.design.rack_max_w.sum())
NONE, FRESH = Settings(), LimitMemory()


class Fake:
    """As much of a view as is looked at."""

    def __init__(self, now_s: float, targets: tuple[LoadTarget, ...] = (), **told: float) -> None:
        self.site, self.now_ns, self.targets = SITE, QUARTER_NS + round(now_s * NS), targets
        self.told = {PRICE: told.get("price", np.nan), CARBON: told.get("carbon", np.nan)}

    def load_targets(self) -> tuple[LoadTarget, ...]:
        return self.targets

    def outlook(self, quantity: str, at_ns: int) -> np.ndarray:
        assert at_ns == self.now_ns
        return np.array([self.told[quantity]])

    def envelope(self, control: str) -> Any:
        return self.site.envelopes[control]


def target(
    limit_w: float,
    start_s: float = 0.0,
    end_s: float | None = None,
    feeders: list[int] | None = None,
    name: str = "t",
    kind: str = "demand_response",
) -> LoadTarget:
    end_ns = None if end_s is None else QUARTER_NS + round(end_s * NS)
    index = None if feeders is None else np.array(feeders, np.int32)
    return LoadTarget(name, "us", kind, limit_w, QUARTER_NS + round(start_s * NS), end_ns, index)


class Walk:
    """Calls in a row; the load between two calls is `wants_w` or the limit."""

    def __init__(self, given: Settings = NONE, *targets: LoadTarget, course: LimitMemory = FRESH) -> None:
        self.settings, self.targets, self.course = given.checked(), targets, course
        self.load_w, self.limit_w = float("nan"), np.inf
        self.drawn: dict[int, float] = {}  # W s of each quarter
        self.at_s: float | None = None
        self.found = ExternalLimits(np.inf, np.empty(0), 0.0, "", (), "")

    def to(self, now_s: float, wants_w: float = np.inf, obeys: bool = True, **told: float) -> ExternalLimits:
        load_w = min(wants_w, self.found.site_w) if obeys else wants_w
        if self.at_s is not None:
            edge, at_s = QUARTER_S, self.at_s
            while at_s < now_s:
                till_s = min(now_s, (at_s // edge + 1) * edge)
                quarter = round(at_s // edge)
                self.drawn[quarter] = self.drawn.get(quarter, 0.0) + load_w * (till_s - at_s)
                at_s = till_s
        self.at_s = now_s
        view = cast(View, Fake(now_s, self.targets, **told))
        feeder_w = np.full(SITE.sizes["feeder"], load_w / 2)
        self.found, self.course = outside(view, self.settings, self.course, load_w, feeder_w)
        self.load_w = load_w
        return self.found


def test_nothing_agreed_is_no_limit() -> None:
    found = Walk().to(0.0, 1e5)
    assert found.site_w == np.inf
    assert np.isinf(found.feeder_w).all()
    assert found.shave_pu == 0.0
    assert (found.site_why, found.shave_why, set(found.feeder_why)) == ("", "", {""})


def test_what_runs_now_is_the_least_of_all_targets() -> None:
    view = cast(View, Fake(100.0, (
        target(9e4), target(8e4, end_s=101.0), target(1e3, end_s=100.0), target(1e3, start_s=101.0),
        target(5e4, feeders=[0, 1]), target(4e4, feeders=[1]),
    )))  # fmt: skip
    site_w, feeder_w = targets_now(view)
    assert site_w == 8e4
    assert feeder_w.tolist() == [5e4, 4e4]


def test_a_running_target_binds_at_once_and_says_whose_it_is() -> None:
    found = Walk(Settings(ramp_down_w_per_s=1.0), target(7e4, name="peak"), target(3e4, feeders=[1])).to(
        5.0, 1e5
    )
    assert found.site_w == 7e4
    assert "peak" in found.site_why
    assert "70 kW" in found.site_why
    assert found.feeder_w.tolist() == [np.inf, 3e4]
    assert found.feeder_why[0] == ""
    assert "30 kW" in found.feeder_why[1]


def test_a_coming_target_is_met_on_the_ramp_before_it_begins() -> None:
    walk = Walk(Settings(ramp_down_w_per_s=100.0), target(1e5, start_s=800.0))
    limits = np.array([walk.to(at, 1.5e5).site_w for at in range(0, 830, 5)])
    begin = 800 // 5
    assert limits[begin - round(ARRIVE_S) // 5] == 1e5
    assert (limits[begin - 3 :] == 1e5).all()
    # 50 kW take 500 s: nothing is given away before
    assert limits[(800 - 15 - 500) // 5 - 1] > 1.5e5
    assert np.diff(limits[1:]).min() >= -100.0 * 5 - 1e-6


def test_a_target_that_comes_too_soon_for_the_ramp_is_met_all_the_same_and_it_says_so() -> None:
    walk = Walk(Settings(ramp_down_w_per_s=100.0))
    walk.to(0.0, 2e5)
    walk.to(5.0, 2e5)
    walk.targets = (target(1e5, start_s=120.0),)
    said, limits = [], []
    for at in range(10, 140, 5):
        found = walk.to(at, 2e5)
        said.append(found.site_why)
        limits.append(found.site_w)
    assert "faster than the ramp" in said[3]
    assert limits[(120 - 15 - 10) // 5] == pytest.approx(1e5)
    steps = -np.diff(limits)
    assert steps.max() <= 1.15 * 1e5 / (105 / 5), "straight, not at the last minute"


def test_where_no_load_is_known_a_coming_target_is_approached_on_the_ramp() -> None:
    walk = Walk(Settings(ramp_down_w_per_s=100.0), target(1e5, 100.0), target(2e4, 100.0, feeders=[1]))
    found = walk.to(0.0, np.nan, obeys=False)
    assert found.site_w == pytest.approx(1e5 + 100.0 * (100.0 - ARRIVE_S))
    assert found.feeder_w[1] == pytest.approx(2e4 + 100.0 * (100.0 - ARRIVE_S))


def test_a_thousand_targets_of_many_feeders_are_looked_at_at_once() -> None:
    rng = np.random.default_rng(3)
    many = [target(w, feeders=[0, 1], name=f"t{i}") for i, w in enumerate(rng.uniform(1e4, 1e5, 1000))]
    found = Walk(NONE, *many).to(0.0, 2e5)
    least = min(many, key=lambda t: t.limit_w)
    assert found.feeder_w.tolist() == [least.limit_w] * 2
    assert least.name in found.feeder_why[1]


def test_without_a_ramp_a_coming_target_costs_nothing_until_caps_have_to_arrive() -> None:
    walk = Walk(Settings(), target(1e5, start_s=300.0))
    assert walk.to(300.0 - ARRIVE_S - 1).site_w == np.inf
    assert walk.to(300.0 - ARRIVE_S).site_w == 1e5


def test_after_its_end_the_limit_is_let_up_with_the_ramp_and_then_gone() -> None:
    walk = Walk(Settings(ramp_up_w_per_s=50.0), target(1e5, end_s=100.0))
    limits = [walk.to(at, 2e5).site_w for at in range(0, 8000, 10)]
    assert limits[9] == 1e5
    assert limits[10] == 1e5 + 500.0
    finite = np.array([w for w in limits if np.isfinite(w)])
    assert np.diff(finite).max() <= 500.0 + 1e-6
    most_w = float(SITE.design.rack_max_w.sum())
    assert finite.max() == pytest.approx(most_w, abs=1000.0)
    assert limits[-1] == np.inf
    assert walk.course.held_w < 0


def test_a_feeder_that_is_let_up_makes_the_site_rise_on_the_ramp_as_well() -> None:
    walk = Walk(Settings(ramp_up_w_per_s=50.0), target(4e4, end_s=100.0, feeders=[0]))
    for at in range(0, 100, 10):
        assert walk.to(at, 1e5).site_w == np.inf
    assert walk.to(100.0, 1e5).site_w == pytest.approx(1e5 + 500.0)
    assert walk.to(110.0, 2e5).site_w == pytest.approx(1e5 + 1000.0)


def test_an_untouched_quarter_is_spread_evenly_and_a_saved_one_only_a_little_more() -> None:
    walk, aim_w = Walk(Settings(contract_w=C)), (1 - RESERVE_PU) * C
    assert walk.to(0.0, 0.0).site_w == pytest.approx(aim_w)
    for at in range(5, 840, 5):
        found = walk.to(at, 1e4)
    assert found.site_w == pytest.approx((1 + SLACK_PU) * aim_w), "not the many times more that are left"
    last = [walk.to(at, np.inf).site_w for at in range(840, 905, 5)]
    assert last[-2] <= 1.005 * aim_w
    assert (np.abs(np.diff(last)) <= 0.006 * aim_w).all(), "and that is given back before the next quarter"
    assert walk.drawn[0] < 0.4 * C * QUARTER_S


def test_too_much_early_is_made_up_for_evenly() -> None:
    walk = Walk(Settings(contract_w=C))
    for at in range(0, 305, 5):
        walk.to(at, 1.2 * C, obeys=False)
    first = walk.found.site_w
    assert first == pytest.approx((0.995 * 900 - 1.2 * 300) / 600 * C, rel=1e-6)
    for at in range(305, 905, 5):
        walk.to(at)
        if at < 900:
            assert walk.found.site_w == pytest.approx(first, rel=1e-6), "no crash at the end"
    assert walk.drawn[0] <= C * QUARTER_S


def test_a_quarter_that_is_lost_is_not_crashed_for() -> None:
    walk = Walk(Settings(contract_w=C))
    for at in range(0, 855, 5):
        found = walk.to(at, 1.2 * C, obeys=False)
    assert found.site_w == pytest.approx(LEAST_PU * (1 - RESERVE_PU) * C)
    assert "hardly be kept" in found.site_why


def test_a_restart_in_the_middle_of_a_quarter_takes_it_for_used_as_agreed() -> None:
    found = Walk(Settings(contract_w=C)).to(600.0, 0.5 * C)
    assert found.site_w == pytest.approx((1 - RESERVE_PU) * C)
    assert "600 s of which are not measured" in found.site_why


def test_what_was_drawn_in_a_gap_counts_as_no_less_than_before_and_after() -> None:
    walk = Walk(Settings(contract_w=C))
    for at in range(0, 105, 5):
        walk.to(at, 0.2 * C)
    assert walk.to(100.0 + GAP_S + 100).site_w == pytest.approx(
        min((1 + SLACK_PU) * 0.995 * C, (0.995 * 900 - 0.2 * 100 - 0.995 * 220) / 580 * C)
    )
    for at in range(325, 400, 5):
        walk.to(at, 1.3 * C, obeys=False)
    before_ws = walk.course.quarter_ws
    walk.to(395.0 + GAP_S + 30, 0.9 * C, obeys=False)
    assert walk.course.quarter_ws - before_ws == pytest.approx(1.3 * C * (GAP_S + 30))


@pytest.mark.parametrize("bad", [
    {"quarter_ws": np.nan}, {"held_w": np.inf}, {"seen_ns": -5}, {"quarter_ws": -1.0}, {"load_w": -3.0},
    {"shave_pu": np.nan},
])  # fmt: skip
def test_a_memory_that_cannot_be_is_none(bad: dict[str, Any]) -> None:
    good = LimitMemory(QUARTER_NS, 0.0, 0.0, QUARTER_NS, -1.0, 1e5, 0.5, 1.0, 0.0, 0.0, 0)
    found = Walk(Settings(contract_w=C, ramp_up_w_per_s=1.0), course=replace(good, **bad)).to(450.0, 1e5)
    assert found.site_w == pytest.approx((1 - RESERVE_PU) * C)
    assert found.shave_pu == 0.0


def test_a_clock_that_goes_back_keeps_limits_and_forgets_what_was_saved() -> None:
    walk = Walk(Settings(contract_w=C, ramp_up_w_per_s=10.0), target(1e5, end_s=3000.0))
    for at in range(1000, 1500, 5):
        walk.to(at, 5e4)
    walk.targets = ()
    found = walk.to(400.0, 5e4)
    assert found.site_w == pytest.approx(1e5), "let up from where it was, without time to rise in"
    assert walk.course.unseen_s == 400.0
    assert walk.course.seen_ns == QUARTER_NS + 400 * NS


def test_an_unknown_load_saves_nothing() -> None:
    walk = Walk(Settings(contract_w=C))
    walk.to(0.0, 0.0)
    for at in range(5, 600, 5):
        found = walk.to(at, np.nan, obeys=False)
    assert found.site_w == pytest.approx((1 - RESERVE_PU) * C)


PRICES = Settings(dear_usd_per_kwh=0.2, dirty_g_per_kwh=400.0, shave_pu=0.3)


def test_shaving_while_dear_or_dirty_bit_by_bit_with_hysteresis() -> None:
    walk = Walk(PRICES)
    walk.to(0.0, price=0.1, carbon=300.0)
    assert walk.to(30.0, price=0.25, carbon=300.0).shave_pu == pytest.approx(30.0 / SHAVE_S)
    for at in range(60, 200, 30):
        found = walk.to(at, price=0.2, carbon=np.nan)
    assert found.shave_pu == pytest.approx(0.3)
    assert "high from 0.2 on" in found.shave_why
    assert "the carbon of the grid is unknown" in found.shave_why
    assert walk.to(240.0, price=0.2 * (1 - BACK_PU) + 1e-9).shave_pu == pytest.approx(0.3)
    assert walk.to(250.0, price=0.18).shave_pu == pytest.approx(0.3 - 10.0 / SHAVE_S)
    assert "rise step by step" in walk.found.shave_why
    assert walk.to(360.0, price=0.199).shave_pu == 0.0, "not dear again below the threshold itself"
    assert walk.to(390.0, carbon=401.0).shave_pu > 0.0


def test_an_unknown_price_is_no_reason_to_shave_and_it_says_so() -> None:
    walk = Walk(PRICES)
    for at in (0.0, 30.0, 60.0):
        found = walk.to(at)
    assert found.shave_pu == 0.0
    assert found.shave_why.count("is unknown now") == 2
    assert Walk(Settings()).to(0.0).shave_why == ""


def test_an_outlook_that_falls_silent_ends_the_shaving() -> None:
    walk = Walk(PRICES)
    for at in range(0, 400, 30):
        walk.to(at, price=0.3)
    assert walk.found.shave_pu == pytest.approx(0.3)
    for at in range(400, 900, 30):
        walk.to(at)
    assert walk.found.shave_pu == 0.0


def test_shaving_keeps_to_the_ramps() -> None:
    walk = Walk(replace(PRICES, ramp_down_w_per_s=20.0, ramp_up_w_per_s=10.0))
    walk.to(0.0)
    down = walk.to(10.0, price=0.3).shave_pu
    assert down * RANGE_W == pytest.approx(200.0)
    assert (down - walk.to(15.0, price=0.1).shave_pu) * RANGE_W == pytest.approx(50.0)


@pytest.mark.parametrize(("name", "value"), [
    ("contract_w", 0.0), ("contract_w", -1.0), ("contract_w", np.inf), ("ramp_up_w_per_s", 0.0),
    ("ramp_down_w_per_s", -3.0), ("dear_usd_per_kwh", np.inf), ("dirty_g_per_kwh", -np.inf),
    ("shave_pu", 1.5), ("shave_pu", np.nan), ("lead_s", -1.0), ("lead_s", np.nan), ("lead_s", 1e6),
    ("contract_w", True), ("shave_pu", "a lot"), ("lead_s", None),
])  # fmt: skip
def test_settings_that_make_no_sense_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ContractError, match=name):
        replace(Settings(), **{name: value}).checked()


def test_settings_become_floats_and_a_price_may_be_negative() -> None:
    found = Settings(contract_w=1000, dear_usd_per_kwh=-1).checked()
    assert isinstance(found.contract_w, float)
    assert found.dear_usd_per_kwh == -1.0


steps = st.lists(
    st.tuples(st.sampled_from([1.0, 5.0, 7.0, 60.0, 110.0]), st.floats(0.0, 3.0)), min_size=30, max_size=250
)


@settings(max_examples=60, deadline=None)
@given(steps, st.floats(0.0, 899.0), st.sampled_from([np.nan, 50.0, 1000.0]), st.booleans())
def test_the_contract_is_never_exceeded_by_a_load_that_obeys(
    walked: list[tuple[float, float]], begin_s: float, ramp: float, restarts: bool
) -> None:
    walk = Walk(Settings(contract_w=C, ramp_down_w_per_s=ramp))
    at_s = begin_s
    walk.to(at_s, 0.0)
    for i, (dt_s, wants) in enumerate(walked):
        at_s += dt_s
        if restarts and i % 50 == 49:
            walk.course = LimitMemory()
        walk.to(at_s, wants * C)
        assert walk.found.site_w >= LEAST_PU * (1 - RESERVE_PU) * C
    assert all(ws <= C * QUARTER_S * (1 + 1e-9) for ws in walk.drawn.values())


@st.composite
def some_targets(draw: st.DrawFn) -> list[LoadTarget]:
    out = []
    for i in range(draw(st.integers(0, 5))):
        start_s = draw(st.floats(0.0, 2000.0))
        end_s = draw(st.one_of(st.none(), st.floats(1.0, 1500.0)))
        where = draw(st.sampled_from([None, None, [0], [0, 1]]))
        limit_w = draw(st.floats(0.0, 2e5))
        out.append(target(limit_w, start_s, None if end_s is None else start_s + end_s, where, f"t{i}"))
    return out


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(
    some_targets(),
    st.lists(st.tuples(st.sampled_from([1.0, 5.0, 30.0]), st.floats(0.0, 2.5e5)), min_size=60, max_size=200),
    st.sampled_from([np.nan, 20.0, 500.0]),
    st.sampled_from([np.nan, C]),
)
def test_what_runs_is_kept_nothing_is_negative_and_it_rises_on_the_ramp(
    targets: list[LoadTarget], walked: list[tuple[float, float]], ramp: float, contract_w: float
) -> None:
    walk = Walk(Settings(contract_w=contract_w, ramp_up_w_per_s=ramp, ramp_down_w_per_s=ramp), *targets)
    at_s, before_w = 0.0, np.inf
    for dt_s, wants_w in walked:
        at_s += dt_s
        found = walk.to(at_s, wants_w)
        site_w, feeder_w = targets_now(cast(View, Fake(at_s, tuple(targets))))
        assert found.site_w <= site_w
        assert (found.feeder_w <= feeder_w).all()
        assert found.site_w >= 0.0
        assert (found.feeder_w >= 0.0).all()
        assert (found.site_w < np.inf) == bool(found.site_why)
        assert [w < np.inf for w in found.feeder_w] == [bool(w) for w in found.feeder_why]
        if np.isfinite(ramp) and np.isfinite(before_w) and np.isfinite(found.site_w):
            # A limit above the most that all racks draw lets nothing up: it needs no ramp
            assert min(found.site_w, MOST_W) <= before_w + ramp * dt_s + 1e-6
        before_w = found.site_w


@settings(max_examples=40, deadline=None)
@given(
    st.floats(1e4, 1.9e5),
    st.floats(30.0, 1500.0),
    st.sampled_from([1.0, 5.0, 10.0]),
    st.floats(0.0, 2.5e5),
    st.sampled_from([20.0, 500.0]),
)
def test_a_coming_target_is_met_when_it_begins_and_the_ramp_holds_unless_it_says_so(
    limit_w: float, start_s: float, dt_s: float, wants_w: float, ramp: float
) -> None:
    walk = Walk(Settings(ramp_down_w_per_s=ramp), target(limit_w, start_s))
    at_s, before_w, first = 0.0, np.inf, True
    while at_s < start_s:
        found = walk.to(at_s, wants_w, obeys=not first)
        bound_w = min(before_w, wants_w)  # a limit above what is wanted moves nothing
        if not first and "faster" not in found.site_why and found.site_w < np.inf and at_s < start_s - 20.0:
            assert found.site_w >= bound_w - ramp * dt_s - 1e-6
        before_w, first = found.site_w, False
        at_s += dt_s
    assert before_w == pytest.approx(limit_w) or dt_s > ARRIVE_S
