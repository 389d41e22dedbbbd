"""Evidence masks: comparisons that a known fault disturbs carry no evidence. May import `twin`."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.builders import START_NS, site_of, two_racks
from twin.catalogue import NS
from twin.diagnosis import Topology
from twin.diagnosis.cause import Cause
from twin.diagnosis.evidence_masks import DownstreamMask
from twin.diagnosis.signature import SPLIT


def test_a_leak_stirs_what_it_empties() -> None:
    places = Topology(site_of(two_racks()))
    mask = DownstreamMask(places)
    mask.update([Cause("leak", "cdu", 0)], [], NS)
    for relation, n in (("gpu.temp_c", 144), ("rack.heat", 2), ("cdu.flow_lpm/pump", 1)):
        rows = mask.covered(relation, n)
        assert rows is not None
        assert rows.all()
    assert mask.covered("feeder.balance", 1) is None


def test_a_filter_that_is_plainly_blocked_leaves_its_comparisons_to_no_other_cause() -> None:
    """A deduced one rests on these comparisons, and keeps them."""
    mask = DownstreamMask(Topology(site_of(two_racks())))
    cause = Cause("filter_blocked", "cdu", 0, supported_ns=START_NS)
    for outright, reported, covers in (([], [cause], False), ([cause], [cause], True), ([], [cause], False)):
        mask.update(outright, reported, START_NS)
        for relation in ("cdu.filter_diff_pressure_pa", "cdu.flow_lpm/pump"):
            assert (mask.covered(relation, 1) is not None) == covers
        assert mask.covered("cdu.supply_temp_c", 1) is not None


@pytest.mark.parametrize("kind, loop", [("pump_trip", True), ("valve_stuck", True), ("leak", False)])
def test_the_end_of_a_fault_stirs_what_is_behind_it_and_what_was_warm_goes_to_the_loop(
    kind: str, loop: bool
) -> None:
    """A pump's trip stirs at its beginning and at its end, and not while it lasts."""
    tree = two_racks(loops=[{"name": "fws", "cooling": "dry_cooler"}])
    tree["halls"][0]["cdus"][0]["loop"] = "fws"
    mask = DownstreamMask(Topology(site_of(tree)))
    cause, seen = Cause(kind, "cdu", 0), []
    for second in range(0, 1000, 10):
        now_ns = START_NS + second * NS
        acts = second < 400
        cause.supported_ns = now_ns if acts else cause.supported_ns
        mask.update([cause] if acts else [], [cause] if second < 430 else [], now_ns)
        seen.append([second, *(mask.covered(name, n) is not None for name, n in (
            ("cdu.supply_temp_c", 1), ("loop.supply_temp_c", 1)))])  # fmt: skip
    at = {second: tuple(flags) for second, *flags in seen}
    assert at[0] == (True, False)
    assert at[300] == (kind != "pump_trip", False)
    for second in (420, 440, 530):
        assert at[second] == (True, loop), second
    assert at[600] == (False, False)


def test_a_rack_that_was_without_flow_for_any_reason_settles_once_it_flows() -> None:
    mask, dry = DownstreamMask(Topology(site_of(two_racks()))), np.array([True, False])
    mask.update([], [], START_NS, dry)
    for after_s in range(10, 300, 10):
        mask.update([], [], START_NS + after_s * NS, dry & (after_s < 50))
        for name, n in (("rack.heat", 2), ("gpu.temp_c", 144)):
            rows = mask.covered(name, n)
            flows = 50 <= after_s < 40 + 150
            assert (rows is not None and bool(rows[: n // 2].all())) == flows, after_s
            assert rows is None or not rows[n // 2 :].any()
        assert mask.covered("node.power_w", 36) is None


@pytest.mark.parametrize("lasted_s, until_s", [(60, 150), (400, 400), (4000, 600)])
def test_feeds_share_their_load_anew_for_as_long_as_it_was_disturbed(lasted_s: int, until_s: int) -> None:
    mask = DownstreamMask(Topology(site_of(two_racks())))
    cause = Cause("node_down", "node", 3)
    for second in range(0, lasted_s + 1, 10):
        mask.update([cause], [], START_NS + second * NS)
    for after_s in range(10, 700, 10):
        mask.update([], [], START_NS + (lasted_s + after_s) * NS)
        assert (mask.covered(SPLIT, 2) is not None) == (after_s <= until_s), after_s
        assert (mask.covered("node.power_w", 36) is not None) == (after_s <= 150), after_s
