"""The book of alarms: told once, until it is over; what people say of it holds, also over a restart."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.journal_bodies import body_of
from twin.catalogue import NS, StorageError
from twin.contracts import SAME_S, AlarmRecord, Finding, fields_of
from twin.daemon import alarms
from twin.daemon.alarms import FLAPS, AlarmBook

T0 = 1_700_000_000 * NS


def finding(identity: str = "heat/lab/r1", severity: str = "warning", **more: Any) -> Finding:
    return Finding(identity, severity, "Heat is off", ("lab/r1",), ("return 50 degC",), 0.99, "Look.", **more)


class Watch:
    """A book and a clock of seconds."""

    def __init__(self, folder: Path) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.book = AlarmBook(folder, self._note)
        self.s = 0.0

    def _note(self, record: AlarmRecord) -> None:
        body = body_of(record)
        self.said.append((body.pop("kind"), body))

    def see(self, *found: Finding, after: float = 1.0) -> list[tuple[str, str]]:
        return [(c.what, c.alarm.id) for c in self.changes(found, after)]

    def changes(self, found: Iterable[Finding], after: float = 1.0) -> list[alarms.AlarmChange]:
        self.s += after
        changes = self.book.update(found, self.now)
        self.book.save_if_due()
        return changes

    @property
    def now(self) -> int:
        return T0 + round(self.s * NS)

    def one(self) -> dict[str, Any]:
        (shown,) = self.book.listing()
        return shown


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path)


def test_raised_once_and_cleared_once(watch: Watch) -> None:
    f = finding()
    assert watch.see(f) == [("raised", f.id)]
    assert watch.see(f) == watch.see(finding()) == watch.see(finding(count=3)) == []
    shown = watch.one()
    assert (shown["state"], shown["times"], shown["count"]) == ("raised", 1, 3)
    assert shown["raised_ns"] == T0 + NS
    assert watch.see() == [("cleared", f.id)]
    assert watch.see() == []
    assert watch.book.listing() == []
    (gone,) = watch.book.listing(cleared=True)
    assert (gone["state"], gone["cleared_ns"]) == ("cleared", watch.now - NS)


def test_a_severity_that_changes_is_told(watch: Watch) -> None:
    watch.see(finding())
    watch.book.acknowledge("heat/lab/r1", "ada", "on it")
    watch.see(finding())
    assert watch.see(finding(severity="critical")) == [("severity", "heat/lab/r1")]
    assert watch.one()["ack_author"] == ""  # it is worse than what ada knew of
    watch.book.acknowledge("heat/lab/r1", "ada", "still on it")
    eased = finding(severity="info")
    assert watch.see(eased) == [("acknowledged", "heat/lab/r1")]
    assert watch.one()["severity"] == "critical", "it must last"
    assert watch.see(eased, after=alarms.EASED_S) == [("severity", "heat/lab/r1")]
    assert (watch.one()["severity"], watch.one()["ack_author"]) == ("info", "ada")
    assert watch.see(finding(severity="critical")) == [("severity", "heat/lab/r1")]
    assert (watch.one()["ack_author"], watch.one()["again"]) == ("ada", True), "ada knew of it"


def test_a_severity_that_flickers_at_its_bound_is_told_once(watch: Watch) -> None:
    watch.see(finding())
    said = []
    for _ in range(50):
        said += watch.see(finding(severity="critical"), after=10) + watch.see(finding(), after=10)
    assert said == [("severity", "heat/lab/r1")]


def test_conditions_of_the_shell(watch: Watch) -> None:
    watch.book.condition("part/mqtt", "warning", "mqtt is down", ("refused",), "Look at the broker.")
    assert watch.see(finding()) == [("raised", "heat/lab/r1"), ("raised", "part/mqtt")]
    watch.book.condition("part/mqtt", "critical", "mqtt is down", ("refused",), "")
    assert watch.see(finding()) == [("severity", "part/mqtt")]
    watch.book.clear("part/mqtt")
    watch.book.clear("part/none")
    assert watch.see(finding()) == [("cleared", "part/mqtt")]
    for _ in range(3):  # said again and again: the same
        watch.book.condition("trace", "critical", "no trace", ("full",), "")
        watch.see()
    assert watch.one()["times"] == 1


def test_an_acknowledgement_ends_with_the_incident(watch: Watch) -> None:
    watch.see(finding())
    body = fields_of(watch.book.acknowledge("heat/lab/r1", "ada", "on it"))
    assert body == {"what": "acknowledged", "id": "heat/lab/r1", "severity": "warning", "author": "ada",
                    "note": "on it"}  # fmt: skip
    assert watch.said == [("alarm", body)]
    assert watch.one()["state"] == "acknowledged"
    watch.see()
    watch.see(finding())
    shown = watch.one()
    assert (shown["state"], shown["times"]) == ("acknowledged", 2)
    watch.see()
    watch.see(finding(), after=SAME_S + 1)
    shown = watch.one()
    assert (shown["state"], shown["times"]) == ("raised", 3)


def test_what_is_over_is_shown_until_somebody_acknowledges_it_or_a_day_is_over(watch: Watch) -> None:
    watch.see(finding(), finding("other", "info"))
    assert watch.book.missed() == []
    watch.see()
    (missed,) = watch.book.missed()
    assert (missed["id"], missed["state"]) == ("heat/lab/r1", "cleared")
    assert watch.book.acknowledge("heat/lab/r1", "ada", "seen").note == "seen"
    assert watch.book.missed() == []
    assert watch.see() == [], "who was told that it is over is told no more"
    with pytest.raises(KeyError):
        watch.book.acknowledge("no/such", "ada")
    watch.see(finding("late"))
    watch.see()
    assert [m["id"] for m in watch.book.missed()] == ["late"]
    watch.see(after=alarms.MISSED_S)
    assert watch.book.missed() == []


def rung(watch: Watch) -> int:
    return sum(watch.book.load.raised.values())


def test_what_comes_again_within_the_hour_is_the_same_incident_and_rings_once(watch: Watch) -> None:
    watch.see(finding())
    watch.see(after=10)
    assert watch.see(finding(), after=SAME_S) == [("again", "heat/lab/r1")]
    shown = watch.one()
    assert (shown["raised_ns"], shown["times"], shown["again"]) == (T0 + NS, 2, True)
    assert rung(watch) == 1
    watch.see()
    assert watch.see(finding(), after=SAME_S + 1) == [("raised", "heat/lab/r1")]
    assert (rung(watch), watch.one()["raised_ns"]) == (2, watch.now)


@pytest.mark.parametrize(
    ("then", "after", "what"),
    [
        (finding(), 3000.0, "again"),
        (Finding("heat/lab/r1", "warning", "Heat is off", ("lab/r2",), (), 0.9), 3000.0, "raised"),
        (finding(severity="critical"), 300.0, "raised"),
    ],
)
def test_others_or_something_graver_is_another_incident(
    watch: Watch, then: Finding, after: float, what: str
) -> None:
    watch.see(finding())
    watch.see()
    assert watch.see(then, after=after) == [(what, "heat/lab/r1")]
    assert rung(watch) == (1 if what == "again" else 2)


def test_what_is_critical_rings_again_sooner(watch: Watch) -> None:
    watch.see(finding(severity="critical"))
    watch.see()
    assert watch.see(finding(severity="critical"), after=300) == [("again", "heat/lab/r1")]
    watch.see()
    assert watch.see(finding(severity="critical"), after=601) == [("raised", "heat/lab/r1")]


def test_a_reading_that_moves_between_guard_and_limit_is_one_incident(watch: Watch) -> None:
    guard, limit = finding("beyond/gpu.temp_c/guard"), finding("beyond/gpu.temp_c/limit", "critical")
    for _ in range(10):
        watch.see(guard, after=60)
        watch.see(limit, after=60)
    assert watch.book.load.raised == {"info": 0, "warning": 1, "critical": 1}
    watch.see(limit, after=2 * SAME_S)
    watch.see(guard)
    assert rung(watch) == 2, "it is less bad"


def test_an_incident_is_remembered_over_a_restart(watch: Watch, tmp_path: Path) -> None:
    watch.see(finding())
    watch.see()
    watch.book.save()
    again = Watch(tmp_path)
    assert again.see(finding(), after=600) == [("again", "heat/lab/r1")]
    assert rung(again) == 0


def test_what_was_suppressed_when_it_came_first_rings_when_it_comes_without_its_cause(watch: Watch) -> None:
    link, outage = finding("part/mqtt"), finding("silence/lab")
    causes = {outage.id: (link.id, LINGER_S)}
    watch.book.update([link, outage], watch.now, causes)
    watch.s += 100
    watch.book.update([], watch.now, causes)
    watch.s += 100
    assert rings(watch.book.update([outage], watch.now, causes)) == [outage.id]


@pytest.mark.parametrize("how", ["acknowledge", "shelve", "unshelve"])
def test_what_nobody_knows_of(watch: Watch, how: str) -> None:
    more = {"acknowledge": ("ada", ""), "shelve": (T0 + 60 * NS, "ada", "x"), "unshelve": ("ada",)}[how]
    watch.see()
    with pytest.raises(KeyError):
        getattr(watch.book, how)("nothing", *more)
    watch.see(finding())
    if how == "unshelve":
        with pytest.raises(KeyError):
            watch.book.unshelve("heat/lab/r1", "ada")
    assert watch.said == []


def test_a_shelf_ends_at_its_time(watch: Watch) -> None:
    watch.see(finding())
    watch.book.shelve("heat/lab/r1", watch.now + 100 * NS, "ada", "known")
    assert watch.see(finding()) == [("shelved", "heat/lab/r1")]
    assert watch.one()["state"] == "shelved"
    assert watch.see() == watch.see(finding()) == []  # gone and back again, nobody is told
    assert watch.see(finding(), after=50) == []
    assert watch.see(finding(), after=50) == [("returned", "heat/lab/r1")]
    assert watch.one()["state"] == "raised"


def test_a_shelf_of_what_is_over(watch: Watch) -> None:
    watch.see(finding())
    watch.book.shelve("heat/lab/r1", watch.now + 100 * NS, "ada", "known")
    watch.see()
    assert watch.one()["state"] == "shelved"
    assert watch.see(after=200) == []
    assert watch.book.listing() == []


def test_a_shelf_ends_when_it_gets_worse(watch: Watch) -> None:
    watch.see(finding())
    watch.book.shelve("heat/lab/r1", watch.now + 100 * NS, "ada", "known")
    watch.see(finding())
    assert watch.see(finding(severity="critical")) == [("returned", "heat/lab/r1")]
    watch.book.shelve("heat/lab/r1", watch.now + 100 * NS, "ada", "known")
    watch.see(finding(severity="critical"))
    body = watch.book.unshelve("heat/lab/r1", "bob")
    assert body.what == "unshelved"
    assert watch.see(finding(severity="critical")) == [("returned", "heat/lab/r1")]


@pytest.mark.parametrize("for_s", [0, -5, alarms.MAX_SHELF_S + 1])
def test_a_shelf_has_an_end(watch: Watch, for_s: float) -> None:
    watch.see(finding())
    with pytest.raises(ValueError, match="within the next 30 days"):
        watch.book.shelve("heat/lab/r1", watch.now + round(for_s * NS), "ada", "known")


def test_flapping_is_one_message(watch: Watch) -> None:
    said = []
    for _ in range(50):
        said += watch.see(finding()) + watch.see()
    first, *more = [[(what, "heat/lab/r1"), ("cleared", "heat/lab/r1")] for what in ("raised", "again")]
    assert said == [*first, *more[0] * (FLAPS - 1), ("flapping", "heat/lab/r1")]
    assert rung(watch) == 1
    assert watch.one()["state"] == "flapping"
    assert watch.one()["times"] == 50
    assert watch.book.active()[0].flapping
    watch.book.acknowledge("heat/lab/r1", "ada", "loose cable")
    assert watch.see() == [("acknowledged", "heat/lab/r1")]
    assert watch.see(after=700) == [("cleared", "heat/lab/r1")]
    assert watch.see(finding()) == [("again", "heat/lab/r1")]  # counted afresh


def test_flapping_that_stays_is_an_alarm(watch: Watch) -> None:
    for _ in range(10):
        watch.see(finding())
        watch.see()
    f = finding()
    watch.see(f)
    assert watch.see(f, after=300) == []
    assert watch.see(f, after=301) == [("calm", "heat/lab/r1")]
    assert watch.one()["state"] == "raised"


def test_now_and_then_is_not_flapping(watch: Watch) -> None:
    for k in range(10):
        assert watch.see(finding(), after=100) == [("again" if k else "raised", "heat/lab/r1")]
        assert watch.see(after=100) == [("cleared", "heat/lab/r1")]


def test_what_people_said_survives_a_restart(watch: Watch, tmp_path: Path) -> None:
    a, b, c = finding("a"), finding("b"), finding("c")
    watch.see(a, b, c)
    watch.book.acknowledge("a", "ada", "on it")
    watch.book.shelve("b", watch.now + 1000 * NS, "bob", "known")
    watch.see(a, b, c)
    again = Watch(tmp_path)
    assert again.see(a, b, c, after=10) == []  # nobody is told a second time
    states = {x["id"]: x["state"] for x in again.book.listing()}
    assert states == {"a": "acknowledged", "b": "shelved", "c": "raised"}
    assert [x.id for x in again.book.active()] == ["a", "c"]
    assert again.see(b, c) == [("cleared", "a")]
    assert again.see(b, c, after=2000) == [("returned", "b")]


def test_conditions_have_time_to_show_again(watch: Watch, tmp_path: Path) -> None:
    watch.book.condition("x", "warning", "x", (), "")
    watch.book.condition("y", "warning", "y", (), "")
    watch.see()
    watch.book.save()
    again = Watch(tmp_path)
    assert again.see(after=5) == []
    again.book.condition("x", "warning", "x", (), "")
    assert again.see(after=5) == []
    assert again.see(after=60) == [("cleared", "y")]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b"[]", b'{"format":1}', b'{"format":1,"alarms":[{}]}', b"[" * 99999]
)
def test_a_damaged_file_is_moved_aside_and_said(tmp_path: Path, data: bytes) -> None:
    for number in range(2):
        (tmp_path / "alarms.json").write_bytes(data)
        book = AlarmBook(tmp_path)
        assert "acknowledgements are lost" in book.fault
        kept = tmp_path / ("alarms.damaged" + (f".{number}" if number else ""))
        assert kept.read_bytes() == data
        assert not (tmp_path / "alarms.json").exists()
        book.update([finding()], T0)
        book.acknowledge("heat/lab/r1", "ada")
        assert book.fault == ""


def test_the_file_of_a_later_version_is_left_alone(watch: Watch, tmp_path: Path) -> None:
    watch.see(finding())
    watch.book.acknowledge("heat/lab/r1", "ada")
    path = tmp_path / "alarms.json"
    tree = json.loads(path.read_bytes())
    path.write_text(json.dumps({**tree, "format": 2, "alarms": {"other": "form"}}))
    before = path.read_bytes()
    with pytest.raises(
        StorageError, match=r"alarms\.json: alarms of format 2; .* start the version that wrote it"
    ):
        AlarmBook(tmp_path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("left", [0, 1, 60])
def test_what_people_said_outlives_a_loss_of_power(watch: Watch, tmp_path: Path, left: int) -> None:
    """A file that was renamed and not forced to the disk may be empty afterwards, or a part of itself."""
    watch.see(finding())
    watch.book.acknowledge("heat/lab/r1", "ada", "on it")
    watch.see(finding(), finding("new"), after=20)
    assert {a["id"]: a["state"] for a in AlarmBook(tmp_path).listing()} == {
        "heat/lab/r1": "acknowledged", "new": "raised",
    }  # fmt: skip
    os.truncate(watch.book.recent, left)
    again = AlarmBook(tmp_path)
    assert [(a["id"], a["state"], a["ack_author"]) for a in again.listing()] == [
        ("heat/lab/r1", "acknowledged", "ada")
    ]
    assert again.fault == ""


def test_the_file_of_an_earlier_version_is_newer_than_what_was_left_beside_it(
    watch: Watch, tmp_path: Path
) -> None:
    watch.see(finding(), after=20)
    assert watch.book.recent.exists()
    watch.book.path.write_text('{"format":1,"alarms":[]}')
    assert AlarmBook(tmp_path).listing() == []


def test_a_disk_that_refuses_stops_nothing(watch: Watch, tmp_path: Path) -> None:
    (tmp_path / f".alarms.json.{os.getpid()}").mkdir()
    watch.see(finding())
    watch.book.acknowledge("heat/lab/r1", "ada", "on it")
    assert watch.book.counts["not_saved"] == 1
    assert "cannot be written" in watch.book.fault
    assert watch.one()["state"] == "acknowledged"
    (tmp_path / f".alarms.json.{os.getpid()}").rmdir()
    watch.see()
    watch.see(after=20)
    assert watch.book.fault == ""


def test_it_has_bounds(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarms, "MAX_ALARMS", 10)
    monkeypatch.setattr(alarms, "MAX_CONDITIONS", 5)
    monkeypatch.setattr(alarms, "KEPT_CLEARED", 3)
    for i in range(20):
        watch.book.condition(f"c{i}", "info", "x" * 10_000, ("y" * 10_000,) * 100, "z" * 10_000)
    watch.see(*[finding(f"f{i}") for i in range(20)])
    assert len(watch.book.listing()) == 10
    assert watch.book.counts["dropped"] == 15 + 16, "one of those kept counts the others"
    for i in range(20):
        watch.book.clear(f"c{i}")
    watch.see()
    assert len(watch.book.listing(cleared=True)) == 3
    watch.book.save()
    assert (watch.book.path).stat().st_size < 100_000


def test_of_more_alarms_than_there_is_room_for_the_gravest_are_kept(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarms, "MAX_ALARMS", 10)
    mild = [finding(f"f{i}", "info") for i in range(12)]
    watch.see(*mild)
    watch.see(*mild, finding("late", "critical"))
    listed = {shown["id"]: shown for shown in watch.book.listing()}
    assert next(iter(listed)) == "late"
    assert (len(listed), listed["alarms/more"]["count"], listed["alarms/more"]["severity"]) == (10, 4, "info")
    watch.see(*mild[3:], finding("late", "critical"))
    assert {shown["id"] for shown in watch.book.listing()} == {"late", *(f.id for f in mild[3:])}


def test_the_gravest_first(watch: Watch) -> None:
    watch.see(finding("a", "info"), finding("b", "critical"))
    watch.see(finding("a", "info"), finding("b", "critical"), finding("c", "critical"), finding("d", "odd"))
    assert [x["id"] for x in watch.book.listing()] == ["c", "b", "d", "a"]
    assert watch.book.listing()[2]["severity"] == "warning"


LINGER_S = 30.0  # for which an alarm may outlast its cause


def rings(changes: list[alarms.AlarmChange]) -> list[str]:
    return [c.alarm.id for c in changes if c.what in ("raised", "returned")]


def test_what_follows_from_another_alarm_is_suppressed_while_that_lasts(watch: Watch) -> None:
    link, outage = finding("part/mqtt"), finding("silence/lab")
    causes = {outage.id: (link.id, LINGER_S), link.id: (link.id, LINGER_S)}
    watch.s += 1
    changes = watch.book.update([link, outage], watch.now, causes)
    assert [(c.what, c.alarm.id) for c in changes] == [("raised", link.id), ("suppressed", outage.id)]
    shown = {a["id"]: a for a in watch.book.listing()}
    assert (shown[outage.id]["state"], shown[outage.id]["cause"]) == ("suppressed", link.id)
    assert watch.book.figures()["suppressed"] == 1
    watch.s += 1
    assert rings(watch.book.update([outage], watch.now, causes)) == [], "it has a while to end as well"
    watch.s += LINGER_S
    assert rings(watch.book.update([outage], watch.now, causes)) == [outage.id]
    watch.s += 1
    (over,) = watch.book.update([], watch.now, causes)
    assert (over.what, over.alarm.id) == ("cleared", outage.id)


def test_an_alarm_is_as_grave_as_what_it_suppresses(watch: Watch) -> None:
    link, sink = finding("part/mqtt"), finding("sink/agents", "critical")
    causes = {sink.id: (link.id, LINGER_S)}
    watch.book.update([link], watch.now, causes)
    for what, found in (("critical", [link, sink]), ("critical", [link, sink]), ("warning", [link])):
        for after in (1.0, 1.0, alarms.EASED_S):
            watch.s += after
            watch.book.update(found, watch.now, causes)
        assert watch.book.alarms[link.id].severity == what
    assert watch.book.load.raised == {"info": 0, "warning": 1, "critical": 0}


def test_the_first_of_a_burst_is_marked_and_a_flood_is_counted(watch: Watch) -> None:
    many = [finding(f"x/{i}") for i in range(alarms.FLOOD_BEGINS)]
    watch.see(many[0])
    watch.see(*many[:2])
    assert [watch.book.alarms[f.id].first_up for f in many[:2]] == [True, False]
    assert watch.book.figures()["flood"] == 0
    watch.see(*many)
    figures = watch.book.figures()
    assert (figures["flood"], figures["floods"]) == (1, 1)
    assert figures["last_hour"] == figures["last_ten_minutes"] == alarms.FLOOD_BEGINS
    watch.see(*many, after=100)
    watch.see(*many, after=alarms.FLOOD_WINDOW_S)
    figures = watch.book.figures()
    assert (figures["flood"], figures["floods"], figures["last_ten_minutes"]) == (0, 1, 0)
    assert 100 <= figures["flood_s"] <= 100 + alarms.FLOOD_WINDOW_S
    watch.see(*many, finding("late"))
    assert watch.book.alarms["late"].first_up, "the burst before is over"
    watch.see(*many, after=alarms.STALE_S)
    assert watch.book.figures()["stale"] == alarms.FLOOD_BEGINS
    assert watch.book.figures()["last_hour"] == 0
