"""Ids of faults: what is delivered again counts once, also after a storm, a restart, and another clock."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec import json

from tests.support.builders import START_NS, Twin, eight_nodes, spec_of
from twin.catalogue import NS, digest, pack, unpack
from twin.engine import encode
from twin.engine.snapshot import decode
from twin.telemetry import EntityReplaced, FaultIds, FaultReported, SiteChanged
from twin.telemetry.fault_ids import KEPT

GPU = "r1/node0/gpu0"


def fault(number: int = 1, **more: object) -> FaultReported:
    given = {"id": f"r1/node0#boot-{number}", "table": "gpu", "name": GPU, "code": 79, "detail": "gone"}
    return FaultReported(**(given | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other, answer",
    [
        (fault(), "again"),
        (fault(at_ns=5), "again"),  # read again and dated anew
        (fault(code=78), "reused"),
        (fault(name="r1/node1/gpu0"), "reused"),
        (fault(table="node"), "reused"),
        (fault(detail="Gone"), "reused"),
        (fault(detail="\udcff"), "reused"),
        (fault(count=2), "reused"),
        (fault(2), "new"),
    ],
)
def test_what_an_id_stands_for(other: FaultReported, answer: str) -> None:
    ids = FaultIds()
    assert ids.receive(fault()) == "new"
    assert ids.receive(other) == answer


def test_texts_do_not_run_into_each_other() -> None:
    ids = FaultIds()
    assert ids.receive(fault(table="gpu", name="a'b")) == "new"
    assert ids.receive(fault(table="gpua", name="'b")) == "reused"


def test_the_last_ids_are_known_and_no_more_than_twice_as_many_are_kept() -> None:
    assert KEPT >= 200_000
    ids = FaultIds(100)
    for number in range(1000):
        assert ids.receive(fault(number)) == "new"
        for back in (0, 50, 99):
            if number >= back:
                assert ids.receive(fault(number - back)) == "again"
        assert len(ids) <= 200
    assert ids.receive(fault(0)) == "new", "long forgotten"


def test_a_restart_knows_them_in_the_same_order() -> None:
    ids = FaultIds(100)
    for number in range(170):
        ids.receive(fault(number))
    kept = ids.dump()
    assert {name: (held.dtype, held.shape) for name, held in kept.items()} == {
        "young": (np.uint64, (70, 2)), "old": (np.uint64, (100, 2)),
    }  # fmt: skip
    other = FaultIds(100)
    other.restore(unpack(pack(kept)))
    for number in range(400):
        assert ids.receive(fault(number)) == other.receive(fault(number))
    assert digest(ids.dump()) == digest(other.dump())
    FaultIds().restore(unpack(pack(FaultIds().dump())))


def test_a_storm_pushes_no_id_out_and_is_not_pushed_out() -> None:
    pod = Twin(eight_nodes())
    intake = pod.engine.intake
    pod.tick(None, fault(0))
    assert all(intake.is_new(fault(number)) for number in range(1, 50_000))
    assert not intake.is_new(fault(0)), "minutes later, after a storm"
    assert len(intake.seen) == 0
    assert intake.counts == {"duplicate_events": 1}
    pod.tick(None, fault(0), fault(0, code=31), fault(0, code=48))
    assert [r["count"] for r in pod.records("duplicates")] == [2]  # with the one above
    assert [r["refused"][:12] for r in pod.records("event")] == ["id r1/node0#"] * 2
    assert intake.counts == {"duplicate_events": 2, "reused_ids": 2}
    assert pod.engine.health.book.counts == {"heard": 1}


def test_a_snapshot_without_them_is_read() -> None:
    pod = Twin(eight_nodes())
    pod.tick(None, fault())
    data = decode(encode(pod.engine.dump()))
    other = Twin(eight_nodes())
    other.engine.restore(data)
    other.now_ns = pod.now_ns
    assert other.engine.checksum() == pod.engine.checksum()
    other.tick(None, fault())
    assert other.engine.intake.counts["duplicate_events"] == 1
    del data["intake"]["fault_ids"]
    Twin(eight_nodes()).engine.restore(data)


def test_a_fault_before_the_swap_in_the_same_tick_is_the_old_boards() -> None:
    pod = Twin(eight_nodes())
    swap = EntityReplaced(table="gpu", name=GPU, serial="new")
    pod.tick(None, fault(1), swap)
    book = pod.engine.health.book
    assert book.open_code("gpu")[0] == 0
    assert book.counts == {"heard": 1}
    pod.tick(None, fault(2))
    assert book.open_code("gpu")[0] == 79
    pod.tick(None, EntityReplaced(table="gpu", name=GPU, serial="newer"), fault(3))
    assert book.open_code("gpu")[0] == 79, "heard after the swap"
    for _ in range(5):
        pod.tick()
    pod.tick(None, EntityReplaced(table="gpu", name=GPU, serial="newest"))
    pod.tick(None, fault(4, at_ns=START_NS + 5 * NS))
    assert book.open_code("gpu")[0] == 0, "it happened to the one before"
    assert book.counts["of_a_replaced_device"] == 1


def test_a_fault_in_the_tick_in_which_the_site_changes_is_not_lost() -> None:
    pod = Twin(eight_nodes())
    pod.tick()
    tree = eight_nodes()
    tree["halls"][0]["racks"].append({"name": "r2", "profile": "air-8gpu", "nodes": 1, "gpus_per_node": 1})
    spec = json.encode(spec_of(tree))
    pod.tick(None, fault(), SiteChanged(site_hash="", spec=spec), fault(2, code=95))
    book = pod.engine.health.book
    assert pod.engine.site.sizes["node"] == 9
    assert (book.counts["heard"], book.open_code("gpu")[0]) == (2, 79)
