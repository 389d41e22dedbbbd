"""A million GPUs: hall engines as processes, real nats-servers between them and a hub, and their cost.

`python -m tests.support.million_gpus` runs 12 halls of 83,376 simulated GPUs (1,158 racks of 72), each a
process with the load of the benchmark, beside a leaf node; a hub lends them budgets over its own server. Time
is scaled: a simulated second lasts until all halls and the hub have had their tick, and at least a real one,
as messages take real time. Figures of a tick are processor time, so neighbours on the machine count little;
ages are in simulated seconds.
`--faults` kills leaves, a hall and the hub with its server as `FAULTS` says; the clocks of halls are up to
`SKEW_S` wrong, and grants are lost, come twice and in reverse order.
`--hub-alone 1 2 4 .. 48` measures the hub against the number of halls, with made-up summaries, and draws it
into the folder `--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

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
from tests.support.patience import PATIENCE_S
from twin.catalogue import F64, NS, ActuationError, ConnectorError, TimeAxis
from twin.config import make_engine, spec_of
from twin.daemon import freeze_heap
from twin.engine import Engine
from twin.report import Line, figure, page, plot
from twin.run import Keeping, Recorder, resume
from twin.run.parallel import THREADS
from twin.site import build_site
from twin.telemetry import BudgetGranted, EpochChanged, Inbox, Message, Reading
from twin.wiring.fleet import summary_of

RACKS, HALLS, SECONDS, WARM_UP = 1158, 12, 60, 10
GUARANTEED_W, MOST_W, SHARED_W, SHARING = 95e6, 130e6, 105e6, 3  # watts of a hall; halls below one feeder
EVERY_S = 2  # between two summaries of a hall
KEEPING = Keeping(journal_bytes=0, reserve_bytes=0)
ALONE = (1, 2, 4, 8, 12, 16, 24, 32, 48)
LEAST_WALL_S = 1.0  # of a simulated second: the wire, the reconnects and the syncs take real time
SKEW_S, LOST_PU = 1.5, 0.1  # of clocks; of grants
# Killed processes (a hall by its place), with the shares of the run between which. The first cut is 20 s of a
# minute and stands for 10 minutes: what matters is longer than a grant (10 s) and than silence (15 s)
FAULTS = (("leaf", 1, 0.10, 0.43), ("hall", 2, 0.20, 0.30), ("hub", 0, 0.55, 0.65), ("leaf", 0, 0.80, 0.85))


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
        end = time.monotonic() + PATIENCE_S
        while not self.link.connected:
            assert time.monotonic() < end, f"{self.link.where}: no link within {PATIENCE_S:g} s"
            await asyncio.sleep(0.02)

    def take(self) -> list[Message]:
        """The messages that came since the last call."""
        out, self.got[:] = list(self.got), []
        return out

    async def close(self) -> None:
        """End it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class HallTask(NamedTuple):
    """Task of the process of a hall; `again`: it goes on from its files; `skew_s`: its clock is wrong."""

    name: str
    racks: int
    settings: NatsSettings
    folder: str
    skew_s: float = 0.0
    lossy: bool = False
    again: bool = False


class LiveHall:
    """A hall in a process of its own."""

    def __init__(self, task: HallTask) -> None:
        self.task, self.alive = task, False
        self.begin(task)

    def begin(self, task: HallTask) -> None:
        """Start the process; it answers with its number of GPUs when it is ready."""
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=live_hall, args=(theirs, task), daemon=True)
        self.process.start()
        self.alive = True

    def die(self) -> None:
        """Kill it."""
        self.alive = False
        self.process.kill()
        self.process.join(PATIENCE_S)

    async def answer(self) -> Any:
        """The next message of the process."""
        return await asyncio.get_running_loop().run_in_executor(None, self.pipe.recv)


def live_hall(pipe: Connection, task: HallTask) -> None:
    """The process of a hall: a tick for each number that the pipe brings; None ends it."""
    asyncio.run(_hall(pipe, task))


async def _hall(pipe: Connection, task: HallTask) -> None:
    name, spec = task.name, spec_of(hall_tree(task.racks), None, task.name)
    found = resume(Path(task.folder), lambda s: make_engine(build_site(s))) if task.again else None
    run = Run(TickLoad("live", task.racks, 1, 0, task.folder, aside=False), spec)
    if found is not None:
        run.engine = found.engine
    epoch, rng = 2 if task.again else 1, np.random.default_rng(len(name) + task.racks)
    feeder = run.site.names["feeder"][-1]
    held, decoder = Held(NatsLink(task.settings, f"cpc.{name}.v1.budget")), BudgetDecoder(name, feeder)
    await held.up()
    loop = asyncio.get_running_loop()
    freeze_heap()
    pipe.send(run.site.sizes["gpu"])
    granted = 0
    while (number := await loop.run_in_executor(None, pipe.recv)) is not None:
        now_ns = START_NS + (number + 1) * NS
        clock_ns, come = now_ns + round(task.skew_s * NS), held.take()
        if task.lossy:
            come = [message for message in (*come, *come)[::-1] if rng.random() >= LOST_PU]
        for message in come:
            items = decoder.decode(message._replace(t_ns=clock_ns))
            for item in items if isinstance(items, list) else ():
                assert isinstance(item, BudgetGranted)
                run.inbox.put_event(item)
                granted += 1
        # Aside, so that the link answers pings
        await loop.run_in_executor(None, run.tick, number, True)
        size = 0
        begun = time.process_time()
        if number % EVERY_S == len(name) % EVERY_S:
            lines, head = run.journal.safe
            blank = HallSummary(hall=name, epoch=epoch, sequence=number + 1, t_ns=clock_ns, run=name,
                                lines=lines, head=head)  # fmt: skip
            payload = encode(summary_of(run.engine, feeder, blank))
            size = len(payload)
            with contextlib.suppress(ConnectorError):  # its leaf is away
                await held.link.publish(summary_subject(name), payload, f"{name}:{epoch}:{number + 1}")
        pipe.send((run.counts["cpu_s"][-1], time.process_time() - begun, size, granted))
    await held.close()
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


class Hub:
    """The engine of a hub with decoder, inbox, run folder and sink, and the processor time of its ticks."""

    def __init__(self, names: list[str], link: Any, folder: Path, scale: float = 1.0) -> None:
        self.spec, self.folder, self.link = spec_of(hub_tree(names, scale), None, "hub"), folder, link
        self.cpu_s, self.age_s, self.sent = list[float](), list[F64](), 0
        engine = make_engine(build_site(self.spec, "hub"))
        self._begin(engine, Recorder(engine, self.spec, folder, KEEPING))

    def _begin(self, engine: Engine, recorder: Recorder) -> None:
        self.engine, self.recorder, self.site = engine, recorder, engine.site
        self.inbox = Inbox(self.site.sizes)
        self.decoder, self.sink = SummaryDecoder(self.site), BudgetSink(self.site, self.link)

    def start_again(self, epoch: int) -> None:
        """Go on from the files after a kill, in a new term."""
        self.close()
        found = resume(self.folder, lambda s: make_engine(build_site(s)), present=self.spec)
        self._begin(
            found.engine, Recorder(found.engine, self.spec, self.folder, KEEPING, found.as_manifest())
        )
        self.inbox.put_event(EpochChanged(epoch=epoch))

    def close(self) -> None:
        """End the run."""
        self.recorder.close()
        self.sent += self.sink.sent

    async def tick(self, number: int, messages: list[Message]) -> None:
        """A second of it."""
        now_ns = START_NS + (number + 1) * NS
        begun = time.process_time()
        for message in messages:
            items = self.decoder.decode(message._replace(t_ns=now_ns))
            for item in items if isinstance(items, list) else ():
                assert isinstance(item, Reading)
                self.inbox.put(item, now_ns)
        frame = self.inbox.take(number, now_ns, 1.0)
        self.recorder.before(frame)
        decision = self.engine.tick(frame)
        self.recorder.after(self.engine, decision)
        with contextlib.suppress(ActuationError):  # the server is away: leases lapse
            await self.sink.apply(decision.commands)
        self.cpu_s.append(time.process_time() - begun)
        self.age_s.append(self.engine.view().age_s("rack.hall_power_w")[list(halls_of(self.site).values())])


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


class FleetRun:
    """All halls and the hub, second by second, and what befalls them."""

    def __init__(self, fleet: NatsFleet, names: list[str], args: argparse.Namespace, folder: Path) -> None:
        self.fleet, self.names, self.args = fleet, names, args
        streams = {f"cpc-{hall}": f"cpc.{hall}.>" for hall in names}
        self.held = Held(NatsLink(fleet.daemon(), "cpc.*.v1.summary", streams))
        self.hub = Hub(names, self.held.link, folder / "hub", args.racks / RACKS)
        skew_s = np.linspace(-SKEW_S, SKEW_S, len(names)) if args.faults else np.zeros(len(names))
        self.halls = [
            LiveHall(HallTask(name, args.racks, fleet.hall(name), str(folder / name), skew, args.faults))
            for name, skew in zip(names, skew_s.tolist(), strict=True)
        ]
        self.hub_away = False
        self.well_from = [0] * len(names)  # since when nothing is amiss between a hall and the hub
        self.ticks, self.tells, self.granted = list[float](), list[float](), [0]
        self.current_s = 0  # the longest from the end of a fault until the hub knew of the hall

    async def strike(self, second: int) -> None:
        """Faults that begin or end in this second of the run."""
        for kind, at, begin, end in FAULTS if self.args.faults else ():
            if second == round(begin * self.args.seconds):
                whose = "" if kind == "hub" else f" of {self.names[at]}"
                print(f"second {second}: {kind}{whose} killed", flush=True)
                if kind == "leaf":
                    self.fleet.leaf[self.names[at]].stop()
                elif kind == "hall":
                    self.halls[at].die()
                else:
                    self.fleet.hub.stop()
                    self.hub_away = True
            elif second == round(end * self.args.seconds):
                if kind == "leaf":
                    self.fleet.leaf[self.names[at]].start()
                elif kind == "hall":
                    self.halls[at].begin(self.halls[at].task._replace(again=True))
                    await self.halls[at].answer()
                else:
                    self.fleet.hub.start()
                    self.hub.start_again(2)
                    self.hub_away = False
                for place in range(len(self.names)) if kind == "hub" else (at,):
                    self.well_from[place] = second

    async def second(self, number: int) -> None:
        """A simulated second; the warm-up has numbers below it."""
        second, begun = number - self.args.warm_up, time.monotonic()
        await self.strike(second)
        alive = [hall for hall in self.halls if hall.alive]
        for hall in alive:
            hall.pipe.send(number)
        found = [await hall.answer() for hall in alive]
        await asyncio.sleep(LEAST_WALL_S - (time.monotonic() - begun))
        if not self.hub_away:
            await self.hub.tick(number, self.held.take())
        if second < 0:
            return
        self.ticks += [row[0] for row in found]
        self.tells += [row[1] for row in found if row[2]]
        self.granted = [row[3] for row in found]
        if not self.hub_away:
            self._watch(second)

    def _watch(self, second: int) -> None:
        """Until the hub knows of a hall again after a fault, its age does not count; how long that took."""
        cut = {at for kind, at, begin, end in FAULTS if self.args.faults and kind != "hub"
               and begin * self.args.seconds - 0.5 <= second < round(end * self.args.seconds)}  # fmt: skip
        for place, age_s in enumerate(self.hub.age_s[-1].tolist()):
            if place in cut:
                self.well_from[place] = second + 1
            elif self.well_from[place] and age_s <= second - self.well_from[place] + EVERY_S:
                self.current_s = max(self.current_s, second - self.well_from[place])
                self.well_from[place] = 0
            if self.well_from[place]:
                self.hub.age_s[-1][place] = 0.0


async def measure_fleet(fleet: NatsFleet, names: list[str], args: argparse.Namespace, folder: Path) -> None:
    """The run, and its figures."""
    run = FleetRun(fleet, names, args, folder)
    hub = run.hub
    await run.held.up()
    gpus = sum([await hall.answer() for hall in run.halls])
    print(f"{len(names)} halls, {gpus:,} GPUs; {args.seconds} simulated seconds", flush=True)
    begun = bytes_at = 0.0
    for number in range(args.warm_up + args.seconds):
        if number == args.warm_up:
            begun, bytes_at = time.monotonic(), leaf_bytes(args.port)
            hub.cpu_s.clear(), hub.age_s.clear()
        await run.second(number)
    wall_s = time.monotonic() - begun
    up = (leaf_bytes(args.port) - bytes_at) / len(names) / args.seconds
    for hall in run.halls:
        hall.pipe.send(None)
    hall_bytes = [await hall.answer() for hall in run.halls]
    for hall in run.halls:
        hall.process.join(PATIENCE_S)
    await run.held.close()
    hub.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"a simulated second took {wall_s / args.seconds:.2f} s of the wall")
    print(f"tick of a hall:  {percentiles_ms(run.ticks)} of processor time; "
          f"summary {percentiles_ms(run.tells)}")  # fmt: skip
    print(f"tick of the hub: {percentiles_ms(hub.cpu_s)} of processor time, {hub.sent} grants sent")
    print(f"age of the fleet's state: at most {np.max(hub.age_s):.1f} simulated s; "
          f"grants taken {min(run.granted)}+")  # fmt: skip
    if args.faults:
        print(f"after each fault the hub knew of all halls again within {run.current_s} simulated s")
    else:  # the counts of a server end with it
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


def made_up(names: list[str], number: int, rng: np.random.Generator) -> list[Message]:
    """The summaries of a second, of the halls whose turn it is."""
    now_ns, out = START_NS + (number + 1) * NS, list[Message]()
    for name in names[number % EVERY_S :: EVERY_S]:
        draw_w = float(rng.uniform(80e6, 110e6))
        told = HallSummary(
            hall=name, epoch=1, sequence=number + 1, t_ns=now_ns, power_w=draw_w,
            demand_w=1.1 * draw_w, budget_w=GUARANTEED_W, guaranteed_w=GUARANTEED_W,
            granted_ns=now_ns, heard_pu=1.0, gpus=83_376, run=name, head="0" * 64,
        )  # fmt: skip
        out.append(Message(now_ns, summary_subject(name), encode(told)))
    return out


async def measure_hub(numbers: list[int], seconds: int, folder: Path) -> list[tuple[int, float, float]]:
    """The hub alone: (halls, median and 99th percentile of a tick in ms of processor time).

    All sizes in each second, so that a machine that is slower for a while is so for all.
    """
    out, rng = [], np.random.default_rng(1)
    names = [[f"hall-{i:02d}" for i in range(n)] for n in numbers]
    hubs = [Hub(some, Nowhere(), folder / f"alone-{len(some)}") for some in names]
    freeze_heap()
    for number in range(WARM_UP + seconds):
        for hub, some in zip(hubs, names, strict=True):
            await hub.tick(number, made_up(some, number, rng))
    for hub, n in zip(hubs, numbers, strict=True):
        hub.close()
        p50, p99 = (1e3 * np.percentile(hub.cpu_s[WARM_UP:], (50, 99))).tolist()
        out.append((n, p50, p99))
        print(f"{n:3d} halls: p50 {p50:6.2f} ms  p99 {p99:6.2f} ms", flush=True)
    return out


class HallAxis(TimeAxis):
    """Numbers of halls in the place of instants."""

    def __init__(self, halls: Sequence[int]) -> None:
        super().__init__(np.array(halls, np.int64) * NS, 0, max(halls) * NS)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Some of the numbers that were measured."""
        some = self.times_ns[:: -(-len(self.times_ns) // most)].tolist()
        return [(self.place(t_ns), self.label(t_ns)) for t_ns in some]

    def label(self, t_ns: int) -> str:
        """The number of halls."""
        return str(t_ns // NS)

    def caption(self) -> str:
        """Label of the axis."""
        return "halls"


def straight(rows: list[tuple[int, float, float]]) -> tuple[F64, float, float]:
    """(medians on the straight line through them, its base, its slope), ms."""
    x, y = np.array([r[0] for r in rows], float), np.array([r[1] for r in rows])
    slope, base = np.polyfit(x, y, 1)
    return np.asarray(base + slope * x), float(base), float(slope)


def write_plot(rows: list[tuple[int, float, float]], folder: Path) -> Path:
    """The page with the plot of a tick of the hub against the number of halls."""
    axis = HallAxis([r[0] for r in rows])
    lines = [
        Line("median", np.array([r[1] for r in rows]), 1),
        Line("straight", straight(rows)[0], 0, dashed=True),
        Line("99 %", np.array([r[2] for r in rows]), 2),
    ]
    drawing = plot(lines, axis, "ms of processor time", "tick of the hub against its halls")
    times = axis.times_ns.tolist()
    told = page("Cost of a hub", figure("Tick of the hub", fit(rows), drawing),
                [f"{axis.label(t)} halls" for t in times], [axis.place(t) for t in times])  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "hub-alone.html"
    path.write_text(told, encoding="utf-8")
    return path


def fit(rows: list[tuple[int, float, float]]) -> str:
    """The straight line through the medians, and how far they lie off it."""
    y = np.array([r[1] for r in rows])
    on, base, slope = straight(rows)
    off = y - on
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
    parser.add_argument("--faults", action="store_true", help="kill, cut and lose meanwhile")
    parser.add_argument("--out", type=Path, default=Path("build"), help="folder of the plot of --hub-alone")
    parser.add_argument("--hub-alone", type=int, nargs="*", metavar="HALLS")
    args = parser.parse_args()
    os.environ.update(dict.fromkeys(THREADS, "1"))  # as the units of systemd do; new processes load NumPy so
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        if args.hub_alone is not None:
            rows = asyncio.run(measure_hub(args.hub_alone or list(ALONE), args.seconds, folder))
            print(f"{fit(rows)}; plot in {write_plot(rows, args.out)}")
            return
        args.port, names = free_port(), [f"hall-{chr(ord('a') + i)}" for i in range(args.halls)]
        program = Path(shutil.which("nats-server") or "/usr/sbin/nats-server")
        with nats_fleet(lambda _: program, folder, tuple(names), for_halls(names, args.port)) as fleet:
            asyncio.run(measure_fleet(fleet, names, args, folder))


if __name__ == "__main__":
    main()
