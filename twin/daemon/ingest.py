"""Ingest: the inlet of all sources, with the Inbox of the next frame, the counts and the wake-up.

One instance lives as long as the daemon: a changed site gives it another Inbox. Counts by topic are bounded,
since strangers invent names.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from twin.catalogue import TABLES
from twin.contracts import Item
from twin.engine import news
from twin.site import Site, SiteSpec, build_site
from twin.telemetry import Block, EntityReplaced, Event, Frame, IdentityTold, Inbox, Reading, SiteChanged

log = logging.getLogger(__name__)
MAX_PLACES = 500  # topics and addresses whose faults are counted apart
MAX_IDENTITIES = 2000  # identities in a frame: a fleet that starts at once must not crowd out its faults
SAMPLES = 20
OTHERS = "others"


class Ingest:
    """Implements `twin.contracts.contracts.Inlet`."""

    def __init__(self, site: Site, serials: dict[str, str], tick_s: float = 1.0) -> None:
        self.site, self.inbox = site, Inbox(site.sizes, tick_s)
        self._tick_s = tick_s
        self._serials = serials  # of the engine: what sits where
        self.urgent = asyncio.Event()
        self.counts = {"staged": 0, "ignored": 0, "bad": 0, "dropped": 0}
        self.rejected: OrderedDict[str, list[Any]] = OrderedDict()  # place -> [count, last reason]
        self.dropped: OrderedDict[str, list[Any]] = OrderedDict()
        self.skipped: OrderedDict[str, list[Any]] = OrderedDict()
        self.samples: list[str] = []
        self.last_ns = 0  # when something was staged last
        self._identities = 0  # identities that wait for the next frame

    def stage(self, items: Sequence[Item], now_ns: int) -> None:
        """Stage the items of one message. Items that do not fit the site are counted, never raised."""
        inbox = self.inbox
        self.last_ns = now_ns
        self.counts["staged"] += 1
        for item in items:
            try:
                if type(item) is Reading:
                    inbox.put(item, now_ns)
                elif type(item) is Block:
                    inbox.put_block(item, now_ns)
                else:
                    self.put_event(item)  # type: ignore[arg-type]
            except (KeyError, ValueError, IndexError) as error:
                self.reject("staging", f"{type(error).__name__}: {error}")
        if inbox.urgent:
            self.urgent.set()

    def put_event(self, event: Event) -> bool:
        """Queue an event for the next frame; False when the queue is full.

        An identity that is known is not queued: agents send it again and again.
        """
        if isinstance(event, EntityReplaced):
            self._reset_counters(event)
        elif isinstance(event, IdentityTold):
            what = news(self._serials, event, self.site)
            if what == "same":
                return True
            if self._identities >= MAX_IDENTITIES:
                self.drop("identities", f"more than {MAX_IDENTITIES} wait; agents send them again")
                return False
            self._identities += 1
            if what == "other":
                self._reset_counters(event)
        return self.inbox.put_event(event)

    def force_event(self, event: Event) -> None:
        """Queue an event of the shell itself, also where strangers have filled the queue."""
        if not self.put_event(event):
            self.inbox.events.append(event)

    def change_site(self, event: SiteChanged) -> Site:
        """The next frame changes the site; what is staged from now on is in the new numbering.

        Readings that wait are dropped, less than a tick's; they come again. Sources of the old site must
        have been stopped.
        """
        self.site = build_site(msgspec.json.decode(event.spec, type=SiteSpec), "the changed site")
        before, self.inbox = self.inbox, Inbox(self.site.sizes, self._tick_s)
        self.inbox.events, self.inbox.counts = before.events, before.counts
        self.inbox.put_event(event)
        return self.site

    def take(self, tick: int, now_ns: int, dt_s: float) -> Frame:
        """Cut a frame."""
        self.urgent.clear()
        self._identities = 0
        return self.inbox.take(tick, now_ns, dt_s)

    def skip(self, what: str, why: str) -> None:
        """Count a well-formed message that is not for us."""
        self.counts["ignored"] += 1
        _note(self.skipped, what, why, 1)

    def reject(self, where: str, why: str) -> None:
        """Count a bad message; the first of each place is logged."""
        self.counts["bad"] += 1
        if _note(self.rejected, where, why, 1) == 1:
            log.warning("bad message on %s: %s", where[:200], why[:300])
        if len(self.samples) >= SAMPLES:
            del self.samples[0]
        self.samples.append(f"{where[:120]}: {why[:300]}")

    def drop(self, where: str, why: str, count: int = 1) -> None:
        """Count what was lost before it could be decoded."""
        self.counts["dropped"] += count
        if _note(self.dropped, where, why, count) == count:
            log.warning("%d messages dropped from %s: %s", count, where[:200], why[:300])

    def summary(self) -> dict[str, Any]:
        """Counts for interfaces."""
        return {
            **self.counts,
            "last_ns": self.last_ns,
            "inbox": dict(self.inbox.counts),
            "bad_by_place": {k: {"count": v[0], "last": v[1]} for k, v in self.rejected.items()},
            "dropped_by_place": {k: {"count": v[0], "why": v[1]} for k, v in self.dropped.items()},
            "ignored_kinds": {k: {"count": v[0], "why": v[1]} for k, v in self.skipped.items()},
            "bad_samples": list(self.samples),
        }

    def _reset_counters(self, event: EntityReplaced | IdentityTold) -> None:
        """The counters of a new device do not go on where the old one's ended."""
        entity = self.site.entity(event.table, event.name) if event.table in TABLES else None
        if entity is not None and self._serials.get(f"{event.table}:{event.name}") != event.serial:
            self.inbox.forget(event.table, entity)


def _note(places: OrderedDict[str, list[Any]], place: str, why: str, count: int) -> int:
    """Count under a place. Beyond the limit the one that was quiet longest joins the others: who invents
    names must not hide what real places say."""
    key = place[:200]
    entry = places.setdefault(key, [0, ""])
    entry[0] += count
    entry[1] = why[:300]
    places.move_to_end(key)
    while len(places) > MAX_PLACES + (OTHERS in places):
        quiet = next(name for name in places if name != OTHERS)
        gone = places.pop(quiet)
        others = places.setdefault(OTHERS, [0, ""])
        others[0] += gone[0]
        others[1] = gone[1]
    return int(entry[0])
