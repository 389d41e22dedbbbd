"""DSX Flex in the daemon: what is seen of feeds, who is hinted at, what is published and what waits; and what
the section `power` of a configuration may say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from connectors.dsx import BREACH, FlexDecoder, FlexPublication, KeySet
from connectors.dsx.flex_wire import STATUS
from tests.support.builders import two_racks
from tests.support.flex_messages import (
    CORRELATION,
    TRACE,
    check_event,
    contract,
    envelope,
    key,
    key_set,
    message,
    signer,
    target,
)
from tests.support.powered_plant import Loop
from twin.catalogue import ConfigError, ConnectorError
from twin.config import Loaded, load_config, power_notes
from twin.site import Site
from twin.telemetry import Ignored, JobKind, JobStarted, LoadTargetSet
from twin.wiring import GridInterface, make_grid_interface, power_faults
from twin.wiring.flex import Feeds, FlexIdentity, FlexPublisher

FEEDS = {"main-a": "lab/h/a", "main-b": "lab/h/b", "all": ""}


class Broker:
    """A broker that records publications, and refuses them while it is `down`."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, Any], int]] = []
        self.down = False

    async def publish(self, topic: str, payload: bytes, qos: int) -> None:
        if self.down:
            raise ConnectorError("broker: not connected")
        self.got.append((topic, json.loads(payload), qos))


class Desk:
    """A loop of plant and engine with a publisher beside it."""

    def __init__(self, **more: Any) -> None:
        self.loop, self.broker, self.leads = Loop(two_racks(), []), Broker(), True
        self.feeds = Feeds(FEEDS, lambda: self.loop.twin.engine)
        identity = FlexIdentity(identifier="us", **more)
        self.publisher = FlexPublisher(
            identity, self.feeds, lambda: self.leads, lambda _: (TRACE, "a=b"), lambda: self.loop.twin.now_ns
        )

    def look(self, *events: Any, seconds: int = 1) -> list[str]:
        """Return the topics published after these events and so many seconds."""
        first = len(self.broker.got)
        for _ in range(seconds):
            self.loop.tick(*events)
            events = ()
            asyncio.run(self.publisher.publish_due(self.broker.publish))
        return [t.rpartition("us/")[2] for t, _, _ in self.broker.got[first:]]

    @property
    def last(self) -> dict[str, Any]:
        found: dict[str, Any] = self.broker.got[-1][1]
        return found


def aim(limit_w: float, tag: str = "main-a", **more: Any) -> LoadTargetSet:
    feeders = (FEEDS[tag],) if FEEDS[tag] else ()
    return LoadTargetSet(author="//grid/v1/isv/acme", target=f"{CORRELATION}/{tag}", limit_w=limit_w,
                         feeders=feeders, kind="flex", **more)  # fmt: skip


@pytest.mark.long
def test_feeds_are_seen_as_the_plant_is() -> None:
    desk = Desk()
    desk.loop.run(3)
    seen = desk.feeds.current()
    assert seen["main-a"].load_w == pytest.approx(desk.loop.feeder_w[0], rel=1e-6)
    assert seen["all"].load_w == pytest.approx(desk.loop.rack_w.sum(), rel=1e-6)
    assert seen["main-a"].maximum_w == 300_000  # its budget
    for feed in seen.values():
        assert 0 < feed.minimum_w < feed.maximum_w
    desk.loop.silent = {"feeder.power_w", "rack.power_w", "gpu.power_w"}
    desk.loop.run(400)
    assert all(np.isnan(feed.load_w) for tag, feed in desk.feeds.current().items() if tag != "all")


def test_targets_of_others_are_not_shown() -> None:
    desk = Desk()
    desk.loop.tick(aim(2e5), aim(1e6, "all"), LoadTargetSet(author="op", target="mine", limit_w=1.0))
    seen = desk.feeds.current()
    assert [[t.limit_w for t in seen[tag].targets] for tag in FEEDS] == [[2e5], [], [1e6]]
    assert seen["main-a"].targets[0].correlation == CORRELATION


def test_hints_begin_with_whom_the_policies_cut_first() -> None:
    desk = Desk()
    desk.loop.wants_w[:] = 1000.0
    kinds: list[tuple[JobKind, int]] = [("inference", 0), ("training", 5), ("training", 0)]
    jobs = [
        JobStarted(id=f"s{n}", job=f"j{n}", nodes=(f"lab/h/r1/node{n}",), kind=kind, priority=priority)
        for n, (kind, priority) in enumerate(kinds)
    ]
    desk.loop.tick(*jobs)
    desk.loop.run(3)
    hints = desk.feeds.hints("main-a", 1e9)
    by_node = {h.node: h.priority for h in hints}
    assert [by_node[f"lab/h/r1/node{n}"] for n in range(4)] == [4, 3, 2, 1]
    priorities = [h.priority for h in hints]
    assert priorities == sorted(priorities)
    assert len(hints) == desk.loop.site.sizes["node"]
    # Just as many as it takes: one node of four GPUs from 1000 W to their floor, half of it on this feeder
    low_w = float(desk.loop.site.envelopes["gpu.power_cap_w"].low[0])
    worth_w = 0.5 * 4 * (1000.0 - low_w)
    assert len(desk.feeds.hints("main-a", 2.2 * worth_w)) == 3
    assert len(desk.feeds.hints("all", 2.2 * worth_w)) == 2
    assert all(h.target_w > 0 for h in hints)


def test_a_target_from_set_to_breach_keeps_the_contract(recording: Callable[[str], Path]) -> None:
    tree, desk = contract(recording("dsx-bms-capture")), Desk()
    desk.loop.wants_w[:] = 800.0
    assert desk.look(seconds=3) == ["powerstate/status"]
    load_w = float(desk.loop.feeder_w[0])
    assert desk.look(aim(0.7 * load_w)) == ["powerstate/status"] * 2  # target_set, start_ramp_down
    assert desk.last["data"]["feeds"]["main-a"]["event"] == "start_ramp_down"
    first = desk.broker.got[-2][1]
    assert (first["correlationid"], first["tracestate"]) == (CORRELATION, "a=b")
    assert first["traceparent"].split("-")[1] == TRACE.split("-")[1]
    assert "powerbreach" in desk.look(seconds=20)
    assert (desk.last["data"]["status"], desk.last["data"]["severity"]) == ("active", "critical")
    assert desk.last["data"]["shed_hints"]
    desk.loop.wants_w[:] = 300.0
    desk.look(seconds=10)
    assert desk.last["data"]["status"] == "resolved"
    for topic, event, qos in desk.broker.got:
        breach = topic.endswith("powerbreach")
        check_event(tree, "PowerBreachAlertEvent" if breach else "PowerStateStatusEvent", event)
        assert event["source"] == "//grid/v1/dsx-flex-agent/us"
        assert qos == (2 if breach else 1)


def test_what_is_signed_can_be_verified_and_has_the_contracts_form(recording: Callable[[str], Path]) -> None:
    tree, desk = contract(recording("dsx-bms-capture")), Desk(signer=signer("us", "RSA"))
    desk.look()
    check_event(tree, "PowerStateStatusEvent", desk.last)
    keys = KeySet(key_set(key("us", "RSA").as_dict(private=False)), "k")
    data = json.loads(keys.verify(desk.last["data"], "anyone").payload)
    assert set(data["feeds"]) == set(FEEDS)


def test_a_standby_says_nothing() -> None:
    desk = Desk()
    desk.leads = False
    assert desk.look(aim(1.0), seconds=30) == []
    desk.leads = True
    assert desk.look() == ["powerstate/status"]


def test_a_breach_waits_for_the_link_and_states_do_not() -> None:
    desk = Desk()
    desk.loop.wants_w[:] = 800.0
    desk.look(seconds=2)
    desk.broker.down = True
    desk.look(aim(5e4), seconds=30)
    assert "not connected" in desk.publisher.fault
    assert GridInterface(publisher=desk.publisher).wrong()["outside/dsx-flex"][2] == desk.publisher.fault
    desk.broker.down = False
    assert desk.look()[0] == "powerbreach"
    assert (desk.publisher.fault, desk.publisher.counts["lost"]) == ("", 0)
    desk.publisher._waiting.extend([FlexPublication(BREACH, {}), FlexPublication(STATUS, {})] * 300)
    desk.broker.down = True
    desk.look()
    assert len(desk.publisher._waiting) == 200
    assert desk.publisher.counts["lost"] == 100


CONFIG: dict[str, Any] = {
    "site": "site.yaml", "broker": "embedded",
    "power": {"flex": {"identifier": "us", "feeds": {"main-a": "a", "all": "site"}, "keys_file": "isv.jwks",
                       "sign_key_file": "own.pem"},
              "targets_file": "targets.yaml", "outlooks_files": {"site.grid_price_usd_per_kwh": "price.csv"}},
}  # fmt: skip


def folder_of(path: Path, flex: dict[str, Any] | None = None, **power: Any) -> Loaded:
    """A configuration with all its files; None takes a key away."""
    tree = json.loads(json.dumps(CONFIG))
    tree["power"] = tree["power"] | power
    tree["power"]["flex"] = {k: v for k, v in (tree["power"]["flex"] | (flex or {})).items() if v is not None}
    (path / "racktwin.yaml").write_text(yaml.safe_dump(tree))
    (path / "isv.jwks").write_bytes(key_set())
    (path / "own.pem").write_bytes(key("us", "RSA").as_pem(private=True))
    (path / "own.pem").chmod(0o600)
    (path / "targets.yaml").write_text("targets: []\n")
    (path / "price.csv").write_text("time,value\n")
    return load_config(path / "racktwin.yaml")


def test_a_configuration_that_is_right(tmp_path: Path) -> None:
    loaded, desk = folder_of(tmp_path), Desk()
    assert power_faults(loaded, desk.loop.site) == []
    assert power_notes(loaded.config.power) == []
    outside = make_grid_interface(loaded, desk.loop.site, lambda: desk.loop.twin.engine, lambda: True)
    assert [s.name for s in outside.sources] == [
        "targets-file", "outlook-site.grid_price_usd_per_kwh", "dsx-flex"]  # fmt: skip
    assert isinstance(outside.decoder, FlexDecoder)
    assert outside.decoder.feeds == {"main-a": "lab/h/a", "all": ""}
    got = outside.decoder.decode(message(envelope(target(300, "main-a"))))
    assert not isinstance(got, Ignored)
    assert set(outside.counts) == {"dsx-flex-in", "dsx-flex-out"}
    loose = folder_of(tmp_path, {"keys_file": None, "unsigned": "accept", "sign_key_file": None})
    assert len(power_notes(loose.config.power)) == 2


def test_keys_are_read_again_when_they_change(tmp_path: Path) -> None:
    from tests.support.inlets import RecordingInlet
    from twin.wiring.grid import KeysSource

    loaded, desk = folder_of(tmp_path), Desk()
    outside = make_grid_interface(loaded, desk.loop.site, lambda: desk.loop.twin.engine, lambda: True)
    source, taken, decoder = outside.sources[-1], RecordingInlet(), outside.decoder
    assert isinstance(source, KeysSource)
    assert decoder is not None

    def look() -> None:
        for _ in range(2):
            asyncio.run(source.check(taken))  # type: ignore[arg-type]

    (tmp_path / "isv.jwks").write_bytes(key_set(key("k2").as_dict(private=False)))
    look()
    decoder.decode(message(envelope(target(300, "main-a"), by=signer("k2"))))
    (tmp_path / "isv.jwks").write_text("{")
    look()
    assert "is not JSON" in outside.wrong()["outside/key file of DSX Flex"][2]
    decoder.decode(message(envelope(target(299, "main-a"), by=signer("k2")), 1))  # the old keys hold
    decoder.decode(message(envelope(target(298, "main-a", "main-x"), by=signer("k2")), 2))
    look()
    assert any("no feed 'main-x'" in why for why in taken.faults)


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"identifier": "a/b"}, {}, "$.power.flex.identifier: 'a/b': expected a level of a topic"),
    ({"isvs": ["x y"]}, {}, "$.power.flex.isvs: 'x y'"),
    ({"feeds": {}}, {}, "$.power.flex.feeds: expected 1 to 200"),
    ({"feeds": {"a/b": "a"}}, {}, "tag 'a/b'"),
    ({"keys_file": None}, {}, "$.power.flex.keys_file: missing"),
    ({"heartbeat_s": 0}, {}, "$.power.flex.heartbeat_s: expected a number from 1 to 3600"),
    ({"last_resort": ["PANIC"]}, {}, "last_resort"),
    ({"unsigned": "maybe"}, {}, "unsigned"),
    ({"colour": 1}, {}, "colour"),
    ({}, {"look_s": 0}, "$.power.look_s"),
    ({}, {"outlooks_files": {"rack.power_w": "x"}}, "expected a quantity of the site"),
    ({}, {"outlooks_files": {"site.colour": "x"}}, "expected a quantity of the site"),
]


@pytest.mark.parametrize("flex, power, words", WRONG)
def test_a_section_that_is_wrong(tmp_path: Path, flex: Any, power: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        folder_of(tmp_path, flex, **power)
    assert words in "; ".join(caught.value.problems)


def test_files_that_are_wrong_are_told_by_the_check(tmp_path: Path) -> None:
    loaded = folder_of(tmp_path, {"feeds": {"main-a": "nowhere"}})
    site: Site = Desk().loop.site
    (tmp_path / "isv.jwks").write_text("{}")
    (tmp_path / "own.pem").write_text("x")
    (tmp_path / "targets.yaml").write_text("x")
    (tmp_path / "price.csv").unlink()
    faults = power_faults(loaded, site)
    assert len(faults) == 5
    for words in ("no feeder 'nowhere'", "expected a key set", "expected a private key", "ends within a line",
                  "is not there"):  # fmt: skip
        assert any(words in f for f in faults), words
    with pytest.raises(ConfigError, match="no feeder"):
        make_grid_interface(loaded, site, lambda: Desk().loop.twin.engine, lambda: True)
