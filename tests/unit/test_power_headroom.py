"""Headroom of places from readings, budgets, targets and forecasts, against sums over the racks of each."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from policies.power_capping import PowerCap, PowerGuard, headroom
from policies.power_capping.headroom import (
    PowerState,
    _pu,
    ahead_of,
    first_to_bind,
    fullest,
    limits_at,
    notes_of,
    place_rows,
    power_state,
)
from tests.support.builders import Twin, two_racks
from twin.catalogue import NS
from twin.contracts import Forecast
from twin.engine.explain import Inquiry, request_of
from twin.physics import COOLANTS, heat_rate_w_per_k
from twin.telemetry import Event, LoadTargetSet

RACKS, GPUS_OF_RACK = 3, 8
# Each place, and its share of each rack as the racks are fed now, and with the other side lost
HALF: dict[str, list[float]] = {
    "lab/h/r1": [1.0, 0.0, 0.0],
    "lab/h/r2": [0.0, 1.0, 0.0],
    "lab/h/r3": [0.0, 0.0, 1.0],
    "lab/h/a": [0.5, 0.5, 0.5],
    "lab/h/a1": [0.5, 0.5, 0.0],
    "lab/h/a2": [0.0, 0.0, 0.5],
    "lab/h/b": [0.5, 0.5, 0.5],
    "lab/h/cdu1": [0.87, 0.87, 0.87],
    "site": [1.0, 1.0, 1.0],
}
PLACES = list(HALF)
FEEDERS = PLACES[3:7]
WHOLE = {
    place: [2.0 * share for share in shares] if place in FEEDERS else shares for place, shares in HALF.items()
}
BUDGETS_W = {"lab/h/a": 90e3, "lab/h/a1": 50e3, "lab/h/b": 80e3}


def small_hall() -> dict[str, Any]:
    """Three racks of two nodes with four GPUs each; a feeds a1 and a2, which feed side A of the racks."""
    tree = two_racks(racks="r[1-3]")
    tree["halls"][0]["racks"][0]["nodes"] = 2
    tree["halls"][0]["feeders"] = [
        {"name": "a", "side": "A", "budget_w": 90e3, "serves": ["a[1-2]"]},
        {"name": "a1", "side": "A", "budget_w": 50e3, "serves": ["r[1-2]"]},
        {"name": "a2", "side": "A", "serves": ["r3"]},
        {"name": "b", "side": "B", "budget_w": 80e3, "serves": ["r[1-3]"]},
    ]
    return tree


def small_twin(values: dict[str, Any], *events: Event) -> Twin:
    twin = Twin(small_hall(), [PowerGuard(high_priority=5), PowerCap(high_priority=5)])
    twin.tick(values, *events)
    return twin


def state_of(twin: Twin, failover: bool = True, role: str = "leader") -> PowerState:
    policy = next(p for p in twin.engine.policies if p.name == "power_cap")
    return power_state(twin.engine.view(), request_of(twin.engine, policy, Inquiry(role=role)), failover, 5)


def summed(shares: dict[str, list[float]], place: str, of_rack: Any) -> float:
    return float(np.dot(shares[place], of_rack))


def band(key: str, horizon_s: float, high: Any) -> Forecast:
    hi = np.atleast_1d(np.asarray(high, np.float32))
    return Forecast(key, horizon_s, hi * 0.9, hi * 0.8, hi, model="test", basis="")


def with_bands(twin: Twin, *bands: Forecast) -> Twin:
    for one in bands:
        twin.engine.forecasts[one.signal, one.horizon_s] = one
    return twin


def expected_look(place: str, now_w: float, lost_w: float, target_w: float, failover: bool) -> dict[str, Any]:
    """A budget holds with the other side lost, a target against what flows; what leaves less counts."""
    feeder = place in FEEDERS
    budget_w = BUDGETS_W.get(place, np.inf)
    budget_w = {"lab/h/r": 25_334.0, "lab/h/c": 66_121.74}.get(place[:7], budget_w)
    stands_in = feeder and failover
    cases = [(budget_w - (lost_w if stands_in else now_w), budget_w), (target_w - now_w, target_w)]
    known = [case for case in cases if np.isfinite(case[0])]
    left_w, limit_w = min(known, default=(np.nan, np.nan))

    def told(watts: float) -> Any:
        return pytest.approx(watts, abs=0.06) if np.isfinite(watts) else None

    return {
        "limit_w": told(budget_w),
        "target_w": told(target_w),
        "load_w": told(now_w),
        "lost_w": told(lost_w) if stands_in else None,
        "left_w": told(left_w),
        "use_pu": pytest.approx(1.0 - left_w / limit_w, abs=6e-5) if known else None,
    }


@pytest.mark.parametrize("failover", [True, False])
def test_rows_are_the_sums_of_racks_against_budgets_and_targets(failover: bool) -> None:
    """Rack 1 is metered, rack 2 tells by its GPUs alone, the feeders a1 and b by their meters."""
    nan = np.nan
    target = LoadTargetSet(id="t", author="grid", target="dr", limit_w=33e3, feeders=("lab/h/a2", "lab/h/b"),
                           kind="flex", end_ns=2**62)  # fmt: skip
    everywhere = LoadTargetSet(id="s", author="grid", target="all", limit_w=58e3, kind="flex", end_ns=2**62)
    twin = small_twin(
        {"gpu.power_w": 1000.0, "rack.power_w": [21e3, nan, 17e3], "feeder.power_w": [nan, 45e3, nan, nan]},
        target,
        everywhere,
    )
    gpus_w = GPUS_OF_RACK * 1000.0 * (1.0 + twin.site.design.node_loss_pu[1])
    beside_w = 2 * 200.0 + 12e3  # idle CPUs and the rest of two nodes, and of their rack
    known_w = np.array([21e3, gpus_w, 17e3])
    likely_w = known_w + np.array([0.0, beside_w, 0.0])
    twin.engine.arbiter.leases["gpu.power_cap_w"].value[[0, 1, 9]] = 700.0
    state = state_of(twin, failover)
    assert limits_at(state, twin.now_ns).target[-1] == "all"
    rows = place_rows(state, list(range(len(PLACES))))
    assert [row["place"] for row in rows] == PLACES
    for row in rows:
        place = row["place"]
        now_w = summed(HALF, place, likely_w if place in FEEDERS else known_w)
        now_w = 45e3 if place == "lab/h/a1" else now_w
        lost_w = max(now_w, summed(WHOLE, place, known_w))
        target_w = {"lab/h/a2": 33e3, "lab/h/b": 33e3, "site": 58e3}.get(place, np.inf)
        look = expected_look(place, now_w, lost_w, target_w, failover)
        assert {key: row[key] for key in look} == look, place
        assert row["target"] == {33e3: "dr", 58e3: "all"}.get(target_w, "")
        assert row["kind"] == state.loads.kind[PLACES.index(place)]
        assert (row["dead"], row["ahead"], row["unheard_racks"]) == (False, [], 0)
        assert (row["peak_w"], row["peak_lost_w"], row["peak_s"]) == (None, None, None)
        assert row["metered"] == (place == "lab/h/a1")
        capped = np.dot(np.array(HALF[place]) > 0, [2, 1, 0])
        assert row["capped_gpus"] == capped
    chosen = place_rows(state, [4, 8])
    assert [row["place"] for row in chosen] == ["lab/h/a1", "site"]


def test_what_is_unheard_or_dead_says_so() -> None:
    nan = np.nan
    twin = small_twin({"rack.power_w": [20e3, nan, nan], "feeder.energised_state": [0.0, 0.0, 1.0, 0.0]})
    state = state_of(twin)
    rows = {row["place"]: row for row in place_rows(state, list(range(len(PLACES))))}
    assert {place for place, row in rows.items() if row["dead"]} == {"lab/h/a2"}
    assert {place: row["unheard_racks"] for place, row in rows.items() if place in ("site", "lab/h/b")} == {
        "site": 2,
        "lab/h/b": 2,
    }
    for place in ("lab/h/r2", "lab/h/r3"):
        assert (rows[place]["load_w"], rows[place]["left_w"], rows[place]["use_pu"]) == (None, None, None)
    notes = notes_of(state, list(rows.values()))
    assert "2 of 3 racks have never reported: the load above them is higher" in notes
    assert "not guarded, as the site file gives no `budget_w`: lab/h/a2" in notes
    assert any(note.startswith("24 of 24 GPUs have never reported") for note in notes)
    assert not any("standby" in note for note in notes)
    assert "this daemon is a standby; the leader decides" in notes_of(state_of(twin, role="standby"), [])


@pytest.mark.parametrize("failover", [True, False])
def test_forecasts_are_summed_by_racks_and_replaced_by_what_feeders_and_the_site_have_of_their_own(
    failover: bool,
) -> None:
    """At 300 s racks alone, at 600 s feeders and the site alone, at 900 s all, with a gap in each."""
    nan = np.nan
    racks_w = np.array([18e3, 22e3, 26e3])
    gap_w = np.array([18e3, nan, 26e3])
    twin = with_bands(
        small_twin({"gpu.power_w": 100.0, "rack.power_w": 5e3}),
        band("rack.power_w", 300.0, racks_w),
        band("feeder.power_w", 600.0, [nan, 40e3, 14e3, nan]),
        band("site.power_w", 600.0, 70e3),
        band("rack.power_w", 900.0, gap_w),
        band("feeder.power_w", 900.0, [nan, 41e3, nan, 44e3]),
        band("site.power_w", 900.0, nan),
        band("gpu.power_w", 1200.0, np.full(RACKS * GPUS_OF_RACK, 1.0)),
    )
    own_w = {
        300.0: {},
        600.0: {"lab/h/a1": 40e3, "lab/h/a2": 14e3, "site": 70e3},
        900.0: {"lab/h/a1": 41e3, "lab/h/b": 44e3},
    }
    of_racks_w = {300.0: racks_w, 600.0: np.full(RACKS, nan), 900.0: gap_w}
    basis = {300.0: "racks", 600.0: "feeders", 900.0: "racks and feeders"}
    state = state_of(twin, failover)
    assert [(a.horizon_s, a.basis) for a in ahead_of(state)] == list(basis.items())
    rows = place_rows(state, list(range(len(PLACES))))
    for row in rows:
        place, left = row["place"], {a["horizon_s"]: a for a in row["ahead"]}
        for horizon_s, of_rack_w in of_racks_w.items():
            named = np.array(HALF[place]) > 0
            sum_w = float(np.dot(np.array(HALF[place])[named], of_rack_w[named]))
            upper_w = own_w[horizon_s].get(place, sum_w)
            if not np.isfinite(upper_w):
                assert horizon_s not in left, (place, horizon_s)
                continue
            lost_w = float(np.dot(np.array(WHOLE[place])[named], of_rack_w[named]))
            lost_w = upper_w if place == "site" else float(np.fmax(lost_w, upper_w))
            step = left[horizon_s]
            look = expected_look(place, upper_w, lost_w, np.inf, failover)
            assert {key: step[key] for key in look} == look, (place, horizon_s)
            assert step["from"] == basis[horizon_s]
            assert step["bound"] == (named.sum() > 1 and place not in own_w[horizon_s]), (place, horizon_s)
            limited = place in BUDGETS_W
            assert step["limit_from"] == row["limit_from"]
            assert (step["limit_from"] == "site file, budget_w") == limited


def test_no_more_horizons_are_told_than_so_many() -> None:
    many = [band("rack.power_w", 60.0 * k, np.full(RACKS, 20e3)) for k in range(9, 0, -1)]
    state = state_of(with_bands(small_twin({"rack.power_w": 5e3}), *many))
    assert [a.horizon_s for a in ahead_of(state)] == [60.0 * k for k in range(1, 7)]


def test_an_empty_band_is_no_forecast() -> None:
    twin = with_bands(
        small_twin({"rack.power_w": 5e3}),
        band("rack.power_w", 300.0, np.full(RACKS, np.inf)),
        band("rack.power_w", 600.0, np.full(RACKS, 20e3)),
    )
    assert [a.horizon_s for a in ahead_of(state_of(twin))] == [600.0]


def test_the_fullest_racks_and_all_other_places_are_shown() -> None:
    """Rack 3 is the fullest by its forecast, rack 1 by now."""
    twin = with_bands(
        small_twin({"rack.power_w": [15e3, 5e3, 10e3]}), band("rack.power_w", 300.0, [4e3, 8e3, 20e3])
    )
    state = state_of(twin)
    assert fullest(state, 0) == [3, 4, 5, 6, 7, 8]
    assert fullest(state, 1) == [2, 3, 4, 5, 6, 7, 8]
    assert fullest(state, 2) == [0, 2, 3, 4, 5, 6, 7, 8]
    assert fullest(state, 9) == list(range(9))
    assert fullest(state_of(small_twin({"rack.power_w": [15e3, 5e3, 10e3]})), 1)[0] == 0
    silent = state_of(small_twin({"rack.power_w": [0.0, np.nan, 1.0]}))
    assert fullest(silent, 1)[0] == 2
    assert fullest(silent, 2)[:2] == [1, 2], "an unknown load is not an empty rack"


@pytest.mark.parametrize(
    ("racks_w", "limits_w", "expected"),
    [
        ((20e3, 10e3, 5e3), (25e3, 0.0, 25e3), [1, 0]),
        ((20e3, 10e3, 5e3), (np.inf, 25e3, 25e3), [1, 2]),
        ((20e3, 10e3, 5e3), (np.nan, 25e3, 25e3), [1, 2]),
        ((0.0, 0.0, 5e3), (25e3, 0.0, np.inf), [1, 2]),
    ],
)
def test_a_limit_of_nothing_is_full_and_an_unknown_one_is_neither_full_nor_empty(
    racks_w: tuple[float, ...], limits_w: tuple[float, ...], expected: list[int]
) -> None:
    state = state_of(small_twin({"rack.power_w": racks_w}))
    limit_w = np.array([*limits_w, *state.now.limit_w[RACKS:]])
    state = replace(state, now=state.now._replace(limit_w=limit_w))
    for most in (1, 2):
        assert fullest(state, most)[:most] == sorted(expected[:most])


def test_answers_on_many_places_are_bounded_and_keep_the_fullest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headroom, "MOST_ROWS", 2)
    state = state_of(small_twin({"rack.power_w": [15e3, 5e3, 10e3]}))
    assert [PLACES[at] for at in fullest(state, 0)] == ["lab/h/a1", "lab/h/cdu1"]


def test_a_cdu_that_meters_its_heat_knows_better() -> None:
    """60 litres a minute that get warmer by 10 K; a flow of nothing is its meter's."""
    water = {"rack.power_w": 5e3, "cdu.supply_temp_c": 30.0, "cdu.return_temp_c": 40.0}
    own_w = 10.0 * float(heat_rate_w_per_k(COOLANTS["pg25"], np.array([60.0]), np.array([35.0]))[0])
    assert own_w == pytest.approx(40e3, rel=0.1)
    for flow_lpm, expected_w in ((60.0, own_w), (0.0, 0.87 * 15e3)):
        state = state_of(small_twin(water | {"cdu.flow_lpm": flow_lpm}))
        (cdu,) = place_rows(state, [PLACES.index("lab/h/cdu1")])
        assert cdu["load_w"] == pytest.approx(expected_w, rel=1e-4)
        assert cdu["left_w"] == pytest.approx(66_121.74 - expected_w, rel=1e-3)


def test_recent_peaks_are_those_of_the_account() -> None:
    """A feeder also has a peak with the other side lost."""
    state = state_of(small_twin({"rack.power_w": 5e3}))
    now_w = np.arange(9.0)
    peaks = SimpleNamespace(now_w=now_w, lost_w=10.0 + now_w, span_s=3600.0)
    account = SimpleNamespace(peaks=lambda site: peaks)
    told = replace(state, request=replace(state.request, account=account))
    for at, one in enumerate(place_rows(told, list(range(9)))):
        lost_w = 10.0 + at if one["kind"] == "feeder" else None
        assert (one["peak_w"], one["peak_lost_w"], one["peak_s"]) == (at, lost_w, 3600.0)
    notes = notes_of(told, place_rows(told, [0]))
    assert f"{headroom.NO_FORECAST}; the recent peaks stand in for it" in notes
    assert headroom.NO_FORECAST in notes_of(state, place_rows(state, [0]))


@pytest.mark.parametrize(
    ("load_w", "limit_w", "use_pu"),
    [(1.0, 0.5, 2.0), (50.0, 200.0, 0.25), (1.0, 3.0, 0.3333), (500.0, 1.0, headroom.MOST_USE_PU),
     (1.0, 0.0, headroom.MOST_USE_PU), (0.0, 0.0, None), (0.0, 5.0, 0.0), (np.nan, 5.0, None),
     (5.0, np.inf, None)],
)  # fmt: skip
def test_use_is_load_over_limit(load_w: float, limit_w: float, use_pu: float | None) -> None:
    """A limit of 0 is passed by any load; ten times a limit is enough to tell."""
    assert _pu(load_w, limit_w) == use_pu


def row(place: str, use_pu: float | None, left_w: float | None = 1.0, **more: Any) -> dict[str, Any]:
    given = {"place": place, "kind": "feeder", "dead": False, "use_pu": use_pu, "left_w": left_w,
             "limit_w": 100.0, "limit_from": "file", "target_w": None, "target": "", "load_w": 40.0,
             "lost_w": None, "ahead": []}  # fmt: skip
    return given | more


def step(horizon_s: float, use_pu: float | None, **more: Any) -> dict[str, Any]:
    return row("", use_pu) | {"horizon_s": horizon_s, "bound": False} | more


@pytest.mark.parametrize(
    ("rows", "place", "in_s", "over"),
    [
        ([row("a", 0.5), row("b", 0.7), row("c", 0.6)], "b", 0.0, False),
        ([row("a", 0.7), row("b", 0.7)], "a", 0.0, False),
        ([row("a", 1.2), row("b", 1.5), row("c", 1.1)], "b", 0.0, True),
        ([row("a", 0.9), row("b", 1.0), row("c", 0.95)], "b", 0.0, True),
        # Who is over first counts, then by how much; nobody over: the fullest, whenever that is
        (
            [row("a", 0.9, ahead=[step(900.0, 1.9)]), row("b", 0.3, ahead=[step(300.0, 1.1)])],
            "b",
            300.0,
            True,
        ),
        ([row("a", 0.9), row("b", 0.3, ahead=[step(300.0, 0.95)])], "b", 300.0, False),
        ([row("a", 5.0, dead=True), row("b", 0.1)], "b", 0.0, False),
        ([row("a", None), row("b", 0.1)], "b", 0.0, False),
        ([row("a", None, ahead=[step(300.0, None), step(900.0, 0.2)])], "a", 900.0, False),
    ],
)
def test_the_first_place_to_bind(rows: list[dict[str, Any]], place: str, in_s: float, over: bool) -> None:
    found = first_to_bind(rows)
    assert found is not None
    assert (found["place"], found["in_s"], found["over"], found["lost"]) == (place, in_s, over, False)
    assert (found["kind"], found["limit_w"], found["limit_from"], found["target"]) == (
        "feeder",
        100.0,
        "file",
        "",
    )
    used = [one["use_pu"] for r in rows for one in (r, *r["ahead"]) if not r["dead"]]
    assert found["use_pu"] in used


def test_what_binds_is_the_budget_with_a_side_lost_or_a_target_as_it_is_fed() -> None:
    assert first_to_bind([]) is None
    assert first_to_bind([row("a", None), row("b", 2.0, dead=True)]) is None
    lost = first_to_bind([row("a", 0.8, 20.0, lost_w=80.0)])
    assert lost is not None
    assert (lost["lost"], lost["bound"], lost["left_w"], lost["limit_w"]) == (True, False, 20.0, 100.0)
    told = first_to_bind([row("a", 0.8, 10.0, lost_w=80.0, target_w=50.0, target="dr")])
    assert told is not None
    assert (told["lost"], told["bound"], told["limit_w"], told["target"]) == (False, False, 50.0, "dr")
    by_budget = first_to_bind([row("a", 0.8, 9.0, lost_w=91.0, target_w=50.0, target="dr")])
    assert by_budget is not None
    assert (by_budget["lost"], by_budget["limit_w"], by_budget["target"]) == (True, 100.0, "")
    # Sums with the other side lost are bounds once they are forecasts, and others where they say so
    later = first_to_bind([row("a", 0.1, ahead=[step(300.0, 0.9, lost_w=80.0)])])
    assert later is not None
    assert later["bound"] is True
    for bound in (True, False):
        alone = first_to_bind([row("a", 0.1, ahead=[step(300.0, 0.9, bound=bound)])])
        assert alone is not None
        assert alone["bound"] is bound


def test_policies_that_cannot_act_are_named() -> None:
    state = state_of(small_twin({"rack.power_w": 5e3}))
    rows = place_rows(state, list(range(len(PLACES))))
    silent = "no power policy may act: they only advise, and the preview shows their commands"
    assert silent in notes_of(state, rows)
    guard, cap = state.request.policies
    acts = replace(state, request=replace(state.request, policies=(guard, replace(cap, authority="act"))))
    assert silent not in notes_of(acts, rows)
    failed = replace(state, request=replace(state.request, policies=(replace(guard, suspended=True), cap)))
    assert "power_guard failed and is suspended: racktwin alarm list says why" in notes_of(failed, rows)
    none = replace(state, request=replace(state.request, policies=()))
    assert notes_of(none, rows)[0] == headroom.ADD_IT
    assert headroom.NO_LIMITS not in notes_of(none, rows)
    unlimited = [r | {"limit_w": None} for r in rows]
    assert headroom.NO_LIMITS in notes_of(none, unlimited)
    assert headroom.NO_LIMITS not in notes_of(none, [unlimited[0] | {"target_w": 1.0}, *unlimited])


def test_a_limit_holds_until_its_target_ends() -> None:
    def target(name: str, limit_w: float, end_s: float, *feeders: str) -> LoadTargetSet:
        end_ns = 1_700_000_001 * NS + round(end_s * NS)
        return LoadTargetSet(id=name, author="grid", target=name, limit_w=limit_w, feeders=feeders,
                             kind="flex", end_ns=end_ns)  # fmt: skip

    twin = small_twin(
        {"rack.power_w": 5e3},
        target("wide", 60e3, 900.0, "lab/h/a", "lab/h/b"),
        target("deep", 40e3, 300.0, "lab/h/a"),
        target("site", 50e3, 300.0),
    )
    state = state_of(twin)
    for after_s, named, target_w in (
        (0.0, {"lab/h/a": "deep", "lab/h/b": "wide", "site": "site"}, 40e3),
        (600.0, {"lab/h/a": "wide", "lab/h/b": "wide"}, 60e3),
        (1000.0, {}, np.inf),
    ):
        limits = limits_at(state, twin.now_ns + round(after_s * NS))
        assert {place: name for place, name in zip(PLACES, limits.target, strict=True) if name} == named
        assert limits.target_w[3] == target_w
        assert limits.budget_w[3:7].tolist() == [90e3, 50e3, np.inf, 80e3]
