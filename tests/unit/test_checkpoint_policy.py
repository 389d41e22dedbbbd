"""checkpoint: intervals of the jobs, few changes, whom it leaves alone, what it keeps across restarts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.checkpointing import (
    LEAST_GAIN,
    MOST_S,
    Checkpoint,
    best_plan,
    ettr_at,
    interruption_rates,
    job_nodes,
    rounded_interval,
    save_terms,
    span,
)
from policies.checkpointing.costs import PRIOR_SOFT
from policies.checkpointing.policy import PLAN_EXPIRES_S
from policies.checkpointing.texts import INTERVAL, LOCAL, MOST_SENTENCES, SINCE
from policies.operator import Operator
from tests.support.builders import Twin, two_racks
from tests.support.saving_jobs import DAY_S, EIGHT, N_NODE, OTHERS, RESTLESS, Saving, chances, saved, terms
from tests.support.scripted_health import ailing
from twin.catalogue import NS, ContractError, StorageError
from twin.control import DONE
from twin.telemetry import events as ev


def test_without_a_forecast_nothing_is_proposed() -> None:
    twin = Saving({"a": EIGHT})
    twin.wait(300)
    twin.says.day = np.full(N_NODE, np.nan)
    twin.wait(300)
    assert twin.engine.in_force["checkpoint"] == []
    assert twin.engine.suspended == {}


@pytest.mark.parametrize("day", [0.01, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("shape", [0.5, 4.0, 1e5])
def test_the_interval_is_the_optimum_for_the_rate_of_its_nodes(day: float, shape: float) -> None:
    twin = Saving({"a": EIGHT}, told=RESTLESS)
    twin.says.day, twin.says.shape = day, shape
    twin.wait(10)
    rate = -8.0 * np.log1p(-np.float32(min(day, 0.999))) / DAY_S
    if day < 0.999:  # beyond, the band says nothing more
        best = best_plan(terms(rate, shape)).interval_s
        assert twin.often("a") == pytest.approx(min(best[0], MOST_S), rel=0.02, abs=5.0)
    else:
        assert 60.0 <= twin.often("a") < 2000.0


def test_each_job_has_the_rate_of_exactly_its_nodes() -> None:
    twin = Saving({"a": EIGHT, "b": OTHERS, "c": (*EIGHT[:1], "r1/node9")}, told=RESTLESS)
    twin.says.day = np.where(np.arange(N_NODE) < 8, 0.2, 0.01)
    twin.wait(10)
    for job, n_bad, n_good in (("a", 8, 0), ("b", 0, 8), ("c", 1, 1)):
        rate = -(n_bad * np.log1p(-0.2) + n_good * np.log1p(-0.01)) / DAY_S
        best = best_plan(terms(rate, 4.0, n_bad + n_good)).interval_s[0]
        assert twin.often(job) == pytest.approx(best, rel=0.02), job


@pytest.mark.parametrize(("unknown", "speaks"), [(0, True), (3, True), (4, True), (5, False), (8, False)])
def test_a_job_of_which_half_is_unknown_is_left_alone(unknown: int, speaks: bool) -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = np.where(np.arange(N_NODE) < unknown, np.nan, 0.1)
    twin.wait(10)
    assert np.isfinite(twin.often("a")) == speaks
    if speaks:
        best = best_plan(terms(-8.0 * np.log1p(-0.1) / DAY_S, 4.0)).interval_s[0]
        assert twin.often("a") == pytest.approx(best, rel=0.02), "the others stand for them"


@pytest.mark.parametrize("kind", ["unknown", "inference", "batch"])
def test_only_training_is_advised(kind: str) -> None:
    twin = Saving({"a": EIGHT}, kind=kind)
    twin.says.day = 0.5
    saved(twin)
    twin.wait(100)
    assert twin.engine.in_force["checkpoint"] == []


def test_a_job_that_never_spoke_is_left_alone_unless_asked_for() -> None:
    twin = Saving({"a": EIGHT}, told={})
    twin.says.day = 0.5
    twin.wait(100)
    assert twin.engine.in_force["checkpoint"] == []
    twin = Saving({"a": EIGHT}, told={}, policy=Checkpoint(silent_jobs=True))
    twin.says.day = 0.5
    twin.wait(100)
    assert np.isfinite(twin.often("a"))
    assert "by a prior" in twin.why(INTERVAL)[0]
    with pytest.raises(ContractError, match="expected true or false, got 2"):
        Checkpoint(silent_jobs=2)  # type: ignore[arg-type]


def test_measured_costs_count_before_what_was_said() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.2
    twin.told("a", ago_s=30.0, save_s=60.0, block_s=4.0, flush_s=200.0, restart_s=120.0)
    twin.wait(10)
    rate = -8.0 * np.log1p(-0.2) / DAY_S
    soft = 2.0 / (DAY_S / (PRIOR_SOFT * 8) + 10.0)  # one recovery was told
    asked = terms(rate, 4.0, 8, 4.0, 200.0, 120.0)._replace(soft_per_s=np.array([soft]))
    assert twin.often("a") == pytest.approx(best_plan(asked).interval_s[0], rel=0.02)
    assert "a save stops it for 4 s (measured)" in twin.why(INTERVAL)[0]


def test_a_flush_is_told_from_the_begin_of_its_save_and_counts_from_its_end() -> None:
    """As the client reports: one that stops training for all of it, one that goes on, one as fast as that."""
    for block_s, flush_s, after_s in ((60.0, 60.0, 0.0), (5.0, 65.0, 60.0), (60.0, 50.0, 0.0)):
        twin = Saving({"a": EIGHT})
        twin.says.day = 0.2
        twin.told("a", ago_s=90.0, save_s=flush_s, block_s=block_s, flush_s=flush_s)
        view, slots = twin.engine.view(1.0), np.array([0], np.int32)
        held = job_nodes(view, slots)
        found, _ = save_terms(view, slots, held, interruption_rates(view, held))
        assert (found.block_s[0], found.flush_s[0]) == (block_s, after_s)


def test_the_reason_says_what_was_weighed() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.2
    twin.wait(10)
    why = twin.why(INTERVAL)[0]
    assert why.startswith("job a: save every ")
    for piece in ("instead of 2 h", "8 nodes and the job fail every", "60 s (as it said)", "points more"):
        assert piece in why, piece


def test_a_job_whose_own_interval_is_nearly_best_is_not_nagged() -> None:
    best = best_plan(terms(-8.0 * np.log1p(-0.2) / DAY_S, 4.0)).interval_s[0]
    for factor, told in ((1.0, False), (1.15, False), (0.87, False), (3.0, True), (0.33, True)):
        given = {"checkpoint_interval_s": float(factor * best), "checkpoint_save_s": 60.0,
                 "checkpoint_restart_s": 600.0}  # fmt: skip
        twin = Saving({"a": EIGHT}, told=given)
        twin.says.day = 0.2
        twin.wait(10)
        assert np.isfinite(twin.often("a")) == told, factor


def test_a_rate_that_flickers_changes_nothing() -> None:
    twin = Saving({"a": EIGHT})
    ailing(twin.engine)  # whose log of failures has no begin: only what is forecast counts
    heard = set()
    for k in range(100):
        twin.says.day = 0.2 * (1.0 + 0.1 * (-1) ** k)
        twin.tick(None, dt_s=300.0)
        heard.add(twin.often("a"))
    assert len(heard) == 2, "nothing at first, then one interval"


@pytest.mark.long
def test_a_rate_that_rises_is_followed_and_costs_less_than_the_threshold() -> None:
    twin = Saving({"a": EIGHT})
    ailing(twin.engine)  # whose log of failures has no begin: only what is forecast counts
    changes, before = 0, 7200.0
    for day in np.geomspace(0.02, 0.9, 200):
        twin.says.day = day
        twin.tick(None, dt_s=700.0)
        if np.isfinite(twin.often("a")):
            changes += twin.often("a") != before
            before = twin.often("a")
        now = terms(
            -8.0 * np.log1p(-day) / DAY_S, 4.0, ran_s=(twin.now_ns - twin.engine.jobs.started_ns[0]) / NS
        )
        lost = best_plan(now).ettr - ettr_at(now, before)
        assert lost[0] < 1.5 * LEAST_GAIN
    assert 4 <= changes <= 40


def test_advice_commands_nothing() -> None:
    twin = Saving({"a": EIGHT}, authority="advise")
    twin.says.day, twin.says.hour = 0.3, chances(0.0, n3=0.6)
    saved(twin)
    advised: set[str] = set()
    for _ in range(10):
        twin.tick(None, dt_s=5.0)
        advised |= {c.control for c in twin.decision.advice}
        assert not twin.decision.commands
    assert advised == {INTERVAL, SINCE}


def test_what_people_ask_of_a_job_goes_first() -> None:
    twin = Saving({"a": EIGHT})
    twin.says.day = 0.2
    ask = {"control": INTERVAL, "names": ("lab/job0",), "lo": 300.0, "hi": 400.0}
    twin.tick(None, ev.OperatorRequest(id="q", author="ada", reason="test", **ask))
    twin.wait(10)
    assert twin.often("a") == 400.0


@pytest.mark.long
def test_a_restart_from_a_snapshot_decides_the_same() -> None:
    twin = Saving({"a": EIGHT, "b": OTHERS})
    twin.says.day, twin.says.hour = chances(0.0, n3=0.9, n20=0.5), chances(0.0, n3=0.6)
    saved(twin, "a")
    saved(twin, "b", 100.0)
    twin.wait(30)
    assert twin.why(SINCE)
    other = twin.restarted(two_racks(), list(twin.engine.policies), [twin.says])
    other.engine.intake.authority = dict(twin.engine.intake.authority)
    report = ev.CheckpointTold(job="a", at_ns=twin.now_ns + NS, began_ns=twin.now_ns, block_s=9.0)
    for k in range(20):
        for each in (twin, other):
            each.tick(None, *((report,) if k == 3 else ()), dt_s=5.0)
        assert other.engine.checksum() == twin.engine.checksum(), k


def test_a_run_from_before_this_policy_goes_on() -> None:
    """Nobody else's leases change hands."""
    before = Twin(two_racks(), [Operator()], act=True)
    ask = {"control": "node.service_level", "names": ("r1/node3",), "lo": 3.0, "hi": 3.0}
    before.tick(
        {"node.service_level_state": 0.0}, ev.OperatorRequest(id="q", author="ada", reason="x", **ask)
    )
    after = before.restarted(two_racks(), [Operator(), Checkpoint()])
    after.tick({"node.service_level_state": 0.0})
    assert after.lease("node.service_level")[3] == 3.0
    assert set(after.engine.memory) == {"operator", "checkpoint"}
    with pytest.raises(StorageError, match="differ in policies: checkpoint, operator"):
        before.restarted(two_racks(), [Checkpoint()])


def test_the_next_job_of_a_slot_is_a_stranger() -> None:
    twin = Saving({"a": EIGHT}, max_jobs=1)
    twin.says.day, twin.says.hour = 0.3, chances(0.0, n3=0.6)
    saved(twin)
    twin.wait(30)
    assert twin.engine.in_force["checkpoint"]
    twin.tick(None, ev.JobEnded(job="a"), dt_s=5.0)
    assert twin.engine.in_force["checkpoint"] == []
    twin.tick(None, dt_s=700.0)
    twin.tick(None, ev.JobStarted(job="b", nodes=EIGHT, kind="training"), dt_s=5.0)
    twin.wait(30)
    assert twin.engine.jobs.slot_of == {"b": 0}
    assert twin.engine.in_force["checkpoint"] == []
    assert all(
        not column[:1].any()
        for name, column in twin.engine.memory["checkpoint"].items()
        if name != "generation"
    )


def test_more_jobs_than_sentences() -> None:
    nodes = {f"j{i}": (f"r{1 + i % 2}/node{i % 18}",) for i in range(MOST_SENTENCES + 50)}
    twin = Saving(nodes, max_jobs=MOST_SENTENCES + 60, told=RESTLESS)
    twin.says.day = 0.3
    twin.wait(10)
    why = twin.why(INTERVAL)
    assert len(why) == MOST_SENTENCES + 1
    assert "50 more jobs" in why[-1]
    assert np.isfinite(twin.lease(INTERVAL)[: len(nodes)]).all()
    assert twin.engine.suspended == {}


@pytest.mark.parametrize(
    ("interval_s", "least_s", "expected"),
    [(857.3, 0.0, 855.0), (63.0, 0.0, 65.0), (1.0, 0.0, 5.0), (63.0, 71.2, 72.0), (4000.0, 0.0, 4020.0),
     (np.inf, 0.0, MOST_S), (np.nan, 10.0, MOST_S)],
)  # fmt: skip
def test_intervals_are_said_in_round_numbers(interval_s: float, least_s: float, expected: float) -> None:
    assert rounded_interval(np.array([interval_s]), np.array([least_s])).tolist() == [expected]


@pytest.mark.parametrize(
    ("s", "words"), [(4.0, "4 s"), (840.0, "14 min"), (7200.0, "2 h"), (864000.0, "10 days")]
)
def test_times_in_words(s: Any, words: str) -> None:
    assert span(s) == words


def tiered(twin: Saving, local_s: float = 0.0) -> None:
    """The job says what a save to memory and a restart from there cost, and that processes were lost."""
    for _ in range(40):
        twin.told("a", tier="memory", block_s=2.0, restart_s=60.0, interval_s=local_s, ago_s=100.0)


def test_saves_to_memory_get_the_interval_that_is_best_between_durable_ones() -> None:
    twin = Saving({"a": EIGHT, "b": OTHERS}, told=RESTLESS)
    tiered(twin)
    twin.says.day = 0.002
    twin.wait(10)
    view = twin.engine.view(1.0)
    slots = np.array([0], np.int32)
    held = job_nodes(view, slots)
    known, _ = save_terms(view, slots, held, interruption_rates(view, held))
    best = best_plan(known)
    assert twin.often("a") == pytest.approx(best.interval_s[0], rel=0.02)
    assert twin.local("a") == pytest.approx(best.local_interval_s[0], rel=0.05)
    parts = twin.often("a") / twin.local("a")
    assert 0.0 <= np.rint(parts) - parts < 0.05, "the last one falls together with the durable save"
    assert np.isnan(twin.local("b")), "it never spoke of a memory tier"
    assert any("save to memory every" in why for why in twin.why(LOCAL))
    worth = ettr_at(known, twin.often("a"), twin.local("a"))
    assert worth[0] > best.ettr[0] - 1e-4


@pytest.mark.long
def test_a_job_that_does_not_save_to_memory_as_advised_is_no_fault_and_one_that_does_is_done() -> None:
    twin = Saving({"a": EIGHT}, told=RESTLESS)
    tiered(twin, local_s=50.0)
    twin.says.day = 0.002
    twin.wait(10)
    advised_s = twin.local("a")
    assert advised_s > 0
    (slot,) = np.flatnonzero(twin.engine.jobs.alive)
    twin.told("a", tier="memory", interval_s=advised_s)
    assert twin.engine.jobs.checkpoint_local_interval_s[slot] == advised_s
    assert twin.engine.jobs.checkpoint_interval_s[slot] == 20.0, "the durable one it did not speak of"
    states = {c: int(twin.engine.arbiter.leases[c].state[slot]) == DONE for c in (INTERVAL, LOCAL)}
    assert states == {INTERVAL: False, LOCAL: True}, "by what it reports"
    twin.told("a", tier="memory", interval_s=50.0)
    twin.wait(1200)
    assert all(f.severity == "info" for f in twin.engine.findings.active.values() if "checkpoint" in f.id)


@pytest.mark.long
def test_without_a_plan_the_interval_in_memory_is_let_go_with_the_other() -> None:
    twin = Saving({"a": EIGHT}, told=RESTLESS)
    tiered(twin)
    twin.says.day = 0.002
    twin.wait(10)
    assert twin.local("a") > 0
    twin.says.day = np.full(N_NODE, np.nan)
    twin.wait(PLAN_EXPIRES_S + 1200.0, dt_s=600.0)
    assert twin.why(LOCAL) == twin.why(INTERVAL) == []
