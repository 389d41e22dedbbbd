"""replacement: whose a withdrawn node is, what counts as a withdrawal, and what is planned only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.node_replacement.phases import QUIET_S, REST_S
from policies.node_replacement.policy import SERVICE
from tests.support.replacement_site import EIGHT, Replacing
from twin.catalogue import NS
from twin.contracts import FAILED
from twin.telemetry import events as ev

NODE0 = "lab/h/r1/node0"
OURS, OTHERS = 1.0, 2.0


def told(twin: Replacing, owner: float = OURS) -> Replacing:
    """A source tells whose drains are."""
    twin.owner = np.full(twin.n, owner)
    return twin


def ask(node: str, level: float, number: str = "q") -> ev.Event:
    return ev.OperatorRequest(id=number, author="ada", control=SERVICE, names=(node,), lo=level, hi=level,
                              want=level)  # fmt: skip


@pytest.mark.slow
def test_what_is_only_advised_is_no_offence() -> None:
    twin = Replacing(authority="advise")
    for _ in range(4):
        twin.bad(0)
        twin.wait(180, dt_s=60.0)
        assert twin.phase() == "draining"
        twin.well()
        twin.wait(QUIET_S + 180, dt_s=60.0)
        assert twin.phase() == "in_service"
    assert not twin.memory["offences"].any()


def test_a_withdrawal_is_one_offence_from_when_it_is_in_force() -> None:
    twin = Replacing({"a": EIGHT})
    twin.bad(0)
    twin.wait(70)
    assert twin.phase() == "cordoned"
    assert not twin.memory["offences"][0]
    twin.wait(20)
    assert twin.memory["offences"][0] == 1
    twin.wait(30, ev.JobEnded(id="e", job="a"))
    assert twin.level[0] >= 3
    assert twin.memory["offences"][0] == 1


def test_what_is_planned_only_asks_for_room_again() -> None:
    """A standby planned it; the leader took others out since; then it leads."""
    twin = Replacing(authority="advise", rack_share=0.12)  # two of eighteen
    twin.bad(0)
    twin.wait(120)
    assert twin.phase() == "draining"
    twin.level[[4, 5]] = 3.0
    twin.wait(30)
    assert twin.phase() == "suspect", "there is no room any more"
    twin.look(ev.AuthorityChanged(author="a term", policy="replacement", authority="act"))
    twin.wait(120)
    assert twin.level[0] == 0
    twin.level[4] = 0.0
    twin.wait(120)
    assert twin.level[0] >= 3


def test_a_takeover_in_the_tick_that_others_went_out_commands_nothing() -> None:
    twin = Replacing(authority="advise", rack_share=0.12)
    twin.bad(0)
    twin.wait(120)
    twin.level[[4, 5]] = 3.0
    twin.look(ev.AuthorityChanged(author="a term", policy="replacement", authority="act"))
    assert twin.level[0] == 0


def test_what_was_planned_before_goes_first() -> None:
    twin = Replacing(authority="advise", rack_share=0.06)  # one of eighteen
    twin.bad(0)
    twin.wait(120)
    twin.bad(1, FAILED, "replace", 0.97)
    twin.wait(120)
    assert (twin.phase(0), twin.phase(1)) == ("draining", "suspect")


@pytest.mark.parametrize("bad", [False, True])
def test_what_the_leader_before_withdrew_is_taken_up_and_comes_back(bad: bool) -> None:
    twin = told(Replacing(burn_in=True))
    twin.look()
    if bad:
        twin.bad(0)
        twin.look()
    twin.level[0] = 3.0
    twin.wait(20)
    assert twin.phase() in ("out", "testing")
    assert twin.memory["offences"][0] == 1
    (first,) = [a for a in twin.accounts if a["what"] == "phase" and a["to"] == "out"]
    assert "not in memory" in first["why"]
    twin.wait(60)
    assert twin.test_asked()
    twin.well()
    twin.tests(0, True)
    twin.wait(60)
    assert twin.phase() == "probation"
    assert twin.level[0] == 0
    twin.wait(120)
    assert twin.phase() == "probation"


def test_what_failed_and_the_leader_before_withdrew_is_tested_and_comes_back() -> None:
    """A standby heard of the failure, and had not confirmed it when the leader drained the node and died."""
    twin = told(Replacing(authority="advise", burn_in=True))
    twin.look()
    twin.bad(0, FAILED, "drain", 0.9)
    twin.look()
    assert twin.phase() == "suspect"
    twin.level[0] = 3.0
    twin.look(ev.AuthorityChanged(author="a term", policy="replacement", authority="act"))
    assert twin.phase() == "out"
    twin.wait(60)
    assert twin.level[0] == 3, "nothing asks for people"
    assert twin.test_asked()
    twin.well()
    twin.tests(0, True)
    twin.wait(60)
    assert (twin.phase(), twin.level[0]) == ("probation", 0)


def test_a_cordon_of_the_leader_before_stays_a_cordon() -> None:
    """To take it up disturbs no more than what is in force."""
    twin = told(Replacing({"a": EIGHT}, burn_in=True))
    twin.level[0] = 1.0
    twin.wait(60)
    assert twin.phase() == "cordoned"
    assert twin.level[0] == 1
    twin.wait(QUIET_S + 60, dt_s=30.0)
    assert twin.level[0] == 0, "nothing speaks against it"


def test_a_drain_of_the_leader_before_whose_job_still_runs_goes_on() -> None:
    twin = told(Replacing({"a": EIGHT}, burn_in=True))
    twin.evicts, twin.level[0] = False, 2.0
    twin.look()
    assert twin.phase() == "draining"


def test_where_people_shall_repair_they_still_shall() -> None:
    twin = told(Replacing(burn_in=True))
    twin.level[0] = 4.0
    twin.wait(120)
    assert twin.phase() == "out"
    assert twin.level[0] == 4
    twin.wait(30, ev.NodeRepaired(id="r", author="ada", name=NODE0))
    assert twin.phase() == "testing"


@pytest.mark.parametrize("case", ["others", "nobody tells", "people asked for it", "a request that ended",
                                  "a facility's fault"])  # fmt: skip
def test_what_is_not_ours_stays_as_it_is(case: str) -> None:
    twin = Replacing(burn_in=True)
    if case != "nobody tells":
        told(twin, OTHERS if case == "others" else OURS)
    events: tuple[Any, ...] = (ask("r1/node0", 3.0),) if "asked" in case or "ended" in case else ()
    if "facility" in case:
        twin.bad(0, FAILED, "check_facility")
    twin.wait(60, *events)
    if not events:
        twin.level[0] = 3.0
    if "ended" in case:
        twin.wait(60, ev.RequestWithdrawn(id="c", author="ada", request="q"))
    twin.wait(600, dt_s=30.0)
    assert twin.level[0] == 3.0
    assert twin.phase() == "in_service"


@pytest.mark.long
def test_what_others_brought_back_is_well() -> None:
    """The verdict that stood while people had it out is no news."""
    twin = told(Replacing(), OTHERS)
    twin.bad(0)
    twin.level[0] = 3.0
    twin.wait(120)
    assert not twin.commanded
    twin.level[0] = 0.0
    twin.wait(REST_S / 2, dt_s=60.0)
    assert twin.level[0] == 0
    assert not twin.commanded
    twin.ill.say("node", 0, FAILED, "bad", action_name="replace", sure_pu=0.97, since_ns=twin.now_ns - NS)
    twin.wait(120)
    assert twin.level[0] >= 3, "what comes after is"


@pytest.mark.long
def test_what_another_leader_put_back_is_well_where_there_is_no_room_now() -> None:
    """The plan is dropped before the return is sure; the verdict of then is no news all the same."""
    twin = told(Replacing({"a": EIGHT}, authority="advise", rack_share=0.12))  # two of eighteen
    twin.bad(0)
    twin.level[0] = 1.0
    twin.wait(60)
    assert twin.phase() == "cordoned"
    assert twin.owner is not None
    twin.level[[0, 9, 10]], twin.owner[[9, 10]] = (0.0, 3.0, 3.0), OTHERS
    twin.wait(30)
    assert twin.phase() == "suspect"
    twin.level[[9, 10]] = 0.0
    twin.wait(30, ev.AuthorityChanged(author="a term", policy="replacement", authority="act"))
    twin.wait(REST_S / 2, dt_s=60.0)
    assert not twin.commanded
    assert twin.phase() == "in_service"
    twin.bad(0)
    twin.wait(120)
    assert twin.level[0] >= 1, "what comes after is news"


def test_what_the_scheduler_did_not_carry_out_yet_was_not_put_back() -> None:
    """It answers nobody for a while; its first answer is from before it was asked."""
    twin = told(Replacing({"a": EIGHT}))
    twin.obeys = False
    twin.bad(0)
    twin.wait(60)
    twin.reads = False
    twin.wait(400)
    assert twin.phase() == "cordoned"
    twin.reads = True
    twin.wait(150)
    assert twin.phase() == "cordoned", "nobody resumed it"
    assert not twin.memory["returned_ns"][0]
    twin.obeys = True
    twin.level[0] = 1.0
    twin.wait(QUIET_S + 120, dt_s=30.0)
    assert twin.level[0] >= 1.0


@pytest.mark.parametrize("put_back_s", [230, 260, 290])
def test_what_people_put_back_while_a_new_leader_settles_is_not_drained_anew(put_back_s: int) -> None:
    """The first command of its term falls in the time in which a read-back of "in service" must last."""
    twin = told(Replacing())
    twin.bad(0)
    twin.wait(120)
    assert twin.level[0] >= 3
    twin.wait(put_back_s, ev.EpochChanged(epoch=7, adopt=True))
    twin.level[0] = 0.0
    for _ in range(20):
        twin.wait(10)
        assert twin.level[0] == 0
    assert twin.phase() in ("in_service", "probation")
