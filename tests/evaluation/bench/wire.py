"""Cost of receiving: frames of 8 and of 72 GPUs through a broker, decoded and staged, and aiomqtt alone.

`python -m tests.evaluation.bench.wire TASK` is the process that receives. The publisher sends a round
when the one before has arrived, so nothing is lost and the receiver is what is measured; a rate is per
second of its own processor time, so that what else the machine does counts little.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiomqtt
import msgspec
import numpy as np

from connectors.agents import FRAME, encode_frame, encode_json
from connectors.mqtt import LinkSettings, MqttLink, MqttSource, Router
from tests.evaluation.bench.load import COUNTERS, GAUGES, GPUS_PER_RACK, START_NS, Load, spec_for
from tests.evaluation.bench.sender import HOST, packet, write_round
from tests.evaluation.harness import answer_parent
from twin.catalogue import NS, TABLES, ConnectorError
from twin.config import spec_of
from twin.contracts import Item
from twin.daemon import Ingest
from twin.site import Site, build_site
from twin.sources import SourceAccount
from twin.telemetry import Message

PLACES, SMALL = 64, 8  # speakers in a round; GPUs of a small one
SIGNALS = len(GAUGES) + len(COUNTERS)
AHEAD = 4  # rounds under way: fewer messages than a broker keeps for a client that lags
LATE_S = 10.0
TOPICS = (("IT/v1/PUB/#", 1),)
FORMS = ("json", "msgpack")
WAYS = ("staged", "received", "aiomqtt")
TREE: dict[str, Any] = {
    "site": "bench",
    "halls": [
        {"name": "hall1", "racks": [{"name": f"r[0001-{PLACES:04d}]", "profile": "gb200-nvl72"}]},
        {"name": "hall2", "racks": [{"name": f"n[0001-{PLACES:04d}]", "profile": "hgx-h100", "nodes": 1,
                                     "gpus_per_node": SMALL}]},
    ],
    "periods_s": {"gpu": 1.0},
}  # fmt: skip


class WireLoad(msgspec.Struct, frozen=True):
    """Task of the receiving process; it measures each way `again` times for `seconds`, after `warm_s`."""

    port: int
    seconds: float
    again: int
    folder: str
    warm_s: float = 0.3


def wire_site() -> Site:
    """64 racks of 72 GPUs and 64 nodes of 8."""
    return build_site(spec_of(TREE, None, "bench"), "bench")


def make_round(folder: Path, site: Site, gpus: int, form: str) -> tuple[Path, float]:
    """(the publisher's file, bytes per payload): a frame of each of 64 racks or nodes, no two alike."""
    load = Load(build_site(spec_for(PLACES), "bench"))
    load.arrive(0, START_NS + NS)
    speakers = site.names["rack"][:PLACES] if gpus == GPUS_PER_RACK else site.names["rack"][PLACES:]
    packets, places, size = [], [], 0
    for number, name in enumerate(speakers):
        at = slice(number * GPUS_PER_RACK, number * GPUS_PER_RACK + gpus)
        columns: dict[str, np.ndarray] = {key: load.value[k, at] for k, key in enumerate(GAUGES)}
        columns |= {key: load.counts[k, at] for k, key in enumerate(COUNTERS)}
        payload = _text(columns) if form == "json" else encode_frame(START_NS, columns)
        whole = packet(FRAME + name, payload)
        key = b'"t_ns":' if form == "json" else b"\xa4t_ns\xcf"
        packets.append(whole)
        places.append(whole.index(key) + len(key))
        size += len(payload)
    path = folder / f"round-{gpus}-{form}"
    write_round(path, packets, places, form == "json")
    return path, size / PLACES


def _text(columns: dict[str, np.ndarray]) -> bytes:
    """As an agent spells it: no more digits than the signal has."""
    spec, out = TABLES["gpu"].by_name, dict[str, Any]()
    for name, column in columns.items():
        if column.dtype.kind == "i":
            out[name] = column.tolist()
        else:
            quantum = float(spec[name].quantum)
            out[name] = [round(round(v / quantum) * quantum, 4) for v in column.astype(np.float64).tolist()]
    return encode_json(START_NS, out)


class Publisher:
    """The child that sends, and the credit that it is given: `arrived` is called for each message."""

    def __init__(self, port: int, path: Path, rate: float = 0.0) -> None:
        command = [sys.executable, "-m", "tests.evaluation.bench.sender", str(port), str(path), str(rate)]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
        self.count, self.sent = 0, 0

    def start(self) -> None:
        """The first rounds."""
        self._send(AHEAD)

    def arrived(self) -> None:
        """One message more."""
        self.count += 1
        if self.count % PLACES == 0:
            self._send(1)

    def _send(self, rounds: int) -> None:
        if self.child.stdin is not None and not self.child.stdin.closed:
            self.sent += rounds * PLACES
            self.child.stdin.write(b"." * rounds)

    def hush(self) -> None:
        """No more rounds; what is under way still arrives."""
        if self.child.stdin is not None:
            self.child.stdin.close()

    def close(self) -> None:
        """End it."""
        self.hush()
        self.child.terminate()
        self.child.wait()


class _Counting(Ingest):
    """The daemon's own inlet. It cuts a frame after each round, as where each speaks once a tick."""

    publisher: Publisher
    tick = 0

    def put_items(
        self, items: Sequence[Item], now_ns: int, account: SourceAccount | None = None
    ) -> tuple[int, int]:
        told = super().put_items(items, now_ns, account)
        self.publisher.arrived()
        if self.publisher.count % PLACES == 0:
            self.take(self.tick, now_ns, 1.0)
            self.tick += 1
        return told


@contextlib.asynccontextmanager
async def _staged(port: int, site: Site, publisher: Publisher) -> AsyncIterator[None]:
    """As the daemon: decoded, staged, taken."""
    inlet = _Counting(site, {})
    inlet.publisher = publisher
    source = MqttSource(LinkSettings(HOST, port, "bench-staged", persistent=False), Router(site))
    async with _running(source.link, source.run(inlet)):
        yield
    bad = inlet.counts["bad"] + inlet.counts["ignored"] + inlet.counts["dropped"]
    if bad or inlet.counts["staged"] < publisher.count:
        why = inlet.ledger.overview(0)[:1]
        raise ConnectorError(f"of the benchmark's own frames {bad} did not count: {why}")


@contextlib.asynccontextmanager
async def _received(port: int, _: Site, publisher: Publisher) -> AsyncIterator[None]:
    """Only the link: what aiomqtt does, with bounded memory and late acknowledgement."""
    link = MqttLink(LinkSettings(HOST, port, "bench-received", persistent=False), TOPICS)

    def take(message: Message) -> None:
        if message.payload:
            publisher.arrived()

    def lost(where: str, why: str, count: int) -> None:
        raise ConnectorError(f"{where}: {count} messages lost: {why}")

    async with _running(link, link.run(take, lost)):
        yield


@contextlib.asynccontextmanager
async def _running(link: MqttLink, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        end = time.monotonic() + LATE_S
        while not link.connected and not task.done() and time.monotonic() < end:
            await asyncio.sleep(0.01)
        yield
    finally:
        task.cancel()
        (fault,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(fault, Exception):
        raise fault


@contextlib.asynccontextmanager
async def _aiomqtt(port: int, _: Site, publisher: Publisher) -> AsyncIterator[None]:
    """The baseline: the library's own iterator; nothing is decoded."""
    async with aiomqtt.Client(HOST, port, identifier="bench-aiomqtt") as client:
        await client.subscribe(list(TOPICS))

        async def listen() -> None:
            async for message in client.messages:
                if message.payload:
                    publisher.arrived()

        task = asyncio.ensure_future(listen())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


_OPEN = {"staged": _staged, "received": _received, "aiomqtt": _aiomqtt}


async def measure(way: str, task: WireLoad, site: Site, path: Path) -> tuple[int, float, float]:
    """(messages, seconds, seconds of processor time). Raises ConnectorError if any message was lost."""
    publisher = Publisher(task.port, path)
    try:
        async with _OPEN[way](task.port, site, publisher):
            publisher.start()
            await asyncio.sleep(task.warm_s)
            count, begun, cpu_s = publisher.count, time.perf_counter(), time.process_time()
            await asyncio.sleep(task.seconds)
            count = publisher.count - count
            took = (count, time.perf_counter() - begun, time.process_time() - cpu_s)
            publisher.hush()
            end = time.monotonic() + LATE_S
            while publisher.count < publisher.sent and time.monotonic() < end:
                await asyncio.sleep(0.01)
            if publisher.count != publisher.sent or not count:
                raise ConnectorError(
                    f"{way}: {publisher.sent} messages sent, {publisher.count} arrived; expected all of them"
                )
            return took
    finally:
        publisher.close()


def figures(task: WireLoad) -> Iterator[tuple[str, float]]:
    """All cases; the ways take turns, so that a noisy minute meets them all."""
    import uvloop

    site, folder = wire_site(), Path(task.folder)
    for gpus in (SMALL, GPUS_PER_RACK):
        for form in FORMS:
            path, size = make_round(folder, site, gpus, form)
            sums = {way: np.zeros(3) for way in WAYS}
            for _ in range(task.again):
                for way in WAYS:
                    sums[way] += uvloop.run(measure(way, task, site, path))
            path.unlink()
            key = f"wire.gpus{gpus}.{form}"
            per_cpu_s = {way: float(count / cpu_s) for way, (count, _, cpu_s) in sums.items()}
            count, took_s, cpu_s = sums["staged"].tolist()
            yield f"{key}.payload_bytes", size
            yield f"{key}.messages_per_core_s", per_cpu_s["staged"]
            yield f"{key}.values_per_core_s", per_cpu_s["staged"] * gpus * SIGNALS
            yield f"{key}.cpu_us_per_message", 1e6 * cpu_s / count
            yield f"{key}.messages_per_s", count / took_s
            yield f"{key}.receive_only_messages_per_core_s", per_cpu_s["received"]
            yield f"{key}.aiomqtt_messages_per_core_s", per_cpu_s["aiomqtt"]
            yield f"{key}.staged_per_aiomqtt", per_cpu_s["staged"] / per_cpu_s["aiomqtt"]
            yield f"{key}.receive_only_per_aiomqtt", per_cpu_s["received"] / per_cpu_s["aiomqtt"]


if __name__ == "__main__":
    answer_parent(WireLoad, lambda task: dict(figures(task)), pinned=False)
