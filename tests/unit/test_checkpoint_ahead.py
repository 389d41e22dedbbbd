"""checkpoint: saves ahead of what is about to interrupt a job."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.checkpointing.early_save import DRAIN_PU
from policies.checkpointing.policy import REQUEST_S, UNANSWERED_S
from policies.checkpointing.texts import SINCE
from tests.support.saving_jobs import EIGHT, N_NODE, OTHERS, Saving, chances, drain, saved
from tests.support.scripted_health import ailing
from twin.catalogue import NS
from twin.contracts import DEGRADED, FAILED, Fault
from twin.telemetry import events as ev


def test_a_save_ahead_of_what_is_forecast() -> None:
    twin = Saving({"a": EIGHT, "b": OTHERS})
    twin.says.day = chances(n3=0.9)
    twin.says.hour = chances(0.0, n3=0.6)
    saved(twin, "a")
    saved(twin, "b")
    twin.wait(10)
    assert np.isnan(twin.since("b"))
    assert 60.0 <= twin.since("a") <= 80.0, "one that is being written counts"
    why = twin.why(SINCE)[0]
    assert "forecast to fail soon" in why
    assert "saving costs 60 s; not saving risks" in why
    assert why.endswith("of work on 8 nodes")
    at = twin.lease(SINCE)[0]
    twin.wait(120)
    assert twin.lease(SINCE)[0] == at, "asked once"
    twin.told("a", ago_s=100.0)
    twin.wait(10)
    assert twin.why(SINCE) == []


def test_what_is_at_stake_must_exceed_what_a_save_costs() -> None:
    for ago_s, asked in ((70.0, False), (400.0, False), (2400.0, True)):
        twin = Saving({"a": EIGHT})
        twin.says.day, twin.says.hour = chances(0.0, n3=0.3), chances(n3=0.08)
        saved(twin, ago_s=ago_s)
        twin.tick(None, dt_s=5.0)
        assert bool(twin.why(SINCE)) == asked, ago_s


@pytest.mark.parametrize(
    ("day", "hour", "ago_s", "flush_s", "asked"),
    [
        (0.5, None, 3000.0, 0.0, False),  # no news: the interval was made for that rate
        (0.5, 0.5, 3000.0, 0.0, True),
        (0.01, chances(0.0, n3=0.1), 5000.0, 0.0, True),
        (0.01, chances(0.0, n3=0.1), 7000.0, 0.0, False),  # the next save is near
        (0.01, chances(0.0, n3=0.999), 1200.0, 100.0, True),
        (0.01, chances(0.0, n3=0.999), 1200.0, 3000.0, False),  # too late to be durable in time
    ],
)
def test_a_save_that_changes_nothing_is_not_asked_for(
    day: float, hour: Any, ago_s: float, flush_s: float, asked: bool
) -> None:
    twin = Saving({"a": EIGHT}, authority="advise")
    twin.says.day, twin.says.hour = day, hour
    twin.told("a", ago_s=ago_s, interval_s=7200.0, save_s=60.0, block_s=60.0, flush_s=flush_s)
    twin.wait(5)
    assert bool(twin.why(SINCE)) == asked


@pytest.mark.long
def test_an_unanswered_ask_ends_and_is_no_alarm() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day, twin.says.hour = chances(0.0, n3=0.9), chances(n3=0.6)
    saved(twin)
    twin.wait(REQUEST_S + 120.0, dt_s=20.0)
    asks = twin.engine.memory["checkpoint"]["requested_ns"][0]
    assert twin.why(SINCE) == []
    assert not [key for key in twin.engine.findings.active if SINCE in key]
    twin.wait(3600.0, dt_s=20.0)
    again = twin.engine.memory["checkpoint"]["requested_ns"][0]
    assert again == asks or again - asks >= UNANSWERED_S * NS
    assert not [key for key in twin.engine.findings.active if SINCE in key]


@pytest.mark.parametrize(
    ("level", "action", "ago_s", "asked"),
    [
        (FAILED, "reboot_node", 1200.0, True),
        (FAILED, "reboot_node", 70.0, False),
        (DEGRADED, "drain", 2400.0, True),
        (DEGRADED, "watch", 2400.0, False),
    ],
)
@pytest.mark.parametrize("part", ["node", "gpu"])
def test_a_verdict_on_a_node_of_its_own(
    part: str, level: int, action: str, ago_s: float, asked: bool
) -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.001
    ill = ailing(twin.engine)
    ill.say(part, 3 if part == "node" else 13, level, "it is ill", action_name=action, since_ns=twin.now_ns)
    saved(twin, ago_s=ago_s)
    twin.wait(10)
    assert bool(twin.why(SINCE)) == asked
    if asked:
        assert "one of its nodes is in bad health" in twin.why(SINCE)[0]


def test_an_old_verdict_counts_no_more() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.001
    ill = ailing(twin.engine)
    ill.say("node", 3, FAILED, "it is ill", action_name="drain", since_ns=twin.now_ns - 7 * 3600 * NS)
    saved(twin)
    twin.wait(10)
    assert twin.why(SINCE) == []


@pytest.mark.long
def test_a_drain_that_somebody_wants_is_told_to_the_job_once() -> None:
    twin = Saving({"a": EIGHT, "b": OTHERS})
    twin.says.day = 0.001
    saved(twin)
    twin.tick(None, drain())
    twin.wait(10)
    assert "is to be drained" in twin.why(SINCE)[0]
    assert f"risks {100 * DRAIN_PU:.0f} % of" in twin.why(SINCE)[0]
    assert np.isnan(twin.since("b"))
    twin.told("a", ago_s=10.0)
    twin.wait(7000.0, dt_s=50.0)
    twin.told("a", ago_s=3000.0)
    twin.wait(1000.0, dt_s=20.0)
    first = twin.engine.memory["checkpoint"]["requested_ns"][0]
    assert twin.now_ns - first > 7000 * NS, "it lasts, and is not asked for again"
    twin.tick(None, ev.RequestWithdrawn(id="w", author="ada", request="d"))
    twin.wait(320)  # the lease on the node ends
    twin.tick(None, drain("d2"))
    twin.wait(10)
    assert twin.why(SINCE), "another one is"


@pytest.mark.parametrize(("ran_s", "lost_s"), [(1200.0, 1200.0), (18_000.0, 0.5 * (7200.0 + 60.0))])
def test_a_job_that_never_reported_a_save_has_half_of_its_interval_at_risk_and_no_more_than_it_ran(
    ran_s: float, lost_s: float
) -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.001
    twin.wait(ran_s, dt_s=300.0)
    twin.tick(None, drain())
    twin.wait(10)
    assert twin.why(SINCE)
    assert twin.engine.memory["checkpoint"]["lost_s"][0] == pytest.approx(lost_s, abs=15.0)


def test_cordoning_is_no_drain_and_draining_by_others_is() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.001
    saved(twin)
    twin.tick(None, drain(level=1.0))
    twin.wait(10)
    assert twin.why(SINCE) == []
    state = np.zeros(N_NODE)
    state[5] = 2.0
    twin.wait(10, {"node.service_level_state": state})
    assert twin.why(SINCE)


@pytest.mark.parametrize(
    ("kind", "table", "entity", "sure", "asked"),
    [
        ("feed_lost", "feeder", 0, 0.9, "ab"),
        ("grid_event", "site", 0, 0.9, "ab"),
        ("pump_trip", "cdu", 0, 0.9, "ab"),
        ("branch_blocked", "rack", 0, 0.9, "a"),
        ("branch_blocked", "rack", 0, 0.4, ""),
        ("pump_worn", "cdu", 0, 0.9, ""),
        ("node_down", "node", 30, 0.9, ""),
    ],
)
def test_trouble_of_power_and_cooling(kind: str, table: str, entity: int, sure: float, asked: str) -> None:
    twin = Saving({"a": EIGHT, "b": OTHERS})
    twin.says.day = 0.001
    saved(twin, "a")
    saved(twin, "b")
    fault = Fault(kind, table, entity, "", "critical", sure, twin.now_ns, ("seen",))
    diagnosis = twin.engine.diagnosis
    diagnosis.update = lambda *_: setattr(diagnosis, "faults", (fault,))  # type: ignore[assignment]
    twin.wait(10)
    slots = np.flatnonzero(np.isfinite(twin.lease(SINCE)))
    assert slots.tolist() == [twin.engine.jobs.slot_of[job] for job in asked]
    if asked:
        assert "the power or cooling above it has a fault" in twin.why(SINCE)[0]


def test_trouble_that_lasts_is_a_reason_to_save_once() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.001
    saved(twin)
    fault = Fault("feed_lost", "feeder", 0, "", "critical", 0.9, twin.now_ns, ("seen",))
    diagnosis = twin.engine.diagnosis
    diagnosis.update = lambda *_: setattr(diagnosis, "faults", (fault,))  # type: ignore[assignment]
    twin.wait(10)
    assert twin.why(SINCE)
    twin.told("a", ago_s=10.0)
    twin.wait(1800.0, dt_s=60.0)
    assert twin.now_ns - twin.engine.memory["checkpoint"]["requested_ns"][0] > 1800 * NS
    diagnosis.update = lambda *_: setattr(diagnosis, "faults", ())  # type: ignore[assignment]
    twin.wait(10)
    diagnosis.update = lambda *_: setattr(diagnosis, "faults", (fault,))  # type: ignore[assignment]
    twin.wait(10)
    assert twin.why(SINCE), "one that comes again is another one"


def test_a_feeder_over_its_budget() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.001
    saved(twin)
    twin.wait(10, {"feeder.power_w": 200_000.0})
    assert twin.why(SINCE) == []
    twin.wait(10, {"feeder.power_w": 310_000.0})
    assert twin.why(SINCE)


def test_a_feeder_whose_meter_hovers_about_its_budget_threatens_nobody() -> None:
    twin, rng = Saving({"a": EIGHT}), np.random.default_rng(0)
    twin.says.day = 0.001
    saved(twin)
    for _ in range(60):
        twin.wait(5, {"feeder.power_w": 300_000.0 * (1.0 + 0.004 * rng.normal())})
        assert twin.why(SINCE) == []
