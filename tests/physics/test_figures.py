"""PUE and its kin against published definitions. May import `twin.physics`."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from twin.physics import J_PER_KWH, pue, tue, wue_l_per_kwh

energies = st.floats(1, 1e12)


def test_by_hand() -> None:
    # 1 MW of IT of which fans and supplies take 8 %, 150 kW of cooling, one hour, 1.7 m3 of water
    it, total, compute = 1000 * J_PER_KWH, 1150 * J_PER_KWH, 920 * J_PER_KWH
    assert pue(total, it) == pytest.approx(1.15)
    assert tue(total, compute) == pytest.approx(1.25)
    assert wue_l_per_kwh(1700.0, it) == pytest.approx(1.7)


@given(energies, st.floats(0, 3), st.floats(0.01, 1))
def test_tue_is_pue_times_itue(it: float, cooling: float, chips: float) -> None:
    total, compute = it * (1 + cooling), it * chips
    assert tue(total, compute) == pytest.approx(pue(total, it) * it / compute)
    assert pue(total, it) >= 1
    assert tue(total, compute) >= pue(total, it) * (1 - 1e-12)


def test_without_use_there_is_no_figure() -> None:
    total, it = np.array([10.0, 10.0, np.nan]), np.array([0.0, 5.0, 5.0])
    assert pue(total, it) == pytest.approx([np.nan, 2.0, np.nan], nan_ok=True)
    assert np.isnan(wue_l_per_kwh(1.0, 0.0))


def test_figures_of_two_spans_come_from_the_sums() -> None:
    total, it = np.array([12.0, 300.0]), np.array([10.0, 200.0])
    assert pue(total.sum(), it.sum()) == pytest.approx(312 / 210)
    assert pue(total.sum(), it.sum()) != pytest.approx(float(pue(total, it).mean()))
