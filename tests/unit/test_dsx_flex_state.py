"""DSX Flex out: what is said of feeds as targets come and go, and of breaches, against the contract."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from connectors.dsx import (
    AGENT,
    BREACH,
    EventCause,
    FeedNow,
    FeedTarget,
    FlexAgent,
    FlexPublication,
    Hint,
    encode_event,
)
from connectors.dsx.flex_wire import STATUS, text_of
from tests.support.builders import START_NS
from tests.support.flex_messages import CORRELATION, check_event, contract
from twin.catalogue import NS

HINTS = [Hint("lab/h/r1/node0", 1, 3000.0), Hint("lab/h/r1/node1", 2, 3100.0)]


def goal(limit_w: float, start_s: float = 0.0, end_s: float | None = None, **more: Any) -> FeedTarget:
    end_ns = None if end_s is None else START_NS + round(end_s * NS)
    return FeedTarget(CORRELATION, limit_w, START_NS + round(start_s * NS), end_ns, **more)


class Stage:
    """One feed, `a`, before an agent; `said` is all that it told, as (event or status, ...)."""

    def __init__(self, **more: Any) -> None:
        self.ids = 0
        self.agent = FlexAgent(self._id, **more)
        self.load_w, self.targets, self.held_back = 900.0, tuple[FeedTarget, ...](), False
        self.told: list[FlexPublication] = []
        self.asked: list[float] = []

    def _id(self) -> str:
        self.ids += 1
        return f"00000000-0000-4000-8000-{self.ids:012d}"

    def hints(self, tag: str, excess_w: float) -> list[Hint]:
        self.asked.append(excess_w)
        return HINTS

    def at(self, second: float) -> list[str]:
        """Return the publications at this second: events of snapshots, statuses of breaches."""
        now = FeedNow(self.load_w, 200.0, 1500.0, self.targets, self.held_back)
        told = self.agent.publications(START_NS + round(second * NS), {"a": now}, self.hints)
        self.told += told
        return [t.data["feeds"]["a"]["event"] if t.kind == STATUS else t.data["status"] for t in told]

    @property
    def last(self) -> dict[str, Any]:
        """The feed as last told."""
        found: dict[str, Any] = next(t for t in self.told[::-1] if t.kind == STATUS).data["feeds"]["a"]
        return found


def test_without_targets_there_are_heartbeats() -> None:
    stage = Stage(heartbeat_s=60.0)
    assert [stage.at(s) for s in (0, 1, 59, 60, 61, 120)] == [
        ["periodic"], [], [], ["periodic"], [], ["periodic"]]  # fmt: skip
    assert stage.last["compliant"] is True
    assert stage.last["in_flight"] is False
    assert "power_event_start_time" not in stage.last
    assert stage.last["metadata"]["default_constraint"] == {"value": 1500.0, "unit": "watt"}


def test_the_course_of_a_target() -> None:
    stage = Stage()
    stage.at(0)
    stage.targets = (goal(600.0, 10, 100),)
    assert stage.at(5) == ["target_set"]
    assert stage.told[-1].correlation == CORRELATION
    (shown,) = stage.last["targets"]
    times = {"start_time": text_of(START_NS + 10 * NS), "end_time": text_of(START_NS + 100 * NS)}
    assert shown == {"active": False, "load_constraint": {"value": 600.0, "unit": "watt"}, "interval": times,
                     "strategy": {"best_effort": False}, "correlation_id": CORRELATION}  # fmt: skip
    assert stage.last["compliant"] is True
    assert stage.at(10) == ["start_ramp_down"]
    assert (stage.last["compliant"], stage.last["in_flight"], stage.last["targets"][0]["active"]) == (
        False,
        True,
        True,
    )
    assert stage.last["power_event_start_time"] == text_of(START_NS + 10 * NS)
    stage.load_w, stage.held_back = 650.0, True
    assert stage.at(12) == []
    stage.load_w = 590.0
    assert stage.at(14) == ["end_ramp_down"]
    assert (stage.last["compliant"], stage.last["in_flight"]) == (True, False)
    stage.targets = ()  # over: the book has dropped it
    assert stage.at(100) == ["start_ramp_up"]
    assert (stage.last["in_flight"], stage.last["targets"]) == (True, [])
    assert stage.at(101) == []
    stage.held_back = False
    assert stage.at(102) == ["end_ramp_up"]
    assert "power_event_start_time" not in stage.last


def test_a_target_at_once_and_taken_back() -> None:
    stage = Stage()
    stage.at(0)
    stage.targets = (goal(600.0),)
    assert stage.at(1) == ["target_set", "start_ramp_down"]
    stage.targets = ()
    assert stage.at(2) == ["target_set", "start_ramp_up"]
    stage.held_back = True
    stage.at(3)
    assert stage.at(2 + 900) == ["end_ramp_up"]  # never longer than that


def test_the_lowest_of_several_counts() -> None:
    stage = Stage()
    stage.at(0)
    stage.targets = (goal(600.0), goal(950.0, 0, 50))
    stage.at(1)
    assert stage.last["compliant"] is False
    stage.targets = (goal(950.0, 0, 50),)
    stage.at(2)
    assert stage.last["compliant"] is True


def breaching(**more: Any) -> Stage:
    stage = Stage(**more)
    stage.load_w = 600.0
    stage.at(0)
    stage.targets = (goal(600.0),)
    stage.at(1)
    stage.at(2)
    return stage


def test_a_breach_grows_and_ends_under_one_id() -> None:
    stage = breaching(last_resort=["SHUTDOWN_NODES"])
    stage.load_w = 660.0
    assert stage.at(15) == []  # it may still come down
    assert stage.at(16) == ["active"]
    first = stage.told[-1].data
    assert (first["severity"], first["measured_load"]["value"], first["infrastructure_actions"]) == (
        "warning",
        660,
        [],
    )
    assert [(h["resource_id"], h["priority"]) for h in first["shed_hints"]] == [
        ("lab/h/r1/node0", 1), ("lab/h/r1/node1", 2)]  # fmt: skip
    assert stage.asked == [60.0]
    assert stage.at(20) == []
    stage.load_w = 725.0
    assert stage.at(21) == ["escalated"]
    second = stage.told[-1].data
    assert (second["severity"], second["infrastructure_actions"]) == ("critical", ["SHUTDOWN_NODES"])
    stage.load_w = 600.0
    assert [stage.at(s) for s in (30, 33)] == [[], []]
    stage.load_w = 601.0  # not within after all: it begins anew
    stage.at(34)
    stage.load_w = 600.0
    assert [stage.at(s) for s in (35, 39, 40)] == [[], [], ["resolved"]]
    last = stage.told[-1].data
    assert last["breach"] == first["breach"] | {"resolved_at": text_of(START_NS + 40 * NS)}
    assert "shed_hints" not in last
    assert last["infrastructure_actions"] == []
    stage.load_w = 700.0
    assert stage.at(41) == ["active"]
    assert stage.told[-1].data["breach"]["breach_id"] != first["breach"]["breach_id"]


def test_a_breach_that_lasts_is_escalated_once() -> None:
    stage = breaching()
    stage.load_w = 660.0
    assert [s for s in range(16, 300) if "escalated" in stage.at(s)] == [76]
    stage.targets = ()
    assert stage.at(300) == ["target_set", "start_ramp_up", "resolved"]


def test_a_load_above_its_limit_by_what_meters_err_is_not_escalated() -> None:
    stage = breaching()
    stage.load_w = 660.0
    assert stage.at(16) == ["active"]
    stage.load_w = 602.0
    assert not any("escalated" in stage.at(s) for s in range(17, 200))
    stage.load_w = 607.0
    assert stage.at(200) == ["escalated"]


def test_a_tighter_target_in_a_breach_has_its_time_too() -> None:
    stage = breaching(last_resort=["SHUTDOWN_RACKS"])
    stage.load_w = 615.0
    assert stage.at(16) == ["active"]
    stage.targets = (goal(400.0),)
    assert stage.at(20) == ["target_set", "start_ramp_down"]
    assert [stage.at(s) for s in (21, 34)] == [[], []]
    assert stage.at(35) == ["escalated"]
    assert stage.told[-1].data["infrastructure_actions"] == ["SHUTDOWN_RACKS"]


@pytest.mark.parametrize(
    "load_w, said", [(606.0, []), (606.1, ["warning"]), (720.0, ["warning"]), (720.1, ["critical"])]
)
def test_how_grave(load_w: float, said: list[str]) -> None:
    stage = breaching()
    stage.load_w = load_w
    stage.at(20)
    assert [t.data["severity"] for t in stage.told if t.kind == BREACH] == said


def test_an_unknown_load_is_not_within_and_proves_nothing() -> None:
    stage = breaching(heartbeat_s=1.0)
    stage.load_w = math.nan
    assert stage.at(30) == ["periodic"]
    assert (stage.last["compliant"], stage.last["calculated_load"]["value"]) == (False, 1500.0)
    stage.load_w = 700.0
    assert "active" in stage.at(31)
    stage.load_w = math.nan
    assert all("resolved" not in stage.at(s) for s in range(32, 60))


def test_what_may_stay_is_no_breach() -> None:
    stage = breaching()
    stage.targets = (goal(600.0, best_effort=True),)
    stage.load_w = 900.0
    assert all(stage.at(s) in ([], ["target_set"], ["periodic"]) for s in range(3, 60))
    assert stage.last["compliant"] is False


def wire(told: FlexPublication) -> dict[str, Any]:
    subject = "powerstate" if told.kind == STATUS else "powerbreach"
    cause = EventCause(told.correlation)
    event: dict[str, Any] = json.loads(
        encode_event(told.kind, f"{AGENT}us", subject, START_NS, told.data, cause)
    )
    return event


SCHEMAS = {STATUS: "PowerStateStatusEvent", BREACH: "PowerBreachAlertEvent"}


TREES: list[dict[str, Any]] = []  # read once


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(course=st.lists(st.tuples(
    st.sampled_from([100.0, 590.0, 610.0, 800.0, math.nan, math.inf]),
    st.sampled_from([(), (goal(600.0),), (goal(600.0, 5, 9), goal(700.0)), (goal(300.0, best_effort=True),)]),
    st.booleans(), st.sampled_from([0.5, 1.0, 20.0, 100.0, -3.0])), max_size=12))  # fmt: skip
def test_whatever_happens_it_keeps_the_contract(recording: Callable[[str], Path], course: list[Any]) -> None:
    if not TREES:
        TREES.append(contract(recording("dsx-bms-capture")))
    stage, second = Stage(heartbeat_s=10.0, last_resort=["SHUTDOWN_RACKS"]), 0.0
    for stage.load_w, stage.targets, stage.held_back, dt_s in course:
        second += dt_s
        stage.at(second)
    opened = 0
    for told in stage.told:
        check_event(TREES[0], SCHEMAS[told.kind], wire(told))
        if told.kind == BREACH:
            opened += {"active": 1, "escalated": 0, "resolved": -1}[told.data["status"]]
            assert opened == (told.data["status"] != "resolved")
