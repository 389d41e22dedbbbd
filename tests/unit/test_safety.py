"""The case of all leases lapsed, against sums by hand. May import `twin`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import eight_nodes, site_of, spec_of, two_racks
from twin.site import Profile, build_site, lapse_faults, parse_profile
from twin.site.safety import lapse_power_w

# NVL72, by hand: 72 GPUs at 750 W; 18 nodes of 6667 W less four GPUs of 1200 W; 12 kW of switches and losses
NVL72_W = 72 * 750 + 18 * (6667 - 4 * 1200) + 12_000


def profiles_of(tree: dict[str, Any]) -> dict[str, Profile]:
    return {n: parse_profile(t, n) for n, t in spec_of(tree).profiles.items()}


def faults(tree: dict[str, Any]) -> list[str]:
    return lapse_faults(site_of(tree), profiles_of(tree))


def power(tree: dict[str, Any]) -> list[float]:
    return lapse_power_w(site_of(tree), profiles_of(tree)).tolist()


def test_a_rack_of_nvl72_by_hand() -> None:
    assert NVL72_W == 99_606
    assert power(two_racks()) == [NVL72_W, NVL72_W]
    assert power(two_racks(controls={"gpu.power_cap_w": {"safe": 500.0}})) == [NVL72_W - 72 * 250] * 2


def test_eight_nodes_of_one_gpu_by_hand() -> None:
    # 8 x (one GPU at 200 W, and what a node draws beside its eight: 4800 - 8 x 350), 200 W of overhead
    assert power(eight_nodes()) == [8 * (200 + 4800 - 8 * 350) + 200]


def test_racks_of_switches_draw_what_the_profile_says() -> None:
    tree = {
        "site": "cm",
        "halls": [{"name": "h", "racks": [{"name": "r[01-16]", "profile": "cloudmatrix384"}]}],
    }
    assert power(tree) == [4 * (8 * 500 + 10_000 - 8 * 800) + 1000] * 12 + [16_750] * 4


@pytest.mark.parametrize(
    "budget_a, budget_b, expected",
    [
        (2 * NVL72_W, 2 * NVL72_W, []),
        (2 * NVL72_W - 1, 2 * NVL72_W, ["lab/h/a: 199.2 kW"]),
        (100_000, 150_000, ["lab/h/a: 199.2 kW", "lab/h/b: 199.2 kW"]),
        (None, 2 * NVL72_W, []),
    ],
)
def test_either_side_carries_all_alone(budget_a: float | None, budget_b: float, expected: list[str]) -> None:
    tree = two_racks()
    for feeder, budget_w in zip(tree["halls"][0]["feeders"], (budget_a, budget_b), strict=True):
        feeder["budget_w"] = budget_w
    found = faults(tree)
    assert [f.split(" after")[0] for f in found] == expected


def test_an_external_budget_counts_by_its_guaranteed_share() -> None:
    tree = two_racks()
    tree["halls"][0]["feeders"][0] |= {"external": True, "guaranteed_w": 150_000}
    (found,) = faults(tree)
    assert "lab/h/a: 199.2 kW" in found
    assert "budget 150.0 kW" in found


def test_a_parent_carries_what_its_children_reach_once() -> None:
    tree = two_racks()
    tree["halls"][0]["feeders"] = [
        {"name": "main", "budget_w": 2.0 * NVL72_W, "serves": ["x", "y"]},
        {"name": "x", "budget_w": 1.0 * NVL72_W, "serves": ["r1"]},
        {"name": "y", "budget_w": 2.0 * NVL72_W, "serves": ["r1", "r2"]},
    ]
    assert faults(tree) == []
    tree["halls"][0]["feeders"][1]["budget_w"] -= 1
    assert len(faults(tree)) == 1


@pytest.mark.parametrize("missing", ["node_max_w", "rack_overhead_w", "gpu_max_w", "cpu_max_w"])
def test_what_a_profile_does_not_state_is_unknown_not_zero(missing: str) -> None:
    spec = spec_of(two_racks())
    profiles = profiles_of(two_racks())
    site = build_site(spec)
    stated = profiles["gb200-nvl72"].power
    del stated[missing]
    rack_w = lapse_power_w(site, profiles)
    if missing == "cpu_max_w":  # contained in what is left of the node
        assert rack_w.tolist() == [NVL72_W, NVL72_W]
    else:
        assert np.isnan(rack_w).all()
        assert len(lapse_faults(site, profiles)) == 2


def test_a_rack_without_a_profile_cannot_be_vouched_for() -> None:
    tree = two_racks()
    tree["halls"][0]["racks"].append({"name": "bare", "nodes": 1, "gpus_per_node": 1})
    assert faults(tree) == [], "nobody feeds it"
    tree["halls"][0]["feeders"][0]["serves"].append("bare")
    (found,) = faults(tree)
    assert "the load of lab/h/bare after a lapse is unknown" in found
