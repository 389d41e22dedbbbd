"""Whatever comes, whenever: scores are numbers, alarms have words, restarts and reloads change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

from tests.support.builders import site_of, two_racks
from tests.support.recurring_devices import Watched
from twin.catalogue import digest
from twin.engine import encode
from twin.engine.remap import slots_kept
from twin.engine.snapshot import decode
from twin.health.recurring import ALARM, DAY_NS, KEYS, LONGEST_NS, STILL, STREAMS, Recurring
from twin.site import Site


def linked(nodes: int) -> Site:
    """Two racks of so many nodes with a link each."""
    tree = two_racks()
    tree["halls"][0]["racks"][0]["nodes"] = nodes
    tree["halls"][0]["planes"] = [{"name": "compute", "racks": ["r[1-2]"], "links_per_node": 1}]
    return site_of(tree)


SITE, LESS, MORE = linked(5), linked(3), linked(7)
GAPS_S = st.sampled_from(
    [0.1, 10.0, 300.0, 599.9, 601.0, 3600.0, 9000.0, 30_000.0, 2e5, -50.0, -4000.0, -1e6]
)


@st.composite
def looks(draw: st.DrawFn) -> list[tuple[float, dict[str, list[int]], dict[str, Any]]]:
    """Looks: how long after the one before, who has trouble, who is silent, worked at or broken."""
    out = []
    few = st.sampled_from([0, 1, 4, 9, 17, 39])
    for _ in range(draw(st.integers(1, 25))):
        came: dict[str, list[int]] = {}
        for key in draw(st.lists(st.sampled_from(KEYS), max_size=3)):
            n = SITE.sizes[key.partition(".")[0]]
            came[key] = [i % n for i in draw(st.lists(few, max_size=3))]
        more: dict[str, Any] = {}
        if draw(st.integers(0, 9)) == 0:
            more["work"] = {"node": [draw(st.integers(0, 9))]}
        if draw(st.integers(0, 9)) == 0:
            more["broken"] = [draw(st.integers(0, 9))]
        if draw(st.integers(0, 9)) == 0:
            more["hushed"] = {"node": [draw(st.integers(0, 9))]}
        out.append((draw(GAPS_S), came, more))
    return out


def check(watch: Watched) -> None:
    """Assert the invariants of `Recurring`, which hold at any moment."""
    recurring, site = watch.recurring, watch.site
    score = recurring.score()
    assert np.isfinite(score).all()
    assert (score >= 0.0).all()
    assert (recurring.standing >= (score >= ALARM)).all()
    assert (score[recurring.standing] >= STILL).all()
    for node in range(site.sizes["node"]):
        told = recurring.text(node)
        assert bool(told) == (score[node] > 0.0)
        assert len(told) < 280  # a rule keeps no more
        assert not any(wrong in told for wrong in ("e+", "nan", "inf", "-", " 1 times"))
    for stream in STREAMS:
        cycles = recurring.cycles[stream.key]
        assert (np.diff(cycles.index) > 0).all()
        assert (cycles.count >= 1).all()
        assert (recurring.now_ns - cycles.first_ns < LONGEST_NS + 3 * DAY_NS).all()
        usual = recurring.usual[stream.key]
        assert usual.mean_per_day > 0.0
        assert (usual.times >= 0.0).all()


@settings(max_examples=25, deadline=None)
@given(looks(), st.integers(0, 25))
def test_a_restart_anywhere_changes_no_bit(script: Any, at: int) -> None:
    watch, other = Watched(SITE), Watched(SITE)
    now_s = 1e6
    for number, (gap_s, came, more) in enumerate(script):
        if number == at:
            other.recurring.restore(decode(encode(watch.recurring.dump())))
            assert np.array_equal(other.recurring.score(), watch.recurring.score())
        now_s += gap_s
        watch.look(now_s, came, **more)
        check(watch)
        if number >= at:
            other.look(now_s, came, **more)
            assert digest(other.recurring.dump()) == digest(watch.recurring.dump())
            assert np.array_equal(other.recurring.score(), watch.recurring.score())


@settings(max_examples=20, deadline=None)
@given(looks(), st.sampled_from([LESS, MORE, SITE]))
def test_a_reload_keeps_the_score_of_each_node_that_stays(script: Any, new: Site) -> None:
    watch, now_s = Watched(SITE), 1e6
    for gap_s, came, more in script:
        now_s += gap_s
        watch.look(now_s, came, **more)
    kept = slots_kept(SITE, new)
    moved = Recurring(new)
    moved.adopt(watch.recurring, kept)
    score = watch.recurring.score()
    expected = [float(score[i]) if i >= 0 else 0.0 for i in kept["node"].tolist()]
    assert moved.score().tolist() == expected
    again = Recurring(new)
    again.adopt(moved, slots_kept(new, new))
    assert again.score().tolist() == expected
    after = Watched(new)
    after.recurring = moved
    after.look(now_s + 10.0)
    check(after)


@settings(max_examples=15, deadline=None)
@given(looks(), st.sampled_from(["node", "gpu", "link"]), st.integers(0, 9))
def test_another_device_begins_anew_and_nobody_else_changes(script: Any, table: str, slot: int) -> None:
    watch, now_s = Watched(SITE), 1e6
    for gap_s, came, more in script:
        now_s += gap_s
        watch.look(now_s, came, **more)
    before = watch.recurring.score().copy()
    watch.recurring.forget(table, slot)
    after = watch.recurring.score()
    owner = int(watch.recurring.node_of(table, np.array([slot], np.int32))[0])
    assert np.array_equal(np.delete(after, owner), np.delete(before, owner))
    assert after[owner] <= before[owner]
    if table == "node":
        assert after[owner] == 0.0
    check(watch)
