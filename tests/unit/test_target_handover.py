"""Load targets at a change of leadership: nothing is lost, and what people withdrew does not come back."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from tests.support.builders import Twin, two_racks
from twin.daemon.handover import Handover, read_handover, targets_after
from twin.daemon.leader import MAX_HEAD
from twin.telemetry import LoadTargetSet, LoadTargetWithdrawn, MaintenanceBegun

ISV, FILE = "//grid/v1/isv/acme", "targets_file"


def goal(name: str, author: str = "ann", limit_w: float = 5e5, **more: Any) -> LoadTargetSet:
    return LoadTargetSet(id=f"id-{name}-{limit_w}", author=author, target=name, limit_w=limit_w, **more)


def after(left: list[LoadTargetSet] | None, own: list[LoadTargetSet]) -> dict[str, float]:
    """Return the targets of a successor that had `own`."""
    twin = Twin(two_racks())
    twin.tick(None, *own)
    twin.tick(None, *targets_after(left, twin.engine.intake.load_targets.events()))
    assert not [r for r in twin.records("event") if "refused" in r]
    return {t.target: t.limit_w for t in twin.engine.intake.load_targets.events()}


def test_what_people_set_and_withdrew_is_as_the_leader_before_had_it() -> None:
    left = [goal("new"), goal("changed", limit_w=3e5)]
    own = [goal("changed", limit_w=9e5), goal("withdrawn")]
    assert after(left, own) == {"new": 5e5, "changed": 3e5}


def test_what_came_from_outside_is_taken_where_it_lacks_and_left_where_it_is() -> None:
    left = [goal("a", ISV), goal("b", ISV), goal("f", FILE)]
    own = [goal("b", ISV, 2e5), goal("c", ISV), goal("g", FILE)]
    assert after(left, own) == {"a": 5e5, "b": 2e5, "c": 5e5, "f": 5e5, "g": 5e5}


def test_what_is_not_known_changes_nothing() -> None:
    assert after(None, [goal("mine")]) == {"mine": 5e5}
    assert after([], [goal("mine")]) == {}


def test_one_that_was_withdrawn_here_under_the_same_id_counts_again() -> None:
    twin = Twin(two_racks())
    twin.tick(None, goal("t"))
    twin.tick(None, LoadTargetWithdrawn(author="x", target="t"))
    twin.tick(None, *targets_after([goal("t")], ()))
    assert len(twin.engine.intake.load_targets.events()) == 1


def test_it_is_told_with_what_else_a_leader_leaves() -> None:
    windows = [MaintenanceBegun(id="m", author="a", table="node", names=("n",), until_ns=1)]
    targets = [goal("t", feeders=("lab/h/a",), end_ns=2**60)]
    left = Handover("h", windows=windows, requests=[], targets=targets)
    again = read_handover(left.text())
    assert again == left
    assert not Handover("h", windows=left.windows, requests=[], targets=[]).same_but_head(left)


def test_what_finds_no_room_is_told() -> None:
    noise = [hashlib.blake2b(b"%d" % n).hexdigest() for n in range(1000)]
    many = [goal(name, name[::-1]) for name in noise]
    text = Handover("h", windows=[], requests=[], targets=many).text()
    assert len(text) <= MAX_HEAD
    again = read_handover(text)
    assert again.targets is None
    assert again.lost == 1000


@pytest.mark.parametrize("mode", ["normal", "held", "released"])
def test_what_a_leader_allowed_is_read_as_it_was_written(mode: str) -> None:
    """A hold that got lost here would let a successor command where people said stop."""
    left = Handover("h", {"replacement": "approve"}, {"replacement": 5}, mode, [], [], targets=[])
    assert read_handover(left.text()) == left


@pytest.mark.parametrize(
    ("change", "reads"),
    [
        ({"mode": "everything"}, {"mode": ""}),
        ({"authority": {"p": "root", "q": "act"}}, {"authority": {"q": "act"}}),
        ({"authority": ["p"]}, {"authority": {}}),
        ({"decided_ns": {"p": -1, "q": True, "r": 2**70, "s": 7}}, {"decided_ns": {"s": 7}}),
        ({"lost": -1}, {"lost": 0}),
        ({"asked": "no base85 \x00"}, {"requests": None}),
    ],
)
def test_a_handover_that_is_none_is_not_believed(change: dict[str, Any], reads: dict[str, Any]) -> None:
    text = json.dumps(json.loads(Handover("h", mode="held", windows=[], requests=[]).text()) | change)
    again = read_handover(text)
    assert {name: getattr(again, name) for name in reads} == reads


def test_nodes_that_came_back_are_told_unless_there_is_no_room() -> None:
    left = Handover("h", windows=[], requests=[], targets=[], returned={"lab/h/r1/n0": 5, "lab/h/r1/n1": 6})
    assert read_handover(left.text()) == left
    assert not Handover("h", windows=[], requests=[], targets=[]).same_but_head(left)
    assert left.same_but_head(Handover("g", windows=[], requests=[], targets=[], returned=left.returned))
    noise = {hashlib.blake2b(b"%d" % n).hexdigest(): n + 1 for n in range(1000)}
    again = read_handover(Handover("h", windows=[], requests=[], targets=[], returned=noise).text())
    assert (again.returned, again.targets, again.lost) == ({}, [], 0)
