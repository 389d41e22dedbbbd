"""The lab of false alarms: draws that share nothing, alarms counted once each, rates with their intervals."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from tests.evaluation.__main__ import main as evaluate
from tests.evaluation.health.failure_classes import BENIGN
from tests.evaluation.quiet.alarm_rates import rates
from tests.evaluation.quiet.circumstances import (
    GAPS_PU,
    events_of,
    load_target,
    maintenance,
    sensors_of,
    weather_of,
)
from tests.evaluation.quiet.healthy_run import AlarmLog, FalseAlarm, restarts_of, run_healthy
from tests.evaluation.quiet.healthy_sites import (
    DRAWS,
    LOADS,
    SEASONS,
    SENSORS,
    Choice,
    Draw,
    HealthyRun,
    healthy_site,
    runs_of,
)
from twin.contracts import Finding
from twin.engine import Engine
from twin.plant import Observation, Plant, TimelinePlayer
from twin.run import no_report
from twin.simulation import Simulation

LIQUID, AIR = DRAWS["develop"].profiles


def every_cell(draw: Draw) -> Choice:
    return Choice(list(LOADS), ["liquid", "air"], [*draw.racks, *draw.large_racks])


def test_no_seed_or_size_of_development_is_held_back() -> None:
    for a, b in combinations(DRAWS.values(), 2):
        assert not {*a.racks, *a.large_racks} & {*b.racks, *b.large_racks}
        some, others = ({r.seed for r in runs_of(d, every_cell(d), 1000, 1)} for d in (a, b))
        assert not some & others


def test_a_run_has_its_seed_whatever_else_is_chosen() -> None:
    every = runs_of(DRAWS["develop"], every_cell(DRAWS["develop"]), 2, 3600)
    assert len({r.seed for r in every}) == len(every)
    assert set(runs_of(DRAWS["develop"], Choice(["steps"], ["air"]), 1, 3600)) < set(every)
    for load, cooling, racks, seed in (("restarts", "air", 8, 40_031), ("response", "air", 8, 40_058),
                                       ("churn", "air", 128, 40_075)):  # fmt: skip
        assert runs_of(DRAWS["develop"], Choice([load], [cooling], [racks]), 1, 60)[0].seed == seed
    pairs = Choice(["steps"], ["air"], [1], SENSORS, list(SEASONS))
    assert len({(r.seed, r.racks) for r in runs_of(DRAWS["develop"], pairs, 1, 60)}) == 1


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


def test_an_alarm_counts_once_for_an_incident_and_a_remark_or_what_is_true_never() -> None:
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
    for node, slowed in (("quiet/h/r1/node0", True), ("quiet/h/r1/node1", False)):
        active[f"health/{node}"] = Finding(f"health/{node}", "warning", "hot", (node,), (), 1.0, "look", 1)
        gpus = simulation.site.node_of_gpu == simulation.site.entity("node", node)
        simulation.plant.truth.throttle_s[gpus] = float(slowed)
    log.look(simulation)
    log.look(simulation)
    del active["balance/a0"]
    log.look(simulation)
    active["balance/a0"] = Finding("balance/a0", "critical", "off", ("quiet/h/a0",), (), 1.0, "look", 1)
    log.look(simulation)
    balance = active.pop("balance/a0")
    log.look(simulation)
    active["balance/a0"] = balance
    log.look(simulation)
    assert [a.again for a in log.alarms] == [False, False, False, True]
    del log.alarms[-1]
    assert [(a.detector, a.time_s, a.severity) for a in log.alarms] == [
        ("balance", 2.0, "warning"),
        ("health", 2.0, "warning"),
        ("balance", 5.0, "critical"),
    ]
    assert log.alarms[0].circumstance == "start"


def test_rates_have_the_interval_of_poisson_counts() -> None:
    runs = [HealthyRun(LIQUID, 8, "idle", 1, 3600 * 125), HealthyRun(AIR, 1, "steps", 2, 3600 * 100)]
    alarm = FalseAlarm("hgx-h100", "air", 1, "steps", "fine", "mild", 2, 7.0, "tray_blocked node", "n",
                       "critical", "gpu.temp_c", "start", "")  # fmt: skip
    liquid, air = rates(runs, [alarm] * 4)["cooling"]
    assert (liquid["rack_hours"], liquid["alarms"], liquid["low"]) == (1000.0, 0, 0.0)
    assert liquid["high"] == pytest.approx(3.68888, abs=1e-4)  # -ln 0.025
    # source: exact limits of a Poisson count of 4, 95 %
    assert (air["critical"], air["per_1000_rack_hours"]) == (4, 40.0)
    assert (air["low"], air["high"]) == pytest.approx((10.899, 102.416), rel=1e-4)
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


def observed(run: HealthyRun) -> tuple[Plant, Observation]:
    site = healthy_site(run)
    plant, sensors = Plant(site, seed=run.seed, weather=weather_of(run)), sensors_of(run, site)
    for second in range(1, 4):  # the building's sensors are late
        plant.step()
        seen = sensors.observe(plant.truth, plant.present, second * 10**9)
    return plant, seen


def readings(seen: Observation, ending: str) -> np.ndarray:
    found = [r.column(s) for r in seen.reports for s in r.signals if s.endswith(ending)]
    return np.concatenate(found).astype(float)


def test_coarse_sensors_read_whole_kelvins_and_every_second_percent() -> None:
    run = HealthyRun(LIQUID, 1, "constant", 7, 60)
    for grade, whole in (("fine", False), ("coarse", True)):
        _, seen = observed(run._replace(sensors=grade))
        for ending, step in (("temp_c", 1.0), ("_pu", 0.02)):
            off = readings(seen, ending) / step
            assert np.allclose(off, np.rint(off), atol=1e-4, equal_nan=True) == whole


def test_a_share_of_the_readings_does_not_come() -> None:
    run = HealthyRun(LIQUID, 8, "constant", 7, 60)
    fine, gaps = (np.isnan(readings(observed(run._replace(sensors=g))[1], "power_w")) for g in SENSORS[::2])
    assert fine.mean() < 0.005
    assert gaps.mean() == pytest.approx(GAPS_PU, rel=0.6)


def test_seasons_differ_outdoors() -> None:
    run = HealthyRun(LIQUID, 1, "constant", 7, 60)
    winter, mild, summer = (
        observed(run._replace(season=s))[0].truth.outdoor_c for s in ("winter", "mild", "summer")
    )
    assert winter < mild < summer


def test_drained_nodes_do_no_work_are_announced_or_not_and_come_back() -> None:
    run = HealthyRun(AIR, 8, "maintenance", 7, 900)
    site = healthy_site(run)
    timeline = maintenance(run, site)
    nodes = {e.at for e in timeline.events if e.field == "node_unfit"}
    assert len(nodes) == 4
    assert [e.at for e in timeline.events if e.act == "work"] == [at for at, _, _ in timeline.reboots]
    plant = Plant(site, seed=run.seed)
    plant.play(TimelinePlayer(site, timeline))
    unfit = set()
    for _ in range(run.seconds // 30):
        plant.step((), 30.0)
        unfit |= set(np.flatnonzero(plant.truth.node_unfit).tolist())
    assert unfit == nodes
    assert not plant.truth.node_unfit.any()
    assert not plant.present.node_silent.any()
    assert plant.truth.node_reboots.sum() == len(timeline.reboots) == 2


def test_ordinary_life_breaks_nothing_and_happens_at_its_rates() -> None:
    run = HealthyRun(LIQUID, 8, "ordinary", 7, 30 * 86_400)
    site = healthy_site(run)
    events = events_of(run, site)
    assert events is not None
    assert (len(events.failures), events.lemons.any()) == (0, False)
    benign = sum(b.per_day * site.sizes[b.table] * 30.0 for b in BENIGN if b.what == "node_reboots")
    planned = sum(b.per_day * site.sizes[b.table] * 30.0 for b in BENIGN if b.what == "maintenance")
    assert len(events.reboots) == pytest.approx(benign + planned, abs=4.0 * (benign + planned) ** 0.5)
    assert "gpu_alive" not in {e.field for e in events.events}
    assert events_of(run._replace(load="steps"), site) is None


def test_a_demand_response_asks_for_less_than_is_drawn_for_a_third_of_the_run() -> None:
    run = HealthyRun(AIR, 1, "response", 7, 60)
    simulation = Simulation.of(Engine(healthy_site(run), [], []))
    simulation.step()
    target = load_target(run, simulation)
    assert 0.0 < target.limit_w < float(simulation.plant.truth.rack_power_w.sum())
    assert simulation.now_ns < target.start_ns < target.end_ns == simulation.now_ns + 20 * 10**9
    simulation.tell(target)
    simulation.step()
    assert len(simulation.engine.intake.load_targets.dump()) == 1


@pytest.mark.parametrize(
    ("load", "sensors", "season"),
    [
        ("response", "fine", "mild"),
        ("maintenance", "gaps", "winter"),
        ("steps", "coarse", "summer"),
        ("ordinary", "fine", "mild"),
    ],
)
def test_a_cell_of_every_axis_lives_for_a_minute(load: str, sensors: str, season: str) -> None:
    run = HealthyRun(AIR, 1, load, 40_001, 60, sensors, season)
    assert run_healthy(run, no_report) == []


def test_the_recorded_facility_is_replayed_and_its_alarms_counted(
    recording: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "dsx-bms-capture").symlink_to(recording("dsx-bms-capture"))
    assert evaluate(["quiet", "--plants", "0", "--recordings", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["plants"], told["alarms"]) == (0, [])
    (replayed,) = told["recordings"]
    assert replayed["name"] == "dsx-bms-capture"
    assert replayed["span_s"] == pytest.approx(99.0, abs=2.0)
