"""History service: takes samples, answers queries, and reports faults of both.

`offer` only copies. The store and an outside database each write in their own thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec

from connectors.influx import InfluxSettings, InfluxWriter, LineColumns, SiteNames
from twin.catalogue import NS
from twin.config import History
from twin.contracts import Decision
from twin.engine import Engine
from twin.run.history_query import HistoryError, HistoryReader
from twin.run.history_sample import Layout, Sample, take_sample
from twin.run.history_schema import FILE_NAME
from twin.run.history_store import HistoryStore
from twin.run.history_writer import NO_FACTS, Backlog, HistoryWriter
from twin.site import Site

MAX_QUESTIONS = 32  # at once, those that wait included
READERS = 2
MB = 10**6
FAILING_S = 30.0  # without a successful write before it is an alarm
RECENT_S = 600.0  # how long a loss stays an alarm
Alarm = tuple[str, str, str, str]
# Counts of an outside database, by what they count
LOSSES = {
    "points": ("dropped_points", "refused_points"),
    "lines of the journal": ("lost_lines", "refused_lines"),
}


class OutsideHistory(Protocol):
    """External database that also receives samples, through its own thread and a bounded queue."""

    def start(self) -> None:
        """Begin to write."""
        ...

    def offer(self, t_ns: int, names: SiteNames, tables: Sequence[LineColumns]) -> None:
        """One instant of these tables; their arrays must not change any more. Never waits for the server."""
        ...

    def stats(self) -> dict[str, int | str]:
        """`queue_points` that wait, counts of what was lost, and `error`, why nothing is written just now."""
        ...

    def close(self) -> bool:
        """Send waiting samples if that is possible soon; return True if all were sent."""
        ...


class Sampler:
    """Takes a sample every `every_s` of nominal time."""

    def __init__(self, site: Site, every_s: float, expected: Sequence[str] = ()) -> None:
        self.layout, self.every_ns, self.expected = Layout(site), round(every_s * NS), expected
        self.took_s: deque[float] = deque(maxlen=600)
        self._next_ns = 0

    def change_site(self, site: Site) -> None:
        """Switch to another site."""
        if site is not self.layout.site:
            self.layout = Layout(site)

    def offer(self, engine: Engine, decision: Decision) -> Sample | None:
        """Take a copy of the state if a sample is due."""
        now_ns = decision.now_ns
        # A tick that comes a little early must not halve the rate; a clock set back must not end it.
        early = now_ns < self._next_ns - self.every_ns // 20
        if early and self._next_ns - now_ns <= self.every_ns:
            return None
        self._next_ns = now_ns // self.every_ns * self.every_ns + self.every_ns
        self.change_site(engine.site)
        began = time.perf_counter()
        sample = take_sample(engine, self.layout, now_ns, self.expected)
        self.took_s.append(time.perf_counter() - began)
        return sample


class HistoryService:
    """Samples in, answers out. `token` is InfluxDB's; it is never shown. Files of `settings` are whole paths.
    `outside` are further databases by name."""

    def __init__(
        self,
        settings: History,
        folder: Path,
        site: Site,
        token: str | None = None,
        outside: Mapping[str, OutsideHistory] | None = None,
    ) -> None:
        self.settings = settings
        self.sampler = Sampler(site, settings.every_s, settings.expected)
        self.backlog = Backlog()
        self.writer: HistoryWriter | None = None
        self.reader: HistoryReader | None = None
        self.outside: dict[str, OutsideHistory] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._asked = 0
        self.failed_samples = 0
        self._failing: dict[str, float] = {}  # since when
        self._lost: dict[str, tuple[int, float]] = {}  # what was lost, and when it grew last
        if settings.influx is not None:
            tls = settings.influx.tls
            files = {} if tls is None else msgspec.structs.asdict(tls)
            self.outside["influx"] = InfluxWriter(
                settings.influx.url,
                settings.influx.org,
                settings.influx.bucket,
                token,
                InfluxSettings(
                    buffer_points=settings.influx.buffer_points, resend_s=settings.influx.resend_s, **files
                ),
            )
        self.outside |= outside or {}
        for database in self.outside.values():
            database.start()
        if settings.embedded:
            path = folder / FILE_NAME
            quota = settings.quota_mb * MB
            self.writer = HistoryWriter(
                path,
                lambda: HistoryStore(path, settings.every_s, settings.keep_days, quota),
                self.backlog,
                quota,
            )
            self.reader = HistoryReader(path, settings.every_s)
            self._pool = ThreadPoolExecutor(READERS, "history-query")
            self.writer.start()

    def change_site(self, site: Site) -> None:
        """Switch to another site."""
        self.sampler.change_site(site)

    def offer(self, engine: Engine, decision: Decision) -> None:
        """Called after each tick; takes a sample where one is due. Never raises, never waits."""
        try:
            sample = self.sampler.offer(engine, decision)
            if sample is None:
                return
            if self.writer is not None:
                self.backlog.put(sample)
            for database in self.outside.values():
                database.offer(sample.t_ns, sample.layout, sample.tables)
        except Exception:
            self.failed_samples += 1

    async def query(
        self,
        signal_key: str,
        names: list[str],
        since_ns: int,
        until_ns: int,
        step_s: float | None = None,
        max_points: int = 2000,
    ) -> dict[str, Any]:
        """One signal of some entities in [since, until): full names, or local ones that are unique.

        `rack.power_w/expected` is what was expected of it, `rack.power_w/band` half of its 90 % band.

        The answer: `t_ns`, and per name as asked `values`, None where there was no reading. With a step
        (given, or chosen where there would be more than `max_points`) each value is a mean, `min` and `max`
        beside it; of a counter it is the last total. A step of `every_s` or less is none. `damaged` counts
        what could not be read back, and is a gap. Raises HistoryError for a bad question, StorageError for
        a bad file.
        """
        if self.reader is None or self._pool is None:
            raise HistoryError("this daemon keeps no history of its own (history.embedded is false)")
        if self._asked >= MAX_QUESTIONS:
            raise HistoryError(f"{MAX_QUESTIONS} questions are being answered; ask again later")
        self._asked += 1
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(
                self._pool, self.reader.query, signal_key, names, since_ns, until_ns, step_s, max_points
            )
        finally:
            self._asked -= 1

    def stats(self) -> dict[str, Any]:
        """Counts of points kept, waiting and lost; those of an external database under its name."""
        writer = self.writer
        out: dict[str, Any] = {
            **(writer.facts if writer is not None else NO_FACTS),
            "samples": writer.written if writer is not None else 0,
            "dropped": self.backlog.dropped + self.failed_samples,
            "write_errors": writer.write_errors if writer is not None else 0,
            "moved_aside": writer.moved_aside if writer is not None else 0,
            "queue": len(self.backlog),
            "sample_s_max": max(self.sampler.took_s, default=0.0),
        }
        out |= {name: database.stats() for name, database in self.outside.items()}
        return out

    def alarms(self) -> list[Alarm]:
        """Return (id, severity, title, evidence) of each present fault."""
        out: list[Alarm] = []
        if self.writer is not None:
            error = "its thread ended" if self.writer.dead else self.writer.error
            if self._for_long("history/failing", bool(error)):
                text = f"{error}; {len(self.backlog)} samples wait"
                out.append(("history/failing", "warning", "The history cannot be written", text))
            aside = self.writer.moved_aside
            if self._lately("history/moved_aside", aside):
                text = f"{self.writer.path.parent}: {aside} files; answers begin anew"
                title = "A history file could not be used and was moved aside"
                out.append(("history/moved_aside", "warning", title, text))
        dropped = self.backlog.dropped + self.failed_samples
        if self._lately("history/dropped", dropped):
            text = f"{dropped} samples since the start"
            out.append(("history/dropped", "warning", "Samples of the history were lost", text))
        for name, database in self.outside.items():
            known = database.stats()
            if self._for_long(f"history/{name}", bool(known["error"])):
                text = f"{known['error']}; {known['queue_points']} points wait"
                out.append((f"history/{name}", "warning", "The outside history cannot be written", text))
            lost = {what: sum(int(known.get(key, 0)) for key in keys) for what, keys in LOSSES.items()}
            if self._lately(f"history/{name}_dropped", sum(lost.values())):
                counts = " and ".join(f"{count} {what}" for what, count in lost.items() if count)
                text = f"{counts} since the start {known['refusal']}".rstrip()
                title = "Points for the outside history were lost"
                out.append((f"history/{name}_dropped", "warning", title, text))
        return out

    def _for_long(self, name: str, wrong: bool) -> bool:
        """True if something has been wrong at each look for a while."""
        if not wrong:
            self._failing.pop(name, None)
            return False
        since_s = self._failing.setdefault(name, time.monotonic())
        return time.monotonic() - since_s >= FAILING_S

    def _lately(self, name: str, count: int) -> bool:
        """True if a count of losses grew in the last minutes."""
        known, grew_s = self._lost.get(name, (0, 0.0))
        if count > known:
            known, grew_s = count, time.monotonic()
            self._lost[name] = (known, grew_s)
        return known > 0 and time.monotonic() - grew_s < RECENT_S

    def close(self) -> None:
        """Write what can be written within three seconds or so, and end the threads."""
        if self.writer is not None:
            self.writer.stop()
        for database in self.outside.values():
            database.close()
        if self.writer is not None:
            self.writer.close()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
