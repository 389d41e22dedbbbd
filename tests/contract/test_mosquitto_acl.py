"""The access list and the configuration that we ship, in a real Mosquitto with certificates made here."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from connectors.mqtt import LinkSettings, MqttLink
from tests.support.inlets import until
from tests.support.secured_mosquitto import Authority, Secured, secured_broker
from twin.catalogue import ConfigError, ConnectorError
from twin.cli.acl import agent_user, identities
from twin.cli.main import parse
from twin.config import load_config
from twin.telemetry import Message
from twin.wiring import link_settings

SITE = """
site: lab
halls:
  - name: h1
    racks:
      - {name: r1, profile: gb200-nvl72}
      - {name: r2, profile: gb200-nvl72}
"""
NODE, NEXT, FAR = "lab/h1/r1/node0", "lab/h1/r1/node1", "lab/h1/r2/node0"


@pytest.fixture
def secured(server: Callable[..., Path], tmp_path: Path) -> Iterator[Secured]:
    with secured_broker(server, tmp_path, SITE) as broker:
        assert f"{agent_user(NODE)}\tagent of node {NODE}\n" in (tmp_path / "users").read_text()
        yield broker


@contextlib.asynccontextmanager
async def client(settings: LinkSettings, *topics: str) -> AsyncIterator[tuple[MqttLink, list[Message]]]:
    got: list[Message] = []
    link = MqttLink(settings, tuple((t, 1) for t in topics))
    task = asyncio.create_task(link.run(got.append, lambda *lost: None))
    try:
        await until(lambda: link.connected or task.done(), "a connection")
        if task.done():
            task.result()
        yield link, got
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectorError):
            await task


PUBLISHING = [
    ("racktwin", "IT/v1/racktwin/Request/gpu.power_cap_w/lab/h1/r1", True),
    ("racktwin", "IT/v1/racktwin/Contingency/lab/h1/r1", True),
    ("racktwin", "IT/v1/racktwin/Daemon/one", True),
    ("racktwin", "IT/v1/racktwin/Canary/racktwin", True),
    ("racktwin", "BMS/v1/racktwin/Value/Cdu/x", True),
    ("racktwin", "BMS/v1/PUB/Value/Cdu/x", False),
    ("racktwin", f"IT/v1/PUB/Frame/{NODE}", False),
    (agent_user(NODE), f"IT/v1/PUB/Frame/{NODE}", True),
    (agent_user(NODE), f"IT/v1/PUB/Event/{NODE}", True),
    (agent_user(NODE), f"IT/v1/PUB/Agent/{NODE}", True),
    (agent_user(NODE), f"IT/v1/racktwin/Result/gpu.power_cap_w/{NODE}", True),
    (agent_user(NODE), f"IT/v1/PUB/Frame/{NEXT}", False),
    (agent_user(NODE), f"IT/v1/PUB/Frame/{FAR}", False),
    (agent_user(NODE), f"IT/v1/PUB/Event/{NEXT}", False),
    (agent_user(NODE), "IT/v1/PUB/Event/jobs/slurm", False),
    (agent_user(NODE), f"IT/v1/racktwin/Result/gpu.power_cap_w/{NEXT}", False),
    (agent_user(NODE), "IT/v1/racktwin/Request/gpu.power_cap_w/lab/h1/r1", False),
    (agent_user(NODE), "IT/v1/racktwin/Contingency/lab/h1/r1", False),
    (agent_user(NODE), "BMS/v1/PUB/Value/Rack/x", False),
    ("bms", "BMS/v1/PUB/Metadata/Rack/x", True),
    ("bms", f"IT/v1/PUB/Frame/{NODE}", False),
    ("bms", "BMS/v1/racktwin/Value/Cdu/x", False),
    ("bms", "IT/v1/racktwin/Request/gpu.power_cap_w/lab/h1/r1", False),
    ("grid", "grid/v1/isv/x/loadtarget/set", True),
    ("grid", "grid/v1/dsx-flex-agent/us/powerbreach", False),
    ("racktwin", "grid/v1/dsx-flex-agent/us/powerbreach", True),
    ("racktwin", "grid/v1/isv/x/loadtarget/set", False),
    ("grid", "BMS/v1/PUB/Value/Rack/x", False),
    ("grid", "IT/v1/racktwin/Request/gpu.power_cap_w/lab/h1/r1", False),
    ("jobs", "IT/v1/PUB/Event/jobs/slurm", True),
    ("jobs", f"IT/v1/PUB/Event/{NODE}", False),
    ("racktwin", "IT/v1/racktwin/Job/4711", True),
    ("racktwin", "IT/v1/PUB/Job/4711", False),
    ("checkpoints", "IT/v1/PUB/Job/4711", True),
    ("checkpoints", "IT/v1/PUB/Job/4711/more", False),
    ("checkpoints", "IT/v1/racktwin/Job/4711", False),
    ("checkpoints", "IT/v1/PUB/Event/jobs/slurm", False),
    ("4711", "IT/v1/PUB/Job/4711", True),
    ("4711", "IT/v1/PUB/Job/4712", False),
    ("4711", "IT/v1/racktwin/Job/4711", False),
    (agent_user(NODE), "IT/v1/PUB/Job/4711", False),
    ("jobs", "IT/v1/PUB/Job/4711", False),
    ("telegraf", "telegraf/host/cpu", True),
    ("telegraf", "IT/v1/PUB/Event/jobs/slurm", False),
    ("viewer", "IT/v1/racktwin/Request/gpu.power_cap_w/lab/h1/r1", False),
    ("viewer", "anything", False),
    ("stranger", f"IT/v1/PUB/Frame/{NODE}", False),
]


@pytest.mark.slow
def test_everyone_publishes_what_is_theirs_and_nothing_else(secured: Secured) -> None:
    async def play() -> None:
        async with client(secured.settings("racktwin-standby"), "#") as (_, got):
            for user in dict.fromkeys(user for user, _, _ in PUBLISHING):
                async with client(secured.settings(user)) as (link, _):
                    for i, (who, topic, _) in enumerate(PUBLISHING):
                        if who == user:
                            await link.publish(topic, b"%d" % i, qos=1)
            async with client(secured.settings("racktwin")) as (link, _):
                await link.publish("IT/v1/racktwin/Daemon/last", b"last", qos=1)
            await until(lambda: got[-1:] != [] and got[-1].payload == b"last", "the last message")
            arrived = {int(m.payload) for m in got if m.payload != b"last"}
        wrong = [row for i, row in enumerate(PUBLISHING) if (i in arrived) != row[2]]
        assert wrong == []

    asyncio.run(play())


def test_an_agent_cannot_take_the_place_of_the_daemon(secured: Secured) -> None:
    async def play() -> None:
        async with client(secured.settings("racktwin")) as (ours, _):
            async with client(secured.settings(agent_user(NODE), "racktwin")) as (agent, _):
                await agent.publish(f"IT/v1/PUB/Frame/{NODE}", b"", qos=1)
                await ours.publish("IT/v1/racktwin/Daemon/one", b"here", qos=1)
            assert ours.counts.connections == 1
            assert ours.connected

    asyncio.run(play())


def test_an_agent_reads_what_concerns_its_rack_only(secured: Secured) -> None:
    async def play() -> None:
        agent = secured.settings(agent_user(NODE))
        async with (
            client(agent, "IT/v1/#", "BMS/v1/#") as (_, got),
            client(secured.settings("racktwin")) as (ours, _),
        ):
            for rack in ("r2", "r1"):
                await ours.publish(
                    f"IT/v1/racktwin/Request/gpu.power_cap_w/lab/h1/{rack}", rack.encode(), qos=1
                )
            await until(lambda: bool(got), "its request")
            assert [m.payload for m in got] == [b"r1"]

    asyncio.run(play())


def test_a_job_with_an_identity_hears_its_own_advice_only(secured: Secured) -> None:
    async def play() -> None:
        async with (
            client(secured.settings("4711"), "IT/v1/#") as (_, own),
            client(secured.settings("checkpoints"), "IT/v1/#") as (_, every),
            client(secured.settings("racktwin")) as (ours, _),
        ):
            for job in ("4712", "4711"):
                await ours.publish(f"IT/v1/racktwin/Job/{job}", job.encode(), qos=1)
            await until(lambda: bool(own) and len(every) == 2, "its advice")
            assert [m.payload for m in own] == [b"4711"]

    asyncio.run(play())


def test_nobody_comes_in_without_a_certificate_of_ours(
    secured: Secured, server: Callable[..., Path], tmp_path: Path
) -> None:
    async def refused(settings: LinkSettings) -> str:
        with pytest.raises(ConnectorError) as caught:
            async with client(settings):
                pass
        assert "\n" not in str(caught.value)
        return str(caught.value)

    async def play() -> None:
        good, port = secured.settings("racktwin"), secured.broker.port
        bare = LinkSettings("127.0.0.1", port, tls=True, ca_file=good.ca_file)
        await refused(bare)
        await refused(LinkSettings("127.0.0.1", port))
        other = Authority(server, tmp_path, "other")
        cert, key = other.issue("racktwin")
        await refused(
            LinkSettings("127.0.0.1", port, tls=True, ca_file=good.ca_file, cert_file=cert, key_file=key)
        )
        fooled = await refused(
            LinkSettings("127.0.0.1", port, tls=True, ca_file=str(other.ca), cert_file=cert, key_file=key)
        )
        assert "tls.ca_file" in fooled
        swapped = await refused(
            LinkSettings(
                "127.0.0.1", port, tls=True, ca_file=good.ca_file, cert_file=cert, key_file=good.key_file
            )
        )
        assert "expected a certificate and its key in PEM" in swapped

    asyncio.run(play())


def test_the_daemon_finds_its_way_from_its_configuration(secured: Secured, tmp_path: Path) -> None:
    good = secured.settings("racktwin")
    config = tmp_path / "racktwin.yaml"
    config.write_text(
        f"site: site.yaml\nbroker:\n  host: localhost\n  port: {secured.broker.port}\n"
        f"  tls: {{ca_file: ca.pem, cert_file: {good.cert_file}, key_file: {good.key_file}}}\n"
    )

    async def play() -> None:
        link = MqttLink(link_settings(load_config(config)), (), canary="IT/v1/racktwin/Canary/racktwin")
        task = asyncio.create_task(link.run(lambda message: None, lambda *lost: None))
        await until(lambda: link._canary_back.is_set() or task.done(), "the canary")
        assert not task.done()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(play())
    config.write_text(config.read_text().replace("ca.pem", "no.pem"))
    with pytest.raises(ConfigError, match=r"broker\.tls\.ca_file.*no\.pem: cannot be read"):
        link_settings(load_config(config))


def test_a_recorder_is_a_viewer_and_never_takes_the_place_of_the_daemon(
    secured: Secured, tmp_path: Path
) -> None:
    good, viewer = secured.settings("racktwin"), secured.settings("viewer")
    config = tmp_path / "racktwin.yaml"
    config.write_text(
        f"site: site.yaml\nbroker:\n  host: localhost\n  port: {secured.broker.port}\n"
        f"  tls: {{ca_file: ca.pem, cert_file: {good.cert_file}, key_file: {good.key_file}}}\n"
    )

    def run(*more: str) -> str:
        out = Console(file=io.StringIO())
        words = ["--config", str(config), "--out", str(tmp_path / "r.jsonl"), "--for", "0.5s"]
        args = parse(["trace", "record", *words, "--format", "json", *more])
        assert args.verb.run(args, out, out) == 0
        return out.file.getvalue()  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(ConfigError, match="whose place at the broker a recorder would take"):
        run()
    said = run("--cert-file", str(viewer.cert_file), "--key-file", str(viewer.key_file))
    assert '"connections":1' in said


def test_names_fit_a_certificate_and_never_collide() -> None:
    long = "lab/" + "h" * 40 + "/rack-0001/node-0000000000001"
    assert agent_user(NODE) == "agent.lab.h1.r1.node0"
    assert len(agent_user(long)) <= 64
    assert agent_user(long) != agent_user(long.replace("0001/", "0002/"))
    assert re.fullmatch(r"[A-Za-z0-9._-]+", agent_user("lab/h 1/r1/nöde 0"))

    def site(*nodes: str) -> Any:
        names = {"rack": ["a/b"], "node": nodes}
        return SimpleNamespace(
            name=lambda table, i: names[table][i],
            sizes={table: len(rows) for table, rows in names.items()},
            rack_of_node=[0] * len(nodes),
        )

    with pytest.raises(ConfigError, match=r"would both be called 'agent\.a\.b\.c\.d'"):
        identities(site("a/b/c.d", "a/b/c/d"))
    with pytest.raises(ConfigError, match=r"a/b/\+: its path cannot be a topic"):
        identities(site("a/b/c", "a/b/+"))
    with pytest.raises(ConfigError, match="--integration"):
        identities(site("a/b/c"), "a/#")
    assert [i.user for i in identities(site("a/b/c"), aggregators=True)][-2:] == ["agent.a.b.c", "agent.a.b"]
