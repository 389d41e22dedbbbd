"""Withdrawal of a node: after one requested save, when its job ends, within the room there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from policies.node_replacement import Replacement
from policies.node_replacement.phases import QUIET_S, WITHDRAWN
from policies.node_replacement.policy import SERVICE, SINCE
from tests.support.drained_node import QUICK, WHOLE, drained
from tests.support.replacement_site import EIGHT, ROOMY, Replacing
from twin.catalogue import NS
from twin.contracts import DEGRADED, FAILED
from twin.engine import encode
from twin.engine.snapshot import decode
from twin.telemetry import events as ev


def test_a_large_job_saves_before_its_node_leaves() -> None:
    twin = Replacing({"a": WHOLE}, **QUICK)
    twin.saves(ago_s=1800.0)
    twin.bad(0, FAILED, "drain", 0.9)
    twin.wait(60)
    assert twin.phase() == "saving"
    assert twin.level[0] == 1, "no new jobs meanwhile"
    ((slot, since_s),) = set(twin.asked(SINCE))
    assert slot == twin.engine.jobs.slot_of["a"]
    assert since_s <= twin.now_ns / NS
    twin.wait(60)
    assert twin.level[0] == 1, "the job has not saved yet"
    twin.saves(ago_s=1.0)
    twin.wait(30)
    assert twin.level[0] >= 3
    assert len(set(twin.asked(SINCE))) == 1, "asked once"
    assert "chance" not in twin.commanded[0][3]
    assert "GPU-hours: to watch" in twin.commanded[0][3]


def test_a_save_that_does_not_come_is_waited_for_no_longer_than_its_deadline() -> None:
    twin = Replacing({"a": WHOLE}, **QUICK)
    twin.saves(ago_s=1800.0)
    twin.says.hour = np.where(np.arange(twin.n) == 0, 0.9, 1e-4)
    twin.says.day = np.where(np.arange(twin.n) == 0, 0.95, 2e-3)
    twin.bad(0, FAILED, "drain", 0.9)
    twin.wait(60)
    deadline_ns = int(twin.memory["deadline_ns"][0])
    assert 60 * NS <= deadline_ns - twin.now_ns <= 1800 * NS
    while twin.now_ns < deadline_ns:
        twin.look()
        assert twin.level[0] < 3 or twin.now_ns >= deadline_ns
    twin.wait(30)
    assert twin.level[0] >= 3


def test_where_a_drain_without_the_save_costs_more_the_node_goes_when_its_job_ends() -> None:
    """The gate looks again: what was best with a save need not be without it."""
    twin = Replacing({"a": WHOLE}, **QUICK)
    twin.saves(ago_s=1800.0)
    twin.bad(0, FAILED, "drain", 0.9)
    twin.wait(1200, dt_s=20.0)
    assert "saving" in twin.moves()
    assert twin.phase() == "cordoned"
    assert twin.level[0] == 1


def test_a_save_that_somebody_asked_for_already_is_not_asked_for_again() -> None:
    twin = Replacing({"a": WHOLE}, **QUICK)
    twin.saves(ago_s=1800.0)
    twin.bad(0, FAILED, "drain", 0.9)
    since_s = twin.now_ns / NS + 1.0
    ask = ev.OperatorRequest(id="q", author="ada", control=SINCE, names=("lab/job0",), lo=since_s, hi=1e10,
                             want=since_s)  # fmt: skip
    twin.wait(60, ask)
    assert twin.phase() == "saving"
    assert {since for _, since in twin.asked(SINCE)} == {since_s}


def test_a_small_job_is_let_go_when_it_ends() -> None:
    twin = Replacing({"a": EIGHT})
    twin.bad(0)
    twin.wait(120)
    assert twin.phase() == "cordoned"
    twin.wait(30, ev.JobEnded(id="e", job="a"))
    assert twin.level[0] >= 3


def test_a_cordon_is_lifted_when_evidence_goes() -> None:
    twin = Replacing({"a": EIGHT})
    twin.bad(0)
    twin.wait(120)
    assert twin.level[0] == 1
    twin.well()
    twin.wait(QUIET_S + 120, dt_s=60.0)
    assert twin.level[0] == 0
    assert twin.phase() == "in_service"


@pytest.mark.long
def test_only_advised_nothing_runs_away() -> None:
    twin = Replacing({"a": WHOLE}, authority="advise", **QUICK)
    twin.saves(ago_s=1800.0)
    twin.bad(0, FAILED, "drain", 0.9)
    twin.bad(20)
    twin.wait(4 * 3600, dt_s=60.0)
    assert not twin.commanded
    assert twin.phase(0) in ("suspect", "saving", "draining", "cordoned")
    assert not twin.memory["withdrawn_ns"].any()
    twin.well(0)
    twin.well(20)
    twin.wait(QUIET_S + 120, dt_s=60.0)
    assert twin.phase(0) == twin.phase(20) == "in_service"


def test_an_approval_hours_later_asks_for_a_save_of_then() -> None:
    twin = Replacing({"a": WHOLE}, authority="approve", **QUICK)
    twin.saves(ago_s=1800.0)
    twin.bad(0, FAILED, "drain", 0.9)
    twin.wait(1800, dt_s=60.0)
    assert not twin.commanded
    approvals = [ev.Approved(id=f"y{k}", author="ada", policy="replacement", control=key)
                 for k, key in enumerate((SERVICE, SINCE))]  # fmt: skip
    twin.wait(200, *approvals)
    assert twin.asked(SINCE)[-1][1] >= twin.now_ns / NS - 400.0
    assert twin.level[0] == 1


def test_nodes_that_failed_take_room_before_anybody_withdraws_them() -> None:
    twin = Replacing(site_share=0.12)  # four of 36
    for node in (8, 14, 20, 26):
        twin.ill.failed(node, twin.now_ns - (node * 7200) * NS)
    twin.bad(0)
    twin.wait(200)
    assert not twin.commanded
    assert "out" in next(a for a in twin.accounts if a["what"] == "held")["why"]


def test_nothing_is_done_twice_after_a_restart() -> None:
    twin = Replacing({"a": WHOLE}, **QUICK)
    twin.saves(ago_s=1800.0)
    twin.bad(0, FAILED, "drain", 0.9)
    twin.wait(60)
    before = list(twin.commanded)
    kept = decode(encode({"memory": twin.memory}))["memory"]
    twin.engine.memory["replacement"] = {name: np.array(kept[name]) for name in twin.memory}
    again = Replacement(**ROOMY, **QUICK)
    twin.engine.policies = [again if p.name == "replacement" else p for p in twin.engine.policies]
    twin.wait(60)
    assert twin.phase() == "saving"
    assert set(twin.asked()) == {(i, v) for key, i, v, _ in before if key == SERVICE}
    twin.saves(ago_s=1.0)
    twin.wait(30)
    assert twin.level[0] >= 3


def test_a_gate_says_what_was_foretold_and_what_came() -> None:
    twin = drained()
    gates = [a for a in twin.accounts if a["what"] == "gate"]
    assert len(gates) == 1
    assert gates[0]["act_gpu_h"] >= gates[0]["repair_gpu_h"] >= 0.0


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_never_more_are_out_than_there_is_room(data: st.DataObject) -> None:
    """Whatever turns bad and well, and whoever else takes nodes out."""
    twin = Replacing({"a": EIGHT}, site_share=0.1, rack_share=0.12, domain_share=1.0, job_share=0.3,
                     burn_in=data.draw(st.booleans()))  # fmt: skip
    others = data.draw(st.sets(st.integers(8, 35), max_size=3))
    twin.level[sorted(others)] = 3.0
    twin.look()
    for _ in range(data.draw(st.integers(3, 10))):
        node = data.draw(st.integers(0, 35))
        if data.draw(st.booleans()):
            twin.bad(node, data.draw(st.sampled_from([DEGRADED, FAILED])))
        else:
            twin.well(node)
        for dt_s in data.draw(st.sampled_from([(10.0,), (40.0, 40.0), (350.0, 350.0, 10.0), (4000.0,)])):
            twin.look(dt_s=dt_s)
        ours = np.isin(twin.memory["phase"], WITHDRAWN)
        out = ours | (twin.level >= 1)
        assert not ours.any() or out.sum() <= max(3, len(others))
        for rack in range(2):
            mine = ours & (twin.site.rack_of_node == rack)
            there = out & (twin.site.rack_of_node == rack)
            assert not mine.any() or there.sum() <= max(2, len(others))
        theirs = [i for i in sorted(others) if not ours[i]]
        assert (twin.level[theirs] >= 3).all(), "what others drained stays"


def test_a_read_back_that_nobody_gives_is_replaced_by_the_command() -> None:
    twin = Replacing(reads=False)
    twin.bad(0)
    twin.wait(200)
    assert twin.phase() == "out"
