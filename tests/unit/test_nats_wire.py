"""Wire of a fleet: what is refused and why, and what a hall's grant becomes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from connectors.nats import (
    BudgetDecoder,
    HallGrant,
    HallSummary,
    SummaryDecoder,
    encode,
    hall_problem,
    halls_of,
)
from tests.support.builders import START_NS, Twin, site_of
from tests.support.fleets import fleet_tree
from twin.catalogue import NS, BadMessage
from twin.telemetry import BudgetGranted, Ignored, Message, Reading

SITE = site_of(fleet_tree())


def told(hall: str = "hall-a", **more: Any) -> HallSummary:
    return msgspec.structs.replace(HallSummary(hall=hall, epoch=3, sequence=9, t_ns=START_NS), **more)


def summary(payload: Any, hall: str = "hall-a") -> Message:
    return Message(
        START_NS, f"cpc.{hall}.v1.summary", payload if isinstance(payload, bytes) else encode(payload)
    )


def grant(**more: Any) -> Message:
    known = {"hall": "hall-a", "epoch": 3, "command": 5, "budget_w": 4e5, "issued_ns": START_NS - NS,
             "expires_ns": START_NS + 9 * NS}  # fmt: skip
    return Message(START_NS, "cpc.hall-a.v1.budget", encode(HallGrant(**(known | more))))


def test_a_summary_becomes_readings_of_its_hall() -> None:
    found = SummaryDecoder(SITE).decode(summary(told("hall-b", power_w=2e5, alarms={"critical": 2},
                                                     granted_ns=START_NS - 4 * NS), "hall-b"))  # fmt: skip
    assert not isinstance(found, Ignored)
    values = {r.signal: r.value for r in found if isinstance(r, Reading)}
    assert all(isinstance(r, Reading) and r.entity == halls_of(SITE)["hall-b"] for r in found)
    assert (values["hall_power_w"], values["hall_alarm_critical_count"], values["hall_grant_age_s"]) == (
        2e5,
        2,
        4,
    )
    assert "hall_demand_w" not in values, "what is not told is not zero"


@pytest.mark.parametrize(
    "message, why",
    [
        (summary(told("hall-x"), "hall-x"), "no hall 'hall-x'"),
        (summary(told("hall-b")), "claims to be hall 'hall-b'"),
        (summary(told(power_w=2.1e6)), "at most twice that"),
        (summary(told(power_w=-1.0)), "power_w: expected 0 to"),
        (summary(told(gpus=1, gpus_out=2)), "at most the 1 of gpus"),
        (summary(told(heard_pu=1.5)), "expected 0 to 1"),
        (summary(told(sequence=-1)), "expected numbers from 0"),
        (summary(b"{" * 100_000), "expected at most 65,536"),
        (summary(b"[" * 5_000), "(?i)truncated|recursion|expected"),
        (Message(START_NS, "cpc.a.b.c.d", b"{}"), "no hall ''"),
    ],
)
def test_what_cannot_be_is_refused(message: Message, why: str) -> None:
    with pytest.raises(BadMessage, match=why):
        SummaryDecoder(SITE).decode(message)


@given(st.binary(max_size=300))
def test_garbage_is_refused_and_nothing_else_happens(payload: bytes) -> None:
    for decode in (SummaryDecoder(SITE).decode, BudgetDecoder("hall-a", "main").decode):
        with pytest.raises(BadMessage):
            decode(summary(payload))


def test_an_older_epoch_is_refused_and_what_was_heard_is_passed_over() -> None:
    decoder = SummaryDecoder(SITE)
    decoder.decode(summary(told()))
    with pytest.raises(BadMessage, match="epoch 2 after 3"):
        decoder.decode(summary(told(epoch=2, sequence=10)))
    assert isinstance(decoder.decode(summary(told())), Ignored)
    assert not isinstance(decoder.decode(summary(told(epoch=4, sequence=1))), Ignored)


@pytest.mark.parametrize("ahead", [{"epoch": 2**62}, {"sequence": 2**62}])
def test_one_number_from_a_clock_ahead_does_not_shut_out_its_hall(ahead: dict[str, Any]) -> None:
    decoder = SummaryDecoder(SITE)
    with pytest.raises(BadMessage, match="more than a day ahead"):
        decoder.decode(summary(told(**ahead)))
    assert not isinstance(decoder.decode(summary(told(sequence=10))), Ignored)


def test_a_grant_is_refused_from_a_clock_ahead_and_passed_over_when_it_is_over() -> None:
    decoder = BudgetDecoder("hall-a", "main")
    with pytest.raises(BadMessage, match=r"issued 3\.0 s after now"):
        decoder.decode(grant(issued_ns=START_NS + 3 * NS))
    with pytest.raises(BadMessage, match="expected 'hall-a'"):
        decoder.decode(grant(hall="hall-b"))
    assert isinstance(decoder.decode(grant(expires_ns=START_NS)), Ignored)
    with pytest.raises(BadMessage, match=r"runs \d+ s from its issue; expected at most 60 s"):
        decoder.decode(grant(expires_ns=2**62))
    with pytest.raises(BadMessage, match="from its issue"):
        decoder.decode(grant(issued_ns=0))
    with pytest.raises(BadMessage, match="more than a day ahead"):
        decoder.decode(grant(epoch=2**62))


def test_a_journal_head_is_no_place_for_a_text() -> None:
    decoder = SummaryDecoder(SITE)
    with pytest.raises(BadMessage, match="head: expected at most 128"):
        decoder.decode(summary(told(head="x" * 60_000)))


def test_the_engine_takes_grants_in_their_order_alone() -> None:
    feeder = {"name": "main", "external": True, "guaranteed_w": 1e5, "serves": ["r"]}
    tree = {"site": "s", "halls": [{"name": "h", "racks": [{"name": "r"}], "feeders": [feeder]}]}
    pod = Twin(tree)

    def granted(budget_w: float, issued_s: int, epoch: int) -> float:
        issued_ns = START_NS + issued_s * NS
        until_ns, key = START_NS + 99 * NS, f"{issued_s}-{epoch}"
        order = {"issued_ns": issued_ns, "epoch": epoch}
        pod.tick(
            None,
            BudgetGranted(
                id=key, author="fleet", feeder="main", budget_w=budget_w, expires_ns=until_ns, **order
            ),
        )
        return float(pod.engine.intake.budget_w(pod.site, pod.now_ns)[0])

    assert granted(4e5, 2, 7) == 4e5
    assert granted(9e5, 1, 7) == 4e5, "it came late"
    assert granted(9e5, 3, 6) == 4e5, "a daemon that leads no more"
    pod = pod.restarted(
        {"site": "s", "halls": [{"name": "h", "racks": [{"name": "r"}], "feeders": [feeder]}]}, []
    )
    assert granted(9e5, 1, 7) == 4e5, "a restart knows the order"
    assert granted(3e5, 3, 7) == 3e5


@pytest.mark.parametrize("name", ["a.b", "", "a b", "*", ">", "x" * 65])
def test_a_name_that_is_no_part_of_a_subject_is_named(name: str) -> None:
    assert hall_problem(name) is not None
