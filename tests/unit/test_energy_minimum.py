"""The power of least energy: found for jobs of known truth; what is flat, or not known, does not rule it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from models.energy_minimum import (
    ASKED_PU,
    SHAPE,
    bins_of,
    cover_powers,
    expected_energy,
    least_energy_pu,
    power_share_pu,
    slowed,
)
from twin.catalogue import F64

STATIC = 0.25


def unit_s(power_pu: F64, shape: int, share: float) -> F64:
    """Times per unit of work of a job whose power over clock has this shape; simulated."""
    return np.asarray(1.0 + share * slowed(power_pu[None], np.array([STATIC]))[0][0, shape])


def true_energy(shape: int, share: float, beside: float, asked: F64 = ASKED_PU) -> F64:
    x, drawn = slowed(asked[None], np.array([STATIC]))
    return np.asarray((drawn[0, shape] + beside) * (1.0 + share * x[0, shape]))


def test_work_at_the_power_that_was_learned_takes_hardly_more_than_the_least() -> None:
    """Read at five caps without noise; several shapes may say the same there."""
    power, above = np.array([1.0, 0.8, 0.62, 0.45, 0.3]), []
    for shape, share, beside in product(range(len(SHAPE)), (0.3, 0.6, 0.95), (0.0, 0.3)):
        bins = bins_of(power, unit_s(power, shape, share), STATIC)
        at, low, high = least_energy_pu(bins, np.array([STATIC]), np.array([beside]))[0]
        truth = true_energy(shape, share, beside)
        above.append(np.interp(at, ASKED_PU[::-1], truth[::-1]) / truth.min() - 1.0)
        assert low <= at <= high
    assert np.mean(above) < 0.005
    assert max(above) < 0.08


def test_many_readings_at_caps_that_hardly_touch_a_job_change_nothing() -> None:
    power = np.array([1.0, 0.7, 0.5])
    few = bins_of(power, unit_s(power, 2, 0.8), STATIC)
    flat = np.concatenate([np.full(500, 1.0), power])
    many = bins_of(flat, unit_s(flat, 2, 0.8), STATIC)
    static, beside = np.array([STATIC]), np.array([0.1])
    few_e, many_e = (expected_energy(bins, static, ASKED_PU[None], beside)[0] for bins in (few, many))
    assert many_e / many_e[0] == pytest.approx(few_e / few_e[0], rel=1e-9)
    assert np.array_equal(*(least_energy_pu(bins, static, beside) for bins in (few, many)))


def test_at_one_power_nothing_is_learned_and_a_band_narrows_with_powers() -> None:
    static, beside = np.array([STATIC]), np.array([0.0])
    one = bins_of(np.ones(9), np.ones(9), STATIC)
    assert not cover_powers(one).any()
    wide, narrow = (
        least_energy_pu(bins_of(np.array(p), unit_s(np.array(p), 4, 0.9), STATIC), static, beside)[0]
        for p in ([1.0, 0.85], [1.0, 0.85, 0.7, 0.55, 0.45, 0.35])
    )
    assert narrow[2] - narrow[1] < wide[2] - wide[1]


def test_the_power_of_a_bin_is_that_of_its_readings() -> None:
    power = np.array([1.0, 0.9, 0.7, 0.5])
    bins = bins_of(power, np.ones(4), STATIC)
    filled = bins[0, bins[0, :, 0] > 0]
    found = power_share_pu(filled[:, 1] / filled[:, 0], np.array(STATIC))
    assert sorted(found) == pytest.approx(sorted(power))
