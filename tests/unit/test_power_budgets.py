"""Limits and loads of places: shares of racks on feeders, dead feeders, loads beside GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.power_capping import PowerCap, PowerGuard, carried_by, dead_feeders, loads_of, pairs_of, sums_w
from policies.power_capping.budgets import other_w
from tests.support.builders import Twin, eight_nodes, site_of, two_racks
from twin.site import Site


def tree(*feeders: dict[str, Any], **more: Any) -> dict[str, Any]:
    out = two_racks(**more)
    out["halls"][0]["feeders"] = list(feeders)
    return out


def looped(tree: dict[str, Any]) -> dict[str, Any]:
    """With its CDU on a loop."""
    hall = tree["halls"][0]
    cdus = [cdu | {"loop": "l1"} for cdu in hall["cdus"]]
    return tree | {"loops": [{"name": "l1"}], "halls": [hall | {"cdus": cdus}]}


ALL = ["r[1-2]"]
NESTED = tree(
    {"name": "a", "side": "A", "budget_w": 3e5, "serves": ["pa1", "pa2"]},
    {"name": "b", "side": "B", "budget_w": 3e5, "serves": ["pb"]},
    {"name": "pa1", "side": "A", "budget_w": 2e5, "serves": ["r1"]},
    {"name": "pa2", "side": "A", "budget_w": 2e5, "serves": ["r2"]},
    {"name": "pb", "side": "B", "budget_w": 3e5, "serves": ALL},
)


def shares(site: Site, failover: bool, *dead: str) -> dict[str, list[float]]:
    """Of each feeder: its share of each rack."""
    lost = np.zeros(site.sizes["feeder"], np.bool_)
    for name in dead:
        lost[site.entity("feeder", f"lab/h/{name}")] = True
    pairs, n_rack = pairs_of(site, lost, failover), site.sizes["rack"]
    out = {}
    for i, name in enumerate(site.names["feeder"]):
        row = np.zeros(n_rack)
        mine = pairs.place == n_rack + i
        row[pairs.rack[mine]] = pairs.share[mine]
        out[name.rpartition("/")[2]] = row.tolist()
    return out


def test_racks_hang_half_on_each_side_and_wholly_on_either_when_the_other_is_lost() -> None:
    site = site_of(NESTED)
    half, whole = [0.5, 0.5], [1.0, 1.0]
    assert shares(site, False) == {"a": half, "b": half, "pa1": [0.5, 0], "pa2": [0, 0.5], "pb": half}
    assert shares(site, True) == {"a": whole, "b": whole, "pa1": [1.0, 0], "pa2": [0, 1.0], "pb": whole}


def test_a_dead_feeder_carries_nothing_and_the_others_more() -> None:
    site = site_of(NESTED)
    assert shares(site, False, "b", "pb") == {
        "a": [1, 1],
        "b": [0, 0],
        "pa1": [1, 0],
        "pa2": [0, 1],
        "pb": [0, 0],
    }
    assert shares(site, False, "pa1")["pb"] == [1.0, 0.5]
    assert not np.array(list(shares(site, True, "a", "b", "pa1", "pa2", "pb").values())).any()


def test_the_side_that_is_left_carries_all_however_many_taps_it_has() -> None:
    """One tap on A beside two on B: A alone carries the whole rack, and each of B's half."""
    site = site_of(
        tree(
            {"name": "a", "side": "A", "serves": ALL},
            {"name": "b1", "side": "B", "serves": ALL},
            {"name": "b2", "side": "B", "serves": ALL},
        )
    )
    assert shares(site, True) == {"a": [1, 1], "b1": [0.5, 0.5], "b2": [0.5, 0.5]}


def test_a_rack_with_one_feed_and_a_common_root() -> None:
    site = site_of(
        tree(
            {"name": "u", "serves": ["a", "b"]},
            {"name": "a", "side": "A", "serves": ALL},
            {"name": "b", "side": "B", "serves": ["r2"]},
        )
    )
    assert shares(site, False) == {"u": [1, 1], "a": [1, 0.5], "b": [0, 0.5]}
    assert shares(site, True) == {"u": [1, 1], "a": [1, 1], "b": [0, 1]}


def seen(twin: Twin, values: dict[str, Any]) -> Any:
    twin.tick(values)
    return twin.engine.view(1.0)


def test_all_below_a_dead_feeder_is_dead_also_once_it_fell_silent() -> None:
    twin = Twin(NESTED)
    view = seen(twin, {"feeder.energised_state": [1, 0, 0, 0, 0], "feeder.power_w": 0.0})
    assert dead_feeders(view).tolist() == [True, False, True, True, False]
    for _ in range(10):
        view = seen(twin, {"gpu.power_w": 300.0})
        twin.now_ns += 60 * 10**9
    assert dead_feeders(view).tolist() == [True, False, True, True, False]
    assert dead_feeders(seen(twin, {"feeder.power_w": 5e4})).tolist() == [False] * 5
    assert dead_feeders(seen(twin, {"feeder.energised_state": 0.0})).tolist() == [False] * 5


def test_limits_of_places() -> None:
    twin = Twin(
        tree({"name": "a", "side": "A", "budget_w": 1e5, "serves": ALL}, {"name": "b", "serves": ALL})
    )
    view = seen(twin, {"cdu.flow_lpm": 0.0})
    carried = carried_by(view, pairs_of(view.site, np.zeros(2, np.bool_), True))
    nominal_w = view.site.design.cdu_heat_w[0]
    assert carried.limit_w[:5].tolist() == [132e3, 132e3, 1e5, np.inf, nominal_w]
    assert np.isinf(carried.limit_w[5:]).all()
    half = view.site.design.cdu_flow_lpm[0] / 2
    view = seen(twin, {"cdu.flow_lpm": half})
    reduced = carried_by(view, carried.pairs)
    assert reduced.limit_w[4] == pytest.approx(nominal_w / 2, rel=1e-3)
    assert [carried.name(view.site, k) for k in (0, 2, 4)] == ["lab/h/r1", "lab/h/a", "lab/h/cdu1"]


def test_loops_the_site_and_feeders_as_they_are_fed_now_are_places() -> None:
    twin = Twin(looped(NESTED))
    view = seen(twin, {"loop.flow_lpm": 1.0})
    site = view.site
    for failover, whole in ((True, [1.0, 1.0]), (False, [0.5, 0.5])):
        pairs = pairs_of(site, np.zeros(5, np.bool_), failover)
        carried = carried_by(view, pairs)
        names = [carried.name(site, k) for k in range(len(carried.limit_w))]
        plain = ["lab/h/r1", "lab/h/r2", *site.names["feeder"], "lab/h/cdu1", "lab/l1", "site"]
        assert names == plain + (site.names["feeder"] if failover else [])
        told = carried.within(1e5, np.array([2e5, np.inf, np.inf, np.inf, 4e5]))
        assert told.limit_w[9] == 1e5
        drawn = told.limit_w[pairs.drawn : pairs.drawn + 5]
        assert drawn.tolist() == (
            [2e5, np.inf, np.inf, np.inf, 4e5] if failover else [2e5, 3e5, 2e5, 2e5, 3e5]
        )
        assert told.limit_w[carried.feeder(4)] == 3e5
        racks_w = np.array([100.0, 10.0])
        sums = sums_w(carried, racks_w)
        capture = site.design.capture_pu @ racks_w
        np.testing.assert_allclose(sums[7:10], [capture, capture, 110.0])
        np.testing.assert_allclose(sums[carried.feeder(0)], whole @ racks_w)
        np.testing.assert_allclose(sums[pairs.drawn], 55.0)


@pytest.mark.parametrize(("flow", "share"), [(0.0, 1.0), (0.5, 0.5), (0.79, 0.79), (0.81, 1.0), (1.2, 1.0)])
@pytest.mark.parametrize("table", ["cdu", "loop"])
def test_what_lost_flow_carries_less_heat(table: str, flow: float, share: float) -> None:
    twin = Twin(looped(two_racks()))
    design = twin.site.design
    nominal_lpm, heat_w = getattr(design, f"{table}_flow_lpm")[0], getattr(design, f"{table}_heat_w")[0]
    view = seen(twin, {f"{table}.flow_lpm": flow * nominal_lpm, "cdu.facility_valve1_pu": 1.0})
    carried = carried_by(view, pairs_of(view.site, np.zeros(2, np.bool_), True))
    assert carried.limit_w[4 + (table == "loop")] == pytest.approx(share * heat_w, rel=1e-3)


@pytest.mark.parametrize(
    ("flow", "supply_c", "share"),
    [(0.4, 32.0, 0.4), (0.5, 25.0, 1.0), (0.7, 40.0, 1.0), (0.5, 45.0, 0.5 * 17.0 / 15.0), (0.5, None, 0.5)],
)
def test_slow_pumps_that_were_asked_for_carry_what_the_return_has_room_for(
    flow: float, supply_c: float | None, share: float
) -> None:
    """Real: `cooling_setpoint` at `act` had power_cap and power_guard cap a healthy hall by a fifth."""
    twin = Twin(two_racks())
    design = twin.site.design
    told = {} if supply_c is None else {"cdu.supply_temp_c": supply_c}
    view = seen(twin, {"cdu.flow_lpm": flow * design.cdu_flow_lpm[0], **told})
    twin.engine.arbiter.leases["cdu.diff_pressure_target_pa"].value[0] = 80e3
    carried = carried_by(view, pairs_of(view.site, np.zeros(2, np.bool_), True))
    assert carried.limit_w[4] == pytest.approx(share * design.cdu_heat_w[0], rel=0.02)


@pytest.mark.parametrize("valve", [{"cdu.facility_valve1_pu": 0.5}, {}])
def test_a_loop_whose_valves_ask_for_little_lost_nothing(valve: dict[str, float]) -> None:
    """Little heat asks for little flow: a budget that fell with it would cut for ever."""
    twin = Twin(looped(two_racks()))
    design = twin.site.design
    view = seen(twin, {"loop.flow_lpm": 0.5 * design.loop_flow_lpm[0], **valve})
    carried = carried_by(view, pairs_of(view.site, np.zeros(2, np.bool_), True))
    assert carried.limit_w[5] == pytest.approx(design.loop_heat_w[0])


def test_what_is_beside_gpus_is_not_underrated_when_they_are_silent_or_the_reading_is_old() -> None:
    """Real: 20 kW beside GPUs of 500 W."""
    rack_w, n = 20e3 + 72 * 500.0, 144
    for silent in (True, False):
        twin = Twin(two_racks())
        for _ in range(2):  # by the second reading it is known how often they come
            view = seen(twin, {"rack.power_w": rack_w, "gpu.power_w": 500.0})
        np.testing.assert_allclose(other_w(view, np.full(n, 500.0), 1.0), 20e3)
        for _ in range(30):  # the GPUs are silent, or have doubled since the rack was read
            view = seen(twin, {} if silent else {"gpu.power_w": 1000.0})
        got = other_w(view, np.full(n, 1200.0 if silent else 1000.0), 1.0)
        design = view.site.design
        least = 18 * (design.cpu_idle_w + design.node_other_w) + design.rack_overhead_w
        most = 18 * (design.cpu_max_w + design.node_other_w) + design.rack_overhead_w
        assert (got >= (20e3 if silent else least)).all()
        assert (got <= np.maximum(most, 20e3)).all()


def test_loads_of_feeders() -> None:
    twin = Twin(two_racks())
    none = np.zeros(2, np.bool_)

    def loads(values: dict[str, Any]) -> Any:
        view = seen(twin, values)
        return loads_of(view, carried_by(view, pairs_of(view.site, none, False)))

    found = loads({})
    assert np.isnan(found.load_w).all()
    assert not found.metered.any()
    # A rack that tells nothing counts with what its GPUs draw, and what is beside them at least
    found = loads({"gpu.power_w": 500.0, "rack.power_w": [60e3, np.nan]})
    design = twin.site.design
    beside_w = 18 * (design.cpu_idle_w + design.node_other_w)[1] + design.rack_overhead_w[1]
    gpus_w = 72 * 500.0 * (1.0 + design.node_loss_pu[1])
    np.testing.assert_allclose(found.load_w, 0.5 * (60e3 + gpus_w + beside_w), rtol=1e-6)
    found = loads({"feeder.power_w": [70e3, 40e3]})
    np.testing.assert_allclose(found.load_w, [70e3, 0.5 * (60e3 + gpus_w + beside_w)], rtol=1e-6)
    assert found.metered.all()
    # a's load is its meter's, of just now; b's is that of racks that were read a second ago
    assert (twin.now_ns - found.read_ns).tolist() == [0, 10**9]


def test_places_carry_shares_of_racks() -> None:
    view = seen(Twin(NESTED), {})
    carried = carried_by(view, pairs_of(view.site, np.zeros(5, np.bool_), False))
    sums = sums_w(carried, np.array([100.0, 10.0]))
    np.testing.assert_allclose(sums[:7], [100, 10, 55, 55, 50, 5, 55])


@pytest.mark.parametrize("flow_lpm", [0.0, 12.0])
def test_a_loop_that_cools_no_rack_bounds_none(flow_lpm: float) -> None:
    """Cooled by air, with a loop that no CDU draws from: its nominal flow is zero, and what it takes."""
    tree = eight_nodes(loops=[{"name": "l1"}])
    tree["halls"][0]["feeders"] = [{"name": "a", "side": "A", "budget_w": 30_000, "serves": ["r1"]}]
    pod = Twin(tree, [PowerGuard(), PowerCap()], act=True)
    pod.run(
        5,
        {"gpu.power_w": 300.0, "rack.power_w": 4_000.0, "feeder.power_w": 4_000.0, "loop.flow_lpm": flow_lpm},
    )
    assert not [f.id for f in pod.decision.findings if f.id.startswith("suspended/")]
