"""What-if: two courses from one moment, many cases in any number of processes, and nothing left behind."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

from policies import REGISTRY
from twin.app import whatif_sweep
from twin.app.cli import main
from twin.app.whatif import ARMS, Case, Course, Question, begin, newest_snapshot, run_course
from twin.app.whatif_report import FIGURES, groups_of, render, spread, summary_of
from twin.app.whatif_sweep import CaseBar, Result, run_cases
from twin.app.whatif_trail import CURVES, Trail
from twin.app.wiring import load_site
from twin.errors import StorageError
from twin.plant.scenario import Scenario, cases_of

ROOT = Path(__file__).parents[2]
SITE = """\
site: lab
halls:
  - name: h
    racks: [{name: "r[1-2]", profile: gb200-nvl72, nodes: 2}]
    cdus: [{name: cdu1, serves: ["r[1-2]"], loop: fw1}]
    feeders: [{name: a, side: A, serves: ["r[1-2]"]}, {name: b, side: B, serves: ["r[1-2]"]}]
loops: [{name: fw1}]
"""
SCENARIO = """\
name: no flow
duration_s: 60
faults: [{kind: pump_trip, entity: h/cdu1, begin_s: 10, part: both}]
"""
ERROR = re.compile(r"^error [^\n]+\n$")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a site and a recorded run of it."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "site.yaml").write_text(SITE)
    args = ["simulate", "--site", str(folder / "site.yaml"), "--hours", "0.01", "--out", str(folder / "run")]
    assert main([*args, "--json"]) == 0
    return folder


@pytest.fixture
def lab(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own to work in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.yaml").write_text(SITE)
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    (tmp_path / "run").symlink_to(recorded / "run")
    return tmp_path


BASE = ["whatif", "--site", "site.yaml", "--scenario", "scenario.yaml"]
FROM = [*BASE, "--from", "run"]


def asked(capsys: pytest.CaptureFixture[str], *more: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert main([*FROM, *more, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def question_of(lab: Path, **more: Any) -> Question:
    spec, _ = load_site(lab / "site.yaml")
    raw, path, _ = newest_snapshot(lab / "run")
    return Question(spec, "site.yaml", raw, str(path), **more)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_policies_beside_nothing(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(lab / "run")
    result = asked(capsys, "--jobs", "1", "--report", "out")
    assert contents(lab / "run") == before  # a snapshot is read, never written to
    assert set(result) == {
        "site", "scenario", "simulated", "from", "source", "horizon_s", "dt_s", "authority", "held_workload",
        "not_carried", "summary", "cases", "failed", "wall_s", "site_authority", "warnings",
    }  # fmt: skip
    (case,) = result["cases"]
    assert set(case) == {"varied", "seed", "error", "policies", "nothing", "difference"}
    assert set(case["difference"]) == set(FIGURES)
    assert set(case["policies"]) == {*FIGURES, "faults"}
    assert set(result["authority"].values()) == {"act"}
    acted, idle = case["policies"], case["nothing"]
    assert idle["commands"] == 0 < acted["commands"]
    assert idle["throttled_gpu_s"] > acted["throttled_gpu_s"]
    assert 10 < idle["first_throttle_s"] < 40
    assert acted["lowest_rack_flow_lpm"] == idle["lowest_rack_flow_lpm"] == 0.0
    assert case["difference"]["commands"] == acted["commands"]
    told = [f for f in acted["faults"] if f["kind"] == "pump_trip"]
    assert told
    assert told[0]["delay_s"] == told[0]["told_s"] - 10.0 < 10.0
    page = (lab / "out" / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2 * len(CURVES)
    assert "simulated by racktwin" in page
    assert not re.search(r"https?://", page)


def test_for_people(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FROM, "--jobs", "1", "--horizon", "15", "--authority", "thermal_guard=off"]) == 0
    said = capsys.readouterr().out
    assert "thermal_guard off" in said
    assert "leak_guard act" in said
    assert "set for this question; the site file says: checkpoint advise, leak_guard advise" in said
    for words in (
        "policies",
        "nothing",
        "difference",
        "Hottest GPU, °C",
        "every GPU keeps what it was doing",
    ):
        assert words in said


def test_without_a_snapshot_a_settled_site(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main([*BASE, "--jobs", "1", "--horizon", "10", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["from"] is None
    assert result["held_workload"] is False
    assert result["cases"][0]["policies"]["it_energy_kwh"] > 0


def test_levels_of_the_scenario_override_and_those_of_the_call_both(lab: Path) -> None:
    (lab / "site.yaml").write_text(SITE + "policies: {thermal_guard: {}, leak_guard: {authority: 'off'}}\n")
    spec, _ = load_site(lab / "site.yaml")
    scenario = Scenario("x", duration_s=5.0, policies={"thermal_guard": "advise"})

    def levels(given: dict[str, str]) -> dict[str, str]:
        simulation, _ = begin(Question(spec, "site.yaml", given=given), Case(0, {}, scenario), "policies")
        return dict(simulation.engine.intake.authority)

    expected = dict.fromkeys(REGISTRY, "act") | {"thermal_guard": "advise", "leak_guard": "off"}
    assert levels({}) == expected
    assert levels({"thermal_guard": "off"})["thermal_guard"] == "off"
    simulation, _ = begin(Question(spec, "site.yaml"), Case(0, {}, scenario), "nothing")
    assert set(simulation.engine.intake.authority.values()) == {"off"}


def test_a_lease_that_runs_lapses_where_nothing_is_done(lab: Path) -> None:
    question = question_of(lab, horizon_s=60.0)
    case = Case(0, {}, Scenario("calm"))
    simulation, _ = begin(question, case, "nothing")
    engine = simulation.engine
    lease, index = engine.arbiter.leases["gpu.power_cap_w"], np.array([0], np.int32)
    lease.grant(index, np.array([700.0]), np.zeros(1, np.int32), 1, engine.state.now_ns,
                np.full(lease.n, 1200.0), np.ones(1, np.int32))  # fmt: skip
    plant: Any = simulation.plant
    plant.actuators.value["gpu.power_cap_w"] = np.where(np.arange(lease.n) == 0, 700.0, np.nan)
    plant.actuators.until_s["gpu.power_cap_w"] = np.where(np.arange(lease.n) == 0, 20.0, np.inf)
    plant.actuators.next_s = 20.0
    sent = 0
    for _ in range(int(lease.control.lease_s) + 5):
        sent += len(simulation.step().commands)
    assert sent == 0
    assert not lease.running().any()
    assert plant.actuators.until_s["gpu.power_cap_w"][0] == np.inf


@pytest.mark.slow
def test_processes_give_what_one_gives(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lab / "scenario.yaml").write_text(
        SCENARIO + "sweep: {seeds: [4, 7], vary: {'faults[0].begin_s': [5, 20]}}\n"
    )
    one = asked(capsys, "--jobs", "1", "--horizon", "25")
    many = asked(capsys, "--jobs", "3", "--horizon", "25")
    for result in (one, many):
        del result["wall_s"]
    assert one == many
    assert [c["varied"] for c in one["cases"]] == [
        {"seed": s, "faults[0].begin_s": b} for b in (5, 20) for s in (4, 7)
    ]  # fmt: skip
    assert len(one["summary"]) == 2
    assert one["summary"][0]["cases"] == 2
    hottest = one["summary"][0]["nothing"]["highest_gpu_temp_c"]
    assert hottest["lowest"] < hottest["median"] < hottest["highest"]
    assert hottest["median"] > one["summary"][1]["nothing"]["highest_gpu_temp_c"]["median"]


KILLER = """\
import os


class Killer:
    name, controls, rank, period_s, urgent, memory = "killer", ("gpu.power_cap_w",), 9, 0.0, False, None

    def propose(self, view, memory):
        os._exit(9)
"""


@pytest.mark.slow
def test_a_worker_that_dies_loses_its_own_case_only(
    lab: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (lab / "killers_of_tests.py").write_text(KILLER)
    monkeypatch.syspath_prepend(str(lab))
    (lab / "site.yaml").write_text(SITE + 'policies: {killer: {kind: "killers_of_tests:Killer"}}\n')
    (lab / "scenario.yaml").write_text(
        SCENARIO + "policies: {killer: act}\nsweep: {vary: {policies.killer: ['off', act, 'off']}}\n"
    )
    capsys.readouterr()
    assert main([*BASE, "--jobs", "2", "--horizon", "5", "--json"]) == 1
    said = capsys.readouterr()
    result = json.loads(said.out)
    assert result["failed"] == 1
    assert [c["error"] for c in result["cases"]] == [
        None,
        "its process ended: killed, or out of memory",
        None,
    ]
    assert [("policies" in c, "nothing" in c) for c in result["cases"]] == [
        (True, True),
        (False, True),
        (True, True),
    ]
    assert "failed: policies.killer = act: its process ended" in said.err


def test_a_case_that_fails_is_told(lab: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    def unlucky(question: Question, case: Case, arm: Any, progress: Any = None) -> Course:
        if case.scenario.seed == 1:
            raise ZeroDivisionError("as it happens")
        return run_course(question, case, arm, progress)

    monkeypatch.setattr(whatif_sweep, "run_course", unlucky)
    result = asked(capsys, "--jobs", "1", "--horizon", "5", "--seeds", "0,1", code=1)
    assert [c["error"] for c in result["cases"]] == [None, "ZeroDivisionError: as it happens"]
    assert (result["summary"][0]["cases"], result["summary"][0]["failed"]) == (2, 1)


def children_of(pid: int) -> list[int]:
    try:
        return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nobody_is_left_behind(lab: Path, how: signal.Signals) -> None:
    words = [sys.executable, "-m", "twin.app.cli", *FROM, "--jobs", "2", "--horizon", "1000000"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    children: list[int] = []
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until and process.poll() is None and len(children) < 3:
            children = children_of(process.pid)
            time.sleep(0.1)
        time.sleep(1.5)  # well inside their work
        assert len(children) >= 2, process.poll()
        process.send_signal(how)
        _, err = process.communicate(timeout=90)
        if how != signal.SIGKILL:
            assert process.returncode == 130
            assert err.decode().strip() == "interrupted"
        until = time.monotonic() + 10
        while time.monotonic() < until and any(lives(pid) for pid in children):
            time.sleep(0.05)
        assert [pid for pid in children if lives(pid)] == []
    finally:
        for pid in (process.pid, *children):
            if lives(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    capsys.readouterr()
    assert main(list(args)) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert ERROR.match(said.err), said.err
    return said.err


def test_a_snapshot_of_another_site(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lab / "site.yaml").write_text(SITE.replace("nodes: 2", "nodes: 3"))
    told = refused(capsys, *FROM)
    assert "snapshot is of site" in told
    assert told.count(" (lab)") == 2
    assert "another one since" in told
    (lab / "site.yaml").write_text(SITE.replace("site: lab", "site: other"))
    assert re.search(
        r"is of site [0-9a-f]+ \(lab\), this is [0-9a-f]+ \(other\)$", refused(capsys, *FROM).strip()
    )


def test_a_broken_snapshot(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, _, _ = newest_snapshot(lab / "run")
    for name, raw, words in (
        ("cut.rts", whole[:-9], "damaged"), ("none.rts", b"hello", "not a racktwin snapshot"),
        ("empty.rts", b"", "not a"),
    ):  # fmt: skip
        (lab / name).write_bytes(raw)
        said = refused(capsys, *BASE, "--from", name)
        assert name in said
        assert words in said
    (lab / "nothing").mkdir()
    assert "holds no whole snapshot" in refused(capsys, *BASE, "--from", "nothing")
    assert "No such file" in refused(capsys, *BASE, "--from", "nowhere")


def test_the_newest_whole_snapshot_of_a_folder(
    lab: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, path, _ = newest_snapshot(recorded / "run")
    (lab / "two").mkdir()
    (lab / "two" / path.name).write_bytes(whole)
    (lab / "two" / "snapshot-999999999999.rts").write_bytes(whole[:100])
    assert newest_snapshot(lab / "two") == (
        whole, lab / "two" / path.name, [lab / "two" / "snapshot-999999999999.rts"],
    )  # fmt: skip
    assert main([*BASE, "--from", "two", "--jobs", "1", "--horizon", "2"]) == 0
    assert f"(snapshot-999999999999.rts): {path.name} is used" in capsys.readouterr().err
    (lab / "two" / path.name).unlink()
    with pytest.raises(StorageError, match=r"snapshot-999999999999\.rts: snapshot is damaged"):
        newest_snapshot(lab / "two")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--seeds", "0"], "--seeds 0: expected how many"),
        (["--seeds", "3,3"], "--seeds 3,3: expected"),
        (["--seeds", "a"], "--seeds a: expected"),
        (["--horizon", "-1"], "--horizon -1: expected more than 0"),
        (["--jobs", "0"], "--jobs 0: expected 1 to"),
        (["--authority", "nobody=act"], "--authority nobody=act: expected"),
        (["--authority", "thermal_guard=now"], "--authority thermal_guard=now: expected"),
    ],
)
def test_wrong_calls(lab: Path, capsys: pytest.CaptureFixture[str], args: list[str], words: str) -> None:
    assert words in refused(capsys, *FROM, *args)


def test_a_scenario_with_faults(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lab / "scenario.yaml").write_text(SCENARIO.replace("h/cdu1", "h/cdu9"))
    assert "scenario.yaml: $.faults[0].entity: expected" in refused(capsys, *FROM)
    (lab / "scenario.yaml").write_text("name: [")
    assert "scenario.yaml: line 2" in refused(capsys, *FROM)


def test_the_chart_and_the_figures_count_throttling_alike(lab: Path) -> None:
    """The chart's sum over time is the figure: one point a second here."""
    spec, site = load_site(lab / "site.yaml")
    for cap in (False, True):
        ((_, scenario),) = cases_of(yaml.safe_load(SCENARIO), site)
        question = Question(spec, "site.yaml", given={} if cap else {"thermal_guard": "off"})
        course = run_course(question, Case(0, {}, scenario), "policies" if cap else "nothing")
        slowed, figures = course.trail["throttled_gpus"], course.figures
        assert len(slowed) == 60
        assert sum(slowed) == pytest.approx(figures["throttled_gpu_s"])
        if not cap:
            assert figures["throttled_gpu_s"] > 0.0
        at = [t for t, n in zip(course.trail["time_s"], slowed, strict=True) if n > 0]
        assert figures["first_throttle_s"] == (at[0] if at else None)
        assert max(slowed) <= figures["throttled_gpus"]


def test_late_faults_and_short_horizons(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "--jobs", "1", "--horizon", "5"]) == 0
    assert "ends after 5 s, before these faults begin: pump_trip (10 s)" in capsys.readouterr().err
    assert "--horizon 0.5: expected at least a step of dt_s" in refused(capsys, *BASE, "--horizon", "0.5")


def test_a_report_is_tried_before_and_written_last(
    lab: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "site.yaml/x: cannot be written" in refused(capsys, *BASE, "--report", "site.yaml/x")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert main([*BASE, "--jobs", "1", "--horizon", "2", "--report", "out"]) == 1
    assert "Hottest GPU" in capsys.readouterr().out
    assert list((lab / "out").iterdir()) == []


def test_seeds_of_the_call_replace_those_of_the_file(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lab / "scenario.yaml").write_text(SCENARIO + "seed: 5\nsweep: {count: 9}\n")
    result = asked(capsys, "--jobs", "1", "--horizon", "3", "--seeds", "2")
    assert [c["seed"] for c in result["cases"]] == [5, 6]


def test_a_trail_keeps_the_worst_of_each_stretch_in_bounded_room() -> None:
    trail = Trail(1000.0, points=10)
    for second in range(1, 1001):
        trail.add(
            float(second),
            50.0 + (second == 555) * 40.0,
            0.0,
            float(second % 2),
            100.0 - (second == 42),
            np.nan,
        )
    columns = trail.columns()
    assert columns["time_s"] == [100.0 * (k + 1) for k in range(10)]
    assert columns["hottest_gpu_c"] == [50.0] * 5 + [90.0] + [50.0] * 4
    assert columns["lowest_flow_lpm"][0] == 99.0
    assert columns["it_power_kw"] == pytest.approx([0.5] * 10)
    assert all(x != x for x in columns["warmest_supply_c"])


def result_of(number: int, varied: dict[str, Any], hottest: float | None) -> Result:
    figures: dict[str, float | None] = dict.fromkeys(FIGURES, 1.0)
    course = Course(figures | {"highest_gpu_temp_c": hottest}, [], Trail(10.0).columns(), 0, [])
    result = Result(Case(number, varied, Scenario("x", seed=number)))
    result.courses = dict.fromkeys(ARMS, course)
    return result


def test_groups_and_their_spread() -> None:
    results = [result_of(i, {"seed": i, "b": i // 3}, None if i == 4 else float(i)) for i in range(6)]
    assert [(v, len(members)) for v, members in groups_of(results)] == [({"b": 0}, 3), ({"b": 1}, 3)]
    first, second = summary_of(results)
    assert first["policies"]["highest_gpu_temp_c"] == {"median": 1.0, "lowest": 0.0, "highest": 2.0}
    assert second["nothing"]["highest_gpu_temp_c"] == {"median": 4.0, "lowest": 3.0, "highest": 5.0}
    assert first["difference"]["pue"]["median"] == 0.0
    assert spread([None]) == {"median": None, "lowest": None, "highest": None}


def test_what_a_scenario_is_called_is_not_markup() -> None:
    result = result_of(0, {"a<b>": "<script>"}, 1.0)
    told = {
        "site": "<i>", "scenario": "<script>alert(1)</script>", "horizon_s": 10.0, "from": None,
        "authority": {"<u>": "act"}, "site_authority": {"<u>": "off"}, "warnings": ["<q>"],
        "not_carried": ["<b>x"], "summary": summary_of([result]),
        "cases": [{"error": "<p>", "varied": {"<q>": 1}}],
    }  # fmt: skip
    page = render(told, result)
    for raw in ("<script>alert", "<i>,", "<u>", "<b>x", "<q>", "a<b>"):
        assert raw not in page


def test_the_bar_is_silent_where_there_is_no_terminal(lab: Path) -> None:
    said = io.StringIO()
    with CaseBar(Console(file=said), 2.0, "what if") as bar:
        results = run_cases(question_of(lab, horizon_s=3.0), [Case(0, {}, Scenario("calm"))], 1, bar)
    assert bar.done == 2.0
    assert said.getvalue() == ""
    assert list(results[0].courses) == list(ARMS)
