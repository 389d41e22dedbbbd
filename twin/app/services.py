"""Services: everything around the ticks that may fail on its own, started, followed and stopped together.

Sources, sinks, broker, interfaces, history, notifications, upkeep, snapshots, contingency caps. Part of the
shell.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from connectors.job_files import FolderSource
from twin.app.actuators import make_actuators
from twin.app.api import ApiServer
from twin.app.beforehand import Beforehand
from twin.app.broker import EmbeddedBroker
from twin.app.config import Config, Loaded, differs
from twin.app.history_service import HistoryService
from twin.app.job_advice import Roster, answers_of
from twin.app.notify import Notifier
from twin.app.outflow import Outflow
from twin.app.outside import Outside, make_outside
from twin.app.parts import Links, make_jobs, make_scrapes
from twin.app.power_worth import PowerAccount
from twin.app.schedulers import Schedulers, make_schedulers
from twin.app.telling import tell_alarms, tell_decision
from twin.app.upkeep import Upkeep
from twin.contracts import CommandBatch, Decision, Item, Source
from twin.errors import ConnectorError, StorageError
from twin.frame import NS, Frame
from twin.site import Site

if TYPE_CHECKING:
    from twin.app.daemon import Daemon

log = logging.getLogger(__name__)
UPKEEP_EVERY_S = 60.0


@dataclass(frozen=True)
class Prepared:
    """What a configuration asks for, ready to be started."""

    links: Links
    schedulers: Schedulers
    outside: Outside
    sources: list[Source]
    notifier: Notifier
    influx_token: str | None


class Services:
    """The daemon's surroundings."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        loaded, engine = daemon.loaded, daemon.engine
        self.broker: EmbeddedBroker | None = None
        self.links: Links | None = None
        self.outside = Outside()
        self.outflows: list[Outflow] = []
        self._job_counts: dict[str, dict[str, int]] = {}
        self._faults: dict[str, Callable[[], str]] = {}
        self.slow = ThreadPoolExecutor(2, thread_name_prefix="slow")
        influx = loaded.config.history.influx
        self.history = self._history(loaded.secret(influx.token_file) if influx else None)
        daemon.live.history = self.history
        daemon.live.power = self.power = PowerAccount(loaded.state / "power-account.json")
        self.upkeep = Upkeep(daemon.opened.folder, loaded.config.quotas)
        self.notifier = Notifier(loaded, engine.site.file.site)
        self.api = ApiServer()
        self._snapshot: asyncio.Task[None] | None = None
        self._wrong: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._snapshot_now, self._snapshot_ns = False, time.time_ns()

    def prepare(self, loaded: Loaded, site: Site) -> Prepared:
        """All that a configuration asks for, made and not started. Raises ConfigError; changes nothing."""
        settings, port = loaded.config.history, self.broker.port if self.broker is not None else None
        name = loaded.config.leader.name or _host()
        roster = Roster(lambda: self.daemon.engine)
        may_act = self.daemon.leading.may_act
        outside = make_outside(loaded, site, lambda: self.daemon.engine, may_act)
        links = Links(loaded, site, port, name, self._role, may_act, roster, outside.decoder)
        schedulers = make_schedulers(
            loaded, site, lambda: self.daemon.engine, self._stage, self.daemon.leading.may_act
        )
        make_actuators(
            loaded, site, lambda: self.daemon.engine, self._stage, self.daemon.leading.may_act, schedulers,
            self.daemon.clock.now_ns,
        )  # fmt: skip
        return Prepared(
            links,
            schedulers,
            outside,
            [
                links.source,
                *make_scrapes(loaded, site),
                *schedulers.sources,
                *make_jobs(loaded, roster),
                *outside.sources,
            ],
            Notifier(loaded, site.file.site),
            loaded.secret(settings.influx.token_file) if settings.influx else None,
        )

    def _history(self, token: str | None) -> HistoryService:
        loaded = self.daemon.loaded
        return HistoryService(loaded.config.history, loaded.state / "history", self.daemon.inflow.site, token)

    async def start(self) -> None:
        """Start all of it; what cannot be reached yet is tried again by itself."""
        daemon, loaded = self.daemon, self.daemon.loaded
        supervisor = daemon.supervisor
        if loaded.config.broker == "embedded":
            self.broker = EmbeddedBroker(loaded.config.embedded_port)
            await self.broker.start()
            supervisor.start("broker", "service", self.broker.run)
        self.start_links(self.prepare(loaded, daemon.inflow.site))
        if loaded.config.api is not None:
            supervisor.start("api", "service", lambda: self.api.run(daemon.live))
        self.notifier.prime(daemon.alarms.active(), time.time_ns())
        supervisor.start("notify", "service", self.notifier.run)
        supervisor.start("upkeep", "service", self._keep_up)
        supervisor.start("contingency", "service", Beforehand(daemon).run)
        supervisor.start("power-account", "service", partial(self.power.run, daemon.live))

    def start_links(self, prepared: Prepared) -> None:
        """Sources and sinks, for the site that frames are in from now on."""
        daemon = self.daemon
        self.links = prepared.links
        self._job_counts = {s.name: s.counts for s in prepared.links.to_jobs}
        self._job_counts["mqtt-reports"] = prepared.links.router.reports.counts
        self._job_counts |= {s.name: s.counts for s in prepared.sources if isinstance(s, FolderSource)}
        for source in prepared.sources:
            daemon.supervisor.start(source.name, "source", partial(source.run, daemon.inflow))
        self._faults = prepared.schedulers.faults
        self._job_counts |= prepared.schedulers.counts
        self.outside = prepared.outside
        if prepared.outside.publisher is not None:
            speak = partial(prepared.outside.speak, prepared.links.source.link, daemon.leading.may_act)
            daemon.supervisor.start("dsx-flex-out", "sink", speak)
        for name, work in prepared.schedulers.works.items():
            daemon.supervisor.start(name, "sink", work)
        for sink in (*prepared.links.sinks, *prepared.schedulers.sinks):
            flow = Outflow(sink, daemon.inflow.stage, daemon.leading.may_act, daemon.clock.now_ns)
            self.outflows.append(flow)
            daemon.supervisor.start(f"to-{sink.name}", "sink", flow.run)
        daemon.supervisor.start("heartbeat", "sink", partial(prepared.links.beat, daemon.leading.may_act))

    async def stop_links(self) -> None:
        """Before the site or the broker changes."""
        names = [n for n, p in self.daemon.live.parts.items() if p.kind in ("source", "sink")]
        await self.daemon.supervisor.stop(*names)
        self.outflows.clear()

    def announce(self) -> None:
        """Our role changed: the retained presence says so."""
        if self.links is not None and self.links.source.link.connected:
            task = asyncio.create_task(self._announce(self.links), name="announce")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _announce(self, links: Links) -> None:
        try:
            await links.source.link.announce()
        except ConnectorError as error:
            log.debug("presence: %s", error)  # the next connection announces anew

    def messages(self) -> dict[str, Any]:
        """What became of received messages, of the link they came by, and of what went to the history."""
        # First what is of fixed size: strangers invent the names behind it, and metrics are bounded.
        out: dict[str, Any] = {}
        if self.links is not None:
            link = self.links.source.link
            out["link"] = {"connected": link.connected, "fault": link.fault, **asdict(link.counts)}
        out["sinks"] = {f.sink.name: dict(f.counts) for f in self.outflows}
        out["jobs"] = {name: dict(counts) for name, counts in self._job_counts.items()}
        out["outside"] = {name: dict(counts) for name, counts in self.outside.counts.items()}
        out["history"] = self.history.stats()
        return out | self.daemon.inflow.summary()

    def _stage(self, items: Sequence[Item], now_ns: int) -> None:
        self.daemon.inflow.stage(items, now_ns)

    def _role(self) -> tuple[str, int]:
        return self.daemon.live.role, self.daemon.live.epoch

    def send(self, commands: tuple[CommandBatch, ...]) -> None:
        """Commands of a tick that is in the journal."""
        if self.daemon.leading.term is not None:
            for flow in self.outflows:
                flow.offer(self.daemon.engine.site, commands)

    def forget_commands(self) -> None:
        """We lead no longer."""
        for flow in self.outflows:
            flow.clear()

    def after(self, frame: Frame, decision: Decision) -> None:
        """After each tick: alarms, history, pins, snapshots."""
        daemon = self.daemon
        steps = {"answers": self._answer, "alarms": self._alarms, "pins": self._pin,
                 "history": self._keep_history, "conditions": self._conditions,
                 "snapshots": self._snapshot_if_due}  # fmt: skip
        for name, step in steps.items():
            try:
                step(frame, decision)
                daemon.alarms.clear(f"after/{name}")
            except Exception as error:  # what is around the ticks must not end them, nor each other
                log.exception("after tick %d: %s", decision.tick, name)
                daemon.alarms.condition(f"after/{name}", "critical", f"The daemon's {name} fail",
                                        (f"{type(error).__name__}: {error}"[:300],))  # fmt: skip

    def _alarms(self, frame: Frame, decision: Decision) -> None:
        changes = self.daemon.alarms.update(decision.findings, decision.now_ns)
        if changes:
            self.notifier.offer(changes)
            tell_alarms(changes)
        tell_decision(decision, frame.events, self.daemon.engine.site)

    def _answer(self, frame: Frame, decision: Decision) -> None:
        """What jobs reported may be what they were asked for."""
        acks = answers_of(self.daemon.engine, frame.events)
        if acks:
            self.daemon.inflow.stage(acks, decision.now_ns)

    def _pin(self, frame: Frame, decision: Decision) -> None:
        kinds = [r["kind"] for r in decision.records if r["kind"] in ("finding", "command")]
        if kinds:
            self.upkeep.pin(decision.now_ns, kinds[0])

    def _keep_history(self, frame: Frame, decision: Decision) -> None:
        self.history.offer(self.daemon.engine, decision)

    def _snapshot_if_due(self, frame: Frame, decision: Decision) -> None:
        daemon = self.daemon
        idle = self._snapshot is None or self._snapshot.done()
        every_ns = round(daemon.loaded.config.snapshot_every_s * NS)
        if idle and (self._snapshot_now or decision.now_ns - self._snapshot_ns >= every_ns):
            self._snapshot_now, self._snapshot_ns = False, decision.now_ns
            # Copied here, where the journal holds all lines of this tick; written elsewhere.
            job = daemon.recorder.snapshot_job(daemon.engine)
            self._snapshot = asyncio.create_task(self._take_snapshot(job), name="snapshot")

    def _conditions(self, frame: Frame, decision: Decision) -> None:
        """What is wrong with services that do not fail as a whole."""
        alarms = self.daemon.alarms
        wrong = {i: (severity, title, text) for i, severity, title, text in self.history.alarms()}
        for name, fault in self.notifier.faults().items():
            wrong[f"notify/{name}"] = ("warning", f"Alarms cannot be sent to {name}", fault)
        if self.upkeep.fault:
            wrong["upkeep"] = ("warning", "Old files cannot be pruned", self.upkeep.fault)
        for flow in self.outflows:
            if flow.fault:
                name = flow.sink.name
                wrong[f"sink/{name}"] = ("critical", f"Commands do not reach {name}", flow.fault)
        for name, told in self._faults.items():
            if told():
                wrong.setdefault(f"sink/{name}", ("critical", f"Commands do not reach {name}", told()))
        wrong |= self.outside.wrong()
        if self.links is not None and self.links.source.link.fault:
            wrong["broker"] = ("critical", "The broker denies us", self.links.source.link.fault)
        for identity in self._wrong - wrong.keys():
            alarms.clear(identity)
        for identity, (severity, title, text) in wrong.items():
            alarms.condition(identity, severity, title, (text,))
        self._wrong = set(wrong)

    async def _take_snapshot(self, job: Callable[[], Path]) -> None:
        alarms = self.daemon.alarms
        try:
            await asyncio.get_running_loop().run_in_executor(self.slow, job)
            alarms.clear("snapshot")
        except StorageError as error:
            log.error("%s", error)
            alarms.condition("snapshot", "warning", "A snapshot cannot be written", (str(error),),
                             "Free space on the state folder's file system.")  # fmt: skip

    def snapshot_soon(self) -> None:
        """With this tick."""
        self._snapshot_now = True

    async def _keep_up(self) -> None:
        """Once a second force the trace to the disk; once a minute make room."""
        daemon, loop = self.daemon, asyncio.get_running_loop()
        due = time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            trace = daemon.recorder.trace
            job = trace.sync_job() if trace is not None else None
            if job is not None:
                await loop.run_in_executor(self.slow, job)
            if time.monotonic() < due:
                continue
            due = time.monotonic() + UPKEEP_EVERY_S
            for kind, body in await loop.run_in_executor(self.slow, self.upkeep.run, time.time_ns()):
                daemon.live.note(kind, body)

    async def reconfigure(self, old: Config, new: Config, prepared: Prepared) -> None:
        """Sections that concern one service: it alone begins anew."""
        daemon, supervisor = self.daemon, self.daemon.supervisor
        if differs(old, new, "history"):
            before, self.history = self.history, self._history(prepared.influx_token)
            daemon.live.history = self.history
            await asyncio.get_running_loop().run_in_executor(self.slow, before.close)
        if differs(old, new, "notify"):
            await supervisor.stop("notify")
            self.notifier = prepared.notifier
            self.notifier.prime(daemon.alarms.active(), time.time_ns())
            supervisor.start("notify", "service", self.notifier.run)
        if differs(old, new, "quotas"):
            self.upkeep = Upkeep(daemon.opened.folder, new.quotas)
        if differs(old, new, "api"):
            await supervisor.stop("api")
            self.api = ApiServer()
            if new.api is not None:
                supervisor.start("api", "service", lambda: self.api.run(daemon.live))
        elif problems := self.api.reload():
            log.error("the tokens stay as they were: %s", "; ".join(problems))

    async def stop(self) -> None:
        """End all parts; then what holds files."""
        await self.daemon.supervisor.stop_all()
        if self.broker is not None:
            await self.broker.stop()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.slow, self.history.close)
        if self._snapshot is not None:
            await asyncio.wait([self._snapshot])
        self.slow.shutdown(wait=False)


def _host() -> str:
    import socket

    return socket.gethostname().partition(".")[0] or "daemon"
