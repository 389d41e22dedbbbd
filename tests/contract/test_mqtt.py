"""The MQTT link against a real Mosquitto: nothing lost by a kill or an outage; faults in one line."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from connectors.mqtt import LinkSettings, MqttLink, Presence, link as mqtt
from tests.support.mosquitto import Mosquitto, mosquitto
from tests.support.mqtt_links import PATIENCE_S, Held, Server, held, settings, until
from twin.catalogue import ConnectorError
from twin.telemetry import Message


def test_an_outage_loses_neither_what_is_retained_nor_what_has_qos_1(server: Server, tmp_path: Path) -> None:
    async def play(broker: Mosquitto) -> None:
        link = MqttLink(settings(broker), (("a/#", 1),))
        async with held(MqttLink(settings(broker, "other"))) as other:
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
        async with held(MqttLink(settings(broker, "other"))) as other:
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
from connectors.mqtt import link
from connectors.mqtt.link import LinkSettings, MqttLink
link.SLICE_S = 0.2  # a kill falls between receipt and acknowledgement
async def main():
    out = open(sys.argv[2], "ab")
    def stage(message):
        time.sleep(0.002)
        out.write(message.payload + b"\\n")
        out.flush()
    await MqttLink(LinkSettings("127.0.0.1", int(sys.argv[1]), "child"), (("a/#", 1),)).run(stage, print)
asyncio.run(main())
"""


@pytest.mark.long
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
        async with held(MqttLink(settings(broker, "source"))) as source:
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
        link = MqttLink(settings(broker, max_message_bytes=1_000_000), (("a/#", 1),))
        async with held(MqttLink(settings(broker, "other"))) as other:
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
        async with held(MqttLink(settings(broker, "watcher"), (("d/#", 1),))) as watcher:

            def last() -> bytes:
                return watcher.got[-1].payload if watcher.got else b""

            presence = Presence("d/me", lambda: state[0], b"offline")
            link = MqttLink(settings(broker), presence=presence)
            async with held(link):
                await until(lambda: last() == b"online 1", "online")
                state[0] = b"online 2"
                await link.announce()
                await until(lambda: last() == b"online 2", "the change")
            await until(lambda: last() == b"offline", "a clean end")
            run = Held(link)
            await until(lambda: last() == b"online 2", "online again")
            assert link._connection is not None
            link._connection.tap.raw.shutdown(socket.SHUT_RDWR)
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
        link = MqttLink(settings(broker), (("a/#", 1),), canary="IT/v1/x/Canary/y")
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
        link = MqttLink(settings(broker), (("a/#", 1),), canary="c/y")
        async with held(MqttLink(settings(broker, "other"))) as other, held(link) as run:
            while not link.fault:
                await other.link.publish("a/b", b"")
                await asyncio.sleep(0.02)
            assert not run.task.done()
            assert "c/y" in link.fault
        assert sum("c/y" in r.message for r in caplog.records) == 1

    with mosquitto(server, tmp_path, acl(tmp_path, "topic a/#")) as broker:
        asyncio.run(play(broker))

    async def sing(broker: Mosquitto) -> None:
        link = MqttLink(settings(broker), (("a/#", 1),), canary="c/y")
        async with held(link) as run:
            link.fault = "as before"
            await until(lambda: not link.fault, "the canary")
            assert run.got == []

    with mosquitto(server, tmp_path) as broker:
        asyncio.run(sing(broker))


@pytest.mark.slow
def test_a_broker_that_hangs_is_noticed_and_whoever_publishes_is_told(server: Server, tmp_path: Path) -> None:
    async def play(broker: Mosquitto) -> None:
        link = MqttLink(settings(broker, keepalive_s=2), (("a/#", 1),))
        async with held(link) as run:
            broker.freeze()
            try:
                with pytest.raises(ConnectorError):
                    await link.publish("a/b", b"", qos=1)
                await run.ended()
            finally:
                broker.thaw()
            with pytest.raises(ConnectorError, match="not connected"):
                await link.publish("a/b", b"", qos=1)

    with mosquitto(server, tmp_path) as broker:
        asyncio.run(play(broker))


def test_what_cannot_be_reached_is_one_line_that_says_what_to_do(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def said(given: LinkSettings) -> str:
        text = await Held(MqttLink(given)).ended()
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
            return await Held(
                MqttLink(LinkSettings("127.0.0.1", impostor.sockets[0].getsockname()[1]))
            ).ended()
        finally:
            impostor.close()

    monkeypatch.setattr(mqtt, "ANSWER_S", 1.0)
    connack = b"\x20\x02\0\0"
    assert "did not answer as a broker" in asyncio.run(play(b""))
    asyncio.run(play(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
    assert "four bytes" in asyncio.run(play(connack + b"\x30\xff\xff\xff\xff\xff"))
    assert "QoS 2" in asyncio.run(play(connack + b"\x34\x05\0\1a\0\1"))


def test_a_stop_beside_the_end_of_the_broker_leaves_no_fault_behind(server: Server, tmp_path: Path) -> None:
    """As with the embedded broker, which stops at the same time; that a fault is lost is told by its end."""
    left: list[str] = []

    async def main(broker: Mosquitto) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: left.append(context["message"]))
        link = MqttLink(settings(broker), (("a/#", 1),))
        run = Held(link)
        await until(lambda: link.connected, "a connection")
        run.task.cancel()
        broker.kill()
        with contextlib.suppress(asyncio.CancelledError):
            await run.task

    with mosquitto(server, tmp_path) as broker:
        asyncio.run(main(broker))
    gc.collect()
    assert not left


def test_stops_while_it_connects_and_leaves_nothing_open() -> None:
    async def play() -> None:
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen()
            run = Held(MqttLink(LinkSettings("127.0.0.1", deaf.getsockname()[1])))
            before = len(os.listdir("/proc/self/fd"))
            await asyncio.sleep(0.3)
            run.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(run.task, PATIENCE_S)
            assert len(os.listdir("/proc/self/fd")) <= before

    asyncio.run(play())
