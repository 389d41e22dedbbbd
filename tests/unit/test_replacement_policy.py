"""replacement: which nodes become suspects and are confirmed; what is not their own is left alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.node_replacement import CAUSES, Replacement
from policies.node_replacement.evidence import evidence_of
from policies.node_replacement.phases import QUIET_S
from tests.support.builders import two_racks
from tests.support.drained_node import QUICK, WHOLE
from tests.support.replacement_site import EIGHT, Replacing
from twin.catalogue import NS, ContractError
from twin.contracts import BY_FACILITY, DEGRADED, FAILED, Fault
from twin.telemetry import events as ev


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


@pytest.mark.parametrize(("level", "goes"), [(FAILED, True), (DEGRADED, False)])
def test_a_broken_node_takes_no_more_small_jobs(level: int, goes: bool) -> None:
    """Its job is of one node, which it costs little to lose; the next one would meet the same broken GPU."""
    twin = Replacing()
    alone = ev.JobStarted(id="one", job="one", nodes=("r1/node0",), kind="batch", time_limit_s=86_400.0)
    twin.look(alone)
    twin.bad(0, level, "drain", 0.9)
    twin.wait(120)
    assert (twin.phase(), twin.level[0]) == (("cordoned", 1) if goes else ("suspect", 0))
    assert twin.engine.jobs.job_of_node[0] >= 0, "what runs on it is let go on"


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


def test_causes_have_words() -> None:
    twin = Replacing()
    found = evidence_of(twin.engine.view(1.0))
    assert not found.cause.any()
    assert len(CAUSES) == 8


def test_the_sites_file_can_set_it() -> None:
    tree = two_racks(policies={"replacement": {"authority": "advise", "settings": {"burn_in": True}}})
    from tests.support.builders import site_of
    from twin.config import make_engine

    engine = make_engine(site_of(tree))
    (mine,) = (p for p in engine.policies if p.name == "replacement")
    assert isinstance(mine, Replacement)
    assert mine.rules.burn_in
