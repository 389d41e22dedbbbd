"""Placement of nodes in Slurm: weights and reservations, as they are read and as they are commanded."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from connectors.slurm import SlurmSettings, SlurmSource
from connectors.slurm.marks import (
    END_S,
    KEPT,
    LAST,
    LEASE_S,
    MARK,
    NONE,
    RENEW_S,
    USUAL,
    Marks,
    Reservation,
    answer_of,
    in_the_way,
    lowered,
    members,
    parse_marks,
    parse_reservations,
    parse_weights,
    placements,
    raised,
    reserve,
)
from tests.support.builders import site_of, two_racks
from tests.support.inlets import RecordingInlet
from twin.catalogue import BadMessage, ConnectorError
from twin.telemetry import Reading

ROW = "NodeName={} Arch=x86_64 State=IDLE TmpDisk=0 Weight={} Owner=N/A MCS_label=N/A {}"
LINE = (
    "ReservationName={name} StartTime={start} EndTime={end} Duration=00:20:00 Nodes={nodes} NodeCnt=1 "
    "Flags={flags} TRES=cpu=2 Users=root State={state} MaxStartDelay=(null) Comment=Nodes=gpu9 State=ACTIVE"
)


def line(
    name: str = "racktwin_spares", nodes: str = "gpu[1-2]", state: str = "ACTIVE", start: str = "1000",
    end: str = "2200", flags: str = "IGNORE_JOBS,SPEC_NODES",
) -> str:  # fmt: skip
    return LINE.format(name=name, nodes=nodes, state=state, start=start, end=end, flags=flags)


def ours(*hosts: str, active: bool = True, end_s: int = 2200) -> Reservation:
    return Reservation("racktwin_spares", frozenset(hosts), 1000, end_s, active, False)


def test_weights_are_read_whatever_people_wrote_behind_them() -> None:
    rows = (
        ("gpu1", "1", "Reason=x Weight=9 [root@1]"),
        ("gpu2", str(MARK + 3), "Comment=NodeName=gpu1 Weight=5"),
    )
    text = "\n".join(ROW.format(*row) for row in rows)
    assert parse_weights(text) == {"gpu1": 1, "gpu2": MARK + 3}


@pytest.mark.parametrize("weight", ["(null)", "N/A", "1e9", "-5", "9" * 11, "2000000K", "²"])
def test_a_weight_that_is_no_number_is_unknown_and_nothing_else_is_lost(weight: str) -> None:
    text = f"{ROW.format('gpu1', weight, '')}\n{ROW.format('gpu2', 4, '')}\nNodeName=gpu3 State=IDLE"
    marks = Marks(parse_weights(text), None)
    assert dict(marks.weights) == {"gpu1": None, "gpu2": 4, "gpu3": None}
    assert [marks.placement(host) for host in marks.weights] == [None, USUAL, None]


def test_garbage_in_listings_of_nodes_is_passed_over() -> None:
    lines = "", "\0", "No nodes in the system", "NodeName=", " Weight=5", "Weight=5 NodeName=a"
    text = "\n".join((*lines, ROW.format("x" * 300, 1, "")))
    assert parse_weights(text) == {}


def test_reservations() -> None:
    text = "\n".join((
        line("a", "(null)", flags="MAINT"), "", line(),
        line("b", "far[1-", start="soon"), line("c", "gpu7", "INACTIVE", flags="OVERLAP"),
    ))  # fmt: skip
    spares, others = parse_reservations(text)
    assert spares == ours("gpu1", "gpu2")
    assert others == (
        Reservation("a", frozenset(), 1000, 2200, True, True),
        Reservation("c", frozenset(["gpu7"]), 1000, 2200, False, True),
    )
    assert parse_reservations(f"{NONE}\n") == parse_reservations("") == (None, ())


@pytest.mark.parametrize(
    "text",
    [
        line(nodes="gpu[1-"), line(nodes="gpu[1-999999999]"), line(end="2026-11-22T10:00:00"), line(end=""),
        "slurm_load_reservations error", "Reservation", f"{line()}\nwhat is this",
    ],
)  # fmt: skip
def test_what_cannot_be_read_of_ours_is_no_answer(text: str) -> None:
    with pytest.raises(BadMessage):
        parse_reservations(text)


@pytest.mark.parametrize(
    "weight, active, state",
    [
        (5, None, USUAL), (MARK - 1, None, USUAL), (MARK, None, LAST), (MARK + 5, None, LAST),
        (2 * MARK + 5, None, LAST), (None, None, None), (5, True, KEPT), (MARK + 5, True, KEPT),
        (None, True, KEPT), (5, False, USUAL), (MARK, False, LAST), (None, False, None),
    ],
)  # fmt: skip
def test_how_a_node_is_placed(weight: int | None, active: bool | None, state: int | None) -> None:
    marks = Marks({"gpu1": weight}, None if active is None else ours("gpu1", active=active))
    assert marks.placement("gpu1") == state
    assert marks.placement("unheard") is None


def test_a_node_of_several_hosts_is_placed_as_all_of_them() -> None:
    marks = Marks({"a1": 1, "a2": 2, "b1": 1, "b2": MARK, "b3": 1, "c1": 1, "c2": None, "x": 1}, None)
    entity = {"a": 0, "b": 1, "c": 2}
    assert placements(marks, lambda host: entity.get(host[0])) == {0: USUAL, 1: None, 2: None}


def test_weights_go_together_and_none_is_marked_twice() -> None:
    marks = Marks(
        {"g1": 1, "g2": 1, "g3": 7, "g4": MARK + 1, "g5": None, "g6": 2 * MARK, "bad;name": 1}, ours("g4")
    )
    last = raised(dict.fromkeys([*marks.weights, "absent"], LAST), marks)
    assert [call.arguments() for call in last] == [
        ["update", "NodeName=g[1-2]", f"Weight={MARK + 1}"], ["update", "NodeName=g3", f"Weight={MARK + 7}"],
    ]  # fmt: skip
    assert raised(dict.fromkeys(marks.weights, USUAL), marks) == []
    for wanted in (USUAL, KEPT):
        back = lowered(dict.fromkeys(marks.weights, wanted), marks)
        assert [call.arguments() for call in back] == [["update", "NodeName=g4", "Weight=1"]]
    assert lowered({"g4": LAST}, marks) == []
    assert lowered({"g4": KEPT}, marks._replace(spares=None)) == []  # not before it is kept
    assert lowered({"g4": KEPT}, marks._replace(spares=ours("g4", active=False))) == []


def test_weights_of_many_nodes_go_in_parts_that_a_call_can_hold() -> None:
    hosts = [f"node-{i * 7:07d}" for i in range(9000)]
    calls = raised(dict.fromkeys(hosts, LAST), Marks(dict.fromkeys(hosts, 1), None))
    assert sorted(host for call in calls for host in call.hosts) == sorted(hosts)
    assert max(len(call.arguments()[1]) for call in calls) < 100_000


def test_who_is_in_the_reservation() -> None:
    marks = Marks({"g1": 1, "g2": 1, "g3": None, "g4": None, "g5": 1}, ours("g1", "g2", "g3", "g4", "gone"))
    wanted = {
        "g1": USUAL,
        "g2": LAST,
        "g3": LAST,
        "g4": USUAL,
        "g5": KEPT,
        "absent": KEPT,
        "b;d": KEPT,
        "g9": -1,
    }
    assert members(wanted, marks) == {"g3", "g5", "gone"}
    assert members({}, marks) == marks.spares.hosts  # type: ignore[union-attr]
    assert members({"g5": KEPT}, marks._replace(spares=None)) == {"g5"}


def test_what_is_asked_of_the_reservation() -> None:
    none, some = Marks({}, None), Marks({}, ours("g1", "g2"))
    end, name = f"EndTime=now+{END_S:.0f}", "ReservationName=racktwin_spares"
    assert reserve((), none, "tw", 1000, False) == []
    assert reserve(["g2", "g1"], none, "tw", 1000, True) == [
        "create", "reservation", name, "Nodes=g[1-2]", "StartTime=now", end, "Users=tw", "Flags=IGNORE_JOBS",
    ]  # fmt: skip
    assert reserve((), some, "tw", 1000, True) == ["delete", name]
    assert reserve(["g1"], some, "tw", 1000, False) == ["update", name, "Nodes=g1"]
    assert reserve(["g1"], some, "tw", 1000, True) == ["update", name, "Nodes=g1", end]
    assert reserve(["g1", "g2"], some, "tw", 2200 - RENEW_S, True) == []
    assert reserve(["g1", "g2"], some, "tw", 2200 - RENEW_S + 1, True) == ["update", name, end]
    assert reserve(["g1", "g2"], some, "tw", 2190, False) == []
    # A renewal, half a lease after the last; Slurm's clock may be some seconds behind
    assert reserve(["g1", "g2"], some, "tw", 2200 - END_S + LEASE_S / 2 - 30, True) == ["update", name, end]


def test_who_stands_in_the_way() -> None:
    def other(name: str, start_s: int, end_s: int, shares: bool = False) -> Reservation:
        return Reservation(name, frozenset([name, "gpu1"]), start_s, end_s, True, shares)

    found = (
        other("now", 0, 9000), other("soon", 2100, 9000), other("past", 0, 900), other("later", 2300, 9000),
        other("maint", 0, 9000, shares=True),
    )  # fmt: skip
    hosts = ["now", "soon", "past", "later", "maint", "gpu1", "free"]
    assert in_the_way(hosts, Marks({}, None, found), 1000) == {"now": "now", "soon": "soon", "gpu1": "soon"}


@pytest.mark.parametrize(
    "wanted, weight, spares, state, words",
    [
        (USUAL, 1, None, "done", ""), (USUAL, MARK, None, "failed", "Slurm has it last"),
        (USUAL, 1, ours("g"), "failed", "has it kept"), (USUAL, None, None, "failed", "reports no weight"),
        (USUAL, 2 * MARK, None, "failed", "not change it"), (USUAL, 2 * MARK, ours("g"), "failed", "kept"),
        (LAST, MARK, None, "done", ""), (LAST, 2 * MARK, None, "done", "others gave it"),
        (LAST, 1, None, "failed", "Slurm has it usual"), (LAST, MARK, ours("g"), "failed", "has it kept"),
        (KEPT, 1, ours("g"), "done", ""), (KEPT, None, ours("g"), "done", ""),
        (KEPT, MARK, ours("g"), "done", "still has racktwin's mark"), (KEPT, 1, None, "failed", "has it not"),
        (KEPT, 1, ours("h"), "failed", "has it not"),
        (KEPT, 1, ours("g", active=False), "failed", "not in force"),
    ],
)  # fmt: skip
def test_answers(wanted: int, weight: int | None, spares: Reservation | None, state: str, words: str) -> None:
    answer = answer_of("g", wanted, Marks({"g": weight}, spares))
    assert answer.state == state
    assert words in answer.detail
    assert bool(words) == bool(answer.detail)
    assert answer_of("absent", wanted, Marks({"g": weight}, spares)).state == "failed"


@pytest.mark.parametrize(
    "script, placed, told",
    [
        ("cat nodes; echo", [USUAL, KEPT], ""),
        ("[ $3 = nodes ] && cat nodes || exit 1", [], "scontrol: ends with 1"),
        ("[ $3 = nodes ] && cat nodes || echo 'what is this'", [], "scontrol show: expected `Reservation"),
        ("exit 1", [], "scontrol: ends with 1"),
    ],
)
def test_levels_come_also_where_placement_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, placed: list[int], told: str
) -> None:
    (tmp_path / "text").write_text(f"{ROW.format('gpu1', 1, '')}\n{ROW.format('gpu2', 1, '')}\n")
    (tmp_path / "kept").write_text(line(nodes="gpu2"))
    script = script.replace("cat nodes; echo", "[ $3 = nodes ] && cat nodes || cat kept")
    script = script.replace("cat nodes", f"cat {tmp_path}/text").replace("cat kept", f"cat {tmp_path}/kept")
    bodies = {"sinfo": "echo 'gpu1|idle||||none|'; echo 'gpu2|idle||||none|'", "scontrol": script}
    for name, body in bodies.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def levels(placement: bool) -> RecordingInlet:
        inlet = RecordingInlet()
        settings = SlurmSettings(node_names={"gpu[1-2]": "r1/node[0-1]"}, placement=placement)
        source = SlurmSource(site_of(two_racks()), settings)
        asyncio.run(source._levels(inlet))
        return inlet

    inlet = levels(True)
    readings = [e for e in inlet.items if isinstance(e, Reading)]
    assert [e.value for e in readings if e.signal == "placement_state"] == placed
    assert [e.value for e in readings if e.signal == "service_level_state"] == [0, 0]
    assert [told in why for why in inlet.faults] == [True] * bool(told)
    assert inlet.poll_s == (60.0 if placed else 5.0), "each listing brings its own period"
    inlet = levels(False)  # no further call is made, so none can fail
    assert {e.signal for e in inlet.items if isinstance(e, Reading)} == {
        "service_level_state", "service_owner_state",
    }  # fmt: skip
    assert inlet.faults == []


@pytest.mark.parametrize(
    "period_s, every_s", [(1.0, 12.0), (5.0, 60.0), (15.0, 60.0), (30.0, 60.0), (90.0, 90.0)]
)
def test_weights_are_read_once_a_minute_at_most(
    monkeypatch: pytest.MonkeyPatch, period_s: float, every_s: float
) -> None:
    settings = SlurmSettings(node_names={"gpu1": "r1/node0"}, period_s=period_s, placement=True)
    source = SlurmSource(site_of(two_racks()), settings)
    inlet, now_s, weight = RecordingInlet(), 0.0, 1
    read_s: list[float] = []

    async def ask(*words: str) -> str:
        if "nodes" in words:
            read_s.append(now_s)
        return ROW.format("gpu1", weight, "") if "nodes" in words else NONE

    def listed() -> list[tuple[float | None, float]]:
        inlet.items.clear()
        asyncio.run(source._placements(inlet))
        return [(e.value, round(e.t_ns / 1e9, 6)) for e in inlet.items if isinstance(e, Reading)]

    monkeypatch.setattr(source, "ask", ask)
    clock = SimpleNamespace(monotonic=lambda: now_s, time_ns=lambda: round(now_s * 1e9))
    monkeypatch.setattr("connectors.slurm.source.time", clock)
    for number in range(25):
        now_s = number * period_s + (0.01 if number % 2 else 0.05) * period_s
        told = listed()
        assert told == ([(USUAL, round(now_s, 6))] if read_s[-1] == now_s else [])
    step = round(every_s / period_s)
    assert [round(at_s / period_s - 0.05) for at_s in read_s] == list(range(0, 25, step))
    now_s, weight = now_s + 0.1 * period_s, MARK  # a sink reads; the listing after it tells, and asks nothing
    asyncio.run(source.read_marks())
    sink_s, count = now_s, len(read_s)
    now_s += period_s / 3
    assert listed() == [(LAST, round(sink_s, 6))]
    assert listed() == []
    assert len(read_s) == count
    now_s = sink_s + every_s
    assert listed() == [(LAST, round(now_s, 6))]


def test_an_old_listing_does_not_undo_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SlurmSource(site_of(two_racks()), SlurmSettings())

    async def ask(*words: str) -> str:
        source.marks, source.marks_s = parse_marks(ROW.format("gpu1", 2, ""), ""), 1e18  # asked for meanwhile
        return ROW.format("gpu1", 1, "") if "nodes" in words else NONE

    monkeypatch.setattr(source, "ask", ask)
    asyncio.run(source.read_marks())
    assert source.marks.weights == {"gpu1": 2}


def test_what_no_program_answers_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConnectorError, match="scontrol: cannot be run"):
        asyncio.run(SlurmSource(site_of(two_racks()), SlurmSettings()).read_marks())
