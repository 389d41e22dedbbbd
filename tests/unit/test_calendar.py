"""The local calendar agrees with Python's own datetime, through changes of the clocks and leap days."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from models.load import hours_of_week
from models.load.calendar import days_of_week, hours_of_day, minutes_of_hour
from twin.catalogue import I64, NS, ContractError

ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe", "Pacific/Apia")


def ns(*fields: int, zone: str = "UTC") -> I64:
    return np.array([int(datetime(*fields, tzinfo=ZoneInfo(zone)).timestamp()) * NS])  # type: ignore[arg-type,misc]


@settings(max_examples=60, deadline=None)
@given(
    zone=st.sampled_from(ZONES),
    seconds=st.lists(st.integers(0, 4_000_000_000), min_size=1, max_size=20),
    step_s=st.sampled_from((1, 60, 3600)),
)
def test_it_is_what_datetime_says(zone: str, seconds: list[int], step_s: int) -> None:
    t_s = np.concatenate([np.arange(s, s + 5 * step_s, step_s) for s in seconds])
    local = [datetime.fromtimestamp(int(t), UTC).astimezone(ZoneInfo(zone)) for t in t_s]
    t_ns = t_s * NS
    hour = np.array([d.hour + d.minute / 60 + d.second / 3600 for d in local])
    np.testing.assert_allclose(hours_of_day(t_ns, zone), hour, atol=1e-9)
    weekday = np.array([d.weekday() for d in local])
    np.testing.assert_array_equal(days_of_week(t_ns, zone), weekday)
    np.testing.assert_allclose(hours_of_week(t_ns, zone), 24 * weekday + hour, atol=1e-9)
    np.testing.assert_allclose(
        minutes_of_hour(t_ns, zone), [d.minute + d.second / 60 for d in local], atol=1e-9
    )


def test_clocks_jump_in_spring_and_turn_back_in_autumn() -> None:
    spring = ns(2024, 3, 31, 0, 59, 59) + np.array([0, 1]) * NS
    np.testing.assert_allclose(hours_of_day(spring, "Europe/Berlin"), [2 - 1 / 3600, 3])
    autumn = ns(2024, 10, 27, 0, 59, 59) + np.array([0, 1]) * NS
    np.testing.assert_allclose(hours_of_day(autumn, "Europe/Berlin"), [3 - 1 / 3600, 2])


def test_a_leap_day_is_a_day() -> None:
    t_ns = np.concatenate([ns(2024, 2, 29), ns(2024, 3, 1), ns(2023, 3, 1), ns(2024, 12, 31, 23, 59, 59)])
    np.testing.assert_array_equal(days_of_week(t_ns, "UTC")[:3], [3, 4, 2])


def test_a_day_left_out_at_the_date_line() -> None:
    t_ns = ns(2011, 12, 29, 23, 59, 59, zone="Pacific/Apia") + np.array([0, 1]) * NS
    np.testing.assert_array_equal(days_of_week(t_ns, "Pacific/Apia"), [3, 5])


def test_no_instants() -> None:
    assert hours_of_day(np.array([], np.int64), "Europe/Berlin").shape == (0,)


@pytest.mark.parametrize("zone", ["Europe/Atlantis", "", "../etc/passwd", "/etc/localtime", "a\0b", "Europe"])
def test_an_unknown_zone_is_refused(zone: str) -> None:
    with pytest.raises(ContractError, match="zone"):
        hours_of_day(np.array([0]), zone)
