"""Whatever a broker delivers, the decoder answers with readings, Ignored or BadMessage, in bounded memory."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from connectors.dsx import BmsDecoder, discover
from connectors.dsx.points import POINT_TYPES, ROWS, PointRow
from twin.catalogue import TABLES, BadMessage
from twin.telemetry import Ignored, Message

T_MS = 1_767_225_600_000
KINDS = sorted({row.object_type for row in ROWS} | {"System", "UPS", "Nonsense"})
POINTS = [*sorted(POINT_TYPES), "Nonsense"]
UNITS = [
    "kW",
    "W",
    "A",
    "LPM",
    "GPM",
    "psi",
    "C",
    "F",
    "%",
    "RPM",
    "V",
    "Hz",
    "Pa",
    "kVA",
    "%RH",
    "parsec",
    "",
    None,
]
TEXTS = ["Leak", "NoLeak", "On", "Off", "Open", "Closed", "Fault", "Unknown", "", "Isolated", "\u0000"]
AREAS = ["Primary", "Seccondary", "Supply", "Return", "Fill", "Filter1", "ColdAisle", "north", "", "x" * 64]


class AnyNames:
    """A site that knows half of all names."""

    def entity(self, table: str, name: str) -> int | None:
        return len(name) % 7 if len(name) % 2 else None


def check(decoder: BmsDecoder, message: Message) -> str:
    """Decode, and hold the answer to the contract; the kind of answer."""
    try:
        answer = decoder.decode(message)
    except BadMessage as error:
        if not 0 < len(str(error)) < 1000:
            raise AssertionError("a reason of a few words was expected") from error
        return "bad"
    if isinstance(answer, Ignored):
        assert len(answer.what) < 50
        assert 0 < len(answer.why) < 1200
        return "ignored"
    for reading in answer:
        signal = TABLES[reading.table].by_name[reading.signal]
        assert reading.value is None or (math.isfinite(reading.value) and abs(reading.value) <= 1e12)
        assert signal.kind != "state" or reading.value is None or reading.value in range(len(signal.states))
        assert 946_684_800 <= reading.t_ns / 1e9 <= 4_102_444_800
    return "decoded" if answer else "metadata"


FIELDS = [
    "objectType", "pointType", "engUnit", "stateText", "rackLocationId", "objectId", "associateId",
    "servesId", "processArea", "phase", "isSetpoint", "integration", "value", "timestamp", "quality",
]  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
topics = st.one_of(
    st.text(max_size=40),
    st.builds(
        lambda who, what, kind, point, tag: f"BMS/v1/{who}/{what}/{kind}/{point}/{tag}",
        st.sampled_from(["PUB", "NICO", "", "x"]),
        st.sampled_from(["Value", "Metadata", "Other"]),
        st.sampled_from(KINDS),
        st.sampled_from(POINTS),
        st.text(max_size=10),
    ),
)
fields = st.fixed_dictionaries(
    {},
    optional={
        name: json_values | st.sampled_from(["Rack", "RackPower", "kW", "PUB", ["Secondary"]])
        for name in FIELDS
    },
)
payloads = st.binary(max_size=60) | fields.map(lambda f: json.dumps(f).encode()) | json_values.map(
    lambda v: json.dumps(v).encode()
)  # fmt: skip


@pytest.mark.long
@given(st.lists(st.builds(Message, st.integers(0, 2**62), topics, payloads), max_size=20))
def test_any_messages(messages: list[Message]) -> None:
    decoder = BmsDecoder(AnyNames())
    for message in messages:
        check(decoder, message)
    discover(messages)


@given(
    st.sampled_from(KINDS), st.sampled_from(POINTS), st.sampled_from(UNITS),
    st.lists(st.sampled_from(AREAS), max_size=3),
    st.lists(st.tuples(st.integers(-3, 9), st.sampled_from(TEXTS)), max_size=4) | st.none(),
    st.lists(st.none() | st.floats() | st.integers(), max_size=6),
    st.integers(-(2**70), 2**70) | st.just(T_MS),
)  # fmt: skip
def test_any_point_and_value(
    kind: str, point: str, unit: str | None, areas: list[str], texts: Any, values: list[Any], t_ms: int
) -> None:
    decoder = BmsDecoder(AnyNames())
    states = None if texts is None else [{"value": n, "text": t} for n, t in texts]
    body = {"objectType": kind, "pointType": point, "engUnit": unit, "processArea": areas,
            "stateText": states, "rackLocationId": "r", "objectId": "o", "phase": "A"}  # fmt: skip
    key = f"{kind}/{point}/tag"
    assert check(decoder, Message(0, f"BMS/v1/PUB/Metadata/{key}", json.dumps(body).encode())) == "metadata"
    for value in values:
        payload = json.dumps({"value": value, "timestamp": t_ms, "quality": 1}).encode()
        check(decoder, Message(0, f"BMS/v1/PUB/Value/{key}", payload))


def _number(rng: random.Random) -> str:
    return rng.choice(
        ["1", "0", "-1", "35.2", "null", "true", '"1"', "NaN", "Infinity", "-Infinity", "1e999", "1e308",
         "-1e300", "9" * rng.randint(1, 400), "[]", "{}", "0.5", "[" * rng.randint(1, 3000), "", "01", "1."]
    )  # fmt: skip


def _time(rng: random.Random) -> str:
    return rng.choice(
        [str(T_MS), str(T_MS + rng.randint(-10**9, 10**9)), "0", "-5", str(10**30), "1e12", "null", '"now"',
         str(2**63), "true", str(T_MS * 1000)]
    )  # fmt: skip


def _metadata(rng: random.Random, kind: str, point: str) -> bytes:
    body: dict[str, Any] = {"objectType": kind, "pointType": point}
    for name in ("rackLocationId", "objectId", "associateId"):
        if rng.random() < 0.5:
            body[name] = "e" * rng.randint(0, 12)
    body["engUnit"] = rng.choice(UNITS)
    if rng.random() < 0.4:
        body["stateText"] = [{"value": i, "text": rng.choice(TEXTS)} for i in range(rng.randint(0, 3))]
    if rng.random() < 0.5:
        body["processArea"] = [rng.choice(AREAS) for _ in range(rng.randint(0, 3))]
    if rng.random() < 0.2:
        body[rng.choice(sorted(body))] = rng.choice([None, 1, True, [], {}, "x" * 500, [["a"]], 1e9])
    if rng.random() < 0.3:
        body["integration"] = rng.choice(["NICO", "PUB", "a/b", "", 7])
    return json.dumps(body).encode()


WIRE = {
    "W": "kW",
    "VA": "kVA",
    "degC": "C",
    "l/min": "GPM",
    "Pa": "psi",
    "Hz": "Hz",
    "V": "V",
    "A": "A",
    "1": "%",
}


def sound(rng: random.Random, row: PointRow) -> bytes:
    """Metadata that binds a point of this row."""
    signal = TABLES[row.table].by_name[row.signals[0]]
    associated = row.object_type in ("Valve", "Pump", "Shunt", "Breaker") or (
        row.object_type == "Sensor" and row.table in ("rack", "cdu")
    )
    owner = "e" * rng.choice([1, 3, 5])
    body: dict[str, Any] = {"objectType": row.object_type, "pointType": row.point_type,
                            "rackLocationId": owner, "processArea": sorted(row.areas)}  # fmt: skip
    body["isSetpoint"] = row.setpoint
    body["associateId" if associated else "objectId"] = owner
    if row.phase:
        body["phase"] = row.phase
    if signal.kind == "state":
        body["stateText"] = [{"value": i, "text": t} for i, t in enumerate(rng.sample(signal.states, 2))]
    else:
        body["engUnit"] = WIRE[signal.unit]
    return json.dumps(body).encode()


def malformed(rng: random.Random) -> Message:
    """A message of a broken or hostile publisher; of a few hundred points, so that many do bind."""
    kind, point = rng.choice(KINDS[::5]), rng.choice(POINTS[::9])
    row = rng.choice(ROWS) if rng.random() < 0.8 else None
    if row is not None:
        kind, point = row.object_type, row.point_type
    t_ns = rng.choice([0, T_MS * 10**6, 2**62, T_MS * 10**6 + rng.randint(0, 10**12)])
    who = rng.choice(["PUB", "PUB", "PUB", "NICO", "x"])
    what = rng.choice(["Value", "Value", "Value", "Metadata", "Other"])
    topic = f"BMS/v1/{who}/{what}/{kind}/{point}/{rng.randint(0, 2)}"
    chance = rng.random()
    if chance < 0.03:
        topic = rng.choice(["", "/", "BMS", topic * 40, topic[: rng.randint(0, len(topic))], "\udcff/" * 7])
    if what == "Metadata":
        payload = sound(rng, row) if row is not None and rng.random() < 0.8 else _metadata(rng, kind, point)
    else:
        payload = f'{{"value":{_number(rng)},"timestamp":{_time(rng)},"quality":{_number(rng)}}}'.encode()
        if chance < 0.3:
            payload = f'{{"value":1,"timestamp":{T_MS},"quality":1}}'.encode()
    if chance > 0.9:
        at = rng.randint(0, len(payload))
        payload = payload[:at] + rng.randbytes(rng.randint(0, 4)) + payload[at + rng.randint(0, 4) :]
    return Message(t_ns, topic, payload)
