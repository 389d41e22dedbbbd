"""Two courses from one moment ("what if"), compared by the same figures."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from policies import REGISTRY
from tests.support.recorded_site import BASE, FROM, SCENARIO, SITE, asked, lab, question_of, recorded
from twin.cli.main import main
from twin.config import load_site, make_engine
from twin.control import Setpoints
from twin.plant import Scenario, cases_of
from twin.run import TraceReader, engine_before, write_snapshot
from twin.simulation import Case, Question
from twin.simulation.whatif import CURVES, begin, run_arm
from twin.simulation.whatif_report import FIGURES
from twin.site import build_site

__all__ = ["lab", "recorded"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.long
def test_policies_beside_nothing(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(lab / "run")
    result = asked(capsys, "--jobs", "1", "--report", "out")
    assert contents(lab / "run") == before  # a snapshot is read, never written to
    assert set(result) == {
        "site", "scenario", "simulated", "from", "source", "horizon_s", "dt_s", "authority", "held_workload",
        "not_carried", "summary", "cases", "failed", "wall_s", "site_authority", "warnings", "curves",
    }  # fmt: skip
    (case,) = result["cases"]
    assert set(case) == {"varied", "seed", "error", "policies", "nothing", "difference"}
    assert set(case["difference"]) == set(FIGURES)
    assert set(case["policies"]) == {*FIGURES, "faults", "limits"}
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


def checksum_before(folder: Path, tick: int) -> str:
    return engine_before(folder, tick, lambda spec: make_engine(build_site(spec))).checksum()


@pytest.mark.long
def test_before_a_tick_the_twin_stands_as_it_stood(
    lab: Path, recorded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The state from the nearest snapshot is that of a replay from the beginning; then both courses run."""
    engine = make_engine(load_site(lab / "site.yaml")[1])
    sums = {}
    for frame in TraceReader(recorded / "run"):
        sums[frame.tick] = engine.checksum()  # as it stood before this one
        engine.tick(frame)
    run = tmp_path / "copy"
    shutil.copytree(recorded / "run", run)
    for path in run.glob("snapshot-*.rts"):
        path.unlink()
    again = make_engine(load_site(lab / "site.yaml")[1])
    for frame in TraceReader(run):
        if frame.tick == 12:
            write_snapshot(run, 11, again.dump())
            break
        again.tick(frame)
    for tick in (5, 12, 20):
        assert checksum_before(run, tick) == sums[tick], tick
    result = asked(capsys, "--before", "20", "--horizon", "60s", "--authority", "power_cap=off")
    assert result["from"]["tick"] == 19
    stood = make_engine(load_site(lab / "site.yaml")[1]).intake.authority
    assert result["authority"] == stood | {"power_cap": "off"}, "as they stood, and none is armed"
    assert result["cases"][0]["nothing"]["commands"] == 0
    asked_before = [*FROM, "--before", str(10**6), "--json"]
    assert main(asked_before) == 1
    assert "the trace ends at tick" in capsys.readouterr().err
    for path in run.glob("snapshot-*.rts"):
        path.unlink()
    assert checksum_before(run, 20) == sums[20], "without a snapshot, from the beginning"


def test_for_people(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FROM, "--jobs", "1", "--horizon", "15s", "--authority", "thermal_guard=off"]) == 0
    said = capsys.readouterr().out
    assert "thermal_guard off" in said
    assert "leak_guard act" in said
    of_site = ", ".join(f"{name} advise" for name in sorted(REGISTRY)[:2])
    assert f"set for this question; the site file says: {of_site}" in said
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
    assert main([*BASE, "--jobs", "1", "--horizon", "10s", "--json"]) == 0
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
    new = Setpoints(index, np.array([700.0]), np.zeros(1, np.int32), np.ones(1, np.int32))
    lease.grant(new, 1, engine.state.now_ns, np.full(lease.n, 1200.0))
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


@pytest.mark.long
def test_the_chart_and_the_figures_count_throttling_alike(lab: Path) -> None:
    """The chart's sum over time is the figure: one point a second here."""
    spec, site = load_site(lab / "site.yaml")
    for cap in (False, True):
        ((_, scenario),) = cases_of(yaml.safe_load(SCENARIO), site)
        question = Question(spec, "site.yaml", given={} if cap else {"thermal_guard": "off"})
        course = run_arm(question, Case(0, {}, scenario), "policies" if cap else "nothing")
        slowed, figures = course.trail["throttled_gpus"], course.figures
        assert len(slowed) == 60
        assert sum(slowed) == pytest.approx(figures["throttled_gpu_s"])
        if not cap:
            assert figures["throttled_gpu_s"] > 0.0
        at = [t for t, n in zip(course.trail["time_s"], slowed, strict=True) if n > 0]
        assert figures["first_throttle_s"] == (at[0] if at else None)
        assert max(slowed) <= figures["throttled_gpus"]


def test_seeds_of_the_call_replace_those_of_the_file(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (lab / "scenario.yaml").write_text(SCENARIO + "seed: 5\nsweep: {count: 9}\n")
    result = asked(capsys, "--jobs", "1", "--horizon", "3s", "--seeds", "2")
    assert [c["seed"] for c in result["cases"]] == [5, 6]
