"""Event handlers: apply each event to the state of the engine, and record it in the journal.

Events concern the authority of policies, requests of operators, grants, jobs, replaced devices, outlooks and
fitted models. An event that cannot be applied is counted and recorded with the reason; it raises no error.

The id of an event is unique among events of its type. A second event with the same id and content counts as a
duplicate, unless it is a request of people that was refused. With other content it is refused, except that it
changes a request. The journal records both once per tick.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from twin import kernels
from twin.catalogue import F64, I32, NS, TABLES, digest, find_control, unpack
from twin.contracts import (
    END_OF_TIME_NS,
    ApprovalDroppedRecord,
    ApprovalExpiredRecord,
    DuplicatesRecord,
    EventRecord,
    FitExpiredRecord,
    GrantExpiredRecord,
    JournalRecord,
    LoadTargets,
    Model,
    RequestExpiredRecord,
    brief_event,
)
from twin.control import ACK_STATES, MOST_HANDOVER_S, Arbiter
from twin.engine.identity import Identities
from twin.engine.job_reports import checkpoint_reported, job_ended, job_started
from twin.engine.outlook import Outlooks
from twin.site import Site
from twin.telemetry import FaultColumns, FaultIds, JobSlots, ReportLayout, State, events as ev

ADVISING = ("advise", "approve")  # levels at which proposals are, or may be, advice alone
MAX_REQUESTS = 1000
MAX_SEEN = 10_000
MAX_NAMES = 100_000
MAX_REFUSED = 64  # records per tick of ids that were used for something else; the rest is counted
MAX_PERIOD_S = 86_400.0  # of a source that polls
SUPERSEDED = "is about a superseded command or a replaced device"


class Intake:
    """State that events set, beside the measured state."""

    def __init__(self, site: Site, authority: dict[str, str]) -> None:
        self.authority = dict(authority)
        self.armed_ns: dict[str, int] = {}  # policy -> when what it advised became what it commands
        self.requests: dict[str, ev.OperatorRequest] = {}
        self._named: dict[str, tuple[ev.OperatorRequest, Site, I32]] = {}  # looked up once, not in every tick
        self.approvals: dict[str, ev.Approved] = {}
        self.grant_w = np.full(site.sizes["feeder"], np.nan)
        self.grant_ns = np.zeros(site.sizes["feeder"], np.int64)
        # (epoch, instant of issue) of the newest grant, by which late ones are known
        self.grant_order = np.zeros((site.sizes["feeder"], 2), np.int64)
        self.grants: dict[str, tuple[int, float, float]] = {}  # feeder -> (until, lent W, W after it)
        self.outlooks = Outlooks()
        self.load_targets = LoadTargets()
        self.identities = Identities()
        self.pending_fits: dict[str, int] = {}  # fit id -> deadline
        self.params_hash: dict[str, str] = {}
        self.seen: OrderedDict[str, str] = OrderedDict()  # type and id -> fingerprint
        self.fault_ids = FaultIds()  # apart, so that a storm of faults pushes no other id out
        self.counts: dict[str, int] = {}
        self._tick: list[JournalRecord] = []  # journal records of this tick, given out by `expire`
        self._duplicates = 0  # of this tick

    @property
    def serials(self) -> dict[str, str]:
        """Return the serial of each slot by `table:name`; "" if its device turned up in another slot."""
        return self.identities.serials

    def count(self, what: str, by: int = 1) -> None:
        """Count unusual events of a kind."""
        self.counts[what] = self.counts.get(what, 0) + by

    def is_new(self, event: ev.Event) -> bool:
        """Return False for a repeated event, and for another event with the same id."""
        if not event.id:
            return True
        if type(event) is ev.FaultReported:
            return bool(self.new_faults(FaultColumns.of([event])))
        key, mark = f"{type(event).__name__}:{event.id}", _fingerprint(event)
        known = self.seen.get(key)
        if known == mark or (known is not None and not isinstance(event, ev.OperatorRequest)):
            return self._refuse(event, known == mark)
        self.seen[key] = mark
        while len(self.seen) > MAX_SEEN:
            self.seen.popitem(last=False)
        return True

    def forget_id(self, event: ev.Event) -> None:
        """Forget the id of a person's request that was refused: the same one again is judged anew, since a
        duplicate counts as done."""
        if hasattr(event, "author"):
            self.seen.pop(f"{type(event).__name__}:{event.id}", None)

    def new_faults(self, faults: FaultColumns) -> FaultColumns:
        """Return the faults that are neither repeated nor use the id of another fault."""
        answers = self.fault_ids.receive_all(faults)
        if answers.count("new") == len(faults):
            return faults
        new = [
            i
            for i, (event, answer) in enumerate(zip(faults, answers, strict=True))
            if answer == "new" or self._refuse(event, answer == "again")
        ]
        return faults.some(np.array(new, np.int64))

    def _refuse(self, event: ev.Event, again: bool) -> bool:
        """Record an event whose id is known, as a duplicate or as a conflict; return False."""
        if again:
            self.count("duplicate_events")
            self._duplicates += 1
            return False
        self.count("reused_ids")
        if len(self._tick) < MAX_REFUSED:
            why = f"id {event.id} already used for something else"
            self._tick.append(EventRecord(event=brief_event(event), refused=why))
        return False

    def apply(
        self,
        event: ev.Event,
        site: Site,
        state: State,
        jobs: JobSlots,
        arbiter: Arbiter,
        models: dict[str, Model],
    ) -> str | None:
        """Apply one event; return a reason if it cannot be applied."""
        now_ns = state.now_ns
        match event:
            case ev.JobStarted():
                return job_started(event, site, state, jobs, self.count)
            case ev.JobEnded():
                return job_ended(event, jobs, arbiter, now_ns)
            case ev.CheckpointTold():
                return self.take_report(event, jobs, state)
            case ev.OperatorRequest():
                return self._request(event, site, now_ns)
            case ev.RequestWithdrawn():
                return None if self.requests.pop(event.request, None) else f"no request {event.request}"
            case ev.Approved():
                return self._approved(event, site, now_ns)
            case ev.ApprovalWithdrawn():
                return None if self.approvals.pop(event.approval, None) else f"no approval {event.approval}"
            case ev.Held():
                arbiter.mode = "held"
            case ev.Released():
                arbiter.mode = "released"
            case ev.Resumed():
                arbiter.mode = "normal"
            case ev.AuthorityChanged():
                if event.policy not in self.authority:
                    return f"no policy {event.policy}"
                before, self.authority[event.policy] = self.authority[event.policy], event.authority
                self.armed_ns.pop(event.policy, None)
                if event.authority == "act" and before in ADVISING:
                    self.armed_ns[event.policy] = now_ns
                for key in [k for k, a in self.approvals.items() if a.policy == event.policy]:
                    del self.approvals[key]
                    self._tick.append(ApprovalDroppedRecord(id=key))
            case ev.EpochChanged():
                if not arbiter.epoch <= event.epoch < 2**63:
                    return f"epoch {event.epoch} is older than {arbiter.epoch}, or no epoch"
                arbiter.begin_term(event.epoch, event.adopt, now_ns)
            case ev.EntityReplaced():
                return self._replaced(event, site, state, arbiter)
            case ev.PollPeriodChanged():
                return _poll_period_changed(event, site, state)
            case ev.BudgetGranted():
                return self._granted(event, site, now_ns)
            case ev.LoadTargetSet():
                return self.load_targets.set(event, site, now_ns)
            case ev.LoadTargetWithdrawn():
                return self.load_targets.withdraw(event.target)
            case ev.OutlookTold():
                return self.outlooks.take(event, site, now_ns)
            case ev.ModelFitted():
                return self._fitted(event, models)
            case ev.FitFailed():
                self.pending_fits.pop(event.fit, None)
            case _:
                return None
        return None

    def previews(self, policy: str) -> bool:
        """True if a policy reads its advice as obeyed."""
        return self.authority[policy] in ADVISING

    def takes_over(self, policy: str, now_ns: int) -> bool:
        """True if a policy was armed recently, so that it reads its first commands as obeyed."""
        armed_ns = self.armed_ns.get(policy)
        return armed_ns is not None and now_ns - armed_ns < round(MOST_HANDOVER_S * NS)

    def take_report(self, event: ev.CheckpointTold, jobs: JobSlots, state: State) -> str | None:
        """Apply a job's report of its saves if it is newer; return a reason if it is refused."""
        refused = checkpoint_reported(event, jobs, state)
        if refused is not None:
            self.count("refused_reports")
        return refused

    def _approved(self, event: ev.Approved, site: Site, now_ns: int) -> str | None:
        control = find_control(event.control)
        if not event.id:
            return "an approval needs an id, by which it can be withdrawn"
        if event.policy not in self.authority:
            return f"no policy {event.policy}"
        if control is None:
            return f"{event.control} is not a control of the catalogue"
        if len(event.names) > MAX_NAMES or any(site.entity(control.table, n) is None for n in event.names):
            return f"names a {control.table} that this site does not have, or more than {MAX_NAMES}"
        if control.table == "rack" and control.disruptive and len(event.names) != 1:
            return f"an approval of {control.key} names exactly one rack, got {len(event.names) or 'all'}"
        if late := _late(event.expires_ns, now_ns):
            return late
        if len(self.approvals) >= MAX_REQUESTS and event.id not in self.approvals:
            return f"more than {MAX_REQUESTS} approvals"
        self.approvals[event.id] = event
        return None

    def _request(self, event: ev.OperatorRequest, site: Site, now_ns: int) -> str | None:
        control = find_control(event.control)
        if not event.id:
            return "a request needs an id, by which it can be withdrawn"
        if control is None:
            return f"{event.control} is not a control of the catalogue"
        if not event.lo <= event.hi:
            return f"expected lo <= hi, got {event.lo} and {event.hi}"
        if not event.names:
            return f"names no {control.table}"
        if len(event.names) > MAX_NAMES or any(site.entity(control.table, n) is None for n in event.names):
            return f"names a {control.table} that this site does not have, or more than {MAX_NAMES}"
        if late := _late(event.expires_ns, now_ns):
            return late
        if len(self.requests) >= MAX_REQUESTS and event.id not in self.requests:
            return f"more than {MAX_REQUESTS} standing requests"
        # As a snapshot would give it back: a whole number of watts is a float all the same.
        self.requests[event.id] = msgspec.convert(msgspec.to_builtins(event), ev.OperatorRequest)
        return None

    def take_acks(
        self, events: list[ev.CommandAcked], site: Site, arbiter: Arbiter
    ) -> Counter[tuple[str, str, str]]:
        """Note sinks' answers in their order; how many by control, state, and reason why not ("": noted)."""
        key = events[0].control
        if (counts := self._noted_at_once(key, events, site, arbiter)) is not None:  # as a rule
            return counts
        out: Counter[tuple[str, str, str]] = Counter()
        by_control: dict[str, list[ev.CommandAcked]] = {}
        for event in events:
            if not event.id or self.is_new(event):
                by_control.setdefault(event.control, []).append(event)
        for key, mine in by_control.items():
            counts = self._noted_at_once(key, mine, site, arbiter, known=True)
            if counts is None:
                counts = Counter((key, e.state, self.acked(e, site, arbiter) or "") for e in mine)
            out.update(counts)
        return out

    def _noted_at_once(
        self, key: str, events: list[ev.CommandAcked], site: Site, arbiter: Arbiter, known: bool = False
    ) -> Counter[tuple[str, str, str]] | None:
        """Apply acknowledgements of one control at once, and count them as `take_acks` does.

        Return None if one is of another control or matches no command of this daemon, if an entity occurs
        twice, or if one has an id that is not `known` to be new. Those about a superseded command are counted
        as stale.
        """
        control, n = find_control(key), len(events)
        if control is None:
            return None
        at, state = np.empty(n, np.int32), np.empty(n, np.uint8)
        generation, number = np.empty(n, np.int64), np.empty(n, np.int64)
        with_id = 0

        def find(places: dict[str, int], paths: list[str]) -> int:
            nonlocal with_id
            with_id = kernels.read_answers(
                events, key, f"{arbiter.epoch}-", ACK_STATES, places, paths, at, generation, number, state
            )
            return int(np.count_nonzero(at < 0))

        site.look_up(control.table, find)
        if with_id < 0 or (with_id and not known):
            return None
        site.parse_missing(control.table, at, lambda k: events[k].name)
        ordered = np.sort(at)
        if ordered[0] < 0 or (ordered[1:] == ordered[:-1]).any():
            return None
        noted = arbiter.leases[key].ack_all(at, generation, number, state)
        if stale := len(noted) - int(np.count_nonzero(noted)):
            self.count("stale_acks", stale)
        many = np.bincount(2 * state + noted, minlength=2 * len(ACK_STATES)).reshape(-1, 2).tolist()
        return Counter({
            (key, name, "" if fits else SUPERSEDED): count[fits]
            for name, count in zip(ACK_STATES, many, strict=True) for fits in (False, True) if count[fits]
        })  # fmt: skip

    def acked(self, event: ev.CommandAcked, site: Site, arbiter: Arbiter) -> str | None:
        """Apply an acknowledgement of a sink; return a reason if it matches no command of this daemon."""
        control = find_control(event.control)
        entity = None if control is None else site.entity(control.table, event.name)
        epoch, _, number = event.command.partition("-")
        digits = epoch.isascii() and epoch.isdigit() and number.isascii() and number.isdigit()
        if control is None or entity is None or not digits or len(number) > 18 or len(epoch) > 18:
            self.count("strange_acks")
            return "names no command of this site"
        # Another daemon's commands may bear the same numbers; after a takeover ours are sent anew.
        if int(epoch) != arbiter.epoch or not arbiter.leases[control.key].ack(
            entity, event.generation, int(number), event.state
        ):
            self.count("stale_acks")
            return SUPERSEDED
        return None

    def _replaced(self, event: ev.EntityReplaced, site: Site, state: State, arbiter: Arbiter) -> str | None:
        entity = site.entity(event.table, event.name) if event.table in TABLES else None
        if entity is None:
            return f"no {event.table} {event.name}"
        key = f"{event.table}:{site.name(event.table, entity)}"
        if self.serials.get(key) == event.serial:
            return f"serial {event.serial} was already there"
        self.identities.place(key, event.serial)
        state.tables[event.table].replace(entity)
        arbiter.forget(event.table, entity)
        return None

    def _granted(self, event: ev.BudgetGranted, site: Site, now_ns: int) -> str | None:
        feeder = site.entity("feeder", event.feeder)
        if feeder is None:
            return f"no feeder {event.feeder}"
        if not site.external_budget[feeder]:
            return f"the budget of {event.feeder} is not external"
        if not (0 <= event.budget_w < np.inf and 0 <= event.expires_ns < 2**63):
            return f"expected a budget >= 0 and an instant, got {event.budget_w} and {event.expires_ns}"
        if event.expires_ns <= now_ns:
            return f"expired already, {(now_ns - event.expires_ns) / NS:.0f} s ago"
        if not (0 <= event.issued_ns < 2**63 and 0 <= event.epoch < 2**63):
            return f"expected an instant and an epoch, got {event.issued_ns} and {event.epoch}"
        newest = tuple(self.grant_order[feeder].tolist())
        if event.issued_ns and (event.epoch, event.issued_ns) < newest:
            why = f"of epoch {event.epoch}, issued at {event.issued_ns}"
            return f"{why}; the newest one is of epoch {newest[0]}, issued at {newest[1]}"
        self.grant_w[feeder], self.grant_ns[feeder] = event.budget_w, event.expires_ns
        if event.issued_ns:
            self.grant_order[feeder] = event.epoch, event.issued_ns
        own_w, after_w = site.budget_w[feeder], site.guaranteed_w[feeder]
        self.grants[site.name("feeder", feeder)] = (
            event.expires_ns,
            float(np.fmin(event.budget_w, own_w)),
            float(np.fmin(after_w, own_w)),
        )
        return None

    def _fitted(self, event: ev.ModelFitted, models: dict[str, Model]) -> str | None:
        if event.model not in models:
            return f"no model {event.model}"
        if event.fit not in self.pending_fits:
            return f"fit {event.fit} was not asked for, or came too late"
        del self.pending_fits[event.fit]
        try:
            parameters = unpack(event.params)
            if digest(parameters) != event.params_hash:
                return f"its parameters do not hash to {event.params_hash}"
            if not isinstance(parameters, dict):
                return f"expected parameters by name, got {type(parameters).__name__}"
            models[event.model].load(parameters)
        except Exception as error:  # a plug-in's own code, and content that a worker made
            return f"{type(error).__name__}: {error}"[:500]
        self.params_hash[event.model] = event.params_hash
        return None

    def budget_w(self, site: Site, now_ns: int) -> F64:
        """Budget per feeder: the grant while it runs, within the feeder's own; else the guaranteed share."""
        lent = site.external_budget & (self.grant_ns > now_ns)
        outside = np.where(lent, self.grant_w, site.guaranteed_w)
        return np.where(site.external_budget, np.fmin(outside, site.budget_w), site.budget_w)

    def targets(self, request: ev.OperatorRequest, site: Site) -> I32:
        """Entities that a request names, unique and ascending."""
        known = self._named.get(request.id)
        if known is not None and known[0] is request and known[1] is site:
            return known[2]
        control = find_control(request.control)
        found = [] if control is None else [site.entity(control.table, name) for name in request.names]
        index = np.unique(np.array([i for i in found if i is not None], np.int32))
        self._named = {k: v for k, v in self._named.items() if k in self.requests}
        self._named[request.id] = (request, site, index)
        return index

    def expire(self, now_ns: int) -> list[JournalRecord]:
        """Drop expired state; return journal records, with those of this tick's events."""
        records, self._tick = self._tick, []
        if self._duplicates:
            records.append(DuplicatesRecord(count=self._duplicates))
            self._duplicates = 0
        for key in _expired(self.requests, now_ns):
            del self.requests[key]
            records.append(RequestExpiredRecord(id=key))
        for key in _expired(self.approvals, now_ns):
            del self.approvals[key]
            records.append(ApprovalExpiredRecord(id=key))
        for feeder, (until_ns, lent_w, after_w) in list(self.grants.items()):
            if until_ns <= now_ns:
                del self.grants[feeder]
                records.append(GrantExpiredRecord(feeder=feeder, was_w=lent_w, becomes_w=after_w))
        self.outlooks.expire(now_ns)
        records += self.load_targets.expire(now_ns)
        for fit in [f for f, deadline in self.pending_fits.items() if deadline <= now_ns]:
            del self.pending_fits[fit]
            records.append(FitExpiredRecord(id=fit))
        return records

    def dump(self) -> dict[str, Any]:
        """Return all state for a snapshot or a checksum."""
        return {
            "authority": self.authority,
            "armed_ns": self.armed_ns,
            # Lists, as their order is content: the first of two requests has precedence.
            "requests": [msgspec.to_builtins(v) for v in self.requests.values()],
            "approvals": [msgspec.to_builtins(v) for v in self.approvals.values()],
            "grants": [[feeder, *held] for feeder, held in self.grants.items()],
            "pending_fits": [list(item) for item in self.pending_fits.items()],
            "seen": [list(item) for item in self.seen.items()], "fault_ids": self.fault_ids.dump(),
            "grant_w": self.grant_w, "grant_ns": self.grant_ns, "serials": self.serials,
            "grant_order": self.grant_order,
            "identities": self.identities.dump(),
            "params_hash": self.params_hash, "counts": self.counts, "outlooks": self.outlooks.dump(),
            "load_targets": self.load_targets.dump(),
        }  # fmt: skip

    def restore(self, data: dict[str, Any]) -> None:
        """Restore the result of `dump`."""
        self.authority = {**self.authority, **data["authority"]}
        self.armed_ns = dict(data.get("armed_ns", {}))  # one of a version before has none
        requests = [msgspec.convert(v, ev.OperatorRequest) for v in data["requests"]]
        approvals = [msgspec.convert(v, ev.Approved) for v in data["approvals"]]
        self.requests, self.approvals = {r.id: r for r in requests}, {a.id: a for a in approvals}
        self.grants = {g[0]: (g[1], g[2], g[3]) for g in data["grants"]}
        self.grant_w, self.grant_ns = np.array(data["grant_w"]), np.array(data["grant_ns"])
        self.grant_order = np.array(data.get("grant_order", np.zeros((len(self.grant_ns), 2), np.int64)))
        self.identities.restore(data["serials"], data.get("identities"))
        self.pending_fits = dict(data["pending_fits"])
        self.params_hash, self.counts = dict(data["params_hash"]), dict(data["counts"])
        self.outlooks.restore(data.get("outlooks", []))  # one of a version before has none
        self.load_targets.restore(data.get("load_targets", []))
        self.seen = OrderedDict((key, mark) for key, mark in data["seen"])
        if "fault_ids" in data:
            self.fault_ids.restore(data["fault_ids"])


def _poll_period_changed(event: ev.PollPeriodChanged, site: Site, state: State) -> str | None:
    """Store the polling period of some signals; return a reason if it cannot be applied."""
    column, spec = state.tables.get(event.table), TABLES.get(event.table)
    if column is None or spec is None or not set(event.signals) <= set(spec.by_name):
        return f"expected signals of a table of the catalogue, got {event.table}: {event.signals[:3]}"
    if not 0.0 < event.period_s <= MAX_PERIOD_S:
        return f"expected a period of at most {MAX_PERIOD_S:.0f} s, got {event.period_s}"
    counters = tuple(name for name in event.signals if spec.by_name[name].kind == "counter")
    gauges = tuple(name for name in event.signals if name not in counters)
    found = {site.entity(event.table, name) for name in event.names}
    index = np.array(sorted(i for i in found if i is not None), np.int32)
    column.poll(ReportLayout(event.table, gauges, counters).all_rows, index, event.period_s)
    return None if len(index) else "none of its entities is of this site"


def _expired(standing: Mapping[str, ev.OperatorRequest | ev.Approved], now_ns: int) -> list[str]:
    return [key for key, event in standing.items() if 0 < event.expires_ns <= now_ns]


def _late(expires_ns: int, now_ns: int) -> str | None:
    """Return the fault of an end, or None. 0 means no end."""
    if not 0 <= expires_ns < END_OF_TIME_NS:
        return f"expected an instant >= 0 at which it ends, got {expires_ns}"
    return f"expired already, {(now_ns - expires_ns) / NS:.0f} s ago" if 0 < expires_ns <= now_ns else None


def _fingerprint(event: ev.Event) -> str:
    """The event's content by hash; the same before and after storage, which makes 500 W 500.0 W.

    Without the start time of a job, which snapshots of earlier versions lack: the id names the run already.
    """
    names = (name for name in event.__struct_fields__ if name != "started_ns")
    content = repr([_same(getattr(event, name)) for name in names])
    return hashlib.blake2b(content.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def _same(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_same(v) for v in value]
    return float(value) if isinstance(value, int) and abs(value) < 2**53 else value
