"""The MQTT link against a real Mosquitto: nothing lost by a kill or an outage; faults in one line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from connectors import mqtt
from connectors.capture import read_capture
from connectors.discovery import discover, to_yaml
from connectors.it_frame import encode_json
from connectors.mqtt import Link, LinkSettings, Presence
from connectors.mqtt_source import MqttSource
from connectors.routing import Router
from connectors.sparkplug_payload import read_payload
from tests.brokers import Mosquitto, mosquitto
from tests.builders import eight_nodes, site_of
from twin.app.wiring import load_site
from twin.contracts import Item
from twin.errors import ConnectorError
from twin.reading import Ignored, Message

PATIENCE_S = 30.0
Server = Callable[..., Path]


async def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"not within {PATIENCE_S} s: {what}"
        await asyncio.sleep(0.01)


class Held:
    """A link that runs, what it delivered and what it lost."""

    def __init__(self, link: Link, delay_s: float = 0.0) -> None:
        self.link, self.delay_s = link, delay_s
        self.got: list[Message] = []
        self.lost: list[tuple[str, str, int]] = []
        self.peak = 0
        self.task: asyncio.Task[None] = asyncio.create_task(link.run(self.take, self.lose))

    def take(self, message: Message) -> None:
        self.got.append(message)
        if self.link._tap is not None:
            self.peak = max(self.peak, len(self.link._tap.backlog))
        if self.delay_s:
            end = time.perf_counter() + self.delay_s
            while time.perf_counter() < end:
                pass

    def lose(self, where: str, why: str, count: int) -> None:
        self.lost.append((where, why, count))

    async def ended(self) -> str:
        with pytest.raises(ConnectorError) as caught:
            await asyncio.wait_for(self.task, PATIENCE_S)
        return str(caught.value)


@contextlib.asynccontextmanager
async def held(link: Link, delay_s: float = 0.0) -> AsyncIterator[Held]:
    run = Held(link, delay_s)
    try:
        await until(lambda: link.connected or run.task.done(), "a connection")
        yield run
    finally:
        run.task.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectorError):
            await run.task


def settings(broker: Mosquitto, name: str = "racktwin", **more: Any) -> LinkSettings:
    return LinkSettings("127.0.0.1", broker.port, name, **more)


def test_an_outage_loses_neither_what_is_retained_nor_what_has_qos_1(server: Server, tmp_path: Path) -> None:
    async def play(broker: Mosquitto) -> None:
        link = Link(settings(broker), (("a/#", 1),))
        async with held(Link(settings(broker, "other"))) as other:
            await other.link.publish("a/kept", b"k", qos=1, retain=True)
            async with held(link) as first:
                await until(lambda: len(first.got) == 1, "the retained message")
                broker.stop()
                said = await first.ended()
        assert f"127.0.0.1:{broker.port}: the connection was lost; " in said
        assert "\n" not in said
        assert not link.connected
        with pytest.raises(ConnectorError, match="not connected"):
            await link.publish("a/x", b"")
        broker.start()
        async with held(Link(settings(broker, "other"))) as other:
            for i in range(50):
                await other.link.publish(f"a/{i}", b"q", qos=1)
            async with held(link) as second:
                await until(lambda: len({m.topic for m in second.got}) == 51, "all of them")
                assert Message(0, "a/kept", b"k")[1:] in [m[1:] for m in second.got]
        assert link.counts.connections == 2

    with mosquitto(server, tmp_path) as broker:
        asyncio.run(play(broker))


CHILD = """
import asyncio, os, sys, time
from connectors.mqtt import Link, LinkSettings
async def main():
    out = open(sys.argv[2], "ab")
    def stage(message):
        time.sleep(0.002)
        out.write(message.payload + b"\\n")
        out.flush()
    await Link(LinkSettings("127.0.0.1", int(sys.argv[1]), "child"), (("a/#", 1),)).run(stage, print)
asyncio.run(main())
"""


@pytest.mark.slow
def test_kills_between_receipt_and_staging_lose_nothing(server: Server, tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    staged.touch()

    def child(broker: Mosquitto) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", CHILD, str(broker.port), str(staged)])

    def lines() -> list[bytes]:
        return staged.read_bytes().splitlines()

    async def play(broker: Mosquitto) -> None:
        number, process = 600, child(broker)
        await until(lambda: "SUBSCRIBE" in broker.log(), "the subscription")
        async with held(Link(settings(broker, "source"))) as source:
            sent = asyncio.gather(*(source.link.publish("a/b", b"%d" % i, qos=1) for i in range(number)))
            for mark in (60, 200, 350):
                await until(lambda mark=mark: len(lines()) >= mark, f"{mark} staged")  # type: ignore[misc]
                process.kill()
                process.wait()
                process = child(broker)
            await sent
            await until(lambda: len(set(lines())) >= number, "all of them")
        process.kill()
        process.wait()
        assert set(lines()) == {b"%d" % i for i in range(number)}
        assert len(lines()) > number, (
            "no message came twice: no kill fell between receipt and acknowledgement"
        )

    with mosquitto(server, tmp_path, ("max_inflight_messages 100",)) as broker:
        asyncio.run(play(broker))


def test_ten_megabytes_are_dropped_counted_and_not_sent_again(server: Server, tmp_path: Path) -> None:
    async def play(broker: Mosquitto) -> None:
        link = Link(settings(broker, max_message_bytes=1_000_000), (("a/#", 1),))
        async with held(Link(settings(broker, "other"))) as other:
            async with held(link) as run:
                for qos in (0, 1):
                    await other.link.publish("a/big", bytes(10 * 2**20), qos)
                    await other.link.publish("a/small", b"%d" % qos, qos)
                await until(lambda: len(run.got) == 2, "the small ones")
                assert [m.payload for m in run.got] == [b"0", b"1"]
                assert [(where, count) for where, _, count in run.lost] == [("a/big", 1)] * 2
                assert "10485" in run.lost[0][1]
                assert link.counts.dropped == 2
            async with held(link) as again:
                await other.link.publish("a/small", b"2", 1)
                await until(lambda: bool(again.got), "the next one")
                assert (again.lost, [m.payload for m in again.got]) == ([], [b"2"])

    with mosquitto(server, tmp_path) as broker:
        asyncio.run(play(broker))


def test_presence_is_retained_and_the_broker_tells_when_we_die(server: Server, tmp_path: Path) -> None:
    state = [b"online 1"]

    async def play(broker: Mosquitto) -> None:
        async with held(Link(settings(broker, "watcher"), (("d/#", 1),))) as watcher:

            def last() -> bytes:
                return watcher.got[-1].payload if watcher.got else b""

            presence = Presence("d/me", lambda: state[0], b"offline")
            link = Link(settings(broker), presence=presence)
            async with held(link):
                await until(lambda: last() == b"online 1", "online")
                state[0] = b"online 2"
                await link.announce()
                await until(lambda: last() == b"online 2", "the change")
            await until(lambda: last() == b"offline", "a clean end")
            run = Held(link)
            await until(lambda: last() == b"online 2", "online again")
            assert link._tap is not None
            link._tap.raw.shutdown(socket.SHUT_RDWR)
            await run.ended()
            await until(lambda: last() == b"offline", "the last will")

    with mosquitto(server, tmp_path) as broker:
        asyncio.run(play(broker))


def acl(tmp_path: Path, *lines: str) -> tuple[str, ...]:
    file = tmp_path / "acl"
    file.write_text("\n".join(lines) + "\n")
    return (f"acl_file {file}",)


def test_a_canary_notices_that_the_broker_denies_everything(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mqtt, "CANARY_S", 0.5)

    async def play(broker: Mosquitto) -> None:
        link = Link(settings(broker), (("a/#", 1),), canary="IT/v1/x/Canary/y")
        said = await Held(link).ended()
        assert "IT/v1/x/Canary/y" in said
        assert "its ACL may deny" in said
        assert link.counts.canaries_missed == 1

    with mosquitto(server, tmp_path, acl(tmp_path, "topic read nothing")) as broker:
        asyncio.run(play(broker))


def test_a_canary_denied_alone_is_a_fault_that_is_told_and_ends(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mqtt, "CANARY_S", 0.5)
    monkeypatch.setattr(mqtt, "CANARY_EVERY_S", 0.1)

    async def play(broker: Mosquitto) -> None:
        link = Link(settings(broker), (("a/#", 1),), canary="c/y")
        async with held(Link(settings(broker, "other"))) as other, held(link) as run:
            while not link.fault:
                await other.link.publish("a/b", b"")
                await asyncio.sleep(0.02)
            assert not run.task.done()
            assert "c/y" in link.fault
        assert sum("c/y" in r.message for r in caplog.records) == 1

    with mosquitto(server, tmp_path, acl(tmp_path, "topic a/#")) as broker:
        asyncio.run(play(broker))

    async def sing(broker: Mosquitto) -> None:
        link = Link(settings(broker), (("a/#", 1),), canary="c/y")
        async with held(link) as run:
            link.fault = "as before"
            await until(lambda: not link.fault, "the canary")
            assert run.got == []

    with mosquitto(server, tmp_path) as broker:
        asyncio.run(sing(broker))


@pytest.mark.slow
def test_a_broker_that_hangs_is_noticed_and_whoever_publishes_is_told(server: Server, tmp_path: Path) -> None:
    async def play(broker: Mosquitto) -> None:
        link = Link(settings(broker, keepalive_s=2), (("a/#", 1),))
        async with held(link) as run:
            broker.freeze()
            begun = time.monotonic()
            try:
                with pytest.raises(ConnectorError):
                    await link.publish("a/b", b"", qos=1)
                await run.ended()
            finally:
                broker.thaw()
            assert time.monotonic() - begun < 15
            with pytest.raises(ConnectorError, match="not connected"):
                await link.publish("a/b", b"", qos=1)

    with mosquitto(server, tmp_path) as broker:
        asyncio.run(play(broker))


def test_what_cannot_be_reached_is_one_line_that_says_what_to_do(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def said(given: LinkSettings) -> str:
        text = await Held(Link(given)).ended()
        assert "\n" not in text
        return text

    async def play(broker: Mosquitto) -> None:
        secret = "pass-w0rd-7261"
        given = settings(broker, username="someone", password=secret)
        assert secret not in repr(given)
        refused = await said(given)
        assert "check username" in refused
        assert secret not in refused
        assert "is the broker running" in await said(LinkSettings("127.0.0.1", 1))
        assert "resolves" in await said(LinkSettings("no-such-host.invalid"))
        assert "TLS handshake" in await said(settings(broker, tls=True))
        missing = await said(settings(broker, tls=True, ca_file=str(tmp_path / "ca.pem")))
        assert "ca.pem" in missing
        assert secret not in caplog.text

    with caplog.at_level(logging.DEBUG), mosquitto(server, tmp_path, open_to_all=False) as broker:
        asyncio.run(play(broker))


def test_an_impostor_is_no_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(answer: bytes) -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                writer.write(answer)
                await reader.read()
            writer.close()

        impostor = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            return await Held(Link(LinkSettings("127.0.0.1", impostor.sockets[0].getsockname()[1]))).ended()
        finally:
            impostor.close()

    monkeypatch.setattr(mqtt, "ANSWER_S", 1.0)
    connack = b"\x20\x02\0\0"
    assert "did not answer as a broker" in asyncio.run(play(b""))
    asyncio.run(play(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
    assert "four bytes" in asyncio.run(play(connack + b"\x30\xff\xff\xff\xff\xff"))
    assert "QoS 2" in asyncio.run(play(connack + b"\x34\x05\0\1a\0\1"))


FLOODER = """
import socket, struct, sys, time
port, rate, seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
s = socket.create_connection(("127.0.0.1", port))
s.sendall(b"\\x10\\x13\\0\\4MQTT\\4\\2\\0\\0\\0\\7flooder")
assert s.recv(4) == b"\\x20\\2\\0\\0"
topic, payload = b"a/flood", b"x" * 200
body = struct.pack("!H", len(topic)) + topic + payload
packet = b"\\x30" + bytes([len(body) & 127 | 128, len(body) >> 7]) + body
begun, sent = time.monotonic(), 0
while (now := time.monotonic() - begun) < seconds:
    due = int(now * rate) - sent
    if due > 0:
        s.sendall(packet * due)
        sent += due
    time.sleep(0.002)
print(sent)
"""


@pytest.mark.slow
def test_a_flood_leaves_the_loop_responsive_and_memory_bounded(server: Server, tmp_path: Path) -> None:
    """20,000 messages/s at 150 us of work each: three times what one core can stage."""

    async def play(broker: Mosquitto) -> None:
        link = Link(settings(broker, queue_messages=5000), (("a/#", 1),), canary="c/y")
        lags: list[float] = []
        async with held(link) as run:
            run.got = counter = _Counter()
            run.delay_s = 150e-6
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            flooder = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", FLOODER, str(broker.port), "20000", "5"), stdout=subprocess.PIPE
            )
            waiting = asyncio.create_task(flooder.communicate())
            while not waiting.done():
                due = time.monotonic() + 0.01
                await asyncio.sleep(0.01)
                lags.append(time.monotonic() - due)
                assert link.counts.waiting <= 5000
            sent = int((await waiting)[0])
            await until(lambda: link._tap is None or not link._tap.backlog, "the rest")
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            dropped = sum(count for _, _, count in run.lost)
            assert sent >= 60_000
            assert dropped == link.counts.dropped > 0
            assert counter.number + dropped <= sent
            lags.sort()
            assert lags[int(len(lags) * 0.99)] < 0.2, lags[-20:]
            assert grown < 100_000, f"{grown} KiB"

    with mosquitto(server, tmp_path) as broker:
        asyncio.run(play(broker))


class _Counter(list[Any]):
    number = 0

    def append(self, item: Any) -> None:
        self.number += 1


def test_many_publications_at_once_are_sent_in_turn(server: Server, tmp_path: Path) -> None:
    async def play(broker: Mosquitto) -> None:
        link = Link(settings(broker), (("a/#", 1),))
        async with held(link) as run:
            await asyncio.gather(*(link.publish(f"a/{i}", b"x", i & 1) for i in range(3000)))
            await until(lambda: len(run.got) == 3000, "all of them")
            assert link._publishing == 0

    with mosquitto(server, tmp_path) as broker:
        asyncio.run(play(broker))


def test_a_burst_that_is_retained_is_never_dropped(server: Server, tmp_path: Path) -> None:
    async def play(broker: Mosquitto) -> None:
        async with held(Link(settings(broker, "other"))) as other:
            for qos in (0, 1):
                await asyncio.gather(
                    *(other.link.publish(f"a/{qos}/{i}", b"x" * 100, qos, True) for i in range(3000))
                )
        link = Link(settings(broker, queue_messages=100), (("a/#", 1),))
        async with held(link, 0.0002) as run:
            await until(lambda: len(run.got) >= 6000, "all of them")
            assert run.lost == []
            assert run.peak < 2500, "reading goes on while the queue is full; one piece holds some 1200"

    lines = ("max_queued_messages 0", "max_inflight_messages 1000")
    with mosquitto(server, tmp_path, lines) as broker:
        asyncio.run(play(broker))


def test_stops_while_it_connects_and_leaves_nothing_open() -> None:
    async def play() -> None:
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen()
            run = Held(Link(LinkSettings("127.0.0.1", deaf.getsockname()[1])))
            before = len(os.listdir("/proc/self/fd"))
            await asyncio.sleep(0.3)
            begun = time.monotonic()
            run.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await run.task
            assert time.monotonic() - begun < 5
            assert len(os.listdir("/proc/self/fd")) <= before

    asyncio.run(play())


class Staged:
    """An inlet that writes down what it was given."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.ignored: list[str] = []
        self.bad: list[tuple[str, str]] = []
        self.dropped = 0

    def stage(self, items: Sequence[Item], now_ns: int) -> None:
        assert abs(now_ns - time.time_ns()) < 600 * 10**9
        self.items += items

    def ignore(self, what: str, why: str) -> None:
        self.ignored.append(what)

    def spoil(self, where: str, why: str) -> None:
        self.bad.append((where, why))

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
        async with held(Link(settings(broker, "edge"), (("spBv1.0/+/NCMD/#", 0),))) as edge:
            for topic, payload in rows:
                sent = await asyncio.create_subprocess_exec(
                    *(tool, "-p", str(broker.port), "-q", "1", "-t", topic, "-s"), stdin=subprocess.PIPE
                )
                await sent.communicate(payload)
            await until(lambda: len(inlet.items) == 2 and len(inlet.bad) == 4, "all of them")
            await until(lambda: bool(edge.got), "the request of a birth")
        assert [item[0] for item in inlet.items] == ["gpu", "gpu"]
        assert [where for where, _ in inlet.bad[:3]] == [rows[1][0], rows[2][0], rows[3][0]]
        assert "says it is 'lab/h/r1/node4'" in inlet.bad[1][1]
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
        async with held(Link(settings(broker, "other"))) as other:
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

    async def play(broker: Mosquitto) -> None:
        source, inlet = MqttSource(settings(broker, queue_messages=500), Router(site)), Staged()
        task = asyncio.create_task(source.run(inlet))
        await until(lambda: source.link.connected, "a connection")
        async with held(Link(settings(broker, "other"))) as other:
            for at in range(0, len(rows), 1000):
                await asyncio.gather(
                    *(other.link.publish(row.topic, row.payload, 1) for row in rows[at : at + 1000])
                )
            await until(lambda: len(inlet.items) + len(inlet.ignored) >= len(expected) + ignored, "all rows")
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert (inlet.dropped, inlet.bad, len(inlet.ignored)) == (0, [], ignored)
        assert inlet.items == expected

    with mosquitto(server, tmp_path, ("max_queued_messages 0",)) as broker:
        asyncio.run(play(broker))
