"""Histograms of errors, candidate curves, edges that are moved until they hold, and lattices."""

from __future__ import annotations

import numpy as np
import pytest

from models.load import LEVELS, MEDIAN, quantum
from models.load.bands import (
    BINS,
    KINDS,
    N_KIND,
    N_LEVEL,
    REACH,
    REFRESH,
    SIDE,
    STEP,
    UNIT,
    Bands,
    first_guess,
    marginal_quantiles,
    quantiles,
)
from models.load.conformal import TAIL, Conformal, tail_shares
from models.load.quantisation import snap

NAN = float("nan")


def asked(bands: Bands, local: np.ndarray, marginal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Spreads and curves around the last value; the local size of changes is the first unit."""
    bands.unit = np.where(np.isnan(bands.unit), local, bands.unit)
    spreads = bands.spreads(np.zeros(1), local, None, None)
    return spreads, bands.curves(np.zeros(1), bands.unit, spreads, marginal)


def learned(errors: np.ndarray, scale: float = 1.0) -> Bands:
    """Bands of one series whose median is always the last value, after these errors."""
    bands = Bands(1, 1.0, 1.0)
    zero, local = np.zeros(1), np.array([scale])
    for error in errors:
        spreads, curves = asked(bands, local, np.full((N_LEVEL, 1), NAN))
        bands.learn(np.array([error]), zero, spreads, curves, bands.mixed(curves))
    bands.refresh()
    return bands


def test_the_first_guess_is_a_double_exponential() -> None:
    want = [np.sign(p - 0.5) * -np.log(2.0 * min(p, 1.0 - p)) for p in LEVELS]
    got = quantiles(first_guess()[None, :, None])[0, :, 0]
    assert got == pytest.approx(want, rel=0.02, abs=1e-12)


@pytest.mark.parametrize("scale", [0.01, 1.0, 300.0])
def test_quantiles_are_those_of_the_errors(scale: float) -> None:
    errors = np.random.default_rng(1).standard_t(4, 4000) * scale
    bands = learned(errors, scale)
    got = bands.table[1, :, 0] * bands.unit[0]
    want = np.quantile(errors, LEVELS)
    assert got[[1, 2, 4, 5]] == pytest.approx(want[[1, 2, 4, 5]], rel=0.06)
    assert got[[0, 6]] == pytest.approx(want[[0, 6]], rel=0.2)
    assert abs(got[MEDIAN]) < 0.05 * scale


def test_no_change_is_exactly_no_change() -> None:
    errors = np.zeros(400)
    errors[::50] = 3.0
    table = learned(errors).table[1, :, 0]
    assert table[1:5].tolist() == [0.0] * 4


def test_an_error_beyond_all_bins_widens_them_and_loses_nothing() -> None:
    errors = np.random.default_rng(2).normal(size=500)
    bands = learned(errors)
    before, total = bands.table[:2] * bands.unit, bands.counts[:2].sum()
    huge = np.array([REACH * 50.0])
    spreads, curves = asked(bands, np.ones(1), np.full((N_LEVEL, 1), NAN))
    bands.learn(huge, np.zeros(1), spreads, curves, bands.mixed(curves))
    assert (bands.table[:2] * bands.unit) == pytest.approx(before)  # not yet looked at again
    bands.refresh()
    assert bands.unit[0] == pytest.approx(200.0)
    assert bands.counts[:2].sum() == pytest.approx(total + 2.0, rel=0.01)
    # In bins of 200 times the size the middle is coarse; the edge of the 90 % band is still near.
    assert (bands.table[1] * bands.unit)[5] == pytest.approx(before[1, 5], rel=0.35)


def test_an_outcome_that_is_the_quantile_gains_nobody_anything() -> None:
    bands, zero = Bands(1, 1.0, 1.0), np.zeros(1)
    curves = np.linspace(-2.0, 2.0, N_KIND)[:, None, None] * np.ones((1, N_LEVEL, 1))
    bands.learn(zero, zero, np.ones((3, 1)), curves, np.zeros((N_LEVEL, 1)))
    away = curves != 0.0
    assert (bands.mix.regret[away] < 0.0).all()
    assert (bands.mix.regret[~away] == 0.0).all()


def test_histograms_are_looked_at_often_first_and_every_few_outcomes_later() -> None:
    bands, zero, ages = Bands(1, 1.0, 1.0), np.zeros(1), []
    for error in np.random.default_rng(8).normal(size=300):
        spreads, curves = asked(bands, np.ones(1), np.full((N_LEVEL, 1), NAN))
        bands.learn(np.array([error]), zero, spreads, curves, bands.mixed(curves))
        ages.append(int(bands.age[0]))
    assert ages[:5] == [0] * 5
    assert max(ages) == REFRESH - 1
    assert bands.table[1, 5, 0] == pytest.approx(1.645, rel=0.2)  # the first guess was 2.3


def test_marginal_is_numpys_own_quantile() -> None:
    rng = np.random.default_rng(3)
    recent = rng.normal(size=(64, 3))
    recent[10:50, 1] = NAN
    recent[:, 2] = NAN
    got = marginal_quantiles(recent)
    assert got[:, :2] == pytest.approx(np.nanquantile(recent[:, :2], LEVELS, axis=0))
    assert np.isnan(got[:, 2]).all()
    assert np.isnan(marginal_quantiles(np.empty((0, 2)))).all()


def test_the_local_spread_wins_where_errors_follow_it() -> None:
    rng = np.random.default_rng(4)
    bands, zero = Bands(1, 1.0, 1.0), np.zeros(1)
    for i in range(1500):
        local = np.array([10.0 if (i // 40) % 2 else 0.5])
        spreads, curves = asked(bands, local, np.full((N_LEVEL, 1), NAN))
        bands.learn(rng.normal(size=1) * local, zero, spreads, curves, bands.mixed(curves))
    bands.refresh()
    weight = bands.weights[:, :, 0]
    for level in (1, 2, 4, 5):
        assert KINDS[weight[:, level].argmax()] == "local"


def test_without_any_change_there_are_no_bands() -> None:
    bands = Bands(1, 1.0, 1.0)
    _, curves = asked(bands, np.array([NAN]), np.zeros((N_LEVEL, 1)))
    assert curves.shape == (N_KIND, N_LEVEL, 1)
    assert np.isnan(bands.mixed(curves)).all()


def test_bins_have_the_size_that_is_promised() -> None:
    centre = UNIT * np.sinh(np.arange(1, SIDE + 1) * STEP)
    edge = UNIT * np.sinh((np.arange(1, SIDE + 1) + 0.5) * STEP)
    assert BINS == 2 * SIDE + 1 <= 256  # the search halves from 128
    assert (edge / centre - 1.0)[20:].max() < 0.075
    assert centre[-1] > 1900.0


SAID = np.array([[-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0]]).T


@pytest.mark.parametrize(
    "actual, want",
    [
        (0.5, [0, 0, 0, 1, 0, 0, 0]),  # beyond the median, outward is below it
        (2.5, [0, 0, 0, 1, 1, 1, 0]),
        (-9.0, [1, 1, 1, 1, 0, 0, 0]),
    ],
)
def test_beyond_counts_edges_that_were_passed(actual: float, want: list[float]) -> None:
    got = tail_shares(np.array([actual]), SAID)[:, 0]
    side = [0, 1, 2, 4, 5, 6]
    assert got[side].tolist() == [want[i] for i in side]


def test_an_outcome_on_an_edge_counts_in_part() -> None:
    got = tail_shares(np.array([2.0]), SAID)[:, 0]  # spread over the levels 0.75 .. 0.995
    assert got[4] == 1.0
    assert got[5] == pytest.approx((0.995 - 0.95) / (0.995 - 0.75))
    assert got[6] == 0.0


def test_a_series_that_never_moves_counts_as_the_levels_say() -> None:
    """All quantiles on one atom: each edge is passed with just the share that it should be."""
    got = tail_shares(np.array([5.0]), np.full((N_LEVEL, 1), 5.0))
    tails = np.delete(np.arange(N_LEVEL), MEDIAN)
    assert got[tails] == pytest.approx(TAIL[tails])


def test_nothing_is_counted_without_an_outcome_or_a_band() -> None:
    assert np.isnan(tail_shares(np.array([NAN]), SAID)).all()
    assert np.isnan(tail_shares(np.array([1.0]), np.full((N_LEVEL, 1), NAN))).all()


@pytest.mark.parametrize("wrong", [0.4, 1.0, 2.5])
def test_edges_that_were_wrong_come_to_hold(wrong: float) -> None:
    """Adaptive conformal inference is off by at most (range + step) / (step * n_time) per edge."""
    rng = np.random.default_rng(5)
    edges, zero = Conformal(1, 1.0), np.zeros(1)
    normal = np.array([-2.5758, -1.6449, -0.6745, 0.0, 0.6745, 1.6449, 2.5758])[:, None]
    passed, n_time = np.zeros((N_LEVEL, 1)), 6000
    for i in range(n_time):
        actual = rng.normal(size=1)
        said = edges.moved(zero, wrong * normal, zero)
        if i >= n_time // 2:
            passed += tail_shares(actual, said)
        edges.learn(actual, said)
    share = passed[:, 0] / (n_time - n_time // 2)
    tails = np.delete(np.arange(N_LEVEL), MEDIAN)
    assert share[tails] == pytest.approx(TAIL[tails, 0], abs=0.012)
    assert edges.log_width[[1, 5], 0] == pytest.approx(-np.log(wrong), abs=0.35)


def test_a_gap_moves_no_edge() -> None:
    edges = Conformal(1, 1.0)
    edges.learn(np.array([NAN]), SAID)
    assert not edges.log_width.any()


def test_an_inner_edge_takes_the_outer_one_along() -> None:
    edges = Conformal(1, 1.0)
    edges.log_width[4, 0] = 2.0
    got = edges.moved(np.zeros(1), SAID, np.zeros(1))[:, 0]
    assert got[4] > 3.0
    assert (np.diff(got) >= 0.0).all()


@pytest.mark.parametrize(
    "step, offset", [(1.0, 0.0), (0.5, 0.0), (8.0, 0.0), (0.1, 20.0), (2.0, 7.0), (72.0, 3.0), (0.01, 1e4)]
)
def test_the_common_step_is_found(step: float, offset: float) -> None:
    rng = np.random.default_rng(6)
    values = offset + step * rng.integers(0, 40, (200, 1))
    values[3:9] = NAN
    assert quantum(values)[0] == step


def test_what_has_no_common_step() -> None:
    rng = np.random.default_rng(7)
    few = np.full(100, NAN)
    few[:5] = 1.0, 2.0, 3.0, 5.0, 8.0
    columns = [rng.normal(size=100), np.full(100, 4.0), few, np.full(100, NAN), 1e12 * rng.random(100)]
    assert quantum(np.column_stack(columns)).tolist() == [0.0] * 5
    assert quantum(np.empty((0, 2))).tolist() == [0.0, 0.0]


def test_values_are_rounded_to_the_lattice_they_stand_on() -> None:
    got = snap(np.array([3.4, 3.4, 3.4, NAN]), np.array([0.0, 0.5, NAN, 1.0]), np.array([1.0, 1.0, 1.0, 1.0]))
    assert got[:3].tolist() == [3.0, 3.5, 3.4]
    assert np.isnan(got[3])
    plain = np.array([3.4])
    assert snap(plain, np.zeros(1), np.zeros(1)).tolist() == [3.4]


def test_outer_edges_of_what_sits_still_come_back_to_the_median() -> None:
    """One move in 500 on either side is less than the 99 % band may miss: its edges belong on the median."""
    edges, still, lattice = Conformal(1, 1.0), np.zeros((len(LEVELS), 1)), np.ones(1)
    out = []
    for row in range(8000):
        said = np.rint(edges.moved(still[0], still, lattice))
        edges.learn(np.array([{0: 5.0, 250: -5.0}.get(row % 500, 0.0)]), said)
        out.append(said[[0, -1], 0] != 0.0)
    assert not np.any(out[4000:])
