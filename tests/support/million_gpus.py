"""A million GPUs: hall engines as processes, real nats-servers between them and a hub, and their cost.

`python -m tests.support.million_gpus` runs 12 halls of 83,376 simulated GPUs (1,158 racks of 72), each a
process with the load of the benchmark, beside a leaf node; a hub lends them budgets over its own server. Time
is scaled: a simulated second lasts until all halls and the hub have had their tick. Figures of a tick are
processor time, so neighbours on the machine count little; ages are in simulated seconds.
`--hub-alone 1 2 4 .. 48` measures the hub against the number of halls, with made-up summaries.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import re
import resource
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from connectors.nats import (
    BudgetDecoder,
    BudgetSink,
    HallSummary,
    NatsLink,
    NatsSettings,
    SummaryDecoder,
    encode,
    halls_of,
    summary_subject,
)
from tests.evaluation.bench.load import START_NS, site_tree
from tests.evaluation.bench.run import Run, TickLoad
from tests.support.mosquitto import free_port
from tests.support.nats_servers import NatsFleet, nats_fleet
from twin.catalogue import NS, ConnectorError
from twin.config import make_engine, spec_of
from twin.run import JournalWriter
from twin.site import build_site
from twin.telemetry import BudgetGranted, Inbox, Message, Reading
from twin.wiring.fleet import summary_of

RACKS, HALLS, SECONDS, WARM_UP = 1158, 12, 60, 10
GUARANTEED_W, MOST_W, SHARED_W, SHARING = 95e6, 130e6, 105e6, 3  # watts of a hall; halls below one feeder
EVERY_S = 2  # between two summaries of a hall
ALONE = (1, 2, 4, 8, 12, 16, 24, 32, 48)
LINK_S = 30.0


def hall_tree(racks: int) -> dict[str, Any]:
    """The site of the benchmark below one external feeder, with the policies that keep to its budget."""
    tree = site_tree(racks)
    top = {"name": "main", "external": True, "guaranteed_w": GUARANTEED_W * racks / RACKS}
    tree["halls"][0]["feeders"].append({**top, "serves": ["ups-a", "ups-b"]})
    tree["policies"] |= {"power_guard": {"authority": "act"}, "power_cap": {"authority": "act"}}
    return tree


def hub_tree(names: list[str], scale: float = 1.0) -> dict[str, Any]:
    """Halls in groups below a pair of feeders each."""
    racks: list[dict[str, Any]] = [
        {
            "name": name,
            "priority": i % 3,
            "guaranteed_w": GUARANTEED_W * scale,
            "max_w": MOST_W * scale,
        }
        for i, name in enumerate(names)
    ]
    groups = [names[i : i + SHARING] for i in range(0, len(names), SHARING)]
    feeders = [
        {"name": f"{side}{g}", "side": side, "budget_w": SHARED_W * scale * len(group), "serves": group}
        for g, group in enumerate(groups)
        for side in "AB"
    ]
    halls = [{"name": "campus", "racks": racks, "feeders": feeders}]
    return {"site": "fleet", "halls": halls, "policies": {"hall_budgets": {"authority": "act"}}}


class Held:
    """A link that is held up in the loop, and the messages that it brought."""

    def __init__(self, link: NatsLink) -> None:
        self.link, self.got = link, list[Message]()
        self._task = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        while True:
            with contextlib.suppress(ConnectorError):
                await self.link.run(self.got.append, lambda *_: None)
            await asyncio.sleep(0.1)

    async def up(self) -> None:
        """Wait until it is connected."""
        end = time.monotonic() + LINK_S
        while not self.link.connected:
            assert time.monotonic() < end, f"{self.link.where}: no link within {LINK_S:g} s"
            await asyncio.sleep(0.02)

    def take(self) -> list[Message]:
        """The messages that came since the last call."""
        out, self.got[:] = list(self.got), []
        return out

    async def close(self) -> None:
        """End it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def live_hall(pipe: Connection, name: str, racks: int, settings: NatsSettings, folder: str) -> None:
    """The process of a hall: a tick for each number that the pipe brings; None ends it."""
    asyncio.run(_hall(pipe, name, racks, settings, folder))


async def _hall(pipe: Connection, name: str, racks: int, settings: NatsSettings, folder: str) -> None:
    task = TickLoad("live", racks, 1, 0, folder, aside=False)
    run = Run(task, spec_of(hall_tree(racks), None, name))
    feeder = run.site.names["feeder"][-1]
    held, decoder = Held(NatsLink(settings, f"cpc.{name}.v1.budget")), BudgetDecoder(name, feeder)
    await held.up()
    loop = asyncio.get_running_loop()
    gc.collect()
    gc.freeze()  # as the daemon does before its first tick
    pipe.send(run.site.sizes["gpu"])
    granted = 0
    while (number := await loop.run_in_executor(None, pipe.recv)) is not None:
        now_ns = START_NS + (number + 1) * NS
        for message in held.take():
            items = decoder.decode(message._replace(t_ns=now_ns))
            for item in items if isinstance(items, list) else ():
                assert isinstance(item, BudgetGranted)
                run.inbox.put_event(item)
                granted += 1
        # Aside, so that the link answers pings
        await loop.run_in_executor(None, run.tick, number, True)
        size = 0
        begun = time.process_time()
        if number % EVERY_S == len(name) % EVERY_S:
            blank = HallSummary(hall=name, epoch=1, sequence=number + 1, t_ns=now_ns, run=name, head="0" * 64)
            told = summary_of(run.engine, feeder, blank)
            payload = encode(told)
            size = len(payload)
            await held.link.publish(summary_subject(name), payload, f"{name}:1:{number + 1}")
        pipe.send((run.counts["cpu_s"][-1], time.process_time() - begun, size, granted))
    await held.close()
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


class Hub:
    """The engine of a hub with decoder, inbox, journal and sink, and the processor time of its ticks."""

    def __init__(self, names: list[str], link: Any, folder: Path, scale: float = 1.0) -> None:
        spec = spec_of(hub_tree(names, scale), None, "hub")
        self.site = build_site(spec, "hub")
        self.engine, self.inbox = make_engine(self.site), Inbox(self.site.sizes)
        self.decoder, self.sink = SummaryDecoder(self.site), BudgetSink(self.site, link)
        self.journal = JournalWriter(folder, durable=False)
        self.cpu_s, self.age_s = list[float](), list[float]()

    def close(self) -> None:
        """End the journal."""
        self.journal.close()

    async def tick(self, number: int, messages: list[Message]) -> None:
        """A second of it."""
        now_ns = START_NS + (number + 1) * NS
        begun = time.process_time()
        for message in messages:
            items = self.decoder.decode(message._replace(t_ns=now_ns))
            for item in items if isinstance(items, list) else ():
                assert isinstance(item, Reading)
                self.inbox.put(item, now_ns)
        decision = self.engine.tick(self.inbox.take(number, now_ns, 1.0))
        self.journal.append(self.journal.chain.lines(decision))
        await self.sink.apply(decision.commands)
        self.cpu_s.append(time.process_time() - begun)
        age_s = self.engine.view().age_s("rack.hall_power_w")[list(halls_of(self.site).values())]
        self.age_s.append(float(np.max(age_s)))


class Nowhere:
    """A link that takes all and sends nothing."""

    async def publish(self, subject: str, payload: bytes, key: str = "") -> None:
        """Nothing."""


def for_halls(names: list[str], port: int) -> Callable[[str, str], str]:
    """Replacements that give the configuration of a hub with two halls these halls, and figures on `port`."""

    def altered(name: str, text: str) -> str:
        if name != "hub":
            return text
        text = f"http: 127.0.0.1:{port}\n{text}"
        block = re.search(r"  FLEET_B: \{.*?\n  \}\n", text, re.DOTALL)
        assert block is not None
        lines = [line for line in text.splitlines() if "hall-b" in line and "FLEET_B" in line]
        for hall in names[2:]:
            for part in (block[0].rstrip("\n"), *lines):
                word = hall.rpartition("-")[2].upper()
                new = part.replace("hall-b", hall).replace("HALL-B", hall.upper())
                text = text.replace(part, f"{new.replace('FLEET_B', f'FLEET_{word}')}\n{part}", 1)
        return text

    return altered


def percentiles_ms(cpu_s: list[float]) -> str:
    """Median, 99th percentile and most."""
    return "p50 {:.1f} p99 {:.1f} max {:.1f} ms".format(*1e3 * np.percentile(cpu_s, (50, 99, 100)))


async def measure_fleet(fleet: NatsFleet, names: list[str], args: argparse.Namespace, folder: Path) -> None:
    """All halls and the hub, second by second."""
    link = NatsLink(fleet.daemon(), "cpc.*.v1.summary", {f"cpc-{hall}": f"cpc.{hall}.>" for hall in names})
    held = Held(link)
    hub = Hub(names, link, folder / "hub", args.racks / RACKS)
    await held.up()
    spawn = multiprocessing.get_context("spawn")
    pipes = dict[str, Connection]()
    processes = []
    for name in names:
        pipes[name], theirs = spawn.Pipe()
        place = (theirs, name, args.racks, fleet.hall(name), str(folder / name))
        processes.append(spawn.Process(target=live_hall, args=place, daemon=True))
        processes[-1].start()
    loop = asyncio.get_running_loop()

    async def answers() -> list[Any]:
        return [await loop.run_in_executor(None, pipe.recv) for pipe in pipes.values()]

    gpus = sum(await answers())
    print(f"{len(names)} halls, {gpus:,} GPUs; {args.seconds} simulated seconds", flush=True)
    ticks, tells, granted = list[float](), list[float](), [0]
    begun = bytes_at = 0.0
    for number in range(args.warm_up + args.seconds):
        if number == args.warm_up:
            begun, bytes_at = time.monotonic(), leaf_bytes(args.port)
            hub.cpu_s.clear(), hub.age_s.clear()
        for pipe in pipes.values():
            pipe.send(number)
        found = await answers()
        await hub.tick(number, held.take())
        if number >= args.warm_up:
            ticks += [row[0] for row in found]
            tells += [row[1] for row in found if row[2]]
            granted = [row[3] for row in found]
    wall_s = time.monotonic() - begun
    up = (leaf_bytes(args.port) - bytes_at) / len(names) / args.seconds
    for pipe in pipes.values():
        pipe.send(None)
    hall_bytes = await answers()
    for process in processes:
        process.join(LINK_S)
    await held.close()
    hub.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"a simulated second took {wall_s / args.seconds:.2f} s of the wall")
    print(f"tick of a hall:  {percentiles_ms(ticks)} of processor time; summary {percentiles_ms(tells)}")
    print(f"tick of the hub: {percentiles_ms(hub.cpu_s)} of processor time, {hub.sink.sent} grants sent")
    print(f"age of the fleet's state: at most {max(hub.age_s):.1f} simulated s; grants taken {min(granted)}+")
    print(f"upward: {up / 1e3:.2f} kB a hall and simulated second, by the hub's server")
    print(f"memory: hub process {peak / 1e6:.0f} MB, its nats-server {server_bytes(fleet) / 1e6:.0f} MB, "
          f"a hall at most {max(hall_bytes) / 1e6:.0f} MB (with the load)")  # fmt: skip


def leaf_bytes(port: int) -> float:
    """Bytes that the hub's server has taken from all leaf nodes."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/leafz", timeout=10) as answer:
        return float(sum(leaf["in_bytes"] for leaf in json.load(answer)["leafs"]))


def server_bytes(fleet: NatsFleet) -> int:
    """Memory of the hub's server."""
    assert fleet.hub.process is not None
    status = Path(f"/proc/{fleet.hub.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


async def measure_hub(numbers: list[int], seconds: int, folder: Path) -> list[tuple[int, float, float]]:
    """The hub alone: (halls, median and 99th percentile of a tick in ms of processor time)."""
    out, rng = [], np.random.default_rng(1)
    for n in numbers:
        names = [f"hall-{i:02d}" for i in range(n)]
        hub = Hub(names, Nowhere(), folder / f"alone-{n}")
        for number in range(WARM_UP + seconds):
            hub.cpu_s = hub.cpu_s[: max(0, number - WARM_UP)]
            now_ns, messages = START_NS + (number + 1) * NS, list[Message]()
            for i, name in enumerate(names):
                if number % EVERY_S == i % EVERY_S:
                    draw_w = float(rng.uniform(80e6, 110e6))
                    told = HallSummary(
                        hall=name, epoch=1, sequence=number + 1, t_ns=now_ns, power_w=draw_w,
                        demand_w=1.1 * draw_w, budget_w=GUARANTEED_W, guaranteed_w=GUARANTEED_W,
                        granted_ns=now_ns, heard_pu=1.0, gpus=83_376, run=name, head="0" * 64,
                    )  # fmt: skip
                    messages.append(Message(now_ns, summary_subject(name), encode(told)))
            await hub.tick(number, messages)
        hub.close()
        p50, p99 = (1e3 * np.percentile(hub.cpu_s, (50, 99))).tolist()
        out.append((n, p50, p99))
        print(f"{n:3d} halls: p50 {p50:6.2f} ms  p99 {p99:6.2f} ms", flush=True)
    return out


def fit(rows: list[tuple[int, float, float]]) -> str:
    """The straight line through the medians, and how far they lie off it."""
    x, y = np.array([r[0] for r in rows], float), np.array([r[1] for r in rows])
    slope, base = np.polyfit(x, y, 1)
    off = y - (base + slope * x)
    share = 1.0 - float((off**2).sum() / ((y - y.mean()) ** 2).sum())
    far = float(np.abs(off).max())
    return f"p50 = {base:.2f} ms + {slope:.4f} ms a hall; r2 {share:.3f}, at most {far:.2f} ms off it"


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--halls", type=int, default=HALLS)
    parser.add_argument("--racks", type=int, default=RACKS, help="of 72 GPUs, in each hall")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="simulated")
    parser.add_argument("--warm-up", type=int, default=WARM_UP)
    parser.add_argument("--hub-alone", type=int, nargs="*", metavar="HALLS")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        if args.hub_alone is not None:
            print(fit(asyncio.run(measure_hub(args.hub_alone or list(ALONE), args.seconds, folder))))
            return
        args.port, names = free_port(), [f"hall-{chr(ord('a') + i)}" for i in range(args.halls)]
        program = Path(shutil.which("nats-server") or "/usr/sbin/nats-server")
        with nats_fleet(lambda _: program, folder, tuple(names), for_halls(names, args.port)) as fleet:
            asyncio.run(measure_fleet(fleet, names, args, folder))


if __name__ == "__main__":
    main()
