"""Runtime: the present state of the daemon as its interfaces see it, and the entry point of their requests.

Interfaces run between ticks on the daemon's loop, so what they read is consistent. A request becomes an event
of the next frame; an action that is no event becomes a note in the journal.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from twin.catalogue import I32, TABLES, clean
from twin.config import Loaded
from twin.contracts import (
    AccountRecord,
    AlarmRecord,
    Bound,
    ClearedRecord,
    Decision,
    EventRecord,
    Explanation,
    JournalRecord,
    OtherRecord,
    PolicyAccount,
    ProposalsRecord,
)
from twin.engine import Engine
from twin.report import LedgerStore, brief, sentence
from twin.site import Site
from twin.telemetry import Event, PollPeriodChanged
from twin.wiring import SelfDescription

MAX_LINES = 2000  # journal records that interfaces can show without reading the file
MAX_LINES_BYTES = 64 * 2**20  # of their columns: a command may name every GPU of a site
MAX_TEXT = 400  # characters of a line's sentence
WHOLE_TEXT = 20_000  # of one that is asked for whole: long evidence of many devices
MAX_WAITING = 1000  # requests whose outcome somebody waits for
MAX_FOLLOWERS = 64
FOLLOWER_QUEUE = 256  # updates that a slow client may lag behind; then it is notified that it missed some


@dataclass
class Part:
    """Status of a supervised source, sink or service."""

    name: str
    kind: Literal["source", "sink", "service"]
    state: Literal["starting", "running", "waiting", "stopped"] = "starting"
    since_ns: int = 0
    restarts: int = 0
    error: str = ""


@dataclass
class TickStats:
    """Cost and lateness of the last few hundred ticks."""

    ticks: int = 0
    skipped: int = 0
    urgent: int = 0
    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=600))
    late_s: deque[float] = field(default_factory=lambda: deque(maxlen=600))


# Routine, and what policies say before it becomes a command or advice: shown when asked for by kind.
QUIET_KINDS = ("mark", "renewal", "acks", "reports", "proposals", "duplicates")


def is_routine(record: JournalRecord | OtherRecord) -> bool:
    """Return True for a journal line that only a replay needs, and that is nobody's decision."""
    if isinstance(record, EventRecord) and isinstance(record.event, PollPeriodChanged):
        return True
    return record.kind in QUIET_KINDS


@dataclass
class JournalLine:
    """A journal record as an interface shows it.

    `seq` is its number in the journal, -1 until it is written; `other_site`: its indices are of a site that
    is no more.
    """

    record: JournalRecord | OtherRecord
    tick: int
    now_ns: int
    seq: int = -1
    other_site: bool = False

    @property
    def kind(self) -> str:
        """Kind of the record."""
        return self.record.kind

    @property
    def at(self) -> str | None:
        """Its place in the journal, by which it is found again: instant and number; None until written."""
        return f"{self.now_ns}.{self.seq}" if self.seq >= 0 else None

    def answer(self, site: Site, most_text: int = MAX_TEXT) -> dict[str, Any]:
        """As JSON."""
        known = site if self.shift(site) == 0 else None
        return {
            "at": self.at,
            "kind": self.kind,
            "tick": self.tick,
            "now_ns": self.now_ns,
            "text": clean(sentence(self.record, known), most_text),
            "body": brief(self.record, known),
        }

    def controls(self) -> list[str]:
        """The controls that it is on."""
        if isinstance(self.record, ProposalsRecord):
            return [p.control for p in self.record.proposals]
        return [getattr(self._source(), "control", "")]

    @property
    def policy(self) -> str:
        """The policy that it is of or about; "" for none."""
        return str(getattr(self._source(), "policy", "") or "")

    def _source(self) -> Any:
        return self.record.event if isinstance(self.record, EventRecord) else self.record

    def shift(self, site: Site) -> int | None:
        """Return the shift of its indices to those of this site; None if unknown.

        A batch names the ends of its column: where the site grew since, they say where it is now.
        """
        first: str = getattr(self.record, "first_name", "")
        index: Any = getattr(self.record, "index", ())
        table = getattr(self.record, "control", "").partition(".")[0]
        if not first or not len(index) or table == "job":  # jobs go by their own names
            return None if self.other_site else 0
        ends = [site.entity(table, name) for name in (first, getattr(self.record, "last_name", ""))]
        if ends[0] is None or ends[1] is None or ends[1] - ends[0] != int(index[-1]) - int(index[0]):
            return None
        return ends[0] - int(index[0])

    def touches(self, site: Site, inside: Mapping[str, I32]) -> bool:
        """Return True if it commands or proposes something for one of these entities by table."""
        if not inside or (shift := self.shift(site)) is None:
            return False
        for part in self.record.proposals if isinstance(self.record, ProposalsRecord) else (self.record,):
            members = inside.get(getattr(part, "control", "").partition(".")[0])
            for column in (getattr(part, "index", None), getattr(part, "gone", None)):
                if members is not None and column is not None and np.isin(column + shift, members).any():
                    return True
        return False

    def concerns(self, site: Site, about: tuple[str, int, str]) -> bool:
        """Return True if it concerns an entity (table, index, path): by index in columns, else by path."""
        table, row, path = about
        for part in self.record.proposals if isinstance(self.record, ProposalsRecord) else (self.record,):
            if getattr(part, "control", "").partition(".")[0] != table:
                continue
            names = getattr(part, "names", ())
            if path in names:
                return True
            if (table == "job" and names) or (shift := self.shift(site)) is None:
                continue  # jobs by their own names: a slot may have had another one then
            for column in (getattr(part, "index", None), getattr(part, "gone", None)):
                if column is not None and row - shift in column:
                    return True
        named = self.names()
        if path in named:
            return True
        local = any(path.endswith("/" + n) for n in named)
        return local and any(site.entity(table, n) == row for n in named)

    def names(self) -> list[str]:
        """The entities that it names, without their tables; jobs as `job:NAME`."""
        source, record = self._source(), self.record
        found = [n for field in ("names", "nodes", "entities") for n in getattr(source, field, ())]
        found += [getattr(source, field, "") for field in ("name", "first_name", "last_name")]
        if isinstance(job := getattr(source, "job", None), str):
            found.append(f"job:{job}")
        if isinstance(record, AccountRecord):
            found += [v for v in record.account.values() if isinstance(v, str) and "/" in v and " " not in v]
        if isinstance(record, ClearedRecord | AlarmRecord):
            found.append(record.id.partition("/")[2])
        return [_untabled(n) for n in found if isinstance(n, str) and n]


def _untabled(name: str) -> str:
    """A name without the table before it, `node:a/b` or `node/a/b`, nor the part behind it, `a/b#pump`."""
    for mark in (":", "/"):
        head, _, tail = name.partition(mark)
        if tail and head in TABLES and head != "job":
            name = tail
    return name.partition("#")[0] if not name.startswith("job:") else name


def _nobody(event: Event) -> bool:  # noqa: ARG001
    return False


def _nothing(event: Event) -> str | None:  # noqa: ARG001
    return None


def _nowhere(record: JournalRecord) -> None:
    """Until the daemon says where notes go."""


@dataclass
class Runtime:
    """The daemon's present state. `role` is `leader` if commands may leave, or else `standby`."""

    loaded: Loaded
    engine: Engine
    started_ns: int
    run_dir: str = ""
    version: str = ""
    role: Literal["leader", "standby", "starting"] = "starting"
    epoch: int = 0
    ready: bool = False
    stopping: bool = False
    decision: Decision | None = None
    parts: dict[str, Part] = field(default_factory=dict)
    stats: TickStats = field(default_factory=TickStats)
    counts: dict[str, int] = field(default_factory=dict)  # of the shell: dropped, lines not written, ...
    lines: deque[JournalLine] = field(default_factory=lambda: deque(maxlen=MAX_LINES))
    # Set by the daemon before interfaces start.
    put_event: Callable[[Event], bool] = _nobody
    veto: Callable[[Event], str | None] = _nothing  # why this may not even be asked, or None
    write_note: Callable[[JournalRecord], None] = _nowhere
    reload: Callable[[str], Awaitable[list[str]]] | None = None  # author -> problems; [] is done
    messages: Callable[[], dict[str, Any]] = dict  # what became of received messages
    describe: Callable[[], SelfDescription] = SelfDescription  # what describes the site on the bus
    ledger: Any = None  # twin.sources.SourceLedger
    alarms: Any = None  # twin.daemon.alarms.AlarmBook
    history: Any = None  # twin.run.history_store.HistoryStore
    energy_ledger: LedgerStore | None = None  # hours that are over
    accounts: dict[str, PolicyAccount] = field(default_factory=dict)  # by policy
    sections: list[Explanation] = field(default_factory=list)  # of policies, on the overview
    story: dict[str, Any] | None = None  # the chapter of a simulated story that is shown now
    _waiting: dict[str, asyncio.Future[str | None]] = field(default_factory=dict)
    _lines_bytes: int = 0
    _numbered: int = 0  # lines of a daemon that has no journal on disk
    _followers: set[asyncio.Queue[Decision | None]] = field(default_factory=set)

    async def submit(self, event: Event, timeout_s: float | None = None) -> str | None:
        """Put an event (with an id) into the next frame. Return why it was refused, or None if it holds."""
        if timeout_s is None:
            timeout_s = max(10.0, 2.5 * self.loaded.config.tick_s)
        if not event.id:
            return "an event needs an id"
        if (why := self.veto(event)) is not None:
            return why
        key = f"{type(event).__name__}:{event.id}"
        if len(self._waiting) >= MAX_WAITING or key in self._waiting:
            return "too many requests wait for the next tick, or this request waits already"
        future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            if not self.put_event(event):
                return "the queue of events is full; try again"
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            return f"no tick took the request within {timeout_s:g} s; it may still take effect"
        finally:
            self._waiting.pop(key, None)

    def note(self, record: JournalRecord) -> None:
        """A line in the journal that is no decision: an access refused, an alarm acknowledged."""
        self.write_note(record)

    def settle(self, decision: Decision, events: tuple[Event, ...], first_seq: int = -1) -> None:
        """After a tick: answer who waits, keep the records, wake the followers.

        `first_seq` is the number of its first line in the journal.
        """
        refused = {
            (type(r.event).__name__, r.event.id): r.refused
            for r in decision.records
            if isinstance(r, EventRecord)
        }
        for event in events:
            waiting = self._waiting.get(f"{type(event).__name__}:{event.id}") if event.id else None
            if waiting is not None and not waiting.done():
                waiting.set_result(refused.get((type(event).__name__, event.id)))
        for at, record in enumerate(decision.records):
            seq = first_seq + at if first_seq >= 0 else -1
            self.keep(JournalLine(record, decision.tick, decision.now_ns, seq))
        self.decision = decision
        for queue in self._followers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(decision)

    def keep(self, line: JournalLine) -> None:
        """Remember a record for interfaces; the oldest go beyond a number, and beyond their size."""
        if not self.run_dir:
            line.seq, self._numbered = self._numbered, self._numbered + 1
        if len(self.lines) == self.lines.maxlen:
            self._lines_bytes -= _columns_bytes(self.lines.popleft().record)
        self.lines.append(line)
        self._lines_bytes += _columns_bytes(line.record)
        while self._lines_bytes > MAX_LINES_BYTES and len(self.lines) > 1:
            self._lines_bytes -= _columns_bytes(self.lines.popleft().record)

    def follow(self) -> asyncio.Queue[Decision | None] | None:
        """A queue that gets each decision, the oldest lost to a slow reader; None when too many follow."""
        if len(self._followers) >= MAX_FOLLOWERS:
            return None
        queue: asyncio.Queue[Decision | None] = asyncio.Queue(FOLLOWER_QUEUE)
        self._followers.add(queue)
        return queue

    def unfollow(self, queue: asyncio.Queue[Decision | None]) -> None:
        """The follower is gone."""
        self._followers.discard(queue)


def _columns_bytes(value: Any) -> int:
    """Sum the bytes of a record's arrays."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, msgspec.Struct):
        return sum(_columns_bytes(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, Bound):
        return _columns_bytes(value.value)
    if isinstance(value, dict):
        return sum(_columns_bytes(v) for v in value.values())
    return sum(_columns_bytes(v) for v in value) if isinstance(value, list | tuple) else 0
