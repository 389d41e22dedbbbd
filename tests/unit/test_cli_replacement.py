"""`racktwin device` and its verbs of replacement: what people read and tell, with a daemon and without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from policies.node_replacement import SUSPECT
from policies.node_replacement.phases import DRAINING, RMA
from tests.support.in_process_daemon import Desk, serving_aside
from tests.support.leaving_nodes import Leaving, outed
from twin.catalogue import NS
from twin.cli.main import main
from twin.contracts import OtherRecord
from twin.run.journal import Chain
from twin.telemetry import JobStarted

NODE = "lab/h/r1/node3"


class NodesDesk(Desk):
    """A desk whose nodes leave as `policy` is told."""

    policy: Leaving


@pytest.fixture(params=[True])
def desk(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[NodesDesk]:
    """`params`: whether the policy runs."""
    policy = Leaving()
    more = [policy] if request.param else []
    with serving_aside(tmp_path, monkeypatch, NodesDesk, more=more) as desk:
        desk.policy = policy
        yield desk


def said(capsys: pytest.CaptureFixture[str]) -> str:
    out = capsys.readouterr()
    text = out.out + out.err
    assert "\x1b" not in text
    return " ".join(text.split())


def leave(desk: NodesDesk) -> None:
    def act() -> None:
        for node, phase in ((3, DRAINING), (5, RMA), (7, SUSPECT)):
            outed(desk.policy, node, desk.pod.twin.now_ns, phase)
        desk.policy.set("hold", {7: 1})
        desk.policy.set("spare_pair", {3: 9, 20: 9})
        desk.pod._events.append(JobStarted(id="j", job="big", nodes=(NODE,), kind="training"))
        desk.pod.tick(None)

    desk.do(act)


def test_the_plan_in_lines(desk: NodesDesk, capsys: pytest.CaptureFixture[str]) -> None:
    leave(desk)
    assert desk.run("device", "plan", role="viewer") == 0
    text = said(capsys)
    for expected in (
        "of the site: 33 in service, 1 suspect, 1 draining, 1 rma",
        "lab/h/r1/node5 rma 1 h hardware 61 % waits for an operator: racktwin device report",
        "lab/h/r1/node3 draining 1 h hardware 61 % waits for the scheduler to take big off it",
        "lab/h/r2/node2",
        "waits as it is held back: the maximum number of nodes is already out",
        "spares: 0, 0 of them free; without a forecast the number needed is unknown",
    ):
        assert expected in text, (expected, text)
    assert desk.run("device", "plan", "--phase", "rma", "--limit", "1") == 0
    assert "node3" not in said(capsys)
    assert desk.run("device", "plan", "--json") == 0
    assert json.loads(capsys.readouterr().out)["total"] == 3


def test_one_node_with_all_that_was_weighed(desk: NodesDesk, capsys: pytest.CaptureFixture[str]) -> None:
    leave(desk)
    assert desk.run("device", "plan", "r1/node3") == 0
    text = said(capsys)
    for expected in (
        "lab/h/r1/node3: on its way out of service",
        "reason: row remaps fail",
        "chance of failing within 1 h 12 %",
        "chance of failing within 24 h 61 %",
        "do nothing 410",
        "save now, then drain 41.5 chosen",
        "predicted loss of acting 41.5",
        "service level that the policy wants drained",
        "withdrawals that count against it 1",
        "failed tests since 2",
    ):
        assert expected in text, (expected, text)
    assert "read back" not in text
    assert "chance 1h pu" not in text, "keys are for programs"
    assert desk.run("device", "plan", "r2/node1") == 0
    text = said(capsys)
    assert "lab/h/r2/node1: in service" in text
    assert "chance" not in text
    assert "no option is weighed, as it is no suspect" in text


@pytest.mark.parametrize("desk", [False], indirect=True)
def test_without_the_policy(desk: NodesDesk, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("plan",), ("plan", "r1/node3"), ("history",)):
        assert desk.run("device", *words) == 0
        assert "add `policies: {replacement: {}}` to the site file" in said(capsys)
    assert desk.run("device", "repaired", "r1/node3") == 0
    assert "warning: the report is recorded, but no policy named replacement runs here" in said(capsys)


def test_people_tell_and_the_history_has_it(desk: NodesDesk, capsys: pytest.CaptureFixture[str]) -> None:
    assert desk.run("device", "repaired", "r1/node3", "--note", "ticket 7: new HBM") == 0
    assert "done" in said(capsys)
    assert desk.run("device", "tested", NODE, "--passed", "--test", "burn", "--note", "8 h clean") == 0
    assert desk.run("device", "history", "--node", "r1/node3", role="viewer") == 0
    text = said(capsys)
    for expected in ("repair lab/h/r1/node3 repaired, says operator-1: ticket 7: new HBM",
                     "test burn, reported by operator-1: passed: 8 h clean",
                     "no prediction was made"):  # fmt: skip
        assert expected in text, (expected, text)
    assert desk.run("device", "history", "--json", "--kind", "repair") == 0
    assert [r["kind"] for r in json.loads(capsys.readouterr().out)["rows"]] == ["repair"]


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (("device", "repaired", "r1/node99"), 1, "did you mean"),
        (("device", "repaired", NODE, "--note", "x" * 3000), 1, "expected at most 2,000"),
        (("device", "tested", NODE, "--passed", "--ended", "2099-01-01"), 1, "in the future"),
        (("device", "tested", NODE, "--passed", "--ended", "soon"), 1, "expected a time such as"),
        (("device", "tested", NODE), 2, "expected --passed or --failed"),
        (("device", "tested", NODE, "--passed", "--failed"), 2, "expected --passed or --failed"),
        (("device", "repaird", NODE), 2, "did you mean repaired"),
        (("device", "history", "--back", "7"), 2, "expected a duration with its unit"),
        (("device", "history", "--days", "nan"), 2, "expected a number"),
        (("device", "history", "--limit", "0"), 2, "--limit: '0': expected a whole number"),
        (("device", "history", "--run", "/nowhere"), 1, "is not there; expected the folder of a run"),
        (("device", "plan", "--phase", "gone"), 1, "no phase gone; expected one of in_service"),
        (("device", "report", "r9/node3"), 1, "no node r9/node3"),
    ],
)
def test_bad_words(
    desk: NodesDesk, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, why: str
) -> None:
    try:
        got = desk.run(*words)
    except SystemExit as error:
        got = int(str(error.code))
    assert got == code
    assert why in said(capsys)


def test_a_report_goes_to_a_file_and_overwrites_nothing_unasked(
    desk: NodesDesk, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(desk)
    page, data = desk.folder / "node3.md", desk.folder / "node3.json"
    assert desk.run("device", "report", NODE, "--out", str(page)) == 0
    assert page.read_text().startswith("# lab/h/r1/node3: record for repair or return")
    assert desk.run("device", "report", NODE, "--out", str(data)) == 0
    assert json.loads(data.read_text())["node"] == NODE
    page.write_text("mine")
    assert desk.run("device", "report", NODE, "--out", str(page)) == 1
    assert "expected a new file, or a new or empty folder; --force overwrites it" in said(capsys)
    assert page.read_text() == "mine"
    assert desk.run("device", "report", NODE, "--out", str(page), "--force") == 0
    assert page.read_text() != "mine"
    assert desk.run("device", "report", NODE, "--out", str(desk.folder / "no" / "x.md")) == 1
    assert not list(desk.folder.glob(".node3*"))
    capsys.readouterr()
    assert desk.run("device", "report", NODE) == 0
    assert capsys.readouterr().out.startswith("# lab")


def test_the_history_of_a_run_without_a_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    chain, t0 = Chain(), 1_800_000_000 * NS
    gate = {"what": "gate", "node": NODE, "course": "at_once", "act_pu": 0.5, "act_gpu_h": 8.0}
    bodies = [
        {"policy": "replacement", "account": gate},
        {"policy": "replacement", "account": {**gate, "what": "outcome", "failed": True, "lost_gpu_h": 6.0}},
    ]
    with (tmp_path / "journal.jsonl").open("wb") as file:
        for i, body in enumerate(bodies):
            file.write(chain.line(OtherRecord("account", body), i, t0 + i * NS) + b"\n")
    assert main(["device", "history", "--run", str(tmp_path)]) == 0
    text = said(capsys)
    assert "outcome lab/h/r1/node3 it failed; 6 GPU-h lost" in text
    assert "interruptions 50 % predicted, 100 % came; Brier 0.25" in text
    assert main(["device", "history", "--run", str(tmp_path), "--node", "node3"]) == 0
    assert "nothing of node3: expected a full path" in said(capsys)
    assert main(["device", "history", "--run", str(tmp_path), "--kind", "gats,outcome"]) == 0
    assert "no line of kind gats; kinds of this time: gate, outcome" in said(capsys)
