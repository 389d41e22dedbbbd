"""Load targets: external limits on the power of the site or of some of its feeders, for a time.

A utility, a market, the grid operator through DSX Flex, or a person sets them; policies keep to them. A later
target replaces an earlier one of the same name. The number of targets is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from twin.catalogue import I32, NS
from twin.contracts.journal import JournalRecord, LoadTargetOverRecord
from twin.site import Site
from twin.telemetry import events as ev

MAX_TARGETS = 1000
MAX_LIMIT_W = 1e11  # more than any site draws; a limit beyond it is a wrong unit
KEPT_FREE = 100  # beyond these, for people and files: no grid's side takes all the room
MAX_FEEDERS = 10_000  # of one target
MAX_NAME = 200  # characters of a target's name
MAX_AHEAD_S = 366 * 86_400.0
END_OF_TIME_NS = 2**63


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """At most `limit_w` from `start_ns` until `end_ns` (None: until it is withdrawn).

    `feeders`: indices, each to be held on its own; None: the racks of the site together. `best_effort`: what
    cannot be shed without disturbing jobs may stay.
    """

    name: str
    author: str
    kind: str
    limit_w: float
    start_ns: int
    end_ns: int | None
    feeders: I32 | None
    best_effort: bool = False

    def runs(self, now_ns: int) -> bool:
        """True if it is in force at this instant."""
        return self.start_ns <= now_ns and (self.end_ns is None or now_ns < self.end_ns)


ReadTargets = Callable[[], tuple[LoadTarget, ...]]  # gives the targets in force


class LoadTargets:
    """Targets that run or are to come, in the order in which they were first set."""

    def __init__(self) -> None:
        self._held: dict[str, ev.LoadTargetSet] = {}
        self._site: Site | None = None
        self._found: tuple[LoadTarget, ...] = ()

    def set(self, event: ev.LoadTargetSet, site: Site, now_ns: int) -> str | None:
        """Take a target in; the reason why not, if it cannot be."""
        if not event.target or len(event.target) > MAX_NAME:
            return f"a target needs a name of 1 to {MAX_NAME} characters"
        if not 0 <= event.limit_w < np.inf:
            return f"expected a limit_w of 0 or more, got {event.limit_w}"
        if not (0 <= event.start_ns < END_OF_TIME_NS and 0 <= event.end_ns < END_OF_TIME_NS):
            return "expected instants in ns since 1970, or 0 for none"
        if event.start_ns - now_ns > MAX_AHEAD_S * NS:
            return "begins in more than a year; expected ns since 1970 (UTC)"
        if 0 < event.end_ns <= now_ns:
            return f"over already, {(now_ns - event.end_ns) / NS:.0f} s ago"
        if 0 < event.end_ns <= event.start_ns:
            return "ends before it begins"
        if len(event.feeders) > MAX_FEEDERS:
            return f"names {len(event.feeders)} feeders; expected at most {MAX_FEEDERS}"
        unknown = [name for name in event.feeders if site.entity("feeder", name) is None]
        if unknown:
            return f"no feeder {unknown[0][:200]}"
        room = MAX_TARGETS + (KEPT_FREE if event.kind != "flex" else 0)
        if len(self._held) >= room and event.target not in self._held:
            return f"more than {room} load targets"
        # As a snapshot would give it back: a whole number of watts is a float all the same
        self._held[event.target] = msgspec.convert(msgspec.to_builtins(event), ev.LoadTargetSet)
        self._site = None
        return None

    def withdraw(self, name: str) -> str | None:
        """Forget a target; the reason why not, if there is none."""
        self._site = None
        return None if self._held.pop(name, None) is not None else f"no load target {name[:MAX_NAME]}"

    def expire(self, now_ns: int) -> list[JournalRecord]:
        """Forget those that are over; journal records."""
        over = [name for name, held in self._held.items() if 0 < held.end_ns <= now_ns]
        for name in over:
            del self._held[name]
            self._site = None
        return [LoadTargetOverRecord(target=name) for name in over]

    def current(self, site: Site) -> tuple[LoadTarget, ...]:
        """All of them for this site; feeders that it does not have are left out."""
        if self._site is not site:
            self._site, found = site, []
            for name, event in self._held.items():
                places = [site.entity("feeder", feeder) for feeder in event.feeders]
                index = np.unique(np.array([p for p in places if p is not None], np.int32))
                index.flags.writeable = False
                found.append(LoadTarget(
                    name, event.author, event.kind, event.limit_w, event.start_ns, event.end_ns or None,
                    index if event.feeders else None, event.best_effort,
                ))  # fmt: skip
            self._found = tuple(found)
        return self._found

    def events(self) -> tuple[ev.LoadTargetSet, ...]:
        """All of them as they were set."""
        return tuple(self._held.values())

    def dump(self) -> list[Any]:
        """All of them as plain data."""
        return [msgspec.to_builtins(event) for event in self._held.values()]

    def restore(self, data: list[Any]) -> None:
        """Take over what `dump` gave."""
        self._held = {one["target"]: msgspec.convert(one, ev.LoadTargetSet) for one in data}
        self._site = None
