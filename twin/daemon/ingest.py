"""Ingest: the inlet of all sources, with the Inbox of the next frame, their ledger and the wake-up.

One instance lives as long as the daemon: a changed site gives it another Inbox.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from twin.contracts import Inlet, Item, Source
from twin.engine import news, replaced_entity
from twin.site import Site, SiteSpec, build_site
from twin.sources import OTHERS, SourceAccount, SourceLedger, moved
from twin.telemetry import Block, EntityReplaced, Event, Frame, IdentityTold, Inbox, Reading, SiteChanged

MAX_IDENTITIES = 2000  # identities in a frame: a fleet that starts at once must not crowd out its faults


class Ingest:
    """Implements `twin.contracts.contracts.Inlet`. `passed_ns`: time by a clock that never steps."""

    def __init__(
        self,
        site: Site,
        serials: dict[str, str],
        tick_s: float = 1.0,
        passed_ns: Callable[[], int] | None = None,
    ) -> None:
        self.site, self.inbox = site, Inbox(site.sizes, tick_s)
        self._tick_s = tick_s
        self._serials = serials  # of the engine: what sits where
        self.urgent = asyncio.Event()
        self.ledger = SourceLedger(site.sizes, self.put_items, time.time_ns)
        self.ledger.passed_ns = passed_ns
        self.ahead_ns = 0  # of the ticks to our wall clock, which stepped back
        self.last_ns = 0  # when something was staged last
        self._identities = 0  # identities that wait for the next frame

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of messages by outcome."""
        return self.ledger.counts

    def of(self, source: str, outside: bool = False) -> SourceAccount:
        """The inlet of one source. `outside`: its name came from outside, such as in a topic."""
        return self.ledger.account(source, outside)

    def inlet_of(self, source: Source) -> Inlet:
        """The inlet of a source. One that only reads others has no account of its own beside theirs."""
        origins: Sequence[str] | None = getattr(source, "origins", None)
        accounts = [self.of(name) for name in (source.name,) if origins is None]
        accounts += [self.of(name) for name in origins or ()]
        return accounts[0] if len(accounts) == 1 else self

    def stage(self, items: Sequence[Item], now_ns: int, poll_s: float = 0.0) -> None:
        """Stage items of the daemon itself, such as the outcomes of commands, on the line of the ticks."""
        self.put_items(items, now_ns)

    def put_items(
        self, items: Sequence[Item], now_ns: int, account: SourceAccount | None = None
    ) -> tuple[int, int]:
        """Stage the items of one message: (cells that were too old, the newest stamp of a reading).

        Those of an account go by our wall clock. Items that do not fit the site are counted under it, never
        raised.
        """
        inbox, newest_ns, ahead_ns = self.inbox, 0, 0 if account is None else self.ahead_ns
        late = inbox.counts["older"]
        self.last_ns = now_ns
        self.counts["staged"] += 1
        if ahead_ns:  # on the line of the ticks
            now_ns += ahead_ns
            items = [moved(item, ahead_ns, now_ns) for item in items]
        for item in items:
            try:
                if type(item) is Reading:
                    inbox.put(item, now_ns)
                    newest_ns = max(newest_ns, item.t_ns)
                elif type(item) is Block:
                    inbox.put_block(item, now_ns)
                    newest_ns = max(newest_ns, item.t_ns)
                else:
                    is_queued = self.put_event(item)  # type: ignore[arg-type]
                    if not is_queued and not isinstance(item, IdentityTold):
                        (account or self).drop("events", "too many events wait for the next tick")
            except (KeyError, ValueError, IndexError) as error:
                (account or self).reject("staging", f"{type(error).__name__}: {error}")
        if inbox.urgent:
            self.urgent.set()
        return inbox.counts["older"] - late, newest_ns - ahead_ns if newest_ns else 0

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
        self.force_event(event)
        self.ledger.change_site(self.site.sizes)
        return self.site

    def take(self, tick: int, now_ns: int, dt_s: float) -> Frame:
        """Cut and return a frame."""
        self.urgent.clear()
        self._identities = 0
        for event in self.ledger.take_polls(self.site):
            self.force_event(event)
        frame = self.inbox.take(tick, now_ns, dt_s)
        for signal, entity, value, count in self.inbox.absurd:
            name = self.site.name(signal.table, entity)
            self.ledger.out_of_range(signal, entity, f"{name}: {value:g}", count)
        return frame

    def skip(self, what: str, why: str, example: str = "", remedy: str = "") -> None:
        """Count an unused message without a source."""
        self.of(OTHERS).skip(what, why, example, remedy)

    def reject(self, where: str, why: str, remedy: str = "") -> None:
        """Count a bad message without a source."""
        self.of(OTHERS).reject(where, why, remedy)

    def fail(self, why: str, remedy: str = "") -> None:
        """Count a failed request without a source."""
        self.of(OTHERS).fail(why, remedy)

    def drop(self, where: str, why: str, count: int = 1) -> None:
        """Count lost messages without a source."""
        self.of(OTHERS).drop(where, why, count)

    def summary(self) -> dict[str, Any]:
        """Counts for interfaces; `twin.sources` has the reasons."""
        return {**self.counts, "last_ns": self.last_ns, "inbox": dict(self.inbox.counts)}

    def _reset_counters(self, event: EntityReplaced | IdentityTold) -> None:
        """Reset the counters of a replaced device."""
        entity = replaced_entity(self._serials, event, self.site)
        if entity is not None:
            self.inbox.forget(event.table, entity)
