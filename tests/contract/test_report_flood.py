"""A flood of job reports over a real Mosquitto: readings of devices go on, and it is named who floods."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any, Self

import pytest

from connectors.mqtt import FLOODED, MqttLink, MqttSource, Router
from tests.support.builders import site_of, two_racks
from tests.support.mosquitto import Mosquitto, mosquitto
from tests.support.mqtt_links import Server, held, settings, until

pytestmark = pytest.mark.slow
PER_S, FOR_S = 20_000, 2.5
SHIPPED = ("max_inflight_messages 1000", "max_queued_messages 200000", "max_queued_bytes 268435456")
TICK_EVERY, TICK_S = 40, 0.25  # a tick may hold up the loop for so long

# Reports by a socket of its own, many in one packet; reads acknowledgements and throws them away
FLOODER = """
import json, socket, struct, sys, time
port, qos = int(sys.argv[1]), int(sys.argv[4])
rate, seconds = float(sys.argv[2]), float(sys.argv[3])
s = socket.create_connection(("127.0.0.1", port))
s.sendall(b"\\x10\\x13\\0\\4MQTT\\4\\2\\0\\0\\0\\7flooder")
assert s.recv(4) == b"\\x20\\2\\0\\0"
s.setblocking(False)
begun, sent, out = time.monotonic(), 0, b""
while (now := time.monotonic() - begun) < seconds:
    while len(out) < 200_000 and sent < now * rate:
        sent += 1
        job = "liar" if sent % 10 else "other%d" % (sent % 7)
        topic = ("IT/v1/PUB/Job/" + job).encode()
        body = json.dumps({"v": 1, "id": str(sent), "t_ns": time.time_ns(), "interval_s": 60.0}).encode()
        number = struct.pack("!H", sent % 65535 + 1) if qos else b""
        rest = struct.pack("!H", len(topic)) + topic + number + body
        size = bytes([len(rest)]) if len(rest) < 128 else bytes([len(rest) & 127 | 128, len(rest) >> 7])
        out += (b"\\x32" if qos else b"\\x30") + size + rest
    try:
        out = out[s.send(out):]
    except BlockingIOError:
        pass
    try:
        s.recv(1 << 20)
    except BlockingIOError:
        pass
    time.sleep(0.001)
print(sent)
"""


class Heard:
    """An inlet that keeps when each reading of the one node was made."""

    def __init__(self) -> None:
        self.t_ns: list[int] = []
        self.events = 0
        self.dropped: dict[str, list[str]] = {}
        self.bad: list[str] = []

    def stage(self, items: Any, now_ns: int) -> None:
        for item in items:
            if hasattr(item, "t_ns"):
                self.t_ns.append(int(item.t_ns))
            else:
                self.events += 1

    def of(self, source: str, outside: bool = False) -> Self:
        return self

    def skip(self, what: str, why: str, example: str = "", remedy: str = "") -> None:
        pass

    def reject(self, where: str, why: str, remedy: str = "") -> None:
        self.bad.append(f"{where}: {why}")

    def fail(self, why: str, remedy: str = "") -> None:
        self.bad.append(why)

    def drop(self, where: str, why: str, count: int = 1) -> None:
        self.dropped.setdefault(where, []).append(why)


@pytest.mark.long
@pytest.mark.parametrize("qos", [0, 1])
def test_readings_do_not_wait_behind_a_flood_of_reports(server: Server, tmp_path: Path, qos: int) -> None:
    site = site_of(two_racks())

    async def play(broker: Mosquitto) -> None:
        given = settings(broker, queue_messages=5000)
        slots = {"liar": 0, **{f"other{k}": 1 + k for k in range(7)}}
        source, inlet = MqttSource(given, Router(site, slot_of=slots.get)), Heard()
        task = asyncio.create_task(source.run(inlet))
        await until(lambda: source.link.connected, "a connection")
        async with held(MqttLink(settings(broker, "edge", persistent=False))) as teller:
            flooder = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", FLOODER, str(broker.port), str(PER_S), str(FOR_S), str(qos)),
                stdout=asyncio.subprocess.PIPE,
            )
            waiting, number = asyncio.create_task(flooder.communicate()), 0
            while not waiting.done():
                number += 1
                body = {"t_ns": time.time_ns(), "node": {"power_w": [100.0 + number % 50]}}
                await teller.link.publish("IT/v1/PUB/Frame/lab/h/r1/node3", json.dumps(body).encode())
                if number % TICK_EVERY == 0:
                    time.sleep(TICK_S)
                await asyncio.sleep(0.01)
            sent = int((await waiting)[0])
            await until(lambda: FLOODED in inlet.dropped, "the refusals of the lane")
            await until(lambda: len(set(inlet.t_ns)) >= 0.99 * number, "the readings")
            assert sent > 10_000, "it was no flood"
            assert inlet.events > 100, "some reports are heard"
            assert source.link.counts.dropped == 0, "nothing else was lost"
            reasons = inlet.dropped[FLOODED]
            assert "over the limit" in reasons[-1]
            assert "from job liar" in reasons[-1]
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with mosquitto(server, tmp_path, SHIPPED) as broker:
        asyncio.run(play(broker))
