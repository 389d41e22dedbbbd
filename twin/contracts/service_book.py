"""The service book: when each node was last tested, repaired and replaced, as events said.

Policies read from it whether a node that was taken out may come back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.catalogue import I8, I32, I64, NS, Bool
from twin.site import Site
from twin.telemetry import events as ev

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


def _read_only(column: NDArray[Any]) -> NDArray[Any]:
    """A view of a column that cannot be written to."""
    view = column.view()
    view.flags.writeable = False
    return view


class ServiceBook:
    """Columns of `Service`, kept over restarts and changes of the site."""

    def __init__(self, site: Site) -> None:
        n = site.sizes["node"]
        self.site = site
        self._result = np.full(n, UNTESTED, np.int8)
        self._ns = {name: np.zeros(n, np.int64) for name in ("began", "ended", "repaired", "replaced")}

    def take(self, event: ev.Event, now_ns: int) -> str | None:
        """Write down what an event says of a node; the reason why not, if it cannot be so."""
        if isinstance(event, ev.EntityReplaced):
            entity = self.site.entity(event.table, event.name)
            node = None if entity is None else self._node_of(event.table, entity)
            if node is not None:
                self._ns["replaced"][node] = now_ns
            return None
        if not isinstance(event, ev.NodeTested | ev.NodeRepaired):
            return None
        node = self.site.entity("node", event.name)
        if node is None:
            return f"names a node that this site does not have: {event.name[:200]!r}"
        if isinstance(event, ev.NodeRepaired):
            self._ns["repaired"][node] = now_ns
            return None
        if not 0 < event.began_ns <= event.ended_ns <= now_ns + round(AHEAD_S * NS):
            return "expected a test that began before it ended, and not in the future"
        if event.began_ns < self._ns["began"][node]:
            return "an older test than the one known"
        self._ns["began"][node], self._ns["ended"][node] = event.began_ns, event.ended_ns
        self._result[node] = NO_RESULT if event.passed is None else int(event.passed)
        return None

    def _node_of(self, table: str, entity: int) -> int | None:
        if table == "gpu":
            return int(self.site.node_of_gpu[entity])
        return entity if table == "node" else None

    def service(self) -> Service:
        """All of it, read only."""
        result = _read_only(self._result)
        return Service(result, **{f"{name}_ns": _read_only(column) for name, column in self._ns.items()})

    def remapped(self, new: Site, kept: Mapping[str, I32]) -> ServiceBook:
        """The book of another site; nodes that are new begin with an empty page."""
        out, old_of_new = ServiceBook(new), kept["node"]
        there: Bool = old_of_new >= 0
        out._result[there] = self._result[old_of_new[there]]
        for name, column in self._ns.items():
            out._ns[name][there] = column[old_of_new[there]]
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot."""
        return {"result": self._result, **self._ns}

    def restore(self, data: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        self._result = np.array(data["result"], np.int8)
        self._ns = {name: np.array(data[name], np.int64) for name in self._ns}
