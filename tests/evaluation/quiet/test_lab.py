"""The lab of false alarms: draws that share nothing, alarms counted once each, rates with their intervals."""

from __future__ import annotations

import json
from itertools import combinations

import pytest

from tests.evaluation.__main__ import main as evaluate
from tests.evaluation.quiet.alarm_rates import rates
from tests.evaluation.quiet.healthy_run import AlarmLog, FalseAlarm, restarts_of
from tests.evaluation.quiet.healthy_sites import DRAWS, LOADS, HealthyRun, healthy_site, runs_of
from twin.contracts import Finding
from twin.engine import Engine
from twin.simulation import Simulation

LIQUID, AIR = DRAWS["develop"].profiles


def test_no_seed_or_size_of_development_is_held_back() -> None:
    for a, b in combinations(DRAWS.values(), 2):
        assert not set(a.racks) & set(b.racks)
        some, others = ({r.seed for r in runs_of(d, list(LOADS), ["liquid", "air"], 1000, 1)} for d in (a, b))
        assert not some & others


def test_a_run_has_its_seed_whatever_else_is_chosen() -> None:
    every = runs_of(DRAWS["develop"], list(LOADS), ["liquid", "air"], 2, 3600)
    assert len({r.seed for r in every}) == len(every)
    assert set(runs_of(DRAWS["develop"], ["steps"], ["air"], 1, 3600)) < set(every)


@pytest.mark.parametrize("profile", DRAWS["held_back"].profiles, ids=lambda p: p.name)
def test_a_site_has_its_racks_and_budgets(profile: object) -> None:
    assert profile in DRAWS["held_back"].profiles
    for load, binds in (("idle", False), ("capped", True)):
        run = HealthyRun(profile, 9, load, 1, 60)  # type: ignore[arg-type]
        site = healthy_site(run)
        assert site.sizes["rack"] == 9
        assert site.sizes["feeder"] == 4
        assert site.sizes["cdu"] == (3 if run.profile.cooling == "liquid" else 0)
        assert (site.budget_w[0] < 8 * run.profile.rack_w) == binds


def test_the_twin_is_started_again_with_its_state_and_from_nothing() -> None:
    assert [r.cold for r in restarts_of(HealthyRun(AIR, 1, "restarts", 1, 300))] == [False, True]
    assert restarts_of(HealthyRun(AIR, 1, "idle", 1, 300)) == []


def test_an_alarm_counts_whenever_it_begins_and_a_remark_or_what_is_true_never() -> None:
    run = HealthyRun(AIR, 1, "idle", 1, 60)
    simulation = Simulation.of(Engine(healthy_site(run), [], []))
    log = AlarmLog(run, simulation)
    active = simulation.engine.findings.active
    log.look(simulation)
    active["balance/a0"] = Finding(
        "balance/a0", "warning", "off", ("quiet/h/a0",), ("10 kW",), 1.0, "look", 1
    )
    active["remark/x"] = Finding("remark/x", "info", "so", (), (), 1.0, "look", 1)
    active["beyond/g"] = Finding("beyond/g", "critical", "hot", (), ("88 degC",), 1.0, "look", 1)
    log.look(simulation)
    log.look(simulation)
    del active["balance/a0"]
    log.look(simulation)
    active["balance/a0"] = Finding("balance/a0", "critical", "off", ("quiet/h/a0",), (), 1.0, "look", 1)
    log.look(simulation)
    assert [(a.detector, a.time_s, a.severity) for a in log.alarms] == [
        ("balance", 2.0, "warning"),
        ("balance", 5.0, "critical"),
    ]
    assert log.alarms[0].circumstance == "start"


def test_rates_have_the_interval_of_poisson_counts() -> None:
    runs = [HealthyRun(LIQUID, 8, "idle", 1, 3600 * 125), HealthyRun(AIR, 1, "steps", 2, 3600 * 100)]
    alarm = FalseAlarm("hgx-h100", "air", 1, "steps", 2, 7.0, "tray_blocked node", "n", "critical",
                       "gpu.temp_c", "start", "")  # fmt: skip
    liquid, air = rates(runs, [alarm] * 4)["cooling"]
    assert (liquid["rack_hours"], liquid["alarms"], liquid["low"]) == (1000.0, 0, 0.0)
    assert liquid["high"] == pytest.approx(3.689, abs=0.05)  # -ln 0.025
    # source: exact limits of a Poisson count of 4, 95 %
    assert (air["critical"], air["per_1000_rack_hours"]) == (4, 40.0)
    assert (air["low"], air["high"]) == pytest.approx((10.90, 102.4), rel=0.02)
    causes = rates(runs, [alarm] * 4)["causes"]
    assert [(c["alarms"], c["plants"], c["circumstance"]) for c in causes] == [(4, 1, "start")]


def test_the_short_form_counts_the_same_in_one_process_and_in_two(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["quiet", "--hours", "0.01", "--cooling", "air", "--loads", "steps,restarts", "--json"]
    told = []
    for jobs in ("1", "2"):
        assert evaluate([*words, "--jobs", jobs]) == 0
        told.append(json.loads(capsys.readouterr().out))
        del told[-1]["wall_s"]
    assert told[0] == told[1]
    assert told[0]["plants"] == 4
    assert told[0]["rates"]["cooling"][0]["rack_hours"] == pytest.approx(0.18)


def test_an_unknown_load_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(["quiet", "--loads", "naps"]) == 1
    assert "expected some of idle, constant, steps" in " ".join(capsys.readouterr().err.split())
