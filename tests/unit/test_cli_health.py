"""`racktwin device health`: what a person on duty reads, at several widths, without colour in a pipe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.in_process_daemon import Desk, serving_aside
from tests.support.scripted_health import Ailing, ailing, days_ago_ns
from twin.catalogue import NS, utc
from twin.cli.main import main
from twin.contracts import BY_FACILITY, DEGRADED, FAILED, UNKNOWN, WATCH, Fault
from twin.report import when

DAY_S = 86_400.0
NODE3 = "lab/h/r1/node3"


class Ward(Desk):
    """A desk whose pod tells of health."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ill: Ailing = ailing(self.pod.twin.engine)
        self.now_ns = self.pod.twin.now_ns
        self.pod.twin.engine.health.looked_ns = self.now_ns - 4 * NS

    def run(self, *words: str, role: str = "viewer") -> int:
        return super().run("device", "health", *words, role=role)

    def forecasts(self) -> None:
        chances = np.full(36, 0.004)
        chances[9] = 0.31
        for horizon_s in (3600.0, DAY_S, 604_800.0, 2_592_000.0):
            basis = "what the node did before" if horizon_s < 7 * DAY_S else "telemetry"
            self.ill.forecast(horizon_s, chances, basis=basis)
            self.ill.forecast(horizon_s, 0.4, half=0.7, key="site.node_failure_count")


@pytest.fixture
def ward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ward]:
    with serving_aside(tmp_path, monkeypatch, Ward, columns=100) as ward:
        yield ward


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the printed text as one line."""
    out = capsys.readouterr().out
    assert "\x1b" not in out
    return " ".join(out.split())


def test_a_node_is_explained_in_plain_words(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    ward.forecasts()
    since_ns = ward.now_ns - 180 * NS
    ward.ill.say("node", 9, WATCH, "it was not heard in 12 % of the last hour", action_name="watch",
                 since_ns=since_ns, sure_pu=0.6, source="arXiv 2603.28781")  # fmt: skip
    ward.ill.say(
        "gpu", 38, DEGRADED, "[bold]row\x1b[31m waits to be remapped[/bold]", action_name="reset_gpu"
    )
    ward.ill.lemons.counts[9] = [0, 12, np.nan, 0, 0, 0, 0]
    ward.ill.failures.begin_ns = days_ago_ns(ward.now_ns, 31)
    ward.ill.failed(9, days_ago_ns(ward.now_ns, 6), days_ago_ns(ward.now_ns, 5), "memory")
    ward.ill.reports("gpu", 38, 64, since_ns - 60 * NS, times=3)
    ward.ill.reports("gpu", 38, 64, since_ns, detail="NVRM: Xid (PCI:0000:3b:00): 64")
    assert ward.run("r1/node9") == 0
    text = said(capsys)
    for expected in (
        "lab/h/r1/node9 node judged 4 s ago",
        "This node works, but needs watching, for 3 min; more likely than not (60 %) that it is the",
        "do watch it",
        "watch it was not heard in 12 % of the last hour for 3 min; more likely than not (60 %); rule: arXiv",
        "within 1 d 31 % 29 % to 33 % 1.3 % 25 x the average",
        "within 1 h, 1 d: based on what the node did before within 7 d, 30 d: based on telemetry",
        "4 GPUs: 1 degraded, 3 healthy",
        "gpu2 degraded [bold]row",  # as text
        "would change it It clears by itself once the evidence above has been quiet for a while.",
        "watched for 31 d: 1 failure; nothing replaced; reboots unknown",
        "6 d ago: memory, lasted 1 d",
        "lemon no; in 28 days: XIDs that indicate a hardware fault 12; "
        "never reported: maintenance windows opened",
        "remaining life no wear found yet",
        "gpu2: XID 64, 4 times, the last 3 min ago: remapping a memory row failed; recommended: "
        "reset the GPU",
        "agent, restarts: never reported; comes from racktwin-agent on the node",
    ):
        assert " ".join(expected.split()) in text, expected


def test_a_failed_gpu_says_what_to_do_first(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    ward.ill.say("gpu", 14, FAILED, "XID 79: fell off the bus", action_name="replace", sure_pu=0.97,
                 since_ns=ward.now_ns - 40 * NS)  # fmt: skip
    ward.forecasts()
    assert ward.run(f"{NODE3}/gpu2") == 0
    text = said(capsys)
    first = ("This GPU has failed", "do drain the node and replace the part", "XID 79: fell off the bus",
             f"chance of failing of its node {NODE3}: none: it has failed since "
             f"{utc(ward.now_ns - 40 * NS)} UTC", "would change it", "not known")  # fmt: skip
    assert "within 1 d" not in text
    places = [text.index(x) for x in first]
    assert places == sorted(places)


def test_whose_doing_a_lowered_clock_is(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    ward.ill.say("gpu", 20, DEGRADED, "held down by heat", action_name="check_facility", lowered=BY_FACILITY)
    assert ward.run("r1/node5/gpu0") == 0
    text = said(capsys)
    assert "clock reduced by the facility's cooling, not the GPU" in text
    assert "that it is the GPU itself" not in text
    assert "do check power and cooling: a reset does not help" in text
    assert ward.run() == 0
    assert "GPUs with a reduced clock: 1 by the facility's cooling: no fault of theirs" in said(capsys)


def test_healthy_says_how_much_is_heard(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    ward.ill.verdicts.held["gpu"].sure_pu[14] = 0.45
    assert ward.run(f"{NODE3}/gpu2") == 0
    text = said(capsys)
    assert "This GPU is healthy, as far as it reports: 45 % of what there is to know of it." in text
    assert "all that it reports is as it should be" in text


def test_what_the_diagnosis_says_to_do_is_said(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    fault = Fault("psu_lost", "node", 3, "", "warning", 0.99, ward.now_ns, ("x",))
    ward.pod.twin.engine.diagnosis.faults = (fault,)
    assert ward.run("r1/node3") == 0
    expected = f"{NODE3} runs on one power supply. Replace the supply; the other one carries the whole load."
    assert f"the diagnosis says: {expected}" in said(capsys)


def test_unknown_is_told_first_and_is_not_healthy(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    ward.ill.verdicts.held["psu"].level[:] = UNKNOWN
    assert ward.run("r1/node3#psu2") == 0
    text = said(capsys)
    assert "This power supply is unknown: too few readings arrive to call it healthy." in text
    assert (
        "power, power of the node, state of the node's supply: never reported; comes from the node's BMC"
        in text
    )
    assert text.index("not known") < text.index("would change it")
    assert "is healthy" not in text


def test_the_site_tells_whom_to_look_at_first(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    ward.forecasts()
    ward.ill.say("gpu", 14, FAILED, "XID 79: fell off the bus", action_name="replace",
                 since_ns=ward.now_ns - 40 * NS)  # fmt: skip
    ward.ill.lemons.why[7] = ("3 failures in 28 days, others 0.2",)
    ward.ill.wears("cdu.ua", 0, (9.0, 6.0, 20.0))
    for node in (30, 31):
        ward.ill.failed(node, ward.now_ns, kind="power", shared=True)
    ward.ill.verdicts.held["pump"].level[:] = UNKNOWN
    assert ward.run() == 0
    text = said(capsys)
    for expected in (
        "GPUs 1 failed 143 healthy", "fails in 24 h why",
        f"{NODE3} failed failed since gpu2: XID 79: fell off the bus {when(ward.now_ns - 40 * NS)} "
        "drain the node and replace the part",
        "lab/h/r1/node9 healthy 31 % 25 x the average",
        "3 failures in 28 days, others 0.2; a lemon",
        "nodes of lab expected to fail, with 90 % intervals within 1 h 0.40 0 to 1",
        "node failures: 2 (power 2); 2 still down",
        "2 nodes went down together (lab/h/r2/node12, lab/h/r2/node13): check what they share",
        "lemons (fail more often than others): lab/h/r1/node7",
        "the heat exchanger of lab/h/cdu1 reaches its limit in about 9 d (90 % interval 6 d to 20",
        "2 of 2 pumps speed, flow, pressure, filter: never reported; comes from the building's BMS",
    ):  # fmt: skip
        assert " ".join(expected.split()) in text, expected


def test_a_quiet_site_and_a_site_of_which_nothing_is_known(
    ward: Ward, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ward.run() == 0
    text = said(capsys)
    assert "no node stands out" in text
    assert "nothing is known to be healthy" not in text
    assert "no forecasts of failures: the site file names no model `failure`" in text
    for held in ward.ill.verdicts.held.values():
        held.level[:] = UNKNOWN
    assert ward.run() == 0
    assert "no node stands out, but nothing is known to be healthy either" in said(capsys)


def test_a_rack_and_a_cdu(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    ward.ill.unwell("node", 3)
    ward.ill.say("pump", 1, DEGRADED, "gives 12 % less than its speed promises", action_name="drain")
    assert ward.run("r1") == 0
    text = said(capsys)
    assert f"{NODE3} degraded" in text
    assert "healthy node0, node1, node2, node4" in text
    assert ward.run("cdu1") == 0
    text = said(capsys)
    assert "pump2 degraded gives 12 % less than its speed promises" in text
    assert "cools 2 racks; nodes: 1 degraded, 35 healthy" in text
    assert ward.run("a") == 0
    text = said(capsys)
    assert "lab/h/a feeder" in text
    assert "feeds 2 racks; nodes: 1 degraded, 35 healthy" in text
    assert "all signals: never reported; comes from the building's BMS" in text


@pytest.mark.parametrize("width", [40, 80, 140])
def test_no_line_is_wider_than_the_screen(
    ward: Ward, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    ward.forecasts()
    ward.ill.say("node", 3, DEGRADED, "a long sentence " * 20, action_name="run_diagnostics")
    assert ward.run("r1/node3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines[1:]) <= width


def test_filters_and_json(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    ward.ill.unwell("gpu", 14)
    assert ward.run("--part", "gpu", "--level", "degraded") == 0
    assert f"{NODE3}/gpu2 degraded" in said(capsys)
    assert ward.run("--part", "gpu", "--limit", "3") == 0
    assert "and 141 more; --limit and --level choose" in said(capsys)
    assert ward.run("--json") == 0
    assert json.loads(capsys.readouterr().out)["parts"]["gpu"]["degraded"] == 1
    assert ward.run("r1/node3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "part"
    assert ward.run("--level", "ill") == 1
    assert "expected one of healthy" in capsys.readouterr().err


def test_the_status_has_a_line_on_it(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    ward.ill.unwell("gpu", 14)
    ward.ill.verdicts.held["psu"].level[:] = UNKNOWN
    assert main(["status", "--url", ward.pod.url, "--token-file", str(ward.token_file("viewer"))]) == 0
    text = said(capsys)
    assert "health GPUs: 1 degraded, 143 healthy nodes: 36 healthy" in text
    assert "power supplies: 72 unknown" in text
    assert "psu" not in text


def test_a_mistyped_name_is_a_plain_error(ward: Ward, capsys: pytest.CaptureFixture[str]) -> None:
    assert ward.run("lab/h/r1/node40") == 1
    err = capsys.readouterr().err
    assert "did you mean lab/h/r1/node0 to lab/h/r1/node17?" in " ".join(err.split())
