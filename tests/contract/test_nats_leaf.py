"""The leaf node beside a hall, with the configuration that ships: who may say what, MQTT, TLS and keys."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from connectors.agents import encode_json
from connectors.mqtt import LinkSettings, MqttLink, MqttSource, Router
from connectors.nats import NatsLink, NatsSettings, NKey, seed_of
from tests.support.builders import eight_nodes, site_of
from tests.support.inlets import RecordingInlet, until
from tests.support.nats_servers import DEPLOY, NatsFleet, nats_fleet, server_version
from tests.support.tls_peers import Papers, issue_papers
from twin.catalogue import ConnectorError
from twin.telemetry import Ignored, Message

pytestmark = pytest.mark.slow
Server = Callable[..., Path]
SUMMARY, BUDGET = "cpc.hall-a.v1.summary", "cpc.hall-a.v1.budget"
NODE = "lab/h/r1/node3"
CURRENT_S = 10.0  # in which a hub that returns has to hear and to be heard


class Run:
    """A link that is held up, and what it delivered."""

    def __init__(self, link: Any) -> None:
        self.link, self.got = link, list[Message]()

    async def keep(self) -> None:
        while True:
            with contextlib.suppress(ConnectorError):
                await self.link.run(self.got.append, lambda *_: None)
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def kept(*links: Any) -> AsyncIterator[list[Run]]:
    runs = [Run(link) for link in links]
    tasks = [asyncio.create_task(run.keep()) for run in runs]
    try:
        await until(lambda: all(link.connected for link in links), "links")
        yield runs
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def mqtt(fleet: NatsFleet, user: str, **more: Any) -> LinkSettings:
    words = {"racktwin": "CHANGE-BROKER", "agents": "CHANGE-AGENTS", "bms": "CHANGE-BMS"}
    port = fleet.mqtt_port["hall-a"]
    return LinkSettings("127.0.0.1", port, f"id-{user}", user, words.get(user, "CHANGE-DAEMON"), **more)


async def said_until(say: Callable[[], Awaitable[None]], holds: Callable[[], Any], what: str) -> None:
    """Say it again until it is heard: a leaf that is about to connect forwards nothing."""

    async def again() -> None:
        while True:
            with contextlib.suppress(ConnectorError):
                await say()
            await asyncio.sleep(0.1)

    task = asyncio.create_task(again())
    try:
        await until(holds, what)
    finally:
        task.cancel()


def denied(link: NatsLink, subject: str) -> bool:
    return subject.lower() in link.fault


def test_nobody_at_a_leaf_may_grant_or_speak_of_anything_but_its_summary(
    server: Server, tmp_path: Path
) -> None:
    async def play(fleet: NatsFleet) -> None:
        hub = NatsLink(fleet.daemon(), "cpc.*.v1.summary")
        hall, nosy = NatsLink(fleet.hall("hall-a"), BUDGET), NatsLink(fleet.hall("hall-a"), ">")
        async with kept(hub, hall, nosy) as (at_hub, at_hall, at_nosy):
            for subject in (BUDGET, "cpc.hall-b.v1.summary", "IT.v1.PUB.Frame.x", "$JS.API.INFO"):
                hall.fault = ""
                await hall.publish(subject, b"forbidden")
                await until(partial(denied, hall, subject), f"a refusal of {subject}")
            await until(lambda: '">"' in nosy.fault, "a refusal of the subscription to all")
            await said_until(lambda: hall.publish(SUMMARY, b"told"), lambda: at_hub.got, "a summary")
            await said_until(lambda: hub.publish(BUDGET, b"granted"), lambda: at_hall.got, "a budget")
            assert {m.payload for m in at_hall.got} == {b"granted"}
            assert {m.payload for m in at_hub.got} == {b"told"}
            assert not at_nosy.got
        for settings in (
            NatsSettings((fleet.leaf["hall-a"].url,)),
            NatsSettings((fleet.leaf["hall-a"].url,), username="agents", password="CHANGE-AGENTS"),
        ):
            with pytest.raises(ConnectorError, match="Authorization"):
                await NatsLink(settings).run(lambda _: None, lambda *_: None)
        with pytest.raises(ConnectorError):  # the daemon's account speaks no MQTT
            await MqttLink(mqtt(fleet, "hall")).run(lambda _: None, lambda *_: None)

    with nats_fleet(server, tmp_path, ("hall-a",)) as fleet:
        asyncio.run(play(fleet))


def test_publishers_over_mqtt_reach_the_hall_with_telemetry_alone(server: Server, tmp_path: Path) -> None:
    forbidden = {
        "agents": (
            "cpc/hall-a/v1/budget",
            "cpc/hall-a/v1/summary",
            "IT/v1/racktwin/Request/x",
            "BMS/v1/PUB/x",
        ),
        "bms": ("cpc/hall-a/v1/budget", "IT/v1/PUB/Frame/x", "BMS/v1/racktwin/Value/x"),
        "racktwin": ("cpc/hall-a/v1/budget", "IT/v1/PUB/Frame/x"),
    }

    async def play(fleet: NatsFleet) -> None:
        budgets = NatsLink(fleet.hall("hall-a"), BUDGET)
        listener = MqttLink(mqtt(fleet, "racktwin"), (("IT/v1/#", 1), ("BMS/v1/#", 1)))
        hub = NatsLink(fleet.daemon(), "cpc.*.v1.summary")
        users = [MqttLink(mqtt(fleet, user)) for user in ("agents", "bms")]
        async with kept(hub, budgets, listener, *users) as (at_hub, at_hall, heard, *_):
            links = {"agents": users[0], "bms": users[1], "racktwin": listener}
            for user, topics in forbidden.items():
                for topic in topics:
                    await links[user].publish(topic, b"forbidden", qos=1)
            for user, topic in (
                ("agents", "IT/v1/PUB/Frame/y"),
                ("bms", "BMS/v1/PUB/Value/y"),
                ("racktwin", "IT/v1/racktwin/Canary/y"),
            ):
                await links[user].publish(topic, b"allowed", qos=1)
            await until(lambda: len(heard.got) >= 3, "what is allowed")
            assert {m.payload for m in heard.got} == {b"allowed"}
            await said_until(lambda: hub.publish(BUDGET, b"granted"), lambda: at_hall.got, "a budget")
            assert {m.payload for m in at_hall.got} == {b"granted"}
            assert not at_hub.got, "telemetry stays in the hall"

    with nats_fleet(server, tmp_path, ("hall-a",)) as fleet:
        asyncio.run(play(fleet))


def test_a_hall_reads_its_telemetry_from_the_listener_of_its_leaf(server: Server, tmp_path: Path) -> None:
    """QoS 1 waits for a daemon that is away, what is retained comes again, after a kill of the server too."""
    has_dots = server_version(server("nats-server")) >= (2, 10)
    topics = ("telegraf/#", "spBv1.0/#") if has_dots else ("telegraf/#",)

    async def play(fleet: NatsFleet) -> None:
        inlet, router = RecordingInlet(), Router(site_of(eight_nodes()))
        metadata = list[Message]()

        def noted(message: Message) -> Ignored:
            metadata.append(message)
            return Ignored("metadata", "for this test")

        router.attach("BMS/v1/PUB/Metadata/", noted)
        agent, bms = MqttLink(mqtt(fleet, "agents")), MqttLink(mqtt(fleet, "bms"))
        source = MqttSource(mqtt(fleet, "racktwin"), router, topics=topics)

        async def listen() -> None:
            while True:
                with contextlib.suppress(ConnectorError):
                    await source.run(inlet)
                await asyncio.sleep(0.05)

        def frame() -> bytes:
            return encode_json(time.time_ns(), {"power_w": [1.0]})

        async with kept(agent, bms):
            task = asyncio.create_task(listen())
            await until(lambda: source.link.connected, "the source")
            await bms.publish("BMS/v1/PUB/Metadata/Rack/RackPower/x", b"{}", qos=1, retain=True)
            await agent.publish(f"IT/v1/PUB/Frame/{NODE}", frame(), qos=1)
            line = f"nvidia_smi,host={NODE},index=0 power_draw=321 {time.time_ns()}"
            await agent.publish("telegraf/x", line.encode())
            await until(lambda: len(inlet.items) == 2, "a frame and a line")
            await until(lambda: metadata, "metadata")
            metadata.clear()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            for _ in range(3):
                await agent.publish(f"IT/v1/PUB/Frame/{NODE}", frame(), qos=1)
            fleet.leaf["hall-a"].stop()
            fleet.leaf["hall-a"].start()
            task = asyncio.create_task(listen())
            await until(lambda: len(inlet.items) == 5, "what waited")
            await until(lambda: metadata, "what is retained, again")
            await until(lambda: agent.connected, "the agent")
            command = "IT/v1/racktwin/Request/gpu.power_cap_w/lab/h/r1"
            if has_dots:
                settings = replace(mqtt(fleet, "agents"), client_id="hearer")
                hearer = MqttLink(settings, (("IT/v1/racktwin/Request/#", 1),))
                async with kept(hearer) as (peer,):
                    await source.link.publish(command, b"{}", qos=1)
                    await until(lambda: peer.got, "the request")
                    assert peer.got[0].topic == command
            else:
                with pytest.raises(ConnectorError):
                    await source.link.publish(command, b"{}", qos=1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    with nats_fleet(server, tmp_path, ("hall-a",)) as fleet:
        asyncio.run(play(fleet))


@pytest.mark.parametrize("frozen", (False, True), ids=("killed", "frozen"))
def test_a_hub_that_returns_is_current_at_once(server: Server, tmp_path: Path, frozen: bool) -> None:
    async def play(fleet: NatsFleet) -> None:
        hub, hall = NatsLink(fleet.daemon(), "cpc.*.v1.summary"), NatsLink(fleet.hall("hall-a"), BUDGET)
        async with kept(hub, hall) as (at_hub, at_hall):

            async def both() -> None:
                await hall.publish(SUMMARY, b"told")
                await hub.publish(BUDGET, b"granted")

            await said_until(both, lambda: at_hub.got and at_hall.got, "both ways")
            (fleet.hub.freeze if frozen else fleet.hub.stop)()
            await until(lambda: not hub.connected, "the loss")
            begun = time.monotonic()
            (fleet.hub.thaw if frozen else fleet.hub.start)()
            at_hub.got.clear()
            at_hall.got.clear()
            await said_until(both, lambda: at_hub.got and at_hall.got, "both ways again")
            assert time.monotonic() - begun < CURRENT_S

    with nats_fleet(server, tmp_path, ("hall-a",)) as fleet:
        asyncio.run(play(fleet))


def test_the_way_of_a_fleet_may_be_tls_with_keys(server: Server, tmp_path: Path) -> None:
    """All TLS blocks taken in; the daemon of the hall shows its NKey."""
    papers, key = issue_papers(tmp_path)["sound"], Ed25519PrivateKey.generate()
    seed = tmp_path / "seed"
    seed.write_text(seed_of(key))

    def altered(name: str, text: str) -> str:
        text = with_tls(text, papers)
        return text.replace('user: hall, password: "CHANGE-DAEMON"', f"nkey: {NKey(key).public}")

    async def play(fleet: NatsFleet) -> None:
        tls = ssl.create_default_context(cafile=str(papers.trusted))
        url = fleet.leaf["hall-a"].url.replace("nats://", "tls://")
        hall = NatsLink(NatsSettings((url,), nkey_file=str(seed), tls=tls), BUDGET)
        hub_url = fleet.hub.url.replace("nats://", "tls://")
        hub = NatsLink(
            NatsSettings((hub_url,), username=fleet.user, password=fleet.password, tls=tls),
            "cpc.*.v1.summary",
        )
        agent = MqttLink(mqtt(fleet, "agents", tls=True, ca_file=str(papers.trusted)))
        async with kept(hub, hall, agent) as (at_hub, at_hall, _):
            await said_until(lambda: hall.publish(SUMMARY, b"told"), lambda: at_hub.got, "a summary")
            await said_until(lambda: hub.publish(BUDGET, b"granted"), lambda: at_hall.got, "a budget")
        seed.write_text(seed_of(Ed25519PrivateKey.generate()))
        with pytest.raises(ConnectorError, match="Authorization"):
            await hall.run(lambda _: None, lambda *_: None)

    with nats_fleet(server, tmp_path, ("hall-a",), altered) as fleet:
        asyncio.run(play(fleet))


def with_tls(text: str, papers: Papers) -> str:
    """A configuration with its TLS blocks taken in."""
    text = text.replace("# tls {", "tls {").replace("nats://hall-a", "tls://hall-a")
    text = re.sub(r'"/etc/racktwin/nats/ca\.pem"', f'"{papers.trusted}"', text)
    text = re.sub(r'"/etc/racktwin/nats/[a-z-]+\.pem"', f'"{papers.cert}"', text)
    return re.sub(r'"/etc/racktwin/nats/[a-z-]+\.key"', f'"{papers.key}"', text)


@pytest.mark.parametrize("name", ("hub", "leaf"))
def test_every_setting_that_ships_as_a_comment_is_one_that_the_server_knows(
    server: Server, tmp_path: Path, name: str
) -> None:
    program = server("nats-server")
    text = with_tls((DEPLOY / f"{name}.conf").read_text(), issue_papers(tmp_path)["sound"])
    assert text.count("tls {") >= 2
    if server_version(program) >= (2, 10):
        text = text.replace("# sync_interval", "sync_interval")
        assert "\n  sync_interval: always" in text
    (tmp_path / "nats.conf").write_text(text)
    found = subprocess.run(
        [str(program), "-t", "-c", str(tmp_path / "nats.conf")], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "is valid" in found.stdout + found.stderr
