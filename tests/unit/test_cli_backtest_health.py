"""The evaluation `health`: what it prints and refuses, and that a fleet lives through its days."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.evaluation.__main__ import main as evaluate
from tests.evaluation.health import run as fleets
from tests.evaluation.health.course import DAY_S, HOUR_S, Course, Failed, Spell
from tests.evaluation.health.failure_timeline import draw_timeline
from tests.evaluation.health.run import (
    FleetRun,
    Watch,
    course_of,
    drain_like,
    drains,
    fleet_site,
    reason_of,
    run_course,
)
from tests.support.builders import Twin, two_racks
from tests.support.scripted_health import ailing
from twin.contracts import ACTION_WORDS, DEGRADED, FAILED, WATCH, Finding
from twin.engine import Engine
from twin.health import RECURS
from twin.simulation import Simulation

GOALS = ["false_drains_per_node_month", "precision", "recall", "lead_min", "lemons_found", "lemons_precision"]


def main(words: list[str]) -> int:
    return evaluate(["health", *words])


def made(task: FleetRun) -> Course:
    """A course by hand: one failure foreseen three hours ahead, one false drain."""
    failures = [Failed(0, "memory", 25 * DAY_S, 26 * DAY_S, 24 * DAY_S)]
    spells = [Spell(0, 25 * DAY_S - 3 * HOUR_S, 25 * DAY_S, "[rows]"),
              Spell(1, 30 * DAY_S, 30 * DAY_S, "forecast")]  # fmt: skip
    flagged = np.full(36, np.inf)
    flagged[3] = 20 * DAY_S
    return Course(task.seed, task.strength, 36, 72, 0.0, task.train_days * DAY_S, task.days * DAY_S, failures,
                  [3], spells, [], flagged, [3], cost_ms={"plant": 1.0, "whole": 2.0}, ticks=10,
                  suspended=["failure"])  # fmt: skip


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[FleetRun]:
    asked: list[FleetRun] = []

    def run(tasks: list[FleetRun], jobs: int, report: Any) -> list[Course]:
        asked.extend(tasks)
        return [made(task) for task in tasks]

    monkeypatch.setattr(fleets, "run_tasks", run)
    return asked


def test_json_is_one_object_that_says_it_is_simulated(
    played: list[FleetRun], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--nodes", "20", "--seeds", "2", "--first-seed", "5", "--strength", "1,0.5", "--json"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.count("\n") == 1
    told = json.loads(text)
    assert told["simulated"] is True
    assert [(t.seed, t.strength, t.nodes) for t in played] == [
        (5, 1.0, 20), (6, 1.0, 20), (5, 0.5, 20), (6, 0.5, 20),
    ]  # fmt: skip
    assert (told["racks"], told["nodes"], told["gpus"], told["seeds"]) == (2, 36, 72, [5, 6])
    assert [r["strength"] for r in told["results"]] == [1.0, 0.5]
    [first, _] = told["results"]
    assert [g["goal"] for g in first["goals"]] == GOALS
    assert [g["met"] for g in first["goals"]] == [False, True, True, True, True, True]
    assert first["nodes"] == 72
    assert first["lead_time_min"]["median"] == pytest.approx(180.0)
    assert told["cost"]["fleet_s"] == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--nodes", "0"], "--nodes 0: expected 1 to"),
        (["--seeds", "1000"], "--seeds"),
        (["--days", "nan"], "--days"),
        (["--days", "10", "--train-days", "9.5"], "--train-days 9.5: expected 0 to 9"),
        (["--train-days", "-1"], "--train-days"),
        (["--strength", "-1"], "--strength -1: expected numbers"),
        (["--gpus-per-node", "17"], "--gpus-per-node"),
        (["--jobs", "-2"], "--jobs"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: list[str], why: str, played: list[FleetRun], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    assert why in capsys.readouterr().err
    assert not played


@pytest.mark.parametrize(
    ("name", "drained"),
    [("none", False), ("watch", False), ("restart_app", False), ("check_facility", False),
     ("reset_gpu", True), ("reboot_node", True), ("run_diagnostics", True), ("drain", True),
     ("contact_support", True), ("replace", True)],
)  # fmt: skip
def test_which_actions_take_a_node_out(name: str, drained: bool) -> None:
    words = ACTION_WORDS[name]
    assert drain_like(words[:1].upper() + words[1:] + ".") is drained


def test_only_warnings_of_nodes_drain() -> None:
    todo = "Drain the node."

    def finding(identity: str, severity: str = "warning", action: str = todo) -> Finding:
        return Finding(identity, severity, "", (), (), 1.0, action)

    found = [finding("health/r1/n1"), finding("health/r1/n2", "info"), finding("health/switch/s1"),
             finding("fault/r1/n3"),
             finding("health/r1/n4", "critical", "Drain the node and replace the part."),
             finding("health/r1/n5", "critical", "Nothing to do.")]  # fmt: skip
    names = {f"r1/n{i}": i for i in range(9)}
    assert list(drains(found, names)) == [1, 4]


@pytest.mark.parametrize(
    ("level", "rules", "reason"),
    [(DEGRADED, ("gpu:row_remap_pending", RECURS), RECURS), (FAILED, ("node_down", RECURS), "node_down"),
     (DEGRADED, ("reboots",), "reboots"), (DEGRADED, (), "node, no evidence"),
     (WATCH, (RECURS,), "forecast")],
)  # fmt: skip
def test_the_reason_is_what_asks_for_a_drain_at_once(level: int, rules: tuple[str, ...], reason: str) -> None:
    twin = Twin(two_racks())
    ill = ailing(twin.engine)
    ill.say("node", 3, level, action_name="drain")
    for rule in rules:
        ill.say("node", 3, level, "x", action_name="drain", rule=rule)
    assert reason_of(twin.engine, 3) == reason


def test_a_reason_to_drain_does_not_outlive_the_failure() -> None:
    task = FleetRun(18, 1, 1.0, 0.0, 3)
    site = fleet_site(task)
    simulation = Simulation.of(Engine(site, [], []), seed=3)
    simulation.dt_s = 600.0
    watch = Watch(simulation, task, course_of(task, site, draw_timeline(site, 3, 1.0), 0.0))
    failures = simulation.engine.health.failures
    name = site.name("node", 2)
    drain = Finding(f"health/{name}", "warning", "", (), (), 1.0, "Drain the node.")
    for now_s, row in ((60.0, -1), (120.0, 0), (180.0, 0), (240.0, -1)):
        failures.row[2] = row
        watch.take(simulation.engine, [drain], now_s)
    assert [(s.begin_s, s.last_s) for s in watch.end().spells] == [
        (60.0, 60.0),
        (120.0, 180.0),
        (240.0, 240.0),
    ]


@pytest.mark.evaluation
def test_a_fleet_lives_through_its_hours_and_equal_tasks_are_equal() -> None:
    task = FleetRun(18, 1, 0.15, 0.05, 2, 1.0, 240.0)
    heard: list[float] = []
    one, two = run_course(task, heard.append), run_course(task)
    assert one.n == 18
    assert one.ticks == round(0.15 * DAY_S / 240.0)
    assert heard[-1] == pytest.approx(1.0)
    assert len(one.origin_s) == 2
    assert (np.diff(one.origin_s) == HOUR_S).all()
    assert one.said[DAY_S].shape == (2, 18)
    assert one.failures == two.failures
    assert one.spells == two.spells
    for h, p in one.said.items():
        assert np.array_equal(p, two.said[h], equal_nan=True)
    assert one.suspended == []
    assert {"plant", "sensors", "engine", "health", "whole"} <= set(one.cost_ms)
