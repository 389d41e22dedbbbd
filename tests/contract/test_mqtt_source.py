"""The source of MQTT: what it stages, ignores and counts of what a broker delivers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from connectors.agents import encode_json
from connectors.dsx import discover, to_yaml
from connectors.files import read_capture
from connectors.mqtt import MqttLink, MqttSource, Router
from connectors.sparkplug.payload import read_payload
from tests.support.builders import eight_nodes, site_of, spec_of, two_racks
from tests.support.mosquitto import Mosquitto, mosquitto
from tests.support.mqtt_links import Server, held, settings, until
from twin.config import load_site
from twin.contracts import Item
from twin.site import parse_profile, split_site
from twin.telemetry import Ignored, Message


class Staged:
    """An inlet that writes down what it was given."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.ignored: list[str] = []
        self.notes: list[str] = []
        self.bad: list[tuple[str, str]] = []
        self.dropped = 0

    def stage(self, items: Sequence[Item], now_ns: int) -> None:
        assert abs(now_ns - time.time_ns()) < 600 * 10**9
        self.items += items

    def of(self, source: str, outside: bool = False) -> Self:
        return self

    def skip(self, what: str, why: str, example: str = "", remedy: str = "") -> None:
        if example:
            self.ignored.append(what)
        else:  # of no message: told as often as the source looks
            self.notes.append(why)

    def reject(self, where: str, why: str, remedy: str = "") -> None:
        self.bad.append((where, why))

    def fail(self, why: str, remedy: str = "") -> None:
        self.bad.append(("", why))

    def drop(self, where: str, why: str, count: int = 1) -> None:
        self.dropped += count


def test_a_source_stages_what_it_can_read_and_counts_the_rest(server: Server, tmp_path: Path) -> None:
    """Published by a client that is not ours."""
    site = site_of(eight_nodes())
    node, t_ns = "lab/h/r1/node3", time.time_ns()
    good = encode_json(t_ns, {"power_w": [1.0]})
    rows: list[tuple[str, bytes]] = [
        (f"IT/v1/PUB/Frame/{node}", good),
        (f"IT/v1/PUB/Frame/{node}", b"no frame"),
        (f"IT/v1/PUB/Frame/{node}", json.dumps({**json.loads(good), "from": "lab/h/r1/node4"}).encode()),
        (f"IT/v1/PUB/Event/{node}", b"\xff\xfe"),
        ("IT/v1/PUB/Frame/elsewhere", good),
        ("telegraf/x", f"nvidia_smi,host={node},index=0 power_draw=321 {t_ns}\nno line".encode()),
        ("spBv1.0/g/NDATA/edge", b"\x08\x01\x18\x00"),
    ]

    async def play(broker: Mosquitto) -> None:
        source = MqttSource(settings(broker), Router(site), topics=("telegraf/#", "spBv1.0/#"))
        inlet = Staged()
        task = asyncio.create_task(source.run(inlet))
        await until(lambda: source.link.connected, "a connection")
        tool = str(server("mosquitto_pub", "mosquitto-clients"))
        async with held(MqttLink(settings(broker, "edge"), (("spBv1.0/+/NCMD/#", 0),))) as edge:
            for topic, payload in rows:
                sent = await asyncio.create_subprocess_exec(
                    *(tool, "-p", str(broker.port), "-q", "1", "-t", topic, "-s"), stdin=subprocess.PIPE
                )
                await sent.communicate(payload)
            await until(lambda: len(inlet.items) == 2 and len(inlet.bad) == 4, "all of them")
            await until(lambda: bool(edge.got), "the request of a birth")
        assert [item.table for item in inlet.items] == ["gpu", "gpu"]
        assert [where for where, _ in inlet.bad[:3]] == [rows[1][0], rows[2][0], rows[3][0]]
        assert "claims to be 'lab/h/r1/node4'" in inlet.bad[1][1]
        assert "Frame" in inlet.ignored
        assert edge.got[0].topic == "spBv1.0/g/NCMD/edge"
        (metric,) = read_payload(edge.got[0].payload).metrics
        assert (metric.name, metric.value(11)) == ("Node Control/Rebirth", True)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with mosquitto(server, tmp_path) as broker:
        asyncio.run(play(broker))


def test_a_decoder_that_fails_costs_its_message_only(server: Server, tmp_path: Path) -> None:
    class Broken(Router):
        def decode(self, message: Message) -> Sequence[Item] | Ignored:
            if message.payload == b"bad":
                raise ZeroDivisionError("a fault of ours")
            return super().decode(message)

    async def play(broker: Mosquitto) -> None:
        source, inlet = MqttSource(settings(broker), Broken(site_of(eight_nodes()))), Staged()
        task = asyncio.create_task(source.run(inlet))
        await until(lambda: source.link.connected, "a connection")
        async with held(MqttLink(settings(broker, "other"))) as other:
            for payload in (b"bad", b"{}"):
                await other.link.publish("BMS/v1/PUB/Value/Rack/RackPower/x", payload, qos=1)
            await until(lambda: len(inlet.ignored) == 1, "the second")
        assert inlet.bad == [
            ("BMS/v1/PUB/Value/Rack/RackPower/x", "its decoder failed: ZeroDivisionError: a fault of ours")
        ]
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with mosquitto(server, tmp_path) as broker:
        asyncio.run(play(broker))


@pytest.mark.slow
def test_a_capture_sent_through_a_broker_decodes_as_the_file_does(
    server: Server, tmp_path: Path, recording: Callable[[str], Path]
) -> None:
    """As fast as possible, with a queue shorter than the capture: what has QoS 1 waits in the broker."""
    path = recording("dsx-bms-capture") / "dsx_exemplar.csv"
    rows = [row for row in read_capture(path) if isinstance(row, Message)]
    spec = tmp_path / "site.yaml"
    spec.write_text(to_yaml(discover(iter(rows), "lab")))
    _, site = load_site(spec)
    router, expected, ignored = Router(site), [], 0
    for row in rows:
        got = router.decode(row)
        if isinstance(got, Ignored):
            ignored += 1
        else:
            expected += got
    notes = router.notes()
    assert notes

    async def play(broker: Mosquitto) -> None:
        source, inlet = MqttSource(settings(broker, queue_messages=500), Router(site)), Staged()
        task = asyncio.create_task(source.run(inlet))
        await until(lambda: source.link.connected, "a connection")
        async with held(MqttLink(settings(broker, "other"))) as other:
            for at in range(0, len(rows), 1000):
                await asyncio.gather(
                    *(other.link.publish(row.topic, row.payload, 1) for row in rows[at : at + 1000])
                )
            await until(lambda: len(inlet.items) + len(inlet.ignored) >= len(expected) + ignored, "all rows")
            await until(lambda: inlet.notes == notes, "the notes on metadata")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert (inlet.dropped, inlet.bad, len(inlet.ignored)) == (0, [], ignored)
        assert inlet.items == expected

    with mosquitto(server, tmp_path, ("max_queued_messages 0",)) as broker:
        asyncio.run(play(broker))


def test_a_part_of_a_site_is_sent_what_its_own_racks_publish(server: Server, tmp_path: Path) -> None:
    """Each node of the whole site publishes; the broker delivers what is of the part, each once."""
    tree = two_racks(racks="r[1-4]")
    tree["halls"][0] |= {"cdus": [{"name": "cdu[1-2]", "serves": ["r[1-4]"]}], "feeders": []}
    profiles = {name: parse_profile(body, name) for name, body in spec_of(tree).profiles.items()}
    part = site_of(split_site(site_of(tree), profiles, 2).parts["part-2"])
    frame = encode_json(time.time_ns(), {"power_w": [1.0] * 4})
    nodes = [f"lab/h/r{rack}/node{node}" for rack in (1, 2, 3, 4) for node in (0, 1)]
    last = "IT/v1/PUB/Event/jobs/x"
    topics: list[str] = []

    class Noting(Router):
        def decode(self, message: Message) -> Sequence[Item] | Ignored:
            topics.append(message.topic)
            return super().decode(message)

    async def play(broker: Mosquitto) -> None:
        source, inlet = MqttSource(settings(broker), Noting(part)), Staged()
        task = asyncio.create_task(source.run(inlet))
        await until(lambda: source.link.connected, "a connection")
        for topic in [*(f"IT/v1/PUB/Frame/{node}" for node in nodes), last]:
            await source.link.publish(topic, frame, 1)
        await until(lambda: last in topics, "the last message")
        assert topics == [*(f"IT/v1/PUB/Frame/{node}" for node in nodes[4:]), last]
        assert len(inlet.items) == 4
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with mosquitto(server, tmp_path) as broker:
        asyncio.run(play(broker))
