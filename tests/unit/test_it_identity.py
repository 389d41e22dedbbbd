"""Serials on the IT side's event topics: who may tell them, what is no serial, floods, and garbage."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from connectors.agents import EVENT, ItDecoder, frame
from tests.support.builders import site_of
from twin.catalogue import BadMessage
from twin.telemetry import FaultReported, IdentityTold, Message

T = 1_767_225_600 * 10**9
NODE = "lab/h/r1/node0"
TOLD = {"type": "IdentityTold", "id": "b-gpu1-5-S", "from": NODE, "table": "gpu", "name": f"{NODE}/gpu1",
        "serial": "1650322002345"}  # fmt: skip


def a_decoder() -> ItDecoder:
    return ItDecoder(site_of({"site": "lab", "halls": [{"name": "h", "racks": [
        {"name": "r1", "profile": "air-8gpu", "nodes": 3, "gpus_per_node": 2}]}]}))  # fmt: skip


def told(decoder: ItDecoder, path: str = NODE, t_ns: int = T, packed: bool = False, **more: Any) -> Any:
    body = TOLD | more
    payload = msgspec.msgpack.encode(body) if packed else msgspec.json.encode(body)
    (event,) = decoder.decode(Message(t_ns, EVENT + path, payload))  # type: ignore[misc]
    return event


@pytest.mark.parametrize("packed", [False, True])
def test_a_node_tells_of_itself_and_of_what_is_below_it(packed: bool) -> None:
    decoder = a_decoder()
    event = IdentityTold(id=f"{NODE}#b-gpu1-5-S", table="gpu", name=f"{NODE}/gpu1", serial="1650322002345")
    assert told(decoder, packed=packed) == event
    assert told(decoder, name=NODE, table="node", packed=packed).name == NODE
    assert told(decoder, "lab/h/r1", **{"from": "lab/h/r1"}).name == f"{NODE}/gpu1"


@pytest.mark.parametrize(
    "path,more,why",
    [
        (NODE, {"name": "lab/h/r1/node1/gpu0"}, "a serial of 'lab/h/r1/node1/gpu0' on the topic of"),
        (NODE, {"name": "lab/h/r1/node01"}, "expected an entity below it"),
        (NODE, {"name": "lab/h/r1"}, "expected an entity below it"),
        ("lab/h/r9", {"from": None}, "which is not a rack or node"),
        ("jobs/slurm", {"from": None}, "which is not a rack or node"),
        ("lab/h/r1/node1", {}, "claims to be"),
        (NODE, {"id": ""}, "needs an id"),
        (NODE, {"serial": ""}, "a serial of 0 characters"),
        (NODE, {"serial": "x1" * 100}, "a serial of 200 characters"),
        (NODE, {"serial": "x" * 4001}, "serial of 4001"),
        (NODE, {"serial": "000000"}, "where nobody wrote a serial"),
        (NODE, {"serial": "Default string"}, "where nobody wrote a serial"),
        (NODE, {"serial": "S-1\u202e2345"}, "characters that no serial has"),
        (NODE, {"serial": 1650322002345}, "not an IT event"),
        (NODE, {"serial": None}, "not an IT event"),
        (NODE, {"table": 5}, "not an IT event"),
    ],
)
def test_what_is_refused_with_its_reason(path: str, more: dict[str, Any], why: str) -> None:
    with pytest.raises(BadMessage, match=why):
        told(a_decoder(), path, **more)


def test_a_flood_of_serials_ends_and_costs_no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "IDENTITY_BURST", 2000)
    decoder, taken = a_decoder(), 0
    for number in range(100):
        try:
            told(decoder, id=f"i{number}", serial=f"S-{number:04}")
        except BadMessage:
            continue
        taken += 1
    assert 5 < taken < 20
    with pytest.raises(BadMessage, match="more identities of lab/h/r1/node0 than 2000 bytes"):
        told(decoder)
    fault = {"type": "FaultReported", "id": "f", "table": "gpu", "name": f"{NODE}/gpu1", "code": 79}
    (event,) = decoder.decode(Message(T, EVENT + NODE, msgspec.json.encode(fault)))  # type: ignore[misc]
    assert isinstance(event, FaultReported)
    other = "lab/h/r1/node1"
    assert told(decoder, other, name=other, **{"from": None}).id.startswith(f"{other}#")
    assert told(decoder, t_ns=T + 60 * 10**9).serial == "1650322002345"


def test_garbage_gives_an_event_or_a_reason_and_nothing_else() -> None:
    rng, decoder = random.Random(3), a_decoder()
    odd: list[Any] = [
        None,
        "",
        "x",
        0,
        -1,
        1e300,
        [],
        {},
        True,
        "\x00",
        "S-0001",
        NODE,
        f"{NODE}/gpu0",
        "a" * 300,
    ]
    got, bad, reasons = 0, 0, list[str]()
    for number in range(3000):
        body = TOLD | {"id": f"i{number}"}
        for _ in range(rng.randint(0, 2)):
            body[rng.choice([*TOLD, "extra"])] = rng.choice(odd)
        payload = msgspec.json.encode(body) if rng.random() < 0.5 else msgspec.msgpack.encode(body)
        if rng.random() < 0.3:
            at = rng.randint(0, len(payload))
            payload = payload[:at] + rng.randbytes(rng.randint(0, 3)) + payload[at + rng.randint(0, 3) :]
        try:
            (event,) = decoder.decode(Message(T + number * 10**9, EVENT + NODE, payload))  # type: ignore[misc]
        except BadMessage as error:
            bad += 1
            reasons.append(str(error))
        else:
            got += 1
            assert isinstance(event, IdentityTold)
            assert event.name.startswith(NODE)
    assert min(got, bad) > 500
    assert all(0 < len(reason) < 900 for reason in reasons)
