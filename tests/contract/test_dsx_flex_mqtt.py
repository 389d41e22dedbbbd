"""DSX Flex between an ISV and a real daemon, over a real Mosquitto: from a signed load target to the power
state that echoes it, to a breach, through a restart of the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connectors.agents import encode_json
from connectors.dsx import PUB_VALUE, KeySet
from connectors.dsx.flex_wire import text_of
from connectors.mqtt import LinkSettings, MqttLink
from tests.support.builders import site_of, two_racks
from tests.support.daemon_process import RunningDaemon, running
from tests.support.flex_messages import check_event, contract, envelope, key, key_set, signer, target
from tests.support.inlets import until
from tests.support.mosquitto import Mosquitto, mosquitto
from twin.simulation.plant_wire import PlantWire
from twin.telemetry import Message

AGENT = "grid/v1/dsx-flex-agent/us"
SET = "grid/v1/isv/acme/loadtarget/set"
NODES = [f"lab/h/r{r}/node{n}" for r in (1, 2) for n in range(18)]


class Isv:
    """An ISV that sets targets and hears power states; agents of all nodes beside it."""

    def __init__(self, broker: Mosquitto, keys: KeySet) -> None:
        self.keys = keys
        self.got: list[tuple[str, dict[str, Any], dict[str, Any]]] = []  # topic, envelope, data
        self.link = MqttLink(
            LinkSettings("127.0.0.1", broker.port, "isv", persistent=False), ((f"{AGENT}/#", 1),)
        )
        self.gpu_w = 900.0

    def take(self, message: Message) -> None:
        event = json.loads(message.payload)
        data = json.loads(self.keys.verify(event["data"], "us").payload)
        self.got.append((message.topic.rpartition("us/")[2], event, data))

    async def set(self, *targets: dict[str, Any], **change: Any) -> None:
        event = envelope(*targets, time=text_of(time.time_ns()), **change)
        await self.link.publish(SET, json.dumps(event).encode(), qos=1)

    async def feed(self) -> None:
        """Publish as agents and building do, once a second: half of all racks' watts on each feeder."""
        wire = PlantWire(site_of(two_racks()))
        for message in wire.metadata(time.time_ns()):
            await self.link.publish(message.topic, message.payload, qos=1, retain=True)
        while True:
            now_ns = time.time_ns()
            for node in NODES:
                payload = encode_json(now_ns, {"power_w": [self.gpu_w] * 4})
                await self.link.publish(f"IT/v1/PUB/Frame/{node}", payload)
            for signal in ("rack.power_w", "feeder.power_w"):
                for point in wire._points[signal]:
                    value = {"value": self.gpu_w * 0.1, "timestamp": now_ns // 10**6, "quality": 1}
                    await self.link.publish(PUB_VALUE + point.topic, json.dumps(value).encode())
            await asyncio.sleep(1.0)

    def states(self, feed: str) -> list[dict[str, Any]]:
        return [data["feeds"][feed] for topic, _, data in self.got if topic == "powerstate/status"]

    def changes(self, feed: str) -> list[str]:
        return [s["event"] for s in self.states(feed) if s["event"] != "periodic"]


def held(daemon: RunningDaemon) -> dict[str, float]:
    return {t["name"]: t["limit_w"] for t in daemon.get("/api/v1/load-targets")["targets"]}


def counts(daemon: RunningDaemon) -> dict[str, int]:
    found: dict[str, int] = daemon.get("/api/v1/messages")["messages"]["outside"]["dsx-flex-in"]
    return found


@pytest.mark.slow
def test_a_target_is_kept_and_echoed(
    server: Callable[..., Path], tmp_path: Path, recording: Callable[[str], Path]
) -> None:
    tree = contract(recording("dsx-bms-capture"))
    folder = tmp_path / "daemon"
    folder.mkdir()
    (folder / "isv.jwks").write_bytes(key_set(key().as_dict(private=False) | {"isv": "acme"}))
    (folder / "own.pem").write_bytes(key("us", "RSA").as_pem(private=True))
    (folder / "own.pem").chmod(0o600)
    own = key("us", "RSA").as_dict(private=False)
    own["kid"] = key("us", "RSA").thumbprint()
    flex = {"identifier": "us", "feeds": {"main-a": "a", "main-b": "b"}, "keys_file": "isv.jwks",
            "sign_key_file": "own.pem", "heartbeat_s": 2.0}  # fmt: skip
    first, second = str(uuid.uuid4()), str(uuid.uuid4())

    async def play(broker: Mosquitto, daemon: RunningDaemon) -> None:
        isv = Isv(broker, KeySet(key_set(own), "own"))
        tasks = [asyncio.create_task(isv.link.run(isv.take, lambda *_: None))]
        try:
            await until(lambda: isv.link.connected, "a connection")
            tasks.append(asyncio.create_task(isv.feed()))
            await until(lambda: any(s["calculated_load"]["value"] == 90_000 and s["event"] == "periodic"
                                    for s in isv.states("main-a")), "a heartbeat with the load")  # fmt: skip
            load_w = isv.states("main-a")[-1]["calculated_load"]["value"]
            half = target(load_w / 2e3, "main-a")
            once = envelope(half, correlationid=first, time=text_of(time.time_ns()))
            for _ in range(3):  # delivered again and again
                await isv.link.publish(SET, json.dumps(once).encode(), qos=1)
            await until(lambda: held(daemon) == {f"{first}/main-a": load_w / 2}, "the target")
            events = ["target_set", "start_ramp_down"]
            await until(lambda: isv.changes("main-a") == events,
                        "its echo")  # fmt: skip
            echo = next(e for t, e, d in isv.got if t == "powerstate/status"
                        and d["feeds"]["main-a"]["event"] == "target_set")  # fmt: skip
            assert echo["correlationid"] == first
            # A forged, foreign or broken message changes nothing, and is reported
            await isv.set(target(1, "main-b"), by=signer("k9"))
            await isv.set(target(1, "main-c"))
            await isv.link.publish(SET, b"\xff{", qos=1)
            await isv.link.publish("grid/v1/isv/other/loadtarget/set", json.dumps(once).encode(), qos=1)
            await until(lambda: counts(daemon)["refused"] == 4, "refusals")
            assert counts(daemon)["again"] == 2
            assert list(held(daemon)) == [f"{first}/main-a"]
            # A daemon that is killed knows it all again; what is sent meanwhile waits in its session
            await asyncio.to_thread(daemon.kill)
            await isv.set(target(load_w / 1e3 * 0.8, "main-b"), correlationid=second)
            await asyncio.to_thread(daemon.start)
            await until(lambda: set(held(daemon)) == {f"{first}/main-a", f"{second}/main-b"}, "both targets")
            await isv.link.publish(SET, json.dumps(once).encode(), qos=1)
            await isv.set(target(None, "main-a"))
            await until(lambda: set(held(daemon)) == {f"{second}/main-b"}, "the removal")
            isv.gpu_w = 300.0
            await until(lambda: isv.states("main-b")[-1]["event"] == "periodic"
                        and isv.states("main-b")[-1]["compliant"], "a feed within its target")  # fmt: skip
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        for topic, event, data in isv.got:
            assert topic == "powerstate/status"
            check_event(tree, "PowerStateStatusEvent", event)
            check_event(tree, "PowerStateStatusData", data)

    with mosquitto(server, tmp_path) as broker:
        site = two_racks()
        with running(folder, broker.port, site=site, power={"flex": flex, "look_s": 0.2},
                     tick_s=0.5) as daemon:  # fmt: skip
            asyncio.run(play(broker, daemon))
            told = daemon.journal("event")
            assert {e["body"]["event"]["kind"] for e in told if e["body"]["event"].get("kind")} >= {"flex"}
