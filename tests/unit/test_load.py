"""The model of the daemon: rows from ticks of any length, gaps, restarts, changed sites, fits and settings.

Experts are few here, since it is the daemon's side that is tested; each expert has a test of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models.load import Load
from tests.support.builders import START_NS, Twin, spec_of, two_racks
from tests.support.sampled_cases import sampled
from twin.catalogue import F64, NS
from twin.contracts import Forecast
from twin.telemetry import events as ev

POWER = "rack.power_w"
FEW = "last,ewma5"
MIN, HOUR, DAY = 60.0, 3600.0, 86_400.0


def load_of(signals: tuple[str, ...] = (POWER,), **more: Any) -> Load:
    return Load(signals, **{"experts": FEW, "horizons_s": (MIN, 5 * MIN), **more})


def twin_of(*models: Any, **more: Any) -> Twin:
    return Twin(two_racks(**more), models=models)


def rng_walk(n: int, seed: int = 0, n_rack: int = 2) -> F64:
    return 60e3 + np.cumsum(np.random.default_rng(seed).normal(0, 200, (n, n_rack)), axis=0)


def drive(twin: Twin, values: F64, dt_s: float = MIN, key: str = POWER) -> None:
    for row in values:
        twin.tick({key: row}, dt_s=dt_s)
    assert twin.engine.suspended == {}


def said(twin: Twin, horizon_s: float = MIN, key: str = POWER) -> Forecast:
    return twin.engine.forecasts[key, horizon_s]


def panel(model: Load, grid: str = "fine") -> F64:
    return model._blends[grid].panel().values


# Rows.


@pytest.mark.parametrize(
    ("dt_s", "fine", "coarse"),
    [
        (1.0, (60.0, (1, 5, 15, 60)), (900.0, (24, 96))),
        (60.0, (60.0, (1, 5, 15, 60)), (900.0, (24, 96))),
        (300.0, (300.0, (1, 3, 12)), (900.0, (24, 96))),
        (3600.0, (3600.0, (1,)), (3600.0, (6, 24))),
        (7200.0, None, (7200.0, (3, 12))),
        (7 * DAY, None, None),
    ],
)
def test_rows_are_as_long_as_ticks_need(dt_s: float, fine: Any, coarse: Any) -> None:
    found = {name: (grid.step_s, grid.horizons) for name, grid in Load().grids(dt_s).items()}
    assert found.get("fine") == fine
    assert found.get("coarse") == coarse


def test_rows_of_seconds_for_horizons_of_seconds() -> None:
    (grid,) = load_of(horizons_s=(4.0, 10.0)).grids(1.0).values()
    assert (grid.step_s, grid.horizons) == (2.0, (2, 5))
    (grid,) = load_of(horizons_s=(0.5, 4.0)).grids(1.0).values()
    assert (grid.step_s, grid.horizons) == (1.0, (4,))


def test_horizons_of_seconds_are_forecast_and_judged() -> None:
    """Rows of 2 s need a look each 2 s, not each 10 s."""
    model = load_of(horizons_s=(4.0, 10.0))
    twin = twin_of(model)
    drive(twin, rng_walk(120), 1.0)
    assert sorted(h for _, h in twin.engine.forecasts) == [4.0, 10.0]
    assert np.isfinite(panel(model)).all()
    for horizon_s in (4.0, 10.0):
        assert np.isfinite(said(twin, horizon_s).lo).all(), "no outcome was ever seen"


def test_a_row_is_the_mean_of_what_was_measured_in_its_time() -> None:
    model = load_of()
    model.period_s = 1.0  # type: ignore[misc]
    twin = twin_of(model)
    # Ticks lie at the end of their second: those at 1..60 s belong to the first minute.
    begin_s = -(START_NS // NS) % 60
    for second in range(begin_s + 181):
        minute = (second - begin_s) // 60
        twin.tick({POWER: [1000.0 * (minute + 2), 50.0 + second % 2]})
    np.testing.assert_allclose(panel(model)[-3:, 0], [2000.0, 3000.0, 4000.0])
    np.testing.assert_allclose(panel(model)[-3:, 1], 50.5)


@pytest.mark.parametrize("dt_s", [60.0, 300.0, 3600.0])
def test_a_tick_as_long_as_a_row_is_the_newest_row(dt_s: float) -> None:
    """A forecast of one row ahead is of the tick to come, not of the one that is there."""
    model = load_of(horizons_s=(dt_s,), experts="last")
    twin = twin_of(model)
    # Instants at the ends of rows.
    twin.now_ns += -twin.now_ns % round(dt_s * NS)
    for i in range(20):
        twin.tick({POWER: 1000.0 * i}, dt_s=dt_s)
        if i > 2:
            assert said(twin, dt_s).mean == pytest.approx([1000.0 * i] * 2)


LATE = [(1.0, 3.0), (1.0, 100.0), (1.0, 1000.0), (60.0, 200.0), (60.0, 4000.0)]


@pytest.mark.long
@pytest.mark.parametrize(("dt_s", "late_s"), sampled(LATE, (1.0, 1000.0), (60.0, 200.0), (60.0, 4000.0)))
def test_one_late_tick_or_a_pause_forgets_nothing(dt_s: float, late_s: float) -> None:
    """An overload, a host that slept, a restart: rows that were missed are gaps."""
    model = load_of(horizons_s=(MIN, 5 * MIN, 6 * HOUR))
    twin = twin_of(model)
    drive(twin, rng_walk(round(600 / dt_s) if dt_s == 1.0 else 60), dt_s)
    before = np.isfinite(panel(model)[:, 0]).sum()
    grids = [b.grid for b in model._blends.values()]
    twin.tick({POWER: 60e3}, dt_s=late_s)
    drive(twin, rng_walk(3), dt_s)
    assert np.isfinite(panel(model)[:, 0]).sum() >= before
    assert [b.grid for b in model._blends.values()] == grids


def test_a_first_tick_that_is_long_or_short_does_not_settle_the_rows() -> None:
    """As after a restart of a version that had no such model, or behind an urgent tick."""
    for first_s in (900.0, 0.3):
        model = load_of()
        twin = twin_of(model)
        twin.tick({POWER: 60e3}, dt_s=first_s)
        drive(twin, rng_walk(40), 60.0)
        assert [b.grid.step_s for b in model._blends.values()] == [60.0]
        assert np.isfinite(panel(model)).sum() > 30


def test_ticks_that_stay_longer_get_longer_rows() -> None:
    model = load_of(horizons_s=(MIN, 5 * MIN, HOUR))
    twin = twin_of(model)
    drive(twin, rng_walk(30), 60.0)
    drive(twin, rng_walk(30), 300.0)
    assert model._blends["fine"].grid.step_s == 300.0
    assert np.isfinite(said(twin, 300.0).mean).all()


def test_a_clock_that_goes_back_or_stands_still_is_no_trouble() -> None:
    model = load_of()
    twin = twin_of(model)
    drive(twin, rng_walk(30))
    view = twin.engine.view(60.0)
    rows = panel(model).copy()
    for back_s in (0, 30, 3600):
        view = replace(view, now_ns=twin.now_ns - back_s * NS)
        model.update(view)
        assert all(np.isfinite(f.mean).all() for f in model.predict(view))
    np.testing.assert_array_equal(panel(model), rows)
    drive(twin, rng_walk(5))
    assert len(panel(model)) == len(rows) + 5


# Gaps.


def silent_hour(silence: Callable[[Twin], Mapping[str, Any] | None]) -> tuple[Twin, Load, Forecast]:
    """Rack 1 is there for 3 hours, then silent for one; (the twin, its model, what was said before)."""
    model = load_of(horizons_s=(MIN, 15 * MIN))
    twin = twin_of(model)
    drive(twin, rng_walk(180))
    before = said(twin, 15 * MIN)
    for _ in range(60):
        twin.tick(silence(twin), dt_s=MIN)
    assert twin.engine.suspended == {}
    return twin, model, before


@pytest.mark.long
def test_an_outage_is_a_gap_and_no_load_of_nothing() -> None:
    twin, model, before = silent_hour(lambda _: {POWER: [np.nan, 61e3]})
    assert np.isnan(panel(model)[-50:, 0]).all()
    assert np.isfinite(panel(model)[-50:, 1]).all()
    after = said(twin, 15 * MIN)
    width = before.hi - before.lo
    assert abs(after.mean[0] - before.mean[0]) < width[0]
    assert 0.7 * width[0] < after.hi[0] - after.lo[0] < 3 * width[0]
    assert after.lo[0] <= after.mean[0] <= after.hi[0]
    drive(twin, rng_walk(10))
    assert np.isfinite(panel(model)[-1]).all()


def test_nothing_is_learned_where_people_work() -> None:
    """A rack under maintenance reports, but what it draws is not its load."""
    model = load_of(signals=(POWER, "site.power_w"), horizons_s=(MIN, 15 * MIN))
    twin = twin_of(model)
    drive(twin, rng_walk(60))
    before = said(twin)
    until_ns = twin.now_ns + round(2 * HOUR) * NS
    work = ev.MaintenanceBegun(
        id="m", author="ada", table="rack", names=("lab/h/r1",), until_ns=until_ns, reason="pump"
    )
    twin.tick({POWER: [0.0, 60e3]}, work, dt_s=MIN)
    drive(twin, np.tile([0.0, 60e3], (30, 1)))
    assert np.isnan(panel(model)[-25:, 0]).all()
    assert said(twin).mean[0] == pytest.approx(before.mean[0], rel=0.02)
    twin.tick({POWER: 60e3}, ev.MaintenanceEnded(id="e", author="ada", window="m"), dt_s=MIN)
    drive(twin, rng_walk(5))
    assert np.isfinite(panel(model)[-3:]).all()


def test_a_site_without_one_of_its_racks_is_a_gap() -> None:
    model = load_of(signals=("site.power_w",))
    twin = twin_of(model)
    drive(twin, np.full((30, 2), 50e3))
    drive(twin, np.tile([50e3, np.nan], (30, 1)))
    assert panel(model)[25, 0] == 100e3
    assert np.isnan(panel(model)[-20:, 0]).all()
    assert said(twin, MIN, "site.power_w").mean == pytest.approx([100e3])


@pytest.mark.long
def test_a_jump_a_constant_and_a_quantity_never_heard_give_sound_bands() -> None:
    model = load_of(signals=(POWER, "site.grid_price_usd_per_kwh", "site.requests_per_s"))
    twin = twin_of(model)
    for i in range(200):
        watts = 1e3 if i < 100 else 120e3
        twin.tick({POWER: [watts, 70e3], "site.grid_price_usd_per_kwh": -0.02}, dt_s=MIN)
        for forecast in twin.engine.forecasts.values():
            known = np.isfinite(forecast.lo)
            assert (forecast.lo[known] <= forecast.mean[known]).all()
            assert (forecast.mean[known] <= forecast.hi[known]).all()
    assert twin.engine.suspended == {}
    assert said(twin).mean == pytest.approx([120e3, 70e3], rel=1e-3)
    assert not said(twin).hi[1] - said(twin).lo[1] > 1.0
    assert said(twin, MIN, "site.grid_price_usd_per_kwh").mean == pytest.approx([-0.02])
    assert np.isnan(said(twin, MIN, "site.requests_per_s").mean).all()


@pytest.mark.long
def test_bands_stay_inside_what_is_physical() -> None:
    model = load_of()
    twin = twin_of(model)
    drive(twin, np.tile([[0.0, 9e3], [9e3, 0.0]], (60, 1)))
    for horizon_s in (MIN, 5 * MIN):
        assert (said(twin, horizon_s).lo >= 0.0).all()


# Sites that change.


def change(twin: Twin, tree: dict[str, Any]) -> None:
    later = spec_of(tree)
    twin.tick(
        None, ev.SiteChanged(id=later.digest(), site_hash=later.digest(), spec=later.packed()), dt_s=MIN
    )
    twin.site = twin.engine.site
    twin.inbox = type(twin.inbox)(twin.site.sizes)


def racks(model: Load) -> F64:
    return panel(model)[:, model._slices[POWER]]


@pytest.mark.long
def test_a_new_rack_begins_with_nothing_and_the_others_keep_what_was_learned() -> None:
    keys = ("site.power_w", "cdu.flow_lpm", POWER)
    model, other = load_of(keys), load_of(keys)
    twin, same = twin_of(model), twin_of(other)
    for each in (twin, same):
        drive(each, rng_walk(120))
    change(twin, two_racks(racks="r[0-2]"))
    same.tick(None, dt_s=MIN)
    assert np.isnan(racks(model)[:, 0]).all()
    np.testing.assert_array_equal(racks(model)[:, 1:3], racks(other)[:, :2])
    more = rng_walk(30, seed=1, n_rack=3)
    for row in more:
        twin.tick({POWER: row}, dt_s=MIN)
        same.tick({POWER: row[1:]}, dt_s=MIN)
        for horizon_s in (MIN, 5 * MIN):
            a, b = said(twin, horizon_s), said(same, horizon_s)
            for x, y in ((a.mean, b.mean), (a.lo, b.lo), (a.hi, b.hi)):
                np.testing.assert_array_equal(x[1:], y)
    assert np.isfinite(said(twin).mean).all()
    change(twin, two_racks(racks="r[2-3]"))
    np.testing.assert_array_equal(racks(model)[:-1, 0], racks(other)[:, 1][-len(racks(model)) + 1 :])
    assert np.isnan(racks(model)[:, 1]).all()
    assert twin.engine.suspended == {}


def test_a_rack_that_is_replaced_begins_anew() -> None:
    model = load_of()
    twin = twin_of(model)
    drive(twin, rng_walk(60))
    twin.tick(None, ev.EntityReplaced(id="e", table="rack", name="lab/h/r1", serial="S2"), dt_s=MIN)
    assert np.isnan(panel(model)[:, 0]).all()
    assert np.isfinite(panel(model)[:58, 1]).all()
    drive(twin, np.tile([5e3, 60e3], (3, 1)))
    assert said(twin).mean[0] == pytest.approx(5e3)
