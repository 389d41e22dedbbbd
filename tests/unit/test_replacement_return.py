"""Return of a node: tests, repairs, probation, and the vendor if it fails again and again."""

from __future__ import annotations

import numpy as np
import pytest

from policies.node_replacement import CAUSES
from policies.node_replacement.assessment import COMMON_CAUSE, NEWLY_S
from policies.node_replacement.evidence import evidence_of
from policies.node_replacement.phases import QUIET_S, REST_S
from policies.node_replacement.policy import SERVICE
from tests.support.drained_node import NODE0, WHOLE, drained
from tests.support.replacement_site import EIGHT, Replacing
from twin.catalogue import NS
from twin.contracts import FAILED
from twin.telemetry import events as ev


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


def test_a_repair_is_waited_for_and_tested() -> None:
    twin = Replacing(burn_in=True)
    twin.bad(0, FAILED, "replace", 0.97)
    twin.wait(300)
    assert twin.phase() == "out"
    assert twin.level[0] == 4, "people shall repair"
    assert not twin.test_asked()
    twin.well()
    twin.wait(60)
    alarm = next(f for f in twin.decision.findings if f.id == f"replacement/{NODE0}")
    assert alarm.severity == "warning", "its health is well again, and the repair still owed"
    assert f"racktwin device repaired {NODE0}" in alarm.action
    twin.wait(30, ev.NodeRepaired(id="r", author="ada", name=NODE0))
    assert not [f for f in twin.decision.findings if f.id.startswith("replacement/")]
    assert twin.phase() == "testing"
    twin.tests(0, True)
    twin.wait(60)
    assert twin.level[0] == 0


def test_without_a_test_a_repair_is_enough() -> None:
    twin = drained()
    twin.wait(600, dt_s=60.0)
    assert twin.phase() == "out"
    twin.well()
    twin.wait(60)
    assert twin.level[0] == 3
    alarm = next(f for f in twin.decision.findings if f.id == f"replacement/{NODE0}")
    assert (alarm.severity, "drained" in alarm.evidence[0]) == ("warning", True)
    assert f"racktwin device repaired {NODE0}" in alarm.action
    twin.wait(60, ev.NodeRepaired(id="r", author="ada", name=NODE0))
    assert twin.phase() == "probation"
    assert twin.level[0] == 0
    assert not [f for f in twin.decision.findings if f.id.startswith("replacement/")]


def test_no_check_is_owed_of_a_node_that_is_tested_or_that_an_operator_drained() -> None:
    twin = drained(burn_in=True)
    twin.well()
    twin.wait(600, dt_s=60.0)
    assert (twin.phase(), twin.level[0]) == ("testing", 3)
    assert not [f for f in twin.decision.findings if f.id.startswith("replacement/")]
    people = Replacing()
    node = people.site.entity("node", NODE0)
    assert node is not None
    lease = people.engine.arbiter.leases[SERVICE]
    names = [policy.name for policy in people.engine.policies]
    lease.value[node], lease.owner[node] = 3.0, names.index("operator")
    assert np.isnan(people.engine._awaiting_people(people.now_ns)).all()
    lease.owner[node] = names.index("replacement")
    assert people.engine._awaiting_people(people.now_ns)[node] == 3.0


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
    twin.wait(6 * 3600, dt_s=600.0)
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
    assert twin.memory["needs_repair"][0] == 1


def test_nodes_on_probation_that_fall_ill_with_a_suspect_hold_it_back_at_the_same_look() -> None:
    """The evidence that withdrew them earlier is no reason to count them as suspects of long ago."""
    twin = Replacing(burn_in=True)
    for node in (0, 1):
        twin.bad(node)
    twin.wait(120)
    for node in (0, 1):
        twin.well(node)
        twin.tests(node, True)
    twin.wait(NEWLY_S + 600, dt_s=60.0)
    assert (twin.phase(0), twin.phase(1)) == ("probation", "probation")
    twin.bad(2)
    twin.wait(60)
    assert twin.phase(2) == "suspect", "it leaves at the next look if nothing holds it back"
    twin.bad(0)
    twin.bad(1)
    twin.look()
    assert twin.phase(2) == "suspect"
    assert (twin.memory["hold"][:3] == COMMON_CAUSE).all()


def test_trouble_in_probation_counts_double() -> None:
    twin = drained(burn_in=True)
    twin.well()
    twin.tests(0, True)
    twin.wait(60)
    twin.bad(0)
    twin.wait(200)
    assert twin.memory["offences"][0] == 3
    assert twin.phase() == "rma"


@pytest.mark.parametrize("burn_in", [True, False])
def test_a_repair_that_is_reported_of_a_node_for_the_vendor_brings_it_back(burn_in: bool) -> None:
    twin = drained(burn_in=burn_in, offences=1)
    assert twin.phase() == "rma"
    twin.well()
    twin.wait(2400, dt_s=60.0)
    (asks,) = [f for f in twin.decision.findings if f.id.startswith("replacement/")]
    assert f"racktwin device repaired {NODE0}" in asks.action
    twin.wait(60, ev.NodeRepaired(id="r", author="ada", name=NODE0))
    if burn_in:
        assert twin.phase() == "testing"
        twin.tests(0, True)
        twin.wait(60)
    assert (twin.phase(), twin.level[0]) == ("probation", 0.0)


def test_a_suspicion_that_passes_does_not_end_a_probation() -> None:
    twin = drained()
    twin.well()
    twin.wait(300, ev.NodeRepaired(id="r", author="ada", name=NODE0))
    assert twin.phase() == "probation"
    ends_ns, returned_ns = (int(twin.memory[name][0]) for name in ("deadline_ns", "returned_ns"))
    twin.wait(7 * 3600, dt_s=300.0)
    twin.bad(0)
    twin.wait(30)
    assert twin.phase() == "suspect"
    twin.well()
    twin.wait(QUIET_S + 60, dt_s=30.0)
    assert twin.phase() == "probation"
    assert (int(twin.memory["deadline_ns"][0]), int(twin.memory["returned_ns"][0])) == (ends_ns, returned_ns)
    twin.wait((ends_ns - twin.now_ns) / NS + 600, dt_s=600.0)
    assert twin.phase() == "in_service"


@pytest.mark.long
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


@pytest.mark.long
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


def test_a_lemon_is_for_the_vendor() -> None:
    twin = Replacing(burn_in=True)
    values = np.zeros((twin.n, 2), np.float32)
    values[3, 0] = 1.0
    twin.engine.health._features = (("lemon", "recurs"), values)
    twin.wait(200)
    assert twin.phase(3) == "rma"
    assert [c[1] for c in twin.commanded if c[0] == SERVICE][:1] == [3]


def test_a_node_exchanged_while_it_was_ours_comes_back() -> None:
    twin = drained()
    twin.well()
    twin.wait(200, ev.EntityReplaced(id="x", table="node", name=NODE0, serial="S9"))
    assert twin.level[0] == 0


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


def test_a_cordoned_node_that_fails_is_ours_to_bring_back() -> None:
    twin = Replacing({"a": EIGHT}, burn_in=True)
    twin.bad(0)
    twin.wait(120)
    assert twin.phase() == "cordoned"
    twin.bad(0, FAILED, "reboot_node", 0.97)
    twin.level[0] = 3.0
    twin.wait(60)
    assert twin.phase() == "out"
    assert twin.memory["needs_repair"][0] == 1
    twin.well()
    twin.wait(30, ev.NodeRepaired(id="r", author="ada", name=NODE0))
    twin.tests(0, True)
    twin.wait(60)
    assert twin.level[0] == 0


def test_recurring_trouble_ends_in_a_failure_some_hours_later() -> None:
    twin = Replacing()
    values = np.zeros((twin.n, 2), np.float32)
    values[0, 1] = 9.0
    twin.engine.health._features = (("lemon", "recurs"), values)
    twin.bad(0, sure_pu=0.67)
    found = evidence_of(twin.engine.view(1.0))
    assert CAUSES[found.cause[0]] == "recurring"
    assert found.chance_24h_pu[0] == pytest.approx(0.67 * 0.70, abs=0.01)
    assert found.chance_1h_pu[0] == pytest.approx(0.67 * 0.009, abs=0.003)
    twin.now_ns += 5 * 86_400 * NS
    twin.look()
    later = evidence_of(twin.engine.view(1.0))
    assert later.sure_pu[0] < 0.15, "who lived so long was no true one"
    assert later.chance_24h_pu[0] < found.chance_24h_pu[0]
