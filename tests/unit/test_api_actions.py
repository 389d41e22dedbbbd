"""Actions over the interface: roles, authors in the journal, refusals, and requests that are repeated."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from tests.support.in_process_daemon import Pod, serve
from tests.support.journal_bodies import body_of
from twin.api import service
from twin.api.actions import Kept
from twin.api.service import MAX_BODY
from twin.catalogue import NS, TABLES
from twin.daemon.alarms import AlarmBook

CAP = "gpu.power_cap_w"


def test_a_request_is_an_event_in_the_name_of_the_token(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        body = {"control": CAP, "names": ["lab/h/r1"], "hi": 900, "for_s": 60, "reason": "noise\x1b[31m test"}
        status, done = await pod.ask("POST", "/api/v1/requests", "operator", body)
        assert (status, done["names"]) == (200, 72)
        (held,) = pod.twin.engine.intake.requests.values()
        assert (held.id, held.author, held.hi, held.lo) == (done["id"], "operator-1", 900.0, -math.inf)
        assert held.expires_ns == done["expires_ns"] == pod.twin.now_ns - NS + 60 * NS
        assert held.reason.isprintable()
        _, shown = await pod.ask("GET", "/api/v1/requests")
        assert (shown["requests"][0]["author"], shown["requests"][0]["names_total"]) == ("operator-1", 72)
        assert shown["requests"][0]["lo"] is None
        status, _ = await pod.ask("DELETE", f"/api/v1/requests/{done['id']}", "operator")
        assert (status, pod.twin.engine.intake.requests) == (200, {})
        status, tree = await pod.ask("DELETE", f"/api/v1/requests/{done['id']}", "operator")
        assert (status, "no request" in tree["error"]) == (409, True)

    serve(tmp_path, check)


X = {"control": CAP, "names": ["r1"], "hi": 900, "reason": "x"}
ON = {"control": "node.power_state", "names": ["lab/h/r1/node0"], "want": "on", "reason": "mended"}
BAD = [
    ("requests", {"control": "gpu.x", "names": ["r1"], "hi": 1, "reason": "x"}, 404, "is not a control"),
    ("requests", {"control": CAP, "names": ["lab/h/rk1"], "hi": 1, "reason": "x"}, 404, "you mean lab/h/r1"),
    ("requests", {"control": CAP, "names": ["r1"], "reason": "x"}, 400, "at least one of them"),
    ("requests", {"control": CAP, "names": ["r1"], "hi": "low", "reason": "x"}, 400, "hi: expected a number"),
    ("requests", {"control": CAP, "names": ["r1"], "hi": 1, "reason": " "}, 400, "reason: expected"),
    ("requests", {"control": CAP, "names": ["r1"], "hi": 1}, 400, "missing required field `reason`"),
    ("requests", X | {"author": "eve"}, 400, "unknown field"),
    ("requests", X | {"names": []}, 409, "names no gpu"),
    ("requests", X | {"lo": 950}, 409, "expected lo <= hi"),
    ("requests", X | {"for_s": -1}, 400, "for_s: expected"),
    ("requests", ON, 400, "for_s: missing"),
    ("requests", ON | {"for_s": 3600}, 400, "lasts at most 900 s"),
    ("requests", ON | {"expires_ns": 0}, 400, "for_s: missing"),
    ("requests", X | {"expires_ns": 5}, 409, "expired already"),
    ("approvals", {"policy": "thermal_guard", "control": CAP}, 400, "for_s: missing"),
    ("approvals", {"policy": "thermal_guard", "control": CAP, "expires_ns": 0}, 400, "for_s: missing"),
    ("approvals", {"policy": "operator", "control": CAP, "for_s": 9}, 409, "of operator is act"),
    ("approvals", {"policy": "thermal_gard", "control": CAP, "for_s": 9}, 404, "did you mean thermal_guard?"),
    ("maintenance", {"table": "rack", "names": ["r9"], "for_s": 9, "reason": "x"}, 404, "no rack r9"),
    ("maintenance", {"table": "x", "names": ["r9"], "for_s": 9, "reason": "x"}, 404, "no table x"),
    ("hold", b"{", 400, "the body is not JSON"),
    ("hold", b"[" * 100_000, 400, "the body is"),
    ("hold", b"\xff\xfe", 400, "the body is"),
    ("hold", {}, 400, "missing required field `reason`"),
    ("hold", b" " * (MAX_BODY + 1), 413, "at most 1 MiB"),
]  # fmt: skip


def test_a_wrong_body_is_told_what_is_expected(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        for path, body, status, why in BAD:
            got, tree = await pod.ask("POST", f"/api/v1/{path}", "operator", body)
            assert got == status, (path, str(body)[:100], tree)
            assert why in tree["error"], (path, tree)
        assert pod.twin.engine.intake.requests == {}
        assert pod.twin.engine.arbiter.mode == "normal"

    serve(tmp_path, check)


def test_states_go_by_their_names(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        body = {"control": "node.service_level", "names": ["r1/node3"], "want": "drained", "reason": "fan"}
        status, _ = await pod.ask("POST", "/api/v1/requests", "operator", body)
        assert status == 200
        (held,) = pod.twin.engine.intake.requests.values()
        assert held.want == TABLES["node"].control_by_name["service_level"].states.index("drained")

    serve(tmp_path, check)


def test_approval_hold_release_and_resume(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        pod.tick({"gpu.temp_c": 95.0})
        _, before = await pod.ask("GET", "/api/v1/approvals")
        assert [(w["policy"], w["count"]) for w in before["wanting"]] == [("thermal_guard", 144)]
        body = {"policy": "thermal_guard", "control": CAP, "for_s": 3600}
        _, done = await pod.ask("POST", "/api/v1/approvals", "operator", body)
        _, after = await pod.ask("GET", "/api/v1/approvals")
        assert (after["wanting"], after["approvals"][0]["author"]) == ([], "operator-1")
        _, tree = await pod.ask("GET", "/api/v1/summary")
        assert [(c["policy"], c["count"], c["reasons"]) for c in tree["commanded"]] == [
            ("thermal_guard", 144, ["GPU temperature is beyond its guard"])
        ]
        arbiter = pod.twin.engine.arbiter
        for path, role, mode in (("hold", "operator", "held"), ("resume", "operator", "normal"),
                                 ("release", "admin", "released"), ("resume", "operator", "normal"),
                                 ):  # fmt: skip
            status, _ = await pod.ask("POST", f"/api/v1/{path}", role, {"reason": "test"})
            assert (status, arbiter.mode) == (200, mode)
        assert (await pod.ask("DELETE", f"/api/v1/approvals/{done['id']}", "operator"))[0] == 200
        authors = [body_of(line.record)["event"]["author"] for line in pod.live.lines if line.kind == "event"]
        assert authors == ["operator-1", "operator-1", "operator-1", "admin-1", "operator-1", "operator-1"]

    serve(tmp_path, check)


def test_arming_takes_the_sentence_and_the_reason_is_journaled(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        body = {"policy": "thermal_guard", "authority": "act", "reason": "tested for a week"}
        for said in ("", "yes", "thermal_guard may act on LAB"):
            status, tree = await pod.ask("POST", "/api/v1/authority", "admin", body | {"acknowledge": said})
            assert status == 400
            assert '"thermal_guard may act on lab"; armed now, it would command nothing' in tree["error"]
        body["acknowledge"] = "thermal_guard may act on lab"
        assert (await pod.ask("POST", "/api/v1/authority", "operator", body))[0] == 403
        pod.live.veto = lambda event: "not over this broker"
        status, tree = await pod.ask("POST", "/api/v1/authority", "admin", body)
        assert (status, tree["error"]) == (409, "not over this broker")
        assert not [n for n in pod.notes if n[0] == "authority"]
        pod.live.veto = lambda event: None
        assert (await pod.ask("POST", "/api/v1/authority", "admin", body))[0] == 200
        assert pod.twin.engine.intake.authority["thermal_guard"] == "act"
        (note,) = [n for kind, n in pod.notes if kind == "authority"]
        assert (note["author"], note["reason"]) == ("admin-1", "tested for a week")
        less = {"policy": "thermal_guard", "authority": "off", "reason": "x"}
        assert (await pod.ask("POST", "/api/v1/authority", "admin", less))[0] == 200

    serve(tmp_path, check)


def test_a_maintenance_window_is_opened_shown_and_closed(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        body = {"table": "rack", "names": ["r1"], "for_s": 3600, "reason": "new pump"}
        status, done = await pod.ask("POST", "/api/v1/maintenance", "operator", body)
        assert status == 200, done
        _, tree = await pod.ask("GET", "/api/v1/maintenance")
        assert [(w["names"], w["author"]) for w in tree["windows"]] == [(["lab/h/r1"], "operator-1")]
        assert (await pod.ask("DELETE", f"/api/v1/maintenance/{done['id']}", "operator"))[0] == 200
        _, tree = await pod.ask("GET", "/api/v1/maintenance")
        assert tree["windows"] == []

    serve(tmp_path, check)


def test_alarms_are_acknowledged_and_shelved_by_whom_the_token_names(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        book = AlarmBook(tmp_path / "book")
        pod.live.alarms = book
        pod.tick({"gpu.temp_c": 95.0})
        book.update(pod.twin.engine.findings.active.values(), pod.twin.now_ns)
        _, tree = await pod.ask("GET", "/api/v1/alarms?entity=lab/h/r1&severity=critical")
        (identity,) = [a["id"] for a in tree["alarms"]]
        assert identity == "beyond/gpu.temp_c/limit"  # slashes in the path
        at = f"/api/v1/alarms/{identity}"
        assert (await pod.ask("POST", f"{at}/ack", "viewer", {}))[0] == 403
        assert (await pod.ask("POST", f"{at}/ack", "operator", {"note": "on it"}))[0] == 200
        assert book.alarms[identity].ack_author == "operator-1"
        status, _ = await pod.ask("POST", f"{at}/shelve", "operator", {"for_s": 60, "reason": "known"})
        assert (status, book.alarms[identity].state) == (200, "shelved")
        _, tree = await pod.ask("GET", "/api/v1/summary")
        assert (tree["alarm_counts"]["critical"], tree["alarm_counts"]["shelved"]) == (0, 1)
        assert (await pod.ask("POST", f"{at}/unshelve", "operator"))[0] == 200
        status, tree = await pod.ask("POST", f"{at}/unshelve", "operator")
        assert (status, "is not shelved" in tree["error"]) == (409, True), "it is not over"
        assert (await pod.ask("POST", "/api/v1/alarms/nobody/ack", "operator", {}))[0] == 404
        status, tree = await pod.ask("POST", f"{at}/shelve", "operator", {"until_ns": 5, "reason": "x"})
        assert (status, "within the next" in tree["error"]) == (409, True)
        said = [(n["what"], n.get("author")) for kind, n in pod.notes if kind == "alarm"]
        assert said == [
            ("acknowledged", "operator-1"),
            ("shelved", "operator-1"),
            ("unshelved", "operator-1"),
        ]

    serve(tmp_path, check)


def test_the_same_question_with_the_same_key_acts_once(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        body = {"control": CAP, "names": ["r1"], "hi": 900, "for_s": 60, "reason": "x"}
        key = {"Idempotency_Key": "k-1"}
        first = await pod.ask("POST", "/api/v1/requests", "operator", body, **key)
        again = await pod.ask("POST", "/api/v1/requests", "operator", body, **key)
        assert first == again
        assert len(pod.twin.engine.intake.requests) == 1
        status, tree = await pod.ask("POST", "/api/v1/requests", "operator", body | {"hi": 800}, **key)
        assert (status, "used for another request" in tree["error"]) == (409, True)
        status, other = await pod.ask("POST", "/api/v1/requests", "admin", body, **key)
        assert (status, other["id"] != first[1]["id"]) == (200, True)  # another person's key is another key
        # A request that the engine refused stays refused: a repetition must not be taken for a success.
        wrong = X | {"lo": 950}  # without a duration it is the same event each time
        for _ in range(2):
            status, tree = await pod.ask("POST", "/api/v1/requests", "operator", wrong, Idempotency_Key="k-2")
            assert (status, "lo <= hi" in tree["error"]) == (409, True)

    serve(tmp_path, check)


class Forgetful(Kept):
    """The answers of an interface that starts anew before each request, beside an engine that goes on."""

    def __init__(self) -> None:
        """Keep nothing."""

    @property
    def held(self) -> OrderedDict[tuple[str, str, str], tuple[bytes, web.Response | None]]:  # type: ignore[override]
        """No answers."""
        return OrderedDict()


def test_a_request_that_was_refused_is_not_done_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(pod: Pod) -> None:
        wrong = X | {"lo": 950}
        for _ in range(2):
            status, tree = await pod.ask("DELETE", "/api/v1/requests/no", "operator", Idempotency_Key="k")
            assert (status, "no request no" in tree["error"]) == (409, True)
            status, tree = await pod.ask("POST", "/api/v1/requests", "operator", wrong, Idempotency_Key="k")
            assert (status, "lo <= hi" in tree["error"]) == (409, True)
            status, tree = await pod.ask("DELETE", "/api/v1/maintenance/w", "operator", Idempotency_Key="k")
            assert status == 409

    monkeypatch.setattr(service, "Kept", Forgetful)
    serve(tmp_path, check)


def test_a_repeated_request_with_a_duration_ends_as_before_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = {
        "requests": X | {"for_s": 60},
        "approvals": {"policy": "thermal_guard", "control": CAP, "for_s": 60},
        "maintenance": {"table": "rack", "names": ["r1"], "reason": "x", "for_s": 60},
    }

    async def check(pod: Pod) -> None:
        for path, body in bodies.items():
            answers = []
            for _ in range(2):
                status, tree = await pod.ask("POST", f"/api/v1/{path}", "operator", body, Idempotency_Key="k")
                assert (status, tree.get("done")) == (200, True), (path, tree)
                answers.append({name: value for name, value in tree.items() if name != "tick"})
            assert answers[0] == answers[1]

    monkeypatch.setattr(service, "Kept", Forgetful)
    serve(tmp_path, check)


def test_what_cannot_be_taken_up_now_says_so_and_may_be_tried_again(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        put, pod.live.put_event = pod.live.put_event, lambda event: False
        key = {"Idempotency_Key": "k"}
        status, tree = await pod.ask("POST", "/api/v1/hold", "operator", {"reason": "x"}, **key)
        assert (status, "queue of events is full" in tree["error"]) == (409, True)
        pod.live.put_event = put
        assert (await pod.ask("POST", "/api/v1/hold", "operator", {"reason": "x"}, **key))[0] == 200

    serve(tmp_path, check)


def test_reload_reads_tokens_and_configuration(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        authors: list[str] = []

        async def reload(author: str) -> list[str]:
            authors.append(author)
            return ["site.yaml: $.x: wrong"] if len(authors) == 1 else []

        pod.live.reload = reload
        status, tree = await pod.ask("POST", "/api/v1/reload", "admin")
        assert (status, tree["error"]) == (409, "site.yaml: $.x: wrong")
        assert (await pod.ask("POST", "/api/v1/reload", "admin"))[0] == 200
        assert authors == ["admin-1", "admin-1"]
        pod.tokens_file.write_text("tokens: 3")
        assert (await pod.ask("POST", "/api/v1/reload", "admin"))[0] == 409
        assert (await pod.ask("GET", "/api/v1/whoami", "viewer"))[0] == 200

    serve(tmp_path, check)


def test_a_story_is_told_of_a_simulated_site_only_and_stands_in_the_summary(tmp_path: Path) -> None:
    told = {"chapter": 1, "of": 2, "title": "A pump fails", "text": "it trips\x1b[31m"}

    async def check(pod: Pod) -> None:
        status, _ = await pod.ask("POST", "/api/v1/story", "operator", told)
        assert status == 409
        config = msgspec.structs.replace(pod.loaded.config, simulated=True)
        pod.live.loaded = replace(pod.loaded, config=config)
        assert (await pod.ask("POST", "/api/v1/story", "viewer", told))[0] == 403
        assert (await pod.ask("POST", "/api/v1/story", "operator", told | {"chapter": 3}))[0] == 400
        assert (await pod.ask("GET", "/api/v1/summary"))[1]["story"] is None
        await pod.ask("POST", "/api/v1/story", "operator", told)
        story = (await pod.ask("GET", "/api/v1/summary"))[1]["story"]
        assert (story["chapter"], story["of"], story["since_ns"]) == (1, 2, pod.twin.engine.state.now_ns)
        assert story["text"].isprintable()
        assert pod.notes[-1][0] == "story"
        pod.tick()
        await pod.ask("POST", "/api/v1/story", "operator", told | {"text": "it is answered"})
        again = (await pod.ask("GET", "/api/v1/summary"))[1]["story"]
        assert (again["text"], again["since_ns"]) == ("it is answered", story["since_ns"])
        await pod.ask("POST", "/api/v1/story", "operator", {})
        assert (await pod.ask("GET", "/api/v1/summary"))[1]["story"] is None

    serve(tmp_path, check)
