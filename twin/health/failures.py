"""Failures: nodes that became unusable, with the start, the class and the recovery of each failure.

A node that was taken out of service while it worked, by operators or by us and for whatever suspicion, is no
failure; its row is of the class `taken_out` and says only that nobody could see it fail meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from twin.catalogue import I32, I64, NS, Bool
from twin.contracts import UNKNOWN, FailureLog
from twin.health.common_cause import WINDOW_S, Fallen, Shock, Shocks
from twin.health.context import HealthContext
from twin.health.error_log import FaultBook
from twin.health.failure_evidence import MAX_ASKED, Causes, causes_of, class_of_node, said_so
from twin.health.failure_words import CLASSES, NO_FAILURES, NODE_ENDS, RESTARTED_S, is_failure
from twin.health.verdicts import KEPT_S, Verdicts
from twin.site import Site
from twin.telemetry import Event, JobEnded, JobSlots

__all__ = ["CLASSES", "NO_FAILURES", "Failures", "is_failure"]

MAX_ROWS, DROPPED = 20_000, 1000  # kept; dropped at once when there are more
HOLD_S = 60.0  # a cause that lasts no longer is no failure; source: estimate
# What is merely silent may have lost its agent or its network for a while. source: SlurmdTimeout of Slurm,
# after which a node counts as down by default
SILENT_S = 300.0
WELL_S = 600.0  # so long well, it is back; source: estimate
# So long a verdict is remembered that spoke against a node; source: estimate
REASON_S = 86_400.0
REFINE_S = 600.0  # so long what is heard later may tell the class of a failure; source: estimate
_COLUMNS = {"node": np.int32, "start_ns": np.int64, "end_ns": np.int64, "kind": np.uint8,
            "shared": np.bool_, "closed": np.bool_}  # fmt: skip
_STATES = ("bad_ns", "well_ns", "row", "seen_well", "suspect_ns", "accused_ns", "mended_ns")
_NONE = tuple(CLASSES.index(c) for c in NO_FAILURES)
_VAGUE = tuple(CLASSES.index(c) for c in ("other", "silent"))


class Failures:
    """The log of failures, bounded, and which nodes are down now.

    A row that starts before `begin_ns` was so when the watch began, or its node was never seen well; or it is
    left over of rows that were given up. Rates are to be taken from the others.
    """

    def __init__(self, site: Site) -> None:
        self.site, n = site, site.sizes["node"]
        self.begin_ns = self.now_ns = 0
        self.bad_ns, self.well_ns = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.suspect_ns, self.accused_ns = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.mended_ns = np.zeros(n, np.int64)  # when it or a GPU of it was last exchanged
        self.row = np.full(n, -1, np.int64)  # number of the open row of each node
        self.seen_well = np.zeros(n, np.bool_)
        self.first = 0  # number of the oldest kept row
        self._rows: dict[str, Any] = {k: np.zeros(0, kind) for k, kind in _COLUMNS.items()}
        self._log: FailureLog | None = None
        self._retired = np.zeros(0, np.bool_)
        self._shocks = Shocks(site)

    def take(self, event: Event, jobs: JobSlots, now_ns: int) -> None:
        """Note a job that ends, before that is applied: Slurm says so where a node failed."""
        if not isinstance(event, JobEnded):
            return
        slot = jobs.slot_of.get(event.job)
        if slot is None:
            return
        nodes = jobs.nodes[slot]
        self._shocks.job_ended(event.job, nodes, now_ns)
        if event.reason in NODE_ENDS:
            self.accused_ns[nodes] = now_ns
            if len(nodes) == 1:
                self.bad_ns[nodes] = np.where(self.bad_ns[nodes] == 0, now_ns, self.bad_ns[nodes])

    def update(self, now: HealthContext, verdicts: Verdicts, book: FaultBook) -> None:
        """Begin and end failures by what is judged now; mark those with a cause in common."""
        t_ns = self.now_ns = now.now_ns
        self.begin_ns = self.begin_ns or t_ns
        causes = causes_of(now, verdicts, book, self.row >= 0)
        self.suspect_ns[causes.suspect] = t_ns
        down = self.row >= 0
        lasting = down & causes.still_out
        bad = causes.failed | causes.off | causes.silent | causes.out | lasting
        accused = self._accused()
        # A job of one node told of it: nothing else need be seen
        alone = accused & (self.bad_ns == self.accused_ns)
        self._recover(now, verdicts, book, bad, t_ns)
        held = bad | alone
        if causes.work is not None:
            held &= ~causes.work
        self.bad_ns[held & (self.bad_ns == 0)] = t_ns
        self.bad_ns[~held & ~down] = 0
        seen = causes.failed | causes.off | causes.out
        hold_s = np.where(seen, HOLD_S, SILENT_S)
        # What is still told of the old device is over once the new one is well
        fresh = (self.mended_ns > 0) & (self.bad_ns - self.mended_ns <= KEPT_S * NS)
        long = t_ns - self.bad_ns >= np.where(fresh, WELL_S, hold_s) * NS
        starts = held & (self.row < 0) & (long | causes.grave | accused)
        begun = np.flatnonzero(starts).astype(np.int32)
        if begun.size:
            self._begin(begun, now, verdicts, book, causes)
        self._refine(now, verdicts, book, causes)
        self._share(now, len(begun))

    def _accused(self) -> Bool:
        """Nodes of which the end of a job told just now [n_node]."""
        return np.asarray((self.accused_ns > 0) & (self.now_ns - self.accused_ns <= WELL_S * NS), np.bool_)

    def _begin(
        self, nodes: I32, now: HealthContext, verdicts: Verdicts, book: FaultBook, causes: Causes
    ) -> None:
        fault = causes.failed | causes.off | causes.silent
        asked = ~causes.out | fault | self._accused()
        taken = CLASSES.index("taken_out")
        kinds = class_of_node(nodes, now, verdicts, book, causes)
        kinds = np.where(asked[nodes], kinds, taken).astype(np.uint8)
        started = np.where(self.seen_well[nodes], self.bad_ns[nodes], self.begin_ns - 1)
        none = np.zeros(len(nodes), np.bool_)
        new = {"node": nodes, "start_ns": started, "end_ns": np.zeros(len(nodes), np.int64),
               "kind": kinds, "shared": none, "closed": none}  # fmt: skip
        self.row[nodes] = self.first + len(self._rows["node"]) + np.arange(len(nodes))
        self.well_ns[nodes] = 0
        for name, values in new.items():
            self._rows[name] = np.concatenate([self._rows[name], values.astype(_COLUMNS[name])])
        self._log = None
        excess = len(self._rows["node"]) - MAX_ROWS
        if excess > 0:
            self._drop(max(excess, min(DROPPED, MAX_ROWS // 2)))

    def _drop(self, count: int) -> None:
        """Forget the oldest rows: from then on the log is whole since the last of them only."""
        self.begin_ns = max(self.begin_ns, int(self._rows["start_ns"][:count].max()) + 1)
        self._rows = {k: v[count:].copy() for k, v in self._rows.items()}
        self.first += count
        self._log = None

    def _recover(self, now: HealthContext, verdicts: Verdicts, book: FaultBook, bad: Bool, t_ns: int) -> None:
        """Record the nodes that are well, and since when; a node of unknown state is not well."""
        asked = ~bad & ((self.row >= 0) | ~self.seen_well)
        self.well_ns[bad] = 0
        if not asked.any():
            return
        known = verdicts.health("node").level != UNKNOWN
        doubtful = asked & ~known
        if doubtful.any():
            of_gpu = np.flatnonzero(doubtful[self.site.node_of_gpu])
            heard = of_gpu[verdicts.health("gpu").level[of_gpu] != UNKNOWN]
            known[self.site.node_of_gpu[heard]] = True
        well = asked & known
        self.seen_well |= well
        well &= self.row >= 0
        self.well_ns[(self.row >= 0) & ~well] = 0
        self.well_ns[well & (self.well_ns == 0)] = t_ns
        back = np.flatnonzero(well & (t_ns - self.well_ns >= WELL_S * NS))
        if back.size:
            self._restarted(back, book)
            self._end(back, self.well_ns[back])

    def _restarted(self, nodes: I64, book: FaultBook) -> None:
        """Of these nodes, which are well again, those that came back soon and never said what was wrong."""
        at = self.row[nodes] - self.first
        rows, well_ns = at[at >= 0], self.well_ns[nodes][at >= 0]
        soon = well_ns - self._rows["start_ns"][rows] <= round(RESTARTED_S * NS)
        rows = rows[soon]
        # A GPU that is not heard is taken to be off its bus: one that was does not come back so soon
        silent = rows[self._merely_silent(rows, book)]
        if silent.size:
            self._rows["kind"][silent] = CLASSES.index("restarted")
            self._log = None

    def _merely_silent(self, rows: I64, book: FaultBook) -> Bool:
        """Failures of which all that is known is that the node or GPUs of it were not heard [k]."""
        kind = self._rows["kind"][rows]
        out = np.asarray(kind == CLASSES.index("silent"), np.bool_)
        lost = np.flatnonzero(kind == CLASSES.index("off_bus"))
        if lost.size:
            at = rows[lost]
            out[lost] = ~said_so(self._rows["node"][at], self._rows["start_ns"][at], self.site, book)
        return out

    def _end(self, nodes: I32 | I64 | list[int], at_ns: I64 | int) -> None:
        at = self.row[nodes] - self.first
        kept = at >= 0
        end_ns = np.broadcast_to(np.asarray(at_ns, np.int64), at.shape)
        rows = at[kept]
        self._rows["end_ns"][rows] = np.maximum(end_ns[kept], self._rows["start_ns"][rows] + 1)
        self.row[nodes] = -1
        for state in (self.bad_ns, self.well_ns, self.accused_ns):
            state[nodes] = 0
        self._log = None

    def _refine(self, now: HealthContext, verdicts: Verdicts, book: FaultBook, causes: Causes) -> None:
        """Refine the class of a failure by evidence that came after it had begun."""
        rows = self._rows
        young = (rows["start_ns"] >= now.now_ns - round(REFINE_S * NS)) & (rows["end_ns"] == 0)
        vague = np.flatnonzero(young)
        vague = vague[np.isin(rows["kind"][vague], _VAGUE)][-MAX_ASKED:]
        if not vague.size:
            return
        found = class_of_node(rows["node"][vague], now, verdicts, book, causes)
        better = ~np.isin(found, _VAGUE)
        if better.any():
            rows["kind"][vague[better]] = found[better]
            self._log = None

    def _share(self, now: HealthContext, begun: int) -> None:
        """Mark failures with a cause in common."""
        rows = self._rows
        fails = ~np.isin(rows["kind"], _NONE)
        lately = rows["start_ns"] >= now.now_ns - round(2 * WINDOW_S * NS)
        recent = np.flatnonzero(fails & lately)
        if not recent.size:
            return
        past = fails & ~lately & ~rows["shared"] & (rows["start_ns"] >= self.begin_ns)
        fresh = recent >= len(lately) - begun
        fallen = Fallen(rows["node"][recent], rows["start_ns"][recent], rows["kind"][recent], fresh,
                        rows["shared"][recent])  # fmt: skip
        found = recent[self._shocks.judge(now, fallen, int(np.count_nonzero(past)), self.begin_ns)]
        if not rows["shared"][found].all():
            rows["shared"][found] = True
            self._log = None

    def log(self) -> FailureLog:
        """All that are remembered, oldest first.

        `shared` is also set where the node has been replaced since: the row counts for the fleet, and tells
        nothing of the node that is there now (`retired` tells which).
        """
        if self._log is None:
            rows = self._rows
            order = np.argsort(rows["start_ns"], kind="stable")
            shown = {k: v[order] for k, v in rows.items()}
            shown["shared"] |= shown["closed"]
            for column in shown.values():
                column.flags.writeable = False
            self._retired = shown["closed"]
            self._log = FailureLog(
                shown["node"], shown["start_ns"], shown["end_ns"], shown["kind"], shown["shared"], CLASSES,
                self.begin_ns,
            )  # fmt: skip
        elif self._log.begin_ns != self.begin_ns:
            self._log = replace(self._log, begin_ns=self.begin_ns)
        return self._log

    def retired(self) -> Bool:
        """Rows of the log [k] whose node has been replaced since."""
        self.log()
        return self._retired

    def down(self) -> Bool:
        """Nodes that are not to be used now: failed, or out of service [n_node]."""
        return self.row >= 0

    def broken(self, book: FaultBook) -> Bool:
        """Nodes that are down for more than a short silence [n_node]."""
        out: Bool = self.row >= 0
        nodes = np.flatnonzero(out)
        at = self.row[nodes] - self.first
        kept = at >= 0  # of older ones the row is not known any more
        rows = at[kept]
        young = self.now_ns - self._rows["start_ns"][rows] <= round(RESTARTED_S * NS)
        out[nodes[kept][young]] = ~self._merely_silent(rows[young], book)
        return out

    def suspects(self) -> Bool:
        """Nodes that a verdict, of their own or of a GPU of theirs, spoke against within a day [n_node]."""
        return (self.suspect_ns > 0) & (self.now_ns - self.suspect_ns <= REASON_S * NS)

    def shocks(self) -> tuple[Shock, ...]:
        """Causes in common that were found, the newest last; at most 256."""
        return self._shocks.told()

    def forget(self, table: str, entity: int) -> None:
        """Another device sits in this slot: a new node or GPU is a repair, and a new node has no history."""
        if table == "gpu":
            node = int(self.site.node_of_gpu[entity])
            row = int(self.row[node]) - self.first
            if row >= 0 and self._rows["kind"][row] != CLASSES.index("taken_out"):
                self._end([node], self.now_ns)
            self.suspect_ns[node] = self.bad_ns[node] = 0
            self.mended_ns[node] = self.now_ns
        elif table == "node":
            if self.row[entity] >= 0:
                self._end([entity], self.now_ns)
            for state in (self.bad_ns, self.well_ns, self.suspect_ns, self.accused_ns):
                state[entity] = 0
            self.mended_ns[entity] = self.now_ns
            self._rows["closed"][self._rows["node"] == entity] = True
            self._log = None

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> Failures:
        """Return the log for a changed site: entity i of a table was `old_of_new[table][i]`, -1 if new.

        Failures of nodes that have left go with them. A new node counts as well until it is seen otherwise.
        """
        out = Failures(site)
        source = old_of_new["node"]
        new = np.flatnonzero(source >= 0)
        new_of_old = np.full(self.site.sizes["node"], -1, np.int64)
        new_of_old[source[new]] = new
        moved = new_of_old[self._rows["node"]]
        kept = np.flatnonzero(moved >= 0)
        out._rows = {k: v[kept] for k, v in self._rows.items()}
        out._rows["node"] = moved[kept].astype(np.int32)
        out.begin_ns, out.now_ns = self.begin_ns, self.now_ns
        out.seen_well[:] = True
        for name in _STATES:
            getattr(out, name)[new] = getattr(self, name)[source[new]]
        number = np.full(len(moved), -2, np.int64)  # -2: open, and its row is no longer kept
        number[kept] = np.arange(len(kept))
        at = out.row - self.first
        out.row = np.where(out.row < 0, -1, np.where(at >= 0, number[at], -2)) if len(moved) else out.row
        out._shocks = self._shocks.remapped(site, old_of_new)
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        return {"begin_ns": self.begin_ns, "now_ns": self.now_ns, "first": self.first,
                "rows": dict(self._rows), **{name: getattr(self, name) for name in _STATES},
                "shocks": self._shocks.dump()}  # fmt: skip

    def restore(self, data: Mapping[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.begin_ns, self.now_ns = int(data["begin_ns"]), int(data["now_ns"])
        self.first = int(data["first"])
        self._rows = {k: np.array(data["rows"][k], kind) for k, kind in _COLUMNS.items()}
        for name in _STATES:
            if name in data:  # an older one knows nothing of exchanges
                setattr(self, name, np.array(data[name]))
        self._shocks.restore(data["shocks"])
        self._log = None
