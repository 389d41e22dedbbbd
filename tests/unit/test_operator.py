"""operator: a person's request is a proposal like any other. May import `twin` and policies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policies.operator import Operator
from policies.thermal_guard import ThermalGuard
from tests.support.builders import Twin, eight_nodes, explained, two_racks
from twin.catalogue import NS, find_control
from twin.contracts import control_cell, proposals_table
from twin.telemetry import OperatorRequest, RequestWithdrawn

CAP = "gpu.power_cap_w"
NAN, INF = float("nan"), float("inf")


def request(*names: str, **more: Any) -> OperatorRequest:
    given = {"id": "r1", "author": "ann", "control": CAP, "names": names, "lo": 200.0, "hi": 300.0}
    return OperatorRequest(**(given | more))


def operated() -> Twin:
    twin = Twin(eight_nodes(), [Operator()], act=True)
    twin.tick({"gpu.power_limit_w": 350.0})
    return twin


def test_a_request_is_carried_out_and_says_who_asked() -> None:
    twin = operated()
    twin.tick(
        None,
        request("r1/node5/gpu0", "lab/h/r1/node2/gpu0", "r1/node5/gpu0", want=250.0, reason="noise test"),
    )
    (batch,) = twin.commands()
    assert batch.index.tolist() == [2, 5]
    assert batch.value.tolist() == [250.0, 250.0]
    assert batch.reason == "requested by ann: noise test"
    assert batch.policy == "operator"


@pytest.mark.parametrize(
    "lo, hi, want, expected, cut",
    [
        (200, 300, None, 300, False), (200, 300, 250.0, 250, False), (200, 300, NAN, 300, False),
        (0, 100, 50.0, 200, True), (0, 100, None, 200, True), (900, 1000, None, 350, True),
        (0, 1000, None, 350, False), (0, 1000, 900.0, 350, True), (-INF, INF, 220.0, 220, False),
        (-INF, INF, INF, 350, True),
    ],
)  # fmt: skip
def test_outside_the_envelope_it_is_narrowed_and_that_is_recorded(
    lo: float, hi: float, want: float | None, expected: float, cut: bool
) -> None:
    twin = operated()
    twin.tick(None, request("r1/node0/gpu0", lo=lo, hi=hi, want=want))
    records = twin.records("narrowed")
    twin.run(4)
    assert twin.lease(CAP)[0] == expected
    assert [(r["policy"], r["count"]) for r in records] == ([("operator", 1)] if cut else [])
    assert twin.engine.suspended == {}


@pytest.mark.parametrize("how", ["withdrawn", "expired"])
def test_a_request_ends_when_it_is_withdrawn_or_runs_out(how: str) -> None:
    twin = operated()
    until_ns = twin.now_ns + 6 * NS if how == "expired" else 0
    twin.tick(None, request("r1/node0/gpu0", expires_ns=until_ns))
    twin.run(4)
    assert twin.lease(CAP)[0] == 300.0
    twin.tick(None, *([RequestWithdrawn(author="bob", request="r1")] if how == "withdrawn" else []))
    assert np.isnan(twin.lease(CAP)[0])
    assert twin.commands()[0].final
    assert twin.commands()[0].value.tolist() == [350.0]


def test_earlier_requests_go_first() -> None:
    twin = operated()
    twin.tick(None, request("r1/node0/gpu0", hi=300.0), request("r1/node0/gpu0", id="r2", lo=320.0, hi=350.0))
    assert twin.lease(CAP)[0] == 300.0
    assert [(r["policy"], r["count"]) for r in twin.records("narrowed")] == [("operator", 1)]


def test_nobody_widens_protection() -> None:
    twin = Twin(two_racks(), [Operator(), ThermalGuard()], act=True)
    twin.tick({"gpu.power_limit_w": 1200.0})
    names = tuple(twin.site.name("gpu", i) for i in range(144))
    hot = {"gpu.temp_c": np.where(np.arange(144) == 3, 87.0, 60.0)}
    twin.tick(hot, request(*names, lo=1000.0, hi=1200.0, want=1200.0))
    assert twin.lease(CAP)[3] == 200.0
    assert np.delete(twin.lease(CAP), 3).tolist() == [1200.0] * 143
    assert [(r["policy"], r["count"]) for r in twin.records("narrowed")] == [("operator", 1)]


def test_a_request_may_go_below_protection() -> None:
    twin = Twin(two_racks(), [Operator(), ThermalGuard()], act=True)
    twin.tick({"gpu.power_limit_w": 1200.0})
    hot = {"gpu.temp_c": np.where(np.arange(144) == 3, 84.5, 60.0)}
    twin.tick(hot, request("r1/node0/gpu3", lo=200.0, hi=400.0))
    assert twin.lease(CAP)[3] == 400.0


def test_in_advise_it_is_shown_and_not_done() -> None:
    twin = Twin(eight_nodes(), [Operator()])
    twin.tick({"gpu.power_limit_w": 350.0}, request("r1/node0/gpu0"))
    assert twin.decision.commands == ()
    assert [(a.policy, a.value.tolist()) for a in twin.decision.advice] == [("operator", [300.0])]


def test_a_request_outlives_a_restart() -> None:
    twin = operated()
    twin.tick(None, request("r1/node0/gpu0"))
    back = twin.restarted(eight_nodes(), [Operator()])
    back.run(40)
    assert back.lease(CAP)[0] == 300.0


def test_an_explanation_has_the_numbers_of_the_requests_in_force() -> None:
    twin = operated()
    twin.tick(
        None,
        request(
            "r1/node0/gpu0", "r1/node1/gpu0", want=250.0, reason="noise", expires_ns=twin.now_ns + 61 * NS
        ),
        request("r1/node9/gpu0", id="r2"),
    )
    found = explained(twin, "operator")
    (row,) = found.table("requests")
    (p,) = twin.engine.in_force["operator"]
    assert (row["count"], row["lo"], row["hi"], row["want"]) == (len(p.index), p.lo[0], p.hi[0], p.want[0])
    assert (row["request"], row["author"], row["reason"], row["ends_s"]) == ("r1", "ann", "noise", 60.0)
    assert row["lift"] == "racktwin control withdraw r1"
    assert explained(twin, "operator", "r1/node1").table("requests")[0]["count"] == 1
    assert explained(twin, "operator", "r1/node7").table("requests") == []


def test_states_are_named_in_an_explanation_of_requests_and_proposals() -> None:
    """A service level is a word, and a cap stays a number."""
    twin = operated()
    level = find_control("node.service_level")
    assert level is not None
    twin.tick(None, request("r1/node0", control=level.key, lo=4.0, hi=4.0))
    (row,) = explained(twin, "operator").table("requests")
    assert (row["lo"], row["hi"]) == (level.states[4], level.states[4])
    (p,) = proposals_table(twin.engine.view(), twin.engine.in_force["operator"], None).rows
    assert p[3] == p[4] == level.states[4]


def test_an_instant_that_bounds_nothing_is_left_out_of_a_table() -> None:
    burn_in, cap = find_control("node.burn_in_since_s"), find_control(CAP)
    assert burn_in is not None
    assert cap is not None
    assert control_cell(burn_in.high, burn_in) is control_cell(burn_in.low, burn_in) is None
    assert control_cell(1795837872.0, burn_in) == "2026-11-28 03:51:12 UTC"
    assert control_cell(cap.high, cap) == cap.high
