"""The design of a site follows from its profiles: full and idle nodes, flows, exchangers; unknown is NaN."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.builders import PROFILES, profile_tree, site_of, two_racks
from twin.site import APPROACH_K, PRIMARY_FLOW_RATIO, parse_profile
from twin.site.design import counterflow_ua_w_per_k


def one(profile: str, **group: object) -> dict[str, object]:
    count = int(parse_profile(profile_tree(profile), profile).layout.racks.value)
    racks = f"r[01-{count:02d}]"
    return {"site": "d", "halls": [{"name": "h", "racks": [{"name": racks, "profile": profile, **group}],
                                    "cdus": [{"name": "c1", "serves": [racks]}]}]}  # fmt: skip


@pytest.mark.parametrize("name", sorted(p.stem for p in PROFILES.glob("*.yaml")))
def test_a_node_draws_what_its_profile_says_idle_and_full(name: str) -> None:
    profile, d = parse_profile(profile_tree(name), name), site_of(one(name)).design
    gpus, idle, full = profile.gpus_per_node, profile.get("node_idle_w"), profile.get("node_max_w")
    assert idle is not None
    assert full is not None
    at_idle = gpus * d.gpu_idle_w[0] + d.cpu_idle_w[0] + d.node_other_w[0]
    chips = gpus * d.gpu_max_w[0] + d.cpu_max_w[0]
    assert at_idle == pytest.approx(idle, rel=0.1)
    assert chips * (1 + d.node_loss_pu[0]) + d.node_other_w[0] == pytest.approx(full, rel=0.05)
    assert d.rack_max_w[0] <= (profile.get("rack_max_w") or np.inf) * 1.001


def test_the_exchanger_gives_the_approach_it_was_made_for() -> None:
    """Rival: march along the exchanger in small steps and see what leaves it."""
    heat, warm = np.array([1e5]), np.array([7700.0])
    cold = PRIMARY_FLOW_RATIO * warm
    ua = counterflow_ua_w_per_k(heat, APPROACH_K, warm, cold)
    # From the cold end: the warm stream leaves there, the cold stream enters.
    hot, cool, steps, carried = 36.0, 32.0, 20_000, 0.0
    for _ in range(steps):
        q = float(ua[0]) / steps * (hot - cool)
        carried += q
        hot, cool = hot + q / float(warm[0]), cool + q / float(cold[0])
    assert carried == pytest.approx(1e5, rel=1e-3)


def test_equal_streams_have_no_singularity() -> None:
    w = np.array([5000.0])
    assert counterflow_ua_w_per_k(np.array([4e4]), 4.0, w, w)[0] == pytest.approx(1e4)


def test_a_rack_with_half_its_trays_takes_half_the_flow() -> None:
    full, half = (site_of(one("gb200-nvl72", **g)).design for g in ({}, {"nodes": 9}))
    assert half.rack_flow_lpm[0] == pytest.approx(full.rack_flow_lpm[0] / 2)
    assert half.cdu_heat_w[0] < full.cdu_heat_w[0]


def test_air_has_no_coolant_and_no_profile_is_unknown() -> None:
    air = site_of(one("hgx-h100")).design
    assert (air.liquid[0], air.capture_pu[0]) == (False, 0.0)
    assert np.isnan([air.rack_flow_lpm[0], air.cdu_flow_lpm[0], air.cdu_ua_w_per_k[0]]).all()
    bare = site_of(
        {"site": "d", "halls": [{"name": "h", "racks": [{"name": "r1", "nodes": 2, "gpus_per_node": 4}]}]}
    )
    assert np.isnan([bare.design.gpu_max_w[0], bare.design.rack_max_w[0]]).all()


def test_it_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        site_of(two_racks()).design.gpu_max_w[0] = 1.0
