"""Routing of a topic to its decoder, by MQTT's own rules of matching."""

from __future__ import annotations

from typing import Any, Self

import msgspec
import pytest

from connectors.agents import encode_json
from connectors.mqtt import Router, extra_route, matcher
from tests.support.builders import eight_nodes, site_of
from tests.support.inlets import RecordingInlet
from twin.catalogue import BadMessage, ConfigError
from twin.site import Site
from twin.telemetry import Block, CommandAcked, Ignored, Message, Reading

T = 1_790_000_000_000_000_000
NODE = "lab/h/r1/node3"


@pytest.fixture(scope="module")
def site() -> Site:
    return site_of(eight_nodes())


@pytest.mark.parametrize(
    "topic_filter, matching, others",
    [
        ("a/b", ["a/b"], ["a", "a/b/c", "a/bb", "A/b"]),
        ("a/#", ["a", "a/", "a/b", "a/b/c"], ["ab", "b/a", "$a/b"]),
        ("#", ["a", "a/b", "/"], ["$SYS/broker"]),
        ("+/b", ["a/b", "/b"], ["a/b/c", "b", "$SYS/b"]),
        ("a/+", ["a/b", "a/"], ["a", "a/b/c"]),
        ("a/+/c/#", ["a/b/c", "a/b/c/d", "a//c"], ["a/c", "a/b/d/c"]),
        ("$SYS/#", ["$SYS/x"], ["SYS/x"]),
        ("+/+/#", ["a/b", "a/b/c"], ["a"]),
    ],
)
def test_filters_match_as_mqtt_says(topic_filter: str, matching: list[str], others: list[str]) -> None:
    fits = matcher(topic_filter)
    assert [t for t in (*matching, *others) if fits(t)] == matching


@pytest.mark.parametrize("topic_filter", ["", "a/#/b", "a#", "a/b+", "#a", "a\0", "x" * 70_000])
def test_what_is_no_filter_is_refused(topic_filter: str) -> None:
    with pytest.raises(ConfigError, match="expected an MQTT filter"):
        matcher(topic_filter)


def ask(router: Router, topic: str, payload: bytes) -> Any:
    got = router.decode(Message(T, topic, payload))
    return got if isinstance(got, Ignored) else list(got)


def test_each_tree_has_its_decoder(site: Site) -> None:
    router = Router(site, integration="ours", extra=(extra_route("plant/+/lines"),))
    (block,) = ask(router, f"IT/v1/PUB/Frame/{NODE}", encode_json(T, {"power_w": [1.0]}))
    assert isinstance(block, Block)
    (state,) = ask(router, f"IT/v1/PUB/Agent/{NODE}", b'{"state":"online","t_ns":%d}' % T)
    assert isinstance(state, Reading)
    assert (state.table, state.entity, state.signal) == ("node", 3, "agent_state")
    answer = {"v": 1, "epoch": 3, "t_ns": T, "names": ["gpu0"], "generations": [0], "commands": [17],
              "states": ["done"], "details": [""]}  # fmt: skip
    topic = f"Result/gpu.power_cap_w/{NODE}"
    (acked,) = ask(router, f"IT/v1/ours/{topic}", msgspec.json.encode(answer))
    assert isinstance(acked, CommandAcked)
    assert (acked.command, acked.name) == ("3-17", f"{NODE}/gpu0")
    assert isinstance(ask(router, f"IT/v1/theirs/{topic}", msgspec.json.encode(answer)), Ignored)
    line = b"nvidia_smi,host=lab/h/r1/node3,index=0 power_draw=321 %d" % T
    for topic in ("telegraf/node3/nvidia_smi", "plant/7/lines"):
        (reading,) = ask(router, topic, line)
        assert isinstance(reading, Reading)
        assert (reading.table, reading.entity, reading.value) == ("gpu", 3, 321.0)
    with pytest.raises(BadMessage):
        router.decode(Message(T, "spBv1.0/g/NBIRTH/edge", b"\xff\xff"))
    assert ask(router, "IT/v1/ours/Canary/racktwin", b"1") == Ignored(
        "own", "a request, a canary or the presence of a daemon"
    )
    assert isinstance(ask(router, "BMS/v1/PUB/Value/Rack/RackPower/x", b"{}"), Ignored)
    for topic in ("plant/7", "other", "IT/v2/x"):
        assert ask(router, topic, b"") == Ignored(
            "topic", "no route: neither BMS/v1/, IT/v1/ nor a topic of the configuration"
        )


def test_a_configuration_cannot_take_a_tree_away_from_its_decoder(site: Site) -> None:
    router = Router(site, extra=(extra_route("#"),))
    (block,) = ask(router, f"IT/v1/PUB/Frame/{NODE}", encode_json(T, {"power_w": [1.0]}))
    assert isinstance(block, Block)


def test_extra_topics_have_a_mapping_that_is_checked_before_use(site: Site, tmp_path: object) -> None:
    assert extra_route("spBv1.0/plant/#").form == "sparkplug"
    assert extra_route("x/#").form == "line"
    Router(site).load()
    with pytest.raises(ConfigError, match="no-such"):
        Router(site, extra=(extra_route("x/#", "no-such.yaml"),)).load()


def test_faults_inside_messages_are_told_once(site: Site) -> None:
    router = Router(site)
    ask(router, "telegraf/x", b"nvidia_smi,host=lab/h/r1/node3,index=0 power_draw=321 %d\nno line\n" % T)
    assert sum(count for _, count in router.faults()) == 1
    assert router.faults() == []


def test_metadata_that_is_read_otherwise_than_it_stands_is_told_once(site: Site) -> None:
    router = Router(site)
    assert router.notes() == []
    meta = {"objectType": "CDU", "pointType": "LiquidTemperature", "objectId": "c1", "processArea": ["Suply"]}
    for _ in range(2):
        ask(router, "BMS/v1/PUB/Metadata/CDU/LiquidTemperature/x", msgspec.json.encode(meta))
    assert router.notes() == ["process area 'Suply' read as 'Supply'"]
    assert router.notes() == []


def test_a_daemon_is_no_source_of_telemetry(site: Site) -> None:
    class Sources(RecordingInlet):
        def of(self, source: str, outside: bool = False) -> Self:
            named.append(source)
            return self

    named: list[str] = []
    router = Router(site, ours=("ours",))
    for topic in ("IT/v1/ours/Canary/racktwin", "BMS/v1/ours/Value/System/HeartbeatEchoIntegration/lab/ours"):
        assert router.take(Sources(), Message(T, topic, b"1")) == "ignored"
    assert named == []
    assert router.take(Sources(), Message(T, "BMS/v1/PUB/Value/Rack/RackPower/x", b"{}")) == "ignored"
    assert named == ["BMS gateway PUB"]
