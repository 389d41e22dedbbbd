"""Leaks and detectors that lie: the racks that leak are isolated, and no other one is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.leak_run import live_through_leak
from tests.support.leaks import leaks_of, leaks_together
from tests.support.sampled_cases import sampled

pytestmark = pytest.mark.slow


def _progress(done: float, what: str) -> None:
    """Nobody looks on."""


KINDS = ["tray_flaps", "two_racks", "liar_and_leak", "unseen", "liar", "gateway_lies", "release"]


@pytest.mark.long
@pytest.mark.parametrize("kind", sampled(KINDS, "liar_and_leak", "unseen", "gateway_lies"))
def test_racks_that_leak_are_isolated_and_no_other_is(kind: str) -> None:
    (leak,) = leaks_of("develop", [kind], 1)
    (found,) = live_through_leak((leak,), _progress)
    assert found.isolated == found.leaking
    assert (found.wrong_racks, found.wrong_nodes) == (0, 0)
    assert (found.dry_off, found.wet_left) == (0, 0), "wet trays and those below, and no others, at once"
    assert found.told is (kind == "unseen")
    if found.leaking:
        assert found.command_s <= 5.0, "the building's values are up to 3 s old and come each 2 s"
        assert found.switched_off > 0


@pytest.mark.long
def test_what_one_plant_has_side_by_side_is_told_of_its_own_circuit() -> None:
    (lot,) = leaks_together(leaks_of("develop", ["unseen"], 2))
    other = replace(lot[1], kind="healthy")
    found = live_through_leak((lot[0], other), _progress)
    assert [x.told for x in found] == [True, False]
    assert [x.lost_l > 0.0 for x in found] == [True, False]
    assert [x.isolated + x.wrong_racks + x.wrong_nodes for x in found] == [0, 0]
