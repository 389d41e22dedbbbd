"""A blend of experts over rows that come one by one: gaps, old rows, memory, and who is trusted."""

from __future__ import annotations

import numpy as np
import pytest

from models.blend import LATTICE_EVERY_ROWS, Blend
from models.climatology import HourlyMedian
from models.ewma import Ewma5
from models.forecaster import BANDS, MEDIAN, Grid
from models.last_value import LastValue
from models.seasonal_naive import SeasonalDay
from twin.errors import ContractError
from twin.frame import F64, NS
from twin.tree import digest

LOW, HIGH = BANDS["90"]
NONE: dict[str, F64] = {}


def blend_of(
    n: int = 2,
    rows: int = 200,
    step_s: float = 60.0,
    horizons: tuple[int, ...] = (1, 5),
    more: tuple[str, ...] = (),
) -> Blend:
    grid = Grid(step_s, horizons)
    return Blend(grid, n, rows, [LastValue(grid), Ewma5(grid)], more)


def feed(blend: Blend, values: F64, first: int = 1000) -> F64:
    """Rows one by one; what was said after each [n_row, n_horizon, n, n_level]."""
    said = []
    for i, row in enumerate(values):
        blend.append(first + i, row)
        said.append(blend.say({}))
    return np.array(said)


def walks(n_time: int, n: int = 2, seed: int = 0) -> F64:
    return 1e4 + np.cumsum(np.random.default_rng(seed).normal(0, 10, (n_time, n)), axis=0)


def test_the_panel_is_the_newest_rows_at_their_instants() -> None:
    blend = blend_of(rows=50)
    values = walks(300)
    for i, row in enumerate(values):
        blend.append(i, row)
        panel = blend.panel()
        kept = min(i + 1, 50)
        np.testing.assert_array_equal(panel.values, values[i + 1 - kept : i + 1].astype(np.float32))
        assert panel.start_ns == (i + 1 - kept) * 60 * NS
        assert int(panel.t_ns()[-1]) == i * 60 * NS
    assert blend.panel(7).n_time == 7
    assert blend.panel(7).start_ns == 293 * 60 * NS
    assert blend.panel(10**6).n_time == 50


def test_rows_that_were_left_out_are_gaps_and_old_ones_are_not_taken() -> None:
    blend = blend_of()
    blend.append(10, np.array([1.0, 2.0]))
    blend.append(13, np.array([3.0, 4.0]))
    for row in (13, 12, 10, 3):
        before = digest(blend.memory())
        blend.append(row, np.array([9.0, 9.0]))
        assert digest(blend.memory()) == before
    np.testing.assert_array_equal(
        blend.panel().values, [[1.0, 2.0], [np.nan, np.nan], [np.nan, np.nan], [3.0, 4.0]]
    )


@pytest.mark.parametrize("missed", [198, 199, 200, 201, 10**9])
def test_after_a_silence_as_long_as_what_is_kept_it_begins_anew(missed: int) -> None:
    blend = blend_of()
    feed(blend, walks(250), 0)
    blend.append(250 + missed, np.array([5.0, 6.0]))
    said = blend.say({})
    assert said[:, :, MEDIAN] == pytest.approx(np.tile([5.0, 6.0], (2, 1)), rel=0.2)
    assert np.isfinite(said[:, :, MEDIAN]).all()
    kept = np.isfinite(blend.panel().values[:, 0]).sum()
    assert kept == max(1, 200 - missed)
    assert blend.panel().n_time == (200 if missed < 200 else 1)


def test_a_constant_series_has_no_band_or_a_tiny_one_and_no_warnings() -> None:
    said = feed(blend_of(), np.full((150, 2), 7.25))
    np.testing.assert_array_equal(said[:, :, :, MEDIAN], 7.25)
    width = said[:, :, :, HIGH] - said[:, :, :, LOW]
    assert (np.isnan(width) | (np.abs(width) < 1e-6)).all()


def test_nothing_but_gaps_is_no_trouble() -> None:
    said = feed(blend_of(), np.full((LATTICE_EVERY_ROWS + 5, 2), np.nan))
    assert np.isnan(said).all()
    mixed = walks(150)
    mixed[:, 1] = np.nan
    said = feed(blend_of(), mixed)
    assert np.isnan(said[:, :, 1]).all()
    assert np.isfinite(said[20:, :, 0]).all()


def test_a_gap_teaches_nothing_and_leaves_the_band_as_wide_as_it_was() -> None:
    """A random walk of steps of 10, silent for an hour: the forecast holds, its band does not shrink."""
    values = walks(600)
    values[500:560, 0] = np.nan
    said = feed(blend_of(rows=600), values)
    for horizon in range(2):
        width = said[:, horizon, 0, HIGH] - said[:, horizon, 0, LOW]
        assert width[499] > 10.0
        assert (width[500:560] > 0.8 * width[499]).all()
        median = said[:, horizon, 0, MEDIAN]
        np.testing.assert_allclose(median[500:560], median[499], atol=0.3 * width[499])
        assert abs(median[575] - values[575, 0]) < width[499]


def test_what_is_said_is_bit_identical_after_a_restart_at_any_row() -> None:
    values = walks(150)
    values[40:45] = np.nan
    whole, said = blend_of(rows=64, more=("told",)), []
    told = np.full((2, 2), 1e4)
    stops = {0, 1, 42, 71, 72, 73, 120}
    held = {}
    for i, row in enumerate(values):
        whole.append(i, row)
        said.append(whole.say({"told": told}))
        if i in stops:
            held[i] = whole.memory()
    for stop, memory in held.items():
        again = blend_of(rows=64, more=("told",))
        again.restore(memory)
        assert digest(again.memory()) == digest(memory)
        for i in range(stop + 1, min(stop + 30, len(values))):
            again.append(i, values[i])
            np.testing.assert_array_equal(again.say({"told": told}), said[i])
        if stop == 120:
            assert digest(again.memory()) == digest(whole.memory())


def test_a_memory_of_another_shape_is_refused() -> None:
    memory = blend_of(n=2, rows=50).memory()
    for other in (blend_of(n=3, rows=50), blend_of(n=2, rows=50, more=("told",))):
        with pytest.raises(ContractError):
            other.restore(memory)
    full = blend_of(rows=50)
    feed(full, walks(60))
    with pytest.raises(ContractError, match="at most 40"):
        blend_of(rows=40).restore(full.memory())


def test_series_that_moved_go_on_and_new_ones_begin_with_nothing() -> None:
    values = walks(200, 3)
    whole = blend_of(n=3)
    feed(whole, values)
    moved = blend_of(n=3)
    feed(moved, values)
    moved.remap(np.array([2, -1, 0], np.int32))
    more = walks(80, 3, seed=1)
    for i, row in enumerate(more):
        whole.append(1200 + i, row)
        moved.append(1200 + i, row[[2, 1, 0]])
        before, after = whole.say({}), moved.say({})
        np.testing.assert_array_equal(after[:, [0, 2]], before[:, [2, 0]])
        if i == 0:
            np.testing.assert_allclose(after[:, 1, MEDIAN], row[1])
            assert np.isnan(after[:, 1, LOW]).all()


def test_a_series_that_is_forgotten_begins_anew_and_the_others_go_on() -> None:
    values = walks(200)
    whole, other = blend_of(), blend_of()
    feed(whole, values)
    feed(other, values)
    other.forget(np.array([0]))
    assert np.isnan(other.panel().values[:, 0]).all()
    for blend in (whole, other):
        blend.append(1200, np.array([77.0, values[-1, 1]]))
    before, after = whole.say({}), other.say({})
    np.testing.assert_array_equal(after[:, 1], before[:, 1])
    np.testing.assert_allclose(after[:, 0, MEDIAN], 77.0)


def share(blend: Blend, name: str, horizon: int = 0) -> float:
    return float(np.nanmean(blend.online[horizon].weights()[:, blend.names.index(name)]))


def test_who_knows_what_comes_is_trusted_and_who_lies_is_not() -> None:
    rng = np.random.default_rng(3)
    values = 100.0 + rng.normal(0, 10, (400, 2))
    true, false = blend_of(more=("told",)), blend_of(more=("told",))
    for i in range(395):
        coming = np.array([values[i + 1], values[i + 5]])
        for blend, told in ((true, coming), (false, coming + 300.0)):
            blend.append(i, values[i])
            blend.say({"told": told})
    assert share(true, "told") > 0.7
    assert share(false, "told") < 0.1
    assert true.basis(0, slice(0, 2)).startswith("told ")
    assert "told" not in false.basis(0, slice(0, 2))


def test_a_lie_after_a_long_truth_costs_its_trust() -> None:
    rng = np.random.default_rng(4)
    values = 100.0 + rng.normal(0, 10, (800, 1))
    blend = blend_of(n=1, more=("told",))
    for i in range(790):
        blend.append(i, values[i])
        told = values[[i + 1, i + 5]] if i < 300 else np.full((2, 1), 250.0)
        blend.say({"told": told})
        if i == 299:
            assert share(blend, "told") > 0.7
    assert share(blend, "told") < 0.1


def test_the_basis_names_at_most_three_and_nobody_before_anything_was_said() -> None:
    blend = blend_of()
    assert blend.basis(0, slice(0, 2)) == ""
    feed(blend, walks(100))
    words = blend.basis(0, slice(0, 2))
    assert words.endswith(" %")
    assert {part.split()[0] for part in words.split(", ")} <= {"last", "ewma5"}
    assert blend.basis(0, slice(0, 0)) == ""


def office(zone: str, berlin_offset_h: F64) -> F64:
    """Error of forecasts a day ahead in the week after the clocks change, of load that rises at 8 local."""
    hours = np.arange(24 * 28)
    local = (hours + berlin_offset_h) % 24
    values = np.where((local >= 8) & (local < 18), 100.0, 20.0)[:, None]
    grid = Grid(3600.0, (24,))
    blend = Blend(grid, 1, 24 * 28, [HourlyMedian(grid)], zone=zone)
    errors = []
    start_h = 1_709_510_400 // 3600  # 4 March 2024, a Monday, 0 h UTC; the clocks change on the 31st
    for i in range(len(hours) - 24):
        blend.append(start_h + i, values[i])
        said = blend.say({})[0, 0, MEDIAN]
        if i + 24 >= 27 * 24 + 1:
            errors.append(abs(said - values[i + 24, 0]))
    return np.array(errors)


def test_people_follow_their_clocks_when_these_change() -> None:
    """From 31 March 2024, 1 h UTC, Berlin is two hours ahead instead of one."""
    hours = np.arange(24 * 28)
    offset_h = np.where(hours >= 27 * 24 + 1, 2.0, 1.0)
    assert office("Europe/Berlin", offset_h).mean() < 0.5 * office("UTC", offset_h).mean()


def test_a_leap_day_is_a_day_like_any() -> None:
    """Hours from 26 February 2024 on: the day before is the same hour's, on 29 February and on 1 March."""
    grid = Grid(3600.0, (24,))
    blend = Blend(grid, 1, 24 * 10, [LastValue(grid), SeasonalDay(grid)])
    values = np.tile(np.arange(24.0), 7)[:, None]
    start_h = 1_708_905_600 // 3600
    for i, row in enumerate(values):
        blend.append(start_h + i, row)
        said = blend.say({})[0, 0, MEDIAN]
        if i >= 48:
            assert said == pytest.approx(row[0], abs=1e-3)
