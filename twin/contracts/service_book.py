"""Service book: the last test, repair and replacement of each node, from events.

Policies use it to decide whether a withdrawn node may return.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from twin.catalogue import I8, I64, NS
from twin.site import Site
from twin.telemetry import EntityState, OldOfNew, column, events as ev

PASSED, FAILED_TEST, NO_RESULT, UNTESTED = 1, 0, -1, -2
AHEAD_S = 60.0  # clocks of test stations may be ahead of ours by so much. source: estimate


@dataclass(frozen=True, slots=True)
class Service:
    """Service record of each node [n_node]; instants 0 = never. Read only.

    `result` is PASSED, FAILED_TEST, NO_RESULT or UNTESTED, of the last test, which ran from `began_ns` to
    `ended_ns`. `replaced_ns`: of the node itself or of the last of its GPUs.
    """

    result: I8
    began_ns: I64
    ended_ns: I64
    repaired_ns: I64
    replaced_ns: I64


class ServiceBook(EntityState):
    """The service record of each node, kept over restarts and changes of the site."""

    result: I8 = column("node", "i1", fill=UNTESTED)
    began: I64 = column("node", "i8")  # ns, as the others
    ended: I64 = column("node", "i8")
    repaired: I64 = column("node", "i8")
    replaced: I64 = column("node", "i8")

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site = site

    def take(self, event: ev.Event, now_ns: int) -> str | None:
        """Write down what an event says of a node; the reason why not, if it cannot be so."""
        if isinstance(event, ev.EntityReplaced):
            node, before = (self._node_of(event.table, name) for name in (event.name, event.moved_from))
            # A GPU that left, or that its node counts in another order, mends nothing
            if node is not None and (event.table == "node" or (event.serial and before != node)):
                self.replaced[node] = now_ns
            return None
        if not isinstance(event, ev.NodeTested | ev.NodeRepaired):
            return None
        node = self.site.entity("node", event.name)
        if node is None:
            return f"names a node that this site does not have: {event.name[:200]!r}"
        if isinstance(event, ev.NodeRepaired):
            self.repaired[node] = now_ns
            return None
        if not 0 < event.began_ns <= event.ended_ns <= now_ns + round(AHEAD_S * NS):
            return "expected a test that began before it ended, and not in the future"
        if event.began_ns < self.began[node]:
            return "an older test than the one known"
        self.began[node], self.ended[node] = event.began_ns, event.ended_ns
        self.result[node] = NO_RESULT if event.passed is None else int(event.passed)
        return None

    def _node_of(self, table: str, name: str) -> int | None:
        entity = self.site.entity(table, name) if table in ("gpu", "node") else None
        return int(self.site.node_of_gpu[entity]) if entity is not None and table == "gpu" else entity

    def service(self) -> Service:
        """All of it, read only."""
        shown = Service(
            self.result.view(),
            self.began.view(),
            self.ended.view(),
            self.repaired.view(),
            self.replaced.view(),
        )
        for field in fields(shown):
            getattr(shown, field.name).flags.writeable = False
        return shown

    def remapped(self, new: Site, kept: OldOfNew) -> ServiceBook:
        """The book of another site; nodes that are new begin with an empty page."""
        out = ServiceBook(new)
        out.adopt(self, kept)
        return out
