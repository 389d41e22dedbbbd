"""Load targets: set, replaced, withdrawn, over; kept in snapshots; refused with a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.builders import START_NS, Twin, two_racks
from tests.support.journal_bodies import bodies_of
from twin.catalogue import NS
from twin.contracts import MAX_TARGETS, LoadTarget, LoadTargets, Memory, Proposal, View
from twin.contracts.load_targets import KEPT_FREE
from twin.telemetry import LoadTargetSet, LoadTargetWithdrawn

FEEDS = [{"name": "a", "side": "A", "budget_w": 5e5, "serves": ["r[1-2]"]},
         {"name": "b", "side": "B", "budget_w": 5e5, "serves": ["r[1-2]"]}]  # fmt: skip


class Ear:
    """A policy that notes the targets that it sees."""

    name, controls, rank, period_s, urgent, memory = "ear", ("gpu.power_cap_w",), 90, 0.1, True, None

    def __init__(self) -> None:
        self.seen: tuple[LoadTarget, ...] = ()

    def propose(self, view: View, memory: Memory) -> tuple[list[Proposal], Memory]:
        self.seen = view.load_targets()
        return [], memory


def made() -> tuple[Twin, Ear]:
    ear = Ear()
    tree = two_racks()
    tree["halls"][0]["feeders"] = FEEDS
    return Twin(tree, [ear]), ear


def target(**change: Any) -> LoadTargetSet:
    given: dict[str, Any] = {"author": "grid", "target": "t", "limit_w": 4e5}
    return LoadTargetSet(**given | change)


def refusals(twin: Twin) -> list[str]:
    return [r["refused"] for r in bodies_of(twin.decision) if "refused" in r]


def test_a_target_is_seen_until_it_is_over() -> None:
    twin, ear = made()
    twin.tick(None, target(feeders=("lab/h/a",), end_ns=START_NS + 100 * NS, kind="flex", best_effort=True))
    (seen,) = ear.seen
    assert (seen.name, seen.author, seen.kind, seen.limit_w, seen.best_effort) == (
        "t",
        "grid",
        "flex",
        4e5,
        True,
    )
    assert seen.feeders is not None
    assert seen.feeders.tolist() == [twin.site.entity("feeder", "lab/h/a")]
    assert seen.runs(START_NS + 99 * NS)
    assert not seen.runs(START_NS + 100 * NS)
    twin.tick(None, dt_s=200.0)
    assert ear.seen == ()
    assert {"kind": "load_target_over", "target": "t"} in bodies_of(twin.decision)


def test_a_later_one_takes_its_place_and_it_can_be_taken_back() -> None:
    twin, ear = made()
    twin.tick(None, target())
    twin.tick(None, target(limit_w=3e5), target(target="u"))
    assert [(t.name, t.limit_w, t.feeders) for t in ear.seen] == [("t", 3e5, None), ("u", 4e5, None)]
    twin.tick(None, LoadTargetWithdrawn(author="grid", target="t"))
    assert [t.name for t in ear.seen] == ["u"]
    twin.tick(None, LoadTargetWithdrawn(author="grid", target="t"))
    assert refusals(twin) == ["no load target t"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"target": ""}, "needs a name"),
        ({"limit_w": -1.0}, "limit_w of 0 or more"),
        ({"limit_w": np.nan}, "limit_w of 0 or more"),
        ({"limit_w": np.inf}, "limit_w of 0 or more"),
        ({"end_ns": 5}, "over already"),
        ({"end_ns": 2**63}, "expected instants"),
        ({"start_ns": START_NS + 9000 * NS, "end_ns": START_NS + 8000 * NS}, "ends before it begins"),
        ({"start_ns": 2**62 + 2**61}, "more than a year"),
        ({"feeders": ("lab/h/x",)}, "no feeder lab/h/x"),
    ],
)  # fmt: skip
def test_what_is_no_target_is_refused(change: dict[str, Any], why: str) -> None:
    twin, ear = made()
    twin.tick(None, target(**change))
    assert ear.seen == ()
    (refused,) = refusals(twin)
    assert why in refused


def test_there_is_a_limit_and_known_names_pass_it() -> None:
    twin, _ = made()
    book = LoadTargets()
    for k in range(MAX_TARGETS):
        assert book.set(target(target=str(k), kind="flex"), twin.site, START_NS) is None
    assert book.set(target(kind="flex"), twin.site, START_NS) == f"more than {MAX_TARGETS} load targets"
    for k in range(KEPT_FREE):
        assert book.set(target(target=f"p{k}"), twin.site, START_NS) is None
    most = MAX_TARGETS + KEPT_FREE
    assert book.set(target(), twin.site, START_NS) == f"more than {most} load targets"
    assert book.set(target(target="5", limit_w=1.0), twin.site, START_NS) is None


def test_a_snapshot_keeps_them() -> None:
    twin, _ = made()
    book, other = LoadTargets(), LoadTargets()
    assert book.set(target(limit_w=400, feeders=("lab/h/b",)), twin.site, START_NS) is None
    other.restore(book.dump())
    (a,), (b,) = book.current(twin.site), other.current(twin.site)
    assert (a.name, a.limit_w, a.end_ns) == (b.name, b.limit_w, b.end_ns)
    assert a.feeders is not None
    assert b.feeders is not None
    np.testing.assert_array_equal(a.feeders, b.feeders)
    assert other.dump() == book.dump()
