"""Failures: nodes that became unusable, with the start, the class and the recovery of each failure.

A node that was taken out of service while it worked, by operators or by us and for whatever suspicion, is no
failure; its row is of the class `taken_out` and says only that nobody could see it fail meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from twin.catalogue import I32, I64, NS, U8, Bool, signal_of
from twin.contracts import (
    DEGRADED,
    FAILED,
    FAILURE_CLASSES,
    HEALTHY,
    NO_FAILURES,
    NODE_ENDS,
    RESTARTED_S,
    UNKNOWN,
    FailureLog,
    action,
)
from twin.diagnosis import Diagnosis
from twin.health.common_cause import WINDOW_S, Fallen, Shock, Shocks
from twin.health.context import HealthContext
from twin.health.error_log import FaultBook
from twin.health.fault_codes import find
from twin.health.verdicts import KEPT_S, MAX_PARTS, Verdicts
from twin.site import Site
from twin.telemetry import EntityState, Event, JobEnded, JobSlots, OldOfNew, column, part, scalar

# Class of each kind of code in the catalogue; a kind that is not here is `other`
CLASS_OF_CODES = {"bus": "off_bus", "memory": "memory", "nvlink": "link", "fabric": "link", "pcie": "link",
                  "thermal": "thermal", "power": "power", "app": "software"}  # fmt: skip
# Faults of the diagnosis that give the class of a failure at a node or its GPU
CLASS_OF_KIND = {
    "gpu_off_bus": "off_bus",
    "ecc_growth": "memory",
    "nvlink_flaps": "link",
    "plate_degraded": "thermal",
    "tray_blocked": "thermal",
    "leak": "thermal",
    "psu_lost": "power",
}
# Parts of the names of rules, in this order
CLASS_OF_RULE = (
    ("bus", "off_bus"), ("remap", "memory"), ("ecc", "memory"), ("memory", "memory"), ("nvlink", "link"),
    ("link", "link"), ("pcie", "link"), ("margin", "thermal"), ("therm", "thermal"), ("temp", "thermal"),
    ("leak", "thermal"), ("psu", "power"), ("power", "power"), ("silent", "silent"), ("gap", "silent"),
)  # fmt: skip
OUT_FROM = 3.0  # service level from which nobody can use a node: drained, replace
SAID_NS = 600 * NS  # before a failure begins that its cause may have been reported; source: estimate
MAX_ASKED = 200  # nodes whose evidence is read in one look; the rest are classed by the cause alone


@dataclass(slots=True)
class Causes:
    """Reasons against the use of each node [n_node]; `work`: nodes in maintenance, None: no node."""

    failed: Bool  # by verdict, themselves or one of their GPUs
    off: Bool
    silent: Bool
    out: Bool  # drained, or to be replaced, by recent verdicts
    still_out: Bool  # by the last verdict, however long ago
    grave: Bool  # failed, and a device itself reported it
    suspect: Bool  # a verdict of degraded or worse speaks against them
    work: Bool | None
    by_diagnosis: dict[int, str]  # node -> class by the diagnosis


def causes_of(now: HealthContext, verdicts: Verdicts, book: FaultBook, down: Bool) -> Causes:
    """Return the reasons against each node at this moment; `down` are known to be [n_node].

    A GPU that only does not report, without a code, may have lost no more than its telemetry: its node is
    silent, not failed.
    """
    site, n = now.site, now.n("node")
    node_level, gpu_level = verdicts.health("node").level, verdicts.health("gpu").level
    suspect, own = node_level >= DEGRADED, node_level == FAILED
    worse = np.flatnonzero(gpu_level >= DEGRADED)
    suspect[site.node_of_gpu[worse]] = True
    lost = worse[gpu_level[worse] == FAILED]
    grave = own & (book.open_action("node") >= _GRAVE) if own.any() else np.zeros(n, np.bool_)
    if lost.size:
        grave[site.node_of_gpu[lost[book.open_action("gpu")[lost] >= _GRAVE]]] = True
    silent: Bool = np.zeros(n, np.bool_)
    by_diagnosis, quiet = _diagnosed(now)
    silent[quiet] = True
    failed, only_silent = failed_nodes(site, now.diagnosis, verdicts, book, down)
    silent[only_silent] = True
    off = now.good("node.power_on_state") == 0.0
    level = now.good("node.service_level_state")
    signal = signal_of("node.service_level_state")
    with np.errstate(invalid="ignore"):
        still_out = now.state.tables["node"].value[signal.row] >= OUT_FROM
        out = level >= OUT_FROM
    return Causes(failed, off, silent, out, still_out, grave, suspect, now.under_work("node"), by_diagnosis)


def failed_nodes(
    site: Site, diagnosis: Diagnosis, verdicts: Verdicts, book: FaultBook, down: Bool
) -> tuple[Bool, list[int]]:
    """Return (nodes that have failed by verdict, themselves or one of their GPUs [n_node]; nodes whose only
    failed parts are silent GPUs). `down` are known to be [n_node]."""
    failed = verdicts.health("node").level == FAILED
    lost = np.flatnonzero(verdicts.health("gpu").level == FAILED)
    if not lost.size:
        return failed, []
    failed[site.node_of_gpu[lost]] = True
    only = _only_silent(site, diagnosis, verdicts, book, lost, down)
    failed[only] = False
    return failed, only


def _only_silent(
    site: Site, diagnosis: Diagnosis, verdicts: Verdicts, book: FaultBook, lost: I64, down: Bool
) -> list[int]:
    """Return the nodes whose only failed parts are silent GPUs; `lost` are the failed GPUs."""
    of = site.node_of_gpu
    off_bus = [e for kind, table, e, _ in diagnosis.book.reported if (kind, table) == ("gpu_off_bus", "gpu")]
    if not off_bus:
        return []
    dark = np.isin(lost, off_bus) & (book.open_action("gpu")[lost] < _GRAVE)
    nodes = np.setdiff1d(of[lost[dark]], of[lost[~dark]])
    nodes = nodes[~down[nodes]][:MAX_ASKED]
    own = verdicts.rules_of("node", nodes, FAILED)
    return [node for node in nodes.tolist() if node not in own]


def class_of_node(nodes: I32, now: HealthContext, verdicts: Verdicts, book: FaultBook, causes: Causes) -> U8:
    """Return the class of each node's failure [m], a place in FAILURE_CLASSES.

    What a device says of itself goes before what the diagnosis found, that before the rule of the verdict,
    and that before the bare fact that it is off or silent.
    """
    codes, actions = book.open_code("gpu"), book.open_action("gpu")
    plain = np.where(causes.off, _POWER, np.where(causes.silent, _SILENT, _OTHER)).astype(np.uint8)
    for node, name in causes.by_diagnosis.items():
        plain[node] = FAILURE_CLASSES.index(name)
    out: U8 = plain[nodes]
    asked = nodes[:MAX_ASKED].tolist()
    start = now.site.gpu_start_of_node
    gpus = {node: range(int(start[node]), int(start[node + 1])) for node in asked}
    names = [_of_codes(codes[g.start : g.stop], actions[g.start : g.stop]) for g in gpus.values()]
    vague = {node: gpus[node] for node, name in zip(asked, names, strict=True)
             if node not in causes.by_diagnosis and name in ("", "software")}  # fmt: skip
    by_rules = _of_rules(vague, verdicts) if vague else {}
    for k, (node, code_name) in enumerate(zip(asked, names, strict=True)):
        name = by_rules.get(node, "") or code_name
        if name and not (name == "software" and node in causes.by_diagnosis):
            out[k] = FAILURE_CLASSES.index(name)
    return out


def said_so(nodes: I32, since_ns: I64, site: Site, book: FaultBook) -> Bool:
    """Return those of these nodes [m] with a GPU that reported, about then or since, that it left the bus."""
    last_ns = np.zeros(site.sizes["node"], np.int64)
    for kind in (k for k, name in CLASS_OF_CODES.items() if name == "off_bus"):
        of_gpu = book.last_ns("gpu", kind)
        some = np.flatnonzero(of_gpu)
        np.maximum.at(last_ns, site.node_of_gpu[some], of_gpu[some])
    said: Bool = (last_ns[nodes] > 0) & (last_ns[nodes] >= since_ns - SAID_NS)
    return said


def _of_codes(codes: I32, actions: U8) -> str:
    """Return the class of the code with the strongest action."""
    for k in np.argsort(-actions.astype(np.int32), kind="stable").tolist():
        if codes[k] and (name := CLASS_OF_CODES.get(find(int(codes[k]), "gpu").kind)):
            return name
    return ""


def _of_rules(nodes: dict[int, range], verdicts: Verdicts) -> dict[int, str]:
    """Return the class by the gravest rules against each node and its GPUs, if a rule has one."""
    level = verdicts.health("gpu").level
    failed = {node: [g for g in gpus if level[g] == FAILED] for node, gpus in nodes.items()}
    every = np.array(sorted(g for some in failed.values() for g in some), np.int32)
    of_gpu = verdicts.rules_of("gpu", every, HEALTHY)
    of_node = verdicts.rules_of("node", np.array(sorted(nodes), np.int32), FAILED)
    out = {}
    for node, gpus in nodes.items():
        own = [(-sure, rule) for _, sure, rule in of_node.get(node, [])]
        ill = [g for g in gpus if level[g] != HEALTHY][:MAX_PARTS]
        theirs: list[tuple[float, str]] = []
        for gpu in failed[node]:
            said = of_gpu.get(gpu, [])
            if said and gpu in ill:
                _, sure, rule = min(said, key=lambda s: (-s[0], -s[1]))
                own.append((-sure, f"gpu:{rule}"))
            theirs += sorted((-sure, rule) for at, sure, rule in said if at == FAILED)
        for _, rule in (*sorted(own), *theirs):
            if name := next((name for part, name in CLASS_OF_RULE if part in rule), ""):
                out[node] = name
                break
    return out


def _diagnosed(now: HealthContext) -> tuple[dict[int, str], list[int]]:
    """Return the faults that the diagnosis reports of nodes and their GPUs: (node -> class, nodes that are
    silent).
    """
    classes: dict[int, str] = {}
    silent: list[int] = []
    for kind, table, entity, _ in now.diagnosis.book.reported:
        if kind == "node_silent":
            silent.append(entity)
        elif kind in CLASS_OF_KIND and table in ("gpu", "node"):
            node = int(now.site.node_of_gpu[entity]) if table == "gpu" else entity
            classes.setdefault(node, CLASS_OF_KIND[kind])
    return classes, silent


_GRAVE = action("reset_gpu")
_POWER, _SILENT, _OTHER = (FAILURE_CLASSES.index(c) for c in ("power", "silent", "other"))

MAX_ROWS, DROPPED = 20_000, 1000  # kept; dropped at once when there are more
HOLD_S = 60.0  # a cause that lasts no longer is no failure; source: estimate
# A device that is merely silent may have lost its agent or its network for a while. source: SlurmdTimeout
# of Slurm, after which a node counts as down by default
SILENT_S = 300.0
WELL_S = 600.0  # so long well, it is back; source: estimate
# So long a verdict is remembered that spoke against a node; source: estimate
REASON_S = 86_400.0
REFINE_S = 600.0  # so long later reports may give the class of a failure; source: estimate
_COLUMNS = {"node": np.int32, "start_ns": np.int64, "end_ns": np.int64, "kind": np.uint8,
            "shared": np.bool_, "closed": np.bool_}  # fmt: skip
_NONE = tuple(FAILURE_CLASSES.index(c) for c in NO_FAILURES)
_VAGUE = tuple(FAILURE_CLASSES.index(c) for c in ("other", "silent"))


class Failures(EntityState):
    """The bounded log of failures, and the nodes that are down now.

    A row that starts before `begin_ns` was so when the watch began, or its node was never seen well; or it is
    left over of rows that were given up. Rates are to be taken from the others.
    """

    begin_ns: int = scalar(0)
    now_ns: int = scalar(0)
    bad_ns: I64 = column("node", "i8")
    well_ns: I64 = column("node", "i8")
    suspect_ns: I64 = column("node", "i8")
    accused_ns: I64 = column("node", "i8")
    mended_ns: I64 = column("node", "i8", of_place=True)  # when it or a GPU of it was last exchanged
    row: I64 = column("node", "i8", -1, of_place=True)  # number of the open row of each node
    seen_well: Bool = column("node", "?", of_place=True)
    first: int = scalar(0)  # number of the oldest kept row
    _rows: dict[str, Any] = scalar({k: np.zeros(0, kind) for k, kind in _COLUMNS.items()})
    _shocks: Shocks = part()

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site = site
        self._log: FailureLog | None = None
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
        """Begin and end failures by the present verdicts; mark those with a common cause."""
        t_ns = self.now_ns = now.now_ns
        self.begin_ns = self.begin_ns or t_ns
        causes = causes_of(now, verdicts, book, self.row >= 0)
        self.suspect_ns[causes.suspect] = t_ns
        down = self.row >= 0
        lasting = down & causes.still_out
        bad = causes.failed | causes.off | causes.silent | causes.out | lasting
        accused = self._accused()
        # A single-node job reported the failure: no other evidence is needed
        alone = accused & (self.bad_ns == self.accused_ns)
        self._recover(now, verdicts, book, bad, t_ns)
        held = bad | alone
        if causes.work is not None:
            held &= ~causes.work
        self.bad_ns[held & (self.bad_ns == 0)] = t_ns
        self.bad_ns[~held & ~down] = 0
        seen = causes.failed | causes.off | causes.out
        hold_s = np.where(seen, HOLD_S, SILENT_S)
        # Reports that still name the old device end once the new one is well
        fresh = (self.mended_ns > 0) & (self.bad_ns - self.mended_ns <= KEPT_S * NS)
        long = t_ns - self.bad_ns >= np.where(fresh, WELL_S, hold_s) * NS
        starts = held & (self.row < 0) & (long | causes.grave | accused)
        begun = np.flatnonzero(starts).astype(np.int32)
        if begun.size:
            self._begin(begun, now, verdicts, book, causes)
        self._refine(now, verdicts, book, causes)
        self._share(now, len(begun))

    def _accused(self) -> Bool:
        """Return the nodes with a failure that the end of a job has just reported [n_node]."""
        return np.asarray((self.accused_ns > 0) & (self.now_ns - self.accused_ns <= WELL_S * NS), np.bool_)

    def _begin(
        self, nodes: I32, now: HealthContext, verdicts: Verdicts, book: FaultBook, causes: Causes
    ) -> None:
        fault = causes.failed | causes.off | causes.silent
        asked = ~causes.out | fault | self._accused()
        taken = FAILURE_CLASSES.index("taken_out")
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
        """Drop the oldest rows: the log is complete only since the last of them."""
        self.begin_ns = max(self.begin_ns, int(self._rows["start_ns"][:count].max()) + 1)
        self._rows = {k: v[count:].copy() for k, v in self._rows.items()}
        self.first += count
        self._log = None

    def _recover(self, now: HealthContext, verdicts: Verdicts, book: FaultBook, bad: Bool, t_ns: int) -> None:
        """Record the healthy nodes and their times; a node of unknown state is not healthy."""
        asked = ~bad & ((self.row >= 0) | ~self.seen_well)
        self.well_ns[bad] = 0
        if not asked.any():
            return
        known = verdicts.health("node").level != UNKNOWN
        doubtful = asked & ~known
        if doubtful.any():
            of_gpu = np.flatnonzero(doubtful[self.site.node_of_gpu])
            reporting = of_gpu[verdicts.health("gpu").level[of_gpu] != UNKNOWN]
            known[self.site.node_of_gpu[reporting]] = True
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
        """Return those of these recovered nodes that returned soon without a reported fault."""
        at = self.row[nodes] - self.first
        rows, well_ns = at[at >= 0], self.well_ns[nodes][at >= 0]
        soon = well_ns - self._rows["start_ns"][rows] <= round(RESTARTED_S * NS)
        rows = rows[soon]
        # A silent GPU counts as off its bus: a GPU that really was does not return so soon
        silent = rows[self._merely_silent(rows, book)]
        if silent.size:
            self._rows["kind"][silent] = FAILURE_CLASSES.index("restarted")
            self._log = None

    def _merely_silent(self, rows: I64, book: FaultBook) -> Bool:
        """Return the failures of which only silence of the node or its GPUs is known [k]."""
        kind = self._rows["kind"][rows]
        out = np.asarray(kind == FAILURE_CLASSES.index("silent"), np.bool_)
        lost = np.flatnonzero(kind == FAILURE_CLASSES.index("off_bus"))
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
        """Refine the class of a failure by evidence after its begin."""
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
        """Mark failures with a common cause."""
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
        """Return all remembered failures, oldest first.

        `shared` is also set where the node has been replaced since: the row counts for the fleet, and says
        nothing about the present node.
        """
        if self._log is None:
            rows = self._rows
            order = np.argsort(rows["start_ns"], kind="stable")
            shown = {k: v[order] for k, v in rows.items()}
            shown["shared"] |= shown["closed"]
            for column in shown.values():
                column.flags.writeable = False
            self._log = FailureLog(
                shown["node"], shown["start_ns"], shown["end_ns"], shown["kind"], shown["shared"],
                FAILURE_CLASSES, self.begin_ns,
            )  # fmt: skip
        elif self._log.begin_ns != self.begin_ns:
            self._log = replace(self._log, begin_ns=self.begin_ns)
        return self._log

    def down(self) -> Bool:
        """Return the nodes that must not be used now: failed, or out of service [n_node]."""
        return self.row >= 0

    def broken(self, book: FaultBook) -> Bool:
        """Return the nodes that are down for more than a short silence [n_node]."""
        out: Bool = self.row >= 0
        nodes = np.flatnonzero(out)
        at = self.row[nodes] - self.first
        kept = at >= 0  # of older ones the row is not known any more
        rows = at[kept]
        young = self.now_ns - self._rows["start_ns"][rows] <= round(RESTARTED_S * NS)
        out[nodes[kept][young]] = ~self._merely_silent(rows[young], book)
        return out

    def suspects(self) -> Bool:
        """Return the nodes with a verdict against them or their GPUs within a day [n_node]."""
        return (self.suspect_ns > 0) & (self.now_ns - self.suspect_ns <= REASON_S * NS)

    def well_again(self) -> tuple[I64, I64]:
        """Return (since when each failed node is well, when it has recovered) [n_node]; 0 for none."""
        return self.well_ns, np.where(self.well_ns > 0, self.well_ns + round(WELL_S * NS), 0)

    def shocks(self) -> tuple[Shock, ...]:
        """Return the common causes, the newest last; at most 256."""
        return self._shocks.log()

    def forget(self, table: str, entity: int) -> None:
        """Clear the slot of a new device: a new node or GPU is a repair, and a new node has no history."""
        if table == "gpu":
            node = int(self.site.node_of_gpu[entity])
            row = int(self.row[node]) - self.first
            if row >= 0 and self._rows["kind"][row] != FAILURE_CLASSES.index("taken_out"):
                self._end([node], self.now_ns)
            self.suspect_ns[node] = self.bad_ns[node] = 0
            self.mended_ns[node] = self.now_ns
        elif table == "node":
            if self.row[entity] >= 0:
                self._end([entity], self.now_ns)
            self.mended_ns[entity] = self.now_ns
            self._rows["closed"][self._rows["node"] == entity] = True
        super().forget(table, entity)

    def derive(self) -> None:
        """Drop the log; it is rebuilt on demand."""
        self._log = None

    def adopt(self, old: Self, old_of_new: OldOfNew) -> None:
        """Take over the failures of nodes that stay. A new node counts as well until it is seen otherwise."""
        super().adopt(old, old_of_new)
        source = old_of_new["node"]
        self.seen_well |= source < 0
        new_of_old = np.full(old.site.sizes["node"], -1, np.int64)
        new_of_old[source[source >= 0]] = np.flatnonzero(source >= 0)
        moved = new_of_old[old._rows["node"]]
        kept = np.flatnonzero(moved >= 0)
        self._rows = {k: v[kept] for k, v in old._rows.items()}
        self._rows["node"] = moved[kept].astype(np.int32)
        number = np.full(len(moved), -2, np.int64)  # -2: open, and its row is no longer kept
        number[kept] = np.arange(len(kept))
        if len(moved):
            at = self.row - old.first
            self.row = np.where(self.row < 0, -1, np.where(at >= 0, number[np.maximum(at, 0)], -2))
        self.first = 0
