"""Outlooks as IT events: in JSON and msgpack, in the name of their topic, and what is refused as nonsense."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import pytest

from connectors.agents import EVENT, ItDecoder
from connectors.agents.frame import OUTLOOK_BURST
from tests.support.builders import START_NS, Twin, site_of, two_racks
from twin.catalogue import NS, BadMessage
from twin.telemetry import FaultReported, JobEnded, Message, OutlookTold

T = START_NS
PATH = "outlooks/weather"
BODY = {"type": "OutlookTold", "id": "7", "quantity": "site.outdoor_temp_c", "start_ns": T, "step_s": 3600,
        "values": [21, 20.5, None]}  # fmt: skip


@pytest.fixture
def decoder() -> ItDecoder:
    return ItDecoder(site_of(two_racks()))


def payload(body: Any, packed: bool) -> bytes:
    return msgspec.msgpack.encode(body) if packed else msgspec.json.encode(body)


def event_on(decoder: ItDecoder, path: str, body: Any, packed: bool = False) -> Any:
    (event,) = decoder.decode(Message(T, EVENT + path, payload(body, packed)))  # type: ignore[misc]
    return event


@pytest.mark.parametrize("packed", [False, True])
def test_an_outlook_comes_back_in_the_name_of_its_topic(decoder: ItDecoder, packed: bool) -> None:
    expected = OutlookTold(
        id=f"{PATH}#7", author=PATH, quantity="site.outdoor_temp_c", start_ns=T, step_s=3600.0,
        values=(21.0, 20.5, None),
    )  # fmt: skip
    for extra in ({}, {"author": "ada"}, {"from": PATH}, {"a later field": [1]}):
        event = event_on(decoder, PATH, BODY | extra, packed)
        assert event == expected
        assert type(event) is OutlookTold
        assert all(v is None or type(v) is float for v in event.values)


def test_an_event_as_we_have_it_can_be_sent_as_it_is(decoder: ItDecoder) -> None:
    event = OutlookTold(id="1", author="x", quantity="rack.power_w", name="r1", start_ns=T, step_s=60.0,
                        values=(1.0, None))  # fmt: skip
    for packed in (False, True):
        got = event_on(decoder, PATH, event, packed)
        assert msgspec.structs.replace(got, id="1", author="x") == event


@pytest.mark.parametrize("packed", [False, True])
def test_the_other_events_come_in_both_encodings(decoder: ItDecoder, packed: bool) -> None:
    job = JobEnded(id="3", job="j")
    assert event_on(decoder, "jobs/slurm", job, packed) == job
    fault = FaultReported(id="1", table="gpu", name="lab/h/r1/node0/gpu0", code=79)
    assert event_on(decoder, "lab/h/r1", fault, packed).code == 79


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"id": ""}, "needs an id"),
    ({"id": "x" * 201}, "id of 201"),
    ({"from": "outlooks/other"}, "claims to be"),
    ({"values": []}, "0 values; expected 1 to 2000"),
    ({"values": [1.0] * 2001}, "2001 values"),
    ({"values": ["1"]}, "not an IT event"),
    ({"values": [True]}, "not an IT event"),
    ({"values": [[1.0]]}, "not an IT event"),
    ({"values": 5}, "not an IT event"),
    ({"values": None}, "not an IT event"),
    ({"start_ns": 0}, "expected UTC nanoseconds"),
    ({"start_ns": -T}, "expected UTC nanoseconds"),
    ({"start_ns": 2**62}, "expected UTC nanoseconds"),
    ({"start_ns": 1.5}, "not an IT event"),
    ({"start_ns": "now"}, "not an IT event"),
    ({"step_s": "1h"}, "not an IT event"),
    ({"step_s": None}, "not an IT event"),
    ({"quantity": 7}, "not an IT event"),
    ({"quantity": "x" * 5000}, "quantity of 5000"),
    ({"name": "x" * 5000}, "name of 5000"),
    ({"values": [1.25] * 1_000_000}, "bytes of event"),
]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("change,why", REFUSED)
def test_nonsense_is_refused_with_its_reason(
    decoder: ItDecoder, change: dict[str, Any], why: str, packed: bool
) -> None:
    with pytest.raises(BadMessage, match=why) as caught:
        event_on(decoder, PATH, BODY | change, packed)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_are_finite(decoder: ItDecoder, value: float) -> None:
    with pytest.raises(BadMessage, match="finite numbers or null"):
        event_on(decoder, PATH, BODY | {"values": [1.0, value]}, packed=True)


NO_EVENTS = [b'{"type":"OutlookTold","id":"1","values":[1e400]}', b"\x80", b"\xc1", b"\xff" * 9,
             b'{"start_ns":' + b"9" * 5000 + b"}", b"\x91" * 100_000]  # fmt: skip


@pytest.mark.parametrize("raw", NO_EVENTS)
def test_bytes_that_are_no_event(decoder: ItDecoder, raw: bytes) -> None:
    with pytest.raises(BadMessage, match="not an IT event"):
        decoder.decode(Message(T, EVENT + PATH, raw))


def test_outlooks_come_from_their_sources_only(decoder: ItDecoder) -> None:
    for path in ("jobs/slurm", "lab/h/r1", "lab/h/r1/node0", "outlooks", ""):
        with pytest.raises(BadMessage, match="an outlook on the topic of"):
            event_on(decoder, path, BODY)
    with pytest.raises(BadMessage, match="a job event on the topic of"):
        event_on(decoder, PATH, JobEnded(id="1", job="j"))


def test_a_flood_of_them_is_not_taken(decoder: ItDecoder) -> None:
    body = BODY | {"values": [1.23456789] * 2000}
    for i in range(OUTLOOK_BURST // len(payload(body, False))):
        event_on(decoder, f"outlooks/{i}", body)
    with pytest.raises(BadMessage, match="more outlooks of all sources"):
        event_on(decoder, PATH, body)
    later = Message(T + 60 * NS, EVENT + PATH, payload(BODY, False))
    assert isinstance(decoder.decode(later), list)


def test_whatever_is_decoded_an_engine_takes_or_refuses() -> None:
    """Random bodies: what the decoder lets through never breaks a tick, and is told in the journal."""
    rng, twin = random.Random(5), Twin(two_racks())
    decoder = ItDecoder(twin.site)
    taken, refused = 0, 0
    for i in range(200):
        body = {
            **BODY,
            "id": str(i),
            "quantity": rng.choice(["site.outdoor_temp_c", "rack.power_w", "cdu.heat_w", "cdu.heat_w2"]),
            "name": rng.choice(["", "r1", "r1", "lab/h/r2", "cdu1", "lab", "\u0000", "r9"]),
            "start_ns": rng.choice([T, T, 1, 2**62 - 1, T + 7200 * NS]),
            "step_s": rng.choice([0, 1e-9, 1, 900, 900, 7200, 1e300]),
            "values": [rng.choice([None, 0, 20.5, 25.0, 25.0, 1e308]) for _ in range(rng.randint(1, 3))],
        }  # fmt: skip
        twin.tick(None, event_on(decoder, PATH, body, packed=rng.random() < 0.5), dt_s=0.01)
        (said,) = twin.records("event")
        taken, refused = taken + ("refused" not in said), refused + ("refused" in said)
        for quantity in ("rack.power_w", "cdu.heat_w", "site.outdoor_temp_c"):
            twin.engine.intake.outlooks.at(quantity, T + 10 * NS, twin.site)
    assert min(taken, refused) > 5
