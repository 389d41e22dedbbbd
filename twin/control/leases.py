"""Lease table: one row per control and entity, with the commanded value, its expiry and its progress.

A newer command supersedes the running one. The columns are part of the snapshot, so that an hour-long drain
survives a restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from twin import kernels
from twin.catalogue import F64, I32, I64, NS, U8, Bool, Control
from twin.telemetry import OWN, EntityState, column

NONE, SENT, ACCEPTED, IN_PROGRESS, DONE, FAILED, EXPIRED = range(7)
ACK_STATES = ("accepted", "in_progress", "done", "failed")  # that a sink answers
_ACK = dict(zip(ACK_STATES, (ACCEPTED, IN_PROGRESS, DONE, FAILED), strict=True))

# A failed or overdue command is sent again while its lease lives, at most this often.
MAX_ATTEMPTS = 3
# A sink that says no is asked again after this long; one that says nothing, after the control's deadline.
RETRY_S = 10.0
# A read-back may lag by this much before it counts as a mismatch.
MISMATCH_S = 10.0


@dataclass(frozen=True, slots=True)
class Setpoints:
    """The values to be commanded of some entities [k]: policy (index in the engine's order), generation."""

    index: I32
    value: F64
    owner: I32
    generation: I32


class Leases(EntityState):
    """The leases of one control. All columns [n]; `value` NaN means nothing is commanded."""

    value: F64 = column(OWN, "f8", fill=np.nan)
    expires_ns: I64 = column(OWN, "i8")
    owner: np.ndarray = column(OWN, "i2", fill=-1)  # index of the policy in the engine's order
    command: I64 = column(OWN, "i8")
    state: U8 = column(OWN, "u1")
    issued_ns: I64 = column(OWN, "i8")
    deadline_ns: I64 = column(OWN, "i8")
    begun_ns: I64 = column(OWN, "i8")  # since when a lease has run without a break
    changed_ns: I64 = column(OWN, "i8")  # when the value last moved, for the slew limit
    found: F64 = column(OWN, "f8", fill=np.nan)  # read back before the first command, to be given back
    lapsed: F64 = column(OWN, "f8", fill=np.nan)  # of a lease that ran out; NaN once there is a new one
    # Value given back, and when, until the device is seen to have kept it: a last command may be lost
    given: F64 = column(OWN, "f8", fill=np.nan)
    given_ns: I64 = column(OWN, "i8")
    strays_ns: I64 = column(OWN, "i8")  # since when it reads as neither that nor a lapse; 0 = no
    losses: np.ndarray = column(OWN, "i2")  # how many last commands in a row the device did not keep
    seen: Bool = column(OWN, "?")  # the command that runs was read back as carried out
    differs_ns: I64 = column(OWN, "i8")  # since when the read-back differs; 0 = it does not
    doubted_ns: I64 = column(OWN, "i8")  # since when others may have ended what was in force; 0 = no doubt
    generation: I32 = column(OWN, "i4")
    attempts: np.ndarray = column(OWN, "i2")

    def __init__(self, control: Control, n: int) -> None:
        super().__init__({control.table: n}, control.table)
        self.control, self.n = control, n

    def running(self) -> Bool:
        """Mask of the running leases [n]."""
        return cast(Bool, ~np.isnan(self.value))

    def ever_used(self) -> bool:
        """Return True if anything was ever commanded here, or taken out by the leader before."""
        inherits = self.control.disruptive and not np.isnan(self.lapsed).all()
        return bool(self.command.any() or inherits)

    def grant(self, new: Setpoints, first_command: int, now_ns: int, readback: F64) -> None:
        """New values under new leases, numbered from `first_command` on.

        What was found before the first lease is kept through a lapse: what our own lapse left behind is not
        the site's. Nor is what is read before what was given back has arrived.
        """
        index = new.index
        fresh = index[np.isnan(self.value[index]) & np.isnan(self.found[index])]
        given = self.given[fresh]
        self.found[fresh] = np.where(np.isnan(given), readback[fresh], given)
        self.lapsed[index] = self.given[index] = np.nan
        self.begun_ns[index[np.isnan(self.value[index])]] = now_ns
        self.value[index], self.owner[index] = new.value, new.owner
        self.command[index] = first_command + np.arange(len(index), dtype=np.int64)
        self.state[index], self.attempts[index], self.seen[index] = SENT, 1, False
        self.doubted_ns[index] = 0
        self.issued_ns[index] = self.changed_ns[index] = now_ns
        self.expires_ns[index] = now_ns + round(self.control.lease_s * NS)
        self.deadline_ns[index] = now_ns + round(self.control.deadline_s * NS)
        self.generation[index] = new.generation

    def renew(self, index: I32, now_ns: int) -> None:
        """The same value for another lease."""
        self.expires_ns[index] = now_ns + round(self.control.lease_s * NS)

    def give_back(self, index: I32, now_ns: int) -> None:
        """The device received its last command, the value found before: nothing is commanded any more."""
        self.given[index], self.given_ns[index], self.strays_ns[index] = self.value[index], now_ns, 0
        self.end(index)

    def kept(self, readback: F64, received_ns: I64, lapse_value: F64, tolerance: float, now_ns: int) -> None:
        """Look after what was given back once a lease would have run out [all arrays n].

        Where the device then is as a lapse leaves it, the last command did not reach it: what was found is
        still owed, as after any lapse; after `MAX_ATTEMPTS` more it stays as its lapse leaves it. What is
        neither for as long again, and still reports, is somebody else's.
        """
        wait_ns = round((self.control.lease_s + MISMATCH_S) * NS)
        at = np.flatnonzero(~np.isnan(self.given))
        at = at[(received_ns[at] > self.given_ns[at] + wait_ns) & np.isnan(self.value[at])]
        given, read = self.given[at], readback[at]
        agrees = np.abs(read - given) <= tolerance
        lost = ~agrees & (np.abs(read - lapse_value[at]) <= tolerance)
        strays = ~agrees & ~lost
        since = np.where(self.strays_ns[at] == 0, now_ns, self.strays_ns[at])
        self.strays_ns[at] = np.where(strays, since, 0)
        losses = np.where(agrees, 0, self.losses[at] + lost).astype(np.int16)
        self.losses[at] = losses
        again = lost & (losses <= MAX_ATTEMPTS)
        self.found[at[again]], self.lapsed[at[again]] = given[again], read[again]
        self.given[at[agrees | lost | (strays & (received_ns[at] - since >= wait_ns))]] = np.nan

    def others(
        self, at: I32, readback: F64, lapse_value: F64, tolerance: float, now_ns: int
    ) -> tuple[Bool, Bool]:
        """(where somebody else has lowered what we had set, where that is too early to say) of rows `at` [k].

        Nowhere where a lower value does not protect.

        Not where our own command was never read back as carried out, whatever its sink answered, nor where a
        lapse led there: what is read then is our own doing, late or lost.
        """
        read, differs_ns = readback[at], self.differs_ns[at]
        below = self.seen[at] & (differs_ns > 0) & (read < self.value[at])  # where none runs, NaN is not
        below &= ~(np.abs(read - lapse_value[at]) <= tolerance) & (self.control.protective == "low")
        late = now_ns - differs_ns >= round(MISMATCH_S * NS)
        return below & late, below & ~late

    def end(self, index: I32) -> None:
        """Nothing is commanded, found or owed any more."""
        self.value[index], self.found[index], self.lapsed[index] = np.nan, np.nan, np.nan
        self.state[index], self.owner[index] = NONE, -1
        self.expires_ns[index] = self.differs_ns[index] = 0

    def disown(self) -> None:
        """Nothing here was commanded by us any more: another daemon has had the site since."""
        for name in ("value", "found", "lapsed", "given"):
            getattr(self, name)[:] = np.nan
        self.state[:], self.owner[:], self.attempts[:] = NONE, -1, 0
        self.expires_ns[:] = self.differs_ns[:] = self.doubted_ns[:] = 0

    def doubt(self, received_ns: I64, now_ns: int) -> None:
        """From now on others may have ended what was in force and can be read back [n]."""
        in_force = self.seen | (self.state == IN_PROGRESS) | (self.state == DONE)
        in_force &= (self.running() | ~np.isnan(self.lapsed)) & (received_ns > 0)
        self.doubted_ns = np.where(in_force, now_ns, 0)

    def settle_doubts(self, readback: F64, received_ns: I64, wanted: Bool) -> Bool:
        """End the doubt where a read-back shows it in force; returns these [n].

        Where a read-back shows that others ended it, the doubt lasts while a policy still wants it.
        """
        read = (self.doubted_ns > 0) & (received_ns >= self.doubted_ns)
        stands: Bool = read & (readback > 0)
        self.doubted_ns[stands | read & ~wanted] = 0
        return stands

    def left_to_others(self, index: I32, readback: F64, lapse_value: F64, tolerance: float) -> None:
        """People were here: where a device is not as its lapse left it, what was found is no longer owed."""
        set_by_hand = np.abs(readback - lapse_value) > tolerance  # False where nothing is read
        mine = index[set_by_hand[index] & ~self.running()[index]]
        self.found[mine] = self.lapsed[mine] = self.given[mine] = np.nan

    def no_longer_ours(self, index: I32) -> None:
        """Somebody else took these over, or brought them back: what lapsed there counts no more."""
        mine = index[~self.running()[index]]
        self.found[mine] = self.lapsed[mine] = np.nan

    def due(self, now_ns: int, at: I32 | slice = slice(None)) -> Bool:
        """Mask of the leases `at` [k] that run and have at most half of their time left."""
        soon_ns = now_ns + round(self.control.lease_s * NS / 2)
        return ~np.isnan(self.value[at]) & (self.expires_ns[at] <= soon_ns)

    def ack(self, entity: int, generation: int, command: int, state: str) -> bool:
        """Note a sink's answer; return False for one to another device or a superseded command."""
        if (
            not 0 <= entity < self.n
            or self.generation[entity] != generation
            or self.command[entity] != command
        ):
            return False
        if np.isnan(self.value[entity]):
            # The last command of a lease that was given back is answered after its end.
            return command > 0 and bool(self.state[entity] == NONE)
        # Answers may come out of order or twice: progress only ever moves forward, and done is the end of it.
        if state == "done" or (self.state[entity] != DONE and _ACK[state] > self.state[entity]):
            self.state[entity] = _ACK[state]
        return True

    def ack_all(self, entity: I32, generation: I64, command: I64, state: U8) -> Bool:
        """Note answers on different entities of this table, each as `ack` does; mask of the noted [k].

        `state` holds places in `ACK_STATES`.
        """
        mine = (self.generation[entity] == generation) & (self.command[entity] == command)
        before, ended = self.state[entity], np.isnan(self.value[entity])
        answers = np.array([_ACK[name] for name in ACK_STATES], np.uint8)[state]
        moves = mine & ~ended & ((answers == DONE) | ((before != DONE) & (answers > before)))
        self.state[entity[moves]] = answers[moves]
        noted: Bool = mine & (~ended | ((command > 0) & (before == NONE)))
        return noted

    def lapse(self, now_ns: int, abandoned: Bool | None = None) -> I32:
        """End the leases that ran out; returns where. What the device does then is `control.on_expiry`.

        Where the owner is `abandoned` [n] (suspended, or no longer approved) the device stays as the lapse
        leaves it; elsewhere what was found is still owed.
        """
        over = np.flatnonzero(self.running() & (self.expires_ns <= now_ns)).astype(np.int32)
        self.lapsed[over] = self.value[over]
        if abandoned is not None:
            self.found[over[abandoned[over]]] = np.nan
        self.value[over] = np.nan
        self.state[over] = EXPIRED
        self.differs_ns[over] = 0
        self.owner[over] = -1
        return over

    def overdue(self, now_ns: int) -> I32:
        """Commands past their deadline and not done, and refused ones that may be tried again."""
        at = np.flatnonzero(_waiting(self.state) | (self.state == FAILED)).astype(np.int32)
        at = at[~np.isnan(self.value[at])]
        failed, deadline_ns = self.state[at] == FAILED, self.deadline_ns[at]
        wait_ns = round(max(0.0, self.control.deadline_s - RETRY_S) * NS)
        again = failed & (self.attempts[at] <= MAX_ATTEMPTS) & (deadline_ns - wait_ns <= now_ns)
        due: I32 = at[again | ~failed & (deadline_ns <= now_ns)]
        return due

    def retry(self, index: I32, now_ns: int) -> I32:
        """Of these, the ones to send again (same number: idempotent); the others have failed for good."""
        again = index[self.attempts[index] < MAX_ATTEMPTS]
        self.attempts[again] += 1
        self.state[again] = SENT
        self.deadline_ns[again] = now_ns + round(self.control.deadline_s * NS)
        lost = index[self.attempts[index] >= MAX_ATTEMPTS]
        lost = np.setdiff1d(lost, again).astype(np.int32)
        self.state[lost] = FAILED
        self.attempts[lost] = MAX_ATTEMPTS + 1  # journaled once
        return again

    def unanswered(self, readback: F64, received_ns: I64, tolerance: float) -> I32:
        """Running leases whose command was given up, but for those that a later read-back shows as obeyed."""
        failed = np.flatnonzero(self.state == FAILED).astype(np.int32)
        given_up = ~np.isnan(self.value[failed]) & (self.attempts[failed] > MAX_ATTEMPTS)
        at = failed[given_up]
        with np.errstate(invalid="ignore"):
            obeyed = np.abs(readback[at] - self.value[at]) <= tolerance
        return at[~obeyed | (received_ns[at] <= self.issued_ns[at])]

    def compare(self, readback: F64, received_ns: I64, tolerance: float, now_ns: int) -> I32:
        """Entities whose read-back differs from the setpoint for `MISMATCH_S`; a read-back older than the
        command proves nothing, and what takes its time (a drain) may differ until its deadline."""
        slow_ns, wait_ns = round(max(0.0, self.control.deadline_s - MISMATCH_S) * NS), round(MISMATCH_S * NS)
        columns = self.value, self.issued_ns, self.state, self.differs_ns, self.seen
        off = np.empty(self.n, np.int32)
        times = now_ns, slow_ns, wait_ns
        found: I32 = off[: kernels.compare_readbacks(*columns, readback, received_ns, off, tolerance, *times)]
        return found.copy()

    def unread(self, received_ns: I64, wait_s: F64, now_ns: int, resumed_ns: int = 0) -> I32:
        """Answered commands without a read-back for so long [n], or no longer.

        `resumed_ns`: nobody listened before. A device that fell silent may have let its lease lapse.
        """
        # Nearly always all report within the shortest wait, less a second for the rounding of instants
        if self.n == 0 or received_ns.min() > max(now_ns - round((float(wait_s.min()) - 1.0) * NS), 0):
            return np.zeros(0, np.int32)
        since_ns = np.maximum(now_ns - np.rint(wait_s * NS).astype(np.int64), 0)
        answered = (self.state >= ACCEPTED) & (self.state <= DONE)
        since = np.maximum(np.maximum(received_ns, self.issued_ns), resumed_ns)
        silent = self.running() & answered & (since <= since_ns)
        return np.flatnonzero(silent).astype(np.int32)


def _waiting(state: U8) -> Bool:
    """Mask of the commands that are on their way."""
    return (state >= SENT) & (state <= IN_PROGRESS)
