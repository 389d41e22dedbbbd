"""Error log: the errors that devices reported, per device and code, bounded.

Late faults count where they belong, those of the future now, those older than 28 days not at all; a fault
that happened before its device was replaced is not the new one's.

`SoftwareFaults` are exceptions and page faults that several nodes of one job report at about the same time:
the job's own (source: rule of thumb of operators: XID 31 on different GPUs of one job is software).
`XidGauge` reads the gauge of the last XID where no agent reads the kernel's log: DCGM holds it and clears it
only when it starts anew (field 230). A value that was there before anybody watched shows neither when it came
nor whether it is cured, and one that goes shows a restart of the GPU, its node, or DCGM alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from twin.catalogue import F32, I32, I64, NS, U8, Bool, signal_of
from twin.contracts import action
from twin.health.context import HealthContext
from twin.health.fault_actions import OpenActions, Remediation
from twin.health.fault_codes import CATALOGUE, CLASSES, MAX_CODE, read_detail
from twin.health.fault_counts import SPANS_S, Batch, FaultCounts
from twin.site import Site
from twin.telemetry import EntityState, FaultColumns, FaultReported, JobSlots, column, entries, part, scalar

KEY = "gpu.xid_code"
NEVER = -1.0
DOUBT_S = 86_400.0  # for which a GPU is watched whose grave XID went; source: estimate
MOST = 1000  # faults of one look; the rest follows at the next ones
ONLINE = 0.0  # of node.agent_state


class XidGauge(EntityState):
    """Last XID in the gauge of each GPU [n_gpu]; NEVER: none."""

    last: F32 = column("gpu", "f4", NEVER)
    before: I32 = column("gpu", "i4")  # grave, there when first reported or gone lately; 0 = none
    gone_ns: I64 = column("gpu", "i8")  # when it went; 0 = it is held still

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site = site
        self.gone: I32 = np.zeros(0, np.int32)  # GPUs whose grave XID went at this look

    def update(self, now: HealthContext) -> list[FaultReported]:
        """Return new values since the last check as faults; none for GPUs whose agent reports faults."""
        self.gone = self.gone[:0]
        if self.gone_ns.any():
            lapsed = (self.gone_ns > 0) & (now.now_ns - self.gone_ns > DOUBT_S * NS)
            self.before[lapsed] = self.gone_ns[lapsed] = 0
        signal = signal_of(KEY)
        column = now.state.tables["gpu"]
        if column.n == 0 or not now.ever_reported(KEY):
            return []
        value = column.value[signal.row]
        moved = np.flatnonzero(value != self.last)
        moved = moved[np.isfinite(value[moved])][:MOST]
        if not len(moved):
            return []
        code, old = value[moved].astype(np.int64), self.last[moved]
        self.last[moved] = value[moved]
        grave = CATALOGUE.grave[CATALOGUE.rows(code, "gpu")]
        known = _agents(now)
        spared = np.zeros(len(moved), np.bool_) if known is None else known[moved]
        was = np.maximum(old, 0).astype(np.int64)
        went = (code == 0) & CATALOGUE.grave[CATALOGUE.rows(was, "gpu")] & ~spared
        self.gone = moved[went].astype(np.int32)
        self.before[moved] = np.where(went, was, np.where((old == NEVER) & grave & ~spared, code, 0))
        self.gone_ns[moved] = np.where(went, now.now_ns, 0)
        fresh = (old != NEVER) & (code > 0) & ~spared
        return [
            FaultReported(table="gpu", name=self.site.name("gpu", int(i)), code=int(c),
                          detail="the last XID, as the gauge holds it")
            for i, c in zip(moved[fresh].tolist(), code[fresh].tolist(), strict=True)
        ]  # fmt: skip


def _agents(now: HealthContext) -> Bool | None:
    """Return the GPUs of nodes with an online agent, which reads the log itself [n_gpu]; None: no agent."""
    if not now.ever_reported("node.agent_state"):
        return None
    online: Bool = now.good("node.agent_state") == ONLINE
    return online[now.site.node_of_gpu]


CODES = (13, 31)  # source: NVIDIA XID catalogue: mostly the application's
TOGETHER_S, NODES = 600.0, 2  # source: estimate
HELD_S = 86_400.0  # for which such a fault speaks of the job. source: estimate


class SoftwareFaults(EntityState):
    """Last software fault of each node and GPU: instant, job, and whether the job caused it."""

    _node_ns: I64 = column("node", "i8")
    _slot: I32 = column("node", "i4", -1)
    _generation: I32 = column("node", "i4")
    _gpu_ns: I64 = column("gpu", "i8")
    _own_ns: I64 = column("gpu", "i8")

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site = site

    def receive(self, batch: Batch, fresh: Bool, jobs: JobSlots | None, now_ns: int) -> None:
        """Take in faults of GPUs [k]; those which are `fresh` count."""
        if jobs is None:
            return
        some = np.flatnonzero(np.isin(batch.code, CODES) & fresh & (now_ns - batch.at_ns < TOGETHER_S * NS))
        gpu = batch.entity[some]
        node = self.site.node_of_gpu[gpu]
        slot = jobs.job_of_node[node]
        of_job = slot >= 0
        if not of_job.any():
            return
        gpu, node, slot, at_ns = gpu[of_job], node[of_job], slot[of_job], batch.at_ns[some][of_job]
        np.maximum.at(self._node_ns, node, at_ns)
        np.maximum.at(self._gpu_ns, gpu, at_ns)
        self._slot[node], self._generation[node] = slot, jobs.generation[slot]
        recent = np.flatnonzero((self._slot >= 0) & (now_ns - self._node_ns < TOGETHER_S * NS))
        recent = recent[self._slot[recent] < jobs.n]
        recent = recent[jobs.generation[self._slot[recent]] == self._generation[recent]]
        nodes = np.bincount(self._slot[recent], minlength=jobs.n)
        own = np.zeros(len(self._slot), np.bool_)
        own[recent] = nodes[self._slot[recent]] >= NODES
        self._own_ns[own[self.site.node_of_gpu] & (now_ns - self._gpu_ns < TOGETHER_S * NS)] = now_ns

    def gpus(self, now_ns: int) -> Bool:
        """Return the GPUs whose faults of these codes were caused by their own job [n_gpu]."""
        return (self._own_ns > 0) & (now_ns - self._own_ns < HELD_S * NS)


MOST_ALIKE = 5  # of one code within a day on one device. source: gpud and NVSentinel, rules of thumb
MAX_TIMES = 1_000_000  # that one report may stand for
MAX_DETAILS, MAX_DETAIL = 10_000, 200  # texts kept, at times twice as many; characters of each
MAX_NOTED = 1000  # of one tick and table whose texts are kept
MAX_FAULTS = 32  # listed faults of one device
MOST_RETURNED = 200  # nodes of a day in a handover
REBOOT = action("reboot_node")


class ReportedFault(NamedTuple):
    """A fault as reported."""

    at_ns: int
    received_ns: int
    code: int
    times: int
    detail: str


class FaultBook(EntityState):
    """Faults by device. Tables: gpu (XIDs), switch and node (SXIDs, codes of agents), and any other that
    reports."""

    now_ns: int = scalar(0)
    counts: dict[str, int] = scalar({})
    _heard: dict[str, FaultCounts] = part("_new_counts")
    _open: dict[str, OpenActions] = part("_new_actions")
    _details: dict[tuple[str, int, int], str] = entries()  # by table, entity and code; the newest last
    _replaced: dict[tuple[str, int], int] = entries()  # when devices were, within the longest span
    _software: SoftwareFaults = part()
    _cures: Remediation = part()
    _gauge: XidGauge = part()

    def __init__(self, site: Site) -> None:
        super().__init__(site.sizes)
        self.site = site
        self._heard, self._open = {}, {}
        self._software, self._cures, self._gauge = SoftwareFaults(site), Remediation(site), XidGauge(site)
        self._by_class = np.zeros((len(CLASSES), site.sizes["gpu"]), np.float32)

    def _new_counts(self, table: str) -> FaultCounts:
        return FaultCounts(self.site.sizes[table], table, self.now_ns)

    def _new_actions(self, table: str) -> OpenActions:
        return OpenActions(self.site.sizes[table], table)

    def receive(self, events: Sequence[FaultReported], now_ns: int, jobs: JobSlots | None = None) -> bool:
        """Take in faults in order of arrival; True if one of them wants to be judged at once.

        With `jobs`, page faults and exceptions on several nodes of one job are taken for its own.
        """
        self.advance(now_ns)
        grave = False
        for table, (entities, some) in self._by_table(FaultColumns.of(events)).items():
            grave |= self._take(table, entities, some, jobs)
        return grave

    def update(self, now: HealthContext) -> None:
        """Advance to this look, and close the faults that restarts, resets and people have resolved since."""
        self.advance(now.now_ns)
        self._cures.update(now, self._open)
        found = self._gauge.update(now)
        if len(self._gauge.gone):  # more than the gauge, no source reports it
            self.resolve("gpu", self._gauge.gone, REBOOT, now.now_ns)
        if found:
            self.receive([f for f in found if not self._is_known(f)], now.now_ns, now.jobs)

    def _is_known(self, fault: FaultReported) -> bool:
        """Return True if the same device reported the same code within 24 h."""
        counts, entity = self._heard.get(fault.table), self.site.entity(fault.table, fault.name)
        if counts is None or entity is None:
            return False
        pairs = counts.of(entity)
        return bool((counts.sums[1, pairs[counts.code[pairs] == fault.code]] > 0).any())

    def advance(self, now_ns: int) -> None:
        """Advance the time: old faults no longer count, and mild actions lapse."""
        self.now_ns = max(self.now_ns, now_ns)
        for counts in self._heard.values():
            counts.advance(self.now_ns)
        for opened in self._open.values():
            opened.lapse(self.now_ns)

    def _count(self, what: str, by: int = 1) -> None:
        if by:
            self.counts[what] = self.counts.get(what, 0) + by

    def _by_table(self, faults: FaultColumns) -> dict[str, tuple[I32, FaultColumns]]:
        """Return entities and faults per table, in order; faults of unknown entities are counted."""
        out: dict[str, tuple[I32, FaultColumns]] = {}
        present, known = faults.tables(), 0
        tables = [table for table in self.site.sizes if table in present and table != "job"]
        for table in sorted(tables, key=lambda table: table == "switch"):
            some, found = faults.of_table(table, self.site)
            known += len(some)
            there = found >= 0
            if there.all():
                out[table] = found, some
                continue
            lost = some.some(np.flatnonzero(~there))
            out[table] = found[there], some.some(np.flatnonzero(there))
            if table == "switch":
                lost = self._show_on_nodes(lost, out)
            self._count("unknown_entities", len(lost))
        self._count("unknown_tables", len(faults) - known)
        return {table: held for table, held in out.items() if held[1]}

    def _show_on_nodes(self, faults: FaultColumns, out: dict[str, tuple[I32, FaultColumns]]) -> FaultColumns:
        """Assign faults of switches that the site does not list to their nodes."""
        nodes = self.site.entities("node", [name.rpartition("/")[0] for name in faults.names])
        known = nodes >= 0
        if known.any():
            shown = [faults.some(np.flatnonzero(known))]
            entities, some = out.get("node", (np.zeros(0, np.int32), None))
            shown = shown if some is None else [some, *shown]
            out["node"] = np.concatenate([entities, nodes[known]]), FaultColumns.joined(shown)
        return faults.some(np.flatnonzero(~known))

    def _take(self, table: str, entity: I32, faults: FaultColumns, jobs: JobSlots | None) -> bool:
        batch, wanted = self._batch(table, entity, faults)
        if not wanted.all():
            index = np.flatnonzero(wanted)
            batch, faults = batch.some(index), faults.some(index)
        counts = self._heard.get(table)
        if counts is None:
            self._heard[table] = counts = self._new_counts(table)
            self._open[table] = self._new_actions(table)
        fresh = counts.add(batch, self.now_ns)
        self._count("heard", len(fresh))
        self._count("heard_twice", int((~fresh).sum()))
        self._count("unknown_codes", int((batch.row == 0).sum()))
        asked, grave = CATALOGUE.action[batch.row], CATALOGUE.grave[batch.row].copy()
        cured = self._read_words(batch, faults, asked, grave)
        answered = batch.dated & (batch.at_ns <= self._returned_ns(table)[batch.entity])
        self._count("before_return", int((answered & fresh).sum()))
        asked[~fresh | answered], grave[~fresh | answered] = 0, False
        self._ask(table, batch, asked, grave, cured & fresh)
        self._note_details(table, batch, faults)
        if table == "gpu":
            self._software.receive(batch, fresh, jobs, self.now_ns)
        return bool(grave.any())

    def _returned_ns(self, table: str) -> I64:
        """Return the last return to service of each entity's node [n]; 0 = not seen."""
        of_node = self._cures.returned_ns
        if table == "node":
            return of_node
        if table == "gpu":
            return of_node[self.site.node_of_gpu]
        return np.zeros(self.site.sizes[table], np.int64)

    def returned(self) -> dict[str, int]:
        """Return when nodes came back into service, of those that did within a day, by name."""
        at_ns = self._cures.returned_ns
        lately = np.flatnonzero(at_ns > self.now_ns - SPANS_S[1] * NS)
        newest = np.sort(lately[np.argsort(-at_ns[lately], kind="stable")][:MOST_RETURNED])
        return {self.site.name("node", i): int(at_ns[i]) for i in newest.tolist()}

    def take_returns(self, returned: Mapping[str, int], now_ns: int) -> None:
        """Take in what another daemon saw return, and drop the actions that faults before that ask for."""
        known, at_ns = self._cures.returned_ns, np.zeros(self.site.sizes["node"], np.int64)
        for name, when_ns in returned.items():
            node = self.site.entity("node", name)
            if node is not None:
                at_ns[node] = min(when_ns, now_ns)
        news = at_ns > known
        known[news] = at_ns[news]
        for table, opened in self._open.items():
            since_ns = self._returned_ns(table)
            open_now = np.flatnonzero((opened.action > 0).any(axis=0) & (since_ns > 0)).astype(np.int32)
            before = [all(f.at_ns <= since_ns[i] for f in self.of(table, i)) for i in open_now.tolist()]
            opened.drop(open_now[np.array(before, np.bool_)])

    def _batch(self, table: str, entity: I32, faults: FaultColumns) -> tuple[Batch, Bool]:
        """Return columns of faults, within bounds, and the mask of those to count [k]."""
        code, times, at_ns = faults.code, faults.times, faults.at_ns
        absurd = (code < 0) | (code > MAX_CODE)
        self._count("absurd_codes", int(absurd.sum()))
        code = np.where(absurd, MAX_CODE, code)
        many = (times < 1) | (times > MAX_TIMES)
        self._count("absurd_counts", int(many.sum()))
        times = np.where(many, 1, times)
        self._count("absurd_times", int((at_ns < 0).sum()))
        self._count("from_the_future", int((at_ns > self.now_ns).sum()))
        dated = at_ns > 0
        at_ns = np.where(dated, np.minimum(at_ns, self.now_ns), self.now_ns)
        old = at_ns <= self.now_ns - SPANS_S[-1] * NS
        self._count("too_old", int(old.sum()))
        wanted = ~old
        if self._replaced:
            since = np.array([self._replaced.get((table, e), -1) for e in entity.tolist()], np.int64)
            before = dated & (at_ns <= since) & wanted
            self._count("of_a_replaced_device", int(before.sum()))
            wanted &= ~before
        row = CATALOGUE.rows(code, table)
        return Batch(entity, code, row, at_ns, times, dated), wanted

    def _read_words(self, batch: Batch, faults: FaultColumns, asked: U8, grave: Bool) -> Bool:
        """Grade codes by the words of their report; returns the mask of GPUs that report no needed action
        [k]."""
        cured = np.zeros(len(faults), np.bool_)
        for i in np.flatnonzero(CATALOGUE.text[batch.row]).tolist():
            entry = CATALOGUE.entries[batch.row[i]]
            asked[i], grave[i] = read_detail(entry, faults[i].detail)
            cured[i] = entry.text == "recovery" and asked[i] == 0
        return cured

    def _ask(self, table: str, batch: Batch, asked: U8, grave: Bool, cured: Bool) -> None:
        opened, start = self._open[table], 0
        for stop in (*np.flatnonzero(cured).tolist(), len(asked)):
            part = slice(start, stop)
            opened.ask(batch.some(part), asked[part], grave[part], self.now_ns)
            if stop < len(asked):
                opened.resolve(batch.entity[stop : stop + 1], REBOOT, int(batch.at_ns[stop]))
            start = stop

    def _note_details(self, table: str, batch: Batch, faults: FaultColumns) -> None:
        """Note the words of the first faults only: a storm repeats them."""
        details, some = self._details, slice(MAX_NOTED)
        of = zip(batch.entity[some].tolist(), batch.code[some].tolist(), faults[some], strict=True)
        for entity, code, event in of:
            if event.detail:
                key = (table, entity, code)
                details.pop(key, None)  # the newest last
                details[key] = event.detail[:MAX_DETAIL]
        if len(details) > 2 * MAX_DETAILS:  # seldom, as a dict is slow to lose its first ones
            self._details = dict(list(details.items())[-MAX_DETAILS:])

    def within(self, table: str, span_s: float) -> I32:
        """Return the significant faults within the last 600, 86,400 or 2,419,200 s [n].

        A span is counted in minutes, hours or days, and may be one of them longer. Raises ValueError for
        another span.
        """
        span = SPANS_S.index(int(span_s))
        counts = self._heard.get(table)
        if counts is None:
            return np.zeros(self.site.sizes[table], np.int32)
        total: I32 = np.minimum(counts.total[span], 2**31 - 1).astype(np.int32)
        return total

    def repeated(self, table: str) -> tuple[I32, I32, I32]:
        """Return (entity ascending, code, count) of codes with MOST_ALIKE or more faults within 24 h."""
        counts = self._heard.get(table)
        if counts is None:
            none = np.zeros(0, np.int32)
            return none, none, none
        size = counts.size
        many = np.flatnonzero((counts.sums[1, :size] >= MOST_ALIKE) & ~CATALOGUE.ignore[counts.row[:size]])
        many = many[np.lexsort((counts.code[many], counts.entity[many]))]
        count = np.minimum(counts.sums[1, many], 2**31 - 1)
        return counts.entity[many], counts.code[many].astype(np.int32), count.astype(np.int32)

    def lately(self, table: str, codes: tuple[int, ...], since_ns: int) -> I32:
        """Return the devices with one of these codes after an instant, ascending."""
        counts = self._heard.get(table)
        return np.zeros(0, np.int32) if counts is None else counts.lately(codes, since_ns)

    def last_ns(self, table: str, kind: str) -> I64:
        """Return the last report of a code of this kind [n], by the devices' own times; 0 = never."""
        counts = self._heard.get(table)
        return np.zeros(self.site.sizes[table], np.int64) if counts is None else counts.last_ns(kind)

    def _open_column(self, table: str, name: str, kind: Any) -> Any:
        opened = self._open.get(table)
        return np.zeros(self.site.sizes[table], kind) if opened is None else opened.in_force(name)

    def open_action(self, table: str) -> U8:
        """Return the open action of the codes [n]: 0 = none.

        Of what is grave the strongest, else of what is mild.
        """
        return np.asarray(self._open_column(table, "action", np.uint8))

    def open_code(self, table: str) -> I32:
        """Return the code behind the open action [n]; 0 = none."""
        return np.asarray(self._open_column(table, "code", np.int32))

    def open_grave(self, table: str) -> Bool:
        """Return the mask of devices that cannot be used until the open action is done [n]."""
        opened = self._open.get(table)
        return np.zeros(self.site.sizes[table], np.bool_) if opened is None else opened.action[1] > 0

    @property
    def of_software(self) -> Bool:
        """Return the GPUs whose exceptions and page faults most likely come from their job [n_gpu]."""
        return self._software.gpus(self.now_ns)

    def xid_before(self) -> I32:
        """Return the grave XID in a GPU's gauge at the first observation [n_gpu]; 0 = none."""
        return self._gauge.before

    def dbe_undone(self) -> I64:
        """Return each GPU's counter of double-bit errors at its last reset [n_gpu]; -1 = never seen."""
        return self._cures.last["dbe"]

    def by_class(self) -> tuple[tuple[str, ...], F32]:
        """Return (names of classes, decayed counts of the last day [n_class, n_gpu]); valid until the next
        call."""
        counts = self._heard.get("gpu")
        if counts is None:
            self._by_class[:] = 0
            return CLASSES, self._by_class
        return CLASSES, counts.by_class(self._by_class)

    def of(self, table: str, entity: int) -> tuple[ReportedFault, ...]:
        """Return the last faults of a device, the newest last: the newest three of a code, one with its
        words."""
        counts, found = self._heard.get(table), list[ReportedFault]()
        if counts is None:
            return ()
        for pair in counts.of(entity).tolist():
            code = int(counts.code[pair])
            columns = (counts.ring_at[:, pair], counts.ring_heard[:, pair], counts.ring_times[:, pair])
            faults = [
                ReportedFault(at_ns, received_ns, code, times, "")
                for at_ns, received_ns, times in zip(*(c.tolist() for c in columns), strict=True)
                if times
            ]
            if faults:
                faults[-1] = faults[-1]._replace(detail=self._details.get((table, entity, code), ""))
            found += faults
        return tuple(sorted(found, key=lambda h: (h.at_ns, h.received_ns, h.code))[-MAX_FAULTS:])

    def resolve(self, table: str, index: I32, upto: int, now_ns: int) -> None:
        """Close the faults of these entities reported up to `now_ns` whose action is at most `upto` in
        ACTIONS.
        """
        if table in self._open:
            self._open[table].resolve(np.asarray(index, np.int32), upto, now_ns)

    def forget(self, table: str, entity: int) -> None:
        """Clear the faults of this slot for a new device."""
        super().forget(table, entity)
        oldest_ns = self.now_ns - SPANS_S[-1] * NS
        self._replaced = {key: at_ns for key, at_ns in self._replaced.items() if at_ns > oldest_ns}
        self._replaced[table, entity] = self.now_ns
