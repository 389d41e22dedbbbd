"""replacement: suspects are confirmed, drained after a save, tested, brought back; what is not its own is
left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.replacement import SERVICE, SINCE, Replacement
from policies.replacement_evidence import CAUSES, evidence_of
from policies.replacement_phases import QUIET_S, REST_S, WITHDRAWN
from tests.builders import two_racks
from tests.replacing import EIGHT, ROOMY, Replacing
from twin import events as ev
from twin.contracts import Fault
from twin.errors import ContractError
from twin.frame import NS
from twin.health.levels import BY_FACILITY, DEGRADED, FAILED
from twin.snapshot import decode, encode

NODE0 = "lab/h/r1/node0"
QUICK: dict[str, Any] = {"queue_h": 0.05}  # other nodes are free at once: so that to drain is cheap
WHOLE = tuple(f"r1/node{i}" for i in range(18)) + tuple(f"r2/node{i}" for i in range(18))


def drained(**settings: Any) -> Replacing:
    """A node that was idle, bad and taken out."""
    twin = Replacing(**settings)
    twin.bad(0)
    twin.wait(120)
    assert twin.level[0] >= 3
    return twin


def test_a_quiet_site_is_left_alone() -> None:
    twin = Replacing({"a": EIGHT})
    twin.wait(300)
    assert not twin.commanded
    assert not twin.accounts
    assert not twin.memory["phase"].any()


def test_when_nobody_knows_anything_nothing_is_done() -> None:
    twin = Replacing({"a": EIGHT})
    twin.says.day = np.full(twin.n, np.nan)
    twin.wait(300)
    assert not twin.commanded


def test_an_idle_node_is_drained_and_a_test_brings_it_back() -> None:
    twin = drained(burn_in=True)
    assert twin.moves()[:4] == ["suspect", "draining", "out", "testing"]
    assert twin.test_asked()
    twin.well()
    twin.tests(0, True)
    twin.wait(60)
    assert twin.phase() == "probation"
    assert twin.level[0] == 0
    assert not twin.memory["withdrawn_ns"][0]
    twin.wait(60)
    assert twin.asked()[-1] == (0, 0.0)


def test_evidence_must_stand_for_a_while() -> None:
    twin = Replacing()
    twin.bad(0)
    twin.wait(50)
    assert twin.phase() == "suspect"
    assert not twin.commanded
    twin.well()
    twin.wait(20)
    twin.bad(0)
    twin.wait(50)
    assert not twin.commanded, "what flickers is confirmed anew"
    twin.wait(30)
    assert twin.commanded


def test_what_is_broken_is_confirmed_sooner() -> None:
    twin = Replacing()
    twin.bad(0, FAILED, "replace", 0.97)
    twin.wait(30)
    assert twin.phase() in ("draining", "out")


def test_after_a_pause_suspects_are_confirmed_anew() -> None:
    twin = Replacing()
    twin.bad(0)
    twin.wait(50)
    twin.tick(None, dt_s=3.0)
    twin.now_ns += 3600 * NS  # nobody looked
    twin.look()
    twin.wait(50)
    assert not twin.commanded
    twin.wait(30)
    assert twin.commanded


def test_evidence_that_goes_makes_no_suspect_any_more() -> None:
    twin = Replacing()
    twin.bad(0)
    twin.wait(20)
    twin.well()
    twin.wait(QUIET_S - 20)
    assert twin.phase() == "suspect"
    twin.wait(40)
    assert twin.phase() == "in_service"


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


@pytest.mark.parametrize("action", ["restart_app", "check_facility"])
def test_what_is_not_the_nodes_own_is_no_reason(action: str) -> None:
    twin = Replacing()
    twin.bad(0, FAILED, action)
    twin.wait(300)
    assert not twin.commanded
    (told,) = (a for a in twin.accounts if a["what"] == "left_alone")
    assert told["cause"] == ("software" if action == "restart_app" else "facility")


def test_below_a_fault_of_the_facility_nodes_stay() -> None:
    twin = Replacing()
    cdu = Fault("pump_trip", "cdu", 0, "", "critical", 0.95, twin.now_ns, ())
    twin.engine.diagnosis.faults = (cdu,)
    twin.engine.diagnosis.update = lambda *_: None  # type: ignore[method-assign]
    for node in range(6):
        twin.bad(node, FAILED, "replace", 0.97)
    twin.wait(300)
    assert not twin.commanded
    assert {a["cause"] for a in twin.accounts if a["what"] == "left_alone"} == {"facility"}


def test_what_failed_together_is_not_taken_out() -> None:
    twin = Replacing()
    twin.bad(0, FAILED, "reboot_node", 0.97)
    twin.ill.failed(0, twin.now_ns, shared=True)
    twin.wait(300)
    assert not twin.commanded


def test_silence_alone_never_disturbs_work() -> None:
    twin = Replacing({"a": WHOLE}, **QUICK)
    twin.saves(ago_s=3000.0)
    silent = Fault("node_silent", "node", 0, "", "warning", 0.9, twin.now_ns, ())
    twin.engine.diagnosis.faults = (silent,)
    twin.engine.diagnosis.update = lambda *_: None  # type: ignore[method-assign]
    twin.bad(0, DEGRADED, "run_diagnostics", 0.9)
    twin.wait(600, dt_s=60.0)
    assert twin.level.max() <= 1


def test_a_gpu_that_is_slowed_from_outside_is_no_reason() -> None:
    twin = Replacing()
    twin.ill.say("gpu", 0, DEGRADED, "slow", action_name="check_facility", lowered=BY_FACILITY)
    twin.wait(200)
    assert not twin.commanded


def test_many_at_once_are_a_common_cause() -> None:
    twin = Replacing()
    for node in range(12):
        twin.bad(node)
    twin.wait(300)
    assert not twin.commanded
    held = [a for a in twin.accounts if a["what"] == "held"]
    assert "common cause" in held[0]["why"]


def test_a_forecast_alone_makes_a_suspect_only_where_it_stands_out() -> None:
    twin = Replacing({"a": WHOLE[:30]})
    twin.says.day = np.where(np.arange(twin.n) == 33, 0.6, 0.01)
    twin.wait(120)
    assert twin.phase(33) != "in_service"
    assert twin.level[33] >= 3
    other = Replacing({"a": WHOLE[:30]})
    other.says.day = 0.6
    other.wait(120)
    assert not other.commanded, "what is likely of all is news of the fleet"


@pytest.mark.slow
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


def test_who_is_drained_by_people_is_theirs() -> None:
    twin = Replacing()
    twin.level[0] = 3.0
    twin.bad(0)
    twin.wait(QUIET_S, dt_s=60.0)
    twin.well()
    twin.wait(QUIET_S + 120, dt_s=60.0)
    assert not twin.commanded
    assert twin.level[0] == 3.0


def test_people_who_drain_a_cordoned_node_take_it_over() -> None:
    twin = Replacing({"a": EIGHT})
    twin.bad(0)
    twin.wait(120)
    twin.level[0], twin.evicts = 3.0, False
    twin.wait(30)
    twin.well()
    twin.wait(2 * QUIET_S, dt_s=60.0)
    assert twin.phase() == "in_service"
    assert twin.level[0] == 3.0


def test_people_who_resume_a_node_are_respected() -> None:
    twin = drained()
    twin.level[0], twin.obeys = 0.0, False
    twin.wait(200)
    assert twin.phase() == "probation"
    twin.obeys = True
    twin.wait(REST_S / 2, dt_s=60.0)
    assert twin.level[0] == 0, "what was known then is no news"


def test_where_people_work_nothing_is_begun() -> None:
    twin = Replacing()
    until = twin.now_ns + 7200 * NS
    twin.bad(0)
    twin.wait(600, ev.MaintenanceBegun(id="m", author="ada", table="node", names=(NODE0,), until_ns=until,
                                       reason="dimm"))  # fmt: skip
    assert not twin.commanded


def test_a_request_to_stay_in_service_outranks() -> None:
    twin = Replacing()
    twin.bad(0)
    twin.wait(300, ev.OperatorRequest(id="q", author="ada", control=SERVICE, names=("r1/node0",), lo=0.0,
                                      hi=0.0, want=0.0))  # fmt: skip
    assert {value for i, value in twin.asked() if i == 0} <= {0.0}
    assert twin.level[0] == 0


def test_a_repair_is_waited_for_and_tested() -> None:
    twin = Replacing(burn_in=True)
    twin.bad(0, FAILED, "replace", 0.97)
    twin.wait(300)
    assert twin.phase() == "out"
    assert twin.level[0] == 4, "people shall repair"
    assert not twin.test_asked()
    twin.well()
    twin.wait(30, ev.NodeRepaired(id="r", author="ada", name=NODE0))
    assert twin.phase() == "testing"
    twin.tests(0, True)
    twin.wait(60)
    assert twin.level[0] == 0


def test_without_a_test_a_repair_is_enough() -> None:
    twin = drained()
    twin.wait(600, dt_s=60.0)
    assert twin.phase() == "out"
    twin.well()
    twin.wait(60, ev.NodeRepaired(id="r", author="ada", name=NODE0))
    assert twin.phase() == "probation"
    assert twin.level[0] == 0


def test_two_failed_tests_are_for_the_vendor() -> None:
    twin = drained(burn_in=True)
    twin.tests(0, False)
    twin.wait(30)
    assert twin.phase() == "out"
    twin.wait(30, ev.NodeRepaired(id="r", author="ada", name=NODE0))
    assert twin.phase() == "testing"
    twin.tests(0, False)
    twin.wait(30)
    assert twin.phase() == "rma"
    twin.wait(86_400, dt_s=600.0)
    assert twin.level[0] == 4
    twin.well()
    twin.wait(30, ev.EntityReplaced(id="x", table="node", name=NODE0, serial="S2"))
    twin.wait(60)
    assert twin.phase() == "testing", "a new device is tested too"
    twin.tests(0, True)
    twin.wait(60)
    assert twin.level[0] == 0


def test_a_test_without_a_result_is_asked_for_again_and_then_people_are() -> None:
    twin = drained(burn_in=True)
    for _ in range(3):
        assert twin.phase() == "testing"
        twin.tests(0, None)
        twin.wait(30)
    assert twin.phase() == "out"
    assert twin.memory["repairs"][0] == 1


def test_trouble_in_probation_counts_double() -> None:
    twin = drained(burn_in=True)
    twin.well()
    twin.tests(0, True)
    twin.wait(60)
    twin.bad(0)
    twin.wait(200)
    assert twin.memory["offences"][0] == 3
    assert twin.phase() == "rma"


def test_a_verdict_from_before_a_passed_test_is_answered_with_it() -> None:
    twin = drained(burn_in=True)
    twin.tests(0, True)
    twin.wait(60)
    assert twin.phase() == "probation"
    twin.wait(2 * REST_S, dt_s=300.0)
    assert twin.phase() == "probation", "it still stands, and is no news"
    twin.bad(0)
    twin.wait(120)
    assert twin.memory["offences"][0] == 3


def test_where_the_work_is_large_people_look_at_what_passed_its_test_and_stays_suspect() -> None:
    """A test finds only some of what is wrong; what people have looked at is answered for good."""
    twin = Replacing({"a": WHOLE[1:]}, burn_in=True)
    twin.bad(0)
    twin.wait(120)
    twin.tests(0, True)
    twin.wait(60)
    assert twin.phase() == "out"
    assert twin.level[0] == 4, "people shall repair"
    twin.wait(60, ev.NodeRepaired(id="r", author="ada", name=NODE0))
    assert twin.phase() == "testing"
    twin.tests(0, True)
    twin.wait(60)
    assert twin.phase() == "probation"
    assert twin.level[0] == 0


@pytest.mark.parametrize(("days", "offences"), [(14.0, 2), (29.0, 1)])
def test_trouble_is_a_new_matter_after_four_good_weeks(days: float, offences: int) -> None:
    twin = drained(burn_in=True)
    twin.well()
    twin.tests(0, True)
    twin.wait(60)
    assert twin.memory["offences"][0] == 1
    twin.wait(days * 86_400.0, dt_s=43_200.0)
    assert twin.phase() == "in_service"
    twin.bad(0)
    twin.wait(200)
    assert twin.memory["offences"][0] == offences


def test_nodes_that_failed_take_room_before_anybody_withdraws_them() -> None:
    twin = Replacing(site_share=0.12)  # four of 36
    for node in (8, 14, 20, 26):
        twin.ill.failed(node, twin.now_ns - (node * 7200) * NS)
    twin.bad(0)
    twin.wait(200)
    assert not twin.commanded
    assert "out" in next(a for a in twin.accounts if a["what"] == "held")["why"]


def test_a_lemon_is_for_the_vendor() -> None:
    twin = Replacing(burn_in=True)
    features = twin.engine.health.features()
    values = np.zeros((twin.n, 2), np.float32)
    values[3, 0] = 1.0
    twin.engine.health._features = type(features)(("lemon", "recurs"), values)
    twin.wait(200)
    assert twin.phase(3) == "rma"
    assert [c[1] for c in twin.commanded if c[0] == SERVICE][:1] == [3]


def test_a_node_exchanged_while_it_was_ours_comes_back() -> None:
    twin = drained()
    twin.well()
    twin.wait(200, ev.EntityReplaced(id="x", table="node", name=NODE0, serial="S9"))
    assert twin.level[0] == 0


def test_a_node_of_others_that_is_exchanged_stays_theirs() -> None:
    twin = Replacing()
    twin.level[0] = 3.0
    twin.wait(60)
    twin.wait(200, ev.EntityReplaced(id="x", table="node", name=NODE0, serial="S9"))
    assert twin.level[0] == 3.0


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


def test_without_a_snapshot_what_is_drained_is_others() -> None:
    twin = drained()
    for column in twin.memory.values():
        column[:] = 0
    twin.well()
    twin.wait(QUIET_S * 2, dt_s=60.0)
    assert twin.level[0] >= 3


def test_a_gate_says_what_was_foretold_and_what_came() -> None:
    twin = drained()
    gates = [a for a in twin.accounts if a["what"] == "gate"]
    assert len(gates) == 1
    assert gates[0]["act_gpu_h"] >= gates[0]["repair_gpu_h"] >= 0.0


def test_the_pool_is_told_once_a_day() -> None:
    twin = Replacing()
    for _ in range(3):
        twin.now_ns += 86_400 * NS
        twin.look()
    assert [a["what"] for a in twin.accounts].count("pool") == 3


@pytest.mark.parametrize("given", [
    {"burn_in": 1}, {"test_h": -1.0}, {"site_share": 2.0}, {"offences": 0}, {"queue_h": float("nan")},
    {"probation_days": "7"}, {"site_count": True},
])  # fmt: skip
def test_a_bad_setting_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=next(iter(given))):
        Replacement(**given)


@pytest.mark.slow
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


def test_a_node_that_failed_by_itself_is_tested_before_it_works_again() -> None:
    """The scheduler took it out as it failed; where the site has a test, it comes back by us."""
    twin = Replacing(burn_in=True)
    twin.wait(30)
    twin.bad(0, FAILED, "reboot_node", 0.97)
    twin.level[0] = 3.0
    twin.wait(30)
    assert twin.phase() == "out"
    assert not twin.test_asked(), "it is broken: people repair it first"
    twin.well()
    twin.wait(30, ev.NodeRepaired(id="r", author="ada", name=NODE0))
    assert twin.phase() == "testing"
    assert twin.level[0] >= 3
    twin.tests(0, True)
    twin.wait(60)
    assert twin.level[0] == 0


@pytest.mark.parametrize("case", ["out before", "out long after", "no test"])
def test_a_node_that_failed_and_that_people_hold_stays_theirs(case: str) -> None:
    twin = Replacing(burn_in=case != "no test")
    twin.wait(30)
    twin.level[0] = 3.0 if case == "out before" else 0.0
    twin.obeys = False
    twin.wait(300)
    twin.bad(0, FAILED, "reboot_node", 0.97)
    if case == "out long after":
        twin.well()
        twin.ill.say("node", 0, FAILED, "bad", action_name="reboot_node", since_ns=twin.now_ns - 7200 * NS)
    twin.level[0], twin.obeys = 3.0, True
    twin.wait(60)
    assert twin.phase() == "in_service"
    twin.well()
    twin.wait(60, ev.NodeRepaired(id="r", author="ada", name=NODE0))
    assert not twin.commanded
    assert twin.level[0] == 3.0


def test_a_cordoned_node_that_fails_is_ours_to_bring_back() -> None:
    twin = Replacing({"a": EIGHT}, burn_in=True)
    twin.bad(0)
    twin.wait(120)
    assert twin.phase() == "cordoned"
    twin.bad(0, FAILED, "reboot_node", 0.97)
    twin.level[0] = 3.0
    twin.wait(60)
    assert twin.phase() == "out"
    assert twin.memory["repairs"][0] == 1
    twin.well()
    twin.wait(30, ev.NodeRepaired(id="r", author="ada", name=NODE0))
    twin.tests(0, True)
    twin.wait(60)
    assert twin.level[0] == 0


def test_recurring_trouble_ends_in_a_failure_some_hours_later() -> None:
    twin = Replacing()
    features = twin.engine.health.features()
    values = np.zeros((twin.n, 2), np.float32)
    values[0, 1] = 9.0
    twin.engine.health._features = type(features)(("lemon", "recurs"), values)
    twin.bad(0, sure_pu=0.67)
    found = evidence_of(twin.engine._view(1.0))
    assert CAUSES[found.cause[0]] == "recurring"
    assert found.chance_24h_pu[0] == pytest.approx(0.67 * 0.70, abs=0.01)
    assert found.chance_1h_pu[0] == pytest.approx(0.67 * 0.009, abs=0.003)
    twin.now_ns += 5 * 86_400 * NS
    twin.look()
    later = evidence_of(twin.engine._view(1.0))
    assert later.sure_pu[0] < 0.15, "who lived so long was no true one"
    assert later.chance_24h_pu[0] < found.chance_24h_pu[0]


def test_causes_have_words() -> None:
    twin = Replacing()
    found = evidence_of(twin.engine._view(1.0))
    assert not found.cause.any()
    assert len(CAUSES) == 8


def test_a_read_back_that_nobody_gives_is_replaced_by_the_command() -> None:
    twin = Replacing(reads=False)
    twin.bad(0)
    twin.wait(200)
    assert twin.phase() == "out"


def test_the_sites_file_can_set_it() -> None:
    tree = two_racks(policies={"replacement": {"authority": "advise", "settings": {"burn_in": True}}})
    from tests.builders import site_of
    from twin.app.wiring import make_engine

    engine = make_engine(site_of(tree))
    (mine,) = (p for p in engine.policies if p.name == "replacement")
    assert isinstance(mine, Replacement)
    assert mine.rules.burn_in
