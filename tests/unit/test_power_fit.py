"""The number of further racks that fit: closed forms, a rival that knows the truth, and refusals."""

from __future__ import annotations

from math import erf, sqrt

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from policies.power_capping.rack_fit import (
    MIN_DAYS,
    MOST_RACKS,
    FitPlaces,
    PowerHistory,
    RackFit,
    by_nameplate,
    fit,
)

SLOT_S = 300


def places(limit_w: float, n_rack: int, share: float = 1.0, **more: float) -> FitPlaces:
    """One place that carries all racks; `new`: what it carries of a new one."""
    return FitPlaces(np.array([limit_w]), np.full((1, n_rack), share), np.array([more.get("new", share)]))


def past(power_w: np.ndarray, slot_s: int = SLOT_S) -> PowerHistory:
    """Slots from the beginning of a day on."""
    t_s = np.arange(len(power_w), dtype=np.int64) * slot_s
    return PowerHistory(power_w, t_s // 3600, t_s // 86_400)


def steady(power_w: float, n_rack: int, days: int = 20) -> PowerHistory:
    return past(np.full((days * 24, n_rack), power_w), 3600)


def asked(
    where: FitPlaces, before: PowerHistory | None, risk_pu: float = 0.01, new_w: float = 130.0
) -> RackFit:
    n = where.share.shape[1]
    return fit(where, before, np.full(n, 130.0), new_w, np.arange(n), risk_pu)


@pytest.mark.long
@settings(max_examples=12)
@given(
    limit_w=st.floats(100.0, 1e5),
    n=st.integers(1, 9),
    power_w=st.floats(1.0, 130.0),
    share=st.sampled_from([0.5, 1.0]),
)
def test_racks_that_never_change_fit_as_often_as_they_divide_the_room(
    limit_w: float, n: int, power_w: float, share: float
) -> None:
    found = asked(places(limit_w, n, share), steady(power_w, n, MIN_DAYS))
    plate = max(0, int((limit_w - share * n * 130.0) / (share * 130.0) + 1e-9))
    room = (limit_w - share * n * power_w) / (share * power_w)
    assert found.nameplate == min(plate, MOST_RACKS)
    if abs(room - round(room)) < 1e-6:  # at the very edge either is right
        return
    exact = min(max(0, int(np.floor(room))), MOST_RACKS)
    assert found.peaks == exact
    assert found.diverse == found.low == found.high == min(exact, 4 * found.nameplate + 50)
    assert found.excess_pu == float(room < 0)


def test_the_tightest_of_several_places_counts_and_is_named() -> None:
    where = FitPlaces(np.array([1000.0, 700.0]), np.ones((2, 3)), np.array([1.0, 0.5]))
    found = asked(where, steady(100.0, 3))
    assert (found.diverse, found.binds) == (7, 0)  # 700 W left for 100 W each, and 400 W for 50 W each
    assert (found.nameplate, found.peaks) == (4, 7)
    narrow = where._replace(limit_w=np.array([1000.0, 500.0]))
    assert (asked(narrow, steady(100.0, 3)).diverse, asked(narrow, steady(100.0, 3)).binds) == (4, 1)


def test_racks_that_take_turns_fit_where_their_peaks_would_not() -> None:
    turn = np.arange(20 * 24) % 2 == 0
    power_w = np.stack([np.where(turn, 100.0, 20.0), np.where(turn, 20.0, 100.0)], axis=1)
    found = asked(places(361.0, 2), past(power_w, 3600))
    assert found.peaks == 2  # 120 W are there at most, and each may bring 100 W at the worst moment
    assert found.diverse == 4  # two of each kind: 120 W a pair, at any time
    together = np.stack([power_w[:, 0]] * 2, axis=1)
    assert asked(places(361.0, 2), past(together, 3600)).diverse == 1


def test_a_risk_is_a_share_of_hours() -> None:
    power_w = np.full((1000, 1), 10.0)
    power_w[:30] = 100.0  # 3 % of the hours
    for risk_pu, fits in ((0.02, 4), (0.04, 49)):
        assert asked(places(500.0, 1), past(power_w, 3600), risk_pu).diverse == fits


def test_an_hour_counts_with_its_worst_moment() -> None:
    power_w = np.full((20 * 288, 1), 10.0)
    power_w[::12] = 100.0  # five minutes of every hour
    assert asked(places(500.0, 1), past(power_w)).diverse == 4


@pytest.mark.parametrize("common", [0.0, 20.0])
def test_as_many_as_a_rival_finds_who_knows_how_racks_draw(common: float) -> None:
    """Racks of normal power, alone or with a swing in common: the chance that an hour is beyond."""
    rng = np.random.default_rng(3)
    n, days, mean_w, own_w, limit_w, risk_pu = 40, 400, 100.0, 15.0, 6000.0, 0.02
    shared = rng.normal(0.0, common, (days * 24, 1))
    power_w = mean_w + shared + rng.normal(0.0, own_w, (days * 24, n))
    found = fit(places(limit_w, n), past(power_w, 3600), np.full(n, 200.0), 200.0, np.arange(n), risk_pu)

    def chance(k: int) -> float:
        spread = sqrt((n + k) * own_w**2 + ((n + k) * common) ** 2)
        # Up to `n` new ones repeat racks that are there: the same draw twice
        spread = sqrt(spread**2 + 2 * k * own_w**2)
        return 0.5 * (1.0 - erf((limit_w - (n + k) * mean_w) / spread / sqrt(2.0)))

    truth = max(k for k in range(500) if chance(k) <= risk_pu) if chance(0) <= risk_pu else 0
    assert found.diverse is not None
    assert abs(found.diverse - truth) <= 1
    assert found.low is not None
    assert found.high is not None
    assert found.low <= truth <= found.high


def test_the_interval_is_wide_where_days_differ() -> None:
    rng = np.random.default_rng(5)
    of_day = np.repeat(rng.uniform(50.0, 100.0, 30), 24)[:, None] * np.ones((1, 4))
    calm = asked(places(2000.0, 4), steady(75.0, 4, 30), 0.1)
    found = asked(places(2000.0, 4), past(of_day, 3600), 0.1)
    assert calm.low == calm.high
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.high


@pytest.mark.parametrize(
    ("days", "risk_pu", "why"),
    [
        (MIN_DAYS - 1, 0.1, "days in the history: 13; expected 14"),
        (MIN_DAYS, 0.001, "a risk of 0.001 needs 3000"),
    ],
)
def test_no_promise_where_the_past_is_too_short(days: int, risk_pu: float, why: str) -> None:
    found = asked(places(1000.0, 2), steady(10.0, 2, days), risk_pu)
    assert why in found.why_not
    assert found.peaks is found.diverse is found.low is found.excess_pu is None
    assert found.nameplate == 5


def test_hours_with_gaps_are_no_hours() -> None:
    power_w = np.full((20 * 288, 2), 10.0)
    power_w[: 10 * 288, 1] = np.nan  # ten days without the second rack
    found = asked(places(1000.0, 2), past(power_w))
    assert (found.hours, found.days) == (240, 10)
    assert found.diverse is None
    few = np.full((20 * 288, 2), 10.0)
    few[7::12] = np.nan
    assert asked(places(1000.0, 2), past(few)).hours == 480


def test_nothing_to_learn_from() -> None:
    assert asked(places(1000.0, 2), None).why_not == "no history is kept"
    nobody = fit(places(1000.0, 2), steady(10.0, 2), np.full(2, 130.0), 130.0, np.zeros(0, np.int64), 0.01)
    assert "no rack of this kind" in nobody.why_not
    mute = steady(10.0, 3)
    mute.power_w[:, 2] = np.nan  # of the kind that is asked for, and not on this feeder
    where = FitPlaces(np.array([1000.0]), np.array([[1.0, 1.0, 0.0]]), np.array([1.0]))
    silent = fit(where, mute, np.full(3, 130.0), 130.0, np.array([2]), 0.01)
    assert ("no rack of this kind" in silent.why_not, silent.nameplate) == (True, 5)
    assert fit(where, mute, np.full(3, 130.0), 130.0, np.array([1, 2]), 0.01).diverse == 70
    assert by_nameplate(places(1000.0, 2), np.array([130.0, np.nan]), 130.0) == (None, -1)
    assert by_nameplate(places(1000.0, 2), np.full(2, 130.0), float("nan")) == (None, -1)
    assert by_nameplate(places(float("inf"), 2), np.full(2, 130.0), 130.0) == (None, -1)


@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), limit_w=st.floats(500.0, 3000.0))
def test_more_room_and_more_risk_never_fit_fewer(seed: int, limit_w: float) -> None:
    rng = np.random.default_rng(seed)
    before = past(rng.uniform(20.0, 130.0, (MIN_DAYS * 24, 5)), 3600)
    counts = [
        asked(places(w, 5), before, r) for w, r in ((limit_w, 0.01), (1.2 * limit_w, 0.01), (limit_w, 0.1))
    ]
    assert all(c.diverse is not None and c.nameplate is not None and c.peaks is not None for c in counts)
    assert counts[0].diverse <= min(counts[1].diverse, counts[2].diverse)  # type: ignore[operator]
    assert all(c.nameplate <= c.peaks <= c.diverse for c in counts)  # type: ignore[operator]
