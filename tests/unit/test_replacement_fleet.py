"""The made-up fleet of the replacement backtest: its truth, its jobs and its people."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.evaluation.replacement.fleet import (
    AGAIN_PU,
    AGAIN_S,
    DAY_S,
    GPUS,
    HOUR_S,
    MEASURED,
    REPAIR_S,
    SCENARIOS,
    draw,
)
from tests.evaluation.replacement.jobs import RESTART_S, SAVE_S, Floor, Run, arrivals
from tests.evaluation.replacement.nodes import NOTHING_S, REPLACE
from tests.evaluation.replacement.quarter import SAVE, SERVICE, Quarter
from tests.evaluation.replacement.rivals import Counted, at
from tests.evaluation.replacement.view import START_NS, FleetView
from tests.support.small_fleet import SITE, SMALL, N, Says, lived, one_fault, small
from twin.catalogue import NS, Bool
from twin.contracts import Proposal
from twin.tables import read_faults


@pytest.mark.parametrize("name", ["rate_6.5", "rate_2.34"])
def test_rates_come_out_as_stated_over_many_nodes(name: str) -> None:
    """First faults and those that follow give the stated rate: 1 / (1 - again) of the first."""
    scenario = SCENARIOS[name]._replace(lemon_pu=0.0)
    truth = draw(scenario, MEASURED, 3, 90 * DAY_S, 20_000)
    chain = 1.0 + np.cumprod(truth.again, axis=1).sum(axis=1)
    assert chain.mean() == pytest.approx(1.0 / (1.0 - sum(AGAIN_PU)), rel=0.02)
    assert chain.sum() / (20_000 * 90) == pytest.approx(scenario.rate, rel=0.03)
    assert truth.told[:, 0].mean() == pytest.approx(MEASURED.shows_pu * MEASURED.found_pu, rel=0.1)
    assert np.median(truth.lead_s[truth.told]) == pytest.approx(MEASURED.lead_s, rel=0.1)
    months = 20_000 * 3
    assert len(truth.false_s) / months == pytest.approx(MEASURED.false_per_month, rel=0.15)


def test_repairs_and_recurrence_are_those_of_the_recording_before_day_120(
    recording: Callable[[str], Path],
) -> None:
    path = recording("gpu-server-faults") / "fault_trace_to_day232.json"
    log = read_faults(path, 400).log.known_at(120.0)
    took_h = (log.end_d - log.start_d)[np.isfinite(log.end_d)] * 24.0
    assert np.median(took_h) == pytest.approx(REPAIR_S / HOUR_S, rel=0.01)
    gaps = []
    for node in range(400):
        mine = np.flatnonzero(log.node == node)
        gaps += [log.start_d[b] - log.end_d[a] for a, b in itertools.pairwise(mine)]
    ended = len(took_h)
    # Within half a day of the return: the fast part, a little of the slow one and of the constant rate
    fast = (np.array(gaps) <= 0.5).sum() / ended
    expected = sum(p * (1.0 - np.exp(-0.5 * DAY_S / s)) for p, s in zip(AGAIN_PU, AGAIN_S, strict=True))
    assert fast == pytest.approx(expected, abs=0.03)


def test_a_fault_ends_the_stretch_of_its_job_and_is_repaired() -> None:
    quarter = lived(one_fault(30.0))
    assert quarter.nodes.counts["failures"] == 1
    assert quarter.view.rows.start_ns[0] == START_NS + round(30 * HOUR_S) * NS
    assert quarter.view.rows.end_ns[0] == START_NS + round(40 * HOUR_S) * NS
    assert quarter.out_gpu_h == pytest.approx(10 * GPUS)


@pytest.mark.evaluation
@pytest.mark.parametrize(("since_h", "failures", "visited"), [(29.0, 0, True), (27.5, 1, False)])
def test_people_mend_what_a_warning_names_before_it_fails(
    since_h: float, failures: int, visited: bool
) -> None:
    """The warning stands from the 28th hour; who comes before it finds nothing and the fault comes."""

    def say(view: FleetView) -> list[Proposal]:
        hour = (view.now_ns - START_NS) / NS / HOUR_S
        at_h = view.service().repaired_ns[0] > 0
        return at(SERVICE, np.array([0]), 0.0 if hour < since_h or at_h else float(REPLACE), "out")

    truth = one_fault(30.0 if visited else 40.0, shows=True)
    quarter = lived(truth, lambda q: Says(say))
    assert quarter.nodes.counts["failures"] == failures
    assert quarter.nodes.counts["withdrawals"] == 1
    took_s = 10 * HOUR_S if visited else NOTHING_S
    assert quarter.view.ns["repaired"][0] >= START_NS + round(since_h * HOUR_S + took_s) * NS


def alone(interval_s: float, need_s: float) -> tuple[Floor, int]:
    """A job of four nodes that is alone, from second 0 on."""
    come = arrivals(1, DAY_S, N, HOUR_S)
    floor = Floor(N, 64, np.zeros(N, np.bool_), 0.01, come._replace(at_s=come.at_s[:0]), START_NS)
    run = Run(7, 4, need_s, interval_s, np.arange(4, dtype=np.int32), since_s=0.0)
    slot = floor._bind(run, 0.0)
    assert slot is not None
    floor.runs[slot] = run
    return floor, slot


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(61.0, 5e4), st.sampled_from(["fail", "save", "late"])), max_size=12))
def test_every_second_of_a_job_is_useful_or_lost(events: list[tuple[float, str]]) -> None:
    """Without saves of its own, a job takes its work and what was lost, whatever happens to it."""
    floor, slot = alone(1e12, 1e6)
    service: Bool = np.ones(N, np.bool_)
    now_s, run = 0.0, floor.runs[slot]
    for gap_s, what in events:
        now_s += gap_s
        if what == "save":
            if floor.save(slot, now_s):
                now_s += SAVE_S
                assert floor.saved(slot, run.turn, now_s)
            continue
        floor.lose_nodes(slot, run.nodes[:1], now_s, True)
        now_s += 300.0 if what == "late" else 0.0
        floor.dirty = True
        assert floor.fill(service, now_s) == [slot]
    lost_s = sum(floor.tally.lost.values()) / (4 * GPUS) * HOUR_S
    assert run.end_s() == pytest.approx(1e6 + lost_s, abs=0.1)


def test_only_what_no_save_holds_is_lost() -> None:
    """Saves of a minute every ten: after 1000 s one is durable, and 340 s of work are not in it."""
    floor, slot = alone(600.0, 1e6)
    floor.lose_nodes(slot, np.array([1], np.int32), 1000.0, True)
    assert floor.tally.lost["work"] == pytest.approx(340.0 * 4 * GPUS / HOUR_S)
    assert floor.runs[slot].done_s == 600.0
    assert floor.runs[slot].saved_s == 600.0


@pytest.mark.evaluation
def test_a_save_that_is_asked_for_keeps_the_work_of_a_move() -> None:
    """A drain without a save loses what is not durable; with one a minute before, next to nothing."""

    def moved(ask: bool) -> Quarter:
        def say(view: FleetView) -> list[Proposal]:
            hour = (view.now_ns - START_NS) / NS / HOUR_S
            node = int(np.flatnonzero(view.jobs.job_of_node >= 0)[0]) if hour >= 5.0 and not seen else -1
            if hour >= 5.0 and not seen:
                seen.append(node)
            out = at(SAVE, view.jobs.job_of_node[[seen[0]]], view.now_ns / NS, "save") if ask and seen else []
            if seen and hour >= 5.2:
                out = [*at(SERVICE, np.array(seen), 3.0, "out")]
            return out

        seen: list[int] = []
        return lived(one_fault(90.0), lambda q: Says(say))

    bare, kept = moved(False).floor.tally, moved(True).floor.tally
    assert bare.moves == kept.moves == 1
    assert kept.lost["saving"] > 0.0 == bare.lost["saving"]
    assert kept.lost["work"] < bare.lost["work"]


@settings(max_examples=40, deadline=None)
@given(st.floats(60.0, 1e6), st.floats(120.0, 1e5), st.floats(0.0, 1e6))
def test_work_adds_up_however_a_stretch_is_cut(need_s: float, interval_s: float, spent_s: float) -> None:
    run = Run(0, 4, need_s, interval_s, np.arange(4, dtype=np.int32), since_s=100.0)
    work_s, durable_s = run.useful_s(100.0 + spent_s)
    assert 0.0 <= durable_s <= work_s <= spent_s + 1e-6
    assert work_s - durable_s <= interval_s + 1e-6
    done_s, _ = run.useful_s(run.end_s())
    assert done_s == pytest.approx(need_s, rel=1e-6)


def test_a_job_takes_a_spare_first_and_waits_where_there_is_none() -> None:
    come = arrivals(1, DAY_S, N, HOUR_S)
    spare = np.zeros(N, np.bool_)
    spare[-2:] = True
    floor = Floor(N, 64, spare, 0.01, come._replace(at_s=come.at_s[:0]), START_NS)
    run = Run(7, 4, 9e4, 3600.0, np.arange(4, dtype=np.int32), since_s=0.0)
    slot = floor._bind(run, 0.0)
    assert slot is not None
    floor.runs[slot] = run
    floor.lose_nodes(slot, np.array([1], np.int32), 600.0, True)
    none: Bool = np.zeros(N, np.bool_)
    assert floor.fill(none, 660.0) == []
    assert floor.jobs.job_of_node[1] == -1
    service: Bool = np.ones(N, np.bool_)
    service[1] = False
    assert floor.fill(service, 1200.0) == [slot]
    assert N - 2 in run.nodes.tolist()
    assert floor.tally.spares == 1
    assert floor.tally.lost["work"] == pytest.approx(600.0 * 4 * GPUS / HOUR_S)
    assert floor.tally.lost["waiting"] == pytest.approx(600.0 * 4 * GPUS / HOUR_S)
    assert floor.tally.lost["restart"] == pytest.approx(RESTART_S * 4 * GPUS / HOUR_S)
    assert run.since_s == 1200.0 + RESTART_S


@pytest.mark.evaluation
def test_no_node_has_two_jobs_and_none_runs_on_what_is_out() -> None:
    truth = small(4, 6.0)
    quarter = Quarter(SITE, truth, 4, SMALL.rate, SMALL.job_s, 0.67, 0.0)
    arm = Counted(quarter.view, 0.5)
    quarter.arm = arm
    while quarter.now_s < truth.until_s:
        quarter._step()
        held = np.concatenate([r.nodes for r in quarter.floor.runs.values()] or [np.zeros(0, np.int32)])
        assert len(held) == len(np.unique(held))
        assert not quarter.view.down[held].any()
        assert (quarter.nodes.level[held] < 3).all()
    assert quarter.nodes.counts["exchanges"] > 0
