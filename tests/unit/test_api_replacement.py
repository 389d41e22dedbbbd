"""Replacement over HTTP: the plan, the history, the record, and what people say of repairs and tests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.node_replacement import PHASES, PLACED_LAST, RESERVED, SUSPECT
from policies.node_replacement.phases import DRAINING, OUT, RMA
from tests.support.builders import START_NS
from tests.support.in_process_daemon import Pod, serve
from tests.support.journal_bodies import body_of
from tests.support.leaving_nodes import Leaving, outed
from tests.support.scripted_health import ailing
from twin.api.node_service import MAX_NOTE
from twin.catalogue import NS
from twin.contracts import DEGRADED, FAILED, OtherRecord
from twin.daemon.policy_accounts import PolicyAccounts
from twin.run.journal import Chain
from twin.telemetry import JobStarted

NODE = "lab/h/r1/node3"
NASTY = "\x1b[31m[bold]`|evil\u202e"


def paths_of(node: str = NODE) -> dict[str, str]:
    return {"repaired": f"/api/v1/nodes/{node}/repaired", "tested": f"/api/v1/nodes/{node}/tested",
            "rma": f"/api/v1/nodes/{node}/rma"}  # fmt: skip


def test_what_people_say_of_a_node_is_an_event_with_their_name(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        at = paths_of("r1/node3")
        status, done = await pod.ask("POST", at["repaired"], "operator", {"note": f"ticket 7\n{NASTY}"})
        assert (status, done["node"], done["done"]) == (200, NODE, True)
        assert "no policy named replacement" in done["warnings"][0]
        status, done = await pod.ask(
            "POST", at["tested"], "operator", {"passed": False, "test": "burn", "note": "GPU 2 hangs"}
        )
        assert (status, done["passed"]) == (200, False)
        page = pod.twin.engine.book.service()
        assert (page.result[3], page.repaired_ns[3] > START_NS) == (0, True)
        lines = [body_of(line.record)["event"] for line in pod.live.lines if line.kind == "event"]
        repair = next(e for e in lines if e["type"] == "NodeRepaired")
        assert (repair["author"], repair["name"]) == ("operator-1", NODE)
        assert repair["note"].startswith("ticket 7 / ")
        assert "\x1b" not in repair["note"]
        test = next(e for e in lines if e["type"] == "NodeTested")
        assert (test["test"], test["detail"]) == ("burn, reported by operator-1", "GPU 2 hangs")

    serve(tmp_path, check)


@pytest.mark.parametrize(
    ("node", "what", "body", "status", "why"),
    [
        ("r1/node99", "repaired", {}, 404, "no node r1/node99 on this site"),
        ("r1/node99", "repaired", {}, 404, "did you mean"),
        ("node3", "repaired", {}, 404, "did you mean lab/h/r1/node3, lab/h/r2/node3?"),
        ("r1", "repaired", {}, 404, "is a rack; expected a node"),
        ("r1/node3/gpu1", "tested", {"passed": True}, 404, "is a GPU; expected a node"),
        (NODE, "repaired", {"note": "x" * (MAX_NOTE + 1)}, 400, "expected at most 2,000"),
        (NODE, "repaired", {"notes": "x"}, 400, "the body is not valid"),
        (NODE, "tested", {}, 400, "passed"),
        (NODE, "tested", {"passed": 1}, 400, "the body is not valid"),
        (NODE, "tested", {"passed": True, "test": "x" * 81}, 400, "at most 80"),
        (NODE, "tested", {"passed": True, "ended_ns": START_NS + 7200 * NS}, 400, "in the future"),
        (NODE, "tested", {"passed": True, "ended_ns": 2**63}, 400, "expected an instant"),
        (
            NODE,
            "tested",
            {"passed": True, "began_ns": START_NS, "ended_ns": START_NS - 1},
            400,
            "began before",
        ),
        (NODE, "tested", {"passed": True, "ended_ns": 10**9}, 409, "older test"),
    ],
)
def test_what_cannot_be_so_is_refused_and_changes_nothing(
    tmp_path: Path, node: str, what: str, body: dict[str, Any], status: int, why: str
) -> None:
    async def check(pod: Pod) -> None:
        known = {"passed": True, "ended_ns": START_NS}
        assert (await pod.ask("POST", paths_of()["tested"], "operator", known))[0] == 200
        got, tree = await pod.ask("POST", paths_of(node)[what], "operator", body)
        assert (got, why in tree["error"]) == (status, True), tree
        page = pod.twin.engine.book.service()
        assert (page.result[3], page.ended_ns[3], page.repaired_ns.any()) == (1, START_NS, False)

    serve(tmp_path, check)


def test_without_the_policy_everything_answers_and_says_how_to_add_it(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        for path in ("/api/v1/replacement", "/api/v1/replacement/history"):
            status, tree = await pod.ask("GET", path)
            assert (status, tree["runs"]) == (200, False)
            assert "policies: {replacement: {}}" in tree["notes"][-1]
        status, tree = await pod.ask("GET", paths_of()["rma"])
        assert (status, tree["node"], tree["planned"]) == (200, NODE, None)
        _, summary = await pod.ask("GET", "/api/v1/summary")
        assert not any(section["policy"] == "replacement" for section in summary["sections"])
        _, text = await pod.ask("GET", "/metrics")
        assert "racktwin_replacement" not in text

    serve(tmp_path, check)


def test_the_plan_tells_what_was_weighed_and_what_is_awaited(tmp_path: Path) -> None:
    policy = Leaving()

    async def check(pod: Pod) -> None:
        outed(policy, 3, pod.twin.now_ns)
        outed(policy, 7, pod.twin.now_ns, SUSPECT)
        outed(policy, 5, pod.twin.now_ns, RMA)
        outed(policy, 9, pod.twin.now_ns, DRAINING)
        policy.set("spare_pair", {3: 41, 20: 41})
        pod.tick(None)
        pod._events.append(JobStarted(id="j", job="big", nodes=("lab/h/r1/node9",), kind="training"))
        pod.tick({"node.service_level_state": 0.0})
        status, tree = await pod.ask("GET", "/api/v1/replacement")
        assert (status, tree["runs"], tree["authority"], tree["total"]) == (200, True, "act", 4)
        assert [r["node"].rpartition("/")[2] for r in tree["nodes"]] == ["node5", "node3", "node9", "node7"]
        assert {p: n for p, n in tree["phases"].items() if n} == {
            "in_service": 32, "suspect": 1, "draining": 1, "out": 1, "rma": 1}  # fmt: skip
        assert tree["commanded"] == {"cordoned": 0, "draining": 0, "drained": 1, "replace": 0}, (
            "one at a time"
        )
        by = {r["phase"]: r for r in tree["nodes"]}
        out = by["out"]
        assert out["waits"] == "for its repair: racktwin device repaired lab/h/r1/node3"
        assert out["spare"] == pod.twin.site.name("node", 20)
        assert out["costs_gpu_h"] == {
            "watch": 410.0, "cordon": 212.0, "at_next": 88.0, "save_now": 41.5, "at_once": 120.0}  # fmt: skip
        assert out["gate"] == {"at_ns": out["gate"]["at_ns"], "act_gpu_h": 41.5, "wait_gpu_h": 410.0,
                               "act_pu": 0.03, "wait_pu": 0.61, "use_pu": 0.0}  # fmt: skip
        assert (out["cause"], out["course"], out["offences"], out["level"]) == (
            "hardware", "save_now", 1, "drained")  # fmt: skip
        assert out["reason"].startswith("row remaps fail")
        assert by["draining"]["waits"] == "for the scheduler to take big off it"
        assert "racktwin device report lab/h/r1/node5" in by["rma"]["waits"]
        assert by["suspect"]["read_back"] == "in_service"
        assert (out["chance_1h_pu"], out["chance_24h_pu"]) == (0.12, 0.61)
        ailing(pod.twin.engine).say("node", 3, FAILED, "it is off")
        status, tree = await pod.ask("GET", "/api/v1/replacement?node=r1/node3")
        assert tree["nodes"][0]["chance_1h_pu"] is tree["nodes"][0]["chance_24h_pu"] is None, "it has failed"
        status, tree = await pod.ask("GET", "/api/v1/replacement?phase=out,rma&limit=1")
        assert (tree["total"], len(tree["nodes"]), tree["next_offset"]) == (2, 1, 1)
        status, tree = await pod.ask("GET", "/api/v1/replacement?node=r2/node1")
        assert [r["phase"] for r in tree["nodes"]] == ["in_service"]
        (well,) = tree["nodes"]  # nobody suspects it, and no model forecasts here: nothing is known
        assert (well["weighed"], out["weighed"]) == (False, True)
        assert well["chance_1h_pu"] is well["chance_24h_pu"] is well["sure_pu"] is None
        assert set(well["costs_gpu_h"].values()) == {None}
        for path, status in (("phase=gone", 400), ("node=r1/node99", 404), ("limit=0", 400),
                             ("limit=1001", 400),
                             ("foo=1", 400)):  # fmt: skip
            assert (await pod.ask("GET", f"/api/v1/replacement?{path}"))[0] == status

    serve(tmp_path, check, more=[policy])


def test_marks_in_the_scheduler_are_told_also_where_nobody_looks_after_them(tmp_path: Path) -> None:
    policy = Leaving()

    async def check(pod: Pod) -> None:
        placed = np.zeros(pod.twin.site.sizes["node"])
        placed[[3, 4, 5]], placed[9] = PLACED_LAST, RESERVED
        for authority, alone in (("act", False), ("approve", True), ("advise", True), ("off", True)):
            pod.twin.engine.intake.authority["replacement"] = authority
            pod.tick({"node.placement_state": placed})
            notes = " ".join((await pod.ask("GET", "/api/v1/replacement"))[1]["notes"])
            assert "gives 3 nodes to jobs after all others, and keeps 1 for spares" in notes
            assert ("these marks stay until" in notes) is alone
        (row,) = (await pod.ask("GET", "/api/v1/replacement?node=r1/node9"))[1]["nodes"]
        assert row["placement"] == "kept"
        pod.tick({"node.placement_state": 0.0})
        assert "after all others" not in str((await pod.ask("GET", "/api/v1/replacement"))[1]["notes"])

    serve(tmp_path, check, more=[policy])


def test_what_is_only_advised_does_not_read_as_done(tmp_path: Path) -> None:
    policy = Leaving()

    async def check(pod: Pod) -> None:
        outed(policy, 3, pod.twin.now_ns, DRAINING)
        policy.set("withdrawn_ns", {3: 0})
        for authority, waits in (("advise", "nothing was commanded"), ("approve", "policy approvals"),
                                 ("act", "for the scheduler to")):  # fmt: skip
            pod.twin.engine.intake.authority["replacement"] = authority
            pod.tick(None)
            (row,) = (await pod.ask("GET", "/api/v1/replacement"))[1]["nodes"]
            assert waits in row["waits"]
            assert row["phase_words"].startswith("in service; if it may act: ") == (authority != "act")

    serve(tmp_path, check, more=[policy])


def test_the_summary_and_the_metrics_count(tmp_path: Path) -> None:
    policy = Leaving()

    async def check(pod: Pod) -> None:
        for node in range(12):
            outed(policy, node, pod.twin.now_ns, DRAINING)
        for column, value in {"score_count": 4, "score_brier": 0.4, "score_predicted_gpu_h": 10.0,
                              "score_actual_gpu_h": 12.0, "score_tests": 3,
                              "score_bad": 2}.items():  # fmt: skip
            policy.set(column, {3: value})
        pod.tick(None)
        PolicyAccounts(pod.live).observe()
        _, summary = await pod.ask("GET", "/api/v1/summary")
        section = next(s for s in summary["sections"] if s["policy"] == "replacement")
        table = next(t for t in section["tables"] if t["name"] == "nodes")
        assert (table["total"], len(table["rows"])) == (12, 8)
        _, text = await pod.ask("GET", "/metrics")
        for line in (
            'racktwin_replacement_nodes{phase="draining"} 12.0',
            'racktwin_replacement_spares{what="have"} 0.0',
            "racktwin_replacement_predictions_total 4.0",
            "racktwin_replacement_brier 0.1",
            'racktwin_replacement_gpu_hours_total{what="predicted"} 10.0',
            'racktwin_replacement_gpu_hours_total{what="lost"} 12.0',
            'racktwin_replacement_tests_total{what="bad"} 2.0',
        ):
            assert line in text, line

    serve(tmp_path, check, more=[policy])


def test_history_in_order_and_in_pages(tmp_path: Path) -> None:
    policy = Leaving()

    async def check(pod: Pod) -> None:
        outed(policy, 3, pod.twin.now_ns, DRAINING)
        gate = {"what": "gate", "node": NODE, "course": "at_once", "act_gpu_h": 10.0, "wait_gpu_h": 90.0,
                "act_pu": 0.2, "wait_pu": 0.6, "at_ns": START_NS}  # fmt: skip
        pod._events.append(JobStarted(id="j", job="big", nodes=("lab/h/r1/node9",), kind="training"))
        policy.say({"what": "phase", "node": NODE, "from": "suspect", "to": "draining", "why": NASTY}, gate)
        pod.tick(None)
        policy.say({**gate, "what": "outcome", "failed": True, "lost_gpu_h": 20.0})
        policy.set("phase", {3: OUT})
        pod.tick(None)
        assert (await pod.ask("POST", paths_of()["repaired"], "operator", {"note": "new HBM"}))[0] == 200
        status, tree = await pod.ask("GET", "/api/v1/replacement/history")
        kinds = [r["kind"] for r in tree["rows"]]
        assert status == 200
        assert [k for k in kinds if k in ("phase", "gate", "outcome", "repair")] == [
            "phase", "gate", "outcome", "repair"]  # fmt: skip
        assert "command" in kinds
        told = next(r for r in tree["rows"] if r["kind"] == "command")
        assert told["nodes"] == [NODE]
        assert told["text"].startswith("drained: row remaps fail")
        assert all(a["at_ns"] <= b["at_ns"] for a, b in zip(tree["rows"], tree["rows"][1:], strict=False))
        assert tree["score"]["brier"] == pytest.approx(0.64)
        assert (tree["score"]["predicted_gpu_h"], tree["score"]["lost_gpu_h"]) == (10.0, 20.0)
        seen: list[int] = []
        path = "/api/v1/replacement/history?limit=2"
        before = None
        while True:
            _, page = await pod.ask("GET", path + (f"&before={before}" if before is not None else ""))
            seen = [r["seq"] for r in page["rows"]] + seen
            if page["next"] is None:
                break
            before = page["next"]
        assert seen == [r["seq"] for r in tree["rows"]], "pages miss nothing and repeat nothing"
        _, other = await pod.ask("GET", "/api/v1/replacement/history?node=r1/node4")
        assert other["rows"] == []
        _, some = await pod.ask("GET", "/api/v1/replacement/history?kind=repair&node=r1/node3")
        assert [r["kind"] for r in some["rows"]] == ["repair"]
        _, none = await pod.ask("GET", "/api/v1/replacement/history?kind=repairs")
        assert (none["rows"], len(none["notes"]), len(some["notes"])) == ([], 1 + len(tree["notes"]),
                                                                          len(tree["notes"]))  # fmt: skip
        assert "no line of kind repairs; kinds of this time: " in none["notes"][-1]
        for query in ("days=0", "days=367", "days=x", "limit=0", "node=nowhere", "before=-1"):
            assert (await pod.ask("GET", f"/api/v1/replacement/history?{query}"))[0] in (400, 404)

    serve(tmp_path, check, more=[policy])


def test_a_run_folder_without_a_journal_is_said(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        pod.live.run_dir = str(tmp_path / "gone")
        status, tree = await pod.ask("GET", "/api/v1/replacement/history")
        assert (status, "holds no journal" in tree["error"]) == (503, True)

    serve(tmp_path, check)


def test_the_journal_of_the_run_is_read_where_there_is_one(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        chain, pod.live.run_dir = Chain(), str(tmp_path)
        gate = {"what": "gate", "node": NODE, "course": "at_once", "act_pu": 0.5}
        with (tmp_path / "journal.jsonl").open("ab", buffering=0) as file:
            for days in (30, 2):
                at_ns = pod.twin.now_ns - days * 86_400 * NS
                body = {"policy": "replacement", "account": gate}
                file.write(chain.line(OtherRecord("account", body), 100 - days, at_ns) + b"\n")
            _, week = await pod.ask("GET", "/api/v1/replacement/history")
            _, month = await pod.ask("GET", "/api/v1/replacement/history?days=31")
            assert (week["total"], month["total"]) == (1, 2)
            file.write(chain.line(OtherRecord("account", body), 101, pod.twin.now_ns) + b"\n")
            asked = [pod.ask("GET", "/api/v1/replacement/history?node=r1/node3") for _ in range(8)]
            assert [tree["total"] for _, tree in await asyncio.gather(*asked)] == [2] * 8
        assert (await pod.ask("GET", paths_of()["rma"]))[1]["history_total"] == 3

    serve(tmp_path, check)


def test_the_record_holds_what_a_ticket_needs(tmp_path: Path) -> None:
    policy = Leaving()

    async def check(pod: Pod) -> None:
        ill = ailing(pod.twin.engine)
        ill.say("node", 3, DEGRADED, "row remaps fail", action_name="drain", sure_pu=0.9)
        ill.reports("gpu", int(pod.twin.site.gpu_start_of_node[3]), 64, START_NS - 60 * NS, times=3)
        ill.reports("gpu", int(pod.twin.site.gpu_start_of_node[3]), 64, START_NS, detail=NASTY)
        pod.twin.engine.intake.serials[f"node:{NODE}"] = "SN-1"
        outed(policy, 3, pod.twin.now_ns, RMA)
        pod._events.append(JobStarted(id="j", job="big", nodes=("lab/h/r1/node9",), kind="training"))
        pod.tick(None)
        body = {"passed": False, "note": "hangs"}
        assert (await pod.ask("POST", paths_of()["tested"], "operator", body))[0] == 200
        status, tree = await pod.ask("GET", paths_of("r1/node3")["rma"])
        assert (status, tree["node"], tree["serial"], tree["planned"]["phase"]) == (
            200,
            NODE,
            "SN-1",
            PHASES[RMA],
        )
        assert [(f["of"], f["code"], f["times"]) for f in tree["faults"]] == [("gpu0", 64, 4)]
        assert tree["faults"][0]["first_ns"] < tree["faults"][0]["last_ns"]
        assert (tree["tests_total"], tree["tests_failed"], tree["tests"][0]["data"]["detail"]) == (
            1,
            1,
            "hangs",
        )
        assert len(tree["drains"]) == 1
        assert tree["evidence"][0]["text"] == "row remaps fail"
        assert (await pod.ask("GET", paths_of("r9/node3")["rma"]))[0] == 404

    serve(tmp_path, check, more=[policy])


def test_a_site_without_nodes_says_so(tmp_path: Path) -> None:
    async def check(pod: Pod) -> None:
        status, tree = await pod.ask("GET", "/api/v1/nodes/lab/h/rma")
        assert (status, "this site has no nodes" in tree["error"]) == (404, True)

    serve(tmp_path, check, tree={"site": "lab", "halls": [{"name": "h"}]})
