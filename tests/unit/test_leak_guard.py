"""leak_guard: one detector is no reason to act, two are; what follows, in which order, what people may do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.leak_guard import GRACE_S, HOLD_S, LeakGuard
from policies.operator import Operator
from tests.support.builders import Twin, explained, two_racks
from twin.catalogue import NS
from twin.telemetry import events as ev

LIQUID, ELECTRICAL = "rack.liquid_isolation", "rack.electrical_isolation"
SAVE, CAP, SERVICE = "job.checkpoint_since_s", "gpu.power_cap_w", "node.service_level"
DRY: dict[str, Any] = {
    "gpu.power_limit_w": 1200.0,
    "node.leak_state": 0.0,
    "rack.leak_state": 0.0,
    "rack.liquid_isolation_state": 0.0,
    "rack.electrical_isolation_state": 0.0,
    "node.service_level_state": 0.0,
}
JOB = ev.JobStarted(id="j", job="train", nodes=("r1/node3", "r2/node0"), kind="training")


def trays(*wet: int, n: int = 36) -> list[float]:
    return [1.0 if i in wet else 0.0 for i in range(n)]


def guarded(authority: str = "act", **more: Any) -> Twin:
    policies = [LeakGuard(), Operator()]
    twin = Twin(two_racks(**more), policies, authority={"leak_guard": authority, "operator": "act"})
    twin.tick(DRY, JOB)
    return twin


def leaking(twin: Twin) -> list[int]:
    """Racks that the policy holds for leaking."""
    return np.flatnonzero(twin.engine.memory["leak_guard"]["since_ns"]).tolist()


@pytest.mark.parametrize(
    ("wet", "expected"),
    [
        ({"node.leak_state": trays(4)}, []),
        ({"rack.leak_state": [1.0, 0.0]}, []),
        ({"node.leak_state": trays(4, 5)}, [0]),
        ({"node.leak_state": trays(20), "rack.leak_state": [0.0, 1.0]}, [1]),
        ({"node.leak_state": trays(20), "rack.leak_state": [1.0, 0.0]}, []),
        ({"node.leak_state": trays(4), "rack.tray_leak_state": [1.0, 0.0]}, []),  # the same detector twice
        ({"rack.tray_leak_state": [1.0, 0.0], "rack.leak_state": [1.0, 0.0]}, [0]),
        ({"cdu.leak_state": 1.0, "hall.leak_state": 1.0}, []),  # whose leak it is, nobody says
        ({"cdu.leak_state": 1.0, "node.leak_state": trays(4)}, [0]),
        ({"hall.leak_state": 1.0, "rack.leak_state": [0.0, 1.0]}, [1]),
        (
            {"rack.leak_state": [1.0, 0.0], "rack.leak_sensor_fault_state": 1.0, "node.leak_state": trays(4)},
            [],
        ),
    ],
)
def test_two_independent_detectors_are_needed(wet: dict[str, Any], expected: list[int]) -> None:
    twin = guarded()
    twin.tick(DRY | wet)
    assert leaking(twin) == expected


def test_detectors_that_flap_one_after_the_other_count_together() -> None:
    twin = guarded()
    twin.tick(DRY | {"node.leak_state": trays(4)})
    twin.tick(DRY, dt_s=HOLD_S - 10)
    twin.tick(DRY | {"node.leak_state": trays(9)})
    assert leaking(twin) == [0]


def test_a_drop_long_ago_does_not_count() -> None:
    twin = guarded()
    twin.tick(DRY | {"node.leak_state": trays(4)})
    twin.tick(DRY, dt_s=HOLD_S + 10)
    twin.tick(DRY | {"node.leak_state": trays(9)})
    assert leaking(twin) == []


def test_it_saves_and_powers_down_at_once_and_isolates_after_the_grace() -> None:
    twin = guarded(controls={SERVICE: {"blast_radius": 36}})
    twin.tick(DRY | {"node.leak_state": trays(4, 5)})
    found_s = twin.now_ns // NS
    assert twin.lease(SAVE)[0] == found_s
    caps = twin.lease(CAP)
    assert (caps[:72] == 200.0).all()
    assert np.isnan(caps[72:]).all(), "the other rack is left alone"
    assert (twin.lease(SERVICE)[:18] == 3.0).all()
    assert np.isnan(twin.lease(LIQUID)).all()
    for _ in range(int(GRACE_S) + 1):
        twin.tick(DRY | {"node.leak_state": trays(4, 5)})
    assert twin.lease(LIQUID)[0] == twin.lease(ELECTRICAL)[0] == 1.0
    assert np.isnan(twin.lease(LIQUID)[1])


def test_water_that_spreads_does_not_wait() -> None:
    twin = guarded()
    twin.tick(DRY | {"node.leak_state": trays(4, 5, 6)})
    assert twin.lease(LIQUID)[0] == twin.lease(ELECTRICAL)[0] == 1.0


def test_advise_says_it_and_commands_nothing() -> None:
    twin = guarded("advise")
    decision = twin.tick(DRY | {"node.leak_state": trays(4, 5, 6)})
    assert not decision.commands
    assert {c.control for c in decision.advice} == {SAVE, CAP, SERVICE, LIQUID, ELECTRICAL}


def approval(identity: str, *names: str) -> ev.Approved:
    return ev.Approved(id=identity, author="ada", policy="leak_guard", control=LIQUID, names=names)


def test_an_approval_isolates_one_rack() -> None:
    twin = guarded("approve")
    wet = DRY | {"node.leak_state": trays(4, 5, 6, 20, 21, 22)}
    twin.tick(wet, approval("all"), approval("both", "r1", "r2"))
    refused = [r["refused"] for r in twin.records("event") if "refused" in r]
    assert len(refused) == 2
    assert all("exactly one rack" in why for why in refused)
    assert np.isnan(twin.lease(LIQUID)).all()
    twin.tick(wet, approval("one", "r2"))
    assert twin.lease(LIQUID)[1] == 1.0
    assert np.isnan(twin.lease(LIQUID)[0])


def test_an_isolation_without_echo_is_an_alarm() -> None:
    twin = guarded()
    wet = DRY | {"node.leak_state": trays(4, 5, 6)}
    for _ in range(120):
        twin.tick(wet)
    assert any(LIQUID in f.id for f in twin.decision.findings), [f.id for f in twin.decision.findings]


def test_once_isolated_it_stays_so_when_all_is_dry_until_a_person_opens_it() -> None:
    twin = guarded()
    twin.tick(DRY | {"node.leak_state": trays(4, 5, 6)})
    shut = DRY | {"rack.liquid_isolation_state": [1.0, 0.0], "rack.electrical_isolation_state": [1.0, 0.0]}
    twin.tick(shut, dt_s=HOLD_S + 60)
    twin.tick(shut, dt_s=400.0)
    assert leaking(twin) == [0]
    assert all(c.value.max() == 1.0 for c in twin.decision.commands if c.control == LIQUID)
    opened = ev.OperatorRequest(id="o", author="ada", control=LIQUID, names=("r1",), lo=0.0, hi=0.0, want=0.0)
    twin.tick(shut | {"node.leak_state": trays(4)}, opened)
    assert leaking(twin) == [0], "still wet: the request of a person does not open a leaking rack"
    twin.tick(shut, dt_s=HOLD_S + 60)
    twin.tick(shut)
    assert leaking(twin) == []
    assert twin.lease(LIQUID)[0] == 0.0


def test_an_explanation_has_the_numbers_of_the_proposals() -> None:
    twin = guarded()
    twin.tick(DRY | {"node.leak_state": trays(4, 5, 20), "hall.leak_state": 0.0})
    twin.tick(DRY | {"node.leak_state": trays(5, 20)}, dt_s=10.0)
    found = explained(twin, "leak_guard")
    leaking, alarm = found.table("racks")
    assert (leaking["rack"], leaking["detectors"], leaking["since_s"]) == ("lab/h/r1", 2, 10.0)
    assert leaking["isolates_s"] == GRACE_S - 10.0
    by_control = {p.control: p for p in twin.engine.in_force["leak_guard"]}
    assert leaking["gpus"] == len(by_control[CAP].index)
    assert leaking["nodes"] == len(by_control[SERVICE].index)
    assert leaking["jobs"] == len(by_control[SAVE].index)
    assert (alarm["rack"], alarm["detectors"], alarm["isolates_s"]) == ("lab/h/r2", 1, None)
    rows = [(r["entity"], r["value"], r["age_s"], r["quality"]) for r in found.table("detectors")]
    assert rows == [
        ("lab/h/r1/node4", 0.0, 0.0, "good"),
        ("lab/h/r1/node5", 1.0, 0.0, "good"),
        ("lab/h/r2/node2", 1.0, 0.0, "good"),
    ]
    twin.tick(DRY | {"node.leak_state": trays(5, 20)}, dt_s=GRACE_S - 10.0)
    assert explained(twin, "leak_guard", "r1").table("racks")[0]["isolates_s"] == 0.0
    assert LIQUID in {p.control for p in twin.engine.in_force["leak_guard"]}
