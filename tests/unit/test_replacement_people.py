"""Nodes of people: what they drain, resume, work on or ask to keep is theirs, and stays so."""

from __future__ import annotations

import numpy as np
import pytest

from policies.node_replacement.phases import QUIET_S, REST_S
from policies.node_replacement.policy import SERVICE
from tests.support.drained_node import NODE0, drained
from tests.support.replacement_site import EIGHT, Replacing
from twin.catalogue import NS
from twin.contracts import FAILED
from twin.telemetry import events as ev


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


@pytest.mark.long
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


@pytest.mark.parametrize("still_bad", [True, False])
def test_a_cordoned_node_that_people_work_on_is_racktwins_again_afterwards(still_bad: bool) -> None:
    twin = Replacing({"a": EIGHT})
    twin.owner, twin.evicts = np.ones(twin.n), False
    twin.bad(0)
    twin.wait(120)
    assert (twin.phase(), twin.level[0]) == ("cordoned", 1.0)
    before = len(twin.commanded)
    until_ns = twin.now_ns + 1800 * NS
    twin.wait(1740, ev.MaintenanceBegun(id="m", author="ada", table="node", names=(NODE0,),
                                        until_ns=until_ns, reason="dimm"), dt_s=30.0)  # fmt: skip
    assert (twin.phase(), twin.level[0]) == ("cordoned", 1.0)
    assert len(twin.commanded) == before
    if not still_bad:
        twin.well()
    twin.wait(2 * QUIET_S, dt_s=30.0)
    assert twin.level[0] == (1.0 if still_bad else 0.0)
    twin.well()
    twin.wait(2 * QUIET_S, dt_s=30.0)
    assert (twin.phase(), twin.level[0]) == ("in_service", 0.0)


def test_gpus_that_are_counted_in_another_order_are_no_repair() -> None:
    twin = Replacing()
    names = [f"{NODE0}/gpu{i}" for i in range(4)]

    def tell(first: int) -> list[ev.IdentityTold]:
        return [
            ev.IdentityTold(table="gpu", name=name, serial=f"SN-{i + first}a")
            for i, name in enumerate(names[: 4 - first])
        ]

    twin.look(*tell(0))
    twin.bad(0)
    twin.wait(120)
    assert twin.phase() == "out"
    twin.wait(300, *tell(1))  # the first is off its bus since the node started anew
    assert twin.engine.intake.serials[f"gpu:{names[3]}"] == ""
    assert (twin.phase(), twin.level[0] >= 3) == ("out", True)
    twin.wait(60, ev.IdentityTold(table="gpu", name=names[0], serial="NEW-1"))
    assert twin.phase() == "probation", "another board is"


def test_a_request_to_stay_in_service_outranks() -> None:
    twin = Replacing()
    twin.bad(0)
    twin.wait(300, ev.OperatorRequest(id="q", author="ada", control=SERVICE, names=("r1/node0",), lo=0.0,
                                      hi=0.0, want=0.0))  # fmt: skip
    assert {value for i, value in twin.asked() if i == 0} <= {0.0}
    assert twin.level[0] == 0


def test_a_node_of_others_that_is_exchanged_stays_theirs() -> None:
    twin = Replacing()
    twin.level[0] = 3.0
    twin.wait(60)
    twin.wait(200, ev.EntityReplaced(id="x", table="node", name=NODE0, serial="S9"))
    assert twin.level[0] == 3.0


def test_without_a_snapshot_what_is_drained_is_others() -> None:
    twin = drained()
    for column in twin.memory.values():
        column[...] = 0
    twin.well()
    twin.wait(QUIET_S * 2, dt_s=60.0)
    assert twin.level[0] >= 3


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
