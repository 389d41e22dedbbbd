"""Arbiter: settles the proposals of all policies into commands, and owns the leases of a site.

Policies claim a control in order of rank. A claim can only narrow the interval that the earlier claims left.
Then these apply in order: envelope, hold, deadband, slew limit, blast radius, lease. Protective moves pass
the hold and the slew limit at once.

A new epoch commands all running leases again. A leader that is new to a site finds devices as another daemon
left them. It takes leases on the values that are read back. For one lease of each control it then makes only
protective changes. The values before the former leader are unknown, so such a lease lapses when no policy
asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np

from twin import kernels
from twin.catalogue import F64, I32, I64, NS, TABLES, Bool, ContractError, Control, find_control
from twin.contracts import CommandBatch, Proposal
from twin.control.leases import Leases, Setpoints
from twin.control.shadow import ShadowLeases
from twin.site import Site

Mode = Literal["normal", "held", "released"]
MAX_PROPOSALS = 1000  # per policy and tick
WHY_ADOPTED = "adopted at takeover, as found"
# For so long after a takeover a read-back from before it may be older than the last command of the leader
# before: devices with an agent report every second. source: estimate
OUTDATED_S = 2.0


@dataclass(frozen=True, slots=True)
class Claim:
    """A proposal with the policy that made it (index in the engine's order) and where it may act [k]."""

    policy: int
    name: str
    proposal: Proposal
    allowed: Bool | None  # None: everywhere


@dataclass(slots=True)
class Settlement:
    """The outcome of one control's claims, [n]: the value inside the interval lo..hi that they left open.

    `by` is the index of the claim that set the value, -1 for none. `clipped` counts, by claim, the entities
    on which it could not have its way.
    """

    control: Control
    lo: F64
    hi: F64
    value: F64
    by: I32
    claims: list[Claim]
    clipped: dict[int, int] = field(default_factory=dict)


def check_proposal(proposal: Proposal, controls: tuple[str, ...], n: int) -> None:
    """Raises ContractError if a proposal is not what `Proposal` promises."""
    p = proposal
    if p.control not in controls or find_control(p.control) is None:
        raise ContractError(f"proposes {p.control}, declared {', '.join(controls)}")
    if not isinstance(p.reason, str):
        raise ContractError(f"{p.control}: reason must be text")
    columns = (p.index, p.lo, p.hi, p.want)
    if not all(isinstance(c, np.ndarray) and c.ndim == 1 for c in columns) or p.index.dtype.kind != "i":
        raise ContractError(
            f"{p.control}: index, lo, hi and want must be arrays of one dimension, index of integers"
        )
    if not all(c.dtype.kind in "fi" for c in columns):
        raise ContractError(f"{p.control}: lo, hi and want must be numbers")
    k = len(p.index)
    if not (len(p.lo) == len(p.hi) == len(p.want) == k):
        raise ContractError(f"{p.control}: index, lo, hi and want differ in length")
    if k and (p.index[0] < 0 or p.index[-1] >= n or (p.index[1:] <= p.index[:-1]).any()):
        raise ContractError(f"{p.control}: index must be unique, ascending and below {n}")
    if not (p.lo <= p.hi).all():  # nor where one is NaN
        raise ContractError(f"{p.control}: lo must be <= hi, and neither NaN")


class Arbiter:
    """The leases of a site, or the given ones of some of its controls, and the rules by which they change."""

    def __init__(self, site: Site, leases: Mapping[str, Leases] | None = None) -> None:
        self.site = site
        self.leases: Mapping[str, Leases] = (
            leases
            if leases is not None
            else {c.key: Leases(c, site.sizes[t]) for t, spec in TABLES.items() for c in spec.controls}
        )
        self.shadow: dict[str, ShadowLeases] = {}  # of the controls on which policies advise
        self.next_command = 1
        self.epoch = 1
        self.mode: Mode = "normal"
        self.verdicts: dict[str, int] = {}  # clipped, deferred or protected in the last tick -> entities
        self.advised_verdicts: dict[str, int] = {}  # the same of the advice; made anew in each tick
        self.settling: dict[str, int] = {}  # control -> until when nothing changes, after a takeover
        self.fresh_term = False  # the epoch rose in this very tick: what runs is commanded anew under it
        self.first_of_term = 0  # number of its first command

    def rehearsal(self) -> Arbiter:
        """An arbiter under the same mode over the shadow leases: what it commands is advice."""
        out = Arbiter(self.site, self.shadow)
        out.epoch, out.mode, out.settling = self.epoch, self.mode, self.settling
        return out

    def shadow_of(self, key: str, advised: bool) -> ShadowLeases | None:
        """The shadow leases of a control, level with the real ones; None while nothing is `advised`."""
        lease, shadow = self.leases[key], self.shadow.get(key)
        if shadow is None:
            if not advised:
                return None
            shadow = self.shadow[key] = ShadowLeases(lease.control, lease.n)
        shadow.follow(lease)
        return shadow

    def forget(self, table: str, entity: int) -> None:
        """Drop the leases of replaced devices or jobs."""
        for lease in (*self.leases.values(), *self.shadow.values()):
            lease.forget(table, entity)

    def mode_of(self, key: str) -> Mode:
        """The mode as it applies to one control."""
        return "held" if self.mode == "normal" and key in self.settling else self.mode

    def settle(self, key: str, claims: list[Claim], readback: F64) -> Settlement:
        """Narrow the envelope by each claim in turn; the value is the wish inside what remains.

        `readback` [n] is where the device stands, used where nobody wishes for a value.
        """
        control = cast(Control, find_control(key))
        envelope, lease = self.site.envelopes[key], self.leases[key]
        lo, hi = envelope.low.copy(), envelope.high.copy()
        want = np.full(lease.n, np.nan)
        out = Settlement(control, lo, hi, np.full(lease.n, np.nan), np.full(lease.n, -1, np.int32), claims)
        for number, claim in enumerate(claims):
            p = claim.proposal
            lost = kernels.narrow(
                np.ascontiguousarray(p.index, np.int32),
                np.ascontiguousarray(p.lo, np.float64),
                np.ascontiguousarray(p.hi, np.float64),
                np.ascontiguousarray(p.want, np.float64),
                claim.allowed,
                lo,
                hi,
                want,
                out.value,
                out.by,
                lease.value,
                readback,
                envelope.safe,
                number,
                bool(control.states),
            )
            if lost:
                out.clipped[number] = lost
        return out

    def limit(self, done: Settlement, readback: F64, dt_s: float, known: Bool | None = None) -> int:
        """Apply hold, slew, deadband and blast radius to a settlement; returns how many were deferred.

        `known` [n] is where the read-back is current (None: wherever there is one).
        """
        known = ~np.isnan(readback) if known is None else known
        control, lease = done.control, self.leases[done.control.key]
        envelope = self.site.envelopes[control.key]
        change = np.empty(lease.n, np.bool_)
        kernels.limit_moves(
            done.value,
            change,
            lease.value,
            readback,
            envelope.low,
            envelope.high,
            envelope.safe,
            done.lo,
            done.hi,
            envelope.slew_per_s,
            known,
            dt_s,
            envelope.deadband,
            self.mode_of(control.key) == "held",
            {"low": -1, "high": 1}.get(control.protective, 0),
            control.disruptive,
        )
        change_at = np.flatnonzero(change).astype(np.int32)
        return self._contain(done, lease, change_at, readback, known)

    def protects(self, done: Settlement, readback: F64) -> Bool:
        """Mask of protective moves [n]; a device that never reported counts as standing at its worst."""
        lease, envelope = self.leases[done.control.key], self.site.envelopes[done.control.key]
        worst = envelope.high if done.control.protective == "low" else envelope.low
        stands = np.where(lease.running(), lease.value, np.where(np.isnan(readback), worst, readback))
        return self._protective(done.control, done.value, stands)

    @staticmethod
    def _protective(control: Control, value: F64, stands: F64) -> Bool:
        if control.protective == "low":
            return value < stands
        if control.protective == "high" and not control.disruptive:
            return value > stands
        return np.zeros(len(value), np.bool_)

    def _contain(self, done: Settlement, lease: Leases, change: I32, readback: F64, known: Bool) -> int:
        """Hold back changes beyond the blast radius; recovery towards the normal level is never held back."""
        room = self.site.envelopes[done.control.key].blast_radius
        if done.control.disruptive:
            # A node that we took out counts until a read-back says that it is back, also after a lapse.
            # One that broke or others took out is no harm of ours: much that is broken would leave no room.
            ours = lease.running() | ~np.isnan(lease.lapsed)
            last = np.where(known, readback, np.fmax(lease.lapsed, readback))
            stood = np.nan_to_num(np.where(lease.running(), np.fmax(lease.value, readback), last)) > 0
            room -= int((stood & ours).sum())
            change = change[(done.value[change] > 0) & ~stood[change]]
        if len(change) <= room:
            return 0
        # The strongest claim goes first; among equals, the lower index.
        order = change[np.argsort(done.by[change], kind="stable")]
        held_back = order[max(room, 0) :]
        done.value[held_back] = lease.value[held_back]
        return len(held_back)

    def command(
        self, done: Settlement, readback: F64, generation: I32, now_ns: int, excluded: Bool | None = None
    ) -> list[CommandBatch]:
        """Grant or renew leases for a limited settlement; nothing is sent where it is `excluded` [n]."""
        lease = self.leases[done.control.key]
        mode = self.mode_of(done.control.key)
        if mode == "released":
            return []
        doubted = self._spare_doubted(done, lease)
        touched = ~np.isnan(done.value)
        # Where nothing runs, the lease's value is NaN, which differs from any
        changed = done.value != lease.value
        if not self.fresh_term:  # what no policy claimed as the term began, and one claims again
            changed |= lease.command < self.first_of_term
        new = np.flatnonzero(touched & changed).astype(np.int32)
        by = done.by[new]
        batches: list[CommandBatch] = []
        for number, claim in enumerate(done.claims):
            index = new[by == number]
            if len(index):
                owner = np.full(len(index), claim.policy, np.int32)
                self._grant(
                    lease, Setpoints(index, done.value[index], owner, generation[index]), now_ns, readback
                )
                batches.append(self._batch(lease, index, claim.name, claim.proposal.reason, now_ns))
        if self.fresh_term:  # all that runs is about to be commanded anew
            return batches
        wanted = (touched | (lease.running() & (mode == "held"))) & ~doubted
        if excluded is not None:
            wanted &= ~excluded
        index = np.flatnonzero(wanted & lease.due(now_ns)).astype(np.int32)
        if len(index):
            lease.renew(index, now_ns)
            batches.append(self._batch(lease, index, "", "renewal", now_ns))
        return batches

    @staticmethod
    def _spare_doubted(done: Settlement, lease: Leases) -> Bool:
        """Drop what the owner of a doubted lease still wants; returns the doubted ones [n].

        What another policy wants there is news.
        """
        doubted: Bool = lease.doubted_ns > 0
        if doubted.any():
            policy = np.array([*(claim.policy for claim in done.claims), -1])[done.by]
            same = (lease.owner == policy) | ~lease.running()
            done.value[doubted & same & (done.value > 0)] = np.nan
        return doubted

    def withdraw(
        self, key: str, wanted: Bool, now_ns: int, dt_s: float, readback: F64 | None = None
    ) -> list[CommandBatch]:
        """Release values that no policy wants: slew them to the initial value, then end the lease.

        Only in normal mode; a lease that dies with the daemon lapses instead, and is given back when the
        daemon is there again. Where nothing was found, and for controls that keep their value, the lease is
        left to lapse. A more protective value that somebody else has set stands; while it cannot be
        distinguished from our own command on its way, the lease is renewed.
        """
        lease, envelope = self.leases[key], self.site.envelopes[key]
        if self.mode_of(key) != "normal" or lease.control.on_expiry == "keep":
            return []
        owed = (lease.running() | ~np.isnan(lease.lapsed)) & ~wanted
        index = np.flatnonzero(owed & np.isfinite(lease.found) & np.isfinite(envelope.low)).astype(np.int32)
        if len(index) == 0:
            return []
        readback = np.full(lease.n, np.nan) if readback is None else readback
        tolerance = max(envelope.deadband, 1e-6)
        taken, unsure = lease.others(index, readback, envelope.safe, tolerance, now_ns)
        theirs = np.zeros(lease.n, np.bool_)
        theirs[index] = taken
        later, index = index[unsure], index[~unsure]
        if len(index) > envelope.blast_radius:  # the longest standing first; the others keep their lease
            order = np.argsort(lease.changed_ns[index], kind="stable")
            later = np.sort(np.concatenate([later, index[order[envelope.blast_radius :]]]))
            index = np.sort(index[order[: envelope.blast_radius]])
        later = later[lease.due(now_ns, later)]
        batches: list[CommandBatch] = []
        if len(later) and not self.fresh_term:
            lease.renew(later, now_ns)
            batches = [self._batch(lease, later, "", "renewal", now_ns)]
        low, high, read, leased = (
            envelope.low[index],
            envelope.high[index],
            readback[index],
            lease.value[index],
        )
        left = np.where(np.isnan(read), envelope.safe[index], read)
        # From where somebody else has it: on the way from our own setting it would rise above theirs
        stands = np.clip(np.where(np.isnan(leased) | theirs[index], left, leased), low, high)
        goal = np.where(theirs[index], np.fmin(lease.found[index], read), lease.found[index])
        lease.found[index] = goal  # what somebody else has set since is what was found
        goal = np.clip(goal, low, high)
        slew = envelope.slew_per_s[index]
        reach = np.where(slew > 0, slew * dt_s, np.inf)
        value = np.clip(goal, stands - reach, stands + reach)
        there = value == goal
        for mask, why in (
            (~there, "no longer needed: on the way back"),
            (there, "no longer needed: back to the earlier value"),
        ):
            some = index[mask]
            if len(some):
                found, owner = lease.found[some].copy(), lease.owner[some].astype(np.int32)
                new = Setpoints(some, value[mask], owner, lease.generation[some])
                self._grant(lease, new, now_ns, lease.found)
                lease.found[some] = found
                batches.append(self._batch(lease, some, "arbiter", why, now_ns))
        if there.any():
            batches[-1] = replace(batches[-1], final=True)
            lease.give_back(index[there], now_ns)
        return batches

    def take(self, key: str, index: I32, value: F64, why: str, now_ns: int, generation: I32) -> CommandBatch:
        """Grant a lease that no policy asked for, at this value; its owner stays the same."""
        lease = self.leases[key]
        owner, unknown = lease.owner[index].astype(np.int32), np.full(lease.n, np.nan)
        self._grant(lease, Setpoints(index, value, owner, generation[index]), now_ns, unknown)
        return self._batch(lease, index, "arbiter", why, now_ns)

    def confine(self, key: str, now_ns: int, excluded: Bool | None = None) -> list[CommandBatch]:
        """Under a hold: move leases outside a narrower envelope to its edge, where that protects."""
        lease, envelope = self.leases[key], self.site.envelopes[key]
        if self.mode_of(key) != "held":
            return []
        edge = np.clip(lease.value, envelope.low, envelope.high)  # NaN where nothing runs or may run
        outside = self._protective(lease.control, edge, lease.value)
        if excluded is not None:
            outside &= ~excluded
        index = np.flatnonzero(outside).astype(np.int32)
        if len(index) == 0:
            return []
        return [self.take(key, index, edge[index], "the envelope is narrower now", now_ns, lease.generation)]

    def resend(self, key: str, now_ns: int, excluded: Bool | None = None) -> tuple[CommandBatch | None, I32]:
        """Return (overdue commands to send again under their old number, entities given up).

        One in doubt is not sent again before its read-back: others may have ended what it began.
        """
        lease = self.leases[key]
        late = lease.overdue(now_ns)
        late = late[lease.doubted_ns[late] == 0]
        if excluded is not None:
            late = late[~excluded[late]]
        if len(late) == 0 or self.mode == "released":
            return None, late[:0]
        again = lease.retry(late, now_ns)
        lost = np.setdiff1d(late, again).astype(np.int32)
        if len(again) == 0:
            return None, lost
        return self._batch(lease, again, "", "no answer before the deadline", now_ns), lost

    def _grant(self, lease: Leases, new: Setpoints, now_ns: int, readback: F64) -> None:
        lease.grant(new, self.next_command, now_ns, readback)
        self.next_command += len(new.index)

    def _batch(self, lease: Leases, index: I32, policy: str, reason: str, now_ns: int) -> CommandBatch:
        """The commands of these leases; with no `policy`, the same ones again under their old numbers."""
        return CommandBatch(
            control=lease.control.key,
            policy=policy,
            epoch=self.epoch,
            index=index,
            generation=lease.generation[index].copy(),
            command=lease.command[index].copy(),
            value=lease.value[index].copy(),
            reason=reason,
            issued_ns=now_ns,
            expires_ns=int(lease.expires_ns[index].min()),
            deadline_ns=int(lease.deadline_ns[index].max()),
            renewal=not policy,
        )

    def begin_term(self, epoch: int, adopt: bool, now_ns: int) -> None:
        """Lead under this epoch. With `adopt` nothing that ran here counts: another daemon has led since."""
        self.fresh_term = epoch > self.epoch or adopt
        if self.fresh_term:
            self.first_of_term = self.next_command
        self.epoch = epoch
        if adopt:
            for lease in self.leases.values():
                lease.disown()
            self.settling = {
                key: now_ns + round(lease.control.lease_s * NS)
                for key, lease in self.leases.items()
                # Without limits nobody on this site has it; those of jobs come with the jobs
                if lease.n
                and (lease.control.table == "job" or np.isfinite(self.site.envelopes[key].low).any())
            }

    def end_settling(self, now_ns: int) -> list[str]:
        """End the settling of controls whose time is over; return them, sorted."""
        over = sorted(key for key, until_ns in self.settling.items() if until_ns <= now_ns)
        for key in over:
            del self.settling[key]
        return over

    def read_since_takeover(self, key: str, received_ns: I64, now_ns: int) -> Bool:
        """Mask of the devices whose read-back [n] may be adopted: read since the takeover.

        A cap that the leader before had just lowered would else be raised again to what it was. After
        `OUTDATED_S` an older one counts too, lest the leases in force lapse meanwhile.
        """
        begun_ns = self.settling[key] - round(self.leases[key].control.lease_s * NS)
        if now_ns - begun_ns >= round(OUTDATED_S * NS):
            return np.ones(len(received_ns), np.bool_)
        return np.asarray(received_ns >= begun_ns, np.bool_)

    def adopt(self, key: str, readback: F64, known: Bool, generation: I32, now_ns: int) -> list[CommandBatch]:
        """While a control settles: leases on what its devices read back, where it is not simply free.

        `known` [n]: the read-back is current and nobody works there. A control that keeps its value needs no
        lease: policies see its read-back. A device outside the envelope cannot be commanded.
        """
        lease, envelope = self.leases[key], self.site.envelopes[key]
        control = lease.control
        if key not in self.settling or control.on_expiry == "keep" or self.mode == "released":
            return []
        free = envelope.low if control.protective == "high" else envelope.high
        found = known & ~lease.running() & (readback >= envelope.low) & (readback <= envelope.high)
        found &= np.abs(readback - free) > max(envelope.deadband, 1e-6)
        index = np.flatnonzero(found).astype(np.int32)
        if len(index) == 0:
            return []
        return [self.take(key, index, readback[index], WHY_ADOPTED, now_ns, generation)]

    def inherit_outages(self, key: str, readback: F64, ours: Bool) -> None:
        """While a disruptive control settles: count what the leader before took out in the blast radius.

        It counts as a lease of ours that lapsed. `ours` [n]: out by the mark of racktwin, as last reported.
        """
        lease = self.leases[key]
        if key in self.settling and lease.control.disruptive:
            at = ours & ~lease.running() & np.isnan(lease.lapsed) & (readback > 0)
            lease.lapsed[at] = readback[at]

    def renew_term(
        self, key: str, now_ns: int, excluded: Bool | None = None, late: Bool | None = None
    ) -> list[CommandBatch]:
        """In the first tick of a term: command what runs again, with the new epoch and new numbers.

        Devices refuse the epoch before once they have seen the new one, and its answers are no longer ours.
        `late` [n]: where the first tick was too early.
        """
        lease = self.leases[key]
        if not (self.fresh_term or late is not None) or self.mode == "released":
            return []
        again = lease.running() & (lease.issued_ns < now_ns) & (lease.doubted_ns == 0)
        if not self.fresh_term and late is not None:
            again &= late
        if excluded is not None:
            again &= ~excluded
        index = np.flatnonzero(again).astype(np.int32)
        if len(index) == 0:
            return []
        why = f"as before, under epoch {self.epoch}"
        return [self.take(key, index, lease.value[index].copy(), why, now_ns, lease.generation)]

    def remapped(self, site: Site, old_of_new: dict[str, I32]) -> Arbiter:
        """This arbiter for a changed site."""
        out = Arbiter(site)
        out.next_command, out.epoch, out.mode = self.next_command, self.epoch, self.mode
        out.fresh_term, out.first_of_term = self.fresh_term, self.first_of_term
        out.settling = {key: at for key, at in self.settling.items() if out.leases[key].n}
        for key, lease in self.leases.items():
            out.leases[key].adopt(lease, old_of_new)
        for key, shadow in self.shadow.items():
            out.shadow[key] = ShadowLeases(shadow.control, out.leases[key].n)
            out.shadow[key].adopt(shadow, old_of_new)
        return out

    def dump(self) -> dict[str, Any]:
        """Everything, for a snapshot or a checksum."""
        own: dict[str, Any] = {"next_command": self.next_command, "epoch": self.epoch, "mode": self.mode}
        own["settling"], own["first_of_term"] = self.settling, self.first_of_term
        own |= {"verdicts": self.verdicts, "leases": {k: v.dump() for k, v in self.leases.items()}}
        return own | {"shadow": {k: v.dump() for k, v in self.shadow.items()}}

    def restore(self, data: dict[str, Any]) -> None:
        """Take over what `dump` gave."""
        self.next_command, self.epoch, self.mode = data["next_command"], data["epoch"], data["mode"]
        self.first_of_term = data.get("first_of_term", 0)  # one of a version before has none
        self.verdicts, settling = dict(data["verdicts"]), data["settling"]
        # In the order of the leases, as it was made: a snapshot sorts its keys.
        self.settling = {key: settling[key] for key in self.leases if key in settling}
        for key, lease in self.leases.items():
            lease.restore(data["leases"][key])
        self.shadow = {}
        for key, dump in data.get("shadow", {}).items():  # one of a version before has none
            self.shadow[key] = ShadowLeases(self.leases[key].control, self.leases[key].n)
            self.shadow[key].restore(dump)
