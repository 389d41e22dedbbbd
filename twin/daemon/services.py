"""Services: all parts around the ticks, started, watched and stopped together.

Sources, sinks, broker, interfaces, history, notifications, retention, snapshots and contingency caps may fail
without the ticks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from connectors.jobs import FolderSource
from connectors.orders import SinkContext
from twin.api import ApiServer, Part, Runtime
from twin.archive import ArchiveWriter, make_archive
from twin.catalogue import NS, ConnectorError, StorageError
from twin.config import Config, History, Loaded, Tls, differs
from twin.contracts import (
    CommandBatch,
    CommandRecord,
    Decision,
    EventRecord,
    FailedRecord,
    FindingRecord,
    JournalRecord,
    LapsedRecord,
    Source,
)
from twin.daemon.alarm_causes import AlarmCauses
from twin.daemon.alarms import AlarmBook, AlarmChange
from twin.daemon.bootstrap import OpenedRun
from twin.daemon.carrier_file import carrier_job
from twin.daemon.contingency_publisher import ContingencyPublisher
from twin.daemon.dispatcher import Dispatcher
from twin.daemon.ingest import Ingest
from twin.daemon.journal_anchor import JournalAnchor
from twin.daemon.leader import daemon_name
from twin.daemon.leadership import Leadership
from twin.daemon.notify import Notifier
from twin.daemon.policy_accounts import PolicyAccounts
from twin.daemon.supervision import Supervisor
from twin.report import LedgerStore
from twin.run import OPEN, HistoryService, Upkeep, journal_lines, line_hash
from twin.site import Site
from twin.telemetry import Event, Frame, Held, Released, Resumed, TicksSkipped
from twin.wiring import (
    EmbeddedBroker,
    FleetInterface,
    GridInterface,
    HallState,
    Links,
    Member,
    Roster,
    Schedulers,
    SelfDescription,
    WiringContext,
    answers_of,
    make_actuators,
    make_fleet,
    make_grid_interface,
    make_jobs,
    make_schedulers,
    make_scrapes,
)

log = logging.getLogger(__name__)
# One line for each decision and alarm; the journal has them whole
event_log = logging.getLogger("racktwin")
SYNC_EVERY_S, UPKEEP_EVERY_S, HEADS_EVERY_S = 1.0, 60.0, 60.0
CONNECT_S = 10.0  # after the start links are made; no sink is in trouble until then. source: estimate


@dataclass(frozen=True)
class PreparedParts:
    """Parts of a configuration, ready to start."""

    links: Links
    schedulers: Schedulers
    outside: GridInterface
    fleet: FleetInterface
    sources: list[Source]
    notifier: Notifier
    influx_token: str | None
    archive: ArchiveWriter | None


class Services:
    """All parts around the ticks. `now_ns` is the clock of the ticks."""

    def __init__(
        self,
        live: Runtime,
        opened: OpenedRun,
        ingest: Ingest,
        alarms: AlarmBook,
        leadership: Leadership,
        now_ns: Callable[[], int],
    ) -> None:
        self.live, self.opened, self.ingest, self.alarms = live, opened, ingest, alarms
        self.leadership, self._now_ns = leadership, now_ns
        loaded, engine = live.loaded, live.engine
        self.supervisor = Supervisor(live.parts, self._part_alarm)
        leadership.on_change = self._leadership_changed
        self.broker: EmbeddedBroker | None = None
        self.links: Links | None = None
        self.outside, self.fleet = GridInterface(), FleetInterface()
        self._run = ""  # of this journal: the hash of its first line
        self.dispatchers: list[Dispatcher] = []
        self._job_counts: dict[str, dict[str, int]] = {}
        self._faults: dict[str, Callable[[], str]] = {}
        self.slow = ThreadPoolExecutor(2, thread_name_prefix="slow")
        influx = loaded.config.history.influx
        token = loaded.secret(influx.token_file) if influx else None
        self.history = self._history(token, self._archive(loaded))
        live.history = self.history
        self.energy_ledger = live.energy_ledger = LedgerStore(loaded.state / "ledger")
        self._closed_hours: list[bytes] | None = None  # that the last tick left
        self._ledger_write: Future[None] | None = None
        self.accounts = PolicyAccounts(live, loaded.state)
        self.upkeep = Upkeep(self.opened.folder, loaded.config.quotas)
        self.trace_fault = ""  # why the trace could not be forced to the disk within the last minute
        self.notifier = Notifier(loaded, engine.site.file.site)
        self.anchor = JournalAnchor(loaded, opened, alarms, self.slow, lambda: self.links)
        self.api = ApiServer()
        self._snapshot: asyncio.Task[None] | None = None
        self._conditions_raised: set[str] = set()
        self._causes, self._link_sinks = AlarmCauses(), list[str]()
        self._tasks: set[asyncio.Task[None]] = set()
        self._snapshot_now, self._snapshot_ns = False, time.time_ns()

    def prepare(self, loaded: Loaded, site: Site) -> PreparedParts:
        """Create all parts of a configuration without starting them. Raises ConfigError; changes nothing."""
        settings, port = loaded.config.history, self.broker.port if self.broker is not None else None
        name = daemon_name(loaded)
        roster = Roster(lambda: self.live.engine)
        may_act = self.leadership.may_act
        outside = make_grid_interface(loaded, site, lambda: self.live.engine, may_act)
        member = Member(name, lambda: (self.live.role, self.live.epoch), may_act)
        links = Links(loaded, site, port, member, roster, outside.decoder)
        sink_context = SinkContext(self.ingest.stage, may_act, self._now_ns)
        context = WiringContext(loaded, site, lambda: self.live.engine, sink_context)
        schedulers = make_schedulers(context)
        make_actuators(context, schedulers)
        hall = HallState(lambda: self.live.epoch, self._alarm_counts, self._journal_head, may_act)
        fleet = make_fleet(loaded, site, lambda: self.live.engine, hall)
        return PreparedParts(
            links,
            schedulers,
            outside,
            fleet,
            [
                links.source,
                *make_scrapes(loaded, site),
                *schedulers.sources,
                *make_jobs(loaded, roster),
                *outside.sources,
                *fleet.sources,
            ],
            Notifier(loaded, site.file.site),
            loaded.secret(settings.influx.token_file) if settings.influx else None,
            self._archive(loaded),
        )

    def _alarm_counts(self) -> dict[str, int]:
        """Active alarms by severity."""
        return dict(Counter(alarm.severity for alarm in self.alarms.active()))

    def _journal_head(self) -> tuple[str, int, str]:
        """(run, lines, head) of the journal as far as it is on the disk."""
        lines, head = self.opened.recorder.safe
        if lines and not self._run:
            self._run = line_hash(next(journal_lines(self.opened.folder / OPEN), b""))
        return self._run, lines, head

    async def _note_heads(self) -> None:
        """Write the journal heads of all halls into this journal, once a minute."""
        while True:
            await asyncio.sleep(HEADS_EVERY_S)
            record = self.fleet.heads()
            if record is not None:
                self.live.note(record)

    def _history(self, token: str | None, archive: ArchiveWriter | None) -> HistoryService:
        loaded = self.live.loaded
        outside = {} if archive is None else {"clickhouse": archive}
        folder = loaded.state / "history"
        return HistoryService(_whole_paths(loaded), folder, self.ingest.site, token, outside)

    def _archive(self, loaded: Loaded) -> ArchiveWriter | None:
        """The writer of the fleet's history, not started. Raises ConfigError."""
        if loaded.config.history.clickhouse is None:
            return None
        return make_archive(
            loaded,
            lambda: self.live.engine.site,
            lambda: self.live.role == "leader",
            lambda: self.opened.recorder.safe[0],
            self.opened.folder,
        )

    async def start(self) -> None:
        """Start all parts. A part that cannot connect yet retries by itself."""
        live, loaded, supervisor = self.live, self.live.loaded, self.supervisor
        if loaded.config.broker == "embedded":
            self.broker = EmbeddedBroker(loaded.config.embedded_port)
            await self.broker.start()
            supervisor.start("broker", "service", self.broker.run)
        self.start_links(self.prepare(loaded, self.ingest.site))
        if loaded.config.api is not None:
            supervisor.start("api", "service", lambda: self.api.run(self.live))
        self.notifier.load()
        self.notifier.prime(self.alarms.active(), time.time_ns())
        supervisor.start("notify", "service", self.notifier.run)
        supervisor.start("upkeep", "service", self._keep_up)
        publisher = ContingencyPublisher(live, self.opened, self.ingest, self.leadership, lambda: self.links)
        supervisor.start("contingency", "service", publisher.run)
        if self.anchor.signer is not None:
            supervisor.start("journal-anchor", "service", self.anchor.run)
        supervisor.start("policy-accounts", "service", self.accounts.run)

    def start_links(self, prepared: PreparedParts) -> None:
        """Sources and sinks, for the site that frames are in from now on."""
        supervisor, may_act = self.supervisor, self.leadership.may_act
        self.links = prepared.links
        self._job_counts = {s.name: s.counts for s in prepared.links.to_jobs}
        self._job_counts["mqtt-reports"] = prepared.links.router.reports.counts
        self._job_counts |= {s.name: s.counts for s in prepared.sources if isinstance(s, FolderSource)}
        self._causes.part_of = {
            origin: source.name for source in prepared.sources for origin in getattr(source, "origins", ())
        }
        for source in prepared.sources:
            run = partial(source.run, self.ingest.inlet_of(source))
            supervisor.start(source.name, "source", run, getattr(source, "settle_s", None))
        self._faults = prepared.schedulers.faults
        self._job_counts |= prepared.schedulers.counts
        self.outside = prepared.outside
        if prepared.outside.publisher is not None:
            publish = prepared.links.source.publisher(may_act)
            supervisor.start("dsx-flex-out", "sink", partial(prepared.outside.publisher.run, publish))
        self.fleet = prepared.fleet
        if prepared.fleet.publisher is not None:
            supervisor.start("fleet-summary", "sink", prepared.fleet.publisher.run)
        if prepared.fleet.decoder is not None:
            supervisor.start("hall-heads", "sink", self._note_heads)
        for name, work in prepared.schedulers.works.items():
            supervisor.start(name, "sink", work)
        for sink in (*prepared.links.sinks, *prepared.schedulers.sinks, *prepared.fleet.sinks):
            dispatcher = Dispatcher(sink, self.ingest.stage, may_act, self._now_ns)
            self.dispatchers.append(dispatcher)
            supervisor.start(f"to-{sink.name}", "sink", dispatcher.run)
        supervisor.start("heartbeat", "sink", partial(prepared.links.beat, may_act))
        self._link_sinks = [
            "heartbeat",
            "dsx-flex-out",
            *(f"to-{sink.name}" for sink in prepared.links.sinks),
        ]

    async def stop_links(self) -> None:
        """Stop sources and sinks before the site or the broker changes."""
        names = [n for n, p in self.live.parts.items() if p.kind in ("source", "sink")]
        await self.supervisor.stop(*names)
        self.dispatchers.clear()

    def announce(self) -> None:
        """Publish the changed role in the retained presence."""
        if self.links is not None and self.links.source.link.connected:
            task = asyncio.create_task(self._announce(self.links), name="announce")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _announce(self, links: Links) -> None:
        try:
            await links.source.link.announce()
        except ConnectorError as error:
            log.debug("presence: %s", error)  # the next connection announces anew

    def describe(self) -> SelfDescription:
        """Return points and paths of agents, as they describe the site on the bus."""
        if self.links is None:
            return SelfDescription()
        return SelfDescription(self.links.router.described(), self.links.router.unplaced())

    def messages(self) -> dict[str, Any]:
        """Counts of received messages, of their links, and of writes to the history."""
        # First what is of fixed size: strangers invent the names behind it, and metrics are bounded.
        out: dict[str, Any] = {}
        if self.links is not None:
            link = self.links.source.link
            out["link"] = {"connected": link.connected, "fault": link.fault, **asdict(link.counts)}
        out["sinks"] = {d.sink.name: dict(d.counts) for d in self.dispatchers}
        out["jobs"] = {name: dict(counts) for name, counts in self._job_counts.items()}
        out["outside"] = {name: dict(counts) for name, counts in self.outside.counts.items()}
        out |= {
            name: {"connected": link.connected, "fault": link.fault, **link.counts}
            for name, link in self.fleet.links.items()
        }
        out["history"] = self.history.stats()
        return out | self.ingest.summary()

    def send(self, commands: tuple[CommandBatch, ...]) -> None:
        """Send the commands of a tick that is in the journal."""
        if self.leadership.term is not None:
            for dispatcher in self.dispatchers:
                dispatcher.offer(self.live.engine.site, commands)

    def forget_commands(self) -> None:
        """Drop the commands that wait for the sinks."""
        for dispatcher in self.dispatchers:
            dispatcher.clear()

    def _leadership_changed(self, leads: bool) -> None:
        if not leads:
            self.forget_commands()
        self.announce()

    def after(self, frame: Frame, decision: Decision) -> None:
        """Run the work after a tick: alarms, history, pins, snapshots."""
        steps = {
            "answers": self._answer,
            "alarms": self._alarms,
            "pins": self._pin,
            "history": self._keep_history,
            "ledger": self._keep_ledger,
            "conditions": self._conditions,
            "snapshots": self._snapshot_if_due,
        }
        for name, step in steps.items():
            try:
                step(frame, decision)
                self.alarms.clear(f"after/{name}")
            except Exception as error:  # what is around the ticks must not end them, nor each other
                log.exception("%s failed after tick %d", name, decision.tick)
                self.alarms.condition(
                    f"after/{name}",
                    "critical",
                    f"The daemon's {name} fail",
                    (f"{type(error).__name__}: {error}"[:300],),
                )

    def _alarms(self, frame: Frame, decision: Decision) -> None:
        found = self._causes.named(decision.findings, self.live.engine, self.ingest.ledger)
        waiting = [p.name for p in self.live.parts.values() if p.state == "waiting"]
        for name in self._causes.down(waiting):
            self.supervisor.alarm_now(name)
        changes = self.alarms.update(found, decision.now_ns, self._causes.of(self._link_sinks))
        if changes:
            self.notifier.offer(changes)
            log_alarms(changes)
        self.notifier.save_if_due(decision.now_ns, self.alarms.is_due())
        self.alarms.save_if_due()
        log_decision(decision, frame.events, self.live.engine.site)

    def _answer(self, frame: Frame, decision: Decision) -> None:
        """Acknowledge commands that a job report answers."""
        acks = answers_of(self.live.engine, frame.events)
        if acks:
            self.ingest.stage(acks, decision.now_ns)

    def _pin(self, frame: Frame, decision: Decision) -> None:
        kinds = [r.kind for r in decision.records if isinstance(r, FindingRecord | CommandRecord)]
        if kinds:
            self.upkeep.pin(decision.now_ns, kinds[0])

    def _keep_history(self, frame: Frame, decision: Decision) -> None:
        self.history.offer(self.live.engine, decision)

    def _keep_ledger(self, frame: Frame, decision: Decision) -> None:
        """Write the hours that are over, in a thread; again with the next tick where the disk refused."""
        closed = self.live.engine.ledger.closed
        idle = self._ledger_write is None or self._ledger_write.done()
        if closed and idle and (closed is not self._closed_hours or self.energy_ledger.fault):
            self._closed_hours = closed
            self._ledger_write = self.slow.submit(self.energy_ledger.write, closed)

    def _snapshot_if_due(self, frame: Frame, decision: Decision) -> None:
        idle = self._snapshot is None or self._snapshot.done()
        every_ns = round(self.live.loaded.config.snapshot_every_s * NS)
        if idle and (self._snapshot_now or decision.now_ns - self._snapshot_ns >= every_ns):
            self._snapshot_now, self._snapshot_ns = False, decision.now_ns
            # Copied here, where the journal holds all lines of this tick; written elsewhere.
            job = self.opened.recorder.snapshot_job(self.live.engine)
            self._snapshot = asyncio.create_task(
                self._take_snapshot(job, self.carrier_job()), name="snapshot"
            )

    def _conditions(self, frame: Frame, decision: Decision) -> None:
        """Alarms of services that fail in part."""
        alarms = self.alarms
        wrong = {i: (severity, title, text) for i, severity, title, text in self.history.alarms()}
        for name, fault in self.notifier.faults().items():
            wrong[f"notify/{name}"] = ("warning", f"Alarms cannot be sent to {name}", fault)
        if self.energy_ledger.fault:
            wrong["ledger"] = ("warning", "The ledger cannot be written", self.energy_ledger.fault)
        if self.upkeep.fault:
            wrong["upkeep"] = ("warning", "Old files cannot be pruned", self.upkeep.fault)
        if self.trace_fault:
            title = "A power loss may take the last ticks of the trace"
            wrong["trace/sync"] = ("warning", title, self.trace_fault)
        findings = self.live.engine.findings
        if findings.full:
            text = f"{len(findings.active):,} are active; of others only critical ones take their place"
            wrong["findings"] = ("warning", "There are more findings than are kept", text)
        begins = decision.now_ns - self.live.started_ns < round(CONNECT_S * NS)
        for dispatcher in self.dispatchers:
            if begins:
                dispatcher.forgive()
            if dispatcher.fault:
                name = dispatcher.sink.name
                wrong[f"sink/{name}"] = ("critical", f"Commands do not reach {name}", dispatcher.fault)
        for name, fault_of in self._faults.items():
            if fault := fault_of():
                wrong.setdefault(f"sink/{name}", ("critical", f"Commands do not reach {name}", fault))
        wrong |= self.outside.wrong()
        if self.links is not None and self.links.source.link.fault:
            wrong["broker"] = (
                "critical",
                "The broker denies the daemon access",
                self.links.source.link.fault,
            )
        for identity in self._conditions_raised - wrong.keys():
            alarms.clear(identity)
        for identity, (severity, title, text) in wrong.items():
            alarms.condition(identity, severity, title, (text,))
        self._conditions_raised = set(wrong)

    def carrier_job(self) -> Callable[[], None]:
        """A function that writes which source carried each reading."""
        site = self.live.engine.site.spec_hash
        return carrier_job(self.ingest.ledger, self.live.loaded.state, site)

    async def _take_snapshot(self, job: Callable[[], Path], carriers: Callable[[], None]) -> None:
        alarms, loop = self.alarms, asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self.slow, job)
            await loop.run_in_executor(self.slow, carriers)
            alarms.clear("snapshot")
        except StorageError as error:
            log.error("%s", error)
            alarms.condition(
                "snapshot",
                "warning",
                "A snapshot cannot be written",
                (str(error),),
                "Free space on the state folder's file system.",
            )

    def snapshot_soon(self) -> None:
        """Take a snapshot with this tick."""
        self._snapshot_now = True

    async def _keep_up(self) -> None:
        """Once a second force the trace to the disk; once a minute make room."""
        loop = asyncio.get_running_loop()
        due, failed = time.monotonic(), False
        while True:
            await asyncio.sleep(SYNC_EVERY_S)
            trace = self.opened.recorder.trace
            job = trace.sync_job() if trace is not None else None
            if job is not None:
                try:
                    await loop.run_in_executor(self.slow, job)
                except StorageError as error:
                    # Linux reports an error once: a later success does not bring back what was lost
                    self.trace_fault, failed = str(error), True
            if time.monotonic() < due:
                continue
            due = time.monotonic() + UPKEEP_EVERY_S
            self.trace_fault, failed = self.trace_fault if failed else "", False
            for record in await loop.run_in_executor(self.slow, self.upkeep.run, time.time_ns()):
                self.live.note(record)

    async def reconfigure(
        self, old: Config, new: Config, prepared: PreparedParts, renewed: Collection[str]
    ) -> None:
        """Apply changed sections and those with `renewed` files; restart only the services that they
        concern.
        """
        supervisor = self.supervisor
        if differs(old, new, "broker") or "broker" in renewed:
            self.anchor.change_broker(self.live.loaded)
        if differs(old, new, "history") or "history" in renewed:
            before = self.history
            self.history = self._history(prepared.influx_token, prepared.archive)
            self.live.history = self.history
            await asyncio.get_running_loop().run_in_executor(self.slow, before.close)
        if differs(old, new, "notify") or "notify" in renewed:
            await supervisor.stop("notify")
            prepared.notifier.take_over(self.notifier)
            self.notifier = prepared.notifier
            self.notifier.prime(self.alarms.active(), time.time_ns())
            supervisor.start("notify", "service", self.notifier.run)
        if differs(old, new, "quotas"):
            self.upkeep = Upkeep(self.opened.folder, new.quotas)
        if differs(old, new, "api") or "api" in renewed:
            await supervisor.stop("api")
            self.api = ApiServer()
            if new.api is not None:
                supervisor.start("api", "service", lambda: self.api.run(self.live))
        elif problems := self.api.reload():
            log.error("the tokens file is refused and the tokens stay as they were: %s", "; ".join(problems))

    def _part_alarm(self, part: Part, error: str | None) -> None:
        if error is None:
            self.alarms.clear(f"part/{part.name}")
            return
        title, action = f"{part.kind} {part.name} is down", "Check the other end."
        if part.kind == "source":
            broker = self.links.source.link.where if self.links is not None else ""  # broker HOST:PORT
            outages = self.live.engine.diagnosis.silence.outages
            known = self._causes.part_down(part.name, broker, self.ingest.ledger, outages)
            title, action = known or (title, action)
        self.alarms.condition(
            f"part/{part.name}",
            "critical" if part.kind == "sink" else "warning",
            title,
            (error,),
            f"{action} The daemon retries by itself.",
        )

    async def stop(self) -> None:
        """Stop all parts, then the parts that hold files."""
        await self.supervisor.stop_all()
        if self.broker is not None:
            await self.broker.stop()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.slow, self.history.close)
        if self._snapshot is not None:
            await asyncio.wait([self._snapshot])
        self.slow.shutdown(wait=False)


LEVELS = {"critical": logging.CRITICAL, "warning": logging.WARNING}
MAX_LOGGED = 8  # commands of a tick that have a line of their own
MAX_LOGGED_ALARMS = 50  # of a tick, the gravest; source: estimate


def log_alarms(changes: Iterable[AlarmChange]) -> None:
    """Raised, cleared, acknowledged: what a person would want to find by time; in a storm the gravest.

    Critical lines are never held back by the log itself, so their number is bounded here.
    """
    lines = [
        (logging.INFO if c.what == "cleared" else LEVELS.get(c.alarm.severity, logging.INFO), c)
        for c in changes
    ]
    lines.sort(key=lambda line: -line[0])
    for level, change in lines[:MAX_LOGGED_ALARMS]:
        event_log.log(level, "alarm %s: %s [%s]", change.what, change.alarm.title, change.alarm.id)
    if left := lines[MAX_LOGGED_ALARMS:]:
        event_log.log(left[0][0], "%d more alarms changed with this tick", len(left))


def log_decision(decision: Decision, events: tuple[Event, ...], site: Site) -> None:
    """New commands and leases that ran out, what people asked, ticks that did not happen."""
    for event in events:
        if isinstance(event, Held | Released | Resumed):
            reason = getattr(event, "reason", "")
            event_log.warning(
                "%s by %s%s", type(event).__name__.lower(), event.author, f": {reason}" if reason else ""
            )
        elif isinstance(event, TicksSkipped):
            event_log.warning("%d ticks were skipped: %s", event.count, event.why)
    for batch in [c for c in decision.commands if not c.renewal][:MAX_LOGGED]:
        table = batch.control.partition(".")[0]
        first = site.name(table, int(batch.index[0]))
        low, high = float(batch.value.min()), float(batch.value.max())
        value = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        does = "gives back" if batch.final else "commands"
        by = batch.policy or "takeover"
        event_log.info(
            "%s %s %s for %d %s, first %s, by %s: %s",
            does,
            batch.control,
            value,
            len(batch.index),
            table,
            first,
            by,
            batch.reason,
        )
    for record in decision.records:
        _log_record(record)


def _log_record(record: JournalRecord) -> None:
    match record:
        case LapsedRecord():
            event_log.warning("leases lapsed: %s of %d", record.control, len(record.index))
        case FailedRecord():
            event_log.error("%s of %d: %s", record.control, len(record.index), record.why)
        case EventRecord(refused=str()):
            event_log.warning("%s refused: %s", type(record.event).__name__, record.refused)


def _whole_paths(loaded: Loaded) -> History:
    """The section of the history, its files by their whole paths. Raises ConfigError."""
    history = loaded.config.history
    if history.influx is None or history.influx.tls is None:
        return history
    loaded.trust(history.influx.tls, "history.influx.tls")
    files = msgspec.structs.asdict(history.influx.tls)
    tls = Tls(**{key: None if name is None else str(loaded.file(name)) for key, name in files.items()})
    return msgspec.structs.replace(history, influx=msgspec.structs.replace(history.influx, tls=tls))
