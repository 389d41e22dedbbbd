"""Daemon: the loop around `engine.tick` that connects the engine to the site.

Each tick goes frame -> trace -> tick -> journal (on the disk) -> commands, alarms, history, interfaces.

Sources, sinks and services may fail; the supervisor restarts them. If the journal cannot be written, nothing
is commanded and the process ends; leases lapse.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

from connectors.mqtt import FLOODED
from twin import VERSION
from twin.api import JournalLine, Runtime
from twin.catalogue import NS, ConfigError, StorageError, TwinError
from twin.config import Loaded, differs, load_config
from twin.contracts import DaemonRecord, Decision, JournalRecord, ReloadRecord
from twin.daemon.alarms import AlarmBook
from twin.daemon.authority import AuthorityBook
from twin.daemon.bootstrap import OpenedRun, load_checked, open_run
from twin.daemon.carrier_file import resume_carriers
from twin.daemon.clock import Clock, Tick
from twin.daemon.collector import collect_garbage, freeze_heap
from twin.daemon.ingest import Ingest
from twin.daemon.leadership import Leadership
from twin.daemon.sdnotify import SdNotify
from twin.daemon.services import Services
from twin.run import Fitter, Quarantine, manifest
from twin.site import SiteFile, SiteSpec
from twin.telemetry import AuthorityChanged, Event, Frame, SiteChanged, TicksSkipped
from twin.wiring import file_digests

log = logging.getLogger(__name__)
STOP_S = 4.0  # for all parts together; systemd is given five seconds
TRACE_RETRY_S = 10.0
LONG_TICK_S = 2.0  # requests and a new term close the frame of a longer one
# Settings that a running process keeps, and those that restart the links
FIXED = ("state", "tick_s", "leader", "journal", "simulated", "embedded_port")
LINKS = (
    "broker", "scrapes", "jobs", "kubernetes", "burn_in", "redfish", "dcmi", "power", "outlooks", "fleet"
)  # fmt: skip
LEFT_OUT_S, MAX_LEFT_OUT = 86_400.0, 8  # how long and how many the alarm shows. source: estimate
MAX_NOTES = 1000  # between two ticks
CLOCKS_EVERY = 10  # ticks between looks at the clocks of sources
FLOOD_ALARM_S, FLOOD_OVER_S = 10.0, 60.0  # between two alarms of a flood; without one, it is over


class Daemon:
    """Daemon of one site, one configuration and one run folder. Create it inside a running loop."""

    def __init__(self, loaded: Loaded, notify: SdNotify) -> None:
        self.loaded, self.notify = loaded, notify
        self.disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self.tick_lock = asyncio.Lock()  # held by a tick from its frame to its commands
        opened: OpenedRun = open_run(loaded)
        self.opened, self.engine, self.recorder = opened, opened.engine, opened.recorder
        serials, tick_s = self.engine.intake.serials, loaded.config.tick_s
        self.ingest = Ingest(self.engine.site, serials, tick_s, _passed_ns)
        self.ingest.inbox.resume(self.engine.state)
        resume_carriers(self.ingest.ledger, loaded.state, self.engine.site.spec_hash, time.time_ns())
        self.clock = Clock(loaded.config.tick_s, opened.last_ns)
        self.tick_no = opened.last_tick + 1
        self.fitter = Fitter()
        self._notes: list[JournalLine] = []
        self.alarms = AlarmBook(loaded.state, self._note)
        self.authority: AuthorityBook = opened.authority
        self.live = Runtime(loaded, self.engine, time.time_ns(), run_dir=str(opened.folder), version=VERSION)
        self.live.alarms, self.live.put_event = self.alarms, self._put_request
        self.live.write_note, self.live.ledger = self._note, self.ingest.ledger
        self.leadership = Leadership(self.live, opened, self.put)
        self.services = Services(
            self.live, opened, self.ingest, self.alarms, self.leadership, self.clock.now_ns
        )
        self.live.messages, self.live.describe = self.services.messages, self.services.describe
        self.live.veto, self.live.reload = self.leadership.veto, self.reload
        self._reloads = asyncio.Lock()
        self._next_reload: asyncio.Task[list[str]] | None = None  # that waits for the one under way
        self._in_part = False  # a reload failed after its site and links were in force
        self._files = file_digests(loaded)  # before any of them is read, so that no renewal is missed
        self._flooded = (0, 0)  # reports dropped at the last alarm, and its instant
        self._trace_retry = 0.0
        self._trace_lost = False
        self._broken = False  # a tick failed half-way: the engine is in no state that a replay gives
        self.quarantine = Quarantine(opened.folder)
        self._last_left_out: list[str] = []

    async def run(self) -> None:
        """Until `stop`. Raises StorageError when the journal fails, TwinError for a broken invariant."""
        for fault in self.opened.faults:
            log.warning("start: %s", fault)
        opened = self.opened
        self._note(
            DaemonRecord(
                started=VERSION,
                resumed_at=opened.last_tick,
                wall_ns=time.time_ns(),
                faults=tuple(opened.faults[:20]),
            )
        )
        if 0 < self.notify.watchdog_s < 2.5 * self.loaded.config.tick_s:
            raise ConfigError(
                f"{self.loaded.path}: $.tick_s: {self.loaded.config.tick_s:g} s, but the service manager's "
                f"watchdog wants a tick every {self.notify.watchdog_s:g} s; expected WatchdogSec of at least "
                "2.5 ticks in the unit"
            )
        try:
            # A site that changed while we were away comes first: sources speak in its numbers.
            self.put(self.opened.events)
            self.services.history.change_site(self.ingest.site)
            await self.leadership.start()
            await self.services.start()
            freeze_heap()
            while not self.live.stopping:
                tick = await self._due()
                if tick is not None:
                    async with self.tick_lock:
                        await self._step(tick)
        finally:
            await self._close()

    def stop(self) -> None:
        """Stop after the current tick."""
        self.live.stopping = True
        self.ingest.urgent.set()

    async def _due(self) -> Tick | None:
        """Wait for the next tick and return it; None when the daemon stops."""
        clock, urgent = self.clock, self.ingest.urgent
        while not self.live.stopping:
            wait_s = clock.wait_s()
            if wait_s <= 0:
                return clock.regular()
            if urgent.is_set():
                tick = clock.urgent()
                if tick is not None:
                    return tick
                await asyncio.sleep(min(wait_s, max(0.001, clock.wait_urgent_s())))
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await urgent.wait()
        return None

    async def _step(self, tick: Tick) -> None:
        begun = time.perf_counter()
        for event in self.fitter.due(tick.now_ns, self.engine.site.spec_hash, patient=False):
            self.ingest.put_event(event)
        if tick.skipped:
            self.live.stats.skipped += tick.skipped
            self.ingest.put_event(TicksSkipped(count=tick.skipped, why=tick.why))
        self.ingest.ahead_ns = self.clock.ahead_ns
        frame = self.ingest.take(self.tick_no, tick.now_ns, tick.dt_s)
        frame, known = self.quarantine.without_known(dataclasses.replace(frame, urgent=tick.urgent))
        if known:
            self._last_left_out = known
            self.live.counts["input_left_out"] = self.live.counts.get("input_left_out", 0) + len(known)
        self._trace(frame)
        try:
            decision = self.engine.tick(frame)
        except Exception as error:
            self._broken = True
            raise TwinError(
                f"tick {frame.tick}: the engine failed: {error}; the next start leaves out what it failed on"
            ) from error
        self.tick_no += 1
        notes, self._notes = self._notes, []
        # Intent before act: the journal is on the disk before anything leaves.
        loop = asyncio.get_running_loop()
        first_seq = await loop.run_in_executor(self.disk, self._journal, decision, notes)
        self._after(frame, decision, first_seq)
        stats = self.live.stats
        stats.ticks, stats.urgent = stats.ticks + 1, stats.urgent + tick.urgent
        stats.took_s.append(time.perf_counter() - begun)
        stats.late_s.append(tick.late_s)
        if not self.live.ready:
            self.live.ready = True
            self.notify.ready(f"tick {decision.tick}")
        self.notify.watchdog()
        collect_garbage(decision.tick)

    def _trace(self, frame: Frame) -> None:
        """Write the frame before its effects. If the trace cannot be written, raise an alarm and continue."""
        # What is traced later must name the site that changes here
        changes = SiteChanged in map(type, frame.events)
        if self._trace_lost and time.monotonic() < self._trace_retry and not changes:
            self.live.counts["ticks_not_traced"] = self.live.counts.get("ticks_not_traced", 0) + 1
            return
        try:
            self.recorder.before(frame)
        except StorageError as error:
            self.live.counts["ticks_not_traced"] = self.live.counts.get("ticks_not_traced", 0) + 1
            self._trace_retry = time.monotonic() + TRACE_RETRY_S
            if not self._trace_lost:
                log.error("%s; ticks go on, but this stretch cannot be replayed", error)
            self._trace_lost = True
            self.alarms.condition(
                "trace",
                "critical",
                "The trace cannot be written",
                (str(error),),
                "Free space on the state folder's file system.",
            )
            return
        if self._trace_lost:
            self._trace_lost = False
            log.warning("the trace is written again")
            self.alarms.clear("trace")
            self.services.snapshot_soon()  # so that a restart need not cross the gap

    def _journal(self, decision: Decision, notes: list[JournalLine]) -> int:
        """Write the lines of a tick and the notes before it; the number of the tick's first line."""
        for line in notes:
            line.seq, line.tick, line.now_ns = self.recorder.note(line.record)
        first_seq = self.recorder.chain.seq
        self.recorder.after(self.engine, decision)
        return first_seq

    def _after(self, frame: Frame, decision: Decision, first_seq: int) -> None:
        for request in decision.fits:
            self.fitter.submit(self.engine, request, decision.now_ns)
        self.leadership.after(frame, decision)
        if decision.commands:
            self.services.send(decision.commands)
        self.live.settle(decision, frame.events, first_seq)
        behind = first_seq + len(decision.records)
        if self.recorder.chain.seq > behind:  # a segment was closed: the next one begins with its manifest
            record = manifest(self.engine, self.recorder.simulated)
            self.live.keep(JournalLine(record, decision.tick, decision.now_ns, behind))
        try:
            self.services.after(frame, decision)
        except Exception:  # services must not end the ticks
            log.exception("services failed after tick %d", decision.tick)
            self.live.counts["after_failed"] = self.live.counts.get("after_failed", 0) + 1
        if self.clock.ahead_ns:
            self.alarms.condition(
                "clock",
                "warning",
                "The wall clock stepped back",
                (f"ticks are {self.clock.ahead_ns / NS:.1f} s ahead of it and wait",),
                "Check the time service of this host.",
            )
        else:
            self.alarms.clear("clock")
        self._floods(decision.now_ns)
        self._left_out(decision.now_ns)
        self._source_clocks(decision)
        if any(isinstance(e, AuthorityChanged) for e in frame.events):
            self.leadership.keep_authority()

    def _left_out(self, now_ns: int) -> None:
        """Raise an alarm for a day after input was left out, since the engine failed on it."""
        if not self.quarantine.poisons:
            return
        recent = [p for p in self.quarantine.poisons.values() if now_ns - p.now_ns < LEFT_OUT_S * NS]
        if not recent:
            self.alarms.clear("quarantine")
            return
        folder, left_out = self.opened.folder, self.live.counts.get("input_left_out", 0)
        last = ", ".join(self._last_left_out[:MAX_LEFT_OUT])
        more = [f"{left_out} more like these were left out at once, the last: {last}"] if left_out else []
        self.alarms.condition(
            "quarantine",
            "critical",
            "The engine failed on input, which was left out",
            (*more, *(f"{p.text}; kept in {folder / p.file}" for p in recent[: -MAX_LEFT_OUT - 1 : -1])),
            f"`racktwin trace quarantine {folder} --again` repeats it. Report it with "
            "the file, which holds the site's description and readings.",
        )

    def _source_clocks(self, decision: Decision) -> None:
        """Raise one alarm for clocks that are wrong by minutes; report those that stepped or are ahead."""
        if decision.tick % CLOCKS_EVERY:
            return
        ledger, severity = self.ingest.ledger, "warning"
        now_ns = decision.now_ns - self.ingest.ahead_ns
        if not (wrong := ledger.wrong_clocks(now_ns)):
            wrong, severity = ledger.odd_clocks(now_ns), "info"
        if not wrong:
            self.alarms.clear("clock/sources")
            return
        several = f"The clocks of {len(wrong)} sources are wrong"
        self.alarms.condition(
            "clock/sources",
            severity,
            several if len(wrong) > 1 else f"The clock of {wrong[0].partition(': ')[0]} is wrong",
            wrong[:8],
            "Synchronise these hosts by NTP (`chronyc tracking`, `timedatectl`).",
        )

    def _floods(self, now_ns: int) -> None:
        """Raise an alarm while jobs report more than is taken; clear it after a calm minute."""
        line = self.ingest.ledger.line_of(FLOODED, "dropped", FLOODED)
        count, why = (line.count, line.why) if line is not None else (0, "")
        before, since_ns = self._flooded
        if count and count != before and now_ns - since_ns >= FLOOD_ALARM_S * NS:
            self._flooded = (count, now_ns)
            self.alarms.condition(
                "flood/job-reports",
                "warning",
                "Jobs send far more reports than they should",
                (f"{FLOODED}: {why}",),
                "Check the client of that job.",
            )
        elif before and now_ns - since_ns >= FLOOD_OVER_S * NS:
            self.alarms.clear("flood/job-reports")

    def _put_request(self, event: Event) -> bool:
        """Queue a request from an interface; it does not wait for a long tick."""
        taken = self.ingest.put_event(event)
        if self.loaded.config.tick_s > LONG_TICK_S:
            self.ingest.urgent.set()
        return taken

    def put(self, events: list[Event]) -> None:
        """Queue events of the daemon itself for the next frame."""
        for event in events:
            if isinstance(event, SiteChanged):
                self.ingest.change_site(event)
            else:
                self.ingest.force_event(event)
        if events and self.loaded.config.tick_s > LONG_TICK_S:
            self.ingest.urgent.set()

    def _note(self, record: JournalRecord) -> None:
        """Queue a journal line, written with those of the next tick; bounded, since requests cause them."""
        if len(self._notes) < MAX_NOTES:
            state = self.engine.state
            # Before the first tick the engine has no instant
            now_ns = state.now_ns if state.tick >= 0 else time.time_ns()
            line = JournalLine(record, state.tick, now_ns)
            self._notes.append(line)
            self.live.keep(line)
        else:
            self.live.counts["notes_dropped"] = self.live.counts.get("notes_dropped", 0) + 1

    async def reload(self, author: str) -> list[str]:
        """Apply the present configuration file as a whole or not at all; return its problems.

        One that is asked for while another is under way follows it, as files may have changed since; all that
        are asked for meanwhile are one. Raises TwinError where it failed when it was in force in part.
        """
        if self._next_reload is None:
            self._next_reload = asyncio.create_task(self._reload(author), name="reload")
        return await asyncio.shield(self._next_reload)

    async def _reload(self, author: str) -> list[str]:
        async with self._reloads:
            self._next_reload = None  # files are read from now on
            if self.live.stopping:
                return ["the daemon stops"]
            self.notify.reloading()
            before = self.loaded
            try:
                problems = await self._take_over(author)
            except ConfigError as error:
                problems = list(error.problems)
            except Exception as error:
                log.exception("a reload failed")
                why = str(error) if isinstance(error, TwinError) else f"{type(error).__name__}: {error}"
                if self.loaded is not before:
                    self._in_part = True
                    self._reload_alarm(
                        "A new configuration is in force only in part", [why], "Restart the daemon."
                    )
                    raise TwinError(f"the new configuration is in force only in part: {why}") from error
                problems = [why]
            finally:
                self.notify.ready("reloaded")
        if problems:
            log.error("the new configuration is refused, the old one stays: %s", "; ".join(problems[:5]))
            self._reload_alarm("A new configuration was refused", problems, "Fix the file and reload.")
        else:
            log.info("configuration reloaded")
            if not self._in_part:
                self.alarms.clear("reload")
        self.live.note(ReloadRecord(author=author, refused=tuple(problems[:20])))
        return problems

    def _reload_alarm(self, title: str, problems: list[str], action: str) -> None:
        self.alarms.condition("reload", "warning", title, tuple(problems[:8]), action)

    async def _take_over(self, author: str) -> list[str]:
        old = self.loaded.config
        loaded = load_config(self.loaded.path)
        spec, site, configured = load_checked(loaded)
        new = loaded.config
        problems = [
            f"{loaded.path}: $.{name}: cannot change while the daemon runs; restart it"
            for name in FIXED
            if getattr(new, name) != getattr(old, name)
        ]
        if (new.broker == "embedded") != (old.broker == "embedded"):
            problems.append(f"{loaded.path}: $.broker: embedded or not cannot change; restart the daemon")
        problems += _plug_ins_differ(self.engine.site.file, site.file, str(loaded.file(new.site)))
        if problems:
            return problems
        if (files := file_digests(loaded)).get("leader") != self._files.get("leader"):
            log.warning("files of the section `leader` have changed: restart the daemon to use them")
        # Whatever can be refused is refused here, before anything is touched.
        prepared = self.services.prepare(loaded, site)
        before = dict(self.authority.levels)
        self.authority.reconfigure(configured)
        changed = site.spec_hash != self.ingest.site.spec_hash
        renewed = {name for name in files if files[name] != self._files.get(name)}
        links = changed or differs(old, new, *LINKS) or not renewed.isdisjoint(LINKS)
        async with self.tick_lock:  # not while a tick is in flight: its commands speak of the old site
            if self.live.stopping:
                return ["the daemon stops"]
            if links:
                await self.services.stop_links()
            self.loaded = self.live.loaded = loaded
            self._apply_site(spec, changed, before, author)
            if links:
                self.services.start_links(prepared)
        await self.services.reconfigure(old, new, prepared, renewed)
        self._files = files
        return []

    def _apply_site(self, spec: SiteSpec, changed: bool, before: dict[str, str], author: str) -> None:
        events: list[Event] = []
        if changed:
            events.append(SiteChanged(site_hash=spec.digest(), spec=spec.packed()))
            self.opened.spec = spec
        if self.leadership.term is not None:
            for policy, level in self.authority.levels.items():
                if before.get(policy) != level:
                    events.append(AuthorityChanged(author=author, policy=policy, authority=cast(Any, level)))
        self.put(events)
        self.services.history.change_site(self.ingest.site)

    async def _close(self) -> None:
        """Stop everything in order, within the time that systemd grants."""
        self.notify.stopping()
        self.live.stopping = True
        try:
            async with asyncio.timeout(STOP_S):
                await self.services.stop()
                await self.leadership.stop()
        except TimeoutError:
            log.error("some services did not stop within %g s; the process ends without them", STOP_S)
        self.fitter.close()
        self.services.notifier.save()
        self.alarms.save()
        self.services.carrier_job()()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(StorageError, ConfigError):
            await loop.run_in_executor(self.disk, self._finish)
        self.services.anchor.close()
        self.disk.shutdown(wait=True)
        self.opened.close()

    def _finish(self) -> None:
        for line in self._notes:
            self.recorder.note(line.record)
        self._notes = []
        if self._broken:
            self.recorder.close()
        else:
            self.recorder.finish(self.engine)


def _passed_ns() -> int:
    """Return the time of a clock that never steps and counts while the host sleeps."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _plug_ins_differ(old: SiteFile, new: SiteFile, path: str) -> list[str]:
    """Differences that need a restart: policies and models are made when the process starts."""
    out = []
    for kind in ("policies", "models"):
        a = {n: (e.kind, e.settings) for n, e in getattr(old, kind).items()}
        b = {n: (e.kind, e.settings) for n, e in getattr(new, kind).items()}
        out += [
            f"{path}: $.{kind}.{name}: kind and settings cannot change while the daemon runs; restart it"
            for name in sorted(a.keys() | b.keys())
            if a.get(name, (None, {})) != b.get(name, (None, {}))
        ]
    return out
