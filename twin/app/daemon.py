"""The daemon: the third short loop around `engine.tick`, fed by the world and acting on it.

    frame -> trace -> tick -> journal (on the disk) -> commands, alarms, history, interfaces

What may fail is elsewhere, and supervised: sources, sinks, services. If the journal cannot be written,
nothing is commanded and the process ends; leases lapse. Part of the shell.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from connectors.mqtt_source import FLOODED
from twin import VERSION
from twin.app.alarms import AlarmBook
from twin.app.authority import AuthorityBook
from twin.app.clock import Clock, Tick
from twin.app.config import Loaded
from twin.app.fitting import Fitter
from twin.app.inflow import Inflow
from twin.app.leading import Leading
from twin.app.live import Line, Live
from twin.app.opening import Opened, open_run
from twin.app.reloading import Reloading
from twin.app.sdnotify import SdNotify
from twin.app.services import Services
from twin.app.supervise import Supervisor
from twin.contracts import Decision
from twin.errors import ConfigError, StorageError
from twin.events import AuthorityChanged, Event, SiteChanged, TicksSkipped
from twin.frame import NS, Frame

log = logging.getLogger(__name__)
STOP_S = 4.0  # for all parts together; systemd is told five seconds
TRACE_RETRY_S = 10.0
LONG_TICK_S = 2.0  # events of people and of a new term close the frame of a longer one
MAX_NOTES = 1000  # between two ticks
FLOOD_TOLD_S, FLOOD_OVER_S = 10.0, 60.0  # between two tellings of a flood; without it, it is over


class Daemon:
    """One site, one configuration, one run folder. Make it inside a running loop."""

    def __init__(self, loaded: Loaded, notify: SdNotify) -> None:
        self.loaded, self.notify = loaded, notify
        self.disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self.between = asyncio.Lock()  # held by a tick from its frame to its commands
        opened: Opened = open_run(loaded)
        self.opened, self.engine, self.recorder = opened, opened.engine, opened.recorder
        self.inflow = Inflow(self.engine.site, self.engine.intake.serials, loaded.config.tick_s)
        self.inflow.inbox.resume(self.engine.state)
        self.clock = Clock(loaded.config.tick_s, opened.last_ns)
        self.tick_no = opened.last_tick + 1
        self.fitter = Fitter()
        self._notes: list[tuple[str, dict[str, Any]]] = []
        self.alarms = AlarmBook(loaded.state, self._note)
        self.authority: AuthorityBook = opened.authority
        self.live = Live(loaded, self.engine, time.time_ns(), run_dir=str(opened.folder), version=VERSION)
        self.live.alarms, self.live.put_event = self.alarms, self._asked
        self.live.write_note = self._note
        self.supervisor = Supervisor(self.live.parts, self._part_alarm)
        self.leading = Leading(self)
        self.services = Services(self)
        self.live.messages = self.services.messages
        self.reloading = Reloading(self)
        self.live.veto, self.live.reload = self.leading.veto, self.reloading.reload
        self._flooded = (0, 0)  # reports that had been dropped when that was last told, and when
        self._trace_retry = 0.0
        self._trace_lost = False

    async def run(self) -> None:
        """Until `stop`. Raises StorageError when the journal fails, TwinError for a broken invariant."""
        for fault in self.opened.faults:
            log.warning("start: %s", fault)
        opened = self.opened
        self._note("daemon", {"started": VERSION, "resumed_at": opened.last_tick, "wall_ns": time.time_ns(),
                              "faults": opened.faults[:20]})  # fmt: skip
        if 0 < self.notify.watchdog_s < 2.5 * self.loaded.config.tick_s:
            raise ConfigError(
                f"{self.loaded.path}: $.tick_s: {self.loaded.config.tick_s:g} s, but the service manager's "
                f"watchdog wants a tick every {self.notify.watchdog_s:g} s; expected WatchdogSec of at least "
                "2.5 ticks in the unit"
            )
        try:
            # A site that changed while we were away comes first: sources speak in its numbers.
            self.put(self.opened.events)
            self.services.history.change_site(self.inflow.site)
            await self.leading.start()
            await self.services.start()
            gc.collect()
            gc.freeze()  # what lives as long as the daemon need not be looked at again
            while not self.live.stopping:
                tick = await self._due()
                if tick is not None:
                    async with self.between:
                        await self._step(tick)
        finally:
            await self._close()

    def stop(self) -> None:
        """End after the tick in flight."""
        self.live.stopping = True
        self.inflow.urgent.set()

    async def _due(self) -> Tick | None:
        """The next tick, when it is due; None when the daemon stops."""
        clock, urgent = self.clock, self.inflow.urgent
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
            self.inflow.put_event(event)
        if tick.skipped:
            self.live.stats.skipped += tick.skipped
            self.inflow.put_event(TicksSkipped(count=tick.skipped, why=tick.why))
        frame = self.inflow.take(self.tick_no, tick.now_ns, tick.dt_s)
        frame = dataclasses.replace(frame, urgent=tick.urgent)
        self._trace(frame)
        decision = self.engine.tick(frame)
        self.tick_no += 1
        notes, self._notes = self._notes, []
        # Intent before act: the journal is on the disk before anything leaves.
        await asyncio.get_running_loop().run_in_executor(self.disk, self._journal, decision, notes)
        self._after(frame, decision)
        stats = self.live.stats
        stats.ticks, stats.urgent = stats.ticks + 1, stats.urgent + tick.urgent
        stats.took_s.append(time.perf_counter() - begun)
        stats.late_s.append(tick.late_s)
        if not self.live.ready:
            self.live.ready = True
            self.notify.ready(f"tick {decision.tick}")
        self.notify.watchdog()

    def _trace(self, frame: Frame) -> None:
        """Input before effect. A trace that cannot be written degrades and alarms; the ticks go on."""
        if self._trace_lost and time.monotonic() < self._trace_retry:
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
            self.alarms.condition("trace", "critical", "The trace cannot be written", (str(error),),
                                  "Free space on the state folder's file system.")  # fmt: skip
            return
        if self._trace_lost:
            self._trace_lost = False
            log.warning("the trace is written again")
            self.alarms.clear("trace")
            self.services.snapshot_soon()  # so that a restart need not cross the gap

    def _journal(self, decision: Decision, notes: list[tuple[str, dict[str, Any]]]) -> None:
        for kind, body in notes:
            self.recorder.note(kind, body)
        self.recorder.after(self.engine, decision)

    def _after(self, frame: Frame, decision: Decision) -> None:
        for request in decision.fits:
            self.fitter.submit(self.engine, request, decision.now_ns)
        self.leading.after(frame, decision)
        if decision.commands:
            self.services.send(decision.commands)
        self.live.settle(decision, frame.events)
        try:
            self.services.after(frame, decision)
        except Exception:  # what is around the ticks must not end them
            log.exception("after tick %d", decision.tick)
            self.live.counts["after_failed"] = self.live.counts.get("after_failed", 0) + 1
        if self.clock.ahead_ns:
            self.alarms.condition("clock", "warning", "The wall clock stepped back",
                                  (f"ticks are {self.clock.ahead_ns / NS:.1f} s ahead and wait for it",),
                                  "Look at the time service of this host.")  # fmt: skip
        else:
            self.alarms.clear("clock")
        self._floods(decision.now_ns)
        if any(isinstance(e, AuthorityChanged) for e in frame.events):
            self.leading.keep_authority()

    def _floods(self, now_ns: int) -> None:
        """Jobs that report more than is taken: an alarm that names the worst, until a minute is calm."""
        count, why = self.inflow.dropped.get(FLOODED, (0, ""))
        before, since_ns = self._flooded
        if count > before and now_ns - since_ns >= FLOOD_TOLD_S * NS:
            self._flooded = (count, now_ns)
            self.alarms.condition("flood/job-reports", "warning", "Jobs report far more than they should",
                                  (f"{FLOODED}: {why}",), "Look at that job's client.")  # fmt: skip
        elif before and now_ns - since_ns >= FLOOD_OVER_S * NS:
            self.alarms.clear("flood/job-reports")

    def _asked(self, event: Event) -> bool:
        """What people ask does not wait for a long tick."""
        taken = self.inflow.put_event(event)
        if self.loaded.config.tick_s > LONG_TICK_S:
            self.inflow.urgent.set()
        return taken

    def put(self, events: list[Event]) -> None:
        """Events of the shell itself, into the next frame."""
        for event in events:
            if isinstance(event, SiteChanged):
                self.inflow.change_site(event)
            else:
                self.inflow.force_event(event)
        if events and self.loaded.config.tick_s > LONG_TICK_S:
            self.inflow.urgent.set()

    def _note(self, kind: str, body: dict[str, Any]) -> None:
        """A line for the journal, written with the next tick's; bounded, since people can cause them."""
        if len(self._notes) < MAX_NOTES:
            self._notes.append((kind, body))
            state = self.engine.state
            self.live.keep(Line(kind, state.tick, state.now_ns, body))
        else:
            self.live.counts["notes_dropped"] = self.live.counts.get("notes_dropped", 0) + 1

    def _part_alarm(self, part: Any, error: str | None) -> None:
        if error is None:
            self.alarms.clear(f"part/{part.name}")
            return
        severity = "critical" if part.kind == "sink" else "warning"
        self.alarms.condition(f"part/{part.name}", severity, f"{part.kind} {part.name} is down", (error,),
                              "It is tried again by itself; look at the other end.")  # fmt: skip

    async def _close(self) -> None:
        """Everything in order, within the time that systemd grants."""
        self.notify.stopping()
        self.live.stopping = True
        try:
            async with asyncio.timeout(STOP_S):
                await self.services.stop()
                await self.leading.stop()
        except TimeoutError:
            log.error("some parts did not end within %g s; they are left behind", STOP_S)
        self.fitter.close()
        self.alarms.save()
        loop = asyncio.get_running_loop()
        with contextlib.suppress(StorageError, ConfigError):
            await loop.run_in_executor(self.disk, self._finish)
        self.disk.shutdown(wait=True)
        self.opened.close()

    def _finish(self) -> None:
        for kind, body in self._notes:
            self.recorder.note(kind, body)
        self._notes = []
        self.recorder.finish(self.engine)
