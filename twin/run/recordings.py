"""Sources of a replay: reads files of any known form as one stream of arrivals in order of time, in frames.

It detects the form of a file, decodes it, and counts every message or row as decoded, ignored or bad. A
ledger of sources, as in the daemon, holds the reasons. The codecs are in `connectors`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from connectors.files import (
    Dump,
    RowTally,
    open_bytes,
    read_capture,
    read_mapping,
    read_sensor_table,
    read_series,
)
from connectors.mqtt import Router
from twin.catalogue import NS, START_NS, TABLES, ConfigError, StorageError
from twin.contracts import Item
from twin.engine import Engine, news, replaced_entity
from twin.site import Site, SiteSpec, build_site
from twin.sources import OTHERS, SourceLedger, UnusedLine
from twin.telemetry import (
    Block,
    Counts,
    EntityReplaced,
    Event,
    Frame,
    IdentityTold,
    Inbox,
    Message,
    Reading,
    SiteChanged,
    TableUpdate,
    TicksSkipped,
)

Form = Literal["native", "capture", "ipmi", "table"]
URGENT_GAP_NS = NS // 10  # an urgent frame comes at least 100 ms after the one before
MAX_QUIET_TICKS = 100_000  # a longer gap in a recording is skipped, and said so by an event


class Arrival(NamedTuple):
    """Decoded readings that arrived at `t_ns` (our clock)."""

    t_ns: int
    items: list[Any]  # Reading, Block or Event


class Recorded:
    """Messages or rows of recordings: `counts` by outcome, and a `ledger` of what is not used and why."""

    def __init__(self, site: Site) -> None:
        self.counts = dict.fromkeys(("total", "decoded", "ignored", "bad"), 0)
        self.now_ns = 0
        self.items: list[Any] = []  # of the message just decoded
        self.ledger = SourceLedger(site.sizes, self._keep, lambda: self.now_ns, is_logged=False)

    def _keep(self, items: Sequence[Item], *_: object) -> tuple[int, int]:
        self.items = list(items)
        return 0, 0  # no stamp: offsets of a recording say nothing of how late its sources were

    def summary(self) -> dict[str, Any]:
        """For JSON: three counts add up to the total. A message that was used may have reasons too."""
        return {**self.counts, "reasons": self.ledger.reasons()}


def form_of(path: Path, mapping: Path | None) -> Form:
    """Return the form of a recording by its path. Raises StorageError for other files."""
    if path.is_dir():
        if sorted(path.glob("trace-*.rt")):
            return "native"
        raise StorageError(f"{path}: a folder without trace-*.rt; expected a recorded run or a file")
    if not path.exists():
        raise StorageError(f"{path}: no such file")
    if path.suffix == ".rt":
        return "native"
    if path.name.endswith((".tar.gz", ".tgz", ".tar", ".tar.xz")):
        return "ipmi"
    if ".jsonl" in path.suffixes[-2:]:
        return "capture"
    if mapping is not None:
        return "table"
    try:
        with open_bytes(path) as file:
            head = file.readline(4096)
    except (OSError, EOFError, ValueError) as error:
        raise StorageError(f"{path}: cannot be read: {error}") from error
    if head.lstrip(b"\xef\xbb\xbf").strip() == b"offset,topic,payload":
        return "capture"
    raise ConfigError(
        f"{path}: a table needs --map FILE (columns to signals), a capture begins with "
        "`offset,topic,payload` or ends in .jsonl"
    )


class MessageSource:
    """MQTT messages of a capture, decoded by topic."""

    def __init__(self, paths: list[Path], site: Site, start_ns: int = START_NS) -> None:
        self.paths, self.start_ns = paths, start_ns
        self.messages = Recorded(site)
        self.router = Router(site)

    def __iter__(self) -> Iterator[Arrival]:
        for path in self.paths:
            inlet = self.messages.ledger.account(f"file {path.name}")
            for row in read_capture(path, self.start_ns):
                if isinstance(row, Message):
                    if (arrival := self.take(row)) is not None:
                        yield arrival
                    continue
                inlet.reject(f"line {row.line}", row.reason, "check this line of the file")
                self._count("bad")

    def take(self, message: Message) -> Arrival | None:
        """Decode a message; return its arrival, or None if it is not used."""
        kept = self.messages
        kept.now_ns, kept.items = message.t_ns, []
        outcome = self.router.take(kept.ledger.account(OTHERS), message)
        self._count(outcome)
        return Arrival(message.t_ns, kept.items) if outcome == "decoded" else None

    def _count(self, outcome: str) -> None:
        self.messages.counts["total"] += 1
        self.messages.counts[outcome] += 1


class SampleSource:
    """Rows of a table or sensor lines of a dump, already in order."""

    def __init__(self, samples: Any, tally: RowTally, site: Site) -> None:
        self.samples, self.messages = samples, Recorded(site)
        counts, rows = self.messages.counts, self.messages.ledger.account("rows")
        counts |= {name: getattr(tally, name) for name in counts}
        for (outcome, what, why), (number, sample) in tally.reasons.items():
            if outcome != "other":
                rows.note(UnusedLine(outcome, what if outcome == "ignored" else why, why, "", sample), number)

    def __iter__(self) -> Iterator[Arrival]:
        for t_ns, readings in self.samples:
            yield Arrival(t_ns, readings)


def open_source(paths: list[Path], site: Site, mapping: Path | None) -> MessageSource | SampleSource:
    """The arrivals of these files, which must all have one form (native ones are read by `replay`)."""
    forms = {form_of(p, mapping) for p in paths}
    if len(forms) != 1:
        raise ConfigError(
            f"{', '.join(map(str, paths))}: forms differ ({', '.join(sorted(forms))}); expected one"
        )
    form = forms.pop()
    if form == "capture":
        return MessageSource(paths, site)
    if form == "table":
        assert mapping is not None
        series = read_series(paths, read_mapping(mapping), site)
        return SampleSource(series, series.counts, site)
    if len(paths) != 1:
        raise ConfigError("expected one archive of IPMI dumps")
    dump = Dump(paths[0], read_sensor_table(default_sensors()), site)
    return SampleSource(dump, dump.tally, site)


def default_sensors() -> Path:
    """The mapping of sensor names that comes with racktwin, inside the package."""
    return Path(str(resources.files("connectors") / "ipmi-sdr.yaml"))


class Cutter:
    """Cuts arrivals into frames: nominal ticks `dt_s` apart, and urgent ones between them.

    Follows the site: behind a SiteChanged, arrivals are in the new numbering, and so the Inbox begins anew.
    What the old one still held is dropped: less than a tick's readings, which come again.
    """

    def __init__(self, engine: Engine, dt_s: float, due_events: Callable[[int, str], list[Event]]) -> None:
        self.site, self.step_ns = engine.site, round(dt_s * NS)
        self.inbox = Inbox(self.site.sizes)
        self._serials = engine.intake.serials
        self._due_events = due_events
        self._tick, self._last_ns = 0, 0

    def frames(self, source: Iterable[Arrival]) -> Iterator[Frame]:
        """The frames of these arrivals, in order of time."""
        next_ns: int | None = None
        urgent_ns: int | None = None
        for arrival in source:
            if next_ns is None:
                self._last_ns = arrival.t_ns // self.step_ns * self.step_ns
                next_ns = self._last_ns + self.step_ns
            while arrival.t_ns > (next_ns if urgent_ns is None else min(urgent_ns, next_ns)):
                if urgent_ns is not None and urgent_ns < next_ns:
                    yield self._cut(urgent_ns, True)
                else:
                    yield self._cut(next_ns, False)
                    next_ns += self.step_ns
                    quiet = (arrival.t_ns - next_ns) // self.step_ns
                    if quiet > MAX_QUIET_TICKS:
                        self.inbox.put_event(TicksSkipped(count=quiet, why="the recording has a gap"))
                        next_ns += quiet * self.step_ns
                urgent_ns = None
            for item in arrival.items:
                self._stage(item, arrival.t_ns)
            if self.inbox.urgent and urgent_ns is None:
                urgent_ns = max(arrival.t_ns, self._last_ns + URGENT_GAP_NS)
        if next_ns is not None:
            if urgent_ns is not None and urgent_ns < next_ns:
                yield self._cut(urgent_ns, True)
            yield self._cut(next_ns, False)

    def _cut(self, now_ns: int, urgent: bool) -> Frame:
        for event in self._due_events(now_ns, self.site.spec_hash):
            self.inbox.put_event(event)
        frame = self.inbox.take(self._tick, now_ns, (now_ns - self._last_ns) / NS)
        self._tick, self._last_ns = self._tick + 1, now_ns
        return dataclasses.replace(frame, urgent=urgent)

    def _stage(self, item: Reading | Block | Event, now_ns: int) -> None:
        if isinstance(item, Reading):
            self.inbox.put(item, now_ns)
        elif isinstance(item, Block):
            self.inbox.put_block(item, now_ns)
        else:
            if isinstance(item, SiteChanged):
                self._follow(item)
            elif isinstance(item, EntityReplaced):
                self._reset_counters(item)
            elif isinstance(item, IdentityTold):
                what = news(self._serials, item, self.site)
                if what == "same":
                    return
                if what == "other":
                    self._reset_counters(item)
            self.inbox.put_event(item)

    def _follow(self, event: SiteChanged) -> None:
        self.site = build_site(msgspec.json.decode(event.spec, type=SiteSpec), "the changed site")
        before, self.inbox = self.inbox, Inbox(self.site.sizes)
        self.inbox.events, self.inbox.urgent = before.events, before.urgent
        self.inbox.counts = before.counts

    def _reset_counters(self, event: EntityReplaced | IdentityTold) -> None:
        """Reset the counters of a replaced device."""
        entity = replaced_entity(self._serials, event, self.site)
        if entity is not None:
            self.inbox.forget(event.table, entity)


def check_fits(frame: Frame, site: Site) -> None:
    """Raise StorageError for a frame with a table or an entity that the site does not have."""
    for event in frame.events:
        if isinstance(event, SiteChanged):
            try:
                site = build_site(msgspec.json.decode(event.spec, type=SiteSpec))
            except (msgspec.MsgspecError, ConfigError) as error:
                raise StorageError(f"tick {frame.tick}: changes the site to none: {error}") from error
    parts: list[TableUpdate | Counts] = [*frame.updates, *frame.counts]
    for part in parts:
        n, known = site.sizes.get(part.table, 0), TABLES.get(part.table)
        rows = 0 if known is None else len(known.gauges if isinstance(part, TableUpdate) else known.counters)
        entity = np.arange(len(part.t_ns)) if part.entity is None else part.entity
        fits = len(entity) == n if part.entity is None else bool((np.diff(entity) > 0).all())
        for index, end in ((entity, n), (part.rows, rows)):
            fits = fits and len(index) > 0 and index.min() >= 0 and index.max() < end
        if not fits:
            raise StorageError(
                f"tick {frame.tick}: {len(entity)} of {part.table}, rows {part.rows.tolist()[:8]}; "
                f"expected some of {n}, rows below {rows}, as its site has"
            )
