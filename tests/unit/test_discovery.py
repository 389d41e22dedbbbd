"""Discovery: the recorded site as it must come out, and small sites that try its rules and limits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from connectors.dsx import discover, discovery, to_yaml
from connectors.dsx.discovery import Discovery
from connectors.files import BadRow, read_capture
from twin.site import SiteFile, convert
from twin.telemetry import Message


def point(kind: str, tag: str, point_type: str = "Status", **fields: Any) -> Message:
    body = {"objectType": kind, "pointType": point_type, **fields}
    return Message(0, f"BMS/v1/PUB/Metadata/{kind}/{point_type}/{tag}", json.dumps(body).encode())


def rack(name: str) -> Message:
    return point("Rack", name, "RackPower", rackLocationId=name)


def meter(name: str, *serves: str) -> Message:
    return point("PowerMeter", name, "ActivePower", objectId=name, servesId=list(serves))


def cdu(name: str, *serves: str) -> Message:
    return point("CDU", name, objectId=name, servesId=list(serves))


def loop_point(name: str, *serves: str, kind: str = "CoolingTower", **fields: Any) -> Message:
    edges = {"objectId": name, "servesId": list(serves)} | fields
    return point(kind, f"{name}-t", "LiquidTemperature", processArea=["Supply"], **edges)


def loops(found: Discovery) -> tuple[list[dict[str, Any]], dict[str, str | None]]:
    """(the loops, the loop of each CDU)."""
    cdus = [row for hall in found.site["halls"] for row in hall["cdus"]]
    return found.site.get("loops", []), {row["name"]: row.get("loop") for row in cdus}


def feeders(found: Discovery) -> dict[str, dict[str, Any]]:
    rows = [row for hall in found.site["halls"] for row in hall["feeders"]] + found.site.get("feeders", [])
    return {row["name"]: row for row in rows}


def noted(found: Discovery, *parts: str) -> bool:
    return any(all(part in note for part in parts) for note in found.notes)


def checked(messages: list[Message | BadRow]) -> Discovery:
    """Return the discovery, after a check by the site file's schema and by YAML."""
    found = discover(messages)
    convert(SiteFile, found.site, "discovered")
    assert yaml.safe_load(to_yaml(found)) == found.site
    return found


@pytest.fixture
def recorded(recording: Callable[[str], Path]) -> Discovery:
    return checked(list(read_capture(recording("dsx-bms-capture") / "dsx_exemplar.csv")))


def test_the_recorded_site(recorded: Discovery) -> None:
    (hall,) = recorded.site["halls"]
    assert hall["name"] == "Pod1C"
    reporting = [f"Pod1C-E0{i}" for i in range(1, 7)]
    referenced = [f"Pod1C-F0{i}" for i in range(2, 7)]
    mute = {"reports": False}
    assert hall["racks"] == [
        {"name": r, "profile": None} | (mute if r in referenced else {}) for r in reporting + referenced
    ], "and no layout"
    assert hall["cdus"] == [{"name": "C-F00-CDU-05", "serves": reporting[1:] + referenced}]
    assert recorded.site["policies"] == {}
    assert recorded.called == "titan"
    assert noted(recorded, "referenced, no telemetry", *referenced)
    assert noted(recorded, "'Seccondary' is read as 'Secondary'")
    assert noted(recorded, "Pod1C-E01 reports, but no CDU")
    expected = dict(racks=11, racks_without_telemetry=5, cdus=1, feeders=14, halls=1, inferred_edges=10,
                    feeders_without_telemetry=10, points=166, metadata_messages=166, other_messages=4545,
                    notes=len(recorded.notes))  # fmt: skip
    assert recorded.counts == expected


def test_the_recorded_power_tree(recorded: Discovery) -> None:
    expected = {}
    for n, side in ((1, "A"), (2, "B")):
        taps = [f"C-E0{i}-TAP-E{n}" for i in range(1, 7)]
        expected[f"C-E-BUS-E{n}"] = {"name": f"C-E-BUS-E{n}", "serves": taps, "side": side}
        for i, tap in enumerate(taps, 1):
            expected[tap] = {"name": tap, "serves": [f"Pod1C-E0{i}"], "side": side}
            if i != 5:
                expected[tap] |= {"inferred": True, "reports": False}
    assert feeders(recorded) == expected
    assert noted(recorded, "C-E03-TAP-E2", "Pod1C-E03", "by analogy with C-E05-TAP-E2 -> Pod1C-E05")


def test_discovery_reads_metadata_only(recording: Callable[[str], Path], recorded: Discovery) -> None:
    rows = list(read_capture(recording("dsx-bms-capture") / "dsx_exemplar.csv"))
    metadata = [m for m in rows if isinstance(m, Message) and "/Metadata/" in m.topic]
    assert discover(metadata[::-1]).site == recorded.site
    text = to_yaml(recorded)
    assert text.startswith("# A site as a BMS describes itself")
    assert "# - inferred: feeder C-E01-TAP-E1 serves rack Pod1C-E01" in text


def test_an_empty_stream_makes_an_empty_site() -> None:
    found = checked([BadRow(1, "nothing"), Message(0, "x", b"")])
    assert found.site == {"site": "site", "schema": 1, "policies": {}, "halls": [
        {"name": "hall1", "racks": [], "cdus": [], "feeders": []}]}  # fmt: skip
    assert found.counts["bad_rows"] == 1


def test_an_analogy_needs_exactly_one_rack() -> None:
    known = [
        rack("R-01"),
        rack("R-02"),
        rack("S-02"),
        meter("T-01", "R-01"),
        meter("bus", "T-01", "T-02", "T-09", "X"),
    ]
    found = checked([*known])
    assert feeders(found)["T-02"] == {
        "name": "T-02", "serves": ["R-02"], "inferred": True, "reports": False
    }  # fmt: skip
    assert feeders(found)["T-09"]["serves"] == []
    assert noted(found, "T-09", "no rack fits its name")
    assert noted(found, "feeder X", "unknown")
    both = checked([*known, rack("S-01"), meter("T-01", "R-01", "S-01")])
    assert feeders(both)["T-02"]["serves"] == []
    assert noted(both, "T-02", "several racks fit")


def test_unknown_ids_beside_racks_are_racks() -> None:
    found = checked([rack("a1"), meter("m", "a1", "a2")])
    assert [r["name"] for r in found.site["halls"][0]["racks"]] == ["a1", "a2"]
    assert noted(found, "referenced, no telemetry", "a2")


def test_sides_need_exactly_two_separate_trees() -> None:
    two = checked([rack("r"), meter("x", "r"), meter("y", "r"), meter("z", "s"), rack("s")])
    assert {n: f.get("side") for n, f in feeders(two).items()} == {"x": "A", "y": "B", "z": None}
    three = checked([rack("r"), *(meter(m, "r") for m in "xyz")])
    assert not any("side" in f for f in feeders(three).values())
    assert noted(three, "x, y, z", "not as two separate sides")
    ring = checked(
        [rack("q"), rack("r"), rack("s"), meter("x", "q", "r"), meter("y", "r", "s"), meter("z", "s", "q")]
    )
    assert not any("side" in f for f in feeders(ring).values())


def test_loops_do_not_hang_and_are_noted() -> None:
    found = checked([meter("a", "b"), meter("b", "c"), meter("c", "a"), meter("d", "d", "a"),
                     cdu("k", "k", "l"), cdu("l", "k"), point("HX", "h", objectId="h", servesId=["i"]),
                     point("HX", "i", objectId="i", servesId=["h"]), cdu("n", "h")])  # fmt: skip
    edges = [(f["name"], t) for f in feeders(found).values() for t in f["serves"]]
    assert sorted(edges) == [("a", "b"), ("b", "c"), ("d", "a")]
    assert noted(found, "a cycle: c serves a")
    assert noted(found, "d claims to serve itself")


def test_one_parent_is_kept_as_the_site_file_wants() -> None:
    found = checked(
        [rack("r"), cdu("k", "r"), cdu("l", "r"), meter("a", "t"), meter("b", "t"), meter("t", "r")]
    )
    assert [c["serves"] for c in found.site["halls"][0]["cdus"]] == [["r"], []]
    assert feeders(found)["b"]["serves"] == []
    assert noted(found, "r is served by CDU k and by l")
    assert noted(found, "t is served by feeder a and by b")


def test_equipment_between_is_seen_through() -> None:
    found = checked([rack("r"), cdu("k", "h"), point("HX", "h", objectId="h", servesId=["r"]),
                     meter("a", "u"), meter("b", "r"),
                     point("UPS", "u", objectId="u", servesId=["b", "k"])])  # fmt: skip
    assert found.site["halls"][0]["cdus"] == [{"name": "k", "serves": ["r"]}]
    assert feeders(found)["a"]["serves"] == ["b"]
    assert noted(found, "a feeds a CDU")


def test_equipment_with_signals_of_a_loop_is_the_loop_of_what_it_serves() -> None:
    found = checked([rack("r"), rack("s"), cdu("k", "r"), cdu("l", "s"), loop_point("fw1", "k", "l")])
    assert loops(found) == ([{"name": "fw1", "cooling": "tower"}], {"k": "fw1", "l": "fw1"})
    assert found.counts["loops"] == 1


def test_a_cdu_is_on_the_last_loop_before_it() -> None:
    between = point("HX", "h", objectId="h", servesId=["k"])  # without signals: it is seen through
    found = checked([rack("r"), cdu("k", "r"), loop_point("tower", "chiller"), between,
                     loop_point("chiller", "h", kind="Chiller")])  # fmt: skip
    rows = [{"name": "chiller", "cooling": "chiller"}, {"name": "tower", "cooling": "tower"}]
    assert loops(found) == (rows, {"k": "chiller"})
    assert noted(found, "loop tower reports", "serves a CDU")


def test_sensors_of_a_tank_make_it_a_loop_and_those_of_others_do_not() -> None:
    def sensor(owner: str) -> Message:
        return loop_point(f"{owner}-s", kind="Sensor", associateId=owner)

    tank = point("Tank", "t", objectId="t", servesId=["k"])
    found = checked([rack("r"), cdu("k", "r"), meter("m", "r"), tank,
                     *map(sensor, ("t", "r", "k", "m")), loop_point("alone", kind="Sensor")])  # fmt: skip
    assert loops(found) == ([{"name": "t"}], {"k": "t"})


def test_a_cdu_of_two_loops_stays_on_the_first() -> None:
    ring = [loop_point("a", "b", "k"), loop_point("b", "a", "k")]
    found = checked([rack("r"), cdu("k", "r"), *ring])
    assert loops(found)[1] == {"k": "a"}
    assert noted(found, "k is served by loop a and by b")


def test_the_site_is_called_as_all_paths_begin() -> None:
    def path(*parts: str) -> Message:
        tag = "/".join(parts)
        return point("Rack", tag, "RackPower", rackLocationId=parts[-2])

    def called(*messages: Message) -> str:
        return discover(messages).called

    assert called(path("acme", "titan", "r1", "power"), path("acme", "titan", "r2", "power")) == "titan"
    assert called(path("acme", "titan", "r1", "power")) == "titan", "r1 is a rack"
    hall = point("Sensor", "acme/titan/Pod1/x/s", "Sound", objectId="s", processArea=["pod1", "ColdAisle"])
    assert called(path("acme", "titan", "Pod1", "r1", "power"), hall) == "titan", "Pod1 is a hall"
    assert called(path("acme", "r1", "power"), path("titan", "r1", "power")) == ""
    assert called(rack("r")) == called() == ""


def test_parts_make_feeders_known_but_not_racks() -> None:
    found = checked([point("Shunt", "s", associateId="f9"), point("Valve", "v", associateId="r9")])
    assert feeders(found) == {"f9": {"name": "f9", "serves": [], "reports": False}}
    assert noted(found, "f9 is known only from its Shunt")
    assert noted(found, "r9", "left out")


def test_several_halls_share_the_racks_by_their_names() -> None:
    def sensor(hall: str) -> Message:
        return point("Sensor", hall, "Sound", objectId="s", processArea=[hall, "ColdAisle"])

    found = checked([sensor("P1"), sensor("P2"), rack("P1-a"), rack("P2-b"), rack("c"),
                     cdu("k", "P1-a", "P2-b"), meter("m", "P1-a", "P2-b"), meter("n", "P2-b")])  # fmt: skip
    halls = {h["name"]: h for h in found.site["halls"]}
    assert [r["name"] for r in halls["P1"]["racks"]] == ["P1-a", "c"]
    assert [r["name"] for r in halls["P2"]["racks"]] == ["P2-b"]
    assert [f["name"] for f in halls["P2"]["feeders"]] == ["n"]
    assert [f["name"] for f in found.site["feeders"]] == ["m"]
    assert noted(found, "rack c: no metadata names its hall")
    assert noted(found, "CDU k serves racks of another hall")


def test_names_that_the_site_file_forbids_are_escaped_or_left_out() -> None:
    found = checked(
        [rack("a b"), rack("c/[1-9]"), rack("é\n# x: y"), rack("x" * 256), rack("[" * 200), rack("a+20+b")]
    )
    names = [r["name"] for r in found.site["halls"][0]["racks"]]
    assert names == ["a+20+b", "c+2f++5b+1-9+5d+", "x" * 256, "+e9++a++23++20+x:+20+y"]
    assert noted(found, "'a b' gives no unique name") or noted(found, "'a+20+b' gives no unique name")
    assert noted(found, "'c/[1-9]' is written")
    assert noted(found, "gives no unique name of 1 to 256")
    both = checked([rack("m"), meter("m", "x")])
    assert feeders(both) == {}
    assert noted(both, "id of a rack and of a meter")


def test_bad_cleared_and_changed_metadata() -> None:
    broken = rack("r1")._replace(payload=b"{")
    deep = rack("r2")._replace(payload=b"[" * 60_000)
    gone = rack("r3")
    found = checked([broken, deep, gone, gone._replace(payload=b""), meter("m", "a"), meter("m", "b"),
                     point("CDU", "z"), rack("r4")._replace(payload=b" " * 70_000)])  # fmt: skip
    assert found.site["halls"][0]["racks"] == []
    assert feeders(found)["m"]["serves"] == ["b"]
    assert found.counts["bad_metadata"] == 2
    assert found.counts["changed_metadata"] == 1
    assert found.counts["points_without_object"] == 1
    assert found.counts["over_limit"] == 1


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "MAX_POINTS", 50)
    monkeypatch.setattr(discovery, "MAX_NOTES", 10)
    found = checked([*(meter(f"m{i}", f"m{i + 1}", f"m{i}") for i in range(80))])
    assert found.counts["points"] == 50
    assert found.counts["over_limit"] == 30
    assert len(found.notes) == 11
    assert "further notes are left out" in found.notes[-1]


def test_a_long_chain_is_quick() -> None:
    n = 20_000
    found = discover(
        [rack("r"), *(meter(f"m{i:05}", f"m{i + 1:05}") for i in range(n)), meter(f"m{n:05}", "r")]
    )
    assert found.counts["feeders"] == n + 1


def test_notes_hold_no_control_characters() -> None:
    found = checked([rack("r"), cdu("k\x1b[2J\x9b\u202e", "r"), cdu("l\r\x07", "r")])
    assert noted(found, "\ufffd[2J\ufffd\ufffd")
    assert all(note.isprintable() for note in found.notes)


def test_what_is_served_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "MAX_EDGES", 10)
    found = checked([*(meter(f"m{i}", f"r{i}", f"s{i}", f"t{i}") for i in range(9))])
    assert sum(len(f["serves"]) for f in feeders(found).values()) == 9
    assert [n for n in found.notes if n.startswith("more than 10 servesId: those of m3 and later")]
    monkeypatch.setattr(discovery, "MAX_STEPS", 50)
    hx = [point("HX", f"h{i}", objectId=f"h{i}", servesId=[f"h{i + 1}"]) for i in range(9)]
    found = checked([*hx, *(cdu(f"k{i}", "h0") for i in range(9))])
    assert sum("too many ways" in n for n in found.notes) <= 1


def test_many_trees_over_the_same_racks() -> None:
    racks = [f"r{i}" for i in range(500)]
    found = discover([*map(rack, racks), *(meter(f"m{i:03}", *racks) for i in range(200))])
    assert found.counts["feeders"] == 200
    assert noted(found, "m000, m001", "not as two separate sides")
