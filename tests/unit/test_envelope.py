"""Envelopes of controls: catalogue, profile and site, each narrowing the one before. May import `twin`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.support.builders import eight_nodes, profile_tree, site_of, spec_of, two_racks
from twin.catalogue import TABLES, ConfigError
from twin.site import Envelope, Site, build_site

CAP, TARGET = "gpu.power_cap_w", "cdu.supply_temp_target_c"


def row(envelope: Envelope, i: int = 0) -> tuple[float, float, float, float]:
    return tuple(float(x[i]) for x in (envelope.low, envelope.high, envelope.safe, envelope.slew_per_s))  # type: ignore[return-value]


def mixed(**more: Any) -> Site:
    tree = two_racks(**more)
    tree["halls"][0]["racks"] += [
        {"name": "s[01-16]", "profile": "cloudmatrix384"},
        {"name": "bare", "nodes": 1},
    ]
    return site_of(tree)


@pytest.mark.parametrize(
    "limits, expected",
    [
        ({}, (200, 1200, 750, 50)),
        ({"max": 1000.0}, (200, 1000, 750, 50)),
        ({"min": 300.0, "safe": 300.0}, (300, 1200, 300, 50)),
        ({"slew_per_s": 20.0}, (200, 1200, 750, 20)),
        ({"slew_per_s": 0.5}, (200, 1200, 750, 0.5)),
        ({"min": 200.0, "max": 1200.0}, (200, 1200, 750, 50)),
        ({"min": 750.0, "max": 750.0}, (750, 750, 750, 50)),
    ],
)
def test_the_site_narrows_the_profile(limits: dict[str, float], expected: tuple[float, ...]) -> None:
    assert row(site_of(two_racks(controls={CAP: limits})).envelopes[CAP]) == expected


@pytest.mark.parametrize(
    "limits, why",
    [
        ({"max": 1300.0}, ".max: 1300.0 is above the 1200"),
        ({"min": 100.0}, ".min: 100.0 is below the 200"),
        ({"safe": 1300.0}, ".safe: expected a value within"),
        ({"safe": 100.0}, ".safe: expected a value within"),
        ({"min": 900.0, "max": 800.0}, "min is above max"),
        ({"slew_per_s": 0.0}, ".slew_per_s: expected a number > 0"),
        ({"slew_per_s": 60.0}, ".slew_per_s: expected a number > 0, at most 50"),
        ({"max": float("inf")}, ".max: expected a finite number"),
    ],
)
def test_a_site_that_widens_the_profile_is_refused(limits: dict[str, float], why: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(why)):
        site_of(two_racks(controls={CAP: limits}))


def test_each_rack_has_the_envelope_of_its_profile() -> None:
    site = mixed()
    envelope = site.envelopes[CAP]
    assert row(envelope, 0)[:3] == (200, 1200, 750)
    first = site.gpus_of_rack(2).start
    assert row(envelope, first)[:3] == (250, 800, 500)


def test_without_a_safe_value_there_is_no_envelope() -> None:
    tree = eight_nodes()
    tree["halls"][0]["racks"].append({"name": "bare", "nodes": 1, "gpus_per_node": 1})
    envelope = site_of(tree).envelopes[CAP]
    assert np.isfinite(envelope.low[:8]).all()
    assert np.isnan([envelope.low[8], envelope.high[8], envelope.safe[8]]).all()
    with_safe = site_of({**tree, "controls": {CAP: {"safe": 200.0}}}).envelopes[CAP]
    assert row(with_safe, 8) == (0, 3000, 200, 50)


def test_a_cdu_must_suit_every_rack_that_it_serves() -> None:
    assert row(site_of(two_racks()).envelopes[TARGET])[:3] == (25, 45, 32)
    tree = two_racks()
    tree["halls"][0]["racks"].append({"name": "s[01-16]", "profile": "cloudmatrix384"})
    tree["halls"][0]["cdus"] = [
        {"name": "both", "serves": ["r[1-2]", "s[01-16]"]}, {"name": "none"},
    ]  # fmt: skip
    envelope = site_of(tree).envelopes[TARGET]
    assert row(envelope, 0)[:3] == (25, 40, 28)
    assert np.isnan(row(envelope, 1)[:3]).all(), "what serves nothing has no envelope"
    spec = spec_of(tree)
    spec.profiles["cloudmatrix384"]["controls"][TARGET] = {
        k: {"value": v, "source": "estimate"} for k, v in {"min": 10, "max": 20, "safe": 15}.items()
    }
    with pytest.raises(ConfigError, match="leave no value"):
        build_site(spec)


def test_a_disruptive_control_moves_one_in_a_hundred_at_a_time() -> None:
    level = "node.service_level"
    assert site_of(two_racks()).envelopes[level].blast_radius == 1
    assert site_of(two_racks(racks="r[1-50]")).envelopes[level].blast_radius == 9
    assert site_of(two_racks(controls={level: {"blast_radius": 4}})).envelopes[level].blast_radius == 4
    assert site_of(two_racks()).envelopes[CAP].blast_radius == 144


def test_a_profile_may_state_a_slower_slew_and_a_wider_deadband() -> None:
    spec = spec_of(two_racks())
    cap = spec.profiles["gb200-nvl72"]["controls"][CAP]
    cap["slew_per_s"] = cap["deadband"] = {"value": 20, "source": "estimate"}
    envelope = build_site(spec).envelopes[CAP]
    assert row(envelope)[3] == 20
    assert envelope.deadband == 20
    spec.file["controls"] = {CAP: {"slew_per_s": 30.0}}
    with pytest.raises(ConfigError, match=r"slew_per_s: expected a number > 0, at most 20, got 30"):
        build_site(spec)


def test_a_site_may_state_a_slew_where_the_catalogue_has_none() -> None:
    level = "node.service_level"
    assert row(site_of(two_racks()).envelopes[level])[3] == 0
    assert row(site_of(two_racks(controls={level: {"slew_per_s": 1.0}})).envelopes[level])[3] == 1


def test_every_control_has_an_envelope_of_its_tables_size() -> None:
    site = mixed()
    for table, spec in TABLES.items():
        for control in spec.controls:
            envelope = site.envelopes[control.key]
            for column in (envelope.low, envelope.high, envelope.safe, envelope.slew_per_s):
                assert column.shape == (site.sizes[table],)
            known = np.isfinite(envelope.safe)
            assert (envelope.low[known] <= envelope.safe[known]).all()
            assert (envelope.safe[known] <= envelope.high[known]).all()
            assert np.array_equal(known, np.isfinite(envelope.low))


@pytest.mark.parametrize("key", ["gpu.temp_c", "gpu.thermal_margin_k", "rack.flow_lpm", "rack.power_w"])
def test_limits_are_those_of_the_profile(key: str) -> None:
    stated = profile_tree("gb200-nvl72")["limits"][key]
    limit = site_of(two_racks()).limits[key]
    assert (limit.guard == stated["guard"]["value"]).all()
    assert (limit.max == stated["max"]["value"]).all()
    assert np.isnan(limit.slew_per_s).all()


def test_a_limit_of_what_stands_in_no_rack_takes_none_of_the_others_away() -> None:
    spec = spec_of(two_racks())
    spec.profiles["gb200-nvl72"]["limits"]["cdu.supply_temp_c"] = {
        k: {"value": v, "source": "estimate"} for k, v in {"guard": 45, "max": 50}.items()
    }
    limits = build_site(spec).limits
    assert limits.keys() == site_of(two_racks()).limits.keys()
    assert "gpu.temp_c" in limits


def test_racks_without_a_profile_have_no_limits() -> None:
    site = mixed()
    limit = site.limits["rack.flow_lpm"]
    assert np.isfinite(limit.max[:2]).all()
    assert np.isnan(limit.max[-1])
