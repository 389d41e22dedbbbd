"""The heat that a coolant carries, against closed forms. May import `twin.physics`."""

from __future__ import annotations

import numpy as np
import pytest

from twin.physics import COOLANTS, heat_rate_w_per_k, heat_w


def array(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def test_pg25_needs_fifteen_litres_a_minute_per_kilowatt_and_kelvin() -> None:
    kw_per_k = heat_rate_w_per_k(COOLANTS["pg25"], array(15.0), array(40.0)) / 1e3
    assert kw_per_k == pytest.approx(1.0, rel=0.002)


def test_water_at_forty_degrees() -> None:
    # 60 l/min = 1 l/s; 0.9922 kg of water, 4179 J/kg K, 10 K
    assert heat_w(COOLANTS["water"], array(60.0), array(35.0), array(45.0)) == pytest.approx(
        992.2e-3 * 4179 * 10
    )


@pytest.mark.parametrize("name", sorted(COOLANTS))
def test_heat_is_the_rate_times_the_rise_at_the_mean(name: str) -> None:
    coolant = COOLANTS[name]
    flow, supply, back = array(10, 50, 115), array(20, 32, 45), array(21, 47, 45)
    rate = heat_rate_w_per_k(coolant, flow, (supply + back) / 2)
    assert np.allclose(heat_w(coolant, flow, supply, back), rate * (back - supply))
    assert np.allclose(heat_w(coolant, 3 * flow, supply, back), 3 * heat_w(coolant, flow, supply, back))
    assert (heat_w(coolant, flow, back, supply) <= 0).all()
    assert (rate > 0).all()


def test_warmer_water_is_lighter() -> None:
    cold, warm = (heat_rate_w_per_k(COOLANTS["water"], array(100.0), array(t)) for t in (20.0, 60.0))
    assert cold > warm
    # IAPWS: 998.2 kg/m3 at 20 degC and 983.2 at 60 degC; the line through 40 degC is good to 0.3 %
    assert cold / warm == pytest.approx(998.2 / 983.2, rel=3e-3)


@pytest.mark.parametrize("place", range(3))
def test_an_unknown_input_gives_an_unknown_heat(place: int) -> None:
    inputs = [array(50.0), array(30.0), array(45.0)]
    inputs[place] = array(np.nan)
    assert np.isnan(heat_w(COOLANTS["pg25"], *inputs)).all()


def test_every_coolant_has_a_source() -> None:
    assert all(len(c.source) > 10 for c in COOLANTS.values())
