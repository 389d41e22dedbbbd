"""Serials and slots: swaps, moves between nodes, and reports that are not believed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.builders import Twin, eight_nodes, site_of, spec_of, two_racks
from twin.catalogue import NS
from twin.contracts import LEVELS
from twin.engine import check_serial, encode, identity, news
from twin.engine.identity import MAX_IDS, MAX_REFUSALS, MOST_CHANGES, MOST_MOVES, Identities
from twin.engine.snapshot import decode
from twin.run.recovery import warm
from twin.run.trace import TraceDecoder, TraceEncoder
from twin.telemetry import EntityReplaced, Event, FaultReported, Frame, IdentityTold, SiteChanged, State

GPU, OTHER = "lab/h/r1/node0/gpu0", "lab/h/r1/node1/gpu0"
VALUES = {"gpu.temp_c": 60.0, "gpu.power_w": 300.0, "gpu.sm_clock_hz": 1.9e9, "gpu.util_pu": 1.0}
OFF_BUS = "NVRM: Xid (PCI:0000:03:00): 79, pid=1234, GPU has fallen off the bus."


def told(serial: str, name: str = GPU, table: str = "gpu", id: str = "") -> IdentityTold:
    return IdentityTold(id=id, table=table, name=name, serial=serial)


def swaps(pod: Twin) -> list[tuple[str, str]]:
    """(name, serial) of what the last tick replaced, by its journal."""
    events = [r["event"] for r in pod.records("event") if "refused" not in r]
    return [(e["name"], e["serial"]) for e in events if e["type"] == "EntityReplaced"]


def refusals(pod: Twin) -> list[str]:
    return [r["refused"] for r in pod.records("event") if "refused" in r]


def generation(pod: Twin, entity: int = 0) -> int:
    return int(pod.engine.state.tables["gpu"].generation[entity])


def level(pod: Twin, part: str, entity: int) -> str:
    return LEVELS[int(pod.engine.health.health(part).level[entity])]


def test_the_first_serial_is_remembered_and_nothing_else() -> None:
    pod = Twin(eight_nodes())
    pod.tick(VALUES)
    before = generation(pod)
    for _ in range(3):
        pod.tick(VALUES, told("S-0001"))
        assert pod.records("event") == []
    assert generation(pod) == before
    assert pod.engine.intake.serials == {f"gpu:{GPU}": "S-0001"}
    pod.tick(None, told("S-0001", name="r1/node0/gpu0"))  # the same slot by a shorter name
    assert pod.engine.intake.serials == {f"gpu:{GPU}": "S-0001"}
    assert pod.engine.intake.counts == {}


def test_another_serial_is_a_swap_and_the_journal_says_which() -> None:
    pod, other = Twin(eight_nodes()), Twin(eight_nodes())
    for one in (pod, other):
        one.tick(VALUES, told("S-0001"))
        one.tick(VALUES)
    pod.tick(None, told("S-0002"))
    other.tick(None, EntityReplaced(table="gpu", name=GPU, serial="S-0002"))
    first, second = pod.records("event")
    assert (first["was"], first["event"]["serial"]) == ("S-0001", "S-0002")
    assert "moved_from" not in first
    assert second == other.records("event")[0]
    assert generation(pod) == 1
    for part in ("tables", "estimator", "diagnosis", "health", "arbiter"):
        mine, theirs = pod.engine.dump()[part], other.engine.dump()[part]
        assert encode({"x": mine}) == encode({"x": theirs}), part


def test_what_failed_is_not_blamed_on_the_board_that_came() -> None:
    pod = Twin(two_racks(racks="r1"))
    gpu = "lab/h/r1/node3/gpu2"
    at = pod.site.entity("gpu", gpu)
    assert at is not None
    pod.tick(VALUES, told("OLD-01", gpu))
    pod.run(5, VALUES)
    fault = FaultReported(id="f", table="gpu", name=gpu, code=79, detail=OFF_BUS)
    pod.tick(VALUES, fault)
    pod.run(15, VALUES)
    node = pod.site.entity("node", "lab/h/r1/node3")
    health = pod.engine.health
    assert level(pod, "gpu", at) == "failed"
    pod.tick(VALUES, told("OLD-01", gpu))  # an agent that starts anew says the same
    pod.run(15, VALUES)
    assert level(pod, "gpu", at) == "failed"
    pod.tick(VALUES, told("NEW-01", gpu))
    assert health.book.of("gpu", at) == ()
    for _ in range(12):
        pod.tick(VALUES, dt_s=30.0)
    assert level(pod, "gpu", at) in ("unknown", "healthy")
    assert node is not None
    assert level(pod, "node", node) != "failed"
    named = [f for f in pod.decision.findings if f.id.startswith(("health/", "fault/"))]
    assert not [f for f in named if "lab/h/r1/node3" in " ".join(f.entities)]
    late = FaultReported(id="g", table="gpu", name=gpu, code=79, at_ns=pod.now_ns - 370 * NS)
    pod.tick(VALUES, late)
    assert health.book.of("gpu", at) == (), "it happened to the board before"


def test_a_device_that_turns_up_elsewhere_leaves_its_old_slot() -> None:
    pod = Twin(eight_nodes())
    pod.tick(None, told("AAAA-1"), told("BBBB-2", OTHER))
    pod.tick(None, told("AAAA-1", OTHER))
    first = pod.records("event")[0]
    assert (first["was"], first["moved_from"]) == ("BBBB-2", GPU)
    assert swaps(pod) == [(GPU, ""), (OTHER, "AAAA-1")]
    assert pod.engine.intake.serials == {f"gpu:{GPU}": "", f"gpu:{OTHER}": "AAAA-1"}
    assert (generation(pod, 0), generation(pod, 1)) == (1, 1)
    pod.tick(None, told("BBBB-2"))  # the other half of the exchange: what sat here is forgotten already
    assert swaps(pod) == []
    assert generation(pod, 0) == 1
    assert pod.engine.intake.serials[f"gpu:{GPU}"] == "BBBB-2"


def test_nobody_takes_a_device_from_a_place_that_is_heard() -> None:
    pod = Twin(eight_nodes())
    pod.tick(VALUES, told("AAAA-1"))
    pod.tick(VALUES, told("AAAA-1", OTHER))
    assert swaps(pod) == []
    assert refusals(pod) == [f"{GPU} has this serial and is heard: a device is in one place"]
    assert pod.engine.intake.serials == {f"gpu:{GPU}": "AAAA-1"}
    for _ in range(120):  # silent by now
        pod.tick()
    pod.tick(None, told("AAAA-1", OTHER))
    assert swaps(pod) == [(GPU, ""), (OTHER, "AAAA-1")]


def test_values_that_say_nothing_are_not_being_heard() -> None:
    pod = Twin(eight_nodes())
    pod.tick(VALUES, told("AAAA-1"))
    for _ in range(60):  # its node reports, of this GPU nothing
        pod.tick({k: [np.nan] + [v] * 7 for k, v in VALUES.items()})
    pod.tick(None, told("AAAA-1", OTHER))
    assert swaps(pod) == [(GPU, ""), (OTHER, "AAAA-1")]


def test_a_node_whose_gpus_are_in_another_order_is_believed_though_they_are_heard() -> None:
    pod = Twin(two_racks(racks="r1"))
    names = [f"lab/h/r1/node3/gpu{i}" for i in range(4)]
    pod.tick(VALUES, *(told(f"SN-{i}", name) for i, name in enumerate(names)))
    pod.tick(VALUES)
    pod.tick(VALUES, *(told(f"SN-{i + 1}", name) for i, name in enumerate(names[:3])))  # gpu0 is gone
    assert [pod.engine.intake.serials[f"gpu:{n}"] for n in names] == ["SN-1", "SN-2", "SN-3", ""]
    at = [pod.site.entity("gpu", n) for n in names]
    assert all(generation(pod, i) >= 1 for i in at if i is not None)
    pod.tick(VALUES, *(told(f"SN-{i}", name) for i, name in enumerate(names)), dt_s=300.0)  # and is back
    assert refusals(pod) == [], "an order and back is two changes of each"
    assert [pod.engine.intake.serials[f"gpu:{n}"] for n in names] == ["SN-0", "SN-1", "SN-2", "SN-3"]


def test_a_slot_that_changes_again_and_again_keeps_what_it_has() -> None:
    pod = Twin(eight_nodes())
    for i in range(40):
        pod.tick(None, told("AB"[i % 2] * 3 + "-1"), dt_s=20.0)
        if i == MOST_CHANGES + 1:
            assert "keeps 'BBB-1'" in refusals(pod)[0]
        else:
            assert refusals(pod) == []
    assert generation(pod) == MOST_CHANGES
    assert pod.engine.intake.identities.counts["refused"] == 18
    pod.tick(None, told("AAA-1"), dt_s=3000.0)  # an hour after the first of the changes
    assert pod.engine.intake.serials[f"gpu:{GPU}"] == "AAA-1"


def test_a_serial_that_several_devices_share_moves_a_few_times_a_day() -> None:
    pod = Twin(two_racks(racks="r1"))
    names = [f"lab/h/r1/node3/gpu{i}" for i in range(2)]
    moves = 0
    for _ in range(24):
        for name in names:
            pod.tick(None, told("SHARED-1", name), dt_s=1800.0)
            moves += bool(swaps(pod))
    assert moves == MOST_MOVES


@pytest.mark.parametrize(
    "serial",
    ["", " ", "S-1\n", "1", "0000000000", "ffffffff", "----", "None", "N/A", "To Be Filled By O.E.M.",
     "Default string", " S-0001", "S\u00e9rie-1", "\ud800abc", "x" * 161, "\x1b[31mred", "0.0.0", "[N/A]"],
)  # fmt: skip
def test_what_is_no_serial_is_refused(serial: str) -> None:
    assert check_serial(serial) is not None
    pod = Twin(eight_nodes())
    pod.tick(None, told("S-0001"))
    pod.tick(None, told(serial))
    assert len(refusals(pod)) == 1
    assert pod.engine.intake.serials == {f"gpu:{GPU}": "S-0001"}
    assert news(pod.engine.intake.serials, told(serial), pod.site) == "none"


@pytest.mark.parametrize(
    "serial",
    ["1650322002345", "1650322002345/GPU-5c3d2c00-1b1e-4bd6-9ca5-4e2b6c2f6b11", ".ABC12.CN7.", "00001"],
)
def test_serials_as_boards_bear_them(serial: str) -> None:
    assert check_serial(serial) is None


def test_strangers_and_floods_are_counted_and_told_in_part() -> None:
    pod = Twin(eight_nodes())
    pod.tick(None, told("S-0001", "nobody"), told("S-0001", GPU, "nonsense"))
    assert refusals(pod) == ["no gpu nobody", f"no nonsense {GPU}"]
    pod.tick(None, *(told(f"S-{i:04}", f"nobody{i}", id=f"n{i}") for i in range(MAX_IDS + 100)))
    assert len(refusals(pod)) == MAX_REFUSALS
    identities = pod.engine.intake.identities
    assert identities.counts["refused"] == MAX_IDS + 102
    assert len(identities.dump()["heard"]) == MAX_IDS
    assert len(pod.engine.intake.seen) == 0, "other events' ids are not pushed out"
    for _ in range(5):
        pod.tick(None, told(""))
    assert identities.counts["refused"] == MAX_IDS + 107
    assert refusals(pod) == [], "of a slot once an hour"
    assert identities.serials == {}


def test_a_second_delivery_counts_once() -> None:
    pod = Twin(eight_nodes())
    pod.tick(None, told("S-0001", id="boot-gpu0-1"))
    pod.tick(None, told("S-0002", id="boot-gpu0-2"))
    pod.tick(None, told("S-0001", id="boot-gpu0-1"))
    assert pod.records("event") == []
    assert pod.engine.intake.serials[f"gpu:{GPU}"] == "S-0002"
    pod.tick(None, told("S-0001", id="boot-gpu0-3"))  # put back
    assert swaps(pod) == [(GPU, "S-0001")]


def test_serials_of_one_place_only_whoever_tells_them() -> None:
    pod = Twin(eight_nodes())
    pod.tick(None, told("S-0001"), EntityReplaced(table="gpu", name=OTHER, serial="S-0001"))
    assert pod.engine.intake.serials == {f"gpu:{GPU}": "", f"gpu:{OTHER}": "S-0001"}
    pod.tick(None, told("S-0001", "lab/h/r1/node0", "node"))  # another kind of device
    assert swaps(pod) == []
    assert pod.engine.intake.serials["node:lab/h/r1/node0"] == "S-0001"


def test_a_slot_that_the_site_no_longer_has_gives_its_device_away() -> None:
    pod = Twin(eight_nodes())
    last = "lab/h/r1/node7/gpu0"
    pod.tick(VALUES, told("S-0001", last))
    tree = eight_nodes()
    tree["halls"][0]["racks"][0]["nodes"] = 7
    spec = spec_of(tree)
    pod.tick(None, SiteChanged(site_hash=spec.digest(), spec=spec.packed()))
    pod.site = pod.engine.site
    pod.tick(None, told("S-0001"))
    assert swaps(pod) == [(GPU, "S-0001")]
    assert pod.engine.intake.serials == {f"gpu:{last}": "", f"gpu:{GPU}": "S-0001"}


SLOTS = [GPU, OTHER, "lab/h/r1/node2/gpu0"]
EVENT = st.builds(
    lambda serial, name, number, kind: (
        EntityReplaced(table="gpu", name=name, serial=serial)
        if kind == 0
        else told(serial, name, id=f"i{number}" if kind == 1 else "")
    ),
    st.sampled_from(["AAAA-1", "BBBB-2", "CCCC-3", ""]), st.sampled_from(SLOTS), st.integers(0, 5),
    st.integers(0, 4),
)  # fmt: skip


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(EVENT, st.sampled_from([1.0, 300.0, 5000.0])), max_size=12), st.integers(0, 11))
def test_live_replayed_and_resumed_agree(story: list[tuple[Event, float]], cut: int) -> None:
    """Whatever is reported: a replay of the trace, and a restart in the middle, decide the same to the bit; a
    device is in one place."""
    live, replayed, resumed = Twin(eight_nodes()), Twin(eight_nodes()), Twin(eight_nodes())
    encoder, decoder = TraceEncoder(), TraceDecoder()
    for k, (event, dt_s) in enumerate(story):
        frame = Frame(k, live.now_ns + round(dt_s * NS), dt_s, (), (), (event,), False)
        live.now_ns = frame.now_ns
        decision = live.engine.tick(frame)
        again = replayed.engine.tick(decoder.decode(encoder.encode(frame)))
        assert decision.records == again.records
        if k > cut:
            assert resumed.engine.tick(frame).records == decision.records
        if k == cut:
            resumed.engine.restore(decode(encode(live.engine.dump())))
    assert live.engine.checksum() == replayed.engine.checksum()
    if len(story) > cut:
        assert live.engine.checksum() == resumed.engine.checksum()
    held = [s for s in live.engine.intake.serials.values() if s]
    assert len(held) == len(set(held))


def test_a_snapshot_of_a_version_before_is_read() -> None:
    pod = Twin(eight_nodes())
    pod.tick(None, EntityReplaced(table="gpu", name=GPU, serial="S-0001"))
    data = decode(encode(pod.engine.dump()))
    del data["intake"]["identities"]
    other = Twin(eight_nodes())
    other.engine.restore(data)
    other.now_ns = pod.now_ns
    other.tick(None, told("S-0001"))
    assert swaps(other) == []
    other.tick(None, told("S-0001", OTHER))
    assert swaps(other) == [(GPU, ""), (OTHER, "S-0001")]


def test_a_restart_has_the_history_that_a_swap_left() -> None:
    pod = Twin(eight_nodes(history_s={"gpu.temp_c": 60.0}))
    frames: list[Frame] = []
    tick = pod.engine.tick

    def kept(frame: Frame) -> Any:
        frames.append(frame)
        return tick(frame)

    pod.engine.tick = kept  # type: ignore[method-assign]
    pod.tick({"gpu.temp_c": 70.0}, told("AAAA-1"), told("BBBB-2", "lab/h/r1/node2/gpu0"))
    pod.run(5, {"gpu.temp_c": 71.0})
    pod.tick({"gpu.temp_c": [float("nan")] + [72.0] * 7}, dt_s=1.0)
    pod.run(5)
    pod.tick(None, told("CCCC-3"), told("BBBB-2", OTHER), dt_s=120.0)
    pod.run(5, {"gpu.temp_c": 50.0})
    again = Twin(eight_nodes(history_s={"gpu.temp_c": 60.0}))
    again.engine.restore(decode(encode(pod.engine.dump())))
    scratch = State(again.site.sizes)
    for frame in frames:
        warm(again.engine, scratch, frame)
    mine, theirs = (one.engine.history.rings["gpu.temp_c"].ordered() for one in (pod, again))
    assert np.array_equal(mine[0], theirs[0])
    assert np.array_equal(mine[1], theirs[1], equal_nan=True)
    assert np.isnan(mine[1][0, :3]).all()
    assert not np.isnan(mine[1][0, 3:]).any()


def test_moves_are_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "MAX_MOVED", 5)
    identities, site = Identities(), site_of(eight_nodes())
    state = State(site.sizes)
    for i in range(20):
        state.now_ns = (1 + i) * 5000 * NS
        for name in (GPU, OTHER):
            for swap in identities.receive(told(f"S-{i:04}", name), site, state)[0]:
                identities.place(f"gpu:{swap.name}", swap.serial)
    data = identities.dump()
    assert len(data["moved_ns"]) == 5
    assert all(len(at) <= MOST_CHANGES for at in data["changed_ns"].values())
