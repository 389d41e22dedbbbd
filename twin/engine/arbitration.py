"""Arbitration pass: one pass of a tick over all controls, from claims to commands and advice.

The rules are the arbiter's and the leases'; this module holds the order in which they apply, and follows up
on the commands of earlier ticks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from twin.alerts import SHOWN_ENTITIES, Findings
from twin.catalogue import (
    F64,
    I32,
    I64,
    NS,
    Bool,
    Control,
    control_value,
    find_control,
    find_signal,
    signal_of,
)
from twin.contracts import (
    CommandBatch,
    DeferredRecord,
    FailedRecord,
    JournalRecord,
    LapsedRecord,
    NarrowedRecord,
    Policy,
    Proposal,
    ProtectedRecord,
    SettledRecord,
    SettlingRecord,
)
from twin.control import MISMATCH_S, Arbiter, Claim, Leases, Settlement, ShadowLeases
from twin.engine.event_handlers import ADVISING, Intake
from twin.engine.preview import OURS, OWNER, SERVICE
from twin.engine.records import advice_record, command_record, job_names, shown
from twin.engine.view import EngineView
from twin.telemetry import GOOD, State

# The policy that carries out what operators ask for: it may disturb work of which nothing is known.
UNDISPUTED = "operator"
# Findings about earlier commands, each by control.
FOLLOWED = ("readback", "unanswered", "unread")
WHY = {
    "failed": "no answer after repeated sending",
    "settling": "settling after takeover: nothing changes unless it protects",
    "narrowed": "a stronger proposal or the envelope left no room",
    "deferred": "blast radius",
    "protected": "nobody knows what runs on these nodes; an operator may ask for it",
}


@dataclass(slots=True)
class Order:
    """The outcome of a pass over one control.

    [n]: `settled` where a claim holds, `by` the index of the last one that set the value, `advised` where
    that one may not act.
    """

    n: int
    commands: list[CommandBatch] = field(default_factory=list)
    records: list[JournalRecord] = field(default_factory=list)
    verdicts: dict[str, int] = field(default_factory=dict)
    settled: Bool = field(init=False)
    by: I32 = field(init=False)
    advised: Bool = field(init=False)

    def __post_init__(self) -> None:
        self.settled = self.advised = np.zeros(self.n, np.bool_)
        self.by = np.full(self.n, -1, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArbitrationPass:
    """The parts of an engine that one pass reads or changes.

    `preview`: the view of the policies that advise. With `rehearsal` the pass settles advice: its arbiter
    holds the shadow leases, and nothing but these changes.
    """

    policies: Sequence[Policy]
    in_force: Mapping[str, list[Proposal]]
    suspended: Mapping[str, int]
    intake: Intake
    arbiter: Arbiter
    findings: Findings
    state: State
    view: EngineView
    preview: EngineView
    slew_s: float
    rehearsal: bool = False

    def run(
        self, records: list[JournalRecord]
    ) -> tuple[list[CommandBatch], list[CommandBatch], dict[str, int]]:
        """Settle every control; returns (commands, advice, number of deferred entities by control)."""
        commands: list[CommandBatch] = []
        advice: list[CommandBatch] = []
        verdicts: dict[str, int] = {}
        arbiter = self.arbiter
        arbiter.advised_verdicts = {}
        records += self._settling()
        for key, lease in arbiter.leases.items():
            if lease.n:
                self._settle(key, lease, commands, advice, verdicts, records)
        arbiter.fresh_term = False
        site, jobs = self.view.site, self.view.jobs
        records += [command_record(c, site, jobs) for c in commands]
        records += [advice_record(c, site, jobs) for c in advice]
        records += self._changed_verdicts(verdicts)
        deferred = "deferred/"
        return (
            commands,
            advice,
            {k[len(deferred) :]: n for k, n in verdicts.items() if k.startswith(deferred)},
        )

    def _settling(self) -> list[JournalRecord]:
        """Journal records: controls that have settled after a takeover, and those that begin to."""
        arbiter, records = self.arbiter, list[JournalRecord]()
        if over := arbiter.end_settling(self.view.now_ns):
            records.append(SettledRecord(controls=tuple(over)))
        if arbiter.fresh_term and arbiter.settling:
            records.append(
                SettlingRecord(epoch=arbiter.epoch, until_ns=dict(arbiter.settling), why=WHY["settling"])
            )
        return records

    def _settle(
        self,
        key: str,
        lease: Leases,
        commands: list[CommandBatch],
        advice: list[CommandBatch],
        verdicts: dict[str, int],
        records: list[JournalRecord],
    ) -> None:
        """Settle one control, and append the results to the four lists."""
        acting, claims = self._claims(key)
        advising = len(claims) > len(acting) or any(c.allowed is not None for c in acting)
        # Before the real leases change: the advice begins where they stand
        shadow = self.arbiter.shadow_of(key, advising)
        rehearsed = None if shadow is None else self._rehearse(key, shadow, claims)
        order = self._carry_out(key, lease, acting, claims)
        commands += order.commands
        records += order.records
        verdicts |= order.verdicts
        if shadow is not None and rehearsed is not None:
            advice += self._advice(shadow, lease, rehearsed)
            if shadow.idle and not advising:
                del self.arbiter.shadow[key]

    def _carry_out(self, key: str, lease: Leases, acting: list[Claim], claims: list[Claim]) -> Order:
        """Settle the order on one control, and follow up on earlier commands."""
        arbiter, view, now_ns = self.arbiter, self.view, self.view.now_ns
        alarmed = any(f"{kind}/{key}" in self.findings.active for kind in FOLLOWED)
        if not (claims or alarmed or arbiter.fresh_term or key in arbiter.settling or lease.ever_used()):
            return Order(0)
        excluded = view.windows.mask_of_control(key)
        generation = self.state.tables[lease.control.table].generation
        out = Order(lease.n)
        if key in arbiter.settling and self._may_act(key):
            if key == SERVICE:
                arbiter.inherit_outages(key, view.readback(key), view.value(OWNER) == OURS)
            known = self._known(key, lease.n) & (True if excluded is None else ~excluded)
            known &= arbiter.read_since_takeover(key, view.readback_ns(key), now_ns)
            out.commands += arbiter.adopt(key, view.readback(key), known, generation, now_ns)
        busy = lease.running().any()
        self._look_after(key, lease)
        stands = self._settle_doubts(lease, claims) if key == SERVICE else None
        owed = np.isfinite(lease.lapsed).any()
        if not (claims or busy or alarmed or owed):
            return out
        self._order(key, lease, acting, self._abandoned(lease, claims), out)
        # A value that keeps and that no policy claims any more may be another's by now: its command is not
        # repeated, and its lease lapses
        keeps = lease.control.on_expiry == "keep" and arbiter.mode_of(key) != "held"
        left = ~out.settled if keeps else excluded
        if left is not None and excluded is not None:
            left = left | excluded
        out.commands += arbiter.renew_term(key, now_ns, left, stands)
        again, lost = arbiter.resend(key, now_ns, left)
        out.commands += [again] if again is not None else []
        if len(lost):
            names = job_names(key, lost, view.site, view.jobs)
            out.records.append(FailedRecord(control=key, index=lost, why=WHY["failed"], names=names))
        out.records += self._follow_up(key, lease, view.readback(key), excluded)
        return out

    def _order(self, key: str, lease: Leases, acting: list[Claim], abandoned: Bool, out: Order) -> None:
        """Lapse, settle, command and withdraw the leases of one control."""
        arbiter, view, now_ns = self.arbiter, self.view, self.view.now_ns
        excluded = view.windows.mask_of_control(key)
        generation = self.state.tables[lease.control.table].generation
        readback = view.readback(key)
        busy = lease.running().any()
        lapsed = lease.lapse(now_ns, abandoned)
        if len(lapsed):
            names = job_names(key, lapsed, view.site, view.jobs)
            becomes = lease.control.on_expiry
            out.records.append(LapsedRecord(control=key, index=lapsed, becomes=becomes, names=names))
        if busy:
            out.commands += arbiter.confine(key, now_ns, excluded)
        if acting or (busy and arbiter.mode_of(key) == "held"):
            done = arbiter.settle(key, acting, readback)
            out.records += self._keep_out(done, readback, excluded)
            if protected := self._protect(done, readback):
                out.verdicts[f"protected/{key}"] = protected
            if deferred := arbiter.limit(done, readback, self.slew_s, self._known(key, lease.n)):
                out.verdicts[f"deferred/{key}"] = deferred
            for number, lost in sorted(done.clipped.items()):
                name = f"narrowed/{key}/{acting[number].name}"
                out.verdicts[name] = out.verdicts.get(name, 0) + lost
            out.commands += arbiter.command(done, readback, generation, now_ns, excluded)
            out.settled, out.by = ~np.isnan(done.value), done.by
        keep = out.settled | abandoned if excluded is None else out.settled | abandoned | excluded
        out.commands += arbiter.withdraw(key, keep, now_ns, self.slew_s, readback)

    def _rehearse(self, key: str, shadow: ShadowLeases, claims: list[Claim]) -> Order:
        """Settle one control as if all claims might act."""
        rehearsal = replace(self, arbiter=self.arbiter.rehearsal(), view=self.preview, rehearsal=True)
        out = Order(shadow.n)
        rehearsal._order(key, shadow, claims, self._suspended(shadow), out)
        # A value that no policy asks for any more is on its way back, if its policy still advises
        advised = np.where(out.settled, out.by >= 0, shadow.apart & self._returning(shadow))
        for number, claim in enumerate(claims):
            authority = self.intake.authority[claim.name]
            allowed = self._approved(claim.name, claim.proposal) if authority == "approve" else None
            if authority == "act" or allowed is not None:
                at = claim.proposal.index if allowed is None else claim.proposal.index[allowed]
                advised[at[out.by[at] == number]] = False
        out.advised = advised
        self.arbiter.advised_verdicts |= out.verdicts
        return out

    def _advice(self, shadow: ShadowLeases, lease: Leases, order: Order) -> list[CommandBatch]:
        """Return as advice the rehearsed commands that the real leases do not have."""
        shown = order.advised | (shadow.apart & ~order.settled)
        received_ns = self._shown_ns(shadow) if shadow.handed_ns.any() else np.zeros(shadow.n, np.int64)
        shadow.part(lease, order.advised, order.settled, received_ns, self.view.now_ns)
        out: list[CommandBatch] = []
        for batch in order.commands:
            new = shown[batch.index] & (lease.value[batch.index] != batch.value)
            if not batch.renewal and new.any():
                index = batch.index[new]
                none = np.zeros(len(index), np.int64)
                out.append(
                    replace(batch, index=index, generation=batch.generation[new], command=none,
                            value=batch.value[new], expires_ns=0, deadline_ns=0, final=False)
                )  # fmt: skip
        return out

    def _claims(self, key: str) -> tuple[list[Claim], list[Claim]]:
        """Return (claims that may act, all claims) on a control, strongest first."""
        acting: list[Claim] = []
        every: list[Claim] = []
        for number, policy in enumerate(self.policies):
            for p in self.in_force[policy.name]:
                if p.control != key or len(p.index) == 0:
                    continue
                every.append(Claim(number, policy.name, p, None))
                authority = self.intake.authority[policy.name]
                if authority == "act":
                    acting.append(Claim(number, policy.name, p, None))
                elif authority == "approve":
                    allowed = self._approved(policy.name, p)
                    if allowed is not None:
                        acting.append(Claim(number, policy.name, p, allowed))
        return acting, every

    def _approved(self, policy: str, p: Proposal) -> Bool | None:
        """Mask of the entities on which an approval allows this proposal [k]; None where none does."""
        allowed = np.zeros(len(p.index), np.bool_)
        table = p.control.partition(".")[0]
        for approval in self.intake.approvals.values():
            if approval.policy == policy and approval.control == p.control:
                if not approval.names:
                    return np.ones(len(p.index), np.bool_)
                named = [i for n in approval.names if (i := self.view.site.entity(table, n)) is not None]
                allowed |= np.isin(p.index, named)
        return allowed if allowed.any() else None

    def _may_act(self, key: str) -> bool:
        """True if any policy may command this control, now or once it is approved."""
        authority = self.intake.authority
        return any(key in p.controls and authority[p.name] in ("act", "approve") for p in self.policies)

    def _keep_out(self, done: Settlement, readback: F64, excluded: Bool | None) -> list[JournalRecord]:
        """Drop claims on entities in maintenance. The journal records dropped protection once per window."""
        if excluded is None or not np.isfinite(done.value[excluded]).any():
            return []
        records: list[JournalRecord] = []
        if not self.rehearsal:
            records = self.view.windows.kept_back(done.control.key, self.arbiter.protects(done, readback))
        done.value[excluded] = np.nan
        return records

    def _protect(self, done: Settlement, readback: F64) -> int:
        """Hold back commands that would disturb protected nodes unasked, and return their number.

        Isolating a rack does not depend on scheduling and is not held back.
        """
        control = done.control
        if not control.disruptive or control.table != "node" or not done.claims:
            return 0
        commanded = self.view.commanded(control.key)
        stands = np.where(np.isnan(commanded), readback, commanded)
        worse = (done.value > np.nan_to_num(stands)) & self.view.protected_nodes()
        if not worse.any():
            return 0
        for claim in done.claims:
            if claim.name == UNDISPUTED:
                p = claim.proposal
                wanted_more = np.fmax(p.lo, p.want) >= done.value[p.index]
                worse[p.index[wanted_more if claim.allowed is None else wanted_more & claim.allowed]] = False
        done.value[worse] = commanded[worse]
        return int(np.count_nonzero(worse))

    def _changed_verdicts(self, verdicts: dict[str, int]) -> list[JournalRecord]:
        """Journal records of the verdicts that differ from those in force."""
        records: list[JournalRecord] = []
        before = self.arbiter.verdicts
        for name in sorted({**before, **verdicts}):
            count = verdicts.get(name, 0)
            if count != before.get(name, 0):
                kind, control, *policy = name.split("/")
                if kind == "narrowed":
                    records.append(
                        NarrowedRecord(control=control, count=count, why=WHY[kind], policy=policy[0])
                    )
                else:
                    cls = DeferredRecord if kind == "deferred" else ProtectedRecord
                    records.append(cls(control=control, count=count, why=WHY[kind]))
        self.arbiter.verdicts = verdicts
        return records

    def _follow_up(
        self, key: str, lease: Leases, readback: F64, excluded: Bool | None
    ) -> list[JournalRecord]:
        """Record commands without an answer, and read-backs that differ or are missing, outside
        maintenance."""
        records: list[JournalRecord] = []
        findings, control, now_ns = self.findings, lease.control, self.view.now_ns
        if not lease.running().any():
            return [r for kind in FOLLOWED for r in findings.clear(f"{kind}/{key}")]
        received_ns = self.view.readback_ns(key)
        tolerance = max(self.view.site.envelopes[key].deadband, 1e-6)
        silent = self._reported(control, lease.unanswered(readback, received_ns, tolerance), excluded)
        records += findings.unanswered(self._shown(control.table, silent), key, silent)
        if control.readback is not None:
            table = self.state.tables[control.table]
            signal = signal_of(f"{control.table}.{control.readback}")
            off = _outside(lease.compare(readback, received_ns, tolerance, now_ns), excluded)
            if excluded is not None:
                lease.differs_ns[excluded] = 0
            evidence = ""
            if len(off):
                first, (name,) = int(off[0]), self._shown(control.table, off[:1])
                wanted, read = lease.value[first], readback[first]
                words = [control_value(x, key) if control.states else f"{x:g}" for x in (wanted, read)]
                evidence = f"{name}: commanded {words[0]}, reads {words[1]}"
            records += findings.mismatches(self._shown(control.table, off), key, off, evidence)
            wait_s = table.limits(table.freshness.row_of(signal)).stale_ns / NS + MISMATCH_S
            unread = lease.unread(received_ns, wait_s, now_ns, int(table.resumed_ns[0]))
            unread = self._reported(control, unread, excluded)
            waited_s = float(wait_s[unread].min(initial=np.inf))
            records += findings.unread(self._shown(control.table, unread), key, unread, waited_s)
        return records

    def _reported(self, control: Control, index: I32, excluded: Bool | None) -> I32:
        """Return the entities of `index` whose silence nothing else reports."""
        index = _outside(index, excluded)
        if len(index) and control.on_expiry != "keep":  # who is silent falls back by itself
            index = _outside(index, self._mute(control))
        return index

    def _mute(self, control: Control) -> Bool:
        """Entities [n] that an outage keeps silent, or whose readings are later than a late message."""
        column, hidden = self.state.tables[control.table], self.view.diagnosis.silence.hidden
        signal = find_signal(f"{control.table}.{control.readback}")
        late: Bool = np.zeros(column.n, np.bool_)
        if signal is not None:
            last_ns = column.t_ns.max(axis=0)
            age_s = (self.view.now_ns - last_ns) / NS
            late = (last_ns > 0) & (age_s > column.limits(column.freshness.row_of(signal)).drift_s)
        return late | hidden.get(control.table, np.False_)

    def _settle_doubts(self, lease: Leases, claims: list[Claim]) -> Bool | None:
        """Return the nodes whose withdrawal from before this term is still read back as in force [n].

        Until the read-back a withdrawal is not commanded again, since people may have ended it unobserved.
        None: no withdrawal is in doubt.
        """
        if not self.arbiter.fresh_term and not lease.doubted_ns.any():
            return None
        received_ns = self.view.readback_ns(SERVICE)
        if self.arbiter.fresh_term:
            lease.doubt(received_ns, self.view.now_ns)
        wanted = np.zeros(lease.n, np.bool_)
        for p in (claim.proposal for claim in claims):
            wanted[p.index[np.fmax(p.lo, p.want) > 0]] = True
        return lease.settle_doubts(self.view.readback(SERVICE), received_ns, wanted)

    def _look_after(self, key: str, lease: Leases) -> None:
        """Check that restored values have arrived, and that withdrawn nodes carry racktwin's mark."""
        view, envelope = self.view, self.view.site.envelopes[key]
        if np.isfinite(lease.given).any():
            received_ns, tolerance = self.view.readback_ns(key), max(envelope.deadband, 1e-6)
            lease.kept(view.readback(key), received_ns, envelope.safe, tolerance, view.now_ns)
        if key == SERVICE and np.isfinite(lease.lapsed).any():
            marked = np.isfinite(lease.lapsed) & (view.quality(OWNER) == GOOD) & (view.value(OWNER) != OURS)
            lease.no_longer_ours(np.flatnonzero(marked).astype(np.int32))

    def _shown_ns(self, shadow: ShadowLeases) -> I64:
        """Return the instant up to which read-back and power of a device show the effect of a command [n].

        For a device that reports neither it is now, since there is nothing to wait for.
        """
        table, view, control = shadow.control.table, self.view, shadow.control
        out = np.full(shadow.n, view.now_ns)
        power = "power_w" if control.key.endswith("power_cap_w") else None
        for name in (control.readback, power):
            if name is not None and find_signal(f"{table}.{name}") is not None:
                age_s = view.age_s(f"{table}.{name}")
                ago_ns = np.where(np.isfinite(age_s), age_s * NS, 0.0).astype(np.int64)
                out = np.minimum(out, view.now_ns - ago_ns)
        return out

    def _shown(self, table: str, index: I32) -> tuple[str, ...]:
        return shown(self.view.site, self.view.jobs, table, index[:SHOWN_ENTITIES])

    def _known(self, key: str, n: int) -> Bool:
        """Return the mask of entities with a current read-back [n]."""
        control = find_control(key)
        if control is None or control.readback is None:
            return np.zeros(n, np.bool_)
        good: Bool = self.view.quality(f"{control.table}.{control.readback}") == GOOD
        return good

    def _abandoned(self, lease: Leases, claims: list[Claim]) -> Bool:
        """Return the mask of leases that lapse instead of being released [n].

        The owner of such a lease is suspended, or may no longer act but still proposes the value: a release
        would raise a value that a policy wants low. None where a lapse restores the initial value: there it
        equals a release, and a BMS that receives the heartbeat keeps the requested value.
        """
        if lease.control.on_expiry == "restore":
            return np.zeros(lease.n, np.bool_)
        out = self._suspended(lease)
        for claim in claims:
            if self.intake.authority[claim.name] != "act":
                index = claim.proposal.index
                out[index[lease.owner[index] == claim.policy]] = True
        return out

    def _returning(self, shadow: ShadowLeases) -> Bool:
        """Return the mask of shadow leases of an advising policy that would be released [n]."""
        gives_back = shadow.control.on_expiry != "keep"
        advising = [i for i, p in enumerate(self.policies) if self.intake.authority[p.name] in ADVISING]
        out: Bool = shadow.running() & np.isin(shadow.owner, advising) & gives_back
        return out

    def _suspended(self, lease: Leases) -> Bool:
        """Return the mask of leases whose owner is suspended [n]."""
        suspended = [i for i, p in enumerate(self.policies) if p.name in self.suspended]
        return np.isin(lease.owner, suspended) if suspended else np.zeros(lease.n, np.bool_)


def _outside(index: I32, excluded: Bool | None) -> I32:
    """Return the entities that are not excluded."""
    return index if excluded is None else index[~excluded[index]]
