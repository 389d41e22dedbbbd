"""The codec of DSX BMS v1 on messages made for the purpose: binding, quality, combining, requests, limits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from connectors.dsx import BmsDecoder
from connectors.dsx.bms import HOLD_NS
from twin.catalogue import ActuationError, BadMessage
from twin.telemetry import Ignored, Message, Reading

T_MS = 1_767_225_600_000
T_NS = T_MS * 10**6


class FakeNames:
    """A site that holds what it is given, each name at its place in the list."""

    def __init__(self, **tables: str) -> None:
        self.tables = {table: names.split() for table, names in tables.items()}

    def entity(self, table: str, name: str) -> int | None:
        names = self.tables.get(table, [])
        return names.index(name) if name in names else None


SITE = FakeNames(rack="r1 r2", cdu="c1 c2", feeder="f1 f2", hall="north south", loop="l1")
LEAK = [{"value": 0, "text": "NoLeak"}, {"value": 1, "text": "Leak"}]


def meta(kind: str, point: str, tag: str, **fields: Any) -> Message:
    body = {"objectType": kind, "pointType": point, **fields}
    return Message(T_NS, f"BMS/v1/PUB/Metadata/{kind}/{point}/{tag}", json.dumps(body).encode())


def value(
    topic: str, number: Any, *, after_s: float = 0, quality: Any = 1, who: str = "PUB", t_ms: Any = None
) -> Message:
    at = T_NS + round(after_s * 1e9)
    body = {"value": number, "timestamp": at // 10**6 if t_ms is None else t_ms, "quality": quality}
    return Message(at, f"BMS/v1/{who}/Value/{topic}", json.dumps(body).encode())


def decoder(*messages: Message, **options: Any) -> BmsDecoder:
    made = BmsDecoder(options.pop("names", SITE), **options)
    for message in messages:
        assert made.decode(message) == []
    return made


POWER = meta("Rack", "RackPower", "a/b", rackLocationId="r2", engUnit="kW")


def test_a_value_before_its_metadata_is_ignored() -> None:
    d = decoder()
    assert d.decode(value("Rack/RackPower/a/b", 4.5)) == Ignored("RackPower", "no metadata yet")
    assert d.decode(POWER) == []
    assert d.decode(value("Rack/RackPower/a/b", 4.5)) == [Reading("rack", 1, "power_w", 4500.0, T_NS, True)]
    assert (d.stats.values, d.stats.metadata, d.stats.ignored) == (1, 1, 1)


def test_our_own_heartbeat_is_nothing_that_lacks_metadata() -> None:
    d = decoder(ours=("racktwin",))
    topic = "System/HeartbeatTimestampIntegration/lab/racktwin"
    d.decode(value("Rack/RackPower/a/b", 4.5))
    beat, foreign = (d.decode(value(topic, 1.0, who=who, after_s=70.0)) for who in ("racktwin", "other"))
    assert beat == Ignored("own", "published by this integration")
    assert isinstance(foreign, Ignored)
    assert foreign.remedy


@pytest.mark.parametrize(
    "number, quality, expected",
    [(1, 1, (1000.0, True)), (1, 0, (1000.0, False)), (1, 192, (1000.0, False)), (None, 1, (None, True)),
     (None, 0, (None, False)), (-0.5, 1, (-500.0, True))],
)  # fmt: skip
def test_quality_and_null(number: Any, quality: int, expected: tuple[float | None, bool]) -> None:
    (reading,) = decoder(POWER).decode(value("Rack/RackPower/a/b", number, quality=quality))
    assert isinstance(reading, Reading)
    assert (reading.value, reading.trusted) == expected


@pytest.mark.parametrize(
    "payload, expected",
    [
        (b"", "truncated"),
        (b"nonsense", "malformed"),
        (b"\xff\xfe", "malformed"),
        (b"[1,2]", "object"),
        (b'{"timestamp":1767225600000,"quality":1}', "value"),
        (b'{"value":1,"quality":1}', "timestamp"),
        (b'{"value":1,"timestamp":1767225600000}', "quality"),
        (b'{"value":true,"timestamp":1767225600000,"quality":1}', "bool"),
        (b'{"value":"1","timestamp":1767225600000,"quality":1}', "str"),
        (b'{"value":[1],"timestamp":1767225600000,"quality":1}', "array"),
        (b'{"value":NaN,"timestamp":1767225600000,"quality":1}', "malformed"),
        (b'{"value":-Infinity,"timestamp":1767225600000,"quality":1}', "malformed"),
        (b'{"value":1e999,"timestamp":1767225600000,"quality":1}', "out of range"),
        (b'{"value":1e308,"timestamp":1767225600000,"quality":1}', "1e12"),
        (b'{"value":1,"timestamp":1767225600000.5,"quality":1}', "int"),
        (b'{"value":1,"timestamp":"1767225600000","quality":1}', "int"),
        (b'{"value":1,"timestamp":1767225600,"quality":1}', "between 2000 and 2100"),
        (b'{"value":1,"timestamp":-1,"quality":1}', "between 2000 and 2100"),
        (b'{"value":1,"timestamp":1767225600000000,"quality":1}', "between 2000 and 2100"),
        (b'{"value":1,"timestamp":' + b"9" * 3000 + b',"quality":1}', "huge"),
        (b'{"value":1,"timestamp":1767225600000,"quality":1,"x":' + b"[" * 3000, "recursion|truncated"),
        (b'{"value":1,"timestamp":1767225600000,"quality":1}' + b" " * 5000, "at most 4096"),
    ],
)
def test_nonsense_is_a_bad_message_that_says_what_was_expected(payload: bytes, expected: str) -> None:
    d = decoder(POWER)
    with pytest.raises(BadMessage, match=expected) as caught:
        d.decode(Message(T_NS, "BMS/v1/PUB/Value/Rack/RackPower/a/b", payload))
    assert len(str(caught.value)) < 500
    assert d.stats.bad == 1


@pytest.mark.parametrize(
    "payload",
    [b"x", b"[]", b'{"objectType":"Rack"}', b'{"objectType":1,"pointType":"RackPower"}', b"[" * 50_000,
     b"\xff",
     b'{"objectType":"Rack","pointType":"RackFlow"}', b'{"objectType":"CDU","pointType":"RackPower"}',
     b'{"objectType":"Rack","pointType":"RackPower","rackLocationId":"' + b"r" * 300 + b'"}',
     b'{"objectType":"Rack","pointType":"RackPower","integration":"a/b"}',
     b'{"objectType":"Rack","pointType":"RackPower","isSetpoint":"true"}', b" " * 70_000],
)  # fmt: skip
def test_bad_metadata(payload: bytes) -> None:
    with pytest.raises(BadMessage):
        decoder().decode(Message(T_NS, "BMS/v1/PUB/Metadata/Rack/RackPower/a/b", payload))


@pytest.mark.parametrize(
    "topic, what",
    [("BMS/v1/PUB/Value/Rack/RackPower", "topic"), ("a", "topic"), ("", "topic"),
     ("BMS/v2/PUB/Value/a/b/c", "topic"),
     ("BMS/v1/a/b/Value/c/d", "topic"), ("BMS/v1/PUB/Value/x/y/z", "unknown point type"),
     ("BMS/v1/NICO/Metadata/Rack/RackPower/a", "Metadata")],
)  # fmt: skip
def test_other_topics_are_ignored(topic: str, what: str) -> None:
    answer = decoder().decode(Message(T_NS, topic, b"{}"))
    assert isinstance(answer, Ignored)
    assert answer.what == what
    with pytest.raises(BadMessage, match="at most 1024"):
        decoder().decode(Message(T_NS, topic + "x" * 1025, b""))


@pytest.mark.parametrize(
    "message, why",
    [
        (meta("Sensor", "Sound", "t", objectId="s", engUnit="dB"), "the catalogue has no signal for it"),
        (meta("UPS", "Status", "t", objectId="u", stateText=LEAK), "the catalogue has no signal for it"),
        (meta("Rack", "RackPower", "t", rackLocationId="r9", engUnit="kW"), "object r9 is not in the site"),
        (meta("Rack", "RackPower", "t", engUnit="kW"), "the object has no id"),
        (meta("Rack", "RackPower", "t", rackLocationId="r1", engUnit="hp"), "unit 'hp'; expected one that"),
        (meta("Rack", "RackPower", "t", rackLocationId="r1"), "no unit; expected one that measures W"),
        (meta("PowerMeter", "Current", "t", objectId="f9", engUnit="A"), "object f9 is not in the site file"),
        (meta("PowerMeter", "PhaseCurrent", "t", objectId="f1", engUnit="A", phase="N"), "phase N"),
        (meta("PowerMeter", "Voltage", "t", objectId="f1", engUnit="V", isSetpoint=True), "as a setpoint"),
        (meta("Shunt", "Status", "t", objectId="f1", stateText=LEAK), "expected an associateId"),
        (meta("CDU", "LiquidFlow", "t", objectId="c1", engUnit="LPM"), "process area none"),
        (meta("CDU", "LiquidFlow", "t", objectId="c1", engUnit="LPM", processArea=["Primary", "Bypass"]),
         "Bypass"),
        (meta("CDU", "PumpSpeed", "t", objectId="c1", engUnit="RPM"), "unit 'RPM'; expected one that"),
        (meta("Sensor", "AirTemperature", "t", objectId="s", engUnit="C", processArea=["west", "HotAisle"]),
         "object s is not in the site file"),
        (meta("System", "HeartbeatTimestampBms", "t", objectId="BMS"), "the catalogue has no signal for it"),
    ],
)  # fmt: skip
def test_points_without_a_place_are_ignored_with_the_reason(message: Message, why: str) -> None:
    d = decoder(message)
    answer = d.decode(value(message.topic.removeprefix("BMS/v1/PUB/Metadata/"), 1))
    assert isinstance(answer, Ignored)
    assert answer.what == message.topic.split("/")[5]
    assert why in answer.why


@pytest.mark.parametrize(
    "message, number, key, expected",
    [
        (meta("Valve", "ValvePosition", "t", associateId="r2", processArea=["Return"],
              stateText=[{"value": 0, "text": "Closed"}, {"value": 1, "text": "Open"}]), 1,
         ("rack", 1, "return_valve_state"), 1.0),
        (meta("Shunt", "Status", "t", associateId="f2",
              stateText=[{"value": 0, "text": "Off"}, {"value": 1, "text": "On"}]), 1,
         ("feeder", 1, "shunt_trip_state"), 1.0),
        (meta("Breaker", "Status", "t", associateId="f1",
              stateText=[{"value": 1, "text": "Closed"}, {"value": 0, "text": "Open"}]), 0,
         ("feeder", 0, "breaker_state"), 1.0),
        (meta("Sensor", "LeakDetect", "t", associateId="c2", stateText=LEAK), 1, ("cdu", 1, "leak_state"), 1),
        (meta("Sensor", "LeakDetect", "t", associateId="r1", stateText=LEAK), 1,
         ("rack", 0, "leak_state"), 1),
        (meta("Sensor", "LeakDetect", "t", objectId="s", processArea=["south"], stateText=LEAK), 1,
         ("hall", 1, "leak_state"), 1.0),
        (meta("Chiller", "LiquidTemperature", "t", objectId="l1", processArea=["Supply"], engUnit="F"), 50,
         ("loop", 0, "supply_temp_c"), 10.0),
        (meta("CDU", "LiquidFlow", "t", objectId="c1", processArea=["Seccondary"], engUnit="GPM"), 100,
         ("cdu", 0, "flow_lpm"), 378.5411784),
        (meta("CDU", "LiquidPressure", "t", objectId="c1", processArea=["primary", "Outlet"], engUnit="psi"),
         1, ("cdu", 0, "facility_return_pressure_pa"), 6894.757293168),
        (meta("PowerMeter", "PowerFactor", "t", objectId="f1"), 0.98, ("feeder", 0, "power_factor_pu"), 0.98),
    ],
)  # fmt: skip
def test_points_find_their_cell(message: Message, number: float, key: Any, expected: float) -> None:
    d = decoder(message)
    (reading,) = d.decode(value(message.topic.removeprefix("BMS/v1/PUB/Metadata/"), number))
    assert isinstance(reading, Reading)
    assert reading[:3] == key
    assert reading.value == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("number", [2, -1, 0.5, 1e11])
def test_a_state_that_the_point_does_not_have_is_bad(number: float) -> None:
    d = decoder(meta("Rack", "RackLeakDetect", "t", rackLocationId="r1", stateText=LEAK))
    with pytest.raises(BadMessage, match="expected one of"):
        d.decode(value("Rack/RackLeakDetect/t", number))


def test_a_state_with_an_unknown_text_is_no_reading() -> None:
    texts = [*LEAK, {"value": -1, "text": "Unknown"}]
    d = decoder(meta("Rack", "RackLeakDetect", "t", rackLocationId="r1", stateText=texts))
    (reading,) = d.decode(value("Rack/RackLeakDetect/t", -1))
    assert reading == Reading("rack", 0, "leak_state", None, T_NS, False)
    assert any("with an unknown text" in note for note in d.notes)


def _current(d: BmsDecoder, tag: str) -> str:
    answer = d.decode(value(f"PowerMeter/Current/{tag}", 1))
    return answer.why if isinstance(answer, Ignored) else answer[0].signal


def test_points_alike_are_told_apart_by_the_order_of_their_tags() -> None:
    points = {t: meta("PowerMeter", "Current", t, objectId="f1", engUnit="A") for t in "mbz"}
    d = decoder(points["m"])
    assert _current(d, "m") == "current_a"
    d.decode(points["b"])  # late metadata shifts the order
    assert (_current(d, "b"), _current(d, "m")) == ("current_a", "current_a_max")
    d.decode(points["z"])
    assert "3. point" in _current(d, "z")
    d.decode(points["b"]._replace(payload=b""))  # a cleared retained message
    assert (_current(d, "m"), _current(d, "z")) == ("current_a", "current_a_max")
    assert _current(d, "b") == "no metadata yet"
    assert d.stats.forgotten == 1


def test_a_lone_setpoint_is_the_configured_one() -> None:
    area = {"objectId": "c1", "engUnit": "C", "processArea": ["Secondary", "Supply"], "isSetpoint": True}
    d = decoder(meta("CDU", "LiquidTemperature", "final", **area))
    topic = "CDU/LiquidTemperature/"
    (lone,) = d.decode(value(topic + "final", 30))
    assert isinstance(lone, Reading)
    assert lone.signal == "supply_temp_setpoint_c"
    d.decode(meta("CDU", "LiquidTemperature", "zone", **area))
    found = [d.decode(value(topic + tag, 30))[0].signal for tag in ("final", "zone")]  # type: ignore[union-attr]
    assert found == ["supply_temp_setpoint_final_c", "supply_temp_setpoint_c"]


def test_changed_metadata_rebinds_and_is_counted() -> None:
    d = decoder(POWER, POWER)
    assert d.stats.changed == 0
    d.decode(meta("Rack", "RackPower", "a/b", rackLocationId="r1", engUnit="W"))
    assert d.decode(value("Rack/RackPower/a/b", 7)) == [Reading("rack", 0, "power_w", 7.0, T_NS, True)]
    assert d.stats.changed == 1


def _aisle(point: str, unit: str, area: str = "ColdAisle") -> BmsDecoder:
    fields = {"objectId": "s", "engUnit": unit, "processArea": ["north", area] if area else ["north"]}
    return decoder(meta("Sensor", point, "s1", **fields), meta("Sensor", point, "s2", **fields))


@pytest.mark.parametrize(
    "point, unit, area, expected",
    [("AirTemperature", "C", "ColdAisle", 30.0), ("AirRelativeHumidity", "%RH", "ColdAisle", 0.25),
     ("AirDifferentialPressure", "Pa", "", 25.0)],
)  # fmt: skip
def test_sensors_of_one_cell_are_combined(point: str, unit: str, area: str, expected: float) -> None:
    d = _aisle(point, unit, area)
    d.decode(value(f"Sensor/{point}/s1", 30))
    (reading,) = d.decode(value(f"Sensor/{point}/s2", 20, after_s=1))
    assert isinstance(reading, Reading)
    assert reading.value == pytest.approx(expected)
    assert reading.entity == 0


def test_low_is_the_danger_of_a_flow() -> None:
    fields = {"objectId": "c1", "engUnit": "LPM", "processArea": ["Secondary"]}
    d = decoder(meta("CDU", "LiquidFlow", "a", **fields), meta("CDU", "LiquidFlow", "b", **fields))
    d.decode(value("CDU/LiquidFlow/a", 5))
    assert d.decode(value("CDU/LiquidFlow/b", 50))[0].value == 5.0  # type: ignore[union-attr]


def test_a_combined_cell_drops_what_is_null_bad_or_old() -> None:
    d = _aisle("AirTemperature", "C")

    def say(tag: str, number: float | None, after_s: float, quality: int = 1) -> tuple[float | None, bool]:
        message = value(f"Sensor/AirTemperature/{tag}", number, after_s=after_s, quality=quality)
        (reading,) = d.decode(message)
        assert isinstance(reading, Reading)
        return reading.value, reading.trusted

    assert say("s1", 40, 0) == (40.0, True)
    assert say("s2", 20, 1) == (40.0, True)
    assert say("s1", 40, 2, quality=0) == (20.0, True)
    assert say("s1", 45, 3) == (45.0, True)
    assert say("s1", None, 4) == (20.0, True)
    assert say("s2", 21, 5, quality=0) == (21.0, False)
    assert say("s2", None, 6) == (None, True)
    assert say("s1", 50, 7) == (50.0, True)
    assert say("s2", 20, 7 + HOLD_NS / 1e9) == (50.0, True)
    assert say("s2", 20, 8 + HOLD_NS / 1e9) == (20.0, True)


def test_a_cleared_point_no_longer_counts() -> None:
    d = _aisle("AirTemperature", "C")
    d.decode(value("Sensor/AirTemperature/s1", 60))
    d.decode(Message(T_NS, "BMS/v1/PUB/Metadata/Sensor/AirTemperature/s1", b""))
    assert d.decode(value("Sensor/AirTemperature/s2", 20))[0].value == 20.0  # type: ignore[union-attr]


def test_a_combined_reading_is_as_new_as_its_newest_part() -> None:
    d = _aisle("AirTemperature", "C")
    d.decode(value("Sensor/AirTemperature/s1", 20, t_ms=T_MS + 500))
    (reading,) = d.decode(value("Sensor/AirTemperature/s2", 30, t_ms=T_MS))
    assert reading == Reading("hall", 0, "cold_aisle_temp_c", 30.0, T_NS + 500_000_000, True)


def test_a_sensor_of_no_named_hall_goes_to_the_only_one() -> None:
    nameless = meta("Sensor", "LeakDetect", "t", objectId="s", stateText=LEAK)
    strange = meta("Sensor", "LeakDetect", "u", objectId="s", stateText=LEAK, processArea=["west"])
    only = FakeNames(hall="hall1")
    d = decoder(nameless, strange, names=only)
    assert d.decode(value("Sensor/LeakDetect/t", 0))[0][:2] == ("hall", 0)  # type: ignore[index]
    assert isinstance(d.decode(value("Sensor/LeakDetect/u", 0)), Ignored)
    d = decoder(nameless, strange, default_hall="south")
    assert d.decode(value("Sensor/LeakDetect/u", 0))[0][:2] == ("hall", 1)  # type: ignore[index]


REQUEST = meta("CDU", "LiquidTemperatureSpRequest", "t", objectId="c1", engUnit="F", integration="MEPAI",
               processArea=["Secondary", "Supply"])  # fmt: skip
ISOLATE = meta("Rack", "RackLiquidIsolationRequest", "t", rackLocationId="r1", integration="NICO", stateText=[
    {"value": 5, "text": "IsolateRequest"}, {"value": 3, "text": "NoIsolateRequest"}])  # fmt: skip


def test_requests_go_to_the_topic_of_the_integration_in_the_units_of_the_wire() -> None:
    d = decoder(REQUEST, ISOLATE, ours=("MEPAI", "NICO"))
    topic, payload = d.encode_request(REQUEST.topic, 20.0, T_NS)
    assert topic == "BMS/v1/MEPAI/Value/CDU/LiquidTemperatureSpRequest/t"
    assert json.loads(payload) == {"value": pytest.approx(68.0), "timestamp": T_MS, "quality": 1}
    assert json.loads(d.encode_request(ISOLATE.topic, 1, T_NS)[1])["value"] == 5
    assert json.loads(d.encode_request(ISOLATE.topic, 0, T_NS)[1])["value"] == 3
    # what we published comes back as a reading, from our topic only
    (echo,) = d.decode(Message(T_NS, topic, payload))
    assert echo == Reading("cdu", 0, "supply_temp_request_c", pytest.approx(20.0), T_NS, True)
    assert "owner" in d.decode(Message(T_NS, topic.replace("MEPAI", "EVIL"), payload)).why  # type: ignore[union-attr]
    assert d.find_request("cdu", 0, "supply_temp_request_c") == REQUEST.topic


def test_a_pressure_is_asked_for_on_the_set_point_that_is_ours_and_read_back_from_the_bms_s_own() -> None:
    like = {"objectId": "c1", "engUnit": "kPa", "processArea": ["Secondary"], "isSetpoint": True}
    own = meta("CDU", "LiquidDifferentialPressure", "own", **like)
    asked = meta("CDU", "LiquidDifferentialPressure", "asked", **like, integration="NICO")
    d = decoder(own, asked, ours=("NICO",))
    assert d.find_request("cdu", 0, "diff_pressure_request_pa") == asked.topic
    topic, payload = d.encode_request(asked.topic, 90_000.0, T_NS)
    assert json.loads(payload)["value"] == pytest.approx(90.0)
    (echo,) = d.decode(Message(T_NS, topic, payload))
    assert (echo.signal, echo.value) == ("diff_pressure_request_pa", pytest.approx(90_000.0))
    told = Message(T_NS, own.topic.replace("Metadata", "Value"), payload)
    (read,) = d.decode(told)
    assert (read.signal, read.value) == ("diff_pressure_setpoint_pa", pytest.approx(90_000.0))
    lone = decoder(own, ours=("NICO",))
    with pytest.raises(ActuationError, match="no point announced"):
        lone.find_request("cdu", 0, "diff_pressure_request_pa")


@pytest.mark.parametrize(
    "topic, number, expected",
    [
        (REQUEST.topic, 20.0, "belongs to MEPAI"),
        (POWER.topic, 20.0, "belongs to the BMS"),
        (REQUEST.topic + "/other", 20.0, "no metadata yet"),
        (ISOLATE.topic, 2, "expected a number from 0 to 1"),
        (ISOLATE.topic, 0.5, "no state text"),
        (ISOLATE.topic, float("nan"), "expected a number"),
    ],
)
def test_requests_that_are_not_ours_or_make_no_sense_are_refused(
    topic: str, number: float, expected: str
) -> None:
    d = decoder(REQUEST, ISOLATE, POWER, ours=("NICO",))
    with pytest.raises(ActuationError, match=expected):
        d.encode_request(topic, number, T_NS)
    with pytest.raises(ActuationError, match="no point announced"):
        d.find_request("cdu", 0, "supply_temp_request_c")


def test_a_request_for_an_unknown_object_is_refused() -> None:
    d = decoder(REQUEST, names=FakeNames(), ours=("MEPAI",))
    with pytest.raises(ActuationError, match="not in the site file"):
        d.encode_request(REQUEST.topic, 20.0, T_NS)
