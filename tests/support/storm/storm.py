"""Storm: one seed, from the making of its world to the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import logging
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

import connectors.mqtt.link as mqtt_link
from tests.support.storm.broker import Connection, SimulatedBroker
from tests.support.storm.disk import SimulatedDisk, simulated_disks
from tests.support.storm.etcd import SimulatedEtcd
from tests.support.storm.field import Field, site_tree, storm_spec
from tests.support.storm.hosts import LIFE, Host, Life, simulated_clocks
from tests.support.storm.loop import SimulatedLoop
from tests.support.storm.trouble import Trouble
from tests.support.storm.watch import Complaints, DurableJournal, Watch
from twin.catalogue import Divergence, StorageError
from twin.config import load_config, make_engine
from twin.daemon import Daemon, SdNotify, collector
from twin.daemon.etcd import Etcd
from twin.run import TraceReader, replay_frames, verify_journal
from twin.run.storage import read_holes
from twin.site import SiteSpec, build_site

TERM_S = 3.0
ENDPOINTS = ("http://etcd1:2379", "http://etcd2:2379", "http://etcd3:2379")
CALM_S = 45.0  # without trouble at the end
RESTART_S = (0.3, 8.0)
SEGMENT_BYTES = 30_000  # of a journal, so that some are closed


@dataclass
class Shape:
    """Size of a storm. `trouble` are the kinds of it that may come (none named: all)."""

    hours: float = 0.1
    tick_s: float = 5.0
    daemons: int = 2
    every_s: float = 12.0  # between two troubles, on average
    trouble: tuple[str, ...] = ()
    people_s: float = 15.0  # between two requests of people, on average
    snapshot_s: float = 60.0
    replay: bool = True
    replay_each: int = 4  # seeds of which one is made again from its trace


@dataclass
class Report:
    """Report of a storm."""

    seed: int
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hours: float = 0.0
    ticks: int = 0
    commands: int = 0
    lives: int = 0
    terms: int = 0
    replayed: int = 0
    digest: str = ""

    def text(self) -> str:
        """For who has to mend it."""
        lines = [f"seed {self.seed}: {len(self.faults)} violations", *self.faults[:5]]
        return "\n".join([*lines, "the last events were:", *self.notes[-25:]])


class Process:
    """One daemon on its host, started again whenever it ends."""

    def __init__(self, storm: Storm, name: str) -> None:
        self.storm, self.name = storm, name
        loop = storm.loop
        self.host = Host(name, loop, drift=storm.dice.uniform(-2e-5, 2e-5))
        self.folder = storm.folder / name
        self.folder.mkdir()
        self.disk = SimulatedDisk(self.folder, random.Random(storm.dice.random()))
        self.life = Life(self.host)
        self.daemon: Daemon | None = None
        self.lives, self.ticks = 0, 0
        self.with_power_loss = False
        self._write()

    def _write(self) -> None:
        (self.folder / "site.yaml").write_text(yaml.safe_dump(site_tree()), encoding="utf-8")
        config = {
            "site": "site.yaml", "broker": {"host": "broker"}, "api": None, "state": "state",
            "tick_s": self.storm.shape.tick_s, "history": {"embedded": False},
            "quotas": {"journal_reserve_mb": 1}, "snapshot_every_s": self.storm.shape.snapshot_s,
            "leader": {"kind": "etcd", "endpoints": list(ENDPOINTS), "name": self.name, "term_s": TERM_S},
        }  # fmt: skip
        (self.folder / "racktwin.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    async def keep(self) -> None:
        """Start, wait for the end, start again; until cancelled."""
        storm = self.storm
        while True:
            ended = asyncio.Event()
            world = contextvars.copy_context()

            def on_kill(ended: asyncio.Event = ended, world: Any = world) -> None:
                storm.loop.call_soon(ended.set, context=world)

            self.life = life = Life(self.host, on_kill=on_kill)
            self.lives += 1
            context = contextvars.copy_context()
            context.run(LIFE.set, life)
            task = storm.loop.create_task(self._live(), context=context)
            task.add_done_callback(lambda _, ended=ended: ended.set())
            await ended.wait()
            self._bury(life, task)
            await asyncio.sleep(storm.dice.uniform(*RESTART_S))

    async def _live(self) -> None:
        daemon = Daemon(load_config(self.folder / "racktwin.yaml"), SdNotify(""))
        daemon.life = LIFE.get()  # type: ignore[attr-defined]
        self.daemon = self.storm.watch.leads[self.name] = daemon
        for fault in daemon.opened.faults:
            if "decided otherwise" in fault:
                self.storm.watch.fault(f"{self.name}: {fault}")
        if daemon.recorder.journal is not None:
            daemon.recorder.journal.segment_bytes = SEGMENT_BYTES
        await daemon.run()

    def does(self, act: Callable[[Daemon], Any]) -> Any:
        """Call an interface of the daemon, inside its life."""
        assert self.daemon is not None
        token = LIFE.set(self.life)
        try:
            return act(self.daemon)
        finally:
            LIFE.reset(token)

    def _bury(self, life: Life, task: asyncio.Task[None]) -> None:
        storm = self.storm
        error = task.exception() if task.done() and not task.cancelled() else None
        why = "killed" if life.is_dead else f"ended: {error!r}"
        storm.watch.note(f"{self.name} {why}, after {life.steps} steps and {self.disk.calls} calls")
        if error is not None and not life.is_dead and not isinstance(error, StorageError):
            storm.watch.fault(f"{self.name} ended: {error!r}")
        life.is_dead = True
        daemon, self.daemon = self.daemon, None
        storm.watch.leads.pop(self.name, None)
        if daemon is not None:
            self.ticks += daemon.live.stats.ticks
        storm.loop.bury(life)
        for session in list(storm.broker.sessions.values()):
            if session.end is not None and getattr(session.end, "life", None) is life:
                storm.broker.disconnect(session.end, with_will=True)
        storm.close_files(life)
        self.disk.kill_at = -1
        if self.with_power_loss:
            self.with_power_loss = False
            self.disk.lose_power()
            storm.watch.note(f"{self.name} lost its power")


class Storm:
    """The world of one seed."""

    def __init__(self, seed: int, folder: Path, shape: Shape) -> None:
        self.seed, self.folder, self.shape = seed, folder.resolve(), shape
        self.dice = random.Random(seed)
        self.loop = SimulatedLoop(random.Random(self.dice.random()))
        self.broker = SimulatedBroker(self.loop)
        self.etcd = SimulatedEtcd(self.loop)
        self.field = Field(self.loop, self.broker, storm_spec(), seed, shape.tick_s)
        self.processes = [Process(self, name) for name in ("a", "b")[: shape.daemons]]
        journals = {p.name: DurableJournal(p.folder / "state" / "run", p.disk) for p in self.processes}
        self.watch = Watch(self.field, journals, self.etcd)
        self.trouble = Trouble(self)
        self.close_files: Callable[[Life], None] = lambda _: None
        self.loop.job_s = self._job_s

    def _job_s(self, life: Life | None) -> float:
        for process in self.processes:
            if life is process.life:
                return process.disk.dice.expovariate(1 / process.disk.job_s)
        return 0.001

    def run(self) -> Report:
        """Blow; the first violation ends it."""
        report = Report(self.seed)
        with _world(self):
            try:
                self.loop.run_until_complete(self._blow())
                if not self.watch.faults:
                    self._afterwards(report)
            finally:
                for process in self.processes:
                    process.life.is_dead = True
                    self.loop.bury(process.life)
                    self.close_files(process.life)
                for life in (self.field.plant_life, self.field.agent_life):
                    life.is_dead = True
                    self.loop.bury(life)
                self.loop.close()
        report.faults, report.notes = self.watch.faults, list(self.watch.notes)
        report.hours = self.loop.time() / 3600.0
        report.ticks = sum(p.ticks for p in self.processes)
        report.commands, report.terms = self.watch.commands, len(self.watch.epoch_of)
        report.lives = sum(p.lives for p in self.processes)
        return report

    async def _blow(self) -> None:
        self.field.start()
        await asyncio.sleep(2 * self.shape.tick_s)
        tasks = [asyncio.ensure_future(p.keep()) for p in self.processes]
        tasks.append(asyncio.ensure_future(self.trouble.brew(self.shape.hours * 3600.0 - CALM_S)))
        end_s = self.loop.time() + self.shape.hours * 3600.0
        while self.loop.time() < end_s and not self.watch.faults:
            await asyncio.sleep(1.0)
            self.watch.look()
            for task in tasks:
                if task.done():
                    task.result()
        if not self.watch.faults:
            self._is_well()
        mine = asyncio.current_task()
        tasks = [t for t in asyncio.all_tasks() if t is not mine and t not in self.loop.lived]
        for task in tasks:
            task.cancel()
        _, late = await asyncio.wait(tasks, timeout=1.0)
        assert not late, late
        for process in self.processes:
            if process.daemon is not None:
                process.ticks += process.daemon.live.stats.ticks
            process.life.kill()

    def _is_well(self) -> None:
        """After the calm, somebody leads and ticks, and commands arrive."""
        acting = [p for p in self.processes if p.daemon is not None and self.watch.acts(p.daemon)]
        if len(acting) != 1:
            self.watch.fault(f"{len(acting)} daemons lead after {CALM_S:g} s of calm")
        for process in self.processes:
            daemon = process.daemon
            if daemon is None or not daemon.live.ready:
                self.watch.fault(f"{process.name} does not tick after {CALM_S:g} s of calm")
            elif daemon.clock.ahead_ns == 0 and daemon.engine.suspended:
                self.watch.fault(f"{process.name}: suspended: {daemon.engine.suspended}")

    def _afterwards(self, report: Report) -> None:
        """Each journal verifies, and its run decides again as it did."""
        for process in self.processes:
            run = process.folder / "state" / "run"
            verdict = verify_journal(run / "journal.jsonl")
            if verdict.fault is not None and not verdict.fault.startswith("the last line"):
                self.watch.fault(f"{process.name}: its journal: {verdict.fault}")
            report.digest += verdict.head
            if self.shape.replay and self.seed % self.shape.replay_each == 0 and not read_holes(run):
                try:
                    report.replayed += _replayed(run)
                except Divergence as error:
                    self.watch.fault(f"{process.name}: decided otherwise in its replay: {error}")


def _replayed(run: Path) -> int:
    """Ticks that were made again from a trace, and compared with the journal; stops at the first gap."""
    try:
        reader = TraceReader(run)
        if reader.first_header().first_tick > 0:
            return 0
    except StorageError:
        return 0
    spec = msgspec.json.decode(reader.first_header().spec, type=SiteSpec)
    return replay_frames(make_engine(build_site(spec)), reader, run / "journal.jsonl").ticks


@contextlib.contextmanager
def _world(storm: Storm) -> Iterator[None]:
    """The product stands on simulated clocks, disks, broker and etcd."""
    before = (mqtt_link._Connection, Etcd.open, Etcd.close, Etcd._ask, collector.gc, random.getstate())
    Connection.broker, Connection.leaves = storm.broker, staticmethod(storm.watch.leaves)  # type: ignore[assignment]

    async def nothing(self: Etcd) -> None:
        pass

    async def ask(self: Etcd, endpoint: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return await storm.etcd.ask(self._timeout_s, endpoint, path, body)

    log, handler = logging.getLogger(), Complaints(storm.watch)
    level, handlers = log.level, log.handlers[:]
    try:
        mqtt_link._Connection = Connection  # type: ignore[assignment,misc]
        Etcd.open = Etcd.close = nothing  # type: ignore[method-assign]
        Etcd._ask = ask  # type: ignore[method-assign]
        collector.gc = types.SimpleNamespace(  # type: ignore[assignment]
            collect=lambda *_: 0, freeze=lambda: None, set_threshold=lambda *_: None
        )
        random.seed(storm.seed)
        log.handlers[:], log.level = [handler], logging.WARNING
        with simulated_clocks(), simulated_disks({p.name: p.disk for p in storm.processes}) as forget:
            storm.close_files = forget
            yield
    finally:
        mqtt_link._Connection = before[0]  # type: ignore[misc]
        Etcd.open, Etcd.close, Etcd._ask = before[1:4]  # type: ignore[method-assign]
        collector.gc = before[4]
        random.setstate(before[5])
        log.handlers[:], log.level = handlers, level


@contextlib.contextmanager
def _unmourned() -> Iterator[None]:
    """Silence the errors of objects that killed processes leave to the collector."""
    hook = sys.unraisablehook
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sys.unraisablehook = lambda _: None
            yield
            gc.collect()
    finally:
        sys.unraisablehook = hook


def blow(seed: int, folder: Path, shape: Shape | None = None) -> Report:
    """One storm in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    with _unmourned():
        return Storm(seed, folder, shape or Shape()).run()
