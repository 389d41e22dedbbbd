"""More than a link can take: floods, bursts, and many publications at once."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from connectors.mqtt import MqttLink
from tests.support.mosquitto import Mosquitto, mosquitto
from tests.support.mqtt_links import Server, held, settings, until

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


@pytest.mark.long
def test_a_flood_leaves_the_loop_responsive_and_memory_bounded(server: Server, tmp_path: Path) -> None:
    """20,000 messages/s at 150 us of work each: three times what one core can stage."""

    async def play(broker: Mosquitto) -> None:
        link = MqttLink(settings(broker, queue_messages=5000), (("a/#", 1),), canary="c/y")
        turns = 0
        async with held(link) as run:
            run.got = counter = _Counter()
            run.delay_s = 150e-6
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            flooder = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", FLOODER, str(broker.port), "20000", "2"), stdout=subprocess.PIPE
            )
            waiting = asyncio.create_task(flooder.communicate())
            while not waiting.done():
                await asyncio.sleep(0.01)
                turns += 1
                assert link.counts.waiting <= 5000
            sent = int((await waiting)[0])
            await until(lambda: link._connection is None or not link._connection.tap.backlog, "the rest")
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            dropped = sum(count for _, _, count in run.lost)
            assert sent >= 15_000
            assert dropped == link.counts.dropped > 0
            assert counter.number + dropped <= sent
            assert turns >= 15, "a queue of 5000 takes 0.75 s if it is not staged in slices"
            assert grown < 100_000, f"{grown} KiB"

    with mosquitto(server, tmp_path) as broker:
        asyncio.run(play(broker))


class _Counter(list[Any]):
    number = 0

    def append(self, item: Any) -> None:
        self.number += 1


def test_many_publications_at_once_are_sent_in_turn(server: Server, tmp_path: Path) -> None:
    async def play(broker: Mosquitto) -> None:
        link = MqttLink(settings(broker), (("a/#", 1),))
        async with held(link) as run:
            await asyncio.gather(*(link.publish(f"a/{i}", b"x", i & 1) for i in range(3000)))
            await until(lambda: len(run.got) == 3000, "all of them")
            assert link._publishing == 0

    with mosquitto(server, tmp_path) as broker:
        asyncio.run(play(broker))


@pytest.mark.long
def test_a_burst_that_is_retained_is_never_dropped(server: Server, tmp_path: Path) -> None:
    async def play(broker: Mosquitto) -> None:
        async with held(MqttLink(settings(broker, "other"))) as other:
            for qos in (0, 1):
                await asyncio.gather(
                    *(other.link.publish(f"a/{qos}/{i}", b"x" * 100, qos, True) for i in range(3000))
                )
        link = MqttLink(settings(broker, queue_messages=100), (("a/#", 1),))
        async with held(link, 0.0002) as run:
            await until(lambda: len(run.got) >= 6000, "all of them")
            assert run.lost == []
            assert run.peak < 2500, "reading goes on while the queue is full; one piece holds some 1200"

    lines = ("max_queued_messages 0", "max_inflight_messages 1000")
    with mosquitto(server, tmp_path, lines) as broker:
        asyncio.run(play(broker))
