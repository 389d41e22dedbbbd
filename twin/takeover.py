"""Takeover: what changes with a new term, and how a leader who is new to a site begins.

With every new epoch what runs is commanded again under it. A leader who is new finds devices as somebody
else left them: it takes leases on what is set, as found, and then changes nothing for one lease of each
control unless that protects. What was there before somebody set it is not known, so such a lease is left to
lapse when nobody asks for it. May import the arbiter and contracts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from twin.arbiter import Arbiter
from twin.contracts import CommandBatch
from twin.frame import F64, I32, NS, Bool

WHY_ADOPTED = "adopted at takeover, as found"


def begin_term(arbiter: Arbiter, epoch: int, adopt: bool, now_ns: int) -> None:
    """Lead under this epoch. With `adopt` nothing that ran here counts: another daemon has led since."""
    arbiter.fresh_term = epoch > arbiter.epoch or adopt
    arbiter.epoch = epoch
    if adopt:
        for lease in arbiter.leases.values():
            lease.disown()
        arbiter.settling = {
            key: now_ns + round(lease.control.lease_s * NS)
            for key, lease in arbiter.leases.items()
            if lease.n
        }


def settling_records(arbiter: Arbiter, now_ns: int) -> list[dict[str, Any]]:
    """Journal bodies: that controls begin to settle, and that some have; the latter are let go."""
    records: list[dict[str, Any]] = []
    over = sorted(key for key, until_ns in arbiter.settling.items() if until_ns <= now_ns)
    for key in over:
        del arbiter.settling[key]
    if over:
        records.append({"kind": "settled", "controls": over})
    if arbiter.fresh_term and arbiter.settling:
        records.append({"kind": "settling", "epoch": arbiter.epoch, "until_ns": dict(arbiter.settling),
                        "why": "settling after takeover: nothing changes unless it protects"})  # fmt: skip
    return records


def adopt(
    arbiter: Arbiter, key: str, readback: F64, known: Bool, generation: I32, now_ns: int
) -> list[CommandBatch]:
    """While a control settles: leases on what its devices read back, where it is not simply free.

    `known` [n] is where the read-back is current and people do not work. A control that keeps its value needs
    no lease: policies see what was found by its read-back. What stands outside the envelope cannot be
    commanded and is left to its device.
    """
    lease, envelope = arbiter.leases[key], arbiter.site.envelopes[key]
    control = lease.control
    if key not in arbiter.settling or control.on_expiry == "keep" or arbiter.mode == "released":
        return []
    free = envelope.low if control.protective == "high" else envelope.high
    found = known & ~lease.running() & (readback >= envelope.low) & (readback <= envelope.high)
    index = np.flatnonzero(found & (np.abs(readback - free) > max(envelope.deadband, 1e-6))).astype(np.int32)
    if len(index) == 0:
        return []
    return [arbiter.take(key, index, readback[index], WHY_ADOPTED, now_ns, generation)]


def claim(arbiter: Arbiter, key: str, readback: F64, ours: Bool) -> None:
    """While a disruptive control settles: what the leader before took out counts in the blast radius, as if
    it had been our lease that lapsed. `ours` [n]: out by the mark of racktwin, as last heard."""
    lease = arbiter.leases[key]
    if key in arbiter.settling and lease.control.disruptive:
        at = ours & ~lease.running() & np.isnan(lease.lapsed) & (readback > 0)
        lease.lapsed[at] = readback[at]


def renew_term(arbiter: Arbiter, key: str, now_ns: int, barred: Bool | None = None) -> list[CommandBatch]:
    """In the first tick of a term: what runs is commanded again, with the new epoch and new numbers.

    Devices refuse the epoch before once they have seen the new one, and its answers are no longer ours.
    """
    lease = arbiter.leases[key]
    if not arbiter.fresh_term or arbiter.mode == "released":
        return []
    again = lease.running() & (lease.issued_ns < now_ns)
    if barred is not None:
        again &= ~barred
    index = np.flatnonzero(again).astype(np.int32)
    if len(index) == 0:
        return []
    why = f"as before, under epoch {arbiter.epoch}"
    return [arbiter.take(key, index, lease.value[index].copy(), why, now_ns, lease.generation)]
