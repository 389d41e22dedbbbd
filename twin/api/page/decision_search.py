"""Decision search: lines of the journal by kind, policy, entity, control and time, newest first.

The newest come from memory; where that ends, the files of the run are walked in a thread. A page is bounded
in lines, bytes and time, and says how far it got.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from twin.api.answers import Refused
from twin.api.runtime import MAX_TEXT, QUIET_KINDS, JournalLine, Runtime, is_routine
from twin.api.scopes import job_of, suggestion
from twin.catalogue import I32, TABLES, StorageError, clean, utc
from twin.contracts import EventRecord, SiteRecord, below
from twin.run import FOREVER_NS, JournalQuery, JournalWalk, WalkedLine, journal_begin
from twin.site import Site
from twin.telemetry import JobEnded, JobStarted

READERS = 2  # walks at once: each takes a second of a core
WAIT_S = 15.0
STAYS_BYTES = 512 * 2**20  # searched for the start of a job; only lines on it are parsed. source: estimate
MOST_STAYS = 16  # of one job
STATE_S = 2.0  # between two walks of the chain's end
FRESH_S = 30.0  # the first line of a journal changes with a pruned segment only


@dataclass(frozen=True, slots=True)
class JobStay:
    """A time in which a job ran on some nodes; `left_out`: number of its nodes that the journal does not
    name."""

    since_ns: int
    until_ns: int
    names: frozenset[str]
    inside: Mapping[str, I32]
    left_out: int = 0

    def holds(self, line: JournalLine, site: Site) -> bool:
        """Return True for a line about one of these nodes or their contents, in that time."""
        if not self.since_ns <= line.now_ns <= self.until_ns:
            return False
        return line.touches(site, self.inside) or any(
            name in self.names or name.rpartition("/")[0] in self.names for name in line.names()
        )


def _whole(name: str, site: Site) -> str:
    """Return the path of a local name; any other name unchanged."""
    if name.startswith((f"{site.file.site}/", "job:")):
        return name
    found = ((table, site.entity(table, name)) for table in TABLES if table != "job")
    return next((site.name(table, row) for table, row in found if row is not None), name)


@dataclass(frozen=True, slots=True)
class DecisionScope:
    """An entity of a query: (table, index, path), with everything inside it if `below`.

    Index -1: it is not on the site now, or a job that has ended. `stays`: a job counts with its nodes.
    """

    about: tuple[str, int, str]
    below: bool = False
    inside: Mapping[str, I32] = field(default_factory=dict)
    stays: bool = False

    @property
    def job(self) -> str:
        """Return the name of the job; "" for another entity."""
        return self.about[2].removeprefix("job:") if self.about[0] == "job" else ""

    def holds(self, line: JournalLine, site: Site) -> bool:
        """Return True for a line about this entity."""
        if line.concerns(site, self.about) or line.touches(site, self.inside):
            return True
        head = self.about[2] + "/"
        return self.below and any(_whole(name, site).startswith(head) for name in line.names())


@dataclass(frozen=True, slots=True)
class DecisionQuestion:
    """Filters of a search. `before`: the place (instant, number) before which the page ends; `most_events`:
    the events on a page, None for any number."""

    kinds: frozenset[str] = frozenset()
    control: str | None = None
    policy: str | None = None
    scopes: tuple[DecisionScope, ...] = ()
    since_ns: int = 0
    until_ns: int = FOREVER_NS
    before: tuple[int, int] | None = None
    limit: int = 100
    most_text: int = MAX_TEXT
    most_events: int | None = None

    @property
    def latest(self) -> bool:
        """Return True for a query about the present only."""
        return self.before is None and not self.since_ns and self.until_ns == FOREVER_NS

    def query(self, before: int | None) -> JournalQuery:
        """Return the query for the files."""
        without = frozenset() if self.kinds else frozenset(QUIET_KINDS)
        return JournalQuery(self.since_ns, self.until_ns, before, self.kinds, without)

    def takes(self, line: JournalLine, site: Site, stays: Iterable[JobStay]) -> bool:
        """Return True for a line that matches all filters except the place."""
        if line.kind not in self.kinds if self.kinds else is_routine(line.record):
            return False
        if not self.since_ns <= line.now_ns <= self.until_ns:
            return False
        if self.control is not None and self.control not in line.controls():
            return False
        if self.policy is not None and self.policy != line.policy:
            return False
        if not self.scopes or any(scope.holds(line, site) for scope in self.scopes):
            return True
        return any(stay.holds(line, site) for stay in stays)


@dataclass(slots=True)
class _Page:
    """Rows of a page during the search."""

    question: DecisionQuestion
    site: Site
    stays: tuple[JobStay, ...] = ()
    rows: list[dict[str, Any]] = field(default_factory=list)
    more: bool = False  # there is at least one that found no room
    other_site_ns: int = 0  # the newest line of a site that is no more
    events: int = 0  # among the lines that match

    def fill(self, lines: Iterable[JournalLine]) -> None:
        """Take lines, newest first, until there is no room."""
        for line in lines:
            if line.other_site and not self.other_site_ns:
                self.other_site_ns = line.now_ns
            if self.question.takes(line, self.site, self.stays):
                if len(self.rows) == self.question.limit:
                    self.more = True
                    return
                if line.kind == "event":
                    self.events += 1
                    if not self._has_room_for_event():
                        continue
                self.rows.append(line.answer(self.site, self.question.most_text))

    def _has_room_for_event(self) -> bool:
        most = self.question.most_events
        return most is None or self.events <= most

    @property
    def events_left_out(self) -> int:
        """Number of events that match and are not on the page."""
        most = self.question.most_events
        return 0 if most is None else max(0, self.events - most)

    def next_place(self, lines: list[JournalLine]) -> str | None:
        """Return the place where the next page begins; None if all lines fit."""
        if not self.more:
            return None
        newest = next((line.seq for line in lines if line.seq >= 0), 2**62)
        return (
            self.rows[-1]["at"] or f"{self.rows[-1]['now_ns']}.{newest + 1}"
        )  # behind notes not yet written


def place_of(text: str) -> tuple[int, int] | None:
    """Return (instant, number) of a place in the form that lines show; None for another text."""
    now, _, number = text.partition(".")
    if not all(part.isascii() and part.isdigit() and len(part) <= 19 for part in (now, number)):
        return None
    return int(now), int(number)


def scope_of(live: Runtime, name: str, inside: bool = False, several: bool = False) -> DecisionScope:
    """Return an entity by its path, with or without its table in front (`rack:lab/h/r1`), or a job by its
    own name.

    With `inside`, what is inside it counts, and a job stands for its nodes, too, unless it is one of several.
    Raises Refused.
    """
    site = live.engine.site
    slot, own = job_of(live, name), "job:" + name.removeprefix("job:")
    stays = inside and not several
    if slot is not None:
        own = "job:" + live.engine.jobs.names[slot]
        return DecisionScope(("job", slot, own), inside, {}, stays)
    head, _, tail = name.partition(":")
    tabled = bool(tail) and head in TABLES
    for table in (head,) if tabled else TABLES:
        row = site.entity(table, tail if tabled else name)
        if row is not None:
            if called := live.engine.jobs.shown(row) if table == "job" else "":
                return DecisionScope((table, row, called), inside, {}, stays)
            about = table, row, site.name(table, row)
            return DecisionScope(about, inside, _inside(site, table, [row]) if inside else {})
    past = ("job", -1, own)
    if (live.run_dir and head == "job") or any(line.concerns(site, past) for line in live.lines):
        return DecisionScope(past, inside, {}, stays)
    if live.run_dir and tabled:  # of a site that was: by its name alone
        return DecisionScope((head, -1, tail), inside)
    gone = f". For an ended job write job:{name}; for a removed place TABLE:{name}."
    hint = suggestion(live, name) or (clean(gone, 300) if live.run_dir else "")
    raise Refused(404, f"no entity {clean(name, 120)} on this site{hint}")


def _inside(site: Site, table: str, rows: list[int]) -> Mapping[str, I32]:
    return below(site, table, np.array(rows, np.int32))


def job_stays(job: str, lines: Iterable[JournalLine], site: Site) -> Iterator[JobStay]:
    """Return the times in which a job ran, latest first, from lines newest first."""
    end_ns = FOREVER_NS
    for line in lines:
        record = line.record
        if not isinstance(record, EventRecord) or record.refused or getattr(record.event, "job", "") != job:
            continue
        if isinstance(record.event, JobEnded):
            end_ns = line.now_ns
        elif isinstance(record.event, JobStarted):
            found = [site.entity("node", n) for n in record.event.nodes]
            rows = [row for row in found if row is not None]
            names = {site.name("node", row) for row in rows} | {n for n in record.event.nodes if "/" in n}
            last = re.fullmatch(r"and (\d+) more", record.event.nodes[-1] if record.event.nodes else "")
            left_out = int(last[1]) if last else 0
            yield JobStay(line.now_ns, end_ns, frozenset(names), _inside(site, "node", rows), left_out)
            end_ns = line.now_ns


class DecisionSearch:
    """Searches of one daemon, a few at a time."""

    def __init__(self) -> None:
        self._readers = asyncio.Semaphore(READERS)
        self._begin, self._state = (-FRESH_S, 0), (-FRESH_S, dict[str, Any]())

    async def page(self, live: Runtime, asked: DecisionQuestion) -> dict[str, Any]:
        """Return a page, with the place where the next one begins. Raises Refused.

        A question for the latest alone, without a place or a time, is answered from memory: screens ask it
        every few seconds. Its `next` leads on into the files.
        """
        page, notes = _Page(asked, live.engine.site), list[str]()
        jobs = [scope.job for scope in asked.scopes if scope.stays]
        if jobs:
            page.stays = tuple(await self.stays(live, jobs[0], asked))
            if left := sum(stay.left_out for stay in page.stays):
                notes.append(f"the journal does not name {left:,} nodes of the job: their lines are missing")
        lines, floor = lines_in_memory(live)
        begin_ns = reached_ns = lines[-1].now_ns if lines else 0
        page.fill(line for line in lines if _older(line, asked.before))
        following = page.next_place(lines)
        if live.run_dir:
            begin_ns = await self._begin_ns(live) or begin_ns
            if following is None and (reached_ns >= asked.since_ns or not lines):
                if asked.latest and floor is not None:
                    following = f"{reached_ns}.{floor}" if floor else None
                else:
                    before = _lower(floor, asked.before)
                    following, reached_ns = await self.read(self._walk_on, live, page, before)
        if page.more:
            reached_ns = page.rows[-1]["now_ns"]
        elif following is None:
            reached_ns = max(begin_ns, asked.since_ns)
        if page.other_site_ns and asked.scopes:
            notes.append(
                f"the site file changed at {utc(page.other_site_ns)} UTC: earlier lines, which give entities "
                "only by number, are not found"
            )
        until_ns = min(asked.until_ns, live.engine.state.now_ns)
        until_ns = min(until_ns, asked.before[0]) if asked.before else until_ns
        return {"decisions": page.rows, "next": following, "begin_ns": begin_ns,
                "searched_ns": [min(reached_ns, until_ns), until_ns], "notes": notes,
                "events_left_out": page.events_left_out}  # fmt: skip

    def _walk_on(self, live: Runtime, page: _Page, before: int | None) -> tuple[str | None, int]:
        """Fill a page from disk; returns (the place of the next page, the instant reached)."""
        walk = JournalWalk(Path(live.run_dir), page.question.query(before), live.engine.site.spec_hash)
        page.fill(walked(walk, live.engine.site))
        if page.more:
            return page.rows[-1]["at"], walk.reached_ns
        return None if walk.ended else f"{walk.reached_ns}.{walk.reached_seq}", walk.reached_ns

    async def read(self, work: Callable[..., Any], *args: Any) -> Any:
        """Return the result of `work`, run in a thread. Raises Refused."""
        try:
            async with asyncio.timeout(WAIT_S), self._readers:
                return await asyncio.to_thread(work, *args)
        except StorageError as error:
            raise Refused(503, str(error)) from None
        except TimeoutError:
            raise Refused(503, f"the journal was not read within {WAIT_S:g} s; ask for less") from None

    async def state(self, live: Runtime, work: Callable[[Runtime], dict[str, Any]]) -> dict[str, Any]:
        """Return the journal state from `work`, renewed at most every few seconds. Raises Refused."""
        if time.monotonic() - self._state[0] >= STATE_S or self._state[1].get("folder") != live.run_dir:
            self._state = time.monotonic(), await self.read(work, live)
        return self._state[1]

    async def _begin_ns(self, live: Runtime) -> int:
        """Return the instant of the first line that the journal still holds."""
        at_s, begin_ns = self._begin
        if time.monotonic() - at_s >= FRESH_S:
            _, begin_ns = await self.read(journal_begin, Path(live.run_dir))
            self._begin = time.monotonic(), begin_ns
        return begin_ns

    async def stays(self, live: Runtime, job: str, asked: DecisionQuestion) -> list[JobStay]:
        """Return the times in which a job ran, latest first: from its present state, or from the journal."""
        site, out = live.engine.site, list[JobStay]()
        if (slot := live.engine.jobs.slot_of.get(job)) is not None:
            rows = live.engine.jobs.nodes[slot].tolist()
            names = frozenset(site.name("node", row) for row in rows)
            since_ns = int(live.engine.jobs.started_ns[slot])
            out.append(JobStay(since_ns, FOREVER_NS, names, _inside(site, "node", rows)))
        if live.run_dir and not (out and asked.latest):
            found = await self.read(_stays_on_disk, live, job, asked.until_ns)
        else:
            found = [*job_stays(job, lines_in_memory(live)[0], site)]
        return [*out, *(stay for stay in found if not out or stay.since_ns < out[0].since_ns)][:MOST_STAYS]


SEARCH: web.AppKey[DecisionSearch] = web.AppKey("decision_search", DecisionSearch)


def lines_in_memory(live: Runtime) -> tuple[list[JournalLine], int | None]:
    """Return (lines newest first without gaps, number of the oldest one in the journal)."""
    out, floor = list[JournalLine](), None
    now = then = live.engine.site.spec_hash
    # A note that arrives while a tick is being written stands before its lines here, and behind them on disk.
    kept = sorted(live.lines, key=lambda line: line.seq if line.seq >= 0 else 2**62)
    for line in reversed(kept):
        if line.seq >= 0:
            if live.run_dir and floor is not None and line.seq != floor - 1:
                break
            floor = line.seq
        line.other_site = then != now
        out.append(line)
        if isinstance(line.record, SiteRecord):
            then = line.record.was
    return out, floor


def walked(walk: Iterable[WalkedLine], site: Site) -> Iterator[JournalLine]:
    """Return lines in the form that interfaces show."""
    for found in walk:
        entry, now = found.entry, site.spec_hash
        other = found.site_hash not in ("", now)
        yield JournalLine(entry.record, entry.tick, entry.now_ns, entry.seq, other)


def _stays_on_disk(live: Runtime, job: str, until_ns: int) -> list[JobStay]:
    site = live.engine.site
    needle = b'"job":' + msgspec.json.encode(job)
    query = JournalQuery(until_ns=until_ns, kinds=frozenset({"event"}), needle=needle)
    walk = JournalWalk(Path(live.run_dir), query, site.spec_hash, STAYS_BYTES)
    out = list[JobStay]()
    for stay in job_stays(job, walked(walk, site), site):
        out.append(stay)
        if len(out) == MOST_STAYS:
            break
    return out


def _older(line: JournalLine, before: tuple[int, int] | None) -> bool:
    return before is None or 0 <= line.seq < before[1]


def _lower(floor: int | None, before: tuple[int, int] | None) -> int | None:
    known = [n for n in (floor, before[1] if before else None) if n is not None]
    return min(known) if known else None
