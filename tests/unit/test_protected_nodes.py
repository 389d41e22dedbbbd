"""Work of which nothing is known is not disturbed, unless an operator asks for it. May import `twin`."""

from __future__ import annotations

import numpy as np
import pytest

from policies.operator import Operator
from tests.support.builders import Twin, Wish, eight_nodes
from twin.telemetry import events as ev

LEVEL, CAP = "node.service_level", "gpu.power_cap_w"
IDLE = ev.JobStarted(job="elsewhere", nodes=())


def drain(*names: str) -> ev.OperatorRequest:
    return ev.OperatorRequest(id="d", author="ann", control=LEVEL, names=names, lo=3.0, hi=3.0, want=3.0)


def driven(*events: ev.Event, level: float = 3.0) -> Twin:
    """A policy and an operator that both may act; the policy wants nodes 0 and 1 at a level."""
    wish = Wish()
    twin = Twin(eight_nodes(controls={LEVEL: {"blast_radius": 8}}), [wish, Operator()], act=True)
    wish.ask(LEVEL, [0, 1], level, level)
    twin.tick({"node.service_level_state": 0.0, "gpu.power_limit_w": 350.0}, *events)
    return twin


def drained(twin: Twin) -> list[int]:
    return np.flatnonzero(np.nan_to_num(twin.lease(LEVEL)) > 0).tolist()


def test_without_a_source_of_jobs_no_policy_drains() -> None:
    twin = driven()
    assert drained(twin) == []
    (verdict,) = twin.records("protected")
    assert (verdict["control"], verdict["count"]) == (LEVEL, 2)
    twin.tick()
    assert twin.records("protected") == [], "told once"
    twin.tick(None, IDLE)
    assert drained(twin) == [0, 1]
    assert twin.records("protected")[0]["count"] == 0


@pytest.mark.parametrize("kind, expected", [("unknown", [1]), ("training", [0, 1])])
def test_a_job_of_unknown_kind_protects_its_nodes(kind: str, expected: list[int]) -> None:
    job = ev.JobStarted(job="j", nodes=("r1/node0",), kind=kind)  # type: ignore[arg-type]
    assert drained(driven(job)) == expected


def test_an_operator_may() -> None:
    assert drained(driven(drain("r1/node0", "r1/node5"))) == [0, 5]


@pytest.mark.long
def test_a_running_drain_is_not_undone_when_an_unknown_job_starts() -> None:
    twin = driven(IDLE)
    twin.tick(None, ev.JobStarted(job="j", nodes=("r1/node0", "r1/node1")))
    for _ in range(400):
        twin.tick({"node.service_level_state": [3.0, 3.0] + [0.0] * 6})
    assert drained(twin) == [0, 1]


def test_bringing_back_disturbs_nobody() -> None:
    twin = driven(IDLE)
    assert drained(twin) == [0, 1]
    twin.tick(
        {"node.service_level_state": [3.0, 3.0] + [0.0] * 6}, ev.JobStarted(job="j", nodes=("r1/node0",))
    )
    twin.engine.policies[0].ask(LEVEL, [0, 1], 0, 0)  # type: ignore[attr-defined]
    twin.tick()
    assert twin.lease(LEVEL)[:2].tolist() == [0.0, 0.0]


def test_caps_are_no_disturbance() -> None:
    wish = Wish()
    twin = Twin(eight_nodes(), [wish], act=True)
    wish.ask(CAP, [0], 200, 300, 300)
    twin.tick({"gpu.power_limit_w": 350.0})
    assert twin.lease(CAP)[0] == 300.0


def test_policies_see_it() -> None:
    twin = driven()
    view = twin.engine.view(1.0)
    assert view.protected_nodes().all()
    assert not view.jobs.known
    with pytest.raises(ValueError, match="read-only"):
        view.protected_nodes()[0] = False


@pytest.mark.parametrize("name", ["time_limit_s", "checkpoint_interval_s", "checkpoint_save_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_job_that_says_nonsense_is_refused(name: str, value: float) -> None:
    twin = driven(ev.JobStarted(job="j", nodes=("r1/node0",), **{name: value}))
    assert f"expected {name} >= 0" in twin.records("event")[0]["refused"]
