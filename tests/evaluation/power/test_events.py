"""Requests of the grid: nothing is foreseen from the future, savings and delays add up, tables read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.evaluation.__main__ import main as evaluate
from tests.evaluation.power import carbon as power_carbon, response
from tests.evaluation.power.arms import START_NS as BEGIN_NS
from tests.evaluation.power.carbon import outlooks
from tests.evaluation.power.demand import recorded
from tests.evaluation.power.grid import LATE_H, MONTH_H, Grid, foreseen, thresholds
from tests.evaluation.power.response import CLOSE_S, HOLD_S, LAG_S, RAMP_W_PER_S
from tests.support.builders import START_NS
from twin.catalogue import NS, ConfigError
from twin.telemetry import OutlookTold

HOURS = 60 * 24


def made(hours: int = HOURS) -> Grid:
    hour = np.arange(hours)
    price = 0.1 + 0.05 * np.sin(2 * np.pi * hour / 24)
    carbon = 300.0 + 100.0 * np.cos(2 * np.pi * hour / 24)
    return Grid("made", START_NS, price, carbon, foreseen(carbon))


def test_carbon_is_foreseen_from_what_was_published_alone() -> None:
    rng = np.random.default_rng(1)
    carbon = rng.uniform(100, 500, 200)
    told = foreseen(carbon)
    assert np.isnan(told[: 24 + LATE_H]).all()
    assert told[100] == pytest.approx(max(carbon[76] + carbon[98] - carbon[74], 0.0))
    for hour in (50, 120):
        other = carbon.copy()
        other[hour - LATE_H + 1 :] += 1000.0
        np.testing.assert_array_equal(foreseen(other)[: hour + 1], told[: hour + 1])


def test_thresholds_come_from_before_the_week() -> None:
    grid = made()
    dear, dirty = thresholds(grid, 40 * 24, 0.25)
    assert np.mean(grid.price[: 40 * 24] >= dear) == pytest.approx(0.25, abs=0.05)
    grid.price[40 * 24 - LATE_H :] = 9.0
    grid.carbon[40 * 24 - LATE_H :] = 9000.0
    assert thresholds(grid, 40 * 24, 0.25) == (dear, dirty)
    with pytest.raises(ConfigError, match="four weeks"):
        thresholds(grid, MONTH_H, 0.25)


def test_what_is_told_in_an_hour_is_the_price_of_the_day_and_the_carbon_foreseen() -> None:
    grid = made()
    grid.foreseen[41 * 24] = np.nan
    first, later = outlooks(grid, 41 * 24, 0), outlooks(grid, 41 * 24, 5)
    assert [e.quantity for e in first if isinstance(e, OutlookTold)] == [
        "site.grid_price_usd_per_kwh",
        "site.grid_carbon_g_per_kwh",
    ]
    assert isinstance(first[0], OutlookTold)
    assert first[0].start_ns == BEGIN_NS
    assert first[0].values == pytest.approx(tuple(grid.price[41 * 24 : 42 * 24]))
    assert isinstance(first[1], OutlookTold)
    assert first[1].values == (None,)
    (told,) = later
    assert isinstance(told, OutlookTold)
    assert told.start_ns == BEGIN_NS + 5 * 3600 * NS
    assert told.values == (grid.foreseen[41 * 24 + 5],)


def row(arm: str, usd: float, tonnes: float, mwh: float, low: float) -> dict[str, Any]:
    return {
        "zone": "made", "seed": 1, "hour": 0, "arm": arm, "energy_mwh": mwh, "tonnes": tonnes, "usd": usd,
        "work_high_gpu_h": 100.0, "work_low_gpu_h": low, "shaved_pu": 0.25, "later_kwh_per_gpu_h": 0.5,
        "later_usd_per_kwh": 0.1, "later_g_per_kwh": 200.0, "trips": 0,
    }  # fmt: skip


def test_what_is_saved_is_less_by_what_the_delayed_work_costs_later() -> None:
    rows = [row("budgets", 1000.0, 5.0, 10.0, 1000.0), row("price", 900.0, 4.5, 9.5, 900.0)]
    told = power_carbon._of_arm("price", rows)
    assert told["usd_saved"] == pytest.approx(100.0)
    assert told["delayed_gpu_h"] == pytest.approx(100.0)
    assert told["delayed_low_pu"] == pytest.approx(0.1)
    assert told["net_usd_saved"] == pytest.approx(100.0 - 100.0 * 0.5 * 0.1)
    assert told["net_tonnes_saved"] == pytest.approx(0.5 - 100.0 * 0.5 * 200.0 / 1e6)
    assert told["net_mwh_saved"] == pytest.approx(0.5 - 0.05)
    assert (told["weeks_that_save_usd"], told["weeks_that_save_tonnes"]) == (1, 1)


def loads(below_s: int) -> np.ndarray:
    """A hundred kW, seventy for three hours, then back on the ramp."""
    begin, limit_w = 600, 70e3
    out = np.full(begin + HOLD_S + 3600, 100e3)
    out[begin + below_s : begin + HOLD_S] = 0.95 * limit_w
    rise_w = limit_w + RAMP_W_PER_S * np.arange(3600)
    out[begin + HOLD_S :] = np.minimum(rise_w, 100e3)
    return out


def test_how_soon_and_how_well_a_response_is_kept() -> None:
    begin, end, limit_w = 600, 600 + HOLD_S, 70e3
    held = response._held(loads(7), limit_w, begin, end)
    assert held == {"below_s": 7, "late_s": 0, "worst_over_pu": 0.0, "used_pu": pytest.approx(0.95)}
    late = response._held(loads(30), limit_w, begin, end)
    assert (late["below_s"], late["late_s"]) == (30, 20)
    assert late["worst_over_pu"] == pytest.approx(100 / 70 - 1)
    never = loads(7)
    never[begin + CLOSE_S - 1] = 1e5
    assert response._held(never, limit_w, begin, end)["below_s"] is None


def test_how_it_comes_back() -> None:
    begin, end, limit_w = 600, 600 + HOLD_S, 70e3
    back = response._back(loads(7), limit_w, begin, end)
    assert back["ahead_of_ramp_pu"] == 0.0
    assert back["steepest_w_per_s"] == pytest.approx(RAMP_W_PER_S, rel=0.02)
    assert back["back_s"] == pytest.approx((98e3 - limit_w) / RAMP_W_PER_S, abs=1)
    at_once = loads(7)
    at_once[end:] = 1e5
    ahead = response._back(at_once, limit_w, begin, end)["ahead_of_ramp_pu"]
    assert ahead == pytest.approx(1e5 / (limit_w + LAG_S * RAMP_W_PER_S) - 1)


def main(*words: str) -> int:
    return evaluate(["power", *words])


def test_a_response_is_lived_beside_rivals_and_printed_as_data(
    recording: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody keeps to it by chance; cuts that treat all alike do, and take from what is of high priority."""
    events = str(recording("gpu-demand-helios-earth"))
    words = (
        "--suite",
        "response",
        "--events",
        events,
        "--arms",
        "none,proportional",
        "--seeds",
        "1",
        "--json",
    )
    assert main(*words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["simulated"] is True
    nobody, cuts = told["arms"]
    assert nobody["missed"] == 1
    assert cuts["below_s_worst"] <= 15
    assert cuts["lost_high_pu"] > 0.05
    assert told["goals"] == []


@pytest.mark.evaluation
def test_our_response_is_kept_and_follows_the_ramp_and_a_day_of_prices_saves_more_than_it_costs_later(
    recording: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    running_pu = recorded(recording("gpu-demand-helios-earth"))
    monkeypatch.setattr(response, "HOLD_S", 600)
    monkeypatch.setattr(response, "AFTER_S", 600)
    told = response.response(running_pu, [100], arms=("racktwin",))
    met = {goal["goal"]: goal["met"] for goal in told["goals"] if "steepest" not in goal["goal"]}
    assert list(met.values()) == [True] * 4, met
    (ours,) = told["arms"]
    assert ours["steepest_5min_w_per_s_worst"] <= 1.25 * response.RAMP_W_PER_S
    # Within a minute jobs that dip and come back rise faster than any ramp
    assert ours["steepest_w_per_s_worst"] <= 2.5 * response.RAMP_W_PER_S
    root = recording("grid-hourly").parent
    week = power_carbon.carbon(root, running_pu, [8], ["germany"], ("budgets", "price_and_carbon"), hours=6)
    (_, ours) = week["zones"][0]["arms"]
    assert ours["usd_saved"] > 0
    assert ours["tonnes_saved"] > 0
    assert ours["net_usd_saved"] > 0
    assert abs(ours["delayed_high_pu"]) < 0.01
    with pytest.raises(ConfigError, match="budgets"):
        power_carbon.carbon(root, running_pu, [1], arms=("price",))
