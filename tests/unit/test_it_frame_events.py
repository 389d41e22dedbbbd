"""Events of faults and jobs from the IT side: what comes back, what is refused, and who may tell what."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from connectors.agents import EVENT, ItDecoder
from tests.support.it_frames import T, blocks, decoder, refused
from twin.catalogue import NS, BadMessage
from twin.telemetry import FaultReported, JobEnded, JobStarted, Message

__all__ = ["decoder"]


@pytest.mark.parametrize(
    "event",
    [
        FaultReported(id="1", table="gpu", name="lab/h/r1/node0/gpu0", code=79, detail="fell off the bus"),
        JobStarted(
            id="2",
            job="j",
            nodes=("lab/h/r1/node0",),
            kind="training",
            priority=-5,
            floor_w=1e5,
            started_ns=T - 3600 * NS,
        ),
        JobEnded(id="3", job="j"),
    ],
)
def test_events_come_back(decoder: ItDecoder, event: Any) -> None:
    path, expected = "jobs/slurm", event
    if isinstance(event, FaultReported):  # its id is one among those of its speaker
        path = "lab/h/r1/node0"
        expected = msgspec.structs.replace(event, id=f"{path}#{event.id}")
    assert decoder.decode(Message(T, EVENT + path, msgspec.json.encode(event))) == [expected]


@pytest.mark.parametrize(
    "change,reason",
    [
        ({"id": ""}, "needs an id"),
        ({"id": "x" * 201}, "id of 201"),
        ({"detail": "x" * 4001}, "detail of 4001"),
        ({"code": 2**31}, "code"),
        ({"code": -(10**30)}, "code"),
        ({"code": None}, "not an IT event"),
        ({"type": "Held"}, "not an"),
        ({"name": "x" * 5 * 2**20}, "bytes of event"),
    ],
)
def test_events_that_are_refused(decoder: ItDecoder, change: dict[str, Any], reason: str) -> None:
    body = {"type": "FaultReported", "id": "1", "table": "gpu", "name": "g", "code": 1} | change
    with pytest.raises(BadMessage, match=reason):
        decoder.decode(Message(T, EVENT + "lab", msgspec.json.encode(body)))
    for name, value in (("priority", 2**31), ("started_ns", -1), ("started_ns", 2**62)):
        body = {"type": "JobStarted", "id": "1", "job": "j", "nodes": [], name: value}
        message = Message(T, EVENT + "lab", msgspec.json.encode(body))
        with pytest.raises(BadMessage, match=name):
            decoder.decode(message)


def event_on(decoder: ItDecoder, path: str, body: dict[str, Any]) -> Any:
    return decoder.decode(Message(T, EVENT + path, msgspec.json.encode(body)))


FAULT = {"type": "FaultReported", "id": "1", "table": "gpu", "name": "lab/h/r1/node0/gpu1", "code": 79}
JOB = {"type": "JobEnded", "id": "2", "job": "j"}


@pytest.mark.parametrize("path", ["lab/h/r1/node0", "lab/h/r1", "r1/node0"])
def test_a_fault_is_told_by_what_holds_the_device(decoder: ItDecoder, path: str) -> None:
    assert event_on(decoder, path, FAULT)[0].name == FAULT["name"]


def decoded(decoder: ItDecoder, **more: Any) -> FaultReported:
    (event,) = event_on(decoder, "lab/h/r1/node0", FAULT | more)
    assert isinstance(event, FaultReported)
    return event


def test_a_fault_may_say_when_and_how_often_and_what_we_do_not_know(decoder: ItDecoder) -> None:
    event = decoded(decoder, at_ns=10**18, count=3, mood="bad", same="x")
    assert (event.at_ns, event.count) == (10**18, 3)
    event = decoded(decoder)  # an agent of a version before
    assert (event.at_ns, event.count) == (0, 1)
    assert decoded(decoder, at_ns=2**62 - 1, count=1_000_000).count == 1_000_000


@pytest.mark.parametrize(
    "more, why",
    [
        ({"at_ns": -1}, "at_ns -1; expected UTC"),
        ({"at_ns": 2**62}, "at_ns 4611686018427387904; expected UTC"),
        ({"at_ns": 1.5}, "not an IT event"),
        ({"at_ns": "now"}, "not an IT event"),
        ({"at_ns": None}, "not an IT event"),
        ({"count": 0}, "count 0; expected 1 to 1000000"),
        ({"count": -3}, "count -3"),
        ({"count": 1_000_001}, "count 1000001"),
        ({"count": 2**63}, "count 9223372036854775808; expected 1 to"),
        ({"code": 2**40}, "code 1099511627776; expected a number below"),
    ],
)
def test_times_and_counts_that_cannot_be(decoder: ItDecoder, more: dict[str, Any], why: str) -> None:
    with pytest.raises(BadMessage, match=why):
        decoded(decoder, **more)


@pytest.mark.parametrize(
    "path", ["lab/h/r1/node1", "lab/h/r2", "lab/h/r1/node", "jobs/slurm", "lab", "", "lab/h/r9/node0"]
)
def test_nobody_tells_the_faults_of_others(decoder: ItDecoder, path: str) -> None:
    with pytest.raises(BadMessage, match=r"a fault o[fn]"):
        event_on(decoder, path, FAULT)
    with pytest.raises(BadMessage, match="a fault of"):  # node1 is no part of node10
        event_on(decoder, "lab/h/r1/node1", FAULT | {"name": "lab/h/r1/node10/gpu0"})


def test_job_events_come_from_sources_of_jobs_only(decoder: ItDecoder) -> None:
    assert event_on(decoder, "jobs/slurm", JOB)[0].job == "j"
    # A node that left the site file is none of them, though the broker may still let it in.
    for path in ("lab/h/r1/node0", "lab/h/r1", "lab/h/r9/node0", "jobs", ""):
        with pytest.raises(BadMessage, match="a job event on the topic of"):
            event_on(decoder, path, JOB)


def test_a_payload_from_somebody_else_is_refused(decoder: ItDecoder) -> None:
    body = {"t_ns": T, "gpu": {"temp_c": [1, 2]}}
    for packed in (False, True):
        assert "claims to be 'lab/h/r1/node1' on the topic of 'lab/h/r1/node0'" in refused(
            decoder, body | {"from": "lab/h/r1/node1"}, packed=packed
        )
    assert len(refused(decoder, body | {"from": "x" * 10**6})) < 600
    refused(decoder, body | {"from": 5})
    own = msgspec.json.encode(body | {"from": "lab/h/r1/node0"})
    assert len(blocks(decoder, "lab/h/r1/node0", own)) == 1
    assert event_on(decoder, "lab/h/r1/node0", FAULT | {"from": "lab/h/r1/node0"})
    with pytest.raises(BadMessage, match="claims to be"):
        event_on(decoder, "lab/h/r1/node0", FAULT | {"from": "lab/h/r1"})
    with pytest.raises(BadMessage, match="claims to be"):
        event_on(decoder, "jobs/slurm", JOB | {"from": "jobs/other"})
