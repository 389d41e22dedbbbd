"""Allowances of the journal: a hostile node fills no disk, and takes no room from other nodes."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest

from connectors.agents import EVENT, ItDecoder, ResultDecoder, command, frame
from connectors.allowance import NS, Allowance
from tests.support.builders import site_of
from twin.catalogue import BadMessage
from twin.telemetry import FaultReported, JobStarted, Message

T = 1_767_225_600 * NS
SITE = site_of({"site": "lab", "halls": [{"name": "h", "racks": [
    {"name": "r1", "profile": "air-8gpu", "nodes": 2, "gpus_per_node": 2}]}]})  # fmt: skip
NODES = ("lab/h/r1/node0", "lab/h/r1/node1")


def fault(node: str, number: int, detail: str = "x" * 3000, t_ns: int = T) -> Message:
    event = FaultReported(id=f"{number}", table="gpu", name=f"{node}/gpu0", code=79, detail=detail)
    return Message(t_ns, EVENT + node, msgspec.json.encode(event))


def taken(decoder: ItDecoder | ResultDecoder, messages: list[Message]) -> int:
    """Return how many bytes of these messages the decoder takes."""
    size = 0
    for message in messages:
        with contextlib.suppress(BadMessage):
            decoder.decode(message)
            size += len(message.payload)
    return size


def test_a_store_is_spent_and_fills_again() -> None:
    store = Allowance("faults", 1000, 10)
    store.spend("a", 1000, T)
    with pytest.raises(BadMessage, match="more faults of a than 1000 bytes at once and 10 a second"):
        store.spend("a", 1, T)
    store.spend("b", 1000, T)  # each has a store of its own
    store.spend("a", 100, T + 10 * NS)
    with pytest.raises(BadMessage):
        store.spend("a", 1, T + 10 * NS)
    with pytest.raises(BadMessage):  # a clock that steps back gives nothing
        store.spend("a", 1, T)
    with pytest.raises(BadMessage):
        store.spend("a", 1, T + 10 * NS)
    store.spend("a", 1000, T + 10_000 * NS)
    with pytest.raises(BadMessage):  # never more than the burst
        store.spend("a", 1, T + 10_000 * NS)


def test_a_flood_of_faults_of_one_node_is_bounded_and_leaves_the_others_theirs() -> None:
    decoder = ItDecoder(SITE)
    flood = [fault(NODES[0], i, t_ns=T + i * NS // 1000) for i in range(10_000)]  # 30 MB within 10 s
    assert taken(decoder, flood) <= frame.FAULT_BURST + 10 * frame.FAULT_PER_S
    assert taken(decoder, [fault(NODES[1], 1)]) > 0
    assert taken(decoder, [fault(NODES[0], 20_000, "short", T + 60 * NS)]) > 0


def test_a_flood_of_job_events_is_bounded_whatever_the_sources_call_themselves() -> None:
    decoder, start = ItDecoder(SITE), {"type": "JobStarted", "nodes": [NODES[0]]}
    flood = [
        Message(
            T, f"{EVENT}jobs/{i}", msgspec.json.encode(start | {"id": f"{i}", "job": f"{i}" + "x" * 3900})
        )
        for i in range(6000)
    ]
    assert taken(decoder, flood) <= frame.JOB_BURST


def test_a_flood_of_answers_is_bounded_by_node() -> None:
    decoder = ResultDecoder(SITE, "racktwin")
    body = {"v": 1, "epoch": 1, "t_ns": T, "names": ["gpu0", "gpu1"], "generations": [0, 0],
            "commands": [1, 2], "states": ["done"] * 2, "details": ["x" * 499] * 2}  # fmt: skip
    payload = msgspec.json.encode(body)
    topic = "IT/v1/racktwin/Result/gpu.power_cap_w/"
    flood = [Message(T, topic + NODES[0], payload)] * (2 * command.ANSWER_BURST // len(payload))
    assert taken(decoder, flood) <= command.ANSWER_BURST
    assert taken(decoder, [Message(T, topic + NODES[1], payload)]) == len(payload)


def test_nobody_uses_up_the_ids_of_another() -> None:
    decoder: Any = ItDecoder(SITE)

    def heard(topic: str, node: str) -> str:
        (event,) = decoder.decode(Message(T, EVENT + topic, fault(node, 7).payload))
        return str(event.id)

    ids = [heard(node, node) for node in NODES]
    assert len(set(ids)) == 2
    assert heard(NODES[0], NODES[0]) == ids[0]
    assert heard("r1/node0", NODES[0]) == ids[0]  # the same node by its short name


def test_names_of_nodes_have_a_length() -> None:
    event = JobStarted(id="1", job="j", nodes=(NODES[0], "x" * 600))
    with pytest.raises(BadMessage, match="names of at most 512"):
        ItDecoder(SITE).decode(Message(T, EVENT + "jobs/a", msgspec.json.encode(event)))
