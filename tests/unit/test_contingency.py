"""Caps that either feed can carry alone, by hand and drawn. May import `twin` and hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.builders import site_of, spec_of, two_racks
from tests.unit.test_safety import NVL72_W
from twin.site import Profile, Site, contingency_caps, parse_profile
from twin.site.safety import lapse_power_w

GPUS, LOW_W, HIGH_W, SAFE_W = 72, 200.0, 1200.0, 750.0
OTHER_W = NVL72_W - GPUS * SAFE_W


def profiles_of(tree: dict[str, Any]) -> dict[str, Profile]:
    return {n: parse_profile(t, n) for n, t in spec_of(tree).profiles.items()}


def tree(a: float | None, b: float | None, racks: str = "r[1-2]") -> dict[str, Any]:
    out = two_racks(racks=racks)
    for feeder, budget_w in zip(out["halls"][0]["feeders"], (a, b), strict=True):
        feeder["budget_w"] = budget_w
    return out


def caps(of: dict[str, Any]) -> tuple[np.ndarray, tuple[str, ...]]:
    found = contingency_caps(site_of(of), profiles_of(of))
    return found.caps_w, found.infeasible


def test_two_equal_racks_share_what_the_smaller_side_carries() -> None:
    room_w = 2 * (OTHER_W + GPUS * 600.0)
    found, infeasible = caps(tree(room_w, room_w + 1e5))
    assert infeasible == ()
    assert found.tolist() == [600.0] * 144


def test_where_no_budget_binds_nothing_is_capped() -> None:
    enough = 2 * (OTHER_W + GPUS * HIGH_W) + 1
    assert np.isnan(caps(tree(enough, None))[0]).all()
    assert np.isnan(caps(tree(None, None))[0]).all()


def test_a_budget_below_the_lowest_caps_is_told() -> None:
    found, infeasible = caps(tree(2 * (OTHER_W + GPUS * LOW_W) - 1, 1e6))
    assert found.tolist() == [LOW_W] * 144
    (why,) = infeasible
    assert why.startswith("lab/h/a: 120.0 kW at the lowest caps with the other feed lost")


def test_a_smaller_budget_below_leaves_more_to_the_others() -> None:
    """Rack 1 hangs on a tap that carries 400 W a GPU; what it leaves under the parent goes to rack 2."""
    out = two_racks()
    out["halls"][0]["feeders"] = [
        {"name": "main", "budget_w": 2 * OTHER_W + GPUS * (400.0 + 900.0), "serves": ["x", "y"]},
        {"name": "x", "budget_w": OTHER_W + GPUS * 400.0, "serves": ["r1"]},
        {"name": "y", "serves": ["r2"]},
    ]
    found, infeasible = caps(out)
    assert infeasible == ()
    assert found[:GPUS].tolist() == [400.0] * GPUS
    assert found[GPUS:].tolist() == [900.0] * GPUS


def test_a_rack_without_a_profile_has_no_caps_and_is_told() -> None:
    out = tree(2 * (OTHER_W + GPUS * 600.0), None)
    out["halls"][0]["racks"].append({"name": "bare", "nodes": 1, "gpus_per_node": 1})
    out["halls"][0]["feeders"][0]["serves"].append("bare")
    found, infeasible = caps(out)
    assert found[:144].tolist() == [600.0] * 144
    assert np.isnan(found[144])
    assert "the load of lab/h/bare is unknown" in infeasible[0]


def test_an_external_budget_counts_by_its_guaranteed_share_and_a_given_one_as_given() -> None:
    out = tree(1e6, 1e6)
    guaranteed = 2 * (OTHER_W + GPUS * 500.0)
    out["halls"][0]["feeders"][0] |= {"external": True, "guaranteed_w": guaranteed}
    site, profiles = site_of(out), profiles_of(out)
    assert contingency_caps(site, profiles).caps_w.tolist() == [500.0] * 144
    given_w = np.array([np.nan, guaranteed + 2 * GPUS * 100.0])
    assert contingency_caps(site, profiles, given_w).caps_w.tolist() == [600.0] * 144


def test_a_site_without_gpus() -> None:
    out = {"site": "s", "halls": [{"name": "h", "feeders": [{"name": "a", "budget_w": 5.0}]}]}
    found = contingency_caps(site_of(out), {})
    assert (len(found.caps_w), found.infeasible) == (0, ())


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Racks on a few taps below two sides, with budgets around what they need."""
    racks = [f"r{i}" for i in range(draw(st.integers(1, 5)))]
    whole = len(racks) * (OTHER_W + GPUS * HIGH_W)
    feeders: list[dict[str, Any]] = []
    for side in ("A", "B"):
        taps = draw(st.integers(1, 3))
        place = [draw(st.integers(0, taps - 1)) for _ in racks]
        used = sorted(set(place))
        for tap in used:
            mine = [r for r, p in zip(racks, place, strict=True) if p == tap]
            entry: dict[str, Any] = {"name": f"{side}{tap}", "serves": mine}
            if draw(st.booleans()):
                entry["budget_w"] = draw(st.floats(0.2, 1.1)) * whole * len(mine) / len(racks)
            feeders.append(entry)
        main = {"name": side, "side": side, "serves": [f"{side}{t}" for t in used]}
        feeders.append(main | {"budget_w": draw(st.floats(0.2, 1.1)) * whole})
    return {"site": "s", "halls": [{"name": "h", "racks": [
        {"name": r, "profile": "gb200-nvl72"} for r in racks], "feeders": feeders}]}  # fmt: skip


def power_w(site: Site, profiles: dict[str, Profile], caps_w: np.ndarray) -> np.ndarray:
    other = lapse_power_w(site, profiles) - site.sum_by_rack("gpu", site.envelopes["gpu.power_cap_w"].safe)
    return other + site.sum_by_rack("gpu", np.where(np.isnan(caps_w), HIGH_W, caps_w))


@settings(max_examples=60, deadline=None)
@given(trees())
def test_every_budget_is_kept_or_named_and_nothing_is_given_away(out: dict[str, Any]) -> None:
    site, profiles = site_of(out), profiles_of(out)
    found = contingency_caps(site, profiles)
    rack_w = power_w(site, profiles, found.caps_w)
    capped = np.isfinite(found.caps_w)
    assert ((found.caps_w[capped] >= LOW_W) & (found.caps_w[capped] <= HIGH_W)).all()
    named = {text.partition(":")[0] for text in found.infeasible}
    tight = np.zeros(site.sizes["rack"], np.bool_)
    for feeder in np.flatnonzero(np.isfinite(site.budget_w)).tolist():
        racks = site.racks_below(feeder)
        left = site.budget_w[feeder] - rack_w[racks].sum()
        if site.name("feeder", feeder) in named:
            assert left < 0
            assert (found.caps_w[site.rack_of_gpu == racks[0]] == LOW_W).all()
        else:
            assert left >= -1e-6
        # A cap that is there is there for a budget: less than a watt for each GPU is left of it.
        if left < GPUS * len(racks):
            tight[racks] = True
    for rack in range(site.sizes["rack"]):
        mine = found.caps_w[site.rack_of_gpu == rack]
        assert len(set(mine[np.isfinite(mine)].tolist())) <= 1, "GPUs of a rack share evenly"
        if np.isfinite(mine).any():
            assert tight[rack]


@pytest.mark.parametrize("racks", [1, 3])
def test_more_budget_never_lowers_a_cap(racks: int) -> None:
    names = f"r[1-{racks}]"
    before = np.full(72 * racks, 0.0)
    for budget_w in np.linspace(5e4, 4e5, 15):
        found = np.nan_to_num(caps(tree(float(budget_w), 1e9, names))[0], nan=HIGH_W)
        assert (found >= before).all()
        before = found
