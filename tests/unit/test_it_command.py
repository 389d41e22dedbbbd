"""Commands on the IT tree: what a batch becomes on the wire, what answers become, and what is refused."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from racktwin_agent.leases import Answer
from racktwin_agent.publish import result_of, status_of
from racktwin_agent.wire import read_plan, read_request

from connectors.agents import BmsSink, ContingencyTerms, MqttSink, ResultDecoder, contingency_of, presence_of
from connectors.agents.command import AGENT, requests_of
from connectors.dsx import PUB_METADATA, PUB_VALUE, BmsDecoder, Heartbeat
from tests.support.builders import site_of
from twin.catalogue import NS, ActuationError, BadMessage, ConnectorError
from twin.contracts import CommandBatch
from twin.site import Site
from twin.telemetry import CommandAcked, Ignored, Message, Reading

T = 1_767_225_600 * NS
CAP, LOCK = "gpu.power_cap_w", "gpu.clock_lock_mhz"


def a_site(nodes: int = 3) -> Site:
    """Racks r1 (nodes of two GPUs) and r2 (one node of four), one CDU; caps 200..350 W, safe 200 W."""
    return site_of({"site": "lab", "halls": [{"name": "h", "racks": [
        {"name": "r1", "profile": "air-8gpu", "nodes": nodes, "gpus_per_node": 2},
        {"name": "r2", "profile": "air-8gpu", "nodes": 1, "gpus_per_node": 4}],
        "cdus": [{"name": "cdu1", "serves": ["r[1-2]"]}]}]})  # fmt: skip


SITE = a_site()


def batch(index: list[int], control: str = CAP, **more: Any) -> CommandBatch:
    n = len(index)
    plain = CommandBatch(
        control,
        "thermal_guard",
        3,
        np.array(index, np.int32),
        np.zeros(n, np.int32),
        17 + np.arange(n),
        np.linspace(250, 300, n) if n else np.zeros(0),
        "flow lost",
        T,
        T + 30 * NS,
        T + 10 * NS,
    )
    return replace(plain, **more)


def test_a_batch_is_one_message_per_rack_with_names_below_it() -> None:
    first, second = requests_of(batch([0, 3, 5, 6, 9]), SITE, "ours")
    assert first[0] == "IT/v1/ours/Request/gpu.power_cap_w/lab/h/r1"
    body = msgspec.json.decode(first[1])
    assert body["names"] == ["node0/gpu0", "node1/gpu1", "node2/gpu1"]
    assert (body["commands"], body["values"], body["lapse"]) == (
        [17, 18, 19],
        [250.0, 262.5, 275.0],
        [200.0] * 3,
    )
    assert second[0] == "IT/v1/ours/Request/gpu.power_cap_w/lab/h/r2"
    body = msgspec.json.decode(second[1])
    assert (body["names"], body["commands"]) == (["node0/gpu0", "node0/gpu3"], [20, 21])
    for key, value in {"v": 1, "epoch": 3, "issued_ns": T, "expires_ns": T + 30 * NS, "renewal": False,
                       "final": False, "on_expiry": "safe", "policy": "thermal_guard"}.items():  # fmt: skip
        assert body[key] == value


def test_the_agent_reads_what_is_written() -> None:
    (topic, payload), _ = requests_of(batch([0, 3, 6], renewal=True), SITE, "ours")
    read = read_request(CAP, topic.split("/", 5)[5], payload)
    assert read.renewal
    assert [(o.name, o.command, o.value, o.lapse) for o in read.orders["node0"]] == [
        ("gpu0", 17, 250.0, 200.0)
    ]
    assert [(o.name, o.command) for o in read.orders["node1"]] == [("gpu1", 18)]
    index = np.arange(10, dtype=np.int32)
    terms = ContingencyTerms("ours", epoch=3, issued_ns=T, expires_ns=T + NS, hold_s=5)
    plans = contingency_of(SITE, index, np.full(10, 220.0), terms)
    assert [t for t, _ in plans] == ["IT/v1/ours/Contingency/lab/h/r1", "IT/v1/ours/Contingency/lab/h/r2"]
    plan = read_plan("lab/h/r1", plans[0][1])
    assert plan.caps["node2"] == {"gpu0": 220.0, "gpu1": 220.0}
    assert (plan.triggers, plan.hold_s) == (("psu_lost", "power_brake", "broker_gone"), 5.0)


def test_lapses_follow_the_control() -> None:
    level = requests_of(batch([1], "node.service_level", value=np.array([1.0])), SITE, "ours")
    body = msgspec.json.decode(level[0][1])
    assert (body["names"], body["lapse"], body["on_expiry"]) == (["node1"], [None], "keep")
    given = requests_of(batch([0, 1]), SITE, "ours", np.arange(10.0) + 300)
    assert msgspec.json.decode(given[0][1])["lapse"] == [300.0, 301.0]
    valve = requests_of(batch([1], "rack.liquid_isolation", value=np.array([1.0])), SITE, "ours")
    assert (valve[0][0][-5:], msgspec.json.decode(valve[0][1])["names"]) == ("/h/r2", [""])


def test_what_no_agent_carries_out_or_could_not_lapse_is_refused() -> None:
    for control in ("cdu.supply_temp_target_c", "job.power_cap_w", "nonsense"):
        with pytest.raises(ActuationError, match="no agent can carry it out"):
            requests_of(batch([0], control), SITE, "ours")
    lapse = np.full(10, 250.0)
    lapse[3] = np.nan
    with pytest.raises(ActuationError, match="lab/h/r1/node1/gpu1: no safe value"):
        requests_of(batch([0, 3]), SITE, "ours", lapse)
    assert requests_of(batch([0, 3], final=True), SITE, "ours", lapse)  # nothing lapses
    assert requests_of(batch([]), SITE, "ours") == []
    for caps in (np.nan, -1.0, np.inf):
        with pytest.raises(ActuationError, match="contingency caps"):
            contingency_of(
                SITE, np.array([0], np.int32), np.array([caps]), ContingencyTerms("x", 1, T, T + 1)
            )


def test_large_racks_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.agents.command._runs.__defaults__", (4,))
    sizes = [len(msgspec.json.decode(p)["names"]) for _, p in requests_of(batch(list(range(10))), SITE, "x")]
    assert sizes == [4, 2, 4]


def test_ten_thousand_commands_keep_their_order() -> None:
    site = a_site(5000)
    messages = requests_of(batch(list(range(10_000))), site, "ours")
    names = [n for _, p in messages for n in msgspec.json.decode(p)["names"]]
    assert (len(messages), len(names)) == (3, 10_000)
    assert (names[0], names[9999]) == ("node0/gpu0", "node4999/gpu1")


RESULT: dict[str, Any] = {
    "v": 1,
    "epoch": 3,
    "t_ns": T,
    "names": ["gpu0", "gpu1"],
    "generations": [0, 2],
    "commands": [17, 18],
    "states": ["done", "failed"],
    "details": ["", "500 is outside 200..350"],
}


def answer(body: Any, path: str = "lab/h/r1/node1", control: str = CAP, site: Site = SITE) -> Any:
    payload = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return ResultDecoder(site, "ours", 3).decode(Message(T, f"IT/v1/ours/Result/{control}/{path}", payload))


def test_answers_become_events_with_full_names() -> None:
    good, bad = answer(RESULT)
    assert good == CommandAcked(
        control=CAP, name="lab/h/r1/node1/gpu0", generation=0, command="3-17", state="done"
    )
    assert (bad.name, bad.generation, bad.state) == ("lab/h/r1/node1/gpu1", 2, "failed")
    assert bad.detail == "500 is outside 200..350"
    node = RESULT | {
        "names": [""],
        "generations": [0],
        "commands": [4],
        "states": ["accepted"],
        "details": [""],
    }
    (level,) = answer(node, control="node.service_level")
    assert (level.name, level.command, level.state) == ("lab/h/r1/node1", "3-4", "accepted")
    out = result_of("lab/h/r1/node1", "ours", CAP, 3, T, [Answer("gpu1", 0, 5, "done")])
    (event,) = answer(out.payload)
    assert (out.topic, event.name) == (f"IT/v1/ours/Result/{CAP}/lab/h/r1/node1", "lab/h/r1/node1/gpu1")


@pytest.mark.parametrize(
    "change,why",
    [
        ({"v": 2}, "not a result"),
        ({"epoch": 4}, "to epoch 4; expected 3"),
        ({"epoch": 2}, "to epoch 2; expected 3"),
        ({"epoch": -1}, "not a result"),
        ({"epoch": 2**60}, "not a result"),
        ({"names": ["gpu0"]}, "unequal length"),
        ({"details": []}, "unequal length"),
        ({"names": ["gpu0", "gpu0"]}, "occurs twice"),
        ({"names": ["gpu0", "gpu2"]}, "is no gpu of lab/h/r1/node1"),
        ({"names": ["gpu0", "../node0/gpu0"]}, "is no gpu of"),
        ({"names": ["gpu0", ""]}, "is no gpu of"),
        ({"names": ["gpu0", "x" * 65]}, "not a result"),
        ({"states": ["done", "lost"]}, "not a result"),
        ({"commands": [1, -1]}, "not a result"),
        ({"commands": [1, 2**62]}, "not a result"),
        ({"generations": [0, 2**31]}, "not a result"),
        ({"details": ["", "x" * 501]}, "detail of 501"),
        ({"from": "lab/h/r1/node0"}, "claims to be 'lab/h/r1/node0'"),
        ({"names": [f"gpu{i}" for i in range(5000)]}, "not a result"),
    ],
)
def test_answers_that_are_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(BadMessage, match=why) as caught:
        answer(RESULT | change)
    assert len(str(caught.value)) < 600


def test_answers_from_places_and_for_controls_that_are_none() -> None:
    for path in ("lab/h/r9/node0", "lab/h", "", "x" * 9999, "lab/h/r1/node1/gpu0"):
        with pytest.raises(BadMessage, match=r"not a rack or node of this site|not a control|unequal"):
            answer(RESULT, path)
    for control in ("nonsense", "job.power_cap_w", "cdu.supply_temp_target_c"):
        with pytest.raises(BadMessage, match="not a control of a rack, node or GPU"):
            answer(RESULT, control=control)
    with pytest.raises(BadMessage, match="bytes of result"):
        answer(b" " * 3 * 2**20)
    decoder = ResultDecoder(SITE, "ours")
    for topic in ("", "IT/v1/ours/Request/x/lab", "IT/v1/other/Result/gpu.power_cap_w/lab/h/r1/node0", "a/b"):
        assert isinstance(decoder.decode(Message(T, topic, b"{}")), Ignored)


def test_an_agent_whose_clock_is_behind_is_online_once_it_says_so_after_its_will() -> None:
    decoder, behind_ns, node = ResultDecoder(SITE), 3600 * NS, "lab/h/r1/node1"

    def told(state: str, t_ns: int) -> Reading:
        out = status_of(node, state, t_ns - behind_ns, 3, "none")
        (reading,) = decoder.decode(Message(t_ns, out.topic, out.payload))  # type: ignore[misc]
        assert isinstance(reading, Reading)
        return reading

    assert told("online", T).t_ns == T - behind_ns  # it may be retained, and as old as that
    gone = told("offline", T + NS)
    back = told("online", T + 2 * NS)
    assert gone.t_ns < back.t_ns == T + 2 * NS, "what comes later is no older"
    assert told("online", T + 62 * NS).t_ns == T + 62 * NS, "nor does it grow stale"
    retained = status_of(node, "online", T + 62 * NS - behind_ns, 3, "none")  # heard again a minute later
    (again,) = decoder.decode(Message(T + 122 * NS, retained.topic, retained.payload))  # type: ignore[misc]
    assert isinstance(again, Reading)
    assert again.t_ns == T + 62 * NS


def test_the_state_of_an_agent_is_a_reading() -> None:
    decoder = ResultDecoder(SITE)
    out = status_of("lab/h/r1/node1", "online", T - NS, 3, "armed")
    assert out.retain
    assert decoder.decode(Message(T, out.topic, out.payload)) == [
        Reading("node", 1, "agent_state", 0.0, T - NS)
    ]
    gone = status_of("lab/h/r1/node1", "offline", T - 10**6 * NS, 3, "none")  # a will of long ago
    assert decoder.decode(Message(T, gone.topic, gone.payload)) == [Reading("node", 1, "agent_state", 1.0, T)]
    ahead = status_of("lab/h/r1/node1", "online", T + NS, 3, "none")
    (reading,) = decoder.decode(Message(T, ahead.topic, ahead.payload))
    assert isinstance(reading, Reading)
    assert reading.t_ns == T
    assert isinstance(decoder.decode(Message(T, AGENT + "lab/h/r9/node0", out.payload)), Ignored)
    assert isinstance(decoder.decode(Message(T, out.topic, b"")), Ignored)
    for bad in (
        b"{}",
        b"[" * 9999,
        b'{"state":"dead","t_ns":1}',
        b'{"state":"online","t_ns":-1}',
        b" " * 20_000,
    ):
        with pytest.raises(BadMessage):
            decoder.decode(Message(T, out.topic, bad))
    with pytest.raises(BadMessage, match="claims to be"):
        decoder.decode(Message(T, AGENT + "lab/h/r1/node0", out.payload))


def test_mutilated_answers_are_read_or_refused() -> None:
    dice, read, longest = random.Random(3), 0, 0
    odd: list[Any] = [None, -1, 2**70, 1.5, "", "x" * 5000, [], {}, [None], [[]], True]
    for _ in range(5000):
        body = dict(RESULT)
        for _ in range(dice.randint(0, 2)):
            body[dice.choice(list(body))] = dice.choice(odd)
        payload = msgspec.json.encode(body) if not any(v == 2**70 for v in body.values()) else b'{"v":1'
        if dice.random() < 0.3:
            at = dice.randrange(len(payload))
            payload = payload[:at] + dice.randbytes(2) + payload[at + 1 :]
        try:
            answer(payload)
            read += 1
        except BadMessage as error:
            longest = max(longest, len(str(error)))
    assert 500 < read < 4500
    assert 0 < longest < 600


def test_presence() -> None:
    topic, payload = presence_of("ours", "d1", "online", "leader", 4, T)
    assert topic == "IT/v1/ours/Daemon/d1"
    assert msgspec.json.decode(payload)["role"] == "leader"


class Wire:
    """Takes publications; refuses those whose topic has `denied` in it."""

    def __init__(self, denied: str = "nothing") -> None:
        self.said: list[tuple[str, bytes, int, bool]] = []
        self.denied = denied

    async def publish(self, topic: str, payload: bytes, qos: int = 0, retain: bool = False) -> None:
        await asyncio.sleep(0)
        if self.denied in topic:
            raise ConnectorError(f"not connected, so {topic} was not published")
        self.said.append((topic, payload, qos, retain))


def test_the_sink_of_agents_publishes_each_rack_once_acknowledged_and_never_retained() -> None:
    wire = Wire()
    sink = MqttSink(SITE, "ours", wire.publish)
    assert (sink.controls, sink.enforces_safe) == ((CAP, LOCK, "node.power_cap_w", "node.power_state"), True)
    other = batch([0], "node.service_level", value=np.array([1.0]))
    asyncio.run(sink.apply((batch([0, 3, 6]), other)))
    assert [(t[-6:], q, r) for t, _, q, r in wire.said] == [("b/h/r1", 1, False), ("b/h/r2", 1, False)]
    assert sink.sent == 3


def test_what_cannot_be_sent_is_an_error_after_the_rest_was_sent() -> None:
    wire = Wire("r1")
    with pytest.raises(ActuationError, match="agents: not connected"):
        asyncio.run(MqttSink(SITE, "ours", wire.publish).apply((batch([0, 3, 6]),)))
    assert len(wire.said) == 1
    nan = MqttSink(SITE, "ours", wire.publish, lapse=lambda b: np.full(10, np.nan))
    with pytest.raises(ActuationError, match="no safe value"):
        asyncio.run(nan.apply((batch([6]),)))


def announce(decoder: BmsDecoder, key: str, body: dict[str, Any]) -> None:
    kind, point, _ = key.split("/", 2)
    payload = msgspec.json.encode({"objectType": kind, "pointType": point} | body)
    decoder.decode(Message(T, PUB_METADATA + key, payload))


def a_bms() -> BmsDecoder:
    decoder = BmsDecoder(SITE, ours=("ours",))
    supply = {
        "engUnit": "C",
        "objectId": "cdu1",
        "processArea": ["Secondary", "Supply"],
        "integration": "ours",
    }
    announce(decoder, "CDU/LiquidTemperatureSpRequest/x/cdu1", supply)
    texts = [{"value": 0, "text": "NoIsolateRequest"}, {"value": 1, "text": "IsolateRequest"}]
    announce(decoder, "Rack/RackLiquidIsolationRequest/x/r1",
             {"stateText": texts, "rackLocationId": "r1", "integration": "ours"})  # fmt: skip
    announce(decoder, "Rack/RackElectricalIsolationRequest/x/r1",
             {"stateText": texts, "rackLocationId": "r1", "integration": "theirs"})  # fmt: skip
    return decoder


def test_the_sink_of_the_bms_writes_on_our_points_only() -> None:
    wire = Wire()
    sink = BmsSink(SITE, a_bms(), "ours", wire.publish)
    assert not sink.enforces_safe
    setpoint = batch([0], "cdu.supply_temp_target_c", value=np.array([31.5]))
    valves = batch([0], "rack.liquid_isolation", value=np.array([1.0]))
    asyncio.run(sink.apply((setpoint, valves)))
    assert [(t, msgspec.json.decode(p)) for t, p, _, _ in wire.said] == [
        (
            "BMS/v1/ours/Value/CDU/LiquidTemperatureSpRequest/x/cdu1",
            {"value": 31.5, "timestamp": T // 10**6, "quality": 1},
        ),
        (
            "BMS/v1/ours/Value/Rack/RackLiquidIsolationRequest/x/r1",
            {"value": 1.0, "timestamp": T // 10**6, "quality": 1},
        ),
    ]
    power = batch([0, 1], "rack.electrical_isolation", value=np.array([1.0, 1.0]))
    with pytest.raises(ActuationError, match=r"bms: lab/h/r1: .*no point announced.*and 1 more"):
        asyncio.run(sink.apply((power, setpoint)))
    assert len(wire.said) == 3


def system(point: str, tag: str = "x", **body: Any) -> Message:
    payload = msgspec.json.encode({"objectType": "System", "pointType": point} | body)
    return Message(T, f"{PUB_METADATA}System/{point}/{tag}", payload)


def test_the_heartbeat_beats_every_ten_seconds_on_our_points() -> None:
    wire = Wire()
    sink = BmsSink(SITE, a_bms(), "ours", wire.publish)
    assert asyncio.run(sink.beat(T)) == 0
    sink.pulse.receive(system("HeartbeatTimestampIntegration", integration="ours", objectId="ours"))
    sink.pulse.receive(system("HeartbeatEchoIntegration", integration="ours", objectId="BMS"))
    sink.pulse.receive(system("HeartbeatTimestampIntegration", "y", integration="theirs", objectId="theirs"))
    assert asyncio.run(sink.beat(T + 9 * NS)) == 0
    assert asyncio.run(sink.beat(T + 10 * NS)) == 1
    (topic, payload, _, retain) = wire.said[0]
    assert (topic, retain) == ("BMS/v1/ours/Value/System/HeartbeatTimestampIntegration/x", False)
    ms = (T + 10 * NS) // 10**6
    assert msgspec.json.decode(payload) == {"value": ms, "timestamp": ms, "quality": 1}
    value = msgspec.json.encode({"value": 123.0, "timestamp": 5, "quality": 1})
    sink.pulse.receive(Message(T, f"{PUB_VALUE}System/HeartbeatTimestampBms/b", value))
    wire.said.clear()
    assert asyncio.run(sink.beat(T + 20 * NS)) == 2
    assert msgspec.json.decode(wire.said[1][1])["value"] == 123.0
    sink.pulse.receive(Message(T, f"{PUB_METADATA}System/HeartbeatEchoIntegration/x", b""))
    assert asyncio.run(sink.beat(T + 30 * NS)) == 1
    wire.denied = "BMS"
    with pytest.raises(ActuationError, match="not connected"):
        asyncio.run(sink.beat(T + 40 * NS))


@pytest.mark.parametrize(
    "payload", [b"{", b"[" * 9999, b"5", b" " * 70_000, b'{"objectType":"Rack","pointType":"x"}']
)
def test_heartbeats_that_are_none(payload: bytes) -> None:
    pulse = Heartbeat("ours")
    for kind in ("Metadata/System/HeartbeatTimestampIntegration", "Value/System/HeartbeatTimestampBms"):
        with pytest.raises(BadMessage):
            pulse.receive(Message(T, f"BMS/v1/PUB/{kind}/x", payload))
    assert isinstance(pulse.receive(Message(T, "BMS/v1/PUB/Value/System/Status/x", payload)), Ignored)
    for i in range(200):
        pulse.receive(system("HeartbeatTimestampIntegration", f"x{i}", integration="ours"))
    assert len(pulse.due(T)) == 64
