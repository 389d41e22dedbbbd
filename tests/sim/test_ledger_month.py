"""The ledger beside a simulated plant's own sums: a compressed month with gaps, resets, steps of clocks,
replaced meters and a pause of the daemon."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.ledger_month import EVER, RACK_PU, SITE_PU, LedgerMonth, racks_of, run_month
from twin.catalogue import NS, pack, unpack
from twin.engine import Engine
from twin.ledger import statement
from twin.physics import J_PER_KWH


def assert_exact(month: LedgerMonth) -> None:
    """All GPU time is there once, and each job's as the scheduler told it."""
    found = statement(month.hours, "job", *EVER)
    assert sum(found.total.gpu_ns.values()) == round(month.seconds * NS) * month.site.sizes["gpu"]
    assert found.watched_ns + found.total.gpu_ns["unknown"] // month.site.sizes["gpu"] >= found.watched_ns
    granted: dict[str, int] = {}
    for row in found.rows:
        granted[row.name] = granted.get(row.name, 0) + (row.granted_ns if row.part == "job" else 0)
    assert {n: ns for n, ns in granted.items() if ns} == {n: ns for n, ns in month.granted_ns.items() if ns}
    for hour in month.hours:
        parts = sum(row.energy_j for row in hour.rows)
        assert parts == pytest.approx(hour.site.energy_j, rel=1e-9)
        assert sum(h.energy_j for h in hour.halls.values()) == pytest.approx(hour.site.energy_j, rel=1e-9)
        cooling = sum(r.energy_j for r in hour.rows if r.part in ("cooling", "losses"))
        racks = sum(r.energy_j for r in hour.racks.values())
        assert racks + cooling == pytest.approx(hour.site.energy_j, rel=1e-9)


@pytest.mark.long
def test_two_hours_with_all_troubles_add_up() -> None:
    month = run_month(1, 7200.0, racks=2, pause_s=300.0)
    assert_exact(month)
    errors, _, found = racks_of(month)
    assert np.abs(errors).max() < 3 * RACK_PU
    assert abs(found.total.energy_kwh * J_PER_KWH / month.site_j - 1.0) < SITE_PU
    assert found.refused_counters == 2  # the counter that began anew, and the meter that was replaced
    # A snapshot holds the hour that runs
    engine = month.engine
    assert engine is not None
    other = Engine(month.site, [], [])
    other.restore(unpack(pack(engine.dump())))
    assert other.checksum() == engine.checksum()
    assert other.ledger.running() == engine.ledger.running()


@pytest.mark.long
def test_water_per_energy_is_that_of_the_plant() -> None:
    month = run_month(2, 7200.0, racks=2, pause_s=300.0, cooling="tower")
    found = statement(month.hours, "site", *EVER)
    rack_j = float(month.rack_j.sum())
    # A water meter of class 2 is known to 2 %, in nine of ten cases
    assert found.wue_l_per_kwh == pytest.approx(month.water_l * J_PER_KWH / rack_j, rel=0.04)
    assert found.pue == pytest.approx(month.site_j / rack_j, rel=0.01)
    assert found.tue is not None
    assert found.tue > found.pue
    assert min(found.wue_known_pu, found.pue_known_pu, found.tue_known_pu) > 0.9


@pytest.mark.storm
def test_a_month_in_a_day_is_within_its_stated_error() -> None:
    month = run_month(1, 86_400.0)
    assert_exact(month)
    errors, half, found = racks_of(month)
    assert np.mean(np.abs(errors) <= half) >= 0.75  # of eight racks; the next test counts more
    assert abs(found.total.energy_kwh * J_PER_KWH / month.site_j - 1.0) < SITE_PU


@pytest.mark.storm
def test_a_whole_month_is_within_half_a_per_cent_of_each_rack() -> None:
    month = run_month(101, 30 * 86_400.0)
    assert_exact(month)
    errors, half, found = racks_of(month)
    assert np.abs(errors).max() < RACK_PU
    assert np.mean(np.abs(errors) <= half) >= 0.75
    assert half.max() < RACK_PU  # what feeders tell of gains is stated
    assert abs(found.total.energy_kwh * J_PER_KWH / month.site_j - 1.0) < SITE_PU


@pytest.mark.storm
def test_stated_intervals_hold_as_often_as_they_say() -> None:
    inside, within = list[bool](), list[bool]()
    for seed in range(3, 15):
        errors, half, found = racks_of(month := run_month(seed, 14_400.0))
        inside += (np.abs(errors) <= half).tolist()
        within.append(abs(found.total.energy_kwh * J_PER_KWH / month.site_j - 1.0) < SITE_PU)
    assert 0.80 <= np.mean(inside) <= 0.97  # 96 racks: 90 % with two of its own sigmas
    assert np.mean(within) >= 0.9
