"""Heat rejection against closed forms, a fixed point and usual figures. May import `twin.physics`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twin.physics.facility import (
    CONDENSING_MAX_C,
    COP_MAX,
    COP_MIN,
    DRY_APPROACH_K,
    EVAPORATION_L_PER_KWH,
    FAN_MIN_PU,
    FAN_RATED_W_PER_W,
    WET_APPROACH_K,
    Rejection,
    chilled_max_w,
    chiller_work_w,
    conductance_w_per_k,
    cop,
    evaporated_l_per_s,
    fan_power_w,
    makeup_l_per_s,
    reject,
    supply_aim_c,
)

NOMINAL_W = 1e6
WATER_W_PER_K = 1e5  # a rise of 10 K at nominal heat


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def loop(**changed: Any) -> Rejection:
    """One loop, or as many as the longest value has, at nominal heat in a temperate hour."""
    given = {"heat_w": NOMINAL_W, "heat_nominal_w": NOMINAL_W, "aim_c": 30.0, "outdoor_c": 15.0,
             "wet_bulb_c": 11.0, "wet": False, "chiller_w": 0.0, "water_w_per_k": WATER_W_PER_K,
             "air_factor": 1.0} | changed  # fmt: skip
    names = list(given)
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(given[n])) for n in names))
    return reject(**dict(zip(names, arrays, strict=True)))


def test_full_fans_at_nominal_heat_reach_the_approach() -> None:
    hot = loop(outdoor_c=40.0, wet_bulb_c=24.0, aim_c=20.0, wet=[False, True])
    assert hot.fan_pu == pytest.approx(1.0)
    assert hot.supply_c == pytest.approx([40 + DRY_APPROACH_K, 24 + WET_APPROACH_K])
    assert hot.fan_power_w == pytest.approx(FAN_RATED_W_PER_W * NOMINAL_W)


def test_the_economiser_meets_its_aim_with_no_compressor() -> None:
    mild = loop(chiller_w=2e6)
    assert mild.supply_c == pytest.approx(30.0)
    assert mild.chilled_w == 0
    assert mild.compressor_power_w == 0
    # (8 K / 15 K)^(1 / 0.8) of the speed, and its cube of the power
    assert mild.fan_pu == pytest.approx((8 / 15) ** 1.25)
    assert mild.fan_power_w == pytest.approx(FAN_RATED_W_PER_W * NOMINAL_W * (8 / 15) ** 3.75)


@settings(max_examples=200)
@given(st.floats(1e4, 1.5e6), st.floats(-20, 45), st.floats(18, 45), st.booleans(), st.floats(0.2, 1))
def test_heat_leaves_by_the_air(heat: float, outdoor: float, aim: float, wet: bool, air: float) -> None:
    free = loop(heat_w=heat, outdoor_c=outdoor, wet_bulb_c=outdoor - 4, aim_c=aim, wet=wet, air_factor=air)
    base, approach = (outdoor - 4, WET_APPROACH_K) if wet else (outdoor, DRY_APPROACH_K)
    carried = conductance_w_per_k(array(NOMINAL_W), approach, free.fan_pu * air) * (free.supply_c - base)
    assert carried == pytest.approx(heat, rel=1e-9)
    assert free.supply_c[0] <= aim + 1e-9 or free.fan_pu[0] == 1
    assert free.supply_c[0] >= aim - 1e-9 or free.fan_pu[0] == FAN_MIN_PU


@pytest.mark.parametrize("wet", [False, True])
def test_warmer_air_never_cools_better(wet: bool) -> None:
    outdoor = np.linspace(-20, 45, 131)
    for chiller_w in (0.0, 4e5, 2e6):
        out = loop(outdoor_c=outdoor, wet_bulb_c=outdoor - 3, wet=wet, chiller_w=chiller_w)
        assert (np.diff(out.supply_c) >= -1e-9).all()
        assert (np.diff(out.chilled_w) >= -1e-6).all()
        # at the end of its capacity the lift stays, and warmer water needs a little less work
        able = out.chilled_w < min(max(chiller_w, 1.0), NOMINAL_W)
        assert able.sum() > 50
        assert (np.diff((out.fan_power_w + out.compressor_power_w)[able]) >= -1e-6).all()


def test_more_heat_needs_more_power_and_more_water() -> None:
    heat = np.linspace(0, 1.5e6, 100)
    out = loop(heat_w=heat, outdoor_c=28.0, wet_bulb_c=24.0, wet=True, chiller_w=1e6)
    assert (np.diff(out.fan_power_w + out.compressor_power_w) >= -1e-6).all()
    assert (np.diff(out.water_l_per_s) > 0).all()
    assert (np.diff(out.supply_c) >= -1e-9).all()


def test_a_chiller_takes_the_rest_of_the_way_as_far_as_it_can() -> None:
    # 35 degC and 8 K of approach give 43 degC; 5 K below costs half of the water's 10 K rise
    out = loop(outdoor_c=35.0, aim_c=38.0, chiller_w=[2e6, 5e5, 2e5, 0.0])
    assert out.free_supply_c == pytest.approx(43.0)
    assert out.supply_c == pytest.approx([38, 38, 41, 43])
    assert out.chilled_w == pytest.approx([5e5, 5e5, 2e5, 0])
    # never more than the heat there is
    assert loop(outdoor_c=45.0, aim_c=20.0, chiller_w=9e6).chilled_w == pytest.approx(NOMINAL_W)


def test_the_work_of_a_chiller_is_at_its_fixed_point() -> None:
    out = loop(outdoor_c=38.0, aim_c=22.0, chiller_w=2e6)
    work, air = 0.0, 38.0
    for _ in range(50):
        sink = air + (NOMINAL_W + work) / float(conductance_w_per_k(array(NOMINAL_W), 8.0, out.fan_pu)[0])
        work = float(out.chilled_w[0] / cop(out.supply_c, array(sink))[0])
    assert out.compressor_power_w == pytest.approx(work, rel=1e-9)


def test_a_chiller_at_its_limit_has_its_sink_there() -> None:
    conductance = np.linspace(1e3, 1e5, 20)
    most = chilled_max_w(22.0, 45.0, conductance)
    work = chiller_work_w(most, 22.0, 45.0 + most / conductance, conductance)
    assert 45.0 + (most + work) / conductance == pytest.approx(np.full(20, CONDENSING_MAX_C))
    assert chilled_max_w(22.0, CONDENSING_MAX_C + 1.0, 1e5) == 0.0
    # never beyond the performance that is meant
    assert chiller_work_w(1e6, 22.0, 300.0, 1e3) == pytest.approx(1e6 / COP_MIN)


def test_performance_of_a_chiller_is_that_of_usual_machines() -> None:
    # chilled water at 7 degC against 30 degC condenser water: water-cooled machines reach 4-6
    assert 4 < cop(array(7.0), array(30.0))[0] < 6
    assert 8 < cop(array(22.0), array(30.0))[0] < 12
    sinks = np.linspace(-10, 60, 100)
    assert (np.diff(cop(np.full(100, 18.0), sinks)) <= 0).all()
    assert COP_MIN <= cop(array(18.0), array(200.0))[0] <= cop(array(18.0), array(-50.0))[0] <= COP_MAX


def test_a_tower_drinks_what_towers_drink() -> None:
    # WUE of wet sites is published at 1.5-2 l/kWh, drains included
    assert 1.2 < EVAPORATION_L_PER_KWH < 1.5
    per_kwh = makeup_l_per_s(evaporated_l_per_s(array(1e6))) * 3600 / 1000
    assert 1.5 < per_kwh[0] < 2.0
    assert loop(wet=False).water_l_per_s == 0
    assert loop(wet=True).water_l_per_s * 3.6 == pytest.approx(EVAPORATION_L_PER_KWH, rel=1e-9)


def test_fans_follow_the_cube() -> None:
    power = fan_power_w(array(1e6, 1e6), array(0.5, 1.0))
    assert power[1] / power[0] == pytest.approx(8)


def test_a_fan_fault_warms_the_supply() -> None:
    well, ill = loop(outdoor_c=30.0, aim_c=35.0), loop(outdoor_c=30.0, aim_c=35.0, air_factor=0.5)
    assert ill.supply_c[0] > well.supply_c[0]
    assert ill.fan_power_w == pytest.approx(well.fan_power_w)  # full speed both


def test_the_aim_stays_above_the_air_and_below_its_limit() -> None:
    assert supply_aim_c(array(25, 25, 25), array(10, 30, 60), 40.0).tolist() == [25, 31, 40]


def test_unknown_weather_gives_unknown_temperatures() -> None:
    assert np.isnan(loop(outdoor_c=np.nan).supply_c).all()
