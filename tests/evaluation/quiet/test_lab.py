"""The lab of false alarms: draws that share nothing, alarms counted once each, rates with their intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from tests.evaluation.__main__ import main as evaluate
from tests.evaluation.health.failure_classes import BENIGN
from tests.evaluation.quiet.alarm_rates import rates
from tests.evaluation.quiet.calibration import NORMAL_PU, ResidualCounts, Tally, calibration
from tests.evaluation.quiet.circumstances import (
    DOOR_K,
    GAPS_PU,
    RECIRCULATED_K,
    events_of,
    load_target,
    maintenance,
    moving_air,
    replace_gpus,
    sensors_of,
    site_change,
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
from twin.contracts import Finding, Residual
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
                                       ("churn", "air", 128, 40_075),
                                       ("response", "liquid", 8, 40_034)):  # fmt: skip
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


@pytest.mark.evaluation
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
    simulation.inject(target)
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
    assert run_healthy(run, no_report).alarms == []


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


class Drawn:
    """A twin of one rack of eight GPUs in each of four nodes, whose residuals are what a test puts there."""

    def __init__(self, sigmas: float = 1.0, kept: float = 0.0) -> None:
        run = HealthyRun(AIR, 1, "idle", 7, 60)
        self.engine = Engine(healthy_site(run), [], [])
        self.counts = ResidualCounts(run)
        self.rng, self.n = np.random.default_rng(1), self.engine.site.sizes["gpu"]
        self.sigmas, self.kept, self.z = sigmas, kept, np.zeros(self.n)

    def look(self, rounds: int, new: bool = True) -> Tally:
        for _ in range(rounds):
            self.engine.state.tables["gpu"].t_ns += new
            drawn = self.rng.standard_normal(self.n)
            self.z = self.kept * self.z + np.sqrt(1.0 - self.kept**2) * drawn
            zero = np.zeros(self.n)
            off = Residual("gpu.temp_c", zero, self.sigmas * self.z, zero + 1.0)
            self.engine.estimator.residuals = {"gpu.temp_c": off}
            self.counts.look(self.engine)
        return self.tallies()["start", "to 15 min"]

    def tallies(self) -> dict[tuple[str, str], Tally]:
        return {(c.since, c.age): c.tally for c in self.counts.cells()}


def test_residuals_of_a_normal_distribution_are_counted_as_one() -> None:
    tally = Drawn().look(800)
    assert tally.readings == 800 * 32
    for count, pu in zip(tally.beyond, NORMAL_PU, strict=True):
        assert abs(count - tally.readings * pu) <= 4.0 * np.sqrt(tally.readings * pu) + 1
    assert tally.effective == pytest.approx(tally.readings, rel=0.05)
    assert NORMAL_PU[2] == pytest.approx(6.334e-5, rel=1e-3)  # source: tables of the normal distribution
    wide = Drawn(1.6)
    wide.look(800)
    row = calibration(wide.counts.cells())["age"][0]
    assert row["verdict"] == "above"
    assert row["share_pu"][2] == pytest.approx(math.erfc(2.5 / math.sqrt(2.0)), rel=0.2)


def test_a_reading_counts_once_and_one_that_is_like_the_last_counts_for_less() -> None:
    drawn = Drawn()
    first = drawn.look(10).readings
    assert drawn.look(10, new=False).readings == first == 320
    alike = Drawn(kept=0.9).look(800)
    assert alike.effective == pytest.approx(alike.readings * 0.1 / 1.9, rel=0.1)
    far = Drawn(sigmas=8.0, kept=1.0)
    far.z = np.ones(32)
    tally = far.look(50)
    assert (tally.beyond, tally.excursions) == ([1600] * 4, 32)
    low, high = tally.interval()
    assert low < 1.0 <= high


def test_residuals_are_counted_by_the_age_of_what_is_known_of_a_device() -> None:
    drawn = Drawn()
    drawn.look(900)
    drawn.counts.replace("replaced", "gpu", np.arange(32) < 4)
    drawn.look(10)
    tallies = drawn.tallies()
    assert {key: t.readings for key, t in tallies.items()} == {
        ("start", "to 15 min"): 900 * 32,
        ("start", "to 1 h"): 10 * 28,
        ("replaced", "to 15 min"): 10 * 4,
    }
    drawn.counts.begin("restart", 60)
    drawn.look(1)
    assert drawn.tallies()["restart", "to 15 min"].readings == 32


def test_the_calibration_is_printed_and_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "quiet",
        "--hours",
        "0.02",
        "--cooling",
        "air",
        "--loads",
        "steps",
        "--racks",
        "1",
        "--calibration",
    ]
    assert evaluate([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["calibration"]
    assert told["normal_pu"] == list(NORMAL_PU)
    assert {row["relation"] for row in told["age"]} == {row["relation"] for row in told["load"]} > set()
    for row in told["age"] + told["load"]:
        assert row["readings"] >= row["beyond"][0] >= row["beyond"][1] >= row["beyond"][2]
        assert row["low"] <= row["share_pu"][2] <= row["high"]
    assert evaluate(words) == 0
    assert "a normal distribution has" in capsys.readouterr().out


def test_the_gpus_of_a_node_change_places_and_are_told() -> None:
    run = HealthyRun(LIQUID, 1, "replaced", 7, 60)
    plant = Plant(healthy_site(run), seed=run.seed)
    before = plant.parameters.gpu_idle_w.copy()
    events = replace_gpus(plant, 3)
    gpus = np.flatnonzero(plant.site.node_of_gpu == 3)
    assert [e.name for e in events] == [plant.site.name("gpu", int(g)) for g in gpus]
    changed = np.flatnonzero(plant.parameters.gpu_idle_w != before)
    assert changed.tolist() == gpus.tolist()
    assert sorted(plant.parameters.gpu_idle_w[gpus]) == sorted(before[gpus])


def test_doors_and_recirculation_warm_the_air_of_racks_and_end() -> None:
    run = HealthyRun(AIR, 8, "doors", 7, 3600)
    plant = Plant(healthy_site(run), seed=run.seed)
    drive, still_k = moving_air(plant, run.seed), plant.parameters.rack_inlet_add_k.copy()
    added_k = []
    for second in range(3600):
        drive(second)
        added_k.append(plant.parameters.rack_inlet_add_k - still_k)
    assert np.min(added_k) >= 0.0
    assert 1.5 < np.max(added_k) < DOOR_K[1] + RECIRCULATED_K[1]
    assert np.ptp(added_k, axis=0).max() > 1.0


def test_a_changed_site_has_the_same_devices_and_other_budgets() -> None:
    run = HealthyRun(AIR, 1, "changed", 7, 60)
    engine = Engine(healthy_site(run), [], [])
    simulation = Simulation.of(engine)
    simulation.step()
    simulation.inbox.put_event(site_change(run))
    simulation.step()
    assert engine.site.spec_hash == site_change(run).site_hash
    assert engine.site.sizes == healthy_site(run).sizes
    assert engine.site.budget_w == pytest.approx(1.1 * healthy_site(run).budget_w)
