"""Quantities: closed forms of the sums, and that nothing is said where a part of them is not known."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.builders import START_NS, Twin, two_racks
from twin.catalogue import F64, NS, TABLES, find_quantity
from twin.contracts import good, measured
from twin.telemetry import STALE_PERIODS, events as ev


def now(twin: Twin, key: str) -> F64:
    """A quantity as a model would see it."""
    return measured(twin.engine.view(1.0), key)


def hall(*racks: str, served: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """A hall with two CDUs; the first serves `served` (all racks if none are named), the other nothing."""
    kinds = {r: "air-8gpu" if r.startswith("air") else "gb200-nvl72" for r in racks}
    return {"site": "lab", "halls": [{
        "name": "h",
        "racks": [{"name": r, "profile": kind} for r, kind in kinds.items()],
        "cdus": [{"name": "cdu1", "serves": list(served or racks)}, {"name": "spare", "serves": []}],
    }], **more}  # fmt: skip


@pytest.fixture(scope="module")
def twin() -> Twin:
    return Twin(hall("r1", "r2"))


def test_every_gauge_is_a_quantity_and_no_counter_is() -> None:
    for table, spec in TABLES.items():
        for signal in spec.gauges:
            what = find_quantity(f"{table}.{signal.name}")
            assert what is not None
            assert (what.table, what.unit, what.low, what.high) == (
                table, signal.unit, signal.low, signal.high)  # fmt: skip
        assert all(find_quantity(f"{table}.{s.name}") is None for s in spec.counters)


NONE = ["", ".", "rack", "rack.", ".power_w", "x.power_w", "rack.power_w.x", "rack.x", "site", "cdu.heat",
        "gpu.power_cap_w", "RACK.power_w", "rack.power_w "]  # fmt: skip


@pytest.mark.parametrize("key", NONE)
def test_what_is_no_quantity(key: str) -> None:
    assert find_quantity(key) is None


def test_derived_quantities_fit_their_tables(twin: Twin) -> None:
    for key, table in (("cdu.heat_w", "cdu"), ("site.power_w", "site"), ("site.gpu_demand_count", "site")):
        what = find_quantity(key)
        assert what is not None
        assert what.table == table
        assert what.low < what.high
        assert now(twin, key).shape == (twin.site.sizes[table],)
        assert now(twin, key).dtype == np.float64


def test_nothing_heard_is_nothing_known() -> None:
    twin = Twin(hall("r1", "r2"))
    twin.tick()
    for key in ("cdu.heat_w", "site.power_w", "site.gpu_demand_count", "rack.power_w"):
        assert np.isnan(now(twin, key)).all()


def heat(flow_lpm: float, supply_c: float, return_c: float) -> float:
    """15.0 l/min and K for a kW: density 1012 kg/m3, 3950 J/kg K. Readings have quanta of 0.01 K."""
    return flow_lpm / 60_000 * 1012.0 * 3950.0 * (return_c - supply_c)


METERED = st.tuples(st.floats(0.5, 900), st.floats(10, 45), st.floats(0.5, 30))


@settings(max_examples=30)
@given(a=METERED, b=METERED)
def test_heat_of_a_cdu_is_that_of_its_own_meter(a: Any, b: Any) -> None:
    twin = Twin(hall("r1", "r2"))  # one for each example: water that leaps is not believed
    (flow, supply, rise), (flow_b, supply_b, rise_b) = a, b
    racks = {"rack.flow_lpm": [flow_b] * 2, "rack.supply_temp_c": [supply_b] * 2,
             "rack.return_temp_c": [supply_b + rise_b] * 2}  # fmt: skip
    twin.tick({"cdu.flow_lpm": [flow, 0.0], "cdu.supply_temp_c": [supply, supply],
               "cdu.return_temp_c": [supply + rise, supply + rise], **racks})  # fmt: skip
    own, spare = now(twin, "cdu.heat_w")
    assert abs(own - heat(flow, supply, supply + rise)) < heat(flow, 0.0, 0.02) + heat(0.001, 0.0, rise)
    assert np.isnan(spare)  # it serves no rack, and its flow of nothing may be a meter that is not there
    # Without a flow of its own, what its racks take.
    twin.tick({"cdu.flow_lpm": 0.0, **racks})
    of_rack = heat(flow_b, supply_b, supply_b + rise_b)
    off = heat(flow_b, 0.0, 0.02) + heat(0.001, 0.0, rise_b)
    assert abs(now(twin, "cdu.heat_w")[0] - 2 * of_rack) < 2 * off


def test_heat_from_racks_needs_all_of_them() -> None:
    twin = Twin(hall("r1", "r2", "air1"))
    full = {"rack.flow_lpm": [80.0, 60.0, np.nan], "rack.supply_temp_c": 30.0, "rack.return_temp_c": 40.0}
    twin.tick(full)
    total = heat(140.0, 30.0, 40.0)  # the rack in air takes none of it
    assert now(twin, "cdu.heat_w") == pytest.approx([total, np.nan], nan_ok=True, rel=1e-4)
    silent = Twin(hall("r1", "r2"))
    silent.tick({"rack.flow_lpm": [80.0, np.nan], "rack.supply_temp_c": 30.0, "rack.return_temp_c": 40.0})
    assert np.isnan(now(silent, "cdu.heat_w")).all()


def test_only_the_racks_that_a_cdu_serves_count() -> None:
    twin = Twin(hall("r1", "r2", served=("r2",)))
    twin.tick({"rack.flow_lpm": [80.0, 60.0], "rack.supply_temp_c": 30.0, "rack.return_temp_c": 40.0})
    assert now(twin, "cdu.heat_w")[0] == pytest.approx(heat(60.0, 30.0, 40.0), rel=1e-4)


def test_the_coolant_is_that_of_the_site() -> None:
    twin = Twin(hall("r1", coolant="water"))
    twin.tick({"cdu.flow_lpm": 600.0, "cdu.supply_temp_c": 35.0, "cdu.return_temp_c": 45.0})
    # Water at 40 degC, IAPWS-IF97: 992.2 kg/m3, 4179 J/kg K
    assert now(twin, "cdu.heat_w")[0] == pytest.approx(0.01 * 992.2 * 4179 * 10, rel=1e-6)


def test_a_site_without_cdus_has_no_heat_of_cdus() -> None:
    twin = Twin({"site": "lab", "halls": [{"name": "h", "racks": [
        {"name": "r1", "profile": "air-8gpu", "nodes": 1, "gpus_per_node": 1}]}]})  # fmt: skip
    twin.tick({"rack.power_w": 5000.0})
    assert now(twin, "cdu.heat_w").shape == (0,)
    assert now(twin, "site.power_w").tolist() == [5000.0]


def test_cdus_of_racks_in_air_take_up_no_heat_that_we_know_of() -> None:
    twin = Twin(hall("air1"))
    twin.tick({"rack.power_w": 5000.0})
    assert np.isnan(now(twin, "cdu.heat_w")).tolist() == [True, True]


def test_power_of_the_site_is_the_sum_of_those_who_ever_reported() -> None:
    twin = Twin(hall("r1", "r2", "r3"))
    twin.tick({"rack.power_w": [100_000.0, np.nan, 50_000.0]})
    assert now(twin, "site.power_w").tolist() == [150_000.0]  # r2 never spoke: it has no meter
    twin.tick({"rack.power_w": [100_000.0, 25_000.0, 50_000.0]})
    assert now(twin, "site.power_w").tolist() == [175_000.0]


def test_a_part_is_not_the_whole() -> None:
    """r2 falls silent: no sum until it is back, though the others speak."""
    twin = Twin(hall("r1", "r2"))
    twin.tick({"rack.power_w": [100_000.0, 90_000.0]})
    stale_s = STALE_PERIODS * TABLES["rack"].by_name["power_w"].period_s
    for _ in range(int(stale_s) // 50 + 1):
        twin.tick({"rack.power_w": [100_000.0, np.nan]}, dt_s=50.0)
    assert np.isnan(now(twin, "site.power_w")).all()
    assert now(twin, "rack.power_w") == pytest.approx([100_000.0, np.nan], nan_ok=True)
    twin.tick({"rack.power_w": [100_000.0, 80_000.0]})
    assert now(twin, "site.power_w").tolist() == [180_000.0]


def test_a_replaced_rack_is_one_that_never_reported() -> None:
    twin = Twin(hall("r1", "r2"))
    twin.tick({"rack.power_w": [100_000.0, 90_000.0]})
    twin.tick(None, ev.EntityReplaced(id="e", table="rack", name="lab/h/r2", serial="2"))
    assert now(twin, "site.power_w").tolist() == [100_000.0]


@pytest.mark.parametrize("key,value", [("rack.power_w", 1000.0), ("site.gpu_running_count", 64.0)])
def test_what_is_stale_is_unknown(key: str, value: float) -> None:
    table, _, name = key.partition(".")
    twin, period_s = Twin(hall("r1")), TABLES[table].by_name[name].period_s
    twin.tick({key: value})
    twin.tick(dt_s=STALE_PERIODS * period_s - 1)
    assert now(twin, key).tolist() == [value]
    twin.tick(dt_s=2.0)
    assert np.isnan(now(twin, key)).all()


def test_what_is_impossible_is_unknown() -> None:
    twin = Twin(hall("r1", "r2"))
    twin.tick({"rack.power_w": [5e6, 7000.0]})  # a megawatt is the bound of a rack
    assert now(twin, "rack.power_w") == pytest.approx([np.nan, 7000.0], nan_ok=True)
    assert good(twin.engine.view(1.0), "rack.power_w").dtype == np.float64


def test_demand_needs_both_counts() -> None:
    twin = Twin(hall("r1"))
    twin.tick({"site.gpu_running_count": 60.0})
    assert np.isnan(now(twin, "site.gpu_demand_count")).all()
    twin.tick({"site.gpu_pending_count": 200.0})
    assert now(twin, "site.gpu_demand_count").tolist() == [260.0]


def test_where_people_work_nothing_is_learned() -> None:
    twin = Twin(hall("r1", "r2"))
    values = {"rack.power_w": [100_000.0, 90_000.0], "cdu.flow_lpm": 600.0, "cdu.supply_temp_c": 30.0,
              "cdu.return_temp_c": 40.0}  # fmt: skip
    window = ev.MaintenanceBegun(id="m", author="ada", table="rack", names=("r2",),
                                 until_ns=START_NS + 100 * NS)  # fmt: skip
    twin.tick(values, window)
    assert now(twin, "rack.power_w") == pytest.approx([100_000.0, np.nan], nan_ok=True)
    # The site's power and the CDU's heat are what they are: nobody works on those.
    assert now(twin, "site.power_w").tolist() == [190_000.0]
    assert np.isfinite(now(twin, "cdu.heat_w")[0])
    cdu = ev.MaintenanceBegun(id="m2", author="ada", table="cdu", names=("cdu1",),
                              until_ns=START_NS + 100 * NS)  # fmt: skip
    twin.tick(values, cdu)
    assert np.isnan(now(twin, "cdu.heat_w")).tolist() == [True, False]
    twin.tick(values, ev.MaintenanceEnded(id="x", author="ada", window="m"))
    assert now(twin, "rack.power_w").tolist() == [100_000.0, 90_000.0]


def test_what_is_measured_may_be_written_into() -> None:
    """A model keeps it: it must be its own, not the state's."""
    twin = Twin(two_racks())
    twin.tick({"rack.power_w": [1000.0, 2000.0]})
    now(twin, "rack.power_w")[:] = 0
    assert now(twin, "rack.power_w").tolist() == [1000.0, 2000.0]
